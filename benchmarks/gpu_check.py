#!/usr/bin/env python3
"""Check what only a GPU can show, by real runs of the scripts: one command, one GPU, some minutes.

python benchmarks/gpu_check.py                     all checks; writes benchmarks/results/gpu_<name of the GPU>_check.*
python benchmarks/gpu_check.py --only same         a part of them, at most four minutes: same, around or speed
python benchmarks/gpu_check.py --only amp,syncs    some of them; writes nothing without --out NAME
python benchmarks/gpu_check.py --rehearse          on the CPU, tiny: tests the checks themselves, nothing else

Exit code 0: all is well; 1: a check failed; 2: there is no GPU. No check outlasts its time limit, and no part its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from engine import config

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LIMIT_S, LIMITS_S, PART_S = 120, {"compiled": 300, "speed": 300}, 240
CACHED = ["cache=none", "cache=device"]
LEAST_S, RUN_S = 30, 75  # of a run whose speed is measured: one that hangs leaves time for the others
Facts = dict[str, Any]

STARVED = """
import torch
from tests.tasks import toy
class Task(toy.Task):  # a GPU with room for 16 samples of 64 MB, and not for 32
    def __init__(self, cfg):
        super().__init__(cfg)
        if torch.cuda.is_available() and cfg.device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.5 * 2**30 / torch.cuda.mem_get_info()[1])
    def loss(self, net, batch):
        torch.empty(len(batch["x"]), 2**26, dtype=torch.uint8, device=batch["x"].device)
        if batch["x"].device.type == "cpu" and len(batch["x"]) > 16:
            raise torch.OutOfMemoryError("no GPU")
        return super().loss(net, batch)
"""

ASSERTS = """
import torch
from engine.phases import phase
from tests.tasks import toy
class Task(toy.Task):  # on a GPU the error comes up later, and every call after it fails
    def loss(self, net, batch):
        place = torch.full((1,), 7 if phase.step == 3 else 0, device=batch["x"].device)
        return super().loss(net, batch | {"x": batch["x"] + batch["x"].new_zeros(3)[place]})
"""


class Failed(Exception):
    """A check has found something wrong."""


def require(so: bool, words: str) -> None:
    if not so:
        raise Failed(words)


class Lab:
    """Runs commands, each with a log, and ends what they leave running.

    root    a temporary folder; `folder` in it is the current check's
    on      the device arguments of every run
    until   the current check's deadline in time.monotonic()
    """

    def __init__(self, root: Path, tiny: bool):
        self.root, self.folder, self.tiny, self.until = root, root, tiny, time.monotonic() + LIMIT_S
        self.on = ["device=cpu" if tiny else "device=cuda"]
        self.har = ["har", "log_every=5", *self.on, *["dataset.stride=512", "model.width=8"] * tiny]
        # On one CPU thread it changes nothing, and imports torch's compiler: more than all the rest of a short run.
        self.deterministic = [] if tiny else ["deterministic=true"]
        # Long enough for a signal to arrive in the middle.
        steps, every = (40, 15) if tiny else (450, 50)
        self.exact = [*self.har, "amp=off", *self.deterministic, f"steps={steps}"]
        self.exact += [f"eval_every={every}", f"save_every={every}"]
        # In float64 only an error shows, not rounding.
        self.toy = [str(ROOT / "tests/tasks/toy.py"), "model.double=true", "amp=off", "global_batch=12", "log_every=4"]

    def start(self, name: str, command: list[str], **more: str) -> subprocess.Popen[bytes]:
        # TMPDIR is also the mark that `end` looks for. The logs say which CUDA graphs were recorded, or left out.
        env = os.environ | {"TMPDIR": str(self.root), "TORCH_LOGS": "perf_hints,cudagraphs"} | more
        env |= {"OMP_NUM_THREADS": "1"} if self.tiny else {}
        how: dict[str, Any] = {"cwd": self.folder, "env": env, "stdin": subprocess.DEVNULL, "start_new_session": True}
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen([sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, **how)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def finish(self, name: str, process: subprocess.Popen[bytes], expected: int = 0) -> None:
        try:
            ended = f"exit code {process.wait(max(0.0, self.until - time.monotonic()))}"
        except subprocess.TimeoutExpired:
            ended = "out of time"
        lines = [line.strip() for line in self.said(name).splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"error: |\w+(\.\w+)*Error: ", line)]
        require(ended == f"exit code {expected}", f"{name}: {ended}: {' / '.join(errors[-2:] or lines[-2:])}")

    def train(self, commands: dict[str, list[str]]) -> dict[str, Path]:
        """Run the commands in parallel, because no times are measured; returns their folders. A command whose folder
        exists resumes there."""
        started = {n: self.start(n, [*command, f"save_dir={self.folder / n}"]) for n, command in commands.items()}
        for name, process in started.items():
            self.finish(name, process)
        return {name: self.folder / name for name in commands}

    def part(self, name: str, *words: str) -> Any:
        """Run a function of PARTS in a new process and return its result."""
        return self.parts({name: [*words]})[name]

    def parts(self, calls: dict[str, list[str]]) -> dict[str, Any]:
        """Run several of them in parallel; the first word of a name is the function's."""
        started = {n: self.start(n, [__file__, "--part", n.split()[0], *words]) for n, words in calls.items()}
        for name, process in started.items():
            self.finish(name, process)
        return {n: json.loads(self.said(n).rpartition("RESULT ")[2].splitlines()[0]) for n in calls}

    @contextlib.contextmanager
    def alone(self, failed: list[str]) -> Iterator[None]:
        """Give a run a time limit of its own, and note that it failed, instead of failing for those to come."""
        end, self.until = self.until, min(self.until, time.monotonic() + RUN_S)
        try:
            yield
        except Failed as error:
            failed.append(str(error))
            self.end()
        self.until = end

    def task(self, name: str, text: str) -> str:
        """Return the path of a task with this source."""
        path = self.folder / f"{name}_task.py"
        path.write_text(text)
        return str(path)

    def end(self) -> None:
        """Kill all, found by their TMPDIR, because under torchrun every rank has a process group of its own."""
        for _ in range(100):  # not forever, because a driver may hold a process
            left = False
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):  # it has ended meanwhile, or is not ours
                    if f"TMPDIR={self.root}\0".encode() in (process / "environ").read_bytes():
                        left = True
                        os.kill(int(process.name), signal.SIGKILL)
            if not left:
                return
            time.sleep(0.1)


def plain(*words: str) -> list[str]:
    return [str(ROOT / "train.py"), *words]


def ddp(processes: int, *words: str) -> list[str]:
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [*run, str(ROOT / "train_ddp.py"), *words]


def load(run: Path) -> dict[str, Any]:
    return torch.load(run / "last.pt", map_location="cpu", weights_only=True)


def logged(run: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if line["event"] == "train"]


def memory_mb(run: Path) -> float:
    """Return the most memory that a run has noted."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "logs"))
    events.Reload()
    return max(event.value for event in events.Scalars("train/memory_mb"))


def compare(lab: Lab, facts: Facts, commands: dict[str, list[str]], most: float = 0.0) -> None:
    """Train by each command, and `weigh` what comes of it."""
    weigh(facts, lab.train(commands), most)


def weigh(facts: Facts, runs: dict[str, Path], most: float = 0.0) -> None:
    """Require that the final weights of each run differ from the first one's by at most `most`, relative to the largest
    number of each tensor."""
    (first, run), *others = runs.items()
    right = load(run)
    for name, other in others:
        state = load(other)
        pairs = [(state["model"][key], weight) for key, weight in right["model"].items()]
        shares = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs]
        apart = max(shares) if all(map(math.isfinite, shares)) else math.inf
        facts[f"{name} and {first}"] = f"{apart:.1e} apart" if apart else "the same bits"
        require(apart <= most, f"the weights of {name} and {first} may be {most:g} apart")
        require(state["progress"]["step"] == right["progress"]["step"], f"{name} took another number of steps")


# ---- the checks -----------------------------------------------------------------------------------------------------


def nccl(lab: Lab, facts: Facts) -> None:
    """train_ddp.py in a group of one, beside plain train.py"""
    compare(lab, facts, {"no group": plain(*lab.exact), "group of one": ddp(1, *lab.exact)})


def amp(lab: Lab, facts: Facts) -> None:
    """mixed precision: the loss falls, the weights stay finite"""
    words = [*lab.har, f"steps={40 if lab.tiny else 120}"]
    runs = lab.train({kind: plain(*words, f"amp={kind}") for kind in ("off", "bf16", "fp16")})
    for name, run in runs.items():
        losses, state = logged(run, "loss"), load(run)
        facts[name] = f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {sum(logged(run, 'skipped_steps')):g} steps skipped"
        require(state["precision"] == name, f"{name}: trained in {state['precision']}")
        require(losses[-1] < losses[0], f"{name}: the loss does not fall")
        require(all(bool(w.isfinite().all()) for w in state["model"].values()), f"{name}: weights are not finite")
    facts["scale of fp16"] = load(runs["fp16"])["scaler"].get("scale")
    require(facts["scale of fp16"] is not None, "the fp16 checkpoint holds no scaler")


def compiled(lab: Lab, facts: Facts) -> None:
    """torch.compile: losses near to the eager run's"""
    # One shape in training and one in evaluation, and few matrices: each is compiled, and tuned, by itself.
    words = [*lab.har, "model.mode=flatten", "model.depth=1", "amp=off", "drop_last=true", "eval_batch_size=1024"]
    words += ["global_batch=64", f"steps={20 if lab.tiny else 80}"]
    modes = ("off", "default", "reduce-overhead", "max-autotune")
    commands = {mode: plain(*words, f"compile={mode}") for mode in modes}
    commands["default, DDP"] = ddp(1, *words, "compile=default")
    mode = "max-autotune-no-cudagraphs"  # the others are refused there
    twice = plain(*words, f"compile={mode}", "gradient_accumulation_steps=2")
    commands[f"{mode}, two passes a step"] = twice
    started = {name: lab.start(name, [*words, f"save_dir={lab.folder / name}"]) for name, words in commands.items()}
    failed = []
    for name, process in started.items():
        try:  # each for itself: a mode that this torch cannot do says nothing about the others
            lab.finish(name, process)
            loss, eager = (logged(lab.folder / run, "loss")[-1] for run in (name, "off"))
            said = lab.said(name)
            recorded, left_out = (len(re.findall(kind, said)) for kind in (r"\bRecording f", "skipping cudag"))
            facts[name] = f"loss {loss:.5f}, {recorded} CUDA graphs, {left_out} left out"
            require(name == "off" or "compiled (" in said, f"{name}: not compiled")
            require(abs(loss - eager) < 0.01 * eager, f"{name}: loss {loss:.5f}, not {eager:.5f}")
        except Failed as error:
            failed.append(str(error))
    require(not failed, "; ".join(failed))


def cut(lab: Lab, facts: Facts) -> None:
    """the same global batch in 1, 2 and 4 passes"""
    har = [*lab.har, "amp=off", *lab.deterministic, "global_batch=64", "steps=10"]
    kinds = {"float64": ([*lab.toy, *lab.on, "steps=14"], 1e-9), "float32": (har, 1e-3)}
    cuts = {(n, kind): f"{n} in {kind}" for kind in kinds for n in (1, 2, 4)}
    runs = lab.train(
        {name: plain(*kinds[kind][0], f"gradient_accumulation_steps={n}") for (n, kind), name in cuts.items()}
    )
    for kind, (_, most) in kinds.items():
        weigh(facts, {name: runs[name] for (_, of), name in cuts.items() if of == kind}, most)


def data_parallel(lab: Lab, facts: Facts) -> None:
    """--multi-gpu dp on one GPU, which torch gives the whole batch: only two GPUs show how it splits one"""
    words = [*lab.exact, "--multi-gpu", "dp", "--gpu-ids", "0"]
    compare(lab, facts, {"plain": plain(*lab.exact), "DataParallel": plain(*words)})
    require(lab.tiny or "one GPU of DataParallel" in lab.said("DataParallel"), "it was not used")


def devices(lab: Lab, facts: Facts) -> None:
    """a checkpoint of the GPU resumed on the CPU, and one of the CPU on the GPU"""
    words, cpu = [*lab.toy, "schedule.horizon=16"], ["device=cpu"]
    ways = {"GPU": (lab.on, lab.on), "GPU then CPU": (lab.on, cpu), "CPU then GPU": (cpu, lab.on)}
    lab.train({name: plain(*words, *on[0], "steps=8") for name, on in ways.items()})
    compare(lab, facts, {name: plain(*words, *on[1], "steps=16") for name, on in ways.items()}, 1e-9)
    for name in ways:
        require("step 8," in lab.said(name), f"{name}: it did not resume from step 8")


def gloo(lab: Lab, facts: Facts) -> None:
    """two gloo processes on one GPU, beside one process"""
    words = [*lab.toy, *lab.on, "steps=14"]
    compare(lab, facts, {"one": plain(*words), "two": ddp(2, *words, "ddp.backend=gloo")}, 1e-9)


def virtual(lab: Lab, facts: Facts) -> None:
    """virtual workers: one process beside two gloo processes on one GPU, with dropout, to the last bit"""
    har = [*lab.har, "model.mode=conv", "model.dropout=0.3", "virtual_workers=4", "global_batch=64", "steps=10"]
    amps = ("off",) if lab.tiny else ("off", "bf16", "fp16")
    ways = {f"one, {amp}": plain(*har, f"amp={amp}") for amp in amps}
    runs = lab.train(ways | {f"two, {amp}": ddp(2, *har, f"amp={amp}", "ddp.backend=gloo") for amp in amps})
    for amp in amps:
        weigh(facts, {name: runs[name] for name in (f"one, {amp}", f"two, {amp}")})


def stop(lab: Lab, facts: Facts) -> None:
    """SIGTERM in the middle and the same command again, beside an uninterrupted run"""
    command, folder = plain(*lab.exact), lab.folder / "stopped"
    process = lab.start("stopped", [*command, f"save_dir={folder}"])
    while "step 5/" not in lab.said("stopped") and process.poll() is None and time.monotonic() < lab.until:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    lab.finish("stopped", process, expected=75)
    facts["stopped after step"] = load(folder)["progress"]["step"]
    compare(lab, facts, {"straight": command, "stopped": command})


def cache(lab: Lab, facts: Facts) -> None:
    """data on the device, of which many passes are prepared at once, beside data on the host"""
    small = [*lab.exact, "batch_size=8"]  # so that on a CPU there are many, too
    compare(lab, facts, {kind: plain(*small, f"cache={kind}") for kind in ("none", "host", "device")})
    require("of data held" in lab.said("device"), "no data were held")


def syncs(lab: Lab, facts: Facts) -> None:
    """calls between log points, and in batches of an evaluation, that wait for the device, but for those meant to"""
    few = lab.part("clips few", str(lab.folder / "few"), "60", "12", "5", "32")
    video = ["video", f"dataset.root={few}", "dataset.frames=5", "model.width=4", "batch_size=2", *lab.on]
    har = [*lab.har, "batch_size=16", "optim.ema_decay=0.9", "gradient_accumulation_steps=2"]
    kinds = {"steps har bf16": [*har, "amp=bf16"], "steps_in_ddp har fp16": [*har, "amp=fp16"]}
    for cached in CACHED:
        kinds[f"steps video bf16 {cached}"] = [*video, "amp=bf16", cached]
    kinds["steps video with loader processes"] = [*video, "amp=bf16", "cache=none", "num_workers=2"]
    kinds["steps robot"] = ["robot", "env.demonstrations=12", "batch_size=16", "optim.ema_decay=0.9", *lab.on]
    norms = [str(ROOT / "tests/tasks/buffers.py"), "batch_size=12", "optim.ema_decay=0.9", *lab.on]
    kinds |= {"steps norms": norms, "steps_in_ddp norms": norms}
    for kind, (places, taken, seen) in lab.parts(kinds).items():
        facts[kind] = f"{len(places)} in {taken} steps"
        require(seen, f"{kind}: one made on purpose was not seen, so none would be")
        require(not places, f"{kind}: {', '.join(sorted(set(places)))}")


def sanitized(lab: Lab, facts: Facts) -> None:
    """no stream reads what another may still write, or frees it: torch's own CUDA sanitizer, on 40 steps"""
    words = [*lab.har, "amp=bf16", "optim.ema_decay=0.9", "steps=40", "eval_every=20", "save_every=15", "batch_size=16"]
    how = {} if lab.tiny else {"TORCH_CUDA_SANITIZER": "1"}  # it needs a GPU
    commands = {kind: plain(*words, kind, f"save_dir={lab.folder / kind}") for kind in CACHED}
    started = {name: lab.start(name, command, **how) for name, command in commands.items()}
    for name, process in started.items():
        lab.finish(name, process)
        facts[name] = "no race"


def beside_nccl(lab: Lab, facts: Facts) -> None:
    """gloo beside NCCL: objects wait for no GPU; a request is answered with the record of what NCCL did"""
    facts |= lab.part("words", str(lab.folder), *lab.on)
    require(facts["the GPU was busy"] or lab.tiny, "an object waited for the GPU")
    require(facts["bytes of NCCL's record"] > 0 or lab.tiny, "torch wrote no record of NCCL")


def shrink(lab: Lab, facts: Facts) -> None:
    """memory runs out on the device: oom=shrink goes on with a smaller batch, as if it had begun with that"""
    words = [lab.task("starved", STARVED), *lab.on, *lab.toy[1:3], "global_batch=32", "steps=4"]
    commands = {
        "half a batch": plain(*words, "batch_size=16"),
        "shrunk": plain(*words, "batch_size=32", "oom=shrink"),
    }
    compare(lab, facts, commands, 1e-9)
    require("Started again with" in lab.said("shrunk"), "memory did not run out")


def device_assert(lab: Lab, facts: Facts) -> None:
    """a device-side assert in a group of one: one line and an exit code, and nothing hangs"""
    process = lab.start("asserts", ddp(1, lab.task("asserts", ASSERTS), *lab.on, "steps=99", "ddp.timeout_s=30"))
    lab.finish("asserts", process, expected=1)
    said = [line for line in lab.said("asserts").splitlines() if line.startswith("error: ")]
    facts["it says"] = said[0].replace(f"{lab.folder}/", "")[:200] if said else ""
    require(len(said) == 1, f"{len(said)} lines of error")


def stall(lab: Lab, facts: Facts) -> None:
    """what a checkpoint keeps a training from, beside its steps"""
    few = lab.part("clips few", str(lab.folder / "few"), "60", "12", "5", "32")
    words = ["video", f"dataset.root={few}", "dataset.frames=5", "batch_size=8", "optim.ema_decay=0.9", *lab.on]
    step_ms, more_ms, megabytes = lab.part("captures", *words, f"model.width={4 if lab.tiny else 40}")
    facts["a step"], facts["a copy for a checkpoint"] = f"{step_ms:.2f} ms", f"{more_ms:.2f} ms for {megabytes:.1f} MB"


def speed(lab: Lab, facts: Facts) -> None:
    """samples a second of each way to run, one at a time, beside what the device could do; each has its own verdict"""
    # Not below 32 pixels: in bf16, oneDNN corrupts memory on maps of one pixel where it emulates the instructions.
    trials, times, frames, size, width = ("60", "2", "5", "32", "4") if lab.tiny else ("240", "21", "17", "256", "40")
    many = lab.part("clips many", str(lab.folder / "many"), trials, "40", frames, size, times)
    rare = ["eval_every=100000", "save_every=100000", "drop_last=true", *lab.on]
    video = ["--config", str(ROOT / "configs/video.yaml"), f"dataset.root={many}", "dataset.val_share=0.1", "amp=bf16"]
    video += [*rare, f"dataset.frames={frames}", f"dataset.size={size}", f"model.width={width}"]
    video += ["steps=12", "batch_size=8", "log_every=2"] if lab.tiny else ["steps=40", "log_every=5"]
    har = ["har", "--mode", "flatten", "--batch-size", "32", *rare]
    har += ["steps=100", "dataset.stride=512", "log_every=10"] if lab.tiny else ["steps=1500", "log_every=50"]
    flop_s, byte_s, flop, traffic = lab.part("ceiling", frames, size, width, *lab.on)
    facts["bf16 matrix multiplication"] = f"{flop_s / 1e12:.4g} TFLOP/s"
    facts["a copy in memory"] = f"{byte_s / 1e12:.4g} TB/s"
    facts["a clip forward and backward"] = f"{flop / 1e9:.4g} GFLOP, {traffic / 1e6:.4g} MB in and out of its kernels"
    compiled = [] if lab.tiny else ["compile=default"]  # on a CPU minutes
    last = "memory_format=channels_last"
    kinds = {f"{what} {how}": [*words, how] for how in CACHED for what, words in (("video", video), ("HAR", har))}
    kinds |= {f"video {last}": [*video, last]}
    kinds |= {f"{what} {how}": [*words, how] for how in compiled for what, words in (("video", video), ("HAR", har))}
    kinds |= {f"video {how} {last}": [*video, how, last] for how in compiled}
    failed: list[str] = []
    for name, words in kinds.items():
        if lab.until - time.monotonic() < LEAST_S:
            facts[name] = "left out: no time is left"
            continue
        with lab.alone(failed):
            run = lab.train({name: plain(*words)})[name]
            rates, waits = logged(run, "samples_per_s"), logged(run, "data_wait_share")
            rate, wait = (statistics.median(values[len(values) // 2 :]) for values in (rates, waits))
            facts[name] = f"{rate:.0f}/s, data wait {100 * wait:.0f} %, {memory_mb(run):.0f} MB at most"
            if words[0] != "har":
                facts[name] += f", {100 * rate * flop / flop_s:.1f} % of the FLOP/s"
                facts[name] += (
                    "" if "compile=default" in words else f", {100 * rate * traffic / byte_s:.1f} % of the TB/s"
                )
    require(not failed, "; ".join(failed))


def graph(lab: Lab, facts: Facts) -> None:
    """cuda_graph: a HAR step of 64 windows as one launch, beside the same step kernel by kernel"""
    exact = [*lab.har, "amp=off", *lab.deterministic, "steps=50"]
    for mode in ("conv", "flatten"):  # not the same bits: a graph's learning rate is a float32
        words, one = plain(*exact, f"model.mode={mode}"), f"{mode}, one launch"
        compare(lab, facts, {mode: words, one: [*words, "cuda_graph=true"]}, 1e-4)
        require(lab.tiny or "a step is one launch" in lab.said(one), f"{one}: {said_of_graphs(lab, one)}")
    places, _, seen = lab.part("steps one launch", *lab.har, "amp=bf16", "drop_last=true", "cuda_graph=true")
    require(seen and not places, f"it waits for the GPU: {', '.join(sorted(set(places)))}")
    har = ["har", "model.mode=flatten", "batch_size=64", "drop_last=true", "eval_every=100000", "save_every=100000"]
    har += ["dataset.stride=512", "steps=60"] if lab.tiny else ["dataset.stride=8", "steps=1500", "log_every=50"]
    rates = {}
    for name, words in (("kernel by kernel", [*har, *lab.on]), ("one launch", [*har, *lab.on, "cuda_graph=true"])):
        rate = logged(lab.train({name: plain(*words)})[name], "samples_per_s")
        rates[name] = statistics.median(rate[len(rate) // 2 :])
        facts[name] = f"{rates[name]:.0f} windows/s"
    ratio = rates["one launch"] / rates["kernel by kernel"]
    facts["one launch"] += f", {ratio:.2f} times as many; the goal is 300000"
    require(lab.tiny or "many launches" not in lab.said("one launch"), said_of_graphs(lab, "one launch"))


def said_of_graphs(lab: Lab, name: str) -> str:
    return "; ".join(line for line in lab.said(name).splitlines() if line.startswith("cuda_graph")) or "nothing said"


def profiled(lab: Lab, facts: Facts) -> None:
    """--profile: where the time of a step goes, and a trace"""
    words = [*lab.har, "--profile", f"steps={60 if lab.tiny else 120}", "eval_every=1000"]
    run = lab.train({"profiled": plain(*words)})["profiled"]
    require((run / "trace.json").exists(), "there is no trace")
    facts["the trace has kernels of the GPU"] = '"cat": "kernel"' in (run / "trace.json").read_text()
    require(lab.tiny or facts["the trace has kernels of the GPU"], "the trace has no kernel of the GPU")


GROUPS: dict[str, tuple[Callable[[Lab, Facts], None], ...]] = {
    "same": (nccl, amp, cut, cache, virtual, syncs, sanitized, devices, gloo),
    "around": (stop, data_parallel, profiled, beside_nccl, shrink, device_assert, stall, compiled),
    "speed": (graph, speed),
}
"""The parts: the same numbers, and nobody waits; what is around a training, and the compiler; samples a second."""
CHECKS = {check.__name__: check for group in GROUPS.values() for check in group}
NOT_REHEARSED = ("compiled", "data_parallel")  # minutes of a C++ compiler; nothing without a GPU


# ---- in processes of their own --------------------------------------------------------------------------------------


def about(on: str) -> Facts:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    out = [subprocess.run(c, capture_output=True, text=True).stdout if shutil.which(c[0]) else "" for c in (git, smi)]
    commit, driver = (text.strip() or "unknown" for text in out)
    found = {"commit": commit, "date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
    found |= {"torch": torch.__version__, "cores": str(os.cpu_count())}
    if on == "device=cpu":
        return found | {"device": "the CPU"}
    gpu, nccl_version = torch.cuda.get_device_properties(0), ".".join(map(str, torch.cuda.nccl.version()))
    found |= {"device": gpu.name, "memory": f"{gpu.total_memory / 2**30:.0f} GiB", "driver": driver}
    return found | {"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version(), "NCCL": nccl_version}


def clips(folder: str, *sizes: str) -> str:
    """Make clips: trials, videos, frames, size, and how many times each trial is in the table, if not once."""
    from formats.synthetic_clips import Recipe, ensure

    trials, videos, frames, size, times = (*map(int, sizes), 1)[:5]
    table = ensure(folder, Recipe(trials, videos, frames, size)) / "trials.csv"
    names, *rows = table.read_text().splitlines()
    table.write_text("\n".join([names, *rows * times, ""]))  # long epochs without more pixels on the disk
    return folder


def steps(*words: str, strict: bool = False) -> tuple[list[str], int, bool]:
    """Take steps, and then score batches, in which torch reports calls that wait for the device; returns (our lines
    that made them, the number of steps, whether one made on purpose was seen). The mode is `warn`, because `error`
    would end at the first. The first ones are left out: they copy class weights, and read the optimizer's counters."""
    import tasks
    import train
    from engine.metrics import EvalSums
    from engine.phases import Phases
    from tools.probe import endless

    args = config.parse(list(words), tasks.load)
    world = train.setup_distributed(args.cfg, strict)
    run = train.build(args, world, strict=strict)

    def scoring() -> Iterator[None]:
        sums, model = EvalSums(), run.evaluated_model.eval()
        while True:
            for batch in run.val_loader:
                with torch.no_grad(), run.precision.autocast():
                    sums.add(run.task.score(model, batch))
                yield

    on_gpu = world.device.type == "cuda"
    mode: Callable[[str], Any] = torch.cuda.set_sync_debug_mode if on_gpu else (lambda _: None)
    places, words_of_torch = [], "called a synchronizing CUDA operation"
    during = Phases.during

    def note(message: Any, *_: Any) -> None:
        if words_of_torch in str(message):
            stack = [frame for frame in traceback.extract_stack()[:-1] if frame.filename.startswith(str(ROOT))]
            ours = [f"{f.filename}:{f.lineno} {f.line}" for f in stack if "site-packages" not in f.filename]
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
    torch.ones(1, device=world.device).item() if on_gpu else warnings.warn(words_of_torch, stacklevel=1)
    mode("default")
    return found, 6, len(places) == len(found) + 1


def steps_in_ddp(*words: str) -> tuple[list[str], int, bool]:
    return steps(*words, strict=True)


def ceiling(frames: str, size: str, width: str, on: str) -> tuple[float, float, float, float]:
    """Return (FLOP/s of a large bf16 matrix multiplication, bytes/s of a large copy, read and written, each the best of
    ten rounds; FLOP of the video model for a clip, bytes that the kernels of its step in bf16 read and write)."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    from models.cnn3d import CNN3d

    class Traffic(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given, found = list(args), func(*args, **(kwargs or {}))
            for each in [*given, found]:
                given += each if isinstance(each, (list, tuple)) else [each]
            if not (func.is_view or "empty" in func.name()):
                tensors = {id(each): each for each in given if isinstance(each, torch.Tensor)}
                self.bytes += sum(each.nbytes for each in tensors.values())
            return found

    device, on_gpu = on.removeprefix("device="), on == "device=cuda"
    wait: Callable[[], Any] = torch.cuda.synchronize if on_gpu else (lambda: None)

    def best_s(work: Callable[[], Any]) -> float:
        best = math.inf
        for _ in range(10):
            wait()
            began = time.perf_counter()
            for _ in range(20):
                work()
            wait()
            best = min(best, (time.perf_counter() - began) / 20)
        return best

    n = 8192 if on_gpu else 128
    a, b = torch.randn(2, n, n, device=device).bfloat16()
    source, target = torch.zeros(2, 2**30 if on_gpu else 2**20, dtype=torch.uint8, device=device)
    flop_s, byte_s = 2 * n**3 / best_s(lambda: a @ b), 2 * source.nbytes / best_s(lambda: target.copy_(source))
    clips_ = 8 if on_gpu else 1
    model = CNN3d(5, int(width)).to(device)
    clip = torch.zeros(clips_, int(frames), int(size), int(size), dtype=torch.uint8, device=device)
    with FlopCounterMode(display=False) as counter, Traffic() as traffic, torch.autocast(device, torch.bfloat16):
        loss = model(clip).sum()
    with FlopCounterMode(display=False) as after, traffic:
        loss.backward()
    flop = counter.get_total_flops() + after.get_total_flops()
    return flop_s, byte_s, flop / clips_, traffic.bytes / clips_


def words(folder: str, on: str) -> Facts:
    """Tell objects in a group of one while the GPU is busy, and ask torch for the record of NCCL."""
    import torch.distributed as dist

    from engine import network

    on_gpu = on == "device=cuda"
    if on_gpu:
        network.set_up_nccl(60.0)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    device = {"device_id": torch.device("cuda:0")} if on_gpu else {}
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **device)
    number, told = torch.ones(8192 if on_gpu else 8, 8192 if on_gpu else 8, device="cuda" if on_gpu else "cpu"), [None]
    dist.all_reduce(number)
    for _ in range(60):  # a second or two of a GPU
        product = number @ number
    ended = torch.cuda.Event() if on_gpu else None
    if ended:
        ended.record()
    began = time.perf_counter()
    dist.all_gather_object(told, "a word")
    found: Facts = {"an object took": f"{1e3 * (time.perf_counter() - began):.2f} ms"}
    found["the GPU was busy"] = bool(ended) and not ended.query()
    require(told == ["a word"] and bool(product.isfinite().all()), "another word arrived")
    network.trace_nccl(Path(folder))
    trace, until = Path(folder) / "nccl_trace_rank0", time.monotonic() + (20 if on_gpu else 0)
    while not trace.exists() and time.monotonic() < until:
        time.sleep(0.1)
    found["bytes of NCCL's record"] = trace.stat().st_size if trace.exists() else 0
    dist.destroy_process_group()
    network.remove_pipes()
    return found


def captures(*words: str) -> tuple[float, float, float]:
    """Return (ms of a step, ms that a copy for a checkpoint after it takes more, MB of the copy)."""
    import tasks
    import train
    from engine import checkpoint
    from tools.probe import endless

    args = config.parse(list(words), tasks.load)
    run = train.build(args, train.setup_distributed(args.cfg))
    taken, seconds, state = endless(run), dict[bool, float](), dict[str, Any]()
    wait: Callable[[], Any] = torch.cuda.synchronize if run.world.device.type == "cuda" else (lambda: None)
    for captured in (False, True, False, True):  # the first of each is not counted
        wait()
        began = time.perf_counter()
        for _ in range(10):
            next(taken)
            if captured:
                state = checkpoint.capture(run)
        wait()
        seconds[captured] = time.perf_counter() - began
    tensors = [*state["model"].values(), *(state["ema"] or {}).values()]
    tensors += [value for each in state["optimizer"]["state"].values() for value in each.values()]
    megabytes = sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor)) / 1e6
    return 100 * seconds[False], 100 * (seconds[True] - seconds[False]), megabytes


PARTS: dict[str, Callable[..., Any]] = {
    part.__name__: part for part in (about, clips, steps, steps_in_ddp, ceiling, words, captures)
}


# ---- the report -----------------------------------------------------------------------------------------------------


def table(argv: list[str], where: Facts, checks: dict[str, Any]) -> str:
    title = "# What was seen on a GPU" if where["device"] != "the CPU" else "# A rehearsal, without a GPU"
    lines = [title, "", f"`{' '.join(['python benchmarks/gpu_check.py', *argv])}`", ""]
    lines += ["; ".join(f"{name} {value}" for name, value in where.items()), ""]
    lines += ["| check | | s | found |", "|---|---|---:|---|"]
    for name, check in checks.items():
        found = "; ".join(f"{key}: {value}" for key, value in check["facts"].items()).replace("|", "\\|")
        lines.append(f"| `{name}`: {CHECKS[name].__doc__} | {check['state']} | {check['seconds']:.0f} | {found} |")
    return "\n".join(lines) + "\n"


def examine(lab: Lab, name: str, end: float) -> dict[str, Any]:
    """Return the state, the seconds and the facts of a check, which is over at time.monotonic() `end` at the latest."""
    facts: Facts = {}
    began = time.monotonic()
    lab.until = min(end, began + LIMITS_S.get(name, LIMIT_S) * (5 if lab.tiny else 1))  # CPUs are shared with others
    lab.folder = lab.root / name
    lab.folder.mkdir()
    try:
        CHECKS[name](lab, facts)
        state = "ok"
    except Exception as error:  # whatever it is, the other checks still run
        words = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        words = words.replace(f"{lab.folder}/", "").replace(f"{ROOT}/", "")  # paths of this machine
        state, facts["failed"] = "failed", " ".join(words.split())[:1000]
    lab.end()
    return {"state": state, "seconds": round(time.monotonic() - began, 1), "facts": facts}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = f"{' or '.join(GROUPS)} (four minutes each)"
    parser.add_argument("--only", default="", help=f"{parts}, or some of {','.join(CHECKS)}")
    parser.add_argument("--out", default="", help="name of the two files")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where they go, instead of benchmarks/results")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny; writes nothing")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part:
        print("RESULT", json.dumps(PARTS[args.part[0]](*args.part[1:])), flush=True)
        return 0
    group = args.only if args.only in GROUPS else ""
    if group or not args.only:
        names = [check.__name__ for name, part in GROUPS.items() if group in ("", name) for check in part]
        names = [name for name in names if not (args.rehearse and name in NOT_REHEARSED)]
    else:
        names = args.only.split(",")
    if unknown := set(names) - CHECKS.keys():
        parser.error(f"no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    if args.rehearse:
        print("A rehearsal on the CPU: nothing of it says anything about a GPU, and nothing is written.\n", flush=True)
    elif not torch.cuda.is_available():
        print("torch sees no GPU here, and all of this is about one (--rehearse: on the CPU)", file=sys.stderr)
        return 2
    checks: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gpu_check_", ignore_cleanup_errors=True) as folder:
        lab = Lab(Path(folder), args.rehearse)
        try:
            where = lab.part("about", *lab.on)
            hardware = re.sub(r"\W+", "_", where["device"].lower().replace("nvidia", "")).strip("_")
            usual = f"gpu_{hardware}_{group or 'check'}" if group or not args.only else ""
            out = "" if args.rehearse else args.out or usual
            end = time.monotonic() + PART_S if group and not lab.tiny else math.inf
            for name in names:
                checks[name] = one = examine(lab, name, end)
                print(f"{name}: {one['state']} ({one['seconds']:.0f} s) {one['facts']}", flush=True)
                if out:  # after each, so that results outlast a time limit
                    whole = json.dumps({"about": where, "checks": checks}, indent=1)
                    args.folder.mkdir(parents=True, exist_ok=True)
                    (args.folder / f"{out}.md").write_text(table(argv, where, checks))
                    (args.folder / f"{out}.json").write_text(whole + "\n")
        finally:
            lab.end()
    print("\n" + table(argv, where, checks))
    return int(any(check["state"] == "failed" for check in checks.values()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running commands are ended, too
    sys.exit(main(sys.argv[1:]))
