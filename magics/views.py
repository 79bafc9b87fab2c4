"""Live views of the notebook's ranks: `rankbook.placement()`, `shards`, `checkpoints` and `dashboard`.

The functions connect the views in widgets/ to their data: `ClusterViewSource` gives access to a cluster, and
`CheckpointBrowser` to a folder of checkpoints.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

from rankbook.checkpoint.format.dcp_metadata import manifest_from_dcp
from rankbook.checkpoint.format.manifest import MANIFEST, Manifest
from rankbook.checkpoint.format.structure import decode
from rankbook.checkpoint.storage import steps
from rankbook.checkpoint.storage.base import read_all
from rankbook.checkpoint.storage.local import storage_of
from rankbook.checkpoint.tools.verify import verify
from rankbook.coordinator import default_cluster
from rankbook.coordinator.cluster import Cluster
from rankbook.errors import BadRequest, CheckpointingException
from rankbook.protocol.telemetry import CheckpointFolder, StoredCheckpoint, Struct
from rankbook.ranks import name_ranks
from rankbook.widgets.checkpoints import CheckpointsView
from rankbook.widgets.dashboard import Dashboard
from rankbook.widgets.placement import PlacementView
from rankbook.widgets.shards import ShardsView

Folder = str | os.PathLike[str]

OF_ACCELERATOR = "rankbook.runtime"
"""Key of the metadata that `Accelerator.save_state` writes into a checkpoint."""


def placement() -> PlacementView:
    """Show hosts, devices and ranks live: state, memory use and training speed. Raises `NoCluster`."""
    return PlacementView(_feed())


def shards(name: str, *, search: str = "") -> ShardsView:
    """Show how the tensors of variable `name` are sharded: a model, an optimizer, a state dict, or one tensor.

    `search` limits the list to parameters whose name contains it. Raises `NoCluster`.
    """
    return ShardsView(_feed(), name, search=search)


def checkpoints(folder: Folder) -> CheckpointsView:
    """Show running saves and the checkpoints in `folder`, with buttons to verify, load and delete them.

    Raises `NoCluster`.
    """
    return CheckpointsView(_feed(), _shelf(folder))


def dashboard(folder: Folder | None = None, *, variable: str = "") -> Dashboard:
    """Show placement, shards and checkpoints as tabs. A notebook has one dashboard: reopening moves it here.

    `folder`: the checkpoints to list beside the running saves. `variable`: the variable whose shards are shown at
    first. Raises `NoCluster`.
    """
    return Dashboard.reopen(_feed(), None if folder is None else _shelf(folder), variable=variable)


def _feed() -> ClusterViewSource:
    return ClusterViewSource(default_cluster.current())


def _shelf(folder: Folder) -> CheckpointBrowser:
    return CheckpointBrowser(folder, _load)


def _load(where: str, manifest: Manifest) -> str | None:
    """Load a checkpoint of `Accelerator.save_state` on the ranks and return a message.

    Returns None for other checkpoints, because the objects to load them into are unknown.
    """
    if OF_ACCELERATOR not in manifest.metadata:
        return None
    default_cluster.current().run(f"accelerator.load_state({where!r})")
    return f"{where} is loaded into what the ranks' accelerator has prepared"


class ClusterViewSource:
    """Data source of views for `cluster`; see `ClusterSource`. Thread-safe, also while cells run."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def watch(self, kind: str, callback: Callable[[Any], None], **_options: object) -> Callable[[], None]:
        """Subscribe to a state; see `Cluster.watch`."""
        return self._cluster.watch(kind, callback)

    def ask(self, kind: str, **options: Any) -> Struct:  # noqa: ANN401 - the question's own
        """Answer "placement", "detail" (rank), "shards" (name) or "statistic" (name, key, rank), within about 2 s.

        Raises `RankbookError`.
        """
        questions: dict[str, Callable[..., Struct]] = {
            "placement": self._cluster.placement,
            "detail": self._cluster.detail,
            "shards": self._cluster.shards,
            "statistic": self._cluster.statistic,
        }
        if kind not in questions:
            raise BadRequest(f"{kind!r} cannot be asked; there are {', '.join(questions)}")
        return questions[kind](**options)

    def act(self, kind: str, rank: int | None = None) -> str:
        """Interrupt or restart `rank`, or all ranks, and return a sentence about the result. Raises `RankbookError`.

        An interrupt stops the rank's cell on all of the cell's ranks, because they wait for one another.
        """
        ranks = None if rank is None else (rank,)
        match kind:
            case "interrupt":
                cells = sorted({cell.label for cell in self._cluster.cells() if rank is None or rank in cell.ranks})
                hit = self._cluster.interrupt(ranks)
                return f"interrupted {', '.join(cells)} on {name_ranks(hit)}" if hit else "nothing runs there"
            case "restart":
                fresh = self._cluster.restart(ranks)
                have = "has a fresh process" if len(fresh) == 1 else "have fresh processes"
                return f"{name_ranks(fresh)} {have} and an empty namespace"
            case _:
                raise BadRequest(f"{kind!r} cannot be done; there are interrupt, restart")


Loader = Callable[[str, Manifest], str | None]
"""Load the checkpoint at this path on the ranks and return a message, or None if that is not possible."""
Signature = tuple[bytes, tuple[tuple[str, int | None], ...]]
_SEAL = 64
"""Bytes read from a manifest's end, which include its checksum.

They detect a step that was saved again with the same size.
"""


class CheckpointBrowser:
    """The checkpoints in a folder; see `widgets.view_model.CheckpointSource`.

    `load` implements the load button; without it, `load` returns instructions.
    """

    def __init__(self, folder: str | os.PathLike[str], load: Loader | None = None) -> None:
        self._folder = os.fspath(folder)
        self._storage = storage_of(folder)
        self._load = load
        self._lock = Lock()
        self._read: dict[str, tuple[Signature, StoredCheckpoint]] = {}
        self._checked: dict[str, tuple[Signature, str, str]] = {}

    def look(self) -> CheckpointFolder:
        """Return the checkpoints; see `CheckpointSource`. Manifests are read again only if files changed."""
        with self._lock:
            try:
                names = self._storage.list()
                if steps.is_checkpoint(names):
                    return CheckpointFolder(self._folder, (self._stored("", None, latest=True),), "")
                trouble, latest = "", None
                try:
                    latest = steps.read_latest(self._storage)
                except CheckpointingException as error:
                    trouble = str(error)
                entries = []
                for step in steps.finished_steps(self._storage):
                    with contextlib.suppress(CheckpointingException):  # another process has removed it meanwhile
                        made = self._stored(steps.folder_of(self._storage, step), step, latest=step == latest)
                        if made.checked != "damaged" or step in steps.finished_steps(self._storage):
                            entries.append(made)
                entries += [self._stored(name, None, latest=False) for name in self._others(names)]
                entries += [self._rest(name) for name in steps.list_partials(self._storage)]
            except (OSError, CheckpointingException) as error:
                return CheckpointFolder(self._folder, (), f"{self._folder}: {error}")
            return CheckpointFolder(self._folder, tuple(entries), trouble)

    def verify(self, name: str) -> str:
        """See `CheckpointSource`."""
        signature = self._signature(self._path(name))
        report = verify(self._folder if self._is_whole_folder(name) else self._whole_path(name))
        detail = "; ".join(map(str, report.damages[:3]))
        with self._lock:
            self._checked[name] = (signature, "verified" if report.ok else "damaged", detail)
        return str(report)

    def load(self, name: str) -> str:
        """See `CheckpointSource`."""
        step, where = self._step(name), self._folder if self._is_whole_folder(name) else self._whole_path(name)
        message = self._load(where, self._manifest(self._path(name))) if self._load is not None else None
        if message is not None:
            return message
        which = f"{self._folder!r}, step={step}" if step is not None else repr(where)
        return f"In a cell on the ranks: rankbook.checkpoint.load(sharded_state_dict, {which})"

    def delete(self, name: str) -> str:
        """Delete a checkpoint; see `CheckpointSource`. A step that is being saved is not deleted."""
        if name in steps.list_partials(self._storage):
            if (owner := steps.writer_of(self._storage, name)) is not None:
                raise BadRequest(f"{name} is being saved by {owner}: wait until it is done, or end that process")
            self._storage.remove(name)
            return f"{name} was deleted"
        step = self._step(name)
        if self._is_whole_folder(name):
            raise BadRequest(f"{self._folder} is a checkpoint itself: remove the folder by hand")
        if step is None:
            self._storage.remove(name)
        else:
            steps.remove(self._storage, step)
        return f"{name} was deleted"

    def _step(self, name: str) -> int | None:
        """Return the step of a finished checkpoint listed by `look`, or None if it has no step number."""
        step = steps.parse_step(name.removesuffix(".old"))
        if step is not None:
            return step
        if self._is_whole_folder(name) or name in self._others(self._storage.list()):
            return None
        raise BadRequest(f"{self._folder} has no finished checkpoint {name!r}")

    def _others(self, names: Mapping[str, int | None]) -> list[str]:
        """Return the checkpoints in folders that are not named as steps, such as those of an `Accelerator`."""
        return [
            name
            for name in sorted(names)
            if names[name] is None
            and steps.parse_step(name.removesuffix(".old")) is None
            and not name.endswith(steps.PARTIAL)
            and steps.is_checkpoint(self._storage.list(name))
        ]

    def _is_whole_folder(self, name: str) -> bool:
        return name == self._own_name() and steps.is_checkpoint(self._storage.list())

    def _whole_path(self, name: str) -> str:
        return f"{self._folder.rstrip('/')}/{name}"

    def _own_name(self) -> str:
        return self._folder.rstrip("/").rpartition("/")[2] or self._folder

    def _path(self, name: str) -> str:
        return "" if name == self._own_name() else name

    def _signature(self, path: str) -> Signature:
        names = self._storage.list(path)
        seal, where = bytearray(_SEAL), f"{path}/{MANIFEST}" if path else MANIFEST
        if size := names.get(MANIFEST):
            with contextlib.suppress(OSError):  # the checkpoint may be deleted meanwhile
                self._storage.read(where, max(0, size - _SEAL), memoryview(seal))
        return bytes(seal), tuple(sorted(names.items()))

    def _stored(self, path: str, step: int | None, *, latest: bool) -> StoredCheckpoint:
        name, signature = path or self._own_name(), self._signature(path)
        cached = self._read.get(name)
        if cached is None or cached[0] != signature:
            cached = self._read[name] = (signature, self._described(name, path, step))
        made = cached[1]
        checked = self._checked.get(name)
        state, detail = made.checked, made.detail
        if checked is not None and checked[0] == signature:
            state, detail = checked[1:]
        return StoredCheckpoint(
            made.name, made.step, made.created, made.bytes, made.world_size, made.state, state, latest, detail
        )

    def _described(self, name: str, path: str, step: int | None) -> StoredCheckpoint:
        try:
            manifest = self._manifest(path)
        except (OSError, CheckpointingException) as error:
            size = sum(size or 0 for size in self._storage.list(path).values())
            return StoredCheckpoint(
                name, step, None, size, None, "finished", "damaged", latest=False, detail=str(error)
            )
        return StoredCheckpoint(
            name=name,
            step=manifest.step if step is None else step,
            created=_seconds(manifest.created),
            bytes=manifest.nbytes,
            world_size=None if manifest.foreign else manifest.world_size,
            state="foreign" if manifest.foreign else "finished",
            checked="",
            latest=False,
            detail="",
        )

    def _manifest(self, path: str) -> Manifest:
        where = f"{path}/{MANIFEST}" if path else MANIFEST
        if MANIFEST not in self._storage.list(path):
            return manifest_from_dcp(self._storage, path)
        return decode(read_all(self._storage, where), where)

    def _rest(self, name: str) -> StoredCheckpoint:
        owner = steps.writer_of(self._storage, name) if name.endswith(steps.PARTIAL) else None
        return StoredCheckpoint(
            name=name,
            step=steps.parse_step(name.removesuffix(steps.PARTIAL)),
            created=None,
            bytes=sum(size or 0 for size in self._storage.list(name).values()),
            world_size=None,
            state="partial",
            checked="",
            latest=False,
            detail=f"being saved by {owner}" if owner else "broken off",
        )


def _seconds(created: str) -> float | None:
    """Convert an ISO time to seconds since the epoch; None if it is invalid."""
    try:
        return datetime.datetime.fromisoformat(created).timestamp()
    except ValueError:
        return None
