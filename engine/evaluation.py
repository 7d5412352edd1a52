"""Score a split: every sample once, with the same sums on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from engine.contract import Batch, Sums, Task, check_direction
from engine.data.batches import batch_info
from engine.gathered import Gathered, check_count
from engine.hooks import check
from engine.phases import Phase, phase
from engine.run import Run
from engine.seeds import seed_generators
from engine.task_state import changes_after_evaluation
from engine.task_trials import num_trials, run_trials


@torch.no_grad()
def evaluate_split(run: Run, batches: Any) -> tuple[dict[str, float], Sums] | None:
    """(all ranks) Score every sample of the split once; return (metrics, sums), or None if the run
    stops before the end.

    Batches do not depend on the number of ranks. Neither do the metrics, to the last bit where
    every process computes alike.
    """
    world, task = run.world, run.task
    scored, collected = Gathered("score"), Gathered("collect", task.collect_limit_mb)
    run.loaders.val.step_info = run.step_info
    with run.evaluated() as model:
        incomplete = False
        phase(Phase.LOADING_VALIDATION_DATA)
        for number, batch in enumerate(_with_empty(run, batches)):
            if incomplete := run.reducer.any(bool(run.stop.reason)):
                break
            phase(Phase.VALIDATION)
            # by the number of the batch in the split: batches are dealt to the ranks in turn
            seed_generators(world.device, "score", run.cfg.seed, world.rank + number * world.size)
            empty = number >= len(run.loaders.val)
            with run.precision.autocast():
                sums = check("score", task.score(model, batch))
                if not empty:
                    scored.add(sums)
                if collects(task):
                    samples = len(batch_info(batch).index)
                    values = check("collect", task.collect(model, batch), samples)
                    if not empty:
                        collected.collect(values, samples)
            phase(Phase.LOADING_VALIDATION_DATA)
        phase(Phase.VALIDATION)
        trials = 0 if incomplete else num_trials(run)
        tried = run_trials(run, model, trials)
        run.agree_to_stop(incomplete or trials > 0)  # a stop may have ended the trials early
        if run.stopped:
            return None
        sums = scored.summed(world)
        check_count(sums, len(run.loaders.val.dataset))
        if trials:
            sums = Sums(sums | tried.summed(world))
        if collects(task):
            sums.collected = collected.joined(world)
            metrics = world.broadcast(reported(task, sums) if world.main else {})
        else:
            metrics = reported(task, sums)
        return metrics | {"count": int(sums["count"])}, sums


@torch.no_grad()
def after_evaluation(run: Run) -> None:
    """(all ranks) Call the task's `after_evaluation`. The run ends for the reason of the first rank
    that has a reason."""
    if not changes_after_evaluation(run.task):
        return
    seed_generators(run.world.device, "after evaluation", run.cfg.seed, run.progress.step)
    reason = run.task.after_evaluation(dict(run.record.metrics))
    check("after_evaluation", reason)
    run.progress.ended = run.world.first(reason) or None


def _with_empty(run: Run, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield this rank's batches. Where every forward pass is a collective, yield one more sample
    for each batch that another rank has more; these samples do not count."""
    yield from batches
    if run.plan.sharded:
        sampler = run.loaders.val.sampler
        rounds = -(-sampler.num_samples // (sampler.batch_size * run.world.size))
        yield from (run.loaders.val.example(1) for _ in range(rounds - len(sampler)))


def collects(task: Task) -> bool:
    """Return whether a task collects values of each sample for its metrics."""
    return type(task).collect is not Task.collect


def reported(task: Task, sums: Sums) -> dict[str, float]:
    """Return the task's metrics as Python floats: torch.load with weights_only=True refuses NumPy
    scalars."""
    check_direction(task)  # a task may choose its monitor by the config
    metrics = check("report", task.report(sums), task.monitor)
    return {name: float(value) for name, value in metrics.items()}
