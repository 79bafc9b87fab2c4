"""Files of safetensors: the header of a file that is written, and the tensors of files that are read.

The `safetensors` library reads. It does not write here, because its `save_file` takes all tensors of a file at once,
while a checkpoint's chunks, or a model's shards, are put together to one whole tensor at a time. A writer needs the
header alone (https://huggingface.co/docs/safetensors): 8 bytes with its length, and in JSON which bytes of what follows
are which tensor. An index is JSON too: which tensor lies in which file.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankbook.checkpoint.format.manifest import ITEM_BYTES
from rankbook.checkpoint.storage.base import Storage, read_all
from rankbook.checkpoint.storage.local import LocalStorage
from rankbook.errors import BadRequest, CheckpointingException

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_BUFFER = 16 * 1024 * 1024

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


def nbytes_of(dtype: str, shape: Iterable[int]) -> int:
    """Return the bytes of a tensor's data."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return the beginning of a file that holds these tensors (dtype, shape), one after the other.

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
    """Return the index file: `weight_map` is the file of each tensor, `total` the bytes of all data."""
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()


def read_tensors(storage: Storage, path: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a file, or of a folder of them: of the files that its index names, where it has one.

    The files are mapped into memory, so a tensor takes none before its data is used. From a storage that is not local
    they are copied to the temporary folder first.

    Raises `CheckpointingException`, naming the file, where one is damaged or cut off, and where the index and the files
    do not fit together; `BadRequest` where the library is not installed.
    """
    if path.endswith(SUFFIX):
        return _read_file(storage, path)
    names = storage.list(path)
    base = f"{path}/" if path else ""
    indexes = sorted(name for name in names if name.endswith(SUFFIX + ".index.json"))
    files = sorted(name for name in names if name.endswith(SUFFIX))
    weight_map: dict[str, str] = {}
    if indexes:
        weight_map = _read_index(storage, base + indexes[0])
        files = sorted(set(weight_map.values()))
    if not files:
        raise CheckpointingException(f"{storage}/{path}: there is no {SUFFIX} file")
    if missing := [name for name in files if name not in names]:
        raise CheckpointingException(f"{storage}/{base}{indexes[0]} names {', '.join(missing)}: missing")
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        held = _read_file(storage, base + name)
        if lost := sorted(key for key, file in weight_map.items() if file == name and key not in held):
            raise CheckpointingException(f"{storage}/{base}{name}: {lost[0]} is missing, which the index names")
        if twice := sorted(tensors.keys() & held.keys()):
            raise CheckpointingException(f"{storage}/{path}: {', '.join(twice[:3])} is there more than once")
        tensors |= held
    return tensors


def _read_index(storage: Storage, path: str) -> dict[str, str]:
    try:
        weight_map = dict(json.loads(read_all(storage, path))["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointingException(f"{storage}/{path}: not an index: {error!r}") from error
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointingException(f"{storage}/{path}: not an index: a file's name is no text")
    return weight_map


def _read_file(storage: Storage, path: str) -> dict[str, torch.Tensor]:
    """Return the tensors in the order of their bytes."""
    try:
        library = import_module("safetensors")
    except ImportError as error:
        raise BadRequest(
            'reading safetensors files needs the package safetensors: pip install "rankbook[safetensors]"'
        ) from error
    where = f"{storage}/{path}"
    try:
        with _local_file(storage, path) as file, library.safe_open(file, framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.offset_keys()}
    except (library.SafetensorError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointingException(f"{where}: {error}") from error
    for key, tensor in tensors.items():
        if (dtype := str(tensor.dtype).removeprefix("torch.")) not in NAMES:
            raise CheckpointingException(f"{where}: {key} is of type {dtype}, which a checkpoint cannot hold")
    return tensors


@contextmanager
def _local_file(storage: Storage, path: str) -> Iterator[str]:
    """Yield the name of a file that can be mapped. What is mapped outlives a copy's name."""
    if isinstance(storage, LocalStorage):
        file = storage.root / path
        if not file.is_file():  # to open a pipe would wait for whoever writes to it
            raise CheckpointingException(f"{file}: there is no such file")
        yield str(file)
        return
    with tempfile.NamedTemporaryFile(suffix=SUFFIX) as copy:
        buffer = memoryview(bytearray(_BUFFER))
        while (count := storage.read(path, copy.tell(), buffer)) == len(buffer):
            copy.write(buffer)
        copy.write(buffer[:count])
        copy.flush()
        yield copy.name
