"""Two epochs of the whole program beside the loop that anybody would write in plain torch, in float64."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import TOY, succeed

import tasks
from engine.config import parse
from engine.contract import sample_seeds, uniform

SETTINGS = (
    "seed=3 epochs=2 amp=off log_every=1 model.double=true lr=0.02 weight_decay=0.1 grad_clip=0.1 warmup_epochs=1.5 "
    "schedule.kind=cosine lr_scaling=linear schedule.base_batch_size=8"
).split()


def plain_loop():
    """Steps of 12 samples, the last of each epoch of one. Returns the model, each step's numbers and its weight."""
    task = tasks.load(TOY)(parse([TOY, *SETTINGS], tasks.load).cfg)
    torch.manual_seed(3)
    (data, _), model, numbers, weights = task.datasets(), task.model(), [], []
    matrices, biases = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}])
    for step in range(12):
        epoch, first = step // 6, 12 * (step % 6)
        rows = torch.from_numpy(np.random.default_rng((3, epoch)).permutation(61)[first : first + 12])
        x = data.x[rows] + 0.01 * uniform(sample_seeds(3, epoch, first + torch.arange(len(rows))), 8)
        lr = 0.02 * 12 / 8 * ((step + 1) / 9 if step < 9 else 0.5 * (1 + math.cos(math.pi * (step - 9) / 3)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        total, weight = ((model(x) - data.y[rows]).square() * data.mask[rows]).sum(), data.mask[rows].sum()
        optimizer.zero_grad()
        (total / weight).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        numbers.append({"loss": (total / weight).item(), "lr": lr, "grad_norm": norm.item()})
        weights.append(weight.item())
    return model, numbers, weights


@pytest.mark.slow
def test_the_accuracy_in_training_is_of_samples_whatever_their_weights(launch, tmp_path):
    """Classes weigh differently in the loss. At a rate that moves no weight the network stays the one it began as."""
    words = ["har", "dataset.stride=512", "model.width=8", "model.dropout=0", "lr=1e-12", "epochs=1", "log_every=1"]
    words += ["augment.enabled=false", "amp=off", "global_batch=64", "batch_size=16"]
    done = succeed(launch.torchrun(2, "train.py", *words, f"save_dir={tmp_path}"))
    task = tasks.load("har")(parse(words, tasks.load).cfg)
    torch.manual_seed(0)
    (data, _), model = task.datasets(), task.model()
    batch = data.__getitems__(np.random.default_rng((0, 0)).permutation(len(data)).tolist())
    with torch.no_grad():
        hits = (model(batch["x"]).argmax(1) == batch["y"]).double()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    ours = [line["accuracy"] for line in lines if line["event"] == "train"]
    assert ours == pytest.approx([part.mean().item() for part in hits.split(64)], abs=1e-12)
    assert f"Acc: {100 * hits.mean():.2f}% | Val" in done.out


@pytest.mark.parametrize(("processes", "cut"), [(1, (4, 3)), (2, (3, 2))])
def test_twelve_steps_are_those_of_a_plain_loop(launch, tmp_path, processes, cut):
    """The loss, the learning rate, the norm of the gradient, clipping and decay of each step, and the epochs' means."""
    words = ["train.py", TOY, *SETTINGS, f"batch_size={cut[0]}", f"grad_accum_steps={cut[1]}", f"save_dir={tmp_path}"]
    done = succeed(launch.python(*words) if processes == 1 else launch.torchrun(processes, *words))
    model, numbers, weights = plain_loop()
    assert all(step["grad_norm"] > 0.1 for step in numbers), "each step is clipped"
    ours = torch.load(tmp_path / "last.pt", weights_only=True)["model"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-12)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "train"]
    assert [line["step"] for line in steps] == list(range(1, 13))
    for line, step in zip(steps, numbers, strict=True):
        assert {name: line[name] for name in step} == pytest.approx(step, rel=1e-9, abs=1e-15)
    for epoch in (0, 1):
        part = slice(6 * epoch, 6 * epoch + 6)
        mean = np.average([step["loss"] for step in numbers[part]], weights=weights[part])
        assert f"Epoch {epoch + 1}/2 - Train Loss: {mean:.4f} " in done.out
