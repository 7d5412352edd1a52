"""Texts that are told of demonstrations, LeRobot's language_persistent: which one is heard when, on any cut."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import succeed
from lerobot_data import PERSISTENT, annotate, pq
from lerobot_data import text_row as row
from refusals import refused
from robot_tasks import record, task_of

from engine.contract import sample_seeds
from engine.data.samples import Fetcher
from formats.robots.lerobot import read

pytestmark = pytest.mark.usefixtures("robot_caches")


TOLD = {  # by episode; it is (9 + episode) frames long, at 10 Hz
    0: [
        row("subtask", "reach", 0.0),
        row("subtask", "close", 0.3),
        row("subtask", "lift", 0.7),
        row("plan", "1. reach", 0.0),
    ],
    1: [row("task_aug", text, 0.0, "user") for text in ("walk 1", "go one", "one walk")] + [row("memory", None, 0.0)],
    2: [row("subtask", "turn", 0.5), row("task_aug", "walk on", 0.0, "user")],
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return annotate(record(tmp_path_factory.mktemp("told") / "set", episodes=4, cameras=0), TOLD)


def heard(root, command, epochs=1):
    """For each epoch {(episode, frame): text} of the training's and the validation's samples."""
    task, *sets = task_of("robot", f"dataset.root={root}", "policy.chunk_size=4", f"dataset.command={command}")
    found = []
    for epoch in range(epochs):
        found.append({})
        for chunks in sets:
            seeds = sample_seeds(7, epoch, torch.arange(len(chunks))) & ((1 << 63) - 1)
            batch = chunks.__getitems__(range(len(chunks)), seeds)
            for e, f, at in zip(batch["episode_index"], batch["frame_index"], batch["text_index"], strict=True):
                found[-1][int(e), int(f)] = task.texts[at]
    return found


def test_columns_of_texts_are_no_obstacle(told, tmp_path):
    demos = read(told)
    assert demos.features[PERSISTENT].kind is None and PERSISTENT not in demos.columns
    task, train, _ = task_of("robot", f"dataset.root={told}", "policy.chunk_size=4")
    assert task.texts == ["walk 0", "walk 1"] and "text_index" not in train.__getitems__([0, 1])


def test_a_subtask_holds_until_the_next(told):
    (found,) = heard(told, "subtask")
    assert len(found) == 9 + 10 + 11 + 12
    for (e, f), text in found.items():
        begun = [
            it["content"] for it in TOLD.get(e, []) if it["style"] == "subtask" and it["timestamp"] <= f / 10 + 1e-6
        ]
        assert text == (begun[-1] if begun else f"walk {e % 2}"), (e, f)


def test_wordings_are_drawn_by_the_seed_of_the_sample(told):
    found = heard(told, "task_aug", 300)
    assert found[:2] == heard(told, "task_aug", 2) and found[0] != found[1]
    assert {text for one in found for (e, _), text in one.items() if e in (0, 3)} == {"walk 0", "walk 1"}
    assert {text for one in found for (e, _), text in one.items() if e == 2} == {"walk on"}
    drawn = [one[1, f] for one in found for f in range(10)]
    for text in ("walk 1", "go one", "one walk"):
        assert abs(drawn.count(text) / len(drawn) - 1 / 3) < 0.03  # three standard deviations
    task, train, _ = task_of("robot", f"dataset.root={told}", "policy.chunk_size=4", "dataset.command=task_aug")
    seeds = torch.arange(12)
    whole = train.__getitems__(range(12), seeds)["text_index"]
    parts = [train.__getitems__([i], seeds[i : i + 1])["text_index"] for i in range(12)]
    assert torch.equal(whole, torch.cat(parts)) and len(task.texts) == 5
    assert torch.equal(train.__getitems__(range(12))["text_index"], Fetcher(train).fetch([*range(12)])["text_index"])
    assert "5 texts with dataset.command=task_aug" in task.summary()


def test_several_datasets_are_told_each_by_itself(told, tmp_path):
    """One of them without a word: its frames keep their tasks."""
    other = record(tmp_path / "other", episodes=3, cameras=0)
    third = annotate(record(tmp_path / "third", cameras=0), {1: [row("subtask", "dance", 0.4)]})
    words = ["policy.chunk_size=4", "dataset.command=subtask", "dataset.weights=[.5,.2,.3]"]
    task, train, val = task_of("robot", f"dataset.root=[{told},{other},{third}]", *words)
    heard_of_each = {0: heard(told, "subtask")[0], 1: {}, 2: {(1, f): "dance" for f in range(4, 10)}}
    for chunks in (train, val):
        every = range(len(chunks))
        batch = chunks.__getitems__(every, torch.tensor(every))
        for n, at in enumerate(batch["text_index"].tolist()):
            k, e, f = (int(batch[f"{name}_index"][n]) for name in ("dataset", "episode", "frame"))
            assert task.texts[at] == heard_of_each[k].get((e, f), f"walk {e % 2}"), (k, e, f)
    order = train.epoch_order(3, 1)
    assert len(order) == len(train) and len(train.sources) == len(train)
    drawn = task.pictures(task.model(), {}, {})
    assert set(drawn) == {"episode_0", "episode_1"}, "a held-out episode hears what it is scored with"


@pytest.mark.slow
def test_one_and_two_processes_hear_the_same(launch, tmp_path, told):
    """And without the texts, or with others, it is another training."""
    words = ["robot", f"dataset.root={told}", "policy.chunk_size=4", "steps=8", "log_every=1", "lr=1e-2"]
    words += ["amp=off"]  # `auto` takes bf16 where the CPU has it, whose rounding is larger than what is compared
    ends = {}
    for name, processes, *more in [
        ("one", 1, "dataset.command=task_aug", "batch_size=8"),
        ("two", 2, "dataset.command=task_aug", "batch_size=4"),
        ("task", 1, "batch_size=8"),
        ("subtask", 1, "dataset.command=subtask", "batch_size=8"),
    ]:
        folder = tmp_path / name
        succeed(launch.torchrun(processes, "train.py", *words, *more, f"save_dir={folder}"))
        ends[name] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]["loss"]
    assert "action_l1" in succeed(launch.python("tools/evaluate.py", str(tmp_path / "one"))).out
    assert ends["one"] == pytest.approx(ends["two"], rel=1e-6)
    assert min(abs(ends["one"] / ends[name] - 1) for name in ("task", "subtask")) > 1e-5, ends


@pytest.mark.parametrize(
    ("command", "rows", "says"),
    [
        ("subtask", None, ["no texts in language_persistent", "dataset.command=subtask", "give task"]),
        (
            "subtask",
            {0: [row("plan", "p", 0.0), row("memory", "m", 0.1)]},
            ["style subtask", "memory (1), plan (1)"],
        ),
        (
            "subtask",
            {1: [row("subtask", "a", 0.2), row("subtask", "b", 0.2)]},
            ["episode 1 frame 0: two rows", "same time"],
        ),
        ("task_aug", {0: [row("task_aug", " ", 0.0), row("task_aug", None, 0.0)]}, ["no texts in"]),
    ],
)
def test_what_cannot_be_heard(tmp_path, command, rows, says):
    root = record(tmp_path / "set", cameras=0)
    if rows:
        annotate(root, rows)
    refused(says, lambda: task_of("robot", f"dataset.root={root}", f"dataset.command={command}"))


def test_act_hears_nothing(told):
    words = ["robot", "policy.type=act", f"dataset.root={told}", "dataset.command=subtask"]
    refused(["ACT hears no command", "dataset.command=subtask", "vla"], lambda: task_of(*words))


def test_a_file_of_texts_that_is_damaged(told, tmp_path):
    root = shutil.copytree(told, tmp_path / "set")
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns([PERSISTENT]), path)
    refused(["no language_persistent can be read", "file-000.parquet"], lambda: heard(root, "subtask"))
    assert np.isfinite(read(root).columns["action"]).all()
