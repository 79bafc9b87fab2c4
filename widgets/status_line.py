"""State of a cell in one line, as text and HTML."""

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


def line(text: str, state: str, *, role: str = "status") -> dict[str, str]:
    """Return a line with a dot in the colour of `state`, as a mime bundle."""
    dot = f'<span aria-hidden="true" style="color:{_COLOURS.get(state, _FAILED)}">&#9679;</span>'
    return {"text/plain": text, "text/html": f'<div role="{role}">{dot} {escape(text)}</div>'}
