"""A running cell's output by rank, live in the browser.

Owns: what is sent, so that what comes late misses nothing and all of it is linear in the text. Refuses: the markup
(panel_picture.py), and which text belongs to whom (rankbook.output.by_rank).

Changes go out as messages, numbered. A browser that has not been there from the first asks for everything. One that
can be heard only once the cell has ended gets everything now and then: after times that double, and at sizes that do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from threading import RLock
from typing import Any

import traitlets

from rankbook.output.by_rank import Change, Drop, Head, More, Piece, Put
from rankbook.ranks import name_ranks
from rankbook.widgets.early_message_widget import TalkingWidget
from rankbook.widgets.live_view import STATIC
from rankbook.widgets.render.ansi import to_html
from rankbook.widgets.render.output_panel import choice_of, choices, piece_html, skeleton, text_of

_FIRST_WHOLE = 0.3
"""Seconds after the opening until everything is sent again; after that each time is twice as long, up to `_LAST`."""
_LAST_WHOLE = 10.0
_END = "</pre></div>"
_FORGOTTEN = '<p class="rb-of rb-forgotten">what came before is left out here</p>'


class CellPanel(TalkingWidget):
    """The output of a cell called `title` on `ranks`; `name` is its own in the page.

    `view` is one of `rankbook.widgets.render.output_panel.VIEWS`.
    """

    _esm = STATIC / "panel.js"
    name = traitlets.Unicode("").tag(sync=True)
    skeleton = traitlets.Unicode("").tag(sync=True)
    whole = traitlets.Unicode("{}").tag(sync=True)

    def __init__(self, name: str, title: str, ranks: Sequence[int], view: str) -> None:
        self._title, self._ranks = title, tuple(ranks)
        self._choice, self._chosen = choice_of(view, self._ranks), 0
        self._lock = RLock()
        self._htmls: dict[int, list[str]] = {}
        self._head, self._forgot = "", False
        self._number = self._told_number = 0
        self._size = self._told_size = 0
        self._opened: float | None = None
        self._next_whole = _FIRST_WHOLE
        super().__init__(name=name, skeleton=skeleton(name, title, self._ranks, self._choice))

    def tell(self, changes: Sequence[Change]) -> None:
        """The output has changed."""
        with self._lock:
            sent = [self._apply(change) for change in changes]
            self._number += 1
            if self._opened is None:
                return
            self.send({"number": self._number, "changes": sent})
            since = time.monotonic() - self._opened
            if self._size > 2 * self._told_size + 1000 or (since > self._next_whole and since < _LAST_WHOLE):
                self._next_whole = 2 * since
                self._tell_whole()

    def bundle(self) -> dict[str, Any]:
        """The mime bundle to display it by; what comes from now on is sent."""
        with self._lock:
            self._opened = time.monotonic()
            self._tell_whole()
        found = super()._repr_mimebundle_()
        data = found[0] if isinstance(found, tuple) else {}
        return {**data, "text/plain": f"{self._title} on {name_ranks(self._ranks)}"}

    def end(self, pieces: Sequence[Piece]) -> dict[str, str]:
        """The mime bundle that stays: it needs neither the widget nor the kernel. The widget is closed."""
        with self._lock:
            html = skeleton(
                self.name, self._title, self._ranks, self._choice, pieces=self._all_pieces(), head=self._head
            )
        self.close()
        return {"text/html": html, "text/plain": text_of(pieces)}

    def _apply(self, change: Change) -> list[object]:
        match change:
            case Put(piece):
                html = piece_html(piece, self._ranks)
                text = piece.data is None
                self._htmls[piece.key] = [html.removesuffix(_END), _END] if text else [html]
                self._size += len(html)
                return ["put", piece.key, html]
            case More(key, text):
                html = to_html(text)
                self._htmls[key].insert(-1, html)
                self._size += len(html)
                return ["more", key, html]
            case Drop(key, forgotten):
                self._htmls.pop(key, None)
                self._forgot |= forgotten
                return ["drop", key, _FORGOTTEN if forgotten else ""]
            case Head(bundle):
                self._head = bundle["text/html"]
                return ["head", 0, self._head]

    def _all_pieces(self) -> str:
        return (_FORGOTTEN if self._forgot else "") + "".join("".join(parts) for parts in self._htmls.values())

    def _tell_whole(self) -> None:
        if self._number != self._told_number or self.whole == "{}":
            self._told_number, self._told_size = self._number, self._size
            self.whole = json.dumps({"number": self._number, "head": self._head, "pieces": self._all_pieces()})

    def _handle(self, message: dict[str, Any]) -> None:
        with self._lock:
            if message.get("op") == "all":
                self._tell_whole()
            elif message.get("op") == "choose" and message.get("choice") in choices(self._ranks):
                arrived = message.get("arrived", 0)
                if arrived < self._chosen:
                    return
                self._choice, self._chosen = str(message["choice"]), arrived
                # for a page that is loaded again
                self.skeleton = skeleton(self.name, self._title, self._ranks, self._choice)
