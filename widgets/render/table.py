"""A small table.

Owns: its look in HTML and in text. Refuses: to know what is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, str]:
    """A small table as a mime bundle, in HTML and in aligned text. Columns with nothing in them are left out."""
    filled = [column for column in range(len(headings)) if any(row[column] for row in rows)]
    headings, *rows = [[row[column] for column in filled] for row in (headings, *rows)]
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (headings, *rows)
    ]
    head = "".join(f'<th scope="col" style="text-align:left">{escape(cell)}</th>' for cell in headings)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    return {
        "text/plain": "\n".join(lines),
        "text/html": f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
    }
