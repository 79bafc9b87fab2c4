"""The vocabulary of widgets that live on ranks.

Owns: what goes both ways between a comm's two ends, Jupyter's own words for it. Refuses: to know what is said.

`content` and `metadata` are JSON; the buffers are the message's frames. See Jupyter's messaging, "Custom Messages".

The vocabulary of ranks under a debugger.
"""

from __future__ import annotations

from typing import Literal

from rankbook.protocol.base import Message


class CommFromRank(Message, frozen=True):
    """A rank's end of a comm opens it, says something, or closes it. `target` is who is to hear, at the opening."""

    kind: Literal["open", "msg", "close"]
    comm: str
    target: str
    content: str
    metadata: str


class CommToRank(Message, frozen=True):
    """The front end's end says something, or has closed it."""

    kind: Literal["msg", "close"]
    comm: str
    content: str
    metadata: str


class DapToRank(Message, frozen=True):
    """A request for the rank's debugger, as JSON; the first one starts it, `disconnect` ends it."""

    content: str


class DapFromRank(Message, frozen=True):
    """What the rank's debugger says, a response or an event, as JSON; "" once it has ended without being asked to."""

    content: str
