"""Define the wire protocol: the messages between the notebook process, the forkserver and the ranks.

`Message` is their base class. The messages themselves are defined by topic in the modules of this folder; messages.py
collects and encodes them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# tests/protocol/test_messages.py compares a digest of all messages with this version, so that neither changes alone.
PROTOCOL_VERSION = 4
"""Version of the messages. It increases when a message, a field or the meaning of one changes.

Notebook and ranks are always of one version, except when a notebook attaches to ranks that another installation of
Rankbook started: `launch.registry` refuses those of another version.
"""

StreamName = Literal["stdout", "stderr"]

RESULT = "rankbook.result"
"""Display metadata key that marks the value of a cell's last expression."""

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
"""Mime type with which a front end shows an ipywidget."""

VIEW = "application/vnd.rankbook.view+json"
"""Mime type with which code on a rank asks the notebook process to show a live view.

The value has the name of a function of magics/views.py, `view`, and its arguments, `options`.
"""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base class of all protocol messages: frozen structs, tagged with the class name, that reject unknown fields."""
