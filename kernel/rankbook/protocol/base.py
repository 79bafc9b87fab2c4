"""What a message on the wire is, before there is any.

Owns: the base of every message. Refuses: to have one; they are in messages.py, and in keeping.py those that let ranks
outlive the notebook.
"""

from __future__ import annotations

import msgspec

RESULT = "rankbook.result"
"""In the metadata of a display: it is what the cell's last expression gave."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """What every message on the wire is."""
