"""A folder of checkpoints, as the notebook's views see it.

Owns: what lies there in plain structs, what was found when one was verified, and how one is loaded. Refuses: to read
data unless asked to, and torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime

from rankbook.checkpoint import folders
from rankbook.checkpoint.manifest import MANIFEST, METADATA, Manifest, decode
from rankbook.checkpoint.storage import storage_of
from rankbook.checkpoint.stores import read_all
from rankbook.checkpoint.verifying import verify
from rankbook.errors import BadRequest, CheckpointingException, RankbookError
from rankbook.telemetry import CheckpointFolder, StoredCheckpoint

OF_ACCELERATOR = "rankbook.runtime"
"""The metadata that `Accelerator.save_state` leaves in a checkpoint."""


class FolderShelf:
    """What lies in `folder`. `run` has the ranks run a line of code, and raises what it raises there."""

    def __init__(self, folder: str | os.PathLike[str], run: Callable[[str], object]) -> None:
        self._folder = os.fspath(folder)
        self._storage = storage_of(self._folder)
        self._run = run
        self._checked: dict[str, tuple[float | None, str, str]] = {}

    def look(self) -> CheckpointFolder:
        """See `Shelf`."""
        names = self._storage.list()
        if folders.is_checkpoint(names):
            return CheckpointFolder(self._folder, (self._stored("", None, latest=True),), "")
        trouble = ""
        try:
            latest = folders.read_latest(self._storage)
        except CheckpointingException as error:
            latest, trouble = None, str(error)
        found = [
            self._stored(folders.folder_of(self._storage, step), step, latest=step == latest)
            for step in folders.finished(self._storage)
        ]
        known = {each.name for each in found}
        inside = {name: self._storage.list(name) for name, size in names.items() if size is None and name not in known}
        found += [
            self._stored(name, None, latest=False) for name, files in inside.items() if folders.is_checkpoint(files)
        ]
        found += [self._partial(name) for name in folders.partials(self._storage)]
        return CheckpointFolder(self._folder, tuple(found), trouble)

    def verify(self, name: str) -> str:
        """See `Shelf`."""
        report = verify(self._at(name))
        what = "" if report.ok else "; ".join(map(str, report.damages[:3]))
        more = "" if len(report.damages) <= 3 else f"; and {len(report.damages) - 3} more"
        self._checked[name] = (self._written(name), "verified" if report.ok else "damaged", what + more)
        return f"{name or self._folder} is whole" if report.ok else f"{name or self._folder} is damaged: {what}{more}"

    def load(self, name: str) -> str:
        """See `Shelf`."""
        manifest = self._manifest(name)
        if manifest is not None and OF_ACCELERATOR in manifest.metadata:
            self._run(f"accelerator.load_state({self._at(name)!r})")
            return f"{name or self._folder} is loaded into what the ranks' accelerator has prepared"
        step = folders.step_of(name)
        which = "" if step is None else f", step={step}"
        where = self._folder if step is not None else self._at(name)
        return f"on the ranks: rankbook.checkpoint.load(state, {where!r}{which}), with your state dict as the map"

    def delete(self, name: str) -> str:
        """See `Shelf`."""
        if name not in {each.name for each in self.look().checkpoints} or not name:
            raise BadRequest(f"there is no checkpoint {name!r} in {self._folder}")
        step = folders.step_of(name)
        if step is not None:
            folders.remove(self._storage, step)
        elif name.endswith(folders.PARTIAL) and folders.owner_of(self._storage, name) is not None:
            raise BadRequest(f"{name} is being written just now")
        else:
            self._storage.remove(name)
        self._checked.pop(name, None)
        return f"{name} is removed"

    def _at(self, name: str) -> str:
        return f"{self._folder.rstrip('/')}/{name}" if name else self._folder

    def _manifest(self, name: str) -> Manifest | None:
        """Of one that Rankbook wrote."""
        prefix = f"{name}/" if name else ""
        if MANIFEST not in self._storage.list(name):
            return None
        return decode(read_all(self._storage, prefix + MANIFEST), f"{self._at(name)}/{MANIFEST}")

    def _written(self, name: str) -> float | None:
        try:
            manifest = self._manifest(name)
        except RankbookError:
            return None
        return None if manifest is None else datetime.fromisoformat(manifest.created).timestamp()

    def _stored(self, name: str, step: int | None, *, latest: bool) -> StoredCheckpoint:
        sizes = self._storage.list(name)
        total = sum(size for size in sizes.values() if size is not None)
        shown = name or "."
        try:
            manifest = self._manifest(name)
        except (RankbookError, OSError) as error:
            return StoredCheckpoint(shown, step, None, total, None, "finished", "damaged", latest, str(error))
        if manifest is None:
            kind = "foreign" if METADATA in sizes else "partial"
            return StoredCheckpoint(shown, step, None, total, None, kind, "", latest, "")
        created = datetime.fromisoformat(manifest.created).timestamp()
        when, checked, detail = self._checked.get(name, (None, "", ""))
        if when != created:  # another one has taken its place since
            checked = detail = ""
        step = manifest.step if step is None else step
        return StoredCheckpoint(shown, step, created, total, manifest.world_size, "finished", checked, latest, detail)

    def _partial(self, name: str) -> StoredCheckpoint:
        sizes = self._storage.list(name)
        total = sum(size for size in sizes.values() if size is not None)
        owner = folders.owner_of(self._storage, name)
        detail = "broken off: the next save removes it" if owner is None else "being written"
        step = folders.step_of(name.removesuffix(folders.PARTIAL))
        return StoredCheckpoint(name, step, None, total, None, "partial", "", False, detail)
