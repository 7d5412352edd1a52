"""Format and write the results of a study: tables for a terminal, CSV, LaTeX."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.errors import LockstepError, amount, few
from engine.files.atomic import write_atomically
from tools.use.evaluate import aligned

STUDY = "study.json"

Table = tuple[str, list[list[str]]]
"""(title, rows). The first row is the head."""


def as_number(value: Any, digits: int = 4) -> str:
    """Return a number with fixed digits; a dash for NaN, infinity, and a value of another type."""
    if isinstance(value, int | float) and math.isfinite(value):
        return f"{value:.{digits}f}"
    return "–"


def shown_metrics(study: dict[str, Any], most: int = 5) -> list[str]:
    """Return the metrics of the tables: the task's monitor first, then metrics that are shares."""
    names: list[str] = []
    for each in study["configs"]:
        names += [*each["over_sources"], *each["metrics"]]
    first = [name for name in (study["monitor"], "macro_f1", "kappa", "accuracy") if name in names]
    return [*dict.fromkeys([*first, *names])][:most]


def plus_minus(value: dict[str, Any] | None, of: int = 0) -> str:
    """Return mean and sd as a text.

    of  the expected number of values; a smaller number is printed, because the rest were not finite
    """
    if not value or not math.isfinite(value["mean"]):
        return "–"
    text = f"{value['mean']:.3f}"
    if math.isfinite(value["sd"]):
        text += f" ± {value['sd']:.3f}"
    if value["n"] < of:
        text += f" ({value['n']} of {of})"
    return text


def summary(study: dict[str, Any]) -> list[Table]:
    """Return the tables for people: (title, rows). The first row is the head."""
    configs = study["configs"]
    seeds = len(study["seeds"])
    people = max((len(each["sources"]) for each in configs), default=0)
    number = max((value["n"] for each in configs for value in each["metrics"].values()), default=0)
    cut = amount(number, "fold" if study["folds"] else "seed")
    tables = [_spreads(study, f"mean ± sd of {people} {study['by']}", "over_sources", people)]
    # If each fold tests one person, the table over folds has the numbers of the table over people.
    one_each = study["folds"] and all(len(fold["test"]) == 1 for fold in study["folds"])
    if not people or not one_each:
        tables.append(_spreads(study, f"mean ± sd of {cut}", "metrics", number))
    if seeds > 1 and study["folds"]:
        title = f"mean ± sd of {amount(seeds, 'seed')}, each the mean of its folds"
        tables.append(_spreads(study, title, "seeds", seeds))
    if all("pooled" in each for each in configs):
        tables += _pooled(study)
    return [table for table in tables if table[1]]


def _spreads(study: dict[str, Any], title: str, key: str, of: int) -> Table:
    """Return the table of mean and sd of each config; without rows if no config has numbers."""
    metrics = shown_metrics(study)
    rows = [["", *metrics]]
    for each in study["configs"]:
        rows.append([each["name"], *[plus_minus(each[key].get(name), of) for name in metrics]])
    if key != "seeds" and not any(each[key] for each in study["configs"]):
        return title, []
    return title, rows


def _pooled(study: dict[str, Any]) -> list[Table]:
    """Return the tables of the pooled tests: metrics of each config, and F1 of each class."""
    configs = study["configs"]
    names = [name for name in shown_metrics(study) if name in configs[0]["pooled"]]
    rows = [["", *names]]
    columns = [["", *[row["name"] for row in configs[0]["classes"]]]]
    for each in configs:
        rows.append([each["name"], *[as_number(each["pooled"][name], 3) for name in names]])
        columns.append([each["name"], *[as_number(row["f1"], 3) for row in each["classes"]]])
    if len(configs) == 1:
        columns[1][0] = "f1"
    columns.append(["tests", *[str(row["count"]) for row in configs[0]["classes"]]])
    by_class = list(map(list, zip(*columns, strict=True)))
    return [("all tests pooled", rows), ("F1 of each class, all tests pooled", by_class)]


def person_table(study: dict[str, Any]) -> Table:
    """Return the table of people, the worst first."""
    configs = study["configs"]
    columns = shown_metrics(study)
    metric = [*columns, ""][0]
    of_each = [{source["name"]: source for source in each["sources"]} for each in configs]
    names = list(dict.fromkeys(itertools.chain(*of_each)))
    sign = 1 if study["higher_is_better"] else -1
    names.sort(key=lambda name: sign * of_each[0].get(name, {}).get(metric, math.inf))
    title = f"each of the {study['by']}"
    heads = columns
    if len(configs) > 1:
        title = f"{metric} of {title}"
        columns = [metric]
        heads = [each["name"] for each in configs]
    rows = [["", *heads, "samples"]]
    for name in names:
        row = [name]
        for sources in of_each:
            person = sources.get(name, {})
            row += [as_number(person.get(column, math.nan), 3) for column in columns]
        counts = [sources[name]["count"] for sources in of_each if name in sources]
        rows.append([*row, str(counts[-1])])
    if not names:
        rows = []
    return title, rows


def difference_table(study: dict[str, Any]) -> Table:
    """Return the table of the paired differences of the shown metrics."""
    metrics = shown_metrics(study)
    differences = []
    for each in study["differences"]:
        if each["metric"] in metrics and math.isfinite(each["mean"]):
            place = each["of"][1], metrics.index(each["metric"]), each["over"] != "sources"
            differences.append((place, each))
    if not differences:
        return "", []
    differences.sort(key=lambda pair: pair[0])
    rows = [["", "", "difference", "interval"]]
    for _, each in differences:
        over = each["over"]
        if over == "sources":
            over = study["by"]
        interval = "–"
        if math.isfinite(each["low"]):
            interval = f"{each['low']:+.3f} to {each['high']:+.3f}"
        what = f"{each['metric']}, {each['n']} {over}"
        rows.append([each["of"][1], what, f"{each['mean']:+.3f}", interval])
    first, other = differences[0][1]["of"]
    if len({row[0] for row in rows[1:]}) > 1:
        other = "each"
    else:
        rows = [row[1:] for row in rows]
    confidence = differences[0][1]["confidence"]
    return f"{other} minus {first}, pair by pair, with {confidence:.0%} interval", rows


def all_tables(study: dict[str, Any]) -> list[Table]:
    """Return (title, rows) of each table with rows. The first row is the head."""
    tables = [*summary(study), person_table(study), difference_table(study)]
    return [table for table in tables if table[1]]


def lines(study: dict[str, Any], most: int = 12) -> list[str]:
    """Return the study in words and tables for a terminal, with at most `most` people."""
    looks = sum(run["looks"] != 1 for each in study["configs"] for run in each["runs"])
    once = f"{looks} of them more than once, by hand" if looks else "each once"
    tested = f"{study['tested']} of {study['trainings']} tested, {once}"
    output = [f"{Path(study['task']).name}: {study['what']}; {tested}"]
    for name, trainings in study.get("mixed_code", {}).items():
        output.append(f"warning: other code than the first training: {name} of {few(trainings, 4)}")
    title, rows = person_table(study)
    if len(rows) > most + 1:
        title += f", {most} of {len(rows) - 1}, the worst"
    people = title, rows[: most + 1]
    for title, rows in [*summary(study), people, difference_table(study)]:
        if rows:
            output += ["", f"  {title}", *aligned(rows)]
    return output


def write(study: dict[str, Any], folder: Path) -> list[str]:
    """Write the files of the study.

    Return the names. Raises LockstepError if a file cannot be written.
    """
    texts = {
        STUDY: json.dumps(_without_nan(study), indent=1) + "\n",
        "study.csv": _csv(study),
        "runs.csv": _runs_csv(study),
    }
    texts["study.tex"] = latex(study)
    try:
        for name, text in texts.items():
            write_atomically(folder / name, partial(_fill, text.encode()))
        if find_spec("matplotlib") is None or not study["tested"]:
            return [*texts, "no plot (pip install matplotlib)"] if study["tested"] else [*texts]
        from tools.paper.study_figure import files

        figures = files(study)
        for name, data in figures.items():
            write_atomically(folder / name, partial(_fill, data))
    except OSError as error:
        raise LockstepError(
            f"cannot write: {error.strerror}", str(folder), "make room, and start it again"
        ) from None
    return [*texts, *figures]


def _fill(data: bytes, file: Any) -> None:
    file.write(data)


def load(folder: Path) -> dict[str, Any]:
    """Return the contents of study.json. Raises LockstepError if the file is no study."""
    try:
        study = _with_nan(json.loads((folder / STUDY).read_bytes()))
        study["monitor"], [run["folder"] for each in study["configs"] for run in each["runs"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise LockstepError(
            "not a study", str(folder / STUDY), "let tools/study.py write it again"
        ) from None
    return dict(study)


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_nan(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_nan(each) for each in value]
    return math.nan if value is None else value


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _csv(study: dict[str, Any]) -> str:
    """Return a table with a row for each number."""
    rows: list[list[Any]] = [
        ["config", "of", "name", "metric", "mean", "sd", "n", "low", "high"],
    ]
    for each in study["configs"]:
        config = each["name"]
        for level, key in (("folds", "metrics"), ("seeds", "seeds"), ("sources", "over_sources")):
            for name, value in each[key].items():
                rows.append([config, f"over {level}", "", name, *_cells(value), "", ""])
        for name, value in each.get("pooled", {}).items():
            rows.append([config, "pooled", "", name, _digits(value), "", "", "", ""])
        for level, key in (("class", "classes"), ("source", "sources")):
            for row in each.get(key, []):
                for name, value in row.items():
                    if name not in ("name", "count"):
                        cells = _digits(value), "", row["count"], "", ""
                        rows.append([config, level, row["name"], name, *cells])
    for each in study["differences"]:
        name = f"{each['of'][1]} - {each['of'][0]}"
        interval = _digits(each["low"]), _digits(each["high"])
        over = f"difference over {each['over']}"
        rows.append([name, over, "", each["metric"], *_cells(each), *interval])
    return _table(rows)


def _digits(value: float) -> str:
    """Return all digits of a number; no text for NaN and infinity."""
    if math.isfinite(value):
        return repr(float(value))
    return ""


def _cells(value: dict[str, Any]) -> list[Any]:
    return [_digits(value["mean"]), _digits(value["sd"]), value["n"]]


def _runs_csv(study: dict[str, Any]) -> str:
    names: dict[str, None] = {}
    rows: list[list[Any]] = []
    for each in study["configs"]:
        for run in each["runs"]:
            names |= dict.fromkeys(run["metrics"])
    for each in study["configs"]:
        for run in each["runs"]:
            fold = run["fold"] if run["fold"] >= 0 else ""
            about = each["name"], fold, run["seed"], run["folder"], run["checkpoint"], run["count"]
            values = [_digits(run["metrics"].get(name, math.nan)) for name in names]
            rows.append([*about, *values])
    return _table([["config", "fold", "seed", "folder", "checkpoint", "samples", *names], *rows])


SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
}
SPECIAL |= {each: rf"\{each}" for each in "&%$#_{}"}


def escaped(text: str) -> str:
    """Return a name with LaTeX's special characters escaped."""
    return "".join(SPECIAL.get(letter, letter) for letter in text)


def latex(study: dict[str, Any]) -> str:
    """Return the tables for a paper (\\usepackage{booktabs})."""
    output = [f"% {escaped(study['task'])}: {escaped(study['what'])}; \\usepackage{{booktabs}}"]
    if study["tested"] < study["trainings"]:
        output.append(
            f"% NOT COMPLETE: {study['tested']} of {study['trainings']} trainings are tested"
        )
    for title, rows in all_tables(study):
        output += [
            "",
            rf"% {escaped(title)}",
            rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}",
            r"\toprule",
        ]
        body = [" & ".join(map(escaped, row)) + r" \\" for row in rows]
        output += [body[0], r"\midrule", *body[1:], r"\bottomrule", r"\end{tabular}"]
    return "\n".join(output).rstrip() + "\n"
