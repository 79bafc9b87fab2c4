"""Folders of clusters, and the registry of detached ones.

`make_folders` chooses the location, names and permissions of a cluster's folders for sockets, shared memory segments
and logs, and removes what crashed clusters have left behind.

A detached cluster has one record file in its folder, through which a later notebook finds and claims it. The record
contains the cluster's processes, sockets, secret token and ranks, and is readable by its user only. Files that other
users could have written are not trusted. `local.ReattachedLauncher` performs the claim.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import platformdirs
import psutil

from rankbook.errors import StartError
from rankbook.formatting import plural
from rankbook.process_identity import claim_folder, is_abandoned, is_owner
from rankbook.protocol import PROTOCOL_VERSION

# `sun_path` has 108 bytes on Linux and 104 on macOS, with the final zero.
_MAX_SOCKET_PATH = 103 if sys.platform == "darwin" else 107
_LOG_DAYS = 7


@dataclass(frozen=True)
class ClusterPaths:
    """The folders of one cluster.

    `sockets` and `segments` have mode 0700 and are removed with the cluster; `logs` are kept for a week. `locks` are
    file descriptors that keep other processes from removing the folders while this process lives.
    """

    sockets: Path
    segments: Path
    logs: Path
    locks: list[int] = field(default_factory=list, compare=False)

    def remove(self) -> None:
        """Remove the folders of sockets and segments, and release the locks."""
        for folder in {self.sockets, self.segments}:
            shutil.rmtree(folder, ignore_errors=True)
        while self.locks:
            os.close(self.locks.pop())


def make_folders(owner: int | None = None) -> ClusterPaths:
    """Create the folders of a new cluster, after removing abandoned ones.

    They belong to the process `owner`, by default this one; once it is gone, a later start removes them.
    `RANKBOOK_RUNTIME_DIR` overrides the location of sockets and segments, `RANKBOOK_LOG_DIR` that of logs. Raises
    `StartError`, which names the folder and the variable to set.
    """
    base = socket_base()
    owner = os.getpid() if owner is None else owner
    # Segments belong into memory. If the user has chosen a folder, everything goes there.
    shared = base if os.environ.get("RANKBOOK_RUNTIME_DIR") else _segment_base(base)
    # Before the new folders are made, which need the space that crashed clusters may hold.
    for folder in {base, shared}:
        _sweep(folder)
    locks: list[int] = []
    # The lock file is in every folder, because both are swept independently.
    sockets = _make(base, owner, locks)
    try:
        segments = sockets if shared == base else _make(shared, owner, locks)
    except StartError:
        ClusterPaths(sockets, sockets, sockets, locks).remove()
        raise
    logs = Path(os.environ.get("RANKBOOK_LOG_DIR") or platformdirs.user_log_path("rankbook"))
    # Logs outlive their clusters for some days: a cell names the file of the output that was cut.
    _sweep_logs(logs)
    return ClusterPaths(sockets, segments, logs / sockets.name, locks)


def socket_base() -> Path:
    """Return the folder in which the clusters' folders are created. Raises `StartError`."""
    chosen = os.environ.get("RANKBOOK_RUNTIME_DIR")
    # The longest path below the base: the cluster's folder (`_make`; process ids have up to 7 digits) with the socket
    # of a rank's incarnation (`ZmqHub.open_downlink`).
    limit = _MAX_SOCKET_PATH - len(f"/rankbook-{os.getuid()}-1234567-abcdefgh/down-1234.1234")
    if chosen:
        if (size := len(os.fsencode(chosen))) > limit:
            raise StartError(
                f"RANKBOOK_RUNTIME_DIR={chosen!r} is too long for a socket path: expected at most {limit} bytes, "
                f"got {size}"
            )
        return Path(chosen)
    # systemd removes this one with the user's last session, and a job of Slurm is none.
    of_session = None if "SLURM_JOB_ID" in os.environ else os.environ.get("XDG_RUNTIME_DIR")
    # The first one that is writable and short enough. On macOS, `gettempdir` is a long path below /var/folders.
    for candidate in (of_session, tempfile.gettempdir(), "/tmp"):  # noqa: S108 - 0700 inside
        if candidate and len(os.fsencode(candidate)) <= limit and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    raise StartError("no writable folder for sockets found; set RANKBOOK_RUNTIME_DIR to a folder that you can write to")


def _segment_base(sockets: Path) -> Path:
    shared = Path("/dev/shm")  # noqa: S108 - memory, and subfolders are 0700
    return shared if shared.is_dir() and os.access(shared, os.W_OK | os.X_OK) else sockets


def _make(base: Path, owner: int, locks: list[int]) -> Path:
    folder = None
    try:
        # `mkdtemp` creates it with mode 0700, and fails if the name exists.
        folder = Path(tempfile.mkdtemp(prefix=f"rankbook-{os.getuid()}-{owner}-", dir=base))
        locks.append(claim_folder(folder, owner))
    except OSError as error:
        # The folder was created, but its owner could not be recorded.
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise StartError(
            f"cannot create a folder in {base}: {error.strerror};"
            " set RANKBOOK_RUNTIME_DIR to a writable folder with free space"
        ) from error
    return folder


def _sweep(base: Path) -> None:
    """Remove the abandoned folders of this user's clusters. Folders that may be in use are kept."""
    for folder in _user_folders(base):
        if is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _sweep_logs(logs: Path) -> None:
    """Remove old logs, and set permissions that earlier versions left open to other users."""
    # By the folder's time, which changes whenever a log is created in it.
    oldest = time.time() - _LOG_DAYS * 86_400
    for folder in _user_folders(logs):
        with contextlib.suppress(OSError):  # another process may remove it
            if folder.lstat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)
            elif stat.S_IMODE(folder.lstat().st_mode) & 0o077:
                folder.chmod(0o700)
                for file in folder.glob("*.log"):
                    if not file.is_symlink():
                        file.chmod(0o600)


def _user_folders(base: Path) -> Iterator[Path]:
    """Yield the folders in `base` that this user created for clusters.

    Other users may have created anything beside them.
    """
    # The names that `_make` gives: user, owner's PID, and the random part of `mkdtemp`.
    name = re.compile(rf"rankbook-{os.getuid()}-[0-9]+-\w+", re.ASCII)
    with contextlib.suppress(OSError):  # unreadable folder
        for folder in base.glob("rankbook-*"):
            with contextlib.suppress(OSError):
                status = folder.lstat()
                if name.fullmatch(folder.name) and stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                    yield folder


# The name is part of the format: notebooks of other versions look for it too.
RECORD = "kept.json"
_CLOCK_STEP = 2.0
"""Tolerance in seconds for a process's start time, which moves when the system clock is set."""


@dataclass(frozen=True)
class DetachedRank:
    """State of a rank at the time when the record was written.

    `since` is the number of the launch that started it. `empty`: nothing has given it variables since then.
    """

    rank: int
    incarnation: int
    pid: int | None
    device: str
    since: int = 0
    empty: bool = False


@dataclass(frozen=True)
class ClusterRecord:
    """Record of one detached cluster.

    `notebook` is the process id of its owner, `forkserver` that of its forkserver. `session` is the owner's notebook
    file as named by Jupyter, or empty. `created`, `started` (of the forkserver) and `notebook_started` are seconds
    since the epoch. `seconds` is how long the cluster waits for a new owner. `interrupted` names the cell that the
    owner interrupted just before it ended. `device` is the type of device that the start has asked for. `cuda_devices`
    is how many CUDA devices ranks can use, 0 in older records too. `protocol` is the version of the messages that the
    ranks understand.
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
    cuda_devices: int = 0
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

    Removes the folders of clusters that have ended. Raises `StartError` for an invalid `RANKBOOK_RUNTIME_DIR`.
    """
    records: list[ClusterRecord] = []
    notes: list[str] = []
    # Other users can create folders with such names in the shared folder, so every record is checked before it is read.
    for path in sorted(path for base in _possible_bases() for path in base.glob(f"rankbook-{os.getuid()}-*/{RECORD}")):
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
        if began is not None and (
            abs(began - record.started) <= _CLOCK_STEP or is_owner(path.parent, record.forkserver)
        ):
            records.append(record)
        elif is_abandoned(path.parent):
            _remove(path.parent, Path(record.segments))
            notes.append(f"{record.describe()}: these ranks have exited; their files were removed")
        else:
            notes.append(
                f"{record.describe()}: their forkserver is not visible here (another container?); their files are kept"
            )
    return DetachedCluster(tuple(records), tuple(notes))


def _possible_bases() -> Iterable[Path]:
    """Return the folders that `socket_base` may have returned in another process of this user.

    A login by SSH, a desktop session and a service have different environments.
    """
    if os.environ.get("RANKBOOK_RUNTIME_DIR"):
        return (socket_base(),)
    of_session, of_user = os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{os.getuid()}"
    bases = (of_session, tempfile.gettempdir(), "/tmp", of_user)  # noqa: S108 - every record is checked
    # Each folder once, also if it has two names, as /tmp of macOS.
    return {os.path.realpath(base): Path(base) for base in bases if base}.values()


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
    if os.path.realpath(record.sockets) != os.path.realpath(path.parent):
        raise ValueError("it describes another folder")
    return record


def _remove(sockets: Path, segments: Path) -> None:
    shutil.rmtree(sockets, ignore_errors=True)
    # The path comes from the file: nothing but a folder of this package and user is removed.
    if segments.name.startswith(f"rankbook-{os.getuid()}-"):
        shutil.rmtree(segments, ignore_errors=True)
