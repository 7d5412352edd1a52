"""Run a function of a test in a process of its own, and kill this process at a step."""

import itertools
import multiprocessing
import os
import signal


def exit_code_of_fork(act):
    """Call `act` in a forked process; return the exit code, which is negative for a signal."""
    process = multiprocessing.get_context("fork").Process(target=act)
    process.start()
    process.join(120)
    return process.exitcode


def run_in_fork(act, exitcode=0):
    """Call `act` in a forked process, which must end with this exit code."""
    assert exit_code_of_fork(act) == exitcode


def kill_before(number, functions):
    """From now on, kill this process before the call of this number of {module: names of functions}."""
    left = itertools.count(number - 1, -1)

    def counted(real):
        def call(*args, **how):
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **how)

        return call

    for module, names in functions.items():
        for name in names:
            setattr(module, name, counted(getattr(module, name)))
