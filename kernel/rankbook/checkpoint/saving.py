"""Saving, and the checkpoint's commit: either the whole of a step becomes visible, or what was there before stays.

Theory of operation: the commit
===============================

A step is written into `step-N.partial` and becomes visible by one rename to `step-N`. Readers look at `step-N` alone,
so until that rename a save can stop anywhere without anybody loading half a checkpoint. What a process leaves behind
when it is killed depends on how far it came; nothing of it is cleaned up by the process that dies, only by the next
save into the same folder.

1. All ranks agree on the arguments (`agreed`), and the asynchronous save before this one has ended. On disk: nothing.

2. **Plan.** Every rank declares which chunks it holds (`Writer.declare`); rank 0 gathers the declarations, checks that
   they make up every tensor exactly once, decides who writes what, and scatters a task to every rank (`Writer.plan`).
   A rank whose declaration is that of the save before sends its digests alone; if rank 0 does not know them (it is a
   new process), it answers None and all declare once more. Before rank 0 answers, it takes the folder's lock, sweeps
   what killed saves have left (see below), chooses the step, and claims it: the file `step-N.partial.owner` names this
   process and is created only where there is none, so of two jobs that save the same step one gets an error. Then it
   removes the rest of an earlier attempt.
   *A crash here leaves* the owner file.

3. **Write.** Every rank writes its one file, `step-N.partial/__R_0.distcp`, and syncs the file and its folder.
   *A crash here leaves* the owner file and a partial folder, with files cut off anywhere.

4. **Describe.** Rank 0 gathers what the ranks have written, and checks that it sees every file with its whole size.
   It writes `common.pt`, `metadata.json` and `.metadata`, which other programs read, and last `manifest.json`, which
   has every chunk's place and checksum. Each file is synced before the next one is begun, so a folder with a manifest
   is complete.
   *A crash here leaves* a partial folder; even with a manifest no step is loaded from it, since it has the wrong name.

5. **Rename.** Under the folder's lock rank 0 checks that the claim is still its own, writes the next `latest` to
   `step-N.latest` (the last operation that needs room on the disk), renames `step-N.partial` to `step-N`, and renames
   `step-N.latest` to `latest`. Where step N was there before, Linux exchanges the two folders in one system call, and
   the old one is removed afterwards. Where folders cannot be exchanged, the old one is put aside as `step-N.old`, which
   readers take in the place of `step-N` while that is missing.
   *A crash before the rename leaves* what it left in 4, and `step-N.latest`. *After it* step N is complete and can be
   loaded by its number; `latest` names the step before until the second rename. The old folder may be left, under the
   partial or the `.old` name, and the owner file.

6. Rank 0 removes the owner file, then old steps as `keep` says, and tells every rank. A failure to remove old steps is
   no failure of the save: the next one tries again. Where only `latest` cannot be replaced, the save fails and says
   that the step is complete.

**Who cleans up.** A save that fails while its processes live is cleaned up by rank 0 at once (`Place.abandon`): the
partial folder, the next `latest` and the claim go, and every rank raises the same error. What a killed process has left
is swept by the next save into the folder (`folders.sweep`, in step 2). The owner file tells the two apart: a partial
folder is swept only if its owner is dead (its process is gone, or another one has its number now; on another machine,
if its claim is a day old). A step that was put aside and has no successor gets its name back.

A checkpoint with a name of its own, as `Accelerator.save_state` makes them, goes the same way as `NAME.partial`,
without `latest` and without a sweep: the next save of that name removes what is left, and so does the Accelerator for
its numbered folders.

**Errors.** No rank raises between two collectives. What a rank's work raises travels in the place of its result
(`agreement.RankGroup`), so all ranks end the phase together and raise one error that names every rank that failed with
its reason. A rank that dies breaks the group's connections; the others get torch's error, with a note. Only rank 0
changes anything outside of the partial folder, and only in steps 2, 5 and 6.

An asynchronous save copies the data first, and does all from step 2 in a thread, over a process group of its own
(`async_save.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from rankbook.checkpoint import async_save
from rankbook.checkpoint.async_save import SaveHandle
from rankbook.checkpoint.consistency import RankGroup, RanksFailed, agreed, spelt
from rankbook.checkpoint.format.manifest import check_json
from rankbook.checkpoint.local_state import Contents, contents_of
from rankbook.checkpoint.progress import Telling
from rankbook.checkpoint.storage.base import Storage
from rankbook.checkpoint.storage.local import storage_of
from rankbook.checkpoint.storage.steps import Place, Retention, whole_number
from rankbook.checkpoint.writer import PlanHistory, Writer
from rankbook.errors import BadRequest, CheckpointingException
from rankbook.protocol.telemetry import CheckpointSave

Folder = str | os.PathLike[str] | Storage


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: its `step` and `name` in the `folder`, this rank's bytes, the seconds that it took."""

    folder: str
    name: str
    step: int | None
    bytes: int
    seconds: float


@dataclass
class _Process:
    """What this process keeps from one save to the next."""

    history: PlanHistory = field(default_factory=PlanHistory)
    last: Saved | None = None


_process = _Process()


def last_saved() -> Saved | None:
    """Return the last checkpoint that this process has saved with the others; None if there is none."""
    return _process.last


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
    """Save what has been taken apart, in a place of any name. See `save`."""
    async_save.settle(refuse=busy == "refuse")
    telling = Telling(place.folder, background=async_, on_progress=on_progress)

    def run(held: Contents, group: Any) -> Saved:  # noqa: ANN401 - a process group
        return run_save(held, place, telling, metadata=metadata, fully_parallel=fully_parallel, group=group)

    if not async_:
        return run(contents, None)
    return async_save.start(contents, telling, run, everything=fully_parallel)


def run_save(
    contents: Contents,
    place: Place,
    telling: Telling,
    *,
    metadata: dict[str, Any],
    fully_parallel: bool = False,
    group: Any = None,  # noqa: ANN401 - a process group
) -> Saved:
    """Save on the calling thread, with every rank of `group`: plan, write and commit, as described above.

    Raises `CheckpointingException`, the same on every rank.
    """
    began = time.monotonic()
    ranks = RankGroup(group)
    writer = Writer(
        ranks.rank, contents, place, telling, _process.history, metadata=metadata, fully_parallel=fully_parallel
    )
    try:
        task = ranks.exchange(lambda: writer.declare(whole=False), writer.plan)
        if task is None:
            task = ranks.exchange(lambda: writer.declare(whole=True), writer.plan)
        assert task is not None
        own = task
        ranks.exchange(lambda: writer.write(own), writer.commit)
    except BaseException as error:
        _process.history.clear()
        if ranks.rank == 0:
            place.abandon()
        if isinstance(error, RanksFailed):
            telling.failed(error.message("save"))
            error.reraise("save")
        telling.failed(f"{type(error).__name__}: {error}")  # the ranks have lost each other
        error.add_note(f"The save to {place.folder} was broken off; what was saved before is untouched.")
        raise
    saved = Saved(place.folder, telling.name, telling.step, telling.written, time.monotonic() - began)
    _process.last = saved
    telling.enter("done")
    telling.check()  # the checkpoint is complete; what the listener raised is raised all the same
    return saved


def _metadata(given: dict[str, Any] | None) -> dict[str, Any]:
    try:
        check_json(given or {}, "metadata")
        return msgspec.json.decode(msgspec.json.encode(given or {}), type=dict[str, Any])
    except (CheckpointingException, TypeError, msgspec.MsgspecError, ValueError) as error:
        raise BadRequest(f"metadata= is written as JSON, which this cannot be: {error}") from error
