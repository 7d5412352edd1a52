"""What `gpu_check.py` runs in processes of their own: each measures or looks at one thing, on the
GPU or, to rehearse, on the CPU, and returns it."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from engine import config
from plugins.resilience import nccl_trace

ROOT = Path(__file__).resolve().parent.parent
Facts = dict[str, Any]


class Failed(Exception):
    """A check has found something wrong."""


def require(so: bool, words: str) -> None:
    if not so:
        raise Failed(words)


def about(on: str) -> Facts:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    out = [
        subprocess.run(c, capture_output=True, text=True).stdout if shutil.which(c[0]) else ""
        for c in (git, smi)
    ]
    commit, driver = (text.strip() or "unknown" for text in out)
    found = {
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
    }
    found |= {"torch": torch.__version__, "cores": str(os.cpu_count())}
    if on == "device=cpu":
        return found | {"device": "the CPU"}
    gpu, nccl_version = (
        torch.cuda.get_device_properties(0),
        ".".join(map(str, torch.cuda.nccl.version())),
    )
    found |= {"device": gpu.name, "memory": f"{gpu.total_memory / 2**30:.0f} GiB", "driver": driver}
    return found | {
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "NCCL": nccl_version,
    }


def clips(folder: str, *sizes: str) -> str:
    """Make clips: trials, videos, frames, size, and how many times each trial is in the table, if
    not once."""
    from formats.lab.synthetic_clips import Recipe, ensure

    trials, videos, frames, size, times = (*map(int, sizes), 1)[:5]
    table = ensure(folder, Recipe(trials, videos, frames, size)) / "trials.csv"
    names, *rows = table.read_text().splitlines()
    # long epochs without more pixels on the disk
    table.write_text("\n".join([names, *rows * times, ""]))
    return folder


def steps(*words: str, strict: bool = False) -> tuple[list[str], int, bool]:
    """Take steps, and then score batches, in which torch reports calls that wait for the device;
    returns (our lines that made them, the number of steps, whether one made on purpose was seen).
    The mode is `warn`, because `error` would end at the first. The first ones are left out: they
    copy class weights, and read the optimizer's counters."""
    from engine.gathered import Gathered
    from engine.phases import Phases
    from tools.machine.probe import endless

    run = built(words, strict)

    def scoring() -> Iterator[None]:
        sums = Gathered("score")
        with run.evaluated() as model:
            while True:
                for batch in run.loaders.val:
                    with torch.no_grad(), run.precision.autocast():
                        sums.add(run.task.score(model, batch))
                    yield

    on_gpu = run.world.device.type == "cuda"
    mode: Callable[[str], Any] = torch.cuda.set_sync_debug_mode if on_gpu else (lambda _: None)
    places, words_of_torch = [], "called a synchronizing CUDA operation"
    during = Phases.during

    def note(message: Any, *_: Any) -> None:
        if words_of_torch in str(message):
            stack = [
                frame
                for frame in traceback.extract_stack()[:-1]
                if frame.filename.startswith(str(ROOT))
            ]
            ours = [
                f"{f.filename}:{f.lineno} {f.line}"
                for f in stack
                if "site-packages" not in f.filename
            ]
            places.append(ours[-1].removeprefix(f"{ROOT}/") if ours else "in a thread of torch's")

    @contextlib.contextmanager
    def allowed(phase: Phases, name: str, waits: bool = False) -> Iterator[None]:
        mode("default" if name == "waiting for the device" else "warn")
        with during(phase, name, waits):
            yield
        mode("warn")

    warnings.simplefilter("always")
    for work in (endless(run), scoring()):
        for _ in range(3):
            next(work)
        Phases.during, usual = allowed, warnings.showwarning  # type: ignore[assignment, method-assign]
        warnings.showwarning = note  # type: ignore[assignment]
        mode("warn")
        for _ in range(6):
            next(work)
        mode("default")
        Phases.during, warnings.showwarning = during, usual  # type: ignore[method-assign]
    found = list(places)
    warnings.showwarning = note  # type: ignore[assignment]
    mode("warn")
    torch.ones(1, device=run.world.device).item() if on_gpu else warnings.warn(
        words_of_torch, stacklevel=1
    )
    mode("default")
    return found, 6, len(places) == len(found) + 1


def steps_in_ddp(*words: str) -> tuple[list[str], int, bool]:
    return steps(*words, strict=True)


def ceiling(
    frames: str, size: str, width: str, on: str
) -> tuple[float, float, float, float, float]:
    """Return (FLOP/s of a large bf16 matrix multiplication, bytes/s of a large copy, read and
    written, each the best of ten rounds; FLOP of the video model for a clip, bytes that the kernels
    of its step in mixed precision read and write, and the fewest: all in bf16, each norm one kernel
    each way, activations a part of others)."""
    import map_bytes
    from torch._subclasses import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    from models import layers
    from models.cnn3d import CNN3d

    device, on_gpu = on.removeprefix("device="), on == "device=cuda"

    def best_s(work: Callable[[], Any]) -> float:
        best = math.inf
        for _ in range(10):
            began = wait(on_gpu)
            for _ in range(20):
                work()
            best = min(best, (wait(on_gpu) - began) / 20)
        return best

    n = 8192 if on_gpu else 128
    a, b = torch.randn(2, n, n, device=device).bfloat16()
    source, target = torch.zeros(2, 2**30 if on_gpu else 2**20, dtype=torch.uint8, device=device)
    flop_s, byte_s = (
        2 * n**3 / best_s(lambda: a @ b),
        2 * source.nbytes / best_s(lambda: target.copy_(source)),
    )
    clips_ = 8 if on_gpu else 1
    shape = clips_, int(frames), int(size), int(size)
    with FakeTensorMode():
        model, clip = CNN3d(5, int(width)), torch.zeros(shape, dtype=torch.uint8)
        with FlopCounterMode(display=False) as counter:
            model(clip).sum().backward()
        form = "kernels" if layers.HAS_TRITON else "torch"
        moved = map_bytes.count(model, clip, form, last=layers.HAS_TRITON).total()
    with torch.device("meta"):
        model, clip = CNN3d(5, int(width)).bfloat16(), torch.zeros(shape, dtype=torch.uint8)
    with map_bytes.Bytes() as every:
        model(clip).sum().backward()
    parts_of_others = ("relu", "threshold_backward")
    fewest = sum(n for name, n in every.moved.items() if name not in parts_of_others)
    flop = counter.get_total_flops()
    return flop_s, byte_s, flop / clips_, moved / clips_, fewest / clips_


NORMS = {
    "16 x 40 x 17 x 64 x 64, channels last": ((16, 40, 17, 64, 64), True),
    "16 x 40 x 17 x 64 x 64": ((16, 40, 17, 64, 64), False),
    "64 x 320 x 17 x 8 x 8, channels last": ((64, 320, 17, 8, 8), True),
    "64 x 48 x 1 x 64": ((64, 48, 1, 64), False),
}
"""Maps of the shipped networks (N, C, *space), and whether the channels are last in memory."""


def norm(on: str) -> dict[str, Facts]:
    """Return, for each of NORMS and the norm with ReLU, forward and backward: whether a repetition
    and the replay of a graph have the same bits; the largest distance from float64 of y and of x's
    gradient, in parts of the largest; ms and TB/s; ms of torch's own kernels, the fallback."""
    import map_bytes

    from models import layers

    device = on.removeprefix("device=")
    found = {}
    for name, (shape, last) in NORMS.items():
        torch.manual_seed(0)
        layer = layers.GroupNorm(8, shape[1], "relu").to(device)
        torch.nn.init.normal_(layer.weight)
        x, grad = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
        if last:
            x, grad = (v.movedim(1, -1).contiguous().movedim(-1, 1) for v in (x, grad))
        first, again = normed(layer, x, grad), normed(layer, x, grad)
        wide = copy.deepcopy(layer).double()
        right = normed(wide, x.double(), grad.double())
        apart = max(
            float((a.double() - b).abs().max() / b.abs().max())
            for a, b in zip(first[:2], right[:2], strict=True)
        )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = normed(layer, x, grad)
        graph.replay()
        same = all(map(torch.equal, first, again)) and all(map(torch.equal, first, recorded))
        ms = milliseconds(layer, x, grad)
        moved = sum(map_bytes.norm_bytes(shape, 8, last, way) for way in (False, True))
        triton, layers.HAS_TRITON = layers.HAS_TRITON, False
        found[name] = {
            "same bits": same,
            "apart": apart,
            "ms": ms,
            "TB/s": moved / ms / 1e9,
            "torch ms": milliseconds(layer, x, grad),
        }
        layers.HAS_TRITON = triton
    return found


def normed(layer: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return y, and the gradients of x and of the parameters."""
    x = x.detach().requires_grad_()
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], grad)


def milliseconds(layer: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> float:
    """Return the device's least time of a forward and a backward pass, of five times ten."""
    times = []
    for _ in range(5):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(10):
            normed(layer, x, grad)
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / 10)
    return min(times)


def words(folder: str, on: str) -> Facts:
    """Gather objects in a group of one while the GPU is busy, and read torch's record of
    NCCL."""
    import torch.distributed as dist

    from plugins.resilience import scratch

    on_gpu = on == "device=cuda"
    if on_gpu:
        nccl_trace.set_up_nccl(60.0)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    device = {"device_id": torch.device("cuda:0")} if on_gpu else {}
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **device)
    number, gathered = (
        torch.ones(
            8192 if on_gpu else 8, 8192 if on_gpu else 8, device="cuda" if on_gpu else "cpu"
        ),
        [None],
    )
    dist.all_reduce(number)
    for _ in range(60):  # a second or two of a GPU
        product = number @ number
    ended = torch.cuda.Event() if on_gpu else None
    if ended:
        ended.record()
    began = time.perf_counter()
    dist.all_gather_object(gathered, "a word")
    found: Facts = {"an object took": f"{1e3 * (time.perf_counter() - began):.2f} ms"}
    found["the GPU was busy"] = bool(ended) and not ended.query()
    require(gathered == ["a word"] and bool(product.isfinite().all()), "another word arrived")
    nccl_trace.trace_nccl(Path(folder))
    trace, until = Path(folder) / "nccl_trace_rank0", time.monotonic() + (20 if on_gpu else 0)
    while not trace.exists() and time.monotonic() < until:
        time.sleep(0.1)
    found["bytes of NCCL's record"] = trace.stat().st_size if trace.exists() else 0
    dist.destroy_process_group()
    scratch.remove_scratch(orphaned=False)
    return found


def built(words: tuple[str, ...], strict: bool = False) -> Any:
    """Return the run of these arguments."""
    import tasks
    import train

    args = config.parse(list(words), tasks.load)
    return train.build(args, train.setup_distributed(args.cfg, strict), strict=strict)


def wait(on_gpu: bool) -> float:
    """Return the time, once the device is through."""
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def captures(*words: str) -> tuple[float, ...]:
    """Return (ms of a step; ms that a copy for a checkpoint keeps the training's stream: the first
    and the second with room on the device, then the first and the second without; MB of a copy)."""
    from engine import checkpoint
    from engine.files.store import bytes_of
    from plugins.performance import snapshot
    from tools.machine.probe import endless

    run = built(words)
    on_gpu, taken, state = run.world.device.type == "cuda", endless(run), dict[str, Any]()
    for _ in range(3):
        next(taken)
    began = wait(on_gpu)
    for _ in range(10):
        next(taken)
    times = [1e2 * (wait(on_gpu) - began)]
    room = snapshot.room
    for part in ("with room", "with room", "without", "without"):
        snapshot.room = room if part == "with room" else lambda device: 0
        began = wait(on_gpu)
        state = checkpoint.capture(run)
        if on_gpu:
            # not the device: a thread's copies go on beside the training
            torch.cuda.current_stream().synchronize()
        times.append(1e3 * (time.perf_counter() - began))
        state = state.on_host() if hasattr(state, "on_host") else state
        next(taken)
    snapshot.room = room
    return *times, bytes_of(state) / 1e6


def pace(seconds: str, *words: str, strict: bool = False) -> Facts:
    """Return what a training's steps take: samples/s, ms, MB, the share in which data are waited
    for; kernels and launches of a step; and samples/s of a `plain_loop` of the same network, where
    it can be taken."""
    from tools.machine.probe import endless, measure

    run = built(words, strict)
    found = measure(run, float(seconds))
    phases, step_ms = found["phases_ms"], found["step_ms"]
    facts = {
        "rate": found["samples_per_s"],
        "ms": step_ms,
        "memory": found["memory_mb"],
        "limit": 0.0,
    }
    facts["waits"] = (
        sum(phases.get(name, 0.0) for name in ("data loading", "host to device")) / step_ms
    )
    facts |= counts(run, endless(run))
    # where it cannot be recorded as a graph, the training's own speed counts
    with contextlib.suppress(RuntimeError):
        facts["limit"] = (
            0.0 if run.plan.workers else limit(run, float(seconds) / 2)
        )  # whose hooks would take its gradients
    return facts


def counts(run: Any, taken: Iterator[Any]) -> Facts:
    """Return the kernels and the launches of a step, the mean of four."""
    on_gpu = run.world.device.type == "cuda"
    activities = [
        torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    ]
    next(taken)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(4):
            next(taken)
        wait(on_gpu)
    events = [
        each for each in profile.events() or () if not getattr(each, "is_user_annotation", False)
    ]
    of_gpu = [each for each in events if each.device_type == torch.autograd.DeviceType.CUDA]
    launches = [each for each in events if re.match(r"cu(da)?(Launch|GraphLaunch)", each.name)]
    return {"kernels": len(of_gpu) / 4, "launches": len(launches) / 4}


def contestant(orders: str, warm_up_steps: str, *words: str, strict: bool = False) -> None:
    """Take part in a contest: take steps until all is warm, print READY, then answer each order
    with a line TURN. An order is a line of the pipe `orders`, {"measure": a key of TURNS,
    "seconds": of its window}; its end ends this."""
    from tools.machine.probe import endless

    run = built(words, strict)
    taken = endless(run)
    for _ in range(int(warm_up_steps)):
        next(taken)
    wait(run.world.device.type == "cuda")
    print("READY", flush=True)
    with open(orders) as lines:
        for line in lines:
            order = json.loads(line)
            try:
                answer = TURNS[order["measure"]](run, taken, order["seconds"])
            except RuntimeError as error:
                answer = {"failed": str(error).splitlines()[0]}
            print("TURN", json.dumps(answer), flush=True)


def contestant_in_ddp(orders: str, warm_up_steps: str, *words: str) -> None:
    contestant(orders, warm_up_steps, *words, strict=True)


def training_turn(run: Any, taken: Iterator[Any], seconds: float) -> Facts:
    """Return samples/s and ms a step of a training, each the median of four blocks of a window, the
    slowest and the fastest block's samples/s, and the most MB that it has reserved."""
    from tools.machine.probe import BLOCKS, peak_memory_mb, timed

    timed(run, taken, 4)  # the clocks of a device that has idled rise
    pace_s, _ = timed(run, taken, 4)
    count = max(2, math.ceil(seconds / BLOCKS / pace_s))
    times, rates = zip(*(timed(run, taken, count) for _ in range(BLOCKS)), strict=True)
    facts = {"rate": statistics.median(rates), "ms": 1e3 * statistics.median(times)}
    return facts | {"least": min(rates), "most": max(rates), "memory": peak_memory_mb(run)}


TURNS: dict[str, Callable[[Any, Iterator[Any], float], Facts]] = {
    "training": training_turn,
    "plain loop": lambda run, _, seconds: {"rate": limit(run, seconds, graph=False)},
    "plain graph": lambda run, _, seconds: {"rate": limit(run, seconds, graph=True)},
    "kernels": lambda run, taken, _: counts(run, taken),
}
"""What a contestant measures in its turn."""


def limit(run: Any, seconds: float, graph: bool | None = None) -> float:
    """Return samples/s of `plain_loop`."""
    batch, on_gpu, count = run.loaders.train.example(), run.world.device.type == "cuda", 0
    step, at_once = plain_loop(run, batch, graph), 20 if on_gpu else 1
    began = wait(on_gpu)
    while wait(on_gpu) - began < seconds:
        for _ in range(at_once):
            step()
        count += at_once
    return count * len(batch["lockstep"].index) / (wait(on_gpu) - began)


def pace_in_ddp(seconds: str, *words: str) -> Facts:
    return pace(seconds, *words, strict=True)


def plain_loop(run: Any, batch: Any, graph: bool | None = None) -> Callable[[], Any]:
    """Return a step without an engine: the network and the loss of a run, compiled as the run's is,
    one batch that lies on the device, torch's own fused AdamW; as a `graph` or kernel by kernel,
    without a choice as the run's own step."""
    from plugins.performance.cuda_graph import unsupported_reason

    if graph is None:
        graph = run.cfg.cuda_graph and not unsupported_reason(run)
    net = run.model
    if run.plan.compile != "off":
        net = torch.compile(net, mode=run.plan.compile, dynamic=False)
    trained = [p for p in run.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True, capturable=graph)
    scaler = torch.amp.GradScaler(run.world.device.type, enabled=run.precision.name == "fp16")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with run.precision.autocast():
            loss = run.task.loss(net, batch)
        scaler.scale(loss.total / loss.weight).backward()
        scaler.step(optimizer)
        scaler.update()

    if graph:
        return recorded(step)
    for _ in range(3):
        step()
    return step


def recorded(step: Callable[[], Any]) -> Callable[[], Any]:
    """Return the launch of a graph of `step`, which is taken three times before."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # a loader's thread may work on the device meanwhile
    with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
        step()
    return graph.replay


def racer(orders: str, warm_up_steps: str, loop: str, about: str) -> None:
    """Take part in a race: a loop of `contest.py`, which takes steps until all is warm and then
    measures when it is ordered to.

    about  of the loop, as JSON
    """
    import contest

    facts = json.loads(about)
    clock = contest.OrderedClock(int(warm_up_steps), orders, facts.get("settling", 0))
    getattr(contest, loop)(facts, clock)


def feeds(seconds: str, *words: str) -> tuple[float, float]:
    """Return (bytes/s, samples/s) of a training's data that reach the device."""
    from engine.data.batches import tensors

    run = built(words)
    passes, size, count, first, on_gpu = iter(()), 0, 0, 3, run.world.device.type == "cuda"
    began = math.inf
    while time.perf_counter() - began < float(seconds):
        pair = next(passes, None)
        if pair is None:
            run.loaders.train.set_epoch(run.progress.epoch, 0, run.progress.step)
            run.progress.next_epoch()
            passes = run.loaders.train.passes()
            continue
        first -= 1
        if first == 0:
            began = wait(on_gpu)
        elif first < 0:
            size, count = (
                size + sum(each.nbytes for each in tensors(pair[0])),
                count + len(pair[1].indices),
            )
    took = wait(on_gpu) - began
    return size / took, count / took


def keep_generators() -> None:
    """Keep the generators that hold batches until the process ends.

    A generator that is dropped early, as the loader's after the last step, frees its batch while
    GeneratorExit is on its way. Torch's hook for a freed tensor then imports a module, which fails,
    and clears the exception. This is the likely cause of a segmentation fault on an H200 (Python
    3.12) between the last evaluation and the end.
    """
    import data_loader
    from engine.data import ahead

    kept = []

    def keeping(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            kept.append(make(*args))
            return kept[-1]

        return call

    ahead.ahead = keeping(ahead.ahead)
    for owner, name in ((data_loader.TrainLoader, "passes"), (data_loader.EvalLoader, "__iter__")):
        setattr(owner, name, keeping(getattr(owner, name)))


def sanitized_steps(*words: str) -> int:
    """Train under torch's CUDA sanitizer, which sees a thread only where it is entered, and for
    which all threads must launch one after the other; returns the number of kernels that it has
    seen."""
    import train

    handler = None
    if torch.cuda.is_available():
        from torch.cuda import _sanitizer

        _sanitizer.enable_cuda_sanitizer()
        handler, one_at_a_time, run = (
            _sanitizer.cuda_sanitizer.dispatch.event_handler,
            threading.RLock(),
            threading.Thread.run,
        )
        launched = handler._handle_kernel_launch

        def launch(*about: Any) -> Any:
            with one_at_a_time:
                errors = launched(*about)
            if errors:
                print("CUDASanitizerErrors:", *errors, file=sys.stderr, flush=True)
                os._exit(1)  # an exception would free tensors on its way
            return errors

        def run_sanitized(thread: threading.Thread) -> None:
            mode = _sanitizer.CUDASanitizerDispatchMode.__new__(
                _sanitizer.CUDASanitizerDispatchMode
            )
            mode.event_handler = handler
            with mode:
                run(thread)

        handler._handle_kernel_launch = launch  # type: ignore[method-assign]
        threading.Thread.run = run_sanitized  # type: ignore[method-assign]
        keep_generators()
    require(train.main(list(words)) == 0, "the training failed")
    return handler.seq_num if handler else 0


def race(*words: str) -> int:
    """The same where no stream waits for another."""
    torch.cuda.Stream.wait_stream = lambda *_: None  # type: ignore[method-assign]
    return sanitized_steps(*words)


SANITIZED = ("sanitized_steps", "race")
"""The parts under the CUDA sanitizer, which is called for each tensor that is freed, and fails when
it is called while the interpreter ends or an exception is on its way."""

PARTS: dict[str, Callable[..., Any]] = {
    part.__name__: part
    for part in (
        about,
        clips,
        steps,
        steps_in_ddp,
        ceiling,
        norm,
        words,
        captures,
        pace,
        pace_in_ddp,
        contestant,
        contestant_in_ddp,
        racer,
        feeds,
        sanitized_steps,
        race,
    )
}
