"""Write the streams that a task's `datasets` returns to shards, which give a sample by its number.

    python tools/write_shards.py mine.py --to data/mine     # the words of the training, and --to
    python tools/write_shards.py mine.py --to data/mine --limit 100000     # of an endless stream

A stream is anything to iterate over that gives samples: a torch IterableDataset, a WebDataset
pipeline, load_dataset(..., streaming=True), a generator. The stream runs once, in one process: a
stream that is divided among processes gives all of its samples. A shard ends at --shard-mb or
--shard-samples. A stopped command continues if started again: the shards that are there are
compared with the stream. Samples that a stream draws or augments at random are written as drawn.

Then let `datasets` return stored("data/mine"), from formats.shards.stream import stored.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

import tasks
from engine import config
from engine.errors import LockstepError
from engine.files.atomic import write_json
from formats.shards import stream
from formats.shards.files import INDEX
from tools.arguments import Parser, add_json, printed, whole_number
from tools.lab import index_shards

SETS = ("train", "val")


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the words of the training."""
    parser = Parser(
        prog="write_shards.py",
        usage="write_shards.py TASK [key=value ...] --to FOLDER",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    defaults = stream.Limits()
    add("--to", type=Path, required=True, metavar="FOLDER", help="folder of the shards")
    add(
        "--shard-mb",
        type=whole_number(1),
        default=defaults.bytes // 1_000_000,
        metavar="MB",
        help=f"size at which a shard ends (default: {defaults.bytes // 1_000_000})",
    )
    add(
        "--shard-samples",
        type=whole_number(1),
        default=defaults.samples,
        metavar="N",
        help=f"most samples of a shard (default: {defaults.samples})",
    )
    add(
        "--limit",
        type=whole_number(1),
        default=0,
        metavar="N",
        help="samples to take from each stream (default: all)",
    )
    add_json(parser)
    return parser.parse_known_args(argv)


def write(options: argparse.Namespace, words: list[str]) -> str:
    """Write and index both sets. Return the text to print."""
    folder = options.to
    if (folder / stream.SUMMARY).exists():
        raise LockstepError(
            "the shards are complete already", str(folder), "delete the folder, or give another"
        )
    cfg = config.parse(words, tasks.load).cfg
    train_set, val_set = tasks.load(cfg.task)(cfg).datasets()
    given = {"train": train_set, "val": val_set}
    streams = {name: _stream(name, given[name]) for name in SETS if given[name] is not None}
    limits = stream.Limits(options.shard_mb * 1_000_000, options.shard_samples, options.limit)
    lines = []
    for name, samples in streams.items():
        place = folder / name
        if not (place / INDEX).exists():
            progress = tqdm(samples, f"Writing {name}", unit=" samples", disable=None, leave=False)
            stream.write(progress, place, limits)
            lines.append(index_shards.index(index_shards.parse([str(place)])))
    write_json(folder / stream.SUMMARY, {name: name in streams for name in SETS})
    lines.append(
        f"in the task: `return stored({str(folder)!r})` from `datasets`, with "
        "`from formats.shards.stream import stored`"
    )
    return "\n".join(lines)


def _stream(name: str, dataset: Any) -> Iterable[Any]:
    """Return what to iterate over. Raises LockstepError for a set without a stream."""
    if isinstance(dataset, DataLoader):
        dataset = dataset.dataset  # its batches are no samples
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if hasattr(dataset, "__iter__"):
            return dataset
        raise LockstepError(
            f"the {name} set is a {type(dataset).__name__}, which gives no sample",
            "the task's `datasets`",
            "return something to iterate over",
        )
    return (dataset[number] for number in range(len(dataset)))


def main(argv: list[str] | None = None) -> int:
    options, words = parse(argv)
    return printed(lambda: write(options, words), options.to, options.json)
