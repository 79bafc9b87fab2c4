"""Second copies of snapshots on a neighbouring host, and the transfer of a snapshot to a rank whose host was lost.

A rank writes its snapshots into the shared memory of its own host (protection.py). If there are several hosts, it also
sends them to a rank of the next host (`find_target`), which writes them into the shared memory of that host. The files
have the same names there: a name contains the number of the rank, and a rank runs on one host only. So a rank that
moves to the host of its copy finds it as if it had written it itself.

All transfers are on the main thread, in the default group, and in the same order on all ranks, as the collectives of
the user's code are. A thread with a group of its own would copy beside the training, but a rank that dies breaks off
both groups at different moments, and the two generations of a snapshot do not suffice for a copy that is late.

Before a generation is overwritten, the ranks tell one another which ones are complete, with their second copies
(`Announcement`), and keep the newest one that all of them have.
"""

from __future__ import annotations

import mmap
import pickle
import platform
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from rankbook import snapshot_files
from rankbook.control_collectives import control_device, gather_objects
from rankbook.snapshot_files import GENERATIONS, SnapshotFile, SnapshotHeader, SnapshotPlace, SnapshotVersion

_TAG = 23_023
"""Tag of the transfers, so that they are not taken for a send of the user's code."""
_AT_ONCE = 32 << 20
"""Bytes of one send. On a device without a backend for the CPU, two of these buffers are in its memory."""


class Announcement(NamedTuple):
    """State of a rank, which it tells the others before it takes a snapshot.

    `complete` has the version of every complete generation, `size` is in bytes. `allocates`: it needs new memory, for
    its own snapshot or for a copy.
    """

    complete: dict[int, SnapshotVersion]
    size: int
    allocates: bool


def choose_generation(complete: dict[int, SnapshotVersion], kept: SnapshotVersion | None) -> int:
    """Return the generation to overwrite: not the one with the version `kept`, and rather the older one."""
    # The generation that all ranks have is the only one that a lost host could be restored from, so it stays until the
    # other one is complete everywhere. The rest is the choice between an incomplete generation and an older one.
    free = [generation for generation in GENERATIONS if kept is None or complete.get(generation) != kept]
    # An incomplete generation first.
    return min(free, key=lambda generation: (generation in complete, complete.get(generation)))


def latest_complete(announcements: Sequence[Announcement]) -> SnapshotVersion | None:
    """Return the newest version that all ranks have, None if there is none."""
    common = set.intersection(*(set(announcement.complete.values()) for announcement in announcements))
    return max(common, default=None)


def find_target(rank: int, hosts: Sequence[Sequence[int]]) -> int | None:
    """Return the rank that keeps the second copy of the snapshots of `rank`; None if all ranks are on one host.

    It is on the next host, at the same place among the ranks of its host if there are as many.
    """
    if len(hosts) == 1:
        return None
    at = next(index for index, ranks in enumerate(hosts) if rank in ranks)
    # A ring of hosts: every host keeps the copies of one other host and sends to one. The loss of one host loses no
    # snapshot; that of two neighbours does.
    following = hosts[(at + 1) % len(hosts)]
    return following[hosts[at].index(rank) % len(following)]


def gather_hosts(place: SnapshotPlace) -> list[list[int]]:
    """Return the ranks of every host, in the order of their first ranks. A collective."""
    hosts: dict[tuple[str, str], list[int]] = {}
    # An agent has a folder of its own, also if another one runs on the same host.
    for rank, key in enumerate(gather_objects((platform.node(), str(place.folder)))):
        hosts.setdefault(key, []).append(rank)
    return list(hosts.values())


class SnapshotCopies:
    """Transfer of this rank's snapshots to the next host, and the copies of others that this rank keeps.

    Copies of another version than `kept` are made invalid: they are of steps that are repeated.
    """

    def __init__(self, place: SnapshotPlace, hosts: Sequence[Sequence[int]], kept: SnapshotVersion | None) -> None:
        self.hosts = hosts
        self._target = find_target(place.rank, hosts)
        self._files = {
            rank: [SnapshotFile(place.folder, rank, generation) for generation in GENERATIONS]
            for rank in range(place.world_size)
            if find_target(rank, hosts) == place.rank
        }
        self._memory: dict[tuple[int, int], torch.Tensor] = {}
        self._generations: dict[int, int] = {}
        for files in self._files.values():
            for file in files:
                header = snapshot_files.read_header(file.header)
                if header is None or header.version != kept:
                    file.invalidate()
        local = next(ranks for ranks in hosts if place.rank in ranks)
        if place.rank == local[0]:
            received = [rank for rank in range(place.world_size) if find_target(rank, hosts) in local]
            snapshot_files.remove_others(place.folder, keep=[*local, *received])

    def allocates(self) -> bool:
        """Return True if a copy has no memory yet."""
        return len(self._memory) < len(self._files) * len(GENERATIONS)

    def count_received(self, rank: int) -> int:
        """Return the number of ranks whose copies the host of `rank` keeps."""
        local = next(ranks for ranks in self.hosts if rank in ranks)
        return sum(find_target(other, self.hosts) in local for ranks in self.hosts for other in ranks)

    def allocate(self, announcements: Sequence[Announcement], kept: SnapshotVersion | None) -> None:
        """Prepare memory for the copies that the other ranks will send. Raises OSError."""
        for rank in self._files:
            announcement = announcements[rank]
            self._generations[rank] = choose_generation(announcement.complete, kept)
            self._memory_of(rank, announcement.size)

    def _memory_of(self, rank: int, size: int) -> torch.Tensor:
        """Return the memory for the copy of `rank`, anew if its size has changed."""
        key = rank, self._generations[rank]
        memory = self._memory.get(key)
        if memory is None or len(memory) != size:
            self._memory.pop(key, None)
            memory = self._memory[key] = view_bytes(self._files[rank][key[1]].allocate(size), size)
        return memory

    def exchange(self, header: SnapshotHeader, content: bytes, data: torch.Tensor, start: int) -> None:
        """Send the snapshot whose bytes are `data`, from `start` on, and receive those of others.

        Raises OSError if there is no memory for another size than that of the announcement.
        """
        # Three rounds, because a receiver must know the size of what it receives: lengths, then the header and the
        # description of the tensors, then the tensors. With a scheduler's update only the tensors from `start` on are
        # sent; those before are in the copy already.
        record = torch.frombuffer(bytearray(pickle.dumps((header, content))), dtype=torch.uint8)
        lengths = {rank: torch.zeros(3, dtype=torch.int64, device="cpu") for rank in self._files}
        self._transfer(torch.tensor([len(record), start, len(data)], device="cpu"), lengths)
        records = {
            rank: torch.empty(int(length[0]), dtype=torch.uint8, device="cpu") for rank, length in lengths.items()
        }
        self._transfer(record, records)
        files = {rank: self._files[rank][self._generations[rank]] for rank in self._files}
        # The order is that of a rank's own snapshot: invalid, data, valid. If the sender's host is lost in the middle,
        # this generation has no header, and the other one is complete.
        for file in files.values():
            file.invalidate()
        parts = {rank: self._memory_of(rank, int(length[2]))[int(length[1]) :] for rank, length in lengths.items()}
        self._transfer(data[start:], parts)
        for rank, file in files.items():
            file.commit(*pickle.loads(records[rank].numpy().tobytes()))

    def _transfer(self, sent: torch.Tensor, received: dict[int, torch.Tensor]) -> None:
        transfer([] if self._target is None else [(self._target, sent)], list(received.items()))

    def remove(self) -> None:
        """Remove the copies that this rank keeps."""
        self._memory.clear()
        for files in self._files.values():
            for file in files:
                file.remove()


def fetch_missing(place: SnapshotPlace, version: SnapshotVersion) -> str:
    """Send `version` to the ranks on whose hosts it is not, from hosts that have it. A collective.

    Returns the reason if a rank's snapshot is on no host any more; empty otherwise.
    """
    ranks = range(place.world_size)
    headers = snapshot_files.read_headers(place.folder, ranks)
    # All ranks compute the same list of transfers from the same gathered holdings, so that sends and receives match
    # without a further message. They are made one after the other: only the ranks of a lost host need one.
    present = [rank for rank in ranks if version in [header.version for header in headers[rank]]]
    holdings = gather_objects(present)
    for rank in ranks:
        if rank in holdings[rank]:
            continue
        source = next((holder for holder in ranks if rank in holdings[holder]), None)
        if source is None:
            return f"the snapshot of rank {rank} is on no host any more"
        if place.rank == source:
            _send(place, version, rank)
        elif place.rank == rank:
            _receive(place, version, source)
    return ""


def _send(place: SnapshotPlace, version: SnapshotVersion, rank: int) -> None:
    for generation in GENERATIONS:
        file = SnapshotFile(place.folder, rank, generation)
        if (found := file.read(version)) is not None:
            header, (content, data) = snapshot_files.read_header(file.header), found
            record = torch.frombuffer(bytearray(pickle.dumps((header, content))), dtype=torch.uint8)
            transfer([(rank, torch.tensor([len(record), len(data)], device="cpu"))], [])
            transfer([(rank, record)], [])
            transfer([(rank, view_bytes(data, len(data)))], [])
            return


def _receive(place: SnapshotPlace, version: SnapshotVersion, source: int) -> None:
    lengths = torch.zeros(2, dtype=torch.int64, device="cpu")
    transfer([], [(source, lengths)])
    record = torch.empty(int(lengths[0]), dtype=torch.uint8, device="cpu")
    transfer([], [(source, record)])
    file = SnapshotFile(place.folder, place.rank, GENERATIONS[0])
    size = int(lengths[1])
    transfer([], [(source, view_bytes(file.allocate(size), size))])
    header, content = pickle.loads(record.numpy().tobytes())
    assert header.version == version
    file.commit(header, content)


def transfer(sent: Sequence[tuple[int, torch.Tensor]], received: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Send tensors of one dimension to ranks, and fill others by what ranks send."""
    # In parts of at most `_AT_ONCE` bytes, since a backend without support for the CPU needs a buffer on the device for
    # every part. All parts of one round travel together, so that two hosts that send to each other do not wait for each
    # other.
    device = control_device()
    for start in range(0, max((len(tensor) for _, tensor in [*sent, *received]), default=0), _AT_ONCE):
        operations = [
            dist.P2POp(dist.isend, tensor[start : start + _AT_ONCE].to(device), rank, tag=_TAG)
            for rank, tensor in sent
            if start < len(tensor)
        ]
        parts = []
        for rank, tensor in received:
            if start < len(tensor):
                part = tensor[start : start + _AT_ONCE]
                buffer = part if device.type == "cpu" else torch.empty_like(part, device=device)
                parts.append((part, buffer))
                operations.append(dist.P2POp(dist.irecv, buffer, rank, tag=_TAG))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for part, buffer in parts:
            if buffer is not part:
                part.copy_(buffer)


def view_bytes(memory: mmap.mmap, size: int) -> torch.Tensor:
    """Return `size` bytes of a mapping as a tensor."""
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]
