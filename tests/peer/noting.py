"""Train by LeRobot's own script, or by ours, and note what each rank takes and computes at each step.

    python tests/peer/noting.py lerobot NOTES dataset.root=... policy.path=...     LeRobot's lerobot-train
    python tests/peer/noting.py lockstep NOTES robot dataset.root=...              our train_ddp.py
    torchrun --standalone --nproc_per_node=2 tests/peer/noting.py ...              the same, in two processes

NOTES/rank0.json and so on are lists of {"samples": rows, "valid": unpadded steps, and of LeRobot "loss", "grad_norm"},
an item for each step; our own log has the other two. `start` makes a policy by LeRobot's classes, `demonstrations` a
dataset, for both.

With ORDER=seen.csv, which `tools/provenance.py RUN --list seen.csv` writes, LeRobot takes the samples of that run, of
seed 0, in its order, and its VAE the noise that ours drew. Nothing else of its script is changed.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
CHUNK = 16
TINY = {"chunk_size": CHUNK, "n_action_steps": CHUNK, "dim_model": 32, "n_heads": 4, "dim_feedforward": 64}
TINY |= {"n_encoder_layers": 2, "n_vae_encoder_layers": 1, "latent_dim": 4, "dropout": 0.0}
SHAPES = {"observation.state": (3,), "observation.environment_state": (2,), "observation.images.top": (3, 32, 40)}
KINDS = dict(zip(SHAPES, ("STATE", "ENV", "VISUAL"), strict=True))


def environment(home: Path) -> dict[str, str]:
    """Of a process that finds LeRobot where this one does, and asks the Hub nothing."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}


def demonstrations(root: Path, camera: bool = True) -> Path:
    """A dataset of 167 samples: random walks, with key points in pixels as `observation.environment_state`."""
    from formats.robots.lerobot_writer import Recorder

    rng = np.random.default_rng(0)
    shapes = {name: shape for name, shape in SHAPES.items() if camera or KINDS[name] != "VISUAL"}
    features = {name: ("image" if KINDS[name] == "VISUAL" else "float32", shape) for name, shape in shapes.items()}
    with Recorder(root, 10, features | {"action": ("float32", (3,))}) as recorder:
        for length in (40, 35, 50, 42):
            walk = rng.normal(size=(length, 3)).cumsum(0).astype(np.float32)
            told = {"observation.state": walk, "observation.environment_state": 256 + 40 * walk[:, :2]}
            told["action"] = walk + rng.normal(size=(length, 3))
            for name in shapes.keys() - told.keys():
                told[name] = rng.integers(0, 256, (length, *shapes[name]), dtype=np.uint8)
            recorder.add_episode(told, "walk")
    return root


def start(folder: Path, root: Path, **options: Any) -> Path:
    """The weights that both begin with: a folder written by LeRobot, as its users have them."""
    __import__("torchvision_shim").load()
    from lerobot.datasets.lerobot_dataset import LeRobotDatasetMetadata
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.utils.feature_utils import dataset_to_policy_features

    about = LeRobotDatasetMetadata("someone/walks", root=root)
    features = dataset_to_policy_features(about.features)
    config = ACTConfig(
        input_features={name: feature for name, feature in features.items() if name in SHAPES},
        output_features={"action": features["action"]},
        pretrained_backbone_weights=None,
        device="cpu",
        push_to_hub=False,
        **TINY | options,
    )
    torch.manual_seed(0)
    for part in (ACTPolicy(config), *make_pre_post_processors(config, dataset_stats=about.stats)):
        part.save_pretrained(folder)
    return folder


THEIRS = "policy.push_to_hub=false policy.device=cpu num_workers=0 save_checkpoint=false log_freq=1".split()
OURS = "policy.use_amp=false device=cpu log_every=1 dataset.eval_split=0 dataset.cache=none".split()
"""Words behind those that both take: nothing uploaded, float32 on CPUs, all episodes, each step in the log."""


def lerobot(words: list[str], notes: list[dict[str, Any]]) -> None:
    """Call lerobot-train with these words."""
    __import__("torchvision_shim").load()
    from lerobot.scripts import lerobot_train

    update = lerobot_train.update_policy

    def noted(metrics: Any, policy: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        told = {"samples": batch["index"].flatten().tolist(), "valid": int((~batch["action_is_pad"]).sum())}
        result = update(metrics, policy, batch, *rest, **more)
        notes.append(told | {"loss": metrics.loss.val, "grad_norm": metrics.grad_norm.val})
        return result

    lerobot_train.update_policy = noted
    if "ORDER" in os.environ:
        lerobot_train.cycle = lambda loader: in_our_order(loader.dataset, Path(os.environ["ORDER"]))
    sys.argv = ["lerobot-train", *(f"--{word}" for word in words)]
    lerobot_train.main()


def in_our_order(dataset: Any, order: Path) -> Iterator[dict[str, Any]]:
    """The batches of the steps in seen.csv; before each, the noise of its samples is put in the place of torch's."""
    from engine.contract import sample_seeds, uniform
    from models.layers import normal_quantiles

    with open(order, newline="") as file:
        uses = list(csv.DictReader(file))
    for _, group in itertools.groupby(uses, key=lambda use: use["step"]):
        step = torch.tensor([[int(use[key]) for key in ("sample", "epoch", "position")] for use in group])
        seeds = torch.cat([sample_seeds(0, int(epoch), position[None]) for _, epoch, position in step])
        torch.randn_like = lambda like, seeds=seeds: normal_quantiles()(uniform(seeds, like.shape[1]))
        yield torch.utils.data.default_collate([dataset[int(sample)] for sample, _, _ in step])


def lockstep(words: list[str], notes: list[dict[str, Any]]) -> None:
    """Call train_ddp.py with these words."""
    import train

    take_step = train.train_step

    def noted(run: Any, passes: Any) -> Any:
        taken = list(passes)
        batches = [batch for batch, micro in taken if not micro.empty]
        rows = [row for batch in batches for row in batch["row"].tolist()]
        notes.append({"samples": rows, "valid": sum(int((~batch["action_is_pad"]).sum()) for batch in batches)})
        return take_step(run, taken)

    train.train_step = noted
    assert train.main(words, strict=True) == 0


def main(who: str, folder: str, *words: str) -> None:
    notes: list[dict[str, Any]] = []
    {"lerobot": lerobot, "lockstep": lockstep}[who](list(words), notes)
    rank = os.environ.get("RANK", "0")
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    main(*sys.argv[1:])
