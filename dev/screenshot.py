#!/usr/bin/env python3
"""A picture of TensorBoard as a browser shows a run: curves, and the pictures of the last
evaluation. Needs Chromium.

python dev/screenshot.py RUN docs/images/tensorboard.png
python dev/screenshot.py report.html docs/images/report.png
    the page of tools/report.py instead
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
CURVES = ("train/loss", "val/loss", "val/macro_f1", "val/action_l1", "val/success_rate")


@contextlib.contextmanager
def board(runs: Path) -> Iterator[str]:
    """A TensorBoard that shows all `runs` in a folder, on a free port, as its address."""
    options = ["--host", "127.0.0.1", "--port", "0", "--load_fast", "false"]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs), *options]
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as server,
    ):
        try:
            while not (found := re.search(r"http://[\d.]+:\d+/", _text(output))):
                if server.poll() is not None:
                    raise RuntimeError(f"TensorBoard ended: {_text(output)}")
                time.sleep(0.1)  # until it has printed where it is
            _wait_until_read(found[0])
            yield found[0]
        finally:
            server.terminate()


def _wait_until_read(address: str) -> None:
    """It reads the files while it serves, and doesn't print when it is through: until there is
    something, and a second later no more."""
    before, now = None, None
    while not now or now != before:
        time.sleep(1.0)
        before = now
        now = [
            newest(address, run, tag)
            for run, tags in query(address, "images").items()
            for tag in tags
        ]


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def get(address: str, path: str, **words: Any) -> bytes:
    with urllib.request.urlopen(
        f"{address}data/plugin/{path}?{urllib.parse.urlencode(words)}", timeout=60
    ) as answer:
        return bytes(answer.read())


def query(address: str, plugin: str) -> dict[str, Any]:
    """{run: {tag: about it}}, as the page requests them."""
    return dict(json.loads(get(address, f"{plugin}/tags")))


def newest(address: str, run: str, tag: str) -> bytes:
    """The file of a tag's newest picture."""
    query = json.loads(get(address, "images/images", run=run, tag=tag, sample=0))[-1]["query"]
    return get(address, "images/individualImage", **dict(urllib.parse.parse_qsl(query)))


def shoot(address: str, picture: Path, size: tuple[int, int] = (1680, 1000)) -> None:
    """Save what a browser shows with the curves and the pictures of the first run pinned."""
    (run, curves), (_, pictures) = (
        next(iter(query(address, plugin).items())) for plugin in ("scalars", "images")
    )
    cards: list[dict[str, Any]] = [
        {"plugin": "scalars", "tag": tag} for tag in CURVES if tag in curves
    ]
    whose = {"runId": f"defaultExperimentId/{run}", "sample": 0}
    cards += [{"plugin": "images", "tag": tag, **whose} for tag in sorted(pictures)]
    pinned = urllib.parse.quote(json.dumps(cards))
    page = f"{address}?pinnedCards={pinned}&smoothing=0&forceSVG=true#timeseries"
    shoot_page(page, picture, size)


def shoot_page(page: str, picture: Path, size: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory(prefix="chromium_", ignore_cleanup_errors=True) as profile:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ]
        options += [
            f"--window-size={size[0]},{size[1]}",
            "--virtual-time-budget=60000",
            f"--screenshot={picture}",
        ]
        subprocess.run([CHROMIUM, *options, page], check=True, timeout=300, capture_output=True)


def main(argv: list[str]) -> int:
    if len(argv) != 2 or not CHROMIUM:
        print(
            __doc__ if CHROMIUM else "error: no Chromium here: apt install chromium",
            file=sys.stderr,
        )
        return 2
    shown, picture = Path(argv[0]), Path(argv[1]).resolve()
    if shown.suffix == ".html":
        shoot_page(shown.resolve().as_uri(), picture, (1280, 2950))
        _with_few_colours(picture)
    else:
        with board(shown) as address:
            shoot(address, picture)
    return 0


def _with_few_colours(path: Path) -> None:
    """Rewrite a picture with 64 colours, at three quarters of its size, for the repository."""
    from PIL import Image  # comes with tensorboard

    picture = Image.open(path).convert("RGB")
    small = picture.resize(
        (picture.width * 3 // 4, picture.height * 3 // 4), Image.Resampling.LANCZOS
    )
    small.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
