"""Virtual workers: a training takes the same bits on any number of processes.

With `virtual_workers=V` the samples of a step are dealt to V workers; a process runs a block of
neighbours, one after the other. What a worker computes depends on (seed, step, its number) alone,
and the workers' results are added up along one binary tree over their numbers: (0+1)+(2+3) and so
on. Floating-point addition is commutative but not associative, so the same tree over the same
operands gives the same bits, wherever its nodes lie.

The idea is that of EasyScale (Li et al., SC'23, arXiv 2208.14228). See docs/same-bits.md.
"""

# No `from __future__ import annotations`: DDP refuses a hook whose annotations are texts.

import collections
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.functional import pad

from engine import hooks
from engine.comm.reducer import LocalReducer
from engine.comm.shards import row_range, to_local
from engine.comm.world import World
from engine.errors import LockstepError
from engine.plan import workers_of_rank
from plugins.parallel.exact import sqrt_correctly_rounded
from plugins.parallel.tree import Node, Span, push_node, subtree_roots, tree_sum

AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Gradients whose squares are in memory at once: on a CPU in its cache."""

# its name since torch 2.13
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

ALIGNED = 32
"""Bytes: CUDA's kernels read four float64 at once where the memory allows it."""


class TreeAllReduce:
    """(all ranks) One sum over the nodes of all processes. Each process adds up one piece of the
    tensor: where every process has one node, it sends and receives as many bytes as in a ring
    all-reduce. In shared memory every process reads everything.

    by_rank  the nodes of each process
    mine     this process's sums, one for each of its nodes: flat, of one length and type; they may
             be overwritten
    """

    def __init__(self, by_rank: list[list[Span]], mine: list[Tensor]):
        self.by_rank, self.mine, self.size = by_rank, mine, len(by_rank)
        self.channel = hooks.shared_memory.first(None) if mine[0].device.type == "cpu" else None
        self.sends = self.size > 1 and self.channel is None
        if self.sends:
            self._send()

    def _send(self) -> None:
        """Send to each process its piece of each of this one's nodes. In bytes, because gloo does
        not know every type; through the host, where the backend cannot do it on a GPU."""
        length, device = len(self.mine[0]), self.mine[0].device
        host = torch.device("cpu") if "nccl" not in dist.get_backend() else device
        self.piece = -(-length // self.size)
        padded = [
            pad(each.to(host), (0, self.size * self.piece - length)).view(self.size, -1)
            for each in self.mine
        ]
        self.sent = torch.stack(padded, 1)  # (ranks, nodes, piece); must live until it has arrived
        self.counts = [len(theirs) * self.piece for theirs in self.by_rank]
        self.received = self.sent.new_empty(sum(self.counts))
        width = self.sent.element_size()
        self.work: Any = dist.all_to_all_single(
            self.received.view(torch.uint8),
            self.sent.view(-1).view(torch.uint8),
            [count * width for count in self.counts],
            [len(self.mine) * self.piece * width] * self.size,
            async_op=True,
        )

    def add(self) -> None:
        """Add up this process's piece, and send it to all."""
        if self.sends:
            self.work.wait()
            parts = [[*part.view(-1, self.piece)] for part in self.received.split(self.counts)]
            self.whole = self.received.new_empty(self.size * self.piece)
            self.root = self._root(parts)
            self.work = ALL_GATHER(self.whole, self.root, async_op=True)

    def result(self) -> Tensor:
        """Return the sum, flat."""
        if self.sends:
            self.work.wait()
            return self.whole[: len(self.mine[0])].to(self.mine[0].device)
        if self.channel is not None:
            return self.channel.gather(
                self.mine, [len(theirs) for theirs in self.by_rank], self._root
            )
        return self._root([self.mine])

    def _root(self, parts: list[list[Tensor]]) -> Tensor:
        """Return the root of the tree, given each process's part of each of its nodes."""
        nodes = [
            Node(*span, [part])
            for spans_of_rank, parts_of_rank in zip(self.by_rank, parts, strict=True)
            for span, part in zip(spans_of_rank, parts_of_rank, strict=True)
        ]
        nodes.sort(key=lambda node: node.begin)
        return tree_sum(nodes, in_place=self.channel is None)[
            0
        ]  # other ranks still read shared memory


class Dealt(LocalReducer):
    """Keep what the virtual workers of one process compute within a step, but for their gradients.

    block    numbers of the workers of this process
    by_rank  the nodes of each process that its workers' sums make
    changes  nodes of the tree of changes of running statistics, float64
    others   buffers that are not floating point, after the last worker
    """

    in_rounds = False  # see `tree.dealt`

    follows_passes = True

    def __init__(self, workers: int, world: World, model: nn.Module):
        super().__init__(world, model, "same")
        self.workers = workers
        everyones = [
            workers_of_rank(workers, rank, world.size, self.in_rounds) for rank in range(world.size)
        ]
        blocks = [range(each.start, min(each.stop, workers), each.step) for each in everyones]
        self.block, self.by_rank = blocks[world.rank], [subtree_roots(each)[0] for each in blocks]
        self.changes: list[Node] = []
        self.others: dict[str, Tensor] = {}
        # of the passes under way; -1 before the step's first
        self.worker, self.idle, self.samples = -1, False, 0

    # ---- one worker after the other ----

    def begin_pass(self, micro: Any) -> None:
        """Begin a pass, a `data_loader.MicroBatch`."""
        if micro.opens_worker:
            self.begin_worker(micro.worker, micro.empty)
        self.samples = micro.samples

    def begin_worker(self, worker: int, idle: bool) -> None:
        """Set aside what the worker before has computed, and begin with the buffers as they were
        before the step. `idle`: it has no samples, because the step has fewer than there are
        workers."""
        if self.worker >= 0:
            self._keep_buffers()
        self.buffers.restore()
        self.worker, self.idle = worker, idle

    def end_step(self, skipped: Tensor) -> None:
        self.add_changes(busy=min(self.workers, self.samples))
        super().end_step(skipped)

    def add_changes(self, busy: int) -> None:
        """(all ranks) Add to the buffers the mean change of the `busy` workers, those that had
        samples."""
        self._keep_buffers()
        self.worker, self.others = -1, {}
        if not self.changes:
            return
        exchange = TreeAllReduce(self.by_rank, [node.sums[0] for node in self.changes])
        exchange.add()
        self.changes = []
        change, at = exchange.result() / busy, 0
        for _, buffer, kept in self.buffers.changes():
            if buffer.is_floating_point():
                buffer.copy_(kept.double() + change[at : at + buffer.numel()].view(buffer.shape))
                at += buffer.numel()

    def _keep_buffers(self) -> None:
        """Keep what the worker has changed: nothing, if it is idle. With `check`, raises
        LockstepError if a buffer that cannot be averaged differs from its value after the worker
        before."""
        pairs = [*self.buffers.changes()]
        others = {
            name: buffer.clone() for name, buffer, _ in pairs if not buffer.is_floating_point()
        }
        for name, buffer in others.items():
            if self.check and name in self.others and not torch.equal(buffer, self.others[name]):
                raise LockstepError(
                    (
                        f"the buffer {name} differs after virtual worker {self.worker} from that "
                        "after the one before"
                    ),
                    "virtual_workers",
                    "change it by what all workers share, keep it in floating point, where the "
                    "workers' mean "
                    "is taken, or drop virtual_workers",
                )
        self.others = others
        if floats := [
            (buffer.flatten(), kept.flatten())
            for _, buffer, kept in pairs
            if buffer.is_floating_point()
        ]:
            after, before = (torch.cat(values).double() for values in zip(*floats, strict=True))
            # infinities stay as they are
            change = torch.where(after == before, 0.0, after - before)
            change = torch.zeros_like(change) if self.idle else change
            if self.worker < self.workers:
                push_node(self.changes, Node(self.worker, self.worker + 1, [change]))

    # ---- numbers ----

    def worker_row(self, numbers: Tensor, micro: Any) -> Tensor:
        """Return (workers, len(numbers)) with zeros in the other workers' rows, so that any order
        of additions over passes and ranks is exact. A pass beyond the last worker has votes
        only."""
        rows = numbers.new_zeros(self.workers, len(numbers))
        rows[min(micro.worker, self.workers - 1)] = numbers
        return rows

    def sum_workers(self, rows: Tensor) -> Tensor:
        """Return (columns,): the root of the tree over the rows."""
        return tree_sum((Node(w, w + 1, [row]) for w, row in enumerate(rows)), in_place=False)[0]

    @torch.no_grad()
    def grad_norm(self, grads: list[Tensor]) -> Tensor:
        """Return the norm of all gradients in bits that depend on their values alone: a kernel's
        own order of additions depends on the shape of what a rank holds. No row of a weight is ever
        cut: its squares are added by halves, in float64, and go into a table of all rows; the
        others' are zeros until the ranks' tables are added up.
        """
        lengths = [len(grad) if grad.ndim else 1 for grad in grads]
        table = torch.zeros(sum(lengths), dtype=torch.float64, device=grads[0].device)
        # small weights of a width together
        batches = collections.defaultdict[Any, list[tuple[Tensor, Tensor]]](list)
        for grad, sums in zip(grads, table.split(lengths), strict=True):
            if (mine := to_local(grad)).numel():
                places = sums[row_range(grad)]
                rows = mine.reshape(len(places), -1)
                width = 1 << (rows.shape[1] - 1).bit_length()
                several = max(1, AT_ONCE[table.device.type] // rows.shape[1])
                for piece, place in zip(rows.split(several), places.split(several), strict=True):
                    alone = len(batches) + 1 if piece.numel() > 1 << 16 else 0
                    batches[width, alone].append((piece, place))
        for (width, _), batch in batches.items():
            pieces, places = zip(*batch, strict=True)
            squares = pieces[0].to(torch.float64, copy=True)  # it may be float64 itself
            if len(batch) > 1:
                squares = table.new_zeros(sum(map(len, pieces)), width)
                parts = squares.split([*map(len, pieces)])
                torch._foreach_copy_(
                    [t[:, : piece.shape[1]] for t, piece in zip(parts, pieces, strict=True)], pieces
                )
            squares.square_()
            while (width := squares.shape[1]) > 1:
                half = 1 << (width - 1).bit_length() - 1
                squares[:, : width - half].add_(squares[:, half:])
                squares = squares[:, :half]
            torch._foreach_copy_(places, squares[:, 0].split([*map(len, places)]))
        self.sum_over_shards(table)
        return sqrt_correctly_rounded(table.sum()).to(grads[0].dtype)


class WorkerReducer(Dealt):
    """Virtual workers whose gradients DDP, or the only process, adds up along the tree.

    in_ddp  a step's last pass leaves its gradients to `hook`, which DDP has
    unused  DDP has `find_unused_parameters`: `grad` must show DDP which parameters any of its
            passes has used
    nodes   nodes of the tree of gradients: at most log2(workers of a process) + 1
    added   numbers of the parameters that the worker under way has used
    used    those that any worker of this step has used
    """

    def __init__(self, workers: int, world: World, model: nn.Module, unused: bool = False):
        super().__init__(workers, world, model)
        self.unused, self.in_ddp = unused, False
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.number = {id(p): number for number, p in enumerate(self.parameters)}
        self.nodes: list[Node] = []
        self.added: set[int] = set()
        self.used: set[int] = set()
        for number, p in enumerate(self.parameters):
            p.register_post_accumulate_grad_hook(lambda _, number=number: self.added.add(number))
        self.buckets: list[tuple[TreeAllReduce, Tensor, Future[Tensor]]] = []

    def begin_worker(self, worker: int, idle: bool) -> None:
        if self.worker >= 0:
            self._take()
        super().begin_worker(worker, idle)

    # ---- gradients ----

    def _take(self) -> None:
        """Add the gradients of the worker before to the tree: zeros of the parameters that it has
        not used."""
        sums: list[Any] = []
        for number, p in enumerate(self.parameters):
            if number not in self.added:
                sums.append(torch.zeros_like(p))
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
        full, and added up when the last one is: the backward pass continues meanwhile."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        # Not the views that `gradients` returns: they are contiguous, and DDP keeps the layouts of
        # the parameters.
        offsets = [
            int(view.storage_offset() - buffer.storage_offset()) for view in bucket.gradients()
        ]
        numbers, views = (
            [state.number[id(p)] for p in parameters],
            _views(buffer, parameters, offsets),
        )
        for number, view in zip(numbers, views, strict=True):
            if number not in state.added:
                view.add_(0.0)  # the last worker's zeros: they make 0.0 of -0.0
        nodes = [
            Node(begin, end, [sums[number] for number in numbers])
            for begin, end, sums in state.nodes
        ]
        push_node(nodes, Node(state.block[-1], state.block[-1] + 1, views))
        mine = [torch.zeros_like(buffer) for _ in nodes[1:]]
        for flat, node in zip(mine, nodes, strict=False):  # the last one is in the bucket
            torch._foreach_copy_(_views(flat, parameters, offsets), node.sums)
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        state.buckets.append((TreeAllReduce(state.by_rank, [*mine, buffer]), buffer, future))
        if bucket.is_last():
            for exchange, _, _ in state.buckets:
                exchange.add()
            for exchange, buffer, future in state.buckets:
                if (total := exchange.result()) is not buffer:
                    buffer.copy_(total)
                future.set_result(buffer)
            state.buckets = []
        return future

    def sum_workers(self, rows: Tensor) -> Tensor:
        """Also give the parameters their gradients, where one process runs all workers without
        DDP."""
        if not self.in_ddp:
            self._take()
            sums = tree_sum(self.nodes)
            for number in self.used:
                self.parameters[number].grad = sums[number]
        self.nodes, self.used = [], set()
        self.added.clear()
        if self.in_ddp and self.world.device.type == "cuda":
            # A norm adds in a different order where memory is not aligned, as in DDP's buckets:
            # copy those gradients.
            odd = {
                p: p.grad
                for p in self.parameters
                if p.grad is not None and p.grad.data_ptr() % ALIGNED
            }
            for p, grad in zip(
                odd, torch._foreach_mul([*odd.values()], 1.0) if odd else (), strict=True
            ):
                p.grad = grad
        return super().sum_workers(rows)


def _views(flat: Tensor, parameters: list[Tensor], offsets: list[int]) -> list[Tensor]:
    """Return the views of a bucket's flat tensor in which DDP keeps the gradients of
    `parameters`."""
    return [
        flat.as_strided(p.shape, _dense_strides(p), flat.storage_offset() + offset)
        for p, offset in zip(parameters, offsets, strict=True)
    ]


def _dense_strides(p: Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient in DDP's bucket (torch/csrc/distributed/c10d/reducer.cpp,
    read in 2.13): those of its parameter if they leave no gaps, or else those of a contiguous
    tensor."""
    dense = torch.empty_like(p, device="meta").stride() == p.stride()
    return p.stride() if dense else torch.empty(p.shape, device="meta").stride()
