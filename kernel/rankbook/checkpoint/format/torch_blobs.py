"""One chunk of a tensor as the bytes that `torch.load` reads, and one object as those.

Owns: the envelope that `torch.save` puts around a tensor's data, so that the data is written from where it lies, and
checked on its way. Refuses: files, and to know which chunk is whose.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

NEVER = frozenset({"collections.defaultdict", "collections.deque"})
"""What torch's restricted unpickler cannot fill, whatever is allowed."""

_RECORD = b"archive/data/0"
_CENTRAL = b"PK\x01\x02"
_DESCRIPTOR = b"PK\x07\x08"
_CENTRAL_CRC, _CENTRAL_NAME, _CENTRAL_HEAD = 16, 28, 46  # bytes into an entry of the central directory (APPNOTE 4.3.12)


class Envelope(NamedTuple):
    """What stands before and after a tensor's data in a file of `torch.save`."""

    before: bytes
    after: bytes
    checksums: tuple[int, ...]
    """Where in `after` the CRC-32 of the data stands."""

    def ending(self, checksum: int) -> bytes:
        """`after`, with the CRC-32 of the data in it."""
        made = bytearray(self.after)
        for at in self.checksums:
            struct.pack_into("<I", made, at, checksum)
        return bytes(made)


class _Sink:
    """A file that keeps what is written, and not what is left out."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytes]] = []
        self.at = 0

    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
        kept = bytes(data)
        self.parts.append((self.at, kept))
        self.at += len(kept)
        return len(kept)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset if whence == io.SEEK_SET else self.at + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def flush(self) -> None:
        pass


@lru_cache(maxsize=4096)
def envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> Envelope:
    """The envelope of a contiguous CPU tensor that is not empty."""
    tensor = torch.empty(shape, dtype=dtype)  # memory that nobody touches
    size = tensor.numel() * tensor.element_size()
    sink = _Sink()
    with torch.serialization.skip_data():
        torch.save(tensor, sink)  # type: ignore[arg-type]  # it has what is called
    before, after = bytearray(), bytearray()
    hole = False
    for at, part in sink.parts:
        if not hole and at == len(before):
            before += part
            continue
        hole = True
        if at != len(before) + size + len(after):
            raise RuntimeError(f"torch.save left {at - len(before)} bytes for data of {size}")
        after += part
    return Envelope(bytes(before), bytes(after), tuple(_places(bytes(after))))


def _places(after: bytes) -> Iterator[int]:
    if after.startswith(_DESCRIPTOR):
        yield len(_DESCRIPTOR)
    at = after.find(_CENTRAL)
    while at >= 0:
        (length,) = struct.unpack_from("<H", after, at + _CENTRAL_NAME)
        if after[at + _CENTRAL_HEAD : at + _CENTRAL_HEAD + length] == _RECORD:
            yield at + _CENTRAL_CRC
        at = after.find(_CENTRAL, at + 4)


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order: its own memory if it lies so on the CPU, a copy's if not."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    row = plain.as_strided((plain.numel(),), (1,))  # also where an axis of one element has another stride
    return row.view(torch.uint8).numpy().data


def object_blob(value: object) -> bytes:
    """An object as Megatron-Core stores it: a list of one."""
    stream = io.BytesIO()
    torch.save([value], stream)
    return stream.getvalue()


def unsafe(blob: bytes | bytearray) -> list[str]:
    """What an object's blob names that torch does not take for safe, and that no `safe_globals` allows now."""
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(blob)))
