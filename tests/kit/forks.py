"""Run a function of a test in a process of its own."""

import multiprocessing


def run_in_fork(act, exitcode=0):
    """Call `act` in a forked process, which must end with this exit code."""
    process = multiprocessing.get_context("fork").Process(target=act)
    process.start()
    process.join(120)
    assert process.exitcode == exitcode, process.exitcode
