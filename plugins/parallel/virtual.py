"""Virtual workers: a training takes the same bits on any number of processes.

`virtual_workers=V` divides the samples of a step among V workers. A process runs a block of
neighbours, one worker after the other. The result of a worker depends on (seed, step, number of the
worker) alone. The results of the workers are added up along one binary tree over the numbers:
(0+1)+(2+3) and so on. Floating-point addition is commutative but not associative, so the same tree
over the same operands gives the same bits on any rank.

The idea is EasyScale's (Li et al., SC'23, arXiv 2208.14228). See docs/same-bits.md.
"""

# No `from __future__ import annotations`: DDP refuses a hook whose annotations are texts.

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.functional import pad

from engine import hooks
from engine.comm.reducer import LocalReducer
from engine.comm.world import World
from engine.errors import LockstepError, console, few
from engine.partition import Deals, deal_workers
from plugins.parallel.grad_norm import exact_grad_norm
from plugins.parallel.shares import Balance, mean_workers
from plugins.parallel.tree import Node, Span, push_node, subtree_roots, tree_sum

# the name since torch 2.13
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

ALIGNED = 32
"""Bytes: CUDA's kernels read four float64 at once where the address is a multiple."""


class TreeAllReduce:
    """(all ranks) One sum over the nodes of all processes.

    Each process adds up one piece of the tensor. If every process has one node, a process sends and
    receives as many bytes as in a ring all-reduce. In shared memory every process reads all pieces.

    spans_by_rank  the nodes of each process
    local_sums     the sums of this process, one for each node: flat, of one length and
                   type. May be overwritten
    """

    def __init__(self, spans_by_rank: list[list[Span]], local_sums: list[Tensor]):
        self.spans_by_rank, self.local_sums = spans_by_rank, local_sums
        self.size, self.counts = len(spans_by_rank), [*map(len, spans_by_rank)]
        on_cpu = local_sums[0].device.type == "cpu"
        self.channel = hooks.shared_memory.first(None) if on_cpu else None
        self.sends = self.size > 1 and self.channel is None
        if self.sends:
            self._send()

    def _send(self) -> None:
        """Send each process a piece of each node of this process.

        The tensors go as bytes, because gloo does not support every type, and through the host if
        the backend does not support all_to_all on a GPU.
        """
        length = len(self.local_sums[0])
        device = self.local_sums[0].device if "nccl" in dist.get_backend() else "cpu"
        self.piece = -(-length // self.size)
        nodes = torch.stack(self.local_sums).to(device)
        pieces = pad(nodes, (0, self.size * self.piece - length)).view(-1, self.size, self.piece)
        # (ranks, nodes, piece); must live until it has arrived
        self.sent = pieces.transpose(0, 1).contiguous()
        self.received = self.sent.new_empty(sum(self.counts) * self.piece)
        piece_bytes = self.piece * self.sent.element_size()
        self.work: Any = dist.all_to_all_single(
            self.received.view(torch.uint8),
            self.sent.view(-1).view(torch.uint8),
            [count * piece_bytes for count in self.counts],
            [len(self.local_sums) * piece_bytes] * self.size,
            async_op=True,
        )

    def add(self) -> None:
        """Add up the piece of this process, and send the sum to all processes."""
        if not self.sends:
            return
        self.work.wait()
        self.total = self.received.new_empty(self.size * self.piece)
        # must live until it has arrived
        self.root = self._root(self.received.view(-1, self.piece).split(self.counts))
        self.work = ALL_GATHER(self.total, self.root, async_op=True)

    def result(self) -> Tensor:
        """Return the sum, flat."""
        if self.sends:
            self.work.wait()
            return self.total[: len(self.local_sums[0])].to(self.local_sums[0].device)
        if self.channel is not None:
            return self.channel.gather(self.local_sums, self.counts, self._root)
        return self._root([self.local_sums])

    def _root(self, parts: Sequence[Iterable[Tensor]]) -> Tensor:
        """Return the root of the tree, given the sums of each process, one for each node."""
        nodes: list[Node] = []
        for spans, sums in zip(self.spans_by_rank, parts, strict=True):
            for (begin, end), part in zip(spans, sums, strict=True):
                nodes.append(Node(begin, end, [part]))
        nodes.sort(key=attrgetter("begin"))
        # other ranks may still read shared memory
        return tree_sum(nodes, in_place=self.channel is None)[0]


class VirtualWorkers(LocalReducer):
    """The buffers and numbers of the virtual workers of one process within a step. Subclasses add
    the gradients.

    deals          the workers of each process, which may change with the step
    blocks         the workers of each process in the current step
    block          the workers of this process among them
    balance        moves workers between processes; None: they stay
    spans_by_rank  the remaining nodes of each process's workers
    counted        the step of the last call of `workers_a_step`
    changes        nodes of the tree of changes of running statistics, float64
    counters       buffers of integers, after the last worker
    worker         number of the current worker; -1 before the first worker of a step
    averaged       names of changed buffers outside of norms, which a line has named
    idle           the current worker has no samples: the step has fewer samples than workers
    samples        number of samples of the step
    """

    in_rounds = False  # see `partition.blocks_of`

    follows_passes = True

    def __init__(self, workers: int, world: World, model: nn.Module, deals: Deals | None = None):
        super().__init__(world, model, "same")
        self.balance: Balance | None = None
        self.workers = workers
        even = deal_workers(workers, [1] * world.size)
        self.deals = deals or Deals(even, self.in_rounds)
        self.blocks: list[list[int]] = []
        self.take_blocks(self.deals.at(0))
        self.counted = 0
        self.changes: list[Node] = []
        self.counters: dict[str, Tensor] = {}
        self.averaged: set[str] | None = None
        self.worker, self.idle, self.samples = -1, False, 0

    def take_blocks(self, blocks: list[list[int]]) -> None:
        """Take the workers of each process in the coming step."""
        if blocks is self.blocks:
            return
        self.blocks = blocks
        self.spans_by_rank: list[list[Span]] = []
        for rank, block in enumerate(blocks):
            workers = [worker for worker in block if worker < self.workers]
            self.spans_by_rank.append(subtree_roots(workers)[0])
            if rank == self.world.rank:
                self.block = workers

    # ---- shares of the processes ----

    def workers_a_step(self, step: int) -> float:
        steps = range(self.counted, step)
        self.counted = step
        return mean_workers(self.deals, self.world.rank, steps)

    def move_workers(self, run: Any) -> None:
        if self.balance:
            self.balance.move(run)

    # ---- one worker after the other ----

    def begin_step(self) -> None:
        """Keep the buffers, and forget a step that was computed and not taken."""
        super().begin_step()
        self.worker, self.counters, self.changes = -1, {}, []

    def begin_pass(self, micro: Any) -> None:
        """Begin a pass, a `data_loader.MicroBatch`."""
        if micro.opens_worker:
            if self.worker < 0:
                self.take_blocks(self.deals.at(micro.step))
            self.begin_worker(micro.worker, micro.empty)
        self.samples = micro.samples

    def begin_worker(self, worker: int, idle: bool) -> None:
        """Keep the results of the previous worker. Begin with the buffers as before the step."""
        if self.worker >= 0:
            self._keep_buffers()
        self.buffers.restore()
        self.worker, self.idle = worker, idle

    def end_step(self, skipped: Tensor) -> None:
        """(all ranks) Add the changes of all workers to the buffers, or restore the buffers if the
        step was skipped."""
        self.add_changes(busy=min(self.workers, self.samples))
        super().end_step(skipped)

    def add_changes(self, busy: int) -> None:
        """(all ranks) Add to the buffers the mean change of the `busy` workers, the workers with
        samples."""
        self._keep_buffers()
        self.worker, self.counters = -1, {}
        if not self.changes:
            return
        if self.averaged is None:
            self._name_averaged()
        exchange = TreeAllReduce(self.spans_by_rank, [node.sums[0] for node in self.changes])
        exchange.add()
        self.changes = []
        change = exchange.result() / busy
        start = 0
        for _, buffer, before in self.buffers.changes():
            if buffer.is_floating_point():
                stop = start + buffer.numel()
                buffer.copy_(before.double() + change[start:stop].view(buffer.shape))
                start = stop

    def _name_averaged(self) -> None:
        """Print once which buffers outside of norms the mean of the workers changes: a queue of
        features would become a mean of queues."""
        own = self.buffers(of_norms=False)
        self.averaged = {
            name for name in self.buffers.changed() if name in own and own[name].is_floating_point()
        }
        if self.averaged:
            console.info(
                f"note: the buffer {few(sorted(self.averaged))} takes the mean of the virtual "
                "workers' changes in each step: right for a running mean, wrong for a queue "
                "(docs/same-bits.md)\n"
            )

    def _keep_buffers(self) -> None:
        """Push the current worker's change of the running statistics into the tree: zeros if the
        worker is idle."""
        counters: dict[str, Tensor] = {}
        statistics: list[tuple[Tensor, Tensor]] = []
        for name, buffer, value_before in self.buffers.changes():
            if buffer.is_floating_point():
                statistics.append((buffer.flatten(), value_before.flatten()))
            else:
                counters[name] = buffer.clone()
        if self.check:
            self._check_counters(counters)
        self.counters = counters
        if not statistics or self.worker >= self.workers:
            return
        after, before = map(torch.cat, zip(*statistics, strict=True))
        # the difference of two infinities would be NaN
        equal = (after == before) | self.idle
        change = torch.where(equal, 0.0, after.double() - before.double())
        push_node(self.changes, Node(self.worker, self.worker + 1, [change]))

    def _check_counters(self, counters: dict[str, Tensor]) -> None:
        """Raise LockstepError if a buffer that cannot be averaged differs from the buffer's value
        after the previous worker."""
        for name, buffer in counters.items():
            previous = self.counters.get(name)
            if previous is not None and not torch.equal(buffer, previous):
                raise LockstepError(
                    f"the buffer {name} differs after virtual worker {self.worker} from that after "
                    "the one before",
                    "virtual_workers",
                    "change it by what all workers share, keep it in floating point, where the "
                    "workers' mean is taken, or drop virtual_workers",
                )

    # ---- numbers ----

    def worker_row(self, numbers: Tensor, micro: Any) -> Tensor:
        """Return (workers, len(numbers)) with zeros in the rows of the other workers, so that any
        order of additions over passes and ranks is exact. A pass beyond the last worker has votes
        only."""
        rows = numbers.new_zeros(self.workers, len(numbers))
        rows[min(micro.worker, self.workers - 1)] = numbers
        return rows

    def sum_workers(self, rows: Tensor) -> Tensor:
        """Return (columns,): the root of the tree over the rows."""
        nodes = [Node(worker, worker + 1, [row]) for worker, row in enumerate(rows)]
        return tree_sum(nodes, in_place=False)[0]

    def grad_norm(self, grads: list[Tensor]) -> Tensor:
        """(all ranks with shards) Return the norm of all gradients, see `exact_grad_norm`."""
        return exact_grad_norm(grads, self.sum_over_shards)


class Bucket(NamedTuple):
    """A bucket of DDP on the way: the sum, DDP's memory, and DDP's future."""

    exchange: TreeAllReduce
    buffer: Tensor
    future: Future[Tensor]


class WorkerReducer(VirtualWorkers):
    """Virtual workers whose gradients DDP, or the only process, adds up along the tree.

    in_ddp  the last pass of a step leaves the gradients to `hook`, DDP's hook
    unused  DDP has `find_unused_parameters`: `grad` must show DDP the parameters used by
            any pass of the step
    nodes   nodes of the tree of gradients: at most log2(workers of a process) + 1
    added   numbers of the parameters used by the current worker
    used    numbers of the parameters used by any worker of the step
    """

    def __init__(
        self,
        workers: int,
        world: World,
        model: nn.Module,
        unused: bool = False,
        deals: Deals | None = None,
    ):
        super().__init__(workers, world, model, deals)
        self.unused, self.in_ddp = unused, False
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.number = {id(p): number for number, p in enumerate(self.parameters)}
        self.nodes: list[Node] = []
        self.added: set[int] = set()
        self.used: set[int] = set()
        self.buckets: list[Bucket] = []
        for number, p in enumerate(self.parameters):
            p.register_post_accumulate_grad_hook(lambda _, number=number: self.added.add(number))

    def begin_step(self) -> None:
        """Also forget the gradients of a step that was computed and not taken."""
        super().begin_step()
        self.nodes, self.used = [], set()
        self.added.clear()

    def begin_worker(self, worker: int, idle: bool) -> None:
        """Push the previous worker's gradients into the tree, and begin with a worker."""
        if self.worker >= 0:
            self._take_gradients()
        super().begin_worker(worker, idle)

    # ---- gradients ----

    def _take_gradients(self) -> None:
        """Push the gradients of the current worker into the tree: zeros for a parameter without
        a use by the worker."""
        sums: list[Any] = []
        for number, p in enumerate(self.parameters):
            if number not in self.added:
                # the weights of other turns get no gradient, and zeros without axes
                sums.append(torch.zeros_like(p) if p.requires_grad else p.new_zeros(()))
                continue
            sums.append(p.grad)
            # A gradient added to -0.0 keeps its bits, even if it is -0.0.
            p.grad = torch.full_like(p, -0.0) if self.unused and self.in_ddp else None
        push_node(self.nodes, Node(self.worker, self.worker + 1, sums))
        self.used |= self.added
        self.added.clear()

    @staticmethod
    def hook(state: "WorkerReducer", bucket: dist.GradBucket) -> Future[Tensor]:
        """Sum a bucket over all workers, as DDP's communication hook. A bucket is sent when it is
        full. All buckets are added up when the last is full, so the backward pass continues in
        between."""
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        state.buckets.append(
            Bucket(TreeAllReduce(state.spans_by_rank, state.flat_sums(bucket)), buffer, future)
        )
        if bucket.is_last():
            state.finish_buckets()
        return future

    def flat_sums(self, bucket: dist.GradBucket) -> list[Tensor]:
        """Return the sums of each node of this process in the layout of a bucket. The last sums are
        in the bucket itself, with the gradients of the last worker."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        # The views of `gradients` are contiguous, but DDP keeps the layouts of the parameters: only
        # the offsets of these views are right.
        start = buffer.storage_offset()
        offsets = [int(view.storage_offset() - start) for view in bucket.gradients()]
        numbers = [self.number[id(p)] for p in parameters]
        last_grads = _views(buffer, parameters, offsets)
        for number, grad in zip(numbers, last_grads, strict=True):
            if number not in self.added:
                grad.add_(0.0)  # the last worker's zeros: the sum of -0.0 and 0.0 is 0.0
        nodes: list[Node] = []
        for node in self.nodes:
            nodes.append(node._replace(sums=[node.sums[number] for number in numbers]))
        push_node(nodes, Node(self.worker, self.worker + 1, last_grads))
        flat_sums: list[Tensor] = []
        for node in nodes[:-1]:
            flat = torch.zeros_like(buffer)
            torch._foreach_copy_(_views(flat, parameters, offsets), node.sums)
            flat_sums.append(flat)
        return [*flat_sums, buffer]

    def finish_buckets(self) -> None:
        """(all ranks) Add up all buckets, and complete the futures of DDP."""
        for bucket in self.buckets:
            bucket.exchange.add()
        for bucket in self.buckets:
            total = bucket.exchange.result()
            if total is not bucket.buffer:
                bucket.buffer.copy_(total)
            bucket.future.set_result(bucket.buffer)
        self.buckets = []

    def sum_without_ddp(self) -> None:
        """(all ranks) Give the parameters the gradients of a step whose passes DDP has not seen:
        the sums over the workers of all processes."""
        self._take_gradients()
        numbers = sorted(self.used)
        flats = []
        for node in self.nodes:
            flats.append(torch.cat([node.sums[number].flatten() for number in numbers]))
        exchange = TreeAllReduce(self.spans_by_rank, flats)
        exchange.add()
        parameters = [self.parameters[number] for number in numbers]
        parts = exchange.result().split([*map(torch.numel, parameters)])
        for p, part in zip(parameters, parts, strict=True):
            p.grad = part.view_as(p)

    def sum_workers(self, rows: Tensor) -> Tensor:
        """Return the root of the tree over the rows. Also give the parameters their gradients, if
        one process runs all workers without DDP."""
        if not self.in_ddp:
            self._take_gradients()
            sums = tree_sum(self.nodes)
            for number in self.used:
                self.parameters[number].grad = sums[number]
        elif self.world.device.type == "cuda":
            self._align_gradients()
        self.nodes, self.used = [], set()
        self.added.clear()
        return super().sum_workers(rows)

    def _align_gradients(self) -> None:
        """Copy the unaligned gradients of DDP's buckets: on a GPU the order of additions
        of a norm depends on the alignment."""
        unaligned: list[Any] = []
        for p in self.parameters:
            if p.grad is not None and p.grad.data_ptr() % ALIGNED:
                unaligned.append(p)
        if unaligned:
            copies = torch._foreach_mul([p.grad for p in unaligned], 1.0)
            for p, grad in zip(unaligned, copies, strict=True):
                p.grad = grad


def _views(flat: Tensor, parameters: list[Tensor], offsets: list[int]) -> list[Tensor]:
    """Return the views of a bucket's flat tensor in which DDP keeps the gradients of
    `parameters`."""
    start = flat.storage_offset()
    pairs = zip(parameters, offsets, strict=True)
    return [flat.as_strided(p.shape, _dense_strides(p), start + offset) for p, offset in pairs]


def _dense_strides(p: Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient in DDP's bucket (torch/csrc/distributed/c10d/reducer.cpp,
    read in 2.13): the strides of the parameter if these leave no gaps, else the strides of a
    contiguous tensor."""
    dense = torch.empty_like(p, device="meta").stride() == p.stride()
    return p.stride() if dense else torch.empty(p.shape, device="meta").stride()
