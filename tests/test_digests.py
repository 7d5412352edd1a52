"""By what ranks are told apart: a sum of bits on GPUs, digests on the host where it differs."""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TOY, succeed
from torch import nn

import tasks
from engine import preflight
from engine.comm import digests
from engine.comm.digests import sum_of_bits
from engine.errors import LockstepError


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64]
)
def test_every_bit_and_every_place_counts(dtype):
    bits = torch.randint(0, 256, (77 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    flat = (bits % 2).bool() if dtype == torch.bool else bits.view(dtype)
    tensors = [flat, flat[:7].clone(), torch.tensor(3.0)]
    right = sum_of_bits(tensors)
    assert sum_of_bits([flat.view(7, 11).t().contiguous().t(), *tensors[1:]]) == right, "whatever its order"
    for tensor in tensors:
        bits = tensor.view(-1).view(torch.uint8)
        for bit in range(0, 8 * len(bits) if dtype != torch.bool else 1, 29):
            bits[bit // 8] ^= 1 << bit % 8
            assert sum_of_bits(tensors) != right
            bits[bit // 8] ^= 1 << bit % 8
    assert sum_of_bits([tensors[1], tensors[0], tensors[2]]) != right, "two tensors have changed places"
    other = next(n for n in range(1, 77) if flat[n] != flat[0])
    flat[[0, other]] = flat[[other, 0]]
    assert sum_of_bits(tensors) != right, "two numbers have changed places"


def test_numbers_of_several_pieces_that_change_places_count(monkeypatch):
    monkeypatch.setattr(digests, "PIECE", 8)
    long = torch.zeros(19)
    long[0] = 1.0
    assert len({sum_of_bits([long.roll(place)]) for place in range(19)}) == 19


def test_a_checksum_is_of_names_shapes_types_and_bytes():
    """And of extra state, which is taken at the end of a run, where an error would hide that the run is done."""
    flat = torch.arange(4.0)
    ways = [("w", flat), ("v", flat), ("w", flat.view(2, 2)), ("w", flat.view(torch.int32)), ("w", flat + 1)]
    ways += [("w", {"scale": 1}), ("w", {"scale": 2})]
    assert len({digests.of_tensors([way]) for way in ways}) == len(ways)
    assert digests.of_tensors([("w", flat.view(2, 2).t())]) == digests.of_tensors([("w", flat.view(2, 2).t().clone())])


def test_the_code_is_all_that_a_task_may_import(monkeypatch):
    """Not only the engine: a model that differs between ranks is found by its name, before the first step."""
    read, task = [], tasks.load(TOY)(None)
    whole = type(ROOT).read_bytes
    monkeypatch.setattr(type(ROOT), "read_bytes", lambda path: read.append(path) or whole(path))
    digests.code(task)
    names = {str(path.relative_to(ROOT)) for path in read}
    assert {"train.py", "data_loader.py", "engine/comm/digests.py", "models/layers.py", "tests/tasks/toy.py"} <= names
    assert "tests/conftest.py" not in names


def ranks(mine, theirs):
    """What rank 0 of two GPUs gathers, each of which has a model."""

    def compare(model, gather):
        world = SimpleNamespace(size=2, device=torch.device("cuda"), gather=gather)
        workers, record = SimpleNamespace(buffers=lambda of_norms: {}), SimpleNamespace(fresh=None)
        run = SimpleNamespace(
            model=model, world=world, workers=workers, record=record, progress=SimpleNamespace(step=7)
        )
        preflight.compare_weights(run)

    told = []
    compare(theirs, lambda value: told.append(value) or [value, value])
    told.append({f"parameter {name}": "other" for name, _ in theirs.named_parameters()})
    answers = iter(told)
    compare(mine, lambda value: [value, next(answers)])
    return told


def test_weights_are_compared_by_a_sum_and_what_differs_is_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    same = copy.deepcopy(model)
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
