"""Behaviour of a mouse in short gray clips: rest, walk, rear, groom, paw withdrawal; split by video."""

from __future__ import annotations

import colorsys
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from engine import contract
from engine.config import option, section
from engine.contract import Batch, LockstepError, Sums
from formats.clips import Clips, split_by_video
from formats.synthetic_clips import Recipe, ensure
from models.cnn3d import CNN3d
from tasks._classification import Classification, LossSettings
from tasks._pictures import caption

GENERATED = Path(__file__).resolve().parent.parent / "data" / "generated"


@dataclass
class Dataset:
    root: str = option("", "packed folder of clips (tools/prepare_clips.py makes one); empty = synthetic clips")
    frames: int = option(17, "frames of a clip; a longer trial gives its middle", low=2)
    size: int = option(64, "height and width of the synthetic clips in pixels", low=8)
    trials: int = option(980, "number of synthetic trials", low=20)
    videos: int = option(100, "number of videos that the synthetic trials come from", low=2)
    data_seed: int = option(0, "of the synthetic clips", low=0, high=2**31 - 1)
    val_share: float = option(0.2, "share of the trials to validate on, in whole videos", low=0.01, high=0.9)
    split_seed: int = option(0, "of the choice of these videos", low=0, high=2**31 - 1)
    val_videos: list[str] = option([], "videos to validate on, by name, such as a.mp4,b.mp4; they overrule val_share")


@dataclass
class Model:
    width: int = option(8, "channels of the stem; 8 gives 0.1 million parameters, 40 gives 2.7 million", low=1)
    dropout: float = option(0.0, "share of the features dropped before the last layer", low=0.0, high=0.99)


@dataclass
class Augment:
    flip: Literal["none", "horizontal", "all"] = option(
        "all", "horizontal = left and right; all = the eight symmetries of a square, for a view from above"
    )
    shift: float = option(0.08, "largest shift, as a share of height and width", low=0.0, high=0.5)
    jitter: int = option(1, "largest shift in time, in frames", low=0)
    brightness: float = option(0.15, "largest change of gain, and of offset as a share of white", low=0.0, high=1.0)


@dataclass
class VideoSettings(contract.Settings):
    dataset: Dataset = section(Dataset)
    model: Model = section(Model)
    loss: LossSettings = section(LossSettings)
    augment: Augment = section(Augment)


class Task(Classification):
    Settings = VideoSettings
    defaults = {
        "epochs": 14,
        "batch_size": 32,
        "optim.lr": 4e-3,
        "schedule.warmup_epochs": 1.0,
    }
    splitting = "record it in two videos at least, or choose those to validate on by dataset.val_videos"
    aliases = {"root": "dataset.root", "frames": "dataset.frames", "size": "dataset.size", "width": "model.width"}

    def _clips(self) -> Clips:
        wanted = self.cfg.dataset
        folder = Path(os.path.expanduser(wanted.root))
        if not wanted.root:
            recipe = Recipe(wanted.trials, wanted.videos, wanted.frames, wanted.size, wanted.data_seed)
            folder = ensure(GENERATED / recipe.name, recipe)
        elif not os.path.isdir(folder):  # unlike Path's own, it raises for no name whatever
            raise LockstepError(
                f"no folder {wanted.root!r}", where="dataset.root", todo="make it with tools/prepare_clips.py"
            )
        return Clips(folder, wanted.frames)

    def datasets(self) -> tuple[Clips, Clips]:
        wanted, clips = self.cfg.dataset, self._clips()
        train, val = split_by_video(clips.videos, clips.labels, wanted.val_share, wanted.split_seed, wanted.val_videos)
        self.classes = clips.classes
        self.count(clips.labels[train], str(clips.folder), clips.labels[val])
        self.about: dict[str, Any] = {"shape": [*clips.shape], "cutting": clips.cutting}
        held_out, videos = sorted({*clips.videos[val].tolist()}), {*clips.videos.tolist()}
        some = ", ".join(held_out[:8]) + (", ..." if len(held_out) > 8 else "")
        self._found = (
            f"Found {len(videos)} unique videos with {len(clips)} total trials\n"
            f"Train trials: {len(train)}, Val trials: {len(val)}\n"
            f"Held-out videos: {some} ({len(held_out)} of {len(videos)})"
        )
        return clips.subset(train), clips.subset(val)

    def known(self) -> dict[str, Any]:
        return super().known() | self.about

    def recall(self, known: dict[str, Any]) -> None:
        super().recall(known)
        self.about = {name: known[name] for name in ("shape", "cutting")}

    def everything(self) -> Clips:
        clips = self.fitting(self._clips())
        self._found = f"Found {len({*clips.videos.tolist()})} unique videos with {len(clips)} total trials"
        return clips.renumbered(self.classes)

    def fitting(self, clips: Clips) -> Clips:
        """After `recall`: other clips, if they are as large as those the model was trained on."""
        if [*clips.shape] != self.about["shape"]:
            sizes = [" x ".join(map(str, shape)) for shape in (clips.shape, self.about["shape"])]
            what = f"clips of {sizes[0]}, the model was trained on clips of {sizes[1]}"
            raise LockstepError(what, where=str(clips.folder), todo="make them anew from the videos, as large as those")
        return clips

    def model(self) -> nn.Module:
        return CNN3d(len(self.classes), self.cfg.model.width, self.cfg.model.dropout)

    def augment(self, x: Tensor, seeds: Tensor) -> Tensor:
        """(B, T, H, W) uint8 -> the same: flipped, shifted in space and time, brighter or darker."""
        return augment(x, contract.uniform(seeds, 8), self.cfg.augment)

    def summary(self) -> str:
        return f"{self._found}\n\n{self.class_summary()}"

    def pictures(self, model: nn.Module, batch: Batch, sums: Sums) -> dict[str, np.ndarray]:
        x, y = batch["x"][:4], batch["y"][:4]
        with torch.no_grad():
            guesses = model(x).argmax(1).tolist()
        pairs = [*zip(y.tolist(), guesses, strict=True)]
        captions = [(f"true {self.classes[truth]}", f"pred {self.classes[guess]}") for truth, guess in pairs]
        shown = draw_clips(x.cpu().numpy(), captions, [truth != guess for truth, guess in pairs])
        return super().pictures(model, batch, sums) | {"clips": shown}


def augment(x: Tensor, u: Tensor, wanted: Augment) -> Tensor:
    """x (B, T, H, W) uint8, u (B, 8) in [0, 1) -> (B, T, H, W) uint8; a shift repeats the edge that it uncovers."""
    _, num_frames, height, width = x.shape
    times = _moved(num_frames, wanted.jitter, u[:, 0])
    rows = _moved(height, wanted.shift * height, u[:, 1])
    columns = _moved(width, wanted.shift * width, u[:, 2])
    if wanted.flip != "none":
        columns = torch.where(u[:, 3:4] < 0.5, columns, columns.flip(1))
    if wanted.flip == "all":
        rows = torch.where(u[:, 4:5] < 0.5, rows, rows.flip(1))
    # Time, rows and columns in one gather; the index tensors are broadcast, never spelled out per pixel.
    sample = torch.arange(len(x), device=x.device)[:, None, None, None]
    x = x[sample, times[:, :, None, None], rows[:, None, :, None], columns[:, None, None, :]]
    if wanted.flip == "all" and height == width:
        x = torch.where(u[:, 5, None, None, None] < 0.5, x, x.transpose(2, 3))
    if wanted.brightness:
        gain, offset = (1 + wanted.brightness * (2 * u[:, 6:8] - 1)).unbind(1)
        light = x * gain[:, None, None, None] + 255 * (offset - 1)[:, None, None, None]
        x = light.clamp_(0, 255).to(torch.uint8)
    return x


def _moved(length: int, most: float, u: Tensor) -> Tensor:
    """(B,) draws -> (B, length) indices moved by up to `most` either way, held at the ends."""
    steps = torch.floor((2 * int(most) + 1) * u).long() - int(most)  # (B,)
    return (torch.arange(length, device=u.device) + steps[:, None]).clamp(0, length - 1)


def draw_ethogram(labels: np.ndarray, classes: list[str], fps: float, width: int = 1200) -> np.ndarray:
    """(N,) class numbers of a video's frames -> uint8 picture (H, W', 3): a row per class, in colour where the video
    shows it, over an axis of time, or of frames where fps is 0. W' is `width` and room for the names."""
    from PIL import Image, ImageDraw  # comes with tensorboard; imported when the first picture is drawn

    pen = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    row, margin = 26, 16 + max(int(pen.textlength(name)) for name in classes)
    picture = np.full((row * len(classes) + 30, margin + width + 24, 3), 255, dtype=np.uint8)
    first = (
        np.arange(width) * len(labels) // width
    )  # a column of pixels may stand for many frames, or for a part of one
    last = np.maximum(first + 1, np.arange(1, width + 1) * len(labels) // width)
    for c in range(len(classes)):
        seen = np.concatenate([[0], np.cumsum(labels == c)])
        share = ((seen[last] - seen[first]) / (last - first))[:, None]  # (width, 1)
        full = np.array([round(255 * part) for part in colorsys.hsv_to_rgb(c / len(classes), 0.75, 0.75)])
        picture[row * c + 3 : row * (c + 1) - 3, margin : margin + width] = 240 + share * (full - 240)
    image = Image.fromarray(picture)
    pen = ImageDraw.Draw(image)
    for c, name in enumerate(classes):
        pen.text((8, row * c + 7), name, fill="black")
    whole = len(labels) / (fps or 1.0)
    nice = [digit * 10.0**power for power in range(-2, 8) for digit in (1, 2, 5)]
    step = next(one for one in nice if whole / one <= 12)
    for n in range(int(whole / step) + 1):
        at, bottom = margin + round(n * step / whole * width), row * len(classes)
        pen.line((at, bottom, at, bottom + 5), fill="black")
        pen.text((at + 2, bottom + 8), f"{n * step:g}" + (" s" if fps else ""), fill="black")
    return np.asarray(image)


def draw_clips(clips: np.ndarray, captions: list[tuple[str, str]], wrong: list[bool] | None = None) -> np.ndarray:
    """(N, T, H, W) uint8 and N captions of two lines -> one clip (T, H', W'), side by side under their captions; those
    that are wrong stand black on white."""

    zoom = max(1, -(-128 // clips.shape[3]))
    clips = clips.repeat(zoom, 2).repeat(zoom, 3)
    count, frames, height, width = clips.shape
    lines = zip(captions, wrong or [False] * count, strict=True)
    strip = np.concatenate([caption(pair, width, inverse=odd) for pair, odd in lines], 1)
    side_by_side = clips.transpose(1, 2, 0, 3).reshape(frames, height, count * width)
    return np.concatenate([np.repeat(strip[None], frames, 0), side_by_side], 1)
