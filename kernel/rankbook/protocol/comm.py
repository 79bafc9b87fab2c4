"""Messages that connect comms (Jupyter widgets) and debuggers on the ranks to the front end.

Comm messages follow "Custom Messages" in the Jupyter messaging specification: `content` and `metadata` are JSON, and
the buffers are further frames of the same multipart message. Debugger messages carry the Debug Adapter Protocol (DAP)
as JSON. Both kinds are forwarded without being interpreted.
"""

from __future__ import annotations

from typing import Literal

from rankbook.protocol.base import Message


# `content` and `metadata` are text, because both ends have JSON already: the widget on the rank and the front end.
class CommFromRank(Message, frozen=True):
    """Open, use or close a comm from the rank's side.

    `comm` is the comm's id. `target` is the target name in the front end, set when `kind` is "open".
    """

    kind: Literal["open", "msg", "close"]
    comm: str
    target: str
    content: str
    metadata: str


class CommToRank(Message, frozen=True):
    """Forward a message from the front end to a comm on the rank, or report that the front end closed the comm."""

    kind: Literal["msg", "close"]
    comm: str
    content: str
    metadata: str


class DapToRank(Message, frozen=True):
    """Send a DAP request, as JSON, to the rank's debugger.

    The first request starts the debugger, and `disconnect` stops it.
    """

    content: str


class DapFromRank(Message, frozen=True):
    """Forward a DAP response or event, as JSON, from the rank's debugger.

    An empty string means that the debugger ended without a request to disconnect.
    """

    content: str
