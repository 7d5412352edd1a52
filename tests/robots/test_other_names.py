"""Names and rates that change between two starts: the numbers stay, and their meaning does not."""

import shutil

import numpy as np
import pytest
from conftest import succeed
from lerobot_data import change_feature, change_info, pa, pq
from robot_tasks import TINY_ACT, task_of

from engine.data.fingerprint import Fingerprint, compare, fingerprint
from formats.robots.lerobot_writer import Recorder

NAMES = {"observation.state": ["x", "y"], "action": ["x", "y"]}


def write(root, names=NAMES):
    rng = np.random.default_rng(0)
    with Recorder(root, 10, dict.fromkeys(NAMES, ("float32", (2,))), names=names) as recorder:
        for length in (6, 7, 5):
            recorder.add_episode({name: rng.normal(size=(length, 2)).astype(np.float32) for name in NAMES}, "go")
    return root


@pytest.fixture
def arm(tmp_path):
    return write(tmp_path / "arm")


def exchange_action(root):
    change_feature(root, "action", names=["y", "x"])


def exchange_state(root):
    change_feature(root, "observation.state", names=["y", "x"])


def double_rate(root):
    """Give 20 Hz to the same numbers."""
    change_info(root, lambda info: info.update(fps=20))
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    place = table.column_names.index("timestamp")
    halves = pa.array(np.array(table["timestamp"]) / np.float32(2), table.schema.field("timestamp").type)
    pq.write_table(table.set_column(place, "timestamp", halves), path)


def data_of(*roots):
    root = f"[{','.join(map(str, roots))}]" if len(roots) > 1 else roots[0]
    return fingerprint(*task_of("robot", f"dataset.root={root}", "policy.chunk_size=4")[1:])


CHANGES = {
    "names of the action": (exchange_action, "names of action"),
    "names of the state": (exchange_state, "names of observation.state"),
    "rate": (double_rate, "fps"),
}


@pytest.mark.parametrize(("change", "part"), CHANGES.values(), ids=CHANGES)
def test_other_names_and_another_rate_are_other_data(arm, change, part):
    before = data_of(arm)
    assert compare(before, data_of(arm)).parts == ()
    change(arm)
    now = data_of(arm)
    assert compare(before, now).parts == (f"train: {part}", f"val: {part}")
    earlier = {name: fact for name, fact in before.facts.items() if "names of" not in name and "fps" not in name}
    assert compare(Fingerprint(before.text, earlier), now).parts == (), "a checkpoint of an earlier release"


def test_names_of_the_second_set_of_a_mixture(arm, tmp_path):
    other = shutil.copytree(arm, tmp_path / "other")
    before = data_of(arm, other)
    exchange_action(other)
    assert compare(before, data_of(arm, other)).parts == ("train: names of action", "val: names of action")


def test_names_that_only_one_start_has_are_not_compared(tmp_path):
    arm = write(tmp_path / "arm", names={})
    before = data_of(arm)
    change_feature(arm, "action", names=["x", "y"])
    assert compare(before, data_of(arm)).parts == ()


@pytest.mark.slow
def test_a_resumed_run_and_an_evaluation_name_what_has_changed(launch, arm, tmp_path):
    words = ["robot", "policy.type=act", *TINY_ACT, "device=cpu", "batch_size=4", f"dataset.root={arm}"]
    run = f"save_dir={tmp_path / 'run'}"
    succeed(launch.train(*words, run, "steps=1"))
    exchange_action(arm)
    again = launch.train(*words, run, "steps=2")
    assert again.code == 2 and "other data (train: names of action, val: names of action)" in again.err
    scored = succeed(launch.python("tools/evaluate.py", str(tmp_path / "run")))
    assert "not those of the checkpoint (train: names of action" in scored.out + scored.err
    everything = succeed(launch.python("tools/evaluate.py", str(tmp_path / "run"), "--split=all"))
    assert "names of action: y, x, of the training x, y" in everything.out + everything.err
    change_feature(arm, "action", names=["x", "y"])
    right = succeed(launch.python("tools/evaluate.py", str(tmp_path / "run"), "--split=all"))
    assert "of the training" not in right.out + right.err
