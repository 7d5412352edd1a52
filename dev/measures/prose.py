"""Stand-in words: pronouns and similar words, per 100 words of prose.

A block of code is left out. A piece of code within a sentence counts as one word. The
address of a link is left out. The text of a link and the words of a table count.

The plan of the project was made with a count of 7.6 in docstrings and 6.5 in the documentation.
At the commit of the plan (1fe1709) the list below gives 7.40 and 6.51. The list without "one" and
"same" comes closest to the two numbers: here "one" is mostly a number, and "same" is mostly an
adjective ("the same bits"). The wider list counts both words. The rows of the wider list have no
bar.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from measures import project
from measures.rows import Row

STAND_INS = frozenset(
    "it its this that these those they them their what which who whose other others ones another "
    "such".split()
)
WIDER = STAND_INS | {"one", "same"}

BAR = 3

BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(`+)[^`\n]*(?:\n[^`\n]+)?\1")
ADDRESS = re.compile(r"\]\([^)]*\)")
TAG = re.compile(r"<[^>]+>")
WORD = re.compile(r"[a-z0-9](?:[a-z0-9'’_.,/-]*[a-z0-9])?")


def rows() -> list[Row]:
    """Return the rows of the module."""
    docstrings = {
        project.relative(path): _docstrings(path) for path in project.sources_of(project.PRODUCT)
    }
    pages = [project.ROOT / "README.md", project.ROOT / "CONTRIBUTING.md"]
    pages += sorted((project.ROOT / "docs").glob("*.md"))
    docs = {project.relative(page): project.text(page) for page in pages if page.is_file()}
    return [*_rows("docstrings", docstrings), *_rows("docs", docs)]


def _docstrings(path: Path) -> str:
    """Return the docstrings of a file, joined."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in project.nodes(path):
        if isinstance(node, documented):
            found.append(ast.get_docstring(node) or "")
    return "\n\n".join(found)


def words(prose: str) -> list[str]:
    """Return the words of a text in lower case, without code and addresses."""
    prose = BLOCK.sub(" ", prose)
    prose = INLINE.sub(" code ", prose)
    prose = ADDRESS.sub("]", prose)
    prose = TAG.sub(" ", prose)
    return WORD.findall(prose.lower())


def _rows(name: str, texts: dict[str, str]) -> list[Row]:
    counted = {file: words(prose) for file, prose in texts.items()}
    every = [word for found in counted.values() for word in found]
    worst = sorted(
        ((_per_100(found), len(found), file) for file, found in counted.items()), reverse=True
    )
    places = tuple(
        f"{share:.2f} of {count} words {file}" for share, count, file in worst if share > BAR
    )
    return [
        Row(
            f"{name}: stand-in words per 100",
            _per_100(every),
            BAR,
            f"{len(every):,} words",
            places=places,
        ),
        Row(f'{name}: with "one" and "same"', _per_100(every, WIDER)),
    ]


def _per_100(found: list[str], stand_ins: frozenset[str] = STAND_INS) -> float:
    count = sum(word in stand_ins for word in found)
    return round(100 * count / max(1, len(found)), 2)
