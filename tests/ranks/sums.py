"""Run under torchrun: sums of tensors of every kind, compared with what each rank adds up for itself.

torchrun ... sums.py WHAT [KEY=VALUE ...]
"""

import random
import resource
import sys
import time

import torch

import tasks
from engine import config, dist, shared
from engine.contract import LockstepError

KINDS = [
    (torch.float32, ()),
    (torch.float64, (7,)),
    (torch.int64, (3, 5)),
    (torch.bfloat16, (1000,)),
    (torch.float32, (shared.PIECE // 4,)),
    (torch.float32, (3 * shared.PIECE // 4 + 11,)),
    (torch.float64, (2, 3, 40, 50)),
    (torch.float32, (0,)),
]


def of(rank, dtype, shape, turn):
    draw = torch.Generator().manual_seed(1000 * turn + rank)
    return (torch.randn(shape, generator=draw, dtype=torch.float64) * 100).to(dtype)


def whole(world, dtype, shape, turn):
    """In the order of the ranks, as promised."""
    total = of(0, dtype, shape, turn)
    for rank in range(1, world.size):
        total = total + of(rank, dtype, shape, turn)
    return total


def right(world):
    turn = 0
    for dtype, shape in KINDS:
        turn += 1
        mine = of(world.rank, dtype, shape, turn)
        world.sum(mine)
        assert torch.equal(mine, whole(world, dtype, shape, turn)), (dtype, shape)
    for layout in (lambda t: t.to(memory_format=torch.channels_last), lambda t: t.transpose(1, 3)):
        turn += 1
        mine = layout(of(world.rank, torch.float32, (2, 3, 4, 5), turn))
        world.sum(mine)
        assert torch.equal(mine, layout(whole(world, torch.float32, (2, 3, 4, 5), turn)))
    hurry = random.Random(world.rank)
    for turn in range(100, 700):
        aside = of(world.rank, torch.float64, (9 if turn % 50 else 100_000,), turn)
        done = world.begin_sum(aside)
        if turn % 7 == 0:
            time.sleep(hurry.random() * 3e-3)  # now the one rank is late, now the other
        mine = of(world.rank, torch.float32, (turn,), turn)
        world.sum(mine)
        done()
        assert torch.equal(mine, whole(world, torch.float32, (turn,), turn))
        assert torch.equal(aside, whole(world, torch.float64, aside.shape, turn))


def refused(world, words):
    try:
        world.sum(torch.ones(3 if world.rank else 4))
    except (LockstepError, torch.distributed.DistError) as error:
        assert words in str(error), error
        return
    raise AssertionError("no error")


def main():
    what = sys.argv[1]
    if what == "no_room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    if what == "forbidden":

        def refuse(name):
            raise PermissionError(13, "memfd_create")

        shared.os.memfd_create = refuse
    if what == "not_all" and dist.environment().rank:
        sys.argv.append("ddp.backend=gloo")
    cfg = config.parse(sys.argv[2:], tasks.load).cfg
    world = dist.join(cfg, dist.environment())
    if world.main:
        print("shared" if world.shared else "gloo")
    if what == "of other sizes":
        refused(world, "the ranks add up different things: rank")
    elif what == "too late":
        if world.main:
            world.shared.timeout_s = 0.2
            refused(world, "Timed out waiting")
            world.store.set("over", "")
        world.store.wait(["over"])
    else:
        right(world)
    world.leave()


if __name__ == "__main__":
    main()
