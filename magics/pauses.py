"""Which ranks are paused in a debugger, and what a front end calls what it is shown of them.

Owns: the numbers of the ranks' threads, frames and variables in the notebook, the chosen rank, the events that tell of
a pause. Refuses: to ask anybody; it is told.

To a front end a rank is a thread. JupyterLab knows one thread at a time, that of the last event, and forgets it all
when one goes on; so where some go on and others do not, it is told once more of one that still stands. Of the frames
that it is shown after that it chooses the first, and keeps to it as long as it is among them. So that what a person
looks at does not jump from rank to rank with each step, the others' pauses are held back a moment until the chosen
rank has paused too, and it is shown first once; after that the ranks stand in their order. One that takes longer comes
back into view when it pauses, unless a person has chosen another meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

Message = dict[str, Any]

THREADS = 1 << 20
"""The number of rank 0's thread. The notebook's own debugger counts its threads, frames and variables from 1."""
HANDLES = 1 << 30
"""Numbers of the ranks' frames and variables begin here; above 2**31 the protocol has none."""


class Handles:
    """The ranks' own numbers of frames and variables, and ours for them."""

    def __init__(self) -> None:
        self._ours: dict[tuple[int, int], int] = {}
        self._theirs: dict[int, tuple[int, int]] = {}
        self._next = HANDLES

    def of(self, rank: int, number: int) -> int:
        """Ours for a rank's; 0 is 0, which stands for nothing."""
        if not number:
            return 0
        if (rank, number) not in self._ours:
            self._ours[rank, number] = self._next
            self._theirs[self._next] = (rank, number)
            self._next += 1
        return self._ours[rank, number]

    def whose(self, handle: int) -> tuple[int, int] | None:
        """The rank, and its own number; None for what is no more."""
        return self._theirs.get(handle)

    def forget(self, rank: int) -> None:
        """It has gone on, and what it showed is no more."""
        for key in [key for key in self._ours if key[0] == rank]:
            del self._theirs[self._ours.pop(key)]


class Pauses:
    """The ranks that are paused, with their debuggers' numbers of the threads. `one_view`: see JupyterLab above."""

    def __init__(self) -> None:
        self.threads: dict[int, int] = {}
        self.handles = Handles()
        self.one_view = False
        self.chosen: int | None = None
        self._held: list[Message] = []
        self._first: int | None = None  # of those that one view shows, which it looks at by itself; None: it is empty
        self._kept: int | None = None  # the chosen one, that goes on
        self._seq = 0

    @property
    def order(self) -> tuple[int, ...]:
        """The paused ranks, the chosen one first."""
        return tuple(sorted(self.threads, key=lambda rank: (rank != self.chosen, rank)))

    def stop(self, rank: int, body: Message) -> None:
        """A rank's debugger tells that it has stopped. See `tell`."""
        self.handles.forget(rank)
        self.threads[rank] = body["threadId"]
        if self.one_view and rank == self._kept and self._first is not None:
            self.chosen, self._first = rank, None
            self._held.append(self._continued(rank))  # for what the front end forgets with it
        if rank == self._kept:
            self._kept = None
        own: Message = {key: body[key] for key in ("reason", "text", "preserveFocusHint") if key in body}
        self._held.append(self._stopped(rank, {"reason": "breakpoint", **own}))

    def choose(self, rank: int) -> None:
        """It is looked at: by the front end itself, which begins with the first, or because a person said so."""
        self.chosen = rank
        if rank != self._first:
            self._kept = None

    @property
    def holds(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self._held)

    def waits(self, running: Collection[int]) -> bool:
        """Whether what there is to tell is told better a moment later: the rank to be shown first may stop yet."""
        if not (self.one_view and self._held) or self._first is not None:
            return False
        first = min((*running, *self.threads)) if self.chosen is None else self.chosen
        return first in running and first not in self.threads

    def tell(self) -> list[Message]:
        """What the front end has not been told yet."""
        told, self._held = self._held, []
        return told

    def show(self) -> tuple[int, ...]:
        """The paused ranks as one view for all shows them, from now on."""
        is_shown = self._first is not None and self.chosen in self.threads
        ranks = tuple(sorted(self.threads)) if is_shown else self.order
        self._first = next(iter(ranks), None)
        return ranks

    def go_on(self, ranks: Iterable[int]) -> list[Message]:
        """These go on, as they were told to or by themselves: what the front end is told at once. See `tell`."""
        gone = [rank for rank in ranks if rank in self.threads]  # the others were not paused
        events = []
        for rank in gone:
            self.handles.forget(rank)
            del self.threads[rank]
            events.append(self._continued(rank))
        if self.chosen in gone:
            self._kept = self.chosen
        if gone:
            self._first = None
            self._held = [each for each in self._held if rank_of(each["body"]["threadId"]) in self.threads]
        if gone and self.threads and self.one_view and not self._held:
            self._held.append(self._stopped(self.order[0], {"reason": "pause", "preserveFocusHint": True}))
        return events

    def meant(self, thread: int | None, *, single: bool) -> tuple[int, ...]:
        """The paused ranks that a request for `thread` is for: `single`, for that one or else the chosen one alone."""
        rank = rank_of(thread)
        if not single:
            return self.order
        return (rank,) if rank in self.threads else self.order[:1]

    def _continued(self, rank: int) -> Message:
        return self._event("continued", {"threadId": THREADS + rank, "allThreadsContinued": False})

    def _stopped(self, rank: int, body: Message) -> Message:
        told = {"threadId": THREADS + rank, "allThreadsStopped": False, "description": f"rank {rank}"}
        return self._event("stopped", {**body, **told})

    def _event(self, name: str, body: Message) -> Message:
        self._seq += 1
        return {"type": "event", "seq": self._seq, "event": name, "body": body}


def rank_of(thread: int | None) -> int:
    """The rank that is shown as `thread`; -1 for a thread of the notebook's own."""
    return thread - THREADS if thread is not None and thread >= THREADS else -1


def shown(rank: int, command: str, body: Message, handles: Handles) -> Message:
    """The body of a rank's answer as the front end is to see it: with our numbers, its frames with its name."""
    for key, names in _NUMBERED.get(command, {}).items():
        for each in body.get(key, ()) if key else (body,):
            for name in names:
                if name in each:
                    each[name] = handles.of(rank, each[name])
    if command == "stackTrace":
        for frame in body.get("stackFrames", ()):
            frame["name"] = f"rank {rank} · {frame['name']}"
    return body


_NUMBERED: dict[str, dict[str, tuple[str, ...]]] = {
    # command: where in its answer's body numbers stand, "" for the body itself
    "stackTrace": {"stackFrames": ("id",)},
    "scopes": {"scopes": ("variablesReference",)},
    "variables": {"variables": ("variablesReference",)},
    "evaluate": {"": ("variablesReference",)},
    "setVariable": {"": ("variablesReference",)},
    "setExpression": {"": ("variablesReference",)},
}
