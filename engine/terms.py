"""A loss of several terms, each divided by its own weight in the whole global batch (a detector's two means, say).

Quotients cannot be divided once their gradients have been added up, so the weights must be known before the backward
pass. In a step of one pass they meet between forward and backward, in one small all-reduce that no backward pass hides;
no host waits for it. In a step of several, all forward passes are first made for their weights alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from engine.contract import Loss, check_terms, same_names
from engine.global_batch import weights_of
from engine.phases import phase
from engine.seeds import seed_generators

if TYPE_CHECKING:
    from engine.run import Run


class Terms:
    """Add up the weights of the terms of a step, over its passes and the ranks.

    names  of the terms, once all ranks have told theirs
    known  (terms,) the weights of the step under way, where it has several passes
    """

    def __init__(self, run: Run):
        self.run = run
        self.names: list[str] | None = None
        self.known: Tensor | None = None

    def weights(self, terms: Mapping[str, Loss], micro: Any) -> Tensor:
        """(all ranks) Return the (terms,) weights of the whole global batch, float64."""
        return self._over_all(self._of_pass(terms, micro)) if self.known is None else self.known

    def weigh(self, passes: Iterable[tuple[Any, Any]]) -> Iterable[tuple[Any, Any]]:
        """(all ranks) Return the passes of a step once the weights of their terms have been added up: each makes one
        forward pass more, with the random numbers and the buffers that it will have again, and with a graph: without
        one torch may compute in another order of memory, in which dropout meets other elements. All batches of the step
        are held meanwhile."""
        run, held, rows = self.run, list[tuple[Any, Any]](), torch.zeros(())
        if run.plan.accumulation == 1:
            return passes
        run.begin_step()
        in_ddp = isinstance(run.net, DistributedDataParallel)
        for batch, micro in passes:
            phase("weights of the terms")
            if micro.opens_worker:
                run.buffers.restore()
            seed_generators(run.world.device, "train", run.cfg.seed, run.progress.epoch, micro.slots.start)
            with run.net.no_sync() if in_ddp else nullcontext(), run.precision.autocast():
                rows = rows + self._of_pass(check_terms(run.task.losses(run.net, batch)), micro)
            held.append((batch, micro))
        run.buffers.restore()
        self.known = self._over_all(rows)
        return held

    def _of_pass(self, terms: Mapping[str, Loss], micro: Any) -> Tensor:
        """(terms,) the weights of a pass, or with virtual workers a row for each worker; a filler's are zeros."""
        run = self.run
        if self.names != [*terms]:
            self.names = same_names([*terms], self.names, run.world.gather, "terms")
        weights = weights_of(terms, run.world.device)
        weights = torch.zeros_like(weights) if micro.filler else weights
        return run.virtual.as_row(weights, micro.worker) if run.virtual else weights

    def _over_all(self, rows: Tensor) -> Tensor:
        self.run.world.sum(rows)
        return self.run.total(rows)
