"""The safetensors format: its header, and its index over several files.

Owns: the bytes of such files, as https://huggingface.co/docs/safetensors describes them. Refuses: tensors; what goes
in and comes out are bytes, with torch's names for their types.

A file is 8 bytes with the header's length, the header in JSON, and the data of all tensors without gaps. An index is
JSON too: which tensor lies in which file.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from rankbook.checkpoint.manifest import ITEM_BYTES
from rankbook.checkpoint.stores import Storage, read_all
from rankbook.errors import CheckpointingException

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_MOST_HEADER = 100_000_000  # bytes; the format's own limit

NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}
"""torch's names of types to those of the format."""

_TYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: its data are `nbytes` bytes from `start`, counted from the file's start, row-major."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int


def nbytes_of(dtype: str, shape: Iterable[int]) -> int:
    """The bytes of a tensor's data."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file that holds these tensors (dtype, shape), one after the other.

    Raises `CheckpointingException` for a type that the format does not have.
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for key, (dtype, shape) in tensors.items():
        if dtype not in NAMES:
            raise CheckpointingException(f"{key} is of type {dtype}, which safetensors files cannot hold")
        end = at + nbytes_of(dtype, shape)
        fields[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin on a multiple of 8
    return len(text).to_bytes(8, "little") + text


def index(weight_map: Mapping[str, str], total: int) -> bytes:
    """The index file: `weight_map` is the file of each tensor, `total` the bytes of all data."""
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()


def entries(storage: Storage, path: str) -> list[Entry]:
    """All tensors of a file, or of a folder of them, in the order of their bytes.

    A folder's index is followed where there is one. Raises `CheckpointingException`, naming the file, where a header
    is damaged, a file is shorter than its header says, or the index names what is not there.
    """
    if path.endswith(SUFFIX):
        return _in_file(storage, path)
    names = storage.list(path)
    base = f"{path}/" if path else ""
    indexes = sorted(name for name in names if name.endswith(SUFFIX + ".index.json"))
    files = sorted(name for name in names if name.endswith(SUFFIX))
    wanted: dict[str, str] = {}
    if indexes:
        try:
            wanted = dict(json.loads(read_all(storage, base + indexes[0]))["weight_map"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointingException(f"{storage}/{base}{indexes[0]}: not an index: {error!r}") from error
        if not all(isinstance(name, str) for name in wanted.values()):
            raise CheckpointingException(f"{storage}/{base}{indexes[0]}: not an index: a file's name is no text")
        files = sorted(set(wanted.values()))
    if not files:
        raise CheckpointingException(f"{storage}/{path}: there is no {SUFFIX} file")
    if missing := [name for name in files if name not in names]:
        raise CheckpointingException(f"{storage}/{base}{indexes[0]} names {', '.join(missing)}: missing")
    found = [entry for name in files for entry in _in_file(storage, base + name)]
    there = {(entry.key, PurePosixPath(entry.file).name) for entry in found}
    if lost := sorted(set(wanted.items()) - there):
        raise CheckpointingException(f"{storage}/{base}{lost[0][1]}: {lost[0][0]} is missing, which the index names")
    if twice := sorted(key for key, count in Counter(entry.key for entry in found).items() if count > 1):
        raise CheckpointingException(f"{storage}/{path}: {', '.join(twice[:3])} is there more than once")
    return found


def _in_file(storage: Storage, path: str) -> list[Entry]:
    where = f"{storage}/{path}"
    size = storage.list(str(PurePosixPath(path).parent).removeprefix(".")).get(PurePosixPath(path).name)
    if size is None:
        raise CheckpointingException(f"{where}: there is no such file")
    first = bytearray(8)
    storage.read(path, 0, memoryview(first))
    length = int.from_bytes(first, "little")
    if size < 8 or length > min(_MOST_HEADER, size - 8):
        raise CheckpointingException(
            f"{where}: no safetensors file, or one that was cut off: its header has {length} bytes"
        )
    text = bytearray(length)
    storage.read(path, 8, memoryview(text))
    try:
        fields = json.loads(text)
        found = [_entry(key, field, path, 8 + length) for key, field in fields.items() if key != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointingException(f"{where}: its header is damaged: {error!r}") from error
    at = 8 + length
    for entry in sorted(found, key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start != at:
            raise CheckpointingException(f"{where}: {entry.key} begins at byte {entry.start} instead of {at}")
        at += entry.nbytes
    if at != size:
        raise CheckpointingException(f"{where}: it has {size} bytes, and its header says {at}")
    return sorted(found, key=lambda entry: (entry.start, entry.nbytes))


def _entry(key: str, field: Mapping[str, Any], path: str, base: int) -> Entry:
    dtype, shape = _TYPES[field["dtype"]], tuple(int(size) for size in field["shape"])
    start, end = field["data_offsets"]
    if not all(type(number) is int and 0 <= number < 2**62 for number in (start, end, *shape)):
        raise ValueError(f"{key} has a shape or offsets that no tensor has")
    if end - start != nbytes_of(dtype, shape) or min(shape, default=0) < 0:
        raise ValueError(f"{key} has {end - start} bytes, and {dtype} of shape {shape} has {nbytes_of(dtype, shape)}")
    return Entry(key, dtype, shape, path, base + start, end - start)
