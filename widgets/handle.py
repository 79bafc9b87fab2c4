"""A background cell's state, as a line.

Owns: its words and colours. Refuses: to know how the state came about.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from rankbook.ranks import name_ranks

_COLOURS = {
    "queued": "var(--jp-warn-color1, #b26a00)",
    "running": "var(--jp-info-color1, #0969da)",
    "ok": "var(--jp-success-color1, #1a7f37)",
}
_FAILED = "var(--jp-error-color1, #cf222e)"


@dataclass(frozen=True)
class HandleView:
    """One moment of a cell: `state` is queued, running, ok, error or interrupted; `seconds` since it started."""

    number: int
    ranks: tuple[int, ...]
    state: str
    seconds: float | None = None
    waiting_for: tuple[int, ...] = ()

    def text(self) -> str:
        """The line."""
        words = f"cell [{self.number}] on {name_ranks(self.ranks)}: {self.state}"
        if self.state == "queued" and self.waiting_for:
            words += f", waiting for {name_ranks(self.waiting_for)}"
        return words if self.seconds is None else f"{words} after {self.seconds:.1f} s"

    def bundle(self) -> dict[str, str]:
        """The line as a mime bundle."""
        colour = _COLOURS.get(self.state, _FAILED)
        dot = f'<span aria-hidden="true" style="color:{colour}">&#9679;</span>'
        return {"text/plain": self.text(), "text/html": f'<div role="status">{dot} {escape(self.text())}</div>'}
