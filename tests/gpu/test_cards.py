"""GPUs are hidden from the tests: from each process, however a test starts it; tests marked `gpu` see them."""

import json
import os
import subprocess
import sys

import cards
import pytest
from conftest import ROOT, launching, succeed
from nvidia_smi import nvidia_smi

PROBE = """
import json, os
import torch
from engine import config, launch
from tests.tasks import toy
from tools.machine import nvidia
class Task(toy.Task):
    pass
def visible():
    return 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else 1
seen = {"torch's GPUs": torch.cuda.device_count(), "nvidia-smi's GPUs": len(nvidia.cards())}
seen["visible GPUs"] = len(nvidia.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))[0])
torch.cuda.device_count, torch.cuda.is_available = visible, lambda: visible() > 0  # a machine with one GPU
seen["device"] = str(launch.pick_device(config.Config(), launch.Environment()))
seen |= {name: os.environ.get(name) for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")}
print("SEEN", json.dumps(seen), flush=True)
"""
"""A script, and a task, on a machine whose nvidia-smi lists a GPU."""

NOTHING = {"torch's GPUs": 0, "nvidia-smi's GPUs": 1, "visible GPUs": 0, "device": "cpu"}
NOTHING |= {"HIP_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": ""}


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """The path of the probe; nvidia-smi is first on the PATH of what the test starts."""
    gpu = "GPU-aaaa-0, NVIDIA H200, 580.159.04, 143771, 0, 5, 16, 16"
    nvidia_smi(tmp_path / "bin", gpus=f"0, {gpu}\n", listing="GPU 0: NVIDIA H200 (UUID: GPU-aaaa-0)\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for a test's own subprocess
    path = tmp_path / "probe.py"
    path.write_text(PROBE)
    return str(path)


def by_subprocess(env):
    """`env` returns the environment of the process, or None: it is inherited."""

    def run(launch, probe, tmp_path):
        return subprocess.run([sys.executable, probe], env=env(), capture_output=True, text=True).stdout

    return run


def by_child(code):
    return lambda launch, probe, _: succeed(launch.python("-c", code, probe)).out


def by_popen(launch, probe, tmp_path):
    with open(tmp_path / "out", "w") as out:
        launch.popen([sys.executable, probe], cwd=ROOT, env=dict(os.environ), stdout=out).wait()
    return (tmp_path / "out").read_text()


WAYS = {
    "python": lambda launch, probe, _: succeed(launch.python(probe)).out,
    "torchrun": lambda launch, probe, _: succeed(launch.torchrun(2, probe)).out,
    "training": lambda launch, probe, _: succeed(launch.train(probe, "--dry-run")).out,
    "launcher": lambda launch, probe, _: succeed(launch("./train_multigpu.sh", probe, "--dry-run")).out,
    "popen": by_popen,
    "child of a fork": by_child("import subprocess, sys; subprocess.run([sys.executable, sys.argv[1]], check=True)"),
    "fork that becomes another": by_child("import os, sys; os.execv(sys.executable, [sys.executable, sys.argv[1]])"),
    "environment inherited": by_subprocess(lambda: None),
    "environment copied": by_subprocess(lambda: dict(os.environ)),
}


def assert_nothing_is_seen(out, processes):
    """Each process has printed that it sees no GPU."""
    seen = [json.loads(line.removeprefix("SEEN ")) for line in out.splitlines() if line.startswith("SEEN ")]
    assert seen == [NOTHING] * processes, out


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_process_sees_no_gpu(launch, probe, tmp_path, way):
    assert_nothing_is_seen(WAYS[way](launch, probe, tmp_path), 2 if way == "torchrun" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["python", "torchrun", "launcher", "popen"])
def test_a_new_process_sees_no_gpu(probe, tmp_path, way):
    with launching(real=True) as launch:
        assert_nothing_is_seen(WAYS[way](launch, probe, tmp_path), 2 if way == "torchrun" else 1)


def test_a_test_that_shows_the_gpus_by_mistake_fails(launch, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(AssertionError, match="removed what hides the GPUs"):
        launch.python("-c", "")


TORCH = """
import os
class cuda:
    def device_count():
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
        return len(shown.split(",")) if shown else 0
"""
"""A torch that counts GPUs as CUDA does, on a machine with two."""

SUITE = """
import os
import cards
import pytest
def test_of_the_cpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and os.environ["OMP_NUM_THREADS"] == "1"
@pytest.mark.gpu
def test_of_the_gpu():
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == {shown!r} and "OMP_NUM_THREADS" not in os.environ
    assert cards.visible() == {count}
"""


@pytest.fixture
def suite(tmp_path):
    """Returns a function that runs pytest with this conftest, on a machine with two GPUs; it returns the output.

    shown  the user's CUDA_VISIBLE_DEVICES;  count  the number of GPUs that it shows
    """
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)

    def run(*words, shown, count):
        (tmp_path / "test_inner.py").write_text(SUITE.format(shown=shown, count=count))
        unset = {*cards.as_user_has_set(), cards.BEFORE, "PYTEST_XDIST_WORKER"}
        env = {name: value for name, value in os.environ.items() if name not in unset}
        env |= {"PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}:{ROOT / 'tests/kit'}", "PYTHONDONTWRITEBYTECODE": "1"}
        env |= {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
        options = ["-rs", "-p", "conftest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
        command = [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}", *words, str(tmp_path)]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize(("shown", "count"), [(None, 2), ("1", 1)])
def test_what_needs_a_gpu_sees_those_that_the_user_shows(suite, shown, count):
    said = suite("-m", "gpu", shown=shown, count=count)
    assert "1 passed, 1 deselected" in said


@pytest.mark.slow
def test_pytests_workers_know_what_the_user_shows(suite):
    assert "1 passed" in suite("-m", "gpu", "-n", "1", shown="1", count=1)


def test_without_being_asked_for_or_without_a_gpu_it_is_skipped_with_the_reason(suite):
    for words in ([], ["-m", "gpu"]):
        said = suite(*words, shown="" if words else None, count=0)
        assert cards.NONE_VISIBLE in said
        assert ("1 skipped, 1 deselected" if words else "1 passed, 1 skipped") in said
