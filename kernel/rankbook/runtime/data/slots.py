"""Shared memory through which one rank hands another one of the same host large buffers.

Owns: the memory, and who may write where and when. Refuses: a name in the file system, and to wait for anybody. The
memory is known by a descriptor alone, so the kernel frees it once the last process that has it open has ended, however
it ended. Where there is no such memory, and between hosts, buffers travel as messages.

One rank fills slots (`SlotRing`), the other one empties them (`OpenedSlot`). Which slot has the buffers, and where the
memory is (`SlotOffer`), travels with the ranks' messages. A slot counts how often it was emptied; until that equals how
often it was filled nobody writes to it. Who empties copies: nothing that a person is given is ever overwritten.
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
"""One on its way, one that is being emptied, one that is being filled."""
MOST_BYTES = 1 << 27
"""The largest slot; what is larger travels as messages."""

_TOKEN = 16
_OPENED = _TOKEN  # where the receiver says that it has opened the memory
_EMPTIED = _OPENED + 8  # and how often it has emptied each slot
_HEAD = mmap.PAGESIZE
_COUNTS = struct.Struct(f"<{COUNT}Q")
_NUMBER = struct.Struct("<Q")
_LOADS_TO_OPEN = 6
_MEGABYTE = 1 << 20
_ALIGNED = 64


class SlotOffer(NamedTuple):
    """Where the memory is: the process, its descriptor, the bytes of a slot, and the bytes that it begins with."""

    process: int
    descriptor: int
    capacity: int
    token: bytes


NO_OFFER = SlotOffer(0, 0, 0, bytes(_TOKEN))


@cache
def host_key() -> bytes:
    """16 bytes that are the same for processes which can open each other's descriptors; zeros where nobody can."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        inside = Path("/proc/self/ns/pid").readlink()
    except OSError:  # no Linux, or no /proc
        return bytes(16)
    if not hasattr(os, "memfd_create"):
        return bytes(16)
    return blake2b(f"{boot} {inside} {os.getuid()}".encode(), digest_size=16).digest()


class SlotRing:
    """The filling side. Raises OSError where the host gives no such memory."""

    def __init__(self, capacity: int) -> None:
        self.capacity = -(-(capacity + capacity // 4) // _MEGABYTE) * _MEGABYTE  # the next batch may be a bit larger
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
        """Whether the other side has opened the memory."""
        return os.pread(self._descriptor, 1, _OPENED) != b"\0"

    def hopeless(self) -> bool:
        """Whether the other side had time to open the memory, and has not."""
        self._loads += 1
        return self._loads > _LOADS_TO_OPEN and not self.opened()

    def all_free(self) -> None:
        """What was filled is not read any more, for the other side has begun something new."""
        self._filled = self._emptied()
        self._loads = 0

    def begin(self) -> None:
        """What room was given so far is not filled in any more."""
        self._reserved = None

    def room(self, size: int) -> torch.Tensor | None:
        """Memory of `size` bytes, behind the last that was asked for, in a slot that nobody reads; None: there is none.

        The next `fill` finds there what was written to it.
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
        """The slot that now has uint8 `buffers`, one after the other; None if they do not fit, or none is free."""
        reserved, self._reserved = self._reserved, None
        places, end = _places([each.numel() for each in buffers])
        if end > self.capacity:
            return None
        if reserved is not None:
            at = self._memory.data_ptr() + _HEAD + reserved * self.capacity
            if [each.data_ptr() - at for each in buffers] == places:
                self._filled[reserved] += 1
                return reserved
        free = [each for each in self._free() if each != reserved]
        if not free:
            return None
        at = _HEAD + free[0] * self.capacity
        for each, place in zip(buffers, places, strict=True):
            self._memory[at + place : at + place + each.numel()].copy_(each)
        self._filled[free[0]] += 1
        return free[0]

    def outside(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`buffers` that `fill` did not take, in memory that is not used again while they are sent otherwise."""
        start, end = self._memory.data_ptr(), self._memory.data_ptr() + self._memory.numel()
        return [each.clone() if start <= each.data_ptr() < end else each for each in buffers]

    def _free(self) -> list[int]:
        return [
            at for at, (ours, theirs) in enumerate(zip(self._filled, self._emptied(), strict=True)) if ours == theirs
        ]

    def _emptied(self) -> list[int]:
        return list(_COUNTS.unpack(os.pread(self._descriptor, _COUNTS.size, _EMPTIED)))


class OpenedSlot:
    """The emptying side. Raises OSError if the memory of the offer cannot be opened from here."""

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
        """Copy what is in `slot` to uint8 tensors `into`, and free it."""
        at = _HEAD + slot * self._capacity
        for each, place in zip(into, _places([each.numel() for each in into])[0], strict=True):
            each.copy_(self._memory[at + place : at + place + each.numel()])
        place = _EMPTIED + slot * _NUMBER.size
        (count,) = _NUMBER.unpack(os.pread(self._descriptor, _NUMBER.size, place))
        os.pwrite(self._descriptor, _NUMBER.pack(count + 1), place)  # a system call: no reading above comes after it


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where in a slot each buffer begins, and where the last one ends."""
    places, end = [], 0
    for size in sizes:
        places.append(_aligned(end))
        end = places[-1] + size
    return places, end


def _aligned(at: int) -> int:
    return -(-at // _ALIGNED) * _ALIGNED
