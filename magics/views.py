"""Views of the notebook's ranks: `rankbook.placement()`, `shards`, `checkpoints`, `dashboard` and `gradients`.

The functions connect the views in widgets/ to their data: `ClusterViewSource` gives access to a cluster, and
`CheckpointBrowser` to a folder of checkpoints. On a rank, where the cells of auto mode call them, they ask the notebook
process to show the view below the cell.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, NoReturn, cast

import traitlets
from IPython.display import display

from rankbook.checkpoint.format.dcp_metadata import read_manifest
from rankbook.checkpoint.format.manifest import MANIFEST, Manifest
from rankbook.checkpoint.inspection import verify
from rankbook.checkpoint.storage import ASIDE, steps
from rankbook.checkpoint.storage.backends import storage_of
from rankbook.coordinator import default_cluster
from rankbook.coordinator.cluster import Cluster
from rankbook.errors import CheckpointError, InvalidArgument
from rankbook.numerics.norms import GradientTable
from rankbook.protocol import VIEW, telemetry
from rankbook.protocol.telemetry import CheckpointFolder, StoredCheckpoint, Struct
from rankbook.ranks import name_ranks
from rankbook.widgets.checkpoints import CheckpointsModel, CheckpointsView
from rankbook.widgets.live_view import CheckpointSource, ClusterSource, LiveView, script
from rankbook.widgets.placement import PlacementModel, PlacementView
from rankbook.widgets.shards import ShardsModel, ShardsView

Folder = str | os.PathLike[str]

# Repeated from runtime/training_checkpoint.py, whose import would load torch into the notebook process.
ACCELERATOR_KEY = "rankbook.runtime"
"""Key of the metadata that `Accelerator.save_state` writes into a checkpoint."""


def placement() -> PlacementView:
    """Show hosts, devices and ranks live: state, memory use and training speed. Raises `NoClusterError`.

    Example::

        view = rankbook.placement()
        view.save("ranks.svg")  # without `save`, the last line of a cell shows the view
    """
    # On a rank: a cell of auto mode runs there, but only the notebook process has the cluster and the front end.
    if telemetry.this_rank is not None:
        return cast("PlacementView", _request("placement"))
    return PlacementView(_cluster_source())


def shards(name: str, *, search: str = "") -> ShardsView:
    """Show how the tensors of variable `name` are sharded: a model, an optimizer, a state dict, or one tensor.

    `search` limits the list to parameters whose name contains it. Raises `NoClusterError`.

    Example::

        rankbook.shards("model", search="weight")
    """
    if telemetry.this_rank is not None:
        return cast("ShardsView", _request("shards", name=name, search=search))
    return ShardsView(_cluster_source(), name, search=search)


def checkpoints(folder: Folder) -> CheckpointsView:
    """Show running saves and the checkpoints in `folder`, with buttons to verify, load and delete them.

    Raises `NoClusterError`.

    Example::

        rankbook.checkpoints("checkpoints")
    """
    if telemetry.this_rank is not None:
        return cast("CheckpointsView", _request("checkpoints", folder=_absolute(folder)))
    return CheckpointsView(_cluster_source(), _checkpoint_source(folder))


def dashboard(folder: Folder | None = None, *, variable: str = "") -> Dashboard:
    """Show placement, shards and checkpoints as tabs. A notebook has one dashboard: reopening moves it here.

    `folder`: the checkpoints to list beside the running saves. `variable`: the variable whose shards are shown at
    first. Raises `NoClusterError`.

    Example::

        rankbook.dashboard("checkpoints", variable="model")
    """
    if telemetry.this_rank is not None:
        path = None if folder is None else _absolute(folder)
        return cast("Dashboard", _request("dashboard", folder=path, variable=variable))
    return Dashboard.reopen(
        _cluster_source(), None if folder is None else _checkpoint_source(folder), variable=variable
    )


def gradients(model: Any = "model") -> GradientTable:  # noqa: ANN401 - a name or a model
    """Return the norms of a model's gradients over all ranks, by module.

    Replicas count once, and shards are added up: the norms are those of a run on one device, under DDP, FSDP2, tensor
    parallelism and meshes of these.

    Args:
        model: the name of a variable on the ranks. In a cell of the ranks also the model itself; all ranks have to call
            the function then.

    Raises `InvalidArgument` if it is not a model, and `NoClusterError`.

    Example::

        table = rankbook.gradients("model")  # shown as a table by the last line of a cell
        table.norm, table["weight"]  # of all gradients, and of one parameter or module
    """
    if telemetry.this_rank is not None:
        from rankbook.numerics.gradients import gradients_of_ranks
        from rankbook.numerics.naming import namespace

        return gradients_of_ranks(namespace().get(model) if isinstance(model, str) else model)
    if not isinstance(model, str):
        raise InvalidArgument(
            f"expected the name of a variable on the ranks, such as 'model', got a {type(model).__name__}"
        )
    return default_cluster.current().gradients(model)


class RequestedView:
    """Stand for a view on a rank; the notebook process shows the view itself below the cell."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<rankbook.{self._name}, shown by the notebook process>"

    def _ipython_display_(self) -> None:
        """Show nothing: the call has asked for the view."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a view has no attribute {name!r} on a rank, because the notebook process shows it; put %%local in the "
            "first line of the cell to use the view itself"
        )


def _request(view: str, /, **options: str | None) -> RequestedView:
    """Ask the notebook process for the view that its function `view` makes there. Called on a rank."""
    # All ranks of the cell send this. `RequestedViews` shows the view once.
    display({VIEW: {"view": view, "options": options}, "text/plain": f"rankbook.{view}"}, raw=True)
    return RequestedView(view)


def make_requested(request: Mapping[str, Any]) -> LiveView:
    """Return the view that a rank has asked for. Raises the errors of the functions above."""
    makers: dict[str, Callable[..., LiveView]] = {
        "placement": placement,
        "shards": shards,
        "checkpoints": checkpoints,
        "dashboard": dashboard,
    }
    return makers[request["view"]](**request["options"])


def _absolute(folder: Folder) -> str:
    """Return the folder for another process or a later time, when the working directory may differ."""
    path = os.fspath(folder)
    # A URL such as s3://bucket/run does not depend on the working directory.
    return path if "://" in path else str(Path(os.path.expanduser(path)).absolute())  # noqa: PTH111


def _cluster_source() -> ClusterViewSource:
    return ClusterViewSource(default_cluster.current())


def _checkpoint_source(folder: Folder) -> CheckpointBrowser:
    return CheckpointBrowser(folder, _load)


def _load(where: str, manifest: Manifest) -> str | None:
    """Load a checkpoint of `Accelerator.save_state` on the ranks and return a message.

    Returns None for other checkpoints, because the objects to load them into are unknown.
    """
    if ACCELERATOR_KEY not in manifest.metadata:
        return None
    # The cell refers to the variable `accelerator` of the ranks.
    default_cluster.current().run(f"accelerator.load_state({where!r})")
    return f"loaded {where} into the objects that the ranks' accelerator has prepared"


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
        queries: dict[str, Callable[..., Struct]] = {
            "placement": self._cluster.placement,
            "detail": self._cluster.detail,
            "shards": self._cluster.shards,
            "statistic": self._cluster.statistic,
        }
        if kind not in queries:
            raise InvalidArgument(f"unknown query {kind!r}; choose from {', '.join(queries)}")
        return queries[kind](**options)

    def act(self, kind: str, rank: int | None = None) -> str:
        """Interrupt or restart `rank`, or all ranks, and return a sentence about the result. Raises `RankbookError`.

        An interrupt stops the rank's cell on all of the cell's ranks, because they wait for one another.
        """
        ranks = None if rank is None else (rank,)
        match kind:
            case "interrupt":
                # Before the interrupt, which ends the cells.
                cells = sorted({cell.label for cell in self._cluster.cells() if rank is None or rank in cell.ranks})
                hit = self._cluster.interrupt(ranks)
                idle = "no cell is running" if ranks is None else f"no cell is running on {name_ranks(ranks)}"
                return f"interrupted {', '.join(cells)} on {name_ranks(hit)}" if hit else idle
            case "restart":
                restarted = f"{name_ranks(self._cluster.restart(ranks))} restarted with an empty namespace"
                if rank is None or self._cluster.world_size == 1:
                    return restarted
                return f"{restarted}; %distributed heal {rank} copies the variables of another rank"
            case _:
                raise InvalidArgument(f"unknown action {kind!r}; choose from interrupt, restart")


Loader = Callable[[str, Manifest], str | None]
"""Load the checkpoint at this path on the ranks and return a message, or None if that is not possible."""
# What decides whether a cached entry is still valid: the manifest's last bytes, and the names and sizes of the files.
Signature = tuple[bytes, tuple[tuple[str, int | None], ...]]
_TAIL_BYTES = 64
"""Bytes read from a manifest's end, which include its checksum.

They detect a step that was saved again with the same size.
"""


class CheckpointBrowser:
    """The checkpoints in a folder; see `widgets.live_view.CheckpointSource`.

    `load` implements the load button; without it, `load` returns instructions.
    """

    def __init__(self, folder: str | os.PathLike[str], load: Loader | None = None) -> None:
        # `_folder` is shown. What the user does later means the folder of now, also after `os.chdir`.
        self._folder, self._where = os.fspath(folder), _absolute(folder)
        self._storage = storage_of(folder)
        self._load = load
        # Guards the two dicts: polls, clicks and the first display come from several threads.
        self._lock = Lock()
        self._cache: dict[str, tuple[Signature, StoredCheckpoint]] = {}
        self._verified: dict[str, tuple[Signature, str, str]] = {}

    def list_checkpoints(self) -> CheckpointFolder:
        """Return the checkpoints; see `CheckpointSource`. Manifests are read again only if files changed."""
        with self._lock:
            try:
                names = self._storage.list()
                # The folder may be a checkpoint itself instead of a folder of checkpoints.
                if steps.is_checkpoint(names):
                    return CheckpointFolder(self._folder, (self._stored_checkpoint("", None, latest=True),), "")
                # If the record of the latest step is unreadable, the steps are listed nevertheless.
                trouble, latest = "", None
                try:
                    latest = steps.read_latest(self._storage)
                except CheckpointError as error:
                    trouble = str(error)
                folders = steps.finished_folders(self._storage, names)
                finished = set(folders.values())
                # Before manifests are read, which may take longer than a save.
                partials = [
                    self._partial_checkpoint(name) for name in steps.list_partials(self._storage, names, finished)
                ]
                entries = [self._stored_checkpoint(folders[step], step, latest=step == latest) for step in folders]
                # Another process may remove a step at any time. It lacks files then, and so looks damaged. It counts as
                # such only if it is still finished after it was read.
                if damaged := {entry.name for entry in entries if entry.checked == "damaged"}:
                    still = steps.finished_folders(self._storage, damaged & self._storage.list().keys()).values()
                    entries = [entry for entry in entries if entry.name not in damaged or entry.name in still]
                candidates = {name: size for name, size in names.items() if name not in finished}
                others = [
                    self._stored_checkpoint(name, None, latest=False) for name in self._other_checkpoints(candidates)
                ]
                # A step that loses its manifest first, while it is being removed, looks like one of another program.
                entries += [other for other in others if other.checked != "damaged" or self._is_other(other.name)]
            except (OSError, CheckpointError) as error:
                return CheckpointFolder(self._folder, (), f"{self._folder}: {error}")
            self._cache = {name: cached for name, cached in self._cache.items() if name in names}
            self._verified = {name: checked for name, checked in self._verified.items() if name in names}
            return CheckpointFolder(self._folder, (*entries, *partials), trouble)

    def verify(self, name: str) -> str:
        """See `CheckpointSource`."""
        # Taken before verifying: if the checkpoint is replaced meanwhile, the result belongs to the old one and is not
        # shown.
        signature = self._signature(self._path(name))
        # This reads all files and may take minutes, so the lock is not held and the list stays available.
        report = verify(self._full_path(name))
        detail = "; ".join(map(str, report.damages[:3]))
        with self._lock:
            self._verified[name] = (signature, "verified" if report.ok else "damaged", detail)
        return str(report)

    def load(self, name: str) -> str:
        """See `CheckpointSource`."""
        step, where = self._parse_name(name), self._full_path(name)
        message = self._load(where, read_manifest(self._storage, self._path(name))) if self._load is not None else None
        if message is not None:
            return message
        which = f"{self._where!r}, step={step}" if step is not None else repr(where)
        return (
            "run this in a cell on the ranks, with the names of your objects: "
            f"load(sharded_state_dict(model, optimizer), {which})"
        )

    def delete(self, name: str) -> str:
        """Delete a checkpoint; see `CheckpointSource`. A step that is being saved is not deleted."""
        if name in steps.list_partials(self._storage):
            # Checked at the moment of the click. The list in the browser may be seconds old.
            if (owner := self._writer_of(name)) is not None:
                raise InvalidArgument(
                    f"{name} is being saved by {owner}; wait until the save has finished, or stop that process"
                )
            self._storage.remove(name)
            return f"{name} was deleted"
        step = self._parse_name(name)
        if self._is_single_checkpoint(name):
            raise InvalidArgument(f"{self._folder} is itself a checkpoint; delete the folder manually")
        if step is None:
            self._storage.remove(name)
        else:
            steps.remove(self._storage, step)
        return f"{name} was deleted"

    def _parse_name(self, name: str) -> int | None:
        """Return the step of a finished checkpoint listed by `list_checkpoints`, or None if it has no step number."""
        if self._is_single_checkpoint(name) or name in self._other_checkpoints(self._storage.list()):
            return None
        # While a save replaces step 40, it may exist under the name `step-40.replaced` only, and counts as finished.
        step = steps.parse_step(name.removesuffix(ASIDE))
        if step is not None:
            return step
        raise InvalidArgument(f"{self._folder} has no finished checkpoint {name!r}")

    def _other_checkpoints(self, names: Mapping[str, int | None]) -> list[str]:
        """Return the checkpoints that are not steps: those of an `Accelerator`, and those of another program."""
        return [
            name
            for name in sorted(names)
            if names[name] is None and not name.endswith((steps.PARTIAL, ASIDE)) and self._is_other(name)
        ]

    def _is_other(self, name: str) -> bool:
        content = self._storage.list(name)
        return steps.is_checkpoint(content) and (steps.parse_step(name) is None or MANIFEST not in content)

    def _is_single_checkpoint(self, name: str) -> bool:
        return name == self._folder_name() and steps.is_checkpoint(self._storage.list())

    def _full_path(self, name: str) -> str:
        return self._where if self._is_single_checkpoint(name) else f"{self._where.rstrip('/')}/{name}"

    def _folder_name(self) -> str:
        return self._folder.rstrip("/").rpartition("/")[2] or self._folder

    def _path(self, name: str) -> str:
        return "" if self._is_single_checkpoint(name) else name

    def _signature(self, path: str) -> Signature:
        # Names with sizes in bytes. A folder has the size None.
        names = self._storage.list(path)
        tail, where = bytearray(_TAIL_BYTES), f"{path}/{MANIFEST}" if path else MANIFEST
        if size := names.get(MANIFEST):
            with contextlib.suppress(OSError):  # the checkpoint may be deleted meanwhile
                self._storage.read(where, max(0, size - _TAIL_BYTES), memoryview(tail))
        return bytes(tail), tuple(sorted(names.items()))

    def _stored_checkpoint(self, path: str, step: int | None, *, latest: bool) -> StoredCheckpoint:
        name, signature = path or self._folder_name(), self._signature(path)
        # Reading a manifest of many chunks takes much longer than listing a folder, and the view reads every few
        # seconds.
        cached = self._cache.get(name)
        if cached is None or cached[0] != signature:
            cached = self._cache[name] = (signature, self._read_checkpoint(name, path, step))
        checkpoint = cached[1]
        checked = self._verified.get(name)
        state, detail = checkpoint.checked, checkpoint.detail
        if checked is not None and checked[0] == signature:
            state, detail = checked[1:]
        return StoredCheckpoint(
            checkpoint.name,
            checkpoint.step,
            checkpoint.created,
            checkpoint.bytes,
            checkpoint.world_size,
            checkpoint.state,
            state,
            latest,
            detail,
        )

    def _read_checkpoint(self, name: str, path: str, step: int | None) -> StoredCheckpoint:
        try:
            manifest = read_manifest(self._storage, path)
        except (OSError, CheckpointError) as error:
            size = sum(size or 0 for size in self._storage.list(path).values())
            return StoredCheckpoint(
                name, step, None, size, None, "finished", "damaged", latest=False, detail=str(error)
            )
        return StoredCheckpoint(
            name=name,
            step=manifest.step if step is None else step,
            created=_seconds(manifest.created),
            bytes=manifest.nbytes,
            # The metadata of torch's DCP does not name the world size.
            world_size=None if manifest.foreign else manifest.world_size,
            state="foreign" if manifest.foreign else "finished",
            checked="",
            latest=False,
            detail="",
        )

    def _writer_of(self, name: str) -> steps.WriterIdentity | None:
        """Return the process that is writing a partial checkpoint, also one that gets its final name file by file."""
        partial = name if name.endswith(steps.PARTIAL) else name.removesuffix(ASIDE) + steps.PARTIAL
        return steps.writer_of(self._storage, partial)

    def _partial_checkpoint(self, name: str) -> StoredCheckpoint:
        owner = self._writer_of(name)
        return StoredCheckpoint(
            name=name,
            step=steps.parse_step(name.removesuffix(steps.PARTIAL)),
            created=None,
            bytes=sum(size or 0 for size in self._storage.list(name).values()),
            world_size=None,
            state="partial",
            checked="",
            latest=False,
            detail=f"being saved by {owner}" if owner else "the save was interrupted",
        )


def _seconds(created: str) -> float | None:
    """Convert an ISO time to seconds since the epoch; None if it is invalid."""
    try:
        return datetime.datetime.fromisoformat(created).timestamp()
    except ValueError:
        return None


class Dashboard(LiveView):
    """Placement, shards and checkpoints as tabs. Only the visible tab is updated."""

    _esm = script(
        "placement",
        "shards",
        "checkpoints",
        "dashboard",
        last='export default mount("dashboard", '
        "{placement: drawPlacement, shards: drawShards, checkpoints: drawCheckpoints}, tabs);",
    )
    # The traits of all three models, under the names that `LiveView` sets.
    placement_fixed = traitlets.Unicode("{}").tag(sync=True)
    placement_state = traitlets.Unicode("{}").tag(sync=True)
    shards_fixed = traitlets.Unicode("{}").tag(sync=True)
    shards_state = traitlets.Unicode("{}").tag(sync=True)
    checkpoints_fixed = traitlets.Unicode("{}").tag(sync=True)
    checkpoints_state = traitlets.Unicode("{}").tag(sync=True)

    # Of the notebook process: all cells share it.
    _open: ClassVar[Dashboard | None] = None

    def __init__(
        self, source: ClusterSource, checkpoint_source: CheckpointSource | None = None, *, variable: str = ""
    ) -> None:
        super().__init__(
            [PlacementModel(source), ShardsModel(source, variable), CheckpointsModel(source, checkpoint_source)]
        )

    @classmethod
    def reopen(
        cls, source: ClusterSource, checkpoint_source: CheckpointSource | None = None, *, variable: str = ""
    ) -> Dashboard:
        """Open the dashboard in this cell, and close the one that is open elsewhere in the notebook."""
        # Two open dashboards would query the ranks twice.
        if cls._open is not None:
            cls._open.replace_by_message("The dashboard was opened again in another cell.")
        cls._open = cls(source, checkpoint_source, variable=variable)
        return cls._open
