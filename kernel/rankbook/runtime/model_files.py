"""Model files for other programs: safetensors or torch.save files, split into shards with an index.

The module defines file names, the distribution of tensors over files, and the treatment of tied weights. The
safetensors format itself is in `rankbook.checkpoint.format.safetensors`. This module is imported when a model is saved.

Rank 0 holds one full tensor of a sharded model at a time, or, for torch.save, those of one file.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rankbook.checkpoint.format import safetensors
from rankbook.checkpoint.format.tensor_io import raw_bytes
from rankbook.checkpoint.state_dict.models import clean_name
from rankbook.checkpoint.storage import Storage
from rankbook.errors import InvalidArgument
from rankbook.runtime.strategies.base import full_tensor

# Decimal and binary units, as Hugging Face's libraries write them. `parse_size` converts the text to upper case first,
# so that "GiB" is found as "GIB".
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
# Suffix of a file that is being written. Such a file left behind by a killed save is removed by the next one.
_DRAFT = ".writing"


def parse_size(size: int | str) -> int:
    """Return the number of bytes in "10GB", "200MiB" or a number. Raises `InvalidArgument` for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", str(size).strip().upper())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise InvalidArgument(
            f'max_shard_size must be a number of bytes, or text such as "200MB" or "10GB", got {size!r}'
        )
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True)
class FileKind:
    """File format; file names begin with `start` and end with `end`."""

    start: str
    end: str

    def name(self, number: int, count: int) -> str:
        """Return the name of file `number` (from 0) of `count`."""
        return f"{self.start}{self.end}" if count == 1 else f"{self.start}-{number + 1:05d}-of-{count:05d}{self.end}"

    @property
    def index(self) -> str:
        """Name of the index file, used with more than one file."""
        return f"{self.start}{self.end}.index.json"

    def matches(self, name: str) -> bool:
        """Return True if an earlier save in this format may have written the file."""
        pattern = rf"{re.escape(self.start)}(-\d{{5}}-of-\d{{5}})?{re.escape(self.end)}(\.index\.json)?"
        return re.fullmatch(pattern, name) is not None


SAFETENSORS, PICKLED = FileKind("model", ".safetensors"), FileKind("pytorch_model", ".bin")


def without_duplicates(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's state dict with tied tensors under their first name only.

    The names are those of the original model, without the parts that `torch.compile` and other wrappers add. Raises
    `InvalidArgument` for non-tensors.
    """
    # `state_dict()` returns new tensor objects (detached), so tied weights cannot be recognized by identity there. The
    # parameters and buffers themselves are shared, and `remove_duplicate=False` yields them under all their names. An
    # entry that is neither, such as one that a state dict hook adds, has only its own identity.
    owners = {
        raw_name: id(tensor)
        for named in (model.named_parameters, model.named_buffers)
        for raw_name, tensor in named(remove_duplicate=False)
    }
    state = model.state_dict()
    if other_names := [name for name, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise InvalidArgument(
            f"save_model() saves only tensors, but the state dict has other values: {', '.join(other_names)}; "
            "save_state() saves all values"
        )
    owners_seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        owner = owners.get(name, id(value))
        # The first name in the order of the state dict, which is the same on all ranks.
        if owner not in owners_seen:
            owners_seen.add(owner)
            tensors[clean_name(model, name)] = value
    return tensors


def shards(state: Mapping[str, torch.Tensor], most: int) -> list[list[str]]:
    """Group the tensors into files of at most `most` bytes; a larger tensor has a file of its own."""
    groups: list[list[str]] = [[]]
    total = 0
    for name, value in state.items():
        size = value.numel() * value.element_size()
        if groups[-1] and total + size > most:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    # Sort by element size, descending: so every tensor starts at a multiple of its element size.
    return [sorted(names, key=lambda name: -state[name].element_size()) for names in groups]


def write_model(
    storage: Storage, state: Mapping[str, torch.Tensor], kind: FileKind, most: int, *, writes: bool
) -> OSError | None:
    """Write `state` on the ranks with `writes`; all ranks call it, since gathering a sharded tensor is a collective.

    Files are first written under temporary names and renamed when all are complete; the index is written last, and
    files of an earlier save are removed. Returns the storage error, if there was one: a rank that cannot write still
    takes part in the remaining collectives, and the caller reports the error to all ranks.
    """
    # Every rank computes the same groups, names and order of tensors from the same state dict. The order of the
    # collectives in `_full_tensors` depends on it.
    groups = shards(state, most)
    names = [kind.name(number, len(groups)) for number in range(len(groups))]
    headers = [_header(state, keys) if kind is SAFETENSORS else b"" for keys in groups]  # raises on all ranks if at all
    failure: OSError | None = None
    for name, header, keys in zip(names, headers, groups, strict=True):
        tensors = _full_tensors(state, keys)
        if writes and failure is None:
            try:
                storage.write(
                    name + _DRAFT,
                    _safetensors_parts(header, tensors) if kind is SAFETENSORS else _pickled_parts(tensors),
                )
            except OSError as error:
                failure = error
        for _ in tensors:  # ranks that do not write still take part in the collectives
            pass
    # From here on only the writing rank works. The caller lets the other ranks wait for the outcome.
    if writes and failure is None:
        try:
            _commit_files(storage, state, kind, names, groups)
        except OSError as error:
            failure = error
    return failure


def write_file(storage: Storage, name: str, state: Mapping[str, torch.Tensor]) -> None:
    """Write a dict of full tensors as one safetensors file. Raises `InvalidArgument` for other objects, and OSError."""
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise InvalidArgument("safe_serialization=True can only save a dict of tensors")
    ((*names,),) = shards(state, sys.maxsize)
    storage.write(name + _DRAFT, _safetensors_parts(_header(state, names), _full_tensors(state, names)))
    storage.move(name + _DRAFT, name)


def _commit_files(
    storage: Storage,
    state: Mapping[str, torch.Tensor],
    kind: FileKind,
    names: Sequence[str],
    groups: Sequence[list[str]],
) -> None:
    # All tensors are on disk. A reader may now see a mixture of old and new files until the last rename, but never an
    # incomplete file. The index names the shards, so it comes after them; files of the old save that no index names go
    # last.
    for name in names:
        storage.move(name + _DRAFT, name)
    current = set(names)
    if len(names) > 1:
        current.add(kind.index)
        weight_map = {key: name for name, keys in zip(names, groups, strict=True) for key in keys}
        total = sum(value.numel() * value.element_size() for value in state.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
        storage.write(kind.index + _DRAFT, [text.encode()])
        storage.move(kind.index + _DRAFT, kind.index)
    for name in storage.list():
        if kind.matches(name.removesuffix(_DRAFT)) and name not in current:
            storage.remove(name)


def _full_tensors(state: Mapping[str, torch.Tensor], names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        yield name, full_tensor(state[name].detach())


def _header(state: Mapping[str, torch.Tensor], names: Sequence[str]) -> bytes:
    entries = {name: (str(state[name].dtype).removeprefix("torch."), tuple(state[name].shape)) for name in names}
    return safetensors.encode_header(entries, {"format": "pt"})


def _safetensors_parts(header: bytes, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[Any]:
    yield header
    for _, tensor in tensors:
        # An empty tensor has an entry in the header and no bytes in the file.
        if math.prod(tensor.shape):
            yield raw_bytes(tensor)


def _pickled_parts(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[Any]:
    stream = io.BytesIO()
    # torch.save writes the whole storage of a view. A clone has only the tensor's own elements.
    torch.save({name: tensor.cpu().clone() for name, tensor in tensors}, stream)
    yield stream.getbuffer()
