"""The ranks that a debugger has stopped, as a front end sees them through the Debug Adapter Protocol (DAP).

A front end debugs one process, the kernel's, and sees each rank as a thread of it. All debuggers count their threads,
frames and variables from 1, so the numbers of the ranks are translated.

JupyterLab has one call stack for all threads. It asks for the frames after each `stopped` event and selects the first
one, unless it shows the selected one already; a `continued` event of any thread empties its call stack.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Message = dict[str, Any]

THREADS = 1 << 20
"""The number of rank 0's thread; far above those of the kernel's own threads."""
REFERENCES = 1 << 30
"""The first number of a rank's frame or variable; the protocol has none above 2**31."""

_REFERENCE_FIELDS = {
    # command: the list in its response's body that has references ("" for the body itself), and their field
    "stackTrace": ("stackFrames", "id"),
    "scopes": ("scopes", "variablesReference"),
    "variables": ("variables", "variablesReference"),
    "evaluate": ("", "variablesReference"),
    "setVariable": ("", "variablesReference"),
    "setExpression": ("", "variablesReference"),
}


class ReferenceMap:
    """Translates the ranks' references to frames and variables into unique ones for the front end."""

    def __init__(self) -> None:
        self._ours: dict[tuple[int, int], int] = {}
        self._ranks: dict[int, tuple[int, int]] = {}
        self._next = REFERENCES

    def add(self, rank: int, reference: int) -> int:
        """Return our reference for a rank's; 0 means no reference and stays 0."""
        if not reference:
            return 0
        if (rank, reference) not in self._ours:
            self._ours[rank, reference] = self._next
            self._ranks[self._next] = (rank, reference)
            self._next += 1
        return self._ours[rank, reference]

    def find(self, reference: int) -> tuple[int, int] | None:
        """Return the rank of our reference and its own one; None if the rank has resumed since."""
        return self._ranks.get(reference)

    def forget(self, rank: int) -> None:
        """Forget a rank's references, which end when it resumes."""
        for key in [key for key in self._ours if key[0] == rank]:
            del self._ranks[self._ours.pop(key)]

    def translate(self, rank: int, command: str, body: Message) -> Message:
        """Replace the references in a rank's response, and name the rank in its frames."""
        key, field = _REFERENCE_FIELDS.get(command, ("", ""))
        for item in body.get(key, ()) if key else (body,):
            if field in item:
                item[field] = self.add(rank, item[field])
            if command == "stackTrace":
                item["name"] = f"rank {rank} · {item['name']}"
        return body


class StoppedThreads:
    """The stopped ranks with their debuggers' thread numbers, in the order in which they stopped.

    `one_view`: the front end has one call stack for all threads. `single`: continue and step move one rank. `chosen`:
    the rank whose frames or variables the front end asked for last.
    """

    def __init__(self) -> None:
        self.threads: dict[int, int] = {}
        self.references = ReferenceMap()
        self.one_view = False
        self.single = False
        self.chosen: int | None = None
        self._is_empty = True  # JupyterLab's call stack
        self._seq = 0

    def stop(self, rank: int, body: Message) -> list[Message]:
        """Handle a rank's `stopped` event; return the events for the front end."""
        self.references.forget(rank)
        self.threads.pop(rank, None)
        self.threads[rank] = body["threadId"]
        kept: Message = {key: body[key] for key in ("reason", "text", "preserveFocusHint") if key in body}
        stopped = self._stopped(rank, {"reason": "breakpoint", **kept})
        # Where one rank moves alone, JupyterLab shows another one meanwhile, and is to return to this one.
        return [self._continued(rank), stopped] if self.one_view and self.single else [stopped]

    def resume(self, ranks: Iterable[int]) -> list[Message]:
        """Handle that these ranks run again, those of them that were stopped; return the events for the front end."""
        resumed = [rank for rank in ranks if self.threads.pop(rank, None) is not None]
        for rank in resumed:
            self.references.forget(rank)
        self._is_empty = self._is_empty or bool(resumed)
        events = [self._continued(rank) for rank in resumed]
        if resumed and self.threads and self.one_view:  # to fill its call stack again
            events.append(self._stopped(min(self.threads), {"reason": "pause", "preserveFocusHint": True}))
        return events

    def call_stack(self) -> list[int]:
        """Return the ranks in the order in which one view lists their frames.

        The order is by rank, so that the rows stay in place while more ranks stop. To select a rank, an empty view gets
        it first: the chosen one, or the one that stopped last where it moved alone.
        """
        first = next(reversed(self.threads), None) if self.single else self.chosen if self._is_empty else None
        self._is_empty = False
        return sorted(self.threads, key=lambda rank: (rank != first, rank))

    def targets(self, thread: int | None, *, single: bool) -> list[int]:
        """Return the stopped ranks that a request to move `thread` is for: all, or one if `single`.

        One view names the thread that stopped last, whatever frame is selected in it: there it is the chosen rank.
        """
        ranks = sorted(self.threads)
        if not (single or self.single):
            return ranks
        rank = self.chosen if self.one_view else rank_of_thread(thread)
        return [rank] if rank in self.threads else ranks[:1]

    def _continued(self, rank: int) -> Message:
        return self._event("continued", {"threadId": THREADS + rank, "allThreadsContinued": False})

    def _stopped(self, rank: int, body: Message) -> Message:
        thread = {"threadId": THREADS + rank, "allThreadsStopped": False, "description": f"rank {rank}"}
        return self._event("stopped", {**body, **thread})

    def _event(self, name: str, body: Message) -> Message:
        self._seq += 1
        return {"type": "event", "seq": self._seq, "event": name, "body": body}


def rank_of_thread(thread: int | None) -> int:
    """Return the rank whose thread has this number in the front end; -1 for a thread of the kernel."""
    return thread - THREADS if thread is not None and thread >= THREADS else -1
