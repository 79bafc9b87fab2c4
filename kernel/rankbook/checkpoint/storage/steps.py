"""Manage a folder of steps: claim, commit, list, sweep and remove them, and keep `latest`.

A `CheckpointLocation` is the target of one save: a step of such a folder, or a folder with another name.

    step-40/                a finished step, with manifest.json in it
    step-50.partial/        a save that is running or was interrupted
    step-50.partial.owner   the process that runs it
    step-50.latest          becomes `latest` when step 50 is finished
    step-40.replaced/       step 40, while another save of step 40 replaces it and folders cannot be exchanged
    step-30.removed         an empty file, while step 30 is being removed
    latest                  one line, "step-40 crc32=xxxxxxxx", with the checksum of the name

Every change is a sequence of single storage operations, in an order in which any of them may be the last: a step that
could be loaded before can still be loaded.

Other programs use names such as `step-40` too, and a step may be copied into the folder while Rankbook saves there.
Therefore a sweep removes a `step-N` without a manifest only if a file beside it shows that Rankbook has left it:
`step-N.latest` is written before the folder gets its name, and `step-N.removed` before it loses its first file. A save
never replaces another `step-N` without a manifest.

Several processes may save different steps into one folder at the same time. A process that claims, commits, removes or
sweeps steps holds the storage's lock meanwhile (`locked_folder`). A claim is a file that is created exclusively.
Therefore, even without locks, on NFS or an object store, only one of two processes that save the same step gets the
claim, and the other one raises an error.

A claim has the identity of the process that writes the step: host, PID namespace, PID, start time and a token. The
process of another machine cannot be asked; it is considered dead when its claim is older than a day.
"""

from __future__ import annotations

import contextlib
import errno
import json
import operator
import os
import re
import time
import uuid
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from rankbook.checkpoint.format.manifest import MANIFEST, METADATA
from rankbook.checkpoint.storage import ASIDE, NewFiles, Storage, is_link, locked_folder, read_all, read_range
from rankbook.checkpoint.storage.backends import storage_of
from rankbook.errors import CheckpointError, InvalidArgument
from rankbook.process_identity import PATIENCE, ProcessIdentity, identify, machine, start_time_of

LATEST = "latest"
NEXT = ".latest"
REMOVED = ".removed"
PARTIAL = ".partial"
OWNER = ".owner"

_DRAFT = re.compile(r"\.[0-9a-f]{32}$")  # suffix of a draft: a file that is being created
_STEP = re.compile(r"step-(0|[1-9]\d{0,17})")
_LINE = re.compile(r"(step-(\d{1,18})) crc32=([0-9a-f]{8})\n")


def check_int(name: str, value: object, least: int) -> int:
    """Convert `value` to an int; integers of numpy and torch are accepted too.

    Raises `InvalidArgument` for other values, and for numbers below `least` or with more than 18 digits.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # raises TypeError for other values
    except TypeError:
        number = least - 1
    if not least <= number < 10**18 or isinstance(value, bool):
        raise InvalidArgument(f"{name} must be an integer >= {least} with at most 18 digits, got {value!r}")
    return number


def requested_step(step: object) -> int | None:
    """Return the number of a requested step, or None for the latest. Raises `InvalidArgument` for other values."""
    return None if step is None or (isinstance(step, str) and step == "latest") else check_int("step", step, 0)


def step_name(step: int) -> str:
    """Return the folder name of a finished step. Raises `InvalidArgument` for an invalid step number."""
    return f"step-{check_int('step', step, 0)}"


def partial_name(step: int) -> str:
    """Return the folder name of a step that is being written."""
    return step_name(step) + PARTIAL


def parse_step(name: str) -> int | None:
    """Return the step with this folder name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def finished_steps(storage: Storage) -> list[int]:
    """Return the steps that can be loaded, in ascending order."""
    return list(finished_folders(storage, storage.list()))


def finished_folders(storage: Storage, names: Collection[str]) -> dict[int, str]:
    """Return the folder names of those of `names` that are steps which can be loaded, in the order of the steps."""
    # A step that is being replaced may exist under its `ASIDE` name only, and counts as finished.
    steps = {step for name in names if (step := parse_step(name.removesuffix(ASIDE))) is not None}
    return {step: name for step in sorted(steps) if (name := _find_folder(storage, step, names)) is not None}


def steps(folder: str | os.PathLike[str] | Storage) -> list[int]:
    """Return the steps of a checkpoint folder that can be loaded, in ascending order.

    Example::

        steps("checkpoints")  # [100]
    """
    return finished_steps(storage_of(folder))


def list_partials(
    storage: Storage, names: Mapping[str, int | None] | None = None, finished: Collection[str] = ()
) -> list[str]:
    """Return the folders of running or interrupted saves, and the remains of removed steps.

    Who has listed the storage passes the result as `names`, and the folders of finished steps as `finished`.
    """
    names = storage.list() if names is None else names
    candidates = (name for name in names if names[name] is None and name not in finished)
    return sorted(name for name in candidates if _is_leftover(storage, name, names))


def writer_of(storage: Storage, partial: str) -> WriterIdentity | None:
    """Return the process that is writing a partial step; None if the save was interrupted."""
    owner = lock_owner(storage, partial + OWNER)
    return owner if owner is not None and owner.is_alive() else None


def folder_of(storage: Storage, step: int) -> str:
    """Return the folder name of a finished step.

    Raises `CheckpointError` if the step does not exist; the message lists the existing ones.
    """
    if (name := _find_folder(storage, step, storage.list())) is None:
        raise CheckpointError(f"{storage}: no finished step {step}; {_describe_steps(storage, step)}")
    return name


def read_latest_file(storage: Storage) -> int | None:
    """Return the step that the file `latest` names, finished or not; None if there is no such file.

    Raises `CheckpointError` if the file is damaged.
    """
    try:
        # A valid line has at most about 40 bytes. A larger file is damaged, and is not read completely.
        line = bytes(read_range(storage, LATEST, 0, 200))
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise CheckpointError(f"{storage}/{LATEST}: the file is damaged: {error.strerror}") from error
    match = _LINE.fullmatch(line.decode("ascii", errors="replace"))
    if match is None or int(match[3], 16) != zlib.crc32(match[1].encode()):
        raise CheckpointError(
            f"{storage}/{LATEST}: the file is damaged: {line[:60]!r}; {_describe_steps(storage)}; load a step by "
            "its number, or remove the file to use the highest finished step"
        )
    return int(match[2])


def read_latest(storage: Storage) -> int | None:
    """Return the latest step: the one that `latest` names, or without that file the highest finished one.

    Return None if no step is finished. Raises `CheckpointError` if the file is damaged or names a step that does
    not exist, because only the user can decide which step to use then.
    """
    step = read_latest_file(storage)
    while step is not None and _find_folder(storage, step, storage.list()) is None:
        named_before, step = step, read_latest_file(storage)
        if step == named_before:  # otherwise another process has saved the next step and removed this one: try again
            raise CheckpointError(
                f"{storage}/{LATEST} names step {step}, which is missing or not finished; "
                f"{_describe_steps(storage, step)}"
            )
    return max(finished_steps(storage), default=None) if step is None else step


def locate(storage: Storage, step: int | Literal["latest"] | None = "latest") -> str:
    """Return the path of a checkpoint within the storage; "" if the storage's root is itself a checkpoint.

    Raises `CheckpointError` if it does not exist; the message lists the existing steps.
    """
    # A number always means a step of the folder. Without one, a checkpoint in the root itself precedes `latest`.
    number = requested_step(step)
    if number is not None:
        return folder_of(storage, number)
    if is_checkpoint(storage.list()):
        return ""
    while (latest := read_latest(storage)) is not None:
        if (name := _find_folder(storage, latest, storage.list())) is not None:
            return name
        # Another process has saved the next step and removed this one since `latest` was read.
    raise CheckpointError(f"{storage}: no checkpoint found; {_describe_steps(storage)}")


def is_checkpoint(names: Collection[str]) -> bool:
    """Return True if a folder with these file names is a checkpoint, of Rankbook or of another program."""
    return MANIFEST in names or METADATA in names


def begin_step(storage: Storage, step: int) -> str:
    """Claim a step, empty its partial folder, and return the name of that folder.

    Called on one rank, before any rank writes. Raises `CheckpointError` if another process or another save of
    this one is saving the step, if the step is a symbolic link, if another program has written it, and if `latest` is a
    folder.
    """
    name = partial_name(step)
    with locked_folder(storage):
        _refuse_foreign(storage, step)
        claim_step(storage, name, f"step {step}")
    return name


def claim_step(storage: Storage, partial: str, label: str) -> None:
    """Claim a partial folder for this process, and empty it.

    The claim is created, then read back: on a storage without locks and exclusive creation, another process may have
    replaced it. Raises `CheckpointError` as `begin_step` does.
    """
    with locked_folder(storage):
        final = partial.removesuffix(PARTIAL)
        for name in (final, final + ASIDE, partial):
            refuse_link(storage, name)
        if (owner := writer_of(storage, partial)) is not None:
            raise CheckpointError(f"{storage}/{partial}: {label} is being saved by {owner}")
        # Safe under the lock. Without a lock, two processes may both find the owner dead; exclusive creation lets one
        # of them win.
        storage.remove(partial + OWNER)  # claim of a dead owner
        try:
            claim = claim_lock(NewFiles(storage), partial + OWNER)
        except FileExistsError:
            claim = None
        if claim is None or lock_owner(storage, partial + OWNER) != claim:  # replaced meanwhile
            by = writer_of(storage, partial) or "another process"
            raise CheckpointError(f"{storage}/{partial}: {label} is being saved by {by}")
        try:
            # What an earlier, killed save has left. This comes after the claim, so it cannot be the folder of a running
            # save.
            storage.remove(partial)
        except BaseException:
            release_lock(storage, partial + OWNER)
            raise
        _tokens[f"{storage}/{partial}"] = claim.token


_tokens: dict[str, str] = {}  # tokens of this process's claims, by partial folder


def refuse_link(storage: Storage, name: str) -> None:
    """Raise `CheckpointError` if a name is a symbolic link.

    A save must not replace data outside the folder.
    """
    if is_link(storage, name):
        raise CheckpointError(f"{storage}/{name} is a symbolic link; remove it first (nothing was written)")


def _refuse_foreign(storage: Storage, step: int) -> None:
    """Raise `CheckpointError` if a save of a step would replace what Rankbook has not written, or a symbolic link."""
    name, names = step_name(step), storage.list()
    refuse_link(storage, name)
    # A link is replaced itself, and not the folder that it names.
    if LATEST in names and names[LATEST] is None and not is_link(storage, LATEST):
        raise CheckpointError(
            f"{storage}/{LATEST} is a folder, but a save keeps the name of the latest step in a file of this name: "
            "move the folder, or save into another folder (nothing was replaced)"
        )
    if name not in names:
        return
    content = storage.list(name)  # {} for a file
    if names[name] is None and (not content or MANIFEST in content or _is_leftover(storage, name, names)):
        return
    raise CheckpointError(
        f"{storage}/{name} is not a finished step of Rankbook, it has no {MANIFEST}: move or remove it, or save "
        "another step (nothing was replaced)"
    )


def _release(storage: Storage, partial: str) -> None:
    """Remove the claim of this process."""
    _tokens.pop(f"{storage}/{partial}", None)
    release_lock(storage, partial + OWNER)


def _check_claim(storage: Storage, partial: str) -> None:
    """Raise `CheckpointError` if another process has taken over the claim of this one."""
    owner = writer_of(storage, partial)
    # A missing or damaged claim, and that of a process that has ended, do not prevent the commit.
    if owner is not None and owner.token != _tokens.get(f"{storage}/{partial}"):
        raise CheckpointError(f"{storage}/{partial} was taken over by {owner}; this save is aborted")


def commit_step(storage: Storage, step: int) -> None:
    """Rename a partial step to its final name and make it the latest.

    The step is renamed first and `latest` after it, so `latest` never names a missing step. Everything that needs disk
    space is done before. Raises `CheckpointError` if the partial step has no manifest, if another process has
    taken over the claim, or if `latest` cannot be replaced.
    """
    name = partial_name(step)
    with locked_folder(storage):
        # Another process may have taken over: on another machine a claim counts as dead after a day, for example if
        # this process was suspended for so long.
        _check_claim(storage, name)
        _refuse_foreign(storage, step)  # again: it may have been copied into the folder meanwhile
        if MANIFEST not in storage.list(name):
            raise CheckpointError(f"{storage}/{name} has no {MANIFEST}: the save of step {step} did not finish")
        # The last operation that needs disk space: renaming can then fail only for other reasons.
        _write_next(storage, step)
        storage.move(name, step_name(step))  # the commit: from here on the step can be loaded
        # A crash between the two moves leaves `latest` on the previous step, which still exists: old steps are removed
        # after the commit.
        try:
            storage.move(step_name(step) + NEXT, LATEST)
        except OSError as error:
            raise CheckpointError(
                f"{storage}/{step_name(step)} is complete, but {LATEST} could not be updated and is unchanged: {error}"
            ) from error
        # If one of the operations above raises, the claim stays, and `abandon_step` ends it.
        _release(storage, name)


def commit_as(storage: Storage, partial: str, name: str) -> None:
    """Rename a partial folder that this process has claimed to its final name, for a checkpoint that is not a step."""
    with locked_folder(storage):
        _check_claim(storage, partial)
        refuse_link(storage, name)
        storage.move(partial, name)
        _release(storage, partial)


def abandon_step(storage: Storage, step: int) -> None:
    """Remove an unfinished save of this process. Finished steps stay unchanged."""
    name, half_moved = step_name(step), []
    with contextlib.suppress(OSError):
        names = storage.list()
        if name in names and _is_leftover(storage, name, names):
            half_moved = [name]
    # `NEXT` last: if the folder cannot be removed now, the file remains, and the next sweep removes both.
    discard_partial(storage, partial_name(step), *half_moved, name + NEXT)


def discard_partial(storage: Storage, partial: str, *others: str) -> None:
    """Remove a partial folder that this process has claimed, and `others`, and release the claim.

    Raises `CheckpointError` and removes nothing if another process has taken over the claim.
    """
    # `_check_claim` raises CheckpointError, which is not suppressed: another process's files must not be removed.
    with contextlib.suppress(OSError):  # even if the storage cannot be reached, the claim must end
        _check_claim(storage, partial)
    try:
        with locked_folder(storage):
            for name in (partial, *others):
                storage.remove(name)
    finally:
        _release(storage, partial)


def write_latest(storage: Storage, step: int) -> None:
    """Point `latest` at a step."""
    _write_next(storage, step)
    storage.move(step_name(step) + NEXT, LATEST)


def _write_next(storage: Storage, step: int) -> None:
    name = step_name(step)
    storage.write(name + NEXT, [f"{name} crc32={zlib.crc32(name.encode()):08x}\n".encode()])


def sweep(storage: Storage, keep: Collection[int] = (), *, patience: float = PATIENCE) -> list[str]:
    """Remove the leftovers of interrupted saves and removals. Return the removed names.

    Steps in `keep` are left alone, and so are saves that are running in this or another process; those on other
    machines count as running until `patience` seconds after they began. If a step exists only under the `ASIDE` name,
    it gets its name back. What another program has written stays.
    """
    with locked_folder(storage):
        return _sweep(storage, keep, patience)


def _sweep(storage: Storage, keep: Collection[int], patience: float) -> list[str]:
    names = storage.list()
    # Steps that are being saved by a living process, with all their names.
    busy = set(keep)

    def is_saving(step: int) -> bool:
        owner = lock_owner(storage, partial_name(step) + OWNER)
        return owner is not None and owner.is_alive(patience)

    for name in names:
        if name.endswith(PARTIAL + OWNER) and (step := _step_number(name)) is not None and is_saving(step):
            busy.add(step)  # includes its final folder, which may be half moved
    # First restore steps that an interrupted replacement has left under the `ASIDE` name only, then remove the rest.
    idle = {name: step for name in sorted(names) if (step := _step_number(name)) is not None and step not in busy}
    for name, step in idle.items():
        # `_find_folder` prefers the plain name. So the folder with that name is missing or has no manifest, and nothing
        # is lost if it is removed.
        if name == step_name(step) + ASIDE and _find_folder(storage, step, names) == name:
            storage.remove(step_name(step))
            storage.move(name, step_name(step))
    names = storage.list()
    removed = []
    for name, step in idle.items():
        if name not in names:
            continue
        # Files: claims, their drafts, the next `latest`, and marks of removals. Sorted by name, the folder of a step
        # comes before the files that show who left it. Folders: partial ones, and steps that are half moved or removed.
        is_leftover = (
            _is_leftover(storage, name, names)
            if names[name] is None
            else _DRAFT.sub("", name).endswith((PARTIAL + OWNER, NEXT, REMOVED))
        )
        if is_leftover and not is_saving(step):  # without a lock, a save may have begun meanwhile
            storage.remove(name)
            removed.append(name)
    return removed


def retain(storage: Storage, keep: int | None, keep_every: int | None = None) -> list[int]:
    """Remove old steps. Return the removed steps, the oldest first.

    The `keep` newest steps remain, and the multiples of `keep_every`; with `keep=None` nothing is removed. The latest
    step always remains. Steps with a higher number than the latest were saved before a return to an earlier step: they
    remain too, and do not count. Raises `InvalidArgument` for numbers below 1.
    """
    for word, number in (("keep", keep), ("keep_every", keep_every)):
        if number is not None and number < 1:
            raise InvalidArgument(f"{word} must be None or an integer >= 1, got {number}")
    if keep is None:
        return []
    with locked_folder(storage):
        latest = read_latest(storage)
        if latest is None:
            return []
        # Example: steps 10, 20, 30 and 40, latest 30, keep=2. Step 40 does not count, 20 and 30 remain, and 10 is
        # removed unless it is a multiple of `keep_every`.
        # Steps above the latest do not count, see the docstring.
        old = [step for step in finished_steps(storage) if step <= latest][:-keep]
        removed = [step for step in old if step != latest and (keep_every is None or step % keep_every)]
        for step in removed:
            remove(storage, step)
    return removed


def remove(folder: str | os.PathLike[str] | Storage, step: int) -> None:
    """Remove a finished step of a checkpoint folder.

    If it was the latest, `latest` is set to the highest step below it, or else to the lowest step above it. Raises
    `CheckpointError` if the step does not exist.

    Example::

        if rank == 0:  # in one process
            remove("checkpoints", 100)
    """
    storage, step = storage_of(folder), check_int("step", step, 0)
    folder_of(storage, step)  # raises before the lock creates a missing folder
    with locked_folder(storage):
        name = folder_of(storage, step)
        try:
            latest = read_latest(storage)
        except CheckpointError:  # leave a damaged `latest` unchanged
            latest = None
        # `latest` is moved before the step is removed, so that it never names a missing step.
        if latest == step:
            remaining = [other for other in finished_steps(storage) if other != step]
            if next_best := [other for other in remaining if other < step] or remaining[:1]:
                # Both lists are ascending: the last element is the highest step below, or the only one of `others[:1]`.
                write_latest(storage, next_best[-1])
            else:
                storage.remove(LATEST)
        # Without this mark, as on a full disk, the rest of an interrupted removal remains: a sweep cannot know it.
        with contextlib.suppress(OSError):
            storage.write(step_name(step) + REMOVED, [])
        storage.remove(name)
        # A folder aside of the same step would otherwise be found as the step.
        if name == step_name(step):
            storage.remove(name + ASIDE)
        storage.remove(step_name(step) + REMOVED)


def _find_folder(storage: Storage, step: int, names: Collection[str]) -> str | None:
    base = step_name(step)
    # The folder under its own name is preferred; the one aside is the fallback of an interrupted replacement.
    return next((name for name in (base, base + ASIDE) if name in names and MANIFEST in storage.list(name)), None)


def _step_number(name: str) -> int | None:
    """Return the step number in a name, ignoring all suffixes; None for any other name."""
    # The suffixes nest: "step-5.partial.owner.<32 hex digits>".
    name = _DRAFT.sub("", name).removesuffix(REMOVED).removesuffix(NEXT)
    return parse_step(name.removesuffix(OWNER).removesuffix(PARTIAL).removesuffix(ASIDE))


def _is_leftover(storage: Storage, name: str, names: Collection[str]) -> bool:
    """Return True for a folder that a killed save or removal of Rankbook has left. In doubt it is another program's."""
    base = name.removesuffix(PARTIAL).removesuffix(ASIDE)
    step = parse_step(base)
    if step is None:
        return False
    if name == base + PARTIAL:
        return True
    if name == base + ASIDE:  # the replacement is complete, or it was being removed
        return _find_folder(storage, step, names) == base or not is_checkpoint(storage.list(name))
    if name != base or MANIFEST in storage.list(name):
        return False
    return base + NEXT in names or base + REMOVED in names or _find_folder(storage, step, names) == base + ASIDE


def _describe_steps(storage: Storage, requested: int | None = None) -> str:
    steps, leftovers = finished_steps(storage), list_partials(storage)
    # Part of an error message, so that the user can choose a step without listing the folder.
    summary = f"finished steps: {', '.join(map(str, steps)) or 'none'}"
    summary += f"; not finished: {', '.join(leftovers)}" if leftovers else ""
    if requested is not None and (name := step_name(requested)) in storage.list():
        summary += f"; {name}/{MANIFEST} is missing"
    return summary


@dataclass(frozen=True)
class RetentionPolicy:
    """Rules for the finished steps that remain after a save.

    The `keep` newest remain, and the multiples of `keep_every`. With `keep=None` all steps remain.
    """

    keep: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep", self.keep), ("keep_every", self.keep_every)):
            if value is not None:
                check_int(name, value, 1)


@dataclass
class CheckpointLocation:
    """Target of a save: a step of `folder`, or with `name` a subfolder that is not a step.

    With `step=None`, `begin` chooses the first unused step after the highest finished one. The methods are
    called on rank 0 only.
    """

    storage: Storage
    folder: str
    step: int | None = None
    name: str | None = None
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    _claimed: bool = False

    def begin(self) -> str:
        """Choose the step, sweep the leftovers of killed saves, and claim the partial folder; return its name.

        Raises `CheckpointError` as `begin_step` does, and if the folder of steps is itself a checkpoint.
        """
        if self.name is not None:
            # No sweep: `claim_step` removes what an earlier save of the same name has left.
            claim_step(self.storage, self._partial, self.name)
            self._claimed = True
            return self._partial
        # Choosing the number and claiming it are one step: two saves without a number must not choose the same one.
        with locked_folder(self.storage):
            # `locate` finds a checkpoint in the root before all steps: a step in it would never be the latest.
            if is_checkpoint(self.storage.list()):
                raise CheckpointError(f"{self.folder} is itself a checkpoint; save into another folder")
            sweep(self.storage)
            if self.step is None:
                self.step, names = max(finished_steps(self.storage), default=-1) + 1, self.storage.list()
                while step_name(self.step) in names:  # of another program
                    self.step += 1
            partial = begin_step(self.storage, self.step)
        self._claimed = True
        return partial

    @property
    def display_name(self) -> str:
        """Return the name of the finished checkpoint; "" before the step is chosen."""
        if self.name is not None:
            return self.name
        return "" if self.step is None else step_name(self.step)

    def commit(self) -> None:
        """Rename the complete partial folder to its final name, and remove old steps."""
        if self.name is not None:
            commit_as(self.storage, self._partial, self.name)
            return
        assert self.step is not None
        commit_step(self.storage, self.step)
        with contextlib.suppress(OSError, CheckpointError):  # this step is committed; the next save tries again
            retain(self.storage, self.retention.keep, self.retention.keep_every)

    def abandon(self) -> None:
        """Remove the partial folder and the claim after a failure."""
        # A save that failed before its claim must not remove the partial folder of another save.
        if not self._claimed:
            return
        with contextlib.suppress(OSError, CheckpointError):  # the next save sweeps the leftovers
            if self.name is not None:
                discard_partial(self.storage, self._partial)
            elif self.step is not None:
                abandon_step(self.storage, self.step)

    @property
    def _partial(self) -> str:
        return f"{self.name}{PARTIAL}"


_active_claims: dict[str, str] = {}  # tokens of the running saves of this process, by path of the claim


@dataclass(frozen=True, slots=True)
class WriterIdentity(ProcessIdentity):
    """Identity of a process that writes a step.

    `token` distinguishes the saves of one process.
    """

    token: str

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}, since {when} UTC"

    def is_alive(self, patience: float = PATIENCE) -> bool:
        """Return True if the save may still be running.

        For another machine this means that it began less than `patience` seconds ago.
        """
        # This process itself: it is alive, but the save with this token may have ended.
        if self.machine == machine() and self.pid == os.getpid() and self.started == start_time_of(self.pid):
            return self.token in _active_claims.values()
        return ProcessIdentity.is_alive(self, patience)


def claim_lock(storage: Storage, path: str) -> WriterIdentity:
    """Write the file `path`, which claims the step for this process until `release_lock`."""
    identity = WriterIdentity(**asdict(identify(os.getpid())), token=uuid.uuid4().hex)
    # Before the file exists, so that another thread of this process never sees the claim as that of an ended save.
    _active_claims[f"{storage}/{path}"] = identity.token
    try:
        storage.write(path, [json.dumps(asdict(identity)).encode()])
    except BaseException:
        _active_claims.pop(f"{storage}/{path}", None)
        raise
    return identity


def release_lock(storage: Storage, path: str) -> None:
    """Remove a claim, whichever process made it.

    The claim of this process ends even if the storage cannot be reached.
    """
    # First of all: if the file cannot be removed, this process at least no longer counts as its living owner.
    _active_claims.pop(f"{storage}/{path}", None)
    storage.remove(path)


def lock_owner(storage: Storage, path: str) -> WriterIdentity | None:
    """Return the owner of a claim; None if the file is missing or truncated."""
    try:
        return WriterIdentity(**json.loads(read_all(storage, path)))
    # A damaged claim names no process that could be looked up, and counts as that of a dead one.
    except (FileNotFoundError, ValueError, TypeError):
        return None
