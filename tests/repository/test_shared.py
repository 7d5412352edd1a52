"""Sums through shared memory: the right numbers, in the order of the ranks, and gloo where it cannot be."""

import json
import platform
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import FAULTY, ROOT, TOY, succeed
from runs import same_bits, weights

from plugins.performance import shm_backend

SUMS = str(ROOT / "tests" / "ranks" / "sums.py")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="sums through shared memory are for Linux on x86"
)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("case", ["right", "ddp"])
def test_sums_in_the_order_of_the_ranks_and_all_other_collectives(launch, case, processes):
    """Alone, and from DDP with and without hooks."""
    assert "shared" in succeed(launch.torchrun(processes, SUMS, case)).out


@pytest.mark.slow
@pytest.mark.parametrize("what", ["different", "late", "gone"])
def test_what_goes_wrong_is_said_in_the_same_words_from_within_ddp(launch, what):
    succeed(launch.torchrun(2, SUMS, what))


@pytest.mark.slow
@pytest.mark.parametrize("why", ["no_room", "forbidden", "one_cannot", "elsewhere", "other_user"])
def test_gloo_where_memory_cannot_be_shared(launch, why):
    assert "gloo" in succeed(launch.torchrun(2, SUMS, why)).out


def test_torch_has_what_the_backend_is_made_of():
    """If this fails after an update of torch, read `plugins/performance/shm_backend.py` and PyProcessGroup.hpp anew."""
    assert callable(dist.ProcessGroup._register_backend)
    header = Path(torch.__file__).parent / "include" / "torch/csrc/distributed/c10d/PyProcessGroup.hpp"
    asked_in_python = set(re.findall(r"intrusive_ptr<Work> (\w+)\(", header.read_text()))
    assert {"allreduce", "broadcast"} <= asked_in_python <= vars(shm_backend.SharedMemoryGroup).keys()


@pytest.mark.slow
def test_both_ways_train_the_same(launch, tmp_path):
    for backend in ("auto", "gloo"):
        words = [TOY, "steps=14", "gradient_accumulation_steps=2", "batch_size=3", f"ddp.backend={backend}"]
        done = succeed(launch.torchrun(2, "train_ddp.py", *words, f"save_dir={tmp_path / backend}"))
        assert ("sums through shared memory" in done.out) is (backend == "auto")
    assert same_bits(weights(tmp_path / "auto"), weights(tmp_path / "gloo"))


@pytest.mark.slow
def test_a_static_graph_is_the_same_and_has_no_accumulation(launch, tmp_path):
    for how in ("true", "false"):
        words = [TOY, "steps=14", "batch_size=6", f"ddp.static_graph={how}", f"save_dir={tmp_path / how}"]
        succeed(launch.torchrun(2, "train_ddp.py", *words))
    assert same_bits(weights(tmp_path / "true"), weights(tmp_path / "false"))
    words = [TOY, "ddp.static_graph=true", "gradient_accumulation_steps=2", f"save_dir={tmp_path / 'no'}"]
    done = launch.launcher(2, *words)
    assert done.code == 2 and "DDP's no_sync() rules it out" in done.errors[0] and not (tmp_path / "no").exists()


@pytest.mark.slow
def test_stopped_on_three_processes_equals_straight(launch, tmp_path):
    """To the last bit, although DDP makes its buckets anew in each process: here many small ones."""
    common = [FAULTY, "epochs=2", "batch_size=4", "model.width=300", "ddp.bucket_cap_mb=0.003", "log_every=3"]
    variants = [["fault.kind=term", f"fault.step={n}", "fault.rank=2"] for n in (1, 4)]
    stops = str(ROOT / "tests" / "ranks" / "stops.py")
    done = succeed(launch.torchrun(3, stops, str(tmp_path), json.dumps(common), json.dumps(variants)))
    starts = dict(line.split()[1:] for line in done.out.splitlines() if line.startswith("STARTS"))
    assert int(starts["0"]) > 5 and int(starts["1"]) > 1, starts
    straight, *stopped = (weights(tmp_path / run) for run in ("straight", "0", "1"))
    assert all(same_bits(straight, each) for each in stopped)
