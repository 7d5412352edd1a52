"""Stands in for the three names of Hugging Face's package that a port of examples/ports takes."""

import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


class BertConfig(SimpleNamespace):
    pass


class BertForSequenceClassification(nn.Module):
    """The mean of the words' embeddings, and two layers."""

    def __init__(self, config):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, 2)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None]
        mean = (self.embeddings(input_ids) * mask).sum(1) / mask.sum(1)
        return SimpleNamespace(logits=self.classifier(torch.tanh(self.LayerNorm(mean))))


def get_cosine_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def factor(step):
        if step < num_warmup_steps:
            return step / num_warmup_steps
        share = (step - num_warmup_steps) / (num_training_steps - num_warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * share))

    return LambdaLR(optimizer, factor)
