"""The steps of a loop without an engine, of the same network, loss and batch as a training: their kernels are the
measure of the training's, counted by `fake_gpu.py`.

    python tests/kit/fake_gpu.py tests/kit/plain_step.py har device=cuda save_dir=DIR

The batch lies on the device. The loop is torch's own: autocast, its fused AdamW with the training's groups, its
GradScaler and `clip_grad_norm_`, and a `lerp` of the weights into their averages as in
`torch.optim.swa_utils.get_ema_multi_avg_fn`.
"""

import sys

import torch

import tasks
import train
from engine import config
from engine.phases import phase

STEPS = 6


def build(words):
    args = config.parse(words, tasks.load)
    return train.build(args, train.setup_distributed(args.cfg))


def plain_step(run):
    """A function that takes a step."""
    cfg, passes = run.cfg.optim, run.plan.accumulation
    batch, net = run.loaders.train.example(), run.model.train()
    groups = [{name: group[name] for name in ("params", "lr", "weight_decay", "betas", "eps")}
              for group in run.optimizer.param_groups]  # fmt: skip
    weights = [p for group in groups for p in group["params"]]
    optimizer = torch.optim.AdamW(groups, fused=True)
    averages = [p.detach().clone() for p in weights] if cfg.ema_decay else []
    scaler = torch.amp.GradScaler("cuda", enabled=run.precision.name == "fp16")

    def step():
        optimizer.zero_grad(set_to_none=True)
        for _ in range(passes):
            with run.precision.autocast():
                loss = run.task.loss(net, batch)
                mean = loss.total / loss.weight
            scaler.scale(mean if passes == 1 else mean / passes).backward()
        if cfg.grad_clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(weights, cfg.grad_clip, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        if averages:
            torch._foreach_lerp_(averages, [p.detach() for p in weights], 1 - cfg.ema_decay)

    return step


if __name__ == "__main__":
    step = plain_step(build(sys.argv[1:]))
    for phase.step in range(STEPS):
        step()
