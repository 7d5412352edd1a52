"""Write the files of a LeRobot dataset of version 3.0 in the form of LeRobot 0.6.

The files are tables, info.json and statistics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from formats.robots import encoders
from formats.robots.depth import Depth
from formats.robots.lerobot import BOOKKEEPING, FILES, QUANTILES, Stats, aggregate, need

NUMBERS = ("float32", "float64", "int32", "int64", "bool")
PICTURES = ("image", "video", "depth")
OWN = {name: ("float32" if name == "timestamp" else "int64", (1,)) for name in BOOKKEEPING}
FILES_PER_CHUNK = 1000

Declared = dict[str, tuple[str, tuple[int, ...]]]
"""{feature: (dtype, shape of one frame)}; "depth" is a video of one channel."""


def place(number: int, per_chunk: int = FILES_PER_CHUNK) -> dict[str, int]:
    return {"chunk_index": number // per_chunk, "file_index": number % per_chunk}


# ---- tables
# --------------------------------------------------------------------------------------------------


def schema(features: Declared) -> Any:
    """Return the schema of data/ with the metadata types for the package `datasets`."""
    pa = need("pyarrow")
    fields: dict[str, Any] = {}
    known: dict[str, Any] = {}
    for name, (dtype, shape) in features.items():
        if dtype in ("video", "depth"):
            continue
        if dtype == "image":
            known[name] = {"_type": "Image"}
            fields[name] = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
            continue
        known[name] = {"dtype": dtype, "_type": "Value"}
        fields[name] = pa.type_for_alias(dtype)
        if len(shape) > 1:
            known[name] = {"shape": list(shape), "dtype": dtype, "_type": f"Array{len(shape)}D"}
            for _ in shape:
                fields[name] = pa.list_(fields[name])
        elif shape != (1,):
            known[name] = {"feature": known[name], "length": shape[0], "_type": "Sequence"}
            fields[name] = pa.list_(fields[name], shape[0])
    return pa.schema(
        fields.items(), metadata={"huggingface": json.dumps({"info": {"features": known}})}
    )


def table(columns: Mapping[str, np.ndarray], features: Declared) -> Any:
    """Return the rows of an episode, pictures as PNG."""
    pa, arrays, wanted = need("pyarrow"), [], schema(features)
    for field in wanted:
        values = columns[field.name]
        if pa.types.is_struct(field.type):
            pngs = [
                {"bytes": encoders.png(it), "path": f"frame-{n:06d}.png"}
                for n, it in enumerate(values)
            ]
            arrays.append(pa.array(pngs, type=field.type))
        elif pa.types.is_fixed_size_list(field.type):
            arrays.append(
                pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
            )
        elif pa.types.is_list(field.type):
            arrays.append(pa.array(values.tolist(), type=field.type))
        else:
            arrays.append(pa.array(values.reshape(-1), type=field.type))
    return pa.Table.from_arrays(arrays, schema=wanted)


def numbers(column: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Convert a column of `table` to (T, *shape)."""
    array = column.combine_chunks()
    while hasattr(array, "flatten") and need("pyarrow").types.is_nested(array.type):
        array = array.flatten()
    return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(-1, *shape)


def write_episodes(path: Path, rows: list[dict[str, Any]], like: Any = None) -> None:
    """Write rows of meta/episodes, with the columns of the schema `like` if given."""
    pa, pq = need("pyarrow"), need("pyarrow.parquet")
    if like is not None:
        rows = [{name: row.get(name) for name in like.names} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=like), path, compression="snappy")


def write_tasks(path: Path, tasks: Sequence[str]) -> None:
    """Write the table in pandas' format, because LeRobot reads the texts from the index."""
    pa, pq = need("pyarrow"), need("pyarrow.parquet")
    content = pa.table(
        {
            "task_index": pa.array(range(len(tasks)), pa.int64()),
            "task": pa.array(tasks, pa.string()),
        }
    )
    columns: list[dict[str, Any]] = [
        {
            "name": "task_index",
            "field_name": "task_index",
            "pandas_type": "int64",
            "numpy_type": "int64",
        },
        {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object"},
    ]
    none: dict[str, Any] = {
        "name": None,
        "field_name": None,
        "pandas_type": "unicode",
        "numpy_type": "object",
    }
    metadata = {
        "index_columns": ["task"],
        "column_indexes": [none | {"metadata": {"encoding": "UTF-8"}}],
        "columns": [column | {"metadata": None} for column in columns],
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.2.0",
    }
    pq.write_table(content.replace_schema_metadata({"pandas": json.dumps(metadata)}), path)


# ---- info.json
# --------------------------------------------------------------------------------------------------


def info(
    fps: float,
    features: Declared,
    names: Mapping[str, Any],
    robot_type: str,
    codecs: Mapping[str, str],
) -> dict[str, Any]:
    """Return info.json of a dataset without episodes; `codecs` are the codecs of the videos."""
    about: dict[str, Any] = {}
    for name, (dtype, shape) in features.items():
        about[name] = {"dtype": dtype, "shape": list(shape), "names": names.get(name)}
        if dtype in PICTURES:
            shown = {
                "dtype": "image" if dtype == "image" else "video",
                "shape": [*shape[1:], shape[0]],
            }
            about[name] |= shown | {"names": ["height", "width", "channels"]}
        if name in codecs:
            video = {"video.height": shape[1], "video.width": shape[2], "video.fps": int(fps)}
            video |= {"video.channels": shape[0], "has_audio": False} | encoders.about(codecs[name])
            about[name]["info"] = video | (
                Depth().about() if dtype == "depth" else {"is_depth_map": False}
            )
    return {
        "codebase_version": "v3.0",
        "fps": int(fps) if fps == int(fps) else fps,
        "features": about,
        "total_episodes": 0,
        "total_frames": 0,
        "total_tasks": 0,
        "chunks_size": FILES_PER_CHUNK,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "data_path": FILES["data_path"],
        "video_path": FILES["video_path"] if codecs else None,
        "robot_type": robot_type or None,
        "splits": {},
    }


def flat(stats: Stats) -> dict[str, dict[str, Any]]:
    """Return statistics as values for JSON."""
    return {
        name: {key: np.asarray(value).tolist() for key, value in one.items()}
        for name, one in stats.items()
    }


# ---- statistics
# --------------------------------------------------------------------------------------------------


def levels(pictures: np.ndarray, count: int) -> np.ndarray:
    """Count the levels of (T, C, H, W) whole numbers below `count`: (C, count).

    The counts cover about a hundred pictures.
    """
    some = pictures[:: -(-len(pictures) // 100)]
    return np.stack(
        [np.bincount(some[:, c].reshape(-1), minlength=count) for c in range(pictures.shape[1])]
    )


def picture_stats(counts: np.ndarray, values: np.ndarray, frames: int) -> dict[str, np.ndarray]:
    """Return statistics (C, 1, 1) from (C, L) counts of levels.

    values  (L,) ascending values of the levels
    """
    total = counts.sum(1)
    mean = counts @ values / total
    below = np.cumsum(counts, 1) / total[:, None]  # (C, L)
    stats = {"mean": mean, "std": np.sqrt((counts * (values - mean[:, None]) ** 2).sum(1) / total)}
    stats |= {
        "min": values[(counts > 0).argmax(1)],
        "max": values[::-1][(counts[:, ::-1] > 0).argmax(1)],
    }
    stats |= {name: values[(below >= share).argmax(1)] for name, share in QUANTILES.items()}
    return {name: value.reshape(-1, 1, 1) for name, value in stats.items()} | {
        "count": np.array([frames])
    }


def together(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Combine the statistics of one feature over several episodes.

    As in LeRobot, quantiles are means weighted by count.
    """
    stats = aggregate(parts)
    count = np.array([float(np.asarray(part["count"]).reshape(-1)[0]) for part in parts])
    known = [name for name in QUANTILES if all(name in part for part in parts)]
    return stats | {
        n: np.tensordot(count / count.sum(), np.stack([part[n] for part in parts]), 1)
        for n in known
    }
