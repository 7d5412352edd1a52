"""Pair the names of videos in tables with files.

A name and a file belong together if both are called alike without the ending. Of several files, the
folders in the name decide, and then the ending:

    cam1/mouse.mp4         is v/cam1/mouse.mp4, and never v/cam2/mouse.mp4
    D:\\exp\\cam1\\mouse.mp4  a path of another computer: the file with the most folders in common
    mouse.mp4              is mouse.mp4 beside mouse.avi; unclear for two files in two folders
    ./mouse.mp4            is the file in the folder of videos itself
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from formats.lab.videos import SUFFIXES

ANY_FOLDER = "--any-folder"
"""The option of the tools for names whose folders do not count."""

SCORER = "DLC_|DeepCut_|_superanimal_"
"""How DeepLabCut names a network in the name of a file."""

NO_VIDEOS = (".csv", ".tsv", ".txt", ".xlsx", ".h5", ".slp", ".json", ".npy", ".npz", ".mat")
"""Endings of labels and tracks, which may be called like their video."""

OTHER_ENDINGS = tuple(
    ".264 .265 .dav .divx .dv .f4v .gif .h264 .h265 .hevc .insv .lrv .m2v .mjpeg .mjpg .mod .mxf "
    ".ogm .qt .rm .seq .tif .tiff .tod .vob .y4m".split()
)
"""Endings of videos that are read only where a name has the ending, too."""

MOST_LISTED = 4


class Folders(Enum):
    """How the folders in names count.

    FIT     a name excludes a file in other folders; a path of another computer does not
    PREFER  a name excludes no file: tracks lie elsewhere than their videos
    IGNORE  folders do not count
    """

    FIT = 1
    PREFER = 2
    IGNORE = 3


class Named(NamedTuple):
    """A video as a table names it.

    name    with or without folders and ending
    folder  subfolder of the file with the name; it decides where the name has no folder
    """

    name: str
    folder: str = ""


class Fit(NamedTuple):
    """How well a name fits a file; a larger fit is better.

    exact    the name is the path below the folder of videos
    folders  folders in common, from the end of both paths
    beside   folders that the file with the name and the video have in common
    ending   the endings are equal, or one of both has none
    """

    exact: bool
    folders: int
    beside: int
    ending: bool


def stem_of(name: str) -> str:
    """Return the name of a video without folder and ending: C:\\mice\\a.b.mp4 -> a.b

    A file of tracks stands for its video: aDLC_resnet50_miceJan1shuffle1_100000.csv -> a
    """
    last = _steps(name)[-1]
    stem, ending = os.path.splitext(last)
    if ending.lower() in (".csv", ".h5"):
        return re.split(SCORER, stem, maxsplit=1)[0] or last
    return stem if ending.lower() in SUFFIXES else last


def videos_in(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Return the videos in a folder and its subfolders, by name.

    names  of videos in labels; a file of the same name is a video, whatever its ending is
    """
    named = {_steps(name)[-1] for name in names}
    found = []
    for path in sorted(folder.rglob("*")):
        is_named = path.name in named and path.suffix.lower() not in NO_VIDEOS and path.is_file()
        if path.suffix.lower() in SUFFIXES or is_named:
            found.append(path)
    return found


def cure_of_ending(name: str, folder: Path) -> str:
    """Return how to make a video of a file that has another ending; empty without such a file."""
    stem = stem_of(name)
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in OTHER_ENDINGS and stem in (path.stem, path.name):
            what = f"{path.name} is there, and its ending is not read: "
            return what + f"ffmpeg -i {path} -c copy {path.with_suffix('.mp4')}"
    return ""


def pair(
    names: Sequence[Named], files: Sequence[Path], root: Path, folders: Folders = Folders.FIT
) -> list[list[Path]]:
    """Return the files of each name: one, none, or several that the name does not distinguish.

    files  videos, or files of tracks by the name of their video
    root   folder of the files
    Of two names of one file, a name that contradicts the file gives way: D:\\cam2\\mouse.mp4 has no
    file where D:\\cam1\\mouse.mp4 has cam1/mouse.mp4.
    """
    called: dict[str, list[Path]] = {}
    for file in files:
        called.setdefault(stem_of(file.name), []).append(file)
    fits = []
    for named in names:
        of_name = {
            file: fit_of(named, file, root, folders) for file in called.get(stem_of(named.name), [])
        }
        fits.append({file: fit for file, fit in of_name.items() if fit is not None})
    claims: dict[Path, Fit] = {}
    for file, fit in itertools.chain.from_iterable(of_name.items() for of_name in fits):
        claims[file] = max(fit, claims.get(file, fit))
    return [_best(named, of_name, claims) for named, of_name in zip(names, fits, strict=True)]


def fit_of(named: Named, file: Path, root: Path, folders: Folders = Folders.FIT) -> Fit | None:
    """Return how well a name fits a file of the same stem; None if the name excludes the file."""
    stated = folders_of(named.name)
    is_below_root = named.name.startswith("./")
    exact = (bool(stated) or is_below_root) and _is_at(named.name, root, file)
    common = _common_folders(stated, file)
    must_fit = folders is Folders.FIT and not is_absolute(named.name)
    if must_fit and not exact and (is_below_root or common < len(stated)):
        return None
    if folders is Folders.IGNORE:
        common = 0
    beside = 0
    if not stated and not is_below_root:
        beside = _common_folders(folders_of(f"{named.folder}/x"), file)
    return Fit(exact, common, beside, _has_ending_of(named.name, file))


def _best(named: Named, fits: Mapping[Path, Fit], claims: Mapping[Path, Fit]) -> list[Path]:
    if not fits:
        return []
    best = max(fits.values())
    files = [file for file, fit in fits.items() if fit == best]
    contradicts = not best.ending or best.folders < len(folders_of(named.name))
    if len(files) == 1 and contradicts and claims[files[0]] > best:
        return []
    return files


def is_absolute(name: str) -> bool:
    """Return whether a name is a whole path, of this computer or of another one."""
    return re.match(r"[\\/]|[A-Za-z]:|file:", name) is not None


def folders_of(name: str) -> list[str]:
    """Return the folders in a name, in lower case: D:\\Exp\\cam1\\a.mp4 -> exp, cam1"""
    name = re.sub(r"^(file:)?[\\/]*([A-Za-z]:)?", "", name)
    folders: list[str] = []
    for step in _steps(name)[:-1]:
        if step == "..":
            folders = folders[:-1]
        elif step not in ("", "."):
            folders.append(step.lower())
    return folders


def _steps(name: str) -> list[str]:
    return re.split(r"[\\/]", name)


def _is_at(name: str, root: Path, file: Path) -> bool:
    """Return whether a name is the path of a file below a folder."""
    below = [step for step in _steps(name) if step not in ("", ".")]
    return not is_absolute(name) and root.joinpath(*below).absolute() == file.absolute()


def _common_folders(folders: Sequence[str], file: Path) -> int:
    """Return the number of last folders that are those of the file, also behind a link."""
    counts = []
    for path in (file.absolute(), file.resolve()):
        own = [part.lower() for part in path.parts[:-1]]
        pairs = zip(reversed(folders), reversed(own), strict=False)
        counts.append(len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]))
    return max(counts)


def _has_ending_of(name: str, file: Path) -> bool:
    endings = [os.path.splitext(each)[1].lower() for each in (_steps(name)[-1], file.name)]
    known = {ending for ending in endings if ending in SUFFIXES}
    return len(known) < 2


def several_called(name: str, files: Sequence[Path], root: Path) -> str:
    """Return the words for several files that a name does not distinguish."""
    shown = [str(file.relative_to(root)) for file in sorted(files)]
    more = ""
    if len(shown) > MOST_LISTED:
        more = ", ..."
    listed = ", ".join(shown[:MOST_LISTED])
    return f"{len(files)} videos called {stem_of(name)} in {root}: {listed}{more}"


OF_VIDEOS = "--videos {folder}"
OF_FILE = "give {file} alone"
OF_FOLDER = "give the folder {folder} alone"
"""How a command takes one of several files of one name."""


def cure_of_several(name: str, files: Sequence[Path], root: Path, way: str) -> str:
    """Return how to distinguish files.

    name  as a table has it; empty for a table whose file name is the name of the video
    way   OF_VIDEOS, OF_FILE or OF_FOLDER
    """
    first, second = sorted(files)[:2]
    cures = []
    if name:
        paths = " or ".join(_written(file, root) for file in (first, second))
        cures.append(f"write {paths} in place of {name}")
    alone = [file for file in sorted(files) if way == OF_FILE or _is_alone(file, files)]
    if alone:
        cures.append(way.format(file=alone[0], folder=alone[0].parent))
    return ", or ".join(cures) or f"leave one of them in {root}"


def _written(file: Path, root: Path) -> str:
    below = file.relative_to(root)
    return str(below) if len(below.parts) > 1 else f"./{below}"


def _is_alone(file: Path, files: Sequence[Path]) -> bool:
    """Return whether no other one of the files is in the folder of a file or below."""
    return not any(other != file and file.parent in other.parents for other in files)
