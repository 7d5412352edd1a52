"""arithmetic=capped: the variables are set before torch is loaded, by one restart; what contradicts is refused; the
functions that MKL computes by the maker of the CPU are NumPy's.

That the bits are those of another kind of CPU needs another kind of CPU: `benchmarks/cpu_kinds.py`."""

import json
import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TOY, succeed
from runs import same_bits, weights

from engine import config, hooks
from engine import launch as launching
from engine.errors import LockstepError
from plugins.performance import capped

CAPPED = SimpleNamespace(arithmetic="capped")


@pytest.fixture
def clean(monkeypatch):
    """No variable is set, and a restart is counted and not made."""
    restarts = []
    for name in (*capped.VARIABLES, *capped.CONFLICTS, capped.STARTED, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(launching, "replace_process", lambda: restarts.append(dict(os.environ)))
    monkeypatch.setattr(launching, "can_start_again", lambda: True)
    monkeypatch.setattr(capped, "replace_functions", lambda: None)
    kernels = lambda: os.environ.get("ATEN_CPU_CAPABILITY", "AVX512").upper()  # noqa: E731
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", kernels)
    return restarts


def test_native_sets_nothing(clean):
    capped.set_arithmetic(SimpleNamespace(arithmetic="native"))
    assert not clean and not capped.VARIABLES.keys() & os.environ.keys()


@pytest.mark.parametrize(
    ("known", "beyond"),
    [
        (
            {"SIMD Extensions": {"baseline": ["X86_V2"], "found": ["X86_V3", "X86_V4", "AVX512_SPR"]}},
            "AVX512_SPR X86_V4",
        ),
        ({"SIMD Extensions": {"baseline": ["SSE"], "not found": ["AVX2", "AVX512F"]}}, "AVX512F"),
        ({"SIMD Extensions": {"baseline": ["NEON"]}}, ""),
        ({}, ""),
    ],
    ids=["a CPU with all", "a CPU with none", "another architecture", "a NumPy that does not know"],
)
def test_numpy_leaves_out_an_empty_list_of_extensions(monkeypatch, known, beyond):
    monkeypatch.setattr(np, "show_config", lambda mode: known)
    assert capped._variables()["NPY_DISABLE_CPU_FEATURES"] == beyond


def test_one_restart_sets_the_variables(clean):
    capped.set_arithmetic(CAPPED)
    capped.set_arithmetic(CAPPED)  # after the restart
    (env,) = clean
    assert capped.VARIABLES.items() <= env.items()


def test_a_program_that_cannot_be_started_again_is_refused_unless_the_variables_are_set(clean, monkeypatch):
    monkeypatch.setattr(launching, "can_start_again", lambda: False)
    with pytest.raises(LockstepError, match=r"starts the program again, and this program .*: start a file with python"):
        capped.set_arithmetic(CAPPED)
    assert not clean and not capped.VARIABLES.keys() & os.environ.keys()
    os.environ.update(capped.VARIABLES)
    capped.set_arithmetic(CAPPED)
    assert not clean


@pytest.mark.parametrize(
    ("program", "words", "again"),
    [("file", ["train.py"], True), ("file", ["-m", "train"], True), (None, ["-c", "import train"], True),
     (None, ["-"], False), (None, [], False), ("pipe", ["/dev/stdin"], False), ("gone", ["train.py"], False)],
)  # fmt: skip
def test_a_file_and_words_are_started_again_and_nothing_that_was_read_once(
    monkeypatch, tmp_path, program, words, again
):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    main = SimpleNamespace(__file__=str(tmp_path / program)) if program else SimpleNamespace()
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    assert launching.can_start_again() is again
    with monkeypatch.context() as prompt:
        prompt.setattr(sys, "ps1", ">>> ", raising=False)
        assert not launching.can_start_again(), "typed"
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace())
    assert not launching.can_start_again(), "a function of another program"


@pytest.mark.slow
@pytest.mark.real
def test_a_program_from_the_standard_input_is_refused_and_not_lost(tmp_path):
    """Python would find nothing to read after the restart, and end with 0."""
    command = [sys.executable, "-", *words(tmp_path / "run")]
    how = {"cwd": ROOT, "input": (ROOT / "train.py").read_text(), "capture_output": True, "text": True}
    done = subprocess.run(command, **how)
    assert done.returncode == 2 and "read from the standard input" in done.stderr, done
    assert not (tmp_path / "run").exists()


def test_variables_that_something_removes_are_no_endless_restart(clean):
    capped.set_arithmetic(CAPPED)
    del os.environ["MKL_CBWR"]
    with pytest.raises(LockstepError, match="gone after a restart"):
        capped.set_arithmetic(CAPPED)
    os.environ[capped.STARTED] = "1"  # of a parent, whose child has lost a variable
    capped.set_arithmetic(CAPPED)
    assert len(clean) == 2


def test_variables_that_are_set_after_torch_is_loaded_do_nothing(clean, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    os.environ.update(capped.VARIABLES)
    with pytest.raises(LockstepError, match="torch has loaded its kernels for AVX512 before"):
        capped.set_arithmetic(CAPPED)


@pytest.mark.parametrize(
    ("name", "value"),
    [("ATEN_CPU_CAPABILITY", "default"), ("ONEDNN_MAX_CPU_ISA", "SSE41"), ("MKL_CBWR", "AVX2"),
     ("NPY_DISABLE_CPU_FEATURES", "AVX2"), ("DNNL_MAX_CPU_ISA", "AVX2"), ("MKL_VML_DEBUG_CPU_TYPE", "3"),
     ("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX2")],
)  # fmt: skip
def test_a_variable_that_contradicts_is_refused(clean, name, value):
    os.environ[name] = value
    with pytest.raises(LockstepError, match=f"arithmetic=capped, but {name}.*: unset {name}, or drop it"):
        capped.set_arithmetic(CAPPED)
    assert not clean


def test_tunables_of_memory_are_no_arithmetic(clean):
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.check=0"
    capped.set_arithmetic(CAPPED)
    assert len(clean) == 1


@pytest.mark.parametrize(
    ("place", "name", "value", "lacks"),
    [(capped.platform, "machine", "aarch64", "this CPU is aarch64"),
     (torch.backends.cpu, "get_cpu_capability", "DEFAULT", "this CPU has no AVX2"),
     (torch.backends.mkl, "is_available", False, "this torch is built without mkl"),
     (torch.backends.mkldnn, "is_available", False, "this torch is built without mkldnn")],
)  # fmt: skip
def test_a_machine_on_which_it_cannot_hold_is_refused(clean, monkeypatch, place, name, value, lacks):
    monkeypatch.setattr(place, name, lambda: value)
    with pytest.raises(LockstepError, match=f"arithmetic=capped, but {lacks}"):
        capped.set_arithmetic(CAPPED)
    assert not clean


@pytest.mark.parametrize(("name", "value"), [("threads", 2), ("compile", "default")])
def test_settings_that_contradict_are_refused(name, value):
    cfg = config.Config(arithmetic="capped", **{name: value})
    (error,) = hooks.find_conflicts("config", cfg=cfg)
    assert f"arithmetic=capped with {name}={value}" in str(error)
    assert not hooks.find_conflicts("config", cfg=config.Config(arithmetic="capped", threads=1))


def test_gpus_are_refused():
    facts = {"cfg": config.Config(arithmetic="capped"), "env": launching.Environment()}
    (error,) = hooks.find_conflicts("launch", **facts, visible=1)
    assert "arithmetic=capped is of CPUs" in str(error) and "device=cpu" in str(error)
    assert not hooks.find_conflicts("launch", **facts, visible=0)


FORMS = """
import numpy as np, torch
from plugins.performance import capped
torch.manual_seed(0)
grids = {name: torch.rand(37, 50, dtype=torch.float64) * .98 + .01 for name in capped.FUNCTIONS}
torchs = {name: getattr(torch, name)(grid) for name, grid in grids.items()}
slopes = {}
for name, grid in grids.items():
    x = grid.clone().requires_grad_()
    getattr(torch, name)(x).sum().backward()
    slopes[name] = x.grad
capped.replace_functions()
capped.replace_functions()
for name, function in capped.FUNCTIONS.items():
    f, x = getattr(torch, name), grids[name]
    torch.testing.assert_close(f(x), torchs[name], rtol=1e-14, atol=1e-15)
    for dtype in (torch.float32, torch.float64):
        y = x.to(dtype)
        truth = torch.from_numpy(function(y.numpy()))
        assert f(y).dtype == dtype and torch.equal(f(y), truth), name
        assert torch.equal(f(y.t()), truth.t()) and torch.equal(f(y[:, ::3]), truth[:, ::3]), name
        out = torch.empty(0, dtype=dtype)
        assert f(y, out=out) is out and torch.equal(out, truth), name
        z = y.clone()
        assert getattr(z, name + "_")() is z and torch.equal(z, truth), name
        assert torch.equal(f(y[0, 0]), truth[0, 0]) and f(y[0, 0]).shape == (), name
    for half in (torch.bfloat16, torch.float16):
        assert torch.equal(f(x.to(half)), torch.from_numpy(function(x.to(half).float().numpy())).to(half)), name
    assert f(torch.tensor([0, 1])).dtype == torch.float32 and f(torch.empty(0, 3)).shape == (0, 3)
    leaf = x.clone().requires_grad_()
    f(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, slopes[name], rtol=1e-13, atol=1e-14)
for x in (torch.rand(100) + .1, torch.rand(100, dtype=torch.float64) + .1):
    truth = torch.from_numpy(np.sqrt(x.numpy()))
    assert torch.equal(x ** .5, truth) and torch.equal(x.clone().pow_(.5), truth)
    assert torch.equal(torch.pow(x, .5, out=torch.empty(0, dtype=x.dtype)), truth)
    for exponent in (2, 3, -1, -2, 0, 1, -.5, 1.7):
        exact = torch.from_numpy(np.power(x.double().numpy(), float(exponent))).to(x.dtype)
        torch.testing.assert_close(x ** exponent, exact, rtol=3e-7 if x.dtype == torch.float32 else 1e-14, atol=0)
whole = torch.arange(5)
assert torch.equal(whole ** 2, whole * whole) and torch.equal(whole ** 3, whole * whole * whole)
assert (whole ** 1.5).dtype == torch.float32 and (torch.rand(3).bfloat16() ** 3).dtype == torch.bfloat16
leaf = torch.rand(9, dtype=torch.float64, requires_grad=True)
(leaf ** .5).sum().backward()
torch.testing.assert_close(leaf.grad, .5 / leaf.detach().sqrt(), rtol=1e-14, atol=0)
assert torch.isnan(torch.sqrt(torch.tensor(-1.0)))
p = torch.nn.Parameter(torch.rand(1000))
adam = torch.optim.Adam([p], foreach=True)
p.grad = torch.rand(1000)
adam.step()
x = torch.rand(200_000)
assert torch.equal(torch._foreach_sqrt([x])[0], torch.from_numpy(np.sqrt(x.numpy())))
print("all forms")
"""


def test_the_functions_are_numpys_in_every_form(launch):
    """Strides, numbers, empty and integer tensors, halves, `out`, in place, gradients; torch's own to 1e-14."""
    assert succeed(launch.python("-c", FORMS)).out == "all forms\n"


def words(folder, *more, arithmetic="capped"):
    return [
        TOY,
        f"arithmetic={arithmetic}",
        "virtual_workers=2",
        "global_batch=24",
        "device=cpu",
        f"save_dir={folder}",
        *more,
    ]


@pytest.mark.slow
def test_one_processs_bits_are_those_of_two_and_of_variables_from_outside(launch, tmp_path):
    """The restart happens once: a second one would print the line of the first again."""
    one, two, outside = (tmp_path / name for name in ("one", "two", "outside"))
    done = succeed(launch.train(*words(one)))
    assert "1 thread per process" in done.out and done.out.count("Starting training") == 1
    succeed(launch.launcher(2, *words(two)))
    succeed(launch.train(*words(outside), **capped.VARIABLES))
    assert same_bits(weights(one), weights(two)) and same_bits(weights(one), weights(outside))
    environment = torch.load(one / "last.pt", weights_only=True)["environment"]
    assert environment["arithmetic"] == "capped" and environment["CPU instructions"] == "AVX2"
    assert environment["device"] == "x86-64 CPU with AVX2" and environment["NumPy"] == np.__version__
    again = succeed(launch.train(*words(one, "epochs=4")))
    assert "note: arithmetic=capped, the same bits on this CPU as on the one before" in again.out


WIDE = """
import numpy, torch
from tasks.har import Task as Har
from torch import nn
class Wide(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.layers = nn.Sequential(nn.Conv1d(6, 64, 1), nn.Conv1d(64, 256, 9, padding=4), nn.Conv1d(256, 6, 1))
    def forward(self, x):
        return self.net(x + self.layers(x))
class Task(Har):
    def model(self):
        print("a line of the task")
        x = torch.rand(100_000)
        print("NumPy's square root:", torch.equal(torch.sqrt(x), torch.from_numpy(numpy.sqrt(x.numpy()))))
        return Wide(super().model())
    def loss(self, net, batch):
        print("a line of the loss")
        return super().loss(net, batch)
"""


@pytest.mark.slow
def test_a_convolution_by_the_size_of_a_cache_is_named(launch, tmp_path):
    """The lines of the task in the first step are printed all the same; har's own network has no such convolution."""
    (tmp_path / "wide.py").write_text(WIDE)
    words = ["arithmetic=capped", "device=cpu", "model.width=4", "batch_size=16", "steps=2", "check_sums=false"]
    wide = succeed(launch.train(tmp_path / "wide.py", *words, f"save_dir={tmp_path / 'wide'}"))
    assert "oneDNN computes the convolution of 64 to 256 channels with the kernel 1x9 by the size" in wide.out
    assert wide.out.count("oneDNN computes") == 1 and "onednn_verbose" not in wide.out
    assert wide.out.split("Starting training")[1].count("a line of the loss") == 2
    assert "NumPy's square root: True" in wide.out
    usual = succeed(launch.train("har", *words, f"save_dir={tmp_path / 'usual'}", OMP_NUM_THREADS="2"))
    assert "oneDNN computes" not in usual.out and "1 thread per process (the same on any machine)" in usual.out
    words[0], words[4] = "arithmetic=native", "steps=3"
    changed = succeed(launch.train("har", *words, f"save_dir={tmp_path / 'usual'}"))
    assert "note: no longer the same bits" in changed.out, "a promise without virtual workers, too"


TALKS = """
from tests.tasks import toy
class Talks(toy.Waves):
    def __getitems__(self, indices):
        print("a batch of", len(indices))
        return super().__getitems__(indices)
class Task(toy.Task):
    def datasets(self):
        return Talks(60, 0), toy.Waves(9, 1)
"""


@pytest.mark.slow
def test_processes_of_the_first_step_print_to_the_end(launch, tmp_path):
    """They start in the step whose standard output is read for oneDNN's lines."""
    (tmp_path / "talks.py").write_text(TALKS)
    given = ["arithmetic=capped", "device=cpu", "num_workers=1", "batch_size=12", "epochs=1"]
    given += ["check_sums=false", "check_resume=false", f"save_dir={tmp_path / 'run'}"]
    trained = succeed(launch.train(tmp_path / "talks.py", *given)).out.split("Starting training")[1]
    assert trained.count("a batch of 12") == 5


@pytest.mark.slow
def test_a_native_run_that_goes_on_capped_says_so(launch, tmp_path):
    run = tmp_path / "run"
    succeed(launch.train(*words(run, "epochs=1", arithmetic="native")))
    more = succeed(launch.train(*words(run, "epochs=2")))
    assert "note: no longer the same bits" in more.out and "arithmetic native -> capped" in more.out
    back = succeed(launch.train(*words(run, "epochs=3", arithmetic="native")))
    assert "note: no longer the same bits" in back.out and "device x86-64 CPU with AVX2 -> " in back.out


@pytest.mark.slow
def test_a_variable_from_outside_is_refused_before_anything_is_written(launch, tmp_path):
    done = launch.train(*words(tmp_path / "run"), ATEN_CPU_CAPABILITY="default")
    assert done.code == 2 and len(done.errors) == 1 and "ATEN_CPU_CAPABILITY=default is set" in done.err
    assert not (tmp_path / "run").exists()


# ---- tools


def scored(launch, run, *more):
    """The metrics to the last digit, the hash of the state, and the warnings."""
    done = succeed(launch.python("tools/evaluate.py", run, "--json", "--state", *more))
    found = json.loads(done.out)
    warnings = [line for line in done.err.splitlines() if "arithmetic=" in line]
    return found["metrics"], found["sha256"]["state"], warnings


def replayed(launch, run, *more):
    done = launch.python("tools/replay.py", run, "--json", *more)
    found = json.loads(done.out)
    (machine,) = [line for line in done.err.splitlines() if line.startswith("  machine ")]
    return found["verdict"], machine


@pytest.mark.slow
def test_tools_compute_in_the_arithmetic_of_the_run_or_name_the_other(launch, tmp_path):
    """A capped run and a native run: the score and the steps are those of the run, unless `arithmetic` is given."""
    runs = {name: tmp_path / name for name in ("capped", "native")}
    for name, run in runs.items():
        succeed(launch.train(*words(run, "steps=4", "epochs=0", "amp=off", "log_every=1", arithmetic=name)))
        ended = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
        truth = ended["loss"]
        other = {"capped": "native", "native": "capped"}[name]
        metrics, state, warnings = scored(launch, run)
        assert metrics["loss"] == truth and not warnings
        assert scored(launch, run, f"arithmetic={name}") == (metrics, state, [])
        _, same_state, warnings = scored(launch, run, f"arithmetic={other}")
        assert same_state == state, "of the checkpoint"
        line = f"arithmetic={other}, and the run of the checkpoint has arithmetic={name}: the last digits may differ"
        assert warnings == [f"warning: {line}"]
        verdict, machine = replayed(launch, run)
        assert verdict == "same bits" and machine.startswith("  machine  the same: ")
        assert ("the same: x86-64 CPU with AVX2" in machine) is (name == "capped")
        verdict, machine = replayed(launch, run, f"arithmetic={other}")
        assert verdict == "rounding" and f"arithmetic {name} -> {other}; device " in machine
