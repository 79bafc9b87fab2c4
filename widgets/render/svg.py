"""Colours and the few shapes that the still pictures are made of.

Owns: the palette and SVG elements. Refuses: to know what they stand for.

The palette is Okabe and Ito's, made to be told apart by people who see colours differently
(https://jfly.uni-koeln.de/color/). The same one is in static/common.js; a test compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILLION, YELLOW, GREY = "#56B4E9", "#D55E00", "#F0E442", "#999999"

RANK_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILLION, YELLOW, GREY)
DARK = {BLUE}  # on which text is white; on all others black has the greater contrast

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
}

INK, PAPER, LINE, FAINT = "#1f2328", "#ffffff", "#d0d7de", "#57606a"
FONT = "font-family='system-ui, sans-serif'"


def rank_colour(rank: int) -> str:
    """The colour of a rank; ranks that share one are told apart by their number, which always stands beside it."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def ink_on(colour: str) -> str:
    """The colour of text on `colour`."""
    return "#ffffff" if colour in DARK else "#000000"


def rect(x: float, y: float, width: float, height: float, fill: str, *, title: str = "", extra: str = "") -> str:
    """A rectangle; `title` is its tooltip and `extra` more attributes."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{max(0.0, width):.1f}' height='{height:.1f}' fill='{fill}'{extra}>"
        f"{inside}</rect>"
    )


def words(x: float, y: float, text: str, *, size: int = 12, fill: str = INK, anchor: str = "start") -> str:
    """Text whose baseline is at `y`."""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{fill}' text-anchor='{anchor}'>{escape(text)}</text>"
    )


def picture(width: float, height: float, title: str, shapes: Sequence[str]) -> str:
    """A whole SVG file of that many pixels."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
        f"viewBox='0 0 {width:.0f} {height:.0f}' role='img' {FONT}><title>{escape(title)}</title>"
        f"<rect width='100%' height='100%' fill='{PAPER}'/>{''.join(shapes)}</svg>"
    )


def bar(parts: Sequence[tuple[str, float, str]], total: float, *, width: str = "100%") -> str:
    """A bar in HTML split into (label, amount, colour); the rest up to `total` stays empty."""
    spans = "".join(
        f'<span title="{escape(label)}" style="background:{colour};width:{100 * amount / total:.2f}%"></span>'
        for label, amount, colour in parts
        if total > 0 and amount > 0
    )
    return (
        f'<span aria-hidden="true" style="display:inline-flex;width:{width};height:0.8em;border:1px solid #8888">'
        f"{spans}</span>"
    )
