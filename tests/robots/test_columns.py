"""Columns that hold no numbers that can be learned from: the episode is named, and leaving it out goes on."""

import shutil
from decimal import Decimal

import numpy as np
import pytest
from lerobot_data import LENGTHS, V3, change_feature, pa, pq
from refusals import refused

from formats.robots.lerobot import read


@pytest.fixture(params=["v2.1", V3])
def root(made, tmp_path, request):
    return shutil.copytree(made(request.param), tmp_path / "set")


def change_rows(root, name, change, kind):
    """Replace a feature's values of episode 1: `change(values)`; `kind` is the arrow type of all values."""
    for path in sorted(root.glob("data/*/*.parquet")):
        table = pq.read_table(path)
        here = np.array(table["episode_index"]) == 1
        values = table[name].to_pylist()
        changed = iter(change([value for value, is_here in zip(values, here, strict=True) if is_here]))
        values = [next(changed) if is_here else value for value, is_here in zip(values, here, strict=True)]
        place = table.column_names.index(name)
        pq.write_table(table.set_column(place, name, pa.array(values, kind)), path)


def put(row, value):
    return lambda values: [*values[:row], value, *values[row + 1 :]]


DOUBLES = pa.list_(pa.float64())
FAULTS = {
    "too large": (put(2, [0.0, 1e39, 0.0]), DOUBLES, ["frame 2: action is 1e+39, too large for float32"]),
    "too small": (put(0, [-4e38, 0.0, 0.0]), DOUBLES, ["frame 0: action is -4e+38, too large for float32"]),
    "no value": (put(3, None), DOUBLES, ["frame 3: action has no value"]),
    "no number": (put(3, [0.0, None, 0.0]), DOUBLES, ["frame 3: action has no value"]),
    "a number more": (put(1, [0.0] * 4), DOUBLES, ["frame 1: action has 4 numbers, 3 before"]),
    "infinity": (put(1, [0.0, np.inf, 0.0]), DOUBLES, ["frame 1: action is not finite"]),
}


@pytest.mark.parametrize(("change", "kind", "says"), FAULTS.values(), ids=FAULTS)
@pytest.mark.filterwarnings("error")
def test_a_fault_of_one_episode_is_named_and_left_out(root, change, kind, says):
    change_rows(root, "action", change, kind)
    refused([f"episode 1 {says[0]}", "dataset.exclude_episodes=1"], lambda: read(root))
    refused(["dataset.exclude_episodes=0,1"], lambda: read(root, exclude=[0]))
    right = read(root, exclude=[1]).columns["action"]
    assert len(right) == sum(LENGTHS) - LENGTHS[1], "the fault of an episode that is left out does not matter"
    assert np.array_equal(right, read(root, episodes=[0, 2, 3]).columns["action"]) and np.isfinite(right).all()


def test_the_rows_of_the_chosen_episodes_are_those_of_all(root):
    everything = read(root)
    for chosen in ([1], [0, 3], [1, 2], [2]):
        some = read(root, episodes=chosen)
        for name, column in everything.columns.items():
            rows = np.isin(everything.columns["episode_index"], chosen)
            assert np.array_equal(some.columns[name], column[rows]), (name, chosen)


def test_whole_numbers_beyond_int64_are_refused(root):
    change_feature(root, "action", dtype="uint64")
    big = pa.list_(pa.uint64())

    def whole(values):
        return [[0, 0, 2**63 + n] for n in range(len(values))]

    for path in sorted(root.glob("data/*/*.parquet")):
        table = pq.read_table(path)
        place = table.column_names.index("action")
        pq.write_table(table.set_column(place, "action", pa.array([[1, 2, 3]] * len(table), big)), path)
    assert read(root).columns["action"].tolist()[0] == [1, 2, 3]
    change_rows(root, "action", whole, big)
    refused(["episode 1 frame 0: action is 9.22337e+18, too large for int64"], lambda: read(root))


@pytest.mark.parametrize("kind", ["text", "decimal"])
def test_columns_of_no_numbers(root, kind):
    for name, cure in {
        "action": "write numbers: action cannot be left out",
        "observation.state": 'give observation.state the dtype "string" in meta/info.json: then it is not read',
    }.items():
        other = shutil.copytree(root, root.with_name(name))
        for path in sorted(other.glob("data/*/*.parquet")):
            table = pq.read_table(path)
            values = [
                ["1.5"] * len(row) if kind == "text" else [Decimal("1.5")] * len(row) for row in table[name].to_pylist()
            ]
            place = table.column_names.index(name)
            pq.write_table(table.set_column(place, name, pa.array(values)), path)
        refused([f"{name} is of type", "not numbers", cure], lambda other=other: read(other))
        if name != "action":
            change_feature(other, name, dtype="string")
            assert name not in read(other).columns, "the cure goes on"
