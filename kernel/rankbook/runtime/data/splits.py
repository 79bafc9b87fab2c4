"""Detection of datasets and samplers that were split by rank before `prepare`, which would split them again.

`describe_split` looks at one rank's loader when it is prepared. `fingerprint_dataset` and `fingerprint_sampler` are
compared between the ranks when the first pass begins. Both read attributes and a few samples in memory, and run none of
the user's code except `__len__`.

Samples are never read by `dataset[0]`: it may decode a file, take long, or draw random numbers, so that a random
augmentation would make the samples of equal datasets differ, and the check would change the numbers that training
draws. What is read instead is the stored data below: tensors, arrays, lists of files, and rows of Arrow tables.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy
import torch
from torch.utils.data import ConcatDataset, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

# What a dataset that selects its own part of the samples must know, by the names of torch, Accelerate and torchrun. The
# names are searched for in bytecode, which runs nothing.
_RANK_NAMES = {"get_rank", "get_world_size", "process_index", "num_processes", "get_node_local_rank"}
_RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
# Attributes of samplers and datasets of common libraries for the number of parts, next to one for the own part.
_COUNTS = ("num_replicas", "world_size", "num_processes", "num_shards")
_MAX_DEPTH = 4
_PREFIX = 1024
"""Bytes of a row that a fingerprint reads."""
_MAX_CELL = 16 << 20
"""Bytes of a cell of an Arrow table up to which its value is read: reading a longer list takes more than 0.1 s."""


def describe_split(loader: Any, ranks: int, rank: int, *, dealt: bool = False) -> str:  # noqa: ANN401 - a DataLoader
    """Return how the dataset or the sampler of `loader` was split by rank; empty if it shows no sign of that.

    `ranks` and `rank` are the number of parts that `prepare` is going to make, and the part of this rank. `dealt`: the
    samples of a DistributedSampler are not split again.
    """
    for sampler in _chain(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler):
        # This sampler deals the samples itself, which is fine if it does so for these ranks.
        if dealt and isinstance(sampler, DistributedSampler):
            if (sampler.num_replicas, sampler.rank) != (ranks, rank):
                return (
                    f"its DistributedSampler has rank {sampler.rank} of {sampler.num_replicas}, but this is rank "
                    f"{rank} of {ranks}"
                )
        elif (count := _parts_of(sampler)) > 1:
            return f"its {type(sampler).__name__} deals the samples to {count} ranks"
    dataset = loader.dataset
    for below in _datasets(dataset):
        # The usual way to split by hand: `Subset(dataset, range(rank, len(dataset), world_size))`.
        if isinstance(below, Subset) and ranks > 1 and _is_stride(below.indices, ranks, rank):
            return f"its Subset takes one of {ranks} samples, from sample {rank} on"
        distributed = getattr(below, "_distributed", None)  # of datasets.IterableDataset, by `split_dataset_by_node`
        if distributed is not None and getattr(distributed, "world_size", 1) > 1:
            return f"split_dataset_by_node() has split it for {distributed.world_size} ranks"
        if (count := _parts_of(below)) > 1:
            return f"its {type(below).__name__} has the attribute of a part: {count} ranks"
        # A stream has no indices. Whether it deals its samples can only be seen in its code.
        if isinstance(below, IterableDataset) and (name := _rank_name(type(below).__iter__)):
            return f"the __iter__ of its {type(below).__name__} uses {name}"
    return ""


def difference_warning(what: str, rank: int) -> str:
    """Return the warning for a rank whose dataset or sampler (`what`) is not that of rank 0."""
    return (
        f"the {what} of rank {rank} is not that of rank 0. prepare() deals the samples of one {what} to all ranks: if "
        "every rank has a part of the samples, they are split twice, and most are lost. Pass the whole dataset on "
        "every rank, or keep your own split with rankbook.DataLoaderShard(dataset, batch_size=...)"
    )


def split_warning(reason: str) -> str:
    """Return the warning for a loader that was split by rank before."""
    return (
        f"the loader seems to be split by rank already: {reason}. prepare() splits it again, so that most samples are "
        "lost. Pass the whole dataset with a plain sampler, or keep your own split with "
        "rankbook.DataLoaderShard(dataset, batch_size=...)"
    )


def _chain(sampler: Any) -> Iterator[Any]:  # noqa: ANN401 - any sampler
    """Yield a sampler and those that it wraps."""
    for _ in range(_MAX_DEPTH):
        if sampler is None:
            return
        yield sampler
        below = vars(sampler) if hasattr(sampler, "__dict__") else {}
        sampler = next((below[name] for name in ("batch_sampler", "sampler", "base_sampler") if name in below), None)


def _datasets(dataset: Any, depth: int = 0) -> Iterator[Any]:  # noqa: ANN401 - any dataset
    yield dataset
    if depth < _MAX_DEPTH:
        inner = getattr(dataset, "__dict__", {}).get("dataset")
        for below in [inner] if inner is not None else getattr(dataset, "datasets", ()):
            yield from _datasets(below, depth + 1)


def _parts_of(value: Any) -> int:  # noqa: ANN401 - a sampler or a dataset
    """Return the number of ranks that a sampler or dataset is split for, according to its attributes; 1 if for none."""
    attributes = getattr(value, "__dict__", {})
    # A number of replicas alone proves nothing: a dataset may know it for other reasons. With a rank beside it, it is a
    # part.
    if not any(name in attributes for name in ("rank", "process_index", "shard_id")):
        return 1
    return max((attributes[name] for name in _COUNTS if type(attributes.get(name)) is int), default=1)


def _is_stride(indices: Any, ranks: int, rank: int) -> bool:  # noqa: ANN401 - a sequence of indices
    # With so few indices, a stride may be an accident.
    if len(indices) < 2 * ranks:
        return False
    if isinstance(indices, range):
        return (indices.start, indices.step) == (rank, ranks)
    array = numpy.asarray(indices)
    return array.ndim == 1 and int(array[0]) == rank and bool((numpy.diff(array) == ranks).all())


def _rank_name(function: Any) -> str:  # noqa: ANN401 - a function
    """Return the name by which a function asks for its rank; empty if it does not."""
    code = getattr(function, "__code__", None)
    # Functions and comprehensions inside the function are among its constants.
    codes = [code] if code is not None else []
    while codes:
        code = codes.pop()
        if names := _RANK_NAMES.intersection(code.co_names):
            return min(names)
        if variables := _RANK_VARIABLES.intersection(item for item in code.co_consts if isinstance(item, str)):
            return f"the variable {min(variables)}"
        codes += [item for item in code.co_consts if isinstance(item, types.CodeType)]
    return ""


# Fingerprints ------------------------------------------------------------------------------------------------------


def fingerprint_dataset(dataset: Any) -> int:  # noqa: ANN401 - any dataset
    """Return a positive number that is equal on all ranks for the same dataset, from its length and a few samples."""
    length = ""
    if hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset):
        # A dataset need not know its length if its sampler does.
        with contextlib.suppress(TypeError, NotImplementedError):
            length = str(len(dataset))
    return _number([length, *_describe(dataset, 0)])


def fingerprint_sampler(loader: Any) -> int:  # noqa: ANN401 - a DataLoader
    """Return a positive number that is equal on all ranks for the same samplers; 0 if a rank's own part is meant."""
    described: list[str] = []
    for sampler in _chain(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler):
        # It differs between the ranks on purpose.
        if isinstance(sampler, DistributedSampler):
            return 0
        described.append(type(sampler).__name__)
        for name, value in sorted(getattr(sampler, "__dict__", {}).items()):
            if name == "data_source":
                continue  # the dataset, which has a fingerprint of its own
            if type(value) in {int, float, bool, str}:
                described.append(f"{name}={value!r}")
            elif isinstance(value, list | tuple | range | numpy.ndarray | torch.Tensor):
                described += [name, *_describe(value, _MAX_DEPTH)]
    return _number(described)


def _number(described: list[str]) -> int:
    # Seven bytes, and at least 1: the number travels as a signed 64-bit integer, and 0 means that there is none.
    return int.from_bytes(blake2b("\n".join(described).encode(), digest_size=7).digest(), "little") | 1


def _describe(value: Any, depth: int) -> Iterator[str]:  # noqa: ANN401 - a dataset or a part of one
    yield type(value).__name__
    if isinstance(value, torch.Tensor):
        yield f"{list(value.shape)} {value.dtype}"
        # Only what lies in memory: a copy from a device would wait for it. The first and the last row differ between
        # parts of a dataset, and reading them costs the same for any length.
        if value.dim() and len(value) and value.device.type == "cpu" and value.layout is torch.strided:
            yield from (_bytes_of(value[index]) for index in (0, -1))
    elif isinstance(value, numpy.ndarray):
        yield f"{value.shape} {value.dtype}"
        if value.ndim and len(value) and value.dtype.kind in "biufcSU":
            yield from (_digest(numpy.ascontiguousarray(value[index]).tobytes()[:_PREFIX]) for index in (0, -1))
    elif isinstance(value, list | tuple | range):
        yield str(len(value))
        for item in (value[0], value[-1]) if len(value) else ():
            yield from _describe_item(item, depth)
    elif isinstance(value, TensorDataset):
        for tensor in value.tensors:
            yield from _describe(tensor, depth + 1)
    elif _is_arrow(value):
        yield from _describe_rows(value)
    elif (isinstance(value, Dataset) and depth <= _MAX_DEPTH) or depth == 0:
        if isinstance(value, Subset | ConcatDataset) and hasattr(value, "__len__"):
            yield str(len(value))
        # Not by `value[0]`, which is the user's code, may decode a file, and may draw random numbers.
        for name, item in sorted(getattr(value, "__dict__", {}).items()):
            if isinstance(item, list | tuple | range | numpy.ndarray | torch.Tensor | Dataset) or _is_arrow(item):
                yield name
                yield from _describe(item, depth + 1)


def _is_arrow(value: Any) -> bool:  # noqa: ANN401 - any dataset
    """Return True for a `datasets.Dataset`: an Arrow table, and the indices of its rows or None for all rows.

    The library is not imported. The names are those of its versions 2.21 to 5.2, in which `shard`, `select` and
    `split_dataset_by_node` take a slice of `_data` or set `_indices`.
    """
    attributes = getattr(value, "__dict__", {})
    return "_indices" in attributes and hasattr(attributes.get("_data"), "fast_slice")


def _describe_rows(dataset: Any) -> Iterator[str]:  # noqa: ANN401 - a datasets.Dataset
    """Yield a description of the first and the last row as they are stored, before any transform and any decoding.

    `_fingerprint` is not read: it is a random number if a function of `map` or `filter` cannot be hashed, and so
    differs between ranks with equal rows.
    """
    # A missing method of another version, or an error of Arrow, which are subclasses of these.
    with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError, OSError, NotImplementedError):
        for index in (0, len(dataset) - 1):
            row = index
            if dataset._indices is not None:
                row = dataset._indices.fast_slice(index, 1).column(0)[0].as_py()
            cells = dataset._data.fast_slice(row, 1)
            for name in cells.column_names:
                cell = cells.column(name)
                yield name
                if cell.nbytes <= _MAX_CELL:
                    yield _digest(repr(_ends_of(cell[0].as_py(), _PREFIX)).encode())


def _ends_of(value: Any, count: int) -> Any:  # noqa: ANN401 - a value of Arrow, as Python's
    """Return the beginning and the end of a nested value, `count` items in all.

    Tokens and texts of different samples begin and end alike, with the same prompt or padding, so that one item at
    either end would not tell them apart.
    """
    if isinstance(value, dict):
        return {name: _ends_of(item, count) for name, item in value.items()}
    half = count // 2
    if isinstance(value, list):
        items = value if len(value) <= count else [*value[:half], *value[-half:]]
        return [_ends_of(item, max(4, count // 16)) for item in items]
    if isinstance(value, str | bytes) and len(value) > count:
        return value[:half], value[-half:]
    return value


def _describe_item(item: Any, depth: int) -> Iterator[str]:  # noqa: ANN401 - an item of a list
    if type(item) in {int, float, str, bytes, bool}:
        yield _digest(repr(item).encode()[:_PREFIX])
    elif depth <= _MAX_DEPTH and isinstance(item, torch.Tensor | numpy.ndarray | tuple | list):
        yield from _describe(item, depth + 1)


def _bytes_of(row: torch.Tensor) -> str:
    values = row.detach().reshape(-1)[: _PREFIX // max(1, row.element_size())].contiguous()
    return _digest(values.view(torch.uint8).numpy().tobytes())


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=7).hexdigest()
