"""Limits of the process's control group: what is left of its memory, its CPU quota, and the kills of the OOM killer.

A container, a job of a scheduler or a systemd unit has a control group with limits of its own, which may be far below
the memory and the CPUs of the machine. Both versions of control groups are read (cgroup-v2.rst, cgroup-v1/memory.rst,
scheduler/sched-bwc.rst).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROCESS = Path("/proc/self")
_READ_INTERVAL = 1.0
_RECENT_SECONDS = 10.0
"""Seconds in which a kill counts as recent: a victim with much memory takes some time to exit."""


def find_counter(process: Path = _PROCESS) -> Path | None:
    """Return the file with the OOM kill count of our control group, or None.

    The kernel counts a kill in the victim's group, whichever limit or shortage caused it (cgroup-v2.rst, `oom_kill`;
    version 1 has the same line in `memory.oom_control`).
    """
    files = (group / names.counter for group, _, names in _memory_groups(process))
    return next((file for file in files if read_counter(file) is not None), None)


def read_counter(file: Path) -> int | None:
    """Return the number of OOM kills so far; None if the file does not count them."""
    try:
        lines = file.read_text().splitlines()
    except OSError:  # no memory controller, or the root group, which has no counter
        return None
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None


class RecentKills:
    """Count the OOM killer's victims of the last seconds.

    Older kills say nothing about a rank that exits now.
    """

    def __init__(self, counter: Path | None) -> None:
        self._counter = counter
        self._changes: deque[tuple[float, int]] = deque()
        self._next = 0.0

    def update(self, now: float) -> None:
        """Read the counter, at most once a second; `now` is in seconds on any clock."""
        if now >= self._next:
            self._read(now)

    def recent(self, now: float) -> int:
        """Return the number of recent OOM kills; 0 if it is unknown."""
        self._read(now)
        # The difference between the newest and the oldest value in the window.
        return self._changes[-1][1] - self._changes[0][1] if self._changes else 0

    def _read(self, now: float) -> None:
        self._next = now + _READ_INTERVAL
        count = read_counter(self._counter) if self._counter is not None else None
        if count is not None and (not self._changes or self._changes[-1][1] != count):
            self._changes.append((now, count))
        # One value from before the window stays, to which the later ones are compared.
        while len(self._changes) > 1 and self._changes[1][0] < now - _RECENT_SECONDS:
            self._changes.popleft()


class _Names:
    """Names of the files of the memory controller, and of the line of pages that the kernel can free at once."""

    def __init__(self, counter: str, limit: str, usage: str, inactive: str) -> None:
        self.counter, self.limit, self.usage, self.inactive = counter, limit, usage, inactive


_VERSION_1 = _Names("memory.oom_control", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Names("memory.events", "memory.max", "memory.current", "inactive_file")


def free_memory(process: Path = _PROCESS) -> int | None:
    """Return the bytes that the limits of our control group and of those around it leave; None without a limit.

    Pages of files that the kernel can drop count as free, as in `MemAvailable`. Pages of shared memory do not.
    """
    left = [
        limit - _read_number(folder / names.usage) + _read_line(folder / "memory.stat", names.inactive)
        for group, top, names in _memory_groups(process)
        for folder in (group, *group.parents)
        if folder.is_relative_to(top) and (limit := _read_number(folder / names.limit))
    ]
    return max(0, min(left)) if left else None


def _read_number(file: Path) -> int:
    """Return the number in a file; 0 if there is none, as without a limit in version 2."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def _read_line(file: Path, name: str) -> int:
    try:
        return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(f"{name} "))
    except (OSError, StopIteration):
        return 0


def cpu_quota(process: Path = _PROCESS) -> float | None:
    """Return the number of CPUs whose time the control groups of a process allow; None without a limit.

    Containers, among them those of Kubernetes, limit the time per period, and leave the affinity as it is.
    """
    quotas = [
        quota
        for group, top, is_version_1 in _groups("cpu", process)
        for folder in (group, *group.parents)
        if folder.is_relative_to(top) and (quota := _read_quota(folder, is_version_1))
    ]
    return min(quotas, default=None)


def _read_quota(folder: Path, is_version_1: bool) -> float | None:
    try:
        if is_version_1:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        else:
            quota, period = (folder / "cpu.max").read_text().split()
        # Without a limit, the quota is `max` in version 2, and -1 in version 1.
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _memory_groups(process: Path) -> Iterator[tuple[Path, Path, _Names]]:
    """Yield the folders that may be that of our memory controller, the topmost groups above them, and their files."""
    for group, top, is_version_1 in _groups("memory", process):
        yield group, top, _VERSION_1 if is_version_1 else _VERSION_2


def _groups(controller: str, process: Path) -> Iterator[tuple[Path, Path, bool]]:
    """Yield the folders that may be that of our controller, the topmost groups above them, and whether of version 1.

    A machine can mount both versions of control groups; a controller belongs to one of them.
    """
    try:
        groups = (process / "cgroup").read_text().splitlines()
        mounts = [_Mount(line) for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:  # not Linux
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        # Version 2 has one line without controllers, version 1 a line per controller.
        if controllers and controller not in controllers.split(","):
            continue
        kind = "cgroup" if controllers else "cgroup2"
        for mount in mounts:
            if mount.kind == kind and (not controllers or controller in mount.options):
                yield mount.folder_of(path), mount.point, bool(controllers)


class _Mount:
    """One line of `/proc/self/mountinfo` (proc_pid_mountinfo(5))."""

    def __init__(self, line: str) -> None:
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        self.root = PurePosixPath(_unescape(fields[3]))
        self.point = Path(_unescape(fields[4]))
        self.kind = kinds[0]
        self.options = kinds[-1].split(",")

    def folder_of(self, group: str) -> Path:
        """Return the folder of the control group `group`.

        A container sees its own group at the mount point, whatever the group's path is outside.
        """
        path = PurePosixPath(group)
        return self.point / path.relative_to(self.root) if path.is_relative_to(self.root) else self.point


def _unescape(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
