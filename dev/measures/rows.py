"""A row of the table: the name of a measurement, today's value, and the bar."""

from __future__ import annotations

from dataclasses import dataclass

HELD = frozenset(
    {
        "reading path: files",
        "imports from the core to plugins",
        "import rings among rooms",
        "core: lines over 100 columns",
        "plugins: lines over 100 columns",
        "tools: lines over 100 columns",
        "formats: lines over 100 columns",
        "tasks: lines over 100 columns",
        "models: lines over 100 columns",
        "page: lines over 100 columns",
        "core: comprehensions per 100",
        "core: text or list times bool",
        "plugins: conditional expressions per 100",
        "plugins: comprehensions per 100",
        "plugins: text or list times bool",
        "tools: text or list times bool",
        "formats: text or list times bool",
        "tasks: text or list times bool",
        "docstrings: stand-in words per 100",
        "docs: stand-in words per 100",
        "models: conditional expressions per 100",
        "models: text or list times bool",
        "page: comprehensions per 100",
        "page: text or list times bool",
        "page: statements",
        "plugins: statements per 100 lines",
        "files that know the state's names",
        "files that know exclusive settings",
    }
)
"""Names of the rows that `house.py --check` holds. Add a name when its row has reached the bar."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    value    today's value; None without a measurement or a single number
    bar      the largest allowed value; None for a printed row without a bar
    note     a text beside the value, or the reason why there is no value
    details  lines below the row, always printed
    places   lines below the row, printed with --places
    """

    name: str
    value: float | None = None
    bar: float | None = None
    note: str = ""
    details: tuple[str, ...] = ()
    places: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        """Return whether `house.py --check` fails when the row is over the bar."""
        return self.name in HELD

    @property
    def state(self) -> str:
        """Return ok, over, or an empty text where there is nothing to compare."""
        if self.bar is None or self.value is None:
            return ""
        return "ok" if self.value <= self.bar else "over"

    @property
    def failed(self) -> bool:
        """Return whether the row makes `house.py --check` fail."""
        return self.held and self.state != "ok"
