"""The rows of the plan about processes, virtual workers, strategies and DDP."""

from __future__ import annotations

import math

from engine.comm.shards import to_local
from engine.errors import amount, few
from engine.plan import Plan
from engine.run import Run
from plugins.parallel import private, strategies
from plugins.parallel.shares import counts_of
from plugins.parallel.tree import subtree_roots

MIB = 1 << 20
"""The unit of DDP's bucket sizes. DDP has a small first bucket only if no bucket size is set."""


def plan_rows(run: Run) -> dict[str, str]:
    """Return the rows about virtual workers, and about the memory of each strategy."""
    rows: dict[str, str] = {}
    if run.plan.workers:
        gradient_bytes = sum(to_local(p).nbytes for p in run.model.parameters() if p.requires_grad)
        rows = describe_workers(run.plan, gradient_bytes)
    if run.world.size > 1:
        rows["strategies"] = strategies.describe(run)
    return rows


def describe_workers(plan: Plan, gradient_bytes: int) -> dict[str, str]:
    """Return the rows about virtual workers: samples, processes and sums.

    gradient_bytes  of the gradients of one worker in a process
    """
    workers, processes = plan.workers, plan.processes
    blocks = plan.deals.at(0)
    counts = counts_of(plan.deals, blocks)
    per_process = " or ".join(map(str, sorted({*counts})))
    if max(counts) - min(counts) > 1:  # ddp.shares
        per_process = few(counts)
    roots, waiting = zip(*map(subtree_roots, blocks), strict=True)
    nodes = max(map(len, roots))
    gradient_mb = gradient_bytes / 1e6
    one_way = (processes - 1) / processes * gradient_mb
    traffic = "nothing to send"
    if plan.sharded:
        sent = len(blocks[0]) * (processes - 1) * gradient_mb
        traffic = f"{sent:.2g} MB per process and step"
    elif processes > 1:
        traffic = (
            f"{(nodes + 1) * one_way:.2g} MB per process and step out and back (an "
            f"all-reduce: {2 * one_way:.2g})"
        )
    return {
        "global batch": f"{plan.global_batch}, dealt to {workers} virtual workers: up to "
        f"{-(-plan.global_batch // workers)} samples each, in "
        f"{amount(plan.passes, 'pass')} of up to {plan.micro_batch}",
        "virtual workers": f"{per_process} of {workers} per process x "
        f"{amount(processes, 'process')}; the same bits on 1 to {workers} processes",
        "tree of sums": f"{max(waiting)} of {gradient_mb:.1f} MB waiting in a process at most; "
        f"{traffic}",
    }


def strict_line(run: Run) -> str:
    """Return the line of train_ddp.py about the work of DDP in each step, from DDP's own
    records."""
    cfg = run.cfg.ddp
    hook = cfg.comm_hook
    if run.plan.workers:
        hook = "tree of virtual workers"
    elif hook == "none":
        hook = "sum"
    record = private.ddp_record(run.net)
    size = record["total_parameter_size_bytes"]
    count = math.ceil(size / (cfg.bucket_cap_mb * MIB))
    return (
        f"DDP: {record['backend_name']}, {record['num_parameter_tensors']} tensors, "
        f"{size / 1e6:.3g} MB a step in about {amount(count, 'bucket')} of at most "
        f"{cfg.bucket_cap_mb:g} MiB (the first step: one), hook: {hook}"
    )
