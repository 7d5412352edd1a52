"""Loops side by side on one GPU: what `run.py --gpu` measures.

Each loop is a process of its own that has made its data and is warm. All are alive, and one runs
at a time, in rounds. What there is no time for, or cannot run here, is named with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import bars
import gpu_check
from bars import Bar
from gpu_parts import Facts
from gpu_quick import POLL_S, Contest, Turn, take_turns

ROOT = Path(__file__).resolve().parent.parent
PLAIN = ROOT / "benchmarks" / "plain"

MINUTES, SPARE_S = 5.0, 8.0
"""The whole time; of it, the seconds that end processes and write the results."""

READY_SHARE = 0.5
"""The share of the whole time after which no more loop is waited for."""

WINDOW_S, TURN_S = 0.6, 20.0
"""Seconds of a window; seconds after which a turn has failed."""

WARM_UP = 4
"""Steps before a loop is ready. The GPU is shared by all that get ready at the same time: what
Lockstep chooses by a measurement it must choose later, alone (`Workload.settling`)."""

ENDLESS = 1_000_000
"""Epochs of a training that the end of the race ends."""

OURS, COMPILED = "Lockstep", "Lockstep, compile=default"
PASSES, VIRTUAL = "Lockstep, two passes", "Lockstep, two virtual workers"
GROUP = "Lockstep, DDP in a group of one"
GRAPH = "data on the card, as one graph"

NAMES = ("perceptron", "Conv1d", "Conv3d", "ACT", "vla")
SMALL, LARGE = ("perceptron", "Conv1d"), ("Conv3d",)
"""Names of workloads: all; those that wait for the host most; those that do not."""


class Workload(NamedTuple):
    """A training.

    about     in the title of its table
    words     Lockstep's arguments; the other loops use the task of these
    batch     samples of a step
    settling  steps of Lockstep, alone on the GPU, before its first window
    lr        of all loops
    """

    about: str
    words: list[str]
    batch: int
    settling: int
    lr: float = 1e-3


class Loop(NamedTuple):
    """A loop of `contest.py`.

    name       in the tables
    function   of `contest.py`
    about      more than the workload says
    workloads  whose table it is in
    package    that it needs
    """

    name: str
    function: str
    about: dict[str, Any]
    workloads: tuple[str, ...] = NAMES
    package: str = ""


class Racer(NamedTuple):
    """A loop on a workload, in a process of its own."""

    workload: str
    loop: Loop

    @property
    def way(self) -> str:
        """A name of its own, and of its log."""
        return f"{self.workload}, {self.loop.name}"


# ---- who races
# --------------------------------------------------------------------------------------------------


def workloads(folder: Path, tiny: bool) -> dict[str, Workload]:
    """Return the trainings by name. Their data are in `folder`, or made by their tasks."""
    har = [f"dataset.root={folder / 'har'}", "augment.enabled=false", "loss.class_weights=none"]
    video = [f"dataset.root={folder / 'clips'}"]
    video += [f"augment.{name}=0" for name in ("shift", "jitter", "brightness")]
    video += ["augment.flip=none", "dataset.val_share=0.1"]
    video += ["dataset.frames=5", "dataset.size=32"] if tiny else ["dataset.size=256"]
    demonstrations = ["env.demonstrations=8", "env.size=16"] if tiny else ["env.demonstrations=240"]
    robot = ["robot", "eval.n_episodes=0", *demonstrations]
    act = [*robot, "policy.type=act", f"policy.chunk_size={5 if tiny else 20}"]
    vla = [*robot]
    if tiny:
        vla += ["policy.chunk_size=5"]
        act += ["policy.dim_model=16", "policy.n_heads=2", "policy.dim_feedforward=16"]
        act += ["policy.n_encoder_layers=1", "policy.n_vae_encoder_layers=1", "policy.latent_dim=4"]
    flat, conv = [f"{PLAIN}/perceptron.py", *har], [f"{PLAIN}/har.py", *har]
    clips, conv3d = "clips of 17 x 256 x 256 uint8", [f"{PLAIN}/video.py", *video]
    found = {
        "perceptron": Workload("1152-256-128-6, BatchNorm, dropout", flat, 64, 200),
        "Conv1d": Workload("three nn.Conv1d", conv, 64, 200),
        "Conv3d": Workload(f"four nn.Conv3d, {clips}", conv3d, 32, 30),
        "ACT": Workload("chunks of 20 actions", act, 8, 100, lr=1e-4),
        "vla": Workload("the flow-matching policy", vla, 64, 100),
    }
    if tiny:
        return {name: one._replace(batch=8, settling=6) for name, one in found.items()}
    return found


def loops(tiny: bool) -> list[Loop]:
    """Return all loops, the most important first."""
    half = {"mixed_precision": "bf16"}
    tuned = {"loader_processes": 0 if tiny else 4}
    batch = 8 if tiny else 64
    halves = {"batch_size": batch // 2}
    workers = ["virtual_workers=2"]
    if tiny:
        workers += ["ddp.backend=gloo"]  # a stand-in has no NCCL
    one, others = ("perceptron",), tuple(name for name in NAMES if name not in LARGE)
    last = "channels_last"
    card = "data on the card"
    return [
        Loop(OURS, "lockstep", {}),
        Loop("tuned loop, bf16", "tuned", tuned),
        Loop(GRAPH, "limit", _limit("graph"), SMALL),
        Loop("the tutorials' loop, float32", "tutorial", {}),
        Loop(PASSES, "lockstep", halves | _ours(f"global_batch={batch}"), one),
        Loop(VIRTUAL, "lockstep", halves | _ours(f"global_batch={batch}", *workers), one),
        Loop(GROUP, "lockstep", {"ddp": True}, one),
        Loop(COMPILED, "lockstep", _ours("compile=default"), LARGE),
        Loop(f"{card}, channels-last, compiled", "limit", _limit(last, "compile"), LARGE),
        Loop(f"{card}, compiled", "limit", _limit("compile"), LARGE),
        Loop("accelerate, bf16", "accelerate", half, NAMES, "accelerate"),
        Loop("Fabric, bf16", "fabric", half, NAMES, "lightning"),
        Loop("Lightning, bf16", "lightning", half, NAMES, "lightning"),
        Loop("Lockstep, cuda_graph=false", "lockstep", _ours("cuda_graph=false")),
        Loop(card, "limit", _limit()),
        Loop(f"{card}, channels-last", "limit", _limit(last), LARGE),
        Loop(GRAPH, "limit", _limit("graph"), ("ACT", "vla")),
        Loop(COMPILED, "lockstep", _ours("compile=default"), others),
        Loop(f"{card}, compiled, as one graph", "limit", _limit("compile", "graph"), SMALL),
        Loop(
            f"{card}, channels-last, compiled, as one graph",
            "limit",
            _limit(last, "compile", "graph"),
            LARGE,
        ),
    ]


def racers(tiny: bool) -> list[Racer]:
    return [Racer(name, loop) for loop in loops(tiny) for name in loop.workloads]


def _limit(*how: str) -> dict[str, Any]:
    return {"limit": ["bf16", *how]}


def _ours(*words: str) -> dict[str, Any]:
    return {"lockstep": [*words]}


def missing_reason(racer: Racer) -> str:
    """Return why a loop cannot run here, or an empty text."""
    package = racer.loop.package
    return f"{package} is not installed" if package and not find_spec(package) else ""


# ---- the race
# --------------------------------------------------------------------------------------------------


class Results:
    """What has been measured so far.

    windows  {workload: {name: windows}}; a window has its round, ms a step and the memory
    missing  {way: why it is not measured, or not any more}
    save     is called after each round
    """

    def __init__(self, known: dict[str, Workload], every: list[Racer]):
        self.known, self.racers = known, {racer.way: racer for racer in every}
        self.about: Facts = {}
        self.windows: dict[str, dict[str, list[Facts]]] = {name: {} for name in known}
        self.missing: dict[str, str] = {}
        self.save: Callable[[], None] = lambda: None

    def note(self, number: int, turn: Turn, facts: Facts) -> None:
        """Note a window of round `number`, or the reason why there is none."""
        racer = self.racers[turn.way]
        if "failed" in facts:
            self.note_missing(turn.way, facts["failed"])
            return
        windows = self.windows[racer.workload].setdefault(racer.loop.name, [])
        windows.append(facts | {"round": number})
        rate = 1e3 * self.known[racer.workload].batch / facts["step_ms"]
        print(f"round {number + 1}: {turn.way}: {rate:,.0f} samples/s", flush=True)

    def note_missing(self, way: str, reason: str) -> None:
        reason = " ".join(reason.removeprefix(f"racer {way}: ").split())[:200].replace("|", "/")
        self.missing.setdefault(way, reason)
        print(f"not measured: {way}: {reason}", flush=True)

    def of(self, workload: str, name: str) -> list[Facts]:
        return self.windows[workload].get(name, [])


class Race(Contest):
    """A contest of loops of `contest.py`."""

    def begin(self, racer: Racer, workload: Workload, on_gpu: bool) -> None:
        about = {
            "words": workload.words,
            "batch_size": workload.batch,
            "lr": workload.lr,
            "epochs": ENDLESS,
            "drop_last": True,
            "folder": str(self.lab.folder / racer.way),
            **racer.loop.about,
        }
        if not on_gpu:
            about["cpu"] = True
        if racer.loop.function == "lockstep":
            # its watchdog would take a loop that waits for its turn for one that hangs
            always = ["drop_last=true", "ddp.timeout_s=3600"]
            about["lockstep"] = [*always, *about.get("lockstep", [])]
            about["settling"] = workload.settling
        self.start(racer.way, [racer.loop.function, json.dumps(about)])

    def end(self, way: str) -> None:
        """End a loop that is not ready, with its own processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[way].pid, signal.SIGKILL)
        self.processes[way].wait()

    def _log(self, way: str) -> str:
        return f"racer {way}"


ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "4",
    "PYTHONPATH": str(ROOT),
}
"""Of all loops: the cores are for many of them while they get ready."""


def run(root: Path, tiny: bool, on_gpu: bool, rounds: int, results: Results, end: float) -> None:
    """Start the loops, have each measure in rounds, and note the results; all is over at
    time.monotonic() `end`."""
    began = time.monotonic()
    lab = gpu_check.new_lab(root / "lab", tiny)
    lab.until, lab.more = end, ENVIRONMENT
    results.about = lab.part("about", "device=cuda" if on_gpu else "device=cpu")
    race = Race(lab, WARM_UP)
    every = []
    for racer in results.racers.values():
        if reason := missing_reason(racer):
            results.note_missing(racer.way, reason)
        else:
            every.append(racer)
    try:
        with making_data(lab, root, results.known, tiny) as made:
            get_ready(race, every, made, results, on_gpu, began + READY_SHARE * (end - began))
        take_rounds(race, every, results, rounds, end, tiny)
    finally:
        lab.until = -math.inf
        race.close()


@contextlib.contextmanager
def making_data(
    lab: Any, root: Path, known: dict[str, Workload], tiny: bool
) -> Iterator[dict[str, Future[Any]]]:
    """Make the data of all workloads at the same time, each once for all loops; yields what makes
    the data of each workload."""
    from run import make_arrays

    windows = (256, 64) if tiny else (16_384, 1_024)
    clips = ["60", "12", "5", "32"] if tiny else ["320", "40", "17", "256", "2"]
    robot = [*known["vla"].words, "--dry-run", "device=cpu", "batch_size=8"]
    jobs: dict[Callable[[], Any], tuple[str, ...]] = {
        lambda: make_arrays(root / "made", *windows).rename(root / "har"): SMALL,
        lambda: lab.part("clips made", str(root / "clips"), *clips): LARGE,
        lambda: lab.train({"demonstrations": gpu_check.plain(*robot)}): ("ACT", "vla"),
    }
    pool = ThreadPoolExecutor(len(jobs))
    try:
        futures = {pool.submit(job): names for job, names in jobs.items()}
        yield {name: future for future, names in futures.items() for name in names}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def get_ready(
    race: Race,
    every: list[Racer],
    made: dict[str, Future[Any]],
    results: Results,
    on_gpu: bool,
    until: float,
) -> None:
    """Start the loops, and wait until they are warm. Who is not ready at time.monotonic() `until`
    is ended, because it would disturb the others' windows."""
    # a start waits for the disk and the driver, too
    at_once = max(2, len(os.sched_getaffinity(0)) * 3 // 2)
    waiting = sorted(every, key=_place_in_line)
    began, starting = time.monotonic(), list[Racer]()
    while (waiting or starting) and time.monotonic() < until:
        for racer in [racer for racer in waiting if made[racer.workload].done()]:
            if error := made[racer.workload].exception():
                waiting.remove(racer)
                results.note_missing(racer.way, f"its data could not be made: {error}")
            elif len(starting) < at_once:
                waiting.remove(racer)
                starting.append(racer)
                race.begin(racer, results.known[racer.workload], on_gpu)
        time.sleep(POLL_S)
        starting = [r for r in starting if not (race.is_ready(r.way) or race.has_ended(r.way))]
    seconds = f"{time.monotonic() - began:.0f} s"
    for racer in starting:
        race.end(racer.way)
        results.note_missing(racer.way, f"not ready after {seconds}")
    for racer in waiting:
        results.note_missing(racer.way, f"not started within {seconds}")


def _place_in_line(racer: Racer) -> int:
    """Return the place of a loop among those that wait for a start; of one place the most important
    start first. The compiler's take longest, and no bar needs those of small networks."""
    if "compile" not in racer.loop.name:
        return 1
    return 0 if racer.workload in LARGE else 2


def take_rounds(
    race: Race, every: list[Racer], results: Results, rounds: int, end: float, tiny: bool
) -> None:
    """Have all that are alive measure one after the other, in rounds."""
    window_s, turn_s = (0.05, 100.0) if tiny else (WINDOW_S, TURN_S)
    for number in range(rounds):
        alive = [racer for racer in every if racer.way not in results.missing]
        turns = [Turn(racer.way, "steps", window_s, turn_s) for racer in alive]
        left = take_turns(race, turns, end, functools.partial(results.note, number))
        for turn in left if number == 0 else ():
            results.note_missing(turn.way, "no time was left")
        results.save()
        if left:
            return


# ---- the report
# --------------------------------------------------------------------------------------------------

PEERS = ("tutorial", "tuned", "accelerate", "fabric", "lightning")
"""The loops, as functions of `contest.py`, that people write or use."""

LEAST_OF_PEERS = {"perceptron": 5.0, "Conv1d": 5.0, "Conv3d": 3.0, "ACT": 2.0, "vla": 3.0}
LEAST_OF_GRAPH = {"perceptron": 0.6, "Conv1d": 0.7}
"""Bars: samples/s of Lockstep as it comes, relative to the fastest of the other loops, and to the
arithmetic as one graph."""


def verdicts(results: Results) -> list[Bar]:
    """Return all bars, those without a measurement with the reason."""
    found = [
        _verdict(results, f"{name}: Lockstep ÷ the fastest other loop", (name, OURS),
                 _names(results, name, lambda loop: loop.function in PEERS), least)
        for name, least in LEAST_OF_PEERS.items()
    ]  # fmt: skip
    found += [
        _verdict(results, f"{name}: Lockstep ÷ {GRAPH}", (name, OURS), [GRAPH], least)
        for name, least in LEAST_OF_GRAPH.items()
    ]
    compiled = _names(
        results, "Conv3d",
        lambda loop: loop.function == "limit" and "compile" in loop.about["limit"]
        and "graph" not in loop.about["limit"],
    )  # fmt: skip
    what = f"Conv3d: {COMPILED} ÷ the fastest compiled loop on data on the card"
    return [
        *found,
        _verdict(results, what, ("Conv3d", COMPILED), compiled, 0.95),
        _verdict(results, f"{VIRTUAL} ÷ {PASSES}", ("perceptron", VIRTUAL), [PASSES], 0.9),
        _verdict(results, f"{GROUP} ÷ {OURS}", ("perceptron", GROUP), [OURS], 0.95),
    ]


def _names(results: Results, workload: str, chosen: Callable[[Loop], bool]) -> list[str]:
    found = [racer.loop for racer in results.racers.values() if racer.workload == workload]
    return [loop.name for loop in found if chosen(loop)]


def _verdict(
    results: Results, what: str, ours: tuple[str, str], others: list[str], least: float
) -> Bar:
    """Return the bar of one loop's speed relative to the fastest of others of its training. The bar
    names the others that are missing: one of them may be the fastest."""
    from run import closest

    workload, name = ours
    mine = results.of(workload, name)
    measured = {other: windows for other in others if (windows := results.of(workload, other))}
    if mine and measured:
        absent = [other for other in others if other not in measured]
        without = f" (without {'; '.join(absent)})" if absent else ""
        return Bar(what + without, closest(mine, [*measured.values()], "step_ms"), least)
    if not mine:
        reason = f"{name} is missing"
    elif len(others) == 1:
        reason = f"{others[0]} is missing"
    else:
        reason = "all other loops are missing"
    return Bar(what, math.nan, least, reason=reason)


def text(command: str, results: Results, rounds: int) -> str:
    """Return the report: a table of each training, and the bars."""
    about = results.about
    lines = ["# Loops side by side on one GPU", "", f"`{command}`", ""]
    lines += ["; ".join(f"{name} {value}" for name, value in about.items()) + ".", ""]
    lines += [
        (
            "Each loop is a process of its own; all are alive, and one runs at a time, in up to "
            f"{rounds} rounds of windows of {WINDOW_S:g} s."
        ),
        (
            "Rates are medians. Read the ratios: each is the median of the ratios within a round. "
            "All loops but the tutorials' train in bf16."
        ),
        "",
    ]
    for name in dict.fromkeys(racer.workload for racer in results.racers.values()):
        lines += _table(results, name, results.known[name])
    return "\n".join([*lines, *bars.table(verdicts(results))]) + "\n"


def _table(results: Results, name: str, workload: Workload) -> list[str]:
    """Return the table of a workload: the fastest loop first, the loops that are missing last."""
    from run import ratio

    ours = results.of(name, OURS)
    measured = results.windows[name]
    lines = [f"## {name}: {workload.about}; batches of {workload.batch}", ""]
    lines += ["| loop | samples/s | each window | ms a step | ÷ Lockstep as it comes | MB |"]
    lines += ["|---|---:|---|---:|---:|---:|"]
    for loop in sorted(measured, key=lambda loop: _step_ms(measured[loop])):
        windows = measured[loop]
        rates = [f"{1e3 * workload.batch / one['step_ms']:,.0f}" for one in windows]
        beside = f"{1 / ratio(ours, windows, 'step_ms'):.2f}" if ours else ""
        cells = [f"**{loop} as it comes**" if loop == OURS else loop]
        cells += [f"{1e3 * workload.batch / _step_ms(windows):,.0f}", ", ".join(rates)]
        cells += [f"{_step_ms(windows):.3f}", beside]
        cells += [f"{max(one['memory_mb'] for one in windows):,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    for racer in results.racers.values():
        if racer.workload == name and racer.way in results.missing:
            taken = len(results.of(name, racer.loop.name))
            what = f"ended after {taken} windows" if taken else "not measured"
            cells = [racer.loop.name, f"{what}: {results.missing[racer.way]}", "", "", "", ""]
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _step_ms(windows: list[Facts]) -> float:
    return statistics.median(one["step_ms"] for one in windows)


# ---- the command
# --------------------------------------------------------------------------------------------------


def main(argv: list[str], args: Any, began: float) -> int:
    """`run.py --gpu`: measure, print the report and write it to benchmarks/results."""
    import torch

    on_gpu = torch.cuda.is_available()
    if not (on_gpu or args.rehearse):
        print(
            "torch sees no GPU here, and all of this is about one (--rehearse: on the CPU, tiny)",
            file=sys.stderr,
        )
        return 2
    if args.rehearse:
        print("A rehearsal, tiny: nothing of it says anything about a GPU, and nothing is written.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the loops are ended, too
    minutes = args.minutes or MINUTES * (5 if args.rehearse else 1)  # CPUs are shared with others
    command = f"python benchmarks/run.py {' '.join(argv)}"
    with tempfile.TemporaryDirectory(prefix="gpu_race_", ignore_cleanup_errors=True) as folder:
        root, only = Path(folder), args.only.split(",") if args.only else [*NAMES]
        chosen = [racer for racer in racers(args.rehearse) if racer.workload in only]
        results = Results(workloads(root, args.rehearse), chosen)

        def save() -> None:
            if not args.rehearse:
                write(args.out, text(command, results, args.rounds), results)

        results.save = save
        end = began + 60 * minutes - SPARE_S
        try:
            run(root, args.rehearse, on_gpu, args.rounds, results, end)
        finally:
            gpu_check.keep_logs(root, args.logs)
    print("\n" + text(command, results, args.rounds))
    return bars.exit_code(verdicts(results)) if args.check else 0


def write(name: str, report: str, results: Results) -> None:
    """Write the report and the numbers to benchmarks/results, by the name of the GPU if no other is
    given."""
    gpu = re.sub(r"\W+", "_", results.about["device"].lower().replace("nvidia", "")).strip("_")
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    whole = {"about": results.about, "windows": results.windows, "missing": results.missing}
    name = name or f"gpu_{gpu}_loops"
    (folder / f"{name}.md").write_text(report)
    (folder / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
