#!/usr/bin/env python3
"""The loops and tasks of examples/ports in docs/port-your-loop.md, whole or by method, and the
lines that a port changes.

python dev/ports.py            write files and counts into the page
python dev/ports.py --check    exit 1 if the page has other files or counts
"""

from __future__ import annotations

import ast
import collections
import io
import re
import sys
import textwrap
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "port-your-loop.md"
PORTS = ROOT / "examples" / "ports"
END = "<!-- end -->\n"

PAIRS = {
    "quickstart.py": "quickstart_task.py",
    "lightning_module.py": "lightning_task.py",
    "trainer.py": "trainer_task.py",
    "accelerate_script.py": "accelerate_task.py",
    "lerobot_policy.py": "lerobot_task.py",
}
"""The file of a loop, and the file of the task that trains the same model."""

METHODS = {
    "dice_task.py": ("loss",),
    "recurrent_task.py": ("loss", "after_step"),
    "diffusion_task.py": ("loss",),
}
"""The file of a task, and the methods that the page shows."""


def lines_of_code(source: str) -> list[str]:
    """Return the lines without indentation, empty lines, comments and docstrings."""
    skipped = set()
    begins_statement = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_text = token.type == tokenize.STRING and begins_statement
        if is_text or token.type == tokenize.COMMENT:
            alone = token.line.strip().startswith(("#", '"""'))
            if alone:
                skipped.update(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            begins_statement = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    numbered = enumerate(source.splitlines(), 1)
    return [line.strip() for number, line in numbered if line.strip() and number not in skipped]


def counts(loop: str, task: str) -> tuple[int, int, int, int]:
    """Return the lines of code of the loop, and of these the lines that are gone in the task; the
    lines of the task, and of these the lines that are new."""
    old = collections.Counter(lines_of_code((PORTS / loop).read_text()))
    new = collections.Counter(lines_of_code((PORTS / task).read_text()))
    gone, added = old - new, new - old
    return old.total(), gone.total(), new.total(), added.total()


def side_by_side(loop: str, task: str) -> str:
    """Return the table with both files."""
    cells = []
    for name in (loop, task):
        code = (PORTS / name).read_text().rstrip()
        cells.append(f'<td valign="top">\n\n```python\n{code}\n```\n\n</td>')
    links = [f'<th><a href="../examples/ports/{name}">{name}</a></th>' for name in (loop, task)]
    return f"<table>\n<tr>{''.join(links)}</tr>\n<tr>{''.join(cells)}</tr>\n</table>\n"


def methods(task: str, names: tuple[str, ...]) -> str:
    """Return the code of some methods of a task."""
    source = (PORTS / task).read_text()
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
            found.append(textwrap.dedent("\n".join(lines)))
    code = "\n\n\n".join(found)
    return f"```python\n{code}\n```\n"


def summary() -> str:
    rows = [
        "| loop | lines | of these gone | task | lines | of these new |",
        "|---|---|---|---|---|---|",
    ]
    for loop, task in PAIRS.items():
        old, gone, new, added = counts(loop, task)
        rows.append(f"| `{loop}` | {old} | {gone} | `{task}` | {new} | {added} |")
    return "\n".join(rows) + "\n"


def page_with_files(page: str) -> str:
    """Return the page with the files and the counts of now."""
    parts = {"lines": summary()}
    parts |= {loop: side_by_side(loop, task) for loop, task in PAIRS.items()}
    parts |= {task: methods(task, names) for task, names in METHODS.items()}
    for name, text in parts.items():
        begin = f"<!-- ports: {name} -->\n"
        pattern = re.escape(begin) + ".*?" + re.escape(END)
        filled = f"{begin}\n{text}\n{END}"
        page, found = re.subn(pattern, lambda _, filled=filled: filled, page, flags=re.S)
        assert found == 1, f"docs/port-your-loop.md: {found} places {begin!r}"
    return page


def main(arguments: list[str]) -> int:
    old = PAGE.read_text()
    new = page_with_files(old)
    if "--check" not in arguments:
        PAGE.write_text(new)
    elif new != old:
        print("docs/port-your-loop.md differs from examples/ports", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
