"""Registry of detached clusters: one record file per cluster, through which a later notebook finds and claims it.

A record contains the cluster's processes, sockets, secret token and ranks, and is readable by its user only. Files that
other users could have written are not trusted. `local.ReattachedLauncher` performs the claim.
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
from rankbook.protocol.base import PROTOCOL_VERSION

# The name is part of the format: notebooks of other versions look for it too.
RECORD = "kept.json"
_CLOCK_STEP = 2.0
"""Tolerance in seconds for a process's start time, which moves when the system clock is set."""


@dataclass(frozen=True)
class DetachedRank:
    """State of a rank at the time when the record was written."""

    rank: int
    incarnation: int
    pid: int | None
    device: str


@dataclass(frozen=True)
class ClusterRecord:
    """Record of one detached cluster.

    `notebook` is the process id of its owner, `forkserver` that of its forkserver. `session` is the owner's notebook
    file as named by Jupyter, or empty. `created`, `started` (of the forkserver) and `notebook_started` are seconds
    since the epoch. `seconds` is how long the cluster waits for a new owner. `interrupted` names the cell that the
    owner interrupted just before it ended. `device` is the type of device that the start has asked for. `protocol` is
    the version of the messages that the ranks understand.
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
    device: str | None = None
    protocol: int = PROTOCOL_VERSION

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the ranks' devices."""
        return tuple(rank.device for rank in self.ranks)

    @property
    def owned(self) -> bool:
        """Return True if the owner's process is still running."""
        began = process_start_time(self.notebook)
        # The PID alone is not enough: it may belong to another process by now. Older records have no start time.
        return began is not None and (not self.notebook_started or abs(began - self.notebook_started) <= _CLOCK_STEP)

    def describe(self) -> str:
        """Return a one-line summary: `4711-1 (train.ipynb, 12 min old): 2 ranks on cpu, gloo`."""
        count = plural(len(self.ranks), "rank")
        age = f"{describe_age(time.time() - self.created)} old" if self.created else ""
        details = ", ".join(filter(None, (PurePath(self.session).name, age)))
        key = f"{self.key} ({details})" if details else self.key
        return f"{key}: {count} on {', '.join(sorted(set(self.devices)))}, {self.backend}"


@dataclass(frozen=True)
class DetachedCluster:
    """Records of detached clusters that can be claimed, and notes about ended or untrusted ones."""

    records: tuple[ClusterRecord, ...] = ()
    notes: tuple[str, ...] = ()


def session_id() -> str:
    """Return this process's notebook file, as set by Jupyter Server, or an empty string."""
    return os.environ.get("JPY_SESSION_NAME", "")


def describe_age(seconds: float) -> str:
    """Return a duration in its largest unit: `40 s`, `12 min`, `3 h`, `2 d`."""
    # Rounded down: the age is compared with what the user remembers, not with a clock.
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def process_start_time(pid: int) -> float | None:
    """Return when the process started, in seconds since the epoch; None if it does not run."""
    try:
        process = psutil.Process(pid)
        # A zombie runs no code any more. Its parent, for example a Jupyter server, has not collected it yet.
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def write_record(record: ClusterRecord) -> None:
    """Write the record into its cluster's folder, replacing the previous one. Raises `StartError`."""
    # Written to another file and renamed, so that a reader sees the old record or the new one, never a part. `O_EXCL`
    # and `O_NOFOLLOW` refuse a file that somebody has put there.
    path = Path(record.sockets, RECORD)
    fresh = path.with_suffix(".new")
    try:
        fresh.unlink(missing_ok=True)
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(file, "w") as stream:
            json.dump(dataclasses.asdict(record), stream)
        fresh.rename(path)
    except OSError as error:
        raise StartError(
            f"cannot write {path}: {error.strerror}; without it, a later notebook cannot find the ranks"
        ) from error


def find_detached() -> DetachedCluster:
    """Return this user's detached clusters on this machine.

    Removes the folders of clusters that have ended.
    """
    records: list[ClusterRecord] = []
    notes: list[str] = []
    # Other users can create folders with such names in the shared folder, so every record is checked before it is read.
    for path in sorted(socket_base().glob(f"rankbook-{os.getuid()}-*/{RECORD}")):
        problem = _find_trust_problem(path)
        if problem is not None:
            notes.append(f"{path} is ignored: {problem}")
            continue
        try:
            record = _read(path)
        except FileNotFoundError:  # it was stopped meanwhile
            continue
        # A record of another version has other fields. Only those that exist in all versions are used here.
        except _OtherVersionError as error:
            if is_abandoned(path.parent):
                _remove(path.parent, error.segments)
            else:
                notes.append(str(error))
            continue
        except (OSError, ValueError, TypeError, KeyError) as error:
            notes.append(f"{path} is ignored: it cannot be read ({error})")
            continue
        # The start time tells the forkserver from a later process with its PID.
        began = process_start_time(record.forkserver)
        if began is not None and abs(began - record.started) <= _CLOCK_STEP:
            records.append(record)
        elif is_abandoned(path.parent):
            _remove(path.parent, Path(record.segments))
            notes.append(f"{record.describe()}: these ranks have exited; their files were removed")
        else:
            notes.append(
                f"{record.describe()}: their forkserver is not visible here (another container?); their files are kept"
            )
    return DetachedCluster(tuple(records), tuple(notes))


def _find_trust_problem(path: Path) -> str | None:
    """Return why the record file cannot be trusted, or None."""
    for location, is_kind, kind in ((path.parent, stat.S_ISDIR, "folder"), (path, stat.S_ISREG, "file")):
        try:
            status = location.lstat()
        except OSError as error:
            return f"the {kind} cannot be inspected ({error.strerror})"
        if not is_kind(status.st_mode):
            return f"it is not a regular {kind}"
        if status.st_uid != os.getuid():
            return f"the {kind} belongs to another user"
        if stat.S_IMODE(status.st_mode) & 0o077:
            return f"the {kind} is accessible to other users (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


class _OtherVersionError(Exception):
    """Report a cluster that an installation of Rankbook with another protocol version started."""

    def __init__(self, fields: dict[str, Any], version: object) -> None:
        ranks = plural(len(fields["ranks"]), "rank")
        super().__init__(
            f"{fields['key']}: {ranks} of another version of Rankbook (protocol {version}, this one has "
            f"{PROTOCOL_VERSION}); attach with that version, or end the ranks with `kill {fields['forkserver']}`"
        )
        self.segments = Path(fields["segments"])


def _read(path: Path) -> ClusterRecord:
    """Return the record in a file. Raises `_OtherVersionError`; records of version 1 have no version."""
    fields: dict[str, Any] = dict(json.loads(path.read_text()))
    if (version := fields.get("protocol", 1)) != PROTOCOL_VERSION:
        raise _OtherVersionError(fields, version)
    # An unknown or missing field raises TypeError here, and `find_detached` reports the file.
    fields["ranks"] = tuple(DetachedRank(**rank) for rank in fields["ranks"])
    record = ClusterRecord(**fields)
    # A copied record must not lead to the removal of the folder that it names.
    if Path(record.sockets) != path.parent:
        raise ValueError("it describes another folder")
    return record


def _remove(sockets: Path, segments: Path) -> None:
    shutil.rmtree(sockets, ignore_errors=True)
    # The path comes from the file: nothing but a folder of this package and user is removed.
    if segments.name.startswith(f"rankbook-{os.getuid()}-"):
        shutil.rmtree(segments, ignore_errors=True)
