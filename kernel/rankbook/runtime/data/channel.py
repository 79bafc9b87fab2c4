"""The ways between rank 0, which reads, and the others.

Owns: a pass's first message, and whether large buffers go through shared memory. Refuses: to know what is sent.

Each pass begins with a greeting to rank 0: which host the rank is on, and which memory it has open. So memory is used
again pass after pass, and never one that a lost rank had opened and its successor has not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rankbook.runtime.data.frames import FIRST_CAPACITY, Parcel, Unpacking
from rankbook.runtime.data.slots import MOST_BYTES, NO_OFFER, Slots, host_key

_TAG = 7411  # nobody else's messages between the same ranks
_KEY = 16
_NOWHERE = bytes(_KEY)


class Outbound:
    """Rank 0's end of the way to one other rank."""

    def __init__(self, rank: int, group: Any) -> None:  # noqa: ANN401 - a process group
        self._rank, self._group = rank, group
        self._capacity = FIRST_CAPACITY
        self._slots: Slots | None = None
        self._shares_host = False

    def begin(self) -> Callable[[], None]:
        """A pass begins. What is returned waits until the other side has begun it too."""
        greeting = torch.empty(2 * _KEY, dtype=torch.uint8)
        work = dist.irecv(greeting, src=self._rank, group=self._group, tag=_TAG)
        self._capacity = FIRST_CAPACITY
        return partial(self._greeted, work, greeting)

    def _greeted(self, work: Any, told: torch.Tensor) -> None:  # noqa: ANN401 - c10d's
        work.wait()
        greeting = told.numpy().tobytes()
        key, token = greeting[:_KEY], greeting[_KEY:]
        self._shares_host = key == host_key() != _NOWHERE
        if self._slots is not None and self._slots.offer.token == token:
            self._slots.all_free()
        else:
            self._slots = None

    def begin_parcel(self) -> None:
        """What comes now belongs to another parcel."""
        if self._slots is not None:
            self._slots.begin()

    def room(self, size: int) -> torch.Tensor | None:
        """Shared memory for a large tensor that this rank alone is to get; None: it may lie anywhere."""
        return None if self._slots is None else self._slots.room(size)

    def load(self, parcel: Parcel) -> None:
        """Put the large buffers of `parcel` into shared memory where that can be, so that they need not be kept."""
        needed = sum(each.numel() for each in parcel.large)
        if not needed or not self._shares_host or needed > MOST_BYTES:
            return
        if self._slots is None or needed > self._slots.capacity:
            try:
                self._slots = Slots(needed)
            except OSError:  # no such memory here
                self._shares_host = False
                return
            parcel.say(None, self._slots.offer)
        elif self._slots.opened():
            slot = self._slots.fill(parcel.large)
            if slot is None:
                parcel.large = self._slots.outside(parcel.large)
            else:
                parcel.say(slot)
        elif self._slots.hopeless():
            self._shares_host, self._slots = False, None

    def post(self, parcel: Parcel) -> list[Any]:
        """Begin to send; what is returned is to be waited for."""
        send = partial(dist.isend, dst=self._rank, group=self._group, tag=_TAG)
        posted, self._capacity = parcel.post(send, self._capacity)
        return posted


class Inbound:
    """Another rank's end of the way from rank 0."""

    def __init__(self, group: Any) -> None:  # noqa: ANN401 - a process group
        self._group = group
        self._unpacking = Unpacking()
        self._capacity = FIRST_CAPACITY

    def begin(self) -> None:
        """A pass begins; waits until rank 0 has begun it too."""
        token = (self._unpacking.opened or NO_OFFER).token
        greeting = torch.frombuffer(bytearray(host_key() + token), dtype=torch.uint8)
        dist.send(greeting, dst=0, group=self._group, tag=_TAG)
        self._capacity = FIRST_CAPACITY

    def receive(self) -> Any:  # noqa: ANN401 - what was packed
        """The content of the next parcel."""
        take = partial(dist.recv, src=0, group=self._group, tag=_TAG)
        content, self._capacity = self._unpacking.unpack(take, self._capacity)
        return content
