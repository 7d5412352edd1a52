"""Judge a step whose loss or gradient norm jumped: the samples that explain the jump, or another
cause.

Samples are named if three facts hold. The samples have at least OUTSTANDING of each number that
jumped. Without the samples, the jump is gone: at least EXPLAINED of the distance from the usual
value. And the samples were at fault before the step: with weights from before the jump, the loss of
the step is also high. So a step that a bad update made bad has no culprit.

In a step whose loss or gradient is not finite, the samples that are not finite are named.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.comm import digests
from engine.data.batches import tree_leaves
from engine.data.samples import Fetcher
from engine.errors import amount, few
from tools.evidence.rewind_find import Level
from tools.evidence.rewind_shares import Row, SampleShare, Step

EXPLAINED = 0.6
OUTSTANDING = 0.5
"""The least share of the named samples together, in each number that jumped."""

MOST = 8
"""The most samples that are named: a tenth of the samples of the step; two of six samples or more.
"""

HIGHER = 2.0
"""A rate, or an update, of so many times the usual value is named as the cause."""


@dataclass
class Group:
    """A sample of the step, with all its copies in the step.

    indices  numbers in the dataset, once each
    places   rows in the step
    before   mean loss with the earlier weights
    """

    indices: list[int]
    places: list[Row]
    loss: float
    norm: float
    loss_share: float
    gradient_share: float
    lifts: float
    before: float = math.nan
    named: bool = False

    def score(self, jumped: Sequence[str]) -> float:
        """Return the share by which the groups are ordered: of the numbers that jumped."""
        shares = {"loss": self.loss_share, "grad_norm": self.gradient_share}
        kinds = {name.partition("/")[0] for name in jumped} or {*shares}
        values = [value for name, value in shares.items() if name in kinds]
        return max(value if math.isfinite(value) else -math.inf for value in values)

    @property
    def name(self) -> str:
        text = f"sample {self.indices[0]}"
        if len(self.indices) > 1:
            text = f"samples {few(self.indices)} (equal data)"
        if len(self.places) > len(self.indices):
            text += f", {len(self.places)} times in the step"
        return text


@dataclass
class Verdict:
    """The cause of a jump.

    groups   all samples, the highest share first; the named groups stand at the front
    named    the groups that explain the jump
    without  {number: its value in the step without the named samples}
    cause    a sentence
    facts    sentences on the step
    """

    groups: list[Group]
    named: list[Group] = field(default_factory=list)
    without: dict[str, float] = field(default_factory=dict)
    cause: str = ""
    facts: list[str] = field(default_factory=list)


@dataclass
class Update:
    """The update of a step: its learning rate, and |change of the weights| / |weights|."""

    step: int
    lr: float
    ratio: float


def contents_of(step: Step) -> dict[int, str]:
    """Return a digest of the data of each sample of the step, {index: digest}; empty if a batch has
    other values than a row of a tensor for each sample."""
    fetcher = Fetcher(step.train_set)
    found: dict[int, str] = {}
    for each in step.passes:
        indices = [*dict.fromkeys(each.micro.indices)]
        batch = fetcher.fetch(indices)
        columns = []
        for name, leaf in tree_leaves(batch):
            if name.startswith("lockstep"):
                continue
            if not isinstance(leaf, Tensor) or leaf.shape[:1] != (len(indices),):
                return {}
            columns.append((name, leaf.detach().cpu()))
        for row, index in enumerate(indices):
            found[index] = digests.of_tensors((name, leaf[row]) for name, leaf in columns)
    return found


def groups_of(shares: Sequence[SampleShare], contents: dict[int, str]) -> list[Group]:
    """Return the samples of a step, the copies of a sample in one group."""
    members: dict[Any, list[SampleShare]] = {}
    for share in shares:
        members.setdefault(contents.get(share.index, share.index), []).append(share)
    groups = []
    for each in members.values():
        groups.append(
            Group(
                indices=[*dict.fromkeys(share.index for share in each)],
                places=[share.place for share in each],
                loss=float(np.mean([share.loss for share in each])),
                norm=sum(share.norm for share in each),
                loss_share=sum(share.loss_share for share in each),
                gradient_share=sum(share.gradient_share for share in each),
                lifts=sum(share.lifts for share in each),
            )
        )
    return groups


def judge(
    step: Step,
    shares: Sequence[SampleShare],
    levels: Sequence[Level],
    earlier: Sequence[float],
    updates: Sequence[Update],
) -> Verdict:
    """Return the verdict on a step.

    levels   of loss and gradient norm at the step
    earlier  the mean loss of each sample with weights from before the jump; empty if unknown
    updates  of the steps before, the last of the step before this step
    """
    groups = _groups_with_earlier(step, shares, earlier)
    jumped = [level for level in levels if level.jumped]
    names = [level.name for level in jumped]
    groups.sort(key=lambda group: -group.score(names))
    verdict = Verdict(groups)
    if step.problem:
        verdict.cause = step.problem
        return verdict
    if not step.finite:
        _name_not_finite(step, verdict)
        return verdict
    if not jumped:
        verdict.cause = f"step {step.number} is no jump"
        if not levels:
            verdict.cause = f"too few steps before step {step.number} to judge it"
        return verdict
    by_lift = step.mixes and "loss" in {name.partition("/")[0] for name in names}
    if by_lift:  # a sample that spoils the statistics of the pass raises the loss of the others
        groups.sort(key=lambda group: -group.lifts)
    at_fault = _data_at_fault(step, shares, jumped, earlier)
    if at_fault is not False:
        _name_samples(step, verdict, jumped)
    if verdict.named:
        verdict.cause = _of_samples(verdict)
    else:
        verdict.cause = _of_no_sample(step, groups, jumped, at_fault, updates)
    return verdict


def _groups_with_earlier(
    step: Step, shares: Sequence[SampleShare], earlier: Sequence[float]
) -> list[Group]:
    groups = groups_of(shares, contents_of(step))
    if earlier:
        by_place = dict(zip([share.place for share in shares], earlier, strict=True))
        for group in groups:
            group.before = float(np.mean([by_place[place] for place in group.places]))
    return groups


def _name_not_finite(step: Step, verdict: Verdict) -> None:
    """Name the samples whose own loss is not finite; without one, whose own gradient is not.

    A number that is not finite in one row makes the gradients of the others NaN, too.
    """
    groups = verdict.groups
    by_loss = [group for group in groups if not math.isfinite(group.loss)]
    named = by_loss or [group for group in groups if not math.isfinite(group.norm)]
    text = f"loss or gradient of step {step.number} is not finite"
    if not named or len(named) == len(groups):
        number = "all" if named else "none"
        verdict.cause = f"{text}; of single samples, {number} are not: no sample stands out"
        return
    for group in named:
        group.named = True
    verdict.named = named
    verdict.groups.sort(key=lambda group: not group.named)
    names = few([group.name for group in named], MOST)
    noun = "its" if len(named) == 1 else "their"
    verdict.cause = f"{names}: {text}, and neither is {noun} own"


def _loss_of(shares: Sequence[SampleShare], earlier: Sequence[float]) -> float:
    """Return the loss of the step, from the mean loss of each sample."""
    total = weight = 0.0
    for share, loss in zip(shares, earlier, strict=True):
        if share.loss and math.isfinite(share.loss) and math.isfinite(loss):
            part = share.total / share.loss  # w_i / sum w_i
            total += part * loss
            weight += part
    return total / weight if weight else math.nan


def _data_at_fault(
    step: Step, shares: Sequence[SampleShare], jumped: Sequence[Level], earlier: Sequence[float]
) -> bool | None:
    """Return whether the samples have a high loss also with earlier weights; None: unknown."""
    of_loss = [level for level in jumped if level.name.partition("/")[0] == "loss"]
    if not earlier or not of_loss:
        return None
    level = of_loss[0]
    excess = _loss_of(shares, earlier) - level.usual
    return excess >= (1 - EXPLAINED) * (level.value - level.usual)


def _name_samples(step: Step, verdict: Verdict, jumped: Sequence[Level]) -> None:
    """Name the fewest samples, in the order of the groups, that explain the jump."""
    candidates = verdict.groups[: most_named(verdict.groups)]
    for count in range(1, len(candidates) + 1):
        places = [place for group in candidates[:count] for place in group.places]
        if len(places) == len(step.places):
            return
        if not step.mixes and not _outstanding(candidates[:count], jumped):
            continue
        loss, norm = step.without(places)
        values = {"loss": loss, "grad_norm": norm}
        if all(_explains(level, values[level.name.partition("/")[0]]) for level in jumped):
            verdict.named = candidates[:count]
            verdict.without = values
            for group in verdict.named:
                group.named = True
            return


def _outstanding(groups: Sequence[Group], jumped: Sequence[Level]) -> bool:
    """Return whether some samples have at least OUTSTANDING of each number that jumped."""
    shares = {
        "loss": sum(group.loss_share for group in groups),
        "grad_norm": sum(group.gradient_share for group in groups),
    }
    return all(shares[level.name.partition("/")[0]] >= OUTSTANDING for level in jumped)


def most_named(groups: Sequence[Group]) -> int:
    """Return the most samples of a step that are named."""
    of_few = min(2, len(groups) // 3)
    return max(1, of_few, min(MOST, len(groups) // 10))


def _explains(level: Level, without: float) -> bool:
    gone = level.value - without
    return math.isfinite(without) and gone >= EXPLAINED * (level.value - level.usual)


def _of_samples(verdict: Verdict) -> str:
    names = few([group.name for group in verdict.named], MOST)
    return f"{names}: without, the jump is gone"


def _of_no_sample(
    step: Step,
    groups: Sequence[Group],
    jumped: Sequence[Level],
    at_fault: bool | None,
    updates: Sequence[Update],
) -> str:
    """Return the sentence on a jump that no sample explains."""
    text = "no sample stands out"
    if at_fault is False:
        text += (
            f": with the weights from before the jump the loss of these {len(step.places)} samples "
            "is as usual"
        )
    else:
        text += f": without the highest {most_named(groups)} the jump is there, too"
    cause = cause_of_updates(updates)
    return f"{text}; {cause}" if cause else text


def cause_of_updates(updates: Sequence[Update]) -> str:
    """Return a text on a learning rate, or an update, that was far above the usual one, and above
    the rate of the step before; empty if there is none."""
    usual_lr = float(np.median([each.lr for each in updates])) if updates else 0.0
    by_rate = []
    for before, update in itertools.pairwise(updates):  # the early rates of a decay are high, too
        if usual_lr and update.lr >= HIGHER * max(usual_lr, before.lr):
            by_rate.append(update)
    if by_rate:
        highest = max(by_rate, key=lambda each: each.lr)
        return (
            f"the learning rate of step {highest.step} was {highest.lr:.3g}, "
            f"{highest.lr / usual_lr:.1f} times the usual {usual_lr:.3g}"
        )
    # with turns, the weights of the step's turn do not change in the steps of other turns
    known = [each for each in updates if math.isfinite(each.ratio) and each.ratio]
    if len(known) < 2:
        return ""
    usual = float(np.median([each.ratio for each in known]))
    highest = max(known, key=lambda each: each.ratio)
    if usual and highest.ratio >= HIGHER * usual:
        return (
            f"the update of step {highest.step} changed the weights by "
            f"{100 * highest.ratio:.2g} %, usually {100 * usual:.2g} %"
        )
    return f"the updates before were as usual ({100 * usual:.2g} % of the weights)"


def change_ratio(before: dict[str, Any], after: dict[str, Any], names: set[str]) -> float:
    """Return |after - before| / |before| over the trained weights."""
    change = size = 0.0
    for name in names & before.keys() & after.keys():
        one, two = before[name].double(), after[name].double()
        change += float(torch.sum((two - one).square()))
        size += float(torch.sum(one.square()))
    return math.sqrt(change / size) if size else math.nan


def percent(share: float) -> str:
    """Return a share as a text such as 12.5 %; a dash for a share that is not finite."""
    if not math.isfinite(share):
        return "-"
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # no -0.0


def sources_of(indices: Sequence[int], sources: Sequence[str] | None) -> str:
    """Return the sources of some samples with counts; empty without sources."""
    if sources is None:
        return ""
    counts = Counter(sources[index] for index in indices)
    return ", ".join(f"{name} ({amount(count, 'sample')})" for name, count in counts.most_common(3))
