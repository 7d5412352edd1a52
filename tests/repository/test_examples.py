"""The examples of one file: they learn, on one process and on two, killed and continued, to the same metrics."""

import importlib.util
import json

import numpy as np
import pytest
from conftest import ROOT, succeed
from runs import progress, same_bits, weights
from saved import logged

import tasks
from engine import config

BITS = str(ROOT / "tests" / "ranks" / "bits.py")

EXAMPLES = {
    "own_optimizer": (["steps=60", "batch_size=16"], 1.6),
    "own_lora": (["steps=30", "batch_size=8", "optim.ema_decay=0.5"], 3.5),
}
"""Words, and the loss that is reached."""


def test_what_normalises_a_table_is_measured_on_the_rows_to_train_on(tmp_path):
    """The last rows, which are validated on, are another world: no number of theirs is in the model."""
    rows = np.random.default_rng(0).normal(size=(50, 3))
    rows[40:] += 1000.0
    np.savetxt(tmp_path / "mine.csv", rows, delimiter=",", header="a,price,b", comments="")
    words = ["examples/own_task.py", f"table.path={tmp_path / 'mine.csv'}", "table.target=price", "table.val_share=0.2"]
    cfg = config.parse(["--task", str(ROOT / words[0]), *words[1:]], tasks.load).cfg
    task = tasks.load(cfg.task)(cfg)
    train, val = task.datasets()
    assert len(train) == 40 and len(val) == 10 and np.allclose(val.y, rows[40:, 1])
    model = task.model()
    assert np.allclose(model.mean, rows[:40, ::2].mean(0)) and np.allclose(model.std, rows[:40, ::2].std(0, ddof=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns_and_is_resumed_on_other_processes(launch, tmp_path, name):
    """One rank of two is killed; one process continues, and ends as the one that nothing happened to."""
    if name == "own_lora":
        for package in ("transformers", "peft"):
            if not importlib.util.find_spec(package):
                pytest.skip(f"examples/own_lora.py needs {package} (the extra [lora])")
    launch.may_stay += ["lockstep_", "torch_"]  # of the process that is killed
    more, bar = EXAMPLES[name]
    words = [f"examples/{name}.py", *more, "virtual_workers=2", "save_every=5", "eval_every=15", "device=cpu"]
    runs = {place: [*words, f"save_dir={tmp_path / place}"] for place in ("straight", "killed")}
    killed = launch.torchrun(2, BITS, json.dumps([runs["killed"]]), "SIGKILL:1:22:begin_step")
    assert killed.code and 15 <= progress(tmp_path / "killed" / "last.pt")["step"] < 22
    for each in runs.values():
        succeed(launch.python("train.py", *each))
    straight, resumed = ([line for line in logged(tmp_path / place) if line["event"] == "eval"] for place in runs)
    assert straight == resumed and straight[-1]["loss"] < bar
    one, other = (weights(tmp_path / place) for place in runs)
    assert same_bits(one, other)
    if name == "own_lora":
        assert one and all("lora_" in key for key in one)
