"""Output of commands: tables, and sizes."""

import unicodedata
from collections.abc import Collection, Sequence
from typing import Any


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Rows of cells as lines of text; columns are right-aligned, but for those in `left`."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def cell(text: str, column: int) -> str:
        """The text, filled up with spaces to the width of its column."""
        return text.ljust(widths[column]) if column in left else text.rjust(widths[column])

    return "\n".join("  ".join(cell(text, i) for i, text in enumerate(row)).rstrip() for row in rows)


def printable(text: str) -> str:
    """The text with replacement characters in place of terminal control characters."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


def clipped(text: str, width: int) -> str:
    """The text, or as much of it as fits with an ellipsis at its end."""
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}\u2026"


def size_text(size: int | float) -> str:
    """A number of bytes, in GiB, MiB or KiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if abs(size) >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size / 2**10:,.2f} KiB"


def table(title: str, columns: str, rows: Sequence[Sequence[Any]], left: Collection[int] = (0,)) -> str:
    """A title and aligned rows as text. columns: their names, separated by |; left: see `aligned`."""
    cells = [[f"{x:,}" if isinstance(x, int) else str(x) for x in row] for row in rows]
    lines = aligned([columns.split("|"), *cells], left).splitlines()
    return "\n".join([title, *(f"  {line}" for line in lines)])
