"""Advice for a GPU whose memory has run out."""

from __future__ import annotations

from engine.config import Config
from engine.plan import Plan, divisors
from engine.run import Run
from plugins.resilience import status


def prepare_advice(run: Run) -> None:
    """Keep what errors in the steps to come need: the parameters that DDP numbers, and batches
    that need less memory."""
    trained = [name for name, p in run.model.named_parameters() if p.requires_grad]
    status.current.parameter_names = trained
    status.current.smaller = tuple(
        next_smaller_batch(run.plan, run.cfg, each) for each in (False, True)
    )
    status.current.shrinks = run.cfg.oom == "shrink"


def next_smaller_batch(plan: Plan, cfg: Config, evaluating: bool) -> tuple[int, dict[str, int]]:
    """Return (samples of a forward pass, settings that take the same steps with fewer of them):
    those of the largest smaller batch that divides this process's share of the global batch; none
    if it is a single sample already."""
    if evaluating:
        batch = cfg.eval_batch_size or 2 * cfg.batch_size
        return batch, {"eval_batch_size": batch // 2} if batch > 1 else {}
    # other bits; excludes accumulation
    if plan.workers or (cfg.ddp.static_graph and plan.processes > 1):
        return plan.micro_batch, {}
    copies = max(1, len(plan.devices))
    batch, share = plan.micro_batch // copies, plan.global_batch // (plan.processes * copies)
    if not (fits := divisors(share, batch - 1)):
        return batch, {}
    return batch, {
        "global_batch": plan.global_batch,
        "batch_size": fits[-1],
        "gradient_accumulation_steps": 0,
    }
