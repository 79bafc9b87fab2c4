"""Record which process writes a step, and find out whether that process still lives.

The record is a file beside the partial folder of the step, with host, PID namespace, PID, start time and a token. The
process of another machine cannot be asked; it is considered dead when its record is older than a day.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import asdict, dataclass

from rankbook.checkpoint.storage.base import Storage, read_all
from rankbook.process_identity import PATIENCE, ProcessIdentity, identify, machine, started

_under_way: dict[str, str] = {}  # tokens of the running saves of this process, by path of the claim


@dataclass(frozen=True, slots=True)
class WriterIdentity(ProcessIdentity):
    """Identity of a process that writes a step.

    `token` distinguishes the saves of one process.
    """

    token: str

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}, since {when} UTC"

    def lives(self, patience: float = PATIENCE) -> bool:
        """Return True if the save may still be running.

        For another machine this means that it began less than `patience` seconds ago.
        """
        if self.machine == machine() and self.pid == os.getpid() and self.started == started(self.pid):
            return self.token in _under_way.values()
        return ProcessIdentity.lives(self, patience)


def claim_lock(storage: Storage, path: str) -> WriterIdentity:
    """Write the file `path`, which claims the step for this process until `release_lock`."""
    identity = WriterIdentity(**asdict(identify(os.getpid())), token=uuid.uuid4().hex)
    _under_way[f"{storage}/{path}"] = identity.token
    try:
        storage.write(path, [json.dumps(asdict(identity)).encode()])
    except BaseException:
        _under_way.pop(f"{storage}/{path}", None)
        raise
    return identity


def release_lock(storage: Storage, path: str) -> None:
    """Remove a claim, whichever process made it.

    The claim of this process ends even if the storage cannot be reached.
    """
    _under_way.pop(f"{storage}/{path}", None)
    storage.remove(path)


def lock_owner(storage: Storage, path: str) -> WriterIdentity | None:
    """Return the owner of a claim; None if the file is missing or truncated."""
    try:
        return WriterIdentity(**json.loads(read_all(storage, path)))
    except (FileNotFoundError, ValueError, TypeError):
        return None
