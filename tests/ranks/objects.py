"""Run under torchrun: what ranks tell each other where GPUs have a backend of their own beside gloo, as NCCL is.

torchrun ... objects.py
"""

import os

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # the backend "fake": delivers nothing

from engine.comm.differences import first_difference
from engine.comm.world import World

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

dist.init_process_group("cpu:gloo,cuda:fake")
world = World(RANK, RANK, SIZE, torch.device("meta"))  # a tensor there has no data, so nothing could be read from it
assert world.gather(f"rank {RANK}") == [f"rank {rank}" for rank in range(SIZE)]
assert world.gather_on_main(RANK) == ([*range(SIZE)] if world.main else [])
assert world.broadcast(f"rank {RANK}") == "rank 0"
long = [f"rank {rank} " + "x" * 1000 * (rank + 1) for rank in range(SIZE)]  # the first bytes, and the rest
assert world.gather(long[RANK]) == long and world.broadcast(long[RANK]) == long[0]
assert world.gather(long[RANK] if RANK else "short") == ["short", *long[1:]]
assert world.reduce_on_rank0(long[RANK], next) == long[0], "and the others have not to be looked at"
assert world.reduce_on_rank0(RANK, sum) == SIZE * (SIZE - 1) / 2
assert not world.differs_across_ranks(long[0]) and world.differs_across_ranks(RANK)
facts = {"alike": "1", "of rank 0": str(min(RANK, 1)), **({"of the last": "2"} if RANK == SIZE - 1 else {})}
assert first_difference(world, {"alike": "1"}) == {}
assert first_difference(world, facts) == {"of rank 0": (1, "1", "0"), "of the last": (SIZE - 1, "2", "absent")}
number = torch.tensor(RANK + 1.0)
world.sum(number)
assert number == SIZE * (SIZE + 1) / 2
dist.barrier()
dist.destroy_process_group()
