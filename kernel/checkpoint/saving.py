"""Saving: every rank calls it with its part; afterwards all of it is there, or what was there before.

Owns: `save`, its options and their checks. Refuses: the work (`driving.py`, `writing.py`, `async_save.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from rankbook.checkpoint import async_save
from rankbook.checkpoint.agreement import agreed, spelt
from rankbook.checkpoint.async_save import SaveHandle
from rankbook.checkpoint.contents import Contents, contents_of
from rankbook.checkpoint.driving import Saved, perform
from rankbook.checkpoint.folders import whole_number
from rankbook.checkpoint.manifest import check_json
from rankbook.checkpoint.place import Place, Retention
from rankbook.checkpoint.storage import storage_of
from rankbook.checkpoint.stores import Storage
from rankbook.checkpoint.telling import Telling
from rankbook.errors import BadRequest, CheckpointingException
from rankbook.telemetry import CheckpointSave

Folder = str | os.PathLike[str] | Storage


def save(
    sharded_state_dict: Any,  # noqa: ANN401 - nested dicts and lists
    folder: Folder,
    *,
    step: int | None = None,
    metadata: dict[str, Any] | None = None,
    async_: bool = False,
    on_progress: Callable[[CheckpointSave], None] | None = None,
    keep: int | None = None,
    keep_every: int | None = None,
    fully_parallel: bool = False,
    busy: Literal["wait", "refuse"] = "wait",
) -> Saved | SaveHandle:
    """Save what all ranks hold as `step` of `folder`, the next step if None. Every rank calls it.

    The state dict may hold ShardedTensors, ShardedObjects, factories, DTensors, plain tensors (rank 0's are stored)
    and values, which must be equal on all ranks. `metadata`, rank 0's, is kept beside it, as JSON; all other arguments
    but `on_progress` must be the same on all ranks. `keep` and `keep_every` say which older steps stay: the newest, and
    those that the second number divides; all by default.
    With `fully_parallel` the replicas of a chunk share out who stores it, by bytes; else the main replica is stored.
    `on_progress` is called with this rank's progress, in the thread that saves; where it fails it is logged,
    and not called again.

    With `async_` the data is copied, and a `SaveHandle` returned; a save that is still under way is waited for first,
    or refused with `busy="refuse"`.

    Raises `BadRequest` for arguments that are wrong or not the same, and `CheckpointingException` when the parts do not
    fit together, when one rank cannot write, and when a save in the background has failed of which nobody was told:
    the same on every rank. What was saved before is untouched.
    """

    def checked() -> tuple[dict[str, Any], Place]:
        if busy not in {"wait", "refuse"}:
            raise BadRequest(f'busy={busy!r}: "wait" for the save before this one, or "refuse"')
        number = None if step is None else whole_number("step", step, 0)
        retention = Retention(keep, keep_every)
        return _metadata(metadata), Place(storage_of(folder), str(folder), number, retention=retention)

    given, place = agreed(
        "save",
        checked,
        folder=spelt(folder),
        step=step,
        async_=async_,
        keep=keep,
        keep_every=keep_every,
        fully_parallel=fully_parallel,
        busy=busy,
    )
    return save_contents(
        contents_of(sharded_state_dict),
        place,
        metadata=given,
        async_=async_,
        on_progress=on_progress,
        fully_parallel=fully_parallel,
        busy=busy,
    )


def save_contents(
    contents: Contents,
    place: Place,
    *,
    metadata: dict[str, Any],
    async_: bool = False,
    on_progress: Callable[[CheckpointSave], None] | None = None,
    fully_parallel: bool = False,
    busy: str = "wait",
) -> Saved | SaveHandle:
    """`save`, of what has been taken apart, in a place of any name."""
    async_save.settle(refuse=busy == "refuse")
    telling = Telling(place.folder, background=async_, on_progress=on_progress)

    def work(held: Contents, group: Any) -> Saved:  # noqa: ANN401 - a process group
        return perform(held, place, telling, metadata=metadata, fully_parallel=fully_parallel, group=group)

    if not async_:
        return work(contents, None)
    return async_save.start(contents, telling, work, everything=fully_parallel)


def _metadata(given: dict[str, Any] | None) -> dict[str, Any]:
    try:
        check_json(given or {}, "metadata")
        return msgspec.json.decode(msgspec.json.encode(given or {}), type=dict[str, Any])
    except (CheckpointingException, TypeError, msgspec.MsgspecError, ValueError) as error:
        raise BadRequest(f"metadata= is written as JSON, which this cannot be: {error}") from error
