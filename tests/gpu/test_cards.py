"""GPUs are hidden from the tests: from each process, however a test starts it."""

import json
import os
import subprocess
import sys

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
