"""Write a trained model as a folder that can be handed on: for the Hugging Face Hub, and for our
own tools.

python tools/publish.py RUN --to mouse-r1 --license mit
python tools/publish.py RUN --to mouse-r1 --license other --license-name lab-terms --license-link
    LICENSE.md
python tools/publish.py RUN --to mouse-r1 --license mit --study checkpoints/study_video
hf upload USER/mouse-r1 mouse-r1                       pip install huggingface_hub; the upload is
                                                       yours

RUN is the folder of a run (its best checkpoint) or one of its checkpoints; dataset.root=... after
it says where the data lie now. They are read: the samples that the model has seen are counted and
hashed, and the validation is scored.

    model.safetensors    the weights that an evaluation takes (their average, if the run keeps one);
                         no optimizer
    config.yaml          the run's config: no absolute path, save_dir, secret or wandb account
    checkpoint.json      step, precision, metadata of the task: all else that the tools need
    labels.json          the classes, if there are any
    provenance.json      what the model has seen, see tools/provenance.py; the sources of the test
    eval_results.json    metrics of the validation, of each class and source; of the test and the
                         study if there are any
    proof.json           digests, machine and versions, and the command that ends in them
    README.md            the model card

predict, evaluate, export and init_from take DIR in place of RUN. A run is not continued from it.
--no-sources leaves out the names of people, videos and recordings. A task's own file is program
code: --with-task copies it, and whoever uses it must give --trust.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

import tasks
from engine import checkpoint, config, errors
from engine.comm import digests
from engine.contract import Task
from engine.errors import LockstepError, headline
from engine.files import archive
from engine.files.archive import CheckpointState
from engine.files.store import find_checkpoint
from engine.files.weights import fitted
from formats.partial import Partial
from plugins.resilience import status
from tasks import har, robot, video
from tools.evidence import provenance
from tools.paper import model_card
from tools.paper.report_scores import score
from tools.running import alone, guarded
from tools.use import published
from tools.use.evaluate import TRUST, of_run
from tools.use.tables import finite

KINDS: tuple[tuple[type[Task], str, list[str]], ...] = (
    (
        har.Task,
        "",
        ["time-series", "time-series-classification", "human-activity-recognition", "sensors"],
    ),
    (video.Task, "video-classification", ["behavior"]),
    (robot.Task, "robotics", ["imitation-learning"]),
)
"""(task, the Hub's pipeline tag, tags); the Hub has no pipeline for time series."""

NOT_HANDED_ON = ("save_dir", "resume", "gpu_ids", "record", "wandb", "mlflow")
SECRET = re.compile(r"(^|[._])(api_?key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
BEGAN = re.compile(r"(^|\.)(init_from|pretrained|pretrained_path)$")
OF_A_SPLIT = re.compile(r"exclude|(train|val|test)_")
TEST = "test.json"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="publish.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, or a checkpoint")
    add(
        "--to",
        type=Path,
        metavar="DIR",
        help="a new folder; its name is the model's, on the Hub, too",
    )
    add(
        "--license",
        metavar="ID",
        help="of the weights, as the Hub names it (mit, apache-2.0, cc-by-4.0); or other",
    )
    add("--license-name", metavar="NAME", help="of another license")
    add("--license-link", metavar="LINK", help="its text: a URL, or a file that you put into DIR")
    add(
        "--dataset",
        action="append",
        default=[],
        metavar="ID",
        help="a data set on the Hub that it was trained on",
    )
    add("--tag", action="append", default=[], metavar="TAG", help="one more tag on the Hub")
    add(
        "--source",
        metavar="URL",
        default="",
        help="where the results come from, such as the code's repository",
    )
    add(
        "--study",
        type=Path,
        metavar="DIR",
        help="the folder of a study of this model: mean and spread over its folds",
    )
    add("--with-task", action="store_true", help="copy the task's own file")
    add(
        "--no-sources",
        action="store_true",
        help="leave out the names of people, videos and recordings",
    )
    add("--no-contents", action="store_true", help="hash no sample: counts without a root")
    add("--json", action="store_true", help="one JSON object on stdout")
    add("--trust", action="store_true", help=TRUST)
    asked, rest = parser.parse_known_args(argv)

    def translate(words: list[str]) -> list[str]:
        _check_asked(asked)
        return of_run(asked.trust, words)

    return guarded([asked.run, *rest], partial(_publish, asked=asked), translate)


def _check_asked(asked: argparse.Namespace) -> None:
    """Raise LockstepError for what can be told without the run."""
    if not asked.to:
        raise LockstepError("no folder to write", "--to", "give the name of a new folder")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", asked.to.name):
        todo = "a model's name on the Hub has letters, digits, - _ and ."
        raise LockstepError(f"{asked.to.name!r} is no name for a model", "--to", todo)
    if asked.to.exists() or asked.to.is_symlink():
        raise LockstepError(f"{asked.to} exists", "--to", "give a new folder: nothing is replaced")
    if not asked.license:
        todo = "give one such as mit or cc-by-4.0, or other with --license-name and --license-link"
        raise LockstepError("nobody may use a model without a license", "--license", todo)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", asked.license):
        raise LockstepError(
            f"{asked.license!r} is no license ID of the Hub",
            "--license",
            "give such as mit, or other",
        )
    extra = [bool(asked.license_name), bool(asked.license_link)]
    if asked.license == "other" and not all(extra):
        raise LockstepError(
            "which other license?", "--license", "give --license-name and --license-link"
        )
    if asked.license != "other" and any(extra):
        raise LockstepError(
            f"{asked.license} needs no name and no link",
            "--license",
            "drop them, or give --license other",
        )
    for option, names in (("--dataset", asked.dataset), ("--tag", asked.tag)):
        if wrong := [name for name in names if not re.fullmatch(r"[\w.:/-]{1,96}", name)]:
            raise LockstepError(
                f"{wrong[0]!r} is no name on the Hub", option, "give such as user/name"
            )
    if asked.source and not re.fullmatch(r"https?://\S+", asked.source):
        raise LockstepError(f"{asked.source!r} is no URL", "--source", "give such as https://...")


def _publish(args: config.Args, asked: argparse.Namespace) -> int:
    alone("one process writes it", "publish.py")
    out: Path = asked.to
    published.safetensors()  # now: what follows may take minutes
    saved, state = _opened(args, asked)
    weights = _weights(saved)
    study = _study(asked.study) if asked.study else None
    with contextlib.redirect_stdout(sys.stderr):
        print("Reading what it was trained on", flush=True)
        _, seen = provenance.tell(args, not asked.no_contents)
        print("Scoring the validation", flush=True)
        results = _results(args, asked, saved, state)
    texts = _texts(
        args, asked, saved, state, weights, seen, results | ({"study": study} if study else {})
    )
    sha256 = digests.of_tensors(weights.items())
    _write(out, weights, texts, _task_file(args.cfg.task) if asked.with_task else None)
    files = sorted(path.name for path in out.iterdir())
    own = args.cfg.task.endswith(".py") and not asked.with_task
    if asked.json:
        print(
            json.dumps(
                {
                    "folder": str(out),
                    "files": files,
                    "sha256": sha256,
                    "step": saved.progress["step"],
                }
            )
        )
        return status.set_exit_code(errors.DONE)
    print(f"{published.shown(saved.path or '')}, step {saved.progress['step']}:")
    for name in files:
        print(f"  {name:<20} {(out / name).stat().st_size / 1000:10.1f} kB")
    print(f"  weights              sha256 {sha256[:16]}")
    if own:
        print(f"note: whoever uses it needs {Path(args.cfg.task).name}, too (--with-task)")
    if not asked.no_sources and seen.get("sources"):
        print(f"note: it names {len(seen['sources'])} sources of the training data (--no-sources)")
    print(f"Wrote {out}; after a look at its README.md: hf upload USER/{out.name} {out}")
    return status.set_exit_code(errors.DONE)


# ---- the checkpoint
# --------------------------------------------------------------------------------------------------


def _opened(args: config.Args, asked: argparse.Namespace) -> tuple[CheckpointState, dict[str, Any]]:
    """Return the checkpoint, whole, and its file's contents. Raises LockstepError if it cannot be
    handed on."""
    path = Path(args.cfg.resume)
    if not path.exists():
        what = (
            "the run has no checkpoint yet"
            if Path(asked.run).is_dir()
            else f"no checkpoint {asked.run!r}"
        )
        raise LockstepError(what, asked.run, "let it train to its first evaluation", exit_code=3)
    find_checkpoint(str(path), None)  # compares its SHA-256 with the manifest's
    state = archive.read(path)
    saved, task = checkpoint.parse_state(state, path), tasks.load(args.cfg.task)
    if task.metadata is Task.metadata and task.full_dataset is Task.full_dataset:
        what, where = (
            "the task has no `metadata`, so its model cannot be used without the training data",
            args.cfg.task,
        )
        todo = (
            "give it `metadata` and `load_metadata` (of {} if `model` needs nothing), see "
            "engine/contract.py"
        )
        raise LockstepError(what, where, todo)
    if saved.metadata is None:
        todo = "resume the run for a step, and publish that"
        raise LockstepError(
            "an older version wrote the checkpoint, without metadata", str(path), todo, exit_code=3
        )
    if not _is_json(saved.metadata):
        what, todo = (
            "its `metadata` is not what JSON keeps",
            "return numbers, texts, lists, and dicts by text",
        )
        raise LockstepError(what, args.cfg.task, todo)
    if saved.left_out and saved.config["init_from"]:
        what = (
            f"weights are left to init_from={Path(saved.config['init_from']).name}, which is "
            "not handed on"
        )
        raise LockstepError(what, "the task's `saved`", "train with a task that saves them, too")
    return saved, state


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value) or "nan" in json.dumps(value).lower()
    except (TypeError, ValueError):
        return False


def _weights(saved: CheckpointState) -> dict[str, Tensor]:
    """Return the weights that an evaluation takes, by the model's names, in its order."""
    found = dict(saved.ema or saved.model)
    found.pop("n_averaged", None)
    found = fitted(found, saved.model)
    if strange := [
        name for name, value in found.items() if not isinstance(value, Tensor) or value.is_sparse
    ]:
        what = f"{strange[0]} is no plain tensor, and safetensors holds no other"
        raise LockstepError(what, str(saved.path), "hand on the checkpoint itself")
    return found


def public(value: Any, key: str = "") -> Any:
    """Return a config's value without secrets; of a path outside of the working folder only the
    last part."""
    if isinstance(value, Mapping):
        left = () if key else NOT_HANDED_ON
        return {
            name: public(each, f"{key}.{name}") for name, each in value.items() if name not in left
        }
    if isinstance(value, list | tuple):
        return [public(each, key) for each in value]
    if not isinstance(value, str):
        return value
    return "" if SECRET.search(key) else without_paths(value)


def without_names(value: Any, key: str = "") -> Any:
    """Return a config without the names that choose a split."""
    if isinstance(value, dict):
        return {name: without_names(each, name) for name, each in value.items()}
    return [] if isinstance(value, list) and OF_A_SPLIT.match(key) else value


def without_paths(text: str) -> str:
    """Return a text in which each absolute path, and one from above this folder, is its last
    part."""
    if text.startswith(("/", "~", "..")):
        return Path(text).name
    return re.sub(r"(?<![\w.:/~-])(~|\.\.)?/([^\s/()]*/)*", "", text)


# ---- what is said of it
# ----------------------------------------------------------------------------------------------


def _results(
    args: config.Args, asked: argparse.Namespace, saved: CheckpointState, state: dict[str, Any]
) -> dict[str, Any]:
    """Return the metrics: of the validation, scored now and as logged, and of the test, if that was
    looked at."""
    assert saved.path
    step, folder, found = saved.progress["step"], saved.path.parent, dict[str, Any]()
    try:
        scores = score(args, "val", 0)
        found = {
            "split": "val",
            "count": scores.count,
            "metrics": scores.metrics,
            "per_class": scores.per_class(),
        }
        if scores.confusion is not None:
            found |= {"classes": scores.classes, "confusion": scores.confusion.tolist()}
        found |= {
            "notes": scores.notes,
            **({} if asked.no_sources else {"per_source": scores.by_source}),
        }
    except LockstepError as error:  # a task without `score`, or without validation data
        found = {"split": "val", "notes": [f"not scored: {without_paths(headline(error))}"]}
    logged = _logged(folder / "metrics.jsonl", step)
    found["logged"] = {
        name: value for name, value in logged.items() if name not in found.get("metrics", {})
    }
    results = {"step": step, "monitor": str(tasks.load(args.cfg.task).monitor), "validation": found}
    tested = _json_of(folder / TEST)
    mine = (
        tested.get("sha256", {}).get("weights") == digests.of_tensors(state["model"].items())[:16]
    )
    if tested and mine:
        names = (
            "count",
            "metrics",
            "classes",
            "confusion",
            "looks",
            *(() if asked.no_sources else ("by", "sources")),
        )
        results["test"] = {name: tested[name] for name in names if name in tested}
    return results


def _logged(log: Path, step: int) -> dict[str, float]:
    """Return the metrics of the last evaluation at a step."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for line in log.read_text("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a torn line
                event = json.loads(line)
                if event["event"] == "eval" and event["step"] == step:
                    others = ("event", "step", "epoch", "samples", "time_s")
                    found = {
                        k: v
                        for k, v in event.items()
                        if k not in others and isinstance(v, int | float)
                    }
    return found


def _study(folder: Path) -> dict[str, Any]:
    """Return what is told of a study: mean and spread of each config. Raises LockstepError where
    there is none."""
    path = (folder / "study.json") if folder.is_dir() else folder
    try:
        found = json.loads(path.read_bytes())
        configs = [
            {"name": without_paths(str(each["name"]))}
            | {
                level: {
                    name: {"mean": value["mean"], "sd": value["sd"], "n": value["n"]}
                    for name, value in each[key].items()
                }
                for level, key in (("over_folds", "metrics"), ("over_sources", "over_sources"))
            }
            for each in found["configs"]
        ]
        about = {name: found[name] for name in ("what", "by", "monitor", "trainings", "tested")}
        return about | {"seeds": found["seeds"], "folds": len(found["folds"]), "configs": configs}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        todo = "give the folder of a study that tools/study.py has finished"
        raise LockstepError("no results of a study", str(path), todo) from None


def _json_of(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def _proof(
    args: config.Args, asked: argparse.Namespace, saved: CheckpointState, state: dict[str, Any]
) -> dict[str, Any]:
    """Return digests, the machine, and the command that ends in these weights."""
    assert saved.path
    environment, replay = (
        _json_of(saved.path.parent / name) for name in ("environment.json", "replay.json")
    )
    processes = environment.get("processes", 1)
    name, own = asked.to.name, args.cfg.task.endswith(".py")
    script = (
        "python train.py"
        if processes == 1
        else f"torchrun --standalone --nproc_per_node={processes} train.py"
    )
    task = f" {name}/{Path(args.cfg.task).name}" if own else ""
    root = config.flatten(saved.config).get("dataset.root")
    data = (
        f" dataset.root={model_card.DATA}"
        if isinstance(root, str) and without_paths(root) != root
        else ""
    )
    if isinstance(root, list) and any(without_paths(str(each)) != each for each in root):
        data = f" 'dataset.root=[{', '.join([model_card.DATA] * len(root))}]'"
    device = str(args.cfg.device)
    found: dict[str, Any] = {
        "command": f"{script}{task} --config {name}/config.yaml{data}",
        "then": "python tools/evaluate.py RUN",
    }
    found |= {
        "trained_weights_sha256": digests.of_tensors(state["model"].items()),
        "device": device,
    }
    found |= {
        "steps": saved.progress["step"],
        "data": saved.data,
        "digest": str(state.get("digest") or ""),
    }
    flat = config.flatten(config.to_dict(args.cfg))
    names = [
        key for key, value in flat.items() if value != without_names(value, key.rpartition(".")[2])
    ]
    found["left_out"] = names if asked.no_sources else []
    keys = (
        "code",
        "git_commit",
        "git_dirty",
        "python",
        "packages",
        "cuda",
        "nccl",
        "processes",
        "threads",
    )
    found["run"] = {key: environment[key] for key in keys if environment.get(key) is not None}
    found["machine"] = {key: value for key, value in saved.environment.items() if value}
    told = (
        "from",
        "to",
        "share",
        "verdict",
        "points",
        "equal",
        "whole_run",
        "digest",
        "processes",
        "date",
    )
    return found | (
        {"replay": {key: replay[key] for key in told if key in replay}} if replay else {}
    )


def _texts(
    args: config.Args,
    asked: argparse.Namespace,
    saved: CheckpointState,
    state: dict[str, Any],
    weights: dict[str, Tensor],
    seen: dict[str, Any],
    results: dict[str, Any],
) -> dict[str, str]:
    """Return {file: its text}."""
    cfg, task = public(config.to_dict(args.cfg)), tasks.load(args.cfg.task)
    known, test = dict(saved.metadata or {}), dict(state.get("test") or {})
    if args.cfg.task.endswith(".py"):
        cfg["task"] = Path(args.cfg.task).name
    seen |= {"checkpoint": Path(seen["checkpoint"]).name, "init_from": Path(seen["init_from"]).name}
    if asked.no_sources:
        known = {
            name: value
            for name, value in known.items()
            if name not in ("videos", "subjects", "groups")
        }
        seen.pop("sources", None)
        test |= {"sources": {}} if test else {}
        cfg = without_names(cfg)
    seen |= {"test": test} if test else {}
    kept = (
        "progress",
        "global_batch",
        "num_samples",
        "horizon",
        "precision",
        "data",
        "memory_format",
        "environment",
    )
    about: dict[str, Any] = {name: state[name] for name in kept if name in state}
    about |= {"known": known, "left_out": saved.left_out, "test": test}
    averaged = int((saved.ema or {})["n_averaged"]) if saved.ema else None
    whole: dict[str, Any] = {
        "layout": published.LAYOUT,
        "names": [*weights],
        "tied": published.shared(weights),
    }
    whole |= {"averaged": averaged, "sha256": digests.of_tensors(weights.items()), "state": about}
    classes = (
        [str(name) for name in known["classes"]] if isinstance(known.get("classes"), list) else []
    )
    proof = _proof(args, asked, saved, state)
    pipeline, tags = next(
        ((tag, tags) for kind, tag, tags in KINDS if issubclass(task, kind)), ("", list[str]())
    )
    roots = config.flatten(cfg).get("dataset.root") or []
    root = ", ".join(
        without_paths(str(each)).strip("/")
        for each in (roots if isinstance(roots, list) else [roots])
    )
    # Values are cut to names by now; `init_from` is a key of every config.
    began = [
        str(value) for key, value in config.flatten(cfg).items() if BEGAN.search(key) and value
    ]
    card = model_card.Card(
        name=asked.to.name,
        license=asked.license,
        license_name=asked.license_name or "",
        license_link=asked.license_link or "",
        pipeline=pipeline,
        tags=[*tags, *asked.tag],
        datasets=asked.dataset,
        data=root or f"{Path(args.cfg.task).stem} (Lockstep)",
        source=asked.source,
        task=Path(args.cfg.task).name,
        with_task=asked.with_task,
        began=began,
        left_out=len(saved.left_out),
        robot=issubclass(task, robot.Task),
        parameters=sum(
            value.numel() for name, value in weights.items() if name not in whole["tied"]
        ),
        sha256=whole["sha256"],
        averaged=averaged is not None,
        classes=classes,
        seen=seen,
        results=results,
        proof=proof,
    )
    found = {
        published.CONFIG: yaml.safe_dump(cfg, sort_keys=False, allow_unicode=True),
        published.STATE: _dumped(whole, strict=False),
        "provenance.json": _dumped(seen),
        "eval_results.json": _dumped(results),
        "proof.json": _dumped({"weights_sha256": whole["sha256"], **proof}),
        "README.md": model_card.text(card),
    }
    ids = {
        "id2label": dict(enumerate(classes)),
        "label2id": {name: n for n, name in enumerate(classes)},
    }
    return found | ({"labels.json": _dumped(ids)} if classes else {})


def _dumped(value: Any, strict: bool = True) -> str:
    """Return JSON; `strict`: with null for what it has no number for, as others read it."""
    return json.dumps(finite(value) if strict else value, indent=1, ensure_ascii=False) + "\n"


# ---- the folder
# --------------------------------------------------------------------------------------------------


def _task_file(task: str) -> Path:
    if not task.endswith(".py"):
        raise LockstepError(f"the task {task} comes with Lockstep", "--with-task", "drop it")
    return Path(task)


def _write(out: Path, weights: dict[str, Tensor], texts: dict[str, str], task: Path | None) -> None:
    """Write the folder, read it back, and give it its name: whole or not at all."""
    partial_folder = Partial(out.absolute())
    new, about = partial_folder.path, json.loads(texts[published.STATE])
    own = {
        name: value.contiguous().clone()
        for name, value in weights.items()
        if name not in about["tied"]
    }
    known = {
        "format": "pt",
        "sha256": about["sha256"],
        "step": str(about["state"]["progress"]["step"]),
    }
    known["digest"] = json.loads(texts["proof.json"])["digest"]
    try:
        partial_folder.begin()
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
        if task:
            (new / task.name).write_bytes(task.read_bytes())
        published.safetensors().save_file(own, new / published.WEIGHTS, metadata=known)
        if task or not str(yaml.safe_load(texts[published.CONFIG])["task"]).endswith(".py"):
            back = published.read(new)["model"]
            assert [*back] == [*weights] and all(
                digests.same_bits(back[name], weights[name]) for name in weights
            )
        for path in (*new.iterdir(), new):
            _sync(path)  # a rename may reach the disk before the contents do
        if out.exists():
            raise LockstepError(
                f"{out} exists now", "--to", "give a new folder: nothing is replaced"
            )
        os.rename(new, out)
        _sync(out.absolute().parent)
    except OSError as error:
        todo = "make room, or give another --to"
        raise LockstepError(
            f"cannot be written: {error.strerror or error}", str(out), todo
        ) from None
    finally:
        partial_folder.end()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
