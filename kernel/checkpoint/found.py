"""One checkpoint that is there to be read: its folder, and what it says about itself.

Owns: that `latest`, a step or a folder of its own are found alike, whoever wrote them, and that all ranks read the
same one. Refuses: the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from rankbook.checkpoint import folders, pickles
from rankbook.checkpoint.manifest import MANIFEST, Manifest
from rankbook.checkpoint.stores import ASIDE, Storage, read_all
from rankbook.checkpoint.structure import decode, sizes_hold
from rankbook.errors import CheckpointingException

Step = int | Literal["latest"]


@dataclass(frozen=True)
class Found:
    """A checkpoint: the `folder` within the storage ("" for the storage's own), and its manifest."""

    storage: Storage
    folder: str
    manifest: Manifest

    def path(self, file: int | str) -> str:
        """Of a file by its number in the manifest or its name, within the storage."""
        name = self.manifest.files[file].name if isinstance(file, int) else file
        return f"{self.folder}/{name}" if self.folder else name

    def check_sizes(self) -> None:
        """Raise `CheckpointingException` where a file has fewer bytes than the manifest says."""
        sizes_hold(self.manifest, self.storage.list(self.folder), str(self))

    def __str__(self) -> str:
        return f"{self.storage}/{self.folder}" if self.folder else str(self.storage)


def find(storage: Storage, step: Step | None, *, together: bool = True) -> Found:
    """The checkpoint that `step` means in `storage`. A collective with `together`: rank 0 chooses.

    Raises `CheckpointingException`, the same on every rank, where there is none or its manifest is damaged.
    """
    if not (together and dist.is_initialized()):
        try:
            return _choose(storage, step)
        except OSError as error:
            raise CheckpointingException(f"{storage} cannot be read: {type(error).__name__}: {error}") from error
    told: list[Any] = [None]
    found: Found | None = None
    if dist.get_rank() == 0:
        try:
            found = _choose(storage, step)
            told = [(found.folder, found.manifest, None)]
        except CheckpointingException as error:
            told = [("", None, f"{error}")]
        except Exception as error:  # noqa: BLE001 - raised below on every rank: the others wait to be told
            told = [("", None, f"{storage} cannot be read: {type(error).__name__}: {error}")]
    dist.broadcast_object_list(told, src=0)
    folder, manifest, complaint = told[0]
    if complaint is not None:
        raise CheckpointingException(complaint)
    return found or Found(storage, folder, manifest)


def _choose(storage: Storage, step: Step | None) -> Found:
    while True:
        folder = folders.locate(storage, step)
        try:
            return _read(storage, folder)
        except (CheckpointingException, FileNotFoundError):
            if folders.asked_for(step) is not None or folders.locate(storage, step) == folder:
                raise
            # another process has saved the next step meanwhile, and removed this one


def _read(storage: Storage, folder: str) -> Found:
    prefix = f"{folder}/" if folder else ""
    if MANIFEST in storage.list(folder):
        where = f"{storage}/{prefix}{MANIFEST}"
        manifest = decode(read_all(storage, f"{prefix}{MANIFEST}"), where)
        step = folders.step_of(folder.removesuffix(ASIDE))
        if folder and manifest.step != step:
            raise CheckpointingException(
                f"{where}: it is of step {manifest.step}, and lies in the folder of step {step}"
            )
        return Found(storage, folder, manifest)
    return Found(storage, folder, pickles.foreign(storage, folder))
