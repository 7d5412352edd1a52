"""Rows in data/ that the table of episodes does not name.

They are not used, and one line names them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from engine.errors import few

Numbers = Collection[int]
"""Values of episode_index."""


def describe(
    root: Path,
    files: Mapping[int, Path],
    found: Mapping[Path, Numbers],
    read_numbers: Callable[[Path], Numbers],
) -> str:
    """Return a sentence about all rows that the table does not name; empty if there are none.

    files         {episode: its file}, of the table
    found         {file: episodes of its rows} of the files that were read
    read_numbers  reads the episodes of another file
    """
    named = {*files.values()}
    others = [path for path in _tables(root / "data") if path not in named]
    rows_of = dict(found) | {path: read_numbers(path) for path in others}
    parts: list[str] = []
    for path, numbers in sorted(rows_of.items()):
        parts += _of_file(path.relative_to(root), path, numbers, files)
    if not parts:
        return ""
    return f"{few(parts)}: not used; write the table again, or remove these rows"


def _tables(folder: Path) -> Iterator[Path]:
    """Yield the tables below a folder. A name with a dot in front is no data of the dataset."""
    for path in sorted(folder.rglob("*.parquet")):
        if not path.name.startswith("."):
            yield path


def _of_file(name: Path, path: Path, numbers: Numbers, files: Mapping[int, Path]) -> Iterator[str]:
    """Yield a text for the rows of a file that are of no episode, or of one with another file."""
    lost = [str(e) for e in sorted(numbers) if e not in files]
    double = [str(e) for e in sorted(numbers) if e in files and files[e] != path]
    if lost:
        yield f"{_episodes(lost)} in {name} but not in the table of episodes"
    if double:
        yield f"{_episodes(double)} in {name}, while the table names another file"
    if not numbers:
        yield f"{name} is not in the table of episodes"


def _episodes(numbers: list[str]) -> str:
    if len(numbers) == 1:
        return f"episode {numbers[0]} is"
    return f"episodes {few(numbers)} are"
