"""Content of a training checkpoint: what `save_state` stores, and how `load_state` restores it.

Models and optimizers are stored as sharded tensors. Schedulers, loaders, the gradient scaler and registered objects are
stored as rank 0 has them. The random state of every rank is a separate object, and so is the dataset state of
torchdata's loader on every rank.

Order of loading. Checks come before changes: read the manifest, check that all objects are stored, load the objects,
match the stored tensors with the models and optimizers, and let the loaders accept the new world size. Then the tensors
are read into the models and optimizers, and the other objects are restored.

This module is imported on the first save or load. Folders, hooks and numbering are in methods.py and training_state.py.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankbook.checkpoint.async_save import SaveHandle
from rankbook.checkpoint.format.manifest import Manifest
from rankbook.checkpoint.loading import load, load_metadata, prepare_load
from rankbook.checkpoint.local_state import local_state_of
from rankbook.checkpoint.saving import Saved, save_contents
from rankbook.checkpoint.state_dict.models import load_sharded_state_dicts, sharded_state_dicts
from rankbook.checkpoint.state_dict.sharded_tensor import ShardedObject
from rankbook.checkpoint.storage.base import ASIDE
from rankbook.checkpoint.storage.local import LocalStorage, storage_of
from rankbook.checkpoint.storage.steps import PARTIAL, CheckpointLocation, is_checkpoint
from rankbook.errors import BadRequest, CheckpointingException
from rankbook.runtime.saving import training_state

Told = Callable[[str], AbstractContextManager[None]]
"""Context manager for a block that may fail on some ranks, and then raises on all."""

_KIND = "rankbook.runtime"
_RANDOM = "random_states"
_OWN_FILE = re.compile(r"__\d+_\d+\.distcp|\.metadata|metadata\.json|manifest\.json|common\.pt")


@dataclass(frozen=True)
class TrainingParts:
    """Objects to save or restore, by name. `objects` are those with state that are not models or optimizers."""

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    objects: Mapping[str, Any]
    rank: int
    world_size: int

    @property
    def names(self) -> list[str]:
        """Names of all objects as they are stored."""
        return [*self.models, *self.optimizers, *self.objects]


def training_parts(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    others: Mapping[str, Sequence[Any]],
    rank: int,
    world_size: int,
) -> TrainingParts:
    """Name the objects ("model", "model_1" and so on) and return them. `others` are lists by kind."""
    objects = {name: item for kind, items in others.items() for name, item in _named(kind, items).items()}
    return TrainingParts(_named("model", models), _named("optimizer", optimizers), objects, rank, world_size)


def _named(kind: str, things: Sequence[Any]) -> dict[str, Any]:
    return {f"{kind}_{number}" if number else kind: item for number, item in enumerate(things)}


@dataclass
class Folder(CheckpointLocation):
    """Location of a checkpoint. `after` is called on rank 0 when the checkpoint is complete."""

    after: Callable[[], None] = field(default=lambda: None)

    def commit(self) -> None:
        """Commit the checkpoint on rank 0, keeping files that a hook or the user has put into the folder."""
        if isinstance(self.storage, LocalStorage) and self.name is not None:
            _carry_over(self.storage.root / self.name, self.storage.root / f"{self.name}{PARTIAL}")
        super().commit()
        self.after()


def _carry_over(folder: Path, draft: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        if _OWN_FILE.fullmatch(path.name) is None:
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, draft / path.name, symlinks=True, copy_function=_linked)
            else:
                _linked(path, draft / path.name)


def _linked(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # the file system has no hard links
        shutil.copy2(source, target, follow_symlinks=False)


def split_folder(folder: str) -> tuple[str, str]:
    """Split a folder or its URL into parent and name. Raises `BadRequest` if it has no parent folder."""
    if "://" in folder:
        scheme, _, path = folder.partition("://")
        above, _, name = path.rstrip("/").rpartition("/")
        if not above.strip("/"):
            raise BadRequest(f"{folder}: a checkpoint needs a folder within another, such as {scheme}://run/state")
        return f"{scheme}://{above}", name
    whole = Path(os.path.abspath(folder))  # noqa: PTH100 - unlike resolve, it keeps symbolic links
    return str(whole.parent), whole.name


def write_state(
    found: TrainingParts,
    states: Mapping[str, Mapping[str, Any]],
    folder: str,
    *,
    told: Told,
    async_: bool,
    after: Callable[[], None],
) -> Saved | SaveHandle:
    """Save all objects, with `states` for the models, replacing the content of the folder. A collective."""
    with told("save_state"):
        objects = {name: item.state_dict() for name, item in found.objects.items()}
        random = training_state.random_state()
    state = {
        **sharded_state_dicts(found.models, found.optimizers, states=states),
        "objects": {name: ShardedObject(name, value, (1,), (0,), found.rank) for name, value in objects.items()},
        "readers": {
            name: ShardedObject(name, value, (found.world_size,), (found.rank,)) for name, value in _readers(objects)
        },
        _RANDOM: ShardedObject(_RANDOM, random, (found.world_size,), (found.rank,)),
    }
    above, name = split_folder(folder)
    place = Folder(storage_of(above), above, name=name, after=after)
    parts = [part for part in found.names if part in states or part not in found.models]
    return save_contents(local_state_of(state), place, metadata={_KIND: {"parts": parts}}, async_=async_)


def read_state(
    found: TrainingParts, folder: str, *, told: Told, strict: bool, allow: Sequence[type | str] = ()
) -> None:
    """Restore all objects from a checkpoint.

    A collective; raises on every rank, `BadRequest` if objects are missing.
    """
    with told("load_state"):
        folder = existing_folder(folder)
        manifest = load_metadata(folder)
        _check(found, manifest, folder)
    objects = load(_objects(found, manifest), folder, allow=allow)
    requested = sharded_state_dicts(found.models, found.optimizers)
    with told("load_state"):
        requested = _stored(requested, manifest, folder, strict=strict)
    prepared = prepare_load(requested, folder, allow=allow)
    with told("load_state"):  # a loader may refuse this world size, before anything else has changed
        for name, item in found.objects.items():
            if name.partition("_")[0] == "loader":
                reader = objects.get(f"{name}.reader")
                item.load_state_dict(objects[name] if reader is None else {**objects[name], "reader": reader})
    loaded = prepared.fill()
    with told("load_state"):
        load_sharded_state_dicts(found.models, found.optimizers, loaded)
        for name, item in found.objects.items():
            if name.partition("_")[0] != "loader" and name in objects:  # the scaler of fp16 may start without a state
                item.load_state_dict(objects[name])
        if objects.get(_RANDOM) is not None:
            training_state.restore_random_state(objects[_RANDOM])


def _readers(objects: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the dataset states of the loaders that have one, by name."""
    loaders = [(name, state) for name, state in objects.items() if name.partition("_")[0] == "loader"]
    return [(f"{name}.reader", state["reader"]) for name, state in loaders if "reader" in state]


def existing_folder(folder: str) -> str:
    """Return the folder that contains the checkpoint. Raises `BadRequest` if there is none."""
    above, name = split_folder(folder)
    storage = storage_of(above)
    for candidate in (name, f"{name}{ASIDE}"):  # aside: a save was killed while it replaced the checkpoint
        if is_checkpoint(storage.list(candidate)):
            return f"{above}/{candidate}"
    if "model.pt" in storage.list(name):
        raise BadRequest(f"{folder} was written by a Rankbook before checkpoints were sharded, and cannot be read")
    raise BadRequest(f"there is no checkpoint {folder}")


def _check(found: TrainingParts, manifest: Manifest, folder: str) -> None:
    try:
        stored = manifest.metadata[_KIND]["parts"]
    except (KeyError, TypeError) as error:
        raise BadRequest(f"{folder} is no checkpoint of save_state: rankbook.checkpoint.load reads it") from error
    if missing := [name for name in found.names if name not in stored and name != "scaler"]:
        raise BadRequest(f"{folder} has no {', '.join(missing)}: prepare what was prepared when it was saved")


def _objects(found: TrainingParts, manifest: Manifest) -> dict[str, Any]:
    """Return the objects to load.

    The scaler of fp16 is optional, and a rank beyond the saved world size has no random state to load.
    """
    requests = {name: ShardedObject(name, None, (1,), (0,)) for name in found.objects}
    requests[_RANDOM] = ShardedObject(
        _RANDOM, None, (manifest.world_size,), (min(found.rank, manifest.world_size - 1),)
    )
    if found.rank >= manifest.world_size:
        del requests[_RANDOM]
    if found.world_size == manifest.world_size:
        readers = {f"{name}.reader" for name in found.objects}
        requests |= {name: ShardedObject(name, None, (found.world_size,), (found.rank,)) for name in readers}
    optional = {name for name in requests if name == "scaler" or name.endswith(".reader")}
    return {
        name: request
        for name, request in requests.items()
        if name not in optional or request.unique_key in manifest.objects
    }


def _stored(wanted: dict[str, Any], manifest: Manifest, folder: str, *, strict: bool) -> dict[str, Any]:
    """Return `wanted` without the entries that are not stored.

    Entries may be missing for models if not `strict`, and for optimizers that had not made a step when they were saved.
    """
    stored = {*manifest.tensors, *manifest.objects}

    def known(entry: Any) -> bool:  # noqa: ANN401 - a shard or a value
        return not hasattr(entry, "key") or getattr(entry, "unique_key", entry.key) in stored

    for name, entries in wanted["models"].items():
        lacking = sorted(key for key, entry in entries.items() if not known(entry))
        model_keys = {f"{name}.{key}" for key in entries}
        surplus = sorted(
            key for key in stored if key.startswith(f"{name}.") and _plain(key, manifest) not in model_keys
        )
        if strict and (lacking or surplus):
            gaps = [
                f"{phrase}: {', '.join(map(repr, keys[:8]))}" + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
                for phrase, keys in (("it has no", lacking), ("only it has", surplus))
                if keys
            ]
            raise CheckpointingException(
                f"{folder} does not fit the {name.replace('_', ' ')}; {'; '.join(gaps)}. strict=False loads the rest"
            )
        wanted["models"][name] = {key: entry for key, entry in entries.items() if known(entry)}
    for optimizer in wanted["optimizers"].values():
        for values in optimizer["state"].values():
            for quantity in [quantity for quantity, entry in values.items() if not known(entry)]:
                del values[quantity]
        optimizer["state"] = {name: values for name, values in optimizer["state"].items() if values}
    return wanted


def _plain(key: str, manifest: Manifest) -> str:
    return ShardedObject.empty_from_unique_key(key).key if key in manifest.objects else key
