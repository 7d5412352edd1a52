"""TensorBoard: the numbers of training and evaluation, pictures, and the HPARAMS tab."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

import numpy as np

from engine import config
from engine.run import Run


class Board:
    name = "TensorBoard"

    def __init__(self, folder: Path, run: Run, repeated: bool):
        folder.mkdir(exist_ok=True)
        # it purges whole steps
        self.folder, self.purge_step = folder, run.progress.step + (not repeated)
        self.config = config.to_dict(run.cfg)
        self.text = "" if run.progress.step else config.to_yaml(run.cfg)  # once
        self.monitored = f"val/{run.task.monitor}"
        self.seen: dict[str, float] = {}  # the last value of each

    @functools.cached_property
    def writer(self) -> Any:
        """Return TensorBoard's writer, made at the first log point because its import is slow."""
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self.folder), purge_step=self.purge_step)
        if self.text:
            writer.add_text("config", f"```yaml\n{self.text}```", 0)
        return writer

    def scalars(self, step: int, numbers: dict[str, float]) -> None:
        self.seen |= numbers
        self._write(step, [{"tag": tag, "simple_value": number} for tag, number in numbers.items()])

    def picture(self, step: int, name: str, picture: np.ndarray) -> None:
        """A clip is a GIF: `add_video` needs moviepy, or drops it silently."""
        data, _, (width, height) = encoded(picture)
        image = {"height": height, "width": width, "encoded_image_string": data}
        self._write(step, [{"tag": f"val/{name}", "image": image}])

    def _write(self, step: int, values: list[dict[str, Any]]) -> None:
        """Write one event for all values: SummaryWriter writes one each."""
        writer = self.writer.file_writer  # first: it loads the module below
        from tensorboard.compat.proto.summary_pb2 import Summary

        writer.add_summary(Summary(value=values), step)

    def sync(self) -> None:
        self.writer.flush()

    def close(self, status: str) -> None:
        """Write the config and the final metrics for the HPARAMS tab, in the same folder instead of
        a sub-run."""
        if status == "done" and self.monitored in self.seen:
            from torch.utils.tensorboard.summary import hparams

            flat = config.flatten(self.config)
            flat = {
                key: value if isinstance(value, (int, float)) else str(value)
                for key, value in flat.items()
            }
            # the tab finds them by tag
            results = {tag: self.seen[tag] for tag in (self.monitored, "val/loss")}
            for summary in hparams(flat, results):
                self.writer.file_writer.add_summary(summary)
        self.writer.close()

    def close_files(self) -> None:
        """Write what waits in TensorBoard's queue, and end its thread."""
        if "writer" in vars(self):
            self.writer.close()


def encoded(picture: np.ndarray) -> tuple[bytes, str, tuple[int, int]]:
    """Return (the file, its format, (width, height)): a GIF of what moves, (T, H, W[, 3]), else a
    PNG."""
    from PIL import Image

    moving = picture.ndim == 4 or (picture.ndim == 3 and picture.shape[-1] != 3)
    first, *rest = map(Image.fromarray, picture if moving else [picture])
    data, kind = io.BytesIO(), "GIF" if moving else "PNG"
    about = {"save_all": True, "append_images": rest, "duration": 100, "loop": 0} if moving else {}
    first.save(data, kind, **about)
    return data.getvalue(), kind, first.size
