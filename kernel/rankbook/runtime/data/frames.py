"""Wire format of dispatched batches: pickle a batch into one message, with large tensors out of band.

Layout of a frame (little-endian): `_HEADER` (frame length, pickle length, number of buffers), `_SHARED` (slot of shared
memory, or an offer of it), the sizes of all buffers (uint64), the pickle, and the small buffers, aligned to 64 bytes.
Buffers of `LARGE` bytes or more are not in the frame. They follow as separate messages, unless the frame says in which
slot of the shared memory (slots.py) all of them are.

Frame size. A receiver has to know the length of a message in advance. Both sides start with a short frame, and then
expect the size of the previous frame, rounded up (`next_capacity`); so in the steady state a small batch is one
message. The remainder of a longer frame follows in a second message.

`BufferPool` provides the memory for large received buffers, and reuses it once all tensors that view it are gone.
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
"""Size in bytes from which a buffer is a separate message, since copying it into the frame would take longer."""

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
        """Bytes of the frame and the large buffers."""
        return self.frame.numel() + sum(buffer.numel() for buffer in self.large)

    def again(self) -> BatchFrame:
        """Return a copy for another receiver. The copy has its own header and shares the large buffers."""
        return BatchFrame(self.frame.clone(), self.large)

    def say(self, slot: int | None, offer: SlotOffer = NO_OFFER) -> None:
        """Write into the header that the large buffers are in `slot` and do not follow, or a memory offer."""
        _SHARED.pack_into(self.frame.numpy().data, _HEADER.size, -1 if slot is None else slot, *offer)
        if slot is not None:
            self.large = []

    def post(self, send: Send, capacity: int) -> tuple[list[Any], int]:
        """Send to a receiver that expects `capacity` bytes; return what `send` returned, and the next capacity."""
        length = self.frame.numel()
        if length < capacity:
            frame = torch.empty(capacity, dtype=torch.uint8)
            frame[:length] = self.frame
            sent = [send(frame)]
        else:
            sent = [send(self.frame[:capacity])]
            if length > capacity:
                sent.append(send(self.frame[capacity:]))
        sent += [send(buffer) for buffer in self.large]
        return sent, next_capacity(length)


def next_capacity(length: int) -> int:
    """Return the frame size that the receiver expects after a frame of `length` bytes."""
    return max(_SHORTEST, -(-length // 1024) * 1024)


FIRST_CAPACITY = _SHORTEST


class _FramePickler(pickle.Pickler):
    """Pickler that takes the memory of plain CPU tensors, and other out-of-band buffers, out of the pickle."""

    def reducer_override(self, thing: Any) -> Any:  # noqa: ANN401 - as pickle's
        if type(thing) is not torch.Tensor or thing.layout is not torch.strided or thing.requires_grad:
            return NotImplemented
        if thing.is_quantized or thing.is_conj() or thing.is_neg() or thing.device.type == "meta":
            return NotImplemented
        tensor = thing.cpu().contiguous()
        if not tensor.numel():
            return _no_values, (tensor.dtype, tuple(tensor.shape))
        flat = tensor if tensor.dtype in _KNOWN_TO_NUMPY else tensor.reshape(-1).view(torch.uint8)
        return _tensor, (pickle.PickleBuffer(flat.numpy().data), tensor.dtype, tuple(tensor.shape))


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:  # noqa: ANN401 - a buffer
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def _no_values(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def pack(thing: Any) -> BatchFrame:  # noqa: ANN401 - anything that can be pickled
    """Pack any picklable object into a frame. Raises what pickling raises."""
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    _FramePickler(stream, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw())).dump(thing)
    body = stream.getbuffer()
    at = _START + 8 * len(buffers) + len(body)
    places: list[tuple[int, memoryview]] = []
    large: list[torch.Tensor] = []
    sizes = []
    for view in buffers:
        sizes.append(view.nbytes)
        if view.nbytes >= LARGE:
            large.append(_as_tensor(view))
            continue
        at = -(-at // _ALIGNED) * _ALIGNED
        places.append((at, view))
        at += view.nbytes
    frame = torch.empty(at, dtype=torch.uint8)
    memory = frame.numpy().data
    _HEADER.pack_into(memory, 0, at, len(body), len(buffers))
    _SHARED.pack_into(memory, _HEADER.size, -1, *NO_OFFER)
    struct.pack_into(f"<{len(sizes)}Q", memory, _START, *sizes)
    start = _START + 8 * len(sizes)
    memory[start : start + len(body)] = body
    for place, view in places:
        memory[place : place + view.nbytes] = view
    return BatchFrame(frame, large)


def _as_tensor(view: memoryview) -> torch.Tensor:
    if view.readonly:  # torch does not accept read-only memory
        return torch.frombuffer(bytearray(view), dtype=torch.uint8)
    return torch.frombuffer(view, dtype=torch.uint8)


class FrameReader:
    """Receiving side: unpack frames into pooled memory or from an opened shared memory."""

    def __init__(self) -> None:
        self.lent = BufferPool()
        self.opened: OpenedSlot | None = None

    def unpack(self, receive: Callable[[torch.Tensor], Any], capacity: int) -> tuple[Any, int]:
        """Receive one frame by calling `receive`, which fills a tensor; return its content and the next capacity."""
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
                array = self.lent.take(size)
                buffers.append(array.data)
                large.append(torch.from_numpy(array))
                continue
            at = -(-at // _ALIGNED) * _ALIGNED
            buffers.append(memory[at : at + size])
            at += size
        self._fill(large, memory, receive)
        return pickle.loads(memory[start : start + body], buffers=buffers), next_capacity(length)

    def _fill(self, large: list[torch.Tensor], memory: Any, receive: Callable[[torch.Tensor], Any]) -> None:  # noqa: ANN401
        slot, *fields = _SHARED.unpack_from(memory, _HEADER.size)
        if slot >= 0:
            assert self.opened is not None, "rank 0 fills no memory before it is opened"
            self.opened.empty(slot, large)
        else:
            for buffer in large:
                receive(buffer)
        offer = SlotOffer(*fields)
        if offer != NO_OFFER:
            try:
                self.opened = OpenedSlot(offer)
            except OSError:  # for example in another container: rank 0 notices it, and keeps sending messages
                self.opened = None


_MOST_KEPT = 16
_ROUNDED = 1 << 16


class BufferPool:
    """Pool of receive buffers, reused after the last view is freed."""

    def __init__(self) -> None:
        self._free: list[Any] = []

    def take(self, size: int) -> Any:  # noqa: ANN401 - a numpy array, uint8[size]
        """Return a uint8 array of `size` bytes.

        Its memory returns to the pool once no tensor, array or view of it is left.
        """
        fitting = [(array.nbytes, at) for at, array in enumerate(self._free) if size <= array.nbytes <= 2 * size]
        if fitting:
            piece = self._free.pop(min(fitting)[1])
        else:
            if len(self._free) >= _MOST_KEPT:  # the sizes in demand have changed
                self._free.clear()
            piece = np.empty(max(1, -(-size // _ROUNDED)) * _ROUNDED, dtype=np.uint8)
        lease = np.frombuffer(piece.data, dtype=np.uint8)  # views keep the lease alive, not the piece
        weakref.finalize(lease, _take_back, self._free, piece).atexit = False
        return lease[:size]


def _take_back(free: list[Any], piece: Any) -> None:  # noqa: ANN401 - a numpy array
    """Return memory to the pool. Runs in the thread that frees the last view, so it only appends to the list."""
    if len(free) < _MOST_KEPT:
        free.append(piece)
