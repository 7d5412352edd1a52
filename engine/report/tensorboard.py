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
    """The sink for TensorBoard.

    purge_step  TensorBoard drops earlier events from this step on: it drops whole steps only
    text        the config of a new run as YAML; empty for a resumed run
    seen        last value of each number, by tag
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, run: Run, repeated: bool):
        folder.mkdir(exist_ok=True)
        step = run.progress.step
        self.folder = folder
        self.purge_step = step if repeated else step + 1
        self.config = config.to_dict(run.cfg)
        self.text = "" if step else config.to_yaml(run.cfg)
        self.monitored = f"val/{run.task.monitor}"
        self.seen: dict[str, float] = {}

    @functools.cached_property
    def writer(self) -> Any:
        """Return TensorBoard's writer. The import is slow: at the first log point."""
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self.folder), purge_step=self.purge_step)
        if self.text:
            writer.add_text("config", f"```yaml\n{self.text}```", 0)
        return writer

    def scalars(self, step: int, numbers: dict[str, float]) -> None:
        """Write numbers by tag."""
        self.seen |= numbers
        self._write(step, [{"tag": tag, "simple_value": number} for tag, number in numbers.items()])

    def picture(self, step: int, name: str, picture: np.ndarray) -> None:
        """Write a picture or a clip. A clip is a GIF: `add_video` needs moviepy, or drops the clip
        silently."""
        data, _, (width, height) = encoded(picture)
        image = {"height": height, "width": width, "encoded_image_string": data}
        self._write(step, [{"tag": f"val/{name}", "image": image}])

    def _write(self, step: int, values: list[dict[str, Any]]) -> None:
        """Write an event with all values. SummaryWriter would write an event for each value."""
        writer = self.writer.file_writer  # first: it loads the module below
        from tensorboard.compat.proto.summary_pb2 import Summary

        writer.add_summary(Summary(value=values), step)

    def sync(self) -> None:
        """Write TensorBoard's queue to the file."""
        self.writer.flush()

    def close(self, status: str) -> None:
        """Close the file. For a done run first write the config and the final metrics.

        The HPARAMS tab shows both. SummaryWriter would write both to a folder of their own.
        """
        if status == "done" and self.monitored in self.seen:
            self._write_hparams()
        self.writer.close()

    def _write_hparams(self) -> None:
        from torch.utils.tensorboard.summary import hparams

        settings = config.flatten(self.config)
        for key, value in settings.items():
            if not isinstance(value, (int, float)):
                settings[key] = str(value)
        # the tab finds the metrics by tag
        results = {tag: self.seen[tag] for tag in (self.monitored, "val/loss")}
        for summary in hparams(settings, results):
            self.writer.file_writer.add_summary(summary)

    def close_files(self) -> None:
        """Write TensorBoard's queue, and end TensorBoard's thread, if there is a writer."""
        if "writer" in vars(self):
            self.writer.close()


def encoded(picture: np.ndarray) -> tuple[bytes, str, tuple[int, int]]:
    """Return (file, format, (width, height)): a GIF of a clip (T, H, W[, 3]), else a PNG."""
    from PIL import Image

    data = io.BytesIO()
    if picture.ndim == 2 or (picture.ndim == 3 and picture.shape[-1] == 3):
        image = Image.fromarray(picture)
        image.save(data, "PNG")
        return data.getvalue(), "PNG", image.size
    first, *rest = map(Image.fromarray, picture)
    first.save(data, "GIF", save_all=True, append_images=rest, duration=100, loop=0)
    return data.getvalue(), "GIF", first.size
