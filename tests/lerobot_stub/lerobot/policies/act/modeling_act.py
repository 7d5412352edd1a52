"""A chunk of actions from a state, by two layers; the loss is a mean over the entries that are not padded."""

import torch
from torch import nn


class ACTPolicy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.actions = config.chunk_size, *config.output_features["action"].shape
        width = config.input_features["observation.state"].shape[0]
        self.layers = nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, torch.Size(self.actions).numel()))

    def get_optim_params(self):
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def forward(self, batch):
        errors = (self.layers(batch["observation.state"]).view(-1, *self.actions) - batch["action"]).abs()
        valid = ~batch["action_is_pad"][..., None].expand_as(errors)
        loss = (errors * valid).sum() / valid.sum()
        return loss, {"l1_loss": loss.item()}
