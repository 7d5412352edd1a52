"""The precision that a run takes, and what torch gets wrong in it."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import succeed
from torch import nn
from torch._subclasses import FakeTensorMode

import models
from engine.errors import LockstepError
from engine.precision import Precision, choose, resolve
from engine.private import _in_float32
from models import cnn3d, layers
from models.layers import GroupNormOfHalf, activated_norm, group_norm

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


@pytest.mark.slow
@pytest.mark.real
def test_convolutions_of_tiny_maps_train_in_bf16(launch):
    """In a process of its own, because what is wrong ends it; with memory that is not clean."""
    env = {"PYTHONPATH": "tests:tests/kit:tests/step", "MALLOC_PERTURB_": "128", "OMP_NUM_THREADS": "1"}
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


MASKS = {"none": {}, "bool": {"attn_mask": torch.eye(5) < 1}, "float": {"attn_mask": torch.ones(5, 5) / 3}}
MASKS |= {"causal": {"is_causal": True}, "dropout": {"is_causal": True, "dropout_p": 0.5}, "scale": {"scale": 0.5}}


@pytest.mark.parametrize("more", MASKS.values(), ids=MASKS)
def test_attention_computes_in_float32(more):
    """Also where a module calls it, as nn.MultiheadAttention: (query, key, value, mask, dropout, is_causal)."""
    attention, (query, key, value) = nn.functional.scaled_dot_product_attention, torch.randn(3, 2, 4, 5, 8)
    given = more.get("attn_mask"), more.get("dropout_p", 0.0), more.get("is_causal", False)
    torch.manual_seed(0)
    exact = attention(query, key, value, **more)
    for place, named in (((), more), (given, {"scale": more.get("scale")})):
        torch.manual_seed(0)
        with CPU_BF16.autocast():
            rounded = attention(query, key, value, *place, **named)
        assert torch.equal(rounded, exact.bfloat16()) and not torch.equal(rounded, exact)
    if more == {"is_causal": True}:
        assert torch.equal(rounded[..., 0, :], value[..., 0, :].bfloat16()), "the first sees itself alone"


@pytest.mark.parametrize("grad", [False, True])
def test_a_modules_causal_attention_sees_no_future_in_bf16(grad):
    module, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    later = torch.cat([x[:, :3], torch.randn(2, 2, 8)], 1)
    with CPU_BF16.autocast(), torch.set_grad_enabled(grad):
        one, other = (module(v, v, v, attn_mask=mask, is_causal=True, need_weights=False)[0] for v in (x, later))
    assert torch.equal(one[:, :3], other[:, :3]) and not torch.equal(one[:, 3:], other[:, 3:])


def test_a_modules_attention_computes_in_float32(monkeypatch):
    module, x, seen = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8), []
    plain = nn.functional.scaled_dot_product_attention.__wrapped__
    spy = _in_float32(lambda query, *rest, **more: seen.append(query.dtype) or plain(query, *rest, **more))
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy)
    with CPU_BF16.autocast():
        module(x, x, x, need_weights=False)
    assert seen == [torch.float32]


@pytest.mark.parametrize(
    ("hiding", "found"),
    [({}, True), ({"DNNL_MAX_CPU_ISA": "avx512_core"}, False), ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, False),
     ({"DNNL_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True)],
)  # fmt: skip
def test_instructions_that_are_hidden_are_not_there(monkeypatch, hiding, found):
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in hiding.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert choose("auto", torch.device("cpu")).name == ("bf16" if found else "off")
    assert choose("auto", torch.device("cpu"), compiled=True).name == "off"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert choose("auto", torch.device("cpu")).name == "off"


@pytest.mark.parametrize(
    ("amp", "has_bf16", "name", "note"),
    [
        ("auto", True, "bf16", "T4 has bf16"),
        ("auto", False, "fp16", "T4 has no bf16"),
        ("bf16", True, "bf16", "T4 has bf16"),
        ("bf16", False, "fp16", "T4 has no bf16"),
        ("fp16", True, "fp16", "set by amp"),
        ("off", True, "off", "set by amp"),
    ],
)
def test_what_a_gpu_takes(monkeypatch, amp, has_bf16, name, note):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16 or including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    chosen = choose(amp, torch.device("cuda"))
    assert (chosen.name, chosen.note, chosen.enabled) == (name, note, name != "off")
    if amp == "bf16" and not has_bf16:
        with pytest.raises(LockstepError, match=re.escape("amp=bf16, but T4 has no bf16 (amp): use amp=fp16 or auto")):
            choose(amp, torch.device("cuda"), strict=True)


@pytest.mark.parametrize("elsewhere", ["bf16", "off"])
def test_where_not_all_machines_have_bf16_none_takes_it(elsewhere, monkeypatch):
    cfg = SimpleNamespace(amp="auto", compile="off")
    monkeypatch.setattr("engine.precision.cpu_has_bf16", lambda: True)
    cpu = torch.device("cpu")
    world = SimpleNamespace(device=cpu)
    world.reduce_on_rank0 = lambda mine, choose: choose(iter([mine, elsewhere]))
    world.first = lambda error: error
    world.differs_across_ranks = lambda mine: mine != elsewhere
    assert resolve(cfg, world).name == elsewhere
    assert resolve(cfg, world, "bf16").name == "bf16", "a resumed run keeps its own"


@pytest.mark.slow
@pytest.mark.real
def test_torch_says_which_instructions_are_hidden(launch):
    """torch reads these variables when it starts."""
    ask = "import torch; from engine.precision import choose; print(choose('auto', torch.device('cpu')).name)"
    for hiding in ({"ATEN_CPU_CAPABILITY": "avx2"}, {"DNNL_MAX_CPU_ISA": "AVX2"}):
        assert succeed(launch.python("-c", ask, **hiding)).out == "off\n"


@pytest.mark.slow
def test_what_bf16_gains_is_measured(launch):
    done = succeed(launch.python("benchmarks/precision.py", "--only", "flatten", "--rounds", "2", "--seconds", "0.01"))
    assert "amp=auto is" in done.out and "\n| flatten | " in done.out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 24, 5, 6, 7), (2, 12, 9)], ids=str)
def test_a_norm_on_a_gpu_has_the_bits_of_autocasts_and_keeps_half(dtype, shape):
    """CUDA's autocast gives GroupNorm a float32 input, and the next convolution a bf16 copy of its output."""
    torch.manual_seed(0)
    norm, x = group_norm(shape[1]), (torch.randn(shape) * 3 + 1).to(dtype)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    grad, kept = torch.randn(shape).to(dtype), []

    def passes(forward):
        norm.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
            y = forward(leaf)
        y.backward(grad)
        return y, leaf.grad, norm.weight.grad, norm.bias.grad

    theirs = passes(lambda x: nn.functional.group_norm(x.float(), norm.num_groups, norm.weight, norm.bias).to(dtype))
    kept.clear()
    ours = passes(lambda x: GroupNormOfHalf.apply(x, norm.weight, norm.bias, norm.num_groups, norm.eps))
    assert all(map(torch.equal, ours, theirs)) and ours[0].dtype == dtype
    assert [value.dtype for value in kept if value.numel() == x.numel()] == [dtype]


def test_a_norm_takes_that_way_on_gpus_alone(monkeypatch):
    taken = []
    monkeypatch.setattr(GroupNormOfHalf, "apply", lambda x, *rest: taken.append((x.device.type, x.dtype)) or x)
    for device in ("cuda", "cpu"):
        with FakeTensorMode(), torch.device(device), torch.no_grad():  # autograd itself would look for a GPU
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                assert group_norm(24)(torch.ones(2, 24, 5, dtype=dtype)).dtype == dtype
    assert taken == [("cuda", torch.bfloat16), ("cuda", torch.float16)]


@pytest.mark.parametrize("runs", [True, False])
def test_a_norm_takes_the_kernels_where_they_run(monkeypatch, runs):
    """Of half precision on a GPU, of any but an empty batch; else torch's own, and the activation after it."""
    taken = []

    def group_norm(x, groups, weight, bias, eps, activation):
        taken.append(("kernels", len(x), groups, activation))
        return x

    kernels = SimpleNamespace(can_run=lambda x: runs, group_norm=group_norm)
    monkeypatch.setitem(sys.modules, "models.norm_kernels", kernels)
    monkeypatch.setattr(models, "norm_kernels", kernels, raising=False)
    monkeypatch.setattr(layers, "HAS_TRITON", True)
    monkeypatch.setattr(GroupNormOfHalf, "apply", lambda x, *rest: taken.append(("torch", len(x))) or x)
    for device in ("cuda", "cpu"):
        with FakeTensorMode(), torch.device(device), torch.no_grad():  # autograd itself would look for a GPU
            for samples, dtype in ((2, torch.bfloat16), (0, torch.float16), (2, torch.float32)):
                activated_norm(24, "gelu")[0](torch.ones(samples, 24, 5, dtype=dtype))
    assert taken == [("kernels", 2, 8, "gelu") if runs else ("torch", 2), ("torch", 0)]


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_a_norm_on_a_cpu_has_the_bits_of_torchs_norm_and_activation(name):
    torch.manual_seed(0)
    norm, empty = activated_norm(24, name)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    x = torch.randn(3, 24, 5)
    known = getattr(nn.functional, name)(nn.functional.group_norm(x, 8, norm.weight, norm.bias))
    assert torch.equal(empty(norm(x)), known)


def test_the_layers_keep_their_numbers():
    """Those are the names in checkpoints."""
    block = cnn3d.Block(8, 8, 1).state_dict()
    assert [*block] == [
        *(f"body.{layer}" for layer in ("0.weight", "0.bias", "2.weight", "3.weight", "3.bias", "5.weight")),
        *(f"body.{layer}" for layer in ("6.weight", "6.bias", "8.weight", "9.weight", "9.bias", "11.weight")),
        "skip.weight",
    ]  # fmt: skip
