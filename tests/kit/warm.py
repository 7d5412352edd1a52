"""A warm server for the tests: one process that has imported torch and the project, and forks whatever is asked of it.

    with Zygote() as zygote:
        child = zygote.fork(["train.py", TOY, "epochs=1"], env, cwd, out, err)
        child.wait()

A fork is a process of its own: session, environment, folder, arguments, signals and exit code are those of the command;
torchrun is torchrun's own agent, whose ranks are forked from it. What is saved is importing torch: 1.5 to 2 CPU
seconds a process. A fork does not show what an interpreter does as it starts: `-X`, PYTHON* variables, sitecustomize,
whether the project can be imported, what is imported already, and hashes of strings, which differ between interpreters.
Tests of that are marked `real`; `make test-real` takes real processes everywhere.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
import weakref
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.accelerate_cli"}
"""The modules that `python -m` may name; each has a function `main`."""

LIMIT = 1 << 17
"""Bytes of a request, which is one message."""


class Forked:
    """The part of subprocess.Popen that a waiting process uses, for a child that was forked."""

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self.returncode
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.002)  # polling with a deadline
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def adopt_orphans() -> None:
    """From here on a process whose parent ends becomes this one's child, however deep below it (Linux only)."""
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


class Zygote:
    """The server, a child of this process, which must have called `adopt_orphans`. It ends with it."""

    def __init__(self) -> None:
        self.one_at_a_time = threading.Lock()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            env = os.environ | {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
            command = [sys.executable, __file__, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env, start_new_session=True)

    def fork(
        self,
        words: list[str],
        env: dict[str, str],
        cwd: Path,
        out: int,
        err: int,
        ignored: tuple[int, ...] = (),
        namespaces: tuple[str, ...] = (),
        terminal: bool = False,
    ) -> Forked:
        """A process that does what `python *words` would do, a child of this one, within Linux `namespaces`; `out` is
        its controlling terminal where it has one."""
        request = {"words": words, "env": env, "cwd": str(cwd), "ignored": ignored, "namespaces": namespaces}
        request["terminal"] = terminal
        with self.one_at_a_time:  # two threads would take each other's answer
            socket.send_fds(self.socket, [json.dumps(request).encode()], [out, err])
            answer = self.socket.recv(64)
        assert answer, f"the warm server has ended with {self.process.wait()}"
        return Forked(int(answer))

    def close(self) -> None:
        self.socket.close()
        self.process.wait()


def can_be_warm(words: list[str], env: dict[str, str | None]) -> bool:
    """Return whether a fork does what `python *words` does, with these changes of the environment."""
    if any(name.startswith(("PYTHON", "LD_", "ATEN_", "DNNL_", "ONEDNN_", "MKL_", "GOMP_")) for name in env):
        return False
    script = words[1] if words[0] == "-u" else words[0]
    known = script == "-c" or script.endswith(".py") or (script == "-m" and words[words.index("-m") + 1] in MODULES)
    return known and len(json.dumps(words)) < LIMIT // 4


# ---- in the server and below it --------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with pytest
    preload()
    requests = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, LIMIT, 2)
        if not message:
            os._exit(0)
        request = json.loads(message)
        answer, theirs = os.pipe()
        if not (middle := os.fork()):
            # The one in between ends at once, so that pytest inherits the process and can wait for it.
            middle = os.getpid()
            if not (pid := os.fork()):
                while os.getppid() == middle:
                    time.sleep(0.0005)
                enter(request["namespaces"])
                if request["terminal"]:
                    os.setsid()
                    fcntl.ioctl(descriptors[0], termios.TIOCSCTTY, 0)
                become(request["words"], request["env"], request["cwd"], descriptors, request["ignored"])
            os.write(theirs, str(pid).encode())
            os._exit(0)
        os.close(theirs)
        os.waitpid(middle, 0)
        requests.send(os.read(answer, 64))
        for each in (answer, *descriptors):
            os.close(each)


def enter(namespaces: list[str]) -> None:
    """Become a process within these files of /proc/PID/ns. Process ids are those of a new child: this process waits for
    it, and ends as it does, which is what nsenter does."""
    if not namespaces:
        return
    for descriptor in [os.open(path, os.O_RDONLY) for path in namespaces]:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
            os.write(2, f"setns: {os.strerror(ctypes.get_errno())}\n".encode())
            os._exit(70)
    if not (pid := os.fork()):
        return
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def preload() -> None:
    sys.path[0] = str(ROOT)
    import numpy.ma
    import PIL.Image
    import torch
    import torch.distributed.launch
    import torch.distributed.optim
    import torch.distributed.run
    import torch.utils.tensorboard  # the slowest of all but torch
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: F401
    from torch.distributed.elastic.agent.server import local_elastic_agent  # noqa: F401
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous  # noqa: F401

    import plugins.resilience.agent  # noqa: F401
    import tasks
    import train
    import train_ddp  # noqa: F401

    # First calls import and read more.
    PIL.Image.init()
    numpy.random.seed()
    torch.manual_seed(0)
    with suppress(Exception):
        # DDP's first forward pass imports it and swallows all errors: that of a loader killed meanwhile, too.
        from torch.profiler import _cupti_monitor  # noqa: F401
    for name in tasks.names():
        tasks.load(name)
    torch.zeros(1).sum().item()  # operators' tables
    subprocess_handler.SubprocessHandler._popen = fork_rank
    assert train and threading.active_count() == 1, "a fork has only the thread that forks"
    gc.collect(), gc.freeze()  # else each collection in a fork would copy the pages of all that is here


def fork_rank(handler, command: tuple[str, ...], env: dict[str, str]) -> Forked:
    """In a torchrun: instead of starting an interpreter."""
    out, err = (1 if handler._stdout is None else handler._stdout.fileno()), 2
    if handler._stderr is not None:
        err = handler._stderr.fileno()
    words = list(command[1:])
    if command[0] != sys.executable or not can_be_warm(words, {}):
        return subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True)
    gc.freeze()  # a store that is garbage here must not be collected there: it would wait for a thread of this process
    gate.extend([] if gate else os.pipe())
    pid = os.fork()
    if not pid:
        os.close(gate[1]), os.read(gate[0], 1)
        become(words, env, os.getcwd(), (out, err))
    gc.unfreeze()
    if int(env["LOCAL_RANK"]) + 1 == int(env["LOCAL_WORLD_SIZE"]):
        os.close(gate.pop()), os.close(gate.pop())
    return Forked(pid)


gate: list[int] = []
"""A pipe that is closed once all ranks are forked, for which they wait: a thread of torchrun's looks up the name of
each rank that comes to its store, and a rank forked meanwhile would find glibc's lock of that taken for ever."""


class WarmPopen(subprocess.Popen):
    """In a forked command that starts others, such as tools/tune.py: Python commands are forks of it, too, where it has
    no threads yet."""

    def __init__(self, args, *, env: dict[str, str] | None = None, preexec_fn=None, **how):
        env = dict(os.environ if env is None else env)
        changed = {name: env.get(name) for name in env.keys() | os.environ if env.get(name) != os.environ.get(name)}
        forks = isinstance(args, list) and args[0] == sys.executable and can_be_warm(args[1:], changed)
        if forks and threading.active_count() == 1:

            def begin() -> None:
                if preexec_fn:
                    preexec_fn()
                become(args[1:], env, os.getcwd(), (1, 2))

            how["preexec_fn"] = begin
        elif preexec_fn:
            how["preexec_fn"] = preexec_fn
        super().__init__(args, env=env, **how)


def warm_exec(program: str, args: list[str]) -> None:
    """os.execv in a forked command: it becomes another one without a new interpreter, where no thread would survive,
    neither Python's nor gloo's."""
    changed = {name: value for name, value in os.environ.items() if began.get(name) != value}
    if program == sys.executable and can_be_warm(args[1:], changed) and len(os.listdir("/proc/self/task")) == 1:
        atexit._clear()
        ignored = tuple(n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN)
        become(args[1:], dict(os.environ), os.getcwd(), (1, 2), ignored)
    execv(program, args)


execv = os.execv

began: dict[str, str] = {}
"""The environment in which this forked command began."""


def become(words: list[str], env: dict[str, str], cwd: str, output: tuple[int, int], ignored: tuple = ()) -> None:
    """In the forked child: `python *words`. Does not return."""
    code = 70
    try:
        _prepare(words, env, cwd, output, ignored)
        code = _run(words)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _prepare(words: list[str], env: dict[str, str], cwd: str, output: tuple[int, int], ignored: tuple) -> None:
    """Do what an interpreter does before the first line, and undo what modules noted of the one that imported them."""
    import numpy
    import torch

    import engine.launch
    import plugins.resilience.signals

    if os.getsid(0) != os.getpid():
        os.setsid()
    kept = [os.open(os.devnull, os.O_RDONLY), *(os.dup(each) for each in output)]
    for number, descriptor in enumerate(kept):
        os.dup2(descriptor, number)
    os.closerange(3, 1 << 16)  # a store's connections among them: they would outlive it
    unbuffered = words[0] == "-u" or bool(env.get("PYTHONUNBUFFERED"))
    raw = [io.FileIO(number, "r" if number == 0 else "w", closefd=False) for number in (0, 1, 2)]
    out, err = raw[1:] if unbuffered else map(io.BufferedWriter, raw[1:])
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(raw[0]))
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(out, "utf-8", write_through=unbuffered)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(err, "utf-8", "backslashreplace", line_buffering=True)
    os.environ.clear()
    os.environ.update(env)
    began.clear()
    began.update(env)
    os.chdir(cwd)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    with open("/proc/self/comm", "w") as file:  # for `Launcher.rank_pid`: /proc/PID/environ is the server's
        file.write(f"rank {env['RANK']}" if "RANK" in env else "python")
    tempfile.tempdir = None  # TMPDIR is read again
    weakref.finalize._registry.clear()  # temporary folders of torchrun's agent
    random.seed(), numpy.random.seed(), torch.default_generator.seed()  # torch.seed formats a stack
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    plugins.resilience.signals._parent, engine.launch._BEGAN = os.getppid(), time.monotonic()
    subprocess.Popen, os.execv = WarmPopen, warm_exec


def _run(words: list[str]) -> int:
    """Returns the exit code; a signal that Python turns into an exception ends the process as a signal."""
    sys.orig_argv = [sys.executable, *words]
    words = words[words[0] == "-u" :]
    code, interrupted = 0, False
    try:
        if words[0] == "-m":
            module = importlib.import_module(words[1])
            sys.argv = [module.__file__, *words[2:]]
            module.main()
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.path.insert(0, "")
            exec(words[1], {"__name__": "__main__"})
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    with suppress(Exception):
        threading._shutdown()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code


if __name__ == "__main__":
    serve(int(sys.argv[1]))
