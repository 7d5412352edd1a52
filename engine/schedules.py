"""Closed forms of the schedules: the learning rate, momentum and weight decay of a step.

`plan` is an `engine.plan.Plan`, whose `schedule` holds the settings; all lengths are in optimizer
steps. The function of a kind takes the number of steps `after` the warm-up.
"""

from __future__ import annotations

import math
from typing import Any


def share_of_peak(plan: Any, after: int) -> float:
    """Return the rate as a share of the peak rate, `after` steps after the warm-up.

    `schedule.final_share` is the end of a kind of ENDING, and the least share of any other kind.
    """
    kind, final = plan.schedule.kind, plan.schedule.final_share
    if kind in ENDING:
        return final + (1 - final) * ENDING[kind](plan, after)
    return max(final, OTHERS[kind](plan, after))


# ---- kinds that end at final_share: a factor from 1 to 0


def share_taken(plan: Any, after: int, begin: int = 0) -> float:
    """Return the share of the steps from `begin` to the horizon that are taken, from 0 to 1."""
    return min(1.0, max(0, after - begin) / max(1, plan.horizon - plan.warmup_steps - begin))


def cosine(plan: Any, after: int) -> float:
    """Half a cosine (Loshchilov and Hutter 2017): torch's CosineAnnealingLR."""
    return 0.5 * (1 + math.cos(math.pi * share_taken(plan, after)))


def linear(plan: Any, after: int) -> float:
    """A straight line: torch's LinearLR."""
    return 1 - share_taken(plan, after)


def polynomial(plan: Any, after: int) -> float:
    """A power of the line: torch's PolynomialLR."""
    return (1 - share_taken(plan, after)) ** plan.schedule.power


def wsd(plan: Any, after: int) -> float:
    """Constant, then a line over the last `decay_share` of the steps (Hu et al. 2024)."""
    return 1 - share_taken(plan, after, max(0, plan.decay_begin - plan.warmup_steps))


def warm_restarts(plan: Any, after: int) -> float:
    """A cosine that begins again after each period, `period_factor` times as long as the one before
    (Loshchilov and Hutter 2017): torch's CosineAnnealingWarmRestarts."""
    period, factor = plan.period_steps, plan.schedule.period_factor
    if factor == 1:
        after %= period
    while after >= period:
        after -= period
        period *= factor
    return 0.5 * (1 + math.cos(math.pi * after / period))


# ---- other kinds: a share of the peak


def constant(plan: Any, after: int) -> float:
    """The peak. plateau is constant, too, times the `factor` in `Progress.plateau`."""
    return 1.0


def exponential(plan: Any, after: int) -> float:
    """`gamma` to the power of the periods: torch's ExponentialLR."""
    return plan.schedule.gamma ** (after / plan.period_steps)


def step(plan: Any, after: int) -> float:
    """`gamma` to the power of the whole periods: torch's StepLR."""
    return plan.schedule.gamma ** (after // plan.period_steps)


def multistep(plan: Any, after: int) -> float:
    """`gamma` to the power of the milestones that the run has reached: torch's MultiStepLR."""
    reached = sum(each <= after + plan.warmup_steps for each in plan.milestones)
    return plan.schedule.gamma**reached


def inverse_sqrt(plan: Any, after: int) -> float:
    """The inverse square root of the step, in lengths of the warm-up (Vaswani et al. 2017)."""
    return math.sqrt(plan.warmup_steps / (plan.warmup_steps + after))


def one_cycle(plan: Any, after: int) -> float:
    """Up from `start_share` to the peak, and down to `final_share` (Smith and Topin 2019): torch's
    OneCycleLR."""
    step = after + plan.warmup_steps
    end = plan.schedule.final_share
    if step < cycle_peak(plan):
        end = plan.schedule.start_share
    return end + (1 - end) * cycle_height(plan, step)


def cycle_peak(plan: Any) -> float:
    """Return the step of one-cycle's peak: the end of the warm-up, or of 30 % of the steps."""
    return (plan.warmup_steps or 0.3 * plan.horizon) - 1


def cycle_height(plan: Any, step: int) -> float:
    """Return the height of one-cycle: 0 at the first step, 1 at the peak, 0 at the last step."""
    peak = cycle_peak(plan)
    if step < peak:
        return 0.5 * (1 - math.cos(math.pi * (step / peak)))
    fall = (step - peak) / max(1, plan.horizon - 1 - peak)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, fall)))


ENDING = {
    "cosine": cosine,
    "linear": linear,
    "polynomial": polynomial,
    "wsd": wsd,
    "warm-restarts": warm_restarts,
}
OTHERS = {
    "constant": constant,
    "plateau": constant,
    "exponential": exponential,
    "step": step,
    "multistep": multistep,
    "inverse-sqrt": inverse_sqrt,
    "one-cycle": one_cycle,
}

# ---- values beside the rate


def momentum(plan: Any, step: int, first: float) -> float:
    """Return momentum or beta1: inverse to the rate of one-cycle, from `first` down to
    `peak_momentum`; not up."""
    return first + (min(first, plan.schedule.peak_momentum) - first) * cycle_height(plan, step)


def weight_decay(plan: Any, step: int, first: float) -> float:
    """Return the weight decay: a cosine from `first` to `final_weight_decay` (Caron et al. 2021,
    DINO)."""
    final = plan.schedule.final_weight_decay
    return final + 0.5 * (first - final) * (1 + math.cos(math.pi * min(1.0, step / plan.horizon)))
