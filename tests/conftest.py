"""Real processes for the tests, and the proof that none is left behind.

Most are forked from a warm parent, see warm.py: a tenth of the CPU time. Tests of what a fork cannot show are marked
`real`; with `--real` all processes are. GPUs are hidden from all but what a test marked `gpu` starts, see cards.py.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cards
import pytest
from warm import Forked, Zygote, adopt_orphans, can_be_warm

ROOT = Path(__file__).resolve().parent.parent
TOY = str(ROOT / "tests" / "tasks" / "toy.py")
FAULTY = str(ROOT / "tests" / "tasks" / "faulty.py")
sys.path.insert(0, str(ROOT))

cards.hide()  # before torch is imported

pytest_plugins = ["robot_fixtures"]

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup all that the tests start would ignore it, too

PATIENCE = 5
"""Times as long as on a quiet machine: the limits below only end what hangs, they measure nothing."""


def free_port() -> str:
    """One that nobody has at this moment, for MASTER_PORT."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def by_hand(rank: int, port: str, size: int = 2) -> dict[str, str]:
    """The environment of a rank that no torchrun starts."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    return place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def cases(text: str, usual: str = "") -> dict[str, tuple[str, str]]:
    """{name: (code, what is printed)} of code under lines `# name: what is printed`; else that is the usual."""
    found = {}
    for case in re.split("^# ", text, flags=re.MULTILINE)[1:]:
        head, _, code = case.partition("\n")
        name, _, printed = head.partition(": ")
        found[name] = code, printed or usual
    return found


def wait_until(true: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds * PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds * PATIENCE:.0f} s"
        time.sleep(0.02)  # polling with a deadline


@dataclass
class Done:
    """A process that has ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        lines = [line.lstrip(" \0") for line in self.err.splitlines()]  # torch ends a line of its own with a NUL
        return [line for line in lines if line.startswith("error: ")]


class Running:
    """A process in a session of its own; its output goes to files, so that it never waits for a reader."""

    def __init__(self, process: subprocess.Popen | Forked, files: tuple):
        self.process, self.files = process, files

    def said(self) -> str:
        return "".join(os.pread(file.fileno(), 1 << 24, 0).decode() for file in self.files)

    def wait_for(self, words: str, timeout: float = 60, times: int = 1) -> None:
        """Until it has said `words`, so many times."""
        deadline = time.monotonic() + timeout * PATIENCE
        while self.said().count(words) < times:
            assert self.process.poll() is None and time.monotonic() < deadline, (
                f"never said {words!r}: {self.said()[-3000:]}"
            )
            time.sleep(0.02)  # polling with a deadline

    def signal(self, number: int) -> None:
        """To this process alone."""
        self.process.send_signal(number)

    def wait(self, timeout: float = 60) -> Done:
        try:
            self.process.wait(timeout * PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            pytest.fail(f"ran longer than {timeout * PATIENCE} s\n{self.said()}")
        texts = [os.pread(file.fileno(), 1 << 24, 0).decode() for file in self.files]
        return Done(self.process.returncode, *texts)


class SmallDisk:
    """Stands in for a host of hosts.py: this machine, with one more disk."""

    def __init__(self, namespaces: list[str]):
        user, mount = self.namespaces = namespaces
        self.enter = ["nsenter", f"--user={user}", "--preserve-credentials", f"--mount={mount}"]
        self.enter += ["env", f"--chdir={ROOT}"]


class Launcher:
    """Starts commands from the repository's root; what they started is found as this process's descendants."""

    def __init__(self, cwd: Path, real: bool):
        # A short path: sockets lie in it, whose names have at most 108 characters.
        self.temporary = tempfile.TemporaryDirectory(prefix="lt_", ignore_cleanup_errors=True)
        self.may_stay = ["torchinductor_"]  # torch's cache
        self.cwd, self.real = cwd, real
        self.zygote = None if real else _zygote()
        self.before, self.started = _descendants().keys(), set()

    def environment(self, **more: str | None) -> dict[str, str]:
        dropped = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
            "ACCELERATE_",
            "SLURM_",
            "TORCHELASTIC",
        )
        env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        env |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TMPDIR": self.temporary.name}
        env |= {name: value for name, value in more.items() if value is not None}
        env = {name: value for name, value in env.items() if name not in more or more[name] is not None}
        cards.check_hidden(env)
        return env

    def __call__(self, *command: str, timeout: float = 240, **how) -> Done:
        return self.start(*command, **how).wait(timeout)

    def start(
        self,
        *command: str,
        ignored: tuple[int, ...] = (),
        cwd: Path | None = None,
        host: Any = None,
        output: int | None = None,
        errors: int | None = None,
        terminal: bool = False,
        **env: str | None,
    ) -> Running:
        """Start a command, on this machine or on a `host` of hosts.py. Where its `output` and its `errors` go to
        descriptors of the test, they are not kept; both may be a controlling `terminal`."""
        if {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.accelerate_cli"} & set(command):
            self.may_stay.append("torchelastic_")  # torchrun leaves its own
        files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        ends = [file.fileno() if end is None else end for file, end in zip(files, (output, errors), strict=True)]
        process = self._begin([str(word) for word in command], cwd or self.cwd, env, ends, ignored, host, terminal)
        self.started.add(process.pid)
        return Running(process, files)

    def _begin(
        self, command: list[str], cwd: Path, changes: dict, ends: list[int], ignored: tuple, host: Any, terminal: bool
    ) -> Any:
        env = {"PYTHON": sys.executable} | self.environment(**changes)
        how = {"cwd": cwd, "stdin": subprocess.DEVNULL, "stdout": ends[0], "stderr": ends[1]}
        entering, namespaces = (host.enter, host.namespaces) if host else ([], [])

        def fork(words: list[str], env: dict[str, str]) -> Forked:
            return self.zygote.fork(words, env, cwd, *ends, ignored, namespaces, terminal)

        if self.zygote and command[0] == sys.executable and can_be_warm(command[1:], changes):
            return fork(command[1:], env)
        if self.zygote and Path(command[0]).name == "train_multigpu.sh" and "--print" not in command:
            with tempfile.TemporaryDirectory() as folder:
                warm = {"PYTHON": str(ROOT / "tests" / "kit" / "warm_python"), "WARM_FOLDER": folder}
                warm["WARM_PYTHON"] = sys.executable
                script = subprocess.Popen([*entering, *command], env=env | warm, **how)
                script.wait()
                if not (Path(folder) / "words").exists():
                    return script  # it had nothing to start
                words = (Path(folder) / "words").read_text().split("\0")[:-1]
                lines = (Path(folder) / "environment").read_text().split("\0")[:-1]
            env = dict(line.split("=", 1) for line in lines if not line.startswith("WARM_"))
            env["PYTHON"] = sys.executable
            return fork(words, env)

        def begin() -> None:
            if terminal:
                fcntl.ioctl(1, termios.TIOCSCTTY, 0)
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        return subprocess.Popen([*entering, *command], env=env, start_new_session=True, preexec_fn=begin, **how)

    def popen(self, command: list[str], *, cwd: Path, env: dict[str, str], stdout: Any, **how) -> Any:
        """subprocess.Popen for code of ours that starts Python itself; `stdout` takes the errors, too."""
        if self.zygote and can_be_warm(command[1:], {name: env[name] for name in env.keys() - os.environ.keys()}):
            process = self.zygote.fork(command[1:], env, cwd, stdout.fileno(), stdout.fileno())
        else:
            process = subprocess.Popen(command, cwd=cwd, env=env, stdout=stdout, **how)
        self.started.add(process.pid)
        return process

    def start_launcher(self, processes: int, *words: str, **how) -> Running:
        return self.start("./train_multigpu.sh", str(processes), *words, **how)

    def launcher(self, processes: int, *words: str, timeout: float = 100, **how) -> Done:
        return self.start_launcher(processes, *words, **how).wait(timeout)

    def python(self, *words: str, **how) -> Done:
        return self(sys.executable, *words, **how)

    def torchrun(self, processes: int, *words: str, **how) -> Done:
        run = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
        return self(sys.executable, *run, *words, **how)

    def train(self, *words: str, processes: int = 1, **how) -> Done:
        """train.py, in so many processes."""
        return (
            self.torchrun(processes, "train.py", *words, **how)
            if processes > 1
            else self.python("train.py", *words, **how)
        )

    def on_a_small_disk(self, place: Path | str, size: str, *words: str) -> Done:
        """Python with these words, for which `place` is a disk of `size`."""
        mount = f'mount -t tmpfs -o size={size} none "{place}" && echo up && read end'
        how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(["unshare", "-rm", "sh", "-c", mount], **how) as holder:
            if holder.stdout.readline() != "up\n":
                pytest.skip("this kernel lets no user mount a file system")
            host = SmallDisk([f"/proc/{holder.pid}/ns/{each}" for each in ("user", "mnt")])
            done = self.python(*words, host=host)
            holder.communicate("\n")
            return done

    def signal_all(self, number: int) -> None:
        """To each process by itself: torchrun puts every rank into a session of its own."""
        for pid in self.left_behind():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def rank_pid(self, rank: int) -> int:
        """The process of a rank: the oldest that has its number, because its loader's processes have it, too."""
        return min(pid for pid in self.left_behind() if _rank(pid) == rank)

    def left_behind(self) -> list[int]:
        """Processes below this one that were not there before, and have not ended."""
        found = {pid: state for pid, state in _descendants().items() if pid not in self.before}
        for pid in [pid for pid, state in found.items() if state == "Z" and pid not in self.started]:
            with suppress(ChildProcessError):  # an orphan that this process has inherited, or somebody's child
                os.waitpid(pid, os.WNOHANG)
        return [pid for pid, state in found.items() if state != "Z"]


def _descendants() -> dict[int, str]:
    """{process: state} of all below this one: what is orphaned there becomes its child, see `adopt_orphans`."""
    parents, states = {}, {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            parents[int(process.name)], states[int(process.name)] = int(parent), state
    found, new = {}, {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in new}:
        found |= {pid: states[pid] for pid in new}
    return found


def _rank(pid: int) -> int | None:
    """RANK of a process: from the name that a fork has given itself, or from its environment."""
    with suppress(OSError):
        for line in [
            Path(f"/proc/{pid}/comm").read_text().replace("rank ", "RANK="),
            *Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"),
        ]:
            if line.startswith("RANK="):
                return int(line[5:])
    return None


def pytest_addoption(parser):
    parser.addoption("--real", action="store_true", help="start every process anew, none as a fork of a warm parent")

    parser.addoption("--cpu-times", metavar="FILE", help="append the CPU seconds of each test and of its processes")


def pytest_configure(config):
    adopt_orphans()
    global always_real
    always_real = config.getoption("--real")


always_real = False
_stack = ExitStack()


def pytest_collection_finish():
    """Leave what is collected by now out of each garbage collection. Each of some hundred tests collects, and looked
    through the objects of 4,700 tests and of all imported modules, in half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """With --cpu-times: a test's CPU seconds, from its fixtures to its end. Tests are chosen for the gate by them."""
    file = item.config.getoption("--cpu-times")
    if not file:
        return (yield)
    before = _cpu_seconds()
    try:
        return (yield)
    finally:
        with open(file, "a") as report:  # several workers append: a line is one write
            report.write(f"{_cpu_seconds() - before:.2f} {item.nodeid}\n")


def _cpu_seconds() -> float:
    """CPU seconds of this process and of all below it. One that has ended counts in the one that waited for it."""
    ticks = 0
    for pid in (os.getpid(), *_descendants()):
        with suppress(OSError):  # it has ended meanwhile
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # of itself and of its children, user and system: proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")


GATE = ROOT / "tests" / "gate.txt"


def gate_ids(text: str) -> set[str]:
    """The tests of tests/gate.txt: every line but comments and headings."""
    lines = [line.strip() for line in text.splitlines()]
    return {line for line in lines if line and not line.startswith(("#", "["))}


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by -m
def pytest_collection_modifyitems(config, items):
    """Mark the slow tests of the gate. A line that names no slow test is an error of a whole collection."""
    listed = gate_ids(GATE.read_text())
    marked = set()
    for item in items:
        if item.nodeid in listed and item.get_closest_marker("slow"):
            item.add_marker("gate")
            marked.add(item.nodeid)
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if whole and (unknown := sorted(listed - marked)):
        raise pytest.UsageError(f"tests/gate.txt: no slow test has this name: {', '.join(unknown)}")


@functools.cache
def _zygote() -> Zygote:
    return _stack.enter_context(closing(Zygote()))


def pytest_sessionfinish():
    _stack.close()


@pytest.fixture(autouse=True)
def _shown_cards(request, monkeypatch):
    """Show the GPUs to the processes of a test marked `gpu`. It runs only where it is asked for: `make test` is the
    same everywhere."""
    if request.node.get_closest_marker("gpu") is None:
        return
    if "gpu" not in request.config.option.markexpr or not cards.visible():
        pytest.skip(cards.NONE_VISIBLE)
    monkeypatch.setattr(cards, "shown", True)
    for name, value in cards.as_user_has_set().items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)


@pytest.fixture
def launch(request):
    """Run commands; a process that outlives the test fails it."""
    with launching(real=request.node.get_closest_marker("real") is not None) as launcher:
        yield launcher


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Returns a function: `build(folder)` fills the folder of a name, once for all of pytest's workers."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def folder_of(name: str, build: Callable[[Path], None]) -> Path:
        folder, done = root / name, root / f"{name}.done"
        with open(root / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # half of it, where another worker has failed
                folder.mkdir()
                build(folder)
                done.touch()
        return folder

    return folder_of


@contextmanager
def launching(real: bool = False):
    """The same for a fixture that many tests share."""
    launcher = Launcher(ROOT, real or always_real)
    before = {path.name for path in Path("/dev/shm").glob("torch_*")}  # also of one whose number comes again
    try:
        yield launcher
        deadline = time.monotonic() + 10 * PATIENCE  # a process that is just being reaped is not left behind
        while launcher.left_behind() and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:  # where a test ran out of time, too: its processes would slow down all others
        left = launcher.left_behind()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left behind: {left}"
    stayed = [name for name in os.listdir(launcher.temporary.name) if not name.startswith(tuple(launcher.may_stay))]
    launcher.temporary.cleanup()
    assert not stayed, f"temporary files left behind: {stayed}"
    for name in _shared_memory() - before if "torch_" in launcher.may_stay else ():
        Path("/dev/shm", name).unlink(missing_ok=True)  # of a loader that was killed as it made it
    deadline = time.monotonic() + 10 * PATIENCE  # another of pytest's workers may be about to remove its own
    while (shared := _shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not shared, f"shared memory left behind: {shared}"


def _shared_memory() -> set[str]:
    """Names of shared memory whose maker, a number in the name, is gone."""
    names = {path.name for path in Path("/dev/shm").glob("torch_*")}
    return {name for name in names if not Path("/proc", name.split("_")[1]).exists()}


def succeed(done: Done) -> Done:
    assert done.code == 0, f"exit code {done.code}\n{done.out[-4000:]}\n{done.err[-4000:]}"
    return done


def place_of(task: str | Path, text: str) -> str:
    """Return file:line of the only line of a source that holds this text, as messages name it."""
    lines = enumerate(Path(task).read_text().splitlines(), 1)
    (number,) = (number for number, line in lines if text in line)
    return f"{Path(task).name}:{number}"


def killed_and_resumed(
    launch: Launcher, words: list[str], at: list[str], processes: int = 1, between: Callable[[], Any] = lambda: None
) -> Done:
    """Start train.py and SIGKILL it when it has printed the next text of `at`, as often as there are any; then let it
    resume in so many processes and finish."""
    for text in at:
        run = launch.start(sys.executable, "train.py", *words)
        run.wait_for(text)
        run.signal(signal.SIGKILL)
        assert run.wait().code == -signal.SIGKILL, "killed in the middle"
        between()
    return succeed(launch.train(*words, processes=processes))
