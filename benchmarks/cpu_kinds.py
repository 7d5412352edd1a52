#!/usr/bin/env python3
"""Show the bits of small trainings on this kind of CPU, and compare them with the bits of the kinds
in results/cpu_kinds.json.

python benchmarks/cpu_kinds.py                 this CPU, arithmetic=capped: adds a row to
                                               results/cpu_kinds.json and results/cpu_kinds.md
python benchmarks/cpu_kinds.py --native        the same trainings with arithmetic=native
python benchmarks/cpu_kinds.py --under "qemu-x86_64 -cpu Haswell-v4"
                                               an emulated CPU (Debian's package qemu-user, from
                                               version 8 on)
python benchmarks/cpu_kinds.py --dry           print the row only

Exit code 1: another bit than on another kind with the same torch.

The file is also the task of these trainings:

python train.py benchmarks/cpu_kinds.py net.kind=gru
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from engine import config  # noqa: E402
from engine.contract import Batch, Loss  # noqa: E402
from engine.contract import Task as Base  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "cpu_kinds.json"

TRAININGS = {
    "perceptron": "net.kind=perceptron",
    "perceptron, no virtual workers": "net.kind=perceptron virtual_workers=0",
    "conv1d": "net.kind=conv1d",
    "conv1d in bf16": "net.kind=conv1d amp=bf16",
    "conv2d": "net.kind=conv2d",
    "conv3d": "net.kind=conv3d",
    "transformer": "net.kind=transformer",
    "gru": "net.kind=gru",
}
"""A column of the table: the words of the training."""

COMMON = "steps=4 epochs=0 batch_size=8 global_batch=16 virtual_workers=2 device=cpu amp=off"
COMMON += " check_sums=false check_resume=false num_workers=0 optim.lr=1e-2"


# ---- the task


def numbers(count: int, seed: int = 0) -> Tensor:
    """Return (count,) float32 within -1 and 1, by integers alone: equal on each machine."""
    index = torch.arange(count, dtype=torch.int64) + seed * 1_000_003
    mixed = (index * 2_654_435_761) ^ (index >> 7)
    mixed = (mixed * 40_503 + 12_345) % (1 << 24)
    return (mixed.double() / (1 << 23) - 1).float()


@dataclass
class Net:
    kind: str = config.option("perceptron", "perceptron, conv1d, conv2d, conv3d, transformer, gru")


@dataclass
class Settings:
    net: Net = field(default_factory=Net)


class Encoder(nn.Module):
    """A transformer, or a recurrent network, over (B, 16, 48)."""

    def __init__(self, kind: str):
        super().__init__()
        self.gru = nn.GRU(48, 48, batch_first=True) if kind == "gru" else None
        self.layer = nn.TransformerEncoderLayer(48, 4, 96, batch_first=True, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        if self.gru is not None:
            return self.gru(x)[0].mean(1)
        return self.layer(x).mean(1)


def convolutions(kind: str) -> nn.Module:
    conv = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d}[kind]
    norm = {"conv1d": nn.BatchNorm1d, "conv2d": nn.BatchNorm2d, "conv3d": nn.BatchNorm3d}[kind]
    return nn.Sequential(
        conv(3, 16, 3, padding=1), norm(16), nn.ReLU(),
        conv(16, 32, 3, stride=2, padding=1), norm(32), nn.ReLU(), nn.Dropout(0.1),
        nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
    )  # fmt: skip


SHAPES = {
    "perceptron": (256,),
    "conv1d": (3, 256),
    "conv2d": (3, 16, 16),
    "conv3d": (3, 6, 8, 8),
    "transformer": (16, 48),
    "gru": (16, 48),
}
WIDTHS = {"perceptron": 64, "transformer": 48, "gru": 48}


class Task(Base):
    """Six classes of 64 samples of computed numbers."""

    Settings = Settings

    def datasets(self) -> tuple[Any, Any]:
        shape = SHAPES[self.cfg.net.kind]
        x = numbers(64 * int(np.prod(shape))).reshape(64, *shape)
        return [{"x": x[n], "y": torch.tensor(n % 6)} for n in range(64)], None

    def model(self) -> nn.Module:
        kind = self.cfg.net.kind
        if kind == "perceptron":
            body: nn.Module = nn.Sequential(nn.Linear(256, 96), nn.Tanh(), nn.Linear(96, 64))
        elif kind in ("transformer", "gru"):
            body = Encoder(kind)
        else:
            body = convolutions(kind)
        return nn.Sequential(body, nn.Linear(WIDTHS.get(kind, 32), 6))

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        losses = nn.functional.cross_entropy(net(batch["x"]), batch["y"], reduction="sum")
        return Loss(losses, len(batch["y"]))


# ---- the functions

ELEMENTWISE = (
    "exp log log2 log10 log1p expm1 sqrt rsqrt sin cos tan tanh sinh cosh asin acos atan erf "
    "erfc erfinv sigmoid"
).split()


def functions() -> str:
    """Return the digest of functions that no training above calls, and of generators."""
    found = hashlib.sha256()

    def note(*results: Tensor) -> None:
        for result in results:
            found.update(result.detach().contiguous().reshape(-1).numpy().tobytes())

    for dtype in (torch.float32, torch.float64):
        x = numbers(20_000).to(dtype)
        inside = x.abs() * 0.98 + 0.01
        for name in ELEMENTWISE:
            note(getattr(torch, name)(inside))
        note(inside**0.5, inside**-0.5, inside**2, inside**1.7)
        for rows, inner, columns in ((1, 64, 8), (16, 16, 16), (31, 53, 17), (64, 300, 48)):
            a, b = x[: rows * inner].reshape(rows, inner), x[: inner * columns]
            note(a @ b.reshape(inner, columns), a.t() @ a)
        square = x[:1600].reshape(40, 40)
        note(torch.linalg.solve(square + 9 * torch.eye(40, dtype=dtype), square))
        note(torch.view_as_real(torch.fft.rfft(x[:1000])), x.softmax(0), x.sum(), x.var())
        note(nn.functional.gelu(x), nn.functional.silu(x), x.cumsum(0))
    torch.manual_seed(1)
    note(torch.randn(1000), torch.empty(1000).exponential_(), torch.empty(1000).bernoulli_(0.3))
    return found.hexdigest()[:16]


# ---- one kind of CPU


def measure(arithmetic: str) -> dict[str, Any]:
    """Return the row of the CPU of this process."""
    import train

    hashes = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, more in TRAININGS.items():
            words = [__file__, *COMMON.split(), f"arithmetic={arithmetic}"]
            given = {word.partition("=")[0]: word for word in [*words[1:], *more.split()]}
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                code = train.main([__file__, *given.values(), f"save_dir={folder}/{len(hashes)}"])
            found = re.search(r"sha256 (\w+)", printed.getvalue())
            hashes[name] = found[1] if found else f"exit code {code}"
            print(f"{name}: {hashes[name]}", file=sys.stderr, flush=True)
    hashes["functions"] = functions()
    return {
        "caches": caches(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "libc": " ".join(platform.libc_ver()),
        "hashes": hashes,
    }


def caches() -> list[int]:
    """Return the bytes of the caches for data of levels 1, 2 and 3."""
    # glibc's numbers of _SC_LEVEL1_DCACHE_SIZE, 2 and 3, for which Python has no names
    return [os.sysconf(number) for number in (188, 191, 194)]


def kind_of(under: str) -> str:
    """Return the name of the CPU, with its instructions beyond AVX2."""
    if under:
        return f"{shlex.split(under)[-1]}, emulated by QEMU"
    facts = Path("/proc/cpuinfo").read_text()
    read = {
        name.strip(): value for name, _, value in (x.partition(": ") for x in facts.split("\n"))
    }
    beyond = [name for name in ("avx512f", "avx512_bf16", "amx_tile") if name in read["flags"]]
    family = f"family {read['cpu family']} model {read['model']}"
    return f"{read['model name']} ({family}; {', '.join(['avx2', *beyond])})"


def row_of(under: str, arithmetic: str) -> dict[str, Any]:
    """Measure in a process of its own, whose variables are set from the start: an emulated process
    that starts itself again would leave the emulation."""
    from plugins.performance.capped import VARIABLES

    command = [*shlex.split(under), sys.executable, __file__, "--measure", arithmetic]
    env = dict(os.environ) | (VARIABLES if arithmetic == "capped" else {})
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    about = {"kind": kind_of(under), "emulated": bool(under), "arithmetic": arithmetic}
    return about | json.loads(done.stdout.splitlines()[-1])


# ---- the table


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown; the hashes in their first 8 digits."""
    columns = [*TRAININGS, "functions"]
    lines = [
        "`python benchmarks/cpu_kinds.py` adds a row. A hash is of the weights after 4 steps in",
        "one thread, the last one of the results of functions; its first 8 digits are shown. An",
        "emulated CPU is QEMU's (`--under`): exact arithmetic, but no maker's silicon.",
        "",
        f"| CPU | arithmetic | torch, NumPy, C library | caches, KiB | {' | '.join(columns)} |",
        f"|{'---|' * (len(columns) + 4)}",
    ]
    for row in rows:
        versions = f"{row['torch']}, {row['numpy']}, {row['libc']}"
        sizes = ", ".join(str(size >> 10) for size in row["caches"])
        hashes = " | ".join(row["hashes"].get(name, "")[:8] for name in columns)
        lines.append(f"| {row['kind']} | {row['arithmetic']} | {versions} | {sizes} | {hashes} |")
    return "\n".join(lines) + "\n"


def differences(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Return the trainings with other bits than on another kind with the same versions."""
    versions = ("torch", "numpy", "libc", "arithmetic")
    found = []
    for other in rows:
        if [other[name] for name in versions] == [row[name] for name in versions]:
            for name, digest in row["hashes"].items():
                if other["hashes"].get(name, digest) != digest:
                    found.append(f"{name}: {digest}, on {other['kind']} {other['hashes'][name]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--under", default="", help="the command of an emulator")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        torch.set_num_threads(1)
        print(json.dumps(measure(args.measure)))
        return 0
    row = row_of(args.under, "native" if args.native else "capped")
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    print(table([row]))
    same = ("kind", "arithmetic", "torch", "numpy", "libc")
    rows = [each for each in rows if any(each[name] != row[name] for name in same)]
    found = differences(row, rows)
    print("\n".join(found) or "the same bits as on each other kind with these versions")
    if not args.dry:
        rows.append(row)
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(table(rows))
    return 1 if found and not args.native else 0


if __name__ == "__main__":
    sys.exit(main())
