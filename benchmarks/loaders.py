#!/usr/bin/env python3
"""Compare loaders of shards: what a stop in mid-epoch costs on other numbers of processes, and CPU
time per sample.

    python benchmarks/loaders.py                      both tables, with whichever of the loaders can
                                                      be imported
    python benchmarks/loaders.py resume --only lockstep
    python benchmarks/loaders.py speed --rounds 3
    python benchmarks/loaders.py --install            the line that installs the others, into a
                                                      folder of their own

Prints markdown, with the machine and the versions above it. Every loader reads the same samples,
cut into the same shards: tar, or its own format. In `resume` each rank is a process with a process
group; all are killed in mid-epoch once each has given its state, and other processes go on from
these states, a rank that has none from rank 0's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import pickle
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import loader_kinds
import torch
from loader_kinds import KINDS, Data, Kind, Place
from tqdm import tqdm

from plugins.resilience.scratch import end_with_parent

PATIENCE_S = 300.0
"""After so long a rank that has not come to its end counts as one that hangs."""

SHARDS = {"resume": (2015, 512, 20), "speed": (8000, 4096, 500)}
"""Samples, their bytes, and how many are in a shard. 2015 is a multiple of neither 2, 3, 4 nor
20."""

REACH = {"resume": 240, "speed": 1000}
"""How far a loader shuffles, in samples, where that can be set: as far as Lockstep with 12
lanes."""

CASES = [(4, 3, 12, 60), (4, 2, 12, 60), (2, 3, 12, 60), (4, 3, 16, 47)]
"""Processes before and after, global batch, steps before the stop."""

PROCESSES, BATCH = (4, 3, 2), 12
"""Of the epochs that are not stopped."""

SPEED_BATCH = 64

INDICES = (".json", ".offsets")
"""What the names of files end in that are no shards."""


# ---- ranks
# --------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """What one rank has done: the numbers of its samples by batch, the shards it has opened, its
    pickled state."""

    batches: list[list[int]]
    opened: set[str]
    state: bytes


class Run(NamedTuple):
    """What the ranks of a run have done, or why there is none."""

    parts: list[Part]
    error: str = ""

    @property
    def steps(self) -> list[list[int]]:
        """The samples of each step, over all ranks, sorted: two cuts of a step put them in another
        order."""
        by_step = itertools.zip_longest(*(part.batches for part in self.parts), fillvalue=())
        return [sorted(itertools.chain(*step)) for step in by_step]

    @property
    def samples(self) -> list[int]:
        return [*itertools.chain(*self.steps)]

    @property
    def opened(self) -> set[str]:
        return set().union(*(part.opened for part in self.parts))


def rank(
    kind: type[Kind],
    data: Data,
    place: Place,
    reach: int,
    store: str,
    steps: int | None,
    state: bytes,
) -> Part:
    """Take so many steps, or all that there are, from the begin of an epoch or from a state."""
    opened: set[str] = set()
    shards = str(data.folder / kind.form) + os.sep

    def note(event: str, values: tuple[Any, ...]) -> None:
        name = values[0] if event == "open" else None
        if isinstance(name, str) and name.startswith(shards) and not name.endswith(INDICES):
            opened.add(name.removeprefix(shards))

    names = {"RANK": place.rank, "WORLD_SIZE": place.processes}
    names |= {f"LOCAL_{name}": value for name, value in names.items()}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.distributed.init_process_group(
        "gloo", f"file://{store}", rank=place.rank, world_size=place.processes
    )
    loader = kind(data, place, reach)
    sys.addaudithook(note)
    if state:
        loader.load(pickle.loads(state))
    batches = []
    for batch in itertools.islice(loader, steps):
        assert all(content == data.payload(number) for number, content in batch), (
            "a sample has another's bytes"
        )
        batches.append([number for number, _ in batch])
    return Part(batches, opened, pickle.dumps(loader.state()))


def ranks(
    kind: type[Kind],
    data: Data,
    processes: int,
    batch: int,
    reach: int = REACH["resume"],
    steps: int | None = None,
    states: list[bytes] | None = None,
) -> Run:
    """Run so many processes until each has come to its end, and kill them."""
    # the worker has imported the loader, and started no thread
    mp = multiprocessing.get_context("fork")

    def work(number: int, pipe: Any, store: str) -> None:
        end_with_parent()
        try:
            given = b"" if states is None else states[number if number < len(states) else 0]
            pipe.send(rank(kind, data, Place(number, processes, batch), reach, store, steps, given))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}".splitlines()[0])
        signal.pause()

    with tempfile.TemporaryDirectory() as scratch:
        pipes = [mp.Pipe(duplex=False) for _ in range(processes)]
        children = [
            mp.Process(target=work, args=(n, pipes[n][1], f"{scratch}/store"))
            for n in range(processes)
        ]
        try:
            for child, (_, own_end) in zip(children, pipes, strict=True):
                child.start()
                own_end.close()
            answers = [
                receive(pipe, child) for (pipe, _), child in zip(pipes, children, strict=True)
            ]
        finally:
            for child in children:
                child.kill()
                child.join()
    kind.clean()
    errors = [f"rank {n}: {what}" for n, what in enumerate(answers) if isinstance(what, str)]
    return Run([], errors[0]) if errors else Run(answers)


def receive(pipe: Any, child: Any) -> Part | str:
    ready = connection.wait([pipe, child.sentinel], PATIENCE_S)
    try:
        return pipe.recv() if pipe.poll() else "died" if ready else f"no end after {PATIENCE_S:g} s"
    except EOFError:
        return "died"


# ---- what is counted
# ------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """An epoch that was stopped and resumed.

    lost      samples of the data set that neither run has seen
    repeated  how often a sample was seen again
    same      how many of the resumed steps have the samples of the straight run's, of how many
    again     bytes of shards that both runs have opened, by whichever rank
    batches   of each rank of the resumed run
    """

    lost: int
    repeated: int
    same: tuple[int, int]
    again: int
    batches: list[int]


def counted(count: int, straight: Run, before: Run, after: Run, sizes: dict[str, int]) -> Found:
    """Compare a run in two parts with the one that was not stopped. `sizes`: bytes of each
    shard."""
    seen = Counter(before.samples + after.samples)
    rest = straight.steps[len(before.steps) :]
    pairs = [*itertools.zip_longest(rest, after.steps)]
    return Found(
        lost=count - len(seen),
        repeated=seen.total() - len(seen),
        same=(sum(a == b for a, b in pairs), len(pairs)),
        again=sum(sizes[name] for name in before.opened & after.opened),
        batches=[len(part.batches) for part in after.parts],
    )


def shard_sizes(kind: type[Kind], data: Data) -> dict[str, int]:
    folder = data.folder / kind.form
    paths = [
        path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(INDICES)
    ]
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths}


def resumed(
    kind: type[Kind], data: Data, before: int, after: int, batch: int, steps: int
) -> Found | str:
    """Return what a stop on `before` processes and a resume on `after` comes to, or why it comes to
    nothing."""
    straight = ranks(kind, data, before, batch)
    first = ranks(kind, data, before, batch, steps=steps)
    second = (
        ranks(kind, data, after, batch, states=[part.state for part in first.parts])
        if first.parts
        else first
    )
    errors = [run.error for run in (straight, first, second) if run.error]
    return (
        errors[0]
        if errors
        else counted(data.count, straight, first, second, shard_sizes(kind, data))
    )


def whole(kind: type[Kind], data: Data, processes: int) -> Found | str:
    """Return what an epoch is that is not stopped, against one on the first number of processes."""
    first, other, none = (
        ranks(kind, data, PROCESSES[0], BATCH),
        ranks(kind, data, processes, BATCH),
        Run([]),
    )
    return first.error or other.error or counted(data.count, first, none, other, {})


def epoch_us(kind: type[Kind], data: Data) -> tuple[float, float]:
    """Return microseconds of CPU time and of wall time per sample, of the second epoch of one
    process."""
    loader = kind(data, Place(0, 1, SPEED_BATCH), REACH["speed"])
    for _ in range(2):
        seen, began = 0, (time.process_time(), time.perf_counter())
        for batch in loader:
            seen += len(batch)
            assert int.from_bytes(batch[-1][1][-8:], "little") == batch[-1][0]
        cpu, wall = time.process_time() - began[0], time.perf_counter() - began[1]
        assert seen == data.count, f"{seen} of {data.count} samples"
    return 1e6 * cpu / seen, 1e6 * wall / seen


# ---- a process for each loader
# --------------------------------------------------------------------------------------


def serve(kind: type[Kind]) -> None:
    """Answer jobs from stdin, one JSON line each. A loader's libraries share a process with those
    of no other."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loader_kinds.ready(kind)
    jobs: dict[str, Callable[..., Any]] = {
        "write": kind.write,
        "speed": partial(in_a_fork, epoch_us, kind),
    }
    jobs |= {"epoch": partial(whole, kind), "resume": partial(resumed, kind)}
    try:
        for line in sys.stdin:
            do, folder, shape, case = json.loads(line)
            answer = jobs[do](Data(Path(folder), *shape), *case)
            print(
                json.dumps(answer._asdict() if isinstance(answer, Found) else answer),
                file=answers,
                flush=True,
            )
    finally:
        kind.clean()


def in_a_fork(work: Callable[..., Any], *given: Any) -> Any:
    """Return what `work` does in a child: a round begins as the one before did."""
    mp = multiprocessing.get_context("fork")
    receiver, sender = mp.Pipe(duplex=False)
    child = mp.Process(target=lambda: sender.send(work(*given)))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        child.join()


class Worker:
    """A process that has imported one loader. Its libraries' own words go to a file."""

    def __init__(self, kind: type[Kind], log: Path):
        self.kind, self.log = kind, log
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", kind.name]
        # some leave files of their own there
        env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(log.parent)}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with open(log, "w") as words:
            self.child = subprocess.Popen(command, env=env, stderr=words, **pipes)

    def request(self, data: Data, do: str, *case: int) -> Any:
        assert self.child.stdin and self.child.stdout
        with contextlib.suppress(BrokenPipeError):
            job = [do, str(data.folder), data[1:], case]
            print(json.dumps(job), file=self.child.stdin, flush=True)
        if line := self.child.stdout.readline():
            return json.loads(line)
        raise SystemExit(f"{self.kind.name} has failed at {do}:\n{self.log.read_text()[-3000:]}")

    def end(self) -> None:
        assert self.child.stdin
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.close()  # it ends by itself then, and cleans up
        try:
            self.child.wait(PATIENCE_S)
        finally:
            self.child.kill()


# ---- tables
# --------------------------------------------------------------------------------------------------


def share(part: int, whole: int) -> str:
    return f"{part / 1e3:,.0f} kB ({100 * part / whole:.0f} %)" if part else "0"


def equal(batches: list[int]) -> str:
    return f"{batches[0]} each" if len({*batches}) == 1 else ", ".join(map(str, batches))


def epoch_table(workers: list[Worker], folder: Path) -> Iterator[str]:
    yield (
        f"| loader | processes | lost | repeated | steps as on {PROCESSES[0]} | batches of the "
        "ranks |\n"
    )
    yield "|---|---:|---:|---:|---:|---|\n"
    data = Data(folder, *SHARDS["resume"])
    for worker, processes in tqdm(
        [*itertools.product(workers, PROCESSES)], "epochs", leave=False, disable=None
    ):
        found = worker.request(data, "epoch", processes)
        yield f"| {worker.kind.name} | {processes} | {cells(found)} |\n"


def resume_table(workers: list[Worker], folder: Path) -> Iterator[str]:
    yield "| loader | processes | global batch | lost | repeated | later steps as without the stop "
    yield "| batches of the ranks | bytes read again |\n|---|---|---:|---:|---:|---:|---|---:|\n"
    data = Data(folder, *SHARDS["resume"])
    for worker, case in tqdm(
        [*itertools.product(workers, CASES)], "resume", leave=False, disable=None
    ):
        total = sum(shard_sizes(worker.kind, data).values())
        before, after, batch, _ = case
        found = worker.request(data, "resume", *case)
        again = "–" if isinstance(found, str) else share(found["again"], total)
        yield f"| {worker.kind.name} | {before} → {after} | {batch} | {cells(found)} | {again} |\n"


def cells(found: dict[str, Any] | str) -> str:
    if isinstance(found, str):
        return f"– | – | none: {found.partition(' (')[0]} | –"
    same, of = found["same"]
    return f"{found['lost']} | {found['repeated']} | {same} of {of} | {equal(found['batches'])}"


def speed_table(workers: list[Worker], folder: Path, rounds: int) -> Iterator[str]:
    data, workers = (
        Data(folder, *SHARDS["speed"]),
        [worker for worker in workers if worker.kind.timed],
    )
    times: dict[str, list[tuple[float, float]]] = {worker.kind.name: [] for worker in workers}
    for _ in tqdm(range(rounds), "speed", leave=False, disable=None):
        for worker in workers:
            times[worker.kind.name].append(worker.request(data, "speed"))
    yield "| loader | shards | µs of CPU time per sample: median | range | samples per second |\n"
    yield "|---|---|---:|---:|---:|\n"
    for worker in workers:
        cpu, wall = zip(*times[worker.kind.name], strict=True)
        yield f"| {worker.kind.name} | {worker.kind.form} | {statistics.median(cpu):.1f} | "
        yield f"{min(cpu):.1f} .. {max(cpu):.1f} | {1e6 / statistics.median(wall):,.0f} |\n"


def shown(table: Iterator[str]) -> None:
    for text in table:
        with tqdm.external_write_mode():
            print(text, end="", flush=True)
    print()


def chosen(only: list[str] | None) -> list[type[Kind]]:
    """Return the kinds that can be measured here, and print why the others cannot."""
    kinds = [kind for kind in KINDS if only is None or any(word in kind.name for word in only)]
    here = [kind for kind in kinds if loader_kinds.installed(kind)]
    for kind in kinds:
        if kind not in here:
            print(
                f"{kind.name} is not measured: {kind.needs.partition('.')[0]} is not installed "
                "(--install prints how)"
            )
    return here


def about(kinds: list[type[Kind]]) -> str:
    packages = dict.fromkeys(itertools.chain(*(kind.package.split() for kind in kinds)))
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name, _, _ in (p.partition("==") for p in packages)
    ]
    return ", ".join(
        [f"torch {torch.__version__}", *versions, f"{platform.machine()}, {os.cpu_count()} cores"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=[*SHARDS])
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="loaders whose name has one of these words"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--install", action="store_true", help="print the line that installs the other loaders"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        return serve(next(kind for kind in KINDS if kind.name == asked.serve))
    if asked.install:
        return print(loader_kinds.INSTALL)
    kinds = chosen(asked.only)
    print(f"{about(kinds)}; num_workers=0\n")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        workers = []
        for number, kind in enumerate(kinds):
            workers.append(Worker(kind, Path(name) / f"{number}.log"))
            stack.callback(workers[-1].end)
        for part in [asked.part] if asked.part else SHARDS:
            (folder := Path(name) / part).mkdir()
            written: set[str] = set()
            for worker in workers:
                if worker.kind.form not in written:
                    worker.request(Data(folder, *SHARDS[part]), "write")
                written.add(worker.kind.form)
            count, size, per_shard = SHARDS[part]
            print(
                (
                    f"{count:,} samples of {size} bytes, {per_shard} in a shard; shuffled as far "
                    "as "
                    f"{REACH[part]} samples"
                ),
                end="",
            )
            print(" where that can be set\n")
            if part == "resume":
                print(f"An epoch without a stop, a global batch of {BATCH}:\n")
                shown(epoch_table(workers, folder))
                print("Stopped in mid-epoch and resumed on other processes:\n")
                shown(resume_table(workers, folder))
            else:
                shown(speed_table(workers, folder, asked.rounds))
    for kind in kinds:
        print(f"- {kind.name}: {kind.conditions}.")


if __name__ == "__main__":
    main()
