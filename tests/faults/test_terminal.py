"""A terminal, a pipe or a disk that takes no more of what a run says: the training continues, and what ends a run is
recorded before it is said."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from types import SimpleNamespace

import pytest
from conftest import FAULTY, TOY, succeed, wait_until
from runs import progress, records, status

from engine.data import processes
from plugins.resilience import signals, terminal, watchdog
from plugins.resilience.status import current

PYTHON = [sys.executable, "train.py"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
LAUNCHER = ["./train_multigpu.sh", "2"]
ON_CPUS = {"CUDA_VISIBLE_DEVICES": ""}


def warnings(folder):
    """Return what the log says of the terminal."""
    return [record["warning"] for record in records(folder, "warning")]


# ---- the streams ----

SPEAK = """
import sys
from plugins.resilience import terminal
terminal.make_safe()
terminal.make_safe()
file = open(sys.argv[1], "w")
for n in range(3):
    print("✓ found", n)
    print("✓ on the way", n, file=sys.stderr)
    terminal.write_stderr("✓ at once\\n")
file.write(repr(terminal.lost_streams))
"""


def gone_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return [writer]


def gone_terminal():
    main, terminal = pty.openpty()
    os.close(main)
    return [terminal]


def full_pipe():
    reader, writer = os.pipe2(os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 16))
    return [writer, reader]


GONE = {
    "Broken pipe": gone_pipe,
    "Input/output error": gone_terminal,
    "Resource temporarily unavailable": full_pipe,
    "No space left on device": lambda: [os.open("/dev/full", os.O_WRONLY)],
}


@pytest.mark.slow
@pytest.mark.parametrize("why", GONE)
def test_no_print_fails_of_a_stream_that_is_gone(launch, tmp_path, why):
    ends, command = GONE[why](), [sys.executable, "-c", SPEAK, str(tmp_path / "lost")]
    environment = launch.environment(PYTHONIOENCODING="utf-8")
    for _ in (1, 2):
        done = subprocess.run(command, cwd=launch.cwd, env=environment, stdout=ends[0], stderr=ends[0])
        assert done.returncode == 0
        each = [f"{name} cannot be written ({why})" for name in ("stdout", "stderr")]
        assert (tmp_path / "lost").read_text() == repr(each), "each loss once"
    for end in ends:
        os.close(end)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "lost"),
    [
        ("", []),
        ("PYTHONIOENCODING=ascii", []),
        ("2>&-", ["stderr is closed"]),
        ("<&- >&- 2>&-", ["stdout is closed", "stderr is closed"]),
    ],
)
def test_closed_descriptors_and_letters_that_are_not_there(launch, tmp_path, shell, lost):
    words = f'{shell} "$@"' if "=" in shell else f'"$@" {shell}'
    done = launch("bash", "-c", words, "bash", sys.executable, "-c", SPEAK, str(tmp_path / "lost"))
    assert done.code == 0 and (tmp_path / "lost").read_text() == repr(lost), "the file has not become stderr"
    mark = "?" if "ascii" in shell else "✓"
    if "stdout is closed" not in lost:
        assert done.out == "".join(f"{mark} found {n}\n" for n in range(3))
    if not lost:
        assert done.err == "".join(f"{mark} on the way {n}\n✓ at once\n" for n in range(3)), "in their order"


IN_COLOUR = """
import sys
from plugins.resilience import terminal
terminal.make_safe()
print("  ✓ Saved\\nwarning: no ✓ within, no error: either")
print("error: of", 3, file=sys.stderr)
terminal.write_stderr("error: the last\\n")
"""


@pytest.mark.parametrize("plain", [None, "1"])
def test_colours_are_for_terminals_and_not_for_those_who_want_none(launch, plain):
    shown = OnATerminal(launch, [sys.executable, "-c", IN_COLOUR], NO_COLOR=plain, TERM="xterm").read()
    marks = ["  \x1b[32m✓\x1b[0m Saved", "\x1b[33mwarning:\x1b[0m no ✓ within, no error: either"]
    marks += ["\x1b[1;31merror:\x1b[0m of 3", "\r\x1b[J\x1b[1;31merror:\x1b[0m the last"]
    if plain:
        marks = [re.sub(r"\x1b\[[\d;]*m", "", mark) for mark in marks]
    assert shown.replace("\r\n", "\n") == "".join(f"{mark}\n" for mark in marks)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def words(run):
    """A short training."""
    return [TOY, "epochs=2", "log_every=1", f"save_dir={run}"]


@pytest.fixture
def full():
    """A descriptor that takes nothing."""
    with open("/dev/full", "w") as file:
        yield file.fileno()


def test_whoever_asks_for_words_hears_that_they_were_lost(launch, full):
    assert launch(*PYTHON, "--print-config", output=full).code == 1


@pytest.mark.slow
def test_a_tool_whose_output_is_lost_fails(launch, run, full):
    succeed(launch.python(*PYTHON[1:], TOY, "steps=1", f"save_dir={run}"))
    done = launch.python("tools/evaluate.py", str(run), output=full)
    said = "error: stdout cannot be written (No space left on device) (the output of a tool): start it again"
    assert done.code == 70 and done.err.splitlines() == [said]


# ---- whole runs ----


def assert_trained(run, why):
    """The log says so once, and the status holds it."""
    said = f"{why}: training continues"
    assert warnings(run) == [said] and status(run)["warning"] == said
    assert status(run)["state"] == "done" and progress(run / "last.pt")
    assert (run / "run.lock").read_text().count("\n") == 1, "the lock has not become stderr"


@pytest.mark.slow
@pytest.mark.parametrize(("closed", "command"), [("2>&-", PYTHON), ("<&- 2>&-", LAUNCHER)], ids=["one", "two"])
def test_a_training_continues_without_a_stderr(launch, run, words, closed, command):
    script = f'PYTHONIOENCODING=ascii "$@" {closed}'
    done = succeed(launch("bash", "-c", script, "bash", *command, *words, **ON_CPUS))
    assert_trained(run, "stderr is closed")
    assert "  ? Saved best model: best_model_epoch0.pt" in done.out


@pytest.mark.parametrize("command", [PYTHON, LAUNCHER], ids=["one", "two"])
def test_a_training_continues_without_a_reader(launch, run, words, command):
    reader, writer = os.pipe()
    training = launch.start(*command, *words, output=writer, **ON_CPUS)
    os.close(writer)
    with open(reader) as pipe:
        assert pipe.readline()
    done = succeed(training.wait())
    why = "stdout cannot be written (Broken pipe)"
    assert_trained(run, why)
    assert done.err.count(f"warning: {why}: training continues, its log is {run}") == 1
    assert "rror" not in done.err, "Python's own either"


def test_a_training_continues_where_its_output_finds_no_room(launch, run, words, full):
    succeed(launch(*PYTHON, *words, output=full))
    assert_trained(run, "stdout cannot be written (No space left on device)")


class OnATerminal:
    """A process whose controlling terminal is one of ours, until that is gone."""

    def __init__(self, launch, command, nohup=False, wide=0, **more):
        self.main, terminal = pty.openpty()
        rows = 24 if wide else 0
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", rows, wide, 0, 0))
        how = {"output": terminal, "errors": terminal, "terminal": True}
        how["ignored"] = (signal.SIGHUP,) if nohup else ()
        self.run = launch.start(*command, **how, **ON_CPUS, **more)
        os.close(terminal)

    def wait_for(self, words):
        shown = b""
        while words.encode() not in shown:
            shown += os.read(self.main, 65536)  # fails where the process has ended

    def read(self):
        """All that it says until it ends."""
        shown = b""
        with suppress(OSError):
            while piece := os.read(self.main, 65536):
                shown += piece
        os.close(self.main)
        assert self.run.wait().code == 0
        return shown.decode()

    def drop(self):
        """The kernel sends SIGHUP to the leader of the session; the others meet errors."""
        os.close(self.main)


@pytest.mark.parametrize("columns", [0, 80])
def test_a_terminal_without_a_size_has_lines_in_place_of_bars(launch, run, columns):
    shown = OnATerminal(launch, [*PYTHON, TOY, "steps=12", f"save_dir={run}"], wide=columns).read()
    assert ("  step 12/12  epoch 2/2  loss " in shown) is (columns == 0) and ("Training:" in shown) is (columns > 0)


one_or_two = pytest.mark.parametrize(
    "command", [PYTHON, pytest.param(LAUNCHER, marks=pytest.mark.slow)], ids=["one", "two"]
)


@one_or_two
def test_a_terminal_that_is_gone_stops_the_run_with_a_checkpoint(launch, run, command):
    """The stop that SIGHUP asks for is made, although the last words find nobody."""
    training = OnATerminal(launch, [*command, TOY, "epochs=100000", f"save_dir={run}"])
    training.wait_for("Epoch 1/")
    training.drop()
    assert training.run.wait().code == 75
    now = status(run)
    assert (now["state"], now["exit_code"]) == ("stopped", 75) and now["reason"].startswith("SIGHUP")
    assert progress(run / "last.pt")["step"] == now["step"]


@one_or_two
def test_under_nohup_the_run_outlives_its_terminal(launch, run, command):
    training = OnATerminal(launch, [*command, TOY, "epochs=100000", f"save_dir={run}"], nohup=True)
    training.wait_for("Epoch 1/")
    training.drop()
    wait_until(lambda: warnings(run))
    training.run.signal(signal.SIGHUP)
    step = status(run)["step"]
    wait_until(lambda: status(run)["step"] > step)
    training.run.signal(signal.SIGTERM)
    assert training.run.wait().code == 75
    assert status(run)["reason"].startswith("SIGTERM") and len(warnings(run)) == 1
    assert "cannot be written (Input/output error): training continues" in status(run)["warning"]


@pytest.fixture
def handlers():
    """They are put back."""
    before = {number: signal.getsignal(number) for number in processes.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("names", "ignored"),
    [([], True), (["TORCHELASTIC_RUN_ID", "LOCKSTEP_SCRATCH"], True), (["TORCHELASTIC_RUN_ID"], False)],
)
def test_nohup_is_obeyed_but_where_torchrun_would_kill_for_it(monkeypatch, handlers, names, ignored):
    """Plain torchrun listens to SIGHUP under nohup, too, and hands it on."""
    kept = {name: os.environ[name] for name in os.environ.keys() - {"TORCHELASTIC_RUN_ID", "LOCKSTEP_SCRATCH"}}
    monkeypatch.setattr(os, "environ", kept | dict.fromkeys(names, "x"))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asked = signals.StopRequest()
    asked.install_handlers()
    assert (signal.getsignal(signal.SIGHUP) == signal.SIG_IGN) == ignored
    signal.raise_signal(signal.SIGHUP)
    assert asked.reason == ("" if ignored else "SIGHUP")


@pytest.mark.slow
def test_a_frozen_rank_is_found_by_a_run_that_has_no_stderr(launch, run):
    """The watchdog lives, and records what it cannot say."""
    words = [FAULTY, "fault.kind=freeze", "fault.step=5", "log_every=1", "ddp.timeout_s=2", f"save_dir={run}"]
    done = launch("bash", "-c", '"$@" >/dev/full 2>&-', "bash", *TORCHRUN, *words, **ON_CPUS)
    now = status(run)
    assert done.code and (now["state"], now["exit_code"]) == ("failed", 6)
    assert "rank 1 gives no sign of life" in now["reason"] and "==== rank 0" in (run / "stacks.txt").read_text()
    assert warnings(run) == ["stderr is closed: training continues"] and now["warning"] == warnings(run)[0]


def test_a_failure_that_cannot_be_said_is_recorded(launch, run, full):
    words = [FAULTY, "fault.kind=raise", "fault.rank=0", f"save_dir={run}"]
    assert launch(*PYTHON, *words, output=full, errors=full).code == 1
    now = status(run)
    assert (now["state"], now["exit_code"]) == ("failed", 1) and "ZeroDivisionError" in now["reason"]
    assert "ZeroDivisionError" in (run / "error.txt").read_text()


def test_a_failure_is_recorded_before_it_is_said(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(current, "folder", tmp_path)
    monkeypatch.setattr(current, "fields", {})
    monkeypatch.setattr(terminal, "write_stderr", lambda text: order.append((text, *sorted(os.listdir(tmp_path)))))
    monkeypatch.setenv("LOCKSTEP_SCRATCH", str(tmp_path))
    watchdog.announce(SimpleNamespace(main=True), watchdog.Failure(1, "rank 1 is gone", 6, details="a traceback"), True)
    assert order == [("error: rank 1 is gone\n", "error.txt", "exit_code", "status.json")]
    current.update(step=7)  # a checkpoint that was on its way
    assert (status(tmp_path)["state"], status(tmp_path)["step"], status(tmp_path)["exit_code"]) == ("failed", 7, 6)
