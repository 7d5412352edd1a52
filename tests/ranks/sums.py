"""Run under torchrun: the backend "shm", compared with what each rank adds up for itself.

torchrun ... sums.py right|ddp|different|late|gone|no_room|forbidden|one_cannot|elsewhere|other_user
"""

import functools
import os
import random
import resource
import sys
import time
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from engine.contract import LockstepError
from plugins.performance import compiler, shm_backend
from plugins.performance.shm_backend import PIECE

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

KINDS = [
    (torch.float32, ()),
    (torch.float64, (7,)),
    (torch.int64, (3, 5)),
    (torch.uint8, (3,)),
    (torch.bfloat16, (1000,)),
    (torch.float32, (PIECE // 4,)),
    (torch.float32, (3 * PIECE // 4 + 11,)),
    (torch.float64, (2, 3, 40, 50)),
    (torch.float32, (0,)),
    (torch.complex64, (5,)),
]


def of(rank, dtype, shape, turn=0):
    draw = torch.Generator().manual_seed(1000 * turn + rank)
    return (torch.randn(shape, generator=draw, dtype=torch.float64).abs() * 50).to(dtype)


def whole(dtype, shape, turn=0):
    """In the order of the ranks, as promised."""
    total = of(0, dtype, shape, turn)
    for rank in range(1, SIZE):
        total = total + of(rank, dtype, shape, turn)
    return total


def right():
    for dtype, shape in KINDS:
        mine = of(RANK, dtype, shape)
        dist.all_reduce(mine)
        assert torch.equal(mine, whole(dtype, shape)), (dtype, shape)
    for layout in (lambda t: t.to(memory_format=torch.channels_last), lambda t: t.transpose(1, 3)):
        mine = layout(of(RANK, torch.float32, (2, 3, 4, 5)))
        dist.all_reduce(mine)
        assert torch.equal(mine, layout(whole(torch.float32, (2, 3, 4, 5))))
    hurry = random.Random(RANK)
    for turn in range(100, 700):  # several begun, finished in any order, also while none is left to finish
        kinds = [(torch.float64, (9 if turn % 50 else 3 * PIECE // 8,)), (torch.float32, (turn,)), (torch.int64, (2,))]
        tensors = [of(RANK, *kind, turn) for kind in kinds]
        begun = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        if turn % 7 == 0:
            time.sleep(hurry.random() * 3e-3)  # now the one rank is late, now the other
        now = of(RANK, torch.float32, (turn,), -turn)
        if turn % 2:
            dist.all_reduce(now)
        for work in hurry.sample(begun, len(begun)):  # each rank in an order of its own
            assert work.wait() and work.is_completed()
        if turn % 2:
            assert torch.equal(now, whole(torch.float32, (turn,), -turn))
        assert work.get_future().wait()[0] is work.tensor
        for tensor, kind in zip(tensors, kinds, strict=True):
            assert torch.equal(tensor, whole(*kind, turn))


def everything_else():
    """Each collective, called with a tensor, and what is in the tensor afterwards (None: not on this rank)."""
    assert dist.get_backend() == "shm"
    ranks, rank, mine = [*range(SIZE)], float(RANK), [torch.empty(1) for _ in range(SIZE)]
    objects, box, several = [None] * SIZE, [f"from {RANK}"], [torch.full((2,), rank), torch.ones(3)]
    sparse = torch.tensor([[0.0, rank], [1.0, 0.0]]).to_sparse()
    for collective, tensor, after in [
        (dist.all_reduce, torch.tensor([rank, 1.0]), [sum(ranks), SIZE]),
        (functools.partial(dist.all_reduce, op=dist.ReduceOp.MAX), torch.tensor([rank, -rank]), [SIZE - 1, 0]),
        (dist.all_reduce, sparse, [[0, sum(ranks)], [SIZE, 0]]),
        (functools.partial(dist.broadcast, src=1), torch.full((2,), RANK), [1, 1]),
        (functools.partial(dist.reduce, dst=1), torch.full((2,), RANK), [sum(ranks)] * 2 if RANK == 1 else None),
        (shift, torch.empty(2), [(RANK - 1) % SIZE] * 2),
    ]:
        collective(tensor)
        assert after is None or tensor.to_dense().tolist() == after, (collective, tensor)
    dist.all_reduce_coalesced(several)
    assert [tensor.tolist() for tensor in several] == [[sum(ranks)] * 2, [SIZE] * 3]
    dist.all_gather(mine, torch.tensor([rank]))
    dist.all_gather_object(objects, "x" * RANK)
    dist.broadcast_object_list(box, src=1)
    assert (mine, objects, box) == (ranks, ["x" * rank for rank in ranks], ["from 1"])
    dist.barrier()


def shift(received):
    """From the rank before, to the next."""
    sent = dist.isend(torch.full((2,), float(RANK)), (RANK + 1) % SIZE)
    dist.recv(received, (RANK - 1) % SIZE)
    sent.wait()


def groups():
    both = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(SIZE)][RANK]
    assert dist.get_backend(both if RANK < 2 else alone) == "shm"
    for group, size, shared in [(both, 2, True), (alone, 1, False), (dist.new_group(backend="gloo"), SIZE, False)]:
        if RANK < 2 or group is not both:
            tensor = torch.ones(2)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            assert work.wait() and tensor.tolist() == [size] * 2 and bool(shm_backend.channel(group)) is shared
            assert group is not alone or (work.is_completed() and work.get_future().wait()[0] is tensor)


def net_and_loss(**settings):
    """DDP around a small model with several buckets, and the loss of a rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 7, bias=False))
    compiler.stay_unloaded()
    with compiler.unloaded():
        wrapped = DistributedDataParallel(net, bucket_cap_mb=0.1, gradient_as_bucket_view=True, **settings)
    return wrapped, lambda net, rank: net(of(rank, torch.float32, (5, 300))).square().sum()


def ddp():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    net, loss = net_and_loss()
    each = [torch.autograd.grad(loss(net.module, rank), net.module.parameters()) for rank in range(SIZE)]
    mean = [functools.reduce(torch.add, parts) / SIZE for parts in zip(*each, strict=True)]
    for hook, error in [
        (None, 1e-6),
        (shm_backend.Channel.sum_then_divide, 0),
        (default_hooks.fp16_compress_hook, 2e-3),
    ]:
        net, loss = net_and_loss(find_unused_parameters=True)
        if hook:
            net.register_comm_hook([] if error == 0 else None, hook)
        for _ in range(3):  # the buckets are made anew after the first
            net.zero_grad()
            loss(net, RANK).backward()
            got = [p.grad for p in net.parameters()]
            assert all((a - b).abs().max() <= error * b.abs().max() for a, b in zip(got, mean, strict=True))
            totals = [None] * SIZE
            dist.all_gather_object(totals, [grad.double().sum().item() for grad in got])
            assert totals == [totals[0]] * SIZE, hook


@contextmanager
def stops_with(kind, words):
    try:
        yield
    except Exception as error:
        assert type(error) is kind and words in str(error), repr(error)
    else:
        raise AssertionError("no error")


def trouble(what, store):
    """While DDP, in C++, waits for a sum: the error has the same class and words as in Python."""
    net, loss = net_and_loss()
    step = loss(net, RANK)
    if what == "different":
        with stops_with(LockstepError, "the ranks add up different things: rank "):
            dist.all_reduce(torch.ones(1)) if RANK else step.backward()
    elif RANK == 0:
        dist.group.WORLD.channel.timeout_s = 0.2 if what == "late" else 300
        late = "Timed out waiting 0 s for another process of this machine"
        gone = "Connection closed by peer: a process of this machine has ended"
        for action in (step.backward, lambda: dist.all_reduce(torch.ones(3))):
            with stops_with(dist.DistBackendError, late if what == "late" else gone):
                action()
    if what == "gone":
        os._exit(0)
    store.set("over" if RANK == 0 else "not yet", "")
    store.wait(["over"])


def raising(number):
    def refuse(*_):
        raise PermissionError(number, "not here")

    return refuse


SABOTAGE = {  # of what the backend calls: (owner, name, replacement, whether on rank 0, too)
    "forbidden": (shm_backend.os, "memfd_create", raising(13), True),
    "one_cannot": (shm_backend.platform, "machine", lambda: "arm64", False),
    "elsewhere": (shm_backend, "machine", lambda: f"machine {RANK}", True),
    "other_user": (shm_backend.os, "pidfd_open", raising(1), False),
}


def main():
    what = sys.argv[1]
    if what == "no_room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    owner, name, replacement, everywhere = SABOTAGE.get(what, (None, "", None, False))
    if owner and (everywhere or RANK):
        setattr(owner, name, replacement)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), SIZE, False)
    dist.init_process_group(
        "shm", store=dist.PrefixStore("sums", store), rank=RANK, world_size=SIZE, timeout=timedelta(seconds=300)
    )
    if RANK == 0:
        print("shared" if shm_backend.channel() else "gloo")
    if what in ("different", "late", "gone"):
        trouble(what, store)
    else:
        for check in {"right": (right, everything_else, groups), "ddp": (ddp,)}.get(what, (everything_else,)):
            check()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
