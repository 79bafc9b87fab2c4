"""Write a tensor or an object as a zip file that `torch.load` reads.

`make_envelope` returns the bytes before and after a tensor's data, so that the data is written from where it lies;
`object_blob` returns an object as a whole blob.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

NEVER = frozenset({"collections.defaultdict", "collections.deque"})
"""Classes that torch's restricted unpickler cannot fill, even when they are allowed."""

# Member of the zip with the bytes of the only storage.
_RECORD = b"archive/data/0"
_CENTRAL = b"PK\x01\x02"
_DESCRIPTOR = b"PK\x07\x08"
_CENTRAL_CRC, _CENTRAL_NAME, _CENTRAL_HEAD = 16, 28, 46  # bytes into an entry of the central directory (APPNOTE 4.3.12)


class Envelope(NamedTuple):
    """The bytes before and after a tensor's data in a file of `torch.save`."""

    before: bytes
    after: bytes
    checksums: tuple[int, ...]
    """Positions in `after` of the CRC-32 of the data."""

    def ending(self, checksum: int) -> bytes:
        """Return `after` with the CRC-32 of the data filled in."""
        ending = bytearray(self.after)
        for at in self.checksums:
            struct.pack_into("<I", ending, at, checksum)
        return bytes(ending)


class _Sink:
    """Seekable file that records what is written and where, so that the skipped tensor data shows as a gap."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, bytes]] = []
        self.at = 0

    # The methods that torch's zip writer calls on a file object.
    def write(self, data: Any) -> int:  # noqa: ANN401 - any buffer
        content = bytes(data)
        self.writes.append((self.at, content))
        self.at += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset if whence == io.SEEK_SET else self.at + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def flush(self) -> None:
        pass


@lru_cache(maxsize=4096)
def make_envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> Envelope:
    """Return the envelope of a contiguous, non-empty CPU tensor.

    Cached by dtype and shape. Saves an uninitialized tensor with `torch.serialization.skip_data`, which writes
    everything but the tensor's data; the gap that it leaves separates `before` from `after`.
    """
    tensor = torch.empty(shape, dtype=dtype)  # uninitialized, and never read
    # What torch.save writes with `skip_data`: headers, data.pkl and so on up to the data; then it seeks over the
    # data; then the data descriptor, the last members and the directory. All positions and lengths are as in a real
    # file. Only the CRC-32 of the data is missing; `ending` fills it in.
    size = tensor.numel() * tensor.element_size()
    sink = _Sink()
    with torch.serialization.skip_data():
        torch.save(tensor, sink)  # type: ignore[arg-type]  # has all methods that are called
    before, after = bytearray(), bytearray()
    in_tail = False
    for at, part in sink.writes:
        # Writes without a gap belong to the beginning. The first write after the gap, and all later ones, belong to the
        # end.
        if not in_tail and at == len(before):
            before += part
            continue
        in_tail = True
        if at != len(before) + size + len(after):
            raise RuntimeError(f"torch.save left {at - len(before)} bytes for data of {size}")
        after += part
    return Envelope(bytes(before), bytes(after), tuple(_checksum_positions(bytes(after))))


def _checksum_positions(after: bytes) -> Iterator[int]:
    # The zip stores a member's CRC-32 twice: in the data descriptor right after the data, if there is one, and in the
    # member's entry of the central directory.
    if after.startswith(_DESCRIPTOR):
        yield len(_DESCRIPTOR)
    at = after.find(_CENTRAL)
    while at >= 0:
        # `find` may hit the signature inside of other bytes. The name that follows decides.
        (length,) = struct.unpack_from("<H", after, at + _CENTRAL_NAME)
        if after[at + _CENTRAL_HEAD : at + _CENTRAL_HEAD + length] == _RECORD:
            yield at + _CENTRAL_CRC
        at = after.find(_CENTRAL, at + 4)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order.

    For a contiguous CPU tensor this is its own memory; otherwise a copy.
    """
    # A lazy conjugate or negative has the original values in memory. Resolving makes a copy with the right ones.
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    row = plain.as_strided((plain.numel(),), (1,))  # view() needs a last stride of 1 at any size
    return row.view(torch.uint8).numpy().data


def object_blob(value: object) -> bytes:
    """Serialize an object as Megatron-Core does: `torch.save` of a list of one element."""
    stream = io.BytesIO()
    torch.save([value], stream)
    return stream.getvalue()


def unsafe_globals(blob: bytes | bytearray) -> list[str]:
    """Return the globals of an object's blob that neither torch nor the active `safe_globals` allows."""
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(blob)))
