"""Loading: every rank calls it with the map of what it wants, however many ranks have saved.

In three phases, between which no rank raises alone (`agreement.RankGroup`). Plan: every rank plans its reads, and
rank 0 decides about keys that do not match. Verify: every rank reads its objects and compares the bytes of its tensors
with their checksums, and writes nothing. Fill: every rank reads into its tensors.

Which checkpoint it is, rank 0 decides first (`find`); which bytes go where, `reading.py` and `transfer.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import torch.distributed as dist

from rankbook.checkpoint.consistency import RankGroup, RanksFailed, agreed, spelt
from rankbook.checkpoint.format import dcp_metadata
from rankbook.checkpoint.format.manifest import MANIFEST, Manifest
from rankbook.checkpoint.format.structure import decode, sizes_hold
from rankbook.checkpoint.local_state import Wishes, everything
from rankbook.checkpoint.planning.load_plan import plan_read
from rankbook.checkpoint.planning.validation import said
from rankbook.checkpoint.reader import Fetch
from rankbook.checkpoint.saving import Folder
from rankbook.checkpoint.storage import steps
from rankbook.checkpoint.storage.base import ASIDE, Storage, read_all
from rankbook.checkpoint.storage.local import storage_of
from rankbook.checkpoint.strict import Decision, StrictHandling, decide
from rankbook.errors import CheckpointingException
from rankbook.ranks import group_ranks

Step = int | Literal["latest"]

logger = logging.getLogger(__name__)


def load(
    sharded_state_dict: Any,  # noqa: ANN401 - nested dicts and lists
    folder: Folder,
    *,
    step: Step | None = "latest",
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify: bool = True,
    cast: bool = False,
    allow: Sequence[type | str] = (),
) -> Any:  # noqa: ANN401 - nested as the given one
    """What this rank asks for, from `step` of `folder` or from `folder` itself. Every rank calls it.

    The state dict says what is wanted, as for `save`, in any layout: tensors are read into the memory that its entries
    have, or into new memory on the CPU where a ShardedTensor has no data. Returned is a state dict of the same nesting
    with plain values in the place of sharded entries, and the common part beside them. In a strict mode that returns
    keys, (state dict, missing keys, unexpected keys).

    What is read is verified unless `verify` is False. Another dtype than the stored one is an error unless `cast`.
    Stored objects may have `allow`ed classes, given as such or by name, beside those that torch takes for safe.

    Raises `CheckpointingException`, the same on every rank: where there is no such checkpoint, where keys, shapes or
    dtypes do not match, and where something is damaged, with file, key and the rank that wrote it. All that is wanted
    is verified on all ranks before the first tensor of the state dict is written, so a checkpoint that is damaged
    leaves them as they were. Where the machine's memory cannot hold the bytes until they are read again, from a remote
    storage, and without `verify`, they are read once, and the error names the tensors that are neither old nor new.
    """
    prepared = prepare_load(sharded_state_dict, folder, step=step, strict=strict, verify=verify, cast=cast, allow=allow)
    state, decision = prepared.fill(), prepared.decision
    if prepared.mode.returns_keys:
        return state, set(decision.missing), set(decision.unexpected)
    return state


def prepare_load(
    sharded_state_dict: Any,  # noqa: ANN401 - nested dicts and lists
    folder: Folder,
    *,
    step: Step | None = "latest",
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify: bool = True,
    cast: bool = False,
    allow: Sequence[type | str] = (),
) -> Loader:
    """Load up to the first tensor that is written; `fill` of the loader that is returned does the rest."""
    mode, storage, _ = agreed(
        "load",
        lambda: (StrictHandling.of(strict), storage_of(folder), steps.asked_for(step)),
        folder=spelt(folder),
        step=step,
        strict=str(getattr(strict, "value", strict)).lower(),
        verify=verify,
        cast=cast,
    )
    found = find(storage, step)
    loader = Loader(
        found,
        lambda: Wishes(sharded_state_dict, found.manifest),
        mode=mode,
        verify=verify,
        cast=cast,
        allow=allow,
        ranks=RankGroup(),
    )
    return loader.prepare()


class Request(NamedTuple):
    """What rank 0 needs of a rank's plan. `keys`: all that the rank asks for, or those of them that are not stored."""

    keys: set[str]
    mismatches: list[str]


class Loader:
    """One rank's part in a load. Called in this order: `plan`, `decide` on rank 0, `verify`, `read`, `assemble`."""

    def __init__(
        self,
        found: Found,
        wishes: Callable[[], Wishes],
        *,
        mode: StrictHandling,
        verify: bool,
        cast: bool = False,
        allow: Sequence[type | str] = (),
        ranks: RankGroup,
    ) -> None:
        self.mode = mode
        self.decision = Decision("", "", frozenset(), frozenset(), frozenset())
        self._found = found
        self._make_wishes = wishes
        self._cast = cast
        self._fetch = Fetch(found, verify=verify, allow=allow)
        self._ranks = ranks

    def prepare(self) -> Self:
        """Plan and verify, on all ranks, and write nothing. A collective; raises as `load`."""
        try:
            self.decision = self._ranks.exchange(self.plan, self.decide)
            self._ranks.run(self.verify)
        except RanksFailed as failure:
            failure.reraise("load")
        if self.decision.warning and self._ranks.rank == 0:
            logger.warning(self.decision.warning)
        return self

    def fill(self) -> Any:  # noqa: ANN401 - nested as the given one
        """Read the tensors, and return the state dict that the wishes make. A collective; raises as `load`."""
        try:
            self._ranks.run(self.read)
        except RanksFailed as failure:
            failure.reraise("load")
        return self.assemble()

    def plan(self) -> Request:
        """Plan this rank's reads."""
        self._wishes = self._make_wishes()
        stored = self._found.manifest
        self._read_plan = plan_read([tensor.wanted() for tensor in self._wishes.tensors], stored, cast=self._cast)
        keys = {tensor.key for tensor in self._wishes.tensors} | {each.unique_key for each in self._wishes.objects}
        if not self.mode.asks_all_ranks:
            keys = {key for key in keys if key not in stored.tensors and key not in stored.objects}
        return Request(keys, [mismatch.what for mismatch in self._read_plan.mismatches])

    def decide(self, requests: list[Request]) -> list[Decision]:
        """Raise `CheckpointingException` about mismatches and, as the mode says, about keys. Return one for all."""
        mismatches = group_ranks(
            (rank, mismatch) for rank, request in enumerate(requests) for mismatch in request.mismatches
        )
        if mismatches:
            lines = [f"{mismatch} ({said(ranks)})" for mismatch, ranks in mismatches.items()]
            more = [f"and {len(lines) - 8} more"] if len(lines) > 8 else []
            raise CheckpointingException(
                f"the checkpoint {self._found} does not have what was asked for:\n  " + "\n  ".join([*lines[:8], *more])
            )
        manifest = self._found.manifest
        sharded = [*manifest.tensors, *(key for key in manifest.objects if key not in manifest.values)]
        decision = decide([request.keys for request in requests], sharded, self.mode, str(self._found))
        if decision.error:
            raise CheckpointingException(decision.error)
        return [decision] * len(requests)

    def verify(self) -> None:
        """Read the objects and the common part, and compare the tensors' bytes with their checksums."""
        fetch = self._fetch
        self._objects = fetch.objects([each.unique_key for each in self._wishes.objects])
        self._common = fetch.common(self._wishes)
        if self._ranks.rank == 0:
            fetch.small_files()
        fetch.verify(self._read_plan, self._wishes.fresh, ranks=1 if self._ranks.alone else _ranks_of_this_machine())
        fetch.conclude()

    def read(self) -> None:
        """Read into the tensors."""
        self._fetch.tensors(self._read_plan, self._wishes.tensors, self._wishes.fresh)
        self._fetch.conclude()

    def assemble(self) -> Any:  # noqa: ANN401 - nested as the given one
        """Return the state dict that the wishes make."""
        return self._wishes.assembled(self._objects, self._common, self.decision.skipped)


def _ranks_of_this_machine() -> int:
    """Return how many ranks of this machine load at the same time."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(count) if count.isdecimal() and int(count) else dist.get_world_size()


def load_plain(
    folder: Folder, *, step: Step | None = "latest", verify: bool = True, allow: Sequence[type | str] = ()
) -> Any:  # noqa: ANN401 - nested dicts and lists
    """Everything there is, without a map, on this process alone: whole tensors and objects by key, the common part.

    Raises `CheckpointingException` as `load` does.
    """
    found = find(storage_of(folder), step, together=False)
    found.check_sizes()  # before memory is taken for what the manifest says
    loader = Loader(
        found,
        lambda: Wishes(everything(found.manifest), found.manifest, all_values=True),
        mode=StrictHandling.RAISE_ALL,
        verify=verify,
        allow=allow,
        ranks=RankGroup(alone=True),
    )
    return loader.prepare().fill()


def load_metadata(folder: Folder, *, step: Step | None = "latest") -> Manifest:
    """What the checkpoint says about itself: step, time, world size, the person's metadata, each tensor's chunks.

    Raises `CheckpointingException` where there is none, or where that is damaged.
    """
    return find(storage_of(folder), step, together=False).manifest


@dataclass(frozen=True)
class Found:
    """A checkpoint that can be read: its `folder` within the storage ("" for the storage's own), and its manifest."""

    storage: Storage
    folder: str
    manifest: Manifest

    def path(self, file: int | str) -> str:
        """Return the path, within the storage, of a file by its number in the manifest or its name."""
        name = self.manifest.files[file].name if isinstance(file, int) else file
        return f"{self.folder}/{name}" if self.folder else name

    def check_sizes(self) -> None:
        """Raise `CheckpointingException` where a file has fewer bytes than the manifest says."""
        sizes_hold(self.manifest, self.storage.list(self.folder), str(self))

    def __str__(self) -> str:
        return f"{self.storage}/{self.folder}" if self.folder else str(self.storage)


def find(storage: Storage, step: Step | None, *, together: bool = True) -> Found:
    """Return the checkpoint that `step` means in `storage`. A collective with `together`: rank 0 chooses.

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
        folder = steps.locate(storage, step)
        try:
            return _read(storage, folder)
        except (CheckpointingException, FileNotFoundError):
            if steps.asked_for(step) is not None or steps.locate(storage, step) == folder:
                raise
            # another process has saved the next step meanwhile, and removed this one


def _read(storage: Storage, folder: str) -> Found:
    prefix = f"{folder}/" if folder else ""
    if MANIFEST in storage.list(folder):
        where = f"{storage}/{prefix}{MANIFEST}"
        manifest = decode(read_all(storage, f"{prefix}{MANIFEST}"), where)
        step = steps.step_of(folder.removesuffix(ASIDE))
        if folder and manifest.step != step:
            raise CheckpointingException(
                f"{where}: it is of step {manifest.step}, and lies in the folder of step {step}"
            )
        return Found(storage, folder, manifest)
    return Found(storage, folder, dcp_metadata.foreign(storage, folder))
