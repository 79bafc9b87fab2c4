"""Who is writing a step just now, and whether that process still lives.

Owns: the file beside a partial step that names its writer. Refuses: to judge processes of other machines by anything
but the time that has passed.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import asdict, dataclass

from rankbook.checkpoint.storage.base import Storage, read_all
from rankbook.process_identity import PATIENCE, ProcessIdentity, identify, machine, started

_under_way: dict[str, str] = {}  # the tokens of this process's own saves, by where they claim


@dataclass(frozen=True, slots=True)
class WriterIdentity(ProcessIdentity):
    """A process that writes a step. `token` tells its save from another one of the same process."""

    token: str

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}, since {when} UTC"

    def lives(self, patience: float = PATIENCE) -> bool:
        """Return whether its save may be under way. On other machines: whether it began less than `patience` s ago."""
        if self.machine == machine() and self.pid == os.getpid() and self.started == started(self.pid):
            return self.token in _under_way.values()
        return ProcessIdentity.lives(self, patience)


def claim_lock(storage: Storage, path: str) -> WriterIdentity:
    """Writes into the file `path` that this process is at work from now on, until `release`."""
    own = WriterIdentity(**asdict(identify(os.getpid())), token=uuid.uuid4().hex)
    _under_way[f"{storage}/{path}"] = own.token
    try:
        storage.write(path, [json.dumps(asdict(own)).encode()])
    except BaseException:
        _under_way.pop(f"{storage}/{path}", None)
        raise
    return own


def release_lock(storage: Storage, path: str) -> None:
    """Ends a claim, whoever made it. This process's is over also where the storage cannot be reached."""
    _under_way.pop(f"{storage}/{path}", None)
    storage.remove(path)


def lock_owner(storage: Storage, path: str) -> WriterIdentity | None:
    """Who claimed it; None where there is no such file, or one that was cut off while it was written."""
    try:
        return WriterIdentity(**json.loads(read_all(storage, path)))
    except (FileNotFoundError, ValueError, TypeError):
        return None
