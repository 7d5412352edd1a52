"""Run under torchrun: ranks use other weights of one unit of FSDP2, and the gradients are those of a plain module.

The argument `by hand` hides the switch that torch has for it since 2.13.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from plugins.parallel import private

USES = {
    # (rank, pass): which of the layers are used; the gradients are added up after the second pass
    (0, 0): "both",
    (0, 1): "first",
    (1, 0): "first",
    (1, 1): "first",
    (2, 0): "second",
    (2, 1): "none",
}


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.always = (nn.Linear(4, 3, dtype=torch.float64) for _ in range(3))

    def forward(self, x, used):
        y = self.always(x)
        if used in ("first", "both"):
            y = y + self.first(x)
        if used in ("second", "both"):
            y = y + self.second(x).square()
        return y


def main():
    if sys.argv[1] == "by hand" and hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        del FSDPModule.set_reduce_scatter_unused_params
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    unit = Unit()
    plain = copy.deepcopy(unit)
    inputs = {key: torch.randn(5, 4, dtype=torch.float64) for key in USES}
    for key, used in USES.items():
        if key[0] < size:
            plain(inputs[key], used).sum().backward()

    unit = fully_shard(unit, mesh=dist.init_device_mesh("cpu", (size,)))
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_gradient_divide_factor(1.0)
    private.reduce_unused(unit)
    for number in (0, 1):
        unit.set_requires_gradient_sync(number == 1)
        unit(inputs[rank, number], USES[rank, number]).sum().backward()
    for (name, ours), theirs in zip(unit.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=name)
    print(f"rank {rank} has the plain gradients")
    dist.destroy_process_group()


main()
