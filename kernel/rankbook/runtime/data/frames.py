"""Batches on their way from one rank to another.

Owns: how a batch is packed into one message, with large tensors beside it unpacked. Refuses: to know who sends what.

A parcel is a frame and perhaps large buffers. The frame has the pickle and all small buffers; the receiver must know
how long it is, so both sides begin with a short one and then go by the size of the frame before: in the steady state a
small batch is one message. What does not fit follows in a second one. A large buffer is a message of its own, unless
the frame says in which slot of a shared memory all of them are.

Memory for what arrives, lent again once nobody has it any more.
"""

from __future__ import annotations

import io
import pickle
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rankbook.runtime.data.slots import NO_OFFER, OpenedSlot, SlotOffer

LARGE = 1 << 16
"""Bytes from which on a buffer is a message of its own: copying it into the frame would cost more."""

_ALIGNED = 64
_SHORTEST = 4096
_HEADER = struct.Struct("<QQQ")  # the frame's length, the pickle's, the number of buffers
_SHARED = struct.Struct("<qQQQ16s")  # the slot that has the large buffers, -1 for none; an offer of shared memory
_START = _HEADER.size + _SHARED.size

_KNOWN_TO_NUMPY = {torch.float32, torch.float64, torch.float16, torch.bool, torch.uint8}
_KNOWN_TO_NUMPY |= {torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128}

Send = Callable[[torch.Tensor], Any]


@dataclass
class BatchFrame:
    """A packed batch: the frame and the large buffers, all uint8."""

    frame: torch.Tensor
    large: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Of the frame and the large buffers."""
        return self.frame.numel() + sum(each.numel() for each in self.large)

    def again(self) -> BatchFrame:
        """The same for another receiver, to whom something else may be said."""
        return BatchFrame(self.frame.clone(), self.large)

    def say(self, slot: int | None, offer: SlotOffer = NO_OFFER) -> None:
        """Write into the frame that the large buffers are in `slot` and do not follow; or an offer of memory."""
        _SHARED.pack_into(self.frame.numpy().data, _HEADER.size, -1 if slot is None else slot, *offer)
        if slot is not None:
            self.large = []

    def post(self, send: Send, capacity: int) -> tuple[list[Any], int]:
        """Send to a receiver who expects a frame of `capacity` bytes; what `send` gave, and the next capacity."""
        length = self.frame.numel()
        if length < capacity:
            frame = torch.empty(capacity, dtype=torch.uint8)
            frame[:length] = self.frame
            sent = [send(frame)]
        else:
            sent = [send(self.frame[:capacity])]
            if length > capacity:
                sent.append(send(self.frame[capacity:]))
        sent += [send(each) for each in self.large]
        return sent, next_capacity(length)


def next_capacity(length: int) -> int:
    """How long a frame the receiver of one of `length` bytes expects next."""
    return max(_SHORTEST, -(-length // 1024) * 1024)


FIRST_CAPACITY = _SHORTEST


class _FramePickler(pickle.Pickler):
    """Takes the memory of plain CPU tensors, and of whatever else offers it, out of the pickle."""

    def reducer_override(self, thing: Any) -> Any:  # noqa: ANN401 - as pickle's
        if type(thing) is not torch.Tensor or thing.layout is not torch.strided or thing.requires_grad:
            return NotImplemented
        if thing.is_quantized or thing.is_conj() or thing.is_neg() or thing.device.type == "meta":
            return NotImplemented
        here = thing.cpu().contiguous()
        if not here.numel():
            return _no_values, (here.dtype, tuple(here.shape))
        flat = here if here.dtype in _KNOWN_TO_NUMPY else here.reshape(-1).view(torch.uint8)
        return _tensor, (pickle.PickleBuffer(flat.numpy().data), here.dtype, tuple(here.shape))


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:  # noqa: ANN401 - a buffer
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def _no_values(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def pack(thing: Any) -> BatchFrame:  # noqa: ANN401 - anything that can be pickled
    """Raises whatever pickling raises."""
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    _FramePickler(stream, protocol=5, buffer_callback=lambda each: buffers.append(each.raw())).dump(thing)
    body = stream.getbuffer()
    at = _START + 8 * len(buffers) + len(body)
    places: list[tuple[int, memoryview]] = []
    large: list[torch.Tensor] = []
    sizes = []
    for each in buffers:
        sizes.append(each.nbytes)
        if each.nbytes >= LARGE:
            large.append(_as_tensor(each))
            continue
        at = -(-at // _ALIGNED) * _ALIGNED
        places.append((at, each))
        at += each.nbytes
    frame = torch.empty(at, dtype=torch.uint8)
    memory = frame.numpy().data
    _HEADER.pack_into(memory, 0, at, len(body), len(buffers))
    _SHARED.pack_into(memory, _HEADER.size, -1, *NO_OFFER)
    struct.pack_into(f"<{len(sizes)}Q", memory, _START, *sizes)
    start = _START + 8 * len(sizes)
    memory[start : start + len(body)] = body
    for place, each in places:
        memory[place : place + each.nbytes] = each
    return BatchFrame(frame, large)


def _as_tensor(view: memoryview) -> torch.Tensor:
    if view.readonly:  # somebody's bytes: torch takes no memory that cannot be written to
        return torch.frombuffer(bytearray(view), dtype=torch.uint8)
    return torch.frombuffer(view, dtype=torch.uint8)


class FrameReader:
    """The receiving side: the memory that large buffers come in, and the one that they are lent."""

    def __init__(self) -> None:
        self.lent = BufferPool()
        self.opened: OpenedSlot | None = None

    def unpack(self, receive: Callable[[torch.Tensor], Any], capacity: int) -> tuple[Any, int]:
        """The next parcel's content, from `receive`, which fills a tensor; and the next capacity."""
        frame = torch.empty(capacity, dtype=torch.uint8)
        receive(frame)
        length, body, count = _HEADER.unpack_from(frame.numpy().data, 0)
        if length > capacity:
            whole = torch.empty(length, dtype=torch.uint8)
            whole[:capacity] = frame
            receive(whole[capacity:])
            frame = whole
        memory = frame.numpy().data
        sizes = struct.unpack_from(f"<{count}Q", memory, _START)
        start = _START + 8 * count
        at = start + body
        buffers: list[Any] = []
        large: list[torch.Tensor] = []
        for size in sizes:
            if size >= LARGE:
                own = self.lent.take(size)
                buffers.append(own.data)
                large.append(torch.from_numpy(own))
                continue
            at = -(-at // _ALIGNED) * _ALIGNED
            buffers.append(memory[at : at + size])
            at += size
        self._fill(large, memory, receive)
        return pickle.loads(memory[start : start + body], buffers=buffers), next_capacity(length)

    def _fill(self, large: list[torch.Tensor], memory: Any, receive: Callable[[torch.Tensor], Any]) -> None:  # noqa: ANN401
        slot, *told = _SHARED.unpack_from(memory, _HEADER.size)
        if slot >= 0:
            assert self.opened is not None, "rank 0 fills no memory before it is opened"
            self.opened.empty(slot, large)
        else:
            for each in large:
                receive(each)
        offer = SlotOffer(*told)
        if offer != NO_OFFER:
            try:
                self.opened = OpenedSlot(offer)
            except OSError:  # as in a container of its own: rank 0 sees that it was not opened, and goes on as it did
                self.opened = None


_MOST_KEPT = 16
_ROUNDED = 1 << 16


class BufferPool:
    """Lends memory, and keeps some of what comes back."""

    def __init__(self) -> None:
        self._free: list[Any] = []

    def take(self, size: int) -> Any:  # noqa: ANN401 - a numpy array, uint8[size]
        """Memory of `size` bytes; it is free once no tensor, array or view of it is left."""
        fitting = [(each.nbytes, at) for at, each in enumerate(self._free) if size <= each.nbytes <= 2 * size]
        if fitting:
            piece = self._free.pop(min(fitting)[1])
        else:
            if len(self._free) >= _MOST_KEPT:  # of sizes that are not asked for any more
                self._free.clear()
            piece = np.empty(max(1, -(-size // _ROUNDED)) * _ROUNDED, dtype=np.uint8)
        lease = np.frombuffer(piece.data, dtype=np.uint8)  # each view, however far, holds this one and not the piece
        weakref.finalize(lease, _take_back, self._free, piece).atexit = False
        return lease[:size]


def _take_back(free: list[Any], piece: Any) -> None:  # noqa: ANN401 - a numpy array
    """In whichever thread the last view ended: the list only grows here, and at its end."""
    if len(free) < _MOST_KEPT:
        free.append(piece)
