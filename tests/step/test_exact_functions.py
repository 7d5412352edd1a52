"""The functions that the bits of virtual workers pass through: rounded correctly, or the same wherever a tensor is cut.
exact_functions.py has a row for each; docs/same-bits.md shows the rows."""

import json
import os
import re
import subprocess
import sys

import exact_functions
import numpy as np
import pytest
import torch
from conftest import ROOT

from engine.comm.world import World
from engine.optim.fused import AdamW
from plugins.parallel import exact
from plugins.parallel.exact import sqrt_correctly_rounded
from plugins.parallel.virtual import WorkerReducer

SETTINGS = {
    "as it is": {},
    "below AVX2": {"ATEN_CPU_CAPABILITY": "default"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
    "MKL compatible": {"MKL_CBWR": "COMPATIBLE"},
}
"""Variables that are read when a process starts. On a CPU without AVX2 some make no difference."""


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_each_function_keeps_its_promise(setting):
    command = [sys.executable, "tests/long/exact_functions.py", "1000000"]
    env = os.environ | SETTINGS[setting]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    del rows["torch.sqrt"]
    assert rows.keys() == exact_functions.ROWS.keys()
    assert {name: faults for name, faults in rows.items() if any(faults.values())} == {}


def test_the_page_has_a_line_for_each_row():
    page = (ROOT / "docs/same-bits.md").read_text()
    section = page.split("## Functions between gradients and checkpoint\n")[1].split("\n## ")[0]
    shown = dict(re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", section, re.MULTILINE))
    words = {"rounded": "rounded correctly", "place": "any slice", "memory": "any address"}
    for name, row in exact_functions.ROWS.items():
        assert [promise for promise, text in words.items() if text in shown[name]] == [*row.promises], name


# ---- the square root ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_every_root_of_sixteen_bits(kind):
    """By exact arithmetic: a root is the nearest number if the middles to both neighbours lie on either side of it."""
    largest = torch.tensor(torch.finfo(kind).max, dtype=kind).view(torch.int16).item()
    values = torch.arange(1, largest + 1, dtype=torch.int16).view(kind)
    roots = sqrt_correctly_rounded(values)
    assert roots.dtype == kind
    bits = roots.view(torch.int16)
    below, above = ((roots.double() + (bits + step).view(kind).double()) / 2 for step in (-1, 1))
    assert (below.square() < values.double()).all() and (values.double() < above.square()).all()  # 24 bits: exact


def test_roots_of_one_number_of_nothing_and_of_what_has_none():
    assert sqrt_correctly_rounded(torch.tensor(2.0, dtype=torch.float64)).item() == 2.0**0.5
    assert sqrt_correctly_rounded(torch.tensor(9.0)).shape == ()
    assert sqrt_correctly_rounded(torch.zeros(0, 3)).shape == (0, 3)
    special = sqrt_correctly_rounded(torch.tensor([-0.0, float("inf"), float("nan")]))
    assert special[0].signbit() and special[1].isinf() and special[2].isnan()
    turned = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(sqrt_correctly_rounded(turned).square().round(), turned)


# ---- call sites -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_adamw_rounds_each_operation_once(kind):
    """Two steps on numbers of many sizes, by NumPy's own arithmetic (Loshchilov and Hutter 2019, algorithm 2)."""
    draw = np.random.default_rng(0)
    weights, *grads = (np.exp(draw.normal(size=70_001) * 4).astype(kind) for _ in range(3))
    p = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    optimizer = AdamW([p], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, fused=True)
    exact.use_exact_kernels(optimizer)
    first, second = np.zeros_like(weights), np.zeros_like(weights)
    for step, grad in enumerate(grads, 1):
        p.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        weights = weights * kind(1 - 1e-3 * 0.01)
        first = first * kind(0.9) + grad * kind(1 - 0.9)
        second = second * kind(0.999) + grad * grad * kind(1 - 0.999)
        root = np.sqrt(second) / kind(np.sqrt(1 - 0.999**step)) + kind(1e-8)
        weights = weights + first * kind(-1e-3 / (1 - 0.9**step)) / root
        assert np.array_equal(p.detach().numpy(), weights), step


def test_the_root_of_a_norm_is_rounded_correctly():
    world = World(0, 0, 1, torch.device("cpu"))
    workers = WorkerReducer(2, world, torch.nn.Linear(2, 1))
    draw = torch.Generator().manual_seed(0)
    pairs = torch.randn(2_000, 2, 1, generator=draw, dtype=torch.float64)
    norms = [workers.grad_norm([pair]).item() for pair in pairs]
    squares = [a * a + b * b for a, b in pairs.flatten(1).tolist()]  # the sum over two rows, which round once each
    assert norms == [exact_functions.root_in_integers(square, 0.0) for square in squares]


STEPS = (1270, 2582, 3069, 5458, 6788)
"""Where glibc's `(1 - 0.999**step) ** 0.5` is not rounded correctly: the C library's `pow` promises no such thing."""


def test_the_correction_of_a_moment_is_rounded_correctly(monkeypatch):
    divisors = []
    divide = torch._foreach_div_
    monkeypatch.setattr(torch, "_foreach_div_", lambda a, b: (divisors.append(b), divide(a, b))[1])
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([p], lr=1e-3, fused=True)
    exact.use_exact_kernels(optimizer)
    for step in (1, *STEPS):
        p.grad = torch.ones(3)
        if step > 1:
            optimizer.state[p]["step"].fill_(step - 1)
        optimizer.step()
    right = [exact_functions.root_in_integers(1 - 0.999**step, 0.0) for step in (1, *STEPS)]
    assert [divisor for (divisor,) in divisors[::2]] == right
