"""Palette, SVG elements, bars, tables, ANSI colours and the line of a cell's state: shared rendering of the views.

The palette is Okabe and Ito's, which people with colour vision deficiencies can tell apart
(https://jfly.uni-koeln.de/color/). static/common.js has the same palette; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice

from rankbook.formatting import ANSI_ESCAPE
from rankbook.ranks import name_ranks

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILLION, YELLOW, GREY = "#56B4E9", "#D55E00", "#F0E442", "#999999"

RANK_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILLION, YELLOW, GREY)
# Blue has a contrast of 5.2 to white and 4.0 to black.
DARK = {BLUE}  # backgrounds for white text; on the others black has the greater contrast

MEMORY_COLOURS = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "other": PINK,
}

STATE_MARKS = {
    "starting": "◌",
    "idle": "○",
    "running": "▶",
    "waiting": "‖",
    "unresponsive": "?",
    "dead": "✕",
    "stopped": "□",
}

INK, PAPER, LINE, FAINT = "#1f2328", "#ffffff", "#d0d7de", "#57606a"
FONT = "font-family='system-ui, sans-serif'"
CELL = "text-align:left;white-space:nowrap"  # a size stays in one line; the output area scrolls
WRAPPING = "text-align:left;min-width:12em"
_BLOCKS = "▁▂▃▄▅▆▇█"


# SVG and HTML -------------------------------------------------------------------------------------------------------


def rank_color(rank: int) -> str:
    """Return the colour of a rank. Ranks that share a colour are distinguished by the number shown with it."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def contrast_color(colour: str) -> str:
    """Return the text colour for the background `colour`."""
    return "#ffffff" if colour in DARK else "#000000"


def rect(x: float, y: float, width: float, height: float, fill: str, *, title: str = "", extra: str = "") -> str:
    """Return an SVG rectangle; `title` is its tooltip and `extra` has more attributes."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        # Rounded to a tenth of a pixel, which makes large documents shorter. Rounding errors may make a width
        # negative.
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{max(0.0, width):.1f}' height='{height:.1f}' fill='{fill}'{extra}>"
        f"{inside}</rect>"
    )


def text_element(x: float, y: float, text: str, *, size: int = 12, fill: str = INK, anchor: str = "start") -> str:
    """Return an SVG text element with its baseline at `y`."""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{fill}' text-anchor='{anchor}'>{escape(text)}</text>"
    )


def svg_document(width: float, height: float, title: str, shapes: Sequence[str]) -> str:
    """Return an SVG document of the given size in pixels."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
        f"viewBox='0 0 {width:.0f} {height:.0f}' role='img' {FONT}><title>{escape(title)}</title>"
        f"<rect width='100%' height='100%' fill='{PAPER}'/>{''.join(shapes)}</svg>"
    )


def bar(parts: Sequence[tuple[str, float, str]], total: float, *, width: str = "100%", height: str = "0.8em") -> str:
    """Return an HTML bar split into (label, amount, colour); the rest up to `total` stays empty."""
    spans = "".join(
        f'<span title="{escape(label)}" style="background:{colour};width:{100 * amount / total:.2f}%"></span>'
        for label, amount, colour in parts
        if total > 0 and amount > 0
    )
    return (
        # Browsers print no backgrounds unless `print-color-adjust` says so.
        f'<span aria-hidden="true" style="display:inline-flex;width:{width};height:{height};border:1px solid #8888;'
        f'print-color-adjust:exact">{spans}</span>'
    )


def sparkline(values: Sequence[float], *, most: float = 0.0) -> str:
    """Return the course of `values` as a line of blocks from 0 to the largest value, or to `most`: "▁▂▅█"."""
    top = max([*values, most])
    return "".join(_BLOCKS[min(7, int(8 * max(0.0, value) / top))] if top > 0 else _BLOCKS[0] for value in values)


def polyline(values: Sequence[float], x: float, y: float, width: float, height: float, *, title: str) -> str:
    """Return the course of `values` as an SVG line, scaled to the largest value."""
    top, last = max([*values, 0.0]) or 1.0, max(1, len(values) - 1)
    points = " ".join(
        f"{x + width * number / last:.1f},{y + height * (1 - max(0.0, value) / top):.1f}"
        for number, value in enumerate(values)
    )
    return (
        f"<polyline points='{points}' fill='none' stroke='{FAINT}' stroke-width='1.5'>"
        f"<title>{escape(title)}</title></polyline>"
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return a table as a mime bundle with HTML and aligned text. Empty columns are left out."""
    # A column without any value only takes space.
    filled = [column for column in range(len(headings)) if any(row[column] for row in rows)]
    headings, *rows = [[row[column] for column in filled] for row in (headings, *rows)]
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (headings, *rows)
    ]
    head = "".join(f'<th scope="col" style="text-align:left">{escape(cell)}</th>' for cell in headings)
    body = "".join(
        "<tr>" + "".join(f'<td style="{CELL}">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    return {
        "text/plain": "\n".join(lines),
        "text/html": f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
    }


def colour_grid(
    corner: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[str, str]]]], caption: str
) -> str:
    """Return a table with coloured cells as HTML. A row has its name, and (text, colour) of every column.

    The colour "none" is the background of the page. Colours come with text, as everywhere.
    """
    head = "".join(f'<th scope="col" style="{CELL}">{escape(name)}</th>' for name in (corner, *columns))
    body = "".join(
        f'<tr><th scope="row" style="{CELL}">{escape(name)}</th>'
        + "".join(_colour_cell(text, colour) for text, colour in cells)
        + "</tr>"
        for name, cells in rows
    )
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _colour_cell(text: str, colour: str) -> str:
    paint = "" if colour == "none" else f";background:{colour};color:{contrast_color(colour)};print-color-adjust:exact"
    return f'<td style="text-align:center;white-space:nowrap{paint}">{escape(text)}</td>'


# ANSI sequences -----------------------------------------------------------------------------------------------------


_NAMES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_STYLES = {1: "rb-bold", 3: "rb-italic", 4: "rb-under"}
_PLAIN = {22: "rb-bold", 23: "rb-italic", 24: "rb-under"}


def to_html(text: str) -> str:
    """Convert text with ANSI sequences to HTML: colours become classes (`rb-red`), other sequences are removed."""
    if "\x1b" not in text:
        return escape(text, quote=False)
    # Classes in effect: styles by their own name, the foreground colour under "colour".
    parts, classes, at = [], dict[str, str](), 0

    def add(part: str) -> None:
        if part and classes:
            parts.append(f'<span class="{" ".join(classes.values())}">{escape(part, quote=False)}</span>')
        elif part:
            parts.append(escape(part, quote=False))

    for match in ANSI_ESCAPE.finditer(text):
        add(text[at : match.start()])
        at = match.end()
        # Only colour and style sequences (SGR) have group 1. Sequences that move the cursor are dropped.
        if match[1] is not None:
            _change(classes, map(_code, match[1].split(";")))
    add(text[at:])
    return "".join(parts)


def _code(digits: str) -> int:
    """Return the code in a part of a sequence: 0 if the part is empty, -1 if the number is too long to be a code."""
    # Python refuses to convert more than 4300 digits, and no code has more than three.
    return int(digits or 0) if len(digits) < 5 else -1


def _change(classes: dict[str, str], codes: Iterator[int]) -> None:
    """Apply the codes of one sequence to the current classes."""
    for code in codes:
        if code == 0:
            classes.clear()
        elif code in (38, 48):  # 256 colours (5, number), or RGB (2, red, green, blue): not supported
            rest = 1 if next(codes, None) == 5 else 3
            for _ in islice(codes, rest):
                pass
        elif code in _STYLES:
            classes[_STYLES[code]] = _STYLES[code]
        elif code in _PLAIN:
            classes.pop(_PLAIN[code], None)
        elif code == 39:
            classes.pop("colour", None)
        # 30 to 37 are the colours, 90 to 97 their bright variants, which get the same class.
        elif code // 10 in (3, 9) and code % 10 < 8:
            classes["colour"] = f"rb-{_NAMES[code % 10]}"


# JupyterLab's theme colours. Front ends without these variables use the colours after the comma.
_COLOURS = {
    "queued": "var(--jp-warn-color1, #b26a00)",
    "running": "var(--jp-info-color1, #0969da)",
    "ok": "var(--jp-success-color1, #1a7f37)",
}
STALE_AFTER = 10.0
"""Seconds without an update after which the line of a running cell says so; an update comes every second."""
_STALE = "not updated any more: the page was reloaded, or the kernel has ended; %distributed status shows the ranks"
_FAILED = "var(--jp-error-color1, #cf222e)"


@dataclass(frozen=True)
class HandleView:
    """State of a cell at one moment.

    `state` is "queued", "running", "ok", "error" or "interrupted"; `seconds` the time since its start.
    """

    number: int
    ranks: tuple[int, ...]
    state: str
    seconds: float | None = None
    waiting_for: tuple[int, ...] = ()

    def text(self) -> str:
        """Return the line as text."""
        line_text = f"cell [{self.number}] on {name_ranks(self.ranks)}: {self.state}"
        if self.state == "queued" and self.waiting_for:
            line_text += f", waiting for {name_ranks(self.waiting_for)}"
        return line_text if self.seconds is None else f"{line_text} after {self.seconds:.1f} s"

    def bundle(self) -> dict[str, str]:
        """Return the line as a mime bundle."""
        return line(self.text(), self.state)


def line(text: str, state: str, *, role: str = "status", stale_after: float | None = None) -> dict[str, str]:
    """Return a line with a dot in the colour of `state`, as a mime bundle.

    With `stale_after`, the HTML says that it is out of date unless it is replaced within that many seconds.
    """
    dot = f'<span aria-hidden="true" style="color:{_COLOURS.get(state, _FAILED)}">&#9679;</span>'
    stale = "" if stale_after is None else _stale_note(stale_after)
    return {"text/plain": text, "text/html": f'<div role="{role}">{dot} {escape(text)}{stale}</div>'}


def _stale_note(seconds: float) -> str:
    # A reloaded page shows the last line that was saved, and gets no more of the cell's messages. Only CSS can notice
    # that without a kernel: every update replaces the element and starts the animation anew. Where styles are removed,
    # as on a web page of the notebook, the note is visible from the start, and nothing comes there either.
    return (
        "<style>@keyframes rankbook-stale{to{visibility:visible;font-size:1em}}</style>"
        f'<strong style="visibility:hidden;font-size:0;animation:rankbook-stale 1ms {seconds:g}s forwards">'
        f" &middot; {escape(_STALE)}</strong>"
    )


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
