"""Fifty steps of ACT from a folder that LeRobot wrote, on the same samples: its own training script and ours.

Its policy, pipelines, optimizer and presets; the order of the samples and the VAE's noise are ours (noting.py). In
float32 a network with pictures amplifies rounding: of weights that are changed by 1e-7 at the start LeRobot's own
losses part by 1e-5 to 1e-2 within fifty steps. Hence a backbone that learns a thousand times more slowly.
"""

import importlib.util
import json

import pytest

if importlib.util.find_spec("lerobot") is None:
    pytest.skip("lerobot is not installed (make peer)", allow_module_level=True)

import noting
from conftest import succeed
from runs import records

CASES = {  # camera, options of the policy, words for LeRobot, words for us
    "presets": (False, {}, [], []),
    "without the VAE": (False, {"use_vae": False}, [], []),
    "a camera": (True, {}, ["policy.optimizer_lr_backbone=1e-8"], ["optim.lr_scale=*backbone*:0.001"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_fifty_steps_are_lerobots(launch, tmp_path, case):
    """With an environment_state in pixels, which LeRobot does not normalise: `python train.py robot policy.path=...`"""
    camera, options, theirs, own = CASES[case]
    root = noting.demonstrations(tmp_path / "walks", camera)
    folder = noting.start(tmp_path / "start", root, **options)
    words = [f"dataset.root={root}", f"policy.path={folder}", "batch_size=16", "steps=50"]
    run, seen = tmp_path / "run", tmp_path / "seen.csv"
    own = [*own, *noting.OURS, f"save_dir={run}"]
    succeed(launch.python("train.py", "robot", *words, *own))
    succeed(launch.python("tools/provenance.py", str(run / "last.pt"), "--no-contents", "--list", str(seen)))
    theirs = [*theirs, *noting.THEIRS, "dataset.repo_id=someone/walks", f"output_dir={tmp_path / 'out'}"]
    launch.may_stay.append("tmp")  # LeRobot never removes the config that it writes for its parser
    command = ["tests/peer/noting.py", "lerobot", str(tmp_path / "notes"), *words, *theirs]
    succeed(launch.python(*command, ORDER=str(seen), **noting.environment(tmp_path)))

    steps = json.loads((tmp_path / "notes/rank0.json").read_text())
    ours = [line for line in records(run, "train") if "loss" in line]
    assert len(steps) == len(ours) == 50 and len({row for step in steps for row in step["samples"]}) == 167
    assert sum(step["loss"] for step in steps[40:]) < 0.97 * sum(step["loss"] for step in steps[:10]), "it learns"
    for key, near in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert [line[key] for line in ours] == pytest.approx([step[key] for step in steps], rel=near), key
