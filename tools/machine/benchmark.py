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
import contextlib
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine import config
from engine.errors import LockstepError, amount
from engine.threads import available
from plugins.performance.cores import contention_warning
from tools.arguments import Parser, positive_number, whole_number
from tools.machine import scaling
from tools.machine.probe import OutOfMemory, probe
from tools.output import print_json
from tools.running import guarded

MEANING = {"weak": "each process keeps its batch", "strong": "the global batch stays"}

Row = dict[str, Any]


class Case:
    """A row of a table: the number of processes, the settings, and a measurement per round."""

    def __init__(self, kind: str, processes: int, settings: dict[str, Any], with_dp: bool = False):
        self.kind = kind
        self.processes = processes
        self.settings = settings
        self.with_dp = with_dp
        self.found: list[Row] = []
        self.out_of_memory = False

    def measure(self, words: list[str], seconds: float, threads: int) -> None:
        if self.out_of_memory:
            return
        started = self.processes
        if self.with_dp:
            started = 1
        try:
            self.found.append(probe(words, self.settings, started, seconds, threads))
        except OutOfMemory:
            self.out_of_memory = True

    def median(self, value: Any) -> float:
        """Return the median of `value(measurement)` over the rounds."""
        return statistics.median(map(value, self.found))

    def number(self, name: str) -> float:
        """Return the median of a measured number over the rounds."""
        return self.median(lambda row: row[name])

    @property
    def samples_per_s(self) -> float:
        return self.number("samples_per_s")


def cases(cfg: Any, counts: list[int], kinds: list[str], gpus: int) -> list[Case]:
    found = []
    for kind in kinds:
        # The batch of one process, which strong scaling divides among all.
        whole = cfg.global_batch or cfg.batch_size * (cfg.gradient_accumulation_steps or 1)
        for count in counts:
            if kind == "strong" and whole % count:
                continue
            settings = {"batch_size": cfg.batch_size, "global_batch": 0}
            if kind == "strong":
                batch = min(cfg.batch_size, whole // count)
                settings = {"batch_size": batch, "global_batch": whole}
            settings["gradient_accumulation_steps"] = 0
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
    base = 0.0
    for case in rows:
        if case.found:
            base = base or case.samples_per_s / case.processes
            lines.append(_table_row(case, base))
        else:
            lines.append(f"| {_name(case)} | {case.settings['batch_size']} | out of memory |")
    return "\n".join(lines)


def _name(case: Case) -> str:
    if case.with_dp:
        return f"{case.processes} (DP)"
    return str(case.processes)


def _table_row(case: Case, base: float) -> str:
    """Return a measured case as a row.

    base  samples per second and process of the first measured case
    """
    first = case.found[0]
    speed_up = case.samples_per_s / base
    rates = [row["samples_per_s"] for row in case.found]
    cells = [
        _name(case),
        str(first["batch_size"]),
        str(first["global_batch"]),
        f"{1e3 / case.number('step_ms'):.4g}",
        f"{case.samples_per_s:.4g} ({min(rates):.4g} - {max(rates):.4g})",
        f"{speed_up:.2f}",
        f"{100 * speed_up / case.processes:.0f}%",
        f"{case.number('memory_mb'):.0f}",
        f"{100 * case.median(share('data loading', 'host to device')):.0f}%",
        f"{100 * case.median(share('gradient sync')):.0f}%",
    ]
    return f"| {' | '.join(cells)} |"


def share(*phases: str) -> Callable[[Row], float]:
    """Return a function that computes the share of these phases in a measurement's step time."""

    def of_measurement(row: Row) -> float:
        times = row["phases_ms"]
        return sum(times.get(name, 0.0) for name in phases) / sum(times.values())

    return of_measurement


def measured_link(rows: list[Case]) -> scaling.Link:
    """Return the link between the measured processes. Raises LockstepError after measurements of
    one process alone."""
    for case in rows:
        if case.processes > 1 and case.found and not case.with_dp:
            return _link_of(case)
    raise LockstepError(
        "nothing was measured between processes", "--link", "give one, or --processes 1,2"
    )


def _link_of(case: Case) -> scaling.Link:
    """Return the link that fits the measured times of sums."""
    seconds = {}
    for size in case.found[0]["sum_ms"]:
        times = [row["sum_ms"][size] for row in case.found]
        seconds[int(size)] = 1e-3 * statistics.median(times)
    return scaling.fit(case.processes, seconds)


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
    if machines > 1 and link is None:
        raise LockstepError(
            f"{machines} machines need the link between them",
            "--link",
            "give one, such as 100gbit,20us",
        )
    between = link or measured_link(rows)
    if machines == 1:
        inside = between
    place = scaling.Place(machines, processes // machines, inside or measured_link(rows), between)
    strategies = _strategies(alone, place)
    gradients = scaling.ddp_sums(1e6 * one["gradients_mb"], float("inf"), place)
    prediction = {
        "processes": processes,
        "machines": machines,
        "alpha_us": 1e6 * between.alpha,
        "beta_gbit": 8e-9 * between.beta,
        "gradients_mb": one["gradients_mb"],
        "all_reduce_ms": 1e3 * _seconds(gradients, place),
        "strategies": strategies,
    }
    for name in ("step_ms", "samples_per_s", "efficiency"):
        prediction[name] = strategies[0][name]
    return prediction


def _strategies(alone: Case, place: scaling.Place) -> list[Row]:
    """Return the predicted speed under each strategy, ddp first.

    alone  measurements of one process
    """
    one = alone.found[0]
    processes = place.processes
    step_s = 1e-3 * alone.number("step_ms")
    backward = step_s * alone.median(share("backward", "gradient sync"))
    forward = step_s * alone.median(share("forward"))
    step = scaling.Step(backward, step_s - backward - forward, forward)
    gloo = not one["device"].startswith("cuda")
    passes = scaling.Passes(one["accumulation"], one["reduce_every"])
    units = []
    for sizes in one["units_mb"]:
        units.append(scaling.Unit(*(1e6 * size for size in sizes)))

    def row(strategy: str, collectives: list[scaling.Collective], seconds: float) -> Row:
        return {
            "strategy": strategy,
            "sent_mb": 1e-6 * sum(each.sent for each in collectives),
            "cable_mb": 1e-6 * sum(each.crossing for each in collectives),
            "collectives_ms": 1e3 * _seconds(collectives, place),
            "step_ms": 1e3 * seconds,
            "samples_per_s": processes * alone.samples_per_s * step_s / seconds,
            "efficiency": step_s / seconds,
        }

    sums = scaling.ddp_sums(1e6 * one["gradients_mb"], one["bucket_cap_mb"], place)
    rows = [row("ddp", sums, scaling.predict_s(step, sums, place))]
    for strategy in _sharded_strategies(place):
        shards = scaling.shards(units, place, strategy, gloo)
        seconds = scaling.sharded_s(step, units, shards, passes, place, gloo)
        rows.append(row(strategy, scaling.collectives(shards, passes), seconds))
    return rows


def _sharded_strategies(place: scaling.Place) -> list[str]:
    processes = place.processes
    if processes == 1:
        return []
    if 1 < place.machines < processes:
        return ["fsdp", "hsdp"]
    return ["fsdp"]


def _seconds(collectives: list[scaling.Collective], place: scaling.Place) -> float:
    return sum(each.seconds(place) for each in collectives)


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
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--processes", default="")
    parser.add_argument("--scaling", choices=["weak", "strong", "both"], default="both")
    parser.add_argument("--rounds", type=whole_number(1), default=3)
    parser.add_argument("--seconds", type=positive_number, default=4.0)
    parser.add_argument("--predict", type=whole_number(0), default=0)
    parser.add_argument("--link", default="")
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--inside", default="")
    parser.add_argument("--json", action="store_true")
    options, words = parser.parse_known_args(argv)
    return guarded(words, partial(_main, options, words), as_json=options.json)


def _main(options: argparse.Namespace, words: list[str], args: config.Args) -> int:
    cores = available()
    gpus = 0
    if args.cfg.device != "cpu":
        gpus = torch.cuda.device_count()
    links = _links(options)
    counts = _counts(options.processes) or _usual_counts(gpus, cores)
    _check_prediction(options, counts)
    # On CPUs a process has the same number of threads in all cases, like one GPU each.
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, cores // max(counts))))
    kinds = [options.scaling]
    if options.scaling == "both":
        kinds = ["weak", "strong"]
    measured = cases(args.cfg, counts, kinds, gpus)
    for number in range(options.rounds):
        first = number % len(measured)  # each round begins with another case
        for case in measured[first:] + measured[:first]:
            case.measure(words, options.seconds, threads)
    prediction = None
    if options.predict:
        weak = [case for case in measured if case.kind == kinds[0]]
        prediction = predicted(
            weak, options.predict, links["link"], options.machines, links["inside"]
        )
    if options.json:
        rows = [vars(case) for case in measured]
        print_json({"measured": rows, "predicted": prediction})
    else:
        _print(args.cfg.task, kinds, measured, prediction)
    return 0


def _links(options: argparse.Namespace) -> dict[str, scaling.Link | None]:
    """Return the given links by the name of the option; None without the option."""
    links: dict[str, scaling.Link | None] = {}
    for name in ("link", "inside"):
        text = getattr(options, name)
        links[name] = None
        if text:
            links[name] = scaling.parse_link(text, f"--{name}")
    return links


def _counts(text: str) -> list[int]:
    """Return the numbers of processes in `--processes`, sorted. Raises LockstepError."""
    if not text:
        return []
    counts = []
    with contextlib.suppress(ValueError):
        counts = sorted({int(word) for word in text.split(",")})
    if not counts or counts[0] < 1:
        what = f"{text!r} are no numbers of processes"
        raise LockstepError(what, "--processes", "give some, such as 1,2,4")
    return counts


def _usual_counts(gpus: int, cores: int) -> list[int]:
    """Return the powers of two up to the number of GPUs, or of cores (2 to 4)."""
    largest = gpus or max(2, min(cores, 4))
    return [1 << n for n in range(largest.bit_length())]


def _check_prediction(options: argparse.Namespace, counts: list[int]) -> None:
    if options.machines < 1 or options.predict % options.machines:
        what = (
            f"{options.predict} processes are not the same number on each of "
            f"{options.machines} machines"
        )
        raise LockstepError(what, "--machines", "give a number that divides them")
    if options.predict and 1 not in counts:
        raise LockstepError("a prediction starts from one process", "--processes", "add 1")


def _print(task: str, kinds: list[str], measured: list[Case], prediction: Row | None) -> None:
    rows = list[Row]()
    for case in measured:
        rows += case.found
    floats = rows[0]["precision"].replace("off", "fp32")
    threads = amount(rows[0]["environment"]["threads"], "thread")
    print(f"{task}, {floats}, {_machine(rows[0])}, {threads} a process\n")
    for kind in kinds:
        text = table([case for case in measured if case.kind == kind])
        print(f"{kind.capitalize()} scaling: {MEANING[kind]}\n\n{text}\n")
    if busy := contention_warning(max(row["waited_share"] for row in rows)):
        print(f"warning: {busy}\n")
    if prediction:
        print(f"{_sentence(prediction)}\n\n{strategy_table(prediction['strategies'])}")


def _machine(row: Row) -> str:
    here = row["environment"]
    commit = (here["git_commit"] or "?")[:12]
    if here["git_dirty"]:
        commit += "+"
    devices = ", ".join(sorted({*here["devices"]}))
    return (
        f"{devices}, {here['cpu_cores']} cores, torch {here['packages']['torch']}, commit {commit}"
    )


def _sentence(one: Row) -> str:
    machines = ""
    if one["machines"] > 1:
        machines = f" on {one['machines']} machines"
    return (
        f"Predicted for {one['processes']} processes{machines} (weak scaling; model in "
        "tools/machine/scaling.py): "
        f"latency {one['alpha_us']:.1f} us, {one['beta_gbit']:.3g} Gbit/s; "
        f"{one['gradients_mb']:.3g} MB of gradients "
        f"take {one['all_reduce_ms']:.3g} ms, a step {one['step_ms']:.4g} ms: "
        f"{one['samples_per_s']:.4g} samples/s, "
        f"efficiency {100 * one['efficiency']:.0f}%"
    )
