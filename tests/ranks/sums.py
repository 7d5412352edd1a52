"""Run under torchrun: the backend "shm", compared with what each rank adds up for itself.

torchrun ... sums.py right|ddp|different|late|gone|no_room|forbidden|one_cannot|elsewhere|other_user
"""

import functools
import math
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

from engine.comm import shm_backend
from engine.comm.shm_backend import PIECE
from engine.contract import LockstepError
from engine.speed import compiler

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
    assert dist.get_backend() == "shm"
    ranks = list(range(SIZE))
    tensor = torch.tensor([float(RANK), 1.0])
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(ranks), SIZE]
    tensor = torch.tensor([float(RANK), -RANK])
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    assert tensor.tolist() == [SIZE - 1, 0]
    tensor = torch.tensor([[0.0, RANK], [1.0, 0.0]]).to_sparse()
    dist.all_reduce(tensor)
    assert tensor.to_dense().tolist() == [[0, sum(ranks)], [SIZE, 0]]
    tensors = [torch.full((2,), float(RANK)), torch.ones(3)]
    dist.all_reduce_coalesced(tensors)
    assert tensors[0].tolist() == [sum(ranks)] * 2 and tensors[1].tolist() == [SIZE] * 3
    tensor = torch.full((2,), RANK)
    dist.broadcast(tensor, src=1)
    assert tensor.tolist() == [1, 1]
    tensor = torch.full((2,), RANK)
    dist.reduce(tensor, dst=1)
    assert RANK != 1 or tensor.tolist() == [sum(ranks)] * 2
    found = [torch.empty(1) for _ in ranks]
    dist.all_gather(found, torch.tensor([float(RANK)]))
    assert found == [torch.tensor([float(rank)]) for rank in ranks]
    objects = [None] * SIZE
    dist.all_gather_object(objects, "x" * RANK)
    assert objects == ["x" * rank for rank in ranks]
    box = [f"from {RANK}"]
    dist.broadcast_object_list(box, src=1)
    assert box == ["from 1"]
    received = torch.empty(2)
    sent = dist.isend(torch.full((2,), float(RANK)), (RANK + 1) % SIZE)
    dist.recv(received, (RANK - 1) % SIZE)
    sent.wait()
    assert received.tolist() == [(RANK - 1) % SIZE] * 2
    dist.barrier()


def groups():
    both = dist.new_group([0, 1])
    if RANK < 2:
        assert shm_backend.in_use(both) and dist.get_backend(both) == "shm"
        tensor = torch.tensor([RANK + 1])
        dist.all_reduce(tensor, group=both)
        assert tensor == 3
    alone = [dist.new_group([rank]) for rank in range(SIZE)][RANK]
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=alone)
    assert tensor.tolist() == [1, 1] and not shm_backend.in_use(alone)
    gloo = dist.new_group(backend="gloo")
    assert not shm_backend.in_use(gloo)
    dist.all_reduce(tensor, group=gloo)
    assert tensor.tolist() == [SIZE] * 2


def net_and_loss(**settings):
    """DDP around a small model with several buckets, and the loss of a rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 7, bias=False))
    compiler.stay_unloaded()
    with compiler.unloaded():
        wrapped = DistributedDataParallel(net, bucket_cap_mb=0.1, gradient_as_bucket_view=True, **settings)
    return wrapped, lambda net, rank: net(of(rank, torch.float32, (5, 300))).square().sum()


def ddp():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net, loss = net_and_loss()
    each = [torch.autograd.grad(loss(net.module, rank), net.module.parameters()) for rank in range(SIZE)]
    mean = [functools.reduce(torch.add, parts) / SIZE for parts in zip(*each, strict=True)]
    low_rank = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    for state, hook, error in [
        (None, None, 1e-6),
        ([], shm_backend.sum_then_divide, 0),
        (None, default_hooks.fp16_compress_hook, 2e-3),
        (low_rank, powerSGD_hook.powerSGD_hook, math.inf),
    ]:
        net, loss = net_and_loss(find_unused_parameters=hook is not powerSGD_hook.powerSGD_hook)
        if hook:
            net.register_comm_hook(state, hook)
        for _ in range(3):  # the buckets are made anew after the first
            net.zero_grad()
            loss(net, RANK).backward()
            got = [p.grad for p in net.parameters()]
            assert all(
                (one - other).abs().max() <= error * other.abs().max() for one, other in zip(got, mean, strict=True)
            )
            totals = [None] * SIZE
            dist.all_gather_object(totals, [grad.double().sum().item() for grad in got])
            assert totals == [totals[0]] * SIZE, hook
    before = [p.detach().clone() for p in net.parameters()]
    ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=1.0, parameters_as_bucket_view=True).step()
    assert all(torch.equal(p, b - g) for p, b, g in zip(net.parameters(), before, got, strict=True))


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


def main():
    what = sys.argv[1]
    if what == "no_room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    if what == "forbidden":

        def refuse(name):
            raise PermissionError(13, "memfd_create")

        shm_backend.os.memfd_create = refuse
    if what == "one_cannot" and RANK:
        shm_backend.platform.machine = lambda: "arm64"
    if what == "elsewhere":
        shm_backend.machine = lambda: f"machine {RANK}"
    if what == "other_user" and RANK:

        def hidden(pid):
            raise PermissionError(1, "pidfd_open")

        shm_backend.os.pidfd_open = hidden
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), SIZE, False)
    dist.init_process_group(
        "shm", store=dist.PrefixStore("sums", store), rank=RANK, world_size=SIZE, timeout=timedelta(seconds=300)
    )
    if RANK == 0:
        print("shared" if shm_backend.in_use() else "gloo")
    if what in ("different", "late", "gone"):
        trouble(what, store)
    elif what == "ddp":
        ddp()
    else:
        for check in (right, everything_else, groups) if what == "right" else (everything_else,):
            check()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
