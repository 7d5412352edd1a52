"""By what ranks are told apart: a sum of bits on GPUs, digests on the host where it differs."""

from types import SimpleNamespace

import pytest
import torch
from conftest import succeed
from torch import nn

from engine import preflight
from engine.comm import digests
from engine.comm.digests import sum_of_bits
from engine.errors import LockstepError


def some(dtype):
    draw = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 256, (77 * dtype.itemsize,), dtype=torch.uint8, generator=draw)
    return (bits % 2).bool() if dtype == torch.bool else bits.view(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64]
)
def test_every_bit_and_every_place_counts(dtype):
    tensors = [some(dtype), some(dtype)[:7].clone(), torch.tensor(3.0)]
    right = sum_of_bits(tensors)
    assert sum_of_bits([tensors[0].view(7, 11).t().contiguous().t(), *tensors[1:]]) == right, "whatever its order"
    for tensor in tensors:
        bits = tensor.view(-1).view(torch.uint8)
        for bit in range(0, 8 * len(bits) if dtype != torch.bool else 1, 29):
            bits[bit // 8] ^= 1 << bit % 8
            assert sum_of_bits(tensors) != right
            bits[bit // 8] ^= 1 << bit % 8
    assert sum_of_bits([tensors[1], tensors[0], tensors[2]]) != right, "two tensors have changed places"
    flat = tensors[0]
    other = next(n for n in range(1, 77) if flat[n] != flat[0])
    flat[[0, other]] = flat[[other, 0]]
    assert sum_of_bits(tensors) != right, "two numbers have changed places"


def test_numbers_of_several_pieces_that_change_places_count(monkeypatch):
    monkeypatch.setattr(digests, "PIECE", 8)
    long = torch.zeros(19)
    long[0] = 1.0
    assert len({sum_of_bits([long.roll(place)]) for place in range(19)}) == 19


def ranks(mine, theirs):
    """What rank 0 of two GPUs sees, whose own model is `mine`."""
    gathered = []
    workers, record = SimpleNamespace(buffers=lambda of_norms: {}), SimpleNamespace(fresh=None)
    run = SimpleNamespace(model=mine, workers=workers, progress=SimpleNamespace(step=7), record=record)
    other = SimpleNamespace(**vars(run) | {"model": theirs})

    def world(gather):
        return SimpleNamespace(size=2, device=torch.device("cuda"), gather=gather)

    other.world = world(lambda value: gathered.append(value) or [value, value])
    try:
        preflight.compare_weights(other)
        gathered.append(
            dict(zip([f"parameter {n}" for n, _ in theirs.named_parameters()], ["other"] * 9, strict=False))
        )
    finally:
        values = iter(gathered)
        run.world = world(lambda value: [value, next(values)])
    preflight.compare_weights(run)
    return gathered


def test_weights_are_compared_by_a_sum_and_what_differs_is_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    same = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    same.load_state_dict(model.state_dict())
    assert [type(value) for value in ranks(model, same)][:2] == [int, int], "of buffers and of parameters: numbers"
    with torch.no_grad():
        same[1].bias.view(torch.int32)[0] ^= 1
    with pytest.raises(LockstepError, match=r"rank 1 differs from rank 0 in parameter .*: other instead of"):
        ranks(model, same)


def test_on_a_gpu_few_kernels_make_a_sum_and_one_number_comes_back(launch):
    script = (
        "from tests import fake_gpu; fake_gpu.install()\n"
        "import torch; from engine.comm import digests\n"
        "host = [torch.randn(30, 30), torch.randn(7)]; tensors = [each.to('cuda:0') for each in host]\n"
        "fake_gpu.waits.clear(); fake_gpu.kernels.clear()\n"
        "total = digests.sum_of_bits(tensors)\n"
        "print('SAME', total == digests.sum_of_bits(host), len(fake_gpu.waits), fake_gpu.kernels[0].total())\n"
    )
    said = succeed(launch.python("-c", script)).out
    same, waits, kernels = said.split("SAME ")[1].split()
    assert same == "True" and int(waits) == 1 and int(kernels) <= 8, said
