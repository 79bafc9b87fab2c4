"""Read safetensors files, and encode the header and the index of files that are written.

Reading uses the `safetensors` library. Writing does not, because its `save_file` needs all tensors of a file at once,
while the tensors of a checkpoint or of a sharded model are assembled one at a time. A writer needs only the header
(https://huggingface.co/docs/safetensors): its length in 8 bytes, then JSON with the byte range of every tensor. The
index is JSON too, and maps tensors to files.
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
from rankbook.checkpoint.storage import Storage, read_all
from rankbook.checkpoint.storage.backends import LocalStorage
from rankbook.errors import CheckpointError, InvalidArgument

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
# Bytes that are copied at a time from a remote storage.
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
"""Maps torch's dtype names to those of the format."""


def nbytes_of(dtype: str, shape: Iterable[int]) -> int:
    """Return the size of a tensor's data in bytes."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Encode the header of a file that holds these tensors, (dtype, shape) by key, one after the other.

    Raises `CheckpointError` for a dtype that the format does not have.
    """
    # Example for one tensor "w" of two float32 values. Offsets count from the end of the header:
    #
    #     {"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for key, (dtype, shape) in tensors.items():
        if dtype not in NAMES:
            raise CheckpointError(f"{key} has the dtype {dtype}, which safetensors files do not support")
        end = at + nbytes_of(dtype, shape)
        fields[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    return len(text).to_bytes(8, "little") + text


def index(weight_map: Mapping[str, str], total: int) -> bytes:
    """Encode the index file: `weight_map` maps a tensor to its file, `total` is the size of all data in bytes."""
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()


def read_tensors(storage: Storage, path: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a file or of a folder.

    From a folder with an index, reads the files that the index names; otherwise all safetensors files. Files are memory
    mapped, so a tensor takes no memory before its data is used. Files of a remote storage are first copied to the
    temporary folder.

    Raises `CheckpointError`, naming the file, if a file is damaged or truncated or does not match the index, and
    `InvalidArgument` if the library is not installed.
    """
    if path.endswith(SUFFIX):
        return _read_file(storage, path)
    names = storage.list(path)
    base = f"{path}/" if path else ""
    # Three cases: one index, whose files are read; no index, so all files are read; or several indexes, of several
    # models, among which nobody here can choose.
    indexes = sorted(name for name in names if name.endswith(SUFFIX + ".index.json"))
    files = sorted(name for name in names if name.endswith(SUFFIX))
    weight_map: dict[str, str] = {}
    if len(indexes) > 1:
        raise CheckpointError(
            f"{storage}/{path}: expected one index of {SUFFIX} files, found {', '.join(indexes)}; "
            "move the files of one model to a folder of their own"
        )
    if indexes:
        weight_map = _read_index(storage, base + indexes[0])
        files = sorted(set(weight_map.values()))
    if not files:
        raise CheckpointError(f"{storage}/{path}: no {SUFFIX} file found")
    # Checked for all files before the first one is read: an index often names more than was downloaded.
    if missing := [name for name in files if name not in names]:
        raise CheckpointError(f"{storage}/{base}{indexes[0]} names missing files: {', '.join(missing)}")
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        shard = _read_file(storage, base + name)
        # Both directions of the index are checked: a tensor that it lists must be there, and no tensor may come twice,
        # because the second one would replace the first without a word.
        if absent := sorted(key for key, file in weight_map.items() if file == name and key not in shard):
            raise CheckpointError(f"{storage}/{base}{name}: {absent[0]} is missing, but the index lists it")
        if twice := sorted(tensors.keys() & shard.keys()):
            raise CheckpointError(f"{storage}/{path}: duplicate tensors: {', '.join(twice[:3])}")
        tensors |= shard
    return tensors


def _read_index(storage: Storage, path: str) -> dict[str, str]:
    try:
        weight_map = dict(json.loads(read_all(storage, path))["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{storage}/{path}: not an index: {error!r}") from error
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{storage}/{path}: not an index: a file name is not a string")
    return weight_map


def _read_file(storage: Storage, path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file in the order of their data."""
    try:
        # Imported here, because the library is an optional dependency that only conversions need.
        library = import_module("safetensors")
    except ImportError as error:
        raise InvalidArgument(
            'reading safetensors files needs the package safetensors: pip install "safetensors>=0.5"'
        ) from error
    where = f"{storage}/{path}"
    try:
        # The mappings of the tensors outlive the opened file.
        with _local_file(storage, path) as file, library.safe_open(file, framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.offset_keys()}
    except (library.SafetensorError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    for key, tensor in tensors.items():
        if (dtype := str(tensor.dtype).removeprefix("torch.")) not in NAMES:
            raise CheckpointError(f"{where}: {key} has the dtype {dtype}, which a checkpoint does not support")
    return tensors


@contextmanager
def _local_file(storage: Storage, path: str) -> Iterator[str]:
    """Yield the name of a local file that can be memory mapped.

    The temporary copy of a remote file is deleted on exit; existing mappings stay valid.
    """
    if isinstance(storage, LocalStorage):
        file = storage.root / path
        if not file.is_file():  # opening a named pipe would block until a writer opens it
            raise CheckpointError(f"{file}: no such file")
        yield str(file)
        return
    with tempfile.NamedTemporaryFile(suffix=SUFFIX) as copy:
        buffer = memoryview(bytearray(_BUFFER))
        while (count := storage.read(path, copy.tell(), buffer)) == len(buffer):
            copy.write(buffer)
        copy.write(buffer[:count])
        copy.flush()
        yield copy.name
