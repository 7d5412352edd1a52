"""The order, the shards and the position, as pure functions."""

import contextlib
import functools
import gc
import itertools
import multiprocessing
import operator
import os
import random
import re
import socket
import threading
import weakref
from multiprocessing import resource_sharer
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import succeed
from loading import LABELS, Rows, epoch_of, loaders_of, make_plan, steps_of, world
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from data_loader import (
    EvalSampler,
    TrainSampler,
    create_data_loaders,
)
from engine import config, contract, errors, hooks, plan
from engine.comm.digests import same_bits
from engine.comm.world import World
from engine.contract import LockstepError
from engine.data.ahead import ahead, fetching
from engine.data.batches import tensors
from engine.data.fingerprint import fingerprint
from engine.data.order import balanced_order
from engine.data.processes import _begin_process
from engine.data.splits import load_datasets
from engine.launch import processes_sharing
from engine.phases import phase
from plugins.performance import cached_data
from plugins.performance.cached_data import InMemoryDataset


@pytest.mark.parametrize(("num_samples", "labels"), [(1, None), (5, None), (12, None), (61, None), (61, LABELS)])
def test_every_cut_gives_the_same_steps_from_any_position(num_samples, labels):
    straight = steps_of(epoch_of(make_plan(num_samples, 1, batch=12), labels=labels))
    everything = [pair for step in straight for pair in step]
    assert [place for place, _ in everything] == [*range(num_samples)]
    assert labels is not None or sorted(index for _, index in everything) == [*range(num_samples)]
    for size, batch, accumulation in ((2, 6, 1), (2, 3, 2), (3, 4, 1), (3, 2, 2), (4, 3, 1), (12, 1, 1), (1, 1, 12)):
        cut = make_plan(num_samples, size, batch=batch, accumulation=accumulation)
        for done in (0, 1, 3):
            rest = steps_of(epoch_of(cut, position=12 * done, labels=labels)) if 12 * done < num_samples else []
            assert rest == straight[done:], (size, batch, accumulation, done)


def test_drop_last_drops_whole_steps_only():
    the_plan = make_plan(61, 2, batch=6, drop_last=True)
    assert (the_plan.steps_per_epoch, the_plan.dropped) == (5, 1)
    assert [len(step) for step in steps_of(epoch_of(the_plan))] == [12] * 5


def test_the_devices_of_one_process_have_each_a_batch():
    cfg = config.Config(batch_size=3, multi_gpu="dp", gpu_ids=[0, 1])
    the_plan = plan.make_plan(cfg, World(0, 0, 1, torch.device("cuda", 0)), 61)
    assert the_plan.devices == (0, 1)
    assert (the_plan.micro_batch, the_plan.global_batch, the_plan.steps_per_epoch) == (6, 6, 11)


def test_lengths_in_steps_overrule_those_in_epochs():
    schedule = config.Schedule(warmup_steps=4, warmup_epochs=2.0)
    the_plan = plan.make_plan(config.Config(batch_size=12, epochs=5, steps=8, schedule=schedule), world(), 61)
    assert (the_plan.total_steps, the_plan.epochs, the_plan.warmup_steps) == (8, 2, 4)


def test_the_order_changes_with_epoch_and_seed_and_with_nothing_else():
    the_plan = make_plan(61, 1)
    base = steps_of(epoch_of(the_plan))
    assert base == steps_of(epoch_of(the_plan))
    assert base != steps_of(epoch_of(the_plan, epoch=1))
    assert base != steps_of(epoch_of(the_plan, seed=6))
    # (seed, epoch) and not seed + epoch: torch's own sampler gives run 5's second epoch to run 6 as its first.
    assert steps_of(epoch_of(the_plan, epoch=1, seed=5)) != steps_of(epoch_of(the_plan, epoch=0, seed=6))


def test_balanced_order_is_even_and_deals_each_class_as_a_deck():
    labels = np.repeat([0, 1, 2], [80, 15, 5])
    order = balanced_order(labels, np.random.default_rng(0))
    assert np.bincount(labels[order]).tolist() == [34, 33, 33] or max(np.bincount(labels[order])) == 34
    common = order[labels[order] == 0]
    assert len(set(common)) == len(common), "a common class never repeats"
    rare = np.bincount(order[labels[order] == 2])[95:]
    assert rare.max() - rare.min() <= 1, "a rare class repeats evenly"
    epochs = [balanced_order(labels, np.random.default_rng(epoch)) for epoch in range(20)]
    assert len(np.unique(epochs)) == 100, "in some epoch each sample comes"


@pytest.mark.parametrize("num_samples", [1, 2, 7, 61, 196])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_evaluation_shards_are_exact(num_samples, size):
    def asked(rank, size):
        return [each.indices for each in EvalSampler(range(num_samples), world(rank, size), 8)]

    alone = asked(0, 1)
    assert functools.reduce(operator.iadd, alone, []) == list(range(num_samples))
    shards = [asked(rank, size) for rank in range(size)]
    assert shards == [alone[rank::size] for rank in range(size)], "the same batches, dealt out"
    assert [len(EvalSampler(range(num_samples), world(rank, size), 8)) for rank in range(size)] == [*map(len, shards)]


class Table:
    """With labels and a gather."""

    labels = np.arange(10) % 2

    def __len__(self):
        return 10

    def __getitems__(self, indices):
        return {"x": torch.tensor(indices) * 10, "missing": torch.full((len(indices), 2), torch.nan)}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Table, Rows])
def test_batches_hold_what_augmentation_and_blame_need(monkeypatch, dataset, workers):
    cfg = SimpleNamespace(
        **vars(config.Config(num_workers=workers, batch_size=4, seed=9)), dataset=SimpleNamespace(root="")
    )
    the_plan = make_plan(10, 1, batch=4)
    loader, val = create_data_loaders(cfg, world(), the_plan, dataset(), dataset())
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        batches = [only for (only,) in loader]
        assert len(batches) == len(loader) == 3
        for batch, micro in batches:
            assert batch["x"].tolist() == [10 * i for i in micro.indices] == (10 * batch["lockstep"].index).tolist()
            given = batch["lockstep"]
            assert given.seed.tolist() == contract.sample_seeds(9, epoch, given.position).tolist()
    assert torch.cat([batch["x"] for batch in val]).tolist() == [10 * i for i in range(10)]
    for name in ("index", "position"):
        assert torch.cat([getattr(batch["lockstep"], name) for batch in val]).tolist() == [*range(10)]
    seeds = torch.cat([batch["lockstep"].seed for batch in val])
    assert torch.equal(seeds, contract.sample_seeds(0, 0, torch.arange(10))), "of the sample alone"
    monkeypatch.setattr(dataset, "weights", [*range(10)], raising=False)  # a list will do
    loader, _ = create_data_loaders(cfg, world(), make_plan(10, 1, batch=2, accumulation=2), dataset(), dataset())
    steps = [list(passes) for passes in loader]
    assert len(loader) == 3 and [len(step) for step in steps] == [2, 2, 1]
    for step in steps:
        mean = np.mean([index for _, micro in step for index in micro.indices])
        assert [batch["lockstep"].mean_weight.tolist() for batch, _ in step] == [[mean] * 2] * len(step)


def lend_a_pipe(parent, places, done):
    """A loader process that waits for its batch to be fetched, here the end of a pipe."""
    _begin_process(parent, 0)
    places.put(resource_sharer.DupFd(os.pipe()[0]))
    done.wait()


def test_a_reader_that_disconnects_leaves_no_traceback(capfd):
    """If one loader process is killed, its rank ends while another one may be about to send it a batch."""
    processes = multiprocessing.get_context("fork")
    places, done = processes.SimpleQueue(), processes.Event()
    worker = processes.Process(target=lend_a_pipe, args=(os.getpid(), places, done))
    worker.start()
    place = places.get()
    with socket.socket(socket.AF_UNIX) as reader:
        reader.connect(place._id[0])
    os.close(place.detach())  # the next reader: the first one has been dealt with
    done.set()
    worker.join()
    assert worker.exitcode == 0 and capfd.readouterr().err == ""


class Decoder:
    """A file that a decoder has open: closed in another process, it waits for threads that are not there."""

    def __init__(self, closed_elsewhere):
        self.itself, self.owner, self.closed_elsewhere = self, os.getpid(), closed_elsewhere

    def __del__(self):
        if os.getpid() != self.owner:
            self.closed_elsewhere.touch()


class Collecting(Rows):
    held = None

    def __getitem__(self, i):
        self.held = None  # a cycle: garbage from now on
        gc.collect()
        return super().__getitem__(i)


def test_garbage_of_the_rank_is_not_collected_in_a_loader_process(tmp_path):
    data = Collecting()
    data.held = Decoder(tmp_path / "closed")
    loader, _ = loaders_of(data, workers=1)
    gc.collect()
    gc.disable()  # so that the decoder is still there when the processes start
    try:
        garbage = weakref.ref(Decoder(tmp_path / "closed"))
        passes = len([*loader.passes()])
        collected = garbage() is None
    finally:
        gc.enable()
    del loader  # its process ends
    gc.collect()
    assert passes == 3 and collected, "by the rank, before"
    assert data.held is not None
    assert not (tmp_path / "closed").exists()


@pytest.mark.parametrize(
    ("words", "val", "says"),
    [
        ({"sampler": "balanced"}, Rows(), "sampler=balanced, but .* have no labels"),
        ({"patience": 3}, None, "patience=3 without validation data"),
    ],
)
def test_data_that_a_setting_cannot_use_are_refused(words, val, says):
    with pytest.raises(LockstepError, match=f"^{says}"):
        create_data_loaders(config.Config(**words), world(), make_plan(10, 1), Rows(), val)


@pytest.mark.parametrize("split", ["", "val", "any"])
def test_an_empty_validation_set_is_refused(split):
    task = SimpleNamespace(datasets=lambda: (Rows(), []), test_dataset=lambda: None)
    with pytest.raises(LockstepError, match=r"^the validation set is empty"):
        load_datasets(task, split, None)


def test_uniform_is_uniform_and_depends_on_nothing_but_the_seed():
    seeds = contract.sample_seeds(0, 0, torch.arange(20_000))
    draws = contract.uniform(seeds, 5)
    assert draws.shape == (20_000, 5) and draws.min() >= 0 and draws.max() < 1
    # The standard error of a mean of 20,000 uniform numbers is 0.002.
    assert (draws.mean(0) - 0.5).abs().max() < 0.01 and (draws.var(0) - 1 / 12).abs().max() < 0.005
    assert torch.corrcoef(draws.T).fill_diagonal_(0).abs().max() < 0.04
    assert torch.equal(contract.uniform(seeds[[3, 77]], 5), draws[[3, 77]])
    assert not torch.equal(contract.uniform(contract.sample_seeds(0, 1, torch.arange(20_000)), 5), draws)
    assert len(set(seeds.tolist())) == 20_000


@pytest.mark.parametrize(
    ("global_batch", "size", "passes", "expected"),
    [(96, 1, 0, (48, 2)), (96, 2, 0, (48, 1)), (96, 3, 0, (32, 1)), (96, 4, 4, (6, 4)), (12, 12, 0, (1, 1)),
     (97, 1, 0, (1, 97)), (64, 1, 0, (64, 1))],
)  # fmt: skip
def test_global_batch_is_kept_by_accumulation(global_batch, size, passes, expected):
    the_plan = make_plan(1000, size, batch=64, global_batch=global_batch, accumulation=passes)
    assert (the_plan.micro_batch, the_plan.accumulation) == expected
    assert the_plan.micro_batch * the_plan.accumulation * size == global_batch


def test_a_global_batch_that_cannot_be_kept_is_refused_with_what_can():
    with pytest.raises(LockstepError, match=r"does not divide by 5 processes.*start .*4.*6 of them"):
        make_plan(1000, 5, global_batch=12)
    with pytest.raises(LockstepError, match="0 steps per epoch"):
        make_plan(0, 1)
    with pytest.raises(LockstepError, match="0 steps per epoch"):
        make_plan(5, 2, drop_last=True)


class Drawn(Rows):
    """Breaks the rule: draws at random by itself."""

    def __getitem__(self, i):
        return {"x": torch.randn(3)}


class Flipped(Rows):
    """As augmentations are written: half of the time nothing happens."""

    def __init__(self, flips):
        self.flips = flips

    def __getitem__(self, i):
        x = torch.tensor([i, 10.0])
        return {"x": x.flip(0) if self.flips() else x, "y": torch.tensor(1)}


STREAM = random.Random(0)
FLIPS = {
    "torch": lambda: torch.rand(()) < 0.5,
    "numpy": lambda: np.random.rand() < 0.5,
    "random": lambda: random.random() < 0.5,
    "of its own": lambda: STREAM.random() < 0.5,
}


@pytest.mark.parametrize("source", FLIPS)
def test_a_dataset_that_draws_at_random_is_refused(source):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    drawn, fixed = Flipped(FLIPS[source]), Flipped(lambda: True)
    says = r"^'x' of sample \d changes between two fetches \(Flipped\): draw from the seed that __getitem__"
    for pair in ((drawn, fixed), (fixed, Drawn())):
        with pytest.raises(LockstepError, match=says if pair[0] is drawn else r"\(Drawn\)"):
            fingerprint(*pair)
    assert torch.equal(torch.get_rng_state(), before[0]), "what a training draws is what it was"
    assert random.getstate() == before[1] and all(map(np.array_equal, np.random.get_state(), before[2]))


def test_samples_drawn_at_random_may_be_trained_on_all_the_same(capsys):
    """And a run can be resumed: the fingerprint holds what does not change."""
    errors.set_up(main=True)
    digests = [fingerprint(Drawn(), Flipped(lambda: True), random_samples="warn") for _ in range(2)]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and said[0].startswith("warning: 'x' of sample 0 changes between two fetches (Dr")
    assert digests[0] == digests[1] != fingerprint(Drawn(), Flipped(lambda: False), random_samples="warn")


def test_fetching_is_in_the_phase_of_data_loading(monkeypatch):
    """Of each pass, not only of the first of a step: the watchdog and the log's data wait go by that."""
    seen = []
    get = Table.__getitems__
    monkeypatch.setattr(Table, "__getitems__", lambda self, some: seen.append(phase.name) or get(self, some))
    loader, _ = create_data_loaders(config.Config(), world(), make_plan(10, 1, batch=2, accumulation=2), Table(), None)
    seen.clear()
    for passes in loader:
        assert phase.name == "data loading"
        for _ in passes:
            phase("forward")
    assert seen == ["data loading"] * 5


def test_held_data_give_the_same_batches(monkeypatch, capsys):
    errors.set_up(main=True)
    fetched = []
    monkeypatch.setattr(Table, "__getitems__", _counting(Table.__getitems__, fetched))
    seen = {}
    for cache in ("none", "host", "device", "auto"):
        cfg = config.Config(batch_size=3, num_workers=2 if cache == "host" else 0, cache=cache)
        train, val = create_data_loaders(cfg, world(), make_plan(10, 1), Table(), Table())
        assert train.loader is None, "held data need no loader processes"
        fetched.clear()
        train.set_epoch(1, consumed=3)
        batches = [*(batch for batch, _ in train.passes()), *val]
        assert bool(fetched) is (cache in ("none", "auto")), "auto is for GPUs"
        seen[cache] = batches
    for cache, batches in seen.items():
        for ours, theirs in zip(batches, seen["none"], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(map(same_bits, tensors(ours), tensors(theirs))), cache
    assert capsys.readouterr().out.count("Holding 0 MB of data on cpu") == 2


class Windows:
    """Rows of 11 numbers, so that hardly a batch begins where memory would, and how much of a loss each has."""

    rows = torch.arange(61 * 11.0).view(61, 11)
    weights = np.arange(61) + 1

    def __len__(self):
        return 61

    def __getitems__(self, indices):
        return {"x": self.rows[indices], "y": torch.tensor(indices)}


class Prepares:
    """A task of which the loader knows one method, and that it has no turns."""

    turns = {}


class Noisy(Prepares):
    def prepare(self, batch):
        seed = batch["lockstep"].seed
        self.most = max(getattr(self, "most", 0), len(seed))
        return batch | {"x": batch["x"] + contract.uniform(seed, 11), "sign": seed.sign()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_passes_that_are_prepared_together_have_the_same_bits(monkeypatch, size):
    """And memory that is aligned as their own would be, which kernels go by; from the middle of such a group, too."""
    the_plan = make_plan(61, size, batch=2, accumulation=2)
    seen = {}
    for cache, together in (("none", 0), ("host", 0), ("host", 3), ("host", 16)):
        monkeypatch.setitem(cached_data.AT_ONCE, "cpu", together * 2 * (11 * 4 + 8))
        for rank, consumed in itertools.product(range(size), (0, 3 * the_plan.global_batch)):
            cfg, task = config.Config(batch_size=2, cache=cache, seed=9), Noisy()
            loader, _ = create_data_loaders(cfg, world(rank, size), the_plan, Windows(), None, task)
            loader.set_epoch(1, consumed)
            passes = [*loader.passes()]
            assert (task.most > 4) == (together > 1)
            seen[cache, together, rank, consumed] = passes
            own = [value for batch, _ in passes for value in tensors(contract.inputs(batch))]
            assert all(value.data_ptr() % 64 == 0 for value in own)
    for (_, _, rank, consumed), passes in seen.items():
        expected = seen["none", 0, rank, consumed]
        assert [micro for _, micro in passes] == [micro for _, micro in expected]
        for (batch, micro), (other, _) in zip(passes, expected, strict=True):
            given = batch["lockstep"]
            assert given.index.tolist() == micro.indices == batch["y"].tolist()
            assert all(map(torch.equal, tensors(batch), tensors(other)))


class Ramped(Noisy):
    """Its `prepare` reads the number of the step."""

    def prepare(self, batch):
        info = batch["lockstep"]
        return super().prepare(batch) | {"time": info.index * 0 + info.step + 100 * info.epoch + info.progress}


@pytest.mark.parametrize("cache", ["none", "host"])
@pytest.mark.parametrize("task", [Noisy, Ramped, None])
def test_each_pass_has_the_number_of_its_step(monkeypatch, cache, task):
    """In groups of passes that are prepared at once, too; a `prepare` that reads the number gets no such group."""
    monkeypatch.setitem(cached_data.AT_ONCE, "cpu", 16 * 2 * (11 * 4 + 8))
    the_plan = make_plan(61, 2, batch=2, accumulation=2)
    cfg, own = config.Config(batch_size=2, cache=cache, seed=9), task and task()
    loader, _ = create_data_loaders(cfg, world(1, 2), the_plan, Windows(), None, own)
    assert loader.together is (task is None or (task is Noisy and cache == "host"))
    loader.set_epoch(1, 3 * the_plan.global_batch, 70)
    numbers = []
    for step, passes in enumerate(loader, 70):
        for batch, _ in passes:
            info = batch["lockstep"]
            assert (info.step, info.epoch, info.progress) == (step, 1, step / the_plan.total_steps)
            assert info.clock.tolist() == [step, 1, step / the_plan.total_steps]
            if task is Ramped:
                assert {*batch["time"].tolist()} == {torch.tensor(step + 100 + info.progress).item()}
            numbers.append(step)
    assert numbers == sorted([*range(70, 70 + the_plan.steps_per_epoch - 3)] * 2)[: len(numbers)] and len(numbers) > 7


def test_a_prepare_that_reads_the_number_only_sometimes(monkeypatch):
    """No group of passes gets the number of another step."""

    class Sometimes(Noisy):
        def prepare(self, batch):
            if len(batch["x"]) > 4:
                assert batch["lockstep"].clock.sum() >= 0
            return super().prepare(batch)

    monkeypatch.setitem(cached_data.AT_ONCE, "cpu", 16 * 2 * (11 * 4 + 8))
    the_plan, cfg = make_plan(61, 1, batch=2), config.Config(batch_size=2, cache="host")
    loader, _ = create_data_loaders(cfg, world(0, 1), the_plan, Windows(), None, Sometimes())
    with pytest.raises(LockstepError, match="step in some of its calls only"):
        list(loader.passes())


@pytest.mark.parametrize("size", [1, 3])
def test_the_mean_weight_of_a_step_is_that_of_its_own_samples(size):
    """Of those that all ranks have in it, and not of those that stand at the same places of the dataset."""
    the_plan, steps = make_plan(61, size, batch=2, accumulation=2), {}
    for rank in range(size):
        sampler = TrainSampler(Windows(), the_plan, rank, seed=5)
        for micro in sampler:
            samples, means = steps.setdefault(micro.consumed, (set(), set()))
            samples.update([] if micro.empty else micro.indices)
            means.add(micro.mean_weight)
    assert len(steps) == the_plan.steps_per_epoch
    for samples, means in steps.values():
        assert means == {sum(index + 1 for index in samples) / len(samples)}


@pytest.mark.parametrize("odd", [{"x": torch.zeros(())}, {"names": ["a", "b"]}, {"x": torch.zeros(1, 3)}])
def test_what_cannot_be_cut_into_passes_is_prepared_pass_by_pass(odd):
    task = type("Odd", (Prepares,), {"prepare": lambda self, batch: batch | odd})()
    cfg = config.Config(batch_size=2, cache="host")
    loader, _ = create_data_loaders(cfg, world(), make_plan(61, 1, batch=2), Windows(), None, task)
    for batch, micro in loader.passes():
        assert batch["lockstep"].index.tolist() == micro.indices
        assert all(batch[name] is value for name, value in odd.items())


class Product(Prepares):
    """As exact as a product of matrices: it has other bits for other numbers of rows."""

    def prepare(self, batch):
        weights = torch.rand(11, 40, generator=torch.Generator().manual_seed(0)) / 3
        return batch | {"x": (batch["x"] / 7) @ weights @ weights.T}


@pytest.mark.parametrize("workers", [0, 4])
def test_held_data_are_prepared_pass_by_pass_where_that_has_other_bits(workers):
    """And with virtual workers always: how many passes a process runs is not to matter."""
    passes = {}
    for cache in ("none", "host"):
        cfg = config.Config(batch_size=3, cache=cache, virtual_workers=workers)
        loader, _ = create_data_loaders(cfg, world(), plan.make_plan(cfg, world(), 61), Windows(), None, Product())
        passes[cache] = [batch["x"].clone() for batch, _ in loader.passes()]
        together = create_data_loaders(cfg, world(), loader.sampler.plan, Windows(), None, Noisy())[0].together
        assert together is (cache == "host" and not workers)
    assert all(map(torch.equal, *passes.values()))


PREPARE = "the task's `prepare`"
OWN = torch.Generator()


def seeded():
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    return float(torch.rand(())) + random.random() + np.random.rand()


DRAWS = {  # what a prepare adds, and why it is refused
    "torch": (lambda: torch.rand(()), "'x' of the same samples changes between two calls"),
    "its own": (lambda: torch.rand((), generator=OWN), "'x' of the same samples changes between two calls"),
    "NumPy": (np.random.rand, "'x' of the same samples changes between two calls"),
    "torch, seldom": (lambda: torch.rand(()) < 1e-12, "it draws from torch's generator"),
    "random, seldom": (lambda: random.random() < 1e-12, "it draws from random's generator"),
    "NumPy, seldom": (lambda: np.random.rand() < 1e-12, "it draws from NumPy's generator"),
    "seeded": (seeded, ""),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("cache", ["none", "host"])
def test_a_prepare_that_draws_from_a_generator_is_refused(capsys, draw, cache):
    drawn, why = DRAWS[draw]
    task = type("Draws", (Prepares,), {"prepare": lambda self, batch: batch | {"x": batch["x"] + drawn()}})()
    plan, before = make_plan(61, 1, batch=2), torch.get_rng_state()
    errors.set_up(main=True)
    for random_samples in ("warn", "stop"):
        cfg = config.Config(batch_size=2, cache=cache, random_samples=random_samples)
        refused = pytest.raises(
            LockstepError, match="^" + re.escape(f"{why} ({PREPARE}): draw from batch['lockstep'].s")
        )
        with refused if why and random_samples == "stop" else contextlib.nullcontext():
            create_data_loaders(cfg, world(), plan, Windows(), None, task)
        warned = f"warning: {why} ({PREPARE})" in capsys.readouterr().out
        assert warned == bool(why and random_samples == "warn") and torch.equal(before, torch.get_rng_state())


class Crossings(TorchFunctionMode):
    """Note operations on tensors of two devices, and tensors made of the host's numbers."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        devices = {value.device.type for value in tree_leaves((args, kwargs, out)) if isinstance(value, torch.Tensor)}
        if len(devices) > 1 or func in (torch.tensor, torch.as_tensor):
            self.seen.append(func)
        return out


def test_held_data_are_indexed_where_they_lie(monkeypatch):
    """Within an epoch nothing goes from the host to the device, which has no memory here: it stands in for a GPU."""
    monkeypatch.setitem(cached_data.AT_ONCE, "meta", 3 * 2 * (11 * 4 + 8))
    monkeypatch.delattr(InMemoryDataset, "__getitems__")  # which takes a list
    monkeypatch.setattr(hooks.prepare_checks, "functions", [lambda loader, _: setattr(loader, "together", True)])
    there = World(0, 0, 1, torch.device("meta"))
    cfg = config.Config(batch_size=2, cache="device", eval_batch_size=8)
    train, val = create_data_loaders(cfg, there, make_plan(61, 1, batch=2), Windows(), Windows(), Noisy())
    for batches, count in ((train.passes(), 31), (iter(val), 8)):
        next(batches)  # the epoch's order goes there
        with (crossings := Crossings()):
            assert len([*batches]) == count - 1
        assert not crossings.seen
    with crossings:
        torch.tensor([3, 4], device="meta")
        torch.zeros(2).to("meta")
    assert len(crossings.seen) == 2


def _counting(function, calls):
    def counted(self, indices):
        calls.append(indices)
        return function(self, indices)

    return counted


class Padded(Table):
    """To the longest of its batch."""

    def __getitems__(self, indices):
        return {"x": torch.zeros(len(indices), max(indices) + 1)}


class Changing(Table):
    """Seen by no look at sixteen samples."""

    def __len__(self):
        return 6000

    def __getitems__(self, indices):
        return {"x": torch.zeros(len(indices), 5 if len(indices) < 4096 else 1)}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Drawn, "Drawn gives a sample that changes each time"),
        (Padded, "Padded gives a sample that changes each time, or with the others"),
        (Changing, "'x' of samples 4096 to 5999 has not the shape of the first ones"),
    ],
)
def test_data_that_cannot_be_held_are_refused(data, words):
    cfg = config.Config(batch_size=3, cache="host")
    with pytest.raises(LockstepError, match=words):
        create_data_loaders(cfg, world(), make_plan(10, 1), data(), Rows())


@pytest.fixture
def four_here(monkeypatch):
    """The environment of one of four processes on a machine."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")


def test_data_held_by_every_process_of_a_machine_must_fit_as_often(monkeypatch, four_here):
    cfg = config.Config(batch_size=3, cache="host")
    data = Rows()
    needed = 2 * sum(data[0][name].nbytes for name in data[0]) * len(data)
    monkeypatch.setattr("plugins.performance.cached_data._free_bytes", lambda device: 4 * needed)
    create_data_loaders(cfg, world(size=4), make_plan(10, 4), data, Rows())
    monkeypatch.setattr("plugins.performance.cached_data._free_bytes", lambda device: 4 * needed - 1)
    with pytest.raises(LockstepError, match="in each of 4 process"):
        create_data_loaders(cfg, world(size=4), make_plan(10, 4), data, Rows())
    monkeypatch.delenv("RANK"), monkeypatch.delenv("WORLD_SIZE")
    create_data_loaders(cfg, world(), make_plan(10, 1), data, Rows())


@pytest.mark.parametrize(
    ("gpus", "slurm", "copies"),
    [
        (4, {}, 1),
        (3, {}, 2),
        (1, {}, 4),
        (1, {"SLURM_NTASKS": "4", "SLURM_GPUS_ON_NODE": "4"}, 1),  # --gpus-per-task=1: each sees its own
        (1, {"SLURM_NTASKS": "4", "SLURM_GPUS_ON_NODE": "1"}, 4),
        (1, {"SLURM_NTASKS": "1", "SLURM_GPUS_ON_NODE": "4"}, 4),  # a launcher with CUDA_VISIBLE_DEVICES=0
    ],
)
def test_processes_that_share_a_gpu_share_its_memory(monkeypatch, four_here, gpus, slurm, copies):
    for name in ("SLURM_NTASKS", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert processes_sharing(torch.device("cuda", 0)) == copies


def test_the_next_batch_is_fetched_meanwhile():
    """A GPU gets its batches in order, one ahead, errors where they belong, and no thread stays; all but the copy."""
    begun = [threading.Event() for _ in range(4)]

    def batches():
        for number, event in enumerate(begun):
            event.set()
            if number == 3:
                raise ValueError("the fourth")
            yield number, {"x": torch.tensor([number])}

    coming = ahead(batches(), torch.device("cpu"))
    for number in range(3):
        assert next(coming) == (number, {"x": torch.tensor([number])})
        assert begun[number + 1].wait(30), "the next is begun before it is asked for"
    with pytest.raises(ValueError, match="the fourth"):
        next(coming)
    left = ahead(((number, {"x": torch.tensor([number])}) for number in range(9)), torch.device("cpu"))
    next(left)
    left.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]
    hangs = threading.Event()
    stuck = ahead(((number, hangs.wait(30 * number)) for number in range(2)), torch.device("cpu"))
    next(stuck)
    stuck.close()  # a run that fails does not wait for a fetch that hangs
    hangs.set()


def test_a_dataset_is_told_of_the_next_batch_before_it_gives_this_one(monkeypatch):
    told = []
    monkeypatch.setattr(Table, "prefetch", lambda self, indices: told.append(("next", indices)), raising=False)
    get = Table.__getitems__
    monkeypatch.setattr(Table, "__getitems__", lambda self, some: told.append(("this", some)) or get(self, some))
    cfg = config.Config(batch_size=3, eval_batch_size=4)
    train, val = create_data_loaders(cfg, world(), make_plan(10, 1), Table(), Table())
    for loader in (train, val):
        train.set_epoch(1, consumed=3)
        told.clear()
        assert list(loader.passes() if loader is train else loader)
        batches = [asked.indices for asked in loader.sampler]
        expected = [("next", batches[0])]
        for this, following in itertools.zip_longest(batches, batches[1:]):
            if following is not None:
                expected.append(("next", following))
            expected.append(("this", this))
        assert told == expected


def test_a_dataset_that_fails_to_look_ahead_is_named_with_those_samples(monkeypatch):
    def prefetch(self, indices):
        if 7 in indices:
            raise OSError("no such disk")

    monkeypatch.setattr(Table, "prefetch", prefetch, raising=False)
    _, val = create_data_loaders(config.Config(eval_batch_size=3), world(), make_plan(10, 1), Table(), Table())
    batches = iter(val)
    next(batches)
    with pytest.raises(
        LockstepError, match=r"^`prefetch` of samples 6, 7, 8 has failed: OSError: no such disk \(Table\)"
    ):
        next(batches)


def test_two_loaders_never_fetch_at_once():
    inside, most = [], []

    def batches():
        for number in range(50):
            inside.append(number)
            most.append(len(inside))
            torch.ones(300, 300).sum()
            inside.pop()
            yield number, {"x": torch.tensor([number])}

    for _ in zip(*(ahead(batches(), torch.device("cpu")) for _ in range(3)), strict=True):
        pass
    assert max(most) == 1


def test_no_loader_process_is_forked_while_a_batch_is_fetched(monkeypatch):
    """It would have a copy of whatever lock the fetching thread holds at that moment, locked for ever."""

    class Loader:
        def __iter__(self):
            forked.append(fetching.locked())
            return iter([])

    forked = []
    _, val = create_data_loaders(config.Config(batch_size=3), world(), make_plan(10, 1), Rows(), Rows())
    monkeypatch.setattr(val, "loader", Loader())
    with pytest.raises(LockstepError):
        next(iter(val))  # there is no batch
    assert forked == [True] and not fetching.locked()


@pytest.mark.slow
def test_held_data_train_the_same(launch, tmp_path):
    """Of these ten passes are prepared at once. Three a step: a run that is stopped is in the middle of some."""
    words = ["har", "dataset.stride=512", "model.width=8", "batch_size=8", "virtual_workers=3", "schedule.horizon=6"]
    for cache, parts in {"none": [(1, 6)], "host": [(1, 6)], "device": [(1, 2), (2, 4), (3, 6)]}.items():
        for processes, steps in parts:
            command = ["train.py", *words, f"steps={steps}", f"cache={cache}", f"save_dir={tmp_path / cache}"]
            done = succeed(launch.python(*command) if processes == 1 else launch.torchrun(processes, *command))
            assert (" MB of data held" in done.out) is (cache != "none")
    right, *others = (
        torch.load(tmp_path / cache / "last.pt", weights_only=True)["model"] for cache in ("none", "host", "device")
    )
    assert all(torch.equal(other[name], weight) for other in others for name, weight in right.items())


PREPARES = """
import torch
from tests.tasks import toy

class Task(toy.Task):
    def prepare(self, batch):
        draw = torch.Generator().manual_seed(0)
        weights = torch.rand(8, 40, generator=draw)
        return batch | {"x": batch["x"].float() @ weights @ weights.T / 10}
"""


@pytest.mark.slow
def test_prepared_data_are_the_same_bits_on_any_processes(launch, tmp_path):
    """Held or not, on one, two and four processes that run four virtual workers."""
    (tmp_path / "own.py").write_text(PREPARES)
    words = ["train.py", str(tmp_path / "own.py"), "virtual_workers=4", "batch_size=3", "steps=9", "amp=off"]
    hashes = set()
    for processes, cache in ((1, "none"), (1, "device"), (2, "device"), (4, "device")):
        run = [*words, f"cache={cache}", f"save_dir={tmp_path / f'{processes}{cache}'}"]
        done = succeed(launch.python(*run) if processes == 1 else launch.torchrun(processes, *run))
        hashes.add(done.out.rpartition("sha256 ")[2].split()[0])
    assert len(hashes) == 1
