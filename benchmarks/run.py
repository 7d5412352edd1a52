#!/usr/bin/env python3
"""Compare Lockstep with the usual loops, on the same model and the same arrays, and with the
arithmetic alone.

python benchmarks/run.py
    all workloads, one and two processes
python benchmarks/run.py --only har_flatten --processes 1 --rounds 5
python benchmarks/run.py --check                                  exit code 1 if a bar is missed
python benchmarks/run.py --gpu
    on one GPU, in five minutes: all loops are alive, and one runs at a time (gpu_race.py); writes
    benchmarks/results/gpu_<name of the GPU>_loops.*
python benchmarks/run.py --gpu --processes 1,2                    on GPUs, as on CPUs
ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=AVX2 python benchmarks/run.py
    as if without bf16 and AVX-512

But for the race on one GPU each measurement is a new process (two under torchrun); the contestants
are interleaved, so that other load meets all of them. Ratios are taken within one run. The others
need `pip install -e '.[bench]'`; a missing one is left out and named.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bars
from bars import Bar

ROOT = Path(__file__).resolve().parent.parent
CONTEST = ROOT / "benchmarks" / "contest.py"
RESULTS = ROOT / "benchmarks" / "results"
PLAIN = ROOT / "benchmarks" / "plain"

TIMEOUT_S = 900
"""Seconds until a contestant is taken to hang."""

HIDING = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA")
"""Variables by which a CPU is made to look like an older one."""

PEERS = ["tutorial", "accelerate", "lightning", "fabric", "ignite"]
PACKAGES = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "fabric": "lightning",
    "ignite": "pytorch-ignite",
    "lerobot": "lerobot",
}
MODULES = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "fabric": "lightning",
    "ignite": "ignite",
}

CLASSES, CHANNELS, LENGTH, TRAIN, TEST = 6, 9, 128, 7352, 2947
"""The sizes of UCI HAR."""

WINDOWS = {"samples": TRAIN, "batch_size": 64, "lr": 1e-3, "warmup": 20}
WINDOWS_WORDS = ["dataset.root={arrays}", "augment.enabled=false", "loss.class_weights=none"]
WINDOWS_TASK = ["har", *WINDOWS_WORDS]
WINDOWS_MODEL = {"mean": [0.0] * CHANNELS, "std": [1.0] * CHANNELS, "num_classes": CLASSES}
CLIPS = {"samples": 784, "batch_size": 16, "lr": 2e-3, "warmup": 8, "epochs": 1}
CLIPS_WORDS = [
    *(f"augment.{name}=0" for name in ("shift", "jitter", "brightness")),
    "augment.flip=none",
]
DISCS = {"lr": 1e-3, "warmup": 5, "epochs": 1}
DISCS_TASK = ["robot", "eval.n_episodes=0"]

WORKLOADS: dict[str, dict[str, Any]] = {
    "har_flatten": WINDOWS
    | {
        "about": f"{TRAIN} windows of {CHANNELS} x {LENGTH}, MLP",
        "words": [*WINDOWS_TASK, "model.mode=flatten"],
        "model": ("models.mlp", "MLP", WINDOWS_MODEL | {"length": LENGTH}),
        "epochs": 10,
    },
    "plain_1d": WINDOWS
    | {
        "about": f"{TRAIN} windows of {CHANNELS} x {LENGTH}, three nn.Conv1d",
        "words": [f"{PLAIN}/har.py", *WINDOWS_WORDS],
        "model": (
            "benchmarks.plain.networks",
            "Plain1d",
            {"channels": CHANNELS, "num_classes": CLASSES},
        ),
        "epochs": 3,
    },
    "plain_3d": CLIPS
    | {
        "about": "784 clips of 17 x 64 x 64 uint8, four nn.Conv3d, weighted classes",
        "words": [f"{PLAIN}/video.py", *CLIPS_WORDS],
        "model": ("benchmarks.plain.networks", "Plain3d", {"num_classes": 5}),
    },
    "har_conv": WINDOWS
    | {
        "about": f"{TRAIN} windows of {CHANNELS} x {LENGTH}, 1D CNN",
        "words": [*WINDOWS_TASK, "model.mode=conv", "model.width=32"],
        "model": ("models.conv1d", "Conv1d", WINDOWS_MODEL | {"width": 32}),
        "epochs": 3,
    },
    "video": CLIPS
    | {
        "about": "784 clips of 17 x 64 x 64 uint8, (2+1)D CNN, weighted classes",
        "words": ["video", *CLIPS_WORDS, "model.width=16"],
        "model": ("models.cnn3d", "CNN3d", {"num_classes": 5, "width": 16}),
    },
    "vla": DISCS
    | {
        "about": "simulated demonstrations, flow-matching policy",
        "words": [*DISCS_TASK, "env.demonstrations=240"],
        "samples": 2442,
        "batch_size": 64,
    },
    "act": DISCS
    | {
        "about": "simulated demonstrations, ACT of 11 million parameters",
        "words": [
            *DISCS_TASK,
            "policy.type=act",
            "policy.dim_model=128",
            "policy.dim_feedforward=256",
            "policy.n_encoder_layers=2",
            "policy.chunk_size=20",
            "env.demonstrations=60",
        ],
        "samples": 626,
        "batch_size": 16,
        "lr": 1e-4,
    },
}
"""`words` are Lockstep's arguments; the others use its task. `model` is (module, class, sizes), for
`start`, which does not read the data. `warmup` is in steps, fewer than one epoch has on two
processes."""

BARS = {
    "limit": {
        "har_flatten": 0.85,
        "plain_1d": 0.95,
        "plain_3d": 0.97,
        "har_conv": 0.95,
        "video": 0.97,
    },
    "peer 1": {"har_flatten": 2.0, "plain_1d": 2.2, "plain_3d": 2.2},
    "peer 2": {"har_flatten": 1.5, "plain_1d": 1.5, "plain_3d": 1.5},
    "ddp": {
        "har_flatten": 0.6,
        "plain_1d": 0.95,
        "plain_3d": 0.95,
        "har_conv": 0.95,
        "video": 0.95,
    },
    "start": dict.fromkeys(["har_flatten", "plain_1d", "plain_3d", "har_conv", "video"], 1.3),
}
"""The bars of --check: Lockstep ÷ the best limit; ÷ the best of the others on one and on two
processes; two processes ÷ two independent ones; at most, time to the first step ÷ time to import
torch and build the model. The shipped networks are written to be fast in any loop, so no peer is
held against them."""


def make_arrays(folder: Path, train: int = 0, test: int = 0) -> Path:
    """Write windows of UCI HAR's shape, in which six classes can be told apart, with some errors.

    train, test  number of windows; 0: as many as UCI HAR has
    """
    import numpy as np

    counts = {"train": train or TRAIN, "test": test or TEST}
    folder = folder / f"bench_har_{counts['train']}x{CHANNELS}x{LENGTH}"
    if folder.exists():
        return folder
    beside = folder.with_name(folder.name + f".{os.getpid()}")
    beside.mkdir(parents=True)
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(CLASSES, CHANNELS, 4))
    for part, count in counts.items():
        y = rng.integers(0, CLASSES, count)
        phase, speed = (
            rng.uniform(0, 2 * np.pi, (count, 1, 1)),
            rng.uniform(0.7, 1.3, (count, 1, 1)),
        )
        t = np.arange(LENGTH)[None, :, None] / LENGTH * 2 * np.pi * speed
        waves = np.stack([np.sin((k + 1) * t + phase) for k in range(4)], -1)  # (N, T, 1, 4)
        x = (waves * patterns[y][:, None]).sum(-1) + rng.normal(size=(count, LENGTH, CHANNELS)) * 4
        np.save(beside / f"X_{part}.npy", x.astype(np.float32))
        np.save(beside / f"y_{part}.npy", y)
    beside.rename(folder)
    return folder


def measure(
    name: str, about: dict[str, Any], processes: int, threads: int, gpu: str = ""
) -> dict[str, Any] | None:
    """Run one training by one contestant, on the GPU `gpu` if given; returns its result with the
    total time, or None, after printing the error."""
    contestant = name.split()[0]
    about = about | {"limit": name.split()[1:]}
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        words = [str(CONTEST), contestant, json.dumps(about | {"folder": folder}), str(result)]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        # Without the last each start would compile the project's files again; the others' are, by
        # pip.
        unset = ("MALLOC_", "GLIBC_TUNABLES", "PYTHONDONTWRITEBYTECODE")
        env = {key: value for key, value in os.environ.items() if not key.startswith(unset)}
        # LeRobot may lie in a folder of its own, with a torchvision that breaks the others.
        beside = [env["PYTHONPATH"]] if contestant == "lerobot" and "PYTHONPATH" in env else []
        env |= {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *beside]),
        }
        env |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        began = time.perf_counter()
        with open(log, "w") as file:
            process = subprocess.Popen(
                [sys.executable, *(launcher if processes > 1 else []), *words],
                cwd=folder,
                env=env,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
            try:
                end = f"exit code {process.wait(TIMEOUT_S)}"
            except subprocess.TimeoutExpired:  # one rank may be gone, and the other wait for ever
                end = f"no end after {TIMEOUT_S} s"
                process.terminate()  # torchrun ends its ranks
                process.wait()
        total = time.perf_counter() - began
        if process.returncode or not result.exists():
            print(
                f"  {name} failed ({end}): {log.read_text().strip().splitlines()[-1:]}", flush=True
            )
            return None
        return json.loads(result.read_text()) | {"total_s": total}


def apart(about: dict[str, Any], processes: int, threads: int) -> dict[str, Any] | None:
    """Run independent trainings at the same time: the machine's limit without communication."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(processes) as pool:
        alone = pool.map(lambda n: measure("lockstep", about, 1, threads, str(n)), range(processes))
        each = [one for one in alone if one]
    if len(each) < processes:
        return None
    return each[0] | {"step_ms": statistics.mean(one["step_ms"] for one in each)}


def has_bf16() -> bool:
    """Return whether this CPU has bf16 instructions, as /proc/cpuinfo says, and no variable hides
    them."""
    flags = Path("/proc/cpuinfo")
    return (
        flags.exists()
        and "avx512_bf16" in flags.read_text()
        and not any(name in os.environ for name in HIDING)
    )


def limits(workload: str, everything: bool, bf16: bool) -> list[str]:
    """Return the names of the loops that a workload is held to: `limit`, and how it is made
    fast."""
    found = ["limit allocator"]
    if workload in ("plain_1d", "plain_3d", "video", "har_conv", "act"):
        found.append("limit allocator channels_last")
    if bf16:  # Lockstep takes it by itself: a limit without would be none
        found += [f"{one} bf16" for one in found]
    if everything:
        found += ["limit", *[f"{one} compile" for one in found]]
    return found


def too_short(workload: str, processes: int, epochs: int) -> str:
    """Return why nothing could be timed; empty if there are steps after the warm-up."""
    about = WORKLOADS[workload]
    # Some contestants drop the last, shorter batch of an epoch.
    steps = (epochs or about["epochs"]) * (about["samples"] // (about["batch_size"] * processes))
    if steps > about["warmup"]:
        return ""
    return (
        f"{workload} on {processes} process(es) has {steps} steps, {about['warmup']} to warm "
        "up: raise --epochs"
    )


def compete(
    workload: str, processes: int, args: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    about = json.loads(json.dumps(WORKLOADS[workload]).replace("{arrays}", str(args.arrays)))
    about |= {} if args.gpu else {"cpu": True}
    about["epochs"] = args.epochs or about["epochs"]
    absent = [peer for peer in PEERS if peer in MODULES and not find_spec(MODULES[peer])]
    if absent:
        print(f"not installed, left out: {', '.join(absent)} (pip install -e '.[bench]')")
    names = [
        "lockstep",
        *[peer for peer in PEERS if peer not in absent],
        *limits(workload, args.limits, args.gpu or has_bf16()),
    ]
    names += ["lerobot"] if workload == "act" and find_spec("lerobot") else []
    names += ["apart"] if processes > 1 else ["start"] if workload in BARS["start"] else []
    if args.contestants:
        names = [name for name in names if name in args.contestants.split(",")]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(args.rounds):
        turn = names[number % len(names) :] + names[: number % len(names)]
        for name in turn:
            one = (
                apart(about, processes, args.threads)
                if name == "apart"
                else measure(name, about, processes, args.threads)
            )
            if one:
                results[name].append(one | {"round": number})
                pace = (
                    f"{one['step_ms']:8.2f} ms a step, {one['cpu_step_ms']:8.2f} of CPU, "
                    if "step_ms" in one
                    else ""
                )
                print(
                    f"  {workload} x{processes} round {number + 1} {name:30} {pace}first after "
                    f"{one['first_step_s']:5.1f} s, whole {one['total_s']:5.1f} s, "
                    f"{one['peak_mb']:5.0f} MB",
                    flush=True,
                )
    return {name: values for name, values in results.items() if values}


def middle(values: list[dict[str, Any]], key: str) -> float:
    return statistics.median(value[key] for value in values)


def spread(values: list[dict[str, Any]], key: str) -> str:
    numbers = sorted(value[key] for value in values)
    return f"{numbers[0]:.2f} .. {numbers[-1]:.2f}"


def ratio(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], key: str) -> float:
    """Return our speed-up: the median of the ratios within each round."""
    rounds = {our["round"]: our for our in ours}
    pairs = [(rounds[their["round"]], their) for their in theirs if their["round"] in rounds]
    return (
        statistics.median(their[key] / our[key] for our, their in pairs) if pairs else float("nan")
    )


def closest(ours: list[dict[str, Any]], others: list[list[dict[str, Any]]], key: str) -> float:
    """Return the ratio to the best of the others; NaN if one shares no round with us, because it
    may be the best."""
    return min((ratio(ours, theirs, key) for theirs in others), key=lambda one: (one == one, one))


def table(
    workload: str, processes: int, results: dict[str, list[dict[str, Any]]], batch: int
) -> list[str]:
    ours = results.get("lockstep")
    lines = [
        (
            f"## {workload}: {WORKLOADS[workload]['about']}; {processes} "
            f"process{'es' if processes > 1 else ''} of {batch}"
        ),
        "",
        "| | samples/s | ms a step (range) | CPU ms a step | Lockstep is faster by | of CPU time "
        "| first step "
        "| whole job | peak MB | accuracy | |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, values in results.items():
        cells = [name, "", "", "", "", ""]
        if "step_ms" in values[0]:
            step = middle(values, "step_ms")
            rates = [
                f"{ratio(ours, values, key):.2f}" if ours else ""
                for key in ("step_ms", "cpu_step_ms")
            ]
            pace = [
                f"{1e3 * batch * processes / step:,.0f}",
                f"{step:.2f} ({spread(values, 'step_ms')})",
            ]
            cells = [name, *pace, f"{middle(values, 'cpu_step_ms'):.2f}", *rates]
        cells += [f"{middle(values, key):.1f} s" for key in ("first_step_s", "total_s")]
        cells += [f"{middle(values, 'peak_mb'):.0f}"]
        cells += [
            f"{middle(values, 'accuracy'):.4f}" if "accuracy" in values[0] else "",
            values[0].get("note", ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *parts(results)]


def parts(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return a table of the milliseconds of a step in each phase, of Lockstep and of the loops it
    is held to."""
    spent = {name: values for name, values in results.items() if values[0].get("parts_ms")}
    phases = dict.fromkeys(
        phase for values in spent.values() for one in values for phase in one["parts_ms"]
    )
    rows = [
        [
            phase,
            *(
                statistics.median(one["parts_ms"].get(phase, 0.0) for one in values)
                for values in spent.values()
            ),
        ]
        for phase in phases
    ]
    rows = [[phase, *(f"{ms:.3f}" for ms in row)] for phase, *row in rows if max(row) >= 0.0005]
    heads = [["ms of a step in", *spent], ["---", *["---:"] * len(spent)]]
    return [f"| {' | '.join(cells)} |" for cells in heads + rows] + [""] if rows else []


def verdicts(workload: str, processes: int, results: dict[str, list[dict[str, Any]]]) -> list[Bar]:
    """Return the bars that these results can be held to."""
    ours, found, where = results.get("lockstep"), [], f"{workload}, {processes} process(es)"
    if not ours:
        return []
    fastest = [values for name, values in results.items() if name.startswith("limit")]
    peers = [values for name, values in results.items() if name in PEERS]
    if fastest and processes == 1 and workload in BARS["limit"]:
        got = closest(ours, fastest, "step_ms")
        found.append(Bar(f"{workload}: Lockstep / the best limit", got, BARS["limit"][workload]))
    if peers and workload in BARS.get(f"peer {processes}", {}):
        got = closest(ours, peers, "step_ms")
        found.append(
            Bar(
                f"{where}: Lockstep / the best of the others",
                got,
                BARS[f"peer {processes}"][workload],
            )
        )
    if peers:
        got = closest(ours, peers, "total_s")
        found.append(Bar(f"{where}: whole job, the fastest other / Lockstep", got, 1.0))
    if "apart" in results and workload in BARS["ddp"]:
        got = ratio(ours, results["apart"], "step_ms")
        found.append(
            Bar(f"{workload}: two processes of DDP / two apart", got, BARS["ddp"][workload])
        )
    if "tutorial" in results:
        got = ratio(ours, results["tutorial"], "peak_mb")
        found.append(Bar(f"{where}: peak memory, the tutorial loop's / Lockstep's", got, 1.0))
    if "start" in results and workload in BARS["start"]:
        got = ratio(results["start"], ours, "first_step_s")
        what = f"{workload}, start: first step / importing torch and building the model"
        found.append(Bar(what, got, BARS["start"][workload], at_most=True))
    return found


def surroundings(args: argparse.Namespace) -> dict[str, Any]:
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    dirty = subprocess.run(
        [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True
    ).stdout.strip()
    import torch

    versions = {"torch": str(torch.__version__)}  # of the package, PyPI's lacks `+cu130`
    for package in dict.fromkeys(PACKAGES.values()):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next(
        (
            line.split(":")[1].strip()
            for line in flags.splitlines()
            if line.startswith("model name")
        ),
        "?",
    )
    device = (
        f"{os.cpu_count()} cores of {model}{'' if has_bf16() else ' without bf16 instructions'}"
    )
    if args.gpu:
        device = torch.cuda.get_device_name()
    return {
        "commit": commit + (" and changes" if dirty else ""),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": versions,
        "device": device,
        "threads": args.threads,
        "rounds": args.rounds,
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--only",
        default="",
        help=f"of {', '.join(WORKLOADS)}; with --gpu of perceptron, Conv1d, Conv3d, ACT, vla",
    )
    parser.add_argument("--processes", default="", help="default: 1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=0, help="instead of each workload's own")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each process")
    parser.add_argument("--contestants", default="", help="only these, separated by commas")
    parser.add_argument(
        "--limits", action="store_true", help="more limits: compiled, without the allocator"
    )
    parser.add_argument("--gpu", action="store_true", help="on one GPU, in five minutes")
    parser.add_argument("--minutes", type=float, help="with --gpu: the most that it may take")
    parser.add_argument("--logs", type=Path, help="with --gpu: a tar.gz for what the loops print")
    parser.add_argument(
        "--rehearse", action="store_true", help="with --gpu: tiny, where there is no GPU, too"
    )
    parser.add_argument(
        "--out", default="", help="name of the two files in benchmarks/results; empty: print only"
    )
    parser.add_argument("--check", action="store_true", help="exit code 1 where a bar is missed")
    args = parser.parse_args()
    if args.gpu and not args.processes:
        import gpu_race

        return gpu_race.main(sys.argv[1:], args, began)
    races = [
        (workload, int(processes))
        for workload in (args.only or ",".join(BARS["limit"])).split(",")
        for processes in (args.processes or "1,2").split(",")
    ]
    if short := [words for race in races if (words := too_short(*race, args.epochs))]:
        parser.exit(2, f"error: {'; '.join(short)}\n")
    args.arrays = make_arrays(ROOT / "data" / "generated")
    about = surroundings(args)
    lines = [
        "# Lockstep beside others",
        "",
        f"`{''.join(f'{name}={os.environ[name]} ' for name in HIDING if name in os.environ)}"
        f"python benchmarks/run.py {' '.join(sys.argv[1:])}`",
        "",
        f"Commit {about['commit']}, {about['date']}; {about['device']}; Python {about['python']}; "
        + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        + f"; {args.threads} thread(s) per process; medians of {args.rounds} interleaved rounds; "
        f"load {about['load']} "
        "at the start. Read the ratios: they are medians of the ratios within a round.",
        "",
    ]
    results, found = {}, []
    for workload, processes in races:
        one = results[f"{workload} x{processes}"] = compete(workload, processes, args)
        lines += table(workload, processes, one, WORKLOADS[workload]["batch_size"])
        found += verdicts(workload, processes, one)
    lines += bars.table(found)
    print("\n".join(lines))
    if args.out:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{args.out}.md").write_text("\n".join(lines) + "\n")
        (RESULTS / f"{args.out}.json").write_text(
            json.dumps({"about": about, "results": results}, indent=1) + "\n"
        )
    return bars.exit_code(found) if args.check else 0


if __name__ == "__main__":
    sys.exit(main())
