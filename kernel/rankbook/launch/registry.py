"""Which clusters are kept for a next notebook, and how it reaches them.

Owns: one file for each, which only the user can read: where its processes and sockets are, its secret, what its ranks
were. Refuses: to believe a file that others could have written, and to claim anything (kept.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import psutil

from rankbook.errors import StartError
from rankbook.formatting import plural
from rankbook.launch.paths import socket_base
from rankbook.process_identity import is_abandoned

RECORD = "kept.json"
_CLOCK_STEP = 2.0
"""Seconds that a process's start may seem to have moved, after the machine's clock was set."""


@dataclass(frozen=True)
class DetachedRank:
    """What a rank was when the record was written."""

    rank: int
    incarnation: int
    pid: int | None
    device: str


@dataclass(frozen=True)
class ClusterRecord:
    """One kept cluster. `notebook` is its owner's process id, `forkserver` that of the process which holds it.

    `session` is the owner's notebook file as Jupyter names it, empty where it does not. `created` and the two moments
    at which processes `started` are seconds since the epoch. `interrupted` says which cell the owner interrupted just
    before it ended.
    """

    key: str
    token: str
    seconds: float
    notebook: int
    forkserver: int
    started: float
    address: str
    uplink: str
    sockets: str
    segments: str
    logs: str
    master_port: int
    backend: str
    threads: int
    ranks: tuple[DetachedRank, ...]
    session: str = ""
    created: float = 0.0
    notebook_started: float = 0.0
    interrupted: str = ""

    @property
    def devices(self) -> tuple[str, ...]:
        """Each rank's device."""
        return tuple(each.device for each in self.ranks)

    @property
    def owned(self) -> bool:
        """Whether the process that owns it still runs."""
        began = process_start_time(self.notebook)
        return began is not None and (not self.notebook_started or abs(began - self.notebook_started) <= _CLOCK_STEP)

    def describe(self) -> str:
        """Return it in a line: `4711-1 (train.ipynb, 12 min old): 2 ranks on cpu, gloo`."""
        count = plural(len(self.ranks), "rank")
        age = f"{describe_age(time.time() - self.created)} old" if self.created else ""
        details = ", ".join(filter(None, (PurePath(self.session).name, age)))
        key = f"{self.key} ({details})" if details else self.key
        return f"{key}: {count} on {', '.join(sorted(set(self.devices)))}, {self.backend}"


@dataclass(frozen=True)
class DetachedCluster:
    """What there is: clusters that can be asked, and a line about each that is gone or not to be trusted."""

    records: tuple[ClusterRecord, ...] = ()
    notes: tuple[str, ...] = ()


def session_id() -> str:
    """Return this process's notebook file, as Jupyter Server tells its kernels; empty where it does not."""
    return os.environ.get("JPY_SESSION_NAME", "")


def describe_age(seconds: float) -> str:
    """Return a duration in its largest unit: `40 s`, `12 min`, `3 h`, `2 d`."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def process_start_time(pid: int) -> float | None:
    """When the process began; None when there is none."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def write_record(record: ClusterRecord) -> None:
    """Put the record into its cluster's folder, in place of the one before. Raises `StartError`."""
    path = Path(record.sockets, RECORD)
    fresh = path.with_suffix(".new")
    try:
        fresh.unlink(missing_ok=True)
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(file, "w") as stream:
            json.dump(dataclasses.asdict(record), stream)
        fresh.rename(path)
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}; the ranks could not be found again") from error


def find_detached() -> DetachedCluster:
    """Every kept cluster of this user on this machine. What is left of those that have ended is removed."""
    records: list[ClusterRecord] = []
    notes: list[str] = []
    for path in sorted(socket_base().glob(f"rankbook-{os.getuid()}-*/{RECORD}")):
        problem = _distrust(path)
        if problem is not None:
            notes.append(f"{path} is not used: {problem}")
            continue
        try:
            record = _read(path)
        except FileNotFoundError:  # it has just been stopped
            continue
        except (OSError, ValueError, TypeError, KeyError) as error:
            notes.append(f"{path} is not used: it cannot be read ({error})")
            continue
        began = process_start_time(record.forkserver)
        if began is not None and abs(began - record.started) <= _CLOCK_STEP:
            records.append(record)
        elif is_abandoned(path.parent):
            _remove(path.parent, Path(record.segments))
            notes.append(f"{record.describe()}: these ranks have ended; what was left of them is removed")
        else:
            notes.append(
                f"{record.describe()}: their process cannot be seen from here (another container?); nothing is removed"
            )
    return DetachedCluster(tuple(records), tuple(notes))


def _distrust(path: Path) -> str | None:
    """Why the file is not to be believed."""
    for each, is_kind, kind in ((path.parent, stat.S_ISDIR, "folder"), (path, stat.S_ISREG, "file")):
        try:
            status = each.lstat()
        except OSError as error:
            return f"the {kind} cannot be looked at ({error.strerror})"
        if not is_kind(status.st_mode):
            return f"it is no plain {kind}"
        if status.st_uid != os.getuid():
            return f"the {kind} is another user's"
        if stat.S_IMODE(status.st_mode) & 0o077:
            return f"the {kind} is open to other users (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _read(path: Path) -> ClusterRecord:
    fields: dict[str, Any] = json.loads(path.read_text())
    fields["ranks"] = tuple(DetachedRank(**each) for each in fields["ranks"])
    record = ClusterRecord(**fields)
    if Path(record.sockets) != path.parent:
        raise ValueError("it is about another folder")
    return record


def _remove(sockets: Path, segments: Path) -> None:
    shutil.rmtree(sockets, ignore_errors=True)
    if segments.name.startswith(f"rankbook-{os.getuid()}-"):
        shutil.rmtree(segments, ignore_errors=True)
