"""A model larger than one GPU: torch's FSDP2 (`fully_shard`), with ddp.strategy=fsdp or hsdp.

Each process holds some rows of each weight, gradient and moment. A unit, mostly a block of layers,
is whole only while it computes: an all-gather before, a reduce-scatter after. So every forward pass
is a collective: all ranks must take equally many, in evaluations and checks, too. With hsdp several
groups of processes hold a copy of the model each.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.comm import digests
from engine.comm.reducer import LocalReducer
from engine.comm.shards import row_range, to_local
from engine.comm.world import World
from engine.errors import LockstepError
from plugins.parallel import private
from plugins.parallel.tree import Node, push_node, tree_sum
from plugins.parallel.unit_calls import Collective, UnitCalls
from plugins.parallel.virtual import Dealt

LISTS = (nn.ModuleList, nn.Sequential)

NEEDED = (
    "set_all_reduce_hook",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_force_sum_reduction_for_comms",
    "set_gradient_divide_factor",
)
"""Methods of torch's FSDP2; torch 2.11 has all of them."""


def shard(model: nn.Module, cfg: Any, world: World, task: Any, precision: str) -> nn.Module:
    """(all ranks) With ddp.strategy=fsdp or hsdp keep this rank's rows of each weight: call it
    before the optimizer is made, because it replaces the parameters. The names, and so checkpoints,
    stay as they are. Else do nothing."""
    key = f"ddp.strategy={cfg.ddp.strategy}"
    if cfg.ddp.strategy == "ddp":
        return model
    half = torch.bfloat16 if cfg.ddp.gather_dtype == "bf16" else None
    group = group_size(cfg, world.size)
    types = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    scalar = next((name for name, p in model.named_parameters() if not p.ndim), "")
    through_gloo = (
        world.size > 1 and world.device.type == "cuda" and "nccl" not in dist.get_backend()
    )
    for wrong, what, todo in (
        # A segmentation fault of two processes on one H200 (torch 2.11).
        (
            through_gloo,
            "shards on GPUs through gloo",
            "give each process a GPU and use NCCL, or ddp.strategy=ddp",
        ),
        (
            task.num_trials,
            "trials call the model on each rank by itself",
            "make none, or use ddp.strategy=ddp",
        ),
        (half and precision != "bf16", "ddp.gather_dtype=bf16 without autocast", "add amp=bf16"),
        (
            len(types) > 1,
            f"weights of several types, {' and '.join(sorted(types))}",
            "give all of them one type",
        ),
        (
            cfg.ddp.find_unused_parameters,
            "ddp.find_unused_parameters=true",
            "use every weight, or ddp.strategy=ddp",
        ),
        (scalar, f"the weight {scalar} has no rows to shard", "give it the shape (1,)"),
        (
            world.size % group,
            f"{world.size} processes are no groups of {group} (ddp.shards)",
            "give a divisor",
        ),
    ):
        if wrong:
            raise LockstepError(what, key, todo, everywhere=True)
    from torch.distributed.fsdp import (
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    if lacking := next((name for name in NEEDED if not hasattr(FSDPModule, name)), ""):
        raise LockstepError(
            f"torch {torch.__version__} lacks {lacking}", key, "update it to 2.11", everywhere=True
        )
    # of a view as a block's output: in each pass, each rank
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    recipe = MixedPrecisionPolicy(half, torch.float32 if half else None, cast_forward_inputs=False)
    shape = {"replicate": world.size // group} if cfg.ddp.strategy == "hsdp" else {}
    shape["shard"] = group
    mesh = dist.init_device_mesh(world.device.type, (*shape.values(),), mesh_dim_names=(*shape,))
    blocks = {*units(model, task), model}
    # Inner modules first: each takes the weights that are left. The model is the last of all.
    for module in [module for module in reversed([*model.modules()]) if module in blocks]:
        # The model, too: what it kept whole after a forward pass would be of no use once weights
        # change.
        sharded: Any = fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=recipe)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
        private.reduce_unused(sharded)  # else a rank would send fewer gradients
    for method in task.forward_methods:
        register_fsdp_forward_method(model, method)
    return model


def group_size(cfg: Any, processes: int) -> int:
    """Return how many processes hold one copy of the model together; with hsdp those of a machine,
    if not given."""
    if cfg.ddp.strategy == "fsdp":
        return processes
    return cfg.ddp.shards or int(os.environ.get("LOCAL_WORLD_SIZE") or processes)


def units(model: nn.Module, task: Any, strict: bool = True) -> list[nn.Module]:
    """Return the task's units; or else the blocks in the model's lists, none inside another. One
    that shares a weight with other modules stays a part of the rest; `strict`: one of the task's is
    an error."""
    names, found = {module: name for name, module in model.named_modules()}, task.fsdp_units(model)
    owners = Counter(p for module in names for p in module.parameters(recurse=False))
    if found is None:
        found = []
        for each in names:
            if isinstance(each, LISTS) and not any(each in unit.modules() for unit in found):
                found += [
                    block for block in each if [*block.children()] and not isinstance(block, LISTS)
                ]
        found = [unit for unit in found if [*unit.parameters()] and not _shared(unit, owners)]
        return [*dict.fromkeys(found)]  # a list may hold a block several times
    for unit in found if strict else ():
        if unit not in names or (tied := _shared(unit, owners)):
            what = "a module that is no part of the model"
            if unit in names:
                weight = next(name for name, p in model.named_parameters() if p is tied[0])
                what = f"{names[unit]}, whose weight {weight} another module has, too"
            todo = "return one module that has both, or leave it out"
            raise LockstepError(
                f"it returns {what}", "the task's `fsdp_units`", todo, everywhere=True
            )
    return found


def _shared(unit: nn.Module, owners: Counter[Tensor]) -> list[Tensor]:
    """Return the weights of a unit that are also those of a module outside of it."""
    here = Counter(p for module in unit.modules() for p in module.parameters(recurse=False))
    return [p for p, count in here.items() if owners[p] > count]


class _OverShards:
    """What a rank with some rows of each weight does with those of the others. For a class that
    extends `LocalReducer`."""

    world: World
    model: Any
    check: bool
    calls: UnitCalls
    watched: set[str]  # names of parameters with a hook that takes them out of `unused`
    unused: set[str]  # names of parameters that no pass of this step has used; if it is checked

    follows_passes = True

    def follow_units(self, timeout_s: float) -> None:
        self.calls = UnitCalls(self.world, self.model, timeout_s)
        self.watched, self.unused = set(), set()

    def begin_step(self) -> None:
        """Look which parameters get a gradient: FSDP2 makes zeros of those that get none, and AdamW
        would move them."""
        super().begin_step()  # type: ignore[misc]
        whole = private.unsharded(self.model) if self.check else {}
        for name in whole.keys() - self.watched:
            whole[name].register_post_accumulate_grad_hook(
                lambda _, name=name: self.unused.discard(name),
            )
        self.watched |= whole.keys()
        self.unused = {*whole}

    def end_forward(self) -> None:
        self.calls.end_forward()

    def end_pass(self) -> None:
        self.calls.end_pass()

    def grad_norm(self, grads: list[Tensor]) -> Tensor:
        if self.unused:
            todo = (
                "use every parameter in every step, or ddp.strategy=ddp with "
                "ddp.find_unused_parameters=true"
            )
            what = f"some parameters got no gradient: {', '.join(self._in_order(self.unused)[:3])}"
            raise LockstepError(what, f"rank {self.world.rank}", todo)
        return super().grad_norm(grads)  # type: ignore[misc]

    def _in_order(self, names: set[str]) -> list[str]:
        return [name for name, _ in self.model.named_parameters() if name in names]

    def sum_over_shards(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=next(self.model.parameters()).device_mesh.get_group("shard"))

    def sum_of_bits(self) -> Tensor:
        """(all ranks) Return the sums of the whole weights, see `digests.sum_of_bits`."""
        sums, start = torch.zeros(2, digests.BLOCKS, dtype=torch.int32, device=self.world.device), 0
        for p in self.model.parameters():
            words = p.numel() * max(1, p.element_size() // 4)
            if to_local(p).numel():
                sums += digests.sum_of_bits(
                    [to_local(p.detach())], start + row_range(p).start * words // len(p)
                )
            start += words
        self.sum_over_shards(sums)
        return sums

    def any(self, here: bool) -> bool:
        """(all ranks) Return whether any rank says so."""
        return bool(self.world.reduce_on_rank0(here, any))


class ShardedReducer(_OverShards, LocalReducer):
    """Each process is its own worker. Gradients are added up after each `every`-th pass of a step,
    and its last."""

    def __init__(self, world: World, model: nn.Module, mode: str, every: int, timeout_s: float):
        super().__init__(world, model, mode)
        self.every, self.passes = every, 0
        self.follow_units(timeout_s)

    def begin_pass(self, micro: Any) -> None:
        self.passes += 1
        due = micro.closes_step or (self.every and self.passes % self.every == 0)
        self.passes = 0 if micro.closes_step else self.passes
        self.model.set_requires_all_reduce(micro.closes_step)  # between the copies of hsdp
        self.calls.begin_pass(bool(due))

    def grad_norm(self, grads: list[Tensor]) -> Tensor:
        norm = super().grad_norm([to_local(grad) for grad in grads])
        square = norm.double().square()
        self.sum_over_shards(square)
        return square.sqrt().to(norm.dtype)


class ShardedWorkerReducer(_OverShards, Dealt):
    """Virtual workers whose gradients `Tree` adds up, a round of them at a time."""

    in_rounds = True

    def __init__(self, workers: int, world: World, model: nn.Module, timeout_s: float):
        super().__init__(workers, world, model)
        self.follow_units(timeout_s)
        self.trees = {name: Tree(workers, name, self.calls) for name in self.calls.units}
        for name, unit in self.calls.units.items():
            unit.set_custom_reduce_scatter(self.trees[name])
            unit.set_all_reduce_hook(self.trees[name].add)

    def begin_pass(self, micro: Any) -> None:
        super().begin_pass(micro)
        self.calls.begin_pass(micro.closes_worker)
        for tree in self.trees.values():
            tree.sums = 0

    def end_pass(self) -> None:
        """(all ranks) Raises LockstepError unless each unit has given its tree one sum for each
        worker of the round."""
        super().end_pass()
        for name, tree in self.trees.items() if self.calls.syncs else ():
            if self.calls.trains(name) and tree.sums != 1:
                unit = name or "the model"
                what = f"the gradients of {unit} were added up {tree.sums} times in a pass"
                todo = "take one gradient of the loss in each pass, or use ddp.strategy=ddp"
                raise LockstepError(what, "virtual_workers", todo, everywhere=True)


class Tree(Collective):
    """The sum of one unit's gradients over all workers, along the tree of `WorkerReducer`, in
    FSDP2's reduce-scatter.

    The backend's own adds in an order of its own. This one sends as many bytes, by all_to_all, and
    adds nothing: a rank receives every rank's gradient of its own rows. A round of workers, one on
    each rank, are neighbours, so at most log2(workers) + 1 sums wait, of this rank's rows only.

    seen  workers that have been added
    sums  received in the pass under way
    """

    def __init__(self, workers: int, unit: str, calls: UnitCalls):
        super().__init__("reduce_scatter", dist.all_to_all_single, calls.reduces(unit), calls.order)
        self.workers, self.seen, self.sums = workers, 0, 0
        self.leaves: list[Tensor] = []
        self.nodes: list[Node] = []

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> None:
        received = torch.empty_like(input_tensor)
        super().__call__(received, input_tensor, group=options["group"])
        self.leaves = [*received.chunk(dist.get_world_size(options["group"]))]

    def add(self, output: Tensor) -> None:
        """Called after the reduce-scatter; in a world of one, which has none, in its place. On a
        GPU in another stream than that which the memory was taken in, and will be given to
        again."""
        self.sums += 1
        for tensor in (*self.leaves, output) if output.is_cuda else ():
            tensor.record_stream(torch.cuda.current_stream())
        # what is beyond has no samples
        for leaf in (self.leaves or [output.clone()])[: self.workers - self.seen]:
            push_node(self.nodes, Node(self.seen, self.seen + 1, [leaf]))
            self.seen += 1
        output.zero_()  # it is added to the gradient: nothing before the last round
        if self.seen == self.workers:
            output.copy_(tree_sum(self.nodes)[0])
            self.nodes, self.seen = [], 0
