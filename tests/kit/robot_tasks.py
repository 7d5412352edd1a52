"""The task `robot`, its command lines, and a dataset of random walks."""

import numpy as np
import torch

import tasks
from engine import config
from engine.contract import BatchInfo, sample_seeds
from formats.robots.lerobot_writer import Recorder

TINY_ACT = (
    "policy.dim_model=16 policy.n_heads=2 policy.dim_feedforward=16 policy.n_encoder_layers=1 "
    "policy.n_vae_encoder_layers=1 policy.chunk_size=6 policy.latent_dim=4"
).split()
DISCS = ["robot", "env.demonstrations=8", "env.size=16", "policy.chunk_size=5", "eval.n_episodes=4"]


def parse(*words):
    return config.parse(list(words), tasks.load).cfg


def task_of(*words):
    """Return the task of a command line, and its training and validation samples."""
    cfg = parse(*words)
    task = tasks.load(cfg.task)(cfg)
    return task, *task.datasets()


def seeded(count):
    """Return the numbers by which the loader seeds so many samples."""
    index = torch.arange(count)
    return BatchInfo(index, index, sample_seeds(0, 0, index))


def record(root, episodes=4, frames=9, dim=3, cameras=1, env=0, name="cam"):
    """Record random walks; return the folder."""
    rng = np.random.default_rng(0)
    pictures = {f"observation.images.{name}{n}": ("image", (3, 32, 40)) for n in range(cameras)}
    features = {"observation.state": ("float32", (dim,)), "action": ("float32", (dim,)), **pictures}
    features |= {"observation.environment_state": ("float32", (env,))} if env else {}
    with Recorder(root, 10, features) as recorder:
        for episode in range(episodes):
            length = frames + episode
            walk = rng.normal(size=(length, dim)).cumsum(0).astype(np.float32)
            shots = {name: rng.integers(0, 256, (length, 3, 32, 40), dtype=np.uint8) for name in pictures}
            points = {"observation.environment_state": 100 + 50 * walk[:, :env]} if env else {}
            numbers = {"observation.state": walk, "action": walk + 1, **points}
            recorder.add_episode({**numbers, **shots}, f"walk {episode % 2}")
    return root
