"""The metrics of a log line: of the steps since the last log point."""

from __future__ import annotations

import time
from typing import Any

from engine.comm import digests
from engine.meter import loading_s, means
from engine.optim.rates import rates_of
from engine.phases import phase
from engine.run import Run


def log_metrics(run: Run) -> None:
    """(all ranks) Find a straggler, which may lose virtual workers, and log the metrics since the
    last log point."""
    seconds = phase.take()
    if run.meter.stragglers:
        run.meter.stragglers.workers = run.reducer.workers_a_step(run.progress.step)
        run.record.log.straggler(run, run.meter.stragglers.find(seconds))
        run.reducer.move_workers(run)
    metrics: dict[str, Any] = training_metrics(run, seconds)
    every, step = run.cfg.digest_every, run.progress.step
    if every and step % every < run.plan.log_every and (run.world.main or run.plan.sharded):
        with run.world.host_sync():
            metrics["digest"] = digests.as_text(run.sum_of_bits())
    run.record.log.train(run, metrics)


def training_metrics(run: Run, seconds: dict[str, float]) -> dict[str, Any]:
    """Return the metrics since the last log point, the same on every rank except for times, and
    clear the meter.

    seconds  of each phase since the last log point
    """
    meter = run.meter
    elapsed = time.perf_counter() - meter.since
    for name, value in meter.totals.items():
        run.progress.epoch_totals[name] = run.progress.epoch_totals.get(name, 0.0) + value
    rates = rates_of(run.optimizer)
    metrics: dict[str, Any] = means(meter.totals, run.task.turns) | {
        "lr": rates[-1],
        "grad_norm": meter.grad_norm,
        "skipped_steps": meter.skipped,
        "samples_per_s": meter.timed_samples / elapsed,
        "data_wait_share": min(1.0, loading_s(seconds) / elapsed),
    }
    if len(rates) > 1:
        metrics["lr_min"] = rates[0]
    if meter.turn:
        metrics["turn"] = meter.turn  # of the last step, which has this `grad_norm`
    meter.clear()
    return metrics
