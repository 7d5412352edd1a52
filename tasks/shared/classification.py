"""Base of tasks with one label per sample.

The module has class weights, the weighted loss, the confusion matrix and its metrics.
"""

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
from formats.lab.mixup import Mixed
from tasks.shared.calibration import bins_of, draw_reliability, ece
from tasks.shared.pictures import text_width

PARTNER = 0x5851F42D4C957F2D
"""Converts a sample's seed to the seed of the partner's augmentation."""

LEVELS = 100
"""Levels of a probability in the counts of a binary evaluation."""


@dataclass
class LossSettings:
    class_weights: Literal["inverse", "effective", "none"] = option(
        "inverse",
        "weight of a class in the loss: inverse frequency, effective number of samples, or none",
    )
    label_smoothing: float = option(
        0.0, "share of the target spread evenly over all classes", low=0.0, high=1.0
    )
    focal: float = option(
        0.0, "gamma of the focal loss: what is sure already counts less; 0: cross-entropy", low=0.0
    )
    kind: Literal["softmax", "binary"] = option(
        "softmax", "one class for each sample; or binary: any number of them, where labels overlap"
    )
    positive_exponent: float = option(
        1.0,
        "binary: what is on weighs (off / on)^this of its class: 1 balances, 0 does nothing",
        low=0.0,
        high=2.0,
    )


def class_weights(counts: np.ndarray, kind: str, beta: float = 0.999) -> np.ndarray:
    """Compute (C,) weights from (C,) samples per class; a class without samples gets 0.

    inverse    N / (C n_c), so that the average weight of a sample is 1 (scikit-learn's "balanced")
    effective  (1 - beta) / (1 - beta^n_c), scaled to the same average (Cui et al., CVPR 2019)
    """
    counts = np.asarray(counts, dtype=np.float64)
    seen = counts > 0
    if kind == "none":
        return seen.astype(np.float64)
    raw = np.zeros_like(counts)
    raw[seen] = (
        1.0 / counts[seen] if kind == "inverse" else (1.0 - beta) / (1.0 - beta ** counts[seen])
    )
    return raw * counts.sum() / (raw * counts).sum()


def class_table(
    classes: list[str], counts: np.ndarray, weights: np.ndarray, **others: np.ndarray | None
) -> str:
    """Format a table of the training classes: counts, shares, weights.

    The table also has the counts in `others`, if given.
    """
    bar = "=" * 60
    rows = [
        f"Class {c} ({name:<15}): {counts[c]:6d} samples "
        f"({100 * counts[c] / max(1, counts.sum()):5.2f}%)"
        f" -> weight: {weights[c]:.4f}"
        + "".join(
            f"  {each}: {number[c]:5d}" for each, number in others.items() if number is not None
        )
        for c, name in enumerate(classes)
    ]
    return "\n".join([bar, "Class Distribution and Weights", bar, *rows, bar])


class Classification(contract.Task):
    """A task with labelled batches.

    Batches have `x` (B, ...) and `y` (B,) int64. The model maps x to logits (B, C).

    A subclass sets `classes`, calls `count` in `datasets()`, and has a section `loss:
    LossSettings`. A subclass may override `augment`.

    splitting  advice for a class that is on one side of the split only
    """

    monitor = "macro_f1"
    higher_is_better = True
    classes: list[str]
    train_counts: np.ndarray  # (C,) int64
    # (C,) int64, binary: samples with a known state of the class
    looked_counts: np.ndarray
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
        """Set `train_counts` and `val_counts` from the (N,) labels of each split.

        `test_counts` comes from the dataset `test`. Only `kept` training samples, (N,) bool, count.
        Raises LockstepError if all kept samples have the same class.
        """
        if labels.ndim == 2:
            self._count_binary(labels, where, val_labels, kept, test)
            return
        for each in (
            labels,
            labels[:0] if val_labels is None else val_labels,
            labels[:0] if test is None else test.labels,
        ):
            if wrong := np.flatnonzero((each < 0) | (each >= len(self.classes))).tolist():
                what = (
                    f"sample {wrong[0]} has the label {each[wrong[0]]}, and there are "
                    f"{len(self.classes)} classes"
                )
                raise contract.LockstepError(
                    what, where=where, todo="name all classes; labels are numbers from 0 on"
                )
        labels = labels if kept is None else labels[kept]
        self.train_counts = np.bincount(labels, minlength=len(self.classes))
        if val_labels is not None:
            self.val_counts = np.bincount(val_labels, minlength=len(self.classes))
        if test is not None:
            self.test_counts = np.bincount(test.labels, minlength=len(self.classes))
        if np.count_nonzero(self.train_counts) < 2:
            raise contract.LockstepError(
                (
                    f"all {len(labels)} samples to train on are of class "
                    f"{self.classes[int(self.train_counts.argmax())]!r}"
                ),
                where=where,
                todo="give data of at least two classes, or another split",
            )

    def _count_binary(
        self,
        labels: np.ndarray,
        where: str,
        val_labels: np.ndarray | None,
        kept: np.ndarray | None,
        test: Any = None,
    ) -> None:
        labels = labels if kept is None else labels[kept]
        self.train_counts, self.looked_counts = (labels == 1).sum(0), (labels >= 0).sum(0)
        if val_labels is not None:
            self.val_counts = (val_labels == 1).sum(0)
        if test is not None:
            self.test_counts = (test.targets == 1).sum(0)
        if not ((self.train_counts > 0) & (self.train_counts < self.looked_counts)).any():
            todo = "give data in which a class is on here and off there, or another split"
            raise contract.LockstepError(
                "no class is both on and off in what is trained on", where, todo
            )

    def class_weights(self) -> np.ndarray:
        """Return (C,) weights; binary: weights of the positive labels.

        A negative label weighs 1.
        """
        settings, counts = self.cfg.loss, np.asarray(self.train_counts, dtype=np.float64)
        if self.exclusive:
            return class_weights(self.train_counts, settings.class_weights)
        off = self.looked_counts - counts
        return np.where(
            (counts > 0) & (off > 0),
            (off / np.maximum(counts, 1)) ** settings.positive_exponent,
            1.0,
        )

    def class_summary(self) -> str:
        """Return the table of classes, with a warning for classes on one side of the split only."""
        weights, val = self.class_weights(), self.val_counts
        warnings = [
            class_table(self.classes, self.train_counts, weights, val=val, test=self.test_counts)
        ]
        never = [
            name for name, count in zip(self.classes, self.train_counts, strict=True) if not count
        ]
        unseen = (
            []
            if val is None
            else [name for name, count in zip(self.classes, val, strict=True) if not count]
        )
        if never:
            warnings.append(
                f"warning: nothing to train on of {_some(never)}: never learned; {self.splitting}"
            )
        if unseen:
            warnings.append(
                f"warning: nothing to validate on of {_some(unseen)}: no score shows it; "
                f"{self.splitting}"
            )
        return "\n".join(warnings)

    def metadata(self) -> dict[str, Any]:
        more = {} if self.exclusive else {"looked_counts": self.looked_counts.tolist()}
        return {"classes": self.classes, "train_counts": self.train_counts.tolist()} | more

    def load_metadata(self, metadata: dict[str, Any]) -> None:
        if "classes" not in metadata:
            raise contract.LockstepError(
                "the checkpoint does not hold the names of its classes",
                where="resume",
                todo="give one that a newer version wrote: a step further is enough",
                exit_code=3,
            )
        self.classes, self.train_counts = (
            metadata["classes"],
            np.array(metadata["train_counts"], dtype=np.int64),
        )
        self.looked_counts = np.array(metadata.get("looked_counts", []), dtype=np.int64)

    @property
    def exclusive(self) -> bool:
        """Return whether each sample has exactly one class."""
        return bool(self.cfg.loss.kind == "softmax")

    def with_targets(self, *parts: Any) -> None:
        """Set the `y` of datasets with `one_hot` and `overlapping` to the form that the loss needs.

        Raises LockstepError if labels overlap and the loss needs a single label.
        """
        for part in parts:
            if part is not None and self.exclusive and part.overlapping:
                todo = "give loss.kind=binary, or make the data without --multi"
                raise contract.LockstepError(
                    "the labels of these data may overlap", "loss.kind=softmax", todo
                )
            if part is not None and not self.exclusive:
                part.one_hot()
        mixup = self.cfg.augment.mixup
        if (mixup or not self.exclusive) and self.cfg.model.features == "cached":
            key = f"augment.mixup={mixup:g}" if mixup else "loss.kind=binary"
            todo = (
                "drop one of the two: the features come with one label each, and are of whole "
                "samples"
            )
            raise contract.LockstepError("cached features", key, todo)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Convert logits (B, C) to probabilities (B, C)."""
        return logits.softmax(1) if self.exclusive else logits.sigmoid()

    def augment(self, x: Tensor, seeds: Tensor) -> Tensor:
        """Change the inputs at random on their device.

        `contract.uniform(seeds, k)` is the only source of random numbers.
        """
        return x

    def weights(self, like: Tensor) -> Tensor:
        """Return (C,) class weights on the device of `like`.

        The weights are cached, because the copy is a sync point.
        """
        cached: Tensor | None = getattr(self, "_weights", None)
        if cached is None or cached.device != like.device or cached.dtype != like.dtype:
            values = self.class_weights()
            self._weights = cached = torch.as_tensor(values, dtype=like.dtype, device=like.device)
        return cached

    def prepare(self, batch: Batch) -> Batch:
        seed = batch["lockstep"].seed
        x = self.augment(batch["x"], seed)
        if "x2" not in batch:
            return batch | {"x": x}
        rest = {name: values for name, values in batch.items() if name not in ("x2", "share")}
        second = self.augment(batch["x2"], seed ^ PARTNER)
        return rest | {"x": self.mix(x, second, batch["share"]), "mixed": batch["share"]}

    def mix(self, x: Tensor, other: Tensor, share: Tensor) -> Tensor:
        """Mix (B, ...) inputs; `share` (B,) is the share of `x`."""
        first = share.to(x.dtype if x.is_floating_point() else torch.float32).view(
            -1, *[1] * (x.dim() - 1)
        )
        mixed = first * x + (1 - first) * other
        return mixed if x.is_floating_point() else mixed.round().to(x.dtype)

    def with_mixup(self, train: Any) -> Any:
        """Return the training dataset with mixup partners if `augment.mixup` is on."""
        if not (alpha := self.cfg.augment.mixup):
            return train
        return Mixed(train, alpha, self.kept(train))

    def losses_of(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the (B,) weighted losses.

        The focal loss (Lin et al., ICCV 2017) multiplies each loss by (1 - p)^gamma, where p is the
        probability of the label. The total weight, the divisor of the sum, is unchanged.
        """
        settings, weights = self.cfg.loss, self.weights(logits)
        losses = F.cross_entropy(
            logits, y, weight=weights, label_smoothing=settings.label_smoothing, reduction="none"
        )
        if not settings.focal:
            return losses
        sure = logits.log_softmax(1).gather(1, y[:, None]).squeeze(1)
        # Clamp: at p = 1, the slope of a power below 1 is infinite.
        return losses * (-torch.expm1(sure)).clamp(min=1e-12) ** settings.focal

    def _unusual_loss(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (total, weight) of the focal loss or of mixtures.

        Each label of a mixture counts with its share in the loss and, times its class weight, in
        the weight.
        """
        y, weights = batch["y"], self.weights(logits)
        losses, mine = self.losses_of(logits, y), weights[y]
        if "mixed" in batch:
            share, y2 = batch["mixed"].to(losses.dtype), batch["y2"]
            losses = share * losses + (1 - share) * self.losses_of(logits, y2)
            mine = share * mine + (1 - share) * weights[y2]
        return losses.sum(), mine.sum()

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        y = batch["y"]
        logits = net(batch["x"])  # (B, C)
        # Without autocast's cast, logits may be bf16 or fp16. Sum the loss in at least fp32.
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        if not self.exclusive:
            return self._binary_loss(logits, batch)
        weights = self.weights(logits)
        hits = (logits.argmax(1) == y).sum()
        if self.cfg.loss.focal or "mixed" in batch:
            return Loss(
                *self._unusual_loss(logits, batch),
                Sums(accuracy=hits, count=y.new_full((), len(y))),
            )
        total = F.cross_entropy(
            logits,
            y,
            weight=weights,
            label_smoothing=self.cfg.loss.label_smoothing,
            reduction="sum",
        )
        return Loss(total, weights[y].sum(), Sums(accuracy=hits, count=y.new_full((), len(y))))

    def score(self, model: nn.Module, batch: Batch) -> Sums:
        y = batch["y"]
        logits = model(batch["x"])
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        if not self.exclusive:
            return self._binary_score(logits, y)
        weights = self.weights(logits)
        losses = self.losses_of(logits, y)
        num_classes, guesses = logits.shape[1], logits.argmax(1)
        counts, shares = bins_of(logits.softmax(1).amax(1), guesses == y)
        self.guessed(batch, guesses)
        # bincount would be a sync point, because it reads the largest value.
        cells = y.new_zeros(num_classes**2).scatter_add_(
            0, y * num_classes + guesses, torch.ones_like(y)
        )
        return Sums(
            loss_total=losses.double().sum(),
            loss_weight=weights[y].double().sum(),
            confusion=cells.view(num_classes, num_classes),  # [true, predicted]
            bins=counts,
            bin_shares=shares,
            count=y.new_full((), len(y)),
        )

    def _binary_parts(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, C) losses and weights of sigmoids; both are 0 where y is -1."""
        settings, looked, on = self.cfg.loss, y >= 0, y.clamp(min=0).to(logits.dtype)
        weights = torch.where(y == 1, self.weights(logits), 1.0) * looked
        target = on * (1 - settings.label_smoothing) + settings.label_smoothing / 2
        losses = weights * F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        if settings.focal:
            sure = F.logsigmoid(torch.where(y == 1, logits, -logits))
            losses = losses * (-torch.expm1(sure)).clamp(min=1e-12) ** settings.focal
        return losses, weights

    def _binary_loss(self, logits: Tensor, batch: Batch) -> Loss:
        y = batch["y"]
        losses, weights = self._binary_parts(logits, y)
        if "mixed" in batch:
            share = batch["mixed"].to(losses.dtype)[:, None]
            others = self._binary_parts(logits, batch["y2"])
            losses, weights = (
                share * a + (1 - share) * b for a, b in zip((losses, weights), others, strict=True)
            )
        hits = (((logits > 0) == (y == 1)) | (y < 0)).all(1).sum()
        return Loss(
            losses.sum(), weights.sum(), Sums(accuracy=hits, count=hits.new_full((), len(y)))
        )

    def _binary_score(self, logits: Tensor, y: Tensor) -> Sums:
        losses, weights = self._binary_parts(logits, y)
        place = (logits.sigmoid() * LEVELS).floor().long().clamp(max=LEVELS - 1)  # (B, C)
        # For each class, count negative and positive samples by level of probability.
        cells = (torch.arange(y.shape[1], device=y.device) * 2 + (y == 1)) * LEVELS + place
        levels = torch.zeros(y.shape[1] * 2 * LEVELS, dtype=torch.int64, device=y.device)
        levels.scatter_add_(0, cells.flatten(), (y >= 0).long().flatten())
        return Sums(
            loss_total=losses.double().sum(),
            loss_weight=weights.double().sum(),
            levels=levels.view(-1, 2, LEVELS),
            count=levels.new_full((), len(y)),
        )

    def _binary_report(self, sums: Sums) -> dict[str, float]:
        weight = sums["loss_weight"]
        metrics = {"loss": float(sums["loss_total"] / weight) if weight > 0 else float("nan")}
        rows: dict[str, list[float]] = {"precision": [], "recall": [], "f1": [], "ap": []}
        levels = sums["levels"].cpu().numpy()
        for off, on in levels:
            wrong, hits, all_on = (
                int(off[LEVELS // 2 :].sum()),
                int(on[LEVELS // 2 :].sum()),
                int(on.sum()),
            )
            rows["precision"].append(hits / max(1, hits + wrong))
            rows["recall"].append(hits / max(1, all_on))
            rows["f1"].append(2 * hits / max(1, hits + wrong + all_on))
            rows["ap"].append(average_precision(off, on))
        known = [c for c in range(len(levels)) if levels[c, 1].sum()]
        metrics |= self._binary_baselines(levels[known], known)
        metrics["macro_f1"] = sum(rows["f1"][c] for c in known) / max(1, len(known))
        metrics["mean_ap"] = sum(rows["ap"][c] for c in known) / max(1, len(known))
        return metrics | {
            f"{kind}/{name}": row[c]
            for c, name in enumerate(self.classes)
            for kind, row in rows.items()
        }

    def _binary_baselines(self, levels: np.ndarray, known: list[int]) -> dict[str, float]:
        """Return the macro F1 and the mean AP if each class has its commonest training answer.

        levels  (K, 2, LEVELS) counts of negative and positive samples of the K `known` classes
        """
        negative, positive = levels.sum(2).T.astype(np.float64)
        shares = positive / np.maximum(1, negative + positive)
        is_on = np.zeros(len(known), dtype=bool)
        if len(getattr(self, "looked_counts", [])):
            is_on = (2 * self.train_counts > self.looked_counts)[known]
        # all on: precision is the share of positives, recall is 1
        f1 = np.where(is_on, 2 * shares / (1 + shares), 0.0)
        count = max(1, len(known))
        return {
            "baseline/commonest_macro_f1": float(f1.sum() / count),
            "baseline/commonest_mean_ap": float(shares.sum() / count),
        }

    def guessed(self, batch: Batch, guesses: Tensor) -> None:
        """Receive (B,) predicted class numbers of an evaluation, on the batch's device.

        A task overrides the hook to keep the numbers for `pictures`.
        """

    def baselines(self) -> dict[str, str]:
        name = "commonest class" if self.exclusive else "commonest answers"
        return {f"baseline/commonest_{self.monitor}": name}

    def report(self, sums: Sums) -> dict[str, float]:
        if "levels" in sums:
            return self._binary_report(sums)
        matrix = sums["confusion"].cpu().numpy().astype(np.float64)
        precision, recall, f1 = precision_recall_f1(matrix)
        metrics: dict[str, Any] = {
            "loss": float(sums["loss_total"] / sums["loss_weight"])
            if sums["loss_weight"] > 0
            else float("nan"),
            "accuracy": float(np.trace(matrix) / max(1.0, matrix.sum())),
            "macro_f1": macro_f1(matrix),
        }
        if hasattr(self, "train_counts"):  # a task of one's own may count otherwise
            commonest = always(matrix, int(self.train_counts.argmax()))
            shares = np.trace(commonest) / max(1.0, matrix.sum())
            metrics["baseline/commonest_accuracy"] = float(shares)
            metrics["baseline/commonest_macro_f1"] = macro_f1(commonest)
        if "bins" in sums:  # a task's own `score` may omit the bins
            metrics["ece"] = ece(sums["bins"].cpu().numpy(), sums["bin_shares"].cpu().numpy())
        for c, name in enumerate(self.classes):
            metrics |= {
                f"precision/{name}": float(precision[c]),
                f"recall/{name}": float(recall[c]),
                f"f1/{name}": float(f1[c]),
            }
        return metrics

    def predict(self, model: nn.Module, batch: Batch) -> PerSample:
        shares = self.probabilities(model(batch["x"]).float())  # (B, C)
        labels = [self.classes[c] for c in shares.argmax(1).tolist()]
        if not self.exclusive:
            labels = [
                "+".join(name for name, p in zip(self.classes, row, strict=True) if p >= 0.5)
                for row in shares
            ]
        return {
            "label": labels,
            **{f"p_{name}": shares[:, c] for c, name in enumerate(self.classes)},
        }

    def export_module(
        self, model: nn.Module
    ) -> tuple[nn.Module, Callable[[Batch], Tensor | dict[str, Tensor]]]:
        return Deployed(model, binary=not self.exclusive), lambda batch: batch["x"]

    def pictures(self, model: nn.Module, batch: Batch, sums: Sums) -> dict[str, np.ndarray]:
        if "confusion" not in sums:
            return {}
        found = {"confusion_matrix": draw_confusion(sums["confusion"].cpu().numpy(), self.classes)}
        if "bins" in sums:
            found["reliability"] = draw_reliability(
                sums["bins"].cpu().numpy(), sums["bin_shares"].cpu().numpy()
            )
        return found


def _some(names: list[str]) -> str:
    return ", ".join(names[:10]) + (
        f" and {len(names) - 10} more classes" if len(names) > 10 else ""
    )


class Deployed(nn.Module):
    """A classifier for export that returns {"logits", "probabilities"}, each (B, C) float32.

    by_step  the input is (B, T, channels), as sensor data are stored, not (B, channels, T)
    """

    def __init__(self, model: nn.Module, by_step: bool = False, binary: bool = False):
        super().__init__()
        self.model, self.by_step, self.binary = model, by_step, binary

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.model(x.transpose(1, 2) if self.by_step else x).float()
        return {
            "logits": logits,
            "probabilities": logits.sigmoid() if self.binary else logits.softmax(1),
        }


def average_precision(off: np.ndarray, on: np.ndarray) -> float:
    """Compute the average precision from (L,) counts of negatives and positives.

    Counts are by ascending probability. The result is scikit-learn's for probabilities rounded down
    to their level, and 0 without positives.
    """
    hits, wrong = np.cumsum(on[::-1]), np.cumsum(off[::-1])
    precision = hits / np.maximum(1, hits + wrong)
    return float((precision * on[::-1]).sum() / max(1, on.sum()))


def precision_recall_f1(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (C,) precision, recall and F1 from (C, C) counts [true, predicted].

    A value with denominator 0 is 0 (scikit-learn's default).
    """
    hits = np.diag(matrix).astype(np.float64)
    predicted, actual = matrix.sum(0), matrix.sum(1)

    def ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.divide(a, b, out=np.zeros_like(hits), where=b > 0)

    return ratio(hits, predicted), ratio(hits, actual), ratio(2 * hits, predicted + actual)


def macro_f1(matrix: np.ndarray) -> float:
    """Return the mean F1 of (C, C) counts [true, predicted].

    A class that neither occurs nor is predicted has no F1 and is excluded from the mean.
    """
    known = (matrix.sum(0) + matrix.sum(1)) > 0
    f1 = precision_recall_f1(matrix)[2]
    return float(f1[known].mean()) if known.any() else 0.0


def always(matrix: np.ndarray, predicted: int) -> np.ndarray:
    """Return the (C, C) counts [true, predicted] if each sample is predicted as one class."""
    counts = np.zeros_like(matrix)
    counts[:, predicted] = matrix.sum(1)
    return counts


def draw_confusion(matrix: np.ndarray, classes: list[str]) -> np.ndarray:
    """Draw (C, C) counts [true, predicted] as a uint8 picture (H, W, 3).

    Rows are the truth. The shade of a cell is its share of the row.
    """
    # Pillow comes with tensorboard; the first picture imports Pillow.
    from PIL import Image, ImageDraw, ImageFont

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
        upright = Image.new("L", (longest, 20))  # names exceed a cell's width, so draw them upwards
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
