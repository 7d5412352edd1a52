import torch

from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.two_layers import POLICIES


def make_policy_config(policy_type, **values):
    return PreTrainedConfig.known[policy_type](**values)


def get_policy_class(kind):
    return POLICIES[kind]


class Pipeline:
    def __init__(self, stats, name):
        self.stats, self.name = stats, name

    def save_pretrained(self, folder):
        torch.save(self.stats, f"{folder}/{self.name}.pt")


class Before(Pipeline):
    """Normalises by mean and deviation; a command becomes its length."""

    def __call__(self, batch):
        found = dict(batch)
        for name in ("observation.state", "action"):
            if name in batch:
                found[name] = (batch[name] - self.stats[name]["mean"]) / self.stats[name]["std"]
        found["words"] = torch.tensor([[float(len(text))] for text in batch["task"]])
        return found


class After(Pipeline):
    def __call__(self, actions):
        return actions * self.stats["action"]["std"] + self.stats["action"]["mean"]


def make_pre_post_processors(config, dataset_stats):
    return Before(dataset_stats, "before"), After(dataset_stats, "after")
