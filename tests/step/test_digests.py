"""By what ranks and runs are told apart: a digest of the bits, whatever the cut, and SHA-256 where it differs."""

import copy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TOY, succeed
from runs import records
from torch import nn

from engine.comm import digests
from engine.comm.buffers import Buffers
from engine.comm.digests import as_text, digest, sum_of_bits
from engine.errors import LockstepError
from plugins import preflight


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64]
)
def test_every_bit_and_every_place_counts(dtype):
    bits = torch.randint(0, 256, (77 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    flat = (bits % 2).bool() if dtype == torch.bool else bits.view(dtype)
    tensors = [flat, flat[:7].clone(), torch.tensor(3.0)]
    right = digest(tensors)
    assert digest([flat.view(7, 11).t().contiguous().t(), *tensors[1:]]) == right, "whatever its order"
    for tensor in tensors:
        bits = tensor.view(-1).view(torch.uint8)
        for bit in range(0, 8 * len(bits) if dtype != torch.bool else 1, 29):
            bits[bit // 8] ^= 1 << bit % 8
            assert digest(tensors) != right
            bits[bit // 8] ^= 1 << bit % 8
    assert digest([tensors[1], tensors[0], tensors[2]]) != right, "two tensors have changed places"
    other = next(n for n in range(1, 77) if flat[n] != flat[0])
    flat[[0, other]] = flat[[other, 0]]
    assert digest(tensors) != right, "two numbers have changed places"


def test_numbers_of_several_pieces_that_change_places_count(monkeypatch):
    monkeypatch.setattr(digests, "BLOCK", 3)
    monkeypatch.setattr(digests, "BLOCKS", 4)
    long = torch.zeros(43)
    long[0] = 1.0
    assert len({digest([long.roll(place)]) for place in range(43)}) == 43


@pytest.mark.parametrize("block", [(3, 4), (1024, 1024)])
def test_shards_add_up_to_the_whole(monkeypatch, block):
    """In any cut, each shard read from its place on; and numbers of 1, 2, 4 and 8 bytes in a row."""
    monkeypatch.setattr(digests, "BLOCK", block[0])
    monkeypatch.setattr(digests, "BLOCKS", block[1])
    dice = torch.Generator().manual_seed(0)
    whole = torch.randn(60 if block[0] == 3 else 1_100_000, generator=dice)
    for _ in range(20 if block[0] == 3 else 2):
        cuts = [0, *sorted(torch.randint(0, len(whole) + 1, (4,), generator=dice).tolist()), len(whole)]
        shards = [sum_of_bits([whole[a:b]], start=a) for a, b in pairwise(cuts) if b > a]
        assert as_text(sum(shards)) == digest([whole])
    kinds = [whole[:7], whole[:7].bfloat16(), whole[:7].double(), whole[:7] > 0, whole[:0], whole[:9]]
    at, shards = 0, []
    for each, words in zip(kinds, (7, 7, 14, 7, 0, 9), strict=True):
        shards.append(sum_of_bits([each], start=at))
        at += words
    assert as_text(sum(shards)) == digest(kinds)


@pytest.mark.parametrize("length", [2, 64, 1024, 4096, 65536])
def test_flipped_signs_count_however_many(length):
    """2**31 times any odd weight is the same, so two of them vanish from any sum modulo 2**32."""
    flat = torch.randn(length, generator=torch.Generator().manual_seed(0))
    half = torch.cat([-flat[: length // 2], flat[length // 2 :]])
    zeros = torch.zeros(length)
    some = torch.cat([-zeros[: length // 2], zeros[length // 2 :]])
    assert len({digest([each]) for each in (flat, -flat, half, zeros, -zeros, some)}) == 6


def test_the_log_and_the_checkpoints_hold_that_of_the_weights_after_the_step(launch, tmp_path):
    """In the log at the first log point from each multiple of digest_every on: here 3, 6, and so on, and 11 at the end
    of the epoch."""
    words = ["train.py", TOY, "global_batch=6", "steps=13", "log_every=3", "save_every=1", "keep_checkpoints=20"]
    succeed(launch.python(*words, "digest_every=5", f"save_dir={tmp_path / 'run'}"))
    found = {line["step"]: line.get("digest") for line in records(tmp_path / "run", "train")}
    assert [*found] == [3, 6, 9, 11, 12, 13]
    assert [step for step, digest in found.items() if digest] == [6, 11, 12]
    states = [torch.load(path, weights_only=True) for path in (tmp_path / "run").glob("*[0-9].pt")]
    assert sorted(state["progress"]["step"] for state in states) == [*range(1, 14)]
    for state in states:
        logged = found.get(state["progress"]["step"])
        assert state["digest"] == digest(state["model"].values()) == (logged or state["digest"])
    succeed(launch.python(*words, "digest_every=0", f"save_dir={tmp_path / 'without'}"))
    assert not any("digest" in line for line in records(tmp_path / "without", "train"))
    assert torch.load(tmp_path / "without" / "last.pt", weights_only=True)["digest"] == ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.complex64, torch.bool])
def test_a_tensor_with_gaps_has_the_digest_of_its_numbers(dtype):
    whole = torch.arange(24.0).to(dtype)
    for gaps in (whole[::2], whole.view(4, 6)[:, ::3], whole.view(4, 6).t()):
        assert digest([gaps]) == digest([gaps.clone(memory_format=torch.contiguous_format)])
    assert digest([whole[:2]]) != digest([whole[:3]])


@pytest.mark.slow
def test_a_model_that_fsdp2_has_cut_has_the_same_digest(launch):
    succeed(launch.torchrun(3, str(ROOT / "tests" / "ranks" / "sharded.py")))


def test_a_checksum_is_of_names_shapes_types_and_bytes():
    """And of extra state, which is taken at the end of a run, where an error would hide that the run is done."""
    flat = torch.arange(4.0)
    ways = [("w", flat), ("v", flat), ("w", flat.view(2, 2)), ("w", flat.view(torch.int32)), ("w", flat + 1)]
    ways += [("w", {"scale": 1}), ("w", {"scale": 2})]
    assert len({digests.of_tensors([way]) for way in ways}) == len(ways)
    assert digests.of_tensors([("w", flat.view(2, 2).t())]) == digests.of_tensors([("w", flat.view(2, 2).t().clone())])


def ranks(mine, theirs):
    """What rank 0 of two GPUs is told, each of which has a model."""

    def compare(model, everyone):
        world = SimpleNamespace(size=2, device=torch.device("cuda"))
        world.reduce_on_rank0 = lambda value, choose: choose(iter(everyone(value)))
        world.differs_across_ranks = lambda value: len({*map(repr, everyone(value))}) > 1
        record = SimpleNamespace(fresh=None)
        run = SimpleNamespace(
            model=model,
            world=world,
            reducer=SimpleNamespace(buffers=Buffers(nn.Module())),
            record=record,
            progress=SimpleNamespace(step=7),
            task=SimpleNamespace(state_dict=dict),
            sum_of_bits=lambda: digests.sum_of_bits(model.parameters()),
        )
        preflight.compare_weights(run)

    told = []
    compare(theirs, lambda value: told.append(value) or [value, value])
    told += [{f"parameter {name}": "other" for name, _ in theirs.named_parameters()}] * 2  # compared, then told
    answers = iter(told)
    compare(mine, lambda value: [value, next(answers)])
    return told


def test_what_only_one_rank_has_is_named():
    """The first rank comes first, whatever the order of the names, and each name once."""
    one, both = {"parameter a": "1"}, {"parameter a": "1", "parameter b": "2"}

    def said(*everyone):
        world = SimpleNamespace(differs_across_ranks=lambda value: len({*map(repr, everyone)}) > 1)
        world.reduce_on_rank0 = lambda value, choose: choose(iter(everyone))
        preflight._compare(world, everyone[0], "make them alike")

    with pytest.raises(LockstepError, match=r"^rank 1 differs from rank 0 in parameter b: 2 instead of absent \("):
        said(one, both)
    with pytest.raises(LockstepError, match=r"^rank 1 .* in parameter b: absent instead of 2, and in 1 more \("):
        said(both, one, {"parameter a": "3"})
    said(both, both)


def test_weights_are_compared_by_a_sum_and_what_differs_is_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    same = copy.deepcopy(model)
    of_buffers, of_parameters, *_ = ranks(model, same)
    assert of_buffers == digest([]) and of_parameters == (digest(same.parameters()), [])
    with torch.no_grad():
        same[1].bias.view(torch.int32)[0] ^= 1
    with pytest.raises(LockstepError, match=r"rank 1 differs from rank 0 in parameter .*: other instead of"):
        ranks(model, same)


def test_on_a_gpu_few_kernels_make_a_sum_and_one_number_comes_back(launch):
    script = (
        "from tests.kit import fake_gpu; fake_gpu.install()\n"
        "import torch; from engine.comm import digests\n"
        "host = [torch.randn(30, 30), torch.randn(7)]; tensors = [each.to('cuda:0') for each in host]\n"
        "digests.digest(tensors)  # the weights are copied once\n"
        "fake_gpu.waits.clear(); fake_gpu.kernels.clear()\n"
        "total = digests.digest(tensors)\n"
        "print('SAME', total == digests.digest(host), len(fake_gpu.waits), fake_gpu.kernels[0].total())\n"
    )
    said = succeed(launch.python("-c", script)).out
    same, waits, kernels = said.split("SAME ")[1].split()
    assert same == "True" and int(waits) == 1 and int(kernels) <= 10, said
