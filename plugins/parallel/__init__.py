"""Parallel strategies: virtual workers, FSDP2, communication hooks and SyncBatchNorm of DDP."""

from __future__ import annotations

from engine import hooks
from engine.comm.reducer import LocalReducer
from engine.run import Run
from plugins.parallel.ddp_options import add_comm_hook as add_comm_hook
from plugins.parallel.ddp_options import sync_batch_norm as sync_batch_norm
from plugins.parallel.errors import translate
from plugins.parallel.exact import use_exact_kernels
from plugins.parallel.fsdp import ShardedReducer, ShardedWorkerReducer
from plugins.parallel.fsdp import shard as shard
from plugins.parallel.rows import plan_rows, strict_line
from plugins.parallel.shares import Balance
from plugins.parallel.strategies import check_strategy as check_strategy
from plugins.parallel.virtual import VirtualWorkers, WorkerReducer


def reducer(run: Run) -> LocalReducer | None:
    """Return the reducer of virtual workers or shards; None if each process is one worker."""
    world, model, cfg = run.world, run.model, run.cfg.ddp
    workers = run.plan.workers
    if run.plan.sharded and not workers:
        return ShardedReducer(world, model, cfg.buffers, cfg.reduce_every, cfg.timeout_s)
    if not workers:
        return None
    use_exact_kernels(run.optimizer)
    deals = run.plan.deals
    of_workers: VirtualWorkers
    if run.plan.sharded:
        of_workers = ShardedWorkerReducer(workers, world, model, cfg.timeout_s, deals)
    else:
        of_workers = WorkerReducer(workers, world, model, cfg.find_unused_parameters, deals)
    if cfg.shares == ["auto"]:
        of_workers.balance = Balance(world.size)
    return of_workers


hooks.reducers.add(reducer)
hooks.plan_rows.add(plan_rows)
hooks.strict_lines.add(strict_line)
hooks.translators.add(translate)
