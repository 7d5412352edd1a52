"""A model larger than one GPU: torch's FSDP2 (`fully_shard`), with ddp.strategy=fsdp or hsdp.

Each process holds some rows of each weight, gradient and moment. A unit, in most cases a block of
layers, is whole only while the unit computes: an all-gather before, a reduce-scatter after. So
every forward pass is a collective: all ranks must take equally many, also in evaluations and
checks. With hsdp several groups of processes hold a copy of the model each.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine import hooks
from engine.comm import digests
from engine.comm.reducer import LocalReducer
from engine.comm.shards import row_range, to_local
from engine.comm.world import World
from engine.errors import LockstepError
from engine.meter import loading_s
from engine.partition import Deals
from engine.phases import Phase, phase
from plugins.parallel import private
from plugins.parallel.tree import Node, push_node, tree_sum
from plugins.parallel.unit_calls import Collective, UnitCalls, reduces_event
from plugins.parallel.virtual import VirtualWorkers

LISTS = (nn.ModuleList, nn.Sequential)

PADDING = "padding"
"""The phase of passes beyond the last worker, in the seconds of phases; without their loading."""

NEEDED = (
    "set_all_reduce_hook",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_force_sum_reduction_for_comms",
    "set_gradient_divide_factor",
)
"""Methods of torch's FSDP2; torch 2.11 has all of them."""


def shard(model: nn.Module, cfg: Any, world: World, task: Any, precision: str) -> nn.Module:
    """(all ranks) Keep this rank's rows of each weight, with ddp.strategy=fsdp or hsdp. Else return
    the model unchanged.

    Call `shard` before the optimizer is made, because `shard` replaces the parameters. The names
    of the parameters, and so checkpoints, stay the same. Raises LockstepError for a run
    unfit for FSDP2.
    """
    if cfg.ddp.strategy == "ddp":
        return model
    from torch.distributed.fsdp import (
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    group = group_size(cfg, world.size)
    on_gpus = world.size > 1 and world.device.type == "cuda"
    hooks.check_settings(
        "model",
        cfg=cfg,
        model=model,
        task=task,
        group=group,
        processes=world.size,
        precision=precision,
        through_gloo=on_gpus and "nccl" not in dist.get_backend(),
        torch=torch.__version__,
        lacking=[name for name in NEEDED if not hasattr(FSDPModule, name)],
    )
    # of a view as a block's output: in each pass, each rank
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    half = torch.bfloat16 if cfg.ddp.gather_dtype == "bf16" else None
    policy = MixedPrecisionPolicy(half, half and torch.float32, cast_forward_inputs=False)
    shape = {"replicate": world.size // group} if cfg.ddp.strategy == "hsdp" else {}
    shape["shard"] = group
    mesh = dist.init_device_mesh(world.device.type, (*shape.values(),), mesh_dim_names=(*shape,))
    chosen = {*units(model, task), model}
    # Inner modules first: each takes the weights that are left. The model is the last of all.
    for module in reversed([*model.modules()]):
        if module not in chosen:
            continue
        # Reshard the model, too: weights that stayed whole after a forward pass would be outdated
        # after the step.
        sharded: Any = fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
        private.reduce_unused(sharded)  # else a rank would send fewer gradients
    for method in task.forward_methods:
        register_fsdp_forward_method(model, method)
    return model


def group_size(cfg: Any, processes: int) -> int:
    """Return the number of processes that hold one copy of the model together. With hsdp the
    default is the number of processes of a machine."""
    if cfg.ddp.strategy == "fsdp":
        return processes
    return cfg.ddp.shards or int(os.environ.get("LOCAL_WORLD_SIZE") or processes)


def units(model: nn.Module, task: Any, strict: bool = True) -> list[nn.Module]:
    """Return the task's units; without them the blocks in the model's lists, none inside
    another block. A block that shares a weight with other modules stays a part of the model.

    strict  raise LockstepError for a unit of the task that is no part of the model, or that shares
            a weight
    """
    owners = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    chosen = task.fsdp_units(model)
    if chosen is not None:
        if strict:
            _check_units(model, chosen, owners)
        return chosen
    blocks: dict[nn.Module, bool] = {}  # a list may hold a block several times
    for module in model.modules():
        if isinstance(module, LISTS) and not any(module in block.modules() for block in blocks):
            for block in module:
                if [*block.children()] and not isinstance(block, LISTS):
                    blocks[block] = bool([*block.parameters()]) and not _tied(block, owners)
    return [block for block, alone in blocks.items() if alone]


def _check_units(model: nn.Module, chosen: list[nn.Module], owners: Counter[Any]) -> None:
    """Raise LockstepError if a unit is no part of the model or shares a weight."""
    names = {module: name for name, module in model.named_modules()}
    for unit in chosen:
        tied = _tied(unit, owners)
        if unit in names and not tied:
            continue
        what = "it returns a module that is no part of the model"
        if unit in names:
            weight = {p: name for name, p in model.named_parameters()}[tied[0]]
            what = f"it returns {names[unit]}, whose weight {weight} another module has, too"
        raise LockstepError(
            what,
            "the task's `fsdp_units`",
            "return one module that has both, or leave it out",
            everywhere=True,
        )


def _tied(unit: nn.Module, owners: Counter[Any]) -> list[Any]:
    """Return the weights shared by a unit and a module outside of the unit."""
    inside = Counter(p for module in unit.modules() for p in module.parameters(recurse=False))
    return [p for p, count in inside.items() if owners[p] > count]


class _OverShards(LocalReducer):
    """A reducer of a rank that holds some rows of each weight.

    calls    of FSDP2's units
    watched  names of the parameters with a hook that removes the name from `unused`
    unused   names of the parameters that no pass of the step has used; empty in a step without
             checks
    """

    model: Any

    follows_passes = True

    def __init__(self, *arguments: Any, timeout_s: float):
        super().__init__(*arguments)
        self.calls = UnitCalls(self.world, self.model, timeout_s)
        self.watched: set[str] = set()
        self.unused: set[str] = set()

    def begin_step(self) -> None:
        """Watch for parameters without a gradient: FSDP2 makes zeros, and AdamW would change the
        parameters."""
        super().begin_step()
        parameters = private.unsharded(self.model) if self.check else {}
        for name, p in parameters.items():
            if name not in self.watched:
                p.register_post_accumulate_grad_hook(lambda _, name=name: self.unused.discard(name))
        self.watched |= parameters.keys()
        self.unused = {*parameters}

    def end_forward(self) -> None:
        self.calls.end_forward()

    def end_pass(self) -> None:
        self.calls.end_pass()

    def grad_norm(self, grads: list[Tensor]) -> Tensor:
        """(all ranks) Return the norm of all gradients. Raises LockstepError if a parameter got no
        gradient."""
        if self.unused:
            names = [name for name, _ in self.model.named_parameters() if name in self.unused]
            raise LockstepError(
                f"some parameters got no gradient: {', '.join(names[:3])}",
                f"rank {self.world.rank}",
                "use every parameter in every step, or ddp.strategy=ddp with "
                "ddp.find_unused_parameters=true",
            )
        return super().grad_norm(grads)

    def sum_over_shards(self, tensor: Tensor) -> None:
        """(all ranks) Add up a tensor, in place, over the ranks that hold other rows."""
        parameter: Any = next(self.model.parameters())
        dist.all_reduce(tensor, group=parameter.device_mesh.get_group("shard"))

    def sum_of_bits(self) -> Tensor:
        """(all ranks) Return the sums over the rows of all ranks, see `digests.sum_of_bits`."""
        sums = torch.zeros(2, digests.BLOCKS, dtype=torch.int32, device=self.world.device)
        start = 0  # of a weight, in words of four bytes
        for p in self.model.parameters():
            words = p.numel() * max(1, p.element_size() // 4)
            if to_local(p).numel():
                first = start + row_range(p).start * words // len(p)
                sums += digests.sum_of_bits([to_local(p.detach())], first)
            start += words
        self.sum_over_shards(sums)
        return sums

    def any(self, here: bool) -> bool:
        """(all ranks) Return whether `here` is true on any rank."""
        return bool(self.world.reduce_on_rank0(here, any))


class ShardedReducer(_OverShards):
    """Each process is its own worker. Gradients are added up after each `every`-th pass of a step,
    and after the last pass."""

    def __init__(self, world: World, model: nn.Module, mode: str, every: int, timeout_s: float):
        super().__init__(world, model, mode, timeout_s=timeout_s)
        self.every, self.passes = every, 0

    def begin_pass(self, micro: Any) -> None:
        self.passes += 1
        due = micro.closes_step or (self.every and self.passes % self.every == 0)
        if micro.closes_step:
            self.passes = 0
        self.model.set_requires_all_reduce(micro.closes_step)  # between the copies of hsdp
        self.calls.begin_pass(bool(due))

    def grad_norm(self, grads: list[Tensor]) -> Tensor:
        norm = super().grad_norm([*map(to_local, grads)])
        square = norm.double().square()
        self.sum_over_shards(square)
        return square.sqrt().to(norm.dtype)


class ShardedWorkerReducer(_OverShards, VirtualWorkers):
    """Virtual workers whose gradients `TreeReduceScatter` adds up, a round of workers at a time.

    seconds  of each phase until the end of the last pass
    """

    in_rounds = True

    def __init__(
        self,
        workers: int,
        world: World,
        model: nn.Module,
        timeout_s: float,
        deals: Deals | None = None,
    ):
        super().__init__(workers, world, model, deals, timeout_s=timeout_s)
        self.seconds: dict[str, float] = {}
        self.trees: dict[str, TreeReduceScatter] = {}
        for name, unit in self.calls.units.items():
            self.trees[name] = TreeReduceScatter(workers, name, self.calls)
            unit.set_custom_reduce_scatter(self.trees[name])
            unit.set_all_reduce_hook(self.trees[name].add)

    def begin_pass(self, micro: Any) -> None:
        super().begin_pass(micro)
        self.calls.begin_pass(micro.closes_worker)
        turn = self.blocks[self.world.rank].index(micro.worker)
        ranks: list[int] = []
        for rank, block in enumerate(self.blocks):
            if block[turn] < self.workers:
                ranks.append(rank)
        for tree in self.trees.values():
            tree.sums, tree.ranks = 0, ranks

    def end_pass(self) -> None:
        """(all ranks) Raise LockstepError unless the tree of each unit has received one sum for
        each worker of the round."""
        super().end_pass()
        if self.worker >= self.workers:
            self._end_padding()
        self.seconds = _seconds_until_now()
        for name, tree in self.trees.items():
            if self.calls.syncs and self.calls.trains(name) and tree.sums != 1:
                raise LockstepError(
                    f"the gradients of {name or 'the model'} were added up {tree.sums} times in a "
                    "pass",
                    "virtual_workers",
                    "take one gradient of the loss in each pass, or use ddp.strategy=ddp",
                    everywhere=True,
                )

    def _end_padding(self) -> None:
        """Count the time of a pass beyond the last worker apart, from the end of the pass before:
        it is no time of a worker. A rank never begins a step with such a pass."""
        now = _seconds_until_now()
        seconds = phase.seconds
        for name in (Phase.AUGMENTATION, Phase.FORWARD, Phase.BACKWARD):
            added = now.get(name, 0.0) - self.seconds.get(name, 0.0)
            seconds[name] = seconds.get(name, 0.0) - added
            seconds[PADDING] = seconds.get(PADDING, 0.0) + added
        # The log's data wait has this time, too.
        loading = loading_s(now) - loading_s(self.seconds)
        name = Phase.LOADING_PADDING
        seconds[name] = seconds.get(name, 0.0) + loading

    def workers_a_step(self, step: int) -> float:
        """Return the passes of a step on a GPU, whose clock counts passes beyond the last worker,
        too: there all ranks wait for each other in each pass."""
        workers = super().workers_a_step(step)
        return len(self.blocks[0]) if self.world.device.type == "cuda" else workers


def _seconds_until_now() -> dict[str, float]:
    """Return the seconds of each phase, also of the current phase until now."""
    name, _, began = phase.now
    seconds = dict(phase.seconds)
    seconds[name] = seconds.get(name, 0.0) + time.monotonic() - began
    return seconds


class TreeReduceScatter(Collective):
    """The sum of one unit's gradients over all workers, along the tree of `WorkerReducer`, as
    FSDP2's reduce-scatter.

    The reduce-scatter of a backend adds in a different order. This class sends as many bytes by
    all_to_all, which adds nothing: a rank receives the gradients of its own rows from every rank. A
    round has at most one worker on each rank, and the workers of a round are neighbours, so at most
    log2(workers) + 1 sums wait, of the rank's rows only.

    ranks  those with a worker in the current round
    seen   number of added workers
    sums   number of sums received in the current pass
    """

    def __init__(self, workers: int, unit: str, calls: UnitCalls):
        super().__init__("reduce_scatter", dist.all_to_all_single, reduces_event(unit), calls.order)
        self.workers, self.seen, self.sums = workers, 0, 0
        self.ranks: list[int] = []
        self.leaves: list[Tensor] = []
        self.nodes: list[Node] = []

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> None:
        received = torch.empty_like(input_tensor)
        super().__call__(received, input_tensor, group=options["group"])
        self.leaves = [*received.chunk(dist.get_world_size(options["group"]))]

    def add(self, output: Tensor) -> None:
        """Push the gradients of a round into the tree. FSDP2 calls this hook after the
        reduce-scatter; in a world of one, which has no reduce-scatter, in its place."""
        self.sums += 1
        if output.is_cuda:
            # The memory belongs to another stream than the current stream, and returns to it.
            for tensor in (*self.leaves, output):
                tensor.record_stream(torch.cuda.current_stream())
        leaves = self.leaves or [output.clone()]
        for rank in self.ranks:  # a leaf beyond the last worker has no samples
            push_node(self.nodes, Node(self.seen, self.seen + 1, [leaves[rank]]))
            self.seen += 1
        output.zero_()  # FSDP2 adds it to the gradient: nothing before the last round
        if self.seen == self.workers:
            output.copy_(tree_sum(self.nodes)[0])
            self.nodes, self.seen = [], 0
