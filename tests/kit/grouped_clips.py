"""Packed clips of videos that belong to groups, such as cages."""

import numpy as np

from formats.lab.clips import ClipsWriter


def write_clips(folder, groups):
    """Three trials of each of two videos of each group."""
    rng = np.random.default_rng(0)
    with ClipsWriter(folder, ["rest", "walk"], extra_columns=["group"]) as writer:
        for group in groups:
            for n in range(6):
                clip = rng.integers(0, 255, (5, 16, 16), dtype=np.uint8)
                writer.add(clip, video=f"{group}_{n % 2}.mp4", label=["rest", "walk"][n // 2 % 2], group=group)
    return str(folder)
