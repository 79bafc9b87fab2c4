"""Results that are shown as a table with a sentence above it, as text and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

MAX_ROWS = 30
"""Rows that are shown; the attributes of the result have all of them."""


class TableResult:
    """Base class of results with rows: `summary` is the sentence, `rows` are the lines below `HEADINGS`."""

    HEADINGS: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return the result in one or a few lines."""
        raise NotImplementedError

    def rows(self) -> Sequence[Sequence[str]]:
        """Return the rows of the table."""
        raise NotImplementedError

    def bundle(self) -> dict[str, str]:
        """Return the MIME bundle, with text/plain and text/html."""
        from rankbook.widgets.rendering import table  # only where a result is shown

        rows = list(self.rows())
        more = f"and {len(rows) - MAX_ROWS:,} more rows" if len(rows) > MAX_ROWS else ""
        text, html = [self.summary()], [f"<div>{escape(self.summary())}</div>".replace("\n", "<br>")]
        if rows:
            shown = table(self.HEADINGS, rows[:MAX_ROWS])
            text.append(shown["text/plain"])
            html.append(shown["text/html"])
        if more:
            text.append(more)
            html.append(f"<div>{more}</div>")
        return {"text/plain": "\n".join(text), "text/html": "".join(html)}

    def __str__(self) -> str:
        return self.bundle()["text/plain"]

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return self.bundle()
