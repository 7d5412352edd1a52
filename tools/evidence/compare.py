"""Find where two runs part: from what differs around them to the first module whose output has
other bits.

python tools/compare.py RUN RUN                       config, code, data, machine, log, weights;
                                                      then one step of both
python tools/compare.py RUN RUN --step 40             another step than the first that differs
python tools/compare.py one.pt other.pt               two checkpoints: tensors, numbers, a single
                                                      bit
python tools/compare.py one/record_step_1.npz other/record_step_1.npz
    what a step has computed on two machines

A and B are folders of runs, checkpoints, or records, which a training with record=N writes. The
step is taken again, by both runs, from the last checkpoint before it or from the seed, with this
checkout, on this machine and on as many processes as the run had, in a temporary folder; each ends
with an evaluation. Where the runs are of other code or other machines, give each record=N there,
and compare the two small files. Exit code 0: the same bits; 1: they differ; 7: not known, because
one lacks lines of its log, a checkpoint, digests of its weights, or the last steps of the other.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch import Tensor
from tqdm import tqdm

from engine import config, errors
from engine.data.batches import tree_leaves
from engine.environment import environment_of
from engine.errors import LockstepError, amount
from engine.files import archive, run_folder, weights
from engine.files.atomic import write_atomically
from engine.files.store import Checkpoints, check_files
from plugins import resilience as survive
from plugins.resilience import status
from tools.arguments import NOT_KNOWN
from tools.evidence import records
from tools.machine import cards
from tools.running import train_in
from tools.use.evaluate import TRUST, aligned, of_run

TIMES = ("event", "step", "time_s", "samples_per_s", "data_wait_share")
OF_THE_STEP = ("digest", "grad_norm", "lr", "samples", "epoch")
"""Entries of the log that are of no account; and those of the last step alone, the others since the
last log point."""

SAME, DIFFER, UNKNOWN = "same", "differ", "not known"

FEW = 3
"""Numbers of a tensor that are named one by one."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="compare.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "a", metavar="A", type=Path, help="folder of a run, a checkpoint, or a record of a step"
    )
    parser.add_argument("b", metavar="B", type=Path, help="the other")
    parser.add_argument(
        "--step",
        type=int,
        default=0,
        help="the step that is taken again; default: the first to differ",
    )
    parser.add_argument("--no-replay", action="store_true", help="take no step: only what is there")
    parser.add_argument(
        "--picture",
        type=Path,
        help="draw how the difference grows, as .png or .svg (needs matplotlib)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    asked = parser.parse_args(argv)
    return survive.guarded(lambda argv: _main(asked))(argv)


def _main(asked: argparse.Namespace) -> int:
    if asked.step < 0:
        raise LockstepError("steps count from 1", f"--step {asked.step}", "give another")
    if asked.picture:
        _check_picture(asked.picture)
    a, b = opened("A", asked.a), opened("B", asked.b)
    found = compared(a, b, asked)
    if asked.picture:
        draw(asked.picture, found["growth"])
    if asked.json:
        print(json.dumps(found))
    else:
        print("\n".join(lines(a, b, found)))
    return status.set_exit_code(
        {SAME: errors.DONE, DIFFER: 1, UNKNOWN: NOT_KNOWN}[found["verdict"]]
    )


# ---- what there is of a run
# -----------------------------------------------------------------------------------------


class Side(NamedTuple):
    """What is known of A or of B; empty where it is not.

    folder       of the run
    config       dotted key -> value
    environment  what decides the last bits but for config, code and data
    code         digest of the source files
    commit       of git
    log          step -> the log's line of the training
    scores       step -> that of an evaluation
    checkpoints  step -> file
    gone         names of checkpoints that the run's manifest or status has, and its folder has not
    came_to      the last step that the run has taken, as status.json says
    """

    name: str
    path: Path
    folder: Path
    config: dict[str, Any] = {}
    environment: dict[str, str] = {}
    code: str = ""
    commit: str = ""
    data: str = ""
    processes: int = 0
    global_batch: int = 0
    horizon: int = 0
    log: dict[int, dict[str, Any]] = {}
    scores: dict[int, dict[str, Any]] = {}
    checkpoints: dict[int, Path] = {}
    record: records.Record | None = None
    gone: tuple[str, ...] = ()
    came_to: int = 0

    @property
    def is_run(self) -> bool:
        return self.path.is_dir()

    @property
    def last(self) -> int:
        """The last step that the run has taken."""
        return max([self.came_to, *self.log, *self.scores, *self.checkpoints])

    @property
    def lacking(self) -> list[int]:
        """Steps of which a whole log has a line of the training, and this one has none."""
        if not self.is_run:
            return []
        on_gpu = bool(
            self.environment.get("cuDNN") or self.environment.get("device", "").startswith("NVIDIA")
        )
        every = self.config.get("log_every") or (50 if on_gpu else 10)
        began = (
            0
            if self.config.get("resume") in ("auto", "never", None)
            else min(self.log, default=self.last)
        )
        return [
            step
            for step in range(every, self.last + 1, every)
            if step > began and step not in self.log
        ]


def opened(name: str, path: Path) -> Side:
    """Read a run's folder, a checkpoint, or a record. Raises LockstepError if it is none."""
    if path.is_dir():
        return _of_folder(name, path)
    if not path.exists():
        raise LockstepError(
            f"{name} is not there", str(path), "give a run's folder, a checkpoint, or a record"
        )
    if path.suffix == ".npz":
        record = records.read(path)
        about = record.about
        found = _as_run(
            name,
            path,
            about["config"],
            environment_of(about),
            about.get("code", ""),
            about["processes"],
        )
        return found._replace(data=about.get("data", ""), record=record)
    state = archive.read(path)
    known = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = dict(json.loads((path.parent / "environment.json").read_text()))
    return _of_checkpoint(name, path, state, known)._replace(
        checkpoints={state["progress"]["step"]: path}
    )


def _as_run(
    name: str, path: Path, cfg: dict[str, Any], env: Any, code: str, processes: int
) -> Side:
    flat = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in config.flatten(cfg).items()
    }
    return Side(
        name, path, path if path.is_dir() else path.parent, flat, env, code, processes=processes
    )


def _of_checkpoint(name: str, path: Path, state: dict[str, Any], known: dict[str, Any]) -> Side:
    env = environment_of(state) | {"NumPy": known.get("packages", {}).get("numpy") or ""}
    found = _as_run(
        name, path, state["config"], env, known.get("code", ""), known.get("processes", 0)
    )
    commit = (known.get("git_commit") or "")[:12] + " with changes" * bool(known.get("git_dirty"))
    sizes = {"global_batch": state["global_batch"], "horizon": state["horizon"]}
    return found._replace(commit=commit, data=state["data"], **sizes)


def _of_folder(name: str, folder: Path) -> Side:
    if not (folder / "config.yaml").is_file():
        raise LockstepError(f"no run in {name}", str(folder), "give the folder of a run")
    check_files(folder)
    try:
        known = dict(json.loads((folder / "environment.json").read_text()))
        cfg = yaml.safe_load((folder / "config.yaml").read_text())
        config.flatten(cfg)
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise LockstepError(
            f"the run cannot be read ({archive.reason(error)})", str(folder), "give another"
        ) from None
    entries = {entry.step: folder / entry.file for entry in Checkpoints(folder).entries}
    came_to, newest = _ended(folder)
    names = dict.fromkeys([*(path.name for path in entries.values()), *newest])
    gone = tuple(name for name in names if not (folder / name).is_file())
    entries = {step: path for step, path in entries.items() if path.is_file()}
    state = archive.read(entries[max(entries)]) if entries else None
    env = {
        "torch": run_folder.torch_version(known),
        # a checkpoint has the CPU's model
        "device": " ".join(known.get("devices", [])[:1]).removeprefix("cpu"),
        "threads": str(known.get("threads", "")),
    }
    like = state or {"environment": env, "global_batch": 0, "horizon": 0, "data": ""}
    found = _of_checkpoint(name, folder, like | {"config": cfg}, known)
    log: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "eval": {}}
    for line in _lines_of(folder / "metrics.jsonl"):
        log.setdefault(str(line.get("event")), {})[line.get("step", 0)] = line
    found = found._replace(folder=folder, gone=gone, came_to=came_to, checkpoints=entries)
    return found._replace(log=log["train"], scores=log["eval"])


def _ended(folder: Path) -> tuple[int, list[str]]:
    """Return the last step and the name of the last checkpoint, in a list, as status.json has them;
    (0, []) without."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        known = json.loads((folder / "status.json").read_text())
        return int(known["step"]), [Path(known["checkpoint"]).name] if known["checkpoint"] else []
    return 0, []


def _lines_of(path: Path) -> Iterator[dict[str, Any]]:
    texts = path.read_text(errors="replace").split("\n") if path.is_file() else []
    # what stands after the last newline is no whole line
    for number, text in enumerate(texts[:-1], 1):
        try:
            yield dict(json.loads(text))
        except (ValueError, TypeError):
            raise LockstepError(
                "a line of the log is damaged", f"{path}:{number}", "remove it"
            ) from None


# ---- compare
# --------------------------------------------------------------------------------------------------


def compared(a: Side, b: Side, asked: argparse.Namespace) -> dict[str, Any]:
    """Return all differences, as --json prints them."""
    found: dict[str, Any] = {
        "a": str(a.path),
        "b": str(b.path),
        "differs": {},
        "no matter": {},
        "alike": [],
    }
    for section, differences in around(a, b).items():
        if differences is None:
            continue
        for matters in ("differs", "no matter"):
            chosen = {
                key: [x, y] for key, (x, y, m) in differences.items() if m == (matters == "differs")
            }
            found[matters] |= {section: chosen} if chosen else {}
        found["alike"] += [] if differences else [section]
    found["numbers"] = numbers(a.log, b.log)
    found["scores"] = numbers(a.scores, b.scores)
    found["growth"] = growth(a.log, b.log)
    found["tensors"] = tensors(a, b)
    found["step"] = step(a, b, found["numbers"], asked)
    checked = [
        found["numbers"]["points"],
        found["scores"]["points"],
        found["tensors"].get("compared", 0),
    ]
    checked += [found["step"].get("compared", 0)]
    differ = found["numbers"]["first"] or found["scores"]["first"] or found["tensors"].get("differ")
    found["missing"] = missing(a, b, found, asked) if any(checked) else ["no step is there of both"]
    found["verdict"] = (
        DIFFER if differ or found["step"].get("sentence") else UNKNOWN if found["missing"] else SAME
    )
    found["same"] = found["verdict"] == SAME
    if not any(checked) and not found["differs"]:
        steps = "they have no step in common, in log, checkpoints or records"
        raise LockstepError(
            f"nothing of A and B can be compared: {steps}", f"{a.path}, {b.path}", "give others"
        )
    found["sentence"] = sentence(found)
    return found


def missing(a: Side, b: Side, found: dict[str, Any], asked: argparse.Namespace) -> list[str]:
    """Return what A or B lacks for a verdict on all steps; empty where nothing is missing."""
    texts = list[str]()
    for side in (a, b):
        if side.lacking:
            lines = amount(len(side.lacking), "line")
            texts.append(f"{side.name}'s log lacks {lines}, the first of step {side.lacking[0]}")
        texts += [f"{side.name}'s checkpoint {name} is gone" for name in side.gone]
    texts += _evaluations_missing(a, b)
    if asked.step and not found["step"].get("compared"):
        texts.append(
            f"step {asked.step} was not compared: "
            f"{found['step'].get('impossible') or 'no record of both'}"
        )
    if not (a.is_run and b.is_run):
        return texts
    if a.last != b.last:
        texts.append(f"A ends at step {a.last}, B at step {b.last}")
    common = max({*a.log} & {*b.log}, default=0)
    if not found["numbers"]["digests"] and "step" not in found["tensors"]:
        texts.append("no digest of the weights is in both logs, and no checkpoint is of one step")
    elif (proven := _proven(a, b, found)) < common:
        texts.append(
            f"the bits of the weights are compared up to step {proven}, of the {common} that "
            "both have"
        )
    return texts


def _evaluations_missing(a: Side, b: Side) -> list[str]:
    """Return whose log lacks evaluations that the other's has, where both were to evaluate at the
    same steps."""
    if a.config.get("eval_every") != b.config.get("eval_every") or not (a.is_run and b.is_run):
        return []
    texts, both = list[str](), min(a.last, b.last)
    for side, other in ((a, b), (b, a)):  # at its end a run is evaluated in any case
        of_both = (step for step in other.scores if step < both or step == a.last == b.last)
        steps = sorted(step for step in of_both if step not in side.scores)
        if steps and side.config.get("resume") in ("auto", "never", None):
            texts.append(
                f"{side.name}'s log lacks {amount(len(steps), 'evaluation')}, the first of step "
                f"{steps[0]}"
            )
    return texts


def _proven(a: Side, b: Side, found: dict[str, Any]) -> int:
    """Return the last step at which both have bits of the weights: digests in the logs, or
    checkpoints."""
    with_digest = [step for step in a.log.keys() & b.log.keys() if _has_digests(a, b, step)]
    return max([*with_digest, found["tensors"].get("step", 0)], default=0)


def _has_digests(a: Side, b: Side, step: int) -> bool:
    return bool(a.log[step].get("digest") and b.log[step].get("digest"))


Differences = dict[str, tuple[Any, Any, bool]]
"""Name -> (in A, in B, whether it can change the numbers)."""


def around(a: Side, b: Side) -> dict[str, Differences | None]:
    """Return what differs around the numbers, by section; None where it isn't known of both."""
    found: dict[str, Differences | None] = {"start": start(a, b)}
    virtual = 0 < a.config.get("virtual_workers", 0) == b.config.get("virtual_workers", 0)
    free = (*config.NO_NUMBERS, *(config.NO_BITS if virtual else ()))
    free += tuple(
        key
        for key, name in config.RESOLVED.items()
        if a.environment.get(name) == b.environment.get(name, "?")
    )
    free += ("steps", "epochs", "schedule.horizon") if a.horizon == b.horizon > 0 else ()
    keys = [
        key
        for key in a.config | b.config
        if a.config.get(key) != b.config.get(key) and key != "save_dir"
    ]
    settings = {
        key: (a.config.get(key, "absent"), b.config.get(key, "absent"), not config.is_in(key, free))
        for key in keys
    }
    for name, sizes in (
        ("samples of a step", (a.global_batch, b.global_batch)),
        ("steps of the schedule", (a.horizon, b.horizon)),
    ):
        settings |= {name: (*sizes, True)} if all(sizes) and sizes[0] != sizes[1] else {}
    code: Differences = {"source files": (a.code, b.code, True)} if a.code != b.code else {}
    if a.commit and b.commit and a.commit != b.commit:
        code["commit"] = a.commit, b.commit, not a.code or a.code != b.code
    env = {
        name: (x, y, True)
        for name, x in a.environment.items()
        if x and (y := b.environment.get(name, "")) and x != y
    }
    data = {"fingerprint": (a.data, b.data, True)} if a.data != b.data else {}
    processes = (
        {"processes": (a.processes, b.processes, not virtual)} if a.processes != b.processes else {}
    )
    found["config"] = settings
    found["code"] = code if (a.code and b.code) or (a.commit and b.commit) else None
    found["environment"] = env if a.environment and b.environment else None
    found["data"] = data if a.data and b.data else None
    found["processes"] = processes if a.processes and b.processes else None
    return found


def start(a: Side, b: Side) -> Differences | None:
    """Compare the weights that two runs began with, where these are in files that the configs
    name."""
    found: Differences = {}
    for key in ("resume", "init_from"):
        files = [Path(str(each.config.get(key) or "")) for each in (a, b)]
        if files[0] == files[1] or not any(file.exists() and file != Path() for file in files):
            continue
        both = all(file.exists() and file != Path() for file in files)
        parts: list[Any] = (
            [{"model": weights.read(file)} for file in files] if both and key == "init_from" else []
        )
        parts = [archive.read(file) for file in files] if both and key == "resume" else parts
        texts = _parts(*parts)["lines"] if both else ["given for one of them alone"]
        found |= {key: (str(files[0]), "; ".join([str(files[1]), *texts]), True)} if texts else {}
    return found or None


class Number(NamedTuple):
    name: str
    relative: float


def numbers(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Compare two logs. Return the log points that both have, how many of them have digests of the
    weights; the first that differs (0: none), what differs there, each with its relative
    difference; and the last that is surely equal: with the same digest, if there are any."""
    common, found = sorted(a.keys() & b.keys()), list[Number]()
    digests = [each for each in common if a[each].get("digest") and b[each].get("digest")]
    first = next((each for each in common if (found := _differing(a, b, each))), 0)
    sure = [each for each in digests or common if each < first or not first]
    size = {
        "points": len(common),
        "digests": len(digests),
        "first": first,
        "last equal": max(sure, default=0),
    }
    return size | {"differing": [[*each] for each in found]}


def growth(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]]) -> list[list[Any]]:
    """Return [step, largest relative difference of a logged number, its name] of the log points
    that both have."""
    found = []
    for each in sorted(a.keys() & b.keys()):
        size = {
            d.name: d.relative
            for d in _differing(a, b, each)
            if d.name not in (*OF_THE_STEP, "skipped_steps")
        }
        size |= {d.name: d.relative for d in _differing(a, b, each) if d.name == "grad_norm"}
        name = max(size, key=size.__getitem__, default="")
        found.append([each, size.get(name, 0.0), name])
    return found


def _differing(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]], at: int) -> list[Number]:
    """Return the numbers of a log point that differ. Means since the last one count only if both
    have that, too."""
    one, other = a[at], b[at]
    before = [max((each for each in log if each < at), default=-1) for log in (a, b)]
    names = [name for name in one if name in other and name not in TIMES]
    names = [name for name in names if before[0] == before[1] or name in OF_THE_STEP]
    return [
        Number(name, _relative(one[name], other[name]))
        for name in names
        if _text(one[name]) != _text(other[name])
    ]


def _text(value: Any) -> str:
    return repr(float(value)) if isinstance(value, int | float) else repr(value)  # NaN equals NaN


def _relative(x: Any, y: Any) -> float:
    """Return the difference over the larger of both; 1 where that is no number."""
    if not all(isinstance(each, int | float) and math.isfinite(each) for each in (x, y)):
        return 1.0
    return abs(x - y) / max(abs(x), abs(y))


# ---- tensors
# --------------------------------------------------------------------------------------------------

PARTS = ("model", "ema", "optimizer", "scaler", "tally", "progress")


def tensors(a: Side, b: Side) -> dict[str, Any]:
    """Compare the last checkpoints that both have of the same step."""
    steps = a.checkpoints.keys() & b.checkpoints.keys()
    if not steps:
        both = a.checkpoints and b.checkpoints
        return {"missing": [max(a.checkpoints), max(b.checkpoints)]} if both else {}
    states = [archive.read(each.checkpoints[max(steps)]) for each in (a, b)]
    return {"step": max(steps), **_parts(*states)}


def _parts(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return how two checkpoints differ: a line for each part of them."""
    texts, total, different = [], 0, []
    for part in PARTS:
        mine, theirs = (dict(tree_leaves(state.get(part))) for state in (one, other))
        differ = {name: _leaf(mine.get(name), theirs.get(name)) for name in mine | theirs}
        total += len(differ)
        named = {name: found for name, found in differ.items() if found}
        different += [part] if named else []
        alone = [text for name, found in named.items() for text in _few(name, found)]
        if named and sum(found.numbers for found in named.values()) <= FEW:
            texts.append(f"{part}: {', '.join(alone)}")
        elif named:
            most = max(named, key=lambda name: named[name].relative)
            chosen = dict.fromkeys([next(iter(named)), most])
            told = ", ".join(f"{name} {named[name].size}" for name in chosen)
            texts.append(f"{part}: {len(named)} of {len(differ)} differ: {told}")
    return {"compared": total, "differ": different, "lines": texts}


class Leaf(NamedTuple):
    """How a tensor differs, or a number.

    relative  norm of the difference over that of A
    flips     index -> what has become of it, where only a few differ
    """

    numbers: int
    of: int
    relative: float
    flips: dict[tuple[int, ...], str]

    @property
    def size(self) -> str:
        """How large it is, or what the two are instead."""
        if () in self.flips:
            return self.flips[()]
        return (
            f"by {self.relative:.1e} of its norm in {self.numbers} of {amount(self.of, 'number')}"
        )


def _few(name: str, found: Leaf) -> list[str]:
    return [f"{name}{[*index] if index else ''}: {text}" for index, text in found.flips.items()]


def _leaf(x: Any, y: Any) -> Leaf | None:
    """Compare two leaves of a checkpoint, in bits."""
    if (
        not isinstance(x, Tensor)
        or not isinstance(y, Tensor)
        or x.shape != y.shape
        or x.dtype != y.dtype
    ):
        texts = [
            f"{each.dtype} {tuple(each.shape)}" if isinstance(each, Tensor) else repr(each)
            for each in (x, y)
        ]
        return (
            None
            if texts[0] == texts[1]
            else Leaf(1, 1, 1.0, {(): f"{texts[0]} in A, {texts[1]} in B"})
        )
    bits = [each.contiguous().view(-1).view(torch.uint8).view(x.numel(), -1) for each in (x, y)]
    places = (bits[0] != bits[1]).any(1).nonzero()[:, 0]
    if not len(places):
        return None
    wide = [
        each.to(torch.complex128 if each.is_complex() else torch.float64).reshape(-1)
        for each in (x, y)
    ]
    norm = float(wide[0].abs().square().sum().sqrt())
    apart = float((wide[0] - wide[1])[places].abs().square().sum().sqrt())
    flips = {}
    for place in places.tolist() if len(places) <= FEW else ():
        index = tuple(int(each) for each in np.unravel_index(place, x.shape))
        words = [int.from_bytes(bytes(each[place].tolist()), "little") for each in bits]
        flipped = words[0] ^ words[1]
        values = f"{wide[0][place].item():.9g} in A, {wide[1][place].item():.9g} in B"
        one = f"bit {flipped.bit_length() - 1} is flipped ({values})"
        flips[index] = one if flipped.bit_count() == 1 else values
    return Leaf(len(places), x.numel(), apart / norm if norm else 1.0, flips)


# ---- one step again
# -------------------------------------------------------------------------------------------------


def step(a: Side, b: Side, logged: dict[str, Any], asked: argparse.Namespace) -> dict[str, Any]:
    """Compare what one step has computed, by the records that are there or by taking it again."""
    of_file = [each.record.about["step"] for each in (a, b) if each.record]
    both = set.intersection(*({_step_of(path) for path in _records(each)} for each in (a, b)))
    wanted = asked.step or (of_file[0] if of_file else logged["first"])
    if len(of_file) == 2 or wanted in both or (asked.no_replay and both):
        at = of_file[0] if len(of_file) == 2 else wanted if wanted in both else min(both)
        return _verdict(_recorded(a, at), _recorded(b, at), logged, _settings(a, b))
    if asked.no_replay or not wanted:
        return {}
    try:
        return _again(a, b, logged, wanted, exactly=bool(asked.step or of_file), trust=asked.trust)
    except LockstepError as error:
        if error.exit_code > 128:  # a signal has ended this tool
            raise
        return {"impossible": str(error)}


def _records(side: Side) -> list[Path]:
    return [side.path] if side.record else sorted(side.folder.glob("record_step_*.npz"))


def _step_of(path: Path) -> int:
    return int(number) if (number := path.stem.rpartition("_")[2]).isdigit() else 0


def _recorded(side: Side, at: int) -> records.Record:
    return side.record or records.read(side.folder / f"record_step_{at}.npz")


def _settings(a: Side, b: Side) -> str:
    """Return words on the settings that differ, and that change more than how sums are rounded; or
    an empty text."""
    differences = around(a, b)["config"] or {}
    matter = {key: both for key, (*both, matters) in differences.items() if matters}
    named = {
        key: both for key, both in matter.items() if not config.is_in(key, config.ONLY_ROUNDING)
    }
    if not named:
        return ""
    shown = [f"{key} is {x} in A, {y} in B" for key, (x, y) in [*named.items()][:2]]
    more = [f"{len(named) - 2} more settings differ"] if len(named) > 2 else []
    return ", ".join([*shown, *more])


def _verdict(
    a: records.Record, b: records.Record, logged: dict[str, Any], settings: str
) -> dict[str, Any]:
    """Return what two records of a step say, as a sentence.

    settings  words on settings that differ, see `_settings`
    """
    found, number = records.compare(a, b), a.about["step"]
    first = found.differences[0] if found.differences else None
    text = found.sentence(settings)
    if first and first.kind == "weight" and a.about["lr"] != b.about["lr"]:
        text = f"{text}; the learning rate is {a.about['lr']:.6g} in A, {b.about['lr']:.6g} in B"
    forward = [entry["name"] for entry in a.about["entries"] if entry["kind"] == "forward"]
    began_equal = 0 < number - 1 == logged["last equal"]
    if (
        first
        and first.kind == "forward"
        and first.name == forward[0]
        and not (first.rounding or first.why or began_equal)
    ):
        text = f"{text}; the weights may differ before the step"
    return {
        "step": number,
        "sentence": text,
        "same passes": found.same_cut,
        "why": _why(found),
        "rounding alone": bool(first) and not found.beyond and not settings,
        "compared": found.compared,
        "unmatched": found.unmatched,
        "differences": [
            {
                "text": str(each),
                **each._asdict(),
                "relative": each.relative if math.isfinite(each.relative) else None,
            }
            for each in found.differences
        ],
    }


def _why(found: records.Found) -> str:
    """Return what a module does that depends on the cut, if one does and the cuts differ."""
    module = found.beyond.module if found.beyond and not found.same_cut else ""
    sees = {
        "Dropout": "draws for the samples of its pass",
        "BatchNorm": "computes with the samples of its pass",
    }
    does = next((text for kind, text in sees.items() if kind in module), "")
    return (
        (
            f"{module} {does}, and the passes differ; virtual_workers make them the same on any "
            "processes"
        )
        if does
        else ""
    )


def _again(
    a: Side, b: Side, logged: dict[str, Any], wanted: int, exactly: bool, trust: bool
) -> dict[str, Any]:
    """Take the steps again up to the one wanted, or up to the first that differs, and compare what
    it has computed."""
    notes = list[str]()
    with tempfile.TemporaryDirectory(prefix="lockstep_") as scratch:
        place = Path(scratch)
        before = wanted - 1 if exactly else logged["last equal"]
        number = wanted if exactly else before + 1
        ran = [
            _taken(each, before, wanted, number, place / f"{each.name}1", trust) for each in (a, b)
        ]
        if not exactly:
            logs = [each.log for each in ran]
            parted = numbers(*({n: line for n, line in log.items() if n > before} for log in logs))
            for side, mine in zip((a, b), ran, strict=True):
                if side.log and numbers(side.log, mine.log)["first"]:
                    notes.append(
                        f"taken again here, {side.name} does not take its own bits: "
                        f"{_elsewhere(side, mine)}"
                    )
            if not parted["first"]:
                same = (
                    "taken again with this checkout, both take the same bits up to step "
                    f"{wanted}: the difference "
                )
                return {
                    "vanished": f"{same}lies in what was not taken again: {_not_replayed(a, b)}",
                    "notes": notes,
                }
            if (first := parted["first"]) != number:
                number = first
                ran = [
                    _taken(each, before, number, number, place / f"{each.name}2", trust)
                    for each in (a, b)
                ]
        began = logged | {"last equal": number - 1} if not exactly and number > 1 else logged
        return _verdict(
            _recorded(ran[0], number), _recorded(ran[1], number), began, _settings(a, b)
        ) | {
            "notes": notes,
            "first": not exactly,
        }


def _taken(side: Side, before: int, to: int, record: int, folder: Path, trust: bool) -> Side:
    """Return A, or B, taken again up to step `to`, as a run of its own; a record is A itself, or
    B."""
    if side.record or (
        before + 1 == to == record and (side.folder / f"record_step_{record}.npz").is_file()
    ):
        return side
    env, cfg = side.environment, side.config
    held = [step for step in side.checkpoints if step <= before]
    source = str(side.checkpoints[max(held)]) if held else str(cfg.get("resume", ""))
    if not held and side.path.is_file():
        raise LockstepError(
            f"{side.name} is a checkpoint of a later step", str(side.path), "give a later --step"
        )
    if not held and source in ("auto", "never", ""):
        source = "never"
    elif not Path(source).is_file():
        raise LockstepError(
            f"the checkpoint that {side.name} began with is gone", source, "give --no-replay"
        )
    horizon = (
        cfg.get("schedule.horizon")
        or side.horizon
        or (0 if cfg.get("epochs") else cfg.get("steps", 0))
    )
    settings = NO_MORE | {"resume": source, "record": record}
    settings |= {"steps": to, "schedule": {"horizon": horizon}} if horizon else {}
    backend, device = (
        cfg.get("ddp.backend", "auto"),
        SimpleNamespace(device=cfg.get("device", "auto")),
    )
    settings |= cards.sharing(cards.visible(device), side.processes or 1, backend)
    settings |= {
        key: env[name] for key, name in AS_CHOSEN.items() if env.get(name, "auto") != "auto"
    }
    folder.mkdir()
    (changes := folder / "changes.yaml").write_text(yaml.safe_dump(settings))
    words = ["--config", of_run(trust, [str(side.folder)])[1], "--config", str(changes)]
    begun = max(held, default=0)
    with tqdm(
        total=to - begun,
        unit="step",
        desc=f"step {to} of {side.name} again",
        disable=None,
        leave=False,
    ) as bar:
        tell = lambda now: bar.update(max(0, now - begun - bar.n))  # noqa: E731
        ended = train_in(
            folder / "run", words, side.processes or 1, kill_at=0 if horizon else to, tell=tell
        )
    folder = folder / "run"
    again = (
        _of_folder(side.name, folder)
        if (folder / "config.yaml").is_file()
        else Side(side.name, folder, folder)
    )
    if to not in again.log:
        raise LockstepError(
            f"{side.name} cannot be taken again here: {ended.problem}",
            str(side.path),
            "give --no-replay",
        )
    return again


NO_MORE = {
    "log_every": 1,
    "digest_every": 1,
    "compile": "off",
    "cuda_graph": False,
    "save_every": 0,
    "save_minutes": 0,
    "eval_every": 10**9,
    "patience": 0,
    "max_time_s": 0,
    "keep_checkpoints": 0,
    "check_sums": False,
    "optim": {"zero": False},
    "wandb": {"enable": False},
    "mlflow": {"enable": False},
}
"""Settings of a step that is taken again: none of them can change it, but for those that hide a
model's modules."""

AS_CHOSEN = {"threads": "threads", "amp": "precision", "memory_format": "memory_format"}
"""Keys whose `auto` is what the run has chosen, and its name in the environment."""


def _elsewhere(side: Side, again: Side) -> str:
    """Return what differs between a run and the same run taken again."""
    found = [
        f"{key}: {x} then, {y} now"
        for key, (x, y, _) in (around(side, again)["environment"] or {}).items()
    ]
    if side.code != again.code:
        found.append(f"source files: {side.code} then, {again.code} now")
    return ", ".join(found) or "nothing that is noted differs; its data may have changed"


def _not_replayed(a: Side, b: Side) -> str:
    known = around(a, b)
    named = [
        f"{section}: {', '.join(known[section] or {})}"
        for section in ("code", "environment")
        if known[section]
    ]
    return "; ".join(named) or "the machine, or data that have changed since"


# ---- print
# --------------------------------------------------------------------------------------------------


def sentence(found: dict[str, Any]) -> str:
    """Return the verdict in one sentence."""
    logged, of_step = found["numbers"], found["step"]
    if found["verdict"] != DIFFER:
        equal = [amount(logged["points"], "log point")] if logged["points"] else []
        equal += (
            [f"the checkpoints of step {found['tensors']['step']}"]
            if "step" in found["tensors"]
            else []
        )
        equal += [f"the records of step {of_step['step']}"] if of_step.get("compared") else []
        if found["verdict"] == SAME:
            return f"The same bits: {', '.join(equal)}."
        around_it = (
            ["they differ in what is around the numbers"] if found["differs"] and not equal else []
        )
        rest = [f"the same where both can be compared: {', '.join(equal)}"] if equal else around_it
        return f"Not known to be the same: {'; '.join([*found['missing'], *rest])}."
    if of_step.get("sentence"):
        how = ", by rounding" if of_step["rounding alone"] and not of_step["same passes"] else ""
        first = of_step["step"] == 1 or of_step.get("first")
        where = (
            f"They part at step {of_step['step']}" if first else f"Step {of_step['step']} differs"
        )
        return f"{where}{how}: {of_step['sentence']}"
    if of_step.get("vanished"):
        return f"They part at step {logged['first']}, but {of_step['vanished']}"
    if logged["first"]:
        last = f" after step {logged['last equal']}" if logged["last equal"] else ""
        return f"They part{last}, at step {logged['first']} at the latest."
    if found["tensors"].get("differ"):
        return (
            f"The checkpoints of step {found['tensors']['step']} differ: "
            f"{found['tensors']['lines'][0]}"
        )
    return f"The evaluation of step {found['scores']['first']} differs; the training does not."


def lines(a: Side, b: Side, found: dict[str, Any]) -> list[str]:
    """Return the differences as text: the verdict, what differs around the numbers, the numbers."""
    told: list[tuple[str, str]] = [("A", str(a.path)), ("B", str(b.path)), ("", found["sentence"])]
    told += [("why", text)] if (text := found["step"].get("why")) else []
    for section, differences in found["differs"].items():
        told += [
            (section, f"{key}: {x} in A, {y} in B{MEANINGS.get(key, '')}")
            for key, (x, y) in differences.items()
        ]
    for section, differences in found["no matter"].items():
        keys = ", ".join(f"{key} ({x}, {y})" for key, (x, y) in differences.items())
        told.append((section, f"cannot change the numbers: {keys}"))
    told += [("alike", ", ".join(found["alike"]))] if found["alike"] else []
    told += [("log", text) for text in _about_log(found)]
    told += [("missing", text) for text in found["missing"]] if found["verdict"] == DIFFER else []
    told += [
        (f"step {found['tensors']['step']}", text) for text in found["tensors"].get("lines", [])
    ]
    if "missing" in found["tensors"]:
        told.append(
            (
                "weights",
                "the checkpoints are of other steps: {} and {}".format(
                    *found["tensors"]["missing"]
                ),
            )
        )
    told += [("replay", text) for text in found["step"].get("notes", [])]
    told += (
        [("replay", f"not possible: {found['step']['impossible']}")]
        if "impossible" in found["step"]
        else []
    )
    width = max(len(name) for name, _ in told)
    return [
        *(f"{name:<{width}}  {text}" if name else f"\n{text}\n" for name, text in told),
        *_table(found["growth"]),
    ]


MEANINGS = {
    "processes": (
        " (without virtual_workers sums are rounded otherwise, BatchNorm and dropout "
        "see other samples)"
    ),
    "samples of a step": " (another training: give both the same global_batch)",
}
"""What a difference means that is no key of a config."""


def _about_log(found: dict[str, Any]) -> list[str]:
    texts = list[str]()
    for what, key in (("log point", "numbers"), ("evaluation", "scores")):
        of = found[key]
        if not of["first"]:
            also = f", and the same digests at {of['digests']}" if of["digests"] else ""
            texts += (
                [f"the same numbers at {amount(of['points'], what)}{also}"] if of["points"] else []
            )
            continue
        sizes = [
            f"{name} by {relative:.1e}" for name, relative in of["differing"] if name != "digest"
        ]
        sizes = [*sizes[:4], f"{len(sizes) - 4} more"] if len(sizes) > 5 else sizes
        only = "only the digest of the weights" if not sizes else ", ".join(sizes)
        last = f"; step {of['last equal']} is equal" if of["last equal"] else ""
        texts.append(
            f"step {of['first']} is the first of {amount(of['points'], what)} that differs: "
            f"{only}{last}"
        )
    return texts


def _table(growth: list[list[Any]]) -> list[str]:
    """Return the growth in about eight rows."""
    if not any(size for _, size, _ in growth):
        return []
    begin = next(n for n, (_, size, _) in enumerate(growth) if size)
    chosen = sorted(
        {begin, *np.geomspace(1, len(growth) - begin, 8).round().astype(int) + begin - 1}
    )
    rows = [["step", "relative difference", "of"]]
    return [
        "",
        *aligned(
            [
                *rows,
                *([str(s), f"{size:.1e}", name] for s, size, name in (growth[n] for n in chosen)),
            ]
        ),
    ]


def _check_picture(path: Path) -> None:
    if path.suffix not in (".png", ".svg"):
        raise LockstepError("a picture is .png or .svg", f"--picture {path}", "give such a name")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise LockstepError(
            "a picture needs matplotlib", f"--picture {path}", "pip install matplotlib"
        ) from None


def draw(path: Path, growth: list[list[Any]]) -> None:
    """Draw the relative difference over steps, on a log scale; equal log points stand at the
    bottom."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, sizes = [each[0] for each in growth], [each[1] for each in growth]
    bottom = min([size for size in sizes if size], default=1e-8) / 10
    axes.semilogy(
        steps, [size or math.nan for size in sizes], marker=".", label="largest of a logged number"
    )
    equal = [each for each, size in zip(steps, sizes, strict=True) if not size]
    if equal:
        axes.semilogy(
            equal,
            [bottom] * len(equal),
            linestyle="",
            marker="|",
            color="gray",
            label="equal in bits",
        )
    axes.set(xlabel="step", ylabel="relative difference")
    axes.legend()
    figure.savefig(drawn := io.BytesIO(), format=path.suffix[1:])
    try:
        write_atomically(path, lambda file: file.write(drawn.getvalue()))
    except OSError as error:
        raise LockstepError(
            f"the picture was not written: {error.strerror}", str(path), "give another path"
        ) from None
