"""Content of a training checkpoint: what `save_state` stores, and how `load_state` restores it.

Models and optimizers are stored as sharded tensors. Schedulers, loaders, the gradient scaler and registered objects are
stored as rank 0 has them, except for DTensors in their states, which are stored as sharded tensors. The random state of
every rank is a separate object, and so is the dataset state of torchdata's loader on every rank.

Order of loading. Checks come before changes: read the manifest, check that all objects are stored, load the objects,
match the stored tensors with the models and optimizers, and let the loaders accept their states, which they do for any
number of ranks. Then the tensors are read into the models and optimizers, and the other objects are restored.

This module is imported on the first save or load. Folders, hooks and numbering are in saving.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rankbook.checkpoint.async_save import SaveHandle, wait_for_saves
from rankbook.checkpoint.format.manifest import MANIFEST, Manifest
from rankbook.checkpoint.format.tensor_io import dtype_named
from rankbook.checkpoint.loading import load_metadata, prepare_load
from rankbook.checkpoint.local_state import local_state_of
from rankbook.checkpoint.saving import Saved, save_contents
from rankbook.checkpoint.state_dict.models import (
    check_groups,
    is_cut,
    load_sharded_state_dicts,
    sharded_state_dicts,
)
from rankbook.checkpoint.state_dict.sharded_tensor import ShardedObject, ShardedTensor, format_path
from rankbook.checkpoint.state_dict.state_dicts import as_dtensor, as_sharded, flatten, local_part, map_leaves
from rankbook.checkpoint.storage import ASIDE
from rankbook.checkpoint.storage.backends import LocalStorage, storage_of
from rankbook.checkpoint.storage.steps import (
    PARTIAL,
    CheckpointLocation,
    finished_steps,
    is_checkpoint,
    read_latest,
    step_name,
)
from rankbook.errors import CheckpointError, InvalidArgument
from rankbook.runtime.data.rng import random_state, restore_random_state
from rankbook.runtime.data.stateful import ReadPosition, dataset_length

RaiseOnAll = Callable[[str], AbstractContextManager[None]]
"""Context manager for a block that may fail on some ranks, and then raises on all."""

# Key of the manifest's metadata that tells a training checkpoint from one that was written by
# `rankbook.checkpoint.save`.
_KIND = "rankbook.runtime"
_RANDOM = "random_states"
# Of the DTensors in the states of objects; and the text that the state has in the place of one, before its key.
_TENSORS = "object_tensors"
_SHARDED = f"rankbook.{_TENSORS}:"
# Files that the checkpoint itself consists of. Everything else in a folder belongs to a hook or to the user.
_CHECKPOINT_FILE = re.compile(r"__\d+_\d+\.distcp|\.metadata|metadata\.json|manifest\.json|common\.pt")


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
    objects_by_kind: Mapping[str, Sequence[Any]],
    rank: int,
    world_size: int,
) -> TrainingParts:
    """Name the objects ("model", "model_1" and so on) and return them. `objects_by_kind` has lists."""
    objects = {name: item for kind, items in objects_by_kind.items() for name, item in _by_name(kind, items).items()}
    return TrainingParts(_by_name("model", models), _by_name("optimizer", optimizers), objects, rank, world_size)


def _by_name(kind: str, objects: Sequence[Any]) -> dict[str, Any]:
    # The first object of a kind has no number, the next one is "model_1". Names depend on the order of `prepare`, so a
    # loading script has to prepare the objects in the order of the saving one.
    return {f"{kind}_{number}" if number else kind: item for number, item in enumerate(objects)}


@dataclass
class Folder(CheckpointLocation):
    """Location of a checkpoint. `on_commit` is called on rank 0 when the checkpoint is complete.

    `hook_files` is the folder with the files that hooks have written in this save. It becomes the partial folder.
    """

    on_commit: Callable[[], None] = field(default=lambda: None)
    hook_files: Path | None = None

    def begin(self) -> str:
        """Claim the partial folder. Raises `CheckpointError` also if the save would delete what others have written."""
        self._check_replaceable()
        if self.hook_files is not None:
            _check_hook_files(self.hook_files)
        partial = super().begin()
        if self.hook_files is not None:
            assert isinstance(self.storage, LocalStorage)
            # From here on these files are committed or removed with the others, also after a kill.
            self.hook_files.rename(self.storage.root / partial)
            self.hook_files = None  # the hooks of the next save may use this name, while this save is in the background
        return partial

    def abandon(self) -> None:
        """Remove what this save has written after a failure."""
        super().abandon()
        if self.hook_files is not None:
            shutil.rmtree(self.hook_files, ignore_errors=True)

    def commit(self) -> None:
        """Commit the checkpoint on rank 0, keeping files that a hook or the user has put into the folder.

        Raises `CheckpointError` as `begin` does.
        """
        self._check_replaceable()  # again: other files may have been written meanwhile
        # A commit replaces the whole folder by the draft. Files of the user, and those of hooks in earlier saves, would
        # be lost with the old folder, so they are linked into the draft first. This is done for local folders only.
        if isinstance(self.storage, LocalStorage) and self.name is not None:
            _carry_over(self.storage.root / self.name, self.storage.root / f"{self.name}{PARTIAL}")
        super().commit()
        self.on_commit()

    def _check_replaceable(self) -> None:
        if self.name is None:
            return
        names = self.storage.list(self.name)
        if isinstance(self.storage, LocalStorage):
            _check_folder(self.storage.root / self.name)
            # `commit` keeps all other files than those that have the names of a checkpoint's files.
            if is_checkpoint(names) and MANIFEST not in names:
                raise CheckpointError(
                    f"{self.storage}/{self.name} is a checkpoint of another program, it has no {MANIFEST}: "
                    "move or remove it, or save into another folder (nothing was replaced)"
                )
            # `_carry_over` takes these for the former checkpoint's.
            if MANIFEST not in names and (clash := sorted(name for name in names if _CHECKPOINT_FILE.fullmatch(name))):
                raise CheckpointError(
                    f"{self.storage}/{self.name} contains {clash[0]}, and a checkpoint has a file of this name: "
                    "rename it, or save into another folder (nothing was replaced)"
                )
        # An interrupted save to an object store leaves some of the checkpoint's files there.
        elif others := sorted(name for name in names if _CHECKPOINT_FILE.fullmatch(name) is None):
            raise CheckpointError(
                f"{self.storage}/{self.name} contains {others[0]}, which is not part of a checkpoint, and a save into "
                f"this storage replaces the whole folder: save into a folder of its own, such as "
                f"{self.storage}/{self.name}/state (nothing was replaced)"
            )


def _check_folder(folder: Path) -> None:
    """Raise `CheckpointError` for a folder that a commit cannot exchange, or that is in use as a folder."""
    if not folder.is_dir():
        return
    here, is_inside = Path(), False
    with contextlib.suppress(OSError):  # the working directory was removed, or cannot be reached
        here = Path.cwd()
        is_inside = any(above.samefile(folder) for above in (here, *here.parents))
    if is_inside:
        raise CheckpointError(
            f"the working directory {here} is in {folder}, which a save replaces: save into another folder, such as "
            f"{folder / 'state'} (nothing was replaced)"
        )
    mounts = [folder, *(Path(above, name) for above, names, _ in os.walk(folder) for name in names)]
    if mount := next(filter(os.path.ismount, mounts), None):
        raise CheckpointError(
            f"{mount} is a mount point, which a save into {folder} cannot replace: save into another folder, such as "
            f"{folder / 'state'} (nothing was replaced)"
        )


def _carry_over(folder: Path, draft: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        if _CHECKPOINT_FILE.fullmatch(path.name) is None:
            _link_missing(path, draft / path.name)


def _link_missing(source: Path, target: Path) -> None:
    """Link a file, or the files of a folder, except where a hook has written one of the same name."""
    is_folder = source.is_dir() and not source.is_symlink()
    if is_folder and target.is_dir() and not target.is_symlink():
        for path in source.iterdir():
            _link_missing(path, target / path.name)
    elif os.path.lexists(target):
        return
    elif is_folder:
        shutil.copytree(source, target, symlinks=True, copy_function=_link_file)
    else:
        _link_file(source, target)


def _link_file(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # the file system has no hard links
        shutil.copy2(source, target, follow_symlinks=False)


def hook_folder(folder: str) -> Path:
    """Return the path where the hooks of a save into the local `folder` write their files."""
    above, name = split_folder(folder)
    # Beside the folder, so that a rename can commit the files. Hidden: scripts look for names such as `checkpoint-500`.
    return Path(above, f".{name}.hooks")


def remove_interrupted_hooks(folder: str) -> None:
    """Remove the files of hooks that an interrupted save into `folder` has left."""
    if "://" not in folder and os.path.lexists(path := hook_folder(folder)):
        wait_for_saves()  # they may be those of a save that has just begun in the background
        if os.path.lexists(path):
            shutil.rmtree(path)


def _check_hook_files(folder: Path) -> None:
    if clash := sorted(path.name for path in folder.iterdir() if _CHECKPOINT_FILE.fullmatch(path.name)):
        raise CheckpointError(
            f"a save hook has written {clash[0]}, and a checkpoint has a file of this name: write it under another "
            "name, or into a subfolder (nothing was replaced)"
        )


def split_folder(folder: str) -> tuple[str, str]:
    """Split a folder or its URL into parent and name. Raises `InvalidArgument` if it has no parent folder."""
    if "://" in folder:
        scheme, _, rest = folder.partition("://")
        above, _, name = rest.rstrip("/").rpartition("/")
        if not above.strip("/"):
            raise InvalidArgument(
                f"invalid checkpoint folder {folder}: expected a folder in another one, such as {scheme}://run/state"
            )
        return f"{scheme}://{above}", name
    path = Path(os.path.abspath(folder))  # noqa: PTH100 - unlike resolve, it keeps symbolic links
    return str(path.parent), path.name


def write_state(
    parts: TrainingParts,
    states: Mapping[str, Mapping[str, Any]],
    folder: str,
    *,
    raise_on_all: RaiseOnAll,
    async_: bool,
    on_commit: Callable[[], None],
    hook_files: Path | None = None,
) -> Saved | SaveHandle:
    """Save all objects, with `states` for the models, and `hook_files`, replacing the checkpoint in the folder.

    A collective.
    """
    # A user's `state_dict` may raise on one rank. All ranks have to know before the collective save begins.
    with raise_on_all("save_state"):
        shards: dict[str, torch.Tensor] = {}
        states_of = {name: _with_plain_numbers(name, item.state_dict()) for name, item in parts.objects.items()}
        objects = {name: _without_shards(name, state, shards) for name, state in states_of.items()}
        random = random_state()
    state = {
        **sharded_state_dicts(parts.models, parts.optimizers, states=states),
        # The fifth argument is the replica: rank 0 is replica 0, which is the one that is written. `readers` and random
        # states have one entry per rank instead: their shape is (world size,), and the offset is the rank.
        "objects": {name: ShardedObject(name, value, (1,), (0,), parts.rank) for name, value in objects.items()},
        # By their paths, "object_tensors.custom_checkpoint.average.weight" and so on.
        _TENSORS: shards,
        "readers": {
            name: ShardedObject(name, value, (parts.world_size,), (parts.rank,)) for name, value in _readers(objects)
        },
        _RANDOM: ShardedObject(_RANDOM, random, (parts.world_size,), (parts.rank,)),
    }
    above, name = split_folder(folder)
    target = Folder(storage_of(above), above, name=name, on_commit=on_commit, hook_files=hook_files)
    # A save hook may have taken a model out of `states`, because it has stored the model in a file of its own.
    names = [part for part in parts.names if part in states or part not in parts.models]
    return save_contents(local_state_of(state), target, metadata={_KIND: {"parts": names}}, async_=async_)


def read_state(
    parts: TrainingParts,
    models: Collection[str],
    folder: str,
    *,
    raise_on_all: RaiseOnAll,
    strict: bool,
    allow: Sequence[type | str] = (),
) -> None:
    """Restore all objects from a checkpoint, and of the models those named in `models`.

    A collective; raises on every rank, `InvalidArgument` if objects are missing. The objects and the tensors are those
    of one checkpoint: raises `CheckpointError` if another save replaces it between the two.
    """
    with raise_on_all("load_state"):
        folder = existing_folder(folder)
        manifest = load_metadata(folder)
        _check([name for name in parts.names if name in models or name not in parts.models], manifest, folder)
        states = {name: parts.models[name].state_dict() for name in models}
    # Steps 1 to 3 change nothing: read the objects, match the tensors, plan and check the reading of tensors.
    loading = prepare_load(_objects(parts, manifest), folder, allow=allow)
    objects = loading.fill()
    with raise_on_all("load_state"):
        _check_loaders(parts, objects, folder)
        objects = {name: state for name, state in objects.items() if not _is_other_loader(name, parts)}
        _drop_lost(objects, folder, strict=strict)
        layouts = _layouts(parts, objects)
        shards = _requested_shards(layouts, objects, manifest)
    requested = sharded_state_dicts(parts.models, parts.optimizers, states=states)
    with raise_on_all("load_state"):
        # What was loaded contains the common part of the checkpoint too.
        requested = select_stored(requested, manifest, objects, folder, strict=strict)
    prepared = prepare_load(
        {**requested, _TENSORS: shards},
        folder,
        allow=allow,
        dtype_hint="load_state() does not convert: prepare it with the stored dtype",
    )
    with raise_on_all("load_state"):
        if not manifest == loading.manifest == prepared.manifest:
            raise CheckpointError(f"{folder} was replaced by another save while it was loaded: load it again")
    # A loader may refuse a damaged state, on any rank. Nothing else has changed yet, and the loaders are put back.
    loaders = {name: item for name, item in parts.objects.items() if _is_loader(name)}
    positions = [(loader.position, replace(loader.position)) for loader in loaders.values() if _has_position(loader)]
    try:
        with raise_on_all("load_state"):
            for name, loader in loaders.items():
                reader = objects.get(f"{name}.reader")
                loader.load_state_dict(objects[name] if reader is None else {**objects[name], "reader": reader})
    except BaseException:
        # In place: loaders that `skip_first_batches` returned share the position.
        for position, before in positions:
            vars(position).update(vars(before))
        raise
    # From here on objects change. `fill` reads into the tensors of the models and optimizers in place; the state dicts
    # are loaded afterwards, for the values that are not tensors.
    loaded = prepared.fill()
    with raise_on_all("load_state"):
        load_sharded_state_dicts(parts.models, parts.optimizers, loaded, strict=strict)
        for name, item in parts.objects.items():
            # Loaders have got their states above.
            if not _is_loader(name) and name in objects:  # the scaler of fp16 may start without a state
                state, values = objects[name], loaded.get(_TENSORS, {})
                item.load_state_dict(_with_shards(state, values, layouts[name]) if name in layouts else state)
        # The random states come last, so that nothing of the loading itself draws from the restored generators.
        if objects.get(_RANDOM) is not None:
            restore_random_state(objects[_RANDOM])


def _with_plain_numbers(name: str, state: Any) -> Any:  # noqa: ANN401 - any state
    """Return the state of a scheduler without NumPy's numbers, whose types would have to be allowed at the load."""
    if not name.startswith("scheduler") or not any(isinstance(leaf, np.generic) for _, leaf in flatten(state)):
        return state
    return map_leaves(lambda _, leaf: leaf.item() if isinstance(leaf, np.generic) else leaf, state)


def _is_loader(name: str) -> bool:
    return name.partition("_")[0] == "loader"  # "loader", "loader_1", ...


def _has_position(loader: object) -> bool:
    """Return True for a prepared loader. A subclass of `Accelerator` may return other loaders."""
    return isinstance(getattr(loader, "position", None), ReadPosition)


def _readers(objects: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the dataset states of the loaders that have one, by name."""
    loaders = [(name, state) for name, state in objects.items() if _is_loader(name)]
    return [(f"{name}.reader", state["reader"]) for name, state in loaders if "reader" in state]


def latest_step(folder: str) -> tuple[str, int] | None:
    """Return the latest step in a folder of steps, and their number; None for any other folder.

    `latest_step("run")` returns `("step-580", 29)` if 29 folders from `run/step-20` to `run/step-580` contain a
    checkpoint.
    """
    above, name = split_folder(folder)
    # The folder itself is a checkpoint, such as `run/step-20`: it is loaded as it is.
    if is_checkpoint(storage_of(above).list(name)):
        return None
    storage = storage_of(folder)
    step = read_latest(storage)
    return None if step is None else (step_name(step), len(finished_steps(storage)))


def existing_folder(folder: str) -> str:
    """Return the folder that contains the checkpoint. Raises `InvalidArgument` if there is none."""
    above, name = split_folder(folder)
    storage = storage_of(above)
    for candidate in (name, f"{name}{ASIDE}"):  # aside: a save was killed while it replaced the checkpoint
        if is_checkpoint(storage.list(candidate)):
            return f"{above}/{candidate}"
    if "model.pt" in storage.list(name):
        raise InvalidArgument(
            f"{folder} was written by an old version of Rankbook, before checkpoints were sharded, and cannot be loaded"
        )
    raise InvalidArgument(f"no checkpoint found at {folder}: expected a checkpoint, or a folder of step-N checkpoints")


def _check(names: Sequence[str], manifest: Manifest, folder: str) -> None:
    try:
        stored = manifest.metadata[_KIND]["parts"]
    except (KeyError, TypeError) as error:
        raise InvalidArgument(
            f"{folder} was not written by save_state(): load it with rankbook.checkpoint.load()"
        ) from error
    if missing := [name for name in names if name not in stored and name != "scaler"]:
        raise InvalidArgument(
            f"{folder} does not contain {', '.join(missing)}: prepare the objects that were prepared when it was saved"
        )


def _check_loaders(parts: TrainingParts, objects: Mapping[str, Any], folder: str) -> None:
    """Raise `InvalidArgument` if a loader would get the position of another one, by the sizes of their datasets.

    Warn of another size if no other loader had it: the dataset may have grown since, or it is that of an evaluation.
    """
    loaders = {name: loader for name, loader in parts.objects.items() if _is_loader(name)}
    states = {name: state for name, state in objects.items() if _is_loader(name) and isinstance(state, Mapping)}
    # States of earlier versions, and of loaders that a subclass of `Accelerator` prepares, have no such entry.
    saved = {name: state.get("dataset_length") for name, state in states.items()}
    sizes = {name: (saved.get(name), dataset_length(loader)) for name, loader in loaders.items()}
    changed = {name: size for name, size in sizes.items() if None not in size and size[0] != size[1]}
    # Those that are in the checkpoint and not prepared now have nobody to take their place.
    free = {name: size for name, size in saved.items() if name in changed or name not in loaders}
    for name, (then, now) in changed.items():
        for other, size_of_other in free.items():
            if size_of_other == now:
                raise InvalidArgument(
                    f"{name} was saved for {then:,} samples and is prepared for {now:,}, as {other} was: prepare the "
                    "loaders in the order of the saving run, or after load_state() if they shall begin an epoch"
                )
        if states[name].get("batches") and not states[name].get("finished") and parts.rank == 0:
            warnings.warn(
                f"{folder}: {name} was saved for {then:,} samples and is prepared for {now:,}. It goes on in the "
                "middle of the epoch; prepare it after load_state() if it shall begin one.",
                stacklevel=2,
            )


def _is_other_loader(name: str, parts: TrainingParts) -> bool:
    """Return True for a loader in the checkpoint that is not prepared now."""
    return _is_loader(name) and name.partition(".")[0] not in parts.objects


def _objects(parts: TrainingParts, manifest: Manifest) -> dict[str, Any]:
    """Return the objects to load.

    The scaler of fp16 is optional, and a rank beyond the saved world size has no random state to load.
    """
    stored = [name for name in manifest.metadata[_KIND]["parts"] if _is_other_loader(name, parts)]
    requests = {name: ShardedObject(name, None, (1,), (0,)) for name in (*parts.objects, *stored)}
    # The axis has as many entries as ranks have saved. The offset must be valid for the object to be created, so it is
    # limited for a rank beyond them, whose request is removed again.
    requests[_RANDOM] = ShardedObject(
        _RANDOM, None, (manifest.world_size,), (min(parts.rank, manifest.world_size - 1),)
    )
    if parts.rank >= manifest.world_size:
        del requests[_RANDOM]
    # The dataset's own state belongs to one rank of a certain number of ranks, see `rankbook.runtime.data.stateful`.
    if parts.world_size == manifest.world_size:
        readers = {f"{name}.reader" for name in parts.objects}
        requests |= {name: ShardedObject(name, None, (parts.world_size,), (parts.rank,)) for name in readers}
    optional = {name for name in requests if name == "scaler" or name.endswith(".reader")}
    return {
        name: request
        for name, request in requests.items()
        if name not in optional or request.unique_key in manifest.objects
    }


# DTensors in the states of objects, such as averages of the weights of a sharded model. They are stored as tensors, and
# the state has their keys in their places.


def _without_shards(name: str, state: Any, shards: dict[str, torch.Tensor]) -> Any:  # noqa: ANN401 - any state
    """Return the state of an object with texts in place of its DTensors, which are added to `shards`.

    Raises `CheckpointError` for a DTensor within another object than a dict, list or tuple.
    """

    def take_out(path: tuple[Any, ...], leaf: Any) -> Any:  # noqa: ANN401 - any leaf
        if not isinstance(leaf, DTensor):
            return leaf
        key = ".".join([name, *map(str, path)])
        if key in shards:
            raise CheckpointError(f"two tensors in the state of an object would be stored as {key!r}")
        shards[key] = leaf
        return f"{_SHARDED}{key}"

    # The states of loaders are loaded before the tensors are read.
    if not _is_loader(name) and any(isinstance(leaf, DTensor) for _, leaf in flatten(state)):
        state = map_leaves(take_out, state)
    # An error of another kind is one of the save too, which pickles the state as it is.
    with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):
        _ShardSearch(name).dump(state)
    return state


class _ShardSearch(pickle.Pickler):
    """Raise `CheckpointError` for a DTensor in what is pickled; other tensors are left out."""

    def __init__(self, name: str) -> None:
        super().__init__(io.BytesIO())
        self._name = name

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 - pickle's own contract
        if isinstance(value, DTensor):
            raise CheckpointError(
                f"the state of {self._name} has a DTensor in an object that is no dict, list or tuple, so that only "
                "rank 0's part would be stored: return it from state_dict() in dicts and lists, or its full_tensor()"
            )
        return (int, ()) if isinstance(value, torch.Tensor) else NotImplemented


def _shard_keys(state: Any) -> dict[tuple[Any, ...], str]:  # noqa: ANN401 - any state
    """Return the keys of the DTensors that were stored apart from the state of an object, by path."""
    texts = [(path, leaf) for path, leaf in flatten(state) if isinstance(leaf, str)]
    return {path: text.removeprefix(_SHARDED) for path, text in texts if text.startswith(_SHARDED)}


def _drop_lost(objects: dict[str, Any], folder: str, *, strict: bool) -> None:
    """Remove the states that have rank 0's part of a DTensor only, as earlier versions have stored them.

    Raises `CheckpointError` if `strict`.
    """
    for name in list(objects):
        if any(is_cut(leaf) for _, leaf in flatten(objects[name]) if isinstance(leaf, torch.Tensor)):
            lost = (
                f"{folder} was written by an earlier version, and has only rank 0's part of sharded tensors in {name}"
            )
            if strict:
                raise CheckpointError(f"{lost}; strict=False loads the rest")
            warnings.warn(f"{lost}, which stays as it is", stacklevel=2)
            del objects[name]


def _layouts(parts: TrainingParts, objects: Mapping[str, Any]) -> dict[str, dict[tuple[Any, ...], Any]]:
    """Return the present leaves of the states of objects, by path, if those or the stored ones have DTensors."""
    layouts = {}
    for name, item in parts.objects.items():
        stored, has_keys = flatten(objects.get(name)), bool(_shard_keys(objects.get(name)))
        if not _is_loader(name) and (has_keys or any(isinstance(leaf, torch.Tensor) for _, leaf in stored)):
            present = dict(flatten(item.state_dict()))
            if has_keys or any(isinstance(leaf, DTensor) for leaf in present.values()):
                layouts[name] = present
    return layouts


def _requested_shards(
    layouts: Mapping[str, Mapping[tuple[Any, ...], Any]], objects: Mapping[str, Any], manifest: Manifest
) -> dict[str, torch.Tensor]:
    """Return new tensors for the DTensors that are stored, by key, in the layout of the present ones.

    Raises `CheckpointError` if an object has no tensor of this shape at the path.
    """
    requested = {}
    for name, present in layouts.items():
        for path, key in _shard_keys(objects[name]).items():
            stored, like = manifest.tensors[f"{_TENSORS}.{key}"], present.get(path)
            if not isinstance(like, torch.Tensor) or tuple(like.shape) != tuple(stored.shape):
                what = f"shape {tuple(like.shape)}" if isinstance(like, torch.Tensor) else "none"
                raise CheckpointError(
                    f"the state of {name} has a sharded tensor of shape {tuple(stored.shape)} at {format_path(path)}, "
                    f"but the registered object has {what} there: create its tensors before load_state()"
                )
            requested[key] = torch.empty_like(like, dtype=dtype_named(stored.dtype), requires_grad=False)
    return requested


def _with_shards(state: Any, shards: Mapping[str, Any], present: Mapping[tuple[Any, ...], Any]) -> Any:  # noqa: ANN401 - any state
    """Return the state of an object with its DTensors in their places.

    A whole tensor becomes a DTensor where the object has one now.
    """

    def restored(path: tuple[Any, ...], leaf: Any) -> Any:  # noqa: ANN401 - any leaf
        like = present.get(path)
        if path in keys:
            return shards[keys[path]]
        if isinstance(leaf, torch.Tensor) and isinstance(like, DTensor) and leaf.shape == like.shape:
            copy = as_sharded("", like)
            assert copy is not None and isinstance(copy.entry, ShardedTensor)
            part = local_part(leaf)[copy.entry.global_slice()]
            return as_dtensor(part.to(like.device, copy=True), like)
        return leaf

    keys = _shard_keys(state)
    return map_leaves(restored, state)


def select_stored(
    requested: dict[str, Any], manifest: Manifest, common: Mapping[str, Any], folder: str, *, strict: bool
) -> dict[str, Any]:
    """Return `requested` without the entries that are not stored. `common` is the stored common part.

    Entries may be missing for models if not `strict`, and for optimizers that had not made a step when they were saved.
    Raises `CheckpointError` for other differences of models, and for parameter groups that do not fit.
    """
    stored = {*manifest.tensors, *manifest.objects}

    def is_stored(entry: Any) -> bool:  # noqa: ANN401 - a shard or a value
        # Values without a key are not stored under a name of their own.
        return not hasattr(entry, "key") or getattr(entry, "unique_key", entry.key) in stored

    for name, entries in requested["models"].items():
        lacking = sorted(key for key, entry in entries.items() if not is_stored(entry))
        model_keys = {f"{name}.{key}" for key in entries}
        # Stored objects have keys with their offset and shape; `_plain_key` removes these for the comparison.
        surplus = sorted(
            key for key in stored if key.startswith(f"{name}.") and _plain_key(key, manifest) not in model_keys
        )
        if strict and (lacking or surplus):
            gaps = [
                f"{phrase}: {', '.join(map(repr, keys[:8]))}" + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
                for phrase, keys in (("only in the model", lacking), ("only in the checkpoint", surplus))
                if keys
            ]
            raise CheckpointError(
                f"{folder} does not match the {name.replace('_', ' ')}; {'; '.join(gaps)}. strict=False loads the rest"
            )
        requested["models"][name] = {key: entry for key, entry in entries.items() if is_stored(entry)}
    for name, optimizer in requested["optimizers"].items():
        groups = [group["params"] for group in optimizer["param_groups"]]
        try:
            check_groups(groups, common["optimizers"][name]["param_groups"], strict=strict)
        except CheckpointError as error:
            hint = (
                "; strict=False loads the rest"
                if len(groups) == len(common["optimizers"][name]["param_groups"])
                else ""
            )
            raise CheckpointError(f"{folder} does not match the {name.replace('_', ' ')}; {error}{hint}") from None
    # An optimizer creates its state in the first step, so the state of a parameter may be missing in the checkpoint
    # although the optimizer asks for it. This is not an error; the optimizer keeps what it has.
    for name, optimizer in requested["optimizers"].items():
        optimizer.nested = common["optimizers"][name].get("nested", {})
        optimizer.use_stored_keys(stored)
        for values in optimizer["state"].values():
            for quantity, entry in list(values.items()):
                shards = [leaf for _, leaf in flatten(entry) if hasattr(leaf, "key")]
                if shards and not any(map(is_stored, shards)):
                    del values[quantity]
        optimizer["state"] = {name: values for name, values in optimizer["state"].items() if values}
    return requested


def _plain_key(key: str, manifest: Manifest) -> str:
    return ShardedObject.empty_from_unique_key(key).key if key in manifest.objects else key
