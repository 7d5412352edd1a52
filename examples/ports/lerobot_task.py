"""The task of lerobot_policy.py."""

import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from engine.contract import Loss, inputs
from engine.contract import Task as Base

from project import CHUNK, small_act

times = [step / 10 for step in range(CHUNK)]  # 10 frames a second


class Task(Base):
    defaults = {"steps": 40, "global_batch": 16, "optim.grad_clip": 10.0}

    def datasets(self):
        dataset = LeRobotDataset(
            "mine/walks", root="walks", delta_timestamps={"action": times}
        )
        self.meta = dataset.meta
        return dataset, None

    def model(self):
        policy, self.normalize = small_act(self.meta)
        return policy

    def optimizer(self, model):
        return torch.optim.AdamW(model.get_optim_params(), lr=1e-3)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)

    def loss(self, net, batch):
        batch = self.normalize(inputs(batch))
        loss, _ = net(batch)
        frames = (~batch["action_is_pad"]).sum()
        return Loss(loss * frames, frames)
