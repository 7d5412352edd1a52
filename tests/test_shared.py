"""Sums through shared memory: the right numbers, in the order of the ranks, and gloo where it cannot be."""

import json
import platform
import sys

import pytest
import torch
from conftest import FAULTY, ROOT, TOY, succeed

SUMS = str(ROOT / "tests" / "ranks" / "sums.py")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="sums through shared memory are for Linux on x86"
)


@pytest.mark.parametrize("processes", [2, 3])
def test_sums_are_those_of_the_ranks_in_order(launch, processes):
    assert "shared" in succeed(launch.torchrun(processes, SUMS, "right")).out


@pytest.mark.parametrize("what", ["of other sizes", "too late"])
def test_what_does_not_fit_is_an_error(launch, what):
    succeed(launch.torchrun(2, SUMS, what))


@pytest.mark.parametrize("words", ["right ddp.backend=gloo", "no_room", "forbidden", "not_all"])
def test_gloo_where_one_wants_it_or_memory_is_not_to_be_had(launch, words):
    assert "gloo" in succeed(launch.torchrun(2, SUMS, *words.split())).out


@pytest.mark.slow
def test_both_ways_train_the_same(launch, tmp_path):
    states = {}
    for backend in ("auto", "gloo"):
        words = [TOY, "steps=14", "gradient_accumulation_steps=2", "batch_size=3", f"ddp.backend={backend}"]
        done = succeed(launch.torchrun(2, "train_ddp.py", *words, f"save_dir={tmp_path / backend}"))
        assert ("sums through shared memory" in done.out) is (backend == "auto")
        states[backend] = torch.load(tmp_path / backend / "last.pt", weights_only=True)
    for name, weight in states["gloo"]["model"].items():
        assert torch.equal(weight, states["auto"]["model"][name]), name


@pytest.mark.slow
def test_a_static_graph_is_the_same_and_has_no_accumulation(launch, tmp_path):
    common = [TOY, "steps=14", "batch_size=6"]
    for how in ("true", "false"):
        words = [*common, f"ddp.static_graph={how}", f"save_dir={tmp_path / how}"]
        succeed(launch.torchrun(2, "train_ddp.py", *words))
    first, second = (torch.load(tmp_path / how / "last.pt", weights_only=True)["model"] for how in ("true", "false"))
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
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
    straight, *stopped = (torch.load(tmp_path / run / "last.pt", weights_only=True) for run in ("straight", "0", "1"))
    for name, weight in straight["model"].items():
        assert all(torch.equal(weight, other["model"][name]) for other in stopped), name
