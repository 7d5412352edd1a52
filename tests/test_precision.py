"""Which precision a run takes, and what torch gets wrong in it."""

import pytest
import torch
from conftest import succeed
from torch import nn

from engine.precision import Precision

CPU_BF16 = Precision("bf16", torch.device("cpu"), "")

SMALL_MAPS = [  # layers, and inputs, whose backward pass in bf16 writes where it may not, or leaves gradients unset
    ((nn.Conv3d, 16, 32, (1, 3, 3), (1, 2, 2), (0, 1, 1)), (1, 16, 5, 1, 1)),
    ((nn.Conv3d, 16, 32, (1, 3, 3), (1, 2, 2), (0, 1, 1)), (16, 5, 1, 4)),  # a single sample, not a batch
    ((nn.Conv3d, 20, 32, (5, 3, 1), 1, (2, 0, 0)), (1, 20, 4, 3, 4)),
    ((nn.Conv2d, 16, 32, 3, 2, 1), (1, 16, 1, 1)),
    ((nn.Conv2d, 16, 32, 5, 1, "same"), (1, 16, 1, 1)),
    ((nn.Conv1d, 16, 32, 5, 4, 2), (8, 16, 2)),
    ((nn.ConvTranspose2d, 8, 40, (2, 5), (2, 4), 1), (1, 8, 4, 1)),
    ((nn.ConvTranspose3d, 16, 4, (7, 4, 3), (1, 3, 1), (3, 0, 1)), (1, 16, 4, 2, 3)),
]

THIRTY_PASSES = """
import torch
from test_precision import CPU_BF16, SMALL_MAPS
for (kind, *sizes), shape in SMALL_MAPS:
    layer, x = kind(*sizes), torch.rand(shape)
    for _ in range(30):
        layer.zero_grad()
        with CPU_BF16.autocast():
            y = layer(x)
        y.backward(torch.ones_like(y))
        got = layer.weight.grad.clone()
        layer.zero_grad()
        layer(x).backward(torch.ones_like(y, dtype=torch.float32))
        torch.testing.assert_close(got, layer.weight.grad, rtol=0.01, atol=0.01 * float(got.abs().max()))
print("alive")
"""


def test_convolutions_of_tiny_maps_train_in_bf16(launch):
    """In a process of its own, for what is wrong ends it; with memory that is not clean."""
    env = {"PYTHONPATH": "tests", "MALLOC_PERTURB_": "128", "OMP_NUM_THREADS": "1"}
    assert succeed(launch.python("-c", THIRTY_PASSES, **env)).out.endswith("alive\n")


@pytest.mark.parametrize(("layer", "shape"), SMALL_MAPS)
def test_convolutions_of_tiny_maps_compute_in_float32(layer, shape):
    layer, x = layer[0](*layer[1:]), torch.rand(shape)
    with CPU_BF16.autocast():
        rounded = layer(x)
    assert torch.equal(rounded, layer(x).bfloat16())


def test_other_convolutions_compute_in_bf16():
    for kind, dimensions in ((nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3), (nn.ConvTranspose2d, 2)):
        layer, x = kind(8, 8, 3, padding=1), torch.rand(2, 8, *[5] * dimensions)
        with CPU_BF16.autocast():
            rounded = layer(x)
        assert rounded.dtype == torch.bfloat16 and not torch.equal(rounded, layer(x).bfloat16())
