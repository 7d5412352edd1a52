"""A dataset with an order of its own: an array or a list, or an object that computes its slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from loading import loaded_steps, make_plan, world

from data_loader import TrainSampler, create_data_loaders
from engine import config
from engine.contract import LockstepError


class Own:
    """Ten samples; an epoch has the even ones twice, or the given order."""

    labels = np.zeros(10, np.int64)

    def __init__(self, order: Any = None):
        self.order = order

    def __len__(self):
        return 10

    def __getitems__(self, indices):
        return {"x": torch.tensor(indices)}

    def epoch_order(self, seed, epoch):
        if self.order is not None:
            return self.order
        return np.random.default_rng((seed, epoch)).permutation(np.repeat(np.arange(0, 10, 2), 2))


CUTS = [
    {"processes": 1, "batch_size": 4},
    {"processes": 1, "batch_size": 1, "virtual_workers": 4, "global_batch": 4},
    {"processes": 2, "batch_size": 1, "gradient_accumulation_steps": 2},
    {"processes": 2, "batch_size": 1, "virtual_workers": 4, "global_batch": 4},
]


@pytest.mark.parametrize(
    ("cuts", "more"),
    [(CUTS, {}), (CUTS, {"exclude": ["4"]}), (CUTS, {"cache": "host"}), (CUTS[:1], {"num_workers": 1})],
)
@pytest.mark.parametrize(("epoch", "done"), [(0, 0), (1, 1)])
def test_any_cut_takes_the_order_of_the_dataset(cuts, more, epoch, done):
    order = Own().epoch_order(5, epoch).tolist()
    left_out = [4] if "exclude" in more else []
    truth = {n: [each for each in order[4 * n : 4 * n + 4] if each not in left_out] for n in range(done, 3)}
    for cut in cuts:
        words = {key: value for key, value in cut.items() if key != "processes"} | more
        steps = loaded_steps(Own, "x", cut["processes"], epoch, done, seed=5, **words)
        samples = {n: sorted(sample for _, sample in step) for n, step in steps.items()}
        assert samples == {n: sorted(step) for n, step in truth.items()}, cut
        places = [place for n in range(done, 3) for place, _ in steps[n]]
        assert left_out or places == [*range(4 * done, 10)]


class Lazy:
    """An order that is no list: of this length, with the slices of an array."""

    def __init__(self, length, order):
        self.length, self.order = length, order

    def __len__(self):
        return self.length

    def __getitem__(self, where):
        return self.order[where]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([0.0] * 10, "a ndarray of shape (10,)"),
        (np.arange(9), "a ndarray of shape (9,)"),
        (np.arange(1, 11), "the sample 10, which is not there"),
        (np.arange(-1, 9), "the sample -1, which is not there"),
        (Lazy(9, np.arange(9)), "a Lazy of length 9"),
        (Lazy(10, np.arange(10.0)), "a ndarray of shape (10,)"),
        (Lazy(10, np.arange(9)), "a ndarray of shape (9,)"),
        (Lazy(10, np.arange(1, 11)), "the sample 10, which is not there"),
        (Lazy(10, np.arange(-1, 9)), "the sample -1, which is not there"),
    ],
)
def test_an_order_that_is_none_is_refused(order, says):
    sampler = TrainSampler(Own(order), make_plan(10), 0, 3)
    with pytest.raises(LockstepError) as caught:
        list(sampler)
    assert f"`epoch_order` returns {says}" in str(caught.value)


def test_a_balanced_order_of_data_with_their_own_is_refused():
    cfg = config.Config(sampler="balanced", batch_size=2)
    with pytest.raises(LockstepError, match="the data have an order of their own"):
        create_data_loaders(cfg, world(), make_plan(10), Own(), None)


RANKED = """
import os
from tests.tasks import toy


class Data(toy.Waves):
    def epoch_order(self, seed, epoch):
        return [*range(len(self))][:: -1 if os.environ.get("RANK") == "1" else 1]


class Task(toy.Task):
    def datasets(self):
        return Data(61, 0), Data(23, 1)
"""


def test_ranks_whose_orders_differ_do_not_start(launch, tmp_path):
    (tmp_path / "ranked.py").write_text(RANKED)
    words = [str(tmp_path / "ranked.py"), "steps=1", f"save_dir={tmp_path / 'run'}"]
    done = launch.torchrun(2, "train.py", *words)
    assert done.code and "rank 1 differs from rank 0 in order of the samples" in done.err
