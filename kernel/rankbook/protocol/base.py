"""Base class of all protocol messages.

The messages themselves are defined by topic in the other modules of this folder; messages.py collects and encodes them.
"""

from __future__ import annotations

import msgspec

RESULT = "rankbook.result"
"""Display metadata key that marks the value of a cell's last expression."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base class of all protocol messages: frozen structs, tagged with the class name, that reject unknown fields."""
