"""Compare what must be the same on all ranks, before the first step and now and then; rehearse the
evaluation."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from engine import config, hooks
from engine.comm import digests
from engine.comm.buffers import check_buffers
from engine.comm.world import World, sync_errors
from engine.contract import LockstepError, Task
from engine.data.batches import batch_info
from engine.data.order import LazyOrder
from engine.environment import environment
from engine.errors import console
from engine.evaluation import check_count, collects, reported
from engine.gathered import Gathered
from engine.hooks import check
from engine.phases import phase
from engine.private import release_device_cache
from engine.run import Run
from plugins.preflight import adds_up, optimizers, resume_check
from plugins.preflight.partition import partition_dependent
from plugins.preflight.prepare_check import check_prepare
from plugins.preflight.returned import check_returned
from plugins.preflight.rules import check_together

ALIKE = "start the same code, config and data on all of them, and change weights on all ranks alike"

FEW = 4
"""Samples that are scored before the first step. On a GPU, or with loader processes, it is a whole
batch, which also shows that it fits and that the processes start; on a CPU that may take as long as
two steps."""


def compare_ranks(run: Run) -> None:
    """(all ranks) Compare config, code, versions, data and weights, and check the result of one
    all-reduce. Raises LockstepError (exit code 6) with the first rank that differs."""
    world = run.world
    if world.size > 1:
        keys = config.flatten(config.to_dict(run.cfg))
        facts = {f"config key {key}": str(value) for key, value in keys.items()} | {
            "code": digests.code(run.task),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "number of training samples": str(run.plan.num_samples),
            "data": run.record.fingerprint,
            "order of the samples": digests.digest(_parts(run.loaders.train.sampler.order())),
            "order of convolutions": run.plan.memory_format,
        }
        _compare(world, facts, ALIKE)
    if run.plan.workers:
        _compare(world, environment(run), "use machines of one kind, or drop virtual_workers")
    _compare_weights(run)
    state_bytes = optimizers.state_bytes(run.optimizer)
    moments = world.reduce_on_rank0(
        state_bytes, lambda everyone: None if None in (sizes := [*everyone]) else max(sizes)
    )
    run.plan = replace(run.plan, moments=moments)
    total, expected = (
        torch.tensor(float(world.rank), device=world.device),
        world.size * (world.size - 1) / 2,
    )
    world.sum(total)
    if total.item() != expected:
        what = f"an all-reduce over {world.size} ranks gave {total.item()} instead of {expected}"
        raise LockstepError(what, "preflight", "check the network and the backend", exit_code=6)


def _parts(order: Any) -> list[torch.Tensor]:
    """Return an order to digest; of a sequence that is never listed, three pieces."""
    if not isinstance(order, LazyOrder):
        return [torch.from_numpy(order)]
    starts = 0, len(order) // 2, max(0, len(order) - 4096)
    return [torch.from_numpy(order[first : first + 4096]) for first in starts]


def compare_weights(run: Run) -> None:
    """(all ranks) Compare the parameters, and the buffers that are not of norms, by a digest.
    After the first step, compare what a new process would restore, too."""
    resume_check.check(run)
    _compare_weights(run)


def _compare_weights(run: Run) -> None:
    if run.world.size == 1:
        return
    check_buffers(run.world, run.reducer.buffers)
    if run.world.differs_across_ranks(run.reducer.digest()):
        of_each = digests.each(run.model.named_parameters())
        _compare(
            run.world, {f"parameter {name}": digest for name, digest in of_each.items()}, ALIKE
        )


def _compare(world: World, facts: dict[str, str], todo: str) -> None:
    if first_difference := world.first_difference(facts):
        name, (rank, theirs, ours) = next(iter(first_difference.items()))
        more = f", and in {len(first_difference) - 1} more" if len(first_difference) > 1 else ""
        what = f"rank {rank} differs from rank 0 in {name}: {theirs} instead of {ours}{more}"
        raise LockstepError(what, f"step {phase.step}", todo, exit_code=6, everywhere=True)


@torch.no_grad()
def sanity_check(run: Run) -> None:
    """(all ranks) Score a few samples before the first step, if the task scores any: a mistake in
    the evaluation shows now and not after an epoch. Rank 0 does, or where a forward pass is a
    collective, all do: the same samples. Sets `plan.gflop`."""
    if run.loaders.val is not None and type(run.task).score is not Task.score:
        with sync_errors(run.world):
            gflop = _rehearse(run) if run.world.main or run.plan.sharded else 0.0
        run.plan = replace(run.plan, gflop=run.world.broadcast(gflop))


def check_sums(run: Run) -> None:
    """(all ranks) Check that the training loss adds up, and print how well. All ranks compute the
    same samples, because a task may have collectives of its own. This is the last check before the
    first step: on a GPU it ends with the return of the memory that the checks have cached, so that
    a batch that fits without them fits after them."""
    if run.cfg.check_sums:
        with sync_errors(run.world):
            line = adds_up.check(run, run.loaders.train, adds_up.of_loss)
        console.info(f"{line}\n")
    if run.world.device.type == "cuda":
        # Some ms, once. The allocator returns free blocks by itself when memory runs out, but no
        # block of which the first step holds a piece, such as a gradient.
        release_device_cache()


def _rehearse(run: Run) -> float:
    """(rank 0, or all) Evaluate the first samples. Returns the GFLOP of a sample. Raises what
    surely is a mistake in the task, but not what so few samples may cause, such as a division by
    zero."""
    task, loader, device = run.task, run.loaders.val, run.world.device
    few = device.type == "cpu" and loader.loader is None
    batch = loader.example(FEW) if few or run.plan.sharded else next(iter(loader))
    samples = len(batch_info(batch).index)
    scored, collected, flop = Gathered("score"), Gathered("collect", task.collect_limit_mb), 0.0
    with (
        phase.during("validation"),
        run.precision.autocast(),
        run.reducer.buffers.unchanged() as changed,
    ):
        sums, model = None, run.model.eval()
        if device.type == "cpu":  # the number of threads there depends on it
            # Convolutions, products and attention count. An error is raised again below, without
            # the counter in it.
            with contextlib.suppress(Exception), FlopCounterMode(display=False) as counter:
                sums, flop = task.score(model, batch), counter.get_total_flops()
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
    alone = World(0, 0, 1, device)
    totals = scored.summed(alone)
    check_count(totals, samples)
    totals.collected = collected.joined(alone)
    try:
        reported(task, totals)
    # the report of the whole split counts, and the totals of trials are not there yet
    except Exception as error:
        sure = LockstepError, AttributeError, ImportError, NameError, TypeError
        if isinstance(error, sure) or (isinstance(error, KeyError) and not task.num_trials):
            raise
    if run.cfg.check_sums and not changed:  # else it would only repeat the warning above
        line = adds_up.check(run, loader, adds_up.of_score)
        if "adds up: " not in line:
            console.warning(f"{line}\n")
    return flop / 1e9 / samples


def plan_rows(run: Run) -> dict[str, str]:
    """Return the row of the plan about parts of the model that depend on the partition."""
    parts = "" if run.plan.workers else partition_dependent(run.model, run.plan.accumulation)
    if not parts:
        return {}
    return {"the cut matters": f"{parts}: other processes or another batch_size, other numbers"}


hooks.initial_state.add(optimizers.initial_state)
hooks.prepare_checks.add(check_prepare)
hooks.returned.add(check_returned)
hooks.plan_rows.add(plan_rows)
hooks.settings.add(check_together)
