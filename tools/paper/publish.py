"""Write a trained model as a folder for the Hugging Face Hub and for the tools of Lockstep.

python tools/publish.py RUN --to mouse-r1 --license mit
python tools/publish.py RUN --to mouse-r1 --license other --license-name lab-terms
    --license-link LICENSE.md
python tools/publish.py RUN --to mouse-r1 --license mit --study checkpoints/study_video
hf upload USER/mouse-r1 mouse-r1                       upload the folder yourself
                                                       (pip install huggingface_hub)

RUN is the folder of a run (the best checkpoint is used) or a checkpoint. Give dataset.root=... if
the data have moved. The data are read: the samples of the training are counted and hashed, and the
validation is scored.

    model.safetensors    the weights of an evaluation (averaged, if the run keeps an average);
                         no optimizer
    config.yaml          the run's config: no absolute path, save_dir, secret or wandb account
    checkpoint.json      step, precision and metadata of the task: all values that the tools need
    labels.json          the classes, if there are any
    provenance.json      the samples of the training, see tools/provenance.py; the sources of the
                         test
    eval_results.json    metrics of the validation, of each class and source; of the test and the
                         study if there are any
    proof.json           digests, machine and versions, and the command that reproduces the digests
    README.md            the model card

predict, evaluate, export and init_from take DIR in place of RUN. A run cannot be continued from
DIR. --no-sources leaves out the names of people, videos and recordings. A task file of your own is
program code: --with-task copies the file, and each user must then give --trust.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

import tasks
from engine import api, code_digest, config, errors
from engine.comm import digests
from engine.contract import LOGGED, Task
from engine.errors import LockstepError, few, headline
from engine.files.archive import CheckpointState
from engine.files.atomic import read_object
from engine.files.store import find_checkpoint
from formats.partial import Partial
from plugins.resilience import status
from tasks import har, robot, video
from tools.arguments import Parser
from tools.evidence import provenance
from tools.output import finite, print_json
from tools.paper import model_card
from tools.paper.report_scores import score
from tools.paper.run_files import as_dict
from tools.running import alone, guarded
from tools.use import published
from tools.use.evaluate import TRUST, of_run

KINDS: tuple[tuple[type[Task], str, list[str]], ...] = (
    (
        har.Task,
        "",
        ["time-series", "time-series-classification", "human-activity-recognition", "sensors"],
    ),
    (video.Task, "video-classification", ["behavior"]),
    (robot.Task, "robotics", ["imitation-learning"]),
)
"""(task, the Hub's pipeline tag, tags). The Hub has no pipeline for time series."""

NOT_HANDED_ON = ("save_dir", "resume", "gpu_ids", "record", "wandb", "mlflow")
SECRET = re.compile(r"(^|[._])(api_?key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
BEGAN = re.compile(r"(^|\.)(init_from|pretrained|pretrained_path)$")
OF_A_SPLIT = re.compile(r"exclude|(train|val|test)_")
TEST = "test.json"

OF_ENVIRONMENT = "code git_commit git_dirty python packages cuda nccl processes threads".split()
"""Parts of environment.json that proof.json keeps."""

OF_REPLAY = "from to share verdict points equal whole_run digest processes date".split()
"""Parts of replay.json that proof.json keeps."""


def main(argv: list[str]) -> int:
    parser = Parser(
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
        help="a new folder, with the name of the model on the Hub",
    )
    add(
        "--license",
        metavar="ID",
        help="the Hub's ID of the license of the weights (mit, apache-2.0, cc-by-4.0); or other",
    )
    add("--license-name", metavar="NAME", help="the name of a license that the Hub does not list")
    add("--license-link", metavar="LINK", help="the license text: a URL, or a file to put into DIR")
    add(
        "--dataset",
        action="append",
        default=[],
        metavar="ID",
        help="a data set on the Hub, used in the training",
    )
    add("--tag", action="append", default=[], metavar="TAG", help="a further tag on the Hub")
    add(
        "--source",
        metavar="URL",
        default="",
        help="the source of the results, such as the repository of the code",
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
    options, rest = parser.parse_known_args(argv)

    def translate(words: list[str]) -> list[str]:
        _check_options(options)
        return of_run(options.trust, words)

    work = partial(_publish, options=options)
    return guarded([options.run, *rest], work, translate, options.json)


def _check_options(options: argparse.Namespace) -> None:
    """Raise LockstepError for options that are wrong for every run."""
    if not options.to:
        raise LockstepError("no folder to write", "--to", "give the name of a new folder")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", options.to.name):
        raise LockstepError(
            f"{options.to.name!r} is no name for a model",
            "--to",
            "a model's name on the Hub has letters, digits, - _ and .",
        )
    if options.to.exists() or options.to.is_symlink():
        raise LockstepError(
            f"{options.to} exists", "--to", "give a new folder: nothing is replaced"
        )
    if not options.license:
        raise LockstepError(
            "nobody may use a model without a license",
            "--license",
            "give one such as mit or cc-by-4.0, or other with --license-name and --license-link",
        )
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", options.license):
        raise LockstepError(
            f"{options.license!r} is no license ID of the Hub",
            "--license",
            "give such as mit, or other",
        )
    extra = [bool(options.license_name), bool(options.license_link)]
    if options.license == "other" and not all(extra):
        raise LockstepError(
            "which other license?", "--license", "give --license-name and --license-link"
        )
    if options.license != "other" and any(extra):
        raise LockstepError(
            f"{options.license} needs no name and no link",
            "--license",
            "drop them, or give --license other",
        )
    for option, names in (("--dataset", options.dataset), ("--tag", options.tag)):
        for name in names:
            if not re.fullmatch(r"[\w.:/-]{1,96}", name):
                raise LockstepError(
                    f"{name!r} is no name on the Hub", option, "give such as user/name"
                )
    if options.source and not re.fullmatch(r"https?://\S+", options.source):
        raise LockstepError(f"{options.source!r} is no URL", "--source", "give such as https://...")


def _publish(args: config.Args, options: argparse.Namespace) -> int:
    """Write the folder and print a summary. Return the exit code. Raises LockstepError."""
    alone("one process writes it", "publish.py")
    out: Path = options.to
    published.safetensors()  # fails now, because the next steps may take minutes
    saved = _opened(args, options)
    weights = _weights(saved)
    study = options.study and _study(options.study)
    with contextlib.redirect_stdout(sys.stderr):
        print("Reading what it was trained on", flush=True)
        _, seen = provenance.count_uses(args, not options.no_contents)
        print("Scoring the validation", flush=True)
        results = _results(args, options, saved)
    if study:
        results["study"] = study
    texts = _texts(args, options, saved, weights, seen, results)
    sha256 = digests.of_tensors(weights.items())
    task_files = _task_files(args.cfg.task, options.with_task)
    _write(out, weights, texts, task_files)
    written = [path for path in out.rglob("*") if path.is_file()]
    files = sorted(path.relative_to(out).as_posix() for path in written)
    step = saved.step
    if options.json:
        summary = {"folder": str(out), "files": files, "sha256": sha256, "step": step}
        print_json(summary)
        return status.set_exit_code(errors.DONE)
    print(f"{published.shown(saved.path or '')}, step {step}:")
    for name in files:
        print(f"  {name:<20} {(out / name).stat().st_size / 1000:10.1f} kB")
    print(f"  weights              sha256 {sha256[:16]}")
    if args.cfg.task.endswith(".py") and not options.with_task:
        print(f"note: whoever uses it needs {Path(args.cfg.task).name}, too (--with-task)")
    if len(task_files) > 1:
        own, *others = task_files
        print(f"note: with {own} come the files that it imports: {few(others)}")
    for name in _not_handed_on(saved):
        print(f"note: whoever uses it needs {name}, too")
    if not options.no_sources and seen.get("sources"):
        print(f"note: it names {len(seen['sources'])} sources of the training data (--no-sources)")
    print(f"Wrote {out}; after a look at its README.md: hf upload USER/{out.name} {out}")
    return status.set_exit_code(errors.DONE)


# ---- the checkpoint
# --------------------------------------------------------------------------------------------------


def _opened(args: config.Args, options: argparse.Namespace) -> CheckpointState:
    """Return the checkpoint.

    Raises LockstepError if the checkpoint is missing or cannot be published.
    """
    path = Path(args.cfg.resume)
    if not path.exists():
        what = f"no checkpoint {options.run!r}"
        if Path(options.run).is_dir():
            what = "the run has no checkpoint yet"
        raise LockstepError(what, options.run, "let it train to its first evaluation", exit_code=3)
    find_checkpoint(str(path), None)  # compares the SHA-256 with the manifest
    saved = api.read(path)
    task = tasks.load(args.cfg.task)
    if task.metadata is Task.metadata and task.full_dataset is Task.full_dataset:
        raise LockstepError(
            "the task has no `metadata`, so its model cannot be used without the training data",
            args.cfg.task,
            "give it `metadata` and `load_metadata` (of {} if `model` needs nothing), see "
            "engine/contract.py",
        )
    if saved.metadata is None:
        raise LockstepError(
            "an older version wrote the checkpoint, without metadata",
            str(path),
            "resume the run for a step, and publish that",
            exit_code=3,
        )
    if not _is_json(saved.metadata):
        raise LockstepError(
            "its `metadata` is not what JSON keeps",
            args.cfg.task,
            "return numbers, texts, lists, and dicts by text",
        )
    if saved.task:
        raise LockstepError(
            f"the task keeps a state ({', '.join(saved.task)}), which a published model lacks",
            str(path),
            "hand on the checkpoint itself",
        )
    if saved.init_from:
        name = Path(saved.init_from).name
        raise LockstepError(
            f"weights are left to init_from={name}, which is not handed on",
            "the task's `saved`",
            "train with a task that saves them, too",
        )
    return saved


def _is_json(value: Any) -> bool:
    """Return whether a value is unchanged after JSON; a value with NaN counts as unchanged."""
    try:
        text = json.dumps(value)
        return json.loads(text) == value or "nan" in text.lower()
    except (TypeError, ValueError):
        return False


def _weights(saved: CheckpointState) -> dict[str, Tensor]:
    """Return {name: tensor} of an evaluation, with the model's names and order.

    Raises LockstepError for a value that safetensors cannot store.
    """
    weights = api.evaluated_weights(saved)
    for name, value in weights.items():
        if not isinstance(value, Tensor) or value.is_sparse:
            raise LockstepError(
                f"{name} is no plain tensor, and safetensors holds no other",
                str(saved.path),
                "hand on the checkpoint itself",
            )
    return weights


def public(value: Any, key: str = "") -> Any:
    """Return a config's value without secrets, and with absolute paths reduced to the last part."""
    if isinstance(value, Mapping):
        parts = {name: public(part, f"{key}.{name}") for name, part in value.items()}
        if not key:
            for name in NOT_HANDED_ON:
                parts.pop(name, None)
        return parts
    if isinstance(value, list | tuple):
        return [public(part, key) for part in value]
    if not isinstance(value, str):
        return value
    if SECRET.search(key):
        return ""
    return without_paths(value)


def without_names(value: Any, key: str = "") -> Any:
    """Return a config without the names that choose a split."""
    if isinstance(value, dict):
        return {name: without_names(part, name) for name, part in value.items()}
    if isinstance(value, list) and OF_A_SPLIT.match(key):
        return []
    return value


def without_paths(text: str) -> str:
    """Return a text with each absolute path, and each path from above this folder, shortened."""
    if text.startswith(("/", "~", "..")):
        return Path(text).name
    return re.sub(r"(?<![\w.:/~-])(~|\.\.)?/([^\s/()]*/)*", "", text)


# ---- results, proof and texts
# ------------------------------------------------------------------------------------------


def _results(
    args: config.Args, options: argparse.Namespace, saved: CheckpointState
) -> dict[str, Any]:
    """Return the metrics of the validation, scored now and as logged, and of an existing test."""
    assert saved.path
    step = saved.step
    folder = saved.path.parent
    validation: dict[str, Any] = {"split": "val"}
    try:
        scores = score(args, "val", 0)
        validation |= {
            "count": scores.count,
            "metrics": scores.metrics,
            "per_class": scores.per_class(),
        }
        if scores.confusion is not None:
            validation |= {"classes": scores.classes, "confusion": scores.confusion.tolist()}
        validation["notes"] = scores.notes
        if not options.no_sources:
            validation["per_source"] = scores.by_source
    except LockstepError as error:  # a task without `score`, or without validation data
        validation["notes"] = [f"not scored: {without_paths(headline(error))}"]
    logged = _logged(folder / "metrics.jsonl", step)
    if differ := _other_numbers(validation, logged):
        validation["notes"].append(differ)
        print(f"warning: {differ}", flush=True)
    for name in validation.get("metrics", ()):
        logged.pop(name, None)
    validation["logged"] = logged
    monitor = str(tasks.load(args.cfg.task).monitor)
    results = {"step": step, "monitor": monitor, "validation": validation}
    results["baselines"] = read_object(folder / "status.json").get("baselines", {})
    tested = read_object(folder / TEST)
    weights = api.hash_weights(saved)[:16]
    if tested and tested.get("sha256", {}).get("weights") == weights:
        names = ["count", "metrics", "classes", "confusion", "looks"]
        if not options.no_sources:
            names += ["by", "sources"]
        results["test"] = _chosen(tested, names)
    return results


SAME_NUMBER = 1e-3
"""Relative difference up to which a metric scored now is that of the log: another machine or
another precision rounds in another way."""


def _other_numbers(validation: dict[str, Any], logged: dict[str, float]) -> str:
    """Return a line about a metric that is not as in the log, or an empty text.

    Two samples may fall on the other side of a threshold by rounding, which moves a loss little.
    """
    scored = validation.get("metrics", {})
    two_samples = 2 / max(1, validation.get("count", 1))
    differ = []
    for name in scored.keys() & logged.keys():
        now, then = scored[name], logged[name]
        allowed = SAME_NUMBER * max(abs(now), abs(then))
        if "loss" not in name:
            allowed = max(allowed, two_samples)
        if not abs(now - then) <= allowed:
            differ.append(f"{name} {now:.4g}, in the log {then:.4g}")
    if not differ:
        return ""
    cause = "code, data or precision have changed since the training"
    return f"the validation scored now is not that of the log: {few(sorted(differ), 3)}: {cause}"


def _chosen(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the entries with the given names, in the order of the names."""
    return {name: values[name] for name in names if name in values}


def _logged(log: Path, step: int) -> dict[str, float]:
    """Return the metrics of the last evaluation at a step."""
    metrics: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for line in log.read_text("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a torn line
                event = json.loads(line)
                if event["event"] == "eval" and event["step"] == step:
                    metrics = event
    return {
        name: value
        for name, value in metrics.items()
        if name not in LOGGED and isinstance(value, int | float)
    }


def _study(folder: Path) -> dict[str, Any]:
    """Return mean and sd of each config of a study. Raises LockstepError without results."""
    path = folder
    if folder.is_dir():
        path = folder / "study.json"
    try:
        study = json.loads(path.read_bytes())
        configs = []
        for each in study["configs"]:
            configs.append(
                {
                    "name": without_paths(str(each["name"])),
                    "over_folds": _spreads(each["metrics"]),
                    "over_sources": _spreads(each["over_sources"]),
                }
            )
        names = ("what", "by", "monitor", "trainings", "tested", "seeds")
        return {
            **{name: study[name] for name in names},
            "folds": len(study["folds"]),
            "configs": configs,
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        todo = "give the folder of a study that tools/study.py has finished"
        raise LockstepError("no results of a study", str(path), todo) from None


def _spreads(metrics: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return {metric: mean, sd and n}. Raises KeyError, TypeError."""
    return {
        name: {key: value[key] for key in ("mean", "sd", "n")} for name, value in metrics.items()
    }


def _proof(
    args: config.Args,
    options: argparse.Namespace,
    saved: CheckpointState,
    described: dict[str, Any],
) -> dict[str, Any]:
    """Return digests, machine and versions, and the command that reproduces the weights."""
    assert saved.path
    environment = read_object(saved.path.parent / "environment.json")
    replay = read_object(saved.path.parent / "replay.json")
    name = options.to.name
    command = "python train.py"
    if environment.get("processes", 1) != 1:
        processes = environment["processes"]
        command = f"torchrun --standalone --nproc_per_node={processes} train.py"
    if args.cfg.task.endswith(".py"):
        command += f" {name}/{Path(args.cfg.task).name}"
    left_out = []
    if options.no_sources:
        for key, value in config.flatten(config.to_dict(args.cfg)).items():
            if value != without_names(value, key.rpartition(".")[2]):
                left_out.append(key)
    settings = api.settings_of(saved, args.cfg)
    proof: dict[str, Any] = {
        "command": f"{command} --config {name}/config.yaml{_data_words(settings)}",
        "then": "python tools/evaluate.py RUN",
        "trained_weights_sha256": api.hash_weights(saved),
        "device": str(args.cfg.device),
        "steps": saved.step,
        "data": described["data"],
        "digest": saved.digest,
        "left_out": left_out,
        "run": {},
        "machine": {key: value for key, value in described["environment"].items() if value},
    }
    for key, value in _chosen(environment, OF_ENVIRONMENT).items():
        if value is not None:
            proof["run"][key] = value
    if fork := as_dict(environment.get("fork")):
        text = f"began as a fork of {Path(str(fork.get('run'))).name} at step {fork.get('step')}"
        if not options.no_sources:  # a setting may name a source
            text = str(fork.get("text"))
        proof["fork"] = text
        print(f"warning: the run {text}: the model card has this line", file=sys.stderr)
    if replay:
        proof["replay"] = _chosen(replay, OF_REPLAY)
    return proof


def _data_words(settings: dict[str, Any]) -> str:
    """Return the words of a command that give the place of the data; no text for a public place."""
    root = settings.get("dataset.root")
    if isinstance(root, str) and without_paths(root) != root:
        return f" dataset.root={model_card.DATA}"
    if isinstance(root, list) and any(without_paths(str(part)) != part for part in root):
        return f" 'dataset.root=[{', '.join([model_card.DATA] * len(root))}]'"
    return ""


def _texts(
    args: config.Args,
    options: argparse.Namespace,
    saved: CheckpointState,
    weights: dict[str, Tensor],
    seen: dict[str, Any],
    results: dict[str, Any],
) -> dict[str, str]:
    """Return {file: text}."""
    cfg = public(config.to_dict(args.cfg))
    known = dict(saved.metadata or {})
    described = saved.description()
    test = dict(described["test"])
    if args.cfg.task.endswith(".py"):
        cfg["task"] = Path(args.cfg.task).name
    seen |= {"checkpoint": Path(seen["checkpoint"]).name, "init_from": Path(seen["init_from"]).name}
    if options.no_sources:
        for name in ("videos", "subjects", "groups"):
            known.pop(name, None)
        seen.pop("sources", None)
        if test:
            test["sources"] = {}
        cfg = without_names(cfg)
    if test:
        seen["test"] = test
    contents: dict[str, Any] = {
        "layout": published.LAYOUT,
        "names": [*weights],
        "tied": published.shared(weights),
        "averaged": saved.averaged,
        "sha256": digests.of_tensors(weights.items()),
        "state": described | {"known": known, "test": test},
    }
    classes = []
    if isinstance(known.get("classes"), list):
        classes = list(map(str, known["classes"]))
    proof = _proof(args, options, saved, described)
    card = _card(args, options, saved, cfg, weights, contents, classes, seen, results, proof)
    texts = {
        published.CONFIG: yaml.safe_dump(cfg, sort_keys=False, allow_unicode=True),
        published.STATE: _dumped(contents, strict=False),
        "provenance.json": _dumped(seen),
        "eval_results.json": _dumped(results),
        "proof.json": _dumped({"weights_sha256": contents["sha256"], **proof}),
        "README.md": model_card.text(card),
    }
    if classes:
        numbers = {name: n for n, name in enumerate(classes)}
        ids = {"id2label": dict(enumerate(classes)), "label2id": numbers}
        texts["labels.json"] = _dumped(ids)
    return texts


def _card(
    args: config.Args,
    options: argparse.Namespace,
    saved: CheckpointState,
    cfg: dict[str, Any],
    weights: dict[str, Tensor],
    contents: dict[str, Any],
    classes: list[str],
    seen: dict[str, Any],
    results: dict[str, Any],
    proof: dict[str, Any],
) -> model_card.Card:
    """Return the contents of the model card."""
    task = tasks.load(args.cfg.task)
    pipeline = ""
    tags: list[str] = []
    for kind, kind_pipeline, kind_tags in reversed(KINDS):
        if issubclass(task, kind):
            pipeline, tags = kind_pipeline, kind_tags
    flat = config.flatten(cfg)
    roots = flat.get("dataset.root") or []
    if not isinstance(roots, list):
        roots = [roots]
    names = [without_paths(str(root)).strip("/") for root in roots]
    # `public` has shortened the values to names. `init_from` is a key of every config.
    began = [str(value) for key, value in flat.items() if BEGAN.search(key) and value]
    own = [value.numel() for name, value in weights.items() if name not in contents["tied"]]
    return model_card.Card(
        name=options.to.name,
        license=options.license,
        license_name=options.license_name or "",
        license_link=options.license_link or "",
        pipeline=pipeline,
        tags=[*tags, *options.tag],
        datasets=options.dataset,
        data=", ".join(names) or f"{Path(args.cfg.task).stem} (Lockstep)",
        source=options.source,
        task=Path(args.cfg.task).name,
        with_task=options.with_task,
        began=began,
        left_out=len(contents["state"]["left_out"]),
        robot=issubclass(task, robot.Task),
        parameters=sum(own),
        sha256=contents["sha256"],
        averaged=contents["averaged"] is not None,
        classes=classes,
        seen=seen,
        results=results,
        proof=proof,
    )


def _dumped(value: Any, strict: bool = True) -> str:
    """Return JSON.

    strict  write null in place of NaN and infinity, because JSON parsers reject both
    """
    if strict:
        value = finite(value)
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


# ---- the folder
# --------------------------------------------------------------------------------------------------


def _task_files(task: str, wanted: bool) -> dict[str, Path]:
    """Return {name in the folder: path} of the task's own file, and of the files that the file
    imports from beside it. Raises LockstepError for a task of Lockstep."""
    if not wanted:
        return {}
    if not task.endswith(".py"):
        raise LockstepError(f"the task {task} comes with Lockstep", "--with-task", "drop it")
    return {Path(task).name: Path(task)} | code_digest.files_beside(task)


def _not_handed_on(saved: CheckpointState) -> list[str]:
    """Return the installed packages, and the modules outside the task's folder, that the model
    needs."""
    names = []
    for key, version in saved.code.items():
        if key.startswith(code_digest.PACKAGE):
            names.append(f"the {key} {version}")
        elif key.startswith(code_digest.ELSEWHERE):
            names.append(key.removeprefix(code_digest.ELSEWHERE))
    return names


def _write(
    out: Path, weights: dict[str, Tensor], texts: dict[str, str], task_files: dict[str, Path]
) -> None:
    """Write the folder under a temporary name, read the weights back, and rename the folder.

    An error leaves no folder behind. Raises LockstepError if the disk cannot be written.
    """
    partial_folder = Partial(out.absolute())
    new = partial_folder.path
    contents = json.loads(texts[published.STATE])
    own = {name: value.contiguous().clone() for name, value in weights.items()}
    for name in contents["tied"]:
        del own[name]
    known = {
        "format": "pt",
        "sha256": contents["sha256"],
        "step": str(contents["state"]["progress"]["step"]),
        "digest": json.loads(texts["proof.json"])["digest"],
    }
    try:
        partial_folder.begin()
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
        for name, path in task_files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(path.read_bytes())
        published.safetensors().save_file(own, new / published.WEIGHTS, metadata=known)
        if task_files or not str(yaml.safe_load(texts[published.CONFIG])["task"]).endswith(".py"):
            back = published.read(new)["model"]
            assert [*back] == [*weights]
            assert all(digests.same_bits(back[name], weights[name]) for name in weights)
        for path in (*new.rglob("*"), new):
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
