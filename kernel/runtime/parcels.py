"""Batches on their way from one rank to another.

Owns: how a batch is packed into one message, with large tensors beside it unpacked. Refuses: to know who sends what.

A parcel is a frame and perhaps large buffers. The frame has the pickle and all small buffers; the receiver must know
how long it is, so both sides begin with a short one and then go by the size of the frame before: in the steady state a
small batch is one message. What does not fit follows in a second one.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LARGE = 1 << 16
"""Bytes from which on a buffer is a message of its own: copying it into the frame would cost more."""

_ALIGNED = 64
_SHORTEST = 4096
_HEADER = struct.Struct("<QQQ")  # the frame's length, the pickle's, the number of buffers

Send = Callable[[torch.Tensor], Any]


@dataclass
class Parcel:
    """A packed batch: the frame and the large buffers, all uint8."""

    frame: torch.Tensor
    large: list[torch.Tensor]

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


class _Pickler(pickle.Pickler):
    """Takes the memory of plain CPU tensors, and of whatever else offers it, out of the pickle."""

    def reducer_override(self, thing: Any) -> Any:  # noqa: ANN401 - as pickle's
        if type(thing) is not torch.Tensor or thing.layout is not torch.strided or thing.requires_grad:
            return NotImplemented
        if thing.is_quantized or thing.is_conj() or thing.is_neg() or thing.device.type == "meta":
            return NotImplemented
        flat = thing.cpu().contiguous().reshape(-1).view(torch.uint8) if thing.numel() else torch.empty(0).byte()
        return _tensor, (pickle.PickleBuffer(flat.numpy().data), thing.dtype, tuple(thing.shape))


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:  # noqa: ANN401 - a buffer
    view = memoryview(buffer)
    if not view.nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).reshape(shape)


def pack(thing: Any) -> Parcel:  # noqa: ANN401 - anything that can be pickled
    """Raises whatever pickling raises."""
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=lambda each: buffers.append(each.raw())).dump(thing)
    body = stream.getbuffer()
    at = _HEADER.size + 8 * len(buffers) + len(body)
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
    struct.pack_into(f"<{len(sizes)}Q", memory, _HEADER.size, *sizes)
    start = _HEADER.size + 8 * len(sizes)
    memory[start : start + len(body)] = body
    for place, each in places:
        memory[place : place + each.nbytes] = each
    return Parcel(frame, large)


def _as_tensor(view: memoryview) -> torch.Tensor:
    if view.readonly:  # somebody's bytes: torch takes no memory that cannot be written to
        return torch.frombuffer(bytearray(view), dtype=torch.uint8)
    return torch.frombuffer(view, dtype=torch.uint8)


def unpack(receive: Callable[[torch.Tensor], Any], capacity: int) -> tuple[Any, int]:
    """The next parcel's content, from `receive`, which fills a tensor; and the next capacity."""
    frame = torch.empty(capacity, dtype=torch.uint8)
    receive(frame)
    length, body, count = _HEADER.unpack_from(frame.numpy().data)
    if length > capacity:
        whole = torch.empty(length, dtype=torch.uint8)
        whole[:capacity] = frame
        receive(whole[capacity:])
        frame = whole
    memory = frame.numpy().data
    sizes = struct.unpack_from(f"<{count}Q", memory, _HEADER.size)
    start = _HEADER.size + 8 * count
    at = start + body
    buffers = []
    for size in sizes:
        if size >= LARGE:
            own = torch.empty(size, dtype=torch.uint8)
            receive(own)
            buffers.append(own.numpy().data)
            continue
        at = -(-at // _ALIGNED) * _ALIGNED
        buffers.append(memory[at : at + size])
        at += size
    return pickle.loads(memory[start : start + body], buffers=buffers), next_capacity(length)
