"""Imitation learning: predict a robot's actions from pictures, state and command.

The training data are recorded demonstrations in LeRobot's format (formats/robots/lerobot.py).
Without a dataset, the first start records demonstrations of a simulation: coloured discs on a table
(tasks/envs/discs.py) or PushT (tasks/envs/pusht.py). Every evaluation then also makes trials of the
policy in the simulation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine import contract
from engine.config import changed
from engine.contract import Batch, LockstepError, Loss, PerSample, Sums, amount
from formats import home
from formats.robots import language, lerobot, lerobot_mix
from formats.weights import pretrained
from models import act, vla
from models.layers import Normalizer
from models.policy import STATES, Policy
from tasks.robots import baselines, held_out, imagenet, simulation, trials
from tasks.robots import lerobot as _lerobot
from tasks.robots import lerobot_keys as _lerobot_keys
from tasks.robots.settings import (
    POLICIES,
    Augment,
    Settings,
    check,
    eval_every,
    refuse_depths,
    renamed,
    settings_of,
    start_from,
    steps_of,
)

IMAGENET = {"mean": [[[0.485]], [[0.456]], [[0.406]]], "std": [[[0.229]], [[0.224]], [[0.225]]]}
BASELINES = {"off_mean": "baseline/mean_action_l1", "off_hold": "baseline/hold_state_l1"}
"""{sum of an evaluation: metric of an answer without a model}"""
UNIT = {"min": [[[0.0]]] * 3, "max": [[[1.0]]] * 3}


class Task(contract.Task):
    """Batches hold features by name, `action` (B, chunk, A), and `action_is_pad` (B, chunk).

    See formats/robots/lerobot.py.
    """

    Settings = Settings
    monitor = "action_l1"
    higher_is_better = False
    resumable_keys = tuple(
        "dataset.root dataset.repo_id dataset.revision dataset.cache dataset.cache_dir download "
        "eval. "
        "policy.pretrained_path policy.pretrained_revision policy.n_action_steps policy.num_steps "
        "policy.temporal_ensemble_coeff policy.gradient_checkpointing "
        "policy.pretrained_backbone_weights".split()
    )
    forward_methods = ("act",)
    compat_aliases = _lerobot_keys.ALIASES
    aliases = {"root": "dataset.root", "episodes": "dataset.episodes"}

    @classmethod
    def implied(cls, given: dict[str, str]) -> dict[str, tuple[str, str]]:
        """Return the settings in the config.json of the policy's initial weights."""
        if given["config"].endswith("train_config.json") and os.path.isfile(given["config"]):
            raise _lerobot_keys.cannot_resume(given["config"])
        return (
            _lerobot_keys.of_weights(given, POLICIES) if given.get("policy.pretrained_path") else {}
        )

    @classmethod
    def defaults_for(cls, cfg: Any) -> dict[str, Any]:
        """Return defaults from LeRobot: `eval_every` and the policy's optimizer.

        `eval_every` combines LeRobot's two cadences, of which either may be 0 for never.
        """
        found: dict[str, Any] = {"eval_every": every} if (every := eval_every(cfg)) else {}
        if _lerobot.is_lerobots(cfg.policy):
            return found | _lerobot.presets(cfg)[0]
        # A policy without cameras has no rate of a backbone.
        if rate := getattr(cfg.policy, "optimizer_lr_backbone", 0.0):
            found["optim.lr_scale"] = [f"?*backbone.*:{rate / cfg.optim.lr!r}"]
        return found

    @classmethod
    def sets_nothing(cls, cfg: Any) -> dict[str, tuple[Any, str]]:
        return _lerobot_keys.without_effect(cfg)

    def datasets(self) -> tuple[lerobot.Chunks, lerobot.Chunks]:
        cfg, policy = self.cfg, self.cfg.policy
        check(cfg)
        if policy.pretrained_path and not self.resuming:
            # Raise before the data are read.
            pretrained.find(policy.pretrained_path, policy.pretrained_revision)
        self.given = bool(cfg.dataset.root or cfg.dataset.repo_id)
        self.simulation = simulation.which(cfg.env, self.given)
        self.trials_every = max(0, cfg.eval.trials_every)
        self.num_trials = cfg.eval.n_episodes if self.simulation and cfg.eval.trials_every else 0
        self.films: list[trials.Trial] = []  # of the last evaluation
        self.demos = self._demonstrations()
        texts = language.texts_of(self.demos, cfg.dataset.command)
        self.texts = texts.texts
        both = language.with_texts(self._chunks(), texts)
        # Commands without a training episode.
        self.never = sorted({*both[1].labels.tolist()} - {*both[0].labels.tolist()})
        self._measure(both[0])
        self.val = both[1]
        return both

    def _demonstrations(self) -> lerobot.Demonstrations:
        """Read the datasets under the policy's names and join the datasets.

        Raises LockstepError for missing or differing features.
        """
        cfg = self.cfg.dataset
        if self.given:
            sets = lerobot_mix.places(cfg.root, cfg.repo_id, cfg.revision, self.cfg.download)
        else:
            sets = {"": simulation.recorded(self.cfg.env, self.simulation)}
        ids = [cfg.repo_id] if isinstance(cfg.repo_id, str) else cfg.repo_id
        # for the card of the policy
        self.sets = [*filter(None, ids)] or [path.name for path in sets.values()]
        lerobot_mix.check_weights(cfg.weights, [*sets])
        read = lerobot_mix.read(sets, cfg.episodes, cfg.exclude_episodes, cfg.tolerance_s)
        read, self.names = renamed(self.cfg.rename_map, read)
        cameras = [self.names.get(name, name) for name in cfg.cameras]
        cameras = [*dict.fromkeys(cameras)] if len(read) > 1 else cameras
        demos = lerobot_mix.only(lerobot_mix.joined(read, cameras), self.used)
        root = demos.root
        if (
            len(read) > 1
            and not demos.cameras
            and cameras != ["none"]
            and all(each.cameras for each in read.values())
        ):
            todo = "rename_map gives them one name; dataset.cameras=none trains without"
            raise LockstepError("no camera is in all datasets under one name", str(root), todo)
        self.cameras = _chosen_cameras(cameras, demos.cameras, root)
        refuse_depths(demos, self.cameras)
        demos = _for_imitation(demos, self.cameras)
        self.action_dim = demos.columns["action"].shape[-1]
        self.dims = {
            name: demos.columns[name].shape[-1] for name in STATES if name in demos.columns
        }
        if self.simulation:
            names = {
                name: self.names.get(name, name)
                for name in simulation.features(self.cfg.env, self.simulation)
            }
            wanted = [*self.dims, *self.cameras, "action"]
            simulation.check_fits(self.cfg.env, self.simulation, demos, wanted, names, self.given)
        return demos

    def _chunks(self) -> tuple[lerobot.Chunks, lerobot.Chunks]:
        """Cut the demonstrations into training samples and validation samples."""
        cfg, policy, demos = self.cfg.dataset, self.cfg.policy, self.demos
        train, val = lerobot_mix.split(demos, cfg.eval_split, cfg.split_seed)
        self.shared = not len(val)
        if self.shared:
            val = train
        self.counts = len(train), len(val)
        self.sizes = {
            camera: lerobot_mix.size_of(demos, camera, self._fitted) for camera in self.cameras
        }
        where = _cache_dir(cfg.cache_dir, self.given)
        frames = lerobot_mix.pictures(demos, self.sizes, cfg.cache, where) if self.cameras else None
        if _lerobot.is_lerobots(policy):
            self.windows = _lerobot.windows(policy, [*self.dims, *self.cameras])
        else:
            self.windows = _lerobot.Windows({"action": list(range(policy.chunk_size))})
        deltas, skipped = self.windows.deltas, self.windows.skipped
        both = (
            lerobot_mix.chunks(demos, train, deltas, frames, cfg.weights, skipped),
            lerobot_mix.chunks(demos, val, deltas, frames),
        )
        self.of_each = lerobot_mix.describe_sets(demos, *both)
        return both

    def _measure(self, train: lerobot.Chunks) -> None:
        """Compute the actions without a model, and new statistics if some episodes are excluded."""
        kept, visual = self.kept(train), self.cfg.policy.normalization_mapping.VISUAL
        if not kept.all():
            if (
                self.cameras
                and not self.cfg.dataset.use_imagenet_stats
                and visual not in ("IDENTITY", "MIN_MAX")
            ):
                what = "the statistics of pictures are known of all episodes together"
                raise LockstepError(
                    what, "exclude", "give dataset.use_imagenet_stats=true, to both runs"
                )
            rows = np.ones(len(self.demos.columns["index"]), dtype=bool)
            rows[train.rows.numpy()[~kept]] = False
            self.demos = lerobot.measured_again(self.demos, rows)
        self.held_state = baselines.HeldState(self.demos)
        self.trained_mean: list[float] = baselines.mean_action(train, kept)
        self.mean_action = torch.tensor(self.trained_mean, dtype=torch.float64)

    def full_dataset(self) -> lerobot.Chunks:
        of_other_data = lerobot_mix.of_other_data(self.cfg.dataset) if self.used else {}
        self.cfg = changed(self.cfg, {"dataset.eval_split": 0.0} | of_other_data)
        trained_mean = self.trained_mean
        every = self.datasets()[1]
        lerobot_mix.warn_of_other_facts(self.demos, self.trained_facts)
        # These data may be others than the training's.
        self.trained_mean = trained_mean
        self.mean_action = torch.tensor(trained_mean, dtype=torch.float64)
        return every

    used: Sequence[str] = ()
    """For a model trained on several datasets: the common features."""
    trained_mean: Sequence[float] = ()
    """The mean action of the training; empty with a checkpoint of an earlier release."""
    trained_facts: Mapping[str, Sequence[str]] = {}
    """The rate and the names of numbers of the training; empty with an earlier checkpoint."""

    def metadata(self) -> dict[str, Any]:
        about: dict[str, Any] = {"mean_action": [*self.trained_mean]}
        about["facts"] = lerobot_mix.facts_of(self.demos)
        if lerobot_mix.names_of(self.demos):
            about["features"] = [*self.demos.features]
        return about

    def load_metadata(self, metadata: dict[str, Any]) -> None:
        self.used = metadata.get("features", ())
        self.trained_mean = metadata.get("mean_action", ())
        self.trained_facts = metadata.get("facts", {})

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """Return the (H, W) in batches for a camera's recorded pictures."""
        if wanted := self.cfg.dataset.resize:
            return wanted[0], wanted[1]
        if self.cfg.policy.type != "vla":
            return height, width
        side, larger = settings_of(self.cfg.policy).image_size, max(height, width)
        # Keep the aspect ratio: the network pads pictures to a square.
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
                what = (
                    f"the dataset tells no {', '.join(sorted(missing))} of {name}, which "
                    f"{mode} needs"
                )
                raise LockstepError(what, "policy.normalization_mapping", "choose another mode")
        policy = self._policy(stats, modes)
        self.encode = getattr(policy.net, "encode", None)  # ACT takes no commands
        self.words = self.encode(self.texts) if self.encode else None
        self.num_draws, self.penalty = policy.net.num_draws, policy.net.penalty
        return policy

    def _backbone_file(self) -> str:
        """Return the file of ImageNet's weights for ACT's backbone, if any."""
        cfg = self.cfg.policy
        return str(cfg.pretrained_backbone_weights) if cfg.type == "act" else ""

    def _policy(self, stats: dict[str, Any], modes: dict[str, str]) -> Policy:
        cfg = self.cfg.policy
        state_dim, env_dim = (self.dims.get(name, 0) for name in STATES)
        if _lerobot.is_lerobots(cfg):
            start = None
            if cfg.pretrained_path and not self.resuming:
                start = pretrained.find(cfg.pretrained_path, cfg.pretrained_revision)
            self.started_from = str(start or "")
            return _lerobot.build(
                cfg, self._features(), {name: stats[name] for name in modes}, start
            )
        net: nn.Module
        if cfg.type == "act":
            net = act.ACT(settings_of(cfg), state_dim, env_dim, self.action_dim, self.cameras)
        else:
            net = vla.VLA(settings_of(cfg), state_dim, env_dim, self.action_dim, self.cameras)
        policy = Policy(net, Normalizer(stats, modes), self.cameras)
        if cfg.pretrained_path and not self.resuming:
            self.started_from = start_from(cfg, policy)
        elif self._backbone_file() and not self.resuming:
            by_imagenet = (
                self.cfg.dataset.use_imagenet_stats
                and cfg.normalization_mapping.VISUAL == "MEAN_STD"
            )
            self.started_from = imagenet.start(cfg, getattr(net, "backbone", None), by_imagenet)
        return policy

    def _features(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return {name: (LeRobot's type, shape of one frame)} of the policy's inputs and outputs.

        Pictures are channels first.
        """
        shapes: dict[str, tuple[int, ...]] = {name: (dim,) for name, dim in self.dims.items()}
        shapes |= {"action": (self.action_dim,)} | {
            camera: (3, *size) for camera, size in self.sizes.items()
        }
        return {
            name: (str(self.demos.features[name].kind), shape) for name, shape in shapes.items()
        }

    def save_pretrained(self, policy: Policy, folder: Path) -> None:
        """Write a `pretrained_model` folder.

        `policy.pretrained_path` accepts the folder, and LeRobot reads the folder except for a vla.
        """
        features = {
            name: {"type": of, "shape": list(shape)}
            for name, (of, shape) in self._features().items()
        }
        resize = self.cfg.dataset.resize
        if resize and (other := [camera for camera in self.cameras if "image" not in camera]):
            what = f"LeRobot resizes pictures whose name has `image` in it, and {other[0]} has not"
            raise LockstepError(
                what, "dataset.resize", "give it another name by rename_map, and train again"
            )
        card = pretrained.card_of(self.cfg.policy.type, features, self.sets)
        if isinstance(policy, _lerobot.Adapted):
            pretrained.write_folder(
                folder, lambda new: _lerobot.save(policy, new, self.names, resize), card
            )
            return
        # Use the checkpoint's statistics: the dataset may have grown since.
        stats, modes = policy.normalizer.stats(), policy.normalizer.modes
        config = asdict(settings_of(self.cfg.policy))
        if coefficient := getattr(self.cfg.policy, "temporal_ensemble_coeff", 0.0):
            config["temporal_ensemble_coeff"] = coefficient
        kind, names = self.cfg.policy.type, self.names
        pretrained.save(
            folder, kind, config, policy.net, stats, features, modes, names, card, resize
        )

    def export_module(
        self, model: nn.Module
    ) -> tuple[nn.Module, Callable[[Batch], Tensor | dict[str, Tensor]]]:
        """Return a module that maps batch tensors to {"actions"}.

        The input is {feature name: tensor as in a batch, "words": `encode` of the command}.
        """
        assert isinstance(model, Policy)
        if isinstance(model, _lerobot.Adapted):
            what = f"{self.cfg.policy.type} is exported by the lerobot package only"
            raise LockstepError(
                what, "policy.type", "tools/save_pretrained.py writes what it loads"
            )
        names = [*self.dims, *self.cameras]
        words = ["words"] if self.words is not None else []
        return Acting(model), lambda batch: {
            name: self._with_words(batch)[name] for name in [*names, *words]
        }

    # ---- training ----

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        """Return the mean error over unpadded steps and dimensions, plus the penalty.

        The penalty is the policy's factor times the mean KL.
        """
        augment, given = self.cfg.augment, batch["lockstep"]
        draws = contract.uniform(given.seed, 3 * augment.enabled + self.num_draws)
        inputs = self._with_words(batch)
        if augment.enabled:
            changed = {name: recolour(batch[name], draws[:, :3], augment) for name in self.cameras}
            inputs, draws = inputs | changed, draws[:, 3:]
        out = net(inputs, draws)
        # The denominator of the mean, unknown to the loader; there is no other term.
        if "weight" in out:
            return Loss(
                out["error"].sum(),
                out["weight"].sum(),
                Sums(count=torch.ones_like(given.seed).sum()),
            )
        error = out["error"] if out["error"].dtype == torch.float64 else out["error"].float()
        steps = (~batch["action_is_pad"]).sum(1)  # (B,)
        # The error is a mean over the steps of the global batch, the KL a mean over its samples.
        # With `mean_weight`, both add up over ranks.
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
        # copied once: a copy is a sync point
        self.words = self.words.to(batch["task_index"].device)
        return batch | {"words": self.words[batch.get("text_index", batch["task_index"])]}

    # ---- evaluation ----

    def score(self, model: nn.Module, batch: Batch) -> Sums:
        """Sum the training error under fixed draws, and the L1 error of predicted actions.

        The L1 error is in recorded units.
        """
        assert isinstance(model, Policy)
        inputs = self._with_words(batch)
        seeds = contract.sample_seeds(0, 0, batch["row"])
        out = model(inputs, contract.uniform(seeds, self.num_draws))
        actions = model.act(inputs).double()  # (B, chunk, A)
        window = slice(self.windows.first, self.windows.first + actions.shape[1])
        valid = ~batch["action_is_pad"][:, window, None]  # (B, chunk, 1)
        truth = batch["action"][:, window].double()

        def l1(actions: Tensor) -> Tensor:
            return ((actions.double() - truth).abs() * valid).sum()

        sums = Sums(
            error=out["error"].double().sum(),
            kl=out["kl"].double().sum() if "kl" in out else torch.zeros((), dtype=torch.float64),
            numbers=valid.sum() * self.action_dim,
            off=l1(actions),
            count=torch.tensor(len(truth)),
        )
        if "weight" in out:
            sums["weight"] = out["weight"].double().sum()
        for name, actions_without_model in self._without_model(batch).items():
            sums[name] = l1(actions_without_model[:, None].expand_as(truth))
        if names := lerobot_mix.names_of(self.demos):
            # (B, sets)
            of_set = batch["dataset_index"][:, None] == torch.arange(
                len(names), device=truth.device
            )
            off = ((actions - truth).abs() * valid).sum((1, 2))
            sums["off_of_each"] = (off[:, None] * of_set).sum(0)
            sums["numbers_of_each"] = (valid.sum((1, 2))[:, None] * of_set).sum(0) * self.action_dim
        return sums

    def _without_model(self, batch: Batch) -> dict[str, Tensor]:
        """Return the answers without a model, (B, A) or (1, A), by the name of their sum."""
        answers = {}
        if len(self.trained_mean):
            self.mean_action = self.mean_action.to(batch["row"].device)  # copied once
            answers["off_mean"] = self.mean_action[None]
        if self.held_state.order is not None:
            state = batch[STATES[0]]
            state = state[:, -1] if state.ndim > 2 else state  # the present frame
            dataset = batch.get("dataset_index", torch.zeros_like(batch["row"]))
            answers["off_hold"] = self.held_state.actions(state, dataset)
        return answers

    def baselines(self) -> dict[str, str]:
        if self.monitor != "action_l1":
            return {}
        return {
            "baseline/hold_state_l1": "holding the state",
            "baseline/mean_action_l1": "mean action",
        }

    def report(self, sums: Sums) -> dict[str, float]:
        """Report `action_l1` beside two baselines.

        The baselines are the mean action of the training frames, and the present state as the
        action, see `tasks.robots.baselines`.
        """
        numbers, count = float(sums["numbers"]), float(sums["count"])
        weight = float(sums["weight"]) if "weight" in sums else numbers
        metrics: dict[str, float] = {
            "loss": float(sums["error"]) / weight + self.penalty * float(sums["kl"]) / count,
            "action_l1": float(sums["off"]) / numbers,
        }
        for name, metric in BASELINES.items():
            if name in sums:
                metrics[metric] = float(sums[name]) / numbers
        if names := lerobot_mix.names_of(self.demos):
            each = zip(
                names, sums["off_of_each"].tolist(), sums["numbers_of_each"].tolist(), strict=True
            )
            metrics |= {f"action_l1/{name}": off / of_it for name, off, of_it in each if of_it}
        return metrics | trials.metrics(sums)

    def predict(self, model: nn.Module, batch: Batch) -> PerSample:
        """Return the chunk of actions from each frame on, in recorded units."""
        assert isinstance(model, Policy)
        where: dict[str, Any] = {name: batch[f"{name}_index"] for name in ("episode", "frame")}
        if names := lerobot_mix.names_of(self.demos):
            where = {"dataset": [names[k] for k in batch["dataset_index"].tolist()]} | where
        return where | {"action": model.act(self._with_words(batch)).float()}

    def trials(self, model: nn.Module, which: range, stopped: Callable[[], bool]) -> Sums:
        """Make trials of the policy in the simulation, from starts that no demonstration has."""
        assert isinstance(model, Policy)
        totals, made = trials.make(self, model, which, stopped)
        self.films = made or self.films
        return totals

    def trial_pictures(self) -> dict[str, np.ndarray]:
        return trials.pictures(self.films)

    def pictures(self, model: nn.Module, batch: Batch, sums: Sums) -> dict[str, np.ndarray]:
        """Return films of trials and plots of held-out episodes.

        A plot shows predicted beside recorded actions.
        """
        assert isinstance(model, Policy)
        names = self.demos.features["action"].names
        names = names if len(names) == self.action_dim else [str(n) for n in range(self.action_dim)]
        return (self.trial_pictures() if "trials" in sums else {}) | held_out.pictures(
            self, model, self.val, steps_of(self.cfg.policy), names, not self.shared
        )

    def summary(self) -> str:
        rows = [
            self._recordings_row(),
            *self.of_each,
            self._features_row(),
            f"{self._split_text()}; trials at each evaluation: {self._trials_text()}",
        ]
        if note := self.held_state.note():
            rows.append(note)
        if self.never:
            rows.append(
                f"warning: nothing to train on of {self._commands(self.never)}: all episodes "
                "validate; dataset.split_seed draws others"
            )
        policy = self.cfg.policy
        if _lerobot.is_lerobots(policy):
            rows += _lerobot.notes(self.cfg)
        from_file = policy.pretrained_path or self._backbone_file()
        if policy.type == "act" and self.cameras and not from_file and not self.resuming:
            rows.append(
                f"The {policy.vision_backbone} that sees starts at random, its norms frozen as "
                "they are;"
                f" LeRobot's starts from ImageNet's weights: {imagenet.KEY}=FILE"
            )
        return "\n".join(rows)

    def _recordings_row(self) -> str:
        demos = self.demos
        steps = (demos.end - demos.start).sum()
        tried = ""
        if self.simulation and not self.given:
            tried = f" (the successes of {self.cfg.env.demonstrations} tried)"
        place = os.path.relpath(demos.root)
        if self.of_each:
            place = f"{len(lerobot_mix.names_of(demos))} datasets"
        return (
            f"Found {len(demos.episodes)} episodes{tried} with {steps} frames at {demos.fps:g} Hz "
            f"in {place} ({demos.version})"
        )

    def _features_row(self) -> str:
        tasks = self.demos.tasks
        dims = ", ".join(f"{name} {dim}" for name, dim in self.dims.items())
        row = (
            f"Features: {dims}, action {self.action_dim}, {amount(len(self.cameras), 'camera')}; "
            f"{amount(len(tasks), 'command')}: {self._commands(range(len(tasks)))}"
        )
        command = self.cfg.dataset.command
        if command != "task":
            row += f"; {amount(len(self.texts), 'text')} with dataset.command={command}"
        return row

    def _commands(self, numbers: Sequence[int]) -> str:
        """Return the first three of these commands."""
        text = ", ".join(brief(self.demos.tasks[number]) for number in numbers[:3])
        if len(numbers) > 3:
            text += ", ..."
        return text

    def _split_text(self) -> str:
        train, val = self.counts
        text = f"Train episodes: {train}, Val episodes: {val}"
        if self.shared:
            return f"{text} (the same: there is no other to validate on)"
        if self.given:
            share = self.cfg.dataset.eval_split
            text += f" (dataset.eval_split={share:g}; LeRobot's default is 0: all train)"
        return text

    def _trials_text(self) -> str:
        if not self.num_trials:
            return "none"
        text = f"{self.num_trials} in the simulation {self.simulation}"
        delay = self.cfg.eval.delay
        if delay:
            is_given = delay <= getattr(self.cfg.policy, "rtc_max_delay", 0)
            knowledge = "given" if is_given else "ignorant of"
            text += f", {amount(delay, 'step')} late, {knowledge} what is executed meanwhile"
        return text


class Acting(nn.Module):
    """A policy for export.

    The actions (B, chunk, A) float32 are in recorded units, without noise.
    """

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy

    def forward(self, observation: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"actions": self.policy.act(observation).float()}


def recolour(x: Tensor, u: Tensor, wanted: Augment) -> Tensor:
    """Change brightness, colour and contrast at random.

    x is (B, ..., 3, H, W) in 0..255, u is (B, 3) in [0, 1); the result is float32.
    """
    x = x.float()
    amounts = (wanted.brightness, wanted.saturation, wanted.contrast)
    # a copy is a sync point
    most = torch.stack([torch.full((), amount, device=u.device) for amount in amounts])
    changes = (1 + most * (2 * u - 1)).T  # (3, B)
    light, colour, contrast = changes.view(3, -1, *[1] * (x.ndim - 1))  # each (B, 1, ..., 1)
    x = x * light
    gray = x.mean(-3, keepdim=True)  # (B, ..., 1, H, W)
    x = gray + (x - gray) * colour
    middle = gray.mean((-2, -1), keepdim=True)
    return (middle + (x - middle) * contrast).clamp(0, 255)


def _for_imitation(demos: lerobot.Demonstrations, cameras: list[str]) -> lerobot.Demonstrations:
    """Keep the chosen cameras, in colour, and the numbers as float32 vectors.

    Raises LockstepError if `action` or all inputs of a policy are missing.
    """
    used, columns = {}, dict(demos.columns)
    for name, feature in demos.features.items():
        if feature.is_picture and name in cameras:
            used[name] = replace(feature, shape=(3, *feature.shape[1:]))
        elif not feature.is_picture:
            used[name] = feature
    if "action" not in columns or not (cameras or columns.keys() & set(STATES)):
        what = (
            "the dataset has no `action`, or nothing to act on: no camera and no observation.state"
        )
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


def brief(text: str) -> str:
    """Return a command in quotes; of a long command, return the beginning."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _chosen_cameras(wanted: list[str], there: list[str], root: Path) -> list[str]:
    if wanted == ["none"]:
        return []
    if unknown := sorted(set(wanted) - set(there)):
        what = f"no camera {unknown[0]}"
        raise LockstepError(
            what, f"dataset.cameras, {root}", f"there are {', '.join(there) or 'none'}"
        )
    if len(set(wanted)) < len(wanted):
        raise LockstepError("a camera is named twice", "dataset.cameras", "keep one")
    return wanted or there


def _cache_dir(wanted: str, given: bool) -> Path:
    if not given:
        return simulation.GENERATED
    return home.cache_folder(wanted)
