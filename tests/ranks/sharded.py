"""Run under torchrun: the digest of a model that torch's FSDP2 has cut over the ranks, and after a step of it.

torchrun ... sharded.py
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from engine.comm import digests

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(37, 50), nn.Tanh(), nn.Linear(50, 41), nn.Tanh(), nn.Linear(41, 3))
whole = digests.digest(model.parameters())
for part in (model[0], model[2], model):
    fully_shard(part, mesh=init_device_mesh("cpu", (SIZE,)))


def of_shards():
    """Each rank's rows of each parameter, from their place on; the sums of all ranks added up."""
    sums, start = torch.zeros(2, digests.BLOCKS, dtype=torch.int32), 0
    for p in model.parameters():
        rows = -(-p.shape[0] // SIZE)  # FSDP2 gives each rank so many, the last one what is left
        width = p.numel() // p.shape[0]
        sums += digests.sum_of_bits([p.to_local()], start + min(RANK * rows, p.shape[0]) * width)
        start += p.numel()
    dist.all_reduce(sums)
    return digests.as_text(sums)


assert of_shards() == whole
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 37)).sum().backward()
optimizer.step()
after = of_shards()
assert after != whole
assert after == digests.digest([p.full_tensor() for p in model.parameters()])
dist.barrier()
dist.destroy_process_group()
