"""The table of where a step's time goes: with a clock that the test winds, and in real runs."""

import json

import pytest
from conftest import TOY, succeed
from runs import same_bits, weights

from plugins.reporting import profile as profiling
from plugins.reporting.profile import PerformanceProfiler, Spent, describe

WORDS = [TOY, "epochs=9", "dataset.samples=60", "log_every=2"]  # 45 steps


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `wind` moves."""
    now = [100.0]
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: now[0])

    def wind(seconds):
        now[0] += seconds

    return wind


def test_each_second_belongs_to_one_phase(clock):
    profiler = PerformanceProfiler()

    def batches():
        for number in range(3):
            clock(1.0)
            yield number

    for _ in profiler.steps(batches()):
        with profiler.phase("forward"):
            clock(2.0)
            with profiler.phase("gather"):
                clock(4.0)
            clock(8.0)
        clock(16.0)
    clock(32.0)  # after the loop
    expected = {"data loading": 3.0, "forward": 30.0, "gather": 12.0, "other": 48.0}
    assert {name: spent.host for name, spent in profiler.spent().items()} == expected and profiler.num_steps == 3
    rows = {line.split()[0]: line.split()[-2:] for line in profiler.table().splitlines()}
    assert rows["forward"] == ["10000.000", "32%"] and rows["step"] == ["31000.000", "100%"]


def test_a_phase_that_fails_is_over(clock):
    profiler = PerformanceProfiler()
    with pytest.raises(ZeroDivisionError), profiler.phase("forward"):
        clock(1.0)
        _ = 1 / 0
    clock(5.0)
    assert profiler.spent()["forward"].host == 1.0


def test_several_ranks_are_shown_from_the_lowest_to_the_highest():
    ranks = [{"forward": Spent(0.2, 0.0)}, {"forward": Spent(0.6, 0.0), "backward": Spent(0.2, 0.0)}]
    text = describe(ranks, 2, False, ["forward", "backward"])
    assert "forward            100.000    100%    100.000 - 300.000" in text
    assert "backward             0.000      0%      0.000 - 100.000" in text
    assert "step               100.000    100%    100.000 - 400.000" in text


def rows_of(text):
    """phase -> (ms, share) of the table in what a run has said."""
    lines = text.split("Where the time of a step goes")[1].splitlines()[2:]
    return {line[:18].strip(): line[18:].split()[:2] for line in lines[: len(profiling.PHASES) + 1]}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_says_where_its_time_goes_and_leaves_a_trace(launch, tmp_path, processes):
    run = tmp_path / "run"
    words = [*WORDS, f"save_dir={run}", "batch_size=6", f"gradient_accumulation_steps={3 - processes}", "--profile"]
    done = succeed(launch.torchrun(2, "train.py", *words) if processes == 2 else launch.python("train.py", *words))
    assert "(30 steps, from the 11th on)" in done.out and done.out.count("ms per step") == 1
    rows = rows_of(done.out)
    assert [*rows] == [*profiling.PHASES, "step"]
    parts = [float(rows[name][0]) for name in profiling.PHASES]
    assert sum(parts) == pytest.approx(float(rows["step"][0]), abs=0.01)
    for name in ("data loading", "forward", "backward", "optimizer step", "logging"):
        assert float(rows[name][0]) > 0, name
    assert (float(rows["gradient sync"][0]) > 0) == (processes == 2) and float(rows["host to device"][0]) == 0
    assert ("all ranks" in done.out) == (processes == 2)
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("logging") == names.count("optimizer step") == 3
    assert {"forward", "backward", "data loading", "aten::addmm"} <= {*names}


def test_the_profile_changes_nothing(launch, tmp_path):
    for name, more in (("plain", []), ("profiled", ["--profile"])):
        succeed(launch.python("train.py", *WORDS, f"save_dir={tmp_path / name}", *more))
    assert same_bits(weights(tmp_path / "plain"), weights(tmp_path / "profiled"))


def test_a_run_that_is_too_short_says_so(launch, tmp_path):
    done = succeed(launch.python("train.py", TOY, "steps=4", f"save_dir={tmp_path}", "--profile"))
    assert "--profile lets 10 steps pass, and this run had 4" in done.out
    for steps in (15, 40):
        run = tmp_path / str(steps)
        done = succeed(launch.python("train.py", *WORDS, f"steps={steps}", f"save_dir={run}", "--profile"))
        assert f"({steps - 10} steps, from the 11th on)" in done.out and not (run / "trace.json").exists()


ON_A_GPU = """
import json, time
import torch
from plugins.reporting.profile import PerformanceProfiler
matrix = torch.ones(8192, 8192, device="cuda")
matrix @ matrix  # the first product loads cuBLAS, on the host
torch.cuda.synchronize()
profiler = PerformanceProfiler("cuda")
for _ in profiler.steps(range(3)):
    with profiler.phase("product"):
        for _ in range(20):
            matrix @ matrix
    with profiler.phase("pause"):
        time.sleep(0.01)
print("SPENT", json.dumps(profiler.spent()["product"]))
"""


@pytest.mark.gpu
def test_on_a_gpu_the_device_keeps_its_own_time(launch):
    """The host only launches the products: some microseconds for milliseconds of the GPU."""
    done = succeed(launch.python("-c", ON_A_GPU))
    spent = Spent(*json.loads(done.out.rpartition("SPENT ")[2]))
    assert spent.device > 10 * spent.host
