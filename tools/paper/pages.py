"""The parts that all HTML pages share: templates, numbers and texts, and the name of a page."""

from __future__ import annotations

import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.errors import LockstepError
from tools.paper import report_figures as figures
from tools.running import is_writable

EXTRA = "pip install matplotlib jinja2"


def check_packages(tool: str) -> None:
    """Raise LockstepError if a package for pages is not installed."""
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise LockstepError(f"{' and '.join(missing)} not installed", tool, EXTRA)


def check_name(out: Path, option: str = "--out") -> Path:
    """Return the name of a page. Raises LockstepError if no page can have the name."""
    if out.suffix not in (".html", ".htm") or not out.parent.is_dir() or out.is_dir():
        raise LockstepError(
            f"{out} is not the name of a page",
            option,
            "give one that ends in .html, in a folder that is there",
        )
    if not is_writable(out.parent):
        todo = f"give {option} FILE.html in a folder of yours"
        raise LockstepError(f"{out} cannot be written", option, todo)
    return out


def free_name(stem: str) -> Path:
    """Return the first free name: report.html, report_2.html, ..."""
    path = Path(f"{stem}.html")
    number = 1
    while path.exists():
        number += 1
        path = Path(f"{stem}_{number}.html")
    return path


def template(name: str) -> Any:
    """Return a template of this folder. All values are escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        finalize=plain,
    )
    environment.filters |= {"num": shown, "share": figures.share}
    return environment.get_template(name)


def shown(value: Any) -> str:
    """Format a number or a text for a table."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if not isinstance(value, float) or math.isinf(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        return f"{value:.4f}"
    return f"{value:.4g}"


def plain(value: Any) -> Any:
    """Return a text without control characters. A value of another type is returned unchanged.

    HTML forbids some control characters. Others reverse the direction of the text after them.
    """
    if type(value) is str:
        return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", value)
    return value


CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
