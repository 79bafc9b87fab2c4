"""Loading: every rank calls it with the map of what it wants, however many ranks have saved.

Owns: `load`, `load_plain`, `load_metadata`, and the planner and the reader that `torch.distributed.checkpoint` drives.
Refuses: which bytes go where (`reading.py`, `transfer.py`), and which checkpoint it is (`found.py`).
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from rankbook.checkpoint.agreement import agreed, spelt
from rankbook.checkpoint.contents import Wishes, everything
from rankbook.checkpoint.driving import quiet, raise_own, words
from rankbook.checkpoint.fetch import Fetch
from rankbook.checkpoint.folders import asked_for
from rankbook.checkpoint.found import Found, Step, find
from rankbook.checkpoint.manifest import Manifest
from rankbook.checkpoint.reading import ReadPlan, plan_read
from rankbook.checkpoint.saving import Folder
from rankbook.checkpoint.storage import storage_of
from rankbook.checkpoint.strictness import Decision, StrictHandling, decide
from rankbook.errors import CheckpointingException

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
    state, decision = prepared.fill(), prepared.planner.decision
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
) -> Prepared:
    """`load` up to the first tensor that is written; `fill` of what is returned does the rest."""
    mode, storage, _ = agreed(
        "load",
        lambda: (StrictHandling.of(strict), storage_of(folder), asked_for(step)),
        folder=spelt(folder),
        step=step,
        strict=str(getattr(strict, "value", strict)).lower(),
        verify=verify,
        cast=cast,
    )
    found = find(storage, step)
    return prepare(
        found,
        lambda: Wishes(sharded_state_dict, found.manifest),
        mode=mode,
        verify=verify,
        cast=cast,
        allow=allow,
    )


_NOTHING_TO_DECIDE = Decision("", "", frozenset(), frozenset(), frozenset())


class Prepared:
    """A load of which all ranks have planned and verified their parts, and nobody has written anything."""

    def __init__(self, planner: Planner, fetch: Fetch, mode: StrictHandling, *, alone: bool) -> None:
        self.planner, self.mode = planner, mode
        self._fetch = fetch
        self._alone = alone
        self._objects: dict[str, Any] = {}
        self._common: Any = None

    def verify(self) -> None:
        """Read all but the tensors, and verify those."""
        fetch, own = self._fetch, self.planner
        assert own.wishes is not None
        self._objects = fetch.objects([each.unique_key for each in own.wishes.objects])
        self._common = fetch.common(own.wishes)
        if own.is_coordinator:
            fetch.small_files()
        fetch.verify(own.plan, own.wishes.fresh, ranks=1 if self._alone else _ranks_here())
        fetch.conclude()

    def fill(self) -> Any:  # noqa: ANN401 - nested as the given one
        """Read the tensors, and return the state dict that the wishes make. A collective; raises as `load`."""
        wishes = self.planner.wishes
        assert wishes is not None

        def tensors() -> None:
            self._fetch.tensors(self.planner.plan, wishes.tensors, wishes.fresh)
            self._fetch.conclude()

        _run(Reader(tensors), NoPlan(), alone=self._alone)
        return wishes.assembled(self._objects, self._common, self.planner.decision.skipped)


def prepare(
    found: Found,
    wishes: Callable[[], Wishes],
    *,
    mode: StrictHandling,
    verify: bool,
    cast: bool = False,
    allow: Sequence[type | str] = (),
    together: bool = True,
) -> Prepared:
    """Plan and verify what `wishes` asks for. A collective with `together`. Raises as `load`."""
    alone = not (together and dist.is_initialized())
    planner = Planner(found, wishes, mode, cast=cast)
    prepared = Prepared(planner, Fetch(found, verify=verify, allow=allow), mode, alone=alone)
    _run(Reader(prepared.verify), planner, alone=alone)
    if planner.decision.warning and (alone or dist.get_rank() == 0):
        logger.warning(planner.decision.warning)
    return prepared


def _run(reader: Reader, planner: LoadPlanner, *, alone: bool) -> None:
    """Have all ranks plan and read. Raises, the same on every rank, what went wrong on one."""
    try:
        with quiet(alone):
            dcp.load({}, storage_reader=reader, planner=planner, no_dist=alone)
    except CheckpointException as failure:
        raise_own(failure, 0 if alone else dist.get_rank(), words(failure, "load"))


def _ranks_here() -> int:
    """Return how many ranks of this machine load at the same time."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() and int(told) else dist.get_world_size()


class NoPlan(LoadPlanner):
    """Stands where torch wants a plan, once the ranks have one."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:  # noqa: ANN401
        """Called by torch."""

    def create_local_plan(self) -> LoadPlan:
        """Return an empty one."""
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return them as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return it as it is."""
        return central_plan

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:  # noqa: ANN401
        """Not called: the reader's work fills the tensors itself."""
        raise NotImplementedError

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:  # noqa: ANN401
        """Not called: the reader's work fills the tensors itself."""
        raise NotImplementedError

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:  # noqa: ANN401
        """Not called: the reader's work fills the tensors itself."""
        raise NotImplementedError


class Planner(NoPlan):
    """Has each rank plan what it reads, and rank 0 decide about keys that do not match."""

    def __init__(self, found: Found, ask: Callable[[], Wishes], mode: StrictHandling, *, cast: bool) -> None:
        self._found = found
        self._ask = ask
        self._mode = mode
        self._cast = cast
        self.wishes: Wishes | None = None
        self.plan = ReadPlan()
        self.decision = _NOTHING_TO_DECIDE
        self.is_coordinator = True

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:  # noqa: ANN401
        """Called by torch; the state dict is not needed."""
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """This rank's reads."""
        wishes = self.wishes = self._ask()
        self.plan = plan_read([each.wanted() for each in wishes.tensors], self._found.manifest, cast=self._cast)
        asked = {each.key for each in wishes.tensors} | {each.unique_key for each in wishes.objects}
        stored = self._found.manifest
        unknown = {key for key in asked if key not in stored.tensors and key not in stored.objects}
        told = (asked if self._mode.asks_all_ranks else unknown, [each.what for each in self.plan.mismatches])
        return LoadPlan([], planner_data=told)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On rank 0: raise about mismatches and, as the mode says, about keys."""
        complaints: dict[str, list[int]] = {}
        for rank, each in enumerate(global_plan):
            for what in each.planner_data[1]:
                complaints.setdefault(what, []).append(rank)
        if complaints:
            lines = [f"{what} (rank{'s' * (len(r) > 1)} {', '.join(map(str, r))})" for what, r in complaints.items()]
            more = [f"and {len(lines) - 8} more"] if len(lines) > 8 else []
            raise CheckpointingException(
                f"the checkpoint {self._found} does not have what was asked for:\n  " + "\n  ".join([*lines[:8], *more])
            )
        manifest = self._found.manifest
        asked = [each.planner_data[0] for each in global_plan]
        sharded = [*manifest.tensors, *(key for key in manifest.objects if key not in manifest.values)]
        decision = decide(asked, sharded, self._mode, str(self._found))
        if decision.error:
            raise CheckpointingException(decision.error)
        return [LoadPlan([], planner_data=decision) for _ in global_plan]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As rank 0 decided."""
        self.decision = central_plan.planner_data
        return central_plan


class Reader(StorageReader):
    """Does a rank's `work` once all ranks have their plans."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def reset(self, checkpoint_id: Any = None) -> None:  # noqa: ANN401
        """Called by torch; there is a reader for each load."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ANN401
        """Whether torch may choose this reader by itself: no."""
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ANN401
        """The planner has the manifest."""
        return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Called by torch."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Do the work. Raises `CheckpointingException` where something is damaged."""
        self._work()
        done: Future[None] = Future()
        done.set_result(None)
        return done


def load_plain(
    folder: Folder, *, step: Step | None = "latest", verify: bool = True, allow: Sequence[type | str] = ()
) -> Any:  # noqa: ANN401 - nested dicts and lists
    """Everything there is, without a map, on this process alone: whole tensors and objects by key, the common part.

    Raises `CheckpointingException` as `load` does.
    """
    found = find(storage_of(folder), step, together=False)
    found.check_sizes()  # before memory is taken for what the manifest says
    prepared = prepare(
        found,
        lambda: Wishes(everything(found.manifest), found.manifest, all_values=True),
        mode=StrictHandling.RAISE_ALL,
        verify=verify,
        allow=allow,
        together=False,
    )
    return prepared.fill()


def load_metadata(folder: Folder, *, step: Step | None = "latest") -> Manifest:
    """What the checkpoint says about itself: step, time, world size, the person's metadata, each tensor's chunks.

    Raises `CheckpointingException` where there is none, or where that is damaged.
    """
    return find(storage_of(folder), step, together=False).manifest
