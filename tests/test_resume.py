"""A run that stopped and went on is the run that never stopped."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import TOY, succeed


def load(path):
    return torch.load(path / "last.pt", weights_only=True)


def assert_same(a, b):
    """Bit for bit, whatever the nesting."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def logged(path):
    """metrics.jsonl without what a clock says."""
    timed = ("time_s", "samples_per_s", "data_wait_share")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


HARD = [
    "model.dropout=0.3",
    "optim.ema_decay=0.9",
    "batch_size=3",
    "gradient_accumulation_steps=2",
    "seed=4",
    "log_every=2",
]
"""Dropout, EMA, accumulation; 61 samples: short last steps, with fillers on two processes."""


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (2, 2)])
def test_stopped_and_resumed_equals_straight(launch, tmp_path, processes, workers):
    """Stopped mid-epoch, then at the last step of an epoch, then at the first of the next."""
    steps_per_epoch = -(-61 // (6 * processes))
    total = 3 * steps_per_epoch
    common = [TOY, *HARD, f"num_workers={workers}", f"schedule.horizon={total}", "eval_every=2", "save_every=2"]

    def train(folder, steps):
        command = ["train.py", *common, f"steps={steps}", f"save_dir={tmp_path / folder}"]
        return succeed(launch.torchrun(processes, *command) if processes > 1 else launch.python(*command))

    train("straight", total)
    stops = [4, steps_per_epoch, steps_per_epoch + 1, total]
    for stop in stops:
        done = train("stopped", stop)
    assert f"Resuming {tmp_path / 'stopped' / 'last.pt'}: step {stops[-2]}, epoch 2" in done.out
    straight, stopped = load(tmp_path / "straight"), load(tmp_path / "stopped")
    for part in ("model", "ema", "optimizer", "scaler", "ranks", "precision"):
        assert_same(stopped[part], straight[part])
    ours, theirs = stopped["progress"], straight["progress"]
    assert {k: ours[k] for k in ("step", "epoch", "position", "samples")} == {
        k: theirs[k] for k in ("step", "epoch", "position", "samples")
    }
    # A stop forces a log line, an evaluation and a save that the straight run lacks; what both have is the same.
    by_step = {line["step"]: line for line in logged(tmp_path / "stopped") if line["event"] == "eval"}
    for line in logged(tmp_path / "straight"):
        if line["event"] == "eval":
            assert by_step[line["step"]] == line


def test_a_killed_run_goes_on_as_if_it_had_not_been(launch, tmp_path):
    """SIGKILL to a real process in the middle; its log beyond the checkpoint is taken back, a torn line is dropped."""
    common = ["train.py", TOY, *HARD, "epochs=40", "save_every=5"]
    succeed(launch.python(*common, f"save_dir={tmp_path / 'straight'}"))
    killed = tmp_path / "killed"
    with subprocess.Popen(
        [sys.executable, *common, f"save_dir={killed}"],
        cwd=launch.cwd,
        env=launch.environment(),
        stdout=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + 60
        while not (killed / "last.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.005)  # polling with a deadline: the event is a file of another process
        process.kill()
    stood_at = load(killed)["progress"]["step"]
    assert 0 < stood_at < 40 * 11, "killed in the middle"
    with open(killed / "metrics.jsonl", "a") as file:
        file.write('{"event": "train", "step": 99999, "time_s": 1}\n{"event": "train", "st')
    succeed(launch.python(*common, f"save_dir={killed}"))
    for part in ("model", "ema", "optimizer", "progress", "ranks"):
        assert_same(load(killed)[part], load(tmp_path / "straight")[part])
    assert logged(killed) == logged(tmp_path / "straight")


@pytest.mark.slow
def test_another_number_of_processes_continues_the_same_run(launch, tmp_path):
    """3 -> 1 -> 2, mid-epoch: the same global batches, the weights up to float32 rounding."""
    common = ["train.py", TOY, "global_batch=12", "schedule.horizon=18", "optim.ema_decay=0.9"]
    succeed(launch.python(*common, "steps=18", f"save_dir={tmp_path / 'straight'}"))
    for processes, steps in ((3, 4), (1, 8), (2, 18)):
        command = [*common, f"steps={steps}", f"save_dir={tmp_path / 'moved'}"]
        succeed(launch.torchrun(processes, *command) if processes > 1 else launch.python(*command))
    straight, moved = load(tmp_path / "straight"), load(tmp_path / "moved")
    assert {k: v for k, v in moved["progress"].items() if k in ("step", "epoch", "position", "samples")} == {
        k: v for k, v in straight["progress"].items() if k in ("step", "epoch", "position", "samples")
    }
    for part in ("model", "ema"):
        for name, value in straight[part].items():
            torch.testing.assert_close(moved[part][name], value, rtol=1e-4, atol=1e-6)


@pytest.fixture
def finished(launch, tmp_path):
    """A run that is complete."""
    succeed(launch.python("train.py", TOY, "epochs=1", f"save_dir={tmp_path / 'run'}"))
    return tmp_path / "run"


def test_a_finished_run_started_again_changes_nothing(launch, finished):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    done = succeed(launch.python("train.py", TOY, "epochs=1", f"save_dir={finished}"))
    assert f"Already complete: {finished / 'last.pt'} stands at step 6 of 6" in done.out
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    more = succeed(launch.python("train.py", TOY, "epochs=2", f"save_dir={finished}"))
    assert "Resuming" in more.out and load(finished)["progress"]["step"] == 12


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("lr=0.5", "optim.lr: 0.01 -> 0.5"),
        ("model.width=8", "model.width: 16 -> 8"),
        ("seed=1", "seed: 0 -> 1"),
        ("batch_size=6", "global batch: 12 -> 6"),
        ("dataset.samples=60", "dataset.samples: 61 -> 60; training samples: 61 -> 60"),
        ("resume=never", "resume=never, but the folder holds a run"),
        ("resume=nowhere.pt", "no checkpoint 'nowhere.pt'"),
    ],
)
def test_a_config_that_contradicts_the_checkpoint_is_refused(launch, finished, change, words):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    done = launch.python("train.py", TOY, "epochs=2", change, f"save_dir={finished}")
    assert done.code == 2 and len(done.errors) == 1 and words in done.errors[0], done.err
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_what_may_change_may(launch, finished):
    changes = ["epochs=2", "batch_size=6", "global_batch=12", "num_workers=1", "log_every=1", "ddp.bucket_cap_mb=1"]
    succeed(launch.python("train_ddp.py", TOY, *changes, f"save_dir={finished}"))
    assert load(finished)["progress"]["step"] == 12


NUMPY = """
import numpy as np
from tests_toy import Task as Toy

class Task(Toy):
    def report(self, sums):
        return {"loss": np.float64(super().report(sums)["loss"])}
"""


def test_numpy_metrics_do_not_spoil_a_checkpoint(launch, tmp_path):
    """weights_only=True refuses NumPy's scalars: the run would end well and its checkpoints never be read again."""
    (tmp_path / "tests_toy.py").write_text(Path(TOY).read_text())
    (tmp_path / "numpy_task.py").write_text(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{NUMPY}")
    succeed(launch.python("train.py", str(tmp_path / "numpy_task.py"), "epochs=1", f"save_dir={tmp_path / 'run'}"))
    assert load(tmp_path / "run")["progress"]["best"] > 0


def test_amp_may_change_and_a_new_horizon_is_said(launch, finished):
    done = succeed(launch.python("train.py", TOY, "epochs=2", "amp=fp16", f"save_dir={finished}"))
    assert "the schedule now spans 12 steps instead of 6; schedule.horizon=6 keeps it as it was" in done.out
    assert load(finished)["scaler"]["scale"] > 0


def damaged(kind, data):
    return {"empty": b"", "text": b"hello", "truncated": data[: len(data) // 2], "zeros": bytes(len(data))}[kind]


@pytest.mark.parametrize("kind", ["empty", "text", "truncated", "zeros"])
def test_a_damaged_checkpoint_is_one_line(launch, finished, kind):
    path = finished / "last.pt"
    path.write_bytes(damaged(kind, path.read_bytes()))
    done = launch.python("train.py", TOY, "epochs=2", f"save_dir={finished}")
    assert done.code == 3 and len(done.err.splitlines()) == 1 and str(path) in done.errors[0], done.err


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.marker),)


def test_nothing_hidden_in_a_checkpoint_runs(launch, finished, tmp_path):
    state = load(finished)
    torch.save(state | {"extra": Bomb(tmp_path / "pwned")}, finished / "last.pt")
    done = launch.python("train.py", TOY, "epochs=2", f"save_dir={finished}")
    assert done.code == 3 and not (tmp_path / "pwned").exists() and "weights_only" not in done.err


def test_a_full_disk_keeps_the_older_checkpoint(launch, finished):
    """A file size limit stands in for the disk: the write fails in the middle, with torch's error about positions."""
    before = (finished / "last.pt").read_bytes()
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000)); "
        "import train; sys.exit(train.main(sys.argv[1:]))"
    )
    done = launch.python("-c", limited, TOY, "epochs=2", f"save_dir={finished}")
    assert done.code == 3 and "the checkpoint could not be written" in done.errors[0], done.err
    assert (finished / "last.pt").read_bytes() == before
    assert not list(finished.glob(".*")), "no temporary file is left"


def test_a_checkpoint_is_replaced_never_written_into(tmp_path):
    """Whoever has the old file open, here through a second name, keeps the old bytes; so would a crash."""
    from engine import checkpoint

    path, second_name = tmp_path / "last.pt", tmp_path / "second_name"
    checkpoint.write({"step": 1}, path)
    second_name.hardlink_to(path)
    checkpoint.write({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 2}
    assert torch.load(second_name, weights_only=True) == {"step": 1}
    assert {p.name for p in tmp_path.iterdir()} == {"last.pt", "second_name"}
