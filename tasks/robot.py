"""Imitation: which actions follow from what a robot sees, feels and is told, learned from recorded demonstrations.

The data are in LeRobot's format (formats/lerobot.py). Without any, the demonstrations are of a simulated table with
coloured discs (envs/discs.py), recorded at the first start, and every evaluation lets the policy try for itself.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from engine import contract
from engine.config import choice, option, section
from engine.contract import Batch, LockstepError, Loss, Sums
from envs import discs
from formats import lerobot, pretrained
from formats.frames import Frames
from formats.lerobot_writer import Recorder
from models import act, smolvla, vla
from models.layers import Normalizer
from models.policy import STATES, Policy

GENERATED = Path(__file__).resolve().parent.parent / "data" / "generated"
IMAGENET = {"mean": [[[0.485]], [[0.456]], [[0.406]]], "std": [[[0.229]], [[0.224]], [[0.225]]]}
UNIT = {"min": [[[0.0]]] * 3, "max": [[[1.0]]] * 3}
FPS, RECIPE = 10, 1  # of the simulated demonstrations; raise the second when the same config would give other ones
FRESH = 10**9
"""The first seed of the trials: no demonstration has it or one after it."""

Kind = Literal["act", "vla", "smolvla"]
Mode = Literal["MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10", "IDENTITY"]


@dataclass
class DatasetSettings:
    root: str = option("", "folder of a LeRobot dataset (v2.0, v2.1 or v3.0)")
    repo_id: str = option("", "its id, looked for below root and in the local caches; both empty: simulated discs")
    episodes: list[int] = option([], "numbers of the episodes to use, such as 1,2,4; empty = all", low=0)
    exclude_episodes: list[int] = option([], "numbers of the episodes to leave out", low=0)
    eval_split: float = option(
        0.1, "share of the episodes to validate on; 0 = validate on the training data", low=0, high=0.9
    )
    split_seed: int = option(0, "of the choice of these episodes", low=0)
    tolerance_s: float = option(1e-4, "largest distance of a time stamp from frame / fps, in seconds", above=0)
    use_imagenet_stats: bool = option(True, "normalise pictures by ImageNet's statistics, not by the data's own")
    cameras: list[str] = option([], "cameras to use, by their features' names; empty = all, none = without any")
    resize: list[int] = option(
        [], "height,width to shrink pictures to; empty = what the policy needs, or as recorded", low=8
    )
    cache: Literal["memmap", "none"] = option("memmap", "pictures decoded once into files, or at every use")
    cache_dir: str = option("", "where these files go; empty = $LOCKSTEP_CACHE or ~/.cache/lockstep")


@dataclass
class Modes:
    VISUAL: Mode = option("MEAN_STD", "normalisation of pictures")
    STATE: Mode = option("MEAN_STD", "normalisation of observation.state")
    ENV: Mode = option("MEAN_STD", "normalisation of observation.environment_state")
    ACTION: Mode = option("MEAN_STD", "normalisation of action")


@dataclass
class VisualRange(Modes):
    VISUAL: Mode = option("MIN_MAX", "normalisation of pictures; MIN_MAX is from -1 to 1")


@dataclass
class PolicySettings:
    """What every policy has."""

    type: Kind = option("vla", "act, vla, or smolvla through the lerobot package")
    pretrained_path: str = option(
        "", "weights to start from: a pretrained_model folder, a run's folder, or an id in the local hub cache"
    )
    pretrained_strict: bool = option(True, "refuse weights whose names or shapes are not all the policy's")
    push_to_hub: bool = option(False, "only false: nothing is uploaded")


@dataclass
class ActSettings(PolicySettings):
    """LeRobot's names and defaults."""

    defaults: ClassVar[dict[str, Any]] = {
        "batch_size": 8,
        "epochs": 0,
        "steps": 100_000,
        "optim.lr": 1e-5,
        "optim.weight_decay": 1e-4,
        "optim.grad_clip": 10.0,
        "schedule.kind": "constant",
    }
    type: Kind = option("act", "act, vla, or smolvla through the lerobot package")
    chunk_size: int = option(100, "actions predicted at once", low=1)
    n_action_steps: int = option(0, "of these, executed before the next prediction; 0 = all", low=0)
    dim_model: int = option(512, "width of the transformers", low=8)
    n_heads: int = option(8, "attention heads", low=1)
    dim_feedforward: int = option(3200, "width inside their perceptrons", low=1)
    n_encoder_layers: int = option(4, "layers of the encoder", low=1)
    n_decoder_layers: int = option(1, "layers of the decoder", low=1)
    n_vae_encoder_layers: int = option(4, "layers of the encoder of actions", low=1)
    use_vae: bool = option(True, "train with a latent variable that says in which of many ways to act")
    latent_dim: int = option(32, "its dimensions", low=1)
    kl_weight: float = option(10.0, "weight of its KL divergence from a standard normal", low=0)
    dropout: float = option(0.1, "share of activations dropped in training", low=0, high=0.9)
    pre_norm: bool = option(False, "normalise before attention and perceptron instead of after")
    normalization_mapping: Modes = section(Modes)


@dataclass
class VlaSettings(PolicySettings):
    defaults: ClassVar[dict[str, Any]] = {
        "batch_size": 64,
        "epochs": 0,
        "steps": 1200,
        "optim.lr": 2e-3,
        "optim.beta2": 0.95,
        "schedule.warmup_steps": 100,
        "eval_every": 300,
    }
    preset: Literal["test", "tiny", "small", "base"] = option("test", "0.4, 2, 35 or 200 million parameters")
    chunk_size: int = option(8, "actions predicted at once", low=1)
    n_action_steps: int = option(4, "of these, executed before the next prediction; 0 = all", low=0)
    num_steps: int = option(10, "Euler steps from noise to actions", low=1)
    freeze_vision_encoder: bool = option(False, "train everything but the picture encoder")
    train_expert_only: bool = option(False, "train the action expert alone")
    gradient_checkpointing: bool = option(False, "compute activations again in the backward pass: less memory, slower")
    normalization_mapping: Modes = section(VisualRange)


@dataclass
class AsPictured(Modes):
    VISUAL: Mode = option("IDENTITY", "normalisation of pictures; IDENTITY is from 0 to 1")


@dataclass
class SmolVlaSettings(PolicySettings):
    """LeRobot's names and defaults; the network's size is that of `pretrained_path`."""

    defaults: ClassVar[dict[str, Any]] = {
        "batch_size": 8,
        "epochs": 0,
        "steps": 100_000,
        "optim.lr": 1e-4,
        "optim.weight_decay": 1e-10,
        "optim.beta2": 0.95,
        "optim.grad_clip": 10.0,
        "schedule.warmup_steps": 1000,
        "schedule.horizon": 30_000,
        "schedule.final_share": 0.025,
    }
    type: Kind = option("smolvla", "act, vla, or smolvla through the lerobot package")
    chunk_size: int = option(50, "actions predicted at once", low=1)
    n_action_steps: int = option(0, "of these, executed before the next prediction; 0 = all", low=0)
    freeze_vision_encoder: bool = option(True, "train everything but the picture encoder")
    train_expert_only: bool = option(True, "train the action expert alone")
    normalization_mapping: Modes = section(AsPictured)


@dataclass
class EnvSettings:
    type: Literal["auto", "none", "discs"] = option(
        "auto", "simulation to try the policy in; auto: the one that the data are from"
    )
    command: str = option(
        "", f"the only command to give, such as {discs.COMMANDS[0]!r}; empty = all six. ACT hears none"
    )
    demonstrations: int = option(600, "simulated demonstrations to record", low=4)
    size: int = option(32, "height and width of the simulated camera in pixels", low=16)
    data_seed: int = option(0, "of the demonstrations", low=0, high=999)
    noise: float = option(0.1, "noise in the demonstrator's hand, so that recovering is seen", low=0)


@dataclass
class EvalSettings:
    n_episodes: int = option(20, "simulated trials at each evaluation; 0 = none", low=0)


@dataclass
class Augment:
    enabled: bool = option(False, "change the training pictures at random")
    brightness: float = option(0.2, "largest change of brightness, as a share", low=0, high=1)
    contrast: float = option(0.2, "largest change of contrast, as a share", low=0, high=1)
    saturation: float = option(0.5, "largest change of saturation, as a share", low=0, high=1)


@dataclass
class Settings(contract.Settings):
    dataset: DatasetSettings = section(DatasetSettings)
    policy: PolicySettings = choice("vla", {"act": ActSettings, "vla": VlaSettings, "smolvla": SmolVlaSettings})
    env: EnvSettings = section(EnvSettings)
    eval: EvalSettings = section(EvalSettings)
    augment: Augment = section(Augment)


class Task(contract.Task):
    """Batches as formats/lerobot.py gives them: a feature by its name, `action` as a chunk with `action_is_pad`."""

    Settings = Settings
    monitor = "action_l1"
    foreign = {
        "policy.path": "policy.pretrained_path",
        "policy.use_amp": "amp",
        "policy.device": "device",
        "policy.optimizer_lr": "optim.lr",
        "policy.optimizer_weight_decay": "optim.weight_decay",
        "policy.optimizer_grad_clip_norm": "optim.grad_clip",
        "optimizer.lr": "optim.lr",
        "optimizer.weight_decay": "optim.weight_decay",
        "optimizer.grad_clip_norm": "optim.grad_clip",
        "accelerator.mixed_precision": "amp",
        "accelerator.gradient_accumulation.steps": "gradient_accumulation_steps",
        "output_dir": "save_dir",
        "job_name": "wandb.name",
        "log_freq": "log_every",
        "save_freq": "save_every",
        "eval_freq": "eval_every",
        "env_eval_freq": "eval_every",
        "eval_steps": "eval_every",
        "tolerance_s": "dataset.tolerance_s",
        "cudnn_deterministic": "deterministic",
        "dataset.image_transforms.enable": "augment.enabled",
        "chunk_size": "policy.chunk_size",
    }
    aliases = {"root": "dataset.root", "episodes": "dataset.episodes"}

    def datasets(self) -> tuple[lerobot.Chunks, lerobot.Chunks]:
        cfg, policy = self.cfg.dataset, self.cfg.policy
        _check(self.cfg)
        given = bool(cfg.root or cfg.repo_id)
        root = lerobot.find(cfg.root, cfg.repo_id) if given else recorded_discs(self.cfg.env)
        self.simulated = self.cfg.env.type == "discs" or (self.cfg.env.type == "auto" and not given)
        self.num_trials = self.cfg.eval.n_episodes if self.simulated else 0
        demos = lerobot.read(root, cfg.episodes, cfg.exclude_episodes, cfg.tolerance_s)
        self.cameras = _chosen_cameras(cfg.cameras, demos.cameras, root)
        used = {name: f for name, f in demos.features.items() if name in self.cameras or not f.is_picture}
        self.demos = demos = replace(demos, features=used)
        if "action" not in demos.columns or not (self.cameras or demos.columns.keys() & set(STATES)):
            what = "the dataset has no `action`, or nothing to act on: no camera and no observation.state"
            raise LockstepError(what, where=str(root), todo="imitation needs both")
        if self.simulated and (set(self.cameras) - {discs.CAMERA} or demos.columns["action"].shape[1:] != (2,)):
            what = "the dataset is not of the simulated discs"
            raise LockstepError(what, where="env.type=discs", todo="give env.type=none")
        self.action_dim = demos.columns["action"].shape[-1]
        self.dims = {name: demos.columns[name].shape[-1] for name in STATES if name in demos.columns}
        train, val = lerobot.split(demos.episodes, cfg.eval_split, cfg.split_seed)
        self.shared = not len(val)
        if self.shared:
            val = train
        self.counts = len(train), len(val)
        frames = Frames(demos, self._size(), cfg.cache, _cache_dir(cfg.cache_dir, given)) if self.cameras else None
        deltas = {"action": list(range(policy.chunk_size))}
        return lerobot.Chunks(demos, train, deltas, frames), lerobot.Chunks(demos, val, deltas, frames)

    def _size(self) -> tuple[int, int] | None:
        """(H, W) of the pictures, or None for as they were recorded."""
        wanted = self.cfg.dataset.resize
        if wanted:
            return wanted[0], wanted[-1]
        if self.cfg.policy.type != "vla" or not self.cameras:
            return None
        side = settings_of(self.cfg.policy).image_size
        _, height, width = self.demos.features[self.cameras[0]].shape
        larger = max(height, width)  # the sides' ratio stays: the network fills its square up
        return max(1, round(side * height / larger)), max(1, round(side * width / larger))

    def _camera_shapes(self) -> dict[str, tuple[int, ...]]:
        """{camera: (C, H, W)} as batches hold them."""
        recorded = {camera: self.demos.features[camera].shape for camera in self.cameras}
        return {camera: (shape[0], *(self._size() or shape[1:])) for camera, shape in recorded.items()}

    def model(self) -> nn.Module:
        cfg, demos = self.cfg.policy, self.demos
        modes = dict.fromkeys(self.dims, cfg.normalization_mapping.STATE)
        if STATES[1] in modes:
            modes[STATES[1]] = cfg.normalization_mapping.ENV
        modes |= {"action": cfg.normalization_mapping.ACTION}
        modes |= dict.fromkeys(self.cameras, cfg.normalization_mapping.VISUAL)
        stats: dict[str, Any] = dict(demos.stats)
        for camera in self.cameras:
            stats[camera] = UNIT | (IMAGENET if self.cfg.dataset.use_imagenet_stats else stats.get(camera, IMAGENET))
        self.stats, self.modes = stats, modes
        for name, mode in modes.items():
            if missing := set(Normalizer.NEEDS[mode]) - stats[name].keys():
                what = f"the dataset tells no {', '.join(sorted(missing))} of {name}, which {mode} needs"
                raise LockstepError(what, where="policy.normalization_mapping", todo="choose another mode")
        policy = Policy(self._net(), Normalizer(stats, modes), self.cameras)
        if cfg.pretrained_path and cfg.type != "smolvla":
            self._start_from(policy)
        self.encode = getattr(policy.net, "encode", None)  # ACT hears nothing
        self.words = self.encode(demos.tasks) if self.encode else None
        self.num_draws, self.penalty = policy.net.num_draws, policy.net.penalty
        return policy

    def _net(self) -> nn.Module:
        cfg = self.cfg.policy
        state_dim, env_dim = (self.dims.get(name, 0) for name in STATES)
        if cfg.type == "act":
            return act.ACT(settings_of(cfg), state_dim, env_dim, self.action_dim, self.cameras)
        if cfg.type == "vla":
            return vla.VLA(settings_of(cfg), state_dim, self.action_dim, self.cameras)
        options = {name: vars(cfg)[name] for name in ("chunk_size", "freeze_vision_encoder", "train_expert_only")}
        folder = pretrained.find(cfg.pretrained_path)
        return smolvla.SmolVLA(
            folder, self.dims, self.action_dim, self._camera_shapes(), n_action_steps=steps_of(cfg), **options
        )

    def _start_from(self, policy: Policy) -> None:
        """Take over pretrained weights; the normalisation is that of the data at hand."""
        cfg = self.cfg.policy
        found = pretrained.load(pretrained.find(cfg.pretrained_path))
        here = asdict(settings_of(cfg))
        others = {name: found.config[name] for name in here if found.config.get(name, here[name]) != here[name]}
        if found.config.get("type") != cfg.type:
            others = {"type": found.config.get("type")}
        try:
            if "type" in others:
                raise LockstepError(f"the pretrained weights are not of {cfg.type}", where="policy.pretrained_path")
            self.started_from = pretrained.fit(policy.net, found.weights, cfg.pretrained_strict)
        except LockstepError as error:
            if not others:
                raise
            todo = " ".join(f"policy.{name}={value}" for name, value in others.items())
            raise LockstepError(str(error), todo=f"its config.json says {todo}") from None

    def save_pretrained(self, policy: Policy, folder: Path) -> None:
        """A `pretrained_model` folder: what `policy.pretrained_path` takes, and for ACT what LeRobot loads."""
        shapes = {name: [dim] for name, dim in self.dims.items()} | {"action": [self.action_dim]}
        shapes |= {camera: list(shape) for camera, shape in self._camera_shapes().items()}
        kinds = {name: self.demos.features[name].kind for name in shapes}
        features = {name: {"type": kinds[name], "shape": shape} for name, shape in shapes.items()}
        if self.cfg.policy.type == "smolvla":
            policy.net.policy.save_pretrained(str(folder))
            return
        config = asdict(settings_of(self.cfg.policy))
        pretrained.save(folder, self.cfg.policy.type, config, policy.net, self.stats, features, self.modes)

    # ---- training ----

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        """The mean error over steps and dimensions that are not padding, and the policy's penalty times the mean KL."""
        augment = self.cfg.augment
        draws = contract.uniform(batch["seed"], 3 * augment.enabled + self.num_draws)
        inputs = self._with_words(batch)
        if augment.enabled:
            changed = {name: recolour(batch[name], draws[:, :3], augment) for name in self.cameras}
            inputs, draws = inputs | changed, draws[:, 3:]
        out = net(inputs, draws)
        steps = (~batch["action_is_pad"]).sum(1)  # (B,)
        error = out["error"] if out["error"].dtype == torch.float64 else out["error"].float()
        # The steps of the whole global batch: it is one quotient, and the KL's mean over samples another.
        mean_steps = batch["mean_weight"].to(error.dtype) if "mean_weight" in batch else steps.to(error.dtype).mean()
        total = (error / (mean_steps * self.action_dim)).sum()
        sums = {"error": total.detach(), "count": torch.ones_like(steps).sum()}
        if "kl" in out:
            sums["kl"] = out["kl"].detach().sum()
            total = total + self.penalty * out["kl"].to(error.dtype).sum()
        return Loss(total, sums["count"], Sums(sums))

    def _with_words(self, batch: Batch) -> Batch:
        if self.words is None:
            return batch
        self.words = self.words.to(batch["task_index"].device)  # copied once: a copy is a sync point
        return batch | {"words": self.words[batch["task_index"]]}

    # ---- evaluation ----

    def score(self, model: nn.Module, batch: Batch) -> Sums:
        """Errors of the training's kind under fixed draws, and of the actions taken, in recorded units."""
        assert isinstance(model, Policy)
        inputs = self._with_words(batch)
        seeds = contract.sample_seeds(0, 0, batch["row"])
        out = model(inputs, contract.uniform(seeds, self.num_draws))
        valid = ~batch["action_is_pad"][:, :, None]  # (B, chunk, 1)
        truth = batch["action"].double()
        mean = torch.as_tensor(self.demos.stats["action"]["mean"], dtype=torch.float64, device=truth.device)

        def off(actions: Tensor) -> Tensor:
            return ((actions.double() - truth).abs() * valid).sum()

        sums = Sums(
            error=out["error"].double().sum(),
            kl=out["kl"].double().sum() if "kl" in out else torch.zeros((), dtype=torch.float64),
            numbers=valid.sum() * self.action_dim,
            off=off(model.act(inputs)),
            off_mean=off(mean.expand_as(truth)),
            count=torch.tensor(len(truth)),
        )
        state = batch.get("observation.state")
        if state is not None and state.shape[-1] == self.action_dim:
            sums["off_hold"] = off(state[:, None].expand_as(truth))
        return sums

    def report(self, sums: Sums) -> dict[str, float]:
        """`action_l1` beside two baselines: to act as on average, and to stay where one is."""
        numbers, count = float(sums["numbers"]), float(sums["count"])
        metrics: dict[str, float] = {
            "loss": float(sums["error"]) / numbers + self.penalty * float(sums["kl"]) / count,
            "action_l1": float(sums["off"]) / numbers,
            "baseline/mean_action_l1": float(sums["off_mean"]) / numbers,
        }
        if "off_hold" in sums:
            metrics["baseline/hold_state_l1"] = float(sums["off_hold"]) / numbers
        if "trials" in sums and sums["trials"] > 0:
            metrics["success_rate"] = float(sums["successes"]) / float(sums["trials"])
        return metrics

    def trials(self, model: nn.Module, which: range) -> Sums:
        """Trials of the policy in the simulation, from places that no demonstration began in."""
        assert isinstance(model, Policy)
        device = next(model.parameters()).device

        def policy(observations: dict[str, np.ndarray], commands: list[str]) -> np.ndarray:
            batch = {name: torch.from_numpy(value).to(device) for name, value in observations.items()}
            if self.encode:
                batch["words"] = self.encode(commands).to(device)
            return model.act(batch).float().cpu().numpy()

        seeds = FRESH + np.array(which, dtype=np.int64)
        if not len(seeds):
            return Sums(successes=torch.zeros((), dtype=torch.int64), trials=torch.zeros((), dtype=torch.int64))
        env = self.cfg.env
        success, films = discs.roll_out(policy, seeds, env.size, steps_of(self.cfg.policy), env.command or None)
        self.film = films[0]
        return Sums(successes=torch.tensor(int(success.sum())), trials=torch.tensor(len(seeds)))

    def pictures(self, model: nn.Module, batch: Batch, sums: Sums) -> dict[str, np.ndarray]:
        """A film of one trial, and the same as a strip of ten frames."""
        if not self.num_trials:
            return {}
        film = self.film
        film = np.ascontiguousarray(film.transpose(0, 2, 3, 1)).repeat(4, 1).repeat(4, 2)  # (T, 4 H, 4 W, 3)
        chosen = film[np.linspace(0, len(film) - 1, 10).astype(int)]  # (10, 4 H, 4 W, 3)
        return {"trial": film, "trial_strip": np.concatenate(list(chosen), 1)}

    def summary(self) -> str:
        demos, (train, val) = self.demos, self.counts
        texts = ", ".join(repr(text) for text in demos.tasks[:3]) + (", ..." if len(demos.tasks) > 3 else "")
        rows = [
            f"Found {len(demos.episodes)} episodes with {(demos.end - demos.start).sum()} frames at {demos.fps:g} Hz"
            f" in {os.path.relpath(demos.root)} ({demos.version})",
            f"Features: {', '.join(f'{name} {dim}' for name, dim in self.dims.items())}, action {self.action_dim},"
            f" {len(self.cameras)} camera(s); {len(demos.tasks)} command(s): {texts}",
            f"Train episodes: {train}, Val episodes: {val}"
            + (" (the same: there is no other to validate on)" if self.shared else ""),
        ]
        return "\n".join(rows)


def settings_of(policy: Any) -> Any:
    """The config's section as the network's own hyper-parameters. Raises ValueError where they do not fit together."""
    cls: Any = act.ACTConfig if policy.type == "act" else vla.VLASettings
    told = {name: value for name, value in vars(policy).items() if name in cls.__dataclass_fields__}
    full = cls(**told | {"n_action_steps": steps_of(policy)})
    return full if policy.type == "act" else full.resolved()


def steps_of(policy: Any) -> int:
    """How many actions of a chunk are executed."""
    return int(policy.n_action_steps or policy.chunk_size)


def recolour(x: Tensor, u: Tensor, wanted: Augment) -> Tensor:
    """x (B, 3, H, W) of 0 to 255, u (B, 3) in [0, 1) -> float32 of the same range, another light per sample."""
    x = x.float()
    most = torch.tensor([wanted.brightness, wanted.saturation, wanted.contrast], device=u.device)
    light, colour, contrast = (1 + most * (2 * u - 1)).T[:, :, None, None, None]  # each (B, 1, 1, 1)
    x = x * light
    gray = x.mean(1, keepdim=True)  # (B, 1, H, W)
    x = gray + (x - gray) * colour
    middle = gray.mean((2, 3), keepdim=True)
    return (middle + (x - middle) * contrast).clamp(0, 255)


def recorded_discs(cfg: EnvSettings) -> Path:
    """The folder of the simulated demonstrations; recorded if missing, by one of any number of processes."""
    folder = GENERATED / f"discs_v{RECIPE}_{cfg.demonstrations}x{cfg.size}_seed{cfg.data_seed}_noise{cfg.noise:g}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, by a killed process too
        if not folder.exists():
            record_discs(folder, cfg)
    return folder


def record_discs(folder: Path, cfg: EnvSettings) -> None:
    features = {
        "observation.state": ("float32", (2,)),
        "observation.images.top": ("image", (3, cfg.size, cfg.size)),
        "action": ("float32", (2,)),
    }
    seeds = cfg.data_seed * 10**6 + np.arange(cfg.demonstrations)
    with Recorder(folder, FPS, features, robot_type="discs") as recorder:
        for episode, command in discs.demonstrate(seeds, cfg.size, cfg.noise, cfg.command or None):
            recorder.add_episode(episode, command)


def _chosen_cameras(wanted: list[str], there: list[str], root: Path) -> list[str]:
    if wanted == ["none"]:
        return []
    if unknown := sorted(set(wanted) - set(there)):
        what = f"no camera {unknown[0]}"
        raise LockstepError(what, where=f"dataset.cameras, {root}", todo=f"there are {', '.join(there) or 'none'}")
    return wanted or there


def _check(cfg: Any) -> None:
    """What no single field can know."""
    policy = cfg.policy
    if policy.type == "smolvla":
        _check_smolvla(policy)
    if cfg.env.command and cfg.env.command not in discs.COMMANDS:
        todo = f"choose one of: {', '.join(discs.COMMANDS)}"
        raise LockstepError(f"no command {cfg.env.command!r}", where="env.command", todo=todo)
    if policy.push_to_hub:
        raise LockstepError("nothing is uploaded", where="policy.push_to_hub", todo="drop it, or give false")
    try:
        settings_of(policy) if policy.type != "smolvla" else None
    except ValueError as error:
        raise LockstepError(str(error), where="policy", todo="change one of them") from None


def _check_smolvla(policy: Any) -> None:
    if not find_spec("lerobot"):
        raise LockstepError(
            "SmolVLA is LeRobot's own class, and the lerobot package is not installed",
            where="policy.type=smolvla",
            todo="pip install 'lerobot[smolvla]', or choose policy.type=vla, which is native and another model",
        )
    if not policy.pretrained_path:
        todo = "give policy.pretrained_path=lerobot/smolvla_base, downloaded before"
        raise LockstepError("SmolVLA starts from pretrained weights", where="policy.type=smolvla", todo=todo)


def _cache_dir(wanted: str, given: bool) -> Path:
    if not given:
        return GENERATED
    return Path(wanted or os.environ.get("LOCKSTEP_CACHE", "~/.cache/lockstep")).expanduser()
