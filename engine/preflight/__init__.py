"""Compare what must be the same on all ranks, before the first step and now and then."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from engine import config, plan
from engine.checks import check_count, collects, reported
from engine.comm import digests
from engine.comm.buffers import check_buffers
from engine.comm.digests import code
from engine.comm.world import World, on_rank0
from engine.contract import Batch, Task
from engine.data.batches import given_of
from engine.errors import LockstepError, console
from engine.files import status
from engine.metrics import Gathered
from engine.optim import make
from engine.phases import phase
from engine.preflight import adds_up, resumable
from engine.run import Run, environment

if TYPE_CHECKING:
    from engine.run import Run


def compare_ranks(run: Run) -> None:
    """(all ranks) Compare config, code, versions, data and weights, and check the result of one all-reduce. Raises
    LockstepError (exit code 6) with the first rank that differs."""
    status.current.note(
        parameter_names=[name for name, p in run.model.named_parameters() if p.requires_grad],
        smaller=functools.partial(plan.smaller, run.plan, run.cfg),
        shrinks=run.cfg.oom == "shrink",
    )
    if run.world.size > 1:
        _same(run.world, _facts(run))
    if run.plan.workers:
        _same(run.world, environment(run), todo="use machines of one kind, or drop virtual_workers")
    _compare_weights(run)
    kept = run.world.gather(make.state_bytes(run.optimizer))
    run.plan = replace(run.plan, moments=None if None in kept else max(kept))
    total = torch.tensor(float(run.world.rank), device=run.world.device)
    run.world.sum(total)
    expected = run.world.size * (run.world.size - 1) / 2
    if total.item() != expected:
        raise LockstepError(
            f"an all-reduce over {run.world.size} ranks gave {total.item()} instead of {expected}",
            "preflight",
            "check the network and the backend",
            exit_code=6,
        )


def _facts(run: Run) -> dict[str, str]:
    return {
        **{f"config key {key}": str(value) for key, value in config.flatten(config.to_dict(run.cfg)).items()},
        "code": code(run.task),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "number of training samples": str(run.plan.num_samples),
        "data": run.record.fingerprint,
        "order of convolutions": run.plan.memory_format,
    }


def compare_weights(run: Run) -> None:
    """(all ranks) Compare the parameters, and modules' own buffers; copies them to the host, but from a GPU a sum.
    Once, what a new process would restore, too."""
    resumable.check(run)
    _compare_weights(run)


def _compare_weights(run: Run) -> None:
    if run.world.size == 1:
        return
    check_buffers(run.world, run.workers.buffers)
    on_gpu = run.world.device.type == "cuda"
    mine = digests.sum_of_bits(run.model.parameters()) if on_gpu else digests.checksum(run.model)
    if len(set(run.world.gather(mine))) > 1:
        _same(run.world, {f"parameter {name}": digest for name, digest in digests.checksums(run.model).items()})


TODO = "start the same code, config and data on all of them, and change weights on all ranks alike"


def _same(world: World, facts: dict[str, str], todo: str = TODO) -> None:
    everyone = world.gather(facts)
    differences = [
        f"rank {rank} differs from rank 0 in {name}: {theirs.get(name, 'absent')} instead of {value}"
        for rank, theirs in enumerate(everyone)
        for name, value in everyone[0].items()
        if theirs.get(name) != value
    ]
    if differences:
        more = f", and in {len(differences) - 1} more" if len(differences) > 1 else ""
        raise LockstepError(differences[0] + more, f"step {phase.step}", todo, exit_code=6, everywhere=True)


FEW = 4
"""Samples that are scored before the first step on a CPU, where a whole batch may take as long as two steps. A GPU gets
a whole one, because it may not fit, and so do loader processes, because they may not start."""


@torch.no_grad()
def sanity_check(run: Run) -> None:
    """(all ranks) Score a few samples before the first step: a mistake in the evaluation shows now and not after an
    epoch. Rank 0 does, because the others may have none. Sets `plan.gflop`. Nothing, where nothing is scored."""
    if run.val_loader is not None and type(run.task).score is not Task.score:
        gflop = run.world.broadcast(on_rank0(run.world, lambda: _rehearse(run)) or 0.0)
        run.plan = replace(run.plan, gflop=gflop)


def _rehearse(run: Run) -> float:
    """(rank 0) Evaluate the first samples. Returns the GFLOP of a sample. Raises what surely is a mistake in the
    task, and not what may come of so few samples, such as a division by zero."""
    loader, scored = run.val_loader, Gathered("score")
    few = run.world.device.type == "cpu" and loader.loader is None
    batch = loader.example(FEW) if few else next(iter(loader))
    samples = len(given_of(batch).index)
    with phase.during("validation"), run.precision.autocast(), run.workers.buffers.unchanged() as changed:
        sums, gflop = _counted(run, functools.partial(run.task.score, run.model.eval(), batch))
        collected = _collected(run, batch) if collects(run.task) else {}
    if changed:
        console.info(
            f"warning: the evaluation changes the buffer {changed[0]}, so a batch's numbers depend on those before: "
            "change it only where `self.training`. It is put back after each evaluation\n"
        )
    scored.add(sums)
    if "count" not in sums:
        todo = "add the number of samples of the batch, as a tensor"
        raise LockstepError("the Sums of `score` lack `count`", "the task's `score`", todo)
    totals = scored.summed(World(0, 0, 1, run.world.device))
    check_count(totals, samples)
    totals.collected = collected
    try:
        reported(run.task, totals)
    except (LockstepError, AttributeError, ImportError, NameError, TypeError):
        raise
    except KeyError:
        if not run.task.num_trials:  # whose totals are not there yet
            raise
    except Exception:
        pass  # the report of the whole split counts
    looks = run.cfg.check_sums and not changed  # else it would say no more than the warning above
    if looks and "adds up: " not in (line := adds_up.check(run, loader, adds_up.of_score)):
        console.info(f"warning: {line}\n")
    return gflop / samples


def _collected(run: Run, batch: Batch) -> dict[str, Any]:
    """(rank 0) Return what the task collects of a batch. Raises LockstepError if as much of all samples is too much."""
    collection = Gathered("collect", run.task.collect_limit_mb)
    collection.collect(run.task.collect(run.model, batch), len(given_of(batch).index))
    collection.check_bytes(collection.bytes / collection.samples * len(run.val_loader.dataset))
    return collection.joined(World(0, 0, 1, run.world.device))


def _counted(run: Run, score: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of `score`, and the GFLOP of its convolutions, products and attention; 0 where they cannot be
    counted or are not needed, because they only decide the number of threads on a CPU."""
    if run.world.device.type == "cpu" and run.plan.compile == "off":
        # Any error is raised again below, without torch's counter in it.
        with contextlib.suppress(Exception), FlopCounterMode(display=False) as counter:
            return score(), counter.get_total_flops() / 1e9
    return score(), 0.0
