"""A run's folder under the faults that can be provoked from outside: it holds the old state or the new, or says so.

The I/O calls of atomic.py, archive.py and store.py are counted by stand-ins for what they import; SIGKILL,
limits and full disks are real.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
import os
import pickle
import pickletools
import re
import resource
import shutil
import signal
import tarfile
import tempfile
import threading
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from io_faults import Faults, File, Stand

from engine import config
from engine.contract import LockstepError
from engine.errors import console
from engine.files import archive, atomic, run_folder, store
from engine.files.run_folder import inspect_run_folder as look_into
from engine.files.store import FILES, LAST, LOCK, MANIFEST, Checkpoints, find_checkpoint
from engine.files.writer import CheckpointWriter
from engine.record import Record
from engine.report import log
from engine.run import Progress
from plugins.resilience import status
from tools.use import evaluate

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tmp_path(tmp_path):
    """In memory where that is possible: a save is synced ten thousand times here, and what a sync does is modelled."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="lt_", dir="/dev/shm") as folder:
        yield Path(folder)


def state(step: int, size: int = 64) -> dict:
    return {"format": 2, "progress": {"step": step}, "model": {"w": torch.full((size,), float(step))}, "ema": None}


def step_of(path: Path) -> int:
    """The step of a checkpoint that is what `state` made, to the last element."""
    found = archive.read(path)
    step = found["progress"]["step"]
    assert set(found) == set(state(step)) and bool((found["model"]["w"] == float(step)).all())
    return step


def save(checkpoints: Checkpoints, about: dict, name: str, best: bool = False) -> Path:
    checkpoints.commit(about, name, best)
    return checkpoints.last


def commit(checkpoints: Checkpoints, step: int, best: bool = False, size: int = 64) -> Path:
    return save(checkpoints, state(step, size), f"step_{step}.pt", best)


def found(folder: Path) -> int | None:
    path, _ = find_checkpoint("auto", folder)
    return None if path is None else step_of(path)


def contents(path: Path) -> str | bytes:
    if path.is_symlink():
        return os.readlink(path)
    return path.read_bytes() if path.is_file() else "folder"


def snapshot(folder: Path) -> dict:
    return {path.name: contents(path) for path in folder.iterdir()}


def temporary(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".tmp")]


def in_child(work) -> tuple[int, str]:
    """Run `work` in a forked process: (its wait status, what it returned or its traceback)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code, said = 0, ""
        torch.set_num_threads(1)  # OpenMP's threads are not there after a fork, and would be waited for
        try:
            said = str(work())
        except BaseException:
            code, said = 1, traceback.format_exc()
        finally:
            os.write(writer, said.encode()[:60000])
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    return os.waitpid(child, 0)[1], said


def error_of(work, *given) -> LockstepError:
    with pytest.raises(LockstepError) as caught:
        work(*given)
    return caught.value


@pytest.fixture
def console_lines(caplog, monkeypatch) -> Callable[[], list[str]]:
    """Returns a function: the messages to the console since the last call, warnings with their mark."""
    caplog.set_level(logging.INFO, console.name)
    monkeypatch.setattr(console, "propagate", True)

    def messages() -> list[str]:
        records = [record for record in caplog.records if record.name == console.name]
        marks = {logging.WARNING: "warning: "}
        found = [marks.get(record.levelno, "") + record.getMessage() for record in records]
        caplog.clear()
        return found

    return messages


# ---- the n-th call --------------------------------------------------------------------------------------------------


SCENES = {  # saves before (step, best), keep, the save under test (step, best)
    "nothing there": ([], 1, (3, False)),
    "one older": ([(1, False)], 1, (3, False)),
    "one older goes": ([(1, False)], 0, (3, False)),
    "retention": ([(1, False), (2, False)], 1, (3, False)),
    "a new best": ([(1, True), (2, False)], 0, (3, True)),
}


def writer_of(checkpoints: Checkpoints, sync=lambda: None, **how):
    return contextlib.closing(CheckpointWriter(checkpoints, SimpleNamespace(sync=sync), "F1", **how))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    root = tmp_path_factory.mktemp("scenes")
    for name, (before, keep, _) in SCENES.items():
        (root / name).mkdir()
        checkpoints = Checkpoints(root / name, keep)
        for step, best in before:
            commit(checkpoints, step, best)
    return root


def strike(folder: Path, scene: str, faults: Faults) -> LockstepError | None:
    """The save of a scene, under a fault."""
    _, keep, (step, best) = SCENES[scene]
    checkpoints = Checkpoints(folder, keep)
    with pytest.MonkeyPatch.context() as patch:
        faults.install(patch)
        try:
            commit(checkpoints, step, best)
        except LockstepError as error:
            return error
    return None


def struck(scenes: Path, scene: str, mode: str | int, for_good: bool, tmp_path: Path, console_lines):
    """Yield the n-th call's name, a scene's folder and a fault there, for each call and for one more."""
    calls, faults = tmp_path / "calls", Faults(0, "none")
    shutil.copytree(scenes / scene, calls, symlinks=True)
    assert strike(calls, scene, faults) is None
    for n in range(1, len(faults.calls) + 2):
        folder = tmp_path / str(n)
        shutil.copytree(scenes / scene, folder, symlinks=True)
        yield faults.calls[n - 1 : n], folder, Faults(n, mode, for_good)
        path, _ = find_checkpoint("auto", folder)  # the next start finds its checkpoint and saves
        checkpoints = Checkpoints(folder, SCENES[scene][1])
        if path:
            checkpoints.truncate_after(path)
        console_lines()
        commit(checkpoints, 9)
        assert found(folder) == 9 and console_lines() == [] == temporary(folder) and step_of(folder / LAST) == 9
        shutil.rmtree(folder)
    assert n > 60


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "for_good"), [(errno.ENOSPC, False), (errno.EIO, False), (errno.EIO, True)])
@pytest.mark.parametrize("scene", SCENES)
def test_the_nth_call_of_a_save_fails(scene, mode, for_good, scenes, tmp_path, console_lines):
    befores, _, (new, _) = SCENES[scene]
    old = befores[-1][0] if befores else None
    for call, folder, faults in struck(scenes, scene, mode, for_good, tmp_path, console_lines):
        before = snapshot(folder)
        error = strike(folder, scene, faults)
        if error:  # zipfile turns what it meets into an error of its own
            assert error.exit_code == 3, call
            assert os.strerror(mode) in str(error) or (call[0] == "read" and "zip file" in str(error)), call
        if error and not for_good:
            assert snapshot(folder) == before and found(folder) == old, call
        assert found(folder) in (old, new) if error else found(folder) == new, call
    assert not faults.struck


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "mode"),
    [(scene, "torn") for scene in SCENES]
    + [("a new best", "kill"), ("one older goes", "power"), ("a new best", "power")]
    + [("a new best", "power, renames stay")],
)
def test_the_process_is_killed_at_the_nth_call_of_a_save(scene, mode, scenes, tmp_path, console_lines):
    befores, _, (new, _) = SCENES[scene]
    old = befores[-1][0] if befores else None
    before = ""
    for call, folder, faults in struck(scenes, scene, mode, False, tmp_path, console_lines):
        if [before, *call[:1]] != ["read", "read"]:  # a read changes nothing: this is the kill before

            def save(folder=folder, faults=faults):
                error = strike(folder, scene, faults)
                if mode.startswith("power"):
                    faults.lose()
                return error

            status, said = in_child(save)
            if call:
                assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (call, said)
            else:
                assert (status, said) == (0, "None") and found(folder) == new
            assert found(folder) in (old, new), call
        before = (call or [""])[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["power", "power, renames stay"])
def test_the_log_is_whole_up_to_the_checkpoint_after_a_power_loss(mode, tmp_path):
    """At the n-th call of a start at step 2, which takes line 3 back, of line 3 written anew, and of its checkpoint."""
    line = '{"event": "train", "step": %d, "epoch": 0, "samples": 0, "time_s": 1.0}\n'
    n, struck = 0, True
    while struck:
        n, folder = n + 1, tmp_path / str(n)
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(line % 1 + line % 2 + line % 3)
        checkpoints = Checkpoints(folder)
        commit(checkpoints, 2)

        faults = Faults(n, mode)

        def train(folder=folder, checkpoints=checkpoints, faults=faults):
            job = SimpleNamespace(cfg=config.Config(), plan=SimpleNamespace(epochs=1), progress=Progress(step=2))
            job.task, job.record = SimpleNamespace(monitor="loss"), Record()
            with pytest.MonkeyPatch.context() as patch:
                faults.install(patch)
                opened = log.Log(folder, job)
                opened.sinks = [opened.lines]
                job.progress.step = 3
                opened._send("write", "train", job, {})
                writer = CheckpointWriter(checkpoints, SimpleNamespace(sync=opened.sync), "F1")
                writer.write(state(3))
                writer.wait()
                writer.close()
            faults.lose()

        status, said = in_child(train)
        struck = os.WIFSIGNALED(status)
        assert struck or (status, said) == (0, "None"), said
        step, lines = found(folder), (folder / "metrics.jsonl").read_text().splitlines()
        assert step == 3 or (struck and step == 2), f"call {n}"
        assert [json.loads(text)["step"] for text in lines][:step] == [*range(1, step + 1)], f"call {n}"
        shutil.rmtree(folder)
    assert n > 40


@pytest.mark.parametrize("resume", ["auto", "the file", "the folder"])
@pytest.mark.parametrize("manifest", [True, False])
def test_the_nth_call_of_a_look_fails(resume, manifest, scenes, tmp_path):
    """It falls back or says so: not another exception, and not a run from scratch."""
    folder = tmp_path / "run"
    shutil.copytree(scenes / "retention", folder, symlinks=True)
    if not manifest:
        (folder / MANIFEST).unlink()
    asked = {"auto": "auto", "the file": str(folder / "step_2.pt"), "the folder": str(folder)}[resume]
    n, faults = 0, Faults(1, errno.EIO)
    while not n or faults.struck:
        n += 1
        faults = Faults(n, errno.EIO)
        with pytest.MonkeyPatch.context() as patch:
            faults.install(patch)
            try:
                path, _ = find_checkpoint(asked, folder)
                assert path is not None, f"call {n}: {faults.calls[-1]}"
                step = archive.read(path)["progress"]["step"]
            except LockstepError as error:
                assert error.exit_code == 3 or resume != "auto"
                step = 2
        assert step == 2 if resume == "the file" else step in (1, 2)
    assert n > 10


def test_a_save_is_said_when_it_is_there(tmp_path, console_lines):
    """It is written while the training continues, and the folder may be gone by then."""
    (tmp_path / "run").mkdir()

    def best(step):
        scored = state(step)
        scored["progress"] |= {"epoch": 3, "best": step / 10}
        return scored

    with writer_of(Checkpoints(tmp_path / "run")) as writer:
        for step, name in ((1, "best_model_epoch3.pt"), (2, "best_model_epoch3_step2_1.pt")):
            writer.write(best(step), best=True)
            writer.wait()
            assert console_lines() == [f"  ✓ Saved best model: {name} (F1: 0.{step}000)"]
        shutil.rmtree(tmp_path / "run")
        writer.write(best(3), best=True)
    (warning,) = console_lines()
    assert warning.startswith("warning: the checkpoint could not be written: No such file")


def test_a_checkpoint_that_may_wait_is_written_by_time(monkeypatch, tmp_path):
    """At the end of an epoch after ten seconds, or once the last one's CPU time is a hundredth of the time since; at
    once, if that failed. Within an epoch after `minutes`, and that hundredth; after failures sooner."""
    clock = SimpleNamespace(used=0.0, now=100.0, monotonic=lambda: clock.now, thread_time=lambda: clock.used)
    monkeypatch.setattr("engine.files.writer.time", clock)
    go_on = threading.Event()

    def sync():
        go_on.wait(60)
        clock.used, clock.now = clock.used + 0.03, clock.now + 7  # it counts from its begin

    (run := tmp_path / "run").mkdir()
    with writer_of(Checkpoints(run), sync, minutes=0.01) as writer:

        def due(minutes):
            writer.minutes, began = minutes, clock.now
            writer.write(state(1))
            with contextlib.suppress(LockstepError):
                writer.wait()
            return round(writer.epoch_due_at - began, 6), round(writer.due_at - began, 6)

        assert (writer.epoch_due_at, writer.due_at) == (100, 100.6), "there is none yet"
        writer.write(state(1))
        assert (writer.epoch_due_at, writer.due_at) == (110, math.inf), "it is still being written"
        go_on.set()
        writer.wait()
        assert [due(minutes) for minutes in (0.01, 0.06, math.inf)] == [(3.0, 3.0), (3.0, 3.6), (3.0, math.inf)]
        shutil.rmtree(run)
        for times, seconds in ((1, 30), (2, 60), (7, 600), (2000, 600)):
            writer.failures = times - 1
            assert due(math.inf) == (0.0, seconds), "also with save_every"


FULL_AFTER = """
import errno
from engine.files import store
from tests.tasks import toy
real, tried = store.atomically, []
def write(path):
    step = path.stem.removeprefix("step_")
    if path.suffix == ".pt" and not (step.isdigit() and int(step) <= {step}) and len(tried) < {times}:
        tried.append(path)
        {full}
    return real(path)
store.atomically = write
class Task(toy.Task):
    pass
"""
NO_SPACE = 'raise OSError(errno.ENOSPC, "No space left on device")'
DANGER = "{} saves in a row have failed: nothing since step {} is on disk"


@pytest.mark.parametrize(("times", "failures", "code"), [(2, 0, 0), (5, 3, 0), (999, 10, 3)])
def test_a_disk_that_stays_full_is_a_danger_that_is_said(launch, tmp_path, times, failures, code):
    """Once for each save, from the third in a row on; a success ends it."""
    (tmp_path / "own.py").write_text(FULL_AFTER.format(step=8, times=times, full=NO_SPACE))
    words = [str(tmp_path / "own.py"), "dataset.samples=240", "steps=20", "save_every=1", "eval_every=100"]
    done = launch.python("train.py", *words, f"save_dir={tmp_path / 'run'}")
    assert done.code == code, done.out + done.err
    said = [f"warning: {DANGER.format(n, 8)}" for n in range(3, 3 + failures)]
    assert [line for line in done.out.splitlines() if "in a row" in line] == said
    about = json.loads((tmp_path / "run/status.json").read_text())
    assert about.get("warning", "") == (DANGER.format(12, 8) if code else "")
    assert ("could be written again" in done.out) is (times == 5)


# ---- no room --------------------------------------------------------------------------------------------------------

FILL = """with open(path.parent / "somebody_else", "ab", buffering=0) as file:
            try:
                while file.write(b"0" * 4096):
                    pass
            except OSError:
                pass"""

FULL_RUN = """
import subprocess, sys
code = subprocess.run([sys.executable, "train.py", *sys.argv[2:]]).returncode
print("ended with", code)
print(open(sys.argv[1] + "/status.json").read())
"""


def test_a_full_disk_is_in_the_status(launch, tmp_path):
    """Which is written into its own blocks then: nothing new has room."""
    (tmp_path / "own.py").write_text(FULL_AFTER.format(step=4, times=999, full=FILL))
    (folder := tmp_path / "run").mkdir()
    words = [str(tmp_path / "own.py"), "dataset.samples=240", "steps=20", "save_every=4", "eval_every=100"]
    done = launch.on_a_small_disk(folder, "1m", "-c", FULL_RUN, str(folder), *words, f"save_dir={folder}")
    about = json.loads(done.out.partition("ended with 3\n")[2])
    assert (about["state"], about["exit_code"], about["step"]) == ("failed", 3, 4), about
    assert about["warning"] == DANGER.format(4, 4)
    assert "No space left on device" in about["reason"] and "status.json was not written" not in done.err


def fill(folder: Path) -> str:
    """A save that fits, and one that doesn't."""
    checkpoints = Checkpoints(folder)
    commit(checkpoints, 1, size=1 << 17)
    before = snapshot(folder)
    error = error_of(lambda: commit(checkpoints, 2, size=1 << 20))
    assert snapshot(folder) == before and found(folder) == 1
    commit(checkpoints, 3, size=1 << 17)
    assert found(folder) == 3 and temporary(folder) == []
    return json.dumps([error.exit_code, str(error)])


FULL = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1] + folder for folder in ("", "/tests/kit", "/tests/faults")]
import test_storage
print(test_storage.fill(Path(sys.argv[2])))
"""


@pytest.mark.parametrize("kind", ["No space left on device", "File too large"])
def test_no_room_for_a_checkpoint(kind, tmp_path, launch):
    """On a full disk, and by a limit on the size of files."""

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        return fill(tmp_path)

    if kind == "File too large":
        status, said = in_child(limited)
    else:
        done = launch.on_a_small_disk(tmp_path, "4m", "-c", FULL, str(ROOT), str(tmp_path))
        status, said = done.code, done.out or done.err
    assert status == 0, said
    code, text = json.loads(said)
    assert code == 3 and kind in text and str(tmp_path / "step_2.pt") in text
    needed, free = map(float, re.findall(r"([\d.]+) MB", text))
    assert needed == 4.2 and free > 2 and (free < 4.2 or kind == "File too large")


def test_what_could_not_be_read_again_is_not_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    commit(checkpoints, 1)
    before = snapshot(tmp_path)
    for held, named in ((np.float64(1), "numpy"), (lambda: 0, "")):
        error = error_of(save, checkpoints, state(2) | {"tally": held}, "step_2.pt")
        assert error.exit_code == 3 and named in str(error)
        assert snapshot(tmp_path) == before and found(tmp_path) == 1


# ---- damage ---------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((64,), 2.0).numpy().tobytes()) + 17] ^= 1
    path.write_bytes(data)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "one flipped bit": flip,
    "an empty archive": lambda path: zipfile.ZipFile(path, "w").close(),
    "a folder": as_folder,
    "gone": Path.unlink,
}


@pytest.fixture
def run(scenes, tmp_path) -> Path:
    """Steps 1 and 2."""
    folder = tmp_path / "run"
    shutil.copytree(scenes / "retention", folder, symlinks=True)
    return folder


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint(damage, manifest, run):
    newest = run / "step_2.pt"
    DAMAGE[damage](newest)
    if not manifest:
        (run / MANIFEST).unlink()
    for resume in ("auto", str(run)):
        path, warnings = find_checkpoint(resume, run)
        assert path and step_of(path) == 1
        if manifest:
            assert str(newest) in "".join(warnings) and "resuming from step_1.pt" in "".join(warnings)
        else:
            assert MANIFEST in "".join(warnings)
    error = error_of(lambda: find_checkpoint(str(newest), None))
    if newest.is_file():
        assert error.exit_code == 3 and str(run / "step_1.pt") in str(error)
    else:
        assert error.exit_code == 2
    assert find_checkpoint(str(run / "step_1.pt"), None) == (run / "step_1.pt", [])
    if newest.is_file() and damage != "one flipped bit":  # the archive's CRC is torch's own to check
        assert error_of(archive.read, newest).exit_code == 3

    DAMAGE["truncated"](run / "step_1.pt")
    assert error_of(lambda: find_checkpoint("auto", run)).exit_code == 3
    error = error_of(lambda: find_checkpoint(str(run / "step_1.pt"), None))
    assert error.exit_code == 3 and "another file" in str(error)


NAMED = '{"checkpoints": [{"file": %s, "step": 1, "bytes": 1, "sha256": ""}], "best": ""}'
MANIFESTS = [b"\xff\xfe", b"\0" * 300, b"[" * 100000, None]
MANIFESTS += [b"", b"{", b"[]", b"null", b'{"checkpoints": []}', b'{"checkpoints": [], "best": ""}']
MANIFESTS += [NAMED.replace('"step": 1', '"step": Infinity').encode() % b'"step_1.pt"']
MANIFESTS += [
    (NAMED % json.dumps(name)).encode()
    for name in ("../victim.pt", "/etc/passwd", "..", ".", "", "a\0.pt", "a/b.pt", "config.yaml", LOCK)
]


@pytest.mark.parametrize("text", MANIFESTS)
def test_a_damaged_manifest(text, run, console_lines):
    """The files speak for themselves; none that is not vouched for is ever removed."""
    victim = run.parent / "victim.pt"
    shutil.copy(run / "step_1.pt", victim)
    os.utime(run / "step_1.pt", ns=(0, 0))
    path = run / MANIFEST
    path.unlink()
    if text is not None:
        path.write_bytes(text)
    chosen, warnings = find_checkpoint("auto", run)
    assert chosen and chosen.parent == run and step_of(chosen) == 2 and MANIFEST in "".join(warnings)
    commit(Checkpoints(run, keep=0), 3)
    assert found(run) == 3 and console_lines() == []
    assert victim.is_file() and (run / "step_1.pt").is_file() and (run / "step_2.pt").is_file()
    assert find_checkpoint("auto", run) == (run / "step_3.pt", [])


def test_a_manifest_that_is_a_folder(run):
    as_folder(run / MANIFEST)
    before = snapshot(run)
    assert found(run) == 2 and error_of(lambda: commit(Checkpoints(run), 3)).exit_code == 3
    assert snapshot(run) == before


in_time = pytest.mark.timeout(60)  # to open a pipe that nobody writes to would take for ever


@in_time
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_of_the_run_is_refused(name, make, run):
    """Each of them would be opened, and a pipe that nobody writes to is waited for."""
    (run / name).unlink(missing_ok=True)
    make(run / name)
    cfg = SimpleNamespace(save_dir=str(run), resume="auto")
    asked = [lambda: look_into(cfg), lambda: find_checkpoint(str(run), None)]
    if name != "config.yaml":
        (run / "config.yaml").touch()
        asked.append(lambda: evaluate.of_run(False, [str(run)]))
    for ask in asked:
        error = error_of(ask)
        kinds = "a folder, a pipe or a device"
        assert error.exit_code == 2 and str(error).startswith(f"{name} is {kinds}, and not the run's file ({run}): ")


@in_time
def test_a_checkpoint_that_is_a_pipe_is_passed_over(run):
    assert found(run) == 2
    newest = Checkpoints(run).last
    newest.unlink()
    os.mkfifo(newest)
    path, warnings = find_checkpoint("auto", run)
    assert path.name != newest.name and "it is no file" in warnings[0]


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(run, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(store, "os", Stand(os, {"listdir": refuse}))
    (run / MANIFEST).unlink()
    assert error_of(lambda: find_checkpoint("auto", run)).exit_code == 3
    assert error_of(lambda: Checkpoints(run)).exit_code == 3


def test_nothing_there_is_not_damage(tmp_path):
    for folder in (None, tmp_path, tmp_path / "absent"):
        assert find_checkpoint("auto", folder) == (None, []) == find_checkpoint("never", folder)
    for path in (tmp_path, tmp_path / "absent.pt", "a\0b"):
        assert error_of(find_checkpoint, str(path), None).exit_code == 2


@pytest.fixture
def victim(run):
    """A file outside the folder, which stays as it is."""
    path = run.parent / "victim"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"


LASTS = {
    "a link to a victim": lambda path, victim: path.symlink_to(victim),
    "a dangling link": lambda path, victim: path.symlink_to(victim.with_name("absent")),
    "a folder": lambda path, victim: path.mkdir(),
    "a read-only copy": lambda path, victim: (path.write_bytes(b""), path.chmod(0o444)),
}


@pytest.mark.parametrize("last", LASTS)
def test_what_stands_where_last_belongs(last, run, victim, console_lines):
    """It is replaced, never written through."""
    path, checkpoints = run / LAST, Checkpoints(run)
    path.unlink()
    LASTS[last](path, victim)
    commit(checkpoints, 3)
    assert not (run.parent / "absent").exists() and found(run) == 3 and temporary(run) == []
    if last == "a folder":
        assert LAST in "".join(console_lines())
    else:
        assert os.readlink(path) == "step_3.pt" and console_lines() == []


@pytest.mark.parametrize("name", [".step_3.pt.tmp", ".manifest.json.tmp", ".last.pt.tmp", "step_3.pt", "manifest.json"])
def test_a_link_planted_where_a_file_will_be_written(name, run, victim):
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim)
    commit(Checkpoints(run), 3)
    assert not (run / name).is_symlink() and found(run) == 3 and temporary(run) == []


@pytest.mark.slow
def test_going_back_to_an_older_one(run):
    """Later checkpoints stop counting before they are overwritten, and a crash in between leaves the older one."""
    commit(Checkpoints(run, 2), 3)
    for n in range(1, 300):
        folder = run.parent / str(n)
        shutil.copytree(run, folder, symlinks=True)
        checkpoints = Checkpoints(folder, 2)
        checkpoints.truncate_after((folder / "step_1.pt").resolve())
        faults = Faults(n, "kill")

        def again(checkpoints=checkpoints, faults=faults):
            with pytest.MonkeyPatch.context() as patch:
                faults.install(patch)
                save(checkpoints, state(4), "step_3.pt")

        killed = os.WIFSIGNALED(in_child(again)[0])
        path, warnings = find_checkpoint("auto", folder)
        assert path and warnings == [] and step_of(path) in (3, 1, 4)
        shutil.rmtree(folder)
        if not killed:
            break
    assert step_of(path.parent / path.name) == 4 if path.exists() else n > 30


@pytest.mark.parametrize(("bests", "left"), [((1,), "step_1.pt"), ((1, 2), "")])
def test_a_best_one_that_was_gone_back_behind_is_none(tmp_path, bests, left):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        commit(checkpoints, step, best=step in bests)
    checkpoints.truncate_after(tmp_path / "step_1.pt")
    commit(checkpoints, 3)
    assert checkpoints.best == Checkpoints(tmp_path).best == left and found(tmp_path) == 3


def test_a_relative_folder_and_an_absolute_path_are_the_same(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    checkpoints = Checkpoints(Path("run"))
    checkpoints.truncate_after(run / "step_1.pt")
    assert checkpoints.last == Path("run/step_1.pt")
    assert find_checkpoint("run", None)[0] == run / "step_2.pt"


# ---- what others hand us --------------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, *what):
        self.what = what

    def __reduce__(self):
        return self.what[0], self.what[1:]


def tar(path: Path, bomb: Bomb) -> None:
    """The format of torch 0.1."""
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            data = pickle.dumps(bomb if name in ("pickle", "storages") else {}, 2)
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))


def polyglot(path: Path, bomb: Bomb) -> None:
    """An old-format file with a whole checkpoint behind it: torch goes by the front, zipfile by the end."""
    whole = io.BytesIO()
    torch.save(state(1), whole)
    torch.save({"format": 2, "x": bomb}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes() + whole.getvalue())


def torchscript(path: Path, bomb: Bomb) -> None:
    torch.save({"format": 2, "x": bomb}, path)
    with zipfile.ZipFile(path, "a") as archive:
        top = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{top}/constants.pkl", pickle.dumps(bomb, 2))
        archive.writestr(f"{top}/code/__torch__.py", "def forward(self): pass\n")


def two_pickles(path: Path, bomb: Bomb) -> None:
    """A name that torch finds and zipfile doesn't."""
    rewrite(path, more={"DATA.PKL": pickle.dumps({"format": 2, "x": bomb}, 2)})


HIDDEN = {
    "torch's archive": lambda path, bomb: torch.save({"format": 2, "x": bomb}, path),
    "torch's old format": lambda path, bomb: torch.save(
        {"format": 2, "x": bomb}, path, _use_new_zipfile_serialization=False
    ),
    "torch's tar format": tar,
    "a pickle": lambda path, bomb: path.write_bytes(pickle.dumps({"format": 2, "x": bomb})),
    "TorchScript": torchscript,
    "an old front": polyglot,
    "a second pickle": two_pickles,
}


@pytest.mark.parametrize("what", ["mkdir", "exec"])
@pytest.mark.parametrize("where", HIDDEN)
def test_hidden_code_does_not_run(where, what, tmp_path):
    path, marker = tmp_path / "step_1.pt", tmp_path / "marker"
    bomb = Bomb(os.mkdir, str(marker)) if what == "mkdir" else Bomb(exec, f"import os; os.mkdir({str(marker)!r})")
    HIDDEN[where](path, bomb)
    for look in (archive.read, lambda path: find_checkpoint(str(path), None)):
        error = error_of(look, path)
        assert error.exit_code == 3 and str(path) in str(error)
        assert "weights_only" not in str(error) and "\n" not in str(error)
    assert not marker.exists()
    pickle.loads(pickle.dumps(bomb))
    assert marker.exists(), "the bomb would not have worked at all"


def test_a_real_torchscript_archive_is_refused(tmp_path):
    class Plus(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    path = tmp_path / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still about
        torch.jit.save(torch.jit.trace(Plus(), torch.zeros(1)), str(path))
    error = error_of(archive.read, path)
    assert error.exit_code == 3 and "TorchScript" in str(error)


def unchanged(name: str, data: bytes) -> bytes:
    return data


def rewrite(path: Path, change=unchanged, more: dict | None = None, packing: int = zipfile.ZIP_STORED) -> None:
    """A checkpoint whose parts went through `change(name, data)`."""
    whole = io.BytesIO()
    torch.save(state(1), whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w", packing) as new:
        for name in old.namelist():
            top, _, part = name.partition("/")
            new.writestr(name, change(part, old.read(name)))
        for part, data in (more or {}).items():
            new.writestr(f"{top}/{part}", data)


def claim(storage_numel: int, view_numel: int):
    """A pickle that says its tensor has so many elements, of so many in the storage; the file has 64."""

    def change(name: str, data: bytes) -> bytes:
        if name != "data.pkl":
            return data
        head, cpu, tail = data.partition(b"cpu")
        numbers = [b"\x8a\x08" + number.to_bytes(8, "little") for number in (storage_numel, view_numel)]
        assert tail.count(b"K@") == 2
        return head + cpu + tail.replace(b"K@", numbers[0], 1).replace(b"K@", numbers[1], 1)

    return change


def patched_sizes(path: Path, packing: int) -> None:
    """The directory of the archive says that each file in it has 4 GB."""
    rewrite(path, packing=packing)
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\x01\x02")
    while at >= 0:
        data[at + 24 : at + 28] = b"\xf0\xff\xff\xff"
        at = data.find(b"PK\x01\x02", at + 4)
    path.write_bytes(data)


def pickled(data: bytes):
    """A checkpoint with this pickle."""
    return lambda path: rewrite(path, lambda name, before: data if name == "data.pkl" else before)


CLAIMS = {
    "packed": lambda path: rewrite(path, unchanged, {"data/9": bytes(1 << 26)}, zipfile.ZIP_DEFLATED),
    "packed, 4 GB each": lambda path: patched_sizes(path, zipfile.ZIP_DEFLATED),
    "not packed, 4 GB each": lambda path: patched_sizes(path, zipfile.ZIP_STORED),
    "a storage of 1e12": lambda path: rewrite(path, claim(10**12, 10**12)),
    "a storage of 1e12, a view of 64": lambda path: rewrite(path, claim(10**12, 64)),
    "a storage of 65": lambda path: rewrite(path, claim(65, 65)),
    "a view of 1e12": lambda path: rewrite(path, claim(64, 10**12)),
    "a memo of 4e9": pickled(b"\x80\x02}r\xff\xff\xff\xff."),
    "a billion laughs": pickled(b"\x80\x02]" + b"q\x00h\x00h\x00\x86" * 30 + b"."),
    "a byte array of 1e12": pickled(
        b"\x80\x02c__builtin__\nbytearray\n\x8a\x06" + (10**12).to_bytes(6, "little") + b"\x85R."
    ),
}


@pytest.mark.parametrize("what", CLAIMS)
def test_a_file_that_claims_more_than_it_holds(what, tmp_path):
    path = tmp_path / "step_1.pt"
    CLAIMS[what](path)

    def limited():
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20),) * 2)
        error = error_of(archive.read, path)
        return json.dumps([error.exit_code, str(error)])

    status, said = in_child(limited)
    assert status == 0, said
    code, text = json.loads(said)
    assert code == 3 and "Memory" not in text and "memory" not in text
    if "storage of" in what:
        assert "size is not that of its data" in text


def test_a_checkpoint_names_nothing_but_tensors(tmp_path):
    """Every dtype included, and it reads back."""
    dtypes = "uint16 bool complex64 bfloat16 float8_e4m3fn int64 float64".split()
    weights = {name: torch.ones(3).to(getattr(torch, name)) for name in dtypes}
    weights |= {"empty": torch.zeros(0), "scalar": torch.tensor(1.0), "view": torch.arange(8.0)[2:6:2]}
    about = state(1) | {"model": weights, "best": 0.5, "rng": [1, (2, "x")]}
    path = save(Checkpoints(tmp_path), about, "a.pt", best=True)
    with zipfile.ZipFile(path) as contents:
        (pickled,) = (contents.read(name) for name in contents.namelist() if name.endswith("data.pkl"))
    names = [given for code, given, _ in pickletools.genops(pickled) if code.name in ("GLOBAL", "STACK_GLOBAL", "INST")]
    assert names and {name.split()[0] for name in names} <= {"collections", "torch", "torch._utils", "torch.storage"}
    again = archive.read(path)["model"]
    assert all(again[name].dtype == value.dtype and torch.equal(again[name], value) for name, value in weights.items())


# ---- what stays, and the thread that writes -------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 2, 5])
def test_last_best_and_k_more_stay(keep, tmp_path, console_lines):
    checkpoints = Checkpoints(tmp_path, keep)
    best = 0
    for step in range(1, 9):
        if step in (2, 5):
            best = step
        commit(checkpoints, step, best=step == best)
        expected = {*range(max(1, step - keep), step + 1), *([best] if best else [])}
        assert {p.name for p in tmp_path.glob("step_*")} == {f"step_{n}.pt" for n in expected}
        assert [e.step for e in checkpoints.entries] == sorted(expected)
        assert checkpoints.best == (f"step_{best}.pt" if best else "")
        again = Checkpoints(tmp_path, keep)
        assert (again.entries, again.best) == (checkpoints.entries, checkpoints.best)
    assert console_lines() == []


def test_a_name_that_counts_is_never_written_into(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    paths = [save(checkpoints, state(step), "best.pt", best=True) for step in (1, 2, 2, 3)]
    assert len(set(paths)) == 4 and [step_of(path) for path in paths] == [1, 2, 2, 3]


def test_a_disk_that_writes_something_else(run, monkeypatch):
    """The bytes read back differ from those handed to the disk: the only whole one stays, though keep=0 drops it."""
    DAMAGE["truncated"](run / "step_2.pt")

    class Lying(File):
        def write(self, data):
            return self.file.write(bytes(data).replace(b"\0\0@@", b"\0\0@A"))

    def lying(path, mode="r", **how):
        file = open(path, mode, **how)  # noqa: SIM115
        return Lying(Faults(0, "none"), file, Path(path)) if "x" in mode and "step_3" in str(path) else file

    monkeypatch.setattr(atomic, "open", lying, raising=False)
    before = snapshot(run)
    error = error_of(lambda: commit(Checkpoints(run, 0), 3))
    assert error.exit_code == 3 and "read back" in str(error) and snapshot(run) == before and found(run) == 1


def test_a_failed_removal_is_a_warning(run, monkeypatch, console_lines):
    def unlink(path, *given):
        if Path(path).name == "step_1.pt":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        os.unlink(path, *given)

    monkeypatch.setattr(store, "os", Stand(os, {"unlink": unlink}))
    with writer_of(Checkpoints(run)) as writer:
        writer.write(state(3))
    (warning,) = console_lines()
    assert "step_1.pt" in warning and "not permitted" in warning
    assert found(run) == 3 and (run / "step_1.pt").exists()


@pytest.fixture(autouse=True)
def no_writer_stays(monkeypatch):
    """Which the end of this process would wait for."""
    monkeypatch.setattr(status, "current", status.Status())


class Gated(Checkpoints):
    """Commits only when told to, counts how many at once, and fails for steps of `fails`."""

    def __init__(self, folder: Path, fails=()):
        super().__init__(folder)
        self.gate, self.begun, self.fails = threading.Semaphore(0), threading.Semaphore(0), fails
        self.now = self.most = 0

    def commit(self, about, *how):
        self.now += 1
        self.most = max(self.most, self.now)
        self.begun.release()
        self.gate.acquire()
        self.now -= 1
        if about["progress"]["step"] in self.fails:
            raise LockstepError("it failed", exit_code=3)
        super().commit(about, *how)


def test_the_writer_has_one_in_flight_and_doesnt_make_the_training_wait(tmp_path, monkeypatch, console_lines):
    checkpoints, saved, taken = Gated(tmp_path), list[int](), list[int]()
    monkeypatch.setattr(status.current, "update", lambda step, checkpoint, **more: saved.append(step))
    with writer_of(checkpoints) as writer:
        writer.write(state(1))
        checkpoints.begun.acquire()
        assert console_lines() == saved == [] and found(tmp_path) is None  # in flight, and we do not wait

        def let_it_write() -> None:
            for step in (2, 3, 4):
                writer.write(state(step))
                taken.append(step)

        more = threading.Thread(target=let_it_write)
        more.start()
        # The second waits for the first, and so does who brings it: no more than one state is held in memory.
        assert not checkpoints.begun.acquire(timeout=0.05) and taken == []
        for _ in range(4):
            checkpoints.gate.release()
        more.join()
        writer.wait()
    assert checkpoints.most == 1 and saved == [1, 2, 3, 4] and found(tmp_path) == 4


def test_the_writer_reports_a_failure_and_a_later_success_makes_up_for_it(tmp_path, console_lines):
    checkpoints = Gated(tmp_path, fails=(1, 3))
    checkpoints.gate.release(4)
    with writer_of(checkpoints) as writer:
        writer.write(state(1))
        assert error_of(writer.wait).exit_code == 3 and console_lines() == ["warning: it failed"]
        writer.write(state(2))
        writer.wait()
        assert console_lines() == [] and found(tmp_path) == 2
        writer.write(state(3))
        writer.write(state(4))  # nobody has asked in between: it is said nevertheless
        writer.wait()
    assert console_lines() == ["warning: it failed"] and found(tmp_path) == 4


def test_what_is_unsaved_is_written_before_the_process_ends(tmp_path):
    """By the end of the run, by the watchdog, or by one after the other."""
    checkpoints = Gated(tmp_path)
    with writer_of(checkpoints) as writer:
        assert status.current.checkpoints is writer
        writer.unsaved = state(1)
        writer.close(0.01)
        assert checkpoints.begun.acquire(timeout=60) and found(tmp_path) is None, "it waits no longer than that"
        checkpoints.gate.release()
    assert found(tmp_path) == 1


# ---- one owner ------------------------------------------------------------------------------------------------------


def try_lock(folder: Path, only_look: bool = False) -> str:
    """In another process: "free", or what it is told."""

    def attempt() -> str:
        try:
            run_folder.lock(folder, only_look)
        except LockstepError as error:
            return str(error)
        return "free"

    status, said = in_child(attempt)
    assert status == 0, said
    return said


def test_the_lock_names_its_owner_and_ends_with_it(tmp_path):
    """Also when it is killed, and when a child of its lives on."""
    told, tell = os.pipe()
    stay, leave = os.pipe()
    owner = os.fork()
    if owner == 0:
        os.close(leave)
        held = run_folder.lock(tmp_path)
        if os.fork() == 0:  # a loader's worker, say
            os.write(tell, b"%d" % os.getpid())
            os.read(stay, 1)
            os._exit(0)
        signal.pause()
        held.close()
    child = int(os.read(told, 20))
    os.close(stay)
    for only_look in (True, False):
        said = try_lock(tmp_path, only_look)
        assert re.search(rf"process {owner} on {re.escape(os.uname().nodename)}, started \d{{4}}-\d\d-\d\d \d\d:", said)
        assert str(tmp_path) in said
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    os.kill(child, 0)  # it lives
    assert try_lock(tmp_path) == "free"
    os.close(leave)
    os.close(told)
    os.close(tell)


def test_looking_takes_nothing_and_drops_nothing(tmp_path):
    assert run_folder.lock(tmp_path, only_look=True) is None and os.listdir(tmp_path) == []
    assert run_folder.lock(tmp_path / "absent", only_look=True) is None
    held = run_folder.lock(tmp_path)
    assert run_folder.lock(tmp_path, only_look=True) is None
    assert "another run" in try_lock(tmp_path) and "another run" in try_lock(tmp_path, only_look=True)
    assert run_folder.lock(tmp_path / "." / "", only_look=False) is held
    assert "another run" in try_lock(tmp_path)
    held.close()
    assert try_lock(tmp_path) == "free" == try_lock(tmp_path, only_look=True)
    again = run_folder.lock(tmp_path)
    assert again is not held and "another run" in try_lock(tmp_path)
    again.close()


def test_a_lock_that_is_a_link_or_cannot_be_opened(run, victim):
    (run / LOCK).symlink_to(victim)
    for only_look in (True, False):
        assert LOCK in str(error_of(run_folder.lock, run, only_look))
    (run / LOCK).unlink()
    (run / LOCK).mkdir()
    assert LOCK in str(error_of(run_folder.lock, run))
