"""The norm's Triton kernels: computed by Triton's interpreter on the CPU, beside torch in float64; compiled for GPUs.

`make kernels` installs Triton into a folder of its own and runs this file. The speed is what only a GPU can show:
`benchmarks/gpu_check.py --only norm`.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

pytest.importorskip("triton", reason="Triton is not installed: `make kernels` installs it and runs these tests")

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

sys.path.insert(0, str(ROOT / "benchmarks"))
import map_bytes

from models import norm_kernels as kernels

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 is not set: `make kernels`"
)

ACTIVATIONS = {"none": lambda z: z, "relu": F.relu, "gelu": F.gelu}
EPS = 1e-5
CASES = [
    ((2, 24, 3, 4, 5), 8),
    ((2, 12, 9), 4),
    ((1, 7, 2), 7),  # a channel a group
    ((2, 13, 11), 1),  # one group of a prime number of channels
    ((4, 21, 1), 3),  # one position
    ((1, 40, 7, 3, 5), 8),  # the video network's groups of five
    ((2, 66, 31), 2),
    ((3, 1, 1100), 1),
    ((2, 150, 3, 3), 1),  # more channels than a block has in chunks
]
"""Shapes and numbers of groups."""

FORMS = {"blocks": (8192, 4096, 8), "chunks": (0, 256, 2)}
"""SMALL, TILE and TILES: each group in one block, and each group in chunks."""


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    for name, value in zip(("SMALL", "TILE", "TILES"), FORMS[request.param], strict=True):
        monkeypatch.setattr(kernels, name, value)
    return request.param


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def some(shape, order="contiguous", dtype=torch.float32, seed=0):
    """A map, a gradient of its norm, weight and bias."""
    draws = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(shape, generator=draws).mul(scale).add(scale / 2).to(dtype) for scale in (3.0, 1.0))
    if order == "channels last":
        x, grad = channels_last(x), channels_last(grad)
    return x, grad, *(torch.randn(shape[1], generator=draws) for _ in range(2))


def passes(norm, x, grad, weight, bias):
    """y, and the gradients of x, weight and bias."""
    leaves = [None if value is None else value.clone().requires_grad_() for value in (x, weight, bias)]
    y = norm(*leaves)
    y.backward(grad)
    return y.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)


def ours(x, grad, weight, bias, groups, activation="none"):
    return passes(lambda x, w, b: kernels.group_norm(x, groups, w, b, EPS, activation), x, grad, weight, bias)


def truth(x, grad, weight, bias, groups, activation="none"):
    """Torch's in float64, and the largest factor between a gradient and the gradient of x."""
    wide = [None if value is None else value.double() for value in (x, grad, weight, bias)]
    known = passes(lambda x, w, b: ACTIVATIONS[activation](F.group_norm(x, groups, w, b, EPS)), *wide)
    deviation = wide[0].reshape(len(x), groups, -1).var(2, unbiased=False).add(EPS).sqrt().min()
    return known, float(
        (wide[1].abs().max() if weight is None else (wide[1].abs().max() * wide[2].abs().max())) / deviation
    )


def assert_near(found, known, share, size=None):
    """Within a share of each number, and of the size of the largest."""
    size = float(known.abs().max()) if size is None else size
    assert found.shape == known.shape
    apart = (found.double() - known).abs() - share * known.abs()
    assert float(apart.max()) <= 1e-5 * max(size, 1e-3), float(apart.max())


def assert_true(found, right, share=0.0):
    known, factor = right
    y, of_x, *others = found
    assert_near(y, known[0], share)
    assert_near(of_x, known[1], share, factor)
    for mine, theirs in zip(others, known[2:], strict=True):
        assert_near(mine, theirs, 0.0)


@pytest.mark.parametrize(
    ("order", "activation"),
    [("contiguous", "gelu"), ("contiguous", "none"), ("channels last", "gelu"), ("channels last", "relu")],
)
@pytest.mark.parametrize(("shape", "groups"), CASES, ids=str)
def test_the_norm_is_that_of_float64(form, shape, groups, order, activation):
    given = some(shape, order)
    assert (kernels.form_of(given[0], groups).chunks == 0) == (form == "blocks")
    found = ours(*given, groups, activation)
    assert_true(found, truth(*given, groups, activation))
    assert found[0].stride() == found[1].stride() == given[0].stride()


ROUNDED = {torch.float16: 2**-11, torch.bfloat16: 2**-7}
"""Half a unit in the last place; of bf16 two: the interpreter cuts the lower bits off."""


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_in_half_precision_only_the_result_is_rounded(form, dtype, activation):
    given = some((2, 24, 5, 7), "channels last", dtype)
    found = ours(*given, 8, activation)
    assert [value.dtype for value in found] == [dtype, dtype, torch.float32, torch.float32]
    assert_true(found, truth(*given, 8, activation), ROUNDED[dtype])


@pytest.mark.parametrize("order", ["contiguous", "channels last"])
def test_a_sample_has_the_same_bits_in_every_batch_and_every_time(form, order):
    x, grad, weight, bias = some((2, 24, 3, 11), order)
    first, again = (ours(x, grad, weight, bias, 8, "gelu") for _ in range(2))
    assert all(map(torch.equal, first, again))
    for n in range(2):
        y, of_x, *_ = ours(x[n : n + 1], grad[n : n + 1], weight, bias, 8, "gelu")
        assert torch.equal(y[0], first[0][n]) and torch.equal(of_x[0], first[1][n])


def test_without_weight_and_bias(form):
    x, grad, *_ = some((2, 12, 9))
    found = ours(x, grad, None, None, 4, "relu")
    known, factor = truth(x, grad, None, None, 4, "relu")
    assert_near(found[0], known[0], 0.0)
    assert_near(found[1], known[1], 0.0, factor)
    assert found[2:] == (None, None)


def test_any_input_and_any_gradient(form):
    """Parts of a larger tensor, an expanded gradient, a gradient in the other order."""
    x, grad, weight, bias = some((2, 12, 6, 5))
    right = truth(x[:, :, ::2], grad[:, :, ::2], weight, bias, 4)
    assert_true(ours(x[:, :, ::2], grad[:, :, ::2], weight, bias, 4), right)
    right = truth(x, grad, weight, bias, 4)
    for one, other in ((channels_last(x), grad), (x, channels_last(grad))):
        found = ours(one, other, weight, bias, 4)
        assert_true(found, right)
        assert found[1].stride() == one.stride()
    flat = grad[:1, :1, :1, :1].expand_as(grad)
    assert_true(ours(x, flat, weight, bias, 4), truth(x, flat, weight, bias, 4))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_stays_in_its_group_and_is_not_lost(form, bad, activation):
    """Also beside masked places: five channels of a block of eight."""
    x, grad, weight, bias = some((2, 20, 9), "channels last")
    right = ours(x, grad, weight, bias, 4, activation)
    x[1, 7, 3] = bad
    found = ours(x, grad, weight, bias, 4, activation)
    touched = torch.zeros(2, 20, dtype=torch.bool)
    touched[1, 5:10] = True
    for mine, before in zip(found[:2], right[:2], strict=True):
        assert mine[touched].isnan().any(1).all()
        assert torch.equal(mine[~touched], before[~touched])
    assert found[2][5:10].isnan().all() and found[2][:5].isfinite().all() and found[2][10:].isfinite().all()


@pytest.mark.parametrize("order", ["contiguous", "channels last"])
def test_statistics_far_from_zero(form, order):
    """A deviation of 1 at 1,000: a difference of the squares' mean and the mean's square would have lost it."""
    x, grad, weight, bias = some((2, 12, 300), order)
    x = x / 3 + 1000
    _, means, rstds = kernels.group_norm_op(x, weight, bias, 4, EPS, 0)
    wide = x.double().reshape(2, 4, -1)
    assert torch.allclose(means.double(), wide.mean(2), rtol=1e-6)
    assert torch.allclose(rstds.double(), (wide.var(2, unbiased=False) + EPS).rsqrt(), rtol=1e-4)
    y, *_ = ours(torch.full_like(x, 3.0), grad, weight, bias, 4)
    assert torch.equal(y, bias[:, None].expand_as(y)), "of a constant the bias is left"


@pytest.mark.parametrize("order", ["contiguous", "channels last"])
def test_a_first_block_far_from_the_rest(order, monkeypatch):
    """Distances are taken from its mean: those of the other blocks are then hundreds of deviations."""
    for name, value in zip(("SMALL", "TILE", "TILES"), (0, 256, 8), strict=True):
        monkeypatch.setattr(kernels, name, value)
    x, grad, weight, bias = some((2, 8, 600), order)
    first = kernels.form_of(x, 4).block_s
    x[:, :, :first] *= 1e-3
    x[:, :, first:] += 300
    assert_true(ours(x, grad, weight, bias, 4), truth(x, grad, weight, bias, 4))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_operator_has_the_bits_of_the_direct_call(form, activation):
    x, grad, weight, bias = some((2, 24, 5, 7))
    number = kernels.ACTIVATIONS[activation]
    operator = passes(lambda *some: kernels.group_norm_op(*some, 8, EPS, number)[0], x, grad, weight, bias)
    assert all(map(torch.equal, operator, ours(x, grad, weight, bias, 8, activation)))


def test_only_the_input_and_the_statistics_are_kept():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        x, _, weight, bias = some((2, 24, 5, 7))
        kernels.group_norm(x.requires_grad_(), 8, weight, bias, EPS, "gelu")
    assert [tuple(value.shape) for value in kept] == [(2, 24, 5, 7), (24,), (24,), (2, 8), (2, 8)]
    assert kept[0].data_ptr() == x.data_ptr()


def test_without_a_gpu_the_kernels_are_not_taken(monkeypatch):
    """Nor where a launch fails, which is said once."""
    kernels._runs.cache_clear()
    assert not kernels.can_run(torch.zeros(1, 2, 4))
    kernels._runs.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.warns(UserWarning, match="Triton's kernels do not run here"):
        assert not kernels.can_run(torch.zeros(1, 2, 4))
    assert not kernels.can_run(torch.zeros(1, 2, 4))
    kernels._runs.cache_clear()


@triton.jit
def offsets_of_one(found, sample, S, C: tl.constexpr, LAST: tl.constexpr):
    channels = tl.arange(0, 2)
    places, _ = kernels._block(tl.load(sample), tl.arange(0, 4) + S - 4, channels, channels < C, S, C, LAST)
    columns = tl.arange(0, 4)[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(found + columns, places)


@pytest.mark.parametrize("last", [False, True])
def test_offsets_beyond_the_range_of_int32(last):
    """Of the last positions of sample 127 of the video network's first map: 17 x 128 x 128, 320 channels."""
    sample, size, channels = 127, 17 * 128 * 128, 320
    found = torch.zeros(4, 2, dtype=torch.int64)
    offsets_of_one[(1,)](found, torch.tensor([sample], dtype=torch.int32), size, channels, last)
    known = torch.arange(128, dtype=torch.int64)[-1] * size * channels + torch.tensor(
        [[p * channels + c if last else c * size + p for c in range(2)] for p in range(size - 4, size)]
    )
    assert torch.equal(found, known) and int(known.max()) > 2**31


def test_the_real_sizes_of_blocks():
    """Several chunks with an incomplete last one, and several blocks of channels."""
    for shape, order in (((1, 8, 9000), "contiguous"), ((1, 136, 300), "channels last")):
        given = some(shape, order, torch.float16)
        seen = kernels.form_of(given[0], 8)
        assert seen.chunks > 1 and seen.size % (seen.tiles * seen.block_s) and seen.grid[1] > 1
        assert_true(ours(*given, 8, "gelu"), truth(*given, 8, "gelu"), ROUNDED[torch.float16])


class Traffic:
    """Counts the bytes that kernels load and store, in place of the interpreter's own methods."""

    def __init__(self, monkeypatch):
        self.moved = 0
        for name, masks in (("create_masked_load", 1), ("create_masked_store", 2)):
            monkeypatch.setattr(InterpreterBuilder, name, self.counting(getattr(InterpreterBuilder, name), masks))

    def counting(self, method, place):
        def counted(builder, *args, **more):
            self.moved += int(args[place].data.sum()) * args[0].get_element_ty().primitive_bitwidth // 8
            return method(builder, *args, **more)

        return counted


@pytest.mark.parametrize("order", ["contiguous", "channels last"])
def test_the_bytes_that_kernels_move_are_the_counted_ones(form, monkeypatch, order):
    """Of `benchmarks/map_bytes.py`, without the vectors of a block: six numbers of a channel in each kernel."""
    x, grad, weight, bias = some((2, 24, 13, 25), order, torch.float16)
    traffic = Traffic(monkeypatch)
    y = kernels.group_norm(x.requires_grad_(), 8, weight, bias, EPS, "relu")
    forward, traffic.moved = traffic.moved, 0
    y.backward(grad)
    seen = kernels.form_of(x, 8)
    vectors = 4 * 24 * 2 * max(1, seen.chunks)  # one number for each channel and block
    for found, backward in ((forward, False), (traffic.moved, True)):
        counted = map_bytes.norm_bytes((2, 24, 13, 25), 8, order == "channels last", backward)
        assert counted <= found <= 1.01 * counted + vectors * (10 if backward else 4)


# ---- for a GPU, without one ----


@pytest.fixture(scope="module")
def compiled():
    """What `norm_on_cards.py` found, in a process whose Triton is not the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests/kit/norm_on_cards.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_torchs_compiler_takes_the_norm(compiled):
    """One graph, whose kernels write nothing that was given. The input and the statistics are kept."""
    assert compiled["forward"] == ["_moments", "_merged_moments", "_large_forward"]
    assert compiled["backward"] == ["_gradient_sums", "_merged_sums", "_large_backward"]
    assert compiled["kept"] == [[2, 8], [2, 8], [2, 40, 3, 32, 32], [40], [40]]
    assert compiled["written"] == [["parts"], ["means", "rstds"], ["y"], ["parts"], ["shares", "sums"], ["of_x"]]


def test_the_kernels_compile_for_gpus(compiled):
    """Maps of the shipped networks are read and written in pieces of 16 bytes, and no register is spilled."""
    assert len(compiled["kernels"]) > 30
    for name, found in compiled["kernels"].items():
        assert found["spilled"] == 0 and found["registers"] < 200, (name, found)
        if name.startswith(("video", "har contiguous")):
            assert set(found["maps"]) <= {16}, (name, found)
