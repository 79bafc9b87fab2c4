"""A widget that hears its browser at once, also while a cell runs.

Owns: the way in for messages from the browser. Refuses: to know what they ask for.

Messages from the browser are `{"rankbook": id, "op": ..., ...}`. They are taken off the kernel's shell channel as they
arrive, on the thread that reads it, and handled on a thread of their own: so a click acts while a cell runs, in front
ends with subshells and in those without. Where ipykernel has no such place they are handled as ipywidgets does.

ipykernel 7.4 sends what comes in for a comm to the shell that last published on it, for a view that is updated while a
cell runs the one that is busy. Ours go where the front end sends them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from threading import Lock, Thread
from typing import Any

import anywidget

from rankbook.widgets.daemon_threads import start_thread


class TalkingWidget(anywidget.AnyWidget):
    """`_handle` is called with each message, on a thread of its own; `arrived` numbers them, for they may overtake."""

    def __init__(self, **traits: object) -> None:
        self._arriving = Lock()  # held for moments only, by the kernel's thread
        self._taken: set[str] = set()  # heard early, and not yet delivered: that may be hours later
        self._arrivals = count()
        self._late = False  # whether messages may be delivered only once the cell that runs has ended
        super().__init__(**traits)
        self.on_msg(lambda _widget, content, _buffers: self._arrived(content))
        self._take_messages_early()

    def _handle(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _take_messages_early(self) -> None:
        comm = self.comm
        if not hasattr(comm, "_reply_subshell_for"):
            self._late = hasattr(comm, "kernel")
            return

        def take(data: object, addressed: str | None) -> str | None:
            if isinstance(data, Mapping) and data.get("method") == "custom":
                self._arrived(data.get("content"), early=True)
            return addressed

        comm._reply_subshell_for = take  # the one place on the way in that is never busy

    def _arrived(self, content: object, *, early: bool = False) -> None:
        """A message. What was heard early comes once more, as ipywidgets delivers it."""
        if not isinstance(content, Mapping) or not isinstance(content.get("rankbook"), str):
            return
        with self._arriving:
            if content["rankbook"] in self._taken:
                if not early:
                    self._taken.discard(content["rankbook"])
                return
            if early:
                self._taken.add(content["rankbook"])
            message = {**content, "arrived": next(self._arrivals)}
        start_thread(Thread(target=self._handle, args=(message,), name="rankbook-click"))
