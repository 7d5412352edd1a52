"""The functions that the bits of virtual workers pass through, and what is true of each on this CPU.

python tests/long/exact_functions.py [VALUES]

`ROWS` is the table of docs/same-bits.md. Each row is tried for one or more properties:

rounded  correctly: the result is the number of its type that is nearest to the true one, ties to even
place    the result for a number does not depend on where a tensor is cut, nor on the number of threads
memory   the result does not depend on the address of the tensor

Prints a JSON object: row -> property -> the number of faults, and under "torch.sqrt" how many of torch's own square
roots are not rounded correctly. A setting such as ATEN_CPU_CAPABILITY counts from the start of a process, so
test_exact_functions.py starts this script once for each.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from plugins.parallel.exact import sqrt_correctly_rounded

FACTOR = 0.9991
"""A number in double precision: an operation with a float32 tensor takes the nearest float32 number."""

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}
INTEGERS[torch.float16] = torch.int16


class Row(NamedTuple):
    """A function of the tensors a and b, and what is promised of it."""

    apply: Callable[[Tensor, Tensor], Tensor]
    promises: tuple[str, ...] = ("rounded", "place")
    truth: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None  # of arrays in a wider type


def lerped(a: Tensor, b: Tensor) -> Tensor:
    average = a.clone()
    torch._foreach_lerp_([average], [b], [torch.tensor(1 - FACTOR, dtype=a.dtype)])
    return average


def unscaled(a: Tensor, _: Tensor) -> Tensor:
    grad = a.clone()
    scale = torch.tensor(2.0**-16)
    torch._amp_foreach_non_finite_check_and_unscale_([grad], torch.zeros(()), scale)
    return grad


def halved(a: Tensor, _: Tensor) -> Tensor:
    """The sum of the table of rows in `grad_norm.exact_grad_norm`."""
    return a.double().sum()


ROWS = {
    "add": Row(lambda a, b: torch._foreach_add([a], [b])[0], truth=lambda a, b: a + b),
    "subtract": Row(lambda a, b: a - b, truth=lambda a, b: a - b),
    "multiply": Row(lambda a, b: torch._foreach_mul([a], [b])[0], truth=lambda a, b: a * b),
    "multiply by a number": Row(lambda a, _: torch._foreach_mul([a], FACTOR)[0], truth=lambda a, _: a * nearest(a)),
    "multiply by numbers": Row(lambda a, _: torch._foreach_mul([a], [FACTOR])[0], truth=lambda a, _: a * nearest(a)),
    "add a number": Row(lambda a, _: torch._foreach_add([a], FACTOR)[0], truth=lambda a, _: a + nearest(a)),
    "divide": Row(lambda a, b: torch._foreach_div([a], [b])[0], truth=lambda a, b: a / b),
    "divide by numbers": Row(lambda a, _: torch._foreach_div([a], [FACTOR])[0], truth=lambda a, _: a / nearest(a)),
    "divide by a tensor of one": Row(
        lambda a, _: torch._foreach_div([a], torch.tensor(FACTOR, dtype=a.dtype))[0],
        truth=lambda a, _: a / nearest(a),
    ),
    "square": Row(lambda a, _: a.square(), truth=lambda a, _: a * a),
    "square root": Row(lambda a, _: sqrt_correctly_rounded(a.abs()), truth=lambda a, _: np.sqrt(abs(a))),
    "convert": Row(lambda a, _: a.to(torch.float32), truth=lambda a, _: a),
    "choose": Row(lambda a, b: torch.where(a == b, 0.0, a), promises=("place",)),
    "unscale": Row(unscaled, promises=("place",)),
    "interpolate": Row(lerped, promises=("place",)),
    "sum of the norms of rows": Row(halved, promises=("memory",)),
}
"""Names of rows in docs/same-bits.md. They are called there where the call site is named."""


def nearest(like: np.ndarray) -> np.ndarray:
    """Return FACTOR as the operation sees it: `like` is float64 for float32 tensors, longdouble for float64 ones."""
    kind = np.float32 if like.dtype == np.float64 else np.float64
    return like.dtype.type(kind(FACTOR))


# ---- values ---------------------------------------------------------------------------------------------------------


def numbers(kind: torch.dtype, count: int, seed: int) -> Tensor:
    """Return numbers of every size and both signs: any bits but those of NaN; powers of two and their neighbours."""
    draw = torch.Generator().manual_seed(seed)
    integers = INTEGERS[kind]
    info = torch.iinfo(integers)
    bits = torch.randint(info.min, info.max, (count,), generator=draw, dtype=torch.int64)
    if integers is torch.int64:  # randint is uniform over 63 bits; the last ones matter, too
        bits ^= torch.randint(0, 1 << 62, (count,), generator=draw)
    values = bits.to(integers).view(kind)
    exponents = torch.arange(math.log2(torch.finfo(kind).smallest_normal), math.log2(torch.finfo(kind).max))
    powers = torch.exp2(exponents.double()).to(kind)
    up, down = (torch.nextafter(powers.double().to(kind), torch.tensor(end, dtype=kind)) for end in (math.inf, 0.0))
    few = torch.tensor([0.0, -0.0, math.inf, torch.finfo(kind).tiny, torch.finfo(kind).max], dtype=kind)
    values = torch.cat([values, powers, up, down, few])
    values = torch.where(values.isnan(), 1.5, values)
    return values[torch.randperm(len(values), generator=draw)]


def close_calls(name: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return pairs in float32 whose result lies on the middle between two float32 numbers, or as close as can be."""
    draw = np.random.default_rng(seed)
    odd = draw.integers(1 << 23, 1 << 24, count) * 2 + 1  # of 25 bits: the middle between two numbers of 24
    scale = np.exp2(draw.integers(-40, 40, count))
    middle = odd * scale  # exact in float64
    if name in ("add", "subtract"):
        a = (odd - 1) * scale
        b = scale * (1 if name == "add" else -1)
        b = b + draw.integers(-1, 2, count) * b * 2.0**-23  # the half, or a neighbour of it
    elif name == "multiply":
        a = (draw.integers(1 << 10, 1 << 11, count) * 2 + 1) * scale
        b = draw.integers(1 << 11, 1 << 12, count) * 2.0 + 1
    elif name == "divide":
        b = draw.integers(1 << 23, 1 << 24, count) * 1.0
        a = middle * b
    elif name == "square root":
        a = middle * middle
        b = a
    else:
        a, b = middle, middle[::-1]
    return tuple(torch.from_numpy(np.ascontiguousarray(part).astype(np.float32)) for part in (a, b))


# ---- rounded --------------------------------------------------------------------------------------------------------


def not_rounded(name: str, row: Row, count: int) -> int:
    """Return how many results of float32 and of float64 are not the nearest number.

    Of float32 operands float64 gives the result of any of these functions with 53 bits, which rounds to the nearest
    float32 number: 53 >= 2 * 24 + 2 (Figueroa 1995). NumPy's float64 arithmetic is that of the CPU's instructions; its
    results are compared with exact ones below, as are torch's.
    """
    faults = 0
    close = close_calls(name, count // 4, 3)
    kind = torch.float64 if name == "convert" else torch.float32
    a, b = (torch.cat([numbers(kind, count, seed), part.to(kind)]) for seed, part in zip((1, 2), close, strict=True))
    if name == "convert":
        halves = (torch.nextafter(close[0], torch.tensor(math.inf)).double() + close[0].double()) / 2
        a = torch.cat([a, halves, torch.nextafter(halves, torch.tensor(math.inf, dtype=kind))])
        b = a
    with np.errstate(all="ignore"):
        right = row.truth(a.double().numpy(), b.double().numpy())  # type: ignore[misc]
        faults += differs_across_ranks(row.apply(a, b), torch.from_numpy(right.astype(np.float32)))
        if name == "convert":
            return faults
        a, b = (numbers(torch.float64, count // 50, seed) for seed in (4, 5))
        results = row.apply(a, b)
    exact = torch.tensor([*map(EXACT[name.split()[0], name.split()[-1]], a.tolist(), b.tolist())], dtype=torch.float64)
    return faults + differs_across_ranks(results, exact)


def differs_across_ranks(results: Tensor, right: Tensor) -> int:
    """Count the numbers that have other bits. One NaN is as good as another."""
    integers = INTEGERS[results.dtype]
    same = results.view(integers) == right.view(integers)
    return int((~same & ~(results.isnan() & right.isnan())).sum())


def in_integers(operation: Callable[[Fraction, Fraction], Fraction]) -> Callable[[float, float], float]:
    """Return a function of floats that computes with fractions, and rounds once. What is no fraction is Python's."""

    def rounded(a: float, b: float) -> float:
        if not (math.isfinite(a) and math.isfinite(b)):
            return like_ieee(operation, a, b)
        try:
            result = operation(Fraction(a), Fraction(b))
            return float(result) if result else like_ieee(operation, a, b)
        except (OverflowError, ZeroDivisionError):
            return like_ieee(operation, a, b)

    return rounded


def like_ieee(operation: Callable[..., object], a: float, b: float) -> float:
    """Zeros with their signs, infinities and NaN, by NumPy."""
    with np.errstate(all="ignore"):
        return float(operation(np.float64(a), np.float64(b)))  # type: ignore[arg-type]


def root_in_integers(a: float, _: float) -> float:
    """The square root of |a|: of an integer of 108 bits or more, with one more bit that is set if there is a rest."""
    value = abs(a)
    if value == 0 or not math.isfinite(value):
        return math.sqrt(value)
    mantissa, exponent = math.frexp(value)
    whole, exponent = int(math.ldexp(mantissa, 53)), exponent - 53
    shift = 60 + exponent % 2
    whole, exponent = whole << shift, exponent - shift
    root = math.isqrt(whole)
    rest = root * root != whole
    return math.ldexp(float(2 * root + rest), exponent // 2 - 1)


EXACT: dict[tuple[str, str], Callable[[float, float], float]] = {
    ("add", "add"): in_integers(lambda a, b: a + b),
    ("subtract", "subtract"): in_integers(lambda a, b: a - b),
    ("multiply", "multiply"): in_integers(lambda a, b: a * b),
    ("divide", "divide"): in_integers(lambda a, b: a / b),
    ("square", "square"): in_integers(lambda a, _: a * a),
    ("square", "root"): root_in_integers,
}
for words in (("multiply", "number"), ("multiply", "numbers"), ("add", "number"), ("divide", "numbers")):
    EXACT[words] = lambda a, _, exact=EXACT[words[0], words[0]]: exact(a, FACTOR)  # type: ignore[misc]
EXACT["divide", "one"] = EXACT["divide", "numbers"]
"""First and last word of a row's name -> its function of floats, in exact arithmetic."""


# ---- place, memory --------------------------------------------------------------------------------------------------


def cuts() -> Iterator[slice]:
    for start in (*range(17), 31, 63, 64, 100):
        for length in (*range(1, 71), 255):
            yield slice(start, start + length)


def moderate(kind: torch.dtype, count: int, seed: int) -> Tensor:
    """Return numbers of the sizes of weights and gradients: a fault in the last bit shows, no overflow hides it."""
    draw = torch.Generator().manual_seed(seed)
    spread = torch.exp(torch.rand(count, generator=draw, dtype=torch.float64) * 12 - 8)
    return (torch.randn(count, generator=draw, dtype=torch.float64) * spread).to(kind)


def depending_on_place(row: Row) -> int:
    """Count the cuts, the numbers of threads and the layouts that change a bit."""
    faults = 0
    for kind in TYPES:
        a, b = (moderate(kind, 400, seed) for seed in (1, 2))
        whole = row.apply(a, b)
        faults += sum(differs_across_ranks(row.apply(a[cut], b[cut]), whole[cut]) > 0 for cut in cuts())
        a, b = (moderate(kind, 90_000, seed) for seed in (1, 2))  # from 32,768 numbers on, threads share the work
        torch.set_num_threads(1)
        whole = row.apply(a, b)
        torch.set_num_threads(2)
        faults += differs_across_ranks(row.apply(a, b), whole) > 0
        faults += differs_across_ranks(row.apply(a[12_345:], b[12_345:]), whole[12_345:]) > 0
        turned = [part.view(300, 300).t().contiguous().t() for part in (a, b)]
        faults += differs_across_ranks(row.apply(*turned).contiguous().view(-1), whole) > 0
        torch.set_num_threads(1)
    return faults


def depending_on_memory(row: Row) -> int:
    """Count the addresses that change a bit."""
    faults = 0
    for length in (*range(1, 71), 1_000, 40_000):
        values = moderate(torch.float64, length, 1)
        right = row.apply(values, values)
        for offset in range(1, 9):
            moved = torch.empty(length + offset, dtype=torch.float64)[offset:].copy_(values)
            faults += differs_across_ranks(row.apply(moved, moved), right) > 0
    return faults


def faults(name: str, count: int) -> dict[str, int]:
    """Return the number of faults of a row, by property."""
    row = ROWS[name]
    tried = {
        "rounded": lambda: not_rounded(name, row, count),
        "place": lambda: depending_on_place(row),
        "memory": lambda: depending_on_memory(row),
    }
    return {promise: tried[promise]() for promise in row.promises}


def roots_of_torch(count: int) -> dict[str, int]:
    """Return how many of torch's square roots differ from the correctly rounded ones, by type."""
    found = {}
    for kind in (torch.float32, torch.float64):
        values = numbers(kind, count, 1).abs()
        found[str(kind)] = differs_across_ranks(values.sqrt(), sqrt_correctly_rounded(values))
    return found


def main(count: int) -> dict[str, dict[str, int]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: faults(name, count) for name in ROWS} | {"torch.sqrt": roots_of_torch(count)}
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 4_000_000)))
