"""Receives what the ranks send, and decides what a message that cannot be read or handled costs.

Owns: the loop over the messages that have arrived, which ranks are ended for one of theirs, and that each such message
is reported once. Refuses: to know what a message means (driver.py).

A message that only shows or answers something is left out, and the rank goes on. Without any other one (`Hello`,
`Done`, bytes that are no message at all) nobody knows what the rank does, and whoever waits for it would wait for good:
that rank is killed, and the reason stands where its death is told. Nothing that a rank sends can end the session.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from rankbook.coordinator.running_cell import Cell
from rankbook.coordinator.states import Rank
from rankbook.errors import ProtocolError, UnreadableMessage
from rankbook.protocol.comm import CommSaid, DebugSaid
from rankbook.protocol.messages import Clear, Collectives, Display, FromRank, Lingering, Stack, Text, TextCut
from rankbook.protocol.queries import Answered
from rankbook.transport.link import HubLink, Sender

_DISPENSABLE = (Text, TextCut, Display, Clear, CommSaid, DebugSaid, Stack, Collectives, Answered, Lingering)
_LONGEST = 500
"""Characters of an error that stand in the reason; an `IllegalTransition` tells a long story."""


class Inbox:
    """The messages from `ranks` over `hub`, each passed to `handle(sender, message, frames)`.

    `cell_of(rank)` is the cell that the rank runs, `kill(rank, incarnation)` ends the rank. The driver's thread.
    """

    def __init__(
        self,
        hub: HubLink,
        ranks: Mapping[int, Rank],
        handle: Callable[[Sender, FromRank, list[memoryview]], None],
        cell_of: Callable[[int], Cell | None],
        kill: Callable[[int, int], None],
    ) -> None:
        self._hub = hub
        self._ranks = ranks
        self._handle = handle
        self._cell_of = cell_of
        self._kill = kill
        self._reasons: dict[Sender, str] = {}
        self._reported: set[object] = set()

    def receive(self) -> None:
        """Handle every message that has arrived."""
        while True:
            try:
                parcel = self._hub.receive()
            except UnreadableMessage as error:
                self._refuse(None if error.sender is None else Sender(*error.sender), error)
                continue
            if parcel is None:
                return
            self.take(*parcel)

    def take(self, sender: Sender, message: FromRank, frames: list[memoryview]) -> None:
        """Handle one message, unless it is from an earlier process of its rank."""
        if not self._is_current(sender):
            if sender.rank not in self._ranks:
                self._report(None, ProtocolError(f"a message came from rank {sender.rank}, which does not exist"))
            return
        try:
            self._handle(sender, message, frames)
        except Exception as error:  # noqa: BLE001 - shown as a whole by `_report`, and costs nobody else
            self._leave_out(sender, message, error)

    def reason(self, rank: int, incarnation: int) -> str | None:
        """Return why this process was killed for a message, to stand behind `rank 2`; None if it was not."""
        return self._reasons.get(Sender(rank, incarnation))

    def _is_current(self, sender: Sender) -> bool:
        rank = self._ranks.get(sender.rank)
        return rank is not None and rank.incarnation == sender.incarnation and sender not in self._reasons

    def _refuse(self, sender: Sender | None, error: UnreadableMessage) -> None:
        if sender is None or sender.rank not in self._ranks:
            self._report(None, error)
        elif self._is_current(sender):
            self._end(sender, f"was killed because it sent a message that cannot be read ({_brief(error)})")

    def _leave_out(self, sender: Sender, message: FromRank, error: Exception) -> None:
        kind = type(message).__name__
        first = self._report((sender, kind), error)
        if not isinstance(message, _DISPENSABLE):
            self._end(sender, f"was killed because it sent a {kind} that cannot be handled ({_brief(error)})")
        elif first:
            told = f"rank {sender.rank} sent a {kind} that cannot be handled, so it is left out ({_brief(error)})\n"
            if (cell := self._cell_of(sender.rank)) is not None:
                cell.note(told)

    def _end(self, sender: Sender, reason: str) -> None:
        self._reasons[sender] = reason
        self._kill(*sender)

    def _report(self, key: object, error: Exception) -> bool:
        """Show the whole error, once for each `key`; return whether this was the first time."""
        if key in self._reported:
            return False
        self._reported.add(key)
        sys.excepthook(type(error), error, error.__traceback__)
        return True


def _brief(error: Exception) -> str:
    told = str(error) if isinstance(error, ProtocolError) else f"{type(error).__name__}: {error}"
    return told.partition("\n")[0][:_LONGEST]
