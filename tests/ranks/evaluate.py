"""Run under torchrun (or plain): evaluate N random samples for each N, in float64; rank 0 saves what came out.

torchrun ... evaluate.py OUT.pt 1 2 7 61 196
"""

import random
import sys
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

import data_loader
import train
from engine import config, launch, optim, plan, precision
from engine.contract import Sums
from engine.evaluation import evaluate_split
from engine.run import Run
from plugins.resilience.signals import StopRequest
from tasks.shared.classification import Classification, LossSettings

NUM_CLASSES = 7


class Random:
    """Imbalanced classes, so that macro F1 hangs on single samples."""

    def __init__(self, num_samples):
        rng = np.random.default_rng(num_samples)
        self.x = torch.from_numpy(rng.normal(size=(num_samples, 10)))
        shares = [0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.02]
        self.labels = rng.choice(NUM_CLASSES, size=num_samples, p=shares)

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        return {"x": self.x[indices], "y": torch.from_numpy(self.labels[indices])}


class Task(Classification):
    classes = [f"class{c}" for c in range(NUM_CLASSES)]
    num_trials = 33

    def score(self, model, batch):
        """And what comes out of torch's, NumPy's and Python's own generators, as a model that draws would."""
        drawn = torch.rand(3).sum().double() + np.random.rand() + random.random()
        return Sums(super().score(model, batch) | {"drawn": drawn})

    def trials(self, model, which, stopped):
        luck = torch.rand(3).sum().double() + np.random.rand() + random.random()
        return Sums(tried=torch.eye(self.num_trials, dtype=torch.int64)[list(which)].sum(0), luck=luck)

    def collect(self, model, batch):
        """Of each sample a tensor, a text, and as many numbers as its own number says."""
        scores = model(batch["x"]).softmax(1)
        texts = [f"sample {n}" for n in batch["lockstep"].index.tolist()]
        return {
            "score": scores,
            "y": batch["y"],
            "text": texts,
            "some": [x[: n % 4] for n, x in zip(batch["lockstep"].index, scores, strict=True)],
        }

    def report(self, sums):
        """The area under the ROC curve of the first class: pairs of one and another sample in the right order; 0.5 of
        none."""
        self.collected, score, first = sums.collected, sums.collected["score"][:, 0], sums.collected["y"] == 0
        right = (score[first][:, None] > score[~first]).double().mean()
        return super().report(sums) | {"auc": float(right.nan_to_num(0.5))}


def main():
    torch.set_default_dtype(torch.float64)
    out, sizes = sys.argv[1], [int(word) for word in sys.argv[2:]]
    cfg = config.Config(batch_size=8)
    world = train.setup_distributed(cfg)
    torch.manual_seed(0)
    model = nn.Linear(10, NUM_CLASSES)
    results = {}
    for size in sizes:
        data = Random(size)
        task = Task(SimpleNamespace(loss=LossSettings(label_smoothing=0.1)))
        task.train_counts = np.array([50, 20, 10, 10, 5, 3, 2])
        the_plan = plan.make_plan(cfg, world, size)
        _, batches = data_loader.create_data_loaders(cfg, world, the_plan, data, data)
        run = Run(
            cfg=cfg, world=world, plan=the_plan, task=task, precision=precision.choose("off", world.device),
            model=model, net=model, optimizer=optim.make_optimizer(model, cfg.optim), ema=None,
            scaler=torch.amp.GradScaler("cpu", enabled=False), loaders=data_loader.Loaders(None, batches),
            stop=StopRequest(),
        )  # fmt: skip
        metrics, sums = evaluate_split(run, run.loaders.val)
        everyone = world.gather(metrics)
        assert all(theirs == metrics for theirs in everyone), "the ranks report different metrics"
        assert world.main == hasattr(task, "collected"), "rank 0 alone reports"
        results[size] = {"metrics": metrics, "sums": dict(sums), "collected": dict(sums.collected), "x": data.x}
    if world.main:
        torch.save(results, out)
    launch.leave()


if __name__ == "__main__":
    main()
