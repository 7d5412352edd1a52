"""Find the first difference between two runs: from config and machine to the first module whose
output has other bits.

python tools/compare.py RUN RUN                       compare config, code, data, machine, log and
                                                      weights; then one step of both runs
python tools/compare.py RUN RUN --step 40             compare step 40 instead of the first
                                                      different step
python tools/compare.py one.pt other.pt               compare two checkpoints: tensors, numbers, a
                                                      single bit
python tools/compare.py one/record_step_1.npz other/record_step_1.npz
                                                      compare the tensors of a step on two machines

A and B are folders of runs, checkpoints, or records. A training with record=N writes a record.

Both runs take the step again: from the last checkpoint before the step or from the seed, with this
checkout, on this machine, on the recorded number of processes, in a temporary folder. A repeated
run ends with an evaluation. If the runs have different code or machines, repeat each run with
record=N there and compare the two small files.

Exit code 0: the same bits. 1: the runs differ. 7: not known, because a run lacks lines of the log,
a checkpoint, digests of the weights, or the last steps of the other run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch import Tensor
from tqdm import tqdm

from engine import api, code_digest, config, errors, resume
from engine.code_digest import Code
from engine.data.batches import tree_leaves
from engine.data.fingerprint import Fingerprint
from engine.data.fingerprint import compare as data_difference
from engine.environment import environment_of
from engine.errors import LockstepError, amount, few
from engine.files import archive, run_folder, weights
from engine.files.archive import CheckpointState, Sizes
from engine.files.atomic import read_object, write_atomically
from engine.files.store import check_files
from plugins import resilience
from plugins.resilience import status
from tools.arguments import NOT_KNOWN, Parser
from tools.evidence import records
from tools.machine import cards
from tools.output import print_json
from tools.running import folder_of, tool_work, train_in
from tools.use.evaluate import TRUST, aligned, of_run

TIMES = ("event", "step", "time_s", "samples_per_s", "data_wait_share")
OF_THE_STEP = ("digest", "grad_norm", "lr", "lr_min", "samples", "epoch")
"""Entries of the last step alone. The other entries are means since the last log point. TIMES are
never compared."""

SAME, DIFFER, UNKNOWN = "same", "differ", "not known"
EXIT_CODES = {SAME: errors.DONE, DIFFER: 1, UNKNOWN: NOT_KNOWN}

FEW = 3
"""A tensor with at most so many different numbers is listed number by number."""


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="compare.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "a", metavar="A", type=Path, help="folder of a run, a checkpoint, or a record of a step"
    )
    parser.add_argument("b", metavar="B", type=Path, help="the other run, checkpoint, or record")
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
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args(argv)

    def work(argv: list[str]) -> int:
        with tool_work(args.json):
            return _main(args)

    return resilience.guarded(work, errors.FAULT)(argv)


def _main(args: argparse.Namespace) -> int:
    if args.step < 0:
        raise LockstepError("steps count from 1", f"--step {args.step}", "give another")
    if args.picture:
        _check_picture(args.picture)
    a = read_side("A", args.a)
    b = read_side("B", args.b)
    found = compared(a, b, args)
    if args.picture:
        draw(args.picture, found["growth"])
    if args.json:
        print_json(found)
    else:
        print("\n".join(lines(a, b, found)))
    return status.set_exit_code(EXIT_CODES[found["verdict"]])


# ---- read a run
# -----------------------------------------------------------------------------------------


class Side(NamedTuple):
    """The known facts of A or of B; a field without a value is unknown.

    folder       the run's folder
    config       dotted key -> value
    environment  what decides the last bits, beside config, code and data
    code         digest of the source files
    code_files   digest of each of them, see `code_digest.code_of`; empty of an older run
    commit       of git
    log          step -> line of the training
    scores       step -> line of an evaluation
    checkpoints  step -> file
    gone         names of checkpoints in the manifest or in status.json, without a file in the
                 folder
    came_to      the last step of the run, from status.json
    processes    of the last start
    starts       (step, processes) of each start
    """

    name: str
    path: Path
    folder: Path
    config: dict[str, Any] = {}
    environment: dict[str, str] = {}
    code: str = ""
    code_files: Code = {}
    commit: str = ""
    data: Fingerprint = Fingerprint()
    processes: int = 0
    starts: Sequence[tuple[int, int]] = ()
    sizes: Sizes = Sizes()
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
    def has_whole_log(self) -> bool:
        """Whether the log begins at the first step: the run resumed no checkpoint elsewhere."""
        return self.config.get("resume") in ("auto", "never", None)

    @property
    def lacking(self) -> list[int]:
        """The steps without a line of the training, though a complete log has a line."""
        if not self.is_run:
            return []
        device = self.environment.get("device", "")
        on_gpu = bool(self.environment.get("cuDNN") or device.startswith("NVIDIA"))
        every = self.config.get("log_every") or (50 if on_gpu else 10)
        began = 0
        if not self.has_whole_log:
            began = min(self.log, default=self.last)
        expected = range((began // every + 1) * every, self.last + 1, every)
        return sorted(set(expected) - self.log.keys())


def read_side(name: str, path: Path) -> Side:
    """Read a run's folder, a checkpoint, or a record. Raises LockstepError for any other path."""
    if path.is_dir():
        return _of_folder(name, path)
    if not path.exists():
        raise LockstepError(
            f"{name} is not there", str(path), "give a run's folder, a checkpoint, or a record"
        )
    if path.suffix == ".npz":
        return _of_record(name, path)
    saved = api.read(path)
    known = read_object(path.parent / "environment.json")
    side = _of_checkpoint(name, path, saved, saved.config, known)
    return side._replace(checkpoints={saved.step: path})


def _of_record(name: str, path: Path) -> Side:
    record = records.read(path)
    about = record.about
    env = environment_of(about)
    side = _as_run(name, path, about["config"], env, about.get("code", ""), about["processes"])
    data = Fingerprint(about.get("data", ""), about.get("data_facts", {}))
    side = side._replace(code_files=about.get("code_files", {}))
    return side._replace(data=data, record=record)


def _as_run(
    name: str, path: Path, cfg: dict[str, Any], env: Any, code: str, processes: int
) -> Side:
    flat = config.flatten(cfg)
    for key, value in flat.items():
        if isinstance(value, tuple):
            flat[key] = list(value)
    return Side(name, path, folder_of(path), flat, env, code, processes=processes)


def _of_checkpoint(
    name: str, path: Path, saved: CheckpointState, cfg: dict[str, Any], known: dict[str, Any]
) -> Side:
    env = saved.environment | {"NumPy": known.get("packages", {}).get("numpy") or ""}
    code = known.get("code", "")
    side = _as_run(name, path, cfg, env, code, known.get("processes", 0))
    commit = (known.get("git_commit") or "")[:12]
    if known.get("git_dirty"):
        commit += " with changes"
    side = side._replace(commit=commit, data=resume.data_of(saved), sizes=saved.sizes)
    return side._replace(code_files=saved.code or known.get("code_files", {}))


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
    came_to, newest = _ended(folder)
    checkpoints, gone = _checkpoints(folder, newest)
    facts = {
        "torch": run_folder.torch_version(known),
        # a checkpoint has the CPU's model
        "device": " ".join(known.get("devices", [])[:1]).removeprefix("cpu"),
        "threads": str(known.get("threads", "")),
    }
    saved = CheckpointState(environment=facts)
    if checkpoints:
        saved = api.read(checkpoints[max(checkpoints)])
    side = _of_checkpoint(name, folder, saved, cfg, known)
    log: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "eval": {}}
    for line in _lines_of(folder / "metrics.jsonl"):
        log.setdefault(str(line.get("event")), {})[line.get("step", 0)] = line
    side = side._replace(folder=folder, gone=gone, came_to=came_to, checkpoints=checkpoints)
    side = side._replace(starts=run_folder.starts_of(known))
    return side._replace(log=log["train"], scores=log["eval"])


def _checkpoints(folder: Path, newest: str) -> tuple[dict[int, Path], tuple[str, ...]]:
    """Return {step: file} of the manifest, and the names of checkpoints without a file.

    newest  name of the last checkpoint in status.json, or empty
    """
    listed = api.list_checkpoints(folder)
    paths = [*listed.values()]
    if newest:
        paths.append(folder / newest)
    gone = dict[str, None]()
    for path in paths:
        if not path.is_file():
            gone[path.name] = None
    present = {step: path for step, path in listed.items() if path.is_file()}
    return present, tuple(gone)


def _ended(folder: Path) -> tuple[int, str]:
    """Return the last step and the name of the last checkpoint from status.json, or (0, "")."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        known = json.loads((folder / "status.json").read_text())
        return int(known["step"]), Path(known["checkpoint"] or "").name
    return 0, ""


def _lines_of(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    # text after the last newline is an incomplete line
    texts = path.read_text(errors="replace").split("\n")[:-1]
    for number, text in enumerate(texts, 1):
        try:
            yield dict(json.loads(text))
        except (ValueError, TypeError):
            raise LockstepError(
                "a line of the log is damaged", f"{path}:{number}", "remove it"
            ) from None


# ---- compare
# --------------------------------------------------------------------------------------------------


def compared(a: Side, b: Side, args: argparse.Namespace) -> dict[str, Any]:
    """Return all differences, as --json prints them."""
    found: dict[str, Any] = {"a": str(a.path), "b": str(b.path), **_sections(a, b)}
    found["numbers"] = numbers(a.log, b.log)
    found["scores"] = numbers(a.scores, b.scores)
    found["growth"] = growth(a.log, b.log)
    found["tensors"] = tensors(a, b)
    found["step"] = step(a, b, found["numbers"], args)
    points = found["numbers"]["points"] + found["scores"]["points"]
    points += found["tensors"].get("compared", 0) + found["step"].get("compared", 0)
    found["missing"] = ["no step is there of both"]
    if points:
        found["missing"] = missing(a, b, found, args)
    found["verdict"] = _verdict_of(found)
    found["same"] = found["verdict"] == SAME
    if not points and not found["differs"]:
        steps = "they have no step in common, in log, checkpoints or records"
        raise LockstepError(
            f"nothing of A and B can be compared: {steps}", f"{a.path}, {b.path}", "give others"
        )
    found["sentence"] = sentence(found)
    return found


def _sections(a: Side, b: Side) -> dict[str, Any]:
    """Sort the differences of `around`: "differs", "no matter", and equal sections as "alike"."""
    found: dict[str, Any] = {"differs": {}, "no matter": {}, "alike": []}
    for section, differences in around(a, b).items():
        if differences == {}:
            found["alike"].append(section)
        for key, (x, y, matters) in (differences or {}).items():
            kind = "differs" if matters else "no matter"
            found[kind].setdefault(section, {})[key] = [x, y]
    return found


def _verdict_of(found: dict[str, Any]) -> str:
    logged = found["numbers"]["first"] or found["scores"]["first"]
    if logged or found["tensors"].get("differ") or found["step"].get("sentence"):
        return DIFFER
    return UNKNOWN if found["missing"] else SAME


def missing(a: Side, b: Side, found: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """Return the parts of A or B that are needed for a verdict on all steps and are absent."""
    texts = list[str]()
    for side in (a, b):
        if side.lacking:
            lines = amount(len(side.lacking), "line")
            texts.append(f"{side.name}'s log lacks {lines}, the first of step {side.lacking[0]}")
        texts += [f"{side.name}'s checkpoint {name} is gone" for name in side.gone]
    texts += _evaluations_missing(a, b)
    if args.step and not found["step"].get("compared"):
        texts.append(
            f"step {args.step} was not compared: "
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
    """Return the log points of evaluation that a log lacks and the other log has.

    The result is empty if the runs evaluate at different steps.
    """
    if a.config.get("eval_every") != b.config.get("eval_every") or not (a.is_run and b.is_run):
        return []
    texts = list[str]()
    both = min(a.last, b.last)
    for side, other in ((a, b), (b, a)):
        lacking = sorted(other.scores.keys() - side.scores.keys())
        # every run evaluates at its end
        steps = [step for step in lacking if step < both or step == a.last == b.last]
        if steps and side.has_whole_log:
            texts.append(
                f"{side.name}'s log lacks {amount(len(steps), 'evaluation')}, the first of step "
                f"{steps[0]}"
            )
    return texts


def _proven(a: Side, b: Side, found: dict[str, Any]) -> int:
    """Return the last step with bits of the weights on both sides: digests in the logs, or
    checkpoints."""
    return max([*_with_digests(a.log, b.log), found["tensors"].get("step", 0)])


def _with_digests(a: Log, b: Log) -> list[int]:
    """Return the log points with a digest of the weights in both logs."""
    common = sorted(a.keys() & b.keys())
    return [step for step in common if a[step].get("digest") and b[step].get("digest")]


Differences = dict[str, tuple[Any, Any, bool]]
"""Name -> (in A, in B, whether it can change the numbers)."""


def around(a: Side, b: Side) -> dict[str, Differences | None]:
    """Return the differences beside the numbers, by section; None for a section that is not known
    of both."""
    virtual = _both_virtual(a, b)
    return {
        "start": start(a, b),
        "config": _config(a, b, virtual),
        "code": _code(a, b),
        "environment": _environment(a, b),
        "data": _data(a.data, b.data),
        "processes": _fact("processes", a.processes, b.processes, not virtual),
    }


def _both_virtual(a: Side, b: Side) -> bool:
    """Return whether both runs have the same number of virtual workers."""
    return bool(0 < a.config.get("virtual_workers", 0) == b.config.get("virtual_workers", 0))


def _data(a: Fingerprint, b: Fingerprint) -> Differences | None:
    """Compare the data; None if the data of a run are not known."""
    if not a.text or not b.text:
        return None
    parts = data_difference(a, b).parts
    if not parts:
        return {}
    return {"fingerprint": (a.text, b.text, True)} | {
        part: (a.facts[part], b.facts[part], True) for part in parts if part in a.facts
    }


def _fact(name: str, x: Any, y: Any, matters: bool = True) -> Differences | None:
    """Compare one fact; None if the fact is not known of both."""
    if not x or not y:
        return None
    return {} if x == y else {name: (x, y, matters)}


def _config(a: Side, b: Side, virtual: bool) -> Differences:
    found: Differences = {}
    free = _free_keys(a, b, virtual)
    for key in a.config | b.config:
        if a.config.get(key) != b.config.get(key) and key != "save_dir":
            x = a.config.get(key, "absent")
            y = b.config.get(key, "absent")
            found[key] = x, y, not config.is_in(key, free)
    found |= _fact("samples of a step", a.sizes.global_batch, b.sizes.global_batch) or {}
    return found | (_fact("steps of the schedule", a.sizes.horizon, b.sizes.horizon) or {})


def _free_keys(a: Side, b: Side, virtual: bool) -> list[str]:
    """Return the keys and sections that cannot change the numbers of these two runs."""
    free = [*config.NO_NUMBERS]
    if virtual:
        free += config.NO_BITS
    for key, name in config.RESOLVED.items():
        if a.environment.get(name) == b.environment.get(name, "?"):
            free.append(key)
    if a.sizes.horizon == b.sizes.horizon > 0:
        free += ["steps", "epochs", "schedule.horizon"]
    return free


def _code(a: Side, b: Side) -> Differences | None:
    if not ((a.code and b.code) or (a.commit and b.commit)):
        return None
    found = _source_files(a, b)
    if a.commit and b.commit and a.commit != b.commit:
        found["commit"] = a.commit, b.commit, not a.code or bool(found)
    return found


def _source_files(a: Side, b: Side) -> Differences:
    """Return the source files and packages that differ; of older runs, the digest of all."""
    if not (a.code_files and b.code_files):
        return {} if a.code == b.code else {"source files": (a.code, b.code, True)}
    found: Differences = {}
    names = code_digest.differences(_with_one_name(a, a), _with_one_name(b, a))
    for name, (x, y) in names.items():
        found[f"source file {name}"] = x, y, True
    return found


def _with_one_name(side: Side, first: Side) -> Code:
    """Return the code of a side. The task's own file has the name of `first`'s task file."""
    key, of_first = (code_digest.key_of_task(str(each.config["task"])) for each in (side, first))
    return {of_first if each == key else each: digest for each, digest in side.code_files.items()}


def _environment(a: Side, b: Side) -> Differences | None:
    if not a.environment or not b.environment:
        return None
    found: Differences = {}
    for name, x in a.environment.items():
        found |= _fact(name, x, b.environment.get(name)) or {}
    return found


def start(a: Side, b: Side) -> Differences | None:
    """Compare the weights at the beginning of two runs, if the configs name files."""
    found: Differences = {}
    for key in ("resume", "init_from"):
        one = Path(str(a.config.get(key) or ""))
        other = Path(str(b.config.get(key) or ""))
        files = [path for path in (one, other) if path.exists() and path != Path()]
        if one == other or not files:
            continue
        texts = ["given for one of them alone"]
        if len(files) == 2:
            texts = _parts(_initial(key, one), _initial(key, other))["lines"]
        if texts:
            found[key] = str(one), "; ".join([str(other), *texts]), True
    return found or None


def _initial(key: str, path: Path) -> CheckpointState:
    if key == "resume":
        return api.read(path)
    return CheckpointState(model=weights.read(path))


class Number(NamedTuple):
    """A different number of a log point.

    relative  the difference divided by the larger number
    """

    name: str
    relative: float


Log = dict[int, dict[str, Any]]
"""Step -> line of the log."""


def numbers(a: Log, b: Log) -> dict[str, Any]:
    """Compare two logs.

    Return the number of common log points, how many have a digest of the weights, the first
    different log point (0: none) with the relative differences, and the last log point that is
    certainly equal: of equal digests, if there are any.
    """
    common = sorted(a.keys() & b.keys())
    digests = _with_digests(a, b)
    first = 0
    differing = list[Number]()
    for each in common:
        differing = _differing(a, b, each)
        if differing:
            first = each
            break
    equal = [each for each in digests or common if each < first or not first]
    return {
        "points": len(common),
        "digests": len(digests),
        "first": first,
        "last equal": max(equal, default=0),
        "differing": [*map(list, differing)],
    }


def growth(a: Log, b: Log) -> list[list[Any]]:
    """Return [step, largest relative difference of a logged number, its name] for each common log
    point."""
    left_out = {*OF_THE_STEP, "skipped_steps"} - {"grad_norm"}
    found = []
    for each in sorted(a.keys() & b.keys()):
        sizes = {d.name: d.relative for d in _differing(a, b, each) if d.name not in left_out}
        # of equal sizes grad_norm comes last
        name = max(sizes, key=lambda name: (sizes[name], name != "grad_norm"), default="")
        found.append([each, sizes.get(name, 0.0), name])
    return found


def _differing(a: Log, b: Log, at: int) -> list[Number]:
    """Return the different numbers of a log point. Means over several steps count only if both logs
    have the same log point before."""
    same_span = _point_before(a, at) == _point_before(b, at)
    found = []
    for name, x in a[at].items():
        counts = name not in TIMES and (same_span or name in OF_THE_STEP)
        if counts and name in b[at] and _text(x) != _text(b[at][name]):
            found.append(Number(name, _relative(x, b[at][name])))
    return found


def _point_before(log: Log, at: int) -> int:
    return max((step for step in log if step < at), default=-1)


def _text(value: Any) -> str:
    if isinstance(value, int | float):
        value = float(value)
    return repr(value)  # NaN equals NaN


def _relative(x: Any, y: Any) -> float:
    """Return the difference divided by the larger number; 1 without two finite numbers."""
    if not all(isinstance(each, int | float) and math.isfinite(each) for each in (x, y)):
        return 1.0
    return abs(x - y) / max(abs(x), abs(y))


# ---- tensors
# --------------------------------------------------------------------------------------------------


def tensors(a: Side, b: Side) -> dict[str, Any]:
    """Compare the last common checkpoint."""
    steps = a.checkpoints.keys() & b.checkpoints.keys()
    if steps:
        last = max(steps)
        states = api.read(a.checkpoints[last]), api.read(b.checkpoints[last])
        return {"step": last, **_parts(*states)}
    if a.checkpoints and b.checkpoints:
        return {"missing": [max(a.checkpoints), max(b.checkpoints)]}
    return {}


def _parts(one: CheckpointState, other: CheckpointState) -> dict[str, Any]:
    """Return the differences of two checkpoints: a line for each part."""
    texts = []
    different = []
    total = 0
    other_parts = other.exact_parts()
    for part, value in one.exact_parts().items():
        x = dict(tree_leaves(value))
        y = dict(tree_leaves(other_parts[part]))
        names = x | y
        total += len(names)
        leaves = {name: _leaf(x.get(name), y.get(name)) for name in names}
        differ = {name: leaf for name, leaf in leaves.items() if leaf}
        if differ:
            different.append(part)
            texts.append(f"{part}: {_of_part(differ, len(names))}")
    return {"compared": total, "differ": different, "lines": texts}


def _of_part(differ: dict[str, Leaf], total: int) -> str:
    """Return the different leaves of a part as text: every number, or the first and the largest."""
    if sum(leaf.numbers for leaf in differ.values()) <= FEW:
        return ", ".join([text for name in differ for text in _few(name, differ[name])])
    most = max(differ, key=lambda name: differ[name].relative)
    chosen = dict.fromkeys([next(iter(differ)), most])
    sizes = ", ".join(f"{name} {differ[name].size}" for name in chosen)
    return f"{len(differ)} of {total} differ: {sizes}"


class Leaf(NamedTuple):
    """The difference of a tensor or a number.

    relative  norm of the difference divided by the norm of A
    flips     index -> both values, if only a few numbers differ
    """

    numbers: int
    of: int
    relative: float
    flips: dict[tuple[int, ...], str]

    @property
    def size(self) -> str:
        """The size of the difference, or both values."""
        if () in self.flips:
            return self.flips[()]
        return (
            f"by {self.relative:.1e} of its norm in {self.numbers} of {amount(self.of, 'number')}"
        )


def _few(name: str, leaf: Leaf) -> list[str]:
    return [f"{name}{[*index] or ''}: {text}" for index, text in leaf.flips.items()]


def _leaf(x: Any, y: Any) -> Leaf | None:
    """Compare two leaves of a checkpoint, in bits; None if equal."""
    are_tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
    if not are_tensors or x.shape != y.shape or x.dtype != y.dtype:
        one = _described(x)
        other = _described(y)
        if one == other:
            return None
        return Leaf(1, 1, 1.0, {(): f"{one} in A, {other} in B"})
    bits = _bytes_of(x), _bytes_of(y)
    places = (bits[0] != bits[1]).any(1).nonzero()[:, 0]
    if not len(places):
        return None
    wide = _widened(x), _widened(y)
    norm = float(wide[0].abs().square().sum().sqrt())
    apart = float((wide[0] - wide[1])[places].abs().square().sum().sqrt())
    flips = {}
    if len(places) <= FEW:
        for place in places.tolist():
            index = tuple(map(int, np.unravel_index(place, x.shape)))
            flips[index] = _flip(bits, wide, place)
    return Leaf(len(places), x.numel(), apart / norm if norm else 1.0, flips)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return repr(value)


def _bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of each number of a tensor, (N, bytes) uint8."""
    return x.contiguous().view(-1).view(torch.uint8).view(x.numel(), -1)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64).reshape(-1)


def _flip(bits: tuple[Tensor, Tensor], wide: tuple[Tensor, Tensor], place: int) -> str:
    """Return both values of a number, and the position of a single flipped bit.

    bits  (N, bytes) of A and of B
    wide  (N,) of A and of B in double precision
    """
    words = [int.from_bytes(bytes(each[place].tolist()), "little") for each in bits]
    flipped = words[0] ^ words[1]
    values = f"{wide[0][place].item():.9g} in A, {wide[1][place].item():.9g} in B"
    if flipped.bit_count() == 1:
        return f"bit {flipped.bit_length() - 1} is flipped ({values})"
    return values


# ---- one step again
# -------------------------------------------------------------------------------------------------


def step(a: Side, b: Side, logged: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Compare the computation of one step: from existing records, or from repeated steps."""
    of_file = [side.record.about["step"] for side in (a, b) if side.record]
    both = _recorded_steps(a) & _recorded_steps(b)
    wanted = args.step or [*of_file, logged["first"]][0]
    at = 0
    if len(of_file) == 2:
        at = of_file[0]
    elif wanted in both:
        at = wanted
    elif args.no_replay:
        at = min(both, default=0)
    if at:
        return _verdict(_recorded(a, at), _recorded(b, at), logged, _settings(a, b))
    if args.no_replay or not wanted:
        return {}
    try:
        return _again(a, b, logged, wanted, exactly=bool(args.step or of_file), trust=args.trust)
    except LockstepError as error:
        if error.exit_code > 128:  # a signal ended this tool
            raise
        return {"impossible": str(error)}


def _recorded_steps(side: Side) -> set[int]:
    """Return the steps of the records in the folder of a run, or of a record."""
    paths = [*side.folder.glob("record_step_*.npz")]
    if side.record:
        paths = [side.path]
    return {_step_of(path) for path in paths}


def _step_of(path: Path) -> int:
    number = path.stem.rpartition("_")[2]
    return int(number) if number.isdigit() else 0


def _recorded(side: Side, at: int) -> records.Record:
    return side.record or records.read(side.folder / f"record_step_{at}.npz")


def _settings(a: Side, b: Side) -> str:
    """Return a text about different settings that change more than the rounding of sums; may be
    empty."""
    texts = []
    for key, (x, y, matters) in _config(a, b, _both_virtual(a, b)).items():
        if matters and not config.is_in(key, config.ONLY_ROUNDING):
            texts.append(f"{key} is {x} in A, {y} in B")
    if len(texts) > 2:
        texts[2:] = [f"{len(texts) - 2} more settings differ"]
    return ", ".join(texts)


def _verdict(
    a: records.Record, b: records.Record, logged: dict[str, Any], settings: str
) -> dict[str, Any]:
    """Return the difference of two records of a step, with a sentence.

    settings  a text about different settings, see `_settings`
    """
    if a.about["lr"] != b.about["lr"]:
        rates = f"the learning rate is {a.about['lr']:.6g} in A, {b.about['lr']:.6g} in B"
        settings = ", ".join(filter(None, [settings, rates]))
    found = records.compare(a, b)
    number = a.about["step"]
    first = next(iter(found.differences), None)
    text = found.sentence(settings)
    if first and first.kind == "weight" and a.about["lr"] != b.about["lr"]:
        text = f"{text}; the learning rate is {a.about['lr']:.6g} in A, {b.about['lr']:.6g} in B"
    began_equal = 0 < number - 1 == logged["last equal"]
    if first and _is_first_output(first, a) and not began_equal:
        text = f"{text}; the weights may differ before the step"
    return {
        "step": number,
        "sentence": text,
        "same passes": found.same_cut,
        "why": _why(found),
        "rounding alone": bool(first) and not found.beyond and not settings,
        "compared": found.compared,
        "unmatched": found.unmatched,
        "differences": [*map(_as_json, found.differences)],
    }


def _is_first_output(difference: records.Difference, record: records.Record) -> bool:
    """Return whether numbers beyond rounding differ in the output of the first module."""
    if difference.kind != "forward" or difference.rounding or difference.why:
        return False
    forward = [entry for entry in record.about["entries"] if entry["kind"] == "forward"]
    return bool(difference.name == forward[0]["name"])


def _as_json(difference: records.Difference) -> dict[str, Any]:
    found = {"text": str(difference), **difference._asdict()}
    if not math.isfinite(difference.relative):
        found["relative"] = None
    return found


PARTITION_DEPENDENT = {
    "Dropout": "draws for the samples of its pass",
    "BatchNorm": "computes with the samples of its pass",
}
"""Part of a module's name -> how the module depends on the partition."""


def _why(found: records.Found) -> str:
    """Return how a module depends on the partition; empty without such a module or with equal
    partitions."""
    if found.same_cut or not found.beyond:
        return ""
    module = found.beyond.module
    for name, effect in PARTITION_DEPENDENT.items():
        if name in module:
            return (
                f"{module} {effect}, and the passes differ; virtual_workers make them the same on "
                "any processes"
            )
    return ""


def _again(
    a: Side, b: Side, logged: dict[str, Any], wanted: int, exactly: bool, trust: bool
) -> dict[str, Any]:
    """Repeat the steps up to `wanted`, or up to the first different step, and compare the
    records."""
    notes = list[str]()
    with tempfile.TemporaryDirectory(prefix="lockstep_") as scratch:
        number = wanted
        if not exactly:
            number = logged["last equal"] + 1
        before = number - 1
        again = _both_taken(a, b, before, wanted, number, Path(scratch), trust)
        if not exactly:
            notes = _other_than_logged(a, again[0]) + _other_than_logged(b, again[1])
            parted = numbers(_after(again[0].log, before), _after(again[1].log, before))["first"]
            if not parted:
                text = (
                    f"taken again with this checkout, both take the same bits up to step {wanted}: "
                    f"the difference lies in what was not taken again: {_not_replayed(a, b)}"
                )
                return {"vanished": text, "notes": notes}
            if parted != number:
                number = parted
                again = _both_taken(a, b, before, number, number, Path(scratch), trust)
            if number > 1:
                logged = logged | {"last equal": number - 1}
        found = [_recorded(side, number) for side in again]
        verdict = _verdict(found[0], found[1], logged, _settings(a, b))
        return verdict | {"notes": notes, "first": not exactly}


def _both_taken(
    a: Side, b: Side, before: int, to: int, record: int, place: Path, trust: bool
) -> list[Side]:
    again = []
    for side in (a, b):
        again.append(_taken(side, before, to, record, place / f"{side.name}_{record}", trust))
    return again


def _after(log: Log, step: int) -> Log:
    return {number: line for number, line in log.items() if number > step}


def _other_than_logged(side: Side, again: Side) -> list[str]:
    """Return a note if the repetition of a run has other numbers than the run's log."""
    if not side.log or not numbers(side.log, again.log)["first"]:
        return []
    text = f"taken again here, {side.name} does not take its own bits: "
    return [text + _elsewhere(side, again)]


def _taken(side: Side, before: int, to: int, record: int, folder: Path, trust: bool) -> Side:
    """Return A or B, repeated up to step `to` in a new run; a record is returned unchanged."""
    has_record = (side.folder / f"record_step_{record}.npz").is_file()
    if side.record or (before + 1 == to == record and has_record):
        return side
    begun = max([step for step in side.checkpoints if step <= before], default=0)
    source = _source(side, begun)
    horizon = side.config.get("schedule.horizon") or side.sizes.horizon
    if not horizon and not side.config.get("epochs"):
        horizon = side.config.get("steps", 0)
    settings = NO_MORE | {"resume": source, "record": record}
    if horizon:
        settings |= {"steps": to, "schedule": {"horizon": horizon}}
    settings |= _as_chosen(side, _processes_of(side, before + 1))
    folder.mkdir()
    changes = folder / "changes.yaml"
    changes.write_text(yaml.safe_dump(settings))
    config_of_run = of_run(trust, [str(side.folder)], needs_checkpoint=False)[1]
    words = ["--config", config_of_run, "--config", str(changes)]
    name = f"step {to} of {side.name} again"
    with tqdm(total=to - begun, unit="step", desc=name, disable=None, leave=False) as bar:
        ended = train_in(
            folder / "run",
            words,
            _processes_of(side, before + 1),
            kill_at=0 if horizon else to,
            notify=lambda now: bar.update(max(0, now - begun - bar.n)),
        )
    again = Side(side.name, folder / "run", folder / "run")
    if (again.folder / "config.yaml").is_file():
        again = _of_folder(side.name, again.folder)
    if to not in again.log:
        raise LockstepError(
            f"{side.name} cannot be taken again here: {ended.problem}",
            str(side.path),
            "give --no-replay",
        )
    return again


def _source(side: Side, begun: int) -> str:
    """Return `resume` of a repetition: the checkpoint of step `begun`, or the beginning of the run.

    Raises LockstepError if the repetition cannot start.
    """
    if begun in side.checkpoints:
        return str(side.checkpoints[begun])
    if side.path.is_file():
        raise LockstepError(
            f"{side.name} is a checkpoint of a later step", str(side.path), "give a later --step"
        )
    source = str(side.config.get("resume", ""))
    if source in ("auto", "never", ""):
        return "never"
    if not Path(source).is_file():
        raise LockstepError(
            f"the checkpoint that {side.name} began with is gone", source, "give --no-replay"
        )
    return source


def _processes_of(side: Side, step: int) -> int:
    """Return the number of processes that took a step of A or B."""
    return run_folder.processes_of_step({"starts": side.starts}, step) or side.processes or 1


def _as_chosen(side: Side, processes: int) -> dict[str, Any]:
    """Return the settings of the run's machine: the choices for auto, and shared GPUs."""
    device = SimpleNamespace(device=side.config.get("device", "auto"))
    backend = side.config.get("ddp.backend", "auto")
    settings = cards.sharing(cards.visible(device), processes, backend)
    for key, name in AS_CHOSEN.items():
        if side.environment.get(name, "auto") != "auto":
            settings[key] = side.environment[name]
    return settings


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
    "ddp": {"shares": []},
    "wandb": {"enable": False},
    "mlflow": {"enable": False},
}
"""Settings of a repeated step. No setting changes the step, except those that hide a model's
modules."""

AS_CHOSEN = {"threads": "threads", "amp": "precision", "memory_format": "memory_format"}
"""Keys with `auto` are set to the run's own choice: key -> name in the environment."""


def _elsewhere(side: Side, again: Side) -> str:
    """Return the differences between a run and the repetition of the run."""
    differences = _environment(side, again) or {}
    texts = [f"{key}: {x} then, {y} now" for key, (x, y, _) in differences.items()]
    changed = _source_files(side, again)
    if side.code_files and changed:
        names = [name.removeprefix("source file ") for name in changed]
        texts.append(f"source files: {few(names)}")
    elif changed:
        texts.append(f"source files: {side.code} then, {again.code} now")
    texts += _other_processes(side)
    return ", ".join(texts) or "nothing that is noted differs; its data may have changed"


def _other_processes(side: Side) -> list[str]:
    """Return a text for each start of A or B on another number of processes than before. With
    virtual workers the number does not matter."""
    if side.config.get("virtual_workers"):
        return []
    texts = []
    for (_, before), (step, processes) in itertools.pairwise(side.starts):
        if processes != before:
            number = amount(processes, "process")
            texts.append(f"{side.name} was started again at step {step} on {number}, not {before}")
    return texts


def _not_replayed(a: Side, b: Side) -> str:
    texts = _other_processes(a) + _other_processes(b)
    for section, differences in (("code", _code(a, b)), ("environment", _environment(a, b))):
        if differences:
            texts.append(f"{section}: {', '.join(differences)}")
    return "; ".join(texts) or "the machine, or data that have changed since"


# ---- print
# --------------------------------------------------------------------------------------------------


def sentence(found: dict[str, Any]) -> str:
    """Return the verdict as one sentence."""
    if found["verdict"] != DIFFER:
        return _of_no_difference(found)
    logged = found["numbers"]
    at_step = found["step"]
    if at_step.get("sentence"):
        where = f"Step {at_step['step']} differs"
        if at_step["step"] == 1 or at_step.get("first"):
            where = f"They part at step {at_step['step']}"
        if at_step["rounding alone"] and not at_step["same passes"]:
            where += ", by rounding"
        return f"{where}: {at_step['sentence']}"
    if at_step.get("vanished"):
        return f"They part at step {logged['first']}, but {at_step['vanished']}"
    if logged["first"] and logged["last equal"]:
        after = f"after step {logged['last equal']}"
        return f"They part {after}, at step {logged['first']} at the latest."
    if logged["first"]:
        return f"They part, at step {logged['first']} at the latest."
    if found["tensors"].get("differ"):
        return (
            f"The checkpoints of step {found['tensors']['step']} differ: "
            f"{found['tensors']['lines'][0]}"
        )
    return f"The evaluation of step {found['scores']['first']} differs; the training does not."


def _of_no_difference(found: dict[str, Any]) -> str:
    """Return the sentence for equal numbers, or for a part that is missing."""
    equal = []
    if found["numbers"]["points"]:
        equal.append(amount(found["numbers"]["points"], "log point"))
    if "step" in found["tensors"]:
        equal.append(f"the checkpoints of step {found['tensors']['step']}")
    if found["step"].get("compared"):
        equal.append(f"the records of step {found['step']['step']}")
    if found["verdict"] == SAME:
        return f"The same bits: {', '.join(equal)}."
    reasons = [*found["missing"]]
    if equal:
        reasons.append(f"the same where both can be compared: {', '.join(equal)}")
    elif found["differs"]:
        reasons.append("they differ in what is around the numbers")
    return f"Not known to be the same: {'; '.join(reasons)}."


def lines(a: Side, b: Side, found: dict[str, Any]) -> list[str]:
    """Return the differences as lines: the verdict, the differences beside the numbers, the
    numbers."""
    rows: list[tuple[str, str]] = [("A", str(a.path)), ("B", str(b.path)), ("", found["sentence"])]
    at_step = found["step"]
    if at_step.get("why"):
        rows.append(("why", at_step["why"]))
    rows += _rows_around(found)
    rows += _rows("log", _about_log(found))
    if found["verdict"] == DIFFER:
        rows += _rows("missing", found["missing"])
    tensors = found["tensors"]
    rows += _rows(f"step {tensors.get('step')}", tensors.get("lines", []))
    if "missing" in tensors:
        one, other = tensors["missing"]
        rows.append(("weights", f"the checkpoints are of other steps: {one} and {other}"))
    rows += _rows("replay", at_step.get("notes", []))
    if "impossible" in at_step:
        rows.append(("replay", f"not possible: {at_step['impossible']}"))
    width = max(len(name) for name, _ in rows)
    texts = []
    for name, text in rows:
        texts.append(f"{name:<{width}}  {text}" if name else f"\n{text}\n")
    return [*texts, *_table(found["growth"])]


def _rows(name: str, texts: list[str]) -> list[tuple[str, str]]:
    return [(name, text) for text in texts]


def _rows_around(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a row for each difference that may matter, and for each section."""
    rows = []
    for section, differences in found["differs"].items():
        for key, (x, y) in differences.items():
            rows.append((section, f"{key}: {x} in A, {y} in B{MEANINGS.get(key, '')}"))
    for section, differences in found["no matter"].items():
        keys = ", ".join(f"{key} ({x}, {y})" for key, (x, y) in differences.items())
        rows.append((section, f"cannot change the numbers: {keys}"))
    if found["alike"]:
        rows.append(("alike", ", ".join(found["alike"])))
    return rows


MEANINGS = {
    "processes": (
        " (without virtual_workers sums are rounded otherwise, BatchNorm and dropout "
        "see other samples)"
    ),
    "samples of a step": " (another training: give both the same global_batch)",
}
"""Meaning of a difference that is no key of a config."""


def _about_log(found: dict[str, Any]) -> list[str]:
    texts = [_about_points(found["numbers"], "log point")]
    texts.append(_about_points(found["scores"], "evaluation"))
    return [*filter(None, texts)]


def _about_points(logged: dict[str, Any], kind: str) -> str:
    """Return a line about the log points of the training or the evaluation; empty without any."""
    if not logged["points"]:
        return ""
    points = amount(logged["points"], kind)
    if not logged["first"]:
        text = f"the same numbers at {points}"
        if logged["digests"]:
            text += f", and the same digests at {logged['digests']}"
        return text
    differing = [number for number in logged["differing"] if number[0] != "digest"]
    sizes = [f"{name} by {relative:.1e}" for name, relative in differing]
    if len(sizes) > 5:
        sizes[4:] = [f"{len(sizes) - 4} more"]
    only = ", ".join(sizes) or "only the digest of the weights"
    text = f"step {logged['first']} is the first of {points} that differs: {only}"
    if logged["last equal"]:
        text += f"; step {logged['last equal']} is equal"
    return text


def _table(growth: list[list[Any]]) -> list[str]:
    """Return the growth of the difference in about eight rows."""
    different = [number for number, (_, size, _) in enumerate(growth) if size]
    if not different:
        return []
    begin = different[0]
    spread = np.geomspace(1, len(growth) - begin, 8).round().astype(int) + begin - 1
    rows = [["step", "relative difference", "of"]]
    for number in sorted({begin, *spread}):
        at, size, name = growth[number]
        rows.append([str(at), f"{size:.1e}", name])
    return ["", *aligned(rows)]


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
    """Draw the relative difference over steps, on a log scale. Equal log points are drawn at the
    bottom."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = {step: size or math.nan for step, size, _ in growth}
    equal = [step for step, size, _ in growth if not size]
    bottom = min([size for _, size, _ in growth if size], default=1e-8) / 10
    name = "largest of a logged number"
    axes.semilogy([*sizes], [*sizes.values()], marker=".", label=name)
    if equal:
        style: dict[str, Any] = {"linestyle": "", "marker": "|", "color": "gray"}
        axes.semilogy(equal, [bottom] * len(equal), label="equal in bits", **style)
    axes.set(xlabel="step", ylabel="relative difference")
    axes.legend()
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:])
    try:
        write_atomically(path, lambda file: file.write(drawn.getvalue()))
    except OSError as error:
        raise LockstepError(
            f"the picture was not written: {error.strerror}", str(path), "give another path"
        ) from None
