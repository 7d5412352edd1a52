#!/usr/bin/env python3
"""Hold the prediction of tools/benchmark.py for ddp, fsdp and hsdp against two hosts with a slow
cable.

python benchmarks/cable.py                              100, 400 and 1600 Mbit/s
python benchmarks/cable.py --rates 200 --rounds 5

The hosts are Linux namespaces (tests/kit/hosts.py: root or user namespaces, iproute2), two
processes on each; `tc` rations the cable, and adds no latency. A step of a perceptron is taken by
torch's own DDP and `fully_shard`. What it computes, and what `fully_shard` copies, is measured by
the same four processes side by side, each for itself, because they share this machine's cores; the
link inside a host by sums within it; the bytes by the kernel's counters. Prints markdown."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kit"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from hosts import CABLE, two_hosts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tools.machine import scaling
from tools.machine.benchmark import Case, predicted
from tools.machine.probe import time_sum

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES, WIDTH, BLOCKS, BATCH = ("ddp", "fsdp", "hsdp"), 512, 4, 256
LATENCY_S = 300e-6
"""Of a message of gloo's between two hosts of this kind."""


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x).square().sum()


def network(strategy: str, machines: int) -> nn.Module:
    torch.manual_seed(0)
    model, ranks = Perceptron(), dist.get_world_size()
    if strategy == "alone":
        return model
    if strategy == "ddp":
        return DistributedDataParallel(model)
    copies = {"fsdp": 1, "hsdp": machines, "apart": ranks}[strategy]
    mesh = init_device_mesh("cpu", (copies, ranks // copies), mesh_dim_names=("copy", "shard"))
    for module in (*model.blocks, model):  # as plugins/parallel/fsdp.py does
        fully_shard(
            module, mesh=mesh if strategy == "hsdp" else mesh["shard"], reshard_after_forward=True
        )
    return model


def sent() -> int:
    """Return the bytes that this host has sent through its cable."""
    return int(Path("/proc/net/dev").read_text().partition(f"{CABLE}:")[2].split()[8])


def work(out: str, rounds: int, steps: int) -> None:
    """(all ranks) Time the strategies by turns; the first process writes what it found."""
    dist.init_process_group("gloo")
    machines, rank = int(os.environ["GROUP_WORLD_SIZE"]), dist.get_rank()
    own = [dist.new_group([2 * host, 2 * host + 1]) for host in range(machines)][rank // 2]
    sums = {1 << power: 1e3 * time_inside(own, 1 << power) for power in range(10, 25, 2)}
    nets = {name: network(name, machines) for name in ("alone", "apart", *STRATEGIES)}
    x, model = torch.randn(BATCH, WIDTH), Perceptron()
    # (forward, backward) of a step, in seconds
    times: dict[str, list[list[float]]] = {name: [] for name in nets}
    crossing: dict[str, list[float]] = {name: [] for name in nets}
    for _ in range(rounds + 1):  # the first one connects
        for name, net in nets.items():
            dist.barrier()
            before, spent = sent(), [0.0, 0.0]
            for _ in range(steps):
                marks = [time.perf_counter()]
                loss = net(x)
                marks.append(time.perf_counter())
                loss.backward()
                marks.append(time.perf_counter())
                spent = [spent[0] + marks[1] - marks[0], spent[1] + marks[2] - marks[1]]
            dist.barrier()
            times[name].append([part / steps for part in spent])
            crossing[name].append((sent() - before) / steps)
    if rank == 0:
        found = {"times": {name: rows[1:] for name, rows in times.items()}, "sums": sums}
        found["crossing"] = {name: statistics.median(rows[1:]) for name, rows in crossing.items()}
        sizes = [
            sum(p.nbytes for p in module.parameters()) / 1e6
            for module in (model.head, *model.blocks)
        ]
        Path(out).write_text(json.dumps(found | {"units_mb": [(size, size) for size in sizes]}))
    dist.barrier()


def time_inside(group: Any, count: int) -> float:
    """(all ranks) Return the seconds of a sum of `count` bytes within this host."""

    class Here:
        size, device = 2, torch.device("cpu")

    return time_sum(Here, count, group)  # type: ignore[arg-type]


def measured(mbit: int, rounds: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, two_hosts(rate=f"{mbit}mbit") as hosts:
        out = Path(folder) / "found.json"
        meet = [
            "--nnodes=2",
            "--nproc_per_node=2",
            f"--master_addr={hosts[0].address}",
            "--master_port=29500",
        ]
        settings = ["env", f"GLOO_SOCKET_IFNAME={CABLE}", "OMP_NUM_THREADS=1", sys.executable]
        words = [__file__, "--work", str(out), "--rounds", str(rounds), "--steps", str(steps)]
        agent = [*settings, str(ROOT / "plugins" / "resilience" / "agent.py"), *meet]
        runs = [
            subprocess.Popen([*host.enter, *agent, f"--node_rank={node}", *words])
            for node, host in enumerate(hosts)
        ]
        codes = [run.wait() for run in runs]
        assert codes == [0, 0], codes
        return json.loads(out.read_text())


def rows(mbit: int, found: dict[str, Any]) -> list[str]:
    """Return the predicted step beside the measured one, a line for each strategy."""
    inside = scaling.fit(2, {int(size): 1e-3 * each for size, each in found["sums"].items()})
    lines = []
    for name in STRATEGIES:
        base = found["times"]["alone" if name == "ddp" else "apart"]
        forward, backward = (statistics.median(part) for part in zip(*base, strict=True))
        alone = Case("weak", 1, {})
        alone.found.append(
            {
                "step_ms": 1e3 * (forward + backward),
                "samples_per_s": BATCH / (forward + backward),
                "phases_ms": {"forward": forward, "backward": backward},
                "gradients_mb": sum(gradients for _, gradients in found["units_mb"]),
                "units_mb": found["units_mb"],
                "bucket_cap_mb": 25,
                "accumulation": 1,
                "reduce_every": 1,
                "device": "cpu",
            }
        )
        prediction = predicted(
            [alone], 4, scaling.Link(LATENCY_S, mbit * 1e6 / 8), machines=2, inside=inside
        )
        row = next(row for row in prediction["strategies"] if row["strategy"] == name)
        each = [1e3 * sum(pair) for pair in found["times"][name]]
        lines.append(
            f"| {mbit} | {name} | {row['cable_mb']:.2f} | {1e-6 * found['crossing'][name]:.2f} "
            f"| {1e3 * (forward + backward):.0f} | {row['step_ms']:.0f} "
            f"| {statistics.median(each):.0f} ({min(each):.0f} - {max(each):.0f}) "
            f"| {row['step_ms'] / statistics.median(each):.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="100,400,1600")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work, options.rounds, options.steps)
    cores = len(os.sched_getaffinity(0))
    print(
        f"{platform.machine()}, {cores} cores, torch {torch.__version__}: four processes on two "
        "hosts\n"
    )
    print(
        "| Mbit/s | strategy | cable MB, predicted | counted | compute ms | step ms, predicted | "
        "measured | ratio |"
    )
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    for mbit in map(int, options.rates.split(",")):
        print(*rows(mbit, measured(mbit, options.rounds, options.steps)), sep="\n", flush=True)


if __name__ == "__main__":
    main()
