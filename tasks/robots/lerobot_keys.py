"""Map every key of LeRobot's training config (0.6.1 and its main branch) to this project.

A key becomes a key here, a note, or an error with a reason. The module also reads a policy's
config.json.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from engine.contract import LockstepError
from formats.weights import pretrained
from tasks.robots.lerobot import LeRobotSettings, texts

ALIASES = {
    "policy.path": "policy.pretrained_path",
    "policy.use_amp": "amp",
    "policy.device": "device",
    "policy.optimizer_lr": "optim.lr",
    "policy.optimizer_eps": "optim.eps",
    "policy.optimizer_weight_decay": "optim.weight_decay",
    "policy.optimizer_grad_clip_norm": "optim.grad_clip",
    "policy.scheduler_warmup_steps": "schedule.warmup_steps",
    "policy.scheduler_decay_steps": "schedule.horizon",
    "policy.temporal_ensemble_coeff=null": "policy.temporal_ensemble_coeff=0",
    "policy.device=null": "device=auto",
    "wandb.mode=null": "wandb.mode=auto",
    "wandb.mode=disabled": "wandb.enable=false",
    "optimizer.type": "optim.name",
    "optimizer.lr": "optim.lr",
    "optimizer.eps": "optim.eps",
    "optimizer.weight_decay": "optim.weight_decay",
    "optimizer.momentum": "optim.momentum",
    "optimizer.grad_clip_norm": "optim.grad_clip",
    "scheduler.num_warmup_steps": "schedule.warmup_steps",
    "scheduler.num_decay_steps": "schedule.horizon",
    "scheduler.peak_lr": "optim.lr",
    "accelerator.mixed_precision": "amp",
    "accelerator.mixed_precision=no": "amp=off",
    "accelerator.gradient_accumulation.steps": "gradient_accumulation_steps",
    "accelerator.ddp.find_unused_parameters": "ddp.find_unused_parameters",
    "accelerator.ddp.gradient_as_bucket_view": "ddp.gradient_as_bucket_view",
    "accelerator.ddp.static_graph": "ddp.static_graph",
    "output_dir": "save_dir",
    "job_name": "wandb.name",
    "log_freq": "log_every",
    "save_freq": "save_every",
    "eval_freq": "eval.trials_every",
    "env_eval_freq": "eval.trials_every",
    "eval_steps": "eval.loss_every",
    "tolerance_s": "dataset.tolerance_s",
    "cudnn_deterministic": "deterministic",
    "dataset.image_transforms.enable": "augment.enabled",
    "chunk_size": "policy.chunk_size",
}

ADAM = "the optimizer here is AdamW: optim.beta1= and optim.beta2= set what betas are"
AUGMENT = (
    "augment.brightness, contrast and saturation are the amounts, and all three change at "
    "random in each picture"
)
HUB = "nothing is uploaded; tools/save_pretrained.py writes the folder that you can"
LOCAL = "the training runs where it is started"
SIMULATIONS = "the simulations here are discs, and pusht with PushT-v0 of gym-pusht"
TRAINED = "weights are trained in full; examples/own_lora.py trains LoRA's with a task of its own"


def without_effect(cfg: Any) -> dict[str, tuple[Any, str]]:
    """Return LeRobot's keys without effect here.

    The result is {key or section: (the only permitted value, None: any; reason)}. A section with a
    value is rejected as a whole. The first matching entry counts.
    """
    pusht = cfg.env.type == "pusht"
    return {
        # the policy
        "policy.repo_id": (None, HUB),
        "policy.private": (None, HUB),
        "policy.tags": (None, HUB),
        "policy.license": (None, HUB),
        "policy.use_peft": (False, TRAINED),
        "policy.n_obs_steps": (1, "the policies see the present alone"),
        "policy.input_features": (None, "they are those of the dataset, after rename_map"),
        "policy.output_features": (None, "it is the dataset's action"),
        "policy.optimizer_betas": ("", ADAM),
        "policy.scheduler_decay_lr": (
            "",
            "here schedule.final_share= is the last rate as a share of the first",
        ),
        "policy.compile_model": (False, "compile=auto does it"),
        "policy.compile_mode": ("", "compile= takes the mode"),
        "policy.dtype": ("float32", "amp=bf16 computes in bfloat16, and the weights stay float32"),
        "policy.empty_cameras": (0, "this policy takes the cameras that there are"),
        "use_policy_training_preset": (
            True,
            "optim.* and schedule.* begin with the policy's: set what shall differ",
        ),
        "reward_model": (
            "",
            "LeRobot's reward models are not here: a task of your own is docs/your-own-data.md",
        ),
        # the data
        "dataset.repo_type": (
            "dataset",
            "a bucket is not read: copy it to a folder, and give dataset.root",
        ),
        "dataset.video_backend": (None, "videos are decoded by PyAV"),
        "dataset.return_uint8": (
            None,
            "pictures are bytes until the policy normalises them, on its device",
        ),
        "dataset.depth_output_unit": ("mm", "depth is in millimetres"),
        "dataset.streaming": (
            False,
            "numbers are held in memory, and pictures in a file of their own",
        ),
        "dataset.image_transforms.max_num_transforms": (3, AUGMENT),
        "dataset.image_transforms.random_order": (False, AUGMENT),
        "dataset.image_transforms.tfs": ("", AUGMENT),
        "prefetch_factor": (None, "a loader process is two batches ahead"),
        "persistent_workers": (None, "loader processes live as long as the training"),
        "dataloader_multiprocessing_context": (
            None,
            "loader processes begin as the engine needs them",
        ),
        "sample_weighting": ("", "dataset.weights weighs datasets, and sampler=balanced commands"),
        # the loop
        "optimizer.betas": ("", ADAM),
        "optimizer": ("", "optim.* has the settings of the optimizer"),
        "scheduler": (
            "",
            "schedule.kind, such as cosine, and schedule.* its settings",
        ),
        "save_checkpoint": (
            True,
            "a run is saved at its end at least; save_every says how often before",
        ),
        "save_checkpoint_to_hub": (False, HUB),
        "checkpoint_format": (
            "safetensors",
            "tools/save_pretrained.py writes it; a run's own checkpoints are .pt",
        ),
        "checkpoint_path": ("", "resume= takes the path of a checkpoint"),
        "max_eval_samples": (0, "all held-out samples are scored"),
        "ema.enable": (False, "optim.ema_decay=0.999 keeps an average of the weights"),
        "ema": ("", "optim.ema_decay=0.999 keeps an average of the weights"),
        "peft": ("", TRAINED),
        "parallelism.dp_replicate": (
            None,
            "as many processes as torchrun starts hold the whole model",
        ),
        "parallelism": ("", "ddp.strategy=fsdp shards the model, hsdp with ddp.shards=4 in groups"),
        "accelerator": (
            "",
            "ddp.* and amp= are the settings here; accelerate itself is not needed",
        ),
        "job.target": ("local", LOCAL),
        "job": ("", LOCAL),
        # trials and logs
        "env.task": ("PushT-v0" if pusht else "", SIMULATIONS),
        "env.fps": (10 if pusht else "", SIMULATIONS),
        "env": ("", SIMULATIONS),
        "eval.batch_size": (None, "all trials of an evaluation are made side by side"),
        "eval.use_async_envs": (
            None,
            "all trials of an evaluation are made side by side, in one process a rank",
        ),
        "eval.recording": (
            False,
            "trials are filmed for TensorBoard and tools/report.py, and not recorded as data",
        ),
        "eval.recording_repo_id": (None, HUB),
        "eval.recording_private": (None, HUB),
        "wandb.disable_artifact": (True, "no checkpoint is uploaded"),
        "wandb.add_tags": (None, "the run's config has what tags would say"),
    }


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of the scalars in nested mappings, except null."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, (bool, int, float, str)):
            yield f"{prefix}{name}", str(value)


def cannot_resume(path: str) -> LockstepError:
    """Return the error for LeRobot's own train_config.json.

    The error has a command that reuses the settings.
    """
    whole = pretrained.read_json(Path(path))
    there = dict(flat(whole))
    names = ["dataset.repo_id", "dataset.root", "batch_size", "steps", "seed"]
    words = [
        f"policy.path={Path(path).parent}",
        *(f"{name}={there[name]}" for name in names if there.get(name)),
    ]
    if renamed := whole.get("rename_map"):
        words.append(f"--rename_map={json.dumps(renamed)}")
    line = shlex.join(words)
    what = (
        "this is LeRobot's own config, and its optimizer and its place in the data cannot be "
        "taken over"
    )
    return LockstepError(
        what, path, f"start a new run from its weights: `python train.py robot {line}`"
    )


def of_weights(given: Mapping[str, str], classes: Mapping[str, type]) -> dict[str, tuple[str, str]]:
    """Return the settings in the config.json of `policy.pretrained_path`.

    The settings are the policy's type, sizes, normalisation and rates. A kind of features without
    an entry in the mapping is not normalised.

    given    {key: text} of the command line and files
    classes  {type: dataclass of the settings}
    """
    path, revision = given["policy.pretrained_path"], given.get("policy.pretrained_revision", "")
    download = given.get("download", "").lower() in ("true", "yes", "on", "1")
    try:
        folder = pretrained.find(path, revision, download)
    except LockstepError:
        if download:
            raise
        # A resumed run no longer needs the file. For any other run, the error comes before the data
        # are read.
        return {}
    there = pretrained.read_json(folder / pretrained.CONFIG)
    kind, where = str(there.get("type")), str(folder / pretrained.CONFIG)
    found = {"policy.type": kind}
    if given.get("policy.type", kind) == kind and kind in classes:
        cls: Any = classes[kind]
        names = {field.name for field in fields(cls)} - {
            "pretrained_path",
            "pretrained_strict",
            "push_to_hub",
        }
        if issubclass(cls, LeRobotSettings):
            found |= texts(cls, there)
        else:
            found |= {f"policy.{key}": text for key, text in flat(there) if key in names}
            rates = {
                f"policy.{key}": text for key, text in flat(there) if key.startswith("optimizer_")
            }
            found |= {ALIASES[key]: text for key, text in rates.items() if key in ALIASES}
        if there.get("normalization_mapping"):
            modes = {
                "VISUAL": "IDENTITY",
                "STATE": "IDENTITY",
                "ENV": "IDENTITY",
                "ACTION": "IDENTITY",
            }
            modes |= there["normalization_mapping"]
        else:
            modes = {"ENV": "IDENTITY"}  # no policy of LeRobot has an entry for ENV
        found |= {f"policy.normalization_mapping.{key}": str(mode) for key, mode in modes.items()}
    return {key: (text, where) for key, text in found.items()}
