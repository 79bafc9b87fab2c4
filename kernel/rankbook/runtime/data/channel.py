"""Point-to-point channel between two ranks: pickled objects, with large tensors and arrays beside the pickle.

Layout of a message. A receiver must know the length of a tensor before it arrives. So the first tensor of a message
always has `FIRST_BYTES` bytes, and a small batch is this one tensor. It is the beginning of the frame: header, sizes of
the large buffers (uint64), pickle. The remainder of a longer frame follows in a second tensor, and then every large
buffer in its own one, without a copy. Buffers below `LARGE` bytes are copied into the pickle, which takes less time
than one more tensor.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

FIRST_BYTES = 1 << 13
LARGE = 1 << 16

_TAG = 7411  # keeps these messages apart from others between the same ranks
_HEADER = struct.Struct("<2Q")  # bytes of the frame, number of large buffers


def send(message: Sequence[torch.Tensor], rank: int, group: Any) -> list[Any]:  # noqa: ANN401 - a process group
    """Start to send a packed message; return the works to wait for."""
    return [dist.isend(tensor, dst=rank, group=group, tag=_TAG) for tensor in message]


def receive(rank: int, group: Any) -> Any:  # noqa: ANN401 - what was packed
    """Wait for the next message from `rank`, and return its content."""
    return unpack(partial(dist.recv, src=rank, group=group, tag=_TAG))


def pack(content: object) -> list[torch.Tensor]:
    """Return the message with `content`, as uint8 tensors. Raises what pickling raises."""
    large: list[memoryview] = []

    # Pickle protocol 5: a callback that returns False takes a buffer out of the pickle, True leaves it in.
    def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes >= LARGE:
            large.append(memory)
        return memory.nbytes < LARGE

    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5, buffer_callback=keep_in_pickle)
    pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduce_tensor}
    pickler.dump(content)
    sizes = struct.pack(f"<{len(large)}Q", *(memory.nbytes for memory in large))
    length = _HEADER.size + len(sizes) + stream.tell()
    # A bytearray, because `torch.frombuffer` needs writable memory; the tensors below are views of it.
    frame = bytearray().join((_HEADER.pack(length, len(large)), sizes, stream.getbuffer()))
    # A short frame is filled up, as the receiver always waits for FIRST_BYTES bytes.
    first = torch.frombuffer(frame.ljust(FIRST_BYTES, b"\0"), dtype=torch.uint8)
    message = [first[:FIRST_BYTES], first[FIRST_BYTES:]] if length > FIRST_BYTES else [first]
    # torch refuses read-only memory, so that of a read-only array is copied
    return message + [
        torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8) for memory in large
    ]


def unpack(fill: Callable[[torch.Tensor], object]) -> Any:  # noqa: ANN401 - what was packed
    """Return the content of a message. `fill` receives the next tensor of it into the given one."""
    frame = torch.empty(FIRST_BYTES, dtype=torch.uint8)
    fill(frame)
    # The first tensor has arrived. It tells how much more there is.
    length, count = _HEADER.unpack_from(frame.numpy().data)
    if length > FIRST_BYTES:
        first, frame = frame, torch.empty(length, dtype=torch.uint8)
        frame[:FIRST_BYTES] = first
        fill(frame[FIRST_BYTES:])
    memory = frame.numpy().data
    buffers = []
    for size in struct.unpack_from(f"<{count}Q", memory, _HEADER.size):
        large = torch.empty(size, dtype=torch.uint8)
        fill(large)
        buffers.append(large.numpy().data)
    return pickle.loads(memory[_HEADER.size + 8 * count : length], buffers=buffers)


def _reduce_tensor(tensor: torch.Tensor) -> Any:  # noqa: ANN401 - as `__reduce_ex__`
    """Reduce a plain dense tensor to a buffer, which may leave the pickle, and any other tensor as torch does."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    # Only tensors that are completely described by dtype, shape and bytes. A lazily conjugated or negated tensor has
    # other bytes than values; attributes and gradients would be lost.
    if not is_dense or tensor.is_meta or tensor.is_conj() or tensor.is_neg() or tensor.requires_grad or tensor.__dict__:
        return tensor.__reduce_ex__(5)
    # `cpu()` and `contiguous()` return the tensor itself where possible, so most batches are not copied.
    memory = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return _restore_tensor, (pickle.PickleBuffer(memory), tensor.dtype, tuple(tensor.shape))


def _restore_tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:  # noqa: ANN401 - a buffer
    # `torch.frombuffer` refuses an empty buffer.
    if not len(memory):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
