"""The samples of a random walk of four episodes, in LeRobot's form."""

from types import SimpleNamespace

import torch

LENGTH, EPISODES = 24, 4


class LeRobotDataset:
    def __init__(self, repo_id, root, delta_timestamps):
        draw = torch.Generator().manual_seed(0)
        self.state = torch.randn(EPISODES * LENGTH, 3, generator=draw).view(EPISODES, LENGTH, 3).cumsum(1)
        self.ahead = torch.arange(len(delta_timestamps["action"]))
        features = {"observation.state": {"shape": (3,)}, "action": {"shape": (3,)}}
        values = self.state.flatten(0, 1)
        stats = {"mean": values.mean(0), "std": values.std(0)}
        self.meta = SimpleNamespace(features=features, stats=dict.fromkeys(features, stats))

    def __len__(self):
        return EPISODES * LENGTH

    def __getitem__(self, index):
        episode, frame = divmod(index, LENGTH)
        frames = frame + self.ahead
        return {
            "observation.state": self.state[episode, frame],
            "action": self.state[episode, frames.clamp(max=LENGTH - 1)],
            "action_is_pad": frames >= LENGTH,
            "task": "walk",
        }
