"""Write the card of a published model: README.md with the front matter of the Hugging Face Hub."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from engine.errors import amount
from tools.names import some_names

DATA = "DATA"
"""The place of the data in the commands of the card."""

TYPES = {"macro_f1": "f1"}
"""The Hub's types of metrics, for metrics with a different name."""

SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~$#&!@])")
ROWS = 100
"""The maximum number of rows of a table. The JSON beside the card has all rows."""

Rows = list[list[str]]


@dataclass
class Card:
    """The contents of a card.

    data      name of the data
    began     files of published weights that the training began with
    left_out  number of tensors that `model` gives and no published file contains
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
    """Return a name in one line, with spaces for unprintable characters."""
    text = str(text)
    for letter in {*text}:
        if not letter.isprintable():
            text = text.replace(letter, " ")
    return " ".join(text.split()) or "–"


def escaped(text: str) -> str:
    """Return a name escaped for Markdown, also within the cell of a table."""
    return SPECIAL.sub(r"\\\1", plain(text))


def text(card: Card) -> str:
    """Return README.md."""
    front = yaml.safe_dump(_front_matter(card), sort_keys=False, allow_unicode=True, width=10**6)
    parts = [_title(card), _data(card), _results(card), _limits(card), _use(card), _prove(card)]
    return f"---\n{front}---\n\n" + "\n\n".join("\n".join(part) for part in parts) + "\n"


def _front_matter(card: Card) -> dict[str, Any]:
    front: dict[str, Any] = {"license": card.license}
    if card.license == "other":
        front |= {
            "license_name": plain(card.license_name),
            "license_link": plain(card.license_link),
        }
    front["library_name"] = "lockstep"
    if card.pipeline:
        front["pipeline_tag"] = card.pipeline
    front["tags"] = [*dict.fromkeys(["lockstep", "pytorch", *card.tags])]
    if card.datasets:
        front["datasets"] = card.datasets
    types: dict[str, None] = {}
    results = []
    for split in ("validation", "test"):
        metrics = _shown(card.results.get(split, {}))
        types |= dict.fromkeys(_type(name) for name in metrics if name != "loss")
        if metrics:
            results.append(_of_index(card, split, metrics))
    if types:
        front["metrics"] = [*types]
    if results:
        front["model-index"] = [{"name": card.name, "results": results}]
    return front


def _of_index(card: Card, split: str, metrics: dict[str, float]) -> dict[str, Any]:
    """Return an entry of the Hub's model index."""
    kinds = [tag for tag in card.tags if "classification" in tag]
    slug = re.sub(r"[^A-Za-z0-9._/-]+", "-", plain([*card.datasets, card.data][0])).strip("-/.")
    entry = {
        "task": {"type": card.pipeline or [*kinds, "other"][0], "name": plain(card.task)},
        "dataset": {"type": slug or "own", "name": plain(card.data), "split": split},
        "metrics": [
            {"type": _type(name), "value": value, "name": plain(name.replace("_", " "))}
            for name, value in metrics.items()
        ],
    }
    if card.source:
        entry["source"] = {"name": "Lockstep", "url": card.source}
    return entry


def _type(name: str) -> str:
    return TYPES.get(name, re.sub(r"[^A-Za-z0-9_]+", "_", plain(name)))


def _shown(results: dict[str, Any]) -> dict[str, float]:
    """Return the finite metrics of a whole split.

    The metrics of the log, such as a simulation's, come last.
    """
    metrics = {}
    for name, value in (results.get("metrics", {}) | results.get("logged", {})).items():
        number = isinstance(value, int | float) and math.isfinite(value)
        if number and "/" not in name and name != "count":
            metrics[name] = float(value)
    return metrics


# ---- text
# --------------------------------------------------------------------------------------------------


def _title(card: Card) -> list[str]:
    weights = "the weights"
    if card.averaged:
        weights = "the average of the weights over training"
    text = (
        f"A model of Lockstep's task `{plain(card.task).replace('`', '')}` with "
        f"{card.parameters:,} numbers, at step {card.results['step']} of its training ({weights})."
    )
    if card.classes:
        names = ", ".join(map(escaped, card.classes))
        text += f" It tells {amount(len(card.classes), 'class')} apart: {names}."
    return [f"# {escaped(card.name)}", "", text]


def _data(card: Card) -> list[str]:
    seen = card.seen
    left = ""
    if seen["never"]:
        left = f", {len(seen['never'])} of them never ({seen['excluded']} were excluded)"
    output = [
        "## What it was trained on",
        "",
        f"Data: {escaped(card.data)}. Training has seen {seen['seen']} of "
        f"{amount(seen['samples'], 'sample')}{left}, "
        f"{seen['uses']} times together, in batches of {seen['global_batch']}.",
    ]
    for name, sources in (
        ("Validated", card.results["validation"].get("per_source")),
        ("Tested", seen.get("test", {}).get("sources")),
    ):
        if sources:
            names = some_names([*map(escaped, sources)], 20)
            output.append(f"{name} on {amount(len(sources), 'source')}: {names}.")
    if card.began:
        names = ", ".join(map(escaped, card.began))
        output += [
            f"The weights began as those of {names}, which have a license of their own.",
            "What these had seen is not counted.",
        ]
    if "root" in seen:
        output += ["", f"Merkle root of all uses (`tools/provenance.py`): `{seen['root']}`."]
    for title in ("classes", "sources"):
        if seen.get(title):
            rows = []
            for name, counts in seen[title].items():
                numbers = counts["samples"], counts["seen"], counts["uses"]
                rows.append([escaped(name), *map(str, numbers)])
            output += ["", *_table([title, "samples", "seen", "uses"], rows)]
    return output


def _results(card: Card) -> list[str]:
    results = card.results
    output = ["## Results", ""]
    for split in ("validation", "test"):
        metrics = _shown(results.get(split, {}))
        if metrics:
            rows = [[escaped(name), _number(value)] for name, value in metrics.items()]
            if split == "validation":
                for name, value in results.get("baselines", {}).items():
                    rows.append([f"{results['monitor']} of {escaped(name)}", _number(value)])
            count = results[split].get("count") or results[split].get("metrics", {}).get("count")
            title = split
            if count:
                title += f", {count:g} samples"
            output += [*_table([title, "value"], rows), ""]
    output += _spread(results.get("study"))
    validation = results["validation"]
    if validation.get("per_class"):
        names = ("precision", "recall", "f1", "count")
        rows = []
        for row in validation["per_class"]:
            rows.append([escaped(row["name"]), *[_number(row[name]) for name in names]])
        output += ["", *_table(["validation, by class", *names], rows)]
    output += _by_source("validation", validation.get("per_source"))
    return output + _by_source("test", results.get("test", {}).get("sources"))


def _by_source(split: str, sources: dict[str, Any] | None) -> list[str]:
    """Return the table of the sources of a split; empty without sources."""
    if not sources:
        return []
    parts = {name: source.get("metrics", source) for name, source in sources.items()}
    columns = [*_shown({"metrics": next(iter(parts.values()))})][:4]
    rows = []
    for name, metrics in parts.items():
        numbers = [_number(metrics.get(column)) for column in [*columns, "count"]]
        rows.append([escaped(name), *numbers])
    head = [f"{split}, by source", *map(escaped, columns), "samples"]
    return ["", *_table(head, rows)]


def _spread(study: dict[str, Any] | None) -> list[str]:
    """Return the tables of a study, or a sentence without a study."""
    if not study:
        return [
            "These are of one training: how far another seed, or other people, would be off is "
            "not known."
        ]
    output = [
        f"A study of {study['tested']} of {amount(study['trainings'], 'training')} "
        f"({escaped(study['what'])}; at most "
        "one of them has these weights), mean ± standard deviation:"
    ]
    for level, over in (("over_folds", "trainings"), ("over_sources", study["by"])):
        metrics = dict.fromkeys(itertools.chain(*[each[level] for each in study["configs"]]))
        names = [name for name in metrics if "/" not in name and name != "count"][:6]
        rows = []
        for each in study["configs"]:
            values = [_plus_minus(each[level].get(name)) for name in names]
            rows.append([escaped(each["name"]), *values])
        if names:
            output += ["", *_table([f"over {escaped(over)}", *map(escaped, names)], rows)]
    return output


def _limits(card: Card) -> list[str]:
    test = card.results.get("test")
    seen = card.seen.get("sources", {})
    output = ["## Limits, and what was not checked", ""]
    if not test:
        output.append(
            "- There is no test: the checkpoint was chosen by the validation, which flatters it."
        )
    elif test.get("looks", 1) != 1:
        output.append(
            f"- The test was looked at {test['looks']} times: to choose by it makes it no test."
        )
    if not seen:
        output.append(
            "- There is no record of whom the samples are from, or whether the split cuts a person "
            "or an animal."
        )
    validated = card.results["validation"].get("per_source", {})
    both = [escaped(name) for name in validated if seen.get(name, {}).get("seen")]
    if both:
        output.append(f"- Trained on and validated on: {some_names(both, 20)}.")
    if "root" not in card.seen:
        output.append("- The samples were counted, not hashed.")
    if "replay" not in card.proof:
        output.append("- The steps of the training were not taken again (`tools/replay.py`).")
    output += [f"- {escaped(note)}" for note in card.results["validation"].get("notes", [])]
    if card.left_out:
        output.append(
            f"- Not in it: {amount(card.left_out, 'tensor')} that the task's `model` gives (see "
            "config.yaml)."
        )
    return [
        *output,
        "- Other people, animals, devices, rooms and rates than those of the data were not tried.",
        "- It has no optimizer: a training can start from it (`init_from`), and none continues it.",
    ]


def _use(card: Card) -> list[str]:
    own = card.task.endswith(".py")
    trust = task = ""
    if own:
        task = f" {card.name}/{shlex.quote(card.task)}"
    if own and card.with_task:
        trust = " --trust"
    new = "NEW"
    if card.robot:
        new = "RECORDINGS --out actions.npz"
    output = [
        "## How to use it",
        "",
        "In a checkout of Lockstep:",
        "",
        "```",
        f"hf download USER/{card.name} --local-dir {card.name}",
        f"python tools/predict.py {card.name} {new}{trust}",
        f"python tools/evaluate.py {card.name}{trust}",
        f"python tools/export.py {card.name}{trust}",
        f"python train.py{task} --config {card.name}/config.yaml init_from={card.name}",
        "```",
    ]
    if own and not card.with_task:
        output += [
            "",
            f"Its task is a file of its own, {escaped(card.task)}: ask for it, and put it into "
            "this folder.",
        ]
    elif own:
        output += [
            "",
            f"Its task, {escaped(card.task)}, is a program: read it before you trust it.",
        ]
    if card.robot:
        output += [
            "",
            "`tools/save_pretrained.py`, given this folder, writes the layout that LeRobot reads.",
        ]
    return output


def _prove(card: Card) -> list[str]:
    proof = card.proof
    run = proof["run"]
    hint = ""
    if f"={DATA}" in proof["command"]:
        hint = f" `{DATA}` is where the data lie."
    if proof["left_out"]:
        hint += f" Add what chose the split: {', '.join(proof['left_out'])}."
    if proof.get("fork"):
        hint += f" The run {escaped(proof['fork'])}: the command takes the steps of a run without "
        hint += "the fork."
    averaged = ""
    if card.averaged:
        averaged = " (the weights as trained; published is their average)"
    commit = run.get("git_commit")
    if run.get("git_dirty"):
        commit = f"{commit}, with changes"
    facts = proof["machine"] | {
        "Python": run.get("python"),
        "CUDA": run.get("cuda"),
        "NCCL": run.get("nccl"),
        "processes": run.get("processes"),
        "code": run.get("code"),
        "commit": commit,
        "data": proof["data"],
        "fork": proof.get("fork"),
        "digest in metrics.jsonl": proof["digest"],
    }
    rows = []
    for name, value in facts.items():
        if value not in (None, ""):
            rows.append([escaped(name), escaped(value)])
    output = [
        "## How to prove it",
        "",
        f"SHA-256 of these weights, as `tools/evaluate.py {card.name}` prints it: "
        f"`{card.sha256[:16]}`.",
        "",
        f"To train it again, with the same data, code and kind of machine:{hint}",
        "",
        "```",
        proof["command"],
        proof["then"],
        "```",
        "",
        f"The second command, with the folder of the first as `RUN`, prints `weights  sha256 "
        f"{proof['trained_weights_sha256'][:16]}` for the checkpoint of step "
        f"{proof['steps']}{averaged}.",
        "",
        *_table(["made with", ""], rows),
    ]
    replay = proof.get("replay")
    if replay:
        output += [
            "",
            f"Steps {replay.get('from')} to {replay.get('to')} were taken again "
            f"({escaped(replay.get('date', ''))}): "
            f"{escaped(replay.get('verdict', ''))}, {replay.get('equal')} of "
            f"{replay.get('points')} points are equal.",
        ]
    return output


def _table(head: list[str], rows: Rows) -> list[str]:
    """Return a Markdown table of at most ROWS rows. The names must be escaped already."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    lines = ["| " + " | ".join(row) + " |" for row in [head, rule, *rows[:ROWS]]]
    if len(rows) > ROWS:
        lines += ["", f"and {len(rows) - ROWS} more."]
    return lines


def _number(value: Any) -> str:
    """Return a number of a table; a dash for NaN, infinity, and a value of another type."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    if isinstance(value, int) or (value.is_integer() and abs(value) >= 2):
        return f"{value:g}"
    return f"{value:.4f}"


def _plus_minus(value: dict[str, Any] | None) -> str:
    """Return mean and sd of a table; a dash without a mean."""
    if not value or value["mean"] is None:
        return "–"
    text = f"{value['mean']:.4f}"
    if value["sd"] is not None:
        text += f" ± {value['sd']:.4f}"
    return text
