"""Records in a cluster's folder: what the next notebook process has to know that attaches to the ranks.

A record is written before what it describes begins, and removed when it has ended, because a notebook's process may be
killed at any moment. It is one file, in MessagePack.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from rankbook.transport.shared_memory import ensure_private_folder

_T = TypeVar("_T")


def write_record(folder: Path, name: str, value: object) -> None:
    """Write the record `name`, or replace it by one with another value."""
    ensure_private_folder(folder)
    draft = folder / f"{name}.draft"
    draft.write_bytes(msgspec.msgpack.encode(value))
    draft.replace(folder / name)


def read_record(folder: Path, name: str, kind: type[_T]) -> _T | None:
    """Return the value of the record `name`, which is of type `kind`, or None without this record."""
    try:
        return msgspec.msgpack.decode((folder / name).read_bytes(), type=kind)
    except FileNotFoundError:
        return None


def remove_record(folder: Path, name: str) -> None:
    """Remove the record `name`, if there is one."""
    (folder / name).unlink(missing_ok=True)
