"""Depth maps in LeRobot 0.6's format: distances as 12-bit codes in a video of one channel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

CODES = 4096


@dataclass(frozen=True)
class Depth:
    """Coding of a camera's distances z, with LeRobot's defaults:

        code = round(4095 (f(z) - f(depth_min)) / (f(depth_max) - f(depth_min)))
        f(z) = log(z + shift), or z

    depth_min, depth_max, shift  in metres
    unit  "mm" or "m": unit of uncoded distances and of the dataset's statistics
    """

    depth_min: float = 0.01
    depth_max: float = 10.0
    shift: float = 3.5
    use_log: bool = True
    unit: str = "mm"

    @property
    def factor(self) -> int:
        """Return the millimetres per `unit`."""
        return 1000 if self.unit == "m" else 1

    def millimetres(self) -> np.ndarray:
        """Return (4096,) uint16, the distance of each code.

        As in LeRobot, distances are computed in float32 and then rounded.
        """
        low, high = self._ends(1)
        z = torch.arange(CODES, dtype=torch.float32) * ((high - low) / (CODES - 1)) + low
        z = (z.exp() - self.shift if self.use_log else z).clamp(self.depth_min, self.depth_max)
        return (z * 1000).round().clamp(0, 65535).numpy().astype(np.uint16)

    def codes(self, millimetres: np.ndarray) -> np.ndarray:
        """Convert distances of any shape to uint16 codes, clipped to the range."""
        low, high = self._ends(1000)
        z = millimetres.astype(np.float32)
        z = np.log(z + np.float32(1000 * self.shift)) if self.use_log else z
        return np.rint((z - low) / (high - low) * (CODES - 1)).clip(0, CODES - 1).astype(np.uint16)

    def _ends(self, scale: int) -> tuple[float, float]:
        """Return f(depth_min) and f(depth_max), in metres / scale."""
        low, high, shift = scale * self.depth_min, scale * self.depth_max, scale * self.shift
        return (math.log(low + shift), math.log(high + shift)) if self.use_log else (low, high)

    def about(self) -> dict[str, Any]:
        """Return the values for `depth_of`, in LeRobot's form of a feature's `info`."""
        own = asdict(self)
        return {"is_depth_map": True, "depth_unit": own.pop("unit")} | {
            f"video.{name}": n for name, n in own.items()
        }


def depth_of(raw: Mapping[str, Any]) -> Depth | None:
    """Return the distance coding of a feature of info.json; None for colours. Raises ValueError."""
    info = (raw.get("video_info") or {}) | (raw.get("info") or {})
    if not (info.get("is_depth_map") or info.get("video.is_depth_map")):
        return None
    given = {
        name: info.get(f"video.{name}") for name in ("depth_min", "depth_max", "shift", "use_log")
    }
    depth = Depth(
        **{n: v for n, v in (given | {"unit": info.get("depth_unit")}).items() if v is not None}
    )
    try:
        low, high = depth._ends(1)
        if depth.unit in ("m", "mm") and math.isfinite(low) and math.isfinite(high) and low < high:
            return depth
    except (TypeError, ValueError):
        pass
    raise ValueError(f"no range of depths: {depth}")
