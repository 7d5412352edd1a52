"""The answers of a robot without a model, against plain loops over the recorded numbers."""

import json

import numpy as np
import pytest
from conftest import succeed
from lerobot_data import change_feature
from robot_tasks import TINY_ACT, task_of
from runs import records

from formats.robots.lerobot import Feature
from formats.robots.lerobot_writer import Recorder
from tasks.robots.baselines import match_numbers

LENGTHS = [9, 14, 6, 11, 8, 12]
CHUNK = 6
NAMES = {"observation.state": ["y", "x", "grip"], "action": ["x", "y"]}
HELD = [1, 0]
"""The numbers of the state that the names of the action hold."""


def write(root, seed=0, names=NAMES):
    """Record episodes of different means; return [{feature: (T, D)} of each episode]."""
    rng, episodes = np.random.default_rng(seed), []
    features = {"observation.state": ("float32", (3,)), "action": ("float32", (2,))}
    with Recorder(root, 10, features, names=names) as recorder:
        for e, length in enumerate(LENGTHS):
            state = rng.normal([e, -2 * e, 0], 1, (length, 3)).astype(np.float32)
            action = (state[:, HELD] + rng.normal(0.1, 0.1, (length, 2))).astype(np.float32)
            episodes.append({"observation.state": state, "action": action})
            recorder.add_episode(episodes[-1], "go")
    return episodes


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    """The folders of two datasets, and {name: its episodes}."""
    folder = tmp_path_factory.mktemp("arms")
    return folder, {name: write(folder / name, seed) for seed, name in enumerate("ab")}


def l1_of_chunks(episodes, answer):
    """Return the mean error of `answer(state)` over the actions of the chunk from each frame on."""
    errors = []
    for episode in episodes:
        for t, state in enumerate(episode["observation.state"]):
            errors.append(np.abs(episode["action"][t : t + CHUNK] - answer(state)))
    return np.concatenate(errors).mean()


def mean_of(episodes):
    return np.concatenate([episode["action"] for episode in episodes]).astype(np.float64).mean(0)


SPLITS = {
    "a share validates": [],
    "half validate": ["dataset.eval_split=0.5"],
    "none validates": ["dataset.eval_split=0"],
    "some are chosen": ["dataset.episodes=[0,2,3,5]"],
    "some are excluded": ["dataset.exclude_episodes=[1,4]"],
}


@pytest.mark.parametrize("words", SPLITS.values(), ids=SPLITS)
def test_the_mean_action_is_that_of_the_training_frames(arms, words):
    folder, episodes = arms
    task, train, _ = task_of("robot", f"dataset.root={folder / 'a'}", "policy.chunk_size=6", *words)
    trained = [episodes["a"][int(source)] for source in dict.fromkeys(train.sources.tolist())]
    np.testing.assert_allclose(task.trained_mean, mean_of(trained), rtol=1e-12)
    if "dataset.eval_split=0" not in words:
        assert not np.allclose(task.trained_mean, mean_of(episodes["a"]), rtol=1e-3)


def test_the_mean_action_is_without_excluded_samples(arms):
    folder, episodes = arms
    words = ["robot", f"dataset.root={folder / 'a'}", "policy.chunk_size=6", "dataset.split_seed=1"]
    source = task_of(*words)[1].sources[0]
    task, train, _ = task_of(*words, f"exclude={source},sample:{len(train_of(words)) - 1}")
    trained = [episodes["a"][int(e)]["action"] for e in dict.fromkeys(train.sources.tolist()) if e != source]
    actions = np.concatenate(trained).astype(np.float64)
    np.testing.assert_allclose(task.trained_mean, actions[:-1].mean(0), rtol=1e-12)


def train_of(words):
    return task_of(*words)[1]


@pytest.mark.parametrize("weights", [[], [9, 1]])
def test_a_frame_of_a_mixture_counts_as_often_as_an_epoch_has_it(arms, weights):
    folder, episodes = arms
    roots = f"dataset.root=[{folder / 'a'},{folder / 'b'}]"
    more = [f"dataset.weights={weights}"] if weights else []
    task, train, _ = task_of("robot", roots, "policy.chunk_size=6", *more)
    drawn = train.epoch_order(0, 0) if weights else np.arange(len(train))
    times = np.bincount(train.owner[drawn], minlength=2)
    sums = np.zeros(2)
    for k, name in enumerate("ab"):
        own = {source.split(":")[1] for source in train.sources.tolist() if source.startswith(name)}
        sums += times[k] * mean_of([episodes[name][int(e)] for e in own])
    np.testing.assert_allclose(task.trained_mean, sums / times.sum(), rtol=1e-12)


TINY = [*TINY_ACT, "policy.type=act", "device=cpu", "batch_size=4", "steps=1", "schedule.warmup_steps=0"]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_prints_both_beside_its_score(launch, arms, tmp_path, processes):
    folder, episodes = arms
    words = ["robot", f"dataset.root={folder / 'a'}", *TINY, f"save_dir={tmp_path / 'run'}"]
    done = succeed(launch.train(*words, processes=processes))
    last = records(tmp_path / "run", "eval")[-1]
    _, train, val = task_of(*words)
    trained, held_out = ([episodes["a"][int(e)] for e in dict.fromkeys(each.sources.tolist())] for each in (train, val))
    mean = mean_of(trained)
    truths = {
        "baseline/hold_state_l1": l1_of_chunks(held_out, lambda state: state[HELD]),
        "baseline/mean_action_l1": l1_of_chunks(held_out, lambda state: mean),
    }
    for name, truth in truths.items():
        assert last[name] == pytest.approx(truth, rel=1e-6), name
    shown = "holding the state {:.4f}, mean action {:.4f}".format(*truths.values())
    assert f"({shown})" in done.out and f"; {shown}" in done.out, done.out
    if processes > 1:
        return
    other = f"dataset.root={folder / 'b'}"
    scored = succeed(launch.python("tools/evaluate.py", str(tmp_path / "run"), other, "--split=all", "--json"))
    found = json.loads(scored.out)["metrics"]["baseline/mean_action_l1"]
    assert found == pytest.approx(l1_of_chunks(episodes["b"], lambda state: mean), rel=1e-6)


def feature(size, names):
    return Feature("float32", (size,), names, "ACTION", False)


MATCHES = {
    "the same names": (["x", "y"], ["x", "y"], [0, 1], []),
    "exchanged": (["x", "y"], ["y", "x"], [1, 0], []),
    "a state of more numbers": (["x", "y"], ["v", "y", "x"], [2, 1], []),
    "no names of the action": ([], ["y", "x"], [0, 1], []),
    "no names of the state": (["x", "y"], [], [0, 1], []),
    "one name for both": (["motors"], ["y", "x"], [0, 1], []),
    "other names": (["x", "y"], ["x", "z"], [], ["y"]),
    "a name twice in the state": (["x", "y"], ["x", "y", "y"], [], ["y"]),
    "a name twice in the action": (["x", "x"], ["x", "y"], [], ["x", "x"]),
    "twice the same, in both": (["x", "x"], ["x", "x"], [0, 1], []),
    "another size without names": ([], ["a", "b", "c"], [], []),
}


@pytest.mark.parametrize(("action", "state", "order", "unnamed"), MATCHES.values(), ids=MATCHES)
def test_numbers_are_matched_by_name(action, state, order, unnamed):
    found = match_numbers(feature(2, action), feature(len(state) or 2, state))
    assert found == (order, unnamed)
    assert match_numbers(feature(2, action), None) == ([], [])


def test_names_that_cannot_be_matched_are_a_note_and_no_score(launch, tmp_path):
    names = {"observation.state": ["y", "x", "grip"], "action": ["x", "height"]}
    write(tmp_path / "set", names=names)
    words = ["robot", f"dataset.root={tmp_path / 'set'}", *TINY, f"save_dir={tmp_path / 'run'}"]
    done = succeed(launch.train(*words))
    assert "note: no score of holding the state: observation.state has no single number height" in done.out + done.err
    last = records(tmp_path / "run", "eval")[-1]
    assert "baseline/hold_state_l1" not in last and "baseline/mean_action_l1" in last


def test_each_set_of_a_mixture_holds_its_own_numbers(tmp_path):
    episodes = {"a": write(tmp_path / "a"), "b": write(tmp_path / "b", seed=1)}
    change_feature(tmp_path / "b", "observation.state", names=["x", "y", "grip"])
    task, _, val = task_of("robot", f"dataset.root=[{tmp_path / 'a'},{tmp_path / 'b'}]", "policy.chunk_size=6")
    batch = val.__getitems__([*range(len(val))])
    held = task._without_model(batch)["off_hold"].numpy()
    for row, source, frame in zip(held, val.sources.tolist(), batch["frame_index"].tolist(), strict=True):
        name, _, e = source.partition(":")
        state = episodes[name][int(e)]["observation.state"][frame]
        assert np.array_equal(row, state[{"a": [1, 0], "b": [0, 1]}[name]]), source
