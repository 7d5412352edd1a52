#!/usr/bin/env python3
"""Check what only a GPU can show, by real runs of the scripts: one command, one GPU, some minutes.

python benchmarks/gpu_check.py                     all checks; writes benchmarks/results/gpu_<name
                                                   of the GPU>_check.*
python benchmarks/gpu_check.py --only same         a part of them: same, around or speed; at most
                                                   four --minutes
python benchmarks/gpu_check.py --only speed --minutes 9
    all ways to run, each with the time that it needs
python benchmarks/gpu_check.py --quick             nearly all of them, in four minutes on 16 cores
python benchmarks/gpu_check.py --logs LOGS.tar.gz  keeps the output of every run, too
python benchmarks/gpu_check.py --only amp,syncs    some of them; writes nothing without --out NAME
python benchmarks/gpu_check.py --rehearse          on the CPU, tiny: tests the checks themselves,
                                                   nothing else

Exit code 0: no check failed; 1: one did; 2: there is no GPU. No check outlasts its time limit, and
no part its own: what there is no time to begin is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from gpu_parts import PARTS, SANITIZED, Facts, Failed, require
from gpu_quick import TURN_S, WAYS, Contest, Turn, side_by_side, speeds_table, take_turns, turns_of

from engine import api
from engine.files.archive import CheckpointState

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LIMIT_S, PART_MINUTES = 120, 4.0
# the last three fit into nine minutes
LIMITS_S = {"compiled": 300, "graph": 80, "speed": 355, "loader": 100}
CACHED = ["cache=none", "cache=device"]
FEW = ("60", "12", "5", "32")  # clips, for `clips`
# what must be left to begin a check or a run; the most of a run whose speed is measured
LEAST_S, RUN_S = 30, 90

STARVED = """
import torch
from tests.tasks import toy
class Task(toy.Task):  # a GPU with room for 16 samples of 64 MB, and not for 32
    def __init__(self, cfg):
        super().__init__(cfg)
        if torch.cuda.is_available() and cfg.device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.5 * 2**30 / torch.cuda.mem_get_info()[1])
    def loss(self, net, batch):
        # In pieces: of a single block of 1 GB the first workspace of cuBLAS would take a part, and
        # keep it from the next step.
        device = batch["x"].device
        blocks = [torch.empty(2**26, dtype=torch.uint8, device=device) for _ in batch["x"]]
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


WIDE = """
from torch import nn
from tests.tasks import toy
class Net(toy.Net):
    def __init__(self, width):
        super().__init__(8, 0.0)
        hidden = nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Tanh(), *hidden, nn.Linear(width, 4))
class Task(toy.Task):
    def model(self):
        return Net(self.cfg.model.width)
"""


STRANGE = (
    "counts",
    "counts in hiding",
    "draws",
    "draws by torch",
    "number of the host",
    "row of the host",
    "keeps",
    "hook",
    "prepares",
    "evaluates",
    "input",
    "none",
)
"""What the host does in a step of `tests/tasks/strange.py`; the last two are recorded."""


class Lab:
    """Runs commands, each with a log, and ends what they leave running.

    python  the interpreter of all commands
    more    variables of the environment of all commands
    root    a temporary folder; `folder` in it is the current check's
    on      the device arguments of every run
    until   the current check's deadline in time.monotonic()
    quick   long checks take fewer cases

    Checks that run at the same time need a Lab each, with a `root` of its own.
    """

    python = (sys.executable,)

    def __init__(self, root: Path, tiny: bool, quick: bool = False):
        self.more: dict[str, str] = {}
        self.root, self.folder, self.tiny, self.until = root, root, tiny, time.monotonic() + LIMIT_S
        self.quick = quick
        self.on = ["device=cpu" if tiny else "device=cuda"]
        self.har = ["har", "log_every=5", *self.on, *["dataset.stride=512", "model.width=8"] * tiny]
        # On one CPU thread it changes nothing, and imports torch's compiler: more than all the rest
        # of a short run.
        self.deterministic = [] if tiny else ["deterministic=true"]
        # Long enough for a signal to arrive in the middle.
        steps, every = (40, 15) if tiny else (450, 50)
        self.exact = [*self.har, "amp=off", *self.deterministic, f"steps={steps}"]
        self.exact += [f"eval_every={every}", f"save_every={every}"]
        # In float64 only an error shows, not rounding.
        self.toy = [
            str(ROOT / "tests/tasks/toy.py"),
            "model.double=true",
            "amp=off",
            "global_batch=12",
            "log_every=4",
        ]

    def start(self, name: str, command: list[str], **more: str) -> subprocess.Popen[bytes]:
        # TMPDIR is also the mark that `end` looks for. The logs say which CUDA graphs were
        # recorded, or left out.
        env = os.environ | {"TMPDIR": str(self.root), "TORCH_LOGS": "perf_hints,cudagraphs"} | more
        env |= self.more | ({"OMP_NUM_THREADS": "1"} if self.tiny else {})
        how: dict[str, Any] = {
            "cwd": self.folder,
            "env": env,
            "stdin": subprocess.DEVNULL,
            "start_new_session": True,
        }
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [*self.python, *command], stdout=log, stderr=subprocess.STDOUT, **how
            )

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def finish(self, name: str, process: subprocess.Popen[bytes], expected: int = 0) -> None:
        try:
            ended = f"exit code {process.wait(max(0.0, self.until - time.monotonic()))}"
        except subprocess.TimeoutExpired:
            ended = "out of time"
        lines = [line.strip() for line in self.output(name).splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"error: |\w+(\.\w+)*Error: ", line)]
        require(
            ended == f"exit code {expected}",
            f"{name}: {ended}: {' / '.join(errors[-2:] or lines[-2:])}",
        )

    def train(self, commands: dict[str, list[str]]) -> dict[str, Path]:
        """Run the commands in parallel, because no times are measured; returns their folders. A
        command whose folder exists resumes there."""
        started = {
            n: self.start(n, [*command, f"save_dir={self.folder / n}"])
            for n, command in commands.items()
        }
        for name, process in started.items():
            self.finish(name, process)
        return {name: self.folder / name for name in commands}

    def part(self, name: str, *words: str) -> Any:
        """Run a function of PARTS in a new process and return its result."""
        return self.parts({name: [*words]})[name]

    def begin(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a function of PARTS, the first word of the name, in a new process."""
        return self.start(name, [__file__, "--part", name.split()[0], *words])

    def parts(self, calls: dict[str, list[str]]) -> dict[str, Any]:
        """Run several of them in parallel; the first word of a name is the function's."""
        started = {name: self.begin(name, *words) for name, words in calls.items()}
        for name, process in started.items():
            self.finish(name, process)
        return {
            n: json.loads(self.output(n).rpartition("RESULT ")[2].splitlines()[0]) for n in calls
        }

    @contextlib.contextmanager
    def alone(self, failed: list[str]) -> Iterator[None]:
        """Give a run a time limit of its own, and note that it failed, instead of failing for those
        to come."""
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
        """Kill all, found by their TMPDIR, because under torchrun every rank has a process group of
        its own."""
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


def load(run: Path) -> CheckpointState:
    return api.read(run / "last.pt")


def logged(run: Path, key: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if line["event"] == "train"]


def compare(lab: Lab, facts: Facts, commands: dict[str, list[str]], most: float = 0.0) -> None:
    """Train by each command, and `weigh` what comes of it."""
    weigh(facts, lab.train(commands), most)


def weigh(facts: Facts, runs: dict[str, Path], most: float = 0.0) -> None:
    """Require that the final weights of each run differ from the first one's by at most `most`,
    relative to the largest number of each tensor."""
    (first, run), *others = runs.items()
    right = load(run)
    for name, other in others:
        state = load(other)
        pairs = [(state.model[key], weight) for key, weight in right.model.items()]
        shares = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs]
        apart = max(shares) if all(map(math.isfinite, shares)) else math.inf
        facts[f"{name} and {first}"] = f"{apart:.1e} apart" if apart else "the same bits"
        require(apart <= most, f"the weights of {name} and {first} may be {most:g} apart")
        require(
            state.step == right.step,
            f"{name} took another number of steps",
        )


# ---- the checks
# --------------------------------------------------------------------------------------------------


def nccl(lab: Lab, facts: Facts) -> None:
    """train_ddp.py in a group of one, beside plain train.py"""
    clipped = [*lab.har, "amp=off", *lab.deterministic, "steps=10", "optim.grad_clip=1"]
    for name, words in (("", [*lab.exact, "optim.grad_clip=0"]), ("clipped, ", clipped)):
        groups = {f"{name}no group": plain(*words), f"{name}group of one": ddp(1, *words)}
        compare(lab, facts, groups)


def amp(lab: Lab, facts: Facts) -> None:
    """mixed precision: the loss falls, the weights stay finite"""
    words = [*lab.har, f"steps={40 if lab.tiny else 120}"]
    runs = lab.train({kind: plain(*words, f"amp={kind}") for kind in ("off", "bf16", "fp16")})
    for name, run in runs.items():
        losses, state = logged(run, "loss"), load(run)
        facts[name] = (
            f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {sum(logged(run, 'skipped_steps')):g} "
            "steps skipped"
        )
        require(state.choices["amp"] == name, f"{name}: trained in {state.choices['amp']}")
        require(losses[-1] < losses[0], f"{name}: the loss does not fall")
        require(
            all(bool(w.isfinite().all()) for w in state.model.values()),
            f"{name}: weights are not finite",
        )
    facts["scale of fp16"] = load(runs["fp16"]).scaler.get("scale")
    require(facts["scale of fp16"] is not None, "the fp16 checkpoint holds no scaler")


def compiled(lab: Lab, facts: Facts) -> None:
    """torch.compile: losses near to the eager run's"""
    # One shape in training and one in evaluation, and few matrices: each is compiled, and tuned, by
    # itself.
    words = [
        *lab.har,
        "model.mode=flatten",
        "model.depth=1",
        "amp=off",
        "drop_last=true",
        "eval_batch_size=1024",
    ]
    words += ["global_batch=64", f"steps={20 if lab.tiny else 80}"]
    modes = ("off", "default", "reduce-overhead")
    if not lab.quick:
        modes += ("max-autotune",)
    commands = {mode: plain(*words, f"compile={mode}") for mode in modes}
    if not lab.quick:
        commands["default, DDP"] = ddp(1, *words, "compile=default")
        mode = "max-autotune-no-cudagraphs"  # the others are refused there
        twice = plain(*words, f"compile={mode}", "gradient_accumulation_steps=2")
        commands[f"{mode}, two passes a step"] = twice
    started = {
        name: lab.start(name, [*words, f"save_dir={lab.folder / name}"])
        for name, words in commands.items()
    }
    failed = []
    for name, process in started.items():
        try:  # each for itself: a mode that this torch cannot do says nothing about the others
            lab.finish(name, process)
            loss, eager = (logged(lab.folder / run, "loss")[-1] for run in (name, "off"))
            output = lab.output(name)
            recorded, left_out = (
                len(re.findall(kind, output)) for kind in (r"\bRecording f", "skipping cudag")
            )
            facts[name] = f"loss {loss:.5f}, {recorded} CUDA graphs, {left_out} left out"
            require(name == "off" or "compiled (" in output, f"{name}: not compiled")
            require(abs(loss - eager) < 0.01 * eager, f"{name}: loss {loss:.5f}, not {eager:.5f}")
        except Failed as error:
            failed.append(str(error))
    require(not failed, "; ".join(failed))


def compiled_bf16(lab: Lab, facts: Facts) -> None:
    """compile=default with amp=bf16: no step is skipped, losses near to the eager run's"""
    few = lab.part("clips few", str(lab.folder / "few"), *FEW)
    rare = [*lab.on, "steps=6", "log_every=1", "amp=bf16", "drop_last=true"]
    networks = {
        "1D CNN": ["har", "model.mode=conv", *["dataset.stride=512", "model.width=8"] * lab.tiny],
        "video": ["video", f"dataset.root={few}", "dataset.frames=5", "batch_size=8"],
    }
    commands = {
        f"{name}, {mode}": plain(*words, *rare, f"compile={mode}")
        for name, words in networks.items()
        for mode in ("off", "default")
    }
    runs = lab.train(commands)
    for name in networks:
        eager, losses = (logged(runs[f"{name}, {mode}"], "loss") for mode in ("off", "default"))
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, eager, strict=True))
        skipped = sum(logged(runs[f"{name}, default"], "skipped_steps"))
        log = lab.output(f"{name}, default")
        facts[name] = f"losses {apart:.1e} apart in {len(losses)} steps, {skipped:g} steps skipped"
        warnings = [line for line in log.splitlines() if line.startswith("warning: ")]
        if warnings:
            facts[f"{name} warns"] = " / ".join(warnings)[:300]
        require("compiled (" in log, f"{name}: not compiled")
        require(not skipped, f"{name}: {skipped:g} steps skipped")
        require(apart < 0.05, f"{name}: losses {losses} compiled, {eager} eager")


def norm(lab: Lab, facts: Facts) -> None:
    """the norm's Triton kernels: the same bits again and in a graph, near to float64; the time of
    forward and backward beside torch's own"""
    for name, found in lab.part("norm", *lab.on).items():
        facts[name] = (
            f"{found['ms']:.3f} ms, {found['TB/s']:.2f} TB/s; torch's own {found['torch ms']:.3f} "
            f"ms; {found['apart']:.1e} from float64"
        )
        require(found["same bits"], f"{name}: other bits")
        require(found["apart"] < 2**-7, f"{name}: {found['apart']:.1e} from float64")


def cut(lab: Lab, facts: Facts) -> None:
    """the same global batch in 1, 2 and 4 passes"""
    har = [*lab.har, "amp=off", *lab.deterministic, "global_batch=64", "steps=10"]
    kinds = {"float64": ([*lab.toy, *lab.on, "steps=14"], 1e-9), "float32": (har, 1e-3)}
    cuts = {
        (n, kind): f"{n} in {kind}" for kind in kinds for n in ((1, 2) if lab.tiny else (1, 2, 4))
    }
    runs = lab.train(
        {
            name: plain(*kinds[kind][0], f"gradient_accumulation_steps={n}")
            for (n, kind), name in cuts.items()
        }
    )
    for kind, (_, most) in kinds.items():
        weigh(facts, {name: runs[name] for (_, of), name in cuts.items() if of == kind}, most)


def data_parallel(lab: Lab, facts: Facts) -> None:
    """--multi-gpu dp on one GPU, which torch gives the whole batch: only two GPUs show how it
    splits one"""
    words = [*lab.exact, "--multi-gpu", "dp", "--gpu-ids", "0"]
    compare(lab, facts, {"plain": plain(*lab.exact), "DataParallel": plain(*words)})
    require(lab.tiny or "one GPU of DataParallel" in lab.output("DataParallel"), "it was not used")


def devices(lab: Lab, facts: Facts) -> None:
    """a checkpoint of the GPU resumed on the CPU, and one of the CPU on the GPU, up to the rounding
    of a rate, which a GPU reads as a float32"""
    words, cpu = [*lab.toy, "schedule.horizon=16"], ["device=cpu"]
    ways = {"GPU": (lab.on, lab.on), "GPU then CPU": (lab.on, cpu), "CPU then GPU": (cpu, lab.on)}
    lab.train({name: plain(*words, *on[0], "steps=8") for name, on in ways.items()})
    compare(
        lab, facts, {name: plain(*words, *on[1], "steps=16") for name, on in ways.items()}, 1e-7
    )
    for name in ways:
        require("step 8," in lab.output(name), f"{name}: it did not resume from step 8")


def gloo(lab: Lab, facts: Facts) -> None:
    """two gloo processes on one GPU, beside one process"""
    words = [*lab.toy, *lab.on, "steps=14"]
    compare(lab, facts, {"one": plain(*words), "two": ddp(2, *words, "ddp.backend=gloo")}, 1e-9)


def virtual(lab: Lab, facts: Facts) -> None:
    """virtual workers: one process beside two gloo processes on one GPU, with dropout, to the last
    bit"""
    har = [
        *lab.har,
        "model.mode=conv",
        "model.dropout=0.3",
        "virtual_workers=4",
        "global_batch=64",
        "steps=10",
    ]
    amps = ("off",) if lab.tiny else ("off", "bf16", "fp16")
    ways = {f"one, {amp}": plain(*har, f"amp={amp}") for amp in amps}
    runs = lab.train(
        ways | {f"two, {amp}": ddp(2, *har, f"amp={amp}", "ddp.backend=gloo") for amp in amps}
    )
    for amp in amps:
        weigh(facts, {name: runs[name] for name in (f"one, {amp}", f"two, {amp}")})


def stop(lab: Lab, facts: Facts) -> None:
    """SIGTERM in the middle and the same command again, beside an uninterrupted run"""
    command, folder = plain(*lab.exact), lab.folder / "stopped"
    process = lab.start("stopped", [*command, f"save_dir={folder}"])
    while (
        "step 5/" not in lab.output("stopped")
        and process.poll() is None
        and time.monotonic() < lab.until
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    lab.finish("stopped", process, expected=75)
    facts["stopped after step"] = load(folder).step
    compare(lab, facts, {"straight": command, "stopped": command})


def cache(lab: Lab, facts: Facts) -> None:
    """data on the device, of which many passes are prepared at once, beside data on the host"""
    small = [*lab.exact, "batch_size=8"]  # so that on a CPU there are many, too
    compare(
        lab, facts, {kind: plain(*small, f"cache={kind}") for kind in ("none", "host", "device")}
    )
    require("of data held" in lab.output("device"), "no data were held")


REFUSALS = {"refused": "recording it failed", "two processes": "waits for the GPU"}
"""Why a kind of `graph` is no launch: gloo copies the sums of a GPU through the host."""


def waiting(lab: Lab) -> dict[str, list[str]]:
    """Return what `syncs` looks at: a part and what it is about, and its words. Epochs of more
    steps than it takes."""
    video = [
        "video",
        f"dataset.root={lab.folder / 'few'}",
        "dataset.frames=5",
        "model.width=4",
        "batch_size=2",
    ]
    har = [*lab.har, "batch_size=16", "optim.ema_decay=0.9", "gradient_accumulation_steps=2"]
    kinds = {"steps har bf16": [*har, "amp=bf16"], "steps_in_ddp har fp16": [*har, "amp=fp16"]}
    for cached in ("num_workers=2",) if lab.tiny else (*CACHED, "num_workers=2"):
        kinds[f"steps video {cached}"] = [*video, *lab.on, "amp=bf16", cached]
    kinds["steps robot"] = [
        "robot",
        "env.demonstrations=12",
        "batch_size=16",
        "optim.ema_decay=0.9",
        *lab.on,
    ]
    norms = [
        str(ROOT / "tests/tasks/buffers.py"),
        "dataset.samples=600",
        "batch_size=12",
        "optim.ema_decay=0.9",
    ]
    plain_too = {} if lab.tiny else {"steps norms": [*norms, *lab.on]}
    return kinds | plain_too | {"steps_in_ddp norms": [*norms, *lab.on]}


def syncs(lab: Lab, facts: Facts) -> None:
    """calls between log points, and in batches of an evaluation, that wait for the device, but for
    those meant to"""
    lab.part("clips few", str(lab.folder / "few"), *FEW)
    for kind, (places, taken, seen) in lab.parts(waiting(lab)).items():
        facts[kind] = f"{len(places)} in {taken} steps"
        require(seen, f"{kind}: one made on purpose was not seen, so none would be")
        require(not places, f"{kind}: {', '.join(sorted(set(places)))}")


def sanitized(lab: Lab, facts: Facts) -> None:
    """no stream reads what another may still write: torch's own CUDA sanitizer, in the loader's
    thread, too"""
    words = [
        *lab.har,
        "amp=bf16",
        "optim.ema_decay=0.9",
        "steps=40",
        "eval_every=20",
        "save_every=15",
        "batch_size=16",
    ]
    calls = {
        f"sanitized_steps {kind}": [*words, kind, f"save_dir={lab.folder / kind}"]
        for kind in CACHED
    }
    for name, seen in lab.parts(calls).items():
        facts[name] = f"no race in {seen} kernels"
        require(seen > 0 or lab.tiny, f"{name}: no kernel was seen")
    if not lab.tiny:  # a race that is made on purpose must be seen, or `no race` says nothing
        name = "planted"
        lab.finish(
            name,
            lab.start(
                name,
                [__file__, "--part", "race", *words, "cache=none", f"save_dir={lab.folder / name}"],
            ),
            1,
        )
        require(
            "CSAN detected a possible data race" in lab.output(name),
            "the race made on purpose was not seen",
        )
        facts["one made on purpose"] = "seen"


def beside_nccl(lab: Lab, facts: Facts) -> None:
    """gloo beside NCCL: objects wait for no GPU; a request is answered with the record of what NCCL
    did"""
    facts |= lab.part("words", str(lab.folder), *lab.on)
    require(facts["the GPU was busy"] or lab.tiny, "an object waited for the GPU")
    require(facts["bytes of NCCL's record"] > 0 or lab.tiny, "torch wrote no record of NCCL")


def shrink(lab: Lab, facts: Facts) -> None:
    """memory runs out on the device: oom=shrink goes on with a smaller batch, as if it had begun
    with that"""
    words = [lab.task("starved", STARVED), *lab.on, *lab.toy[1:3], "global_batch=32", "steps=4"]
    commands = {
        "half a batch": plain(*words, "batch_size=16"),
        "shrunk": plain(*words, "batch_size=32", "oom=shrink"),
    }
    compare(lab, facts, commands, 1e-9)
    require("Started again with" in lab.output("shrunk"), "memory did not run out")


def device_assert(lab: Lab, facts: Facts) -> None:
    """a device-side assert in a group of one: one line and an exit code, and nothing hangs"""
    process = lab.start(
        "asserts", ddp(1, lab.task("asserts", ASSERTS), *lab.on, "steps=99", "ddp.timeout_s=30")
    )
    lab.finish("asserts", process, expected=1)
    errors = [line for line in lab.output("asserts").splitlines() if line.startswith("error: ")]
    facts["it says"] = errors[0].replace(f"{lab.folder}/", "")[:200] if errors else ""
    require(len(errors) == 1, f"{len(errors)} lines of error")


def stall(lab: Lab, facts: Facts) -> None:
    """what a checkpoint keeps a training from: the first and the second one, with room on the
    device and without"""
    few = lab.part("clips few", str(lab.folder / "few"), *FEW)
    video = [
        "video",
        f"dataset.root={few}",
        "dataset.frames=5",
        "batch_size=8",
        f"model.width={4 if lab.tiny else 40}",
    ]
    wide = [
        lab.task("wide", WIDE),
        "dataset.samples=600",
        f"model.width={64 if lab.tiny else 10000}",
    ]
    for name, words in (("video", video), ("200 million parameters", wide)):
        step, *stalls, size = lab.part(f"captures {name}", *words, "optim.ema_decay=0.9", *lab.on)
        beside, instead = (
            f"{first:.2f} ms, then {second:.2f} ms" for first, second in (stalls[:2], stalls[2:])
        )
        facts[name] = (
            f"{step:.2f} ms a step; a copy of {size:.1f} MB {beside}; without room {instead}"
        )


def many_clips(lab: Lab) -> tuple[str, str, list[str]]:
    """Return the frames and the size of many clips, made once for all checks, and the arguments of
    a training."""
    # Not below 32 pixels: in bf16, oneDNN corrupts memory on maps of one pixel where it emulates
    # the instructions.
    trials, times, frames, size = ("60", "2", "5", "32") if lab.tiny else ("240", "21", "17", "256")
    if lab.quick and not lab.tiny:
        times = "8"  # each process reads all of them to the device before its first step
    folder = lab.root / "many"
    if not folder.exists():
        lab.part("clips many", str(folder), trials, "40", frames, size, times)
    return (
        frames,
        size,
        ["video", f"dataset.root={folder}", f"dataset.frames={frames}", f"dataset.size={size}"],
    )


def speed(lab: Lab, facts: Facts) -> None:
    """samples a second of each way to run, one at a time, beside a plain loop and what the device
    could do"""
    width = "4" if lab.tiny else "40"
    frames, size, many = many_clips(lab)
    flop_s, byte_s, flop, traffic, fewest = lab.part("ceiling", frames, size, width, *lab.on)
    facts["bf16 matrix multiplication"] = f"{flop_s / 1e12:.4g} TFLOP/s"
    facts["a copy in memory"] = f"{byte_s / 1e12:.4g} TB/s"
    facts["a clip forward and backward"] = (
        f"{flop / 1e9:.4g} GFLOP, {traffic / 1e6:.4g} MB in and out of its kernels"
    )
    facts["a clip forward and backward"] += f", {fewest / 1e6:.4g} at the fewest"
    for name, words in ways(lab, [*many, f"model.width={width}"]).items():
        if lab.until - time.monotonic() < LEAST_S:
            facts[name] = "left out: no time is left"
            continue
        failed: list[str] = []
        with lab.alone(failed):
            part = "pace_in_ddp" if "in DDP" in name else "pace"
            found = lab.part(f"{part} {name}", "0.1" if lab.tiny else "3", *words)
            rate, limit = found["rate"], found["limit"]
            facts[name] = (
                f"{rate:.0f}/s, {found['ms']:.3f} ms a step of {found['kernels']:.0f} kernels in "
            )
            facts[name] += (
                f"{found['launches']:.0f} launches, {found['memory']:.0f} MB, waits "
                f"{100 * found['waits']:.0f} %"
            )
            facts[name] += (
                f", {100 * rate / limit:.0f} % of a plain loop's {limit:.0f}/s" if limit else ""
            )
            # compiled, its kernels read and write less than those that were counted
            if name.startswith("video"):
                shares = {
                    "of the FLOP/s": flop / flop_s,
                    "of the TB/s, if it moved the fewest bytes": fewest / byte_s,
                }
                shares |= {} if "compile" in name else {"of the TB/s": traffic / byte_s}
                facts[name] += "".join(
                    f", {100 * rate * share:.1f} % {what}" for what, share in shares.items()
                )
        facts |= {f"{name} failed": words for words in failed}
    wrong = [words for name, words in facts.items() if name.endswith(" failed")]
    require(not wrong, "; ".join(wrong))


def ways(lab: Lab, video: list[str]) -> dict[str, list[str]]:
    """Return the arguments of each way to run whose speed is measured, by name: graphs and the
    compiler come first, because there may be no time for all."""
    held, fetched = "cache=device", "cache=none"
    rare = ["eval_every=100000", "save_every=100000", "log_every=50", "drop_last=true", *lab.on]
    video = [*video, "dataset.val_share=0.1", *rare, *["batch_size=8"] * lab.tiny]
    har = ["har", *rare, f"dataset.stride={512 if lab.tiny else 8}", "amp=bf16"]
    flat, conv = [*har, "model.mode=flatten"], [*har, "model.mode=conv"]
    one, last, graph, default = (
        "batch_size=64",
        "memory_format=channels_last",
        "cuda_graph=true",
        "compile=default",
    )
    halves = ["batch_size=32", "global_batch=64"]
    robot = ["robot", "eval.n_episodes=0", "env.demonstrations=60", "amp=bf16", *rare]
    act = ["policy.type=act", "policy.chunk_size=20", "batch_size=8"]
    kinds = {
        "perceptron as a graph": [*flat, one, graph],
        "perceptron, compile as a graph": [*flat, one, graph, default],
        "video, compile": [*video, "amp=bf16", held, default],
        "1D CNN as a graph": [*conv, one, graph],
        "1D CNN, compile as a graph": [*conv, one, graph, default],
        "perceptron of 512 as a graph": [*flat, "batch_size=512", graph],
        f"video, compile {last}": [*video, "amp=bf16", held, default, last],
        "perceptron": [*flat, one],
        "1D CNN": [*conv, one],
        "video": [*video, "amp=bf16", held],
        "perceptron of 512": [*flat, "batch_size=512"],
        "ACT": [*robot, *act],
        "vision-language policy": [*robot, "batch_size=64"],
        "perceptron in two passes": [*flat, *halves],
        "perceptron of two virtual workers": [*flat, *halves, "virtual_workers=2"],
        "perceptron in DDP": [*flat, one],
        "video in fp16": [*video, "amp=fp16", held],
        "video of fetched clips": [*video, "amp=bf16", fetched],
        f"video {last}": [*video, "amp=bf16", held, last],
    }
    tried = ("perceptron in DDP", "perceptron of two virtual workers", "video of fetched clips")
    return {name: kinds[name] for name in tried} if lab.tiny and not lab.quick else kinds


def loader(lab: Lab, facts: Facts) -> None:
    """how much data reaches the device where nothing is trained"""
    words = [*many_clips(lab)[2], "batch_size=16", *lab.on]
    kinds = [["cache=none"], ["cache=host"], ["cache=none", "num_workers=4"], ["cache=device"]]
    for kind in kinds[2:] if lab.tiny else kinds:
        byte_s, rate = lab.part(f"feeds {kind[-1]}", "0.1" if lab.tiny else "4", *words, *kind)
        facts[" ".join(kind)] = f"{byte_s / 1e9:.3g} GB/s, {rate:.0f} clips/s"


def graph(lab: Lab, facts: Facts) -> None:
    """cuda_graph: a step as launches, beside the same step kernel by kernel; alone, with a DDP, in
    processes, and after a record that CUDA refuses"""
    exact = [*lab.har, "amp=off", *lab.deterministic, f"steps={10 if lab.tiny else 50}"]
    flat, passes = [*exact, "model.mode=flatten"], "gradient_accumulation_steps=2"
    half = [word for word in flat if word != "amp=off"]
    graphed = [str(ROOT / "tests/tasks/graphed.py"), *lab.on, "amp=off", *lab.deterministic]
    graphed.append("dataset.samples=57")
    # read by the host amid the record alone; dropout shows whether the generator is whole after it
    once = ["own.kind=read once", "own.after=3", "model.dropout=0.3", "steps=30"]
    kinds = {"conv": plain(*exact, "model.mode=conv"), "refused": plain(*graphed, *once)}
    if not lab.tiny:
        workers = ["virtual_workers=4", "model.dropout=0.3", "ddp.backend=gloo"]
        kinds |= {
            "flatten": plain(*flat),
            "SGD": plain(*flat, "optim.name=sgd", "optim.weight_decay=0.03"),
            "passes": plain(*half, passes, "amp=fp16", "optim.ema_decay=0.99"),
            "group of one": ddp(1, *flat, "optim.grad_clip=0.1"),
            "two processes": ddp(2, *flat, *workers),
        }
    commands = {}
    for kind, words in kinds.items():
        commands |= {kind: [*words, "cuda_graph=false"]}
        commands |= {f"{kind}, launches": [*words, "cuda_graph=true"]}
    runs = lab.train(commands)
    for kind in kinds:
        launches = f"{kind}, launches"
        weigh(facts, {name: runs[name] for name in (kind, launches)})
        wanted = REFUSALS.get(kind, r"a step is (one|\d) launch")
        require(
            lab.tiny or re.search(wanted, lab.output(launches)) is not None,
            f"{launches}: {lines_of_graphs(lab, launches)}",
        )
    places, _, seen = lab.part(
        "steps launches", *lab.har, "amp=bf16", "drop_last=true", "cuda_graph=true"
    )
    require(seen and not places, f"it waits for the GPU: {', '.join(sorted(set(places)))}")


def lines_of_graphs(lab: Lab, name: str) -> str:
    return (
        "; ".join(line for line in lab.output(name).splitlines() if line.startswith("cuda_graph"))
        or "no line"
    )


def strange(lab: Lab, facts: Facts) -> None:
    """cuda_graph: a host that does in a step what a graph would hold as it was: the bits of a step
    kernel by kernel, and a line that says why"""
    words = [str(ROOT / "tests/tasks/strange.py"), *lab.on, *lab.deterministic, "eval_every=10"]
    commands = {}
    for kind in STRANGE[: 1 if lab.tiny else None]:
        exact = plain(*words, f"own.kind={kind}")
        commands |= {kind: [*exact, "cuda_graph=false"]}
        commands |= {f"{kind}, launches": [*exact, "cuda_graph=true"]}
    runs = lab.train(commands)
    failed = []
    for kind in STRANGE[: 1 if lab.tiny else None]:
        launches = f"{kind}, launches"
        try:
            weigh(facts, {name: runs[name] for name in (kind, launches)})
        except Failed as error:
            failed.append(str(error))
        facts[launches] = f"{facts.pop(f'{launches} and {kind}')}; {lines_of_graphs(lab, launches)}"
    require(not failed, "; ".join(failed))


def profiled(lab: Lab, facts: Facts) -> None:
    """--profile: where the time of a step goes, and a trace"""
    words = [*lab.har, "--profile", f"steps={60 if lab.tiny else 120}", "eval_every=1000"]
    run = lab.train({"profiled": plain(*words)})["profiled"]
    require((run / "trace.json").exists(), "there is no trace")
    facts["the trace has kernels of the GPU"] = (
        '"cat": "kernel"' in (run / "trace.json").read_text()
    )
    waits = re.search(r"the GPU waits for the host .*", lab.output("profiled"))
    facts["it says"] = waits[0] if waits else ""
    require(
        lab.tiny or facts["the trace has kernels of the GPU"], "the trace has no kernel of the GPU"
    )
    require(lab.tiny or waits is not None, "no line has the time that the GPU waits")


GROUPS: dict[str, tuple[Callable[[Lab, Facts], None], ...]] = {
    "same": (nccl, amp, norm, cut, cache, virtual, syncs, sanitized, devices, gloo),
    "around": (
        stop,
        data_parallel,
        profiled,
        beside_nccl,
        shrink,
        device_assert,
        stall,
        compiled,
        compiled_bf16,
    ),
    "speed": (graph, strange, speed, loader),
}
"""The parts: the same numbers, and nobody waits; what is around a training, and the compiler;
samples a second."""
LEFT_OUT: dict[str, Any] = {"state": "left out", "seconds": 0.0, "facts": {}}
CHECKS = {check.__name__: check for group in GROUPS.values() for check in group}
# minutes of a C++ compiler; nothing without a GPU
NOT_REHEARSED = ("compiled", "compiled_bf16", "data_parallel", "norm")


# ---- all in a few minutes
# -------------------------------------------------------------------------------------------

# the whole time; of it, what ends processes and writes the results
QUICK_MINUTES, SPARE_S = 4.0, 4.0
SHARES = {"checks": 0.5, "ready": 0.7}
"""The shares of the whole time after which no check runs any more, and the speeds begin with those
that are ready."""

SECONDS = {
    "nccl": 63,
    "sanitized": 50,
    "syncs": 44,
    "amp": 42,
    "virtual": 42,
    "cache": 36,
    "graph": 34,
    "cut": 30,
}
SECONDS |= {
    "stop": 28,
    "profiled": 19,
    "data_parallel": 15,
    "devices": 14,
    "gloo": 13,
    "beside_nccl": 12,
}
SECONDS |= {"device_assert": 9, "shrink": 4}
"""Of a check beside seven others on 16 cores and an H200 (`results/gpu_h200_checks.md`). The
longest begin first, and before them those that are not in this table."""

ALONE = "stall"  # it measures times


def quick_ways(lab: Lab) -> dict[str, list[str]]:
    """Return the arguments of each of WAYS; makes the clips that some of them read."""
    width = "4" if lab.tiny else "40"
    known = ways(lab, [*many_clips(lab)[2], f"model.width={width}"])
    for name in ("perceptron", "1D CNN"):
        known[f"{name} kernel by kernel"] = [*known[name], "cuda_graph=false"]
    if lab.tiny:
        return {name: known[name] for name in ("perceptron", "perceptron in DDP")}
    return {name: known[name] for name in WAYS}


class Results:
    """What has been found so far; written to two files after each addition, if there is a folder
    for them.

    checks    {name: state, seconds and facts}
    speeds    {way to run: {measurement: facts}}
    left_out  what there was no time for
    """

    def __init__(self, argv: list[str], folder: Path, out: str):
        self.argv, self.folder, self.out = argv, folder, out
        self.where: Facts = {}
        self.checks: dict[str, Any] = {}
        self.speeds: dict[str, dict[str, Facts]] = {}
        self.left_out: list[str] = []

    def note_check(self, name: str, check: dict[str, Any]) -> None:
        self.checks[name] = check
        if check["state"] == LEFT_OUT["state"]:
            self.left_out.append(name)
        print(f"{name}: {check['state']} ({check['seconds']:.0f} s) {check['facts']}", flush=True)
        self.write()

    def note_speed(self, turn: Turn, facts: Facts) -> None:
        self.speeds.setdefault(turn.way, {})[turn.measure] = facts
        print(f"{turn.way}, {turn.measure}: {facts}", flush=True)
        self.write()

    def failed(self) -> bool:
        of_speeds = [facts for measures in self.speeds.values() for facts in measures.values()]
        checks_failed = any(check["state"] == "failed" for check in self.checks.values())
        return checks_failed or any("failed" in facts for facts in of_speeds)

    def text(self) -> str:
        lines = [table(self.argv, self.where, self.checks)]
        if self.speeds:
            lines += speeds_table(self.speeds)
        if self.left_out:
            lines += ["", f"Left out, because there was no time: {', '.join(self.left_out)}."]
        return "\n".join(lines).rstrip("\n") + "\n"

    def write(self) -> None:
        if not self.out:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        whole: dict[str, Any] = {"about": self.where, "checks": self.checks}
        if self.speeds:
            whole |= {"speeds": self.speeds}
        if self.left_out:
            whole |= {"left out": self.left_out}
        for name, text in (
            (f"{self.out}.md", self.text()),
            (f"{self.out}.json", json.dumps(whole, indent=1) + "\n"),
        ):
            part = self.folder / f".{name}.part"
            part.write_text(text)
            part.replace(self.folder / name)  # a run that is killed leaves a whole file


def quick(
    root: Path, tiny: bool, names: list[str], results: Results, began: float, end: float
) -> None:
    """Run the checks side by side, then the speeds one at a time, then the check that measures
    times by itself; all is over at time.monotonic() `end`."""
    end -= SPARE_S
    checks_end = began + SHARES["checks"] * (end - began)
    ready_end = began + SHARES["ready"] * (end - began)
    workers = max(2, len(os.sched_getaffinity(0)) // 2)
    labs = {name: new_lab(root / name, tiny) for name in [*names, "speed"]}
    labs["speed"].until = end
    contest = Contest(labs["speed"], warm_up_steps=3 if tiny else 40)
    ways_to_run: dict[str, list[str]] = {}

    def check(name: str) -> Any:
        left_s = checks_end - time.monotonic()
        return (
            LEFT_OUT
            if left_s < min(LEAST_S, SECONDS.get(name, LEAST_S))
            else examine(labs[name], name, checks_end)
        )

    def start_contestants(checks_left: int) -> None:
        """Start those that the compiler keeps busy as soon as their data are there, the others near
        the checks' end."""
        for name, words in ways_to_run.items():
            if name not in contest.processes and ("compile" in name or checks_left <= workers // 2):
                contest.start(name, words)

    beside = sorted(
        (name for name in names if name != ALONE), key=lambda name: -SECONDS.get(name, math.inf)
    )
    jobs: dict[str, Callable[[], Any]] = {"speed": functools.partial(quick_ways, labs["speed"])}
    jobs |= {name: functools.partial(check, name) for name in beside}
    try:
        for name, result in side_by_side(jobs, workers, start_contestants):
            if name != "speed":
                results.note_check(name, result)
            elif isinstance(result, Exception):
                results.note_check(
                    name, {"state": "failed", "seconds": 0.0, "facts": {"failed": str(result)}}
                )
            else:
                ways_to_run |= result
        if time.monotonic() < ready_end:
            start_contestants(0)
            contest.wait_ready(ready_end)
        turns = take_turns(contest, turns_of([*ways_to_run], tiny), end, results.note_speed)
        results.left_out += [f"{turn.way} ({turn.measure})" for turn in turns]
        count_kernels(contest, results, end)
        contest.close()
        if ALONE in names:
            begun = end - time.monotonic() > LEAST_S
            results.note_check(ALONE, examine(labs[ALONE], ALONE, end) if begun else LEFT_OUT)
    finally:
        for lab in labs.values():
            lab.until = -math.inf  # a check that still runs in a thread fails at its next step
            lab.end()
        contest.close()
        results.write()


def count_kernels(contest: Contest, results: Results, end: float) -> None:
    """Count the kernels of all contestants at the same time, because no time is measured."""
    counted = []
    for way, measures in results.speeds.items():
        if "rate" in measures.get("training", {}):
            turn = Turn(way, "kernels", 0.0, TURN_S)
            with contextlib.suppress(Failed):  # it has ended in its last turn, which says why
                contest.order(turn)
                counted.append(turn)
    for turn in counted:
        try:
            results.note_speed(turn, contest.answer(turn, end))
        except Failed as error:
            results.left_out.append(f"{turn.way} (kernels: {error})")


def new_lab(root: Path, tiny: bool) -> Lab:
    """Return a Lab for one check, or for the speeds, in a folder of its own."""
    root.mkdir()
    return Lab(root, tiny, quick=True)


# ---- the report
# --------------------------------------------------------------------------------------------------


def described(name: str) -> str:
    """Return the docstring of a check in one line."""
    return " ".join(str(CHECKS[name].__doc__).split())


def table(argv: list[str], where: Facts, checks: dict[str, Any]) -> str:
    title = (
        "# What was seen on a GPU"
        if where["device"] != "the CPU"
        else "# A rehearsal, without a GPU"
    )
    lines = [title, "", f"`{' '.join(['python benchmarks/gpu_check.py', *argv])}`", ""]
    lines += ["; ".join(f"{name} {value}" for name, value in where.items()), ""]
    lines += ["| check | | s | found |", "|---|---|---:|---|"]
    for name, check in checks.items():
        found = "; ".join(f"{key}: {value}" for key, value in check["facts"].items()).replace(
            "|", "\\|"
        )
        lines.append(
            f"| `{name}`: {described(name)} | {check['state']} | {check['seconds']:.0f} | {found} |"
        )
    return "\n".join(lines) + "\n"


def examine(lab: Lab, name: str, end: float) -> dict[str, Any]:
    """Return the state, the seconds and the facts of a check, which is over at time.monotonic()
    `end` at the latest."""
    facts: Facts = {}
    began = time.monotonic()
    # CPUs are shared with others
    lab.until = min(end, began + LIMITS_S.get(name, LIMIT_S) * (5 if lab.tiny else 1))
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


def started_at() -> float:
    """Return the time.monotonic() at which this process was started: the import of torch takes
    seconds."""
    # since boot, proc(5)
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - min(max(age_s, 0.0), 60.0)  # containers may count from another start


def main(argv: list[str], began: float | None = None) -> int:
    began = time.monotonic() if began is None else began
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parts = f"{' or '.join(GROUPS)} ({PART_MINUTES:g} minutes each)"
    parser.add_argument("--only", default="", help=f"{parts}, or some of {','.join(CHECKS)}")
    parser.add_argument(
        "--quick", action="store_true", help=f"nearly all in {QUICK_MINUTES:g} minutes, on 16 cores"
    )
    parser.add_argument(
        "--minutes", type=float, help="the most that it may take; later checks are cut short"
    )
    parser.add_argument("--out", default="", help="name of the two files")
    parser.add_argument(
        "--folder", type=Path, default=RESULTS, help="where they go, instead of benchmarks/results"
    )
    parser.add_argument("--logs", type=Path, help="a tar.gz for the output of every run")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny; writes nothing")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part:
        return run_part(args.part[0], args.part[1:])
    group = args.only if args.only in GROUPS else ""
    names = chosen(args.only, args.quick, args.rehearse)
    if unknown := set(names) - CHECKS.keys():
        parser.error(f"no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    if args.rehearse:
        print(
            (
                "A rehearsal on the CPU: nothing of it says anything about a GPU, and nothing is "
                "written.\n"
            ),
            flush=True,
        )
    elif not torch.cuda.is_available():
        print(
            "torch sees no GPU here, and all of this is about one (--rehearse: on the CPU)",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu_check_", ignore_cleanup_errors=True) as folder:
        lab = Lab(Path(folder), args.rehearse)
        results = Results(argv, args.folder, args.out)
        try:
            results.where = lab.part("about", *lab.on)
            if args.rehearse:
                results.out = ""
            elif not args.out and (args.quick or group or not args.only):
                hardware = re.sub(
                    r"\W+", "_", results.where["device"].lower().replace("nvidia", "")
                ).strip("_")
                results.out = f"gpu_{hardware}_{'quick' if args.quick else group or 'check'}"
            if args.quick:
                usual = QUICK_MINUTES * (5 if args.rehearse else 1)  # CPUs are shared with others
                quick(
                    Path(folder),
                    args.rehearse,
                    names,
                    results,
                    began,
                    began + 60 * (args.minutes or usual),
                )
            else:
                minutes = args.minutes or (PART_MINUTES if group and not lab.tiny else math.inf)
                one_by_one(lab, names, results, time.monotonic() + 60 * minutes)
        finally:
            lab.end()
            keep_logs(Path(folder), args.logs)
    print("\n" + results.text())
    return int(results.failed())


def keep_logs(root: Path, archive: Path | None) -> None:
    """Write the output of every run below a folder, of those that failed, too."""
    if archive is None:
        return
    with tarfile.open(archive, "w:gz") as tar:
        for log in sorted(root.rglob("*.log")):
            tar.add(log, str(log.relative_to(root)))


def chosen(only: str, quick: bool, rehearse: bool) -> list[str]:
    """Return the names of the checks to run: those of a part, those that are named, or all."""
    if only and only not in GROUPS:
        return only.split(",")
    names = [
        check.__name__ for part, group in GROUPS.items() if only in ("", part) for check in group
    ]
    if quick:  # whose speeds are those of the contest
        names = [name for name in names if name not in ("speed", "loader")]
    return [name for name in names if not (rehearse and name in NOT_REHEARSED)]


def one_by_one(lab: Lab, names: list[str], results: Results, end: float) -> None:
    for name in names:
        begun = end - time.monotonic() > LEAST_S
        results.note_check(name, examine(lab, name, end) if begun else LEFT_OUT)


def run_part(name: str, words: list[str]) -> int:
    """Run a function of PARTS and print its result."""
    if name not in SANITIZED:
        print("RESULT", json.dumps(PARTS[name](*words)), flush=True)
        return 0
    code = 0
    try:
        print("RESULT", json.dumps(PARTS[name](*words)))
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the sanitizer must not be called while the interpreter ends


if __name__ == "__main__":
    # so that running commands are ended, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:], started_at()))
