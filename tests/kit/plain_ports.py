"""The trainings of examples/ports as plain loops of torch: no framework, one process, each with the order of a task."""

import copy
import math

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import default_collate

from engine.contract import sample_seeds, uniform


def batches(data, epoch, size=16):
    order = np.random.default_rng((0, epoch)).permutation(len(data)).tolist()
    for first in range(0, len(order), size):
        yield default_collate([data[row] for row in order[first : first + size]])


def step(model, optimizer, scheduler, loss, clip=None):
    optimizer.zero_grad()
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    scheduler.step()


def quickstart(project):
    data, model = project.Pictures(200), project.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 * 13)
    for epoch in range(5):
        for x, y in batches(data, epoch):
            step(model, optimizer, scheduler, cross_entropy(model(x), y))
    return model


def lightning(project):
    data, (x_val, y_val), model = project.Pictures(200), default_collate([*project.Pictures(80, seed=1)]), project.Net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=8 * 13)
    losses = []
    for epoch in range(8):
        for x, y in batches(data, epoch):
            loss = cross_entropy(model(x), y, label_smoothing=0.2 if epoch < 2 else 0.0)
            step(model, optimizer, scheduler, loss, clip=1.0)
            average.update_parameters(model)
        with torch.no_grad():
            losses.append(cross_entropy(average(x_val), y_val).item())
        if len(losses) - 1 - int(np.argmin(losses)) >= 2:
            break
    return average.module


def trainer(project):
    from transformers import get_cosine_schedule_with_warmup

    data, model, weights = project.Words(200), project.small_bert(), torch.tensor([1.0, 3.0])
    named = [*model.named_parameters()]
    decayed = [p for _, p in named if p.ndim > 1]
    others = {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([{"params": decayed}, others], lr=3e-3, weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, 4 * 13)
    for epoch in range(4):
        for batch in batches(data, epoch):
            labels = batch.pop("labels")
            step(model, optimizer, scheduler, cross_entropy(model(**batch).logits, labels, weight=weights), clip=1.0)
    return model


def accelerate(project):
    data, model = project.Pictures(192), project.Net()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: min(1.0, (number + 1) / 10))
    for number, (x, y) in enumerate(batch for epoch in range(4) for batch in batches(data, epoch)):
        output = model(x)
        distance = mse_loss(output.softmax(1), teacher(x).softmax(1))
        loss = cross_entropy(output, y) + min(1.0, number / 30) * distance
        step(model, optimizer, scheduler, loss, clip=1.0)
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.05)
    return teacher


def lerobot(project):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    data = LeRobotDataset("mine/walks", root="walks", delta_timestamps={"action": [n / 10 for n in range(6)]})
    model, normalize = project.small_act(data.meta)
    optimizer = torch.optim.AdamW(model.get_optim_params(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    for number, batch in enumerate(batch for epoch in range(7) for batch in batches(data, epoch)):
        if number < 40:
            step(model, optimizer, scheduler, model(normalize(batch))[0], clip=10.0)
    return model


def shipped(model, steps):
    """The optimizer and the schedule of a task that has none of its own."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([{"params": decayed}, others], lr=1e-3, weight_decay=0.01)

    def cosine(number):
        return 0.5 * (1 + math.cos(math.pi * number / steps))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)


def dice(project):
    data, model = project.Masks(96), project.Segmenter()
    optimizer, scheduler = shipped(model, 3 * 6)
    for epoch in range(3):
        for x, mask in batches(data, epoch):
            logits = model(x)
            shares = logits.sigmoid()
            coefficient = (2 * (shares * mask).sum() + 1) / (shares.sum() + mask.sum() + 1)
            loss = binary_cross_entropy_with_logits(logits, mask) + 1 - coefficient
            step(model, optimizer, scheduler, loss, clip=1.0)
    return model


def recurrent(project):
    data, model = project.Streams(), project.Recurrent()
    optimizer, scheduler = shipped(model, 3 * 10)
    for _ in range(3):
        hidden = torch.zeros(project.STREAMS, model.width)
        for window in range(10):
            rows = range(window * project.STREAMS, (window + 1) * project.STREAMS)
            batch = default_collate([data[row] for row in rows])
            logits, hidden = model(batch["x"], hidden.detach())
            step(model, optimizer, scheduler, cross_entropy(logits.transpose(1, 2), batch["y"]), clip=1.0)
    return model


def diffusion(project):
    """Time and noise by the seeds of the samples; the rest as in a paper: a mean over all numbers."""
    data, model = project.Ring(160), project.Denoiser()
    middles = (torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16
    quantiles = torch.special.ndtri(middles).float()
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer, scheduler = shipped(model, 3 * 5)
    for epoch in range(3):
        for number, batch in enumerate(batches(data, epoch, 32)):
            x = batch["x"]
            draws = uniform(sample_seeds(0, epoch, 32 * number + torch.arange(len(x))), 3)
            time, noise = (draws[:, 0] * 100).long(), quantiles[(draws[:, 1:] * 2**16).long()]
            noisy = kept[time][:, None].sqrt() * x + (1 - kept[time][:, None]).sqrt() * noise
            step(model, optimizer, scheduler, mse_loss(model(noisy, time / 100), noise.to(x)), clip=1.0)
            average.update_parameters(model)
    return average.module
