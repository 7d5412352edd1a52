"""Draw README's picture: the loss of one training on 1, 2 and 3 processes, the curves lying on each
other.

python dev/plot_loss.py        writes docs/images/one_two_three.svg and prints how far they are
apart
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "images" / "one_two_three.svg"
WORDS = ["har", "global_batch=60", "log_every=1", "amp=off", "epochs=2", "eval_every=1000"]
CURVES = {1: ("#c6dbef", 7), 2: ("#6baed6", 4), 3: ("#08306b", 1.2)}
"""Processes -> (colour, width): each narrower than the one below it."""

WIDTH, HEIGHT, LEFT, BOTTOM = 760, 250, 46, 34


def losses(processes: int, folder: Path) -> list[float]:
    start = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        "train.py",
    ]
    run = folder / str(processes)
    command = [sys.executable, *start, *WORDS, f"save_dir={run}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "train"]


def drawn(curves: dict[int, list[float]]) -> str:
    steps, top = len(curves[1]), max(max(values) for values in curves.values())

    def point(step: int, loss: float) -> str:
        x = LEFT + (WIDTH - LEFT - 12) * step / (steps - 1)
        return f"{x:.1f},{12 + (HEIGHT - BOTTOM - 12) * (1 - loss / top):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" '
        'font-size="13" fill="#444"><rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{LEFT},12 V{HEIGHT - BOTTOM} H{WIDTH - 12}" fill="none" stroke="#999"/>',
        f'<text x="{LEFT - 8}" y="20" text-anchor="end">{top:.1f}</text>',
        f'<text x="{LEFT - 8}" y="{HEIGHT - BOTTOM}" text-anchor="end">0</text>',
        f'<text x="{WIDTH - 12}" y="{HEIGHT - 10}" text-anchor="end">step {steps}</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 10}">loss of {" ".join(WORDS[:2])}, every step</text>',
    ]
    for row, (processes, (colour, width)) in enumerate(CURVES.items()):
        line = " ".join(point(step, loss) for step, loss in enumerate(curves[processes]))
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
        )
        y, name = 34 + 22 * row, "1 process" if processes == 1 else f"{processes} processes"
        parts.append(f'<path d="M{WIDTH - 190},{y} h40" stroke="{colour}" stroke-width="{width}"/>')
        parts.append(f'<text x="{WIDTH - 140}" y="{y + 5}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        curves = {processes: losses(processes, Path(folder)) for processes in CURVES}
    OUT.write_text(drawn(curves), encoding="utf-8")
    for processes in (2, 3):
        apart = max(abs(a - b) / abs(b) for a, b in zip(curves[processes], curves[1], strict=True))
        print(
            f"{processes} processes: at most {apart:.1e} of the loss away from 1 process, in "
            f"{len(curves[1])} steps"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
