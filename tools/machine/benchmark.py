"""Measure the scaling of a training on this machine: 1, 2, 4, ... processes. Predict more processes
over another link.

python tools/benchmark.py har
    1 and 2 processes, or as many as there are GPUs
python tools/benchmark.py --processes 1,2,4 --config configs/video.yaml dataset.root=data/mice
python tools/benchmark.py --predict 8 --link 10gbit,50us video
python tools/benchmark.py --predict 16 --machines 2 --inside 2tbit,5us --link 100gbit,20us video

Options, before the arguments of a training:
  --processes N,N,...   numbers of processes (powers of two up to the number of GPUs, or of cores)
  --scaling KIND        weak: the batch of each process is constant; strong: the global batch is
                        constant; both (both)
  --rounds R            repetitions, interleaved (3)
  --seconds S           time of each measurement (4)
  --predict N           predict the speed of N processes under ddp, fsdp and hsdp, by the model in
                        tools/machine/scaling.py
  --link RATE[,LATENCY] link between the processes, such as 10gbit,50us (as measured here)
  --machines M          predict so many machines, with --link between the machines (1)
  --inside RATE[,LATENCY]  link between the processes of a machine, for several machines (as
                           measured here)
  --json                all measurements as JSON, instead of tables

Every measurement runs in new processes. On GPUs, DataParallel is measured beside DDP.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from functools import partial
from typing import Any

import torch

from engine import config
from engine.errors import LockstepError, amount
from engine.threads import available
from plugins.performance.cores import contention_warning
from tools.machine import scaling
from tools.machine.probe import OutOfMemory, probe
from tools.running import guarded

MEANING = {"weak": "each process keeps its batch", "strong": "the global batch stays"}

Row = dict[str, Any]


class Case:
    """A row of a table: the number of processes, the settings, and a measurement per round."""

    def __init__(self, kind: str, processes: int, settings: dict[str, Any], with_dp: bool = False):
        self.kind, self.processes, self.settings, self.with_dp = kind, processes, settings, with_dp
        self.found: list[Row] = []
        self.out_of_memory = False

    def measure(self, words: list[str], seconds: float, threads: int) -> None:
        if self.out_of_memory:
            return
        try:
            self.found.append(
                probe(words, self.settings, 1 if self.with_dp else self.processes, seconds, threads)
            )
        except OutOfMemory:
            self.out_of_memory = True

    def median(self, value: Any) -> float:
        """Return the median of `value(measurement)` over the rounds."""
        return statistics.median(map(value, self.found))

    @property
    def samples_per_s(self) -> float:
        return self.median(lambda row: row["samples_per_s"])


def cases(cfg: Any, counts: list[int], kinds: list[str], gpus: int) -> list[Case]:
    found = []
    for kind in kinds:
        # The batch of one process, which strong scaling divides among all.
        whole = cfg.global_batch or cfg.batch_size * (cfg.gradient_accumulation_steps or 1)
        for count in counts:
            if kind == "strong" and whole % count:
                continue
            weak = {"batch_size": cfg.batch_size, "global_batch": 0}
            strong = {"batch_size": min(cfg.batch_size, whole // count), "global_batch": whole}
            settings = (weak if kind == "weak" else strong) | {"gradient_accumulation_steps": 0}
            found.append(Case(kind, count, settings))
            if 1 < count <= gpus:
                dp = {"multi_gpu": "dp", "gpu_ids": ",".join(map(str, range(count)))}
                found.append(Case(kind, count, settings | dp, with_dp=True))
    return found


def table(rows: list[Case]) -> str:
    """Return the rows of a kind of scaling as markdown. Speed-up and efficiency are relative to the
    first row."""
    lines = [
        "| processes | batch per process | global batch | steps/s | samples/s (from - to) | "
        "speed-up | efficiency "
        "| memory MB | data wait | sync wait |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    base = next((case.samples_per_s / case.processes for case in rows if case.found), 1.0)
    for case in rows:
        name = str(case.processes)
        if case.with_dp:
            name += " (DP)"
        if not case.found:
            lines.append(f"| {name} | {case.settings['batch_size']} | out of memory |")
            continue
        first, speed_up = case.found[0], case.samples_per_s / base
        rates = [row["samples_per_s"] for row in case.found]
        lines.append(
            f"| {name} | {first['batch_size']} | {first['global_batch']} "
            f"| {1e3 / case.median(lambda r: r['step_ms']):.4g} "
            f"| {case.samples_per_s:.4g} ({min(rates):.4g} - {max(rates):.4g}) | {speed_up:.2f} "
            f"| {100 * speed_up / case.processes:.0f}% | "
            f"{case.median(lambda r: r['memory_mb']):.0f} "
            f"| {100 * case.median(share('data loading', 'host to device')):.0f}% "
            f"| {100 * case.median(share('gradient sync')):.0f}% |"
        )
    return "\n".join(lines)


def share(*phases: str) -> Any:
    """Return a function that computes the share of these phases in a measurement's step time."""
    return lambda row: (
        sum(row["phases_ms"].get(name, 0.0) for name in phases) / sum(row["phases_ms"].values())
    )


def measured_link(rows: list[Case]) -> scaling.Link:
    """Return the link between the measured processes. Raises LockstepError after measurements of
    one process alone."""
    several = next(
        (case for case in rows if case.processes > 1 and case.found and not case.with_dp), None
    )
    if several is None:
        raise LockstepError(
            "nothing was measured between processes", "--link", "give one, or --processes 1,2"
        )
    times = {
        int(size): 1e-3 * several.median(lambda r, size=size: r["sum_ms"][size])
        for size in several.found[0]["sum_ms"]
    }
    return scaling.fit(several.processes, times)


def predicted(
    rows: list[Case],
    processes: int,
    link: scaling.Link | None,
    machines: int = 1,
    inside: scaling.Link | None = None,
) -> Row:
    """Predict the speed of `processes` from the measured weak scaling, under each strategy.

    link    between the processes, or with several machines between the machines; None: as measured
    inside  between the processes of a machine; None: as measured

    Raises LockstepError if a link is neither given nor measured.
    """
    alone = next(case for case in rows if case.processes == 1 and case.found)
    one = alone.found[0]
    step_s = 1e-3 * alone.median(lambda r: r["step_ms"])
    backward = step_s * alone.median(share("backward", "gradient sync"))
    forward = step_s * alone.median(share("forward"))
    step = scaling.Step(backward, step_s - backward - forward, forward)
    if machines == 1:
        inside = between = link or measured_link(rows)
    elif link is None:
        raise LockstepError(
            f"{machines} machines need the link between them",
            "--link",
            "give one, such as 100gbit,20us",
        )
    else:
        inside, between = inside or measured_link(rows), link
    place = scaling.Place(machines, processes // machines, inside, between)
    num_bytes = 1e6 * one["gradients_mb"]
    sums = scaling.ddp_sums(num_bytes, one["bucket_cap_mb"], place)
    gloo = not one["device"].startswith("cuda")
    passes = scaling.Passes(one["accumulation"], one["reduce_every"])
    units = [scaling.Unit(*(1e6 * size for size in sizes)) for sizes in one["units_mb"]]

    def row(strategy: str, collectives: list[scaling.Collective], took: float) -> Row:
        return {
            "strategy": strategy,
            "sent_mb": 1e-6 * sum(each.sent for each in collectives),
            "cable_mb": 1e-6 * sum(each.crossing for each in collectives),
            "collectives_ms": 1e3 * sum(each.seconds(place) for each in collectives),
            "step_ms": 1e3 * took,
            "samples_per_s": processes * alone.samples_per_s * step_s / took,
            "efficiency": step_s / took,
        }

    strategies = [row("ddp", sums, scaling.predict_s(step, sums, place))]
    sharded = ["fsdp", "hsdp"] if 1 < machines < processes else ["fsdp"]
    if processes == 1:
        sharded.clear()
    for strategy in sharded:
        each = scaling.shards(units, place, strategy, gloo)
        took = scaling.sharded_s(step, units, each, passes, place, gloo)
        strategies.append(row(strategy, scaling.collectives(each, passes), took))
    return {
        "processes": processes,
        "machines": machines,
        "alpha_us": 1e6 * between.alpha,
        "beta_gbit": 8e-9 * between.beta,
        "gradients_mb": one["gradients_mb"],
        "all_reduce_ms": 1e3
        * sum(each.seconds(place) for each in scaling.ddp_sums(num_bytes, float("inf"), place)),
        "strategies": strategies,
        **{name: strategies[0][name] for name in ("step_ms", "samples_per_s", "efficiency")},
    }


def strategy_table(rows: list[Row]) -> str:
    """Return the prediction for each strategy as markdown."""
    lines = [
        (
            "| strategy | a rank sends MB | a machine sends MB | collectives ms | step ms | "
            "samples/s | efficiency |"
        ),
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['strategy']} | {row['sent_mb']:.4g} | {row['cable_mb']:.4g} | "
            f"{row['collectives_ms']:.4g} "
            f"| {row['step_ms']:.4g} | {row['samples_per_s']:.4g} | "
            f"{100 * row['efficiency']:.0f}% |"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print((__doc__ or "").strip())
        return 0
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--processes", default="")
    parser.add_argument("--scaling", choices=["weak", "strong", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--predict", type=int, default=0)
    parser.add_argument("--link", default="")
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--inside", default="")
    parser.add_argument("--json", action="store_true")
    options, words = parser.parse_known_args(argv)
    return guarded(words, partial(_main, options, words))


def _main(options: argparse.Namespace, words: list[str], args: config.Args) -> int:
    cores = available()
    gpus = torch.cuda.device_count() if args.cfg.device != "cpu" else 0
    link = scaling.parse_link(options.link, "--link") if options.link else None
    inside = scaling.parse_link(options.inside, "--inside") if options.inside else None
    if options.machines < 1 or options.predict % options.machines:
        what = (
            f"{options.predict} processes are not the same number on each of "
            f"{options.machines} machines"
        )
        raise LockstepError(what, "--machines", "give a number that divides them")
    try:
        counts = (
            sorted({int(text) for text in options.processes.split(",")})
            if options.processes
            else []
        )
        fit = not counts or counts[0] > 0
    except ValueError:
        fit = False
    if not fit:
        what = f"{options.processes!r} are no numbers of processes"
        raise LockstepError(what, "--processes", "give some, such as 1,2,4")
    counts = counts or [1 << n for n in range(12) if 1 << n <= (gpus or max(2, min(cores, 4)))]
    if options.predict and 1 not in counts:
        raise LockstepError("a prediction starts from one process", "--processes", "add 1")
    # On CPUs a process has the same number of threads in all cases, like one GPU each.
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, cores // max(counts))))
    kinds = ["weak", "strong"] if options.scaling == "both" else [options.scaling]
    found = cases(args.cfg, counts, kinds, gpus)
    for number in range(options.rounds):
        for case in found[number % len(found) :] + found[: number % len(found)]:  # interleaved
            case.measure(words, options.seconds, threads)
    tables = {kind: table([case for case in found if case.kind == kind]) for kind in kinds}
    weak = [case for case in found if case.kind == kinds[0]]
    ask = (options.predict, link, options.machines, inside)
    prediction = predicted(weak, *ask) if options.predict else None
    if options.json:
        measured = [vars(case) for case in found]
        print(json.dumps({"measured": measured, "predicted": prediction}))
        return 0
    about = next(case.found[0] for case in found if case.found)
    floats = about["precision"].replace("off", "fp32")
    each = amount(about["environment"]["threads"], "thread")
    print(f"{args.cfg.task}, {floats}, {_machine(about)}, {each} a process\n")
    for kind, text in tables.items():
        print(f"{kind.capitalize()} scaling: {MEANING[kind]}\n\n{text}\n")
    if busy := contention_warning(max(row["waited_share"] for case in found for row in case.found)):
        print(f"warning: {busy}\n")
    if prediction:
        print(f"{_sentence(prediction)}\n\n{strategy_table(prediction['strategies'])}")
    return 0


def _machine(row: Row) -> str:
    here = row["environment"]
    commit = (here["git_commit"] or "?")[:12] + ("+" if here["git_dirty"] else "")
    devices = ", ".join(sorted({*here["devices"]}))
    return (
        f"{devices}, {here['cpu_cores']} cores, torch {here['packages']['torch']}, commit {commit}"
    )


def _sentence(one: Row) -> str:
    machines = f" on {one['machines']} machines" if one["machines"] > 1 else ""
    return (
        f"Predicted for {one['processes']} processes{machines} (weak scaling; model in "
        "tools/machine/scaling.py): "
        f"latency {one['alpha_us']:.1f} us, {one['beta_gbit']:.3g} Gbit/s; "
        f"{one['gradients_mb']:.3g} MB of gradients "
        f"take {one['all_reduce_ms']:.3g} ms, a step {one['step_ms']:.4g} ms: "
        f"{one['samples_per_s']:.4g} samples/s, "
        f"efficiency {100 * one['efficiency']:.0f}%"
    )
