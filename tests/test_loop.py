"""The loop of an epoch, in this process: what is known of a step, and when; what a skipped step leaves as it was."""

import pytest
import torch
from conftest import FAULTY

import tasks
import train
from engine import config, loop, status
from engine.dist import World


@pytest.fixture
def steps(monkeypatch):
    """Make a job of six steps an epoch and its steps; what `prepare` sets for a whole process is put back."""
    monkeypatch.setattr(status, "current", status.Status())

    def begin(*words):
        cfg = config.parse(
            [FAULTY, "amp=off", "allocator=system", "dataset.samples=72", "fault.rank=0", *words], tasks.load
        ).cfg
        prepared = train.prepare(cfg, World(0, 0, 1, torch.device("cpu")))
        prepared.train_loader.set_epoch(0)
        return prepared.job, loop.train_epoch(prepared.job, prepared.train_loader)

    return begin


class Event:
    """torch.cuda's, that says when somebody waits for it."""

    waited = 0

    def record(self):
        pass

    def synchronize(self):
        Event.waited += 1


@pytest.mark.parametrize(
    ("words", "late"),
    [
        (["epochs=2"], [1, 2, 3, 4, 5]),  # the sixth is known at once: the epoch ends
        (["steps=4"], [1, 2, 3]),
        (["epochs=1", "eval_every=4"], [1, 2, 3, 5]),
        (["epochs=1", "save_every=2"], [1, 3, 5]),
    ],
)
def test_on_a_gpu_news_come_a_step_late_but_before_any_pause(monkeypatch, steps, words, late):
    """So that the last steps of a run are read, too, and a checkpoint knows of all before it."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    job, outcomes = steps(*words, "fault.kind=nan loss", "fault.step=1", "fault.times=99", "max_skipped_steps=0")
    job.mailbox.on_gpu = True
    known = 0
    for outcome in outcomes:
        known += len(outcome.skipped)
        assert known == job.progress.skipped_in_a_row == job.progress.step - (job.progress.step in late)
        if job.finished:
            break
    assert known == job.progress.step and not job.mailbox.posted and Event.waited >= known


def test_on_a_gpu_a_run_that_is_asked_to_stop_knows_of_its_last_step(monkeypatch, steps):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    job, outcomes = steps("fault.kind=nan loss", "fault.step=1", "fault.times=99")
    job.mailbox.on_gpu = True
    assert not next(outcomes).skipped
    job.stop.ask("SIGTERM")
    assert not next(outcomes).stopping, "its vote is under way"
    last = next(outcomes)
    assert last.stopping and [skipped.step for skipped in last.skipped] == [2, 3]


def test_a_skipped_step_leaves_everything_as_it_was(steps):
    """Weights, BatchNorm's statistics, moments and their counters, the average and its counter."""
    job, outcomes = steps("fault.kind=nan loss", "fault.step=3", "optim.ema_decay=0.5", "epochs=1")
    parts = (job.model, job.ema, job.optimizer)
    before = [[] for _ in parts]
    for outcome in outcomes:
        now = [[value.clone() for value in tensors(part.state_dict())] for part in parts]
        same = [len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(now, before, strict=True)]
        assert same == [job.progress.step == 3] * 3 and bool(outcome.skipped) is (job.progress.step == 3)
        before = now
    assert job.progress.step == 6


def tensors(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    for value in tree.values() if isinstance(tree, dict) else ():
        yield from tensors(value)
