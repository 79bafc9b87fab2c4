"""State of a cell in one line, as text and HTML."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from rankbook.ranks import name_ranks

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
