"""The facts behind speed that can be counted: page faults, layouts, operations. Times are for benchmarks/."""

import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TOY, succeed
from runs import weights
from torch import nn

import tasks
from engine import config, kernels, plan
from engine.comm.world import World
from engine.errors import LockstepError
from models import layers as model_layers
from plugins.performance import compiler

sys.path.insert(0, str(ROOT / "benchmarks"))
import bars
import contest
import run as benchmark

from tests.tasks import toy

FAULTS = """
import resource, sys, torch
from plugins.performance import memory
if sys.argv[1] == "keep":
    assert memory.keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):  # it takes up to eight until the heap has grown to what fits
    torch.ones(10_000_000).sum()
before = faults()
for _ in range(10):
    torch.ones(10_000_000).sum()
print(faults() - before)
"""


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_kept_memory_costs_no_page_faults(launch):
    """Ten times 40 MB: 10 thousand pages of 4 kB each, or 20 large ones, again and again; or none."""
    given_back, kept = (int(succeed(launch.python("-c", FAULTS, how)).out) for how in ("system", "keep"))
    assert given_back > 150 and kept < given_back / 10


def test_the_arithmetic_says_what_was_chosen(launch, tmp_path):
    done = succeed(launch.python("train.py", TOY, "--dry-run"))
    assert "freed memory is kept" in done.out and "convolutions" not in done.out
    done = succeed(launch.python("train.py", TOY, "--dry-run", "allocator=system"))
    assert "freed memory is kept" not in done.out


def network():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv3d(2, 4, 1), nn.ReLU(), nn.Flatten(1, 2))
    return nn.Sequential(*first, nn.Conv2d(20, 3, 3), nn.Flatten())


def test_layouts_change_no_number():
    usual, last = network(), network()
    kernels.apply_memory_format(last, "channels_last")
    assert last[5].weight.is_contiguous(memory_format=torch.channels_last) and not last[5].weight.is_contiguous()
    # Kernels of one channel, or one pixel, are contiguous in either order; by their strides torch chooses the output's.
    assert (last[0].weight.stride(), last[2].weight.stride()) == ((27, 1, 9, 3, 1), (2, 1, 2, 2, 2))
    x = torch.randn(2, 1, 5, 6, 7)
    assert last[0](x).is_contiguous(memory_format=torch.channels_last_3d) and usual[0](x).is_contiguous()
    torch.testing.assert_close(last(x), usual(x))
    for name, value in usual.state_dict().items():
        assert torch.equal(last.state_dict()[name], value)
    usual.load_state_dict(last.state_dict())
    assert usual[0].weight.is_contiguous(), "a checkpoint brings no layout with it"
    assert kernels.apply_memory_format(last, "contiguous")[0].weight.is_contiguous()


def network_1d():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(4, 6, 1))
    last = nn.ConvTranspose1d(6, 5, 3), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(20, 4), nn.BatchNorm1d(4)
    return nn.Sequential(*first, *last).double()


def test_networks_of_one_dimension_take_the_fast_order_from_end_to_end():
    """On CPUs, as images of height 1: the same network, gradients, statistics and checkpoint."""
    usual, last = network_1d(), kernels.apply_memory_format(network_1d(), "channels_last")
    x = torch.randn(2, 3, 16, dtype=torch.double)
    for layers in range(1, 8):
        assert last[:layers](x).stride()[1] == 1 != usual[:layers](x).stride()[1], "channels are neighbours"
    for _ in range(2):
        for net in (usual, last):
            net(x).square().sum().backward()
    torch.testing.assert_close(last(x), usual(x), rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(last.parameters(), usual.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last.state_dict(), usual.state_dict(), rtol=1e-12, atol=1e-12)
    usual.load_state_dict(last.state_dict())
    back = kernels.apply_memory_format(last, "contiguous")
    assert [type(module) for module in back] == [type(module) for module in network_1d()]
    assert back[0].weight.is_contiguous() and torch.equal(back.eval()(x), usual.eval()(x))
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        kernels.apply_memory_format(network_1d(), "channels_last")[1](x[None])


CONV = ["har", "dataset.stride=512", "model.width=8"]


def order_said(done):
    (line,) = [line for line in done.out.splitlines() if line.startswith("  device ")]
    return line.split("convolutions in ")[1].split(" order")[0]


@pytest.mark.slow
def test_the_order_of_convolutions_is_one_for_every_cut_and_stays_that_of_a_run(launch, tmp_path):
    one = succeed(launch.python("train.py", *CONV, "--dry-run"))
    two = succeed(launch.torchrun(2, "train.py", *CONV, "batch_size=32", "--dry-run"))
    assert order_said(one) == order_said(two) == "the usual"  # it has GroupNorm
    run = [*CONV, "schedule.horizon=4", f"save_dir={tmp_path / 'run'}"]
    succeed(launch.python("train.py", *run, "steps=2", "memory_format=channels_last"))
    assert order_said(succeed(launch.python("train.py", *run, "steps=4"))) == "channels-last"


A_VIEW = """
import torch
from torch import nn
from engine.contract import Loss, Sums, Task as Base

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv{n}d(3, 4, 3, padding=1), nn.Linear(4 * 5 ** {n}, 2)

    def forward(self, x):
        return self.head(self.conv(x).view(len(x), -1))

class Task(Base):
    def datasets(self):
        rows = [{{"x": torch.full((3, *[5] * {n}), float(k)), "y": torch.tensor(k % 2)}} for k in range(12)]
        return rows, rows

    def model(self):
        return Net()

    def loss(self, net, batch):
        return Loss(nn.functional.cross_entropy(net(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))

    def score(self, model, batch):
        return Sums(loss=self.loss(model, batch).total, count=torch.tensor(len(batch["y"])))

    def report(self, sums):
        return {{"loss": sums["loss"] / sums["count"]}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "processes"), [(1, 1), (2, 2), (3, 1)])
def test_a_model_that_views_its_features_is_trained_in_the_usual_order(launch, tmp_path, axes, processes):
    """`x.view(len(x), -1)` after a convolution, as in many tutorials: no view flattens the other order."""
    task = tmp_path / "views.py"
    task.write_text(A_VIEW.format(n=axes))
    words = [str(task), "steps=2", "optim.ema_decay=0.9", f"save_dir={tmp_path / 'run'}"]
    assert order_said(succeed(launch.torchrun(processes, "train.py", *words))) == "the usual"
    reshaped = task.with_name("reshapes.py")
    reshaped.write_text(task.read_text().replace(".view(", ".reshape("))
    assert order_said(succeed(launch.python("train.py", str(reshaped), "--dry-run"))) == "channels-last"


@pytest.mark.parametrize(
    ("device", "amp", "norm", "order"),
    [("cpu", "off", nn.GroupNorm(2, 4), "contiguous"), ("cpu", "bf16", nn.GroupNorm(2, 4), "contiguous"),
     ("cpu", "off", nn.BatchNorm2d(4), "channels_last"), ("cpu", "bf16", nn.Identity(), "channels_last"),
     ("cuda", "off", nn.Identity(), "contiguous"), ("cuda", "bf16", nn.GroupNorm(2, 4), "contiguous"),
     ("cuda", "bf16", nn.BatchNorm2d(4), "channels_last"),
     ("cuda", "fp16", nn.Identity(), "channels_last")],
)  # fmt: skip
def test_the_order_of_convolutions_is_chosen_by_rule(device, amp, norm, order):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm)
    assert kernels.faster_order(model, torch.device(device), amp) == order


@pytest.mark.parametrize("triton", [True, False])
def test_the_order_with_a_norm_of_the_shipped_networks(monkeypatch, triton):
    """Its Triton kernels take any order; on a CPU, and in float32, the norm is torch's."""
    monkeypatch.setattr(model_layers, "HAS_TRITON", triton)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), model_layers.group_norm(4))
    orders = [kernels.faster_order(model, torch.device(*on), amp) for on, amp in
              ((["cuda"], "bf16"), (["cuda"], "off"), (["cpu"], "bf16"))]  # fmt: skip
    assert orders == ["channels_last" if triton else "contiguous", "contiguous", "contiguous"]


@pytest.mark.parametrize(("words", "tf32"), [([], True), (["amp=off"], False)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_tf32_is_for_mixed_precision_and_deterministic_anyway(monkeypatch, words, tf32, deterministic):
    cuda, cudnn = SimpleNamespace(matmul=SimpleNamespace()), SimpleNamespace()
    cfg = config.parse([TOY, *words, f"deterministic={str(deterministic).lower()}"], tasks.load).cfg
    with monkeypatch.context() as patch:
        patch.setattr(torch, "backends", SimpleNamespace(cuda=cuda, cudnn=cudnn))
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        patch.setattr(os, "environ", {})
        kernels.set_backends(cfg)
    assert cuda.matmul.allow_tf32 is cudnn.allow_tf32 is tf32 and cudnn.benchmark is not deterministic


def rounds(**step_ms):
    """Results by contestant, of whom each has a number for every round that it finished."""
    keys = {"cpu_step_ms": 1.0, "total_s": 1.0, "peak_mb": 1.0, "first_step_s": 1.0}
    return {
        name: [keys | {"step_ms": ms, "round": n} for n, ms in enumerate(values) if ms]
        for name, values in step_ms.items()
    }


def test_the_benchmark_compares_within_rounds():
    """Whatever slows a round down slows all contestants of that round: rounds that took twice and four times as long
    change no verdict; nor does one that a contestant failed in."""
    results = rounds(lockstep=[10, 40, 20], tutorial=[25, 80, 70], accelerate=[None, 96, 44], apart=[9, 36, 18])
    results["limit allocator"] = rounds(limit=[9.5, 38, 19])["limit"]
    assert benchmark.ratio(results["lockstep"], results["tutorial"], "step_ms") == 2.5  # of 2.5, 2 and 3.5
    one = {bar.what: bar for bar in benchmark.verdicts("har_flatten", 1, results)}
    limit = one["har_flatten: Lockstep / the best limit"]
    assert (limit.got, limit.bar, limit.at_most) == (0.95, 0.85, False) and limit.met
    best = one["har_flatten, 1 process(es): Lockstep / the best of the others"]
    assert best.got == pytest.approx(2.3) and best.met
    results["ignite"] = [results["tutorial"][0] | {"round": 3}]
    best = {bar.what: bar for bar in benchmark.verdicts("har_flatten", 1, results)}[best.what]
    assert not best.met, "who was never measured beside us may be the best"
    assert bars.exit_code([limit]) == 0 and bars.exit_code([limit, best]) == bars.exit_code([]) == 1


def test_no_workload_is_shorter_than_its_warmup(monkeypatch, capsys):
    assert not any(benchmark.too_short(name, size, 1) for name in benchmark.WORKLOADS for size in (1, 2))
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "video", "--processes", "1,16", "--epochs", "1"])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "video on 16 process(es) has 3 steps, 8 to warm up" in error


@pytest.mark.parametrize("workload", sorted(benchmark.BARS["start"]))
def test_start_has_the_model_that_is_trained(workload, tmp_path, monkeypatch):
    """It is given sizes that the task reads off its data."""
    monkeypatch.setattr(benchmark, "TRAIN", 100)
    monkeypatch.setattr(benchmark, "TEST", 20)
    monkeypatch.setattr("tasks.video.GENERATED", tmp_path)
    about = benchmark.WORKLOADS[workload]
    words = [word.replace("{arrays}", str(benchmark.make_arrays(tmp_path))) for word in about["words"]]
    words += ["dataset.trials=40", "dataset.videos=20"] if workload in ("video", "plain_3d") else []
    cfg = config.parse(words, tasks.load).cfg
    task = tasks.load(cfg.task)(cfg)
    task.datasets()
    shapes, trained = (
        {name: tensor.shape for name, tensor in model.state_dict().items()}
        for model in (contest.built(about), task.model())
    )
    assert shapes == trained


@pytest.mark.slow
def test_the_benchmark_runs_and_checks(launch, tmp_path, monkeypatch):
    """The real thing, small; a bar that nobody can reach makes --check fail."""
    common = ["benchmarks/run.py", "--only", "har_flatten", "--rounds", "1", "--epochs", "1", "--processes", "1"]
    done = launch.python(*common, "--contestants", "lockstep,tutorial,limit allocator,start")
    assert done.code == 0 and "failed" not in done.out, done.out
    names = [line.split("|")[1].strip() for line in done.out.splitlines() if line.startswith("| ")]
    assert {"lockstep", "tutorial", "limit allocator", "start"} <= set(names)
    assert "peak memory" in done.out and "har_flatten, start: first step" in done.out
    monkeypatch.setattr(benchmark, "measure", lambda name, *_: None)  # nobody finishes: no bar is met
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "har_flatten", "--processes", "1", "--check"])
    monkeypatch.setattr(benchmark, "make_arrays", lambda folder: tmp_path)
    assert benchmark.main() == 1


@pytest.mark.slow
def test_a_contestant_that_fails_is_named(capsys):
    args = {"arrays": "nowhere", "gpu": False, "epochs": 1, "limits": False, "rounds": 1, "threads": 1}
    assert benchmark.compete("har_flatten", 1, SimpleNamespace(contestants="tutorial", **args)) == {}
    assert "tutorial failed (exit code 1)" in capsys.readouterr().out


def test_a_contestant_that_hangs_is_ended(capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "TIMEOUT_S", 0.5)
    about = {"arrays": "nowhere", "warmup": 1} | benchmark.WORKLOADS["har_flatten"]
    assert benchmark.measure("start", about, 2, 1) is None, "importing torch takes longer"
    assert "start failed (no end after 0.5 s): []" in capsys.readouterr().out


def held_to(bar_count, done):
    """Says so of each of its bars, and the exit code of --check is what they come to."""
    said = [line.split("|")[-2].strip() for line in done.out.partition("## Bars")[2].splitlines()[4:]]
    assert len(said) == bar_count and set(said) <= {"ok", "missed"}, done.out + done.err
    assert done.code == int("missed" in said), done.out + done.err


@pytest.mark.slow
def test_what_observing_costs_is_measured(launch):
    done = launch.torchrun(2, "benchmarks/reliability.py", "watch", "--rounds", "2", "--steps", "2", "--check")
    held_to(1, done)
    for row in ("bare", "watched", "observed", "observed / bare, of 2 pairs of 2 steps", "counted directly: all"):
        assert f"\n| {row}" in done.out


@pytest.mark.slow
def test_what_saving_costs_is_measured(launch):
    held_to(6, launch.python("benchmarks/reliability.py", "save", "--rounds", "1", "--steps", "1", "--check"))


def distance(run, other):
    a, b = weights(run), weights(other)
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in b)


@pytest.mark.slow
def test_compressed_gradients_train_nearly_the_same(launch, tmp_path):
    """Nearly: a hook that does nothing would give the very same weights."""
    for hook in ("none", "fp16", "bf16"):
        words = [TOY, "steps=14", f"ddp.comm_hook={hook}", f"save_dir={tmp_path / hook}"]
        done = succeed(launch.torchrun(2, "train_ddp.py", *words))
        assert ("comm_hook=bf16 is for NCCL" in done.out) is (hook == "bf16")
    assert 0 < distance(tmp_path / "fp16", tmp_path / "none") < 0.02
    assert distance(tmp_path / "bf16", tmp_path / "none") == 0


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++")), reason="no C++ compiler")
def test_a_compiled_run_is_the_same_run(launch, tmp_path):
    """A perceptron with batches of one size: each shape is many seconds of a C++ compiler."""
    # The compiler is not asked for this machine's vectors either, nor to compile headers ahead: five runs of it.
    asked = {"VEC_ISA_OK": "0", "CPP_CACHE_PRECOMPILE_HEADERS": "0", "COMPILE_THREADS": "1"}
    env = {f"TORCHINDUCTOR_{name}": value for name, value in asked.items()}
    words = [TOY, "amp=off", "drop_last=true", "dataset.val_samples=12", "batch_size=12", "eval_batch_size=12"]
    for how in ("off", "default"):
        run = ["steps=4", f"compile={how}", f"save_dir={tmp_path / how}"]
        done = succeed(launch.torchrun(1, "train_ddp.py", *words, *run, **env))
        assert ("compiled (default)" in done.out) is (how == "default")
    assert distance(tmp_path / "default", tmp_path / "off") < 1e-3
    done = succeed(launch.python("train.py", *words, "steps=6", f"save_dir={tmp_path / 'default'}"))
    assert "step 4," in done.out, "and it continues without"


@pytest.mark.parametrize(
    ("wanted", "device", "steps", "expected"),
    [("auto", "cuda", 4999, "off"), ("auto", "cuda", 5000, "default"), ("auto", "cpu", 10**6, "off"),
     ("reduce-overhead", "cpu", 1, "reduce-overhead"), ("off", "cuda", 10**6, "off")],
)  # fmt: skip
def test_auto_compiles_long_runs_on_a_gpu(wanted, device, steps, expected, monkeypatch):
    monkeypatch.setenv("CC", "gcc")
    assert compiler.choose(wanted, torch.device(device), steps) == expected
    if wanted == "auto":
        assert compiler.choose("auto", torch.device("cuda"), 10**6, plain=False) == "off"
        monkeypatch.delenv("CC")
        monkeypatch.setenv("PATH", "")
        assert compiler.choose("auto", torch.device("cuda"), 10**6) == "off", "Triton needs a compiler"


def test_a_short_batch_leaves_full_ones_their_graph(monkeypatch):
    """On GPUs, and not one for all sizes, which torch would take from the second size on; recorded, not compiled."""
    taken = []

    def record(graph, inputs):
        fixed = all(isinstance(value, torch.Tensor) for value in inputs)  # a size is an input of its own
        return lambda *args: taken.append(fixed) or graph(*args)

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, mode, **how: real(f, backend=record, **how))
    model = toy.Net(3, 0.0)
    with compiler.Compiled(model, "default", torch.device("cuda")).used():
        for size in (12, 12, 5, 12, 7, 12):
            model(torch.ones(size, 8))
    assert taken == [True] * 6


def test_cuda_graphs_and_several_passes_a_step_are_refused():
    """In the second pass a graph would overwrite the gradients of the first."""

    def planned(mode, device, passes):
        cfg = config.Config(compile=mode, batch_size=4, gradient_accumulation_steps=passes)
        return plan.make_plan(cfg, World(0, 0, 1, torch.device(device)), 61)

    for mode in ("reduce-overhead", "max-autotune"):
        with pytest.raises(LockstepError, match=rf"^compile={mode} with 3 forward .* \(compile\): .*no-cudagraphs"):
            planned(mode, "cuda", 3)
        assert planned(mode, "cuda", 1).accumulation == 1 and planned(mode, "cpu", 3).accumulation == 3
    assert planned("max-autotune-no-cudagraphs", "cuda", 3).accumulation == 3


def test_without_a_compiler_it_says_so(launch, tmp_path):
    words = ["train.py", TOY, "compile=default", f"save_dir={tmp_path / 'run'}"]
    done = launch(sys.executable, *words, PATH=str(tmp_path), CXX=None)
    assert done.code == 2 and "needs a C++ compiler" in done.errors[0] and not (tmp_path / "run").exists()
