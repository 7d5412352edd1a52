"""Human activity recognition: classify the exercise in a window of wearable sensor signals.

People in validation never appear in training. The shipped data (data/watch) are 7 shoulder
exercises of 10 people with a smartwatch. `formats/lab/windows.py` also reads UCI HAR, UEA .ts files
and the user's own arrays.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from engine import contract
from engine.config import option, section
from engine.contract import Batch
from formats.counters import warnings_of
from formats.lab import windows
from models.backbone import Backbone
from models.conv1d import Conv1d
from models.harnet import RATE_HZ, STAGES, HarNet
from models.layers import Standardise
from models.mlp import MLP
from models.transformer1d import Transformer1d
from tasks.shared.classification import Deployed, LossSettings
from tasks.shared.pretrained import BackboneSettings, FromWeights

SHIPPED = Path(__file__).resolve().parent.parent / "data" / "watch" / "watch.npz"
# width and depth for a config value of 0
SIZES = {"conv": (48, 3), "flatten": (256, 3), "transformer": (64, 4)}


@dataclass
class DatasetSettings:
    root: str = option(
        "",
        (
            "folder or file of sensor data (see formats/lab/windows.py); empty: the shipped "
            "smartwatch data"
        ),
    )
    length: int = option(128, "steps of a window; data published as windows keep theirs", low=8)
    stride: int = option(64, "steps from the start of one window to the next", low=1)
    split: Literal["given", "given-test", "random"] = option(
        "given", "the split the data come with if any; the same as train and test; or a random one"
    )
    val_subjects: list[str] = option(
        [], "subjects to validate on, by name, such as 9,10; they overrule split"
    )
    val_share: float = option(
        0.2, "random split: share of the subjects to validate on", low=0.0, high=1.0
    )
    test_subjects: list[str] = option(
        [], "subjects to test on, by name: a third set, which no training looks at"
    )
    test_share: float = option(
        0.0, "share of the subjects to test on, drawn at random; 0: none", low=0.0, high=0.9
    )
    split_seed: int = option(
        0, "random split: what it is drawn from; not the common seed, so that runs compare", low=0
    )


@dataclass
class ModelSettings(BackboneSettings):
    mode: Literal["conv", "flatten", "transformer", "harnet"] = option(
        "conv",
        "1D convolutions, a perceptron on the flattened window, a transformer on patches, or the "
        "backbone of "
        "ssl-wearables (5, 10 or 30 s at 30 Hz), for model.pretrained",
    )
    width: int = option(0, "channels or units of a layer; 0: the mode's own (48, 256, 64)", low=0)
    depth: int = option(0, "stages or layers; 0: the mode's own (3, 3, 4)", low=0)
    dropout: float = option(0.0, "share of activations dropped in training", low=0.0, high=0.9)


@dataclass
class AugmentSettings:
    enabled: bool = option(True, "change the training windows at random")
    speed: float = option(0.3, "play up to this share faster or slower", low=0.0, high=0.9)
    shift: float = option(0.2, "move by up to this share of the window in time", low=0.0, high=1.0)
    rotate_deg: float = option(
        20.0, "turn the 3-axis sensors by up to this angle about each axis", low=0.0, high=90.0
    )
    scale: float = option(
        0.2, "multiply each 3-axis sensor by 1 plus or minus up to this", low=0.0, high=0.9
    )
    jitter: float = option(
        0.05, "add noise of this share of the channel's standard deviation", low=0.0
    )
    mixup: float = option(
        0.0, "mix pairs of windows in shares of Beta(mixup, mixup), such as 0.2; 0: none", low=0.0
    )


@dataclass
class Settings(contract.Settings):
    dataset: DatasetSettings = section(DatasetSettings)
    model: ModelSettings = section(ModelSettings)
    loss: LossSettings = section(LossSettings)
    augment: AugmentSettings = section(AugmentSettings)


class Task(FromWeights):
    """Batches of windows x (B, C, T) float32 in sensor units; the model normalises."""

    Settings = Settings
    splitting = "choose the people to validate on by dataset.val_subjects"
    split_keys = {"subjects": ("dataset.val_subjects", "dataset.test_subjects")}
    choose_by = "model.mode=harnet"
    shard = 256
    masked = False  # whether the last channel marks padding
    axes = 3  # axes of each sensor; 0: the channels are not axes
    aliases = {"mode": "model.mode"}
    defaults = {
        "epochs": 12,
        "batch_size": 64,
        "optim.lr": 2e-3,
        "optim.weight_decay": 0.05,
        "schedule.warmup_epochs": 1,
    }

    def datasets(self) -> tuple[Any, Any]:
        cfg = self.cfg.dataset
        rate_hz = RATE_HZ if self.backbone(self.cfg) else None
        options = windows.preparation_options(cfg.length, [], rate_hz)
        self.recordings = windows.read(cfg.root or SHIPPED, cfg.length, cfg.stride, options=options)
        given = cfg.split == "given"
        test = windows.choose_test(
            self.recordings, cfg.test_subjects, cfg.test_share, cfg.split_seed, cfg.split
        )
        self.val = windows.split(
            self.recordings, cfg.val_subjects, cfg.val_share, cfg.split_seed, given, test
        )
        rest = ~self.val if test is None else ~self.val & ~test
        train, val = (
            windows.Windows(self.recordings, rest),
            windows.Windows(self.recordings, self.val),
        )
        self.test = None if test is None else windows.Windows(self.recordings, test)
        self.classes, self.length = self.recordings.classes, self.recordings.length
        self.counts = len(train), len(val)
        if not all(self.counts):
            what = "{} windows with a label to train on and {} to validate on".format(*self.counts)
            raise contract.LockstepError(
                what, self.recordings.where, f"label more, or {self.splitting}"
            )
        self.with_targets(train, val, self.test)
        kept = self.kept(train)
        self.count(train.targets, self.recordings.where, val.targets, kept, self.test)
        self.sides = {
            "trained on": self._people(train.recording[kept]),
            "held out": self._people(val.recording),
        }
        if self.test is not None:
            self.sides["test"] = self._people(self.test.recording)
        self.mean, self.std = train.statistics(kept)
        self.masked, self.axes = self.recordings.masked, self.recordings.axes
        if self.backbone(self.cfg):
            check_harnet(self.recordings)
        everything = windows.Windows(self.recordings, np.ones_like(self.val))
        sides = [(train, rest), (val, self.val)] + (
            [(self.test, test)] if self.test is not None else []
        )
        parts = [(part, np.flatnonzero(side[everything.recording])) for part, side in sides]
        train_set, val_set, *tested = self.in_features(everything, *parts)
        self.test = tested[0] if tested else None
        return self.with_mixup(train_set), val_set

    def mix(self, x: Tensor, other: Tensor, share: Tensor) -> Tensor:
        """Mix two windows. A step without both measurements counts as padding."""
        mixed = super().mix(x, other, share)
        if not self.masked:
            return mixed
        valid = x[:, -1:] * other[:, -1:]
        valid = torch.where(share.view(-1, 1, 1) == 1, x[:, -1:], valid)
        return torch.cat([mixed[:, :-1] * valid, valid], 1)

    def test_dataset(self) -> Any:
        return self.test

    def _people(self, chosen: np.ndarray) -> list[str]:
        """Return the subjects of some recordings; empty if the data have no names."""
        found = self.recordings
        return (
            [found.subjects[g] for g in sorted({*found.groups[chosen].tolist()})]
            if found.subjects
            else []
        )

    def metadata(self) -> dict[str, Any]:
        found = self.recordings
        about = {"length": found.length, "channels": found.signal.shape[1], "names": found.channels}
        return super().metadata() | about | {"rate_hz": found.rate_hz, "subjects": self.sides}

    def load_metadata(self, metadata: dict[str, Any]) -> None:
        super().load_metadata(metadata)
        # An older checkpoint has no subjects.
        self.length, self.about = metadata["length"], {"subjects": {}} | metadata
        self.masked = metadata["names"][-1:] == [windows.VALID]
        # The loaded weights overwrite these values.
        self.mean, self.std = torch.zeros(metadata["channels"]), torch.ones(metadata["channels"])

    def full_dataset(self) -> windows.Windows:
        found = self.new(self.cfg.dataset.root or SHIPPED, self.cfg.dataset.stride)
        self.recordings = found = windows.renumbered(found, self.classes)
        self.val = np.ones(len(found), dtype=bool)
        every = windows.Windows(found, self.val)
        self.counts, self.test = (0, len(every)), None
        self.with_targets(every)
        return every

    def new(self, root: str | Path, stride: int, labelled: bool = True) -> windows.Recordings:
        """Read other recordings of the same sensors, with their own classes, after `load_metadata`.

        Raises LockstepError if windows, channels or rate differ.
        """
        names, rate_hz = self.about["names"], self.about["rate_hz"]
        options = windows.preparation_options(self.length, names, rate_hz)
        found = windows.read(root, self.length, stride, labelled, options)
        windows.check_alike(found, self.length, self.about["channels"], names, rate_hz)
        if self.backbone(self.cfg):
            check_harnet(found)
        return found

    def unit_doubts(self, model: nn.Module, found: windows.Recordings) -> list[str]:
        """Return a sentence if channels of `found` differ from the training by more than OTHER.

        The mean and the deviation of each channel are compared. A model without these numbers gives
        no sentence.
        """
        for part in model.modules():
            if isinstance(part, Standardise):
                measured = found.signal.shape[1] - found.masked
                mean = part.mean[:measured, 0].double().cpu().numpy()
                std = part.std[:measured, 0].double().cpu().numpy()
                return other_units(found, mean, std)
        return []

    def export_module(
        self, model: nn.Module
    ) -> tuple[nn.Module, Callable[[Batch], Tensor | dict[str, Tensor]]]:
        """Return a module that takes windows (B, T, C) in sensor units, in the stored layout."""
        return Deployed(model, by_step=True, binary=not self.exclusive), lambda batch: self.raw(
            batch
        )["x"].transpose(1, 2)

    @classmethod
    def backbone(cls, cfg: Any) -> type[Backbone] | None:
        return HarNet if cfg.model.mode == "harnet" else None

    def published_name(self) -> str:
        return f"harnet{self.length // RATE_HZ}"

    def new_backbone(self, fixed_norms: bool) -> Backbone:
        return HarNet(self.length, len(self.classes), self.cfg.model.dropout, fixed_norms)

    def model(self) -> nn.Module:
        model = self._network()
        for part in model.modules():
            if isinstance(part, Standardise):
                part.masked = self.masked
        return model

    def _network(self) -> nn.Module:
        cfg = self.cfg.model
        if cfg.mode == "harnet":
            return super().model()
        width, depth = (
            given or own for given, own in zip((cfg.width, cfg.depth), SIZES[cfg.mode], strict=True)
        )
        length, num_classes = self.length, len(self.classes)
        if cfg.mode == "conv":
            return Conv1d(self.mean, self.std, num_classes, width, depth, cfg.dropout)
        if cfg.mode == "flatten":
            return MLP(self.mean, self.std, length, num_classes, width, depth, cfg.dropout)
        if width % 4:
            what = f"width {width} is not a multiple of 4 heads"
            raise contract.LockstepError(
                what, where="model.width", todo=f"give {max(4, width // 4 * 4)}"
            )
        return Transformer1d(self.mean, self.std, length, num_classes, width, depth, cfg.dropout)

    def augment(self, x: Tensor, seeds: Tensor) -> Tensor:
        """Augment (B, C, T) by +, -, *, / and gathers within a sample only.

        Any partition of a batch therefore gives equal bits.
        """
        cfg = self.cfg.augment
        if not cfg.enabled:
            return x
        valid = x[:, -1:]
        x = x[:, :-1] if self.masked else x
        _, channels, steps = x.shape
        # Rotate groups of three axes. Without such groups, apply a single scale and no rotation.
        sensors = channels // 3 if self.axes == 3 and channels % 3 == 0 else 0
        noise = channels * steps if cfg.jitter else 0
        draws = contract.uniform(seeds, 5 + max(1, sensors) + noise) * 2 - 1  # (B, ...) in [-1, 1)
        speed, shift, turn, gain = (
            draws[:, :1],
            draws[:, 1:2],
            draws[:, 2:5],
            draws[:, 5 : 5 + max(1, sensors)],
        )
        if (cfg.speed or cfg.shift) and steps > 1:
            how = 1 + cfg.speed * speed, cfg.shift * steps * shift
            # Where a measured step and padding are mixed, repeat the measured step.
            if self.masked:
                share = resample(valid, *how)
                valid = (share >= 0.5).to(x.dtype)
                x = resample(x, *how) / torch.where(share > 0, share, 1.0)
            else:
                x = resample(x, *how)
        if cfg.rotate_deg and sensors:
            x = rotate(x, math.tan(math.radians(cfg.rotate_deg) / 2) * turn)
        if cfg.scale:
            gains = (1 + cfg.scale * gain).repeat_interleave(channels // gain.shape[1], 1)  # (B, C)
            x = x * gains[:, :, None]
        if cfg.jitter:
            self.std = self.std.to(x.device)  # copied once: a copy is a sync point
            # Uniform noise on [-sqrt(3), sqrt(3)) has standard deviation 1.
            size = (cfg.jitter * math.sqrt(3)) * self.std[:channels, None]  # (C, 1)
            x = x + size * draws[:, -noise:].view_as(x)
        return torch.cat([x, valid], 1) if self.masked else x

    def _doubts(self) -> list[str]:
        """Return a warning for each channel that is a counter, a clock or a copy of the label."""
        found = self.recordings
        names = found.channels or [f"channel {c + 1}" for c in range(found.signal.shape[1])]
        measured = len(names) - found.masked
        signal = found.signal[:, :measured]
        findings = warnings_of(signal, found.lengths, names[:measured], found.step_labels)
        todo = f"leave it out, unless it was measured ({os.path.relpath(found.where)})"
        return [f"warning: channel {each.name} {each.reason}: {todo}" for each in findings]

    def summary(self) -> str:
        """Return the counts, the held-out subjects, doubts about channels, the table of classes."""
        found, val = self.recordings, self.val
        people = f" of {len(found.subjects)} subjects" if found.subjects else ""
        tested = 0 if self.test is None else len(self.test)
        unlabelled = int(found.windows().sum()) - sum(self.counts) - tested
        more = f" ({unlabelled} more without a label)" if unlabelled else ""
        out = (
            ", ".join(self._people(val))
            or "unknown (the data name none: one person may be on both sides)"
        )
        test = ""
        if self.test is not None:
            test = (
                f"\nTest windows: {tested}, test subjects: "
                f"{', '.join(self.sides['test']) or 'unknown'}"
            )
        rate = f" at {found.rate_hz:g} Hz" if found.rate_hz else ""
        return "\n".join(
            [
                f"Found {len(found)} recordings{people} with {sum(self.counts) + tested} "
                f"windows{more}"
                f" of {found.length} steps x {found.signal.shape[1]} channels{rate} in "
                f"{os.path.relpath(found.where)}",
                "Train windows: {}, Val windows: {}, held-out subjects: {}".format(
                    *self.counts, out
                )
                + test,
                *self._doubts(),
                self.class_summary(),
            ]
        )


OTHER = 3.0
"""Factor between deviations, and deviations between means, beyond which units may differ."""


UNIT_FACTORS = {
    9.80665: "m/s2 and g",
    57.29578: "degrees and radians",
    1000.0: "a unit and its thousandth",
}


def other_units(found: windows.Recordings, mean: np.ndarray, std: np.ndarray) -> list[str]:
    """Return a sentence on the channels whose mean or deviation is far from (C,) mean and std."""
    signal = found.signal[:, : len(mean)]
    if found.masked:
        signal = signal[found.signal[:, -1] > 0]
    means = np.array([column.mean(dtype=np.float64) for column in signal.T])
    stds = np.array([column.std(dtype=np.float64) for column in signal.T])
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = stds / std
    spread = (factors > OTHER) | (factors < 1 / OTHER)
    far = np.abs(means - mean) > OTHER * std
    chosen = np.flatnonzero(spread | far)
    if not len(chosen):
        return []
    c = int(chosen[0])
    names = found.channels or [f"channel {n + 1}" for n in range(len(mean))]
    some = names[c] if len(chosen) == 1 else f"{names[c]} and {len(chosen) - 1} more channels"
    text = f"{some}: mean {means[c]:.4g} and deviation {stds[c]:.4g}, in training {mean[c]:.4g} "
    text += f"and {std[c]:.4g}: other units or sensors? ({os.path.relpath(found.where)})"
    factor = float(np.median(factors))
    for usual, units in UNIT_FACTORS.items():
        for known in (usual, 1 / usual):
            if 0.8 < factor / known < 1.25 and len(chosen) == len(mean):
                text += f" As {units}: tools/prepare_windows.py --scale {1 / known:.6g}"
    return [text]


def check_harnet(found: windows.Recordings) -> None:
    """Raise LockstepError unless the recordings are valid inputs of harnet.

    Inputs are 3 channels of acceleration in g, gravity included, at 30 Hz, in windows of 5, 10 or
    30 s.
    """
    prepare, rate, channels = "tools/prepare_windows.py", found.rate_hz, found.signal.shape[1]
    norm = np.sqrt(
        (found.signal[:: max(1, len(found.signal) // 10**6), :3].astype(np.float64) ** 2).sum(1)
    )
    size = float(np.median(norm))
    if channels != 3:
        named = f" ({' '.join(found.channels)})" if found.channels else ""
        what, todo = (
            f"{channels} channels{named}",
            f"choose x, y, z of one accelerometer with {prepare} --channels",
        )
    elif rate is None or abs(rate - RATE_HZ) > 0.01 * RATE_HZ:
        what = f"a rate of {rate:g} Hz" if rate else "a rate that the data do not tell"
        todo = f"resample with {prepare} --rate {RATE_HZ}"
    elif found.length not in STAGES:
        what = f"windows of {found.length} steps"
        todo = (
            f"give dataset.length={', '.join(map(str, STAGES))} (5, 10 or 30 s), or cut them "
            f"so with {prepare}"
        )
    elif not 0.6 < size < 1.7:
        in_si = 6 < size < 17
        what = f"values about {size:.3g} in size, where gravity alone is 1"
        todo = (
            f"they look like m/s2: divide by 9.81 with {prepare} --scale {1 / 9.80665:.6f}"
            if in_si
            else ""
        )
        todo = todo or (
            "give acceleration in g with gravity in it, neither filtered out nor another sensor's"
        )
    else:
        return
    raise contract.LockstepError(
        f"harnet takes 3 channels at 30 Hz in g, not {what}", found.where, todo
    )


def resample(x: Tensor, speed: Tensor, shift: Tensor) -> Tensor:
    """Resample x (B, C, T) at a speed (B, 1) about the middle, shifted by (B, 1) steps.

    Interpolation is linear; the ends are repeated.
    """
    steps = x.shape[2]
    middle = (steps - 1) / 2
    at = (torch.arange(steps, device=x.device) - middle) * speed + (middle + shift)  # (B, T)
    at = at.clamp(0, steps - 1)
    left = at.floor().clamp(max=steps - 2)
    share = (at - left).to(x.dtype)[:, None]  # (B, 1, T)
    index = left.long()[:, None].expand_as(x)
    return x.gather(2, index) * (1 - share) + x.gather(2, index + 1) * share


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate all C / 3 sensors of a sample of x (B, C, T) by the same rotation.

    turn (B, 3) is axis * tan(angle / 2) (Rodrigues). This form of the rotation (Cayley's) needs no
    sine, whose last bit may depend on the sample's position in the batch.
    """
    a, b, c = (turn.to(x.dtype)[:, n, None, None] for n in range(3))  # each (B, 1, 1)
    u, v, w = x[:, 0::3], x[:, 1::3], x[:, 2::3]  # each (B, G, T)
    norm = 1 + a * a + b * b + c * c
    rows = (
        ((1 + a * a - b * b - c * c) * u + 2 * (a * b - c) * v + 2 * (a * c + b) * w) / norm,
        (2 * (a * b + c) * u + (1 - a * a + b * b - c * c) * v + 2 * (b * c - a) * w) / norm,
        (2 * (a * c - b) * u + 2 * (b * c + a) * v + (1 - a * a - b * b + c * c) * w) / norm,
    )
    return torch.stack(rows, 2).flatten(1, 2)  # (B, G, 3, T) -> (B, C, T)
