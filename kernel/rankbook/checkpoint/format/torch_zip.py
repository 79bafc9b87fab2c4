"""Read the zip files of `torch.save`: locate the data of a stored tensor. tensor_io.py writes them.

`open_zip` and `locate_tensor` find the members of a zip within a larger file, their positions and checksums, and parse
the pickle that describes the tensor. No object that the pickle names is created, and the tensor's data is not read.
The module does not import torch, so that `rankbook verify` and the notebook process do not either.

`check_opcodes` checks a pickle before it is unpickled, so that a small file cannot exhaust memory or CPU time. It
limits resources only; the restricted unpicklers decide which classes a pickle may name. CPython's unpickler allocates
memory for an announced length before it reads the bytes, and a memo entry for every index up to the highest one used: a
pickle of nine bytes can allocate gigabytes. A tuple's hash is computed from all of its elements, again every time it is
fetched from the memo and nested in another tuple, without a limit on depth. The check detects both without creating
objects: it simulates the unpickler's stack, and keeps for every value on the stack the number of values that computing
its hash would visit.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from rankbook.checkpoint.format.manifest import ITEM_BYTES, dense
from rankbook.errors import CheckpointError

MAX_NESTED = 10_000
"""Maximum number of values in one tuple, including those of nested tuples."""

# Opcodes by what they do to the stack, named as in pickletools. Protocols up to 5 are covered; an opcode that is
# missing here pushes one value (`_simulate`, last branch).
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
# Neither torch.save nor DCP writes these: extension codes name classes by number, and the others refer to buffers
# outside of the pickle.
_REFUSED = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
_TO_MARK = {"TUPLE", "LIST", "DICT", "FROZENSET", "INST", "OBJ"}  # pop everything above the mark, push one value
_NO_STACK = {"PROTO", "FRAME"}
_STACK_EFFECTS = {  # number of values popped, and whether one is pushed
    "APPEND": (1, False), "SETITEM": (2, False), "BUILD": (1, False), "REDUCE": (2, True), "NEWOBJ": (2, True),
    "NEWOBJ_EX": (3, True), "STACK_GLOBAL": (2, True), "BINPERSID": (1, True),
    "TUPLE1": (1, True), "TUPLE2": (2, True), "TUPLE3": (3, True),
}  # fmt: skip
_DROPS_TO_MARK = {"APPENDS", "SETITEMS", "ADDITEMS", "POP_MARK"}
# Negative argument sizes in pickletools: -1 reads up to a newline; the others start with a length field of 1-8 bytes.
_LINE, _LENGTHS = -1, {-2: 1, -3: 4, -4: 4, -5: 8}


@cache
def _opcode_table() -> list[tuple[str, int, int] | None]:
    """Return, by opcode byte: the opcode's name, the size of its argument, and the number of its arguments."""
    table: list[tuple[str, int, int] | None] = [None] * 256
    for opcode in pickletools.opcodes:
        size = 0 if opcode.arg is None else opcode.arg.n
        table[ord(opcode.code)] = (opcode.name, size, 2 if opcode.name in {"GLOBAL", "INST"} else 1)
    return table


def check_opcodes(data: bytes) -> None:
    """Raise `CheckpointError` if a pickle is truncated or would take far more memory than its length."""
    try:
        _simulate(data)
    except (IndexError, KeyError, ValueError) as error:
        raise CheckpointError(f"the pickle is damaged: {type(error).__name__}: {error}") from error


def _simulate(data: bytes) -> None:  # noqa: C901, PLR0912 - one branch per kind of opcode
    # Example: the pickle of ((1, 2), 3) is simulated as follows, the stack to the right of every opcode
    # (PROTO and MEMOIZE are left out).
    #
    #     BININT1 1      [1]
    #     BININT1 2      [1, 1]
    #     TUPLE2         [3]           1 for the tuple itself, and 1 for each of its values
    #     BININT1 3      [3, 1]
    #     TUPLE2         [5]
    #     STOP
    table, end, at = _opcode_table(), len(data), 0
    # A stack element stands for one value of the unpickler's stack: the number of values that its hash visits. Marks
    # are kept apart, as positions in the stack; memo maps an index to the remembered element.
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    while True:
        code = table[data[at]]
        if code is None or code[0] in _REFUSED:
            raise ValueError(f"unsupported opcode {data[at]} at byte {at}")
        name, size, count = code
        first = at + 1
        at = first + size if size >= 0 else _argument_end(data, first, size, count)
        if at > end:
            raise ValueError(f"truncated in the argument of {name} at byte {first - 1}")
        if name == "STOP":
            return
        if name == "FRAME" and int.from_bytes(data[first:at], "little") > end - at:
            raise ValueError("truncated in a frame")
        if name in _PUTS:
            index = len(memo) if name == "MEMOIZE" else _memo_index(data, first, at, name)
            # A memo needs at most one entry per byte of the pickle. The unpickler's memo is an array up to the highest
            # index.
            if not 0 <= index <= end:
                raise ValueError(f"memo index {index} is out of range for {end} bytes")
            memo[index] = stack[-1]
        elif name in _GETS:
            stack.append(memo[_memo_index(data, first, at, name)])
        elif name in _STACK_EFFECTS:
            pops, pushes = _STACK_EFFECTS[name]
            popped = stack[len(stack) - pops :]
            if len(stack) < pops:
                raise IndexError(f"{name} at byte {first - 1} on an empty stack")
            del stack[len(stack) - pops :]
            if pushes:
                stack.append(_nested_count(popped))
        elif name in _TO_MARK:
            mark = marks.pop()
            popped = stack[mark:]
            del stack[mark:]
            # A list or a dict has no hash, so whatever it holds is not visited.
            stack.append(_nested_count(popped) if name in {"TUPLE", "FROZENSET"} else 1)
        elif name in _DROPS_TO_MARK:
            del stack[marks.pop() :]
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "POP":
            # As in CPython: POP with nothing above the mark removes the mark.
            if marks and marks[-1] == len(stack):
                marks.pop()
            else:
                stack.pop()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name not in _NO_STACK:
            stack.append(1)


def _nested_count(popped: list[int]) -> int:
    count = 1 + sum(popped)
    if count > MAX_NESTED:
        raise ValueError(f"a tuple has more than {MAX_NESTED} values, including those of nested tuples")
    return count


def _argument_end(data: bytes, first: int, size: int, count: int) -> int:
    """Return the end of an argument whose length is stored in the pickle."""
    if size == _LINE:
        for _ in range(count):
            first = data.index(b"\n", first) + 1
        return first
    width = _LENGTHS[size]
    return first + width + int.from_bytes(data[first : first + width], "little")


def _memo_index(data: bytes, first: int, at: int, name: str) -> int:
    if name in {"PUT", "GET"}:
        # A decimal number in text. 20 digits are enough for any index, and bound the time of `int`.
        return int(data[first : min(at, first + 20)])
    return int.from_bytes(data[first:at], "little")


_EDGE_BYTES = 2048  # bytes read at either end of a blob: enough for headers and directory of one tensor
_MAX_READ = 64 * 1024 * 1024  # limit of a single read, such as a zip's directory, in bytes
_MAX_PICKLE = 1024 * 1024  # limit of the pickle that describes a single tensor, in bytes
# A local file header (APPNOTE 4.3.7): signature, 22 bytes that the central directory repeats, and the lengths of the
# file name and of the extra field, which follow the header. The data comes after both.
_LOCAL_HEADER = struct.Struct("<4s22xHH")

# torch pickles a tensor's storage as ("storage", class, key, device, length), and the class tells the dtype. Newer
# dtypes have no such class; their pickles name the dtype itself (`_rebuild_tensor_v3`).
_STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}


class Readable(Protocol):
    """The source of a zip: a storage, or bytes in memory with the same `read`."""

    def read(self, path: str, start: int, into: memoryview) -> int:
        """See `Storage`."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a zip: its data is at [`data`, `data` + `nbytes`) of the file that contains the zip."""

    data: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class StoredView:
    """The position and layout of a stored tensor.

    `data` is its position from the file's start, in bytes; `strides` (in elements) are None for row-major. `crc` is the
    CRC-32 of the whole data, or None if the zip has no checksums or its storage holds more than this tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    data: int
    nbytes: int
    crc: int | None


class BlobFile(io.RawIOBase):
    """A byte range of a file in a storage, as a seekable file; caches the ends of the range."""

    def __init__(self, storage: Readable, path: str, start: int, length: int) -> None:
        super().__init__()
        self._storage, self._path, self._start, self._length = storage, path, start, length
        self._at = 0
        # A remote read costs milliseconds, and `zipfile` makes a dozen small ones: the end-of-directory record, the
        # directory, and a header per member. They all lie in the first or last 2 KiB of a blob with one tensor.
        self._edges: list[tuple[int, bytes]] = []

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position within the blob, in bytes. Raises OSError for a position before its start."""
        target = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if target < 0:
            raise OSError(f"position {target} is before the blob's start")
        self._at = target
        return target

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes; with -1, all that are left."""
        size = max(0, self._length - self._at if size < 0 else min(size, self._length - self._at))
        data = self._read_cached(self._at, size)
        self._at += len(data)
        return data

    def _read_cached(self, at: int, size: int) -> bytes:
        for start, edge in self._edges:
            if start <= at and at + size <= start + len(edge):
                return edge[at - start : at - start + size]
        if size > _EDGE_BYTES:
            return self._read_uncached(at, size)
        # Small reads fetch and keep _EDGE_BYTES bytes: the first or last ones of the blob, or those from `at` on.
        start = 0 if at + size <= _EDGE_BYTES else min(at, max(0, self._length - _EDGE_BYTES))
        edge = self._read_uncached(start, min(_EDGE_BYTES, self._length - start))
        self._edges.append((start, edge))
        return edge[at - start : at - start + size]

    def _read_uncached(self, at: int, size: int) -> bytes:
        if size > _MAX_READ:
            raise OSError(f"expected a zip file of torch.save, which never needs {size} bytes at once")
        buffer = bytearray(size)
        return bytes(buffer[: self._storage.read(self._path, self._start + at, memoryview(buffer))])


def open_zip(storage: Readable, path: str, start: int, length: int) -> tuple[zipfile.ZipFile, dict[str, Member]]:
    """Open the zip at [start, start + length) of a file; return it and its members by name below its single folder.

    Raises `zipfile.BadZipFile` if it is not a zip of stored members, or truncated.
    """
    try:
        return _open_members(BlobFile(storage, path, start, length), start, length)
    except (zipfile.BadZipFile, OSError):
        raise
    except Exception as error:  # a damaged zip can hold any numbers and names
        raise zipfile.BadZipFile(f"{type(error).__name__}: {error}") from error


def _open_members(file: BlobFile, start: int, length: int) -> tuple[zipfile.ZipFile, dict[str, Member]]:
    # A blob of torch.save is such a zip, with all members stored without compression:
    #
    #     archive/data.pkl       the pickle of the object, in which storages are references ("persistent ids")
    #     archive/byteorder      "little"
    #     archive/data/0         the bytes of storage "0"; one member per storage
    #     archive/version, ...
    #
    # `members` has the names without the folder, "archive/", which torch.save names after the file.
    archive = zipfile.ZipFile(file)  # not closed: it holds no file descriptor
    members = {}
    for entry in archive.infolist():
        file.seek(entry.header_offset)
        header = file.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
            raise zipfile.BadZipFile(f"no member begins at byte {entry.header_offset}")
        _, name, extra = _LOCAL_HEADER.unpack(header)
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise zipfile.BadZipFile(f"{entry.filename} is compressed")
        # The lengths in the local header count: torch pads its `extra` field so that the data is aligned, and the
        # central directory has another one.
        data = entry.header_offset + _LOCAL_HEADER.size + name + extra
        if data + entry.file_size > length:
            raise zipfile.BadZipFile(f"{entry.filename} reaches beyond the end")
        members[entry.filename.partition("/")[2]] = Member(start + data, entry.file_size, entry.CRC)
    return archive, members


def without_checksums(members: dict[str, Member]) -> bool:
    """Return True if the zip was written without checksums: torch then writes a zero for every one."""
    return all(member.crc == 0 for member in members.values())


def is_plain(blob: bytes | bytearray) -> bool:
    """Return True if a blob is an uncompressed zip, as torch.save writes it.

    Such a zip does not expand: loading it takes no more memory than its size.
    """
    try:
        open_zip(_Bytes(blob), "", 0, len(blob))
    except (zipfile.BadZipFile, OSError):
        return False
    return True


def zip_is_intact(blob: bytes) -> bool:
    """Return True if all members of a zip match their checksums, or the zip was written without checksums."""
    try:
        archive, members = open_zip(_Bytes(blob), "", 0, len(blob))
        return without_checksums(members) or archive.testzip() is None
    except Exception:  # noqa: BLE001 - zipfile raises many kinds of errors
        return False


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Bytes in memory, as a storage of one file."""

    data: bytes | bytearray

    def read(self, _path: str, start: int, into: memoryview) -> int:
        part = self.data[start : start + len(into)]
        into[: len(part)] = part
        return len(part)


def read_member(storage: Readable, path: str, member: Member) -> bytes:
    """Return the bytes of a member, without verifying its checksum."""
    buffer = bytearray(member.nbytes)
    return bytes(buffer[: storage.read(path, member.data, memoryview(buffer))])


def locate_tensor(storage: Readable, path: str, start: int, length: int) -> StoredView:
    """Locate the tensor in a blob that holds a single one. Reads only the ends of the blob.

    Raises `CheckpointError` if the blob holds anything else; the message does not name the file, which the
    caller knows.
    """
    try:
        _, members = open_zip(storage, path, start, length)
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"it is not a zip file of torch.save: {error}") from error
    # Without it there is nothing that says what the storages mean.
    if "data.pkl" not in members:
        raise CheckpointError("it is not a zip file of torch.save: data.pkl is missing")
    if members["data.pkl"].nbytes > _MAX_PICKLE:
        raise CheckpointError(
            f"its data.pkl has {members['data.pkl'].nbytes} bytes, expected at most {_MAX_PICKLE} for one tensor"
        )
    pickled = read_member(storage, path, members["data.pkl"])
    if not without_checksums(members) and zlib.crc32(pickled) != members["data.pkl"].crc:
        raise CheckpointError("its data.pkl does not match its checksum")
    order = members.get("byteorder")
    if order is not None and (order.nbytes > len(b"little") or read_member(storage, path, order) != b"little"):
        raise CheckpointError("its bytes are not in little-endian order")
    # Storage key, offset and strides come from the pickle, position and checksum of the storage from the zip's
    # directory.
    view = parse_tensor_pickle(pickled)
    member = members.get(f"data/{view.storage}")
    if member is None:
        raise CheckpointError(f"its data/{view.storage} is missing")
    item = ITEM_BYTES[view.dtype]
    nbytes = math.prod(view.shape) * item
    begin = view.offset * item
    # The view may be smaller than its storage, as of a slice that was saved without clone(). It may not be larger.
    if begin + nbytes > member.nbytes:
        raise CheckpointError(f"it has {member.nbytes} bytes, but its tensor needs {begin + nbytes}")
    strides = None if _row_major(view.shape, view.strides) else view.strides
    if strides is not None and not dense(view.shape, strides):
        raise CheckpointError(f"its tensor of shape {view.shape} has strides {strides}, with gaps or overlaps")
    # The zip's checksum covers the whole storage, so it says nothing about a part of it.
    has_crc = not without_checksums(members) and nbytes == member.nbytes
    return StoredView(view.dtype, view.shape, strides, member.data + begin, nbytes, member.crc if has_crc else None)


@dataclass(frozen=True, slots=True)
class Described:
    """The arguments from which torch would rebuild a tensor; `offset` and `strides` are in elements."""

    storage: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def parse_tensor_pickle(pickled: bytes) -> Described:
    """Parse the pickle of a tensor.

    Raises `CheckpointError` if it holds anything but one plain tensor.
    """
    try:
        check_opcodes(pickled)
        described = _TensorUnpickler(io.BytesIO(pickled)).load()
    except CheckpointError:
        raise
    except Exception as error:
        # A pickle is a program: a damaged one may raise any exception.
        raise CheckpointError(f"its pickle is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(described, Described):
        raise CheckpointError(f"it holds a {type(described).__name__}, expected a tensor")
    return described


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - any stand-in
        if (module, name) in _REBUILDERS:
            return _REBUILDERS[module, name]
        if module == "torch" and (dtype := _STORAGE_DTYPES.get(name, name)) in ITEM_BYTES:
            return dtype
        raise CheckpointError(f"its pickle names {module}.{name}, which a plain tensor does not need")

    def persistent_load(self, pid: Any) -> tuple[str, str]:  # noqa: ANN401 - any pickled value
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(key, str | int) or not isinstance(dtype, str):
            raise CheckpointError("its pickle refers to an object that is not a storage")
        return str(key), dtype


def _rebuild(
    storage: tuple[str, str],
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
    _requires_grad: bool,
    _hooks: object,
    *more: object,
) -> Described:
    key, dtype = storage
    if more and isinstance(more[0], str):  # _rebuild_tensor_v3: an untyped storage, and the dtype after it
        dtype = more[0]
        more = more[1:]
    # What may follow are backward hooks and metadata; torch.save writes them for subclasses and tensors with
    # attributes.
    if any(more):
        raise CheckpointError(f"its tensor has unsupported arguments: {more}")
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"its tensor has the unsupported dtype {dtype}")
    for number in (offset, *shape, *strides):
        # Not `isinstance`: a bool is not a size.
        if type(number) is not int or not 0 <= number < 2**62:
            raise CheckpointError("its tensor has an invalid offset, shape or stride")
    if len(shape) != len(strides) or math.prod(shape) >= 2**62:
        raise CheckpointError(f"its tensor has {len(shape)} axes and {len(strides)} strides, or too many elements")
    return Described(key, dtype, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(data: Described, *_: object) -> Described:
    return data


_REBUILDERS: dict[tuple[str, str], str | Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "UntypedStorage"): "untyped",
    ("collections", "OrderedDict"): dict,
}


# As `Tensor.is_contiguous`: the strides of axes of size 1 do not matter, and without elements nothing does.
def _row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return True
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
