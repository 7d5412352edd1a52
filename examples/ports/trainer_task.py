"""The task of trainer.py."""

import torch
from transformers import get_cosine_schedule_with_warmup

from engine.contract import Loss, Sums, inputs
from engine.contract import Task as Base

from project import Words, small_bert

CLASS_WEIGHTS = torch.tensor([1.0, 3.0])


class Task(Base):
    defaults = {
        "epochs": 4,
        "global_batch": 16,
        "optim.lr": 3e-3,
        "optim.weight_decay": 0.01,
        "patience": 2,
    }
    monitor, higher_is_better = "accuracy", True

    def datasets(self):
        return Words(200), Words(80, seed=1)

    def model(self):
        return small_bert()

    def scheduler(self, optimizer):
        return get_cosine_schedule_with_warmup(
            optimizer,
            num_warmup_steps=10,
            num_training_steps=self.total_steps,
        )

    def compute_loss(self, model, inputs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = CLASS_WEIGHTS.to(labels.device)
        loss = torch.nn.functional.cross_entropy(
            outputs.logits, labels, weight=weights, reduction="sum"
        )
        hits = outputs.logits.argmax(1) == labels
        return Loss(loss, weights[labels].sum()), hits.sum()

    def loss(self, net, batch):
        return self.compute_loss(net, inputs(batch))[0]

    def score(self, model, batch):
        count = torch.tensor(len(batch["labels"]))
        loss, hits = self.compute_loss(model, inputs(batch))
        return Sums(loss=loss.total, weight=loss.weight, hits=hits, count=count)

    def report(self, sums):
        return {
            "loss": sums["loss"] / sums["weight"],
            "accuracy": sums["hits"] / sums["count"],
        }
