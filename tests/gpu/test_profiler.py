"""The table of where a step's time goes: with a clock that the test winds, and in real runs."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import TOY, succeed
from fake_run import HAR, run_on_fake_gpu
from runs import same_bits, weights
from torch.autograd import DeviceType

from engine.phases import phase
from plugins.reporting import device_time
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


@pytest.mark.slow
def test_the_profile_changes_nothing(launch, tmp_path):
    for name, more in (("plain", []), ("profiled", ["--profile"])):
        succeed(launch.python("train.py", *WORDS, f"save_dir={tmp_path / name}", *more))
    assert same_bits(weights(tmp_path / "plain"), weights(tmp_path / "profiled"))


@pytest.mark.slow
def test_a_run_that_is_too_short_says_so(launch, tmp_path):
    done = succeed(launch.python("train.py", TOY, "steps=4", f"save_dir={tmp_path}", "--profile"))
    assert "--profile lets 10 steps pass, and this run had 4" in done.out
    for steps in (15, 40):
        run = tmp_path / str(steps)
        done = succeed(launch.python("train.py", *WORDS, f"steps={steps}", f"save_dir={run}", "--profile"))
        assert f"({steps - 10} steps, from the 11th on)" in done.out and not (run / "trace.json").exists()


def event(name, begin, end, device=DeviceType.CUDA, annotation=False):
    """One of torch's profiler, in microseconds."""
    span = SimpleNamespace(start=begin, end=end)
    return SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=annotation)


KERNELS = [
    event("copy", 0, 100), event("gemm", 50, 150), event("norm", 60, 70),  # of several streams
    event("gemm", 300, 400), event("gemm", 400, 430), event("set", 500, 500),
]  # fmt: skip
OF_THE_HOST = [event("forward", 0, 900), event("Optimizer.step#AdamW.step", 0, 900, annotation=True)]
OF_THE_HOST += [event("aten::mm", 0, 900, DeviceType.CPU), event("cudaLaunchKernel", 0, 900, DeviceType.CPU)]


def test_kernels_that_run_at_the_same_time_count_once():
    found = device_time.kernel_intervals([*KERNELS, *OF_THE_HOST], ["forward", "backward"])
    assert len(found) == len(KERNELS), "ranges and the host's events are no work of the GPU"
    assert device_time.covered(found) == 280 != sum(end - begin for begin, end in found)
    assert device_time.covered(reversed(found)) == 280 and device_time.covered([]) == 0


@pytest.fixture
def of_a_run(monkeypatch):
    """Makes a run as far as the advice looks at it; `reason` is why its steps cannot be recorded."""

    def make(reason="", on=None, compile="off", accumulation=1, workers=0, **cfg):
        monkeypatch.setattr(device_time.hooks, "find_conflicts", lambda *_, **__: [reason] if reason else [])
        dataset = SimpleNamespace(in_memory=True, device=torch.device(on)) if on else []
        loaders = SimpleNamespace(train=SimpleNamespace(dataset=dataset))
        plan = SimpleNamespace(compile=compile, accumulation=accumulation, workers=workers, micro_batch=8)
        cfg = SimpleNamespace(**{"cuda_graph": False, "num_workers": 0} | cfg)
        return SimpleNamespace(cfg=cfg, plan=plan, loaders=loaders)

    return make


IDLE, STARVED = device_time.StepTime(3.2, 0.28, 0.1), device_time.StepTime(3.2, 0.28, 2.0)
HELD = {"on": "cuda"}


@pytest.mark.parametrize(
    ("about", "step", "graphs", "advice"),
    [
        (HELD, IDLE, False, "type cuda_graph=true"),
        (HELD, STARVED, False, "type cuda_graph=true"),  # data on the GPU are not waited for
        ({"reason": "an optimizer reads"}, IDLE, False,
         "cuda_graph does not apply, because an optimizer reads; type compile=default"),
        ({"reason": "an optimizer reads", "compile": "default"}, IDLE, False,
         "cuda_graph does not apply, because an optimizer reads; type batch_size=16, which is a different training"),
        ({"reason": "there are two passes", "compile": "default", "accumulation": 2}, IDLE, False,
         "cuda_graph does not apply, because there are two passes; "
         "type batch_size=16 gradient_accumulation_steps=1: the same steps"),
        ({"cuda_graph": "auto"}, IDLE, False,
         "the line `cuda_graph:` of this run has the reason; type compile=default"),
        ({"cuda_graph": True}, IDLE, True,
         "steps are launches of a graph already; type batch_size=16, which is a different training"),
        ({}, STARVED, False, "data loading takes 2.00 ms: type num_workers=4, or cache=device if the GPU has room"),
        ({"num_workers": 3}, STARVED, True,
         "data loading takes 2.00 ms: type num_workers=6, or cache=device if the GPU has room"),
        ({"on": "cpu"}, STARVED, False, "data loading takes 2.00 ms: type cache=device"),
    ],
)  # fmt: skip
def test_what_to_type_depends_on_what_the_gpu_waits_for(of_a_run, about, step, graphs, advice):
    line = device_time.describe_waiting(of_a_run(**about), step, graphs)
    assert line == f"the GPU waits for the host 91 % of a step (kernels 0.28 ms of 3.20 ms): {advice}"


@pytest.mark.parametrize(("kernels", "share"), [(2.4, 25), (3.3, 0)])
def test_a_busy_gpu_is_said_to_be_busy(of_a_run, kernels, share):
    """Kernels under a profiler may take longer than a step without."""
    line = device_time.describe_waiting(of_a_run(), device_time.StepTime(3.2, kernels, 3.0), False)
    measured = f"{share} % of a step (kernels {kernels:.2f} ms of 3.20 ms)"
    assert line == f"the GPU waits for the host {measured}: the kernels take most of the step"


def test_kernels_of_traced_steps_are_compared_with_timed_steps(of_a_run, tmp_path, monkeypatch, clock):
    """Of a GPU whose kernels take 0.28 ms in each of 3 steps; a timed step is 3.2 ms, a traced one 50 ms."""
    spans = [(1e3 * number, kernel.time_range) for number in range(3) for kernel in KERNELS]
    traced = [event("a kernel", later + span.start, later + span.end) for later, span in spans]
    said = []
    monkeypatch.setattr(profiling.console, "info", said.append)
    tracer = SimpleNamespace(events=lambda: [*traced, *OF_THE_HOST], export_chrome_trace=lambda path: None)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profiling.contextlib.nullcontext(tracer))
    monkeypatch.setattr(profiling, "PerformanceProfiler", lambda device: PerformanceProfiler())
    run = of_a_run(**HELD)
    world = SimpleNamespace(device=torch.device("cuda"), main=True, gather=lambda value: [value])
    profile = profiling.Profile(SimpleNamespace(world=world, **vars(run)), tmp_path)
    for number in profile.follow(range(45)):
        phase("forward")
        clock(2.2e-3 if number < profiling.WARM_UP + profiling.TIMED else 50e-3)
        phase("optimizer step")
        clock(1.0e-3)
    assert said[-1] == "  the GPU waits for the host 91 % of a step (kernels 0.28 ms of 3.20 ms): type cuda_graph=true"


@pytest.mark.slow
def test_where_the_profiler_sees_no_kernel_nothing_is_claimed(launch, tmp_path):
    """The GPU that is none has no kernels that torch's profiler knows."""
    done = run_on_fake_gpu(launch, tmp_path / "run", *HAR, "batch_size=8", "steps=45", "--profile")
    assert device_time.NOTHING_SEEN in done.out


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
