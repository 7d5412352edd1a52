"""Check before a training whether this machine is fit. Print a line for each check: ok, warning or
failure, with a remedy.

python tools/doctor.py                                       the default task, in one process
python tools/doctor.py --launch 2 har num_workers=4
    as two processes of torchrun, with the speed of their sums
python tools/doctor.py --json --config configs/video.yaml    for programs
torchrun --nnodes=2 ... tools/doctor.py har
    on several machines, started in the same way as the training

The other arguments belong to the training. The checks cover the training's data, batch, loader
processes and save_dir. Nothing is trained, and nothing is written into save_dir. With --launch,
processes share GPUs by gloo if there are fewer GPUs than processes.

Exit code 0: no failure, perhaps warnings. 1: a failure. 7: no failure, but a check could not be
made. 2: invalid arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import os
import resource
import shutil
import socket
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]

try:
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import tasks
    import train
    from data_loader import TrainLoader, create_data_loaders
    from engine import config, errors, launch
    from engine.comm.world import World
    from engine.data.batches import tensors
    from engine.errors import LockstepError, amount
    from engine.run import Run
    from engine.threads import available, threads_at_most
    from plugins.parallel import strategies
    from plugins.performance import shm_backend
    from plugins.performance.cached_data import InMemoryDataset
    from plugins.performance.cores import CpuContention, contention_warning
    from plugins.reporting import plan_text
    from plugins.resilience import agent, failure_report, status
    from plugins.resilience.signals import StopRequest
    from tools.arguments import NOT_KNOWN, Parser
    from tools.machine import cards, nvidia
    from tools.machine import checks as machine
    from tools.machine.checks import Line, attempt, failure, ok, unknown, warning
    from tools.machine.probe import time_sum
    from tools.output import print_json
    from tools.running import guarded, in_world, marked_lines, script_of
except ModuleNotFoundError as error:  # the doctor itself needs these packages
    sys.exit(
        f"failure  {error.name} is not installed: {sys.executable} -m pip install -r "
        f"{ROOT / 'requirements.txt'}"
    )

SHM = Path("/dev/shm")
MB = 1e6

BUDGET_S = 1.0
"""Seconds of each measurement, of the loader and of the model."""

WAITS = 0.1
"""The largest share of time waiting for data without a warning."""

SHARE_OF_LINK = {"NVLink": 0.5, "PCIe": 0.25}
"""A bus bandwidth below this share of a link's one-way bandwidth is a warning."""

TINY_S = 1.5e-3
"""Below so many seconds per batch, loader processes do not help: the transfer of a batch costs as
much."""

FILES, FILES_PER_WORKER = 10, 3
"""FILES: files that a training opens (log, TensorBoard, lock, checkpoint, sockets).
FILES_PER_WORKER: pipes per loader process."""


class Report:
    """The lines so far. A table prints each line at once, JSON prints all lines at the end."""

    def __init__(self, main: bool, as_json: bool):
        self.main, self.as_json = main, as_json
        self.out = sys.stdout  # the training's own output is redirected
        self.lines: list[tuple[str, Line]] = []

    def add(self, check: str, lines: Iterable[Line]) -> None:
        for line in lines:
            self.lines.append((check, line))
            text = ": ".join(filter(None, [line.text, line.remedy]))
            self._print(f"{line.level:<8} {text}")

    def run(self, check: Callable[..., Iterable[Line]], *given: Any) -> None:
        """Add the lines of a check of this process alone."""
        self.add(check.__name__, attempt(check, *given))

    def close(self) -> int:
        """Print the summary and return the exit code."""
        levels = [line.level for _, line in self.lines]
        failures = levels.count("failure")
        warned = levels.count("warning")
        unknowns = levels.count("unknown")
        code = errors.DONE
        text = f"\n{amount(failures, 'failure')}, {amount(warned, 'warning')}"
        if unknowns:
            code = NOT_KNOWN
            text += f", {amount(unknowns, 'check')} not made"
        if failures:
            code = 1
        self._print(text)
        lines = [{"check": check, **line._asdict()} for check, line in self.lines]
        whole = {
            "exit_code": code,
            "failures": failures,
            "warnings": warned,
            "unknown": unknowns,
            "lines": lines,
        }
        if self.main and self.as_json:
            print_json(whole, indent=1)
        return code

    def _print(self, text: str) -> None:
        if self.main and not self.as_json:
            print(text, file=self.out, flush=True)


# ---- the checks in order
# ---------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    parser = Parser(
        usage="doctor.py [--launch N] [--json] [TASK] [--config FILE] [key=value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--launch", type=int, metavar="N", help="start so many processes, as torchrun does"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    own, words = parser.parse_known_args(argv)
    if own.launch is not None:
        if not 1 <= own.launch <= 9999:
            parser.error(f"--launch {own.launch}: give 1 or more")
        _launch(own.launch, words, own.json)
    return guarded(words, lambda args: examine(args, own.json), as_json=own.json)


def _launch(processes: int, words: list[str], as_json: bool) -> None:
    """Become torchrun, with the number of threads of ./train_multigpu.sh. Does not return."""
    os.environ |= threads_at_most(max(1, available() // processes))
    given = [*words, *_shared(processes, words)]
    if as_json:
        given.insert(0, "--json")
    command = [
        agent.__file__,
        "--standalone",
        f"--nproc_per_node={processes}",
        script_of("doctor"),
        *given,
    ]
    os.execv(sys.executable, [sys.executable, *command])


def _shared(processes: int, words: list[str]) -> list[str]:
    """Return the arguments for processes that share the visible GPUs; none with enough GPUs.

    words  of the training; the new processes report wrong arguments
    """
    if not torch.cuda.is_available():
        return []
    try:
        cfg = config.parse(words, tasks.load).cfg
        settings = cards.sharing(cards.visible(cfg), processes, cfg.ddp.backend)
    except Exception:  # also from a task's own code; the processes will report the error
        return []
    return [f"{key}={value}" for key, value in settings.items()]


def examine(args: config.Args, as_json: bool) -> int:
    """(all ranks) Run all checks in the order of a training. Returns the exit code."""
    args = args._replace(cfg=config.changed(args.cfg, {"oom": "stop"}))
    cores = available()  # before this process is bound to a part of the cores
    env, started = machine.launch_of(args.cfg)
    report = Report(env.rank == 0, as_json)
    if launch.is_local_rank0():  # one process of each machine
        report.run(machine.versions)
        report.run(machine.cards, args.cfg)
        report.add("launch", started)
        report.run(machine.variables)
        if not env.launched:  # else the processes have met already
            report.run(machine.port)
    if any(line.level == "failure" for line in started):
        report.add(
            "launch", [unknown("not checked for that reason: data, loader, sums", "fix it first")]
        )
        report.close()
        if env.rank:  # with another code torchrun would end rank 0 before the report
            return 0
        return status.set_exit_code(1)
    joined = False

    def work(world: World, stop: StopRequest) -> int:
        nonlocal joined
        joined = True
        with warnings.catch_warnings():
            # `check_threads` warns with a remedy
            warnings.filterwarnings("ignore", "This DataLoader will create")
            _together(args, world, stop, report, cores)
            return world.broadcast(report.close())

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # `report` prints past it
            return status.set_exit_code(in_world(args.cfg, work))
    except LockstepError as error:
        if joined or env.rank != 0:
            raise
        report.add("join", [failure(str(error))])
        return status.set_exit_code(report.close())


def _together(
    args: config.Args, world: World, stop: StopRequest, report: Report, cores: int
) -> None:
    """(all ranks) Run the checks that need all ranks. Rank 0 adds the warnings of all machines."""
    cfg = args.cfg
    add = report.add if world.main else _ignore
    for lines in world.gather(attempt(machine.device, cfg, world)):
        add("device", lines)
    add("ranks", machine.differences(world.gather(machine.facts(world))))
    add("peers", attempt(machine.peers, world) if world.main else [])
    lines, ready = prepare(args, world, stop)
    add("data", lines)
    report.run(check_threads, cfg, world, cores)
    if ready:
        gradients = _check_run(ready, cfg.num_workers, world, report, cores)
    else:
        gradients = 0
        report.run(open_files, cfg.num_workers, 4)
        report.run(busy, CpuContention().share())
    add("sums", [sums(cfg, world, gradients)])
    own = list[Line]()
    if launch.is_local_rank0():
        own = [line for _, line in report.lines]
    add("machine", complaints(world.gather((socket.gethostname(), own))))


def _ignore(check: str, lines: Iterable[Line]) -> None:
    """Drop lines: only rank 0 reports."""


def _check_run(ready: Run, workers: int, world: World, report: Report, cores: int) -> int:
    """(all ranks) Check what the prepared run needs, and the speed. Return the bytes of the
    gradients.

    workers  loader processes; the prepared run has none
    """
    add = report.add if world.main else _ignore
    source = ready.loaders.train
    if isinstance(source.dataset, InMemoryDataset):
        workers = 0
    # a batch without the tensors that the loader adds
    batch = [*tensors(source.source.get(next(iter(source.sampler))))]
    report.run(open_files, workers, len(batch) or 4)
    report.run(shared_memory, ready, workers, sum(value.nbytes for value in batch))
    add("disk", attempt(disk, ready))
    report.run(model_memory, ready)
    crowd = CpuContention()
    everyone = world.gather(measure(ready, workers))
    report.run(busy, crowd.share())
    add("loader", [loader(ready, workers, everyone, cores)])
    return sum(p.nbytes for p in ready.model.parameters() if p.requires_grad)


def complaints(everyones: list[tuple[str, list[Line]]]) -> list[Line]:
    """Return the warnings and failures of all machines except rank 0's, from each rank's (host,
    lines)."""
    found = []
    for host, lines in everyones:
        for line in lines:
            if host != everyones[0][0] and line.level != "ok":
                found.append(line._replace(text=f"{host}: {line.text}"))
    return found


# ---- what the run needs
# ----------------------------------------------------------------------------------------------


def prepare(args: config.Args, world: World, stop: StopRequest) -> tuple[list[Line], Run | None]:
    """(all ranks) Prepare a training up to the first step: read the data, build the model, inspect
    the run's folder and checkpoint, compare the ranks. No loader processes are started, because
    /dev/shm may be too small."""
    output = io.StringIO()
    cfg = args.cfg
    fixed: dict[str, Any] = {"num_workers": 0}
    if cfg.num_workers and cfg.cache == "auto":
        fixed["cache"] = "none"
    try:
        with contextlib.redirect_stdout(output):
            ready = train.build(args._replace(cfg=config.changed(cfg, fixed)), world, stop)
            plan_text.training(ready, strict=False)
    except Exception as error:
        if world.size > 1 and not getattr(error, "everywhere", False):
            raise  # the other ranks wait for this one, so all must end
        left_out = unknown(
            "not checked for that reason: /dev/shm, disk, speed of the loader", "fix it first"
        )
        return [failure(str(failure_report.to_user_error(error, world))), left_out], None
    scored = len(ready.loaders.val.dataset) if ready.loaders.val else 0
    text = f"{ready.plan.num_samples} training and {scored} validation samples can be read"
    if world.size > 1:
        text += f"; {world.size} ranks agree on config, code, data and weights"
    if ready.record.resumed.path:
        text += f"; resumes {ready.record.resumed.path}"
    warned = marked_lines(output.getvalue(), "warning: ")
    lines = [warning(line, "a training would print this line, too") for line in warned]
    return [*lines, ok(f"task {cfg.task}: {text}")], ready


def check_threads(cfg: Any, world: World, cores: int) -> list[Line]:
    """Compare the cores with processes x (threads + loader processes)."""
    processes = max(1, launch.environment().local_size)
    own = torch.get_num_threads()
    workers = cfg.num_workers
    started = amount(processes, "process")
    there = amount(cores, "core")
    lines = []
    if processes > cores:
        lines.append(warning(f"{started} on {there}: they take turns", f"start at most {cores}"))
    elif world.device.type == "cpu" and processes * own > cores:
        what = f"{started} x {own} threads = {processes * own} on {there}: they spin, waiting"
        lines.append(warning(what, f"OMP_NUM_THREADS={cores // processes}"))
    if workers and processes * workers > cores:
        what = f"{started} x {workers} workers = {processes * workers} on {there}"
        lines.append(warning(what, f"num_workers={max(0, cores // processes - 1)}"))
    each = amount(own, "thread")
    if workers:
        each += f" + {workers} workers"
    return lines or [ok(f"{started} x ({each}) on {there}")]


def busy(share: float) -> list[Line]:
    """Warn if other programs used the cores during the checks."""
    if words := contention_warning(share):
        return [warning(words, "wait until they are done; one thread per process suffers least")]
    return [ok("the cores are free: nobody else takes them")]


def open_files(workers: int, tensors: int) -> list[Line]:
    """Compare `ulimit -n` with the pipes of loader processes and a handle for each tensor in
    flight."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return [ok("ulimit -n is unlimited")]
    now = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 64
    # to train, and to validate
    needed = now + FILES + 2 * workers * (FILES_PER_WORKER + 2 * tensors)
    wanted = max(4096, 2 * needed)
    todo = f"ulimit -n {wanted}"
    if hard != resource.RLIM_INFINITY and hard < wanted:
        todo = (
            f"the hard limit is {hard}: raise it in /etc/security/limits.conf, or docker run "
            f"--ulimit nofile={wanted}"
        )
    return [
        _compared(
            needed,
            soft,
            f"ulimit -n is {soft}, and a process of this run opens up to {needed} files",
            todo,
        )
    ]


def _compared(needed: float, there: float, text: str, todo: str) -> Line:
    """Return a failure for too little, and a warning for less than twice the need. The need is an
    estimate, and other programs need some, too."""
    if needed > there:
        return failure(text, todo)
    return warning(text, todo) if 2 * needed > there else ok(text)


def shared_memory(ready: Run, workers: int, batch_bytes: int) -> list[Line]:
    """Compare /dev/shm with the batches of loader processes in flight."""
    if not SHM.is_dir():
        return []
    free, processes = shutil.disk_usage(SHM).free, max(1, launch.environment().local_size)
    if not workers:
        return [ok(f"/dev/shm has {free / MB:.0f} MB free; no loader process needs it")]
    scored = ready.loaders.val.sampler.batch_size if ready.loaders.val else 0
    # to train, and to validate
    batches = (batch_bytes, batch_bytes * scored // ready.plan.micro_batch)
    together = max(batches)
    if ready.cfg.eval_every > 0:  # during an epoch both kinds are in flight
        together = sum(batches)
    ahead = 2 * workers + 1  # torch's prefetch_factor, and the one in work
    needed = processes * ahead * together
    each = f"{amount(processes, 'process')} x {ahead} batches of {together / MB:.3g} MB"
    text = (
        f"/dev/shm has {free / MB:.0f} MB free, loader processes need up to {needed / MB:.3g} "
        f"MB ({each})"
    )
    todo = (
        f"give it more (docker run --shm-size={max(1, math.ceil(2 * needed / 1e9))}g), or "
        "fewer num_workers"
    )
    return [_compared(needed, free, text, todo)]


def disk(ready: Run) -> list[Line]:
    """Compare the free disk with the checkpoints that the run keeps."""
    cfg, one = ready.cfg, checkpoint_bytes(ready)
    folder = Path(cfg.save_dir or "checkpoints").absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    count = cfg.keep_checkpoints + 3  # the last, the best, and one that is being written
    held = sum(path.stat().st_size for path in folder.glob("*.pt") if not path.is_symlink())
    text = (
        f"{free / MB:.0f} MB free at {there}, the run keeps up to {count} checkpoints of "
        f"{one / MB:.3g} MB"
    )
    return [
        _compared(
            count * one - held,
            free,
            text,
            "free some, or another save_dir, or a smaller keep_checkpoints",
        )
    ]


def model_memory(ready: Run) -> list[Line]:
    """Compare the weights, gradients, moments and average of a process with the memory, by
    ddp.strategy."""
    found, strategy = strategies.footprint(ready), ready.cfg.ddp.strategy
    held = next(size for name, size in found.by_strategy.items() if name.startswith(strategy))
    text = f"model in a process: {strategies.describe(ready)}"
    less = [name for name, size in found.by_strategy.items() if size < min(held, found.there)]
    todo = "more processes with ddp.strategy=fsdp, a smaller model"
    if less:
        todo = f"ddp.strategy={less[-1].split()[0]}"
    return [_compared(held, found.there, text, todo)]


def checkpoint_bytes(run: Run) -> int:
    """Return the bytes of a checkpoint's tensors: weights, the EMA, and two moments of each trained
    weight."""
    weights = [*run.model.state_dict().values()]
    if run.ema:
        weights += run.ema.state_dict().values()
    moments = 2 * [p for p in run.model.parameters() if p.requires_grad]
    return sum(each.nbytes for each in [*weights, *moments] if isinstance(each, torch.Tensor))


# ---- how fast it is
# --------------------------------------------------------------------------------------------------


class Speed(NamedTuple):
    """Seconds of a rank for one batch.

    fetch   in one process; fetch_cpu: the computing part, without waiting for a disk
    loaded  as configured, with loader processes
    step    forward and backward
    """

    fetch: float
    fetch_cpu: float
    loaded: float
    step: float


def measure(run: Run, workers: int) -> Speed | str:
    """(all ranks) Measure the loader alone, and the model alone on one batch, on all ranks at the
    same time. Returns the text of the first error instead."""
    given = run.loaders.train
    alone = TrainLoader(given.dataset, given.sampler, run.world, None, given.prepare)
    works = {"fetch": _batches(alone), "step": _steps(run, alone)}
    if workers:
        cfg = config.changed(run.cfg, {"num_workers": workers, "cache": "none"})
        train_set = given.sampler.dataset
        val_set = run.loaders.val and run.loaders.val.dataset
        loaders = create_data_loaders(cfg, run.world, run.plan, train_set, val_set, run.task)
        works["loaded"] = _batches(loaders[0])
    found: dict[str, tuple[float, float]] = {}
    problem = ""
    for name, work in works.items():
        run.world.gather(None)  # all begin together
        try:
            # each is a collective: as many on all ranks
            rounds = 5 if run.plan.sharded and name == "step" else 0
            found[name] = (0.0, 0.0) if problem else _seconds_each(work, run.world.device, rounds)
        except Exception as error:
            problem = str(failure_report.to_user_error(error, run.world))
    return problem or Speed(
        *found["fetch"], found.get("loaded", found["fetch"])[0], found["step"][0]
    )


def _seconds_each(
    work: Generator[None, None, None], device: torch.device, rounds: int = 0
) -> tuple[float, float]:
    """Return (seconds, CPU seconds of this process) per round of `work`, without the first two
    rounds.

    rounds  number of measured rounds; 0: as many as BUDGET_S allows
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda device: None)
    with contextlib.closing(work):
        for _ in range(2):  # processes start, kernels are chosen
            next(work)
        wait(device)
        began, computed, count = time.perf_counter(), time.process_time(), 0
        while not count or (
            count < rounds if rounds else time.perf_counter() - began < BUDGET_S and count < 1000
        ):
            next(work)
            count += 1
        wait(device)
        return (time.perf_counter() - began) / count, (time.process_time() - computed) / count


def _batches(loader: TrainLoader) -> Generator[None, None, None]:
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        for _ in loader.passes():
            yield


def _steps(run: Run, loader: TrainLoader) -> Generator[None, None, None]:
    """Run forward and backward on one batch, without sums over the ranks. The weights do not
    change."""
    batch = loader.example()
    run.net.train()
    without_sums: Any = contextlib.nullcontext
    if isinstance(run.net, DistributedDataParallel):
        without_sums = run.net.no_sync
    while True:
        with without_sums():
            with run.precision.autocast():
                total = run.task.loss(run.net, batch).total
            run.scaler.scale(total / run.plan.global_batch).backward()
        for p in run.model.parameters():
            p.grad = None
        yield


def loader(run: Run, workers: int, everyone: list[Speed | str], cores: int) -> Line:
    """Compare the samples per second of the loader and of the model on the slowest rank."""
    for error in everyone:
        if isinstance(error, str):
            return failure(error)
    slowest = Speed(*map(max, zip(*everyone, strict=True)))
    on_gpu = run.world.device.type == "cuda"
    share = waiting(slowest.loaded, slowest.step, bool(workers) or on_gpu)
    batch = run.plan.micro_batch * run.world.size
    text = (
        f"the loader gives {batch / slowest.loaded:.0f} samples/s (num_workers={workers}), "
        f"forward and backward take {batch / slowest.step:.0f}: "
        f"{100 * share:.0f} % of the time is waiting for data"
    )
    computing = 1 if on_gpu else torch.get_num_threads()
    spare = cores // max(1, launch.environment().local_size) - computing
    best = recommend(slowest, max(0, spare), on_gpu)
    if workers and not best:
        return (ok if share <= WAITS else warning)(text, "num_workers=0 does as well")
    if share <= WAITS or slowest.loaded < TINY_S:
        return ok(text)
    if best > workers:
        return warning(text, f"num_workers={best}")
    todo = (
        "no core is free for more loader processes: fewer training processes, cache=host if "
        "the data fit, or data "
    )
    return warning(text, todo + "prepared so that a sample takes less")


def waiting(load: float, step: float, meanwhile: bool) -> float:
    """Return the share of time that a training waits for data.

    load       seconds for a batch of the loader
    step       seconds of a step
    meanwhile  whether a loader process, or for a GPU a thread, fetches the next batch during a step
    """
    return max(0.0, 1 - step / load) if meanwhile else load / (load + step)


def recommend(speed: Speed, spare: int, on_gpu: bool) -> int:
    """Return the loader processes for each training process; 0 if loader processes would not help.

    spare  cores per process beside the computing cores
    """
    if speed.fetch < TINY_S or waiting(speed.fetch, speed.step, on_gpu) <= WAITS:
        return 0
    if speed.fetch_cpu < speed.fetch / 2:  # waiting for a disk takes no core
        spare = max(spare, 2)
    return min(math.ceil(speed.fetch / speed.step), spare)


def sums(cfg: Any, world: World, gradients: int) -> Line:
    """(all ranks) Measure the all-reduce and compare the speed with the link between GPUs.

    gradients  bytes of this run's gradients; 0 if unknown
    """
    if world.size == 1:
        return ok("one process: nothing to sum (--launch N measures it)")
    on_gpu = world.device.type == "cuda"
    count = 256_000_000 if on_gpu else 16_000_000
    speed = bus_gb_s(world, count)
    through = "gloo"
    if on_gpu and cfg.ddp.backend != "gloo":
        through = "NCCL"
    elif shm_backend.channel():
        through = "shared memory"
    text = (
        f"all-reduce of {count / MB:.0f} MB over {world.size} ranks: bus bandwidth "
        f"{speed:.3g} GB/s through {through}"
    )
    if shm_backend.channel():
        text += f", {bus_gb_s(world, count, dist.new_group(backend='gloo')):.3g} GB/s through gloo"
    if not on_gpu:
        text += f" (a copy in memory: {_copy_gb_s(count):.3g} GB/s)"
    if gradients:
        text += (
            f"; the gradients, {gradients / MB:.3g} MB, take "
            f"{1e3 * time_sum(world, gradients):.3g} ms"
        )
    several = len(set(world.gather(socket.gethostname()))) > 1  # a network's bandwidth is unknown
    if several or through != "NCCL" or not world.main:
        return ok(text)
    local_size = max(1, launch.environment().local_size)
    return _against_the_link(text, speed, machine.shown_cards()[:local_size])


def bus_gb_s(world: World, count: int, group: Any = None) -> float:
    """(all ranks) Return the bus bandwidth as defined by nccl-tests: each byte crosses a link 2 (n
    - 1) / n times."""
    return 2 * (world.size - 1) / world.size * count / time_sum(world, count, group) / 1e9


def _copy_gb_s(count: int) -> float:
    source, target = torch.zeros(2, count, dtype=torch.uint8)
    target.copy_(source)
    began = time.perf_counter()
    for _ in range(8):
        target.copy_(source)
    return 8 * count / (time.perf_counter() - began) / 1e9


def _against_the_link(text: str, speed: float, cards: list[nvidia.Card]) -> Line:
    kind, limit = "", math.nan
    # nvidia-smi's output varies; the measurement is complete without the link
    with contextlib.suppress(Exception):
        ways = machine.ways_between(cards)
        kind = "PCIe"
        speeds = [card.pcie_gb_s for card in cards]
        if ways and all(way.startswith("NV") for way in ways):
            kind = "NVLink"
            speeds = [nvidia.nvlink_gb_s(card.index) for card in cards]
        limit = float(np.min(speeds))  # NaN for an unknown speed
    if not limit > 0:
        return ok(f"{text}; what the link should give is not known")
    text += f"; {kind} carries {limit:.3g} GB/s"
    if speed < SHARE_OF_LINK[kind] * limit:
        return warning(
            text,
            "NCCL_DEBUG=INFO prints which way it takes, `nvidia-smi topo -m` which ways there are",
        )
    return ok(text)
