"""What a message on the wire is, before there is any.

Owns: the base of every message. Refuses: to have one; they are in messages.py, and in keeping.py those that let ranks
outlive the notebook.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

_M = TypeVar("_M", bound="Message")


RESULT = "rankbook.result"
"""In the metadata of a display: it is what the cell's last expression gave."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """What every message on the wire is."""


def changed(message: _M, **fields: Any) -> _M:  # noqa: ANN401 - the fields' own types
    """`message` with other values in these fields."""
    return msgspec.structs.replace(message, **fields)
