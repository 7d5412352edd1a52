"""Calibration: compare predicted probabilities with frequencies. Bins, a picture, a temperature."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BINS = 15


def bins_of(top: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Bin (B,) top probabilities and (B,) bool correctness.

    Returns (2, BINS) int64 counts and hits, and (BINS,) float64 sums of the probabilities. Bin m
    has probabilities above m / BINS, up to (m + 1) / BINS.
    """
    place = (top.double() * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
    # (B, BINS); a scatter has no fixed order of summation
    inside = place[:, None] == torch.arange(BINS, device=top.device)
    return torch.stack([inside.sum(0), (inside & right[:, None]).sum(0)]), (
        inside * top.double()[:, None]
    ).sum(0)


def ece(counts: np.ndarray, shares: np.ndarray) -> float:
    """Return the expected calibration error (Guo et al., ICML 2017).

    The error is the mean of |accuracy - confidence| over the bins, weighted by counts.

    counts  (2, BINS) counts and hits;   shares  (BINS,) sums of the top probabilities
    """
    total = int(counts[0].sum())
    return float(np.abs(counts[1] - shares).sum() / total) if total else float("nan")


def fit_temperature(
    logits: np.ndarray, labels: np.ndarray, binary: bool = False, steps: int = 50
) -> float:
    """Return the temperature T > 0 with the least cross-entropy of softmax(logits / T).

    The problem is convex in 1 / T and solved by Newton's method on 1 / T in float64.

    logits  (N, C);   labels  (N,) class numbers; with `binary` (sigmoids), labels are (N, C) of 1,
            0 and -1, and -1 is ignored

    Raises ValueError if no finite temperature is the best: every label is the most probable class.
    """
    z = np.asarray(logits, dtype=np.float64)
    if binary:  # sigmoid(z) is the softmax of (0, z)
        z, labels = z[labels >= 0], labels[labels >= 0].astype(np.int64)
        z = np.stack([np.zeros_like(z), z], 1)
    own = z[np.arange(len(z)), labels]
    if not (own < z.max(1)).any():
        raise ValueError("every label is the most probable one")
    beta = 1.0
    for _ in range(steps):
        powers = np.exp(beta * (z - z.max(1, keepdims=True)))
        p = powers / powers.sum(1, keepdims=True)
        mean = (p * z).sum(1)
        slope, bend = (mean - own).sum(), (p * (z - mean[:, None]) ** 2).sum()
        step = slope / bend if bend > 0 else 0.0
        # Change the temperature by at most a factor of four per step: with nearly certain
        # predictions, Newton's method overshoots.
        new = float(np.clip(beta - step, beta / 4, beta * 4))
        if abs(new - beta) <= 1e-12 * beta:
            break
        beta = new
    return 1.0 / beta


def draw_reliability(counts: np.ndarray, shares: np.ndarray, size: int = 360) -> np.ndarray:
    """Draw the accuracy by bin of the probability: uint8 (H, W, 3).

    Bars are blue, the gap to the diagonal is red. Below is the number of predictions in each bin.
    """
    # Pillow comes with tensorboard; the first picture imports Pillow.
    from PIL import Image, ImageDraw, ImageFont

    left, top, low = 52, 34, 60
    picture = Image.new("RGB", (left + size + 16, top + size + low + 52), "white")
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    pen.text(
        (8, 8),
        f"ECE {ece(counts, shares):.3f}  of {int(counts[0].sum())} predictions",
        fill="black",
        font=font,
    )
    width, base = size / BINS, top + size
    for m in range(BINS):
        x = left + m * width
        if not counts[0, m]:
            continue
        right, sure = counts[1, m] / counts[0, m], shares[m] / counts[0, m]
        lower, upper = sorted((base - size * right, base - size * sure))
        pen.rectangle(
            (x + 1, lower, x + width - 1, upper), fill=(244, 190, 180), outline=(214, 96, 77)
        )
        pen.rectangle((x + 1, base - size * right, x + width - 1, base), fill=(67, 147, 195))
        share = counts[0, m] / counts[0].max()
        pen.rectangle(
            (x + 1, base + 24 + low * (1 - share), x + width - 1, base + 24 + low),
            fill=(150, 150, 150),
        )
    pen.line((left, base, left + size, top), fill="black")
    pen.rectangle((left, top, left + size, base), outline=(120, 120, 120))
    for share in (0.0, 0.5, 1.0):
        pen.text(
            (left - 6, base - size * share), f"{share:g}", fill="black", font=font, anchor="rm"
        )
        pen.text(
            (left + size * share, base + 4), f"{share:g}", fill="black", font=font, anchor="ma"
        )
    pen.text(
        (left + size // 2, base + 28 + low),
        "probability of the prediction",
        fill="black",
        font=font,
        anchor="ma",
    )
    pen.text((left + 8, top + 8), "right", fill=(33, 102, 172), font=font)
    pen.text(
        (left + 8, top + 26),
        "to the diagonal: too sure, or not sure enough",
        fill=(214, 96, 77),
        font=font,
    )
    return np.asarray(picture)
