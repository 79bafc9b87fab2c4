"""The kernel's OOM killer, as far as its counters tell.

Owns: where the control group of this process counts its victims, in version 1 and 2. Refuses: to say who they were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROCESS = Path("/proc/self")
_EVERY = 1.0
_RECENT = 10.0
"""Seconds that a victim with much memory may take to end."""


def find_counter(process: Path = _PROCESS) -> Path | None:
    """The file with our control group's count; None where there is none.

    Whichever limit or lack of memory it was: the kernel counts where the victim was (cgroup-v2.rst, `oom_kill`; in
    version 1 the same line stands in `memory.oom_control`).
    """
    return next((file for file in _counters(process) if read_counter(file) is not None), None)


def read_counter(file: Path) -> int | None:
    """How many processes were ended so far."""
    try:
        lines = file.read_text().splitlines()
    except OSError:  # no such controller here, or the root group, which counts nothing
        return None
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None


class RecentKills:
    """Counts the OOM killer's victims of the last seconds: one of last week did not end the rank that ends now."""

    def __init__(self, counter: Path | None) -> None:
        self._counter = counter
        self._changes: deque[tuple[float, int]] = deque()
        self._next = 0.0

    def look(self, now: float) -> None:
        """Look at the counter, at most once a second; `now` is on any clock."""
        if now >= self._next:
            self._read(now)

    def recent(self, now: float) -> int:
        """How many there were of late; 0 where it cannot be told."""
        self._read(now)
        return self._changes[-1][1] - self._changes[0][1] if self._changes else 0

    def _read(self, now: float) -> None:
        self._next = now + _EVERY
        count = read_counter(self._counter) if self._counter is not None else None
        if count is not None and (not self._changes or self._changes[-1][1] != count):
            self._changes.append((now, count))
        while len(self._changes) > 1 and self._changes[1][0] < now - _RECENT:
            self._changes.popleft()


def _counters(process: Path) -> Iterator[Path]:
    """The files that may have the counter. A machine can have both versions; the memory is in one of them."""
    try:
        groups = (process / "cgroup").read_text().splitlines()
        mounts = [_Mount(line) for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:  # no Linux
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        kind, name = ("cgroup", "memory.oom_control") if controllers else ("cgroup2", "memory.events")
        for mount in mounts:
            if mount.kind == kind and (not controllers or "memory" in mount.options):
                yield mount.folder_of(path) / name


class _Mount:
    """One line of mountinfo (proc_pid_mountinfo(5))."""

    def __init__(self, line: str) -> None:
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        self.root = PurePosixPath(_plain(fields[3]))
        self.point = Path(_plain(fields[4]))
        self.kind = kinds[0]
        self.options = kinds[-1].split(",")

    def folder_of(self, group: str) -> Path:
        """Where the control group `group` lies. A container sees its own at the top, whatever its path outside."""
        path = PurePosixPath(group)
        return self.point / path.relative_to(self.root) if path.is_relative_to(self.root) else self.point


def _plain(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
