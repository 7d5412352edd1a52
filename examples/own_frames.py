"""Clone a policy from a robot's recordings in shards, larger than a disk. Fork this file.

    python tools/index_shards.py DATASET/data     # once; pictures must be in parquet, not in videos
    python train.py examples/own_frames.py shards.root=DATASET/data
    torchrun --standalone --nproc_per_node=2 train.py examples/own_frames.py
        shards.root=https://host/DATASET/data

The shards are LeRobot's parquet files. A row is a frame, and a shard is a file of frames: an
episode is in one file, in order. The robot task (`python train.py robot`) reads datasets on a disk,
also with videos. Needed packages: pyarrow, and Pillow for pictures.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine import contract
from engine.config import option, section
from engine.contract import Batch, LockstepError, Loss, Sums
from formats.shards import RESUMABLE, Options, Shards, pair


@dataclass(frozen=True)
class Model:
    chunk: int = option(8, "actions that are predicted at once", low=1)
    width: int = option(128, "channels", low=8)


@dataclass
class Settings(contract.Settings):
    shards: Options = section(Options)
    model: Model = section(Model)


class Frames(Shards):
    """A dataset of frames. A sample is a frame and the actions of the next `chunk` frames.

    Actions beyond the end of the episode are masked.
    """

    chunk = 8

    def __getitems__(self, indices: list[int]) -> Batch:
        first = np.asarray(indices)
        # (B,) the end of the shard, where the last episode of the shard ends
        end = self.ends[np.searchsorted(self.ends, first, side="right")]
        numbers = np.minimum(first[:, None] + np.arange(self.chunk), end[:, None] - 1)  # (B, T)
        wanted = np.unique(numbers)
        rows = dict(zip(wanted.tolist(), self.read(wanted.tolist()), strict=True))
        chunks = [[rows[n] for n in each] for each in numbers.tolist()]
        beyond = first[:, None] + np.arange(self.chunk) >= end[:, None]
        other = np.array(
            [
                [row["episode_index"] != chunk[0]["episode_index"] for row in chunk]
                for chunk in chunks
            ]
        )
        batch = {
            "state": torch.tensor([chunk[0]["observation.state"] for chunk in chunks]),
            "action": torch.tensor([[row["action"] for row in chunk] for chunk in chunks]),
            "mask": torch.from_numpy(~(beyond | other)).float(),
        }
        pictures = [name for name in chunks[0][0] if name.startswith("observation.images.")]
        return batch | {
            name: torch.stack([picture(chunk[0][name]) for chunk in chunks]) for name in pictures
        }


def picture(cell: dict[str, Any]) -> Tensor:
    """Return (3, H, W) uint8 of LeRobot's cell of a picture."""
    from PIL import Image

    return torch.from_numpy(np.array(Image.open(io.BytesIO(cell["bytes"])).convert("RGB"))).permute(
        2, 0, 1
    )


class Task(contract.Task):
    Settings = Settings
    defaults = {"epochs": 20, "batch_size": 32, "optim.lr": 1e-3}
    resumable_keys = tuple(f"shards.{key}" for key in RESUMABLE)

    def datasets(self) -> tuple[Any, Any]:
        sets = pair(self.cfg.shards, kind=Frames)
        for each in filter(None, sets):
            each.chunk = self.cfg.model.chunk
        self.text, row = sets[0].summary(), sets[0].read([0])[0]
        if missing := {"observation.state", "action", "episode_index"} - row.keys():
            what = f"the rows have no {', '.join(sorted(missing))}"
            raise LockstepError(
                what, self.cfg.shards.root, "give the folder `data` of a LeRobot dataset"
            )
        self.sizes = {
            "state": len(row["observation.state"]),
            "action": len(row["action"]),
            "cameras": [name for name in row if name.startswith("observation.images.")],
        }
        return sets

    def summary(self) -> str:
        return self.text

    def metadata(self) -> dict[str, Any]:
        return self.sizes

    def load_metadata(self, metadata: dict[str, Any]) -> None:
        self.sizes = metadata

    def model(self) -> nn.Module:
        return Policy(**self.sizes, chunk=self.cfg.model.chunk, width=self.cfg.model.width)

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        total, weight = self._errors(net, batch)
        return Loss(total, weight)

    def score(self, model: nn.Module, batch: Batch) -> Sums:
        total, weight = self._errors(model, batch)
        return Sums(
            total=total.double(), weight=weight.double(), count=torch.tensor(len(batch["state"]))
        )

    def report(self, sums: Sums) -> dict[str, float]:
        return {"loss": float(sums["total"] / sums["weight"])}

    def _errors(self, net: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the total and the weight of a mean over unmasked actions.

        The engine divides both sums.
        """
        errors = (net(contract.inputs(batch)) - batch["action"]).abs().mean(2)  # (B, T)
        return (errors * batch["mask"]).sum(), batch["mask"].sum()


class Policy(nn.Module):
    """YOUR MODEL goes here."""

    def __init__(self, state: int, action: int, cameras: list[str], chunk: int, width: int):
        super().__init__()
        self.cameras, self.shape = cameras, (chunk, action)
        sees = [
            nn.Conv2d(3, 16, 5, 4),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        ]
        self.eyes = nn.ModuleList([nn.Sequential(*sees) for _ in cameras[:1]])
        width_in = state + len(cameras) * 32 * 16
        self.acts = nn.Sequential(
            nn.Linear(width_in, width), nn.ReLU(), nn.Linear(width, chunk * action)
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return (B, T, A) for {state (B, S), pictures (B, 3, H, W) uint8}."""
        seen = [self.eyes[0](batch[name].float() / 255 - 0.5) for name in self.cameras]
        return self.acts(torch.cat([batch["state"], *seen], 1)).unflatten(1, self.shape)
