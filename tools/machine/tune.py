"""Find the largest batch that fits, the fastest batch, and other settings for a faster training on
this machine.

python tools/tune.py har                                   one process, on the GPU or the CPU
python tools/tune.py --processes 2 --config configs/video.yaml dataset.root=data/mice
python train.py har --config tuned.yaml                    train with the result

Options, before the arguments of a training:
  --processes N   number of processes of the training (1)
  --seconds S     time of each measurement (3)
  --max-batch B   largest batch per process to try (the whole training set)
  --out FILE      the result, a delta for --config (tuned.yaml); empty: print only
  --json          the result and all measurements as JSON, instead of tables

Every setting is tried in new processes. Running out of memory is a result. A larger batch is
another training: adapt the learning rate. With global_batch=N, the command searches the fastest
partition of the global batch. With fewer visible GPUs than processes, processes share a GPU by
gloo, and the result has ddp.backend=gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from engine import config, precision
from engine.errors import LockstepError, amount
from engine.files.atomic import write_atomically
from engine.threads import available
from plugins.performance.cores import contention_warning
from tools.arguments import Parser, positive_number, whole_number
from tools.machine import cards
from tools.machine.probe import OutOfMemory, probe
from tools.output import print_json
from tools.running import guarded

CLEARLY = 1.03
"""The smallest speed-up that counts. A smaller speed-up may be chance."""

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a tool after Ctrl-C. Measurements until then are kept."""

Row = dict[str, Any]


class Tuning:
    """The tried settings and the measurements."""

    def __init__(self, options: argparse.Namespace, words: list[str], cfg: Any):
        self.options, self.words, self.cfg = options, words, cfg
        self.cores = available()
        self.threads = int(
            os.environ.get("OMP_NUM_THREADS", max(1, self.cores // options.processes))
        )
        self.rows: list[Row] = []
        self.cards = cards.visible(cfg)
        self.shared = cards.sharing(self.cards, options.processes, cfg.ddp.backend)

    def show(self, text: str = "") -> None:
        if not self.options.json:
            print(text, flush=True)

    def tried(self, settings: dict[str, Any], seconds: float) -> Row | None:
        """Measure a combination of settings. Return None if memory runs out."""
        settings = settings | self.shared
        try:
            found = probe(self.words, settings, self.options.processes, seconds, self.threads)
        except OutOfMemory:
            self.rows.append({"settings": settings, "out_of_memory": True})
            return None
        self.rows.append({"settings": settings, "out_of_memory": False} | found)
        return self.rows[-1]

    # ---- the batch ----

    def batches(self) -> Iterator[int]:
        """Yield batches per process to try: the configured batch, then each time twice the batch.
        With a given global batch, yield the divisors of this process's share."""
        given, most, processes = (
            self.cfg.global_batch,
            self.options.max_batch,
            self.options.processes,
        )
        if given:
            share = given // processes
            yield from (n for n in range(1, share + 1) if share % n == 0 and n <= (most or share))
            return
        batch = self.cfg.batch_size
        yield batch
        while 2 * batch <= (most or self.rows[0]["num_samples"] // processes):
            batch *= 2
            yield batch

    def cut(self, batch: int) -> dict[str, Any]:
        """Return the settings for this batch per process, within a given global batch."""
        if not self.cfg.global_batch:
            return {"batch_size": batch}
        return {
            "batch_size": batch,
            "global_batch": self.cfg.global_batch,
            "gradient_accumulation_steps": 0,
        }

    def find_batch(self) -> tuple[Row, str]:
        """Return (the measurement of the fastest batch, a line about the largest)."""
        if self.shared:
            self.show(
                f"{cards.shared_by(self.cards, self.options.processes)}: a GPU for each is faster\n"
            )
        self.show(HEADER)
        timed: list[Row] = []
        slower, largest, limit = 0, 0, "there are no more samples, or no larger one was asked for"
        for batch in self.batches():
            if would_not_fit(self.rows, batch, self.options.processes):
                limit = f"{batch} would take more than the memory that is free"
                break
            # Once two larger batches are slower, larger batches are only tested for memory.
            row = self.tried(self.cut(batch), seconds=0 if slower == 2 else self.options.seconds)
            if row is None:
                limit = f"memory runs out at {batch}"
                self.show(f"| {batch:>9} | out of memory |")
                break
            largest = batch
            if slower < 2:
                timed.append(row)
                fastest = max(row["samples_per_s"] for row in timed)
                slower = slower + 1 if row["samples_per_s"] < fastest else 0
            self.show(line(row, timed[0]["samples_per_s"]))
        if not timed:
            raise LockstepError(
                "memory runs out with the first batch already", "batch_size", "start lower"
            )
        # The smallest of equally fast batches leaves memory and changes the training least.
        best = next(row for row in timed if row["samples_per_s"] * CLEARLY >= fastest)
        return best, f"largest batch that fits: {largest} ({limit})"

    # ---- the rest ----

    def choices(self, best: Row) -> dict[str, list[Any]]:
        """Return {key: alternatives to the value in `best`}."""
        on_gpu, processes = best["device"].startswith("cuda"), self.options.processes
        device = torch.device(best["device"])
        fast_bf16 = precision.choose("auto", device).name == "bf16"
        amps = {"off", *(("bf16",) if fast_bf16 else ()), *(("fp16",) if on_gpu else ())} - {
            best["precision"]
        }
        workers = [
            n
            for n in (0, 1, 2, 4, 8)
            if n != self.cfg.num_workers and n * processes <= max(1, self.cores)
        ]
        orders = {"channels_last", "contiguous"} - {best["memory_format"]}
        return {
            "amp": sorted(amps),
            # "auto": a model without convolutions
            "memory_format": sorted(orders) if best["memory_format"] != "auto" else [],
            # On a CPU compiling takes up to a minute and makes nothing faster (dev/LOG.md).
            "compile": ["default", "reduce-overhead"]
            if on_gpu and best["compile"] == "off"
            else [],
            "num_workers": workers,
            "ddp.bucket_cap_mb": [5.0, 100.0] if processes > 1 and best["gradients_mb"] > 5 else [],
        }

    def find_rest(self, best: Row) -> Row:
        """Try the keys in turn. Each value is interleaved with the best settings so far."""
        for key, values in self.choices(best).items():
            for value in values:
                settings = best["settings"] | {key: value}
                try:
                    row, again = (
                        self.tried(each, self.options.seconds)
                        for each in (settings, best["settings"])
                    )
                except LockstepError as error:  # such as a missing compiler
                    if error.exit_code == INTERRUPTED:
                        raise
                    self.show(f"  {key}={value}: {error}")
                    continue
                if row is None or again is None:
                    self.show(f"  {key}={value}: out of memory")
                    continue
                gain = row["samples_per_s"] / max(again["samples_per_s"], best["samples_per_s"])
                self.show(
                    f"  {key}={value}: {row['samples_per_s']:.4g} samples/s, {gain:.2f} times "
                    "the best so far"
                )
                if gain > CLEARLY:
                    best = row
        return best


HEADER = (
    "| per process | global batch | memory MB | samples/s | relative | data wait | sync wait |\n"
    "|---:|---:|---:|---:|---:|---:|---:|"
)


def line(row: Row, base: float) -> str:
    total = sum(row["phases_ms"].values())
    waits = [
        sum(row["phases_ms"].get(name, 0.0) for name in names) / total
        for names in (("data loading", "host to device"), ("gradient sync",))
    ]
    return (
        f"| {row['batch_size']:>9} | {row['global_batch']:>12} | {row['memory_mb']:>9.0f} "
        f"| {row['samples_per_s']:>9.4g} | {row['samples_per_s'] / base:>7.2f}x "
        f"| {100 * waits[0]:>8.0f}% | {100 * waits[1]:>8.0f}% |"
    )


def would_not_fit(rows: list[Row], batch: int, processes: int) -> bool:
    """Return whether a linear extrapolation of the last two batches exceeds the free memory. Only
    for CPUs: there the kernel could kill any process."""
    measured = [row for row in rows if not row["out_of_memory"]]
    if not measured or measured[-1]["device"] != "cpu":
        return False
    last = measured[-1]
    before = measured[-2] if len(measured) > 1 else {"batch_size": 0, "memory_mb": 0.0}
    slope = (last["memory_mb"] - before["memory_mb"]) / max(
        1, last["batch_size"] - before["batch_size"]
    )
    needed = last["memory_mb"] + max(0.0, slope) * (batch - last["batch_size"])
    text = ""
    with contextlib.suppress(OSError):  # not Linux
        text = Path("/proc/meminfo").read_text(errors="replace")
    available_kb = re.search(r"^MemAvailable: *(\d+)", text, re.MULTILINE)
    if not available_kb:
        return False
    return processes * needed > int(available_kb[1]) / 1e3


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print((__doc__ or "").strip())
        return 0
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=positive_number, default=3.0)
    parser.add_argument("--max-batch", type=whole_number(0), default=0)
    parser.add_argument("--out", default="tuned.yaml")
    parser.add_argument("--json", action="store_true")
    options, words = parser.parse_known_args(argv)
    return guarded(words, partial(_main, options, words), as_json=options.json)


def _main(options: argparse.Namespace, words: list[str], args: config.Args) -> int:
    if options.processes < 1:
        what = f"{options.processes} is no number of processes"
        raise LockstepError(what, "--processes", "give as many as the training will have")
    if options.out:
        _check_output(Path(options.out))
    tuning = Tuning(options, words, args.cfg)
    largest, cut_short = "", ""
    try:
        best, largest = tuning.find_batch()
        tuning.show(f"\n{largest}\nfastest batch: {best['batch_size']} per process\n")
        best = tuning.find_rest(best)
    except LockstepError as error:
        timed = [row for row in tuning.rows if not row["out_of_memory"]]
        if error.exit_code != INTERRUPTED or not timed:
            raise
        best = max(timed, key=lambda row: row["samples_per_s"])
        cut_short = "# interrupted: the fastest of what was tried so far\n"
    delta = nested({"task": args.cfg.task, **best["settings"]})
    command = shlex.join(["python", "tools/tune.py", *sys.argv[1:]])
    about = (
        f"# {command}\n# {best['samples_per_s']:.4g} samples/s on "
        f"{amount(options.processes, 'process')}\n"
    )
    text = about + cut_short + yaml.safe_dump(delta, sort_keys=False)
    if busy := contention_warning(
        max(row["waited_share"] for row in tuning.rows if not row["out_of_memory"])
    ):
        tuning.show(f"\nwarning: {busy}, and which setting is faster may be chance")
    tuning.show(f"\n{text}")
    if options.out:
        _write(Path(options.out), text)
        tuning.show(f"written to {options.out}: give it to a training with --config {options.out}")
    if options.json:
        found = {"settings": best["settings"], "largest": largest, "best": best}
        print_json(found | {"tried": tuning.rows})
    return INTERRUPTED if cut_short else 0


def _check_output(path: Path) -> None:
    """Raise LockstepError if the file is there, or cannot be written: the search takes minutes."""
    if path.exists():
        raise LockstepError(f"{path} is there already", "--out", "remove it, or give another name")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        todo = "give a file in a folder of yours"
        raise LockstepError(f"{path} cannot be written", "--out", todo)


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        what = f"cannot write: {error.strerror}"
        raise LockstepError(what, str(path), "give another --out") from None


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a flat config: {"ddp.bucket_cap_mb": 5} -> {"ddp": {"bucket_cap_mb":
    5}}."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        place = tree
        for part in sections:
            place = place.setdefault(part, {})
        place[name] = value
    return tree
