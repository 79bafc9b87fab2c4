"""Write tensors as files of `torch.save`; read stored chunks into tensors, and verify their checksums on the way.

`make_envelope` returns the bytes before and after a tensor's data in a zip file that `torch.load` reads, so that the
data is written from where it lies; `object_blob` returns an object as a whole blob.

Reading decides which bytes of a chunk are read for a box of it, and copies them into the tensor; uses a few tens of
megabytes of memory at most.

A contiguous part of a chunk is read straight into the tensor's memory. Any other box is read in slabs (the bytes from a
slab's first to its last element) and copied from there. The manifest has a checksum per piece, so verification reads
whole pieces; pieces that two slabs share are read twice.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from rankbook.checkpoint.format.manifest import PIECE, Chunk, crc32, piece_bytes
from rankbook.checkpoint.load_plan import ChunkRead, ReadItem

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
    tensor = torch.empty(shape, dtype=dtype, device="cpu")  # uninitialized, and never read
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


SLAB_BYTES = 16 * 1024 * 1024
"""Bytes read at a time if the data cannot be read in place."""

ReadRange = Callable[[int, memoryview], int]
"""Callback that fills a buffer with the bytes from a file position on, and returns how many it read."""

# Integer dtypes by element size in bytes: a copy between equal dtypes may be done on any dtype of that size.
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ChunkDamage(Exception):
    """Raised for missing or changed bytes of a chunk; `what` describes them."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype with this name, for example "float32".

    Raises `ChunkDamage` for a name that this version of torch does not know.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ChunkDamage(f"has the dtype {name}, which this version of torch does not support")
    return dtype


def read_into(target: torch.Tensor, chunk: ChunkRead, item: ReadItem, read: ReadRange, check: bool) -> None:
    """Copy one box of a stored chunk into `target`, which has the box's shape.

    With `check`, verifies the pieces that hold the box. Raises `ChunkDamage`, and OSError as `read` does.
    """
    dtype = dtype_named(chunk.dtype)
    source = _Source(chunk.chunk, read, check)
    not_lazy = not (target.is_conj() or target.is_neg())  # no lazy conj or neg: memory holds the values themselves
    in_place = target.device.type == "cpu" and target.dtype == dtype and not_lazy
    if in_place and target.is_contiguous() and _is_row_major(chunk, item):
        source.read(chunk.span(item)[0], _bytes_of(target))
        return
    # The box is not contiguous in the file or in the target, or has another dtype or device: read slabs and copy.
    first, last = chunk.span(item)
    # Worst case: one wanted column of a chunk with very long rows. Then slabs bound the memory, and the bytes between
    # the wanted elements are read and thrown away: one sequential read is faster than a seek per element.
    # The buffer is reused by all slabs.
    size = min(last - first, max(SLAB_BYTES, chunk.itemsize))
    buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
    for slab in chunk.split(item, SLAB_BYTES):
        begin, end = chunk.span(slab)
        # A slab begins at its first element, so the strided view below starts at offset 0.
        scratch = buffer[: end - begin]
        source.read(begin, _bytes_of(scratch))
        into = target
        for axis, (at, origin) in enumerate(zip(slab.target, item.target, strict=True)):
            # `slab.target` counts from the origin of the whole tensor, `into` from that of this box.
            into = into.narrow(axis, at - origin, slab.shape[axis])
        _copy(into, scratch.view(dtype).as_strided(slab.shape, chunk.strides))


def verify_chunk(chunk: ChunkRead, read: ReadRange, scratch: memoryview) -> None:
    """Verify the checksums of the wanted boxes of a stored chunk, without keeping the data.

    Reads through the buffer `scratch`. Raises `ChunkDamage`, and OSError as `read` does.
    """
    stored = chunk.chunk
    if not envelope_matches(stored, read):
        raise ChunkDamage("the bytes around its data do not match their checksum")
    if len(stored.pieces) == 1 and stored.nbytes > PIECE:  # written by another program: a single checksum
        if not data_matches(stored, read):
            raise ChunkDamage("its data does not match its checksum")
        return
    # Example with pieces of 4 bytes and boxes that span the bytes [1, 6) and [5, 7): the first box verifies the
    # pieces [0, 4) and [4, 8), `done` is 6, and of the second box only [6, 7) is left, whose piece is read again.
    # The cost of that is bounded: one piece per box.
    source, done = _Source(stored, read, check=True), 0
    for first, last in sorted(chunk.span(item) for item in chunk.reads):
        # Boxes may overlap in bytes. What was verified for an earlier one is not read again.
        if last > done:
            source.verify(max(first, done), last, scratch)
            done = last


def _is_row_major(chunk: ChunkRead, item: ReadItem) -> bool:
    """Return True if the box is contiguous in the chunk's data, in row-major order."""
    expected = 1
    for size, step in zip(reversed(item.shape), reversed(chunk.strides), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    lazy_or_complex = target.is_complex() or target.is_neg()
    if target.dtype == source.dtype and not lazy_or_complex:  # view as integers: copy_ does not support every dtype
        plain = _SAME_SIZE[target.dtype.itemsize]
        target, source = target.view(plain), source.view(plain)
    target.copy_(source)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    row = tensor.detach().as_strided((tensor.numel(),), (1,))  # view() needs a last stride of 1 at any size
    return row.view(torch.uint8).numpy().data


class _Source:
    """The data of a chunk, read by byte range and verified piece by piece if `check` is set."""

    def __init__(self, chunk: Chunk, read: ReadRange, check: bool) -> None:
        self._chunk = chunk
        self._read = read
        self._check = check

    def read(self, first: int, into: memoryview) -> None:
        """Fill `into` with the data from byte `first` on.

        Whole pieces are read into place and verified there, several at a time. A piece that the range covers only in
        part is read into a buffer of its own, verified, and copied.
        """
        if not self._check or not self._chunk.pieces:
            self._read_exactly(first, into)
            return
        size, nbytes = piece_bytes(self._chunk), self._chunk.nbytes
        at, end = first, first + len(into)
        # Example with pieces of 4 bytes, a chunk of 14 bytes, and the range [2, 13):
        #
        #     [0, 4)    partly wanted: read into a buffer, verified, [2, 4) is copied
        #     [4, 12)   whole pieces: read into the target in one go, and verified there
        #     [12, 14)  partly wanted: as the first one; the last piece is shorter
        pieces_end = end if end == nbytes else end - end % size  # end of the last piece that the range covers
        while at < end:
            begin = at - at % size
            # Whole pieces from here on: read as many as fit into a slab, straight into the target.
            if at == begin and at < pieces_end:
                stop = min(pieces_end, at + max(size, SLAB_BYTES // size * size))
                self._read_verified(at, into[at - first : stop - first])
            else:
                piece = memoryview(bytearray(min(size, nbytes - begin)))
                self._read_verified(begin, piece)
                stop = min(begin + len(piece), end)
                into[at - first : stop - first] = piece[at - begin : stop - begin]
            at = stop

    def verify(self, first: int, last: int, scratch: memoryview) -> None:
        """Verify the pieces that overlap the bytes [first, last) of the data."""
        if not self._chunk.pieces:
            # Nothing to compare with. The last byte is read all the same, which finds a truncated file.
            self._read_exactly(last - 1, scratch[:1])
            return
        size, nbytes = piece_bytes(self._chunk), self._chunk.nbytes
        # From the piece that holds `first` to the end of the piece that holds the last byte, rounded to whole pieces,
        # as many at a time as the buffer holds.
        stop, step = min(-(-last // size) * size, nbytes), len(scratch) // size * size
        for begin in range(first - first % size, stop, step):
            self._read_verified(begin, scratch[: min(step, stop - begin)])

    def _read_verified(self, begin: int, pieces: memoryview) -> None:
        """Read and verify whole pieces, from byte `begin` of the data on."""
        self._read_exactly(begin, pieces)
        size = piece_bytes(self._chunk)
        for at in range(0, len(pieces), size):
            piece = pieces[at : at + size]
            if crc32(piece) != self._chunk.pieces[(begin + at) // size]:
                low, high = begin + at, begin + at + len(piece)
                raise ChunkDamage(f"bytes {low} to {high - 1} of its data do not match their checksum")

    def _read_exactly(self, first: int, into: memoryview) -> None:
        count = self._read(self._chunk.data + first, into)
        if count != len(into):
            raise ChunkDamage(f"is truncated after {first + count} of {self._chunk.nbytes} bytes")


def data_matches(chunk: Chunk, read: ReadRange) -> bool:
    """Return True if the data matches the chunk's single checksum; reads the data in slabs."""
    checksum = 0
    for at in range(0, chunk.nbytes, SLAB_BYTES):
        buffer: Any = memoryview(bytearray(min(SLAB_BYTES, chunk.nbytes - at)))
        if read(chunk.data + at, buffer) != len(buffer):
            return False
        checksum = crc32(buffer, checksum)
    return checksum == chunk.pieces[0]


def envelope_matches(chunk: Chunk, read: ReadRange) -> bool:
    """Return True if the bytes before and after the data match their checksum, or have none."""
    if chunk.envelope is None:
        return True
    before = chunk.data - chunk.start
    # The blob of a chunk:  [ before | data | after ]
    #                       start    data            start + length
    # `before` are the zip's first headers, `after` the other members and the directory, a few hundred bytes together.
    after = chunk.length - before - chunk.nbytes
    checksum = 0
    for at, length in ((chunk.start, before), (chunk.data + chunk.nbytes, after)):
        buffer: Any = memoryview(bytearray(length))
        if read(at, buffer) != length:
            return False
        checksum = crc32(buffer, checksum)
    return checksum == chunk.envelope
