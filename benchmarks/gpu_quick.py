"""The machinery of `gpu_check.py --quick`: work side by side in threads, and a contest of trainings
that are all alive, of which one runs at a time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from gpu_parts import Facts, Failed

POLL_S = 0.02
"""How often the log of a contestant is read while somebody waits for it."""


class Turn(NamedTuple):
    """A measurement: which way to run, what of it (a key of `gpu_parts.TURNS`), and for how long.

    most_s  the time after which it has failed
    """

    way: str
    measure: str
    seconds: float
    most_s: float


class Ratio(NamedTuple):
    """Two measurements to compare, each (way, measure), and the least ratio that is wanted, if
    there is one."""

    above: tuple[str, str]
    below: tuple[str, str]
    bar: float | None = None


# of a training, of a plain loop; after the third a turn has failed
WINDOW_S, PLAIN_S, TURN_S = 2.0, 1.0, 20.0
COMPILE_S = 40.0  # more for a plain loop that is compiled in its turn

PLAIN_LOOPS = {
    "perceptron": ("plain loop", "plain graph"),
    "1D CNN": ("plain loop", "plain graph"),
    "video": ("plain loop",),
    "video, compile": ("plain loop",),
    "video, compile memory_format=channels_last": ("plain loop",),
    "ACT": ("plain loop",),
    "vision-language policy": ("plain loop",),
}
"""The plain loops of the same network that stand beside a way to run."""

WAYS = (
    "perceptron",
    "perceptron as a graph",
    "1D CNN",
    "1D CNN as a graph",
    "video",
    "video, compile",
    "video, compile memory_format=channels_last",
    "ACT",
    "vision-language policy",
    "perceptron in two passes",
    "perceptron of two virtual workers",
    "perceptron in DDP",
    "perceptron kernel by kernel",
    "1D CNN kernel by kernel",
)
"""The ways to run whose speed is measured, the most important first: time is short for the last
ones."""

RATIOS = [
    Ratio(("perceptron", "training"), ("perceptron", "plain loop")),
    Ratio(("perceptron", "training"), ("perceptron", "plain graph"), 0.6),
    Ratio(("perceptron as a graph", "training"), ("perceptron", "plain graph"), 0.6),
    Ratio(("perceptron kernel by kernel", "training"), ("perceptron", "plain loop")),
    Ratio(("1D CNN", "training"), ("1D CNN", "plain loop")),
    Ratio(("1D CNN", "training"), ("1D CNN", "plain graph"), 0.7),
    Ratio(("1D CNN as a graph", "training"), ("1D CNN", "plain graph"), 0.7),
    Ratio(("1D CNN kernel by kernel", "training"), ("1D CNN", "plain loop")),
    Ratio(("video", "training"), ("video", "plain loop")),
    Ratio(("video, compile", "training"), ("video, compile", "plain loop"), 0.95),
    Ratio(("video, compile", "training"), ("video", "training")),
    Ratio(("ACT", "training"), ("ACT", "plain loop")),
    Ratio(("vision-language policy", "training"), ("vision-language policy", "plain loop")),
    Ratio(
        ("perceptron of two virtual workers", "training"),
        ("perceptron in two passes", "training"),
        0.9,
    ),
    Ratio(("perceptron in DDP", "training"), ("perceptron", "training"), 0.95),
]


class Contest:
    """Trainings in processes of their own. Each warms up and then waits for its turns, so that a
    turn costs its window and not the start of a process, and all are measured within the same
    minute.

    lab            a `Lab` for them alone
    warm_up_steps  that each takes before it is ready
    """

    def __init__(self, lab: Any, warm_up_steps: int):
        self.lab, self.warm_up_steps = lab, warm_up_steps
        self.processes: dict[str, Any] = {}
        self.pipes: dict[str, int] = {}
        self.ordered: dict[str, int] = {}

    def start(self, way: str, words: list[str]) -> None:
        path = self.lab.folder / f"orders of {way}"
        os.mkfifo(path)
        # Opened for both directions it waits for no reader. It is closed when this process ends,
        # however that is, and then the contestant ends, too.
        self.pipes[way] = os.open(path, os.O_RDWR)
        self.processes[way] = self.lab.begin(
            self._log(way), str(path), str(self.warm_up_steps), *words
        )

    def wait_ready(self, until: float) -> set[str]:
        """Return who is ready: all that have not failed, or those that are at time.monotonic()
        `until`."""
        while True:
            ready = {way for way in self.processes if self.is_ready(way)}
            starting = [way for way in self.processes.keys() - ready if not self.has_ended(way)]
            if not starting or time.monotonic() > until:
                return ready
            time.sleep(POLL_S)

    def take(self, turn: Turn, until: float) -> Facts:
        """Have a contestant measure, and return the result. Raises Failed."""
        self.order(turn)
        return self.answer(turn, until)

    def order(self, turn: Turn) -> None:
        """Have a contestant measure. Raises Failed where it is not ready."""
        self._require_alive(turn.way, self.is_ready(turn.way))
        self.ordered[turn.way] = self.ordered.get(turn.way, 0) + 1
        order = {"measure": turn.measure, "seconds": turn.seconds}
        os.write(self.pipes[turn.way], (json.dumps(order) + "\n").encode())

    def answer(self, turn: Turn, until: float) -> Facts:
        """Wait for the result of the last order. Raises Failed."""
        until = min(until, time.monotonic() + turn.most_s)
        while len(self._answers(turn.way)) < self.ordered[turn.way]:
            self._require_alive(turn.way, time.monotonic() < until)
            time.sleep(POLL_S)
        return json.loads(self._answers(turn.way)[-1])

    def close(self) -> None:
        for pipe in self.pipes.values():
            os.close(pipe)
        self.pipes.clear()
        self.lab.end()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold a process
                process.wait(1.0)

    def _log(self, way: str) -> str:
        part = "contestant_in_ddp" if "in DDP" in way else "contestant"
        return f"{part} {way}"

    def is_ready(self, way: str) -> bool:
        return re.search("^READY$", self.lab.output(self._log(way)), re.MULTILINE) is not None

    def can_be_taken(self, turn: Turn) -> bool:
        """Return whether a turn has a result at once: the contestant is ready, or has failed."""
        return turn.way in self.processes and (self.is_ready(turn.way) or self.has_ended(turn.way))

    def has_ended(self, way: str) -> bool:
        return self.processes[way].poll() is not None

    def _answers(self, way: str) -> list[str]:
        return re.findall("^TURN (.*)\n", self.lab.output(self._log(way)), re.MULTILINE)

    def _require_alive(self, way: str, in_time: bool) -> None:
        """Raise Failed, with the end of its log, for a contestant that has ended or is out of
        time."""
        if not in_time or self.has_ended(way):
            self.lab.until = time.monotonic()
            self.lab.finish(self._log(way), self.processes[way])
            raise Failed(f"{way}: it ended before its turn")


def side_by_side(
    jobs: dict[str, Callable[[], Any]], workers: int, meanwhile: Callable[[int], None]
) -> Iterator[tuple[str, Any]]:
    """Run jobs in threads, so many at a time, in this order; yield the name and the result of each
    as it ends, or its exception. At least once a second `meanwhile` is called with the number of
    jobs that are left."""
    pool = ThreadPoolExecutor(workers)
    try:
        names: dict[Future[Any], str] = {pool.submit(job): name for name, job in jobs.items()}
        left = set(names)
        while left:
            ended, left = wait(left, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in ended:
                yield names[future], future.exception() or future.result()
            meanwhile(len(left))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def turns_of(names: list[str], tiny: bool) -> list[Turn]:
    """Return the measurements of these ways to run, the most important first."""
    window_s, plain_s = (0.1, 0.05) if tiny else (WINDOW_S, PLAIN_S)
    turn_s = TURN_S * (5 if tiny else 1)
    turns = []
    for name in names:
        turns.append(Turn(name, "training", window_s, turn_s))
        for measure in PLAIN_LOOPS.get(name, ()):
            if not (tiny and measure == "plain graph"):
                compile_s = COMPILE_S if "compile" in name else 0.0
                turns.append(Turn(name, measure, plain_s, turn_s + compile_s))
    return turns


def take_turns(
    contest: Contest, turns: list[Turn], end: float, note: Callable[[Turn, Facts], None]
) -> list[Turn]:
    """Take turns, each time the first one whose contestant is ready; return those for which there
    was no time before time.monotonic() `end`. A turn that fails is noted with its reason."""
    turns = [*turns]
    while turns and time.monotonic() + min(turn.seconds for turn in turns) < end:
        turn = next((turn for turn in turns if contest.can_be_taken(turn)), None)
        if turn is None:
            time.sleep(POLL_S)
            continue
        turns.remove(turn)
        try:
            note(turn, contest.take(turn, end))
        except Failed as error:
            note(turn, {"failed": str(error)})
    return turns


def speeds_table(speeds: dict[str, dict[str, Facts]]) -> list[str]:
    """Return the lines of a table of {way: {measure: facts}}, and of one of the ratios that could
    be taken."""
    lines = [
        "| way to run | samples/s (least .. most block) | ms a step | kernels | launches | MB |"
    ]
    lines[0] += " plain loop, samples/s | plain loop as a graph |"
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    for way, measures in speeds.items():
        training, counts = measures.get("training", {}), measures.get("kernels", {})
        cells = [way, _rate(training), _number(training, "ms", ".3f")]
        cells += [_number(counts, name, ".0f") for name in ("kernels", "launches")]
        cells += [_number(training, "memory", ".0f")]
        cells += [_rate(measures.get(name, {})) for name in ("plain loop", "plain graph")]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| ratio of samples/s | | bar |", "|---|---:|---:|"]
    for above, below, bar in RATIOS:
        rates = [
            speeds.get(way, {}).get(measure, {}).get("rate", 0.0) for way, measure in (above, below)
        ]
        if min(rates) > 0:
            names = " ÷ ".join(_label(*each) for each in (above, below))
            lines.append(
                f"| {names} | {rates[0] / rates[1]:.2f} | {'' if bar is None else f'{bar:g}'} |"
            )
    return lines


def _label(way: str, measure: str) -> str:
    return way if measure == "training" else f"{measure} of {way}"


def _rate(facts: Facts) -> str:
    if "failed" in facts:
        return "failed: " + str(facts["failed"])[:200].replace("|", "\\|")
    if "rate" not in facts:
        return ""
    spread = f" ({facts['least']:.0f} .. {facts['most']:.0f})" if "least" in facts else ""
    return f"{facts['rate']:.0f}{spread}"


def _number(facts: Facts, name: str, form: str) -> str:
    return format(facts[name], form) if name in facts else ""
