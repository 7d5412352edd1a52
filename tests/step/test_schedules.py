"""The kinds of `schedule.kind` beside torch's own classes, stepped a thousand times."""

import math
import warnings

import pytest
import torch
from torch.optim import lr_scheduler

from engine import config, plan, schedules
from engine.comm.world import World
from engine.config import Optim, Schedule
from engine.optim.rates import lowered

STEPS, WARM_UP, PEAK = 1000, 100, 0.3


def the_plan(schedule, **sizes):
    """A run of 1,000 steps, ten an epoch."""
    cfg = config.Config(batch_size=1, epochs=100, optim=Optim(lr=PEAK), schedule=schedule, **sizes)
    return plan.make_plan(cfg, World(0, 0, 1, torch.device("cpu")), 10)


def stepped(make, steps=STEPS):
    """The rate and beta1 of each step, as torch's scheduler sets them."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler, found = make(optimizer), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR passes the number of the step on
        for _ in range(steps):
            group = optimizer.param_groups[0]
            found.append((group["lr"], group["betas"][0]))
            optimizer.step()
            scheduler.step()
    return [[*column] for column in zip(*found, strict=True)]


KINDS = {
    "constant": ({}, lambda o, n: lr_scheduler.ConstantLR(o, 1.0)),
    "cosine": ({"final_share": 0.1}, lambda o, n: lr_scheduler.CosineAnnealingLR(o, n, 0.1 * PEAK)),
    "linear": ({"final_share": 0.1}, lambda o, n: lr_scheduler.LinearLR(o, 1.0, 0.1, n)),
    "polynomial": ({"power": 0.9}, lambda o, n: lr_scheduler.PolynomialLR(o, n, 0.9)),
    "exponential": (
        {"gamma": 0.9, "period_epochs": 3.7},
        lambda o, n: lr_scheduler.ExponentialLR(o, 0.9 ** (1 / 37)),
    ),
    "step": ({"gamma": 0.5, "period_steps": 70}, lambda o, n: lr_scheduler.StepLR(o, 70, 0.5)),
    "multistep": (
        {"gamma": 0.5, "milestone_epochs": [15, 40, 40, 80]},
        lambda o, n: lr_scheduler.MultiStepLR(o, [m - (STEPS - n) for m in (150, 400, 400, 800)], 0.5),
    ),
    "warm-restarts": (
        {"period_steps": 50, "period_factor": 2, "final_share": 0.01},
        lambda o, n: lr_scheduler.CosineAnnealingWarmRestarts(o, 50, 2, 0.01 * PEAK),
    ),
    "wsd": (
        {"decay_share": 0.3},
        lambda o, n: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (n - step) / 300)),
    ),
    "inverse-sqrt": (
        {},
        lambda o, n: lr_scheduler.LambdaLR(o, lambda step: 1 / math.sqrt((step + WARM_UP) / WARM_UP)),
    ),
}
"""{kind: (settings, torch's scheduler of an optimizer and the steps after the warm-up)}."""


@pytest.mark.parametrize(
    ("kind", "warm_up"),
    [(kind, warm_up) for kind in KINDS for warm_up in (0, WARM_UP) if warm_up or kind != "inverse-sqrt"],
)
def test_a_kind_is_torchs_class(kind, warm_up):
    """The warm-up is torch's LinearLR, joined by SequentialLR; it is the scale of inverse-sqrt."""
    settings, make = KINDS[kind]
    ours = the_plan(Schedule(kind=kind, warmup_steps=warm_up, **settings))

    def scheduler(optimizer):
        after = make(optimizer, STEPS - warm_up)
        if not warm_up:
            return after
        before = lr_scheduler.LinearLR(optimizer, 1 / warm_up, 1.0, warm_up - 1)
        return lr_scheduler.SequentialLR(optimizer, [before, after], [warm_up])

    rates, _ = stepped(scheduler)
    assert [ours.lr(step) for step in range(STEPS)] == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize("factor", [1, 3])
def test_restarts_come_at_the_steps_of_torch(factor):
    ours = the_plan(Schedule(kind="warm-restarts", period_steps=7, period_factor=factor))
    rates, _ = stepped(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7, factor))
    assert [ours.lr(step) for step in range(STEPS)] == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize("warm_up", [0, 2, 17, 300])
def test_one_cycle_is_torchs_rate_and_momentum(warm_up):
    """torch's pct_start is the warm-up, 30 % without one; its final_div_factor is of the first rate."""
    ours = the_plan(Schedule(kind="one-cycle", warmup_steps=warm_up, final_share=1 / (25 * 1e4)))
    share = warm_up / STEPS if warm_up else 0.3
    rates, momenta = stepped(lambda o: lr_scheduler.OneCycleLR(o, PEAK, STEPS, pct_start=share))
    assert [ours.lr(step) for step in range(STEPS)] == pytest.approx(rates, rel=1e-12)
    assert [schedules.momentum(ours, step, 0.95) for step in range(STEPS)] == pytest.approx(momenta, rel=1e-12)
    assert schedules.momentum(ours, 100, 0.5) == 0.5, "a smaller one stays"


def test_one_cycle_of_a_few_steps_has_finite_rates():
    """torch divides by zero with a warm-up of one step."""
    for steps in (1, 2, 3):
        for warm_up in (0, 1, steps):
            schedule = Schedule(kind="one-cycle", warmup_steps=warm_up, horizon=steps)
            rates = [the_plan(schedule).lr(step) for step in range(steps + 2)]
            assert all(0 <= rate <= PEAK for rate in rates)
            assert warm_up != 1 or rates[0] == PEAK


def test_the_weight_decay_is_dinos():
    """Half a cosine over the steps of the run, from one value to the other; without a warm-up."""
    ours = the_plan(Schedule(warmup_steps=10, final_weight_decay=0.4))
    expected = [0.4 + 0.5 * (0.04 - 0.4) * (1 + math.cos(math.pi * step / STEPS)) for step in range(STEPS)]
    assert [schedules.weight_decay(ours, step, 0.04) for step in range(STEPS)] == pytest.approx(expected, rel=1e-12)
    assert schedules.weight_decay(ours, 2 * STEPS, 0.04) == 0.4
    assert ours.moves_values and not the_plan(Schedule(warmup_steps=10)).moves_values


@pytest.mark.parametrize("settings", [
    {"kind": "exponential", "period_epochs": 1}, {"kind": "step", "period_epochs": 1, "gamma": 0.3},
    {"kind": "inverse-sqrt", "warmup_steps": 3}, {"kind": "multistep", "milestone_steps": [3, 5, 9], "gamma": 0.3},
])  # fmt: skip
def test_a_kind_without_an_end_stays_above_the_least_rate(settings):
    ours = the_plan(Schedule(final_share=0.2, **settings))
    assert ours.lr(999) == pytest.approx(0.2 * PEAK) and ours.lr(0) <= PEAK


@pytest.mark.parametrize("higher_is_better", [False, True])
@pytest.mark.parametrize("patience", [0, 2])
def test_plateau_is_torchs_after_each_score(higher_is_better, patience):
    """NaN and infinity among the scores; a score that is as good within the threshold is no gain."""
    scores = [5.0, math.inf, 4.0, 4.0, 3.9999, math.nan, 3.0, -math.inf, 3.0, 2.5, 2.5, 2.4, 9.0, 9.0, 9.0, 0.1] * 3
    if higher_is_better:
        scores = [-score for score in scores]
    schedule = Schedule(kind="plateau", gamma=0.5, plateau_patience=patience, plateau_threshold=1e-3, final_share=0.01)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    mode = "max" if higher_is_better else "min"
    theirs = lr_scheduler.ReduceLROnPlateau(optimizer, mode, 0.5, patience, 1e-3, min_lr=0.01 * PEAK, eps=0)
    state, factors = {}, set()
    for score in scores:
        theirs.step(score)
        state = lowered(state, score, higher_is_better, schedule)
        assert PEAK * state["factor"] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        factors.add(state["factor"])
    assert len(factors) > 2


def test_lengths_are_of_epochs_or_of_steps():
    """Steps go before epochs; a period has a step at least."""
    assert the_plan(Schedule(kind="step", period_epochs=2.5)).period_steps == 25
    assert the_plan(Schedule(kind="step", period_epochs=2.5, period_steps=7)).period_steps == 7
    assert the_plan(Schedule(kind="step", period_epochs=0.01)).period_steps == 1
    assert the_plan(Schedule(kind="multistep", milestone_epochs=[0.5, 3])).milestones == (5, 30)
    assert the_plan(Schedule(kind="multistep", milestone_epochs=[3], milestone_steps=[4])).milestones == (4,)
