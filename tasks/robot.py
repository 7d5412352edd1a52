"""Imitation learning: predict a robot's actions from pictures, state and command, given recorded demonstrations.

The data are in LeRobot's format (formats/lerobot.py). Without a dataset, demonstrations of a simulation are recorded at
the first start, coloured discs on a table (envs/discs.py) or PushT (envs/pusht.py), and every evaluation also makes
trials of the policy in it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine import contract
from engine.config import changed
from engine.contract import Batch, LockstepError, Loss, PerSample, Sums, amount
from envs.trials import roll_out
from formats import lerobot, pretrained
from formats.frames import Frames
from models import act, smolvla, vla
from models.layers import Normalizer
from models.policy import STATES, Policy
from tasks import _lerobot_keys
from tasks import _simulation as simulation
from tasks._pictures import captioned
from tasks._robot import POLICIES, Augment, Settings, check, renaming, settings_of, start_from, steps_of

IMAGENET = {"mean": [[[0.485]], [[0.456]], [[0.406]]], "std": [[[0.229]], [[0.224]], [[0.225]]]}
NEVER = 10**9  # steps: an evaluation at the end alone
UNIT = {"min": [[[0.0]]] * 3, "max": [[[1.0]]] * 3}


class Task(contract.Task):
    """Batches hold features by name, and `action` (B, chunk, A) with `action_is_pad` (B, chunk): formats/lerobot.py."""

    Settings = Settings
    monitor = "action_l1"
    resumable_keys = tuple(
        "dataset.root dataset.repo_id dataset.revision dataset.cache dataset.cache_dir download eval. "
        "policy.pretrained_path policy.pretrained_revision policy.n_action_steps policy.num_steps "
        "policy.temporal_ensemble_coeff policy.gradient_checkpointing".split()
    )
    compat_aliases = _lerobot_keys.ALIASES
    aliases = {"root": "dataset.root", "episodes": "dataset.episodes"}

    @classmethod
    def implied(cls, given: dict[str, str]) -> dict[str, tuple[str, str]]:
        """What the config.json of the weights says that a policy starts from."""
        if given["config"].endswith("train_config.json") and os.path.isfile(given["config"]):
            raise _lerobot_keys.cannot_resume(given["config"])
        return _lerobot_keys.of_weights(given, POLICIES) if given.get("policy.pretrained_path") else {}

    @classmethod
    def defaults_for(cls, cfg: Any) -> dict[str, Any]:
        """The two cadences of LeRobot, of which either may be 0 for never, as one of ours."""
        asked = [every for every in (cfg.eval.loss_every, cfg.eval.trials_every) if every >= 0]
        return {"eval_every": next(filter(None, asked), NEVER)} if asked else {}

    @classmethod
    def sets_nothing(cls, cfg: Any) -> dict[str, tuple[Any, str]]:
        return _lerobot_keys.without_effect(cfg)

    def datasets(self) -> tuple[lerobot.Chunks, lerobot.Chunks]:
        cfg, policy = self.cfg.dataset, self.cfg.policy
        check(self.cfg)
        given = bool(cfg.root or cfg.repo_id)
        self.simulation = simulation.which(self.cfg.env, given)
        self.trials_every = max(0, self.cfg.eval.trials_every)
        self.num_trials = self.cfg.eval.n_episodes if self.simulation and self.cfg.eval.trials_every else 0
        if given:
            root = lerobot.find(cfg.root, cfg.repo_id, cfg.revision, self.cfg.download)
        else:
            root = simulation.recorded(self.cfg.env, self.simulation)
        demos = lerobot.read(root, cfg.episodes, cfg.exclude_episodes, cfg.tolerance_s)
        self.cameras = _chosen_cameras(cfg.cameras, demos.cameras, root)
        self.names = renaming(self.cfg.rename_map, demos, root)
        self.cameras = [self.names.get(name, name) for name in self.cameras]
        self.demos = demos = _for_imitation(lerobot.renamed(demos, self.names), self.cameras)
        self.action_dim = demos.columns["action"].shape[-1]
        self.dims = {name: demos.columns[name].shape[-1] for name in STATES if name in demos.columns}
        if policy.type == "smolvla" and STATES[0] not in self.dims:
            raise LockstepError("SmolVLA needs observation.state", str(root), "choose policy.type=vla")
        if self.simulation:
            names = {name: self.names.get(name, name) for name in simulation.features(self.cfg.env, self.simulation)}
            wanted = [*self.dims, *self.cameras, "action"]
            simulation.check_fits(self.cfg.env, self.simulation, demos, wanted, names, given)
        train, val = lerobot.split(demos.episodes, cfg.eval_split, cfg.split_seed)
        self.shared = not len(val)
        if self.shared:
            val = train
        self.counts = len(train), len(val)
        self.sizes = {camera: self._size(camera) for camera in self.cameras}
        frames = Frames(demos, self.sizes, cfg.cache, _cache_dir(cfg.cache_dir, given)) if self.cameras else None
        deltas = {"action": list(range(policy.chunk_size))}
        both = lerobot.Chunks(demos, train, deltas, frames), lerobot.Chunks(demos, val, deltas, frames)
        self.never = sorted(
            {*both[1].labels.tolist()} - {*both[0].labels.tolist()}
        )  # tasks without an episode to train on
        self._measure(both[0])
        return both

    def _measure(self, train: lerobot.Chunks) -> None:
        """Measure again what the dataset tells of all episodes, if some are excluded."""
        kept, visual = self.kept(train), self.cfg.policy.normalization_mapping.VISUAL
        if not kept.all():
            if self.cameras and not self.cfg.dataset.use_imagenet_stats and visual not in ("IDENTITY", "MIN_MAX"):
                what = "the statistics of pictures are known of all episodes together"
                raise LockstepError(what, "exclude", "give dataset.use_imagenet_stats=true, to both runs")
            rows = np.ones(len(self.demos.columns["index"]), dtype=bool)
            rows[train.rows.numpy()[~kept]] = False
            self.demos = lerobot.measured_again(self.demos, rows)
        self.mean_action = torch.as_tensor(self.demos.stats["action"]["mean"], dtype=torch.float64)

    def full_dataset(self) -> lerobot.Chunks:
        self.cfg = changed(self.cfg, {"dataset.eval_split": 0.0})
        return self.datasets()[1]

    def _size(self, camera: str) -> tuple[int, int]:
        """(H, W) of a camera's pictures in the batches."""
        _, height, width = self.demos.features[camera].shape
        if wanted := self.cfg.dataset.resize:
            return wanted[0], wanted[1]
        if self.cfg.policy.type != "vla":
            return height, width
        side, larger = settings_of(self.cfg.policy).image_size, max(height, width)
        # Keep the aspect ratio: the network pads to its square.
        return max(1, round(side * height / larger)), max(1, round(side * width / larger))

    def model(self) -> nn.Module:
        cfg, demos = self.cfg.policy, self.demos
        modes = dict.fromkeys(self.dims, cfg.normalization_mapping.STATE)
        if STATES[1] in modes:
            modes[STATES[1]] = cfg.normalization_mapping.ENV
        modes |= {"action": cfg.normalization_mapping.ACTION}
        modes |= dict.fromkeys(self.cameras, cfg.normalization_mapping.VISUAL)
        stats: dict[str, Any] = dict(demos.stats)
        for camera in self.cameras:
            own = IMAGENET | stats.get(camera, {})
            stats[camera] = own | UNIT | (IMAGENET if self.cfg.dataset.use_imagenet_stats else {})
        for name, mode in modes.items():
            if missing := set(Normalizer.NEEDS[mode]) - stats[name].keys():
                what = f"the dataset tells no {', '.join(sorted(missing))} of {name}, which {mode} needs"
                raise LockstepError(what, "policy.normalization_mapping", "choose another mode")
        policy = Policy(self._net(), Normalizer(stats, modes), self.cameras)
        if cfg.pretrained_path and cfg.type != "smolvla" and not self.resuming:
            self.started_from = start_from(cfg, policy)
        self.encode = getattr(policy.net, "encode", None)  # ACT takes no commands
        self.words = self.encode(demos.tasks) if self.encode else None
        self.num_draws, self.penalty = policy.net.num_draws, policy.net.penalty
        return policy

    def _net(self) -> nn.Module:
        cfg = self.cfg.policy
        state_dim, env_dim = (self.dims.get(name, 0) for name in STATES)
        if cfg.type == "act":
            return act.ACT(settings_of(cfg), state_dim, env_dim, self.action_dim, self.cameras)
        if cfg.type == "vla":
            return vla.VLA(settings_of(cfg), state_dim, env_dim, self.action_dim, self.cameras)
        options = {name: vars(cfg)[name] for name in ("chunk_size", "freeze_vision_encoder", "train_expert_only")}
        folder = pretrained.find(cfg.pretrained_path, cfg.pretrained_revision)
        shapes: dict[str, tuple[int, ...]] = {camera: (3, *size) for camera, size in self.sizes.items()}
        return smolvla.SmolVLA(folder, self.dims, self.action_dim, shapes, n_action_steps=steps_of(cfg), **options)

    def save_pretrained(self, policy: Policy, folder: Path) -> None:
        """Write a `pretrained_model` folder, which `policy.pretrained_path` takes and, except for a vla, LeRobot."""
        shapes = {name: [dim] for name, dim in self.dims.items()} | {"action": [self.action_dim]}
        shapes |= {camera: [3, *size] for camera, size in self.sizes.items()}
        kinds = {name: self.demos.features[name].kind for name in shapes}
        features = {name: {"type": kinds[name], "shape": shape} for name, shape in shapes.items()}
        # The statistics of the checkpoint: the dataset may have grown since.
        stats, modes = policy.normalizer.stats(), policy.normalizer.modes
        if self.cfg.policy.type == "smolvla":
            pretrained.save_with(policy.net.save, folder, stats, features, modes, policy.net.tokenizer, self.names)
            return
        config = asdict(settings_of(self.cfg.policy))
        if coefficient := getattr(self.cfg.policy, "temporal_ensemble_coeff", 0.0):
            config["temporal_ensemble_coeff"] = coefficient
        pretrained.save(folder, self.cfg.policy.type, config, policy.net, stats, features, modes, self.names)

    def export_module(self, model: nn.Module) -> tuple[nn.Module, Callable[[Batch], Tensor | dict[str, Tensor]]]:
        """The module maps {feature name: tensor as in a batch, "words": `encode` of the command} to {"actions"}."""
        assert isinstance(model, Policy)
        if self.cfg.policy.type == "smolvla":
            what = "SmolVLA is exported by the lerobot package only"
            raise LockstepError(what, "policy.type", "tools/save_pretrained.py writes what it loads")
        names = [*self.dims, *self.cameras]
        words = ["words"] if self.words is not None else []
        return Acting(model), lambda batch: {name: self._with_words(batch)[name] for name in [*names, *words]}

    # ---- training ----

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        """The mean error over unpadded steps and dimensions, plus the policy's penalty times the mean KL."""
        augment, given = self.cfg.augment, batch["lockstep"]
        draws = contract.uniform(given.seed, 3 * augment.enabled + self.num_draws)
        inputs = self._with_words(batch)
        if augment.enabled:
            changed = {name: recolour(batch[name], draws[:, :3], augment) for name in self.cameras}
            inputs, draws = inputs | changed, draws[:, 3:]
        out = net(inputs, draws)
        steps = (~batch["action_is_pad"]).sum(1)  # (B,)
        error = out["error"] if out["error"].dtype == torch.float64 else out["error"].float()
        # The error is a mean over the steps of the global batch, the KL one over its samples: both add up this way.
        weight = given.mean_weight
        mean_steps = steps.to(error.dtype).mean() if weight is None else weight.to(error.dtype)
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
        """Sum the training's error under fixed draws, and the L1 error of the predicted actions in recorded units."""
        assert isinstance(model, Policy)
        inputs = self._with_words(batch)
        seeds = contract.sample_seeds(0, 0, batch["row"])
        out = model(inputs, contract.uniform(seeds, self.num_draws))
        valid = ~batch["action_is_pad"][:, :, None]  # (B, chunk, 1)
        truth = batch["action"].double()
        self.mean_action = mean = self.mean_action.to(truth.device)  # copied once

        def l1(actions: Tensor) -> Tensor:
            return ((actions.double() - truth).abs() * valid).sum()

        sums = Sums(
            error=out["error"].double().sum(),
            kl=out["kl"].double().sum() if "kl" in out else torch.zeros((), dtype=torch.float64),
            numbers=valid.sum() * self.action_dim,
            off=l1(model.act(inputs)),
            off_mean=l1(mean.expand_as(truth)),
            count=torch.tensor(len(truth)),
        )
        state = batch.get("observation.state")
        if state is not None and state.shape[-1] == self.action_dim:
            sums["off_hold"] = l1(state[:, None].expand_as(truth))
        return sums

    def report(self, sums: Sums) -> dict[str, float]:
        """`action_l1` beside two baselines: the mean action, and the current state as the action."""
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
            metrics["avg_max_reward"] = float(sums["rewards"]) / float(sums["trials"])
        return metrics

    def predict(self, model: nn.Module, batch: Batch) -> PerSample:
        """The chunk of actions from each frame on, in recorded units."""
        assert isinstance(model, Policy)
        where = {name: batch[f"{name}_index"] for name in ("episode", "frame")}
        return where | {"action": model.act(self._with_words(batch)).float()}

    def trials(self, model: nn.Module, which: range, stopped: Callable[[], bool]) -> Sums:
        """Make trials of the policy in the simulation, from starts that no demonstration has."""
        assert isinstance(model, Policy)
        device = next(model.parameters()).device
        coefficient = getattr(self.cfg.policy, "temporal_ensemble_coeff", 0.0)
        blend = act.TemporalEnsemble(coefficient) if coefficient else None
        looks = itertools.count()

        def policy(observations: dict[str, np.ndarray], commands: list[str]) -> np.ndarray:
            named = {self.names.get(name, name): value for name, value in observations.items()}
            batch = {name: torch.from_numpy(value).to(device) for name, value in named.items()}
            batch |= {name: _shrunk(batch[name], self.sizes[name]) for name in self.cameras}
            if self.encode:
                # A policy trained on one task knows its wording only, whatever the simulation calls it.
                texts = commands if len(self.demos.tasks) > 1 else self.demos.tasks * len(commands)
                batch["words"] = self.encode(texts).to(device)
            # Noise picks one of several ways instead of their mean; seeded by trial and look, whatever the rank.
            seeds_now = contract.sample_seeds(next(looks), 0, torch.tensor(which, device=device))
            chunk = model.act(batch, contract.uniform(seeds_now, model.net.num_noise))
            return (blend(chunk)[:, None] if blend else chunk).float().cpu().numpy()

        totals = dict.fromkeys(("successes", "rewards", "trials"), 0.0)
        if len(which):
            seeds = simulation.FRESH + np.array(which, dtype=np.int64)
            recorded = [self.demos.features[name].shape[1] for name in self.cameras]  # as large as in the data
            worlds = simulation.worlds(self.cfg.env, self.simulation, seeds, max(recorded, default=0), bool(recorded))
            success, film = roll_out(policy, worlds, steps_of(self.cfg.policy), stopped)
            if 0 in which:  # `pictures` shows trial 0
                self.film, self.filmed = film, f"{worlds.commands[0]}: {'done' if success[0] else 'failed'}"
            totals = {"successes": success.sum(), "rewards": worlds.reward.sum(), "trials": len(which)}
        return Sums({name: torch.tensor(total, dtype=torch.float64) for name, total in totals.items()})

    def pictures(self, model: nn.Module, batch: Batch, sums: Sums) -> dict[str, np.ndarray]:
        """A film of one trial, and ten of its frames as a strip, under its command and outcome."""
        if "trials" not in sums:
            return {}
        times = max(1, 288 // self.film.shape[-1])
        film = self.film.transpose(0, 2, 3, 1).repeat(times, 1).repeat(times, 2)  # (T, H, W, 3), larger
        chosen = film[np.linspace(0, len(film) - 1, 10).astype(int)]  # (10, H, W, 3)
        framed = np.pad(chosen, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=255)
        strip = np.concatenate(list(framed), 1)
        return {"trial": captioned(film, self.filmed), "trial_strip": captioned(strip[None], self.filmed)[0]}

    def summary(self) -> str:
        demos, (train, val) = self.demos, self.counts
        texts = ", ".join(repr(text) for text in demos.tasks[:3]) + (", ..." if len(demos.tasks) > 3 else "")
        given, share = bool(self.cfg.dataset.root or self.cfg.dataset.repo_id), self.cfg.dataset.eval_split
        recorded = self.simulation and not given
        tried = f" (the successes of {self.cfg.env.demonstrations} tried)" if recorded else ""
        trials = f"{self.num_trials} in the simulation {self.simulation}" if self.num_trials else "none"
        rows = [
            f"Found {len(demos.episodes)} episodes{tried} with {(demos.end - demos.start).sum()} frames at"
            f" {demos.fps:g} Hz in {os.path.relpath(demos.root)} ({demos.version})",
            f"Features: {', '.join(f'{name} {dim}' for name, dim in self.dims.items())}, action {self.action_dim},"
            f" {amount(len(self.cameras), 'camera')}; {amount(len(demos.tasks), 'command')}: {texts}",
            f"Train episodes: {train}, Val episodes: {val}"
            + (
                " (the same: there is no other to validate on)"
                if self.shared
                else f" (dataset.eval_split={share:g}; LeRobot's default is 0: all train)" * given
            )
            + f"; trials at each evaluation: {trials}",
        ]
        if self.never:
            names = ", ".join(repr(demos.tasks[task]) for task in self.never[:3]) + ", ..." * (len(self.never) > 3)
            rows.append(
                f"warning: nothing to train on of {names}: all episodes validate; dataset.split_seed draws others"
            )
        policy = self.cfg.policy
        if policy.type == "act" and self.cameras and not policy.pretrained_path and not self.resuming:
            rows.append(
                f"The {policy.vision_backbone} that sees starts at random, its norms frozen as they are;"
                " LeRobot's starts from ImageNet's weights"
            )
        return "\n".join(rows)


class Acting(nn.Module):
    """A policy for export: actions (B, chunk, A) float32 in recorded units, predicted without noise."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy

    def forward(self, observation: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"actions": self.policy.act(observation).float()}


def recolour(x: Tensor, u: Tensor, wanted: Augment) -> Tensor:
    """Change brightness, colour and contrast per sample: x (B, 3, H, W) in 0..255, u (B, 3) in [0, 1) -> float32."""
    x = x.float()
    amounts = (wanted.brightness, wanted.saturation, wanted.contrast)
    most = torch.stack([torch.full((), amount, device=u.device) for amount in amounts])  # a copy is a sync point
    light, colour, contrast = (1 + most * (2 * u - 1)).T[:, :, None, None, None]  # each (B, 1, 1, 1)
    x = x * light
    gray = x.mean(1, keepdim=True)  # (B, 1, H, W)
    x = gray + (x - gray) * colour
    middle = gray.mean((2, 3), keepdim=True)
    return (middle + (x - middle) * contrast).clamp(0, 255)


def _shrunk(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """Shrink (B, 3, H, W) uint8 to (B, 3, *size) as in batches, by formats/frames.py's filter."""
    if size == tuple(pictures.shape[2:]):
        return pictures
    return F.interpolate(pictures.float(), size, mode="bilinear", antialias=True).round()


def _for_imitation(demos: lerobot.Demonstrations, cameras: list[str]) -> lerobot.Demonstrations:
    """Keep the chosen cameras, in colour, and the numbers as float32 vectors. Raises LockstepError if `action` or
    everything to act on is missing."""
    used, columns = {}, dict(demos.columns)
    for name, feature in demos.features.items():
        if feature.is_picture and name in cameras:
            used[name] = replace(feature, shape=(3, *feature.shape[1:]))
        elif not feature.is_picture:
            used[name] = feature
    if "action" not in columns or not (cameras or columns.keys() & set(STATES)):
        what = "the dataset has no `action`, or nothing to act on: no camera and no observation.state"
        there = ", ".join(name for name in demos.features if name not in lerobot.BOOKKEEPING)
        todo = f"imitation needs both, under these names; there are {there or 'none'}"
        raise LockstepError(what, str(demos.root), todo)
    for name in columns.keys() & {"action", *STATES}:
        if columns[name].ndim != 2:
            what = f"{name} has {columns[name].ndim - 1} axes"
            raise LockstepError(what, str(demos.root), "a vector is learned from: flatten it")
        if columns[name].dtype.kind != "f":
            columns[name] = columns[name].astype(np.float32)
    return replace(demos, features=used, columns=columns)


def _chosen_cameras(wanted: list[str], there: list[str], root: Path) -> list[str]:
    if wanted == ["none"]:
        return []
    if unknown := sorted(set(wanted) - set(there)):
        what = f"no camera {unknown[0]}"
        raise LockstepError(what, f"dataset.cameras, {root}", f"there are {', '.join(there) or 'none'}")
    if len(set(wanted)) < len(wanted):
        raise LockstepError("a camera is named twice", "dataset.cameras", "keep one")
    return wanted or there


def _cache_dir(wanted: str, given: bool) -> Path:
    if not given:
        return simulation.GENERATED
    return Path(wanted or os.environ.get("LOCKSTEP_CACHE", "~/.cache/lockstep")).expanduser()
