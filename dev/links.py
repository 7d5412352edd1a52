#!/usr/bin/env python3
"""The links from docs/ to lines of code: `[`words`](../file.py#L12)` means that line 12 of the file
holds the words.

python dev/links.py            lead each link to the nearest line that holds its words
python dev/links.py --check    exit 1, with a line each, if one leads elsewhere
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
LINK = re.compile(r"\[`([^`\n]+)`\]\(([^)#\s]+)#L(\d+)\)")


def main(argv: list[str]) -> int:
    check, wrong = argv == ["--check"], 0
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for link in LINK.finditer(text):
            words, target, number = link[1], page.parent / link[2], int(link[3])
            lines = target.read_text(encoding="utf-8").splitlines() if target.is_file() else []
            found = [n for n, line in enumerate(lines, 1) if words in line]
            if number in found:
                continue
            nearest = min(found, key=lambda n: abs(n - number), default=None)
            if check or nearest is None:
                wrong += 1
                hint = (
                    f"python dev/links.py makes it {nearest}"
                    if nearest
                    else "no line of that file has these words"
                )
                print(f"error: {link[0]} ({page.name}): {hint}", file=sys.stderr)
            else:
                text = text.replace(link[0], f"[`{words}`]({link[2]}#L{nearest})")
        if not check:
            page.write_text(text, encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
