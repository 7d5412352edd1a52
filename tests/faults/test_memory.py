"""Memory that runs out: which batch would fit, and `oom=shrink`, which continues with it. It really does: torch asks
for more than any machine has, wherever a pass has more samples than `fault.fits`."""

import json
import sys
import time

import pytest
import torch
from conftest import FAULTY, ROOT, by_hand, free_port, launching, succeed
from runs import weights

from engine import launch
from plugins.resilience import oom
from plugins.resilience.signals import StopRequest

SO_MANY = ["fault.kind=memory for so many", "fault.times=1000000", "save_every=2", "model.double=true"]
SO_MANY += ["ddp.timeout_s=4"]  # a rank that waits for one that failed looks up sooner


def words(folder, *more):
    return [FAULTY, *SO_MANY, f"save_dir={folder}", *more]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The weights of 2 processes with memory for everything."""
    run = tmp_path_factory.mktemp("straight")
    with launching() as launch:
        succeed(launch.launcher(2, *words(run)))
    return weights(run)


def assert_the_same(run, straight):
    torch.testing.assert_close(weights(run), straight, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_all_ranks_continue_with_a_batch_that_fits(launch, tmp_path, straight):
    """In the middle of the run, and twice: 12 samples, then 6, then 4 a pass. The other rank waits in a sum."""
    run = tmp_path / "run"
    done = succeed(launch.launcher(2, *words(run, "oom=shrink", "fault.step=4", "fault.fits=5")))
    assert not done.errors and done.err.count("warning: out of memory, ") == 2, done.err
    assert "out of memory, 12 samples a forward pass: " in done.err and "memory, 6 samples" in done.err
    assert "in misbehave, rank 1, forward at step " in done.err
    assert "all processes start again with global_batch=24 batch_size=6, from the last checkpoint" in done.err
    assert "Started again with global_batch=24 batch_size=6" in done.out and f"Resuming {run}/" in done.out
    assert "4 per process x 2 processes x 3 accumulation = 24" in done.out
    assert_the_same(run, straight)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [0, 1])
def test_without_torchrun(launch, tmp_path, straight, fails):
    """The store is in rank 0, which starts again, too: before the other, or after it."""
    run, port = tmp_path / "run", free_port()
    given = words(run, "oom=shrink", "fault.fits=6", "fault.step=3", f"fault.rank={fails}")
    ranks = [launch.start(sys.executable, "train.py", *given, **by_hand(rank, port)) for rank in (0, 1)]
    for rank in ranks:
        succeed(rank.wait())
    assert_the_same(run, straight)


@pytest.mark.slow
def test_a_single_process(launch, tmp_path, straight):
    """It has not saved anything yet, and nobody has named its folder."""
    run = [FAULTY, *SO_MANY, "oom=shrink", "fault.rank=0", "fault.fits=11", "fault.step=1", "global_batch=24"]
    done = succeed(launch.python(str(ROOT / "train.py"), *run, cwd=tmp_path))
    assert "Started again with global_batch=24 batch_size=8 gradient_accumulation_steps=0 save_dir=" in done.out
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert_the_same(folder, straight)


@pytest.mark.slow
def test_the_validation_shrinks_its_own_batch(launch, tmp_path, straight):
    """And nothing that was trained before it is lost."""
    so_many = ["fault.kind=memory for so many in validation", "fault.rank=0", "fault.fits=6", "fault.times=1000"]
    more = ["oom=shrink", "eval_batch_size=8", "save_every=100", *SO_MANY[3:], f"save_dir={tmp_path / 'run'}"]
    done = succeed(launch.launcher(2, FAULTY, *so_many, *more))
    assert "Started again with eval_batch_size=4 save_dir=" in done.out and "step_3.pt: step 3," in done.out
    assert_the_same(tmp_path / "run", straight)


@pytest.mark.slow
def test_one_sample_that_does_not_fit_is_the_end(launch, tmp_path):
    more = ["oom=shrink", "fault.rank=0", "fault.fits=0", "batch_size=2"]
    done = launch.python("train.py", *words(tmp_path / "run", *more))
    assert done.code == 1 and len(done.errors) == 1 and "no smaller batch takes the same steps" in done.errors[0]


@pytest.mark.parametrize(("times", "over"), [(0, False), (1, True)])
def test_a_restart_does_not_lengthen_a_time_limit(monkeypatch, times, over):
    """It counts from the first start: whoever gave the limit, such as Slurm, ends the run at that time."""
    monkeypatch.setenv(launch.RESTART, json.dumps({"times": times, "began": time.monotonic() - 7200}))
    stop, deadline = StopRequest(3600), time.monotonic() + 10
    while over and not stop.reason and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stop.reason == ("max_time_s is over" if over else "")


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("x"), MemoryError(), RuntimeError("... can't allocate memory: y")]
)
def test_what_running_out_looks_like(error):
    assert oom.ran_out(error) and not oom.ran_out(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
