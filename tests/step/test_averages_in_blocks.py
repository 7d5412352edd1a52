"""The average of weights in blocks, as on a GPU, has the bits of the average of each tensor by itself."""

import copy

import pytest
import torch
from torch import nn

from engine.optim.ema import EMA
from plugins.performance import averages


class Net(nn.Module):
    """Weights of two types, one in another order of memory, a tie, statistics and a counter."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.low, self.norm = nn.Linear(5, 7).bfloat16(), nn.BatchNorm1d(6)
        self.tied = self.conv
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))


def change(model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for value in [*model.parameters(), model.norm.running_mean]:
            value.add_(torch.randn(value.shape).to(value.dtype))
        model.norm.num_batches_tracked += 1


@pytest.mark.parametrize("block", [1 << 24, 40])
def test_blocks_have_the_bits_of_single_averages(monkeypatch, block):
    """Through skipped steps, steps of a turn, a replaced weight, and a state that is loaded."""
    monkeypatch.setattr(averages, "BLOCK", block)
    torch.manual_seed(0)
    one = Net()
    other = copy.deepcopy(one)
    single, blocks = EMA(one, 0.9), averages.AveragesInBlocks(other, 0.9)
    for step in range(12):
        for model in (one, other):
            change(model, step)
            if step == 5:
                model.norm.weight.data = model.norm.weight.data.clone()
            model.low.requires_grad_(step != 7)
        skipped = torch.tensor(float(step in (0, 3)))
        single.update(skipped, by_turn=step == 7)
        blocks.update(skipped, by_turn=step == 7)
        if step == 9:
            blocks.load_state_dict(copy.deepcopy(single.state_dict()))
        for name, value in single.state_dict().items():
            assert torch.equal(value, blocks.state_dict()[name]), (step, name)
        with blocks.swapped():
            assert torch.equal(other.conv.weight, single.values["conv.weight"])
    names = {name for each in blocks.blocks for name in each.names}
    assert len(blocks.blocks) == (2 if block > 40 else 4) and blocks.moved == {"norm.weight"}
    assert "norm.weight" not in names and {"conv.weight", "low.bias", "norm.running_mean"} <= names


def test_the_model_decides(monkeypatch):
    assert averages.averages_on_gpu(nn.Linear(2, 2), 0.9) is None
    assert isinstance(averages.averages_on_gpu(nn.Linear(2, 2, device="meta"), 0.9), averages.AveragesInBlocks)
