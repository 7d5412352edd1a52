"""PushT: the same seeds the same bits, a planner whose copy of the physics is gym-pusht's, an expert that can do it."""

import json

import numpy as np
import pytest
import torch
from conftest import succeed
from robot_tasks import task_of

pytest.importorskip("gym_pusht", reason="needs the extra [pusht]: pip install gym-pusht==0.1.8")

from tasks.envs import trials
from tasks.envs.pusht import CAMERA, GOAL, KEYPOINTS, STATE, Box, PushT, glide, outline
from tasks.robots.trials import _shrunk

SEEDS = np.arange(3)


def pose(table):
    return np.array([*table.block.position, table.block.angle])


def test_a_table_is_a_pure_function_of_its_seed():
    def played(seeds):
        worlds = PushT(seeds)
        for step in range(5):
            worlds.step(np.full((len(seeds), 2), 200.0 + 20 * step))
        return worlds.observe()

    one, two, alone = played(SEEDS), played(SEEDS), played(SEEDS[1:2])
    for name, value in one.items():
        assert np.array_equal(value, two[name]) and np.array_equal(value[1:2], alone[name])
    assert len(np.unique(one[KEYPOINTS], axis=0)) == len(SEEDS)


def test_observations_are_as_declared():
    for pictures in (True, False):
        worlds = PushT(SEEDS, 48, pictures)
        seen = worlds.observe()
        found = {name: (str(value.dtype), value.shape[1:]) for name, value in seen.items()}
        stated = {
            name: ("uint8" if kind == "image" else kind, shape) for name, (kind, shape) in worlds.features.items()
        }
        assert found | {"action": ("float32", (2,))} == stated
    assert np.array_equal(PushT(SEEDS, 48).render(slice(1, 2)), PushT(SEEDS, 48).observe()[CAMERA][1:2])


def test_success_is_the_covered_outline_and_ends_the_trial():
    worlds = PushT(SEEDS, pictures=False)
    block, finger = worlds.tables[0].block, worlds.tables[0].agent
    block.angle = GOAL[2]
    block.position = tuple(GOAL[:2])
    finger.position = (450.0, 450.0)
    assert np.abs(outline(pose(worlds.tables[0])) - outline(GOAL)).max() < 1e-9
    worlds.step(np.full((3, 2), 450.0))
    assert worlds.success.tolist() == [True, False, False] and worlds.reward[0] == 1 and max(worlds.reward[1:]) < 1
    before = worlds.observe()[STATE][0]
    worlds.step(np.full((3, 2), 100.0))
    after = worlds.observe()[STATE]
    assert np.array_equal(after[0], before) and not np.array_equal(after[1], before)


def test_what_the_planner_tries_is_what_happens():
    """Its copy of the physics ends where gym-pusht does, pushed block and all."""
    rng = np.random.default_rng(0)
    worlds, box, moved = PushT(np.arange(20), pictures=False), Box(), 0
    off = []
    for table in worlds.tables:
        before = pose(table)
        finger, velocity = np.array(table.agent.position), np.array(table.agent.velocity)
        actions = before[:2] + rng.normal(0, 40, (1, 4, 2))
        moves, end = glide(finger, velocity, actions)
        expected = box.run(np.array([*finger, *before]), moves[0].tolist(), 40)[0]
        for action in actions[0]:
            table.step(action)
        assert np.abs(np.array(table.agent.position) - end[0]).max() < 1e-6
        off.append(np.abs(pose(table) - expected).max())
        moved += bool(np.abs(pose(table) - before).max() > 5)
    assert moved >= 10
    assert np.median(off) < 0.01 and max(off) < 3  # of 512; it has no memory of the contacts before


@pytest.mark.slow
def test_the_expert_pushes_the_block_home():
    worlds = PushT(SEEDS, pictures=False)
    episodes = list(trials.demonstrate(worlds, SEEDS, 0.02))
    assert len(episodes) == worlds.success.sum() >= 2
    for episode in episodes:
        length = len(episode.features["action"])
        assert length <= worlds.patience and {len(track) for track in episode.features.values()} == {length}


@pytest.mark.slow
def test_record_train_try(launch, tmp_path):
    """Two processes record, train and try as one does."""
    words = "robot env.type=pusht env.demonstrations=4 env.size=32 env.noise=0 policy.chunk_size=4 policy.num_steps=1 "
    words += "steps=3 eval.n_episodes=3 dataset.eval_split=0"
    done = succeed(launch.torchrun(2, "train.py", *words.split(), f"save_dir={tmp_path / 'run'}"))
    assert "observation.state 2, observation.environment_state 16, action 2, 1 camera;" in done.out
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rates = [line["success_rate"] for line in lines if "success_rate" in line]
    assert rates and all(0 <= rate <= 1 for rate in rates)


def test_pictures_reach_the_policy_in_trials_as_in_training(monkeypatch, tmp_path):
    """Shrunk by the same filter as the recorded ones, to one level of 255."""
    monkeypatch.setattr("tasks.robots.simulation.GENERATED", tmp_path)
    monkeypatch.setattr("tasks.envs.pusht.PushT.expert", lambda self: np.full((len(self.tables), 2), 256.0))
    monkeypatch.setattr("tasks.envs.pusht.PushT.step", lambda self, actions: self.success.fill(True))
    task, train, _ = task_of("robot", "env.type=pusht", "env.demonstrations=4", "dataset.eval_split=0")
    batch = train.__getitems__([0])
    fresh = torch.from_numpy(PushT(np.arange(1)).observe()[CAMERA])
    assert batch[CAMERA].shape == (1, 3, 32, 32)
    assert (_shrunk(fresh, task.sizes[CAMERA]).int() - batch[CAMERA].int()).abs().max() <= 1


@pytest.mark.slow
def test_without_the_package_it_says_so(launch, tmp_path):
    (tmp_path / "hidden/gym_pusht").mkdir(parents=True)
    (tmp_path / "hidden/gym_pusht/__init__.py").write_text("raise ImportError('hidden')")
    done = launch.python("train.py", "robot", "env.type=pusht", PYTHONPATH=str(tmp_path / "hidden"))
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert "PushT needs the gym-pusht package (env.type=pusht): pip install gym-pusht==0.1.8" in done.err
