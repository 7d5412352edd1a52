"""What a study prints and writes: tables for a terminal, CSV, LaTeX."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.errors import LockstepError, amount
from engine.files.atomic import write_atomically
from tools.use.evaluate import aligned

STUDY = "study.json"


def as_number(value: Any, digits: int = 4) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) and math.isfinite(value) else "–"


def shown_metrics(found: dict[str, Any], most: int = 5) -> list[str]:
    """Return the metrics of the tables: the one that the task goes by first, then those that are
    shares."""
    names = dict.fromkeys(
        name for each in found["configs"] for name in [*each["over_sources"], *each["metrics"]]
    )
    first = [name for name in (found["monitor"], "macro_f1", "kappa", "accuracy") if name in names]
    return [*dict.fromkeys([*first, *names])][:most]


def plus_minus(value: dict[str, Any] | None, of: int = 0) -> str:
    """Return mean and sd; and of how many values, where they are fewer than `of`: the others are no
    numbers."""
    if not value or not math.isfinite(value["mean"]):
        return "–"
    fewer = f" ({value['n']} of {of})" if value["n"] < of else ""
    spread = f" ± {value['sd']:.3f}" if math.isfinite(value["sd"]) else ""
    return f"{value['mean']:.3f}{spread}{fewer}"


def summary(found: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Return the tables for people: (title, rows), the first row their head."""
    metrics, tables = shown_metrics(found), list[tuple[str, list[list[str]]]]()
    people = max((len(each["sources"]) for each in found["configs"]), default=0)
    number = max(
        (value["n"] for each in found["configs"] for value in each["metrics"].values()), default=0
    )
    cut = amount(number, "fold" if found["folds"] else "seed")
    alone = (
        bool(people)
        and bool(found["folds"])
        and all(len(each["test"]) == 1 for each in found["folds"])
    )
    for title, key, of in (
        (f"mean ± sd of {people} {found['by']}", "over_sources", people),
        (f"mean ± sd of {cut}", "metrics", number),
    ):
        if alone and key == "metrics":  # the same numbers
            continue
        if any(each[key] for each in found["configs"]):
            cells = [
                [plus_minus(each[key].get(name), of) for name in metrics]
                for each in found["configs"]
            ]
            rows = [[each["name"], *row] for each, row in zip(found["configs"], cells, strict=True)]
            tables.append((title, [["", *metrics], *rows]))
    if len(found["seeds"]) > 1 and found["folds"]:
        of = len(found["seeds"])
        rows = [
            [each["name"], *(plus_minus(each["seeds"].get(n), of) for n in metrics)]
            for each in found["configs"]
        ]
        tables.append(
            (
                f"mean ± sd of {amount(len(found['seeds']), 'seed')}, each the mean of its folds",
                [["", *metrics], *rows],
            )
        )
    if all("pooled" in each for each in found["configs"]):
        names = [name for name in metrics if name in found["configs"][0]["pooled"]]
        rows = [
            [each["name"], *(as_number(each["pooled"][name], 3) for name in names)]
            for each in found["configs"]
        ]
        tables.append(("all tests pooled", [["", *names], *rows]))
        first = found["configs"][0]["classes"]
        heads = [each["name"] if len(found["configs"]) > 1 else "f1" for each in found["configs"]]
        by_class = [
            [as_number(row["f1"], 3) for row in each["classes"]] for each in found["configs"]
        ]
        rows = [
            [row["name"], *cells, str(row["count"])]
            for row, *cells in zip(first, *by_class, strict=True)
        ]
        tables.append(("F1 of each class, all tests pooled", [["", *heads, "tests"], *rows]))
    return tables


def person_table(found: dict[str, Any]) -> tuple[str, list[list[str]]]:
    """Return the table of people, the worst first."""
    metric, configs = next(iter(shown_metrics(found)), ""), found["configs"]
    of_each = [{source["name"]: source for source in each["sources"]} for each in configs]
    names = [*dict.fromkeys(name for each in of_each for name in each)]
    sign = 1 if found["higher_is_better"] else -1
    names.sort(key=lambda name: sign * of_each[0].get(name, {}).get(metric, math.inf))
    several = len(configs) > 1
    columns = [metric] if several else shown_metrics(found)
    counts = {name: str(row["count"]) for each in of_each for name, row in each.items()}
    rows = [
        [
            name,
            *(
                as_number(each.get(name, {}).get(column, math.nan), 3)
                for each in of_each
                for column in columns
            ),
            counts[name],
        ]
        for name in names
    ]
    heads = [each["name"] for each in configs] if several else columns
    title = f"{metric} of each of the {found['by']}" if several else f"each of the {found['by']}"
    return title, [["", *heads, "samples"], *rows] if rows else []


def difference_table(found: dict[str, Any]) -> tuple[str, list[list[str]]]:
    """Return the table of the paired differences of the shown metrics."""
    names, metrics = {"sources": found["by"]}, shown_metrics(found)
    of = [
        each
        for each in found["differences"]
        if each["metric"] in metrics and math.isfinite(each["mean"])
    ]
    if not of:
        return "", []
    several = len({each["of"][1] for each in of}) > 1
    rows = [
        [
            *([each["of"][1]] if several else []),
            f"{each['metric']}, {each['n']} {names.get(each['over'], each['over'])}",
            f"{each['mean']:+.3f}",
            f"{each['low']:+.3f} to {each['high']:+.3f}" if math.isfinite(each["low"]) else "–",
        ]
        for each in sorted(
            of,
            key=lambda each: (
                each["of"][1],
                metrics.index(each["metric"]),
                each["over"] != "sources",
            ),
        )
    ]
    other = "each" if several else of[0]["of"][1]
    title = f"{other} minus {of[0]['of'][0]}, pair by pair, with {of[0]['confidence']:.0%} interval"
    return title, [["", *([""] if several else []), "difference", "interval"], *rows]


def all_tables(found: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Return (title, rows) of each table that has any, the first row its head."""
    return [
        pair for pair in [*summary(found), person_table(found), difference_table(found)] if pair[1]
    ]


def lines(found: dict[str, Any], most: int = 12) -> list[str]:
    """Return the study in words and tables for a terminal."""
    looks = sum(run["looks"] != 1 for each in found["configs"] for run in each["runs"])
    once = f"{looks} of them more than once, by hand" if looks else "each once"
    said = [
        (
            f"{Path(found['task']).name}: {found['what']}; {found['tested']} of "
            f"{found['trainings']} "
            f"tested, {once}"
        )
    ]
    title, rows = person_table(found)
    people = [
        (
            title + (f", {most} of {len(rows) - 1}, the worst" if len(rows) > most + 1 else ""),
            rows[: most + 1],
        )
    ]
    for title, rows in [*summary(found), *people, difference_table(found)]:
        if rows:
            said += ["", f"  {title}", *aligned(rows)]
    return said


def write(found: dict[str, Any], folder: Path) -> list[str]:
    """Write the study's files; return their names."""
    texts = {
        STUDY: json.dumps(_without_nan(found), indent=1) + "\n",
        "study.csv": _csv(found),
        "runs.csv": _runs_csv(found),
    }
    texts["study.tex"] = latex(found)
    try:
        for name, text in texts.items():
            write_atomically(folder / name, partial(_fill, text.encode()))
        if find_spec("matplotlib") is None or not found["tested"]:
            return [*texts, "no plot (pip install matplotlib)"] if found["tested"] else [*texts]
        from tools.paper.study_figure import files

        figures = files(found)
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
    """Return what study.json holds. Raises LockstepError where it is none."""
    try:
        found = _with_nan(json.loads((folder / STUDY).read_bytes()))
        found["monitor"], [run["folder"] for each in found["configs"] for run in each["runs"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise LockstepError(
            "not a study", str(folder / STUDY), "let tools/study.py write it again"
        ) from None
    return dict(found)


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


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerows([header, *rows])
    return text.getvalue()


def _csv(found: dict[str, Any]) -> str:
    """Return every number in a row of its own."""
    rows = list[list[Any]]()
    for each in found["configs"]:
        for level, key in (("folds", "metrics"), ("seeds", "seeds"), ("sources", "over_sources")):
            rows += [
                [each["name"], f"over {level}", "", name, *_cells(value)]
                for name, value in each[key].items()
            ]
        rows += [
            [each["name"], "pooled", "", name, _digits(value), "", ""]
            for name, value in each.get("pooled", {}).items()
        ]
        for level, key in (("class", "classes"), ("source", "sources")):
            for row in each.get(key, []):
                numbers = (
                    (name, value) for name, value in row.items() if name not in ("name", "count")
                )
                rows += [
                    [each["name"], level, row["name"], name, _digits(v), "", row["count"]]
                    for name, v in numbers
                ]
    for each in found["differences"]:
        name = f"{each['of'][1]} - {each['of'][0]}"
        rows.append(
            [
                name,
                f"difference over {each['over']}",
                "",
                each["metric"],
                *_cells(each),
                *map(_digits, (each["low"], each["high"])),
            ]
        )
    return _table(
        ["config", "of", "name", "metric", "mean", "sd", "n", "low", "high"],
        [row + [""] * (9 - len(row)) for row in rows],
    )


def _digits(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else ""


def _cells(value: dict[str, Any]) -> list[Any]:
    return [_digits(value["mean"]), _digits(value["sd"]), value["n"]]


def _runs_csv(found: dict[str, Any]) -> str:
    names = [
        *dict.fromkeys(
            name for each in found["configs"] for run in each["runs"] for name in run["metrics"]
        )
    ]
    rows = [
        [
            each["name"],
            run["fold"] if run["fold"] >= 0 else "",
            run["seed"],
            run["folder"],
            run["checkpoint"],
            run["count"],
        ]
        + [_digits(run["metrics"].get(name, math.nan)) for name in names]
        for each in found["configs"]
        for run in each["runs"]
    ]
    return _table(["config", "fold", "seed", "folder", "checkpoint", "samples", *names], rows)


SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
}
SPECIAL |= {each: rf"\{each}" for each in "&%$#_{}"}


def escaped(text: str) -> str:
    """Return a name as LaTeX shows it."""
    return "".join(SPECIAL.get(letter, letter) for letter in text)


def latex(found: dict[str, Any]) -> str:
    """Return the tables for a paper (\\usepackage{booktabs})."""
    said = [f"% {escaped(found['task'])}: {escaped(found['what'])}; \\usepackage{{booktabs}}"]
    if found["tested"] < found["trainings"]:
        said.append(
            f"% NOT COMPLETE: {found['tested']} of {found['trainings']} trainings are tested"
        )
    for title, rows in all_tables(found):
        said += [
            "",
            rf"% {escaped(title)}",
            rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}",
            r"\toprule",
        ]
        body = [" & ".join(map(escaped, row)) + r" \\" for row in rows]
        said += [body[0], r"\midrule", *body[1:], r"\bottomrule", r"\end{tabular}"]
    return "\n".join(said).rstrip() + "\n"
