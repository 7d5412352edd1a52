"""The card of a published model: README.md with the front matter that the Hugging Face Hub
reads."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from engine.errors import amount

DATA = "DATA"
"""Stands for the place of the data in the card's commands."""

TYPES = {"macro_f1": "f1"}
"""The Hub's types of metrics, where ours are called otherwise."""

SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~$#&!@])")
ROWS = 100
"""Of a table, the most that are shown: the JSON beside the card has all."""

Rows = list[list[str]]


@dataclass
class Card:
    """What a card tells.

    data      name of the data
    began     files of others' weights that the training began with
    left_out  number of tensors that `model` gives, and no file here holds
    seen      provenance.json
    results   eval_results.json
    proof     proof.json
    """

    name: str
    license: str
    license_name: str
    license_link: str
    pipeline: str
    tags: list[str]
    datasets: list[str]
    data: str
    source: str
    task: str
    with_task: bool
    began: list[str]
    left_out: int
    robot: bool
    parameters: int
    sha256: str
    averaged: bool
    classes: list[str]
    seen: dict[str, Any]
    results: dict[str, Any]
    proof: dict[str, Any]


def plain(text: str) -> str:
    """Return a name in one line: whatever cannot be printed, and any run of white space, is a
    space."""
    return (
        " ".join("".join(letter if letter.isprintable() else " " for letter in str(text)).split())
        or "–"
    )


def escaped(text: str) -> str:
    """Return a name as Markdown shows it, in a cell of a table, too."""
    return SPECIAL.sub(r"\\\1", plain(text))


def text(card: Card) -> str:
    """Return README.md."""
    front = yaml.safe_dump(_front_matter(card), sort_keys=False, allow_unicode=True, width=10**6)
    parts = [_title(card), _data(card), _results(card), _limits(card), _use(card), _prove(card)]
    return f"---\n{front}---\n\n" + "\n\n".join("\n".join(part) for part in parts) + "\n"


def _front_matter(card: Card) -> dict[str, Any]:
    found: dict[str, Any] = {"license": card.license}
    if card.license == "other":
        found |= {
            "license_name": plain(card.license_name),
            "license_link": plain(card.license_link),
        }
    found["library_name"] = "lockstep"
    if card.pipeline:
        found["pipeline_tag"] = card.pipeline
    found["tags"] = [*dict.fromkeys(["lockstep", "pytorch", *card.tags])]
    if card.datasets:
        found["datasets"] = card.datasets
    splits = {name: _shown(card.results.get(name, {})) for name in ("validation", "test")}
    names = [name for shown in splits.values() for name in shown if name != "loss"]
    if names:
        found["metrics"] = [*dict.fromkeys(_type(name) for name in names)]
    results = [_of_index(card, split, shown) for split, shown in splits.items() if shown]
    return found | ({"model-index": [{"name": card.name, "results": results}]} if results else {})


def _of_index(card: Card, split: str, metrics: dict[str, float]) -> dict[str, Any]:
    kind = card.pipeline or next((tag for tag in card.tags if "classification" in tag), "other")
    slug = re.sub(
        r"[^A-Za-z0-9._/-]+", "-", plain(card.datasets[0] if card.datasets else card.data)
    ).strip("-/.")
    found = {
        "task": {"type": kind, "name": plain(card.task)},
        "dataset": {"type": slug or "own", "name": plain(card.data), "split": split},
        "metrics": [
            {"type": _type(name), "value": value, "name": plain(name.replace("_", " "))}
            for name, value in metrics.items()
        ],
    }
    return found | ({"source": {"name": "Lockstep", "url": card.source}} if card.source else {})


def _type(name: str) -> str:
    return TYPES.get(name, re.sub(r"[^A-Za-z0-9_]+", "_", plain(name)))


def _shown(results: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a split as a whole that are numbers; those of the log last, such as a
    simulation's."""
    every = results.get("metrics", {}) | results.get("logged", {})
    return {
        name: float(value)
        for name, value in every.items()
        if "/" not in name
        and name != "count"
        and isinstance(value, int | float)
        and math.isfinite(value)
    }


# ---- text
# --------------------------------------------------------------------------------------------------


def _title(card: Card) -> list[str]:
    kinds = (
        f" It tells {amount(len(card.classes), 'class')} apart: "
        f"{', '.join(map(escaped, card.classes))}."
    )
    weights = "the average of the weights over training" if card.averaged else "the weights"
    return [
        f"# {escaped(card.name)}",
        "",
        f"A model of Lockstep's task `{plain(card.task).replace('`', '')}` with "
        f"{card.parameters:,} numbers, at step "
        f"{card.results['step']} of its training ({weights}).{kinds if card.classes else ''}",
    ]


def _data(card: Card) -> list[str]:
    seen = card.seen
    left = (
        f", {len(seen['never'])} of them never ({seen['excluded']} were excluded)"
        if seen["never"]
        else ""
    )
    said = [
        "## What it was trained on",
        "",
        f"Data: {escaped(card.data)}. Training has seen {seen['seen']} of "
        f"{amount(seen['samples'], 'sample')}{left}, "
        f"{seen['uses']} times together, in batches of {seen['global_batch']}.",
    ]
    for name, sources in (
        ("Validated", card.results["validation"].get("per_source")),
        ("Tested", _sources(seen)),
    ):
        if sources:
            some = ", ".join(map(escaped, [*sources][:20])) + ", ..." * (len(sources) > 20)
            said.append(f"{name} on {amount(len(sources), 'source')}: {some}.")
    if card.began:
        some = ", ".join(map(escaped, card.began))
        said.append(f"The weights began as those of {some}, which have a license of their own.")
        said.append("What these had seen is not counted.")
    if "root" in seen:
        said += ["", f"Merkle root of all uses (`tools/provenance.py`): `{seen['root']}`."]
    for title in ("classes", "sources"):
        if seen.get(title):
            rows = [
                [escaped(name), str(one["samples"]), str(one["seen"]), str(one["uses"])]
                for name, one in seen[title].items()
            ]
            said += ["", *_table([title, "samples", "seen", "uses"], rows)]
    return said


def _sources(seen: dict[str, Any]) -> dict[str, Any]:
    return dict(seen.get("test", {}).get("sources", {}))


def _results(card: Card) -> list[str]:
    found = card.results
    said = ["## Results", ""]
    splits = {name: _shown(found.get(name, {})) for name in ("validation", "test")}
    for split, metrics in splits.items():
        if metrics:
            rows = [[escaped(name), _number(value)] for name, value in metrics.items()]
            count = found[split].get("count") or found[split].get("metrics", {}).get("count")
            said += [
                *_table([f"{split}{f', {count:g} samples' if count else ''}", "value"], rows),
                "",
            ]
    said += _spread(found.get("study"))
    validation, test = found["validation"], found.get("test", {})
    if validation.get("per_class"):
        names = ("precision", "recall", "f1", "count")
        rows = [
            [escaped(row["name"]), *(_number(row[name]) for name in names)]
            for row in validation["per_class"]
        ]
        said += ["", *_table(["validation, by class", *names], rows)]
    for split, sources in (
        ("validation", validation.get("per_source")),
        ("test", test.get("sources")),
    ):
        if sources:
            parts = {name: each.get("metrics", each) for name, each in sources.items()}
            columns = [*_shown({"metrics": next(iter(parts.values()))})][:4]
            rows = [
                [
                    escaped(name),
                    *(_number(each.get(column)) for column in columns),
                    _number(each.get("count")),
                ]
                for name, each in parts.items()
            ]
            said += ["", *_table([f"{split}, by source", *map(escaped, columns), "samples"], rows)]
    return said


def _spread(study: dict[str, Any] | None) -> list[str]:
    if not study:
        return [
            (
                "These are of one training: how far another seed, or other people, would be off is "
                "not known."
            )
        ]
    said = [
        f"A study of {study['tested']} of {amount(study['trainings'], 'training')} "
        f"({escaped(study['what'])}; at most "
        "one of them has these weights), mean ± standard deviation:"
    ]
    for level, over in (("over_folds", "trainings"), ("over_sources", study["by"])):
        names = [
            *dict.fromkeys(
                name for each in study["configs"] for name in each[level] if "/" not in name
            )
        ]
        names = [name for name in names if name != "count"][:6]
        rows = [
            [escaped(each["name"]), *(_plus_minus(each[level].get(name)) for name in names)]
            for each in study["configs"]
        ]
        if names:
            said += ["", *_table([f"over {escaped(over)}", *map(escaped, names)], rows)]
    return said


def _limits(card: Card) -> list[str]:
    test = card.results.get("test")
    said = ["## Limits, and what was not checked", ""]
    if not test:
        said.append(
            "- There is no test: the checkpoint was chosen by the validation, which flatters it."
        )
    elif test.get("looks", 1) != 1:
        said.append(
            f"- The test was looked at {test['looks']} times: to choose by it makes it no test."
        )
    if not card.seen.get("sources"):
        said.append(
            "- It is not said whom the samples are from, or whether the split cuts a person or "
            "an animal."
        )
    of_validation = card.results["validation"].get("per_source", {})
    if both := [
        name for name in of_validation if card.seen.get("sources", {}).get(name, {}).get("seen")
    ]:
        some = ", ".join(map(escaped, both[:20])) + ", ..." * (len(both) > 20)
        said.append(f"- Trained on and validated on: {some}.")
    if "root" not in card.seen:
        said.append("- The samples were counted, not hashed.")
    if "replay" not in card.proof:
        said.append("- The steps of the training were not taken again (`tools/replay.py`).")
    said += [f"- {escaped(note)}" for note in card.results["validation"].get("notes", [])]
    if card.left_out:
        said.append(
            f"- Not in it: {amount(card.left_out, 'tensor')} that the task's `model` gives (see "
            "config.yaml)."
        )
    return [
        *said,
        "- Other people, animals, devices, rooms and rates than those of the data were not tried.",
        "- It has no optimizer: a training can start from it (`init_from`), and none continues it.",
    ]


def _use(card: Card) -> list[str]:
    own = card.task.endswith(".py")
    trust = " --trust" if own and card.with_task else ""
    new = "RECORDINGS --out actions.npz" if card.robot else "NEW"
    said = ["## How to use it", "", "In a checkout of Lockstep:", "", "```"]
    said += [f"hf download USER/{card.name} --local-dir {card.name}"]
    said += [
        f"python tools/predict.py {card.name} {new}{trust}",
        f"python tools/evaluate.py {card.name}{trust}",
    ]
    said += [
        f"python tools/export.py {card.name}{trust}",
        f"python train.py{_task(card)} --config {card.name}/config.yaml init_from={card.name}",
        "```",
    ]
    if own and not card.with_task:
        said += [
            "",
            (
                f"Its task is a file of its own, {escaped(card.task)}: ask for it, and put it into "
                "this folder."
            ),
        ]
    elif own:
        said += ["", f"Its task, {escaped(card.task)}, is a program: read it before you trust it."]
    if card.robot:
        words = (
            "`tools/save_pretrained.py`, given this folder, writes the layout that LeRobot reads."
        )
        said += ["", words]
    return said


def _task(card: Card) -> str:
    return f" {card.name}/{shlex.quote(card.task)}" if card.task.endswith(".py") else ""


def _prove(card: Card) -> list[str]:
    proof, run = card.proof, card.proof["run"]
    said = ["## How to prove it", ""]
    said += [
        (
            f"SHA-256 of these weights, as `tools/evaluate.py {card.name}` prints it: "
            f"`{card.sha256[:16]}`."
        ),
        "",
    ]
    hint = f" `{DATA}` is where the data lie." if f"={DATA}" in proof["command"] else ""
    hint += (
        f" Add what chose the split: {', '.join(proof['left_out'])}." if proof["left_out"] else ""
    )
    said += [
        f"To train it again, with the same data, code and kind of machine:{hint}",
        "",
        "```",
        proof["command"],
    ]
    said += [proof["then"], "```", ""]
    said.append(
        f"The second command, with the folder of the first as `RUN`, prints `weights  sha256 "
        f"{proof['trained_weights_sha256'][:16]}` for the checkpoint of step {proof['steps']}"
        + (" (the weights as trained; published is their average)." if card.averaged else ".")
    )
    facts = {f"{name}": value for name, value in proof["machine"].items()}
    facts |= {"Python": run.get("python"), "CUDA": run.get("cuda"), "NCCL": run.get("nccl")}
    facts |= {
        "processes": run.get("processes"),
        "code": run.get("code"),
        "commit": run.get("git_commit"),
    }
    if run.get("git_dirty"):
        facts["commit"] = f"{facts['commit']}, with changes"
    facts |= {"data": proof["data"], "digest in metrics.jsonl": proof["digest"]}
    rows = [
        [escaped(name), escaped(value)] for name, value in facts.items() if value not in (None, "")
    ]
    said += ["", *_table(["made with", ""], rows)]
    if replay := proof.get("replay"):
        said += [
            "",
            f"Steps {replay.get('from')} to {replay.get('to')} were taken again "
            f"({escaped(replay.get('date', ''))}): "
            f"{escaped(replay.get('verdict', ''))}, {replay.get('equal')} of "
            f"{replay.get('points')} points are equal.",
        ]
    return said


def _table(head: list[str], rows: Rows) -> list[str]:
    """Return a Markdown table; names in it are escaped already."""
    said = [head, ["---", *["---:"] * (len(head) - 1)], *rows[:ROWS]]
    lines = ["| " + " | ".join(row) + " |" for row in said]
    return lines + (["", f"and {len(rows) - ROWS} more."] if len(rows) > ROWS else [])


def _number(value: Any) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return (
        f"{value:g}"
        if isinstance(value, int) or (float(value).is_integer() and abs(value) >= 2)
        else f"{value:.4f}"
    )


def _plus_minus(value: dict[str, Any] | None) -> str:
    if not value or value["mean"] is None:
        return "–"
    return f"{value['mean']:.4f}" + (f" ± {value['sd']:.4f}" if value["sd"] is not None else "")
