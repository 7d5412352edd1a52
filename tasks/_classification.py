"""Shared by tasks with one label per sample: class weights, the weighted loss, the confusion matrix, its metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine import contract
from engine.config import option
from engine.contract import Batch, Loss, PerSample, Sums
from tasks._pictures import text_width


@dataclass
class LossSettings:
    class_weights: Literal["inverse", "effective", "none"] = option(
        "inverse", "weight of a class in the loss: inverse frequency, effective number of samples, or none"
    )
    label_smoothing: float = option(0.0, "share of the target spread evenly over all classes", low=0.0, high=1.0)


def class_weights(counts: np.ndarray, kind: str, beta: float = 0.999) -> np.ndarray:
    """(C,) samples per class -> (C,) weights; a class without samples gets 0.

    inverse    N / (C n_c), so that the average weight of a sample is 1 (scikit-learn's "balanced")
    effective  (1 - beta) / (1 - beta^n_c), scaled to the same average (Cui et al., CVPR 2019)
    """
    counts = np.asarray(counts, dtype=np.float64)
    seen = counts > 0
    if kind == "none":
        return seen.astype(np.float64)
    raw = np.zeros_like(counts)
    raw[seen] = 1.0 / counts[seen] if kind == "inverse" else (1.0 - beta) / (1.0 - beta ** counts[seen])
    return raw * counts.sum() / (raw * counts).sum()


def class_table(classes: list[str], counts: np.ndarray, weights: np.ndarray, **others: np.ndarray | None) -> str:
    """Format a table of the training classes: counts, shares, weights and, if given, the counts in `others`."""
    bar = "=" * 60
    rows = [
        f"Class {c} ({name:<15}): {counts[c]:6d} samples ({100 * counts[c] / max(1, counts.sum()):5.2f}%)"
        f" -> weight: {weights[c]:.4f}"
        + "".join(f"  {each}: {number[c]:5d}" for each, number in others.items() if number is not None)
        for c, name in enumerate(classes)
    ]
    return "\n".join([bar, "Class Distribution and Weights", bar, *rows, bar])


class Classification(contract.Task):
    """A task whose batches hold `x` (B, ...) and `y` (B,) int64 and whose model maps x to logits (B, C).

    A subclass sets `classes` and calls `count` in `datasets()`, has a section `loss: LossSettings`, and may
    override `augment`.

    splitting  the advice printed for a class that is on one side of the split only
    """

    monitor = "macro_f1"
    higher_is_better = True
    classes: list[str]
    train_counts: np.ndarray  # (C,) int64
    val_counts: np.ndarray | None = None
    test_counts: np.ndarray | None = None
    splitting = "choose another split"

    def count(
        self,
        labels: np.ndarray,
        where: str,
        val_labels: np.ndarray | None = None,
        kept: np.ndarray | None = None,
        test: Any = None,
    ) -> None:
        """Set `train_counts` and `val_counts` from the (N,) labels of each split, and `test_counts` from the dataset
        `test`; of those to train on only what is `kept`, (N,) bool, counts. Raises LockstepError if all of these are of
        one class."""
        for each in (
            labels,
            labels[:0] if val_labels is None else val_labels,
            labels[:0] if test is None else test.labels,
        ):
            if wrong := np.flatnonzero((each < 0) | (each >= len(self.classes))).tolist():
                what = f"sample {wrong[0]} has the label {each[wrong[0]]}, and there are {len(self.classes)} classes"
                raise contract.LockstepError(what, where=where, todo="name all classes; labels are numbers from 0 on")
        labels = labels if kept is None else labels[kept]
        self.train_counts = np.bincount(labels, minlength=len(self.classes))
        if val_labels is not None:
            self.val_counts = np.bincount(val_labels, minlength=len(self.classes))
        if test is not None:
            self.test_counts = np.bincount(test.labels, minlength=len(self.classes))
        if np.count_nonzero(self.train_counts) < 2:
            raise contract.LockstepError(
                f"all {len(labels)} samples to train on are of class {self.classes[int(self.train_counts.argmax())]!r}",
                where=where,
                todo="give data of at least two classes, or another split",
            )

    def class_summary(self) -> str:
        """Return the table of classes, with a warning about those that one side of the split lacks."""
        weights, val = class_weights(self.train_counts, self.cfg.loss.class_weights), self.val_counts
        warnings = [class_table(self.classes, self.train_counts, weights, val=val, test=self.test_counts)]
        never = [name for name, count in zip(self.classes, self.train_counts, strict=True) if not count]
        unseen = [] if val is None else [name for name, count in zip(self.classes, val, strict=True) if not count]
        if never:
            warnings.append(f"warning: nothing to train on of {_some(never)}: never learned; {self.splitting}")
        if unseen:
            warnings.append(f"warning: nothing to validate on of {_some(unseen)}: no score tells; {self.splitting}")
        return "\n".join(warnings)

    def metadata(self) -> dict[str, Any]:
        return {"classes": self.classes, "train_counts": self.train_counts.tolist()}

    def load_metadata(self, metadata: dict[str, Any]) -> None:
        if "classes" not in metadata:
            raise contract.LockstepError(
                "the checkpoint does not hold the names of its classes",
                where="resume",
                todo="give one that a newer version wrote: a step further is enough",
                exit_code=3,
            )
        self.classes, self.train_counts = metadata["classes"], np.array(metadata["train_counts"], dtype=np.int64)

    def augment(self, x: Tensor, seeds: Tensor) -> Tensor:
        """Change the inputs at random on their device, drawing from `contract.uniform(seeds, k)` and nothing else."""
        return x

    def weights(self, like: Tensor) -> Tensor:
        """Return (C,) class weights on the device of `like`, cached because the copy is a sync point."""
        cached: Tensor | None = getattr(self, "_weights", None)
        if cached is None or cached.device != like.device or cached.dtype != like.dtype:
            values = class_weights(self.train_counts, self.cfg.loss.class_weights)
            self._weights = cached = torch.as_tensor(values, dtype=like.dtype, device=like.device)
        return cached

    def prepare(self, batch: Batch) -> Batch:
        return batch | {"x": self.augment(batch["x"], batch["lockstep"].seed)}

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        y = batch["y"]
        logits = net(batch["x"])  # (B, C)
        # Where autocast does not cast them, logits may be bf16 or fp16; the loss is summed in at least fp32.
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        weights = self.weights(logits)
        total = F.cross_entropy(
            logits, y, weight=weights, label_smoothing=self.cfg.loss.label_smoothing, reduction="sum"
        )
        hits = (logits.argmax(1) == y).sum()
        return Loss(total, weights[y].sum(), Sums(accuracy=hits, count=y.new_full((), len(y))))

    def score(self, model: nn.Module, batch: Batch) -> Sums:
        y = batch["y"]
        logits = model(batch["x"])
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        weights = self.weights(logits)
        losses = F.cross_entropy(
            logits, y, weight=weights, label_smoothing=self.cfg.loss.label_smoothing, reduction="none"
        )
        num_classes, guesses = logits.shape[1], logits.argmax(1)
        self.guessed(batch, guesses)
        # Not bincount, which is a sync point: it asks for the largest.
        cells = y.new_zeros(num_classes**2).scatter_add_(0, y * num_classes + guesses, torch.ones_like(y))
        return Sums(
            loss_total=losses.double().sum(),
            loss_weight=weights[y].double().sum(),
            confusion=cells.view(num_classes, num_classes),  # [true, predicted]
            count=y.new_full((), len(y)),
        )

    def guessed(self, batch: Batch, guesses: Tensor) -> None:
        """Hook: an evaluation predicted (B,) class numbers, on the batch's device; keep them for `pictures`."""

    def report(self, sums: Sums) -> dict[str, float]:
        matrix = sums["confusion"].cpu().numpy().astype(np.float64)
        precision, recall, f1 = precision_recall_f1(matrix)
        # Classes that neither occur nor are predicted have no F1; the mean is over the others.
        known = (matrix.sum(0) + matrix.sum(1)) > 0
        metrics: dict[str, Any] = {
            "loss": float(sums["loss_total"] / sums["loss_weight"]) if sums["loss_weight"] > 0 else float("nan"),
            "accuracy": float(np.trace(matrix) / max(1.0, matrix.sum())),
            "macro_f1": float(f1[known].mean()) if known.any() else 0.0,
        }
        for c, name in enumerate(self.classes):
            metrics |= {
                f"precision/{name}": float(precision[c]),
                f"recall/{name}": float(recall[c]),
                f"f1/{name}": float(f1[c]),
            }
        return metrics

    def predict(self, model: nn.Module, batch: Batch) -> PerSample:
        shares = model(batch["x"]).float().softmax(1)  # (B, C)
        labels = [self.classes[c] for c in shares.argmax(1).tolist()]
        return {"label": labels, **{f"p_{name}": shares[:, c] for c, name in enumerate(self.classes)}}

    def export_module(self, model: nn.Module) -> tuple[nn.Module, Callable[[Batch], Tensor | dict[str, Tensor]]]:
        return Deployed(model), lambda batch: batch["x"]

    def pictures(self, model: nn.Module, batch: Batch, sums: Sums) -> dict[str, np.ndarray]:
        return {"confusion_matrix": draw_confusion(sums["confusion"].cpu().numpy(), self.classes)}


def _some(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more classes" if len(names) > 10 else "")


class Deployed(nn.Module):
    """A classifier for export: it returns {"logits", "probabilities"}, each (B, C) float32.

    by_step  the input is (B, T, channels), as sensor data are stored, not (B, channels, T)
    """

    def __init__(self, model: nn.Module, by_step: bool = False):
        super().__init__()
        self.model, self.by_step = model, by_step

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.model(x.transpose(1, 2) if self.by_step else x).float()
        return {"logits": logits, "probabilities": logits.softmax(1)}


def precision_recall_f1(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(C, C) counts [true, predicted] -> three (C,) arrays, 0 where a denominator is 0 (scikit-learn's default)."""
    hits = np.diag(matrix).astype(np.float64)
    predicted, actual = matrix.sum(0), matrix.sum(1)

    def ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.divide(a, b, out=np.zeros_like(hits), where=b > 0)

    return ratio(hits, predicted), ratio(hits, actual), ratio(2 * hits, predicted + actual)


def draw_confusion(matrix: np.ndarray, classes: list[str]) -> np.ndarray:
    """(C, C) counts [true, predicted] -> uint8 picture (H, W, 3): rows are the truth, shade is the row's share."""
    from PIL import Image, ImageDraw, ImageFont  # comes with tensorboard; imported when the first picture is drawn

    num_classes, title = len(classes), "rows: true, columns: predicted"
    names = [name if len(name) <= 60 else name[:59] + "…" for name in classes]
    longest = max(text_width(name, 15) for name in names) + 12
    cell = max(30, min(64, 1200 // num_classes))
    left, top = longest, 30 + longest
    width = max(left + cell * num_classes, text_width(title, 15) + 12)
    picture = Image.new("RGB", (width, top + cell * num_classes), "white")
    pen = ImageDraw.Draw(picture)
    font, small = ImageFont.load_default(15), ImageFont.load_default(15 if cell > 44 else 9)
    pen.text((6, 6), title, fill="black", font=font)
    for c, name in enumerate(names):
        middle = cell * c + cell // 2
        pen.text((left - 6, top + middle), name, fill="black", font=font, anchor="rm")
        upright = Image.new("L", (longest, 20))  # names are wider than a cell: they run upwards
        ImageDraw.Draw(upright).text((6, 10), name, fill=255, font=font, anchor="lm")
        upright = upright.rotate(90, expand=True)
        picture.paste("black", (left + middle - 10, top - longest), upright)
    shares = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
    for row in range(num_classes):
        for column in range(num_classes):
            share = shares[row, column]
            x, y = left + cell * column, top + cell * row
            shade = tuple(int(255 - share * (255 - full)) for full in (33, 102, 172))
            pen.rectangle((x, y, x + cell - 2, y + cell - 2), fill=shade)
            ink = "white" if share > 0.5 else "black" if share else "#b0b0b0"
            at = x + cell // 2 - 1, y + cell // 2 - 1
            pen.text(at, str(int(matrix[row, column])), fill=ink, font=small, anchor="mm")
    return np.asarray(picture)
