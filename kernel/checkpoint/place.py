"""Where a checkpoint comes to be, and under which name.

Owns: what rank 0 does before the first byte and after the last one. Refuses: the names of steps and their folders
(`folders.py`), and what lies in them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from rankbook.checkpoint import folders
from rankbook.checkpoint.stores import Storage, locked
from rankbook.errors import CheckpointingException


@dataclass(frozen=True)
class Retention:
    """Which finished steps stay: the newest `keep`, and each one that `keep_every` divides; None: all."""

    keep: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep", self.keep), ("keep_every", self.keep_every)):
            if value is not None:
                folders.whole_number(name, value, 1)


@dataclass
class Place:
    """A step of `folder`, the next one if `step` is None; or, with a `name`, a folder in it that is no step."""

    storage: Storage
    folder: str
    step: int | None = None
    name: str | None = None
    retention: Retention = field(default_factory=Retention)
    _begun: bool = False

    def begin(self) -> str:
        """On rank 0: choose the step, sweep what killed saves have left, and open the partial folder. Its name."""
        if self.name is not None:
            folders.claim(self.storage, self._partial, self.name)
            self._begun = True
            return self._partial
        with locked(self.storage):
            folders.sweep(self.storage)
            if self.step is None:
                self.step = max(folders.finished(self.storage), default=-1) + 1
            partial = folders.begin(self.storage, self.step)
        self._begun = True
        return partial

    @property
    def shown(self) -> str:
        """The name, once it is known."""
        if self.name is not None:
            return self.name
        return "" if self.step is None else folders.step_name(self.step)

    def commit(self) -> None:
        """On rank 0: the partial folder is complete."""
        if self.name is not None:
            folders.commit_as(self.storage, self._partial, self.name)
            return
        assert self.step is not None
        folders.commit(self.storage, self.step)
        with contextlib.suppress(OSError, CheckpointingException):  # this step is safe; the next save tries again
            folders.retain(self.storage, self.retention.keep, self.retention.keep_every)

    def abandon(self) -> None:
        """On rank 0: the save has failed."""
        if not self._begun:
            return
        with contextlib.suppress(OSError, CheckpointingException):  # what is left is swept by the next save
            if self.name is not None:
                folders.give_up(self.storage, self._partial)
            elif self.step is not None:
                folders.abandon(self.storage, self.step)

    @property
    def _partial(self) -> str:
        return f"{self.name}{folders.PARTIAL}"
