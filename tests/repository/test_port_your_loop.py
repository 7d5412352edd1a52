"""docs/port-your-loop.md: each loop of examples/ports, and its task, end in the same weights.

The loops run in float64 and in the order of the task, see tests/kit/port_loop.py. A loop of a framework runs where the
framework is installed. The plain loop of the same training runs always, with stand-ins for other packages.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, succeed
from port_loop import LOOPS
from robot_tasks import record

ENTRIES = {"lightning": "ema", "accelerate": "task", "diffusion": "ema"}
"""The entry of a checkpoint with the weights that the loop leaves; of others the model."""

STUBS = [str(ROOT / "tests" / name) for name in ("transformers_stub", "lerobot_stub")]

PACKAGES = {"lightning": "lightning", "trainer": "transformers", "accelerate": "accelerate", "lerobot": "lerobot"}

CUTS = [(1, []), (1, ["batch_size=4"]), (2, [])]
"""Processes and settings: one process, four passes, two processes."""


def test_the_page_has_the_files_and_the_counts():
    command = [sys.executable, "dev/ports.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\nfixed by: python dev/ports.py"


def weights_of(run, name, kind):
    """The weights of the last step; of the Trainer itself, which loads them at the end, the best."""
    last = run / "last.pt"
    if (name, kind) == ("trainer", "loop"):
        last = sorted(run.glob("best_model_epoch*.pt"))[-1]
    checkpoint = torch.load(last, weights_only=True)
    entry = checkpoint[ENTRIES.get(name, "model")]
    entry = entry.get("teacher", entry)
    return {key.removeprefix("module."): value for key, value in entry.items() if key != "n_averaged"}


def assert_same_weights(launch, folder, kind, name, paths):
    """Run a loop once, and its task on each cut, and compare."""
    env = {"PYTHONPATH": ":".join([str(ROOT), str(ROOT / "tests" / "kit"), *paths]), "HF_HUB_OFFLINE": "1"}
    launch.may_stay.append("tmp")  # LeRobot and Lightning leave files of theirs
    if name == "lerobot" and kind == "loop":
        record(folder / "walks", episodes=6, frames=14, cameras=0, env=2)
    succeed(launch.python(ROOT / "tests/kit/port_loop.py", kind, name, folder, cwd=folder, **env))
    theirs = torch.load(folder / "model.pth", weights_only=True)
    near = 1e-6 if name == "lerobot" and kind == "loop" else 1e-10  # rounding that Adam enlarges in ACT's encoder
    task = folder / "mine.py"
    task.write_text(f"import port_loop\nport_loop.prepare({name!r})\nfrom {name}_task import Task\n")
    for number, (processes, words) in enumerate(CUTS):
        if name == "dice" and words:
            continue  # gather_batch needs a step of one pass
        run = folder / f"run{number}"
        words = [ROOT / "train.py", task, "amp=off", "device=cpu", f"save_dir={run}", *words]
        if processes > 1:
            done = succeed(launch.torchrun(processes, *words, cwd=folder, **env))
        else:
            done = succeed(launch.python(*words, cwd=folder, **env))
        assert "the loss adds up" in done.out
        ours = weights_of(run, name, kind)
        assert theirs.keys() == ours.keys()
        away = max(float((ours[key] - value).abs().max()) for key, value in theirs.items())
        print(name, kind, processes, words[5:], away)
        assert away <= near


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LOOPS, "dice", "recurrent", "diffusion"])
def test_a_task_takes_the_steps_of_a_plain_loop(launch, tmp_path, name):
    assert_same_weights(launch, tmp_path, "plain", name, STUBS)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_task_takes_the_steps_of_the_loop_that_it_replaces(launch, tmp_path, name):
    package = PACKAGES.get(name, "torch")
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed")
    paths = os.environ.get("PYTHONPATH", "").split(":")
    assert_same_weights(launch, tmp_path, "loop", name, filter(None, paths))
