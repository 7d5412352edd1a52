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
from plugins.parallel.strategies import check_strategy as check_strategy
from plugins.parallel.virtual import WorkerReducer


def reducer(run: Run) -> LocalReducer | None:
    """Return the reducer of virtual workers or shards; None if each process is one worker."""
    world, model, cfg = run.world, run.model, run.cfg.ddp
    workers = run.plan.workers
    if workers:
        use_exact_kernels(run.optimizer)
    if run.plan.sharded and workers:
        return ShardedWorkerReducer(workers, world, model, cfg.timeout_s)
    if run.plan.sharded:
        return ShardedReducer(world, model, cfg.buffers, cfg.reduce_every, cfg.timeout_s)
    if workers:
        return WorkerReducer(workers, world, model, cfg.find_unused_parameters)
    return None


hooks.reducers.add(reducer)
hooks.plan_rows.add(plan_rows)
hooks.strict_lines.add(strict_line)
hooks.translators.add(translate)
