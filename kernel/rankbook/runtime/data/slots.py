"""Shared memory for large buffers between two ranks on the same host.

One rank fills slots (`SlotRing`), the other empties them (`OpenedSlot`). The memory is a memfd, known by a file
descriptor alone (`/proc/<pid>/fd/<fd>`), so the kernel frees it when the last process that has it open ends, however it
ends. If such memory is not available, and between hosts, buffers are sent as messages instead.

Layout: a head of one page, then `COUNT` slots of `capacity` bytes. The head holds a token of 16 bytes that identifies
the memory, a byte that the receiver sets once it has opened the memory, and per slot the number of times that it was
emptied.

Synchronization. The number of the filled slot travels in the frame of the batch (frames.py), and the sender counts how
often it has filled every slot. A slot is free when both counts are equal; only then the sender writes to it. Neither
side ever waits: if no slot is free, the buffers are sent as messages. The receiver copies the data out of the slot
before it increments the count, so no tensor given to the user is overwritten.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch

COUNT = 3
"""Number of slots: one in transit, one being emptied, one being filled."""
MOST_BYTES = 1 << 27
"""Maximum size of a slot in bytes; larger batches are sent as messages."""

_TOKEN = 16
_OPENED = _TOKEN  # set by the receiver once it has opened the memory
_EMPTIED = _OPENED + 8  # counts of emptied slots, written by the receiver
_HEAD = mmap.PAGESIZE
_COUNTS = struct.Struct(f"<{COUNT}Q")
_NUMBER = struct.Struct("<Q")
_LOADS_TO_OPEN = 6
_MEGABYTE = 1 << 20
_ALIGNED = 64


class SlotOffer(NamedTuple):
    """Description of the memory: process id, file descriptor, bytes per slot, and the token it begins with."""

    process: int
    descriptor: int
    capacity: int
    token: bytes


NO_OFFER = SlotOffer(0, 0, 0, bytes(_TOKEN))


@cache
def host_key() -> bytes:
    """Return 16 bytes that are equal for processes that can open one another's descriptors; zeros if none can.

    The key is a hash of the boot id, the PID namespace and the user id.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        inside = Path("/proc/self/ns/pid").readlink()
    except OSError:  # not Linux, or no /proc
        return bytes(16)
    if not hasattr(os, "memfd_create"):
        return bytes(16)
    return blake2b(f"{boot} {inside} {os.getuid()}".encode(), digest_size=16).digest()


class SlotRing:
    """Sending side of the shared memory. Raises OSError if the host does not provide it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = -(-(capacity + capacity // 4) // _MEGABYTE) * _MEGABYTE  # the next batch may be larger
        size = _HEAD + COUNT * self.capacity
        descriptor = os.memfd_create("rankbook-batches")
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, size)
        token = secrets.token_bytes(_TOKEN)
        os.pwrite(descriptor, token, 0)
        self.offer = SlotOffer(os.getpid(), descriptor, self.capacity, token)
        self._memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        self._filled = [0] * COUNT
        self._loads = 0
        self._reserved: int | None = None
        self._used = 0

    def opened(self) -> bool:
        """Return True if the receiver has opened the memory."""
        return os.pread(self._descriptor, 1, _OPENED) != b"\0"

    def hopeless(self) -> bool:
        """Return True if the receiver has had enough time to open the memory, and has not. Counts its calls."""
        self._loads += 1
        return self._loads > _LOADS_TO_OPEN and not self.opened()

    def all_free(self) -> None:
        """Mark all slots as free, because the receiver has started a new pass and reads none of them any more."""
        self._filled = self._emptied()
        self._loads = 0

    def begin(self) -> None:
        """Discard the current reservation."""
        self._reserved = None

    def room(self, size: int) -> torch.Tensor | None:
        """Reserve `size` bytes in a free slot, after the previous reservation; None if there is no room.

        If all buffers of the next `fill` lie in reserved memory in order, it does not copy them.
        """
        if self._reserved is None:
            free = self._free() if self.opened() else []
            if not free:
                return None
            self._reserved, self._used = free[0], 0
        start, end = self._used, self._used + size
        if end > self.capacity:
            return None
        self._used = _aligned(end)
        at = _HEAD + self._reserved * self.capacity
        return self._memory[at + start : at + end]

    def fill(self, buffers: Sequence[torch.Tensor]) -> int | None:
        """Put uint8 `buffers` into a slot, one after the other, and return its number.

        Returns None if they do not fit, or no slot is free.
        """
        reserved, self._reserved = self._reserved, None
        offsets, end = _places([buffer.numel() for buffer in buffers])
        if end > self.capacity:
            return None
        if reserved is not None:
            at = self._memory.data_ptr() + _HEAD + reserved * self.capacity
            if [buffer.data_ptr() - at for buffer in buffers] == offsets:
                self._filled[reserved] += 1
                return reserved
        free = [slot for slot in self._free() if slot != reserved]
        if not free:
            return None
        at = _HEAD + free[0] * self.capacity
        for buffer, offset in zip(buffers, offsets, strict=True):
            self._memory[at + offset : at + offset + buffer.numel()].copy_(buffer)
        self._filled[free[0]] += 1
        return free[0]

    def outside(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return `buffers` for sending as messages, with copies of those that lie in the shared memory."""
        start, end = self._memory.data_ptr(), self._memory.data_ptr() + self._memory.numel()
        return [buffer.clone() if start <= buffer.data_ptr() < end else buffer for buffer in buffers]

    def _free(self) -> list[int]:
        return [
            at
            for at, (filled, emptied) in enumerate(zip(self._filled, self._emptied(), strict=True))
            if filled == emptied
        ]

    def _emptied(self) -> list[int]:
        return list(_COUNTS.unpack(os.pread(self._descriptor, _COUNTS.size, _EMPTIED)))


class OpenedSlot:
    """Receiving side. Raises OSError if the offered memory cannot be opened from this process."""

    def __init__(self, offer: SlotOffer) -> None:
        self.token, self._capacity = offer.token, offer.capacity
        descriptor = os.open(f"/proc/{offer.process}/fd/{offer.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        if os.pread(descriptor, _TOKEN, 0) != offer.token:
            raise OSError(f"descriptor {offer.descriptor} of process {offer.process} is not what was offered")
        self._memory = torch.frombuffer(mmap.mmap(descriptor, _HEAD + COUNT * offer.capacity), dtype=torch.uint8)
        os.pwrite(descriptor, b"\1", _OPENED)

    def empty(self, slot: int, into: Sequence[torch.Tensor]) -> None:
        """Copy the content of `slot` to uint8 tensors `into`, and free the slot."""
        at = _HEAD + slot * self._capacity
        for buffer, offset in zip(into, _places([buffer.numel() for buffer in into])[0], strict=True):
            buffer.copy_(self._memory[at + offset : at + offset + buffer.numel()])
        place = _EMPTIED + slot * _NUMBER.size
        (count,) = _NUMBER.unpack(os.pread(self._descriptor, _NUMBER.size, place))
        os.pwrite(self._descriptor, _NUMBER.pack(count + 1), place)  # a system call, so the copies above are complete


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of every buffer in a slot, and the end of the last one."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(_aligned(end))
        end = offsets[-1] + size
    return offsets, end


def _aligned(at: int) -> int:
    return -(-at // _ALIGNED) * _ALIGNED
