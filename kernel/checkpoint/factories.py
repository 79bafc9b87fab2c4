"""Entries that are built before saving and merged after loading.

Owns: `ShardedTensorFactory`, how factories are applied and their merges undone. Refuses: to know what they build.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from rankbook.checkpoint.sharded_base import ReplicaId, ShardedBase, ShardedStateDict, StateDict
from rankbook.errors import CheckpointingException

FactoryBuildFn: TypeAlias = Callable[[str, torch.Tensor, ReplicaId, slice | None], ShardedStateDict]
FactoryMergeFn: TypeAlias = Callable[[StateDict], torch.Tensor]
Path: TypeAlias = tuple[str | int, ...]

_NOTHING = object()


@dataclass
class ShardedTensorFactory(ShardedBase):
    """Turns a tensor into a sharded state dict before it is saved, and back after it was loaded.

    `build_fn(key, data, replica_id, flattened_range)` makes the sharded state dict and must depend on nothing else, so
    that an optimizer can apply it to its state as to the parameter. `merge_fn(loaded)` is its inverse. What is built
    may hold factories again.
    """

    key: str
    data: torch.Tensor
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> ShardedStateDict:
        """The sharded state dict that stands for the tensor."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Nothing to check: what counts is what it builds."""

    def without_data(self) -> ShardedTensorFactory:
        """A new one with `data=None`."""
        return replace(self, data=None)  # type: ignore[arg-type]  # as for all entries


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Put what each factory builds into its place, in dicts, lists and tuples, at any depth.

    Dicts and lists are changed in place; a tuple is replaced by a new one where it holds a factory. Raises
    `CheckpointingException` where the outermost object is itself a factory or such a tuple.
    """
    if _applied(sharded_state_dict) is not sharded_state_dict:
        raise CheckpointingException(
            f"a {type(sharded_state_dict).__name__} cannot be changed in place: put it into a dict or a list"
        )


def _applied(value: Any) -> Any:  # noqa: ANN401 - any part of a state dict
    if isinstance(value, ShardedTensorFactory):
        built = value.build()
        # What is merged later has to know what was built inside; no field, for the fields are the map's.
        vars(value)["_inner"] = factories_of(built)
        return _applied(built)
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = _applied(each)
    elif isinstance(value, list):
        value[:] = map(_applied, value)
    elif isinstance(value, tuple):
        new = [_applied(each) for each in value]
        if any(one is not other for one, other in zip(new, value, strict=True)):
            return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    return value


def factories_of(sharded_state_dict: Any) -> Any:  # noqa: ANN401 - any part of a state dict
    """Its factories, as `apply_factory_merges` wants them: dicts and lists as dicts, with nothing else in them.

    A factory alone is returned as it is; `{}` where there is none.
    """
    if isinstance(sharded_state_dict, ShardedTensorFactory):
        return sharded_state_dict
    if isinstance(sharded_state_dict, dict):
        items = list(sharded_state_dict.items())
    elif isinstance(sharded_state_dict, list | tuple):
        items = list(enumerate(sharded_state_dict))
    else:
        return {}
    return {key: found for key, each in items if (found := factories_of(each)) != {}}


def apply_factory_merges(x1: StateDict, x2: ShardedStateDict, key: Path = ()) -> StateDict:
    """Merge what was loaded into `x1` where `x2` has a factory; `x1` is changed in place and returned.

    `x2` has factories at some of the places of `x1`; a list or tuple of `x1` may stand there as a list of the same
    length, or as a dict by integers. `key` is the path to here, for messages. Raises `CheckpointingException` with
    the whole path for a key that is missing, lists of different lengths, a key of a list that is no integer or out of
    bounds, and for anything else that is no factory.
    """
    merged: StateDict = _merged(x1, x2, key)
    return merged


def _merged(loaded: Any, factories: Any, key: Path) -> Any:  # noqa: ANN401 - any part of a state dict
    if isinstance(factories, ShardedTensorFactory):
        return factories.merge_fn(_merged_inside(loaded, factories, key))
    if isinstance(loaded, dict) and isinstance(factories, dict):
        for name, below in factories.items():
            if name not in loaded:
                raise CheckpointingException(f"{_spell(key)}: no key {name!r} among what was loaded: {list(loaded)}")
            loaded[name] = _merged(loaded[name], below, (*key, name))
        return loaded
    if isinstance(loaded, list | tuple) and isinstance(factories, list | tuple | dict):
        merged = _merged_list(list(loaded), factories, key)
        if isinstance(loaded, list):
            loaded[:] = merged
            return loaded
        return type(loaded)(*merged) if hasattr(loaded, "_fields") else type(loaded)(merged)
    raise CheckpointingException(
        f"{_spell(key)}: a {type(loaded).__name__} was loaded where the factories have a {type(factories).__name__}"
    )


def _merged_list(loaded: list[Any], factories: Any, key: Path) -> list[Any]:  # noqa: ANN401 - a list, tuple or dict
    if not isinstance(factories, dict):
        if len(loaded) != len(factories):
            raise CheckpointingException(
                f"{_spell(key)}: {len(loaded)} elements were loaded where the factories have {len(factories)}"
            )
        factories = dict(enumerate(factories))
    for index, below in factories.items():
        if not isinstance(index, int):
            raise CheckpointingException(f"{_spell(key)}: {index!r} is no index of the list that was loaded")
        if not 0 <= index < len(loaded):
            raise CheckpointingException(f"{_spell(key)}: {index} is out of the bounds of {len(loaded)} elements")
        loaded[index] = _merged(loaded[index], below, (*key, index))
    return loaded


def _merged_inside(loaded: Any, factory: ShardedTensorFactory, key: Path) -> Any:  # noqa: ANN401 - any part
    inner = vars(factory).get("_inner", _NOTHING)
    if inner is _NOTHING:
        inner = factories_of(factory.build())
    return _merged(loaded, inner, key) if inner != {} else loaded


def _spell(key: Path) -> str:
    return "".join(f"[{each!r}]" for each in key) or "the state dict"
