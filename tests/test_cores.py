"""Which cores a process keeps to, on machines that this one is not: a folder stands in for /sys."""

import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TOY, succeed

from engine import cores

MINE = sorted(os.sched_getaffinity(0))
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

needs_two = pytest.mark.skipif(len(MINE) < 2, reason="with one core there is nothing to share out")


def system(folder, lists, gpu_nodes=()):
    for node, text in enumerate(lists):
        path = folder / f"devices/system/node/node{node}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(text + "\n")
    for gpu, node in enumerate(gpu_nodes):
        path = folder / f"bus/pci/devices/0000:{0x3B + gpu:02x}:00.0"
        path.mkdir(parents=True)
        (path / "numa_node").write_text(f"{node}\n")
    return folder


def _bound(pipe, sys, device, rank, size):
    cores.SYS = sys
    torch.cuda.device_count = lambda: 2
    torch.cuda.get_device_properties = lambda gpu: SimpleNamespace(
        pci_domain_id=0, pci_bus_id=0x3B + gpu.index, pci_device_id=0
    )
    try:
        pipe.send((cores.bind(device, rank, size), sorted(os.sched_getaffinity(0))))
    except Exception as error:
        pipe.send(error)


def bound(sys, device, rank, size):
    """(what `bind` says, the cores) of a process of its own."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_bound, args=(there, sys, device, rank, size))
    child.start()
    assert here.poll(60)
    child.join()
    return here.recv()


def halves():
    middle = len(MINE) // 2
    return MINE[:middle], MINE[middle:]


@needs_two
def test_cpu_processes_are_shared_out_among_the_nodes(tmp_path):
    low, high = halves()
    sys = system(tmp_path, [",".join(map(str, low)), ",".join(map(str, high)), ""])  # the third has memory only
    assert [bound(sys, CPU, rank, 4) for rank in range(4)] == [
        ("NUMA node 0", low), ("NUMA node 0", low), ("NUMA node 1", high), ("NUMA node 1", high)
    ]  # fmt: skip
    assert bound(sys, CPU, 0, 3) == ("", MINE), "three on two nodes would not come out even"
    assert bound(sys, CPU, 0, 0) == ("", MINE), "nobody has said how many there are"
    assert bound(sys, CPU, 4, 4) == ("", MINE), "a LOCAL_WORLD_SIZE that is not of this launch"


@needs_two
def test_a_process_stays_beside_its_gpu(tmp_path):
    low, high = halves()
    lists = [",".join(map(str, low)), ",".join(map(str, high))]
    apart = system(tmp_path / "a", lists, [1, 0])
    assert bound(apart, GPU, 0, 2) == ("NUMA node 1, beside the GPU", high)
    assert bound(apart, GPU, 1, 2) == ("NUMA node 0, beside the GPU", low)
    assert bound(apart, GPU, 0, 1) == ("", MINE), "one process has the whole machine"
    assert bound(system(tmp_path / "b", lists, [1, 1]), GPU, 0, 2) == ("", MINE), "or half the cores would be idle"
    assert bound(system(tmp_path / "c", lists, [-1, -1]), GPU, 0, 2) == ("", MINE), "-1: the system doesn't know"
    assert bound(system(tmp_path / "d", lists), GPU, 0, 2) == ("", MINE), "no such card, as in a virtual machine"


@needs_two
def test_one_node_or_somebody_else_s_choice_is_left_alone(tmp_path):
    assert bound(system(tmp_path / "one", [f"{MINE[0]}-{MINE[-1]}"]), CPU, 0, 2) == ("", MINE)
    more = [str(MINE[0]), f"{MINE[1]},{MINE[-1] + 1}-{MINE[-1] + 4}"]  # of which this process may not use all
    assert bound(system(tmp_path / "chosen", more), CPU, 0, 2) == ("", MINE)
    assert bound(tmp_path / "nothing", CPU, 0, 2) == ("", MINE)


@needs_two
def test_a_launch_keeps_each_process_to_its_cores_and_says_so(launch, tmp_path):
    low, high = halves()
    sys = system(tmp_path / "sys", [",".join(map(str, low)), ",".join(map(str, high))])
    task = tmp_path / "task.py"
    task.write_text(
        f"""
import os, pathlib, sys
sys.path.insert(0, {str(Path(TOY).parent)!r})
import toy
from engine import cores
cores.SYS = pathlib.Path({str(sys)!r})
class Task(toy.Task):
    def model(self):
        print(f"rank {{os.environ.get('RANK')}} on {{sorted(os.sched_getaffinity(0))}}", flush=True)
        return super().model()
"""
    )
    done = succeed(launch.torchrun(2, "train_ddp.py", str(task), "steps=2", f"save_dir={tmp_path / 'run'}"))
    assert f"rank 0 on {low}" in done.out and f"rank 1 on {high}" in done.out
    assert "on the cores of NUMA node 0" in done.out
    words = ["train_ddp.py", str(task), "steps=2", "ddp.bind_cores=false", f"save_dir={tmp_path / 'free'}"]
    done = succeed(launch.torchrun(2, *words))
    assert f"rank 1 on {MINE}" in done.out and "NUMA" not in done.out
    done = succeed(launch.python("train.py", str(task), "steps=2", f"save_dir={tmp_path / 'alone'}"))
    assert f"rank None on {MINE}" in done.out, "one process has the whole machine"


def test_lists_of_cores():
    assert cores._numbers("0-3,8, 10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert cores._numbers("\n") == set()
