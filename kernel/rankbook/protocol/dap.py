"""The vocabulary of ranks under a debugger.

Owns: what goes both ways between a front end's debugger and the one on a rank, in the Debug Adapter Protocol's words.
Refuses: to know what is said.
"""

from __future__ import annotations

from rankbook.protocol.base import Message


class DebugHeard(Message, frozen=True):
    """A request for the rank's debugger, as JSON; the first one starts it, `disconnect` ends it."""

    content: str


class DebugSaid(Message, frozen=True):
    """What the rank's debugger says, a response or an event, as JSON; "" once it has ended without being asked to."""

    content: str
