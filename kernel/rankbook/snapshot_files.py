"""Files of in-memory snapshots: one header and one data file per rank and generation, in the cluster's shared memory.

The files lie in the segment folder of the cluster, which the forkserver (on another host, the agent) removes when the
cluster ends. So they outlive the rank that has written them. A rank writes two generations in turn (`SnapshotFile`):
while it writes one, the other one is complete. A header is renamed into place after its data, so a rank that dies in
between leaves no snapshot.

A snapshot counts only if all ranks have it (`latest_common`). The notebook reads the headers, the ranks the contents.
The copies of ranks of another host (runtime/snapshot_copies.py) are files of the same form.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from rankbook import control_groups
from rankbook.errors import InvalidArgument
from rankbook.formatting import format_bytes, plural

GENERATIONS = (0, 1)
_HEADER_LENGTH = 4  # bytes of the number in front of the header
_ALIGNMENT = 64  # bytes: a cache line, and torch's own alignment
_RESERVE = 64 << 20  # bytes of shared memory that stay free for messages, DataLoader workers and NCCL


class SnapshotVersion(msgspec.Struct, frozen=True, order=True):
    """Identity of a snapshot, which is the same on all ranks.

    `number` counts the steps and other events since protection began, `updates` those since the last one, such as the
    step of a scheduler. `step` is the number of steps that the optimizer has made.
    """

    number: int
    updates: int
    step: int


class SnapshotHeader(msgspec.Struct, frozen=True):
    """Header of a snapshot.

    `seconds` is the time since the epoch, `size` the bytes of tensors, and `every` the interval in steps. `is_final`:
    no scheduler is expected to step before the next step of the optimizer.
    """

    version: SnapshotVersion
    seconds: float
    size: int
    every: int
    is_final: bool = True


class TrainingPlace(msgspec.Struct, frozen=True):
    """Place of a rank in a protected training.

    `step` is the step to show. `steps` are those of the optimizers that take part, by serial number, and `updates` the
    steps of schedulers since. `has_begun`: the next step has begun. `is_mixed`: a step or a return to a snapshot was
    stopped in the middle, so the tensors may be of two steps. `snapshots` are the headers of the rank's snapshots.
    """

    step: int
    steps: dict[int, int]
    updates: int
    has_begun: bool
    is_mixed: bool
    snapshots: tuple[SnapshotHeader, ...]


class SnapshotPlace(msgspec.Struct, frozen=True):
    """Location of a rank's snapshots: the cluster's shared memory on the rank's host, and the number of the rank."""

    folder: Path
    rank: int
    world_size: int


this_place: SnapshotPlace | None = None
"""The place of this rank. None in a process that is no rank of Rankbook."""

next_serial = 0
"""Serial number of the next prepared object of this process, by which snapshots name it. The ranks agree on it whenever
their process groups are formed, so that an object that all ranks prepare has one number."""

replicas_may_differ = False
"""True from when the process groups are formed anew to the next training step: the ranks of a training may have made
different numbers of optimizer steps. The ranks agree on it when the groups are formed, because the comparison that it
asks for is a collective."""

_decoder = msgspec.msgpack.Decoder(SnapshotHeader)


def offsets_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of every buffer in a file of aligned buffers, and the size of the file."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


class SnapshotFile:
    """One generation of a rank's snapshot: its data, mapped into memory, and the header that makes it valid."""

    def __init__(self, folder: Path, rank: int, generation: int) -> None:
        self.header = header_path(folder, rank, generation)
        self._data = self.header.with_suffix(".data")
        self._map: mmap.mmap | None = None

    def allocate(self, size: int) -> mmap.mmap:
        """Return shared memory of `size` bytes to write the data to. The previous content is discarded.

        The pages are allocated now, so that a write never fails for lack of memory (it would end the process), and
        mapped now, so that the first snapshot is as fast as the others. Raises OSError.
        """
        self.invalidate()
        self._map = None
        self._data.unlink(missing_ok=True)
        file = os.open(self._data, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, max(size, 1))
            else:
                os.ftruncate(file, max(size, 1))
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._map = mmap.mmap(file, max(size, 1), flags=flags)
        except BaseException:
            self._data.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        return self._map

    def invalidate(self) -> None:
        """Make the generation invalid, before its data changes."""
        self.header.unlink(missing_ok=True)

    def commit(self, header: SnapshotHeader, content: bytes) -> None:
        """Make the generation valid, after its data has been written. `content` describes the data."""
        # The header is the commit: it is complete or absent, because a rename is atomic. The data needs no such care,
        # since it is only read if there is a header, and `invalidate` has removed that before the data changed. Shared
        # memory needs no fsync either: it is lost with the machine anyway, and a killed process leaves what it has
        # written.
        encoded = msgspec.msgpack.encode(header)
        draft = self.header.with_suffix(".draft")
        with draft.open("wb") as file:
            file.write(len(encoded).to_bytes(_HEADER_LENGTH, "little") + encoded)
            file.write(content)
        draft.replace(self.header)

    def read(self, version: SnapshotVersion) -> tuple[bytes, mmap.mmap] | None:
        """Return the content and the data of `version`, None if this generation is of another one.

        The data is mapped privately: the reader can neither change it nor be affected by a later snapshot's file.
        """
        header = read_header(self.header)
        if header is None or header.version != version:
            return None
        # Nothing is written between the two reads: a rank reads its own files, on the thread that writes them, or those
        # of another rank while all ranks take part in `heal`. Only headers are read at any time.
        raw = self.header.read_bytes()
        start = _HEADER_LENGTH + int.from_bytes(raw[:_HEADER_LENGTH], "little")
        with self._data.open("rb") as file:
            return raw[start:], mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def remove(self) -> None:
        """Remove the files. The memory is freed with the last mapping."""
        self.invalidate()
        self._map = None
        for path in (self._data, self.header.with_suffix(".draft")):
            path.unlink(missing_ok=True)


def header_path(folder: Path, rank: int, generation: int) -> Path:
    """Return the path of a header. The other files of the generation differ by their suffix."""
    return folder / f"snapshot-{rank}-{generation}.header"


def read_header(path: Path) -> SnapshotHeader | None:
    """Return the header in a file; None if there is none, as while its rank writes the snapshot."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_HEADER_LENGTH), "little")
            return _decoder.decode(file.read(length))
    except (OSError, msgspec.MsgspecError):
        return None


def read_headers(folder: Path, ranks: Sequence[int]) -> dict[int, list[SnapshotHeader]]:
    """Return the headers of the valid generations of every rank, newest first."""
    headers = {
        rank: [
            header
            for generation in GENERATIONS
            if (header := read_header(header_path(folder, rank, generation))) is not None
        ]
        for rank in ranks
    }
    return {rank: sorted(found, key=lambda header: header.version, reverse=True) for rank, found in headers.items()}


def read_own_headers(place: SnapshotPlace) -> tuple[SnapshotHeader, ...]:
    """Return the headers of the snapshots of the rank at `place`, as `read_headers` does."""
    return tuple(read_headers(place.folder, [place.rank])[place.rank])


def latest_common(headers: dict[int, list[SnapshotHeader]]) -> SnapshotVersion | None:
    """Return the newest version that all ranks have, None if there is none.

    A rank that died before it had updated its snapshot, as after the step of a scheduler, has an older version of the
    same step. Then the one before counts, which is complete everywhere. It also counts if all ranks were stopped
    between the steps of the optimizer and the scheduler: the loop would go on without the step of the scheduler.
    """
    # Two generations suffice because no rank overwrites its older one before all ranks have the newer one
    # (`wait_for_peers`). So at any moment the ranks' sets of versions have one in common: the version that the slowest
    # rank has completed last.
    versions = [{header.version for header in found} for found in headers.values()]
    common = set.intersection(*versions) if versions else set()
    # Example: the optimizer makes step 5, and a snapshot of it is taken. Then the scheduler steps, and the snapshot is
    # updated. If the ranks stop between the two, all of them have step 5 without its scheduler. Going on from there
    # would skip the scheduler's step, since the loop begins with the next batch; so step 4 counts, if all ranks have
    # it.
    not_final = {header.version for found in headers.values() for header in found if not header.is_final}
    return max(common - not_final or common, default=None)


def are_together(places: Collection[TrainingPlace]) -> bool:
    """Return True if ranks at these places have the state of one step, and can go on from there.

    An optimizer that one of the ranks does not have does not count, such as one of an earlier training.
    """
    shared = set.intersection(*(set(place.steps) for place in places)) if places else set()
    seen = {
        (place.updates, place.has_begun, tuple(place.steps[serial] for serial in sorted(shared))) for place in places
    }
    return len(seen) <= 1 and not any(place.is_mixed for place in places)


def remove_all(folder: Path) -> None:
    """Remove the snapshots of all ranks."""
    with contextlib.suppress(FileNotFoundError):  # the folder has been removed
        for path in list(folder.glob("snapshot-*")):
            path.unlink(missing_ok=True)


def remove_rank(folder: Path, rank: int) -> None:
    """Remove the snapshots of one rank, such as those that an earlier process of this rank has left."""
    for generation in GENERATIONS:
        SnapshotFile(folder, rank, generation).remove()


def remove_others(folder: Path, keep: Collection[int]) -> None:
    """Remove the snapshots of all ranks but those in `keep`."""
    for path in list(folder.glob("snapshot-*")):
        if int(path.name.split("-")[1]) not in keep:
            path.unlink(missing_ok=True)


def merge_headers(found: Iterable[Mapping[int, list[SnapshotHeader]]]) -> dict[int, list[SnapshotHeader]]:
    """Merge the headers that several hosts have. A rank's snapshot may be on two of them."""
    merged: dict[int, list[SnapshotHeader]] = {}
    for headers in found:
        for rank, listed in headers.items():
            known = merged.setdefault(rank, [])
            known += [header for header in listed if header not in known]
    return merged


def wait_for_peers(
    folder: Path, ranks: Sequence[int], version: SnapshotVersion, *, timeout: float
) -> list[set[SnapshotVersion]]:
    """Wait until all `ranks` have `version` or a later one, before a generation is overwritten. Return what they have.

    In a training loop whose ranks reduce gradients there is nothing to wait for: a rank that has made the next step
    has got the gradients of all others, which they have computed after the snapshot. Raises `InvalidArgument`.
    """
    wanted = (version.number, version.updates)
    deadline = time.monotonic() + timeout
    versions = []
    for rank in ranks:
        paths = [header_path(folder, rank, generation) for generation in GENERATIONS]
        while True:
            found = {header.version for header in map(read_header, paths) if header is not None}
            if any((other.number, other.updates) >= wanted for other in found):
                versions.append(found)
                break
            if time.monotonic() > deadline and not found:
                raise InvalidArgument(
                    f"rank {rank} has no snapshot after {timeout:.0f} s, unlike this rank: a rank that was started "
                    "while others ran a cell is not protected yet; %distributed protect on protects all ranks"
                )
            if time.monotonic() > deadline:
                raise InvalidArgument(
                    f"rank {rank} has not made the step of this rank's last snapshot after {timeout:.0f} s: protection "
                    "requires that all ranks step their optimizers and schedulers together; "
                    "accelerator.protect(False) ends it"
                )
            # The header is a file, for whose appearance one can only poll. It is nearly always there: the wait is for
            # ranks that train without reducing gradients.
            time.sleep(0.001)
    return versions


def check_memory(folder: Path, size: int, ranks: int) -> None:
    """Raise `InvalidArgument` if two snapshots of `size` bytes of every rank do not fit into shared memory.

    The memory that snapshots have already counts as free: they are part of what is needed.
    """
    needed = len(GENERATIONS) * size * ranks
    held = _held_memory(folder)
    free, place = free_memory(folder)
    free += held
    if needed > free - _RESERVE:
        raise InvalidArgument(
            f"protection needs {len(GENERATIONS)} copies x {format_bytes(size)} x {plural(ranks, 'rank')} = "
            f"{format_bytes(needed)} of shared memory, but {place} has {format_bytes(free)} free"
            f"{' without the present snapshots' if held else ''}, of which {format_bytes(_RESERVE)} are kept for "
            "messages; enlarge it, or protect fewer ranks' state"
        )


def _held_memory(folder: Path) -> int:
    """Return the bytes that the snapshots in `folder` take, also those that are being allocated."""
    held = 0
    for path in list(folder.glob("snapshot-*.data")):
        with contextlib.suppress(FileNotFoundError):  # its rank has just removed it
            held += path.stat().st_blocks * 512
    return held


def free_memory(folder: Path) -> tuple[int, str]:
    """Return the free bytes of the shared memory of `folder`, and what limits them, for a message.

    That is the size of the file system, the memory of the machine, or a limit of a container or a job.
    """
    status = os.statvfs(folder)
    free, place = status.f_bavail * status.f_frsize, str(folder.parent)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
        if available < free:
            free, place = available, "the machine"
    # The pages of shared memory count for the group of the process that writes them.
    limit = control_groups.free_memory()
    if limit is not None and limit < free:
        free, place = limit, "the control group of this process"
    return free, place
