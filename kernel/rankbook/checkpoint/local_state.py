"""Represent one rank's part of a state dict for planning, writing and loading.

`LocalState` holds the tensors, objects and common part that a save writes, with their digests; `snapshot` makes a copy
that training cannot change. `LoadRequest` holds what a load asks for. Neither communicates with other ranks or accesses
files.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Any

import torch

from rankbook.checkpoint.format.manifest import Manifest
from rankbook.checkpoint.format.tensor_io import dtype_named, object_blob
from rankbook.checkpoint.load_plan import WantedChunk
from rankbook.checkpoint.local_plan import LocalPlan, LocalShard
from rankbook.checkpoint.state_dict.sharded_tensor import (
    EqualTensor,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from rankbook.checkpoint.state_dict.state_dicts import nest, normalize_path, partition
from rankbook.errors import CheckpointError


@dataclass(frozen=True)
class LocalTensor:
    """`ShardedTensor` in the form that planning uses.

    Shapes and offsets have all axes of the global tensor, including the prepended ones, which have extent 1 locally.
    """

    key: str
    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    is_main: bool
    dtype_name: str
    allow_shape_mismatch: bool = False

    @classmethod
    def of(cls, tensor: ShardedTensor) -> LocalTensor:
        """Convert a `ShardedTensor`.

        If it has no data, as on a rank that writes nothing, the data is a meta tensor.
        """
        # Planning knows no prepended axes: a shard with them is a box of extent 1 along these axes.
        shape = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
        return cls(
            tensor.key,
            tensor.data
            if tensor.data is not None
            # A meta tensor has shape and dtype and no memory.
            else torch.empty(tensor.local_shape, dtype=tensor.dtype, device="meta"),
            tuple(tensor.global_shape),
            tuple(tensor.global_offset),
            shape,
            is_main_replica(tensor.replica_id),
            str(tensor.dtype).removeprefix("torch."),
            tensor.allow_shape_mismatch,
        )

    def read_request(self) -> WantedChunk:
        """Return the read request for this tensor."""
        return WantedChunk(
            key=self.key,
            dtype=self.dtype_name,
            global_shape=self.global_shape,
            offset=self.global_offset,
            shape=self.local_shape,
            allow_shape_mismatch=self.allow_shape_mismatch,
        )

    @property
    def nbytes(self) -> int:
        """Return the size of the data in bytes."""
        return prod(self.local_shape) * self.data.element_size()


@dataclass(frozen=True)
class LocalObject:
    """`ShardedObject` in the form that planning uses.

    `pickled` is the serialized data, if the object is a `snapshot`.
    """

    key: str
    unique_key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    is_main: bool
    pickled: bytes | None = None

    def blob(self) -> bytes:
        """Return the bytes that are stored for the object."""
        return object_blob(self.data) if self.pickled is None else self.pickled

    def snapshot(self) -> LocalObject:
        """Return a copy with the data already serialized."""
        return replace(self, data=None, pickled=self.blob())

    @classmethod
    def of(cls, shard: ShardedObject) -> LocalObject:
        """Convert a `ShardedObject`."""
        shape, offset = tuple(shard.global_shape), tuple(shard.global_offset)
        return cls(shard.key, shard.unique_key, shard.data, shape, offset, is_main_replica(shard.replica_id))


@dataclass
class LocalState:
    """State dict of one rank, taken apart for planning and writing.

    `common` is everything that is neither a sharded tensor nor a sharded object: nested, with plain values as leaves.
    `common_pickled` is its serialized form, if the state is a `snapshot`. `equal` are tensors that must be the same on
    all ranks, by key.
    """

    tensors: Sequence[LocalTensor]
    objects: Sequence[LocalObject]
    common: Any = field(default_factory=dict)
    common_pickled: bytes | None = None
    equal: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    # Computed once: a save that has to declare in full after it has sent its digests uses it twice.
    def _local_plan(self) -> LocalPlan:
        return LocalPlan.of(
            [
                LocalShard(e.key, e.global_shape, e.global_offset, e.local_shape, e.dtype_name, e.is_main)
                for e in self.tensors
            ],
            [LocalShard(e.key, e.global_shape, e.global_offset, is_main=e.is_main) for e in self.objects],
            # These tensors are stored as others are, and compared as the common part is.
            common=dict(state_digests(self.common)) | {key: _tensor_digest(value) for key, value in self.equal.items()},
        )

    def local_plan(self) -> LocalPlan:
        """Return the declaration that this rank sends to rank 0."""
        return self._local_plan

    def common_file(self) -> bytes:
        """Return the common part in the format of `torch.save`."""
        if self.common_pickled is not None:
            return self.common_pickled
        stream = io.BytesIO()
        torch.save(self.common, stream)
        return stream.getvalue()

    def snapshot(self, tensors: Sequence[LocalTensor], *, is_coordinator: bool) -> LocalState:
        """Return a copy of the state with the given tensors, which the caller cannot change.

        Objects are serialized now, and so is the common part on the coordinator, which is the rank that writes it.
        """
        # Objects have no general way to be copied, so they are pickled now, in the calling thread.
        objects = [entry.snapshot() for entry in self.objects]
        copy = LocalState(tensors, objects, {}, self.common_file() if is_coordinator else b"")
        # The plan was made from the original: the copy no longer has the common part that its digests are computed
        # from.
        copy._local_plan = self._local_plan
        return copy


class FailedStaging(LocalState):
    """State that could not be copied.

    `local_plan` raises the error of the copy. It is called in the plan, so the error is raised on every rank.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__((), ())
        self._error = error

    def local_plan(self) -> LocalPlan:
        """Raise the error of the copy."""
        raise self._error


def state_digests(value: Any, path: str = "") -> Iterator[tuple[str, str]]:  # noqa: ANN401 - any part of a state dict
    """Yield the path and a digest of every leaf, so that ranks can compare their common parts."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            # Example: {"lr": 0.1, "betas": (0.9, 0.99)} yields ("lr", ...), ("betas[0]", ...) and ("betas[1]", ...). An
            # empty container is a leaf, so that {} and a missing entry differ.
            yield from state_digests(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and value:
        for number, item in enumerate(value):
            yield from state_digests(item, f"{path}[{number}]")
    else:
        yield path, blake2b(_leaf_bytes(value), digest_size=8).hexdigest()


def _leaf_bytes(value: Any) -> bytes:  # noqa: ANN401 - a leaf
    # `repr` of these is the same in all processes, unlike a pickle, which depends on which objects are shared.
    # Containers come here only if they are empty.
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | dict | list | tuple):
        return f"{type(value).__name__} {value!r}".encode()
    if isinstance(value, torch.Tensor):
        stream = io.BytesIO()
        # With dtype and shape, which the raw bytes alone would not tell.
        torch.save(value.detach().cpu(), stream)
        return stream.getvalue()
    if isinstance(value, set | frozenset):  # the order of its elements differs between processes
        return f"{type(value).__name__} {sorted(str(list(state_digests(item))) for item in value)}".encode()
    return pickle.dumps(value)


def _tensor_digest(tensor: torch.Tensor) -> str:
    # Without dtype and shape, which are compared for all tensors.
    data = tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return blake2b(data, digest_size=8).hexdigest()


def local_state_of(sharded_state_dict: Any) -> LocalState:  # noqa: ANN401
    """Return this rank's part of a sharded state dict.

    A collective. Raises `CheckpointError`.
    """
    split = partition(sharded_state_dict)
    tensors = [LocalTensor.of(tensor.shard) for tensor in split.tensors]
    shards = [entry.shard for entry in split.tensors]
    equal = {shard.key: shard.data for shard in shards if isinstance(shard, EqualTensor) and shard.data is not None}
    return LocalState(tensors, [LocalObject.of(shard) for _, shard in split.objects], split.common, equal=equal)


class LoadRequest:
    """Request of one rank to a load: the memory to fill, and its places in the state dict.

    With `all_values`, all stored plain values are requested too.
    """

    def __init__(self, sharded_state_dict: Any, manifest: Manifest, *, all_values: bool = False) -> None:  # noqa: ANN401
        stored = {key: (tensor.shape, tensor.dtype) for key, tensor in manifest.tensors.items()}
        # No collective: which replica is the main one has no meaning for a load.
        self._split = partition(sharded_state_dict, stored=stored, gather=None)
        self._all_values = all_values
        # positions of the tensors whose memory is allocated here, and may be overwritten in part by a failed load
        self.fresh: set[int] = set()
        # Memory is allocated before the reads are planned, so that a lack of it is an error of this phase, on all
        # ranks.
        for position, entry in enumerate(self._split.tensors):
            if entry.shard.data is None:
                # The caller has passed an entry without data and gets new memory.
                entry.shard.init_data("cpu")
                self.fresh.add(position)
            elif entry.shard.data.is_meta:
                raise CheckpointError(
                    f"{entry.shard.key!r} is on the meta device, where nothing can be stored; call "
                    "to_empty(device=...) on the model before the load"
                )
        self.tensors = [LocalTensor.of(tensor.shard) for tensor in self._split.tensors]
        self.objects = [LocalObject.of(shard) for _, shard in self._split.objects]

    def values(self, paths: Mapping[str, tuple[str | int, ...]]) -> dict[str, tuple[Any, ...]]:
        """Return the requested plain values: their keys with their paths in the state dict.

        Checkpoints of other programs may store plain values as objects of their own; `paths` maps their keys to their
        paths. A value is requested if the state dict has the top-level container of its path, or with `all_values`.
        """
        requested = self._split.containers
        return {
            key: normalize_path(path, requested)
            for key, path in paths.items()
            # The first step decides: who asks for "optimizer" wants all of its plain values, also those that it does
            # not have yet.
            if self._all_values or path[0] in requested
        }

    def nest(self, leaves: Iterable[tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
        """Build a part of the state dict from leaves, given as (path, value)."""
        return nest(leaves, self._split.containers)

    def assemble(self, objects: Mapping[str, Any], common: Any, skipped: Collection[str]) -> Any:  # noqa: ANN401
        """Return the state dict with the loaded tensors, objects and common part; skipped keys are left out."""
        split = self._split
        values: dict[tuple[Any, ...], Any] = {
            entry.path: entry.restore(entry.shard.data)
            for entry in split.tensors
            if entry.shard.key not in skipped and entry.shard.data is not None
        }
        values.update({path: objects[shard.unique_key] for path, shard in split.objects if shard.unique_key in objects})
        return split.assemble(values, common)


def request_everything(manifest: Manifest) -> dict[str, Any]:
    """Return a sharded state dict that asks for all tensors and objects of a checkpoint, unsharded."""
    state_dict: dict[str, Any] = {}
    for key, tensor in manifest.tensors.items():
        zeros = (0,) * len(tensor.shape)
        state_dict[key] = ShardedTensor(key, None, dtype_named(tensor.dtype), tensor.shape, tensor.shape, zeros, None)
    for key in manifest.objects.keys() - manifest.values.keys():
        state_dict[key] = ShardedObject.empty_from_unique_key(key)
    return state_dict
