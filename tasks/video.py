"""Classify the behaviour of a mouse in short gray clips; the split is by video.

The behaviours are rest, walk, rear, groom and paw withdrawal.
"""

from __future__ import annotations

import colorsys
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from engine import contract
from engine.config import option, section
from engine.contract import Batch, LockstepError, Sums
from formats.lab.clips import Clips, lasting, split_by_video
from formats.lab.synthetic_clips import Recipe, ensure
from models.backbone import Backbone
from models.cnn3d import CNN3d
from models.resnet3d import ResNet3d
from tasks.shared.classification import LossSettings
from tasks.shared.pictures import caption, text_width
from tasks.shared.pretrained import BackboneSettings, FromWeights

GENERATED = Path(__file__).resolve().parent.parent / "data" / "generated"


@dataclass
class Dataset:
    root: str = option(
        "", "packed folder of clips (tools/prepare_clips.py makes one); empty = synthetic clips"
    )
    frames: int = option(
        0,
        "frames of a clip: the middle of each trial; 0: all that are packed (synthetic: 17)",
        low=0,
    )
    size: int = option(0, "height and width of the synthetic clips in pixels; 0: 64", low=0)
    trials: int = option(980, "number of synthetic trials", low=20)
    videos: int = option(100, "number of videos that the synthetic trials come from", low=2)
    data_seed: int = option(0, "of the synthetic clips", low=0, high=2**31 - 1)
    val_share: float = option(
        0.2, "share of the trials to validate on, in whole groups", low=0.01, high=0.9
    )
    split_seed: int = option(0, "of the choice of these groups", low=0, high=2**31 - 1)
    val_videos: list[str] = option(
        [], "videos to validate on, by name, such as a.mp4,b.mp4; they overrule val_share"
    )
    val_groups: list[str] = option(
        [], "groups (animals or cages) to validate on, by name; they overrule val_share"
    )
    test_share: float = option(
        0.0, "share of the trials to test on, which no training looks at", low=0.0, high=0.9
    )
    test_videos: list[str] = option([], "videos to test on, by name; they overrule test_share")
    test_groups: list[str] = option([], "groups to test on, by name; they overrule test_share")


@dataclass
class Model(BackboneSettings):
    name: Literal["cnn3d", "mc3_18", "r3d_18", "r2plus1d_18"] = option(
        "cnn3d", "a small network of our own, or a backbone of torchvision's, for model.pretrained"
    )
    width: int = option(
        8,
        "cnn3d: channels of the stem; 8 gives 0.1 million parameters, 40 gives 2.7 million",
        low=1,
    )
    dropout: float = option(
        0.0, "share of the features dropped before the last layer", low=0.0, high=0.99
    )


@dataclass
class Augment:
    flip: Literal["none", "horizontal", "all"] = option(
        "all",
        (
            "horizontal = left and right; all = the eight symmetries of a square, for a view from "
            "above"
        ),
    )
    shift: float = option(0.08, "largest shift, as a share of height and width", low=0.0, high=0.5)
    jitter: int = option(1, "largest shift in time, in frames", low=0)
    brightness: float = option(
        0.15, "largest change of gain, and of offset as a share of white", low=0.0, high=1.0
    )
    mixup: float = option(
        0.0, "mix pairs of clips in shares of Beta(mixup, mixup), such as 0.2; 0: none", low=0.0
    )


@dataclass
class VideoSettings(contract.Settings):
    dataset: Dataset = section(Dataset)
    model: Model = section(Model)
    loss: LossSettings = section(LossSettings)
    augment: Augment = section(Augment)


class Task(FromWeights):
    Settings = VideoSettings
    defaults = {
        "epochs": 14,
        "batch_size": 32,
        "optim.lr": 4e-3,
        "schedule.warmup_epochs": 1.0,
    }
    splitting = (
        "record it in two videos at least, or choose those to validate on by dataset.val_videos"
    )
    split_keys = {
        each: (f"dataset.val_{each}", f"dataset.test_{each}") for each in ("groups", "videos")
    }
    # The data's fingerprint already covers frames and size.
    resumable_keys = (*FromWeights.resumable_keys, "dataset.frames", "dataset.size")
    ABOUT = "shape", "cutting", "videos"  # properties of the data in a checkpoint, see `metadata`
    choose_by = "model.name=mc3_18"
    aliases = {
        "root": "dataset.root",
        "frames": "dataset.frames",
        "size": "dataset.size",
        "width": "model.width",
    }

    def _clips(self, frames: int) -> Clips:
        wanted = self.cfg.dataset
        folder = Path(os.path.expanduser(wanted.root))
        if not wanted.root:
            recipe = Recipe(
                wanted.trials,
                wanted.videos,
                wanted.frames or 17,
                wanted.size or 64,
                wanted.data_seed,
            )
            folder = ensure(GENERATED / recipe.name, recipe)
        elif not os.path.isdir(folder):  # unlike Path.is_dir, os.path.isdir never raises
            raise LockstepError(
                f"no folder {wanted.root!r}", "dataset.root", "make it with tools/prepare_clips.py"
            )
        clips = Clips(folder, frames)
        # predicted class by sample index; -1: without a score
        self._guesses = torch.full((len(clips),), -1)
        return clips

    def datasets(self) -> tuple[Any, Any]:
        wanted = self.cfg.dataset
        clips = self._clips(wanted.frames)
        self.with_targets(clips)
        train, val, test = _split(clips, wanted)
        self.classes, self.test = clips.classes, clips.subset(test) if len(test) else None
        kept = self.kept(part := clips.subset(train))
        self.count(part.targets, str(clips.folder), clips.targets[val], kept, self.test)
        held_out, trained_on, videos = (
            sorted({*clips.videos[of].tolist()}) for of in (val, train[kept], slice(None))
        )
        self.about: dict[str, Any] = {"shape": [*clips.shape], "cutting": clips.cutting}
        self.about |= {"videos": {"trained on": trained_on, "held out": held_out}}
        if self.test is not None:
            self.about["videos"]["test"] = sorted({*self.test.videos.tolist()})
        lines = [f"Found {len(videos)} unique videos with {len(clips)} total trials"]
        trials = f"Train trials: {len(train)}, Val trials: {len(val)}"
        if len(test):
            trials += f", Test trials: {len(test)}"
        lines.append(trials)
        for side, of in (("Held-out", val), ("Test", test)):
            if len(of):
                lines.append(
                    f"{side} videos: {_some(sorted({*clips.videos[of].tolist()}))} of "
                    f"{len(videos)})"
                )
            if len(of) and (clips.groups != clips.videos).any():
                lines.append(
                    f"{side} groups: {_some(sorted({*clips.groups[of].tolist()}))} of "
                    f"{len({*clips.groups})})"
                )
        self._found = "\n".join([*lines, _of_a_clip(clips, wanted)])
        self._val = clips.subset(val)
        parts = [(part, train), (self._val, val)] + (
            [(self.test, test)] if self.test is not None else []
        )
        train_set, val_set, *tested = self.in_features(clips, *parts)
        self.test = tested[0] if tested else None
        return self.with_mixup(train_set), val_set

    def test_dataset(self) -> Any:
        return self.test

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | self.about

    def load_metadata(self, metadata: dict[str, Any]) -> None:
        super().load_metadata(metadata)
        self.about = {"videos": {}} | {
            name: metadata[name] for name in self.ABOUT if name in metadata
        }

    def full_dataset(self) -> Clips:
        clips = self.fitting(self._clips(self.about["shape"][0]))
        self._found = (
            f"Found {len({*clips.videos.tolist()})} unique videos with {len(clips)} total trials"
        )
        clips = clips.renumbered(self.classes)
        self.with_targets(clips)
        return clips

    def fitting(self, clips: Clips) -> Clips:
        """Return other clips, after `load_metadata`.

        Raises LockstepError if the size differs from the model's.
        """
        if [*clips.shape] != self.about["shape"]:
            sizes = [" x ".join(map(str, shape)) for shape in (clips.shape, self.about["shape"])]
            what = f"clips of {sizes[0]}, the model was trained on clips of {sizes[1]}"
            raise LockstepError(
                what, str(clips.folder), "make them anew from the videos, as large as those"
            )
        return clips

    def model(self) -> nn.Module:
        if self.cfg.model.name != "cnn3d":
            return super().model()
        return CNN3d(len(self.classes), self.cfg.model.width, self.cfg.model.dropout)

    @classmethod
    def backbone(cls, cfg: Any) -> type[Backbone] | None:
        return None if cfg.model.name == "cnn3d" else ResNet3d

    def published_name(self) -> str:
        return str(self.cfg.model.name)

    def new_backbone(self, fixed_norms: bool) -> Backbone:
        return ResNet3d(self.cfg.model.name, len(self.classes), self.cfg.model.dropout, fixed_norms)

    def backbone_note(self) -> str:
        frames, height, width = self.about["shape"]
        name = self.cfg.model.name
        return (
            f"{name} is published for 16 frames at 15 fps of 112 x 112 pixels; these are "
            f"{frames} of {height} x {width}"
        )

    def augment(self, x: Tensor, seeds: Tensor) -> Tensor:
        """Flip, shift in space and time, and brighten or darken x (B, T, H, W) uint8."""
        wanted = self.cfg.augment
        changes = wanted.flip != "none" or wanted.shift or wanted.jitter or wanted.brightness
        return augment(x, contract.uniform(seeds, 8), wanted) if changes else x

    def summary(self) -> str:
        return f"{self._found}\n\n{self.class_summary()}"

    def guessed(self, batch: Batch, guesses: Tensor) -> None:
        if contract.INFO_KEY in batch:
            self._guesses = self._guesses.to(guesses.device)  # moved once: a copy is a sync point
            self._guesses[batch["lockstep"].index] = guesses

    def pictures(self, model: nn.Module, batch: Batch, sums: Sums) -> dict[str, np.ndarray]:
        """Return the confusion matrix, and a clip of each class from the samples of this rank."""
        val, found = self._val, super().pictures(model, batch, sums)
        guesses = self._guesses[: len(val)].cpu().numpy()
        chosen = one_of_each(val.labels, guesses)
        if not len(chosen):
            return found
        captions, wrong = [], []
        for n in chosen.tolist():
            truth, guess = int(val.labels[n]), int(guesses[n])
            where = f"{val.videos[n]} trial {val.trials[n]}"
            captions.append((f"true {self.classes[truth]}", f"pred {self.classes[guess]}", where))
            wrong.append(truth != guess)
        clips = stretched(val.__getitems__(chosen.tolist())["x"].numpy())
        return found | {"clips": draw_clips(clips, captions, wrong)}


def _split(clips: Clips, wanted: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the indices of the trials for training, validation and test.

    The test part is split off first, then the validation part.
    """
    rest, test = np.arange(len(clips)), np.arange(0)
    for unit, both in (
        ("video", {*wanted.val_videos} & {*wanted.test_videos}),
        ("group", {*wanted.val_groups} & {*wanted.test_groups}),
    ):
        if both:
            what = f"{unit} {', '.join(sorted(both)[:5])} is both to validate and to test on"
            raise LockstepError(what, f"dataset.test_{unit}s", "name it for one of them")
    if wanted.test_videos or wanted.test_groups or wanted.test_share:
        how = (
            wanted.test_share,
            wanted.split_seed + OTHER_SEED,
            wanted.test_videos,
            clips.groups,
            wanted.test_groups,
        )
        rest, test = split_by_video(clips.videos, clips.labels, *how, side="test")
    left = clips.subset(rest)
    how = wanted.val_share, wanted.split_seed, wanted.val_videos, left.groups, wanted.val_groups
    train, val = split_by_video(left.videos, left.labels, *how)
    return rest[train], rest[val], test


OTHER_SEED = 1 << 32
"""Offset of the split's seed for the choice of the test part."""


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") + f" ({len(names)}"


def _of_a_clip(clips: Clips, wanted: Dataset) -> str:
    """Return the size of a clip in frames, pixels and seconds, and the setting that differs."""
    frames, height, width = clips.shape
    cut = f", the middle of {clips.longest}" if clips.longest > frames else ""
    lasts = lasting(frames, clips.cutting) if clips.cutting else ""
    rows = [
        f"Clips: {frames} frames{cut}, {height} x {width} pixels" + (f", {lasts}" if lasts else "")
    ]
    if wanted.size not in (0, height):
        rows.append(
            f"warning: dataset.size={wanted.size} changes no packed clips; "
            "tools/prepare_clips.py has --size"
        )
    return "\n".join(rows)


def one_of_each(labels: np.ndarray, guesses: np.ndarray, most: int = 12) -> np.ndarray:
    """Choose at most `most` samples to show: one of each class, preferably a misclassified sample.

    Misclassified samples come first.

    labels, guesses  (N,) class numbers; samples with guess -1 are excluded
    """
    right: list[int] = []
    wrong: list[int] = []
    for c in range(labels.max() + 1):
        mine = np.flatnonzero((labels == c) & (guesses >= 0))
        missed = mine[guesses[mine] != c]
        found = missed if len(missed) else mine
        # The middle sample: the first samples of all classes would be of a few videos only.
        (wrong if len(missed) else right).extend(found[len(found) // 2 :][:1])
    return np.array(wrong + right, dtype=np.int64)[:most]


def stretched(clips: np.ndarray) -> np.ndarray:
    """Stretch the contrast of each clip of (N, T, H, W) uint8.

    The 1st percentile becomes black, the 99th percentile white.
    """
    low, high = np.percentile(clips, (1, 99), axis=(1, 2, 3), keepdims=True)
    return np.clip((clips - low) * (255 / np.maximum(high - low, 1)), 0, 255).astype(np.uint8)


def augment(x: Tensor, u: Tensor, wanted: Augment) -> Tensor:
    """Augment x (B, T, H, W) uint8 by draws u (B, 8) in [0, 1); a shift repeats the edge."""
    _, num_frames, height, width = x.shape
    times = _moved(num_frames, wanted.jitter, u[:, 0])
    rows = _moved(height, wanted.shift * height, u[:, 1])
    columns = _moved(width, wanted.shift * width, u[:, 2])
    if wanted.flip != "none":
        columns = torch.where(u[:, 3:4] < 0.5, columns, columns.flip(1))
    if wanted.flip == "all":
        rows = torch.where(u[:, 4:5] < 0.5, rows, rows.flip(1))
    # Whole rows of pixels first, then columns: on a CPU, a tenth of the time of a joint gather.
    frames = torch.arange(len(x), device=x.device)[:, None] * num_frames + times  # (B, T)
    places = frames[:, :, None] * height + rows[:, None, :]  # (B, T, H)
    x = x.reshape(-1, width).index_select(0, places.flatten()).view(x.shape)
    x = x.gather(3, columns[:, None, None, :].expand(x.shape))
    if wanted.flip == "all" and height == width:
        x = torch.where(u[:, 5, None, None, None] < 0.5, x, x.transpose(2, 3))
    if wanted.brightness:
        gain, offset = (1 + wanted.brightness * (2 * u[:, 6:8] - 1)).unbind(1)
        light = x * gain[:, None, None, None] + 255 * (offset - 1)[:, None, None, None]
        x = light.clamp_(0, 255).to(torch.uint8)
    return x


def _moved(length: int, most: float, u: Tensor) -> Tensor:
    """Convert (B,) draws to (B, length) indices, shifted by up to `most` either way and clamped."""
    steps = torch.floor((2 * int(most) + 1) * u).long() - int(most)  # (B,)
    return (torch.arange(length, device=u.device) + steps[:, None]).clamp(0, length - 1)


def draw_ethogram(
    probabilities: np.ndarray,
    classes: list[str],
    fps: float,
    title: str = "",
    truth: np.ndarray | None = None,
    width: int = 1200,
    labels: np.ndarray | None = None,
) -> np.ndarray:
    """Draw the (N, C) probabilities of a video's frames as a uint8 picture (H, W', 3).

    A strip shows the labels' colours, below the annotation's strip if given. Under the strips, each
    class has a row with its probability as height, pale where another class is the label. The
    axis is time, or frames if fps is 0.

    truth  (N,) class numbers, -1 for a frame without annotation
    width  pixels of the axis; W' adds space for the names
    labels  (N,) class numbers, -1 for none; by default the most probable class
    """
    # Pillow comes with tensorboard; the first picture imports Pillow.
    from PIL import Image, ImageDraw, ImageFont

    count, num_classes = probabilities.shape
    # A column of pixels covers many frames, or a part of one frame.
    first = np.arange(width) * count // width
    last = np.maximum(first + 1, np.arange(1, width + 1) * count // width)

    def columns(values: np.ndarray) -> np.ndarray:
        """Average (N, C) values of frames to (width, C), one mean per pixel column."""
        total = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, 0)])
        return (total[last] - total[first]) / (last - first)[:, None]

    def strip(labels: np.ndarray) -> np.ndarray:
        """Average the colours of (N,) class numbers or -1 to (width, 3), per pixel column."""
        shares = columns(labels[:, None] == np.arange(num_classes))
        return shares @ colours + (1 - shares.sum(1, keepdims=True)) * 235

    colours = (
        np.array([colorsys.hsv_to_rgb(c / num_classes, 0.75, 0.8) for c in range(num_classes)])
        * 255
    )
    labels = probabilities.argmax(1) if labels is None else labels
    strips = ({} if truth is None else {"annotated": strip(truth)}) | {"predicted": strip(labels)}
    font = ImageFont.load_default(14)
    margin = 16 + max(text_width(name) for name in (*classes, *strips))
    top, high, row = 30, 20, 36  # pixels of the title, of a strip and of a class's row
    begin = top + (high + 4) * len(strips) + 6
    picture = np.full((begin + row * num_classes + 30, margin + width + 50, 3), 255, dtype=np.uint8)
    for n, shades in enumerate(strips.values()):
        picture[top + (high + 4) * n :][:high, margin : margin + width] = np.rint(shades)
    level, won = columns(probabilities), columns(labels[:, None] == np.arange(num_classes))
    inside = np.arange(row - 6, 0, -1)[:, None]  # pixels above the row's base line
    for c in range(num_classes):
        filled = (inside <= np.rint(level[:, c] * (row - 6)))[:, :, None]
        shade = 255 - (255 - colours[c]) * (0.35 + 0.65 * won[:, c, None])  # (width, 3)
        base = begin + row * (c + 1) - 1
        picture[base - (row - 6) : base, margin : margin + width] = np.where(
            filled, np.rint(shade), 247
        )
        picture[base, margin : margin + width] = 160
    image = Image.fromarray(picture)
    pen = ImageDraw.Draw(image)
    pen.text((8, 6), title, fill="black", font=font)
    for n, name in enumerate(strips):
        pen.text((8, top + (high + 4) * n + high // 2), name, fill="black", font=font, anchor="lm")
    for c, name in enumerate(classes):
        pen.text((8, begin + row * c + row // 2), name, fill="black", font=font, anchor="lm")
    bottom = begin + row * num_classes
    for share, mark in _ticks(count, fps):
        at = margin + round(share * width)
        pen.line((at, bottom, at, bottom + 5), fill="black")
        pen.text((at, bottom + 7), mark, fill="black", font=font, anchor="ma" if share else "la")
    return np.asarray(image)


def _ticks(count: int, fps: float) -> list[tuple[float, str]]:
    """Return the marks of an axis of `count` frames: (position as a share of the axis, text)."""
    whole = count / (fps or 1.0)
    in_minutes = bool(fps) and whole >= 120
    nice = [digit * 10.0**power for power in range(-2, 8) for digit in (1, 2, 5)]
    if in_minutes:
        nice = [
            15.0,
            30.0,
            *(60.0 * minutes for minutes in (1, 2, 5, 10, 20, 30)),
            *(3600 * hours for hours in nice[6:]),
        ]
    step = next(one for one in nice if whole / one <= 12)
    times = [n * step for n in range(int(whole / step) + 1)]
    clock = [f"{time // 60:.0f}:{time % 60:02.0f}" if in_minutes else f"{time:g}" for time in times]
    unit = " min" if in_minutes else " s" if fps else " frames"
    return [
        (time / whole, text + unit * (n == 0))
        for n, (time, text) in enumerate(zip(times, clock, strict=True))
    ]


def draw_clips(
    clips: np.ndarray,
    captions: Sequence[Sequence[str]],
    wrong: Sequence[bool] | None = None,
    columns: int = 4,
) -> np.ndarray:
    """Tile (N, T, H, W) uint8 into a clip (T, H', W') with at most `columns` clips per row.

    Each clip has a caption above (equally many lines; black on white where `wrong`).
    """
    zoom = max(1, -(-128 // clips.shape[3]))
    clips = clips.repeat(zoom, 2).repeat(zoom, 3)
    count, frames, _, width = clips.shape
    room = max(width, *(text_width(line) + 10 for lines in captions for line in lines))
    spare = room - width
    clips = np.pad(clips, ((0, 0), (0, 0), (0, 0), (spare // 2, spare - spare // 2)))
    tiles = []
    for clip, lines, odd in zip(clips, captions, wrong or [False] * count, strict=True):
        strip = caption(lines, room, inverse=odd)
        tiles.append(np.concatenate([np.repeat(strip[None], frames, 0), clip], 1))
    rows = -(-count // columns)
    across = -(-count // rows)  # equal number in each row
    tiles += [np.zeros_like(tiles[0])] * (rows * across - count)
    return np.concatenate(
        [np.concatenate(tiles[n : n + across], 2) for n in range(0, rows * across, across)], 1
    )
