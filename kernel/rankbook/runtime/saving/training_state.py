"""Helpers for saving a training run: full state dicts, random states, single files, and numbered checkpoint folders."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rankbook.errors import InvalidArgument
from rankbook.formatting import plural
from rankbook.runtime.config import ProjectConfiguration
from rankbook.runtime.strategies.base import full_tensor

_log = logging.getLogger(__name__)


def full_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict with full tensors on every rank. A collective if it is sharded."""
    # All ranks gather the tensors in the same order, that of the state dict.
    return {
        name: full_tensor(value) if isinstance(value, torch.Tensor) else value
        for name, value in model.state_dict().items()
    }


def random_state() -> dict[str, Any]:
    """Return the states of the generators of Python, numpy, torch and all CUDA devices."""
    import numpy as np

    # The keys of NumPy's Mersenne Twister are uint32, for which torch has only limited support. They are stored as an
    # int64 tensor, so that the checkpoint has no NumPy object in it.
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - user code draws from this state
    state: dict[str, Any] = {
        "random": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the generators from a state returned by `random_state`."""
    import numpy as np

    version, internal, gauss = state["random"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    # The states are per device of the process. With another number of devices there is no correspondence between them.
    saved = len(state.get("cuda", ()))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if saved == devices:
        if saved:
            torch.cuda.set_rng_state_all(state["cuda"])
    elif saved:
        _log.warning(
            "the random states of %s are not restored: this process has %d", plural(saved, "CUDA device"), devices
        )


def write_object(value: object, file: Path) -> None:
    """Write a file atomically: to a temporary name first, then renamed."""
    # In the same folder, since a rename is atomic only within a file system.
    draft = file.with_name(f"{file.name}.writing")
    torch.save(value, draft)
    draft.replace(file)


def numbered_folders(project: ProjectConfiguration) -> list[Path]:
    """Return the project's complete numbered checkpoints, oldest first."""
    folders = [folder for folder in project.checkpoints.glob("checkpoint_*") if checkpoint_number(folder) is not None]
    return sorted(
        (folder for folder in folders if is_complete(folder)), key=lambda folder: checkpoint_number(folder) or 0
    )


def checkpoint_number(folder: Path) -> int | None:
    """Return the number of a numbered checkpoint's folder, None for other folders."""
    # `checkpoint_3` has the number 3. Drafts and folders that were set aside have a suffix, and no number.
    start, _, number = folder.name.rpartition("_")
    return int(number) if start == "checkpoint" and number.isdecimal() else None


def is_complete(folder: Path) -> bool:
    """Return True if the folder contains a complete checkpoint."""
    # A commit renames the complete draft to the folder's name, with the manifest in it.
    return (folder / "manifest.json").is_file()


def latest_folder(project: ProjectConfiguration) -> Path:
    """Return the project's latest numbered checkpoint. Raises `InvalidArgument` if there is none."""
    folders = numbered_folders(project)
    if not folders:
        raise InvalidArgument(f"no checkpoint found in {project.checkpoints}: pass a folder to load_state()")
    return folders[-1]


def keep_latest(project: ProjectConfiguration, newest: Path) -> None:
    """Remove the oldest checkpoints beyond the project's limit, never the `newest`, and incomplete ones.

    A folder that cannot be removed is tried again after the next save. Incomplete checkpoints that another process is
    writing are kept.
    """
    folder = project.checkpoints
    if newest.parent != folder or not project.automatic_checkpoint_naming:
        return
    from rankbook.checkpoint.storage import steps
    from rankbook.checkpoint.storage.backends import LocalStorage

    storage = LocalStorage(folder)
    # Two traces of an incomplete save: its draft folder, and the file that names the process that writes there. A save
    # that was killed at the right moment leaves the second one without the first.
    drafts = [
        path for path in folder.glob("checkpoint_*.partial") if checkpoint_number(path.with_suffix("")) is not None
    ]
    claims = [path.with_suffix("") for path in folder.glob(f"checkpoint_*{steps.PARTIAL}{steps.OWNER}")]
    outdated = [
        folder / name
        for draft in dict.fromkeys([*drafts, *claims])
        if steps.writer_of(storage, draft.name) is None  # otherwise another process is saving there
        for name in (draft.name, draft.name + steps.OWNER)
    ]
    # `newest` may have a lower number than others, if the user has set the iteration back; it is kept in any case.
    if project.total_limit is not None:
        earlier = [path for path in numbered_folders(project) if path != newest]
        outdated += earlier[: max(0, len(earlier) + 1 - project.total_limit)]
    for path in outdated:
        with contextlib.suppress(OSError):
            storage.remove(path.name)


def register_hook(hooks: dict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    """Add `hook` to `hooks`, and return a handle that removes it."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
