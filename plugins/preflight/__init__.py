"""Checks before the first step, and comparisons of the ranks during a run."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from engine import config, hooks
from engine.code_digest import name_of
from engine.comm import digests
from engine.comm.buffers import check_buffers
from engine.comm.differences import first_difference
from engine.comm.world import World, sync_errors
from engine.contract import LockstepError, Task
from engine.data import fingerprint
from engine.data.batches import batch_info, tree_leaves
from engine.data.order import LazyOrder
from engine.environment import environment
from engine.errors import DISTRIBUTED, USAGE, console, few
from engine.evaluation import collects, reported
from engine.gathered import Gathered, check_count
from engine.hooks import check
from engine.phases import Phase, phase
from engine.run import Run
from plugins.preflight import (
    adds_up,
    first_pass,
    optimizers,
    resume_check,
    schedulers,
    steps,
    turns,
)
from plugins.preflight import explain as explain
from plugins.preflight.partition import partition_dependent
from plugins.preflight.prepare_check import check_prepare
from plugins.preflight.private import release_device_cache
from plugins.preflight.returned import check_returned
from plugins.preflight.rules import find_conflicts
from plugins.preflight.snapshot import Snapshot, host_numbers, snapshot_of
from plugins.preflight.state_trial import try_after_evaluation

ALIKE = "start the same code, config and data on all of them, and change weights on all ranks alike"

STATE = (
    "change it in `after_step` alone, by the weights, `step_sums` and random numbers of torch; the "
    "running statistics of norms differ between ranks (virtual_workers=N makes them equal)"
)

REHEARSED = 4
"""Samples that are scored before the first step on a CPU. A GPU, or loader processes, score a whole
batch: the batch then fits into memory, and the processes start. On a CPU a whole batch may take as
long as two steps."""


def compare_ranks(run: Run) -> None:
    """(all ranks) Compare config, code, versions, data and weights, and check the result of one
    all-reduce.

    Sets `plan.moments`. Raises LockstepError with the first rank that differs: exit code 2, because
    the same start would end in the same way.
    """
    world = run.world
    _check_constants(run)
    if run.rates.scheduler is None:
        optimizers.check_schedulers(run.task, run.optimizer)
    schedulers.check(run)
    turn_facts = turns.check_steps(run)
    state_bytes = optimizers.state_bytes(run.optimizer)
    if world.size == 1:
        run.plan = replace(run.plan, moments=state_bytes)
        return
    keys = config.flatten(config.to_dict(run.cfg))
    facts = {f"config key {key}": str(value) for key, value in keys.items()}
    facts |= {
        **{f"code of {name_of(key)}": text for key, text in run.record.code.items()},
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "number of training samples": str(run.plan.num_samples),
        "order of the samples": digests.digest(_parts(run.loaders.train.sampler.order())),
        "order of convolutions": run.plan.memory_format,
        **turn_facts,
    }
    _compare(world, facts, ALIKE)
    _compare_data(run)
    if run.plan.workers:
        _compare(world, environment(run), "use machines of one kind, or drop virtual_workers")
    _compare_weights(run)
    run.plan = replace(run.plan, moments=world.reduce_on_rank0(state_bytes, _largest))
    total = torch.tensor(float(world.rank), device=world.device)
    world.sum(total)
    expected = world.size * (world.size - 1) / 2
    if total.item() != expected:
        raise LockstepError(
            f"an all-reduce over {world.size} ranks gave {total.item()} instead of {expected}",
            "preflight",
            "check the network and the backend",
            exit_code=DISTRIBUTED,
        )


def _largest(sizes: Iterable[int | None]) -> int | None:
    """Return the largest size, or None if a rank has no size."""
    known = [*sizes]
    return None if None in known else max(filter(None, known), default=0)


def _parts(order: Any) -> list[torch.Tensor]:
    """Return an order for a digest; three pieces of an order that is computed item by item."""
    if not isinstance(order, LazyOrder):
        return [torch.from_numpy(order)]
    starts = (0, len(order) // 2, max(0, len(order) - 4096))
    return [torch.from_numpy(order[first : first + 4096]) for first in starts]


def compare_weights(run: Run) -> None:
    """(all ranks) Compare the parameters, and the buffers outside of norms, by a digest. After the
    first step, compare the state that a new process would restore, too.

    Raises LockstepError with the first weight that differs: exit code 6, because a new start goes
    on from the last checkpoint, whose weights are equal.
    """
    resume_check.check(run)
    _check_constants(run)
    if run.world.size > 1:
        _compare_weights(run, DISTRIBUTED)


def _check_constants(run: Run) -> None:
    """Raise LockstepError if a buffer has changed that its module names in `constant_buffers`.

    A skipped step would not restore the buffer, and virtual workers would not add up its changes.
    """
    changed = run.reducer.buffers.changed_constants()
    if changed:
        raise LockstepError(
            f"the buffer {few(changed)} has changed, and its module names it in `constant_buffers`",
            f"step {run.progress.step}",
            "remove the name there: the buffer then follows the steps, as other buffers do",
        )


def _compare_weights(run: Run, exit_code: int = USAGE) -> None:
    world = run.world
    check_buffers(world, run.reducer.buffers)
    leaves = [*tree_leaves(run.task.state_dict())]
    # the tensors are in the sum of bits
    numbers = [str(leaf) for _, leaf in leaves if not isinstance(leaf, torch.Tensor)]
    if world.differs_across_ranks((digests.as_text(run.sum_of_bits()), numbers)):
        parameters = digests.each(run.model.named_parameters())
        _compare(world, _titled("parameter", parameters), ALIKE, exit_code)
        _compare(world, _titled("the state", digests.each(leaves)), STATE)


def _titled(kind: str, digest_of: dict[str, str]) -> dict[str, str]:
    """Return digests under names for a message, such as `parameter head.weight`."""
    return {f"{kind} {name}": digest for name, digest in digest_of.items()}


def _compare_data(run: Run) -> None:
    """(all ranks) Raise LockstepError if the data of a rank differ from the data of rank 0."""
    found = fingerprint.compare_ranks(run.world, run.record.fingerprint)
    if found:
        rank, parts = found
        what = f"rank {rank} differs from rank 0 in the data: {parts}"
        todo = "give all ranks the same files in the same order: sort what a folder lists"
        raise LockstepError(what, f"step {phase.step}", todo, everywhere=True)


def _compare(world: World, facts: dict[str, str], todo: str, exit_code: int = USAGE) -> None:
    """(all ranks) Raise LockstepError if a fact differs from the fact of rank 0."""
    differences = first_difference(world, facts)
    if differences:
        name, (rank, value, expected) = next(iter(differences.items()))
        what = f"rank {rank} differs from rank 0 in {name}: {value} instead of {expected}"
        if len(differences) > 1:
            what += f", and in {len(differences) - 1} more"
        where = f"step {phase.step}"
        raise LockstepError(what, where, todo, exit_code=exit_code, everywhere=True)


@torch.no_grad()
def sanity_check(run: Run) -> None:
    """(all ranks) Score a few samples before the first step, if the task scores.

    A mistake in the evaluation shows at the start, and not after an epoch. Rank 0 scores alone; if
    a forward pass is a collective, all ranks score the same samples. Sets `plan.gflop`.
    """
    if run.loaders.val is not None and type(run.task).score is not Task.score:
        if run.task.monitor == "loss" and run.task.higher_is_better:
            console.warning(
                "the best checkpoint will be that of the highest loss: `higher_is_better` is True, "
                'and `monitor` is "loss"; name the metric, such as monitor = "accuracy"\n'
            )
        with sync_errors(run.world):
            gflop = 0.0
            if run.world.main or run.plan.sharded:
                gflop = _rehearse_unchanged(run)
        run.plan = replace(run.plan, gflop=run.world.broadcast(gflop))


def check_sums(run: Run) -> None:
    """(all ranks) Check that the training loss adds up, and print the result. Then look at a
    training pass: see `first_pass`.

    All ranks compute the same samples, because a task may have collectives of its own. The check is
    the last before the first step. On a GPU the cached memory of the checks is returned at the end:
    a batch that fits without the checks then fits after the checks.
    """
    loader = run.loaders.train
    for turn in turns.each_turn(run):
        place = f"turn {turn}: " if turn else ""
        if run.cfg.check_sums:
            with sync_errors(run.world):
                lines = steps.at_both_ends(
                    loader, lambda: adds_up.check(run, loader, adds_up.of_loss)
                )
            console.info(f"{place}{_clearest(lines)}\n")
        if run.cfg.check_sums or run.cfg.check_resume:
            with sync_errors(run.world):
                notes = steps.at_both_ends(loader, lambda: first_pass.look(run))
            for note in dict.fromkeys(itertools.chain(*notes)):
                console.warning(f"{place}{note}\n")
    if run.world.device.type == "cuda":
        # Some ms, once. The allocator returns free blocks by itself when memory runs out, but no
        # block of which the first step holds a piece, such as a gradient.
        release_device_cache()


def _clearest(lines: list[str]) -> str:
    """Return the line of the last step in which the loss adds up; without such a step the last
    line."""
    certain = [line for line in lines if "adds up: " in line]
    return (certain or lines)[-1]


def _rehearse_unchanged(run: Run) -> float:
    """(rank 0, or all ranks) Rehearse an evaluation, and put back what the evaluation changes.

    The samples are scored as in the evaluation at the end of the run. Raises LockstepError for a
    weight that the evaluation changes. Other ranks would not change the weight, and a plain loop
    would begin with another.
    """
    plan = run.plan
    run.loaders.val.step_info = plan.step_info(plan.total_steps, plan.epochs - 1)
    before = snapshot_of(run)
    try:
        gflop = _rehearse(run, before)
        after = snapshot_of(run, copies=False)
        first_pass.raise_changed_weights(run, [*before.changes(after)])
    finally:
        before.put_back()
    return gflop


def _rehearse(run: Run, before: Snapshot) -> float:
    """(rank 0, or all ranks) Evaluate the first samples. Returns the GFLOP of a sample.

    before  the values before the evaluation

    Raises an error that is certainly a mistake in the task. An error that a small number of samples
    may cause, such as a division by zero, is ignored.
    """
    task, loader = run.task, run.loaders.val
    on_cpu = run.world.device.type == "cpu"
    if run.plan.sharded or (on_cpu and loader.loader is None):
        batch = loader.example(REHEARSED)
    else:
        batch = next(iter(loader))
    samples = len(batch_info(batch).index)
    scored = Gathered("score")
    collected = Gathered("collect", task.collect_limit_mb)
    with (
        phase.during(Phase.VALIDATION),
        run.precision.autocast(),
        run.reducer.buffers.unchanged() as changed,
    ):
        model = run.model.eval()
        sums = None
        flop = 0.0
        if on_cpu:  # the number of threads depends on the count
            # Convolutions, products and attention count. An error is raised again below, without
            # the counter in the traceback.
            with contextlib.suppress(Exception), FlopCounterMode(display=False) as counter:
                sums = task.score(model, batch)
                flop = counter.get_total_flops()
        scored.add(check("score", task.score(model, batch) if sums is None else sums))
        if collects(task):
            collected.collect(check("collect", task.collect(model, batch), samples), samples)
            collected.check_bytes(collected.bytes / samples * len(loader.dataset))
    if changed:
        console.warning(
            f"the evaluation changes the buffer {changed[0]}, so a batch's numbers depend on "
            "those before: "
            "change it only where `self.training`. It is put back after each evaluation\n"
        )
    _rehearse_report(run, before, scored, collected, samples)
    if run.cfg.check_sums and not changed:  # with a changed buffer the result repeats the warning
        line = adds_up.check(run, loader, adds_up.of_score)
        if "adds up: " not in line:
            console.warning(f"{line}\n")
    return flop / 1e9 / samples


def _rehearse_report(
    run: Run, before: Snapshot, scored: Gathered, collected: Gathered, samples: int
) -> None:
    """Compute the report of the rehearsed samples, and raise errors that are certainly mistakes."""
    alone = World(0, 0, 1, run.world.device)
    totals = scored.summed(alone)
    check_count(totals, samples)
    totals.collected = collected.joined(alone)
    certain: tuple[type[Exception], ...] = (
        LockstepError,
        AttributeError,
        ImportError,
        NameError,
        TypeError,
    )
    if not run.task.num_trials:  # the totals of trials are not there yet
        certain += (KeyError,)
    try:
        metrics = reported(run.task, totals)
    except Exception as error:
        if isinstance(error, certain):
            raise
        return
    if run.cfg.check_resume and type(run.task).after_evaluation is not Task.after_evaluation:
        for note in try_after_evaluation(run, metrics, before):
            console.warning(f"{note}\n")


def plan_rows(run: Run) -> dict[str, str]:
    """Return the rows of the plan about turns, and about parts of the model that depend on the
    partition."""
    rows = turns.plan_row(run)
    parts = "" if run.plan.workers else partition_dependent(run.model, run.plan.accumulation)
    if parts:
        rows["the cut matters"] = f"{parts}: other processes or another batch_size, other numbers"
    return rows


hooks.host_numbers.add(host_numbers)
hooks.initial_state.add(optimizers.initial_state)
hooks.prepare_checks.add(check_prepare)
hooks.returned.add(check_returned)
hooks.plan_rows.add(plan_rows)
hooks.plan_rows.add(schedulers.plan_row)
hooks.settings.add(find_conflicts)
