"""What a rank hands to the one that takes a dead rank's place, and how that one takes it over.

Owns: which variables travel, and why others do not. Refuses: to choose the peer, and to make groups.

All variables are pickled at once, so that an optimizer still holds the parameters of its model. Functions and classes
of cells keep to the namespace they are in: on the new rank they see its variables.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import _resolve_process_group

from rankbook.errors import TransferError
from rankbook.rank import models
from rankbook.rank.recoverable import RecoverableGroup
from rankbook.transport.payload import Packed, pack, why_not
from rankbook.transport.segments import SegmentStore

_SAVES = "rankbook.checkpoint.driving"
_namespaces: list[dict[str, Any]] = []
"""The namespace of this rank's cells, which functions that arrive from a peer see."""


class State(TypedDict):
    """What travels. `missing` maps each variable that does not to the reason; `imports` names to modules."""

    variables: dict[str, Any]
    imports: dict[str, str]
    missing: dict[str, str]
    path: list[str]
    folder: str


class Adopted(TypedDict):
    """What the new rank has: how many of each kind, and the reasons for what it has not."""

    variables: int
    functions: int
    imports: int
    missing: dict[str, str]


def export_state(namespace: dict[str, Any], hidden: Mapping[str, Any], store: SegmentStore) -> Packed:
    """Everything of `namespace` that can travel; what is in `hidden` each rank has by itself."""
    own = {name: value for name, value in namespace.items() if not name.startswith("_") and name not in hidden}
    imports = {name: value.__name__ for name, value in own.items() if isinstance(value, types.ModuleType)}
    reduce = _Reducer(namespace)
    missing: dict[str, str] = {}
    variables: dict[str, Any] = {}
    for name, value in own.items():
        if name not in imports:
            if value is dist.GroupMember.NON_GROUP_MEMBER:
                reason: str | None = "the rank that was asked is no member of this group; make it again on all ranks"
            else:
                reason = why_not(value, name=name, reduce=reduce)
            if reason is None:
                variables[name] = value
            else:
                missing[name] = reason
    state = State(variables=variables, imports=imports, missing=missing, path=list(sys.path), folder=str(Path.cwd()))
    return pack(state, store=store, reduce=reduce)


def adopt_state(namespace: dict[str, Any], state: State | None) -> Adopted:
    """Put a peer's `state` into `namespace`; without one, make this rank's models ready for the newcomer."""
    if state is None:
        models.start_over()
        return Adopted(variables=0, functions=0, imports=0, missing={})
    missing = dict(state["missing"])
    sys.path[:] = state["path"]
    try:
        os.chdir(state["folder"])
    except OSError as error:
        missing["the current folder"] = str(error)
    for name, module in state["imports"].items():
        try:
            namespace[name] = importlib.import_module(module)
        except ImportError as error:
            missing[name] = str(error)
    namespace.update(state["variables"])
    functions = sum(isinstance(value, (types.FunctionType, type)) for value in state["variables"].values())
    return Adopted(
        variables=len(state["variables"]) - functions,
        functions=functions,
        imports=sum(name not in missing for name in state["imports"]),
        missing=missing,
    )


def stand_for(namespace: dict[str, Any]) -> None:
    """Functions that arrive from a peer see this namespace."""
    _namespaces[:] = [namespace]


class _Reducer:
    """Takes apart what pickle cannot, or would take along too much of."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace

    def __call__(self, value: object) -> Any:  # noqa: ANN401 - pickle's own contract
        if isinstance(value, types.FunctionType) and value.__globals__ is self._namespace:
            return _reduce_function(value)
        if isinstance(value, RecoverableGroup):
            return _group_here, (value.group_name,)
        if isinstance(value, torch.Tensor):
            placements = getattr(value, "placements", ())
            if any(not each.is_replicate() for each in placements):
                raise TransferError(
                    f"it is sharded over the ranks: what the dead one held of it is lost{_last_saved()}"
                )
            if value.device.type == "cuda" and type(value) in (torch.Tensor, torch.nn.Parameter):
                kind = torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else None
                return _on_this_device, (value.detach().cpu(), kind, value.requires_grad)
        return NotImplemented


def _last_saved() -> str:
    """Where a sharded variable may lie still."""
    driving = sys.modules.get(_SAVES)  # without it no cell has saved anything
    saved = driving.last_saved() if driving is not None else None
    if saved is None or not ("://" in saved.folder or Path(saved.folder, saved.name).is_dir()):
        return ""
    return f"; the last checkpoint is {saved.folder}/{saved.name}"


def _group_here(name: str) -> Any:  # noqa: ANN401 - a group, or what torch has for those that are in none
    try:
        return _resolve_process_group(c10d.GroupName(name))
    except RuntimeError:  # this rank is no member
        return dist.GroupMember.NON_GROUP_MEMBER


def _reduce_function(function: types.FunctionType) -> tuple[Any, ...]:
    free = len(function.__code__.co_freevars)
    state = {
        "attributes": vars(function),
        "__kwdefaults__": function.__kwdefaults__,
        "__qualname__": function.__qualname__,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
        "__annotations__": function.__annotations__,
        "cells": function.__closure__,
    }
    make = (function.__code__, function.__name__, function.__defaults__, free)
    return _make_function, make, state, None, None, _complete_function


def _make_function(code: types.CodeType, name: str, defaults: tuple[Any, ...] | None, free: int) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in range(free))
    return types.FunctionType(code, _namespaces[0], name, defaults, cells)


def _complete_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    """Afterwards, for a function may be in its own closure."""
    function.__dict__.update(state.pop("attributes"))
    for own, sent in zip(function.__closure__ or (), state.pop("cells") or (), strict=True):
        try:
            own.cell_contents = sent.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    for name, value in state.items():
        setattr(function, name, value)


def _on_this_device(tensor: torch.Tensor, kind: type | None, requires_grad: bool) -> torch.Tensor:
    moved = tensor.to("cuda")  # the rank's own: it is the current one
    if kind is not None:
        return torch.nn.Parameter(moved, requires_grad=requires_grad)
    return moved.requires_grad_(requires_grad)
