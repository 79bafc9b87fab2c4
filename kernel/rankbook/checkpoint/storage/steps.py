"""A folder of steps: which one is the latest, what is finished, what was broken off.

A `CheckpointLocation` is where one save goes: a step of such a folder, or a folder of another name.

    step-40/                a finished step: manifest.json is in it
    step-50.partial/        a save that is under way, or was broken off
    step-50.partial.owner   which process is at it
    step-50.latest          what becomes `latest` as soon as step 50 is finished
    step-40.old/            step 40, while another save of step 40 takes its place and folders cannot be exchanged
    latest                  one line, "step-40 crc32=xxxxxxxx", the checksum being that of the name

Every change is made of single operations of the storage, in an order in which any of them may be the last: the step
that could be loaded before can still be loaded.

Several processes may save into one folder, each another step. Whoever claims a step, commits it, removes steps or
sweeps holds the storage's lock for that time (`stores.locked`). A claim is a file that is created only where there is
none, so also without locks, on NFS or an object store, one of two savers of a step gets it and the other is told.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from rankbook.checkpoint.format.manifest import MANIFEST, METADATA
from rankbook.checkpoint.storage import lock
from rankbook.checkpoint.storage.base import ASIDE, NewFiles, Storage, is_link, locked_folder, read_range
from rankbook.checkpoint.storage.local import storage_of
from rankbook.checkpoint.storage.lock import WriterIdentity
from rankbook.errors import BadRequest, CheckpointingException
from rankbook.process_identity import PATIENCE

LATEST = "latest"
NEXT = ".latest"
PARTIAL = ".partial"
OWNER = ".owner"

_DRAFT = re.compile(r"\.[0-9a-f]{32}$")  # what the storage adds to the name of a file that it is about to create
_STEP = re.compile(r"step-(0|[1-9]\d{0,17})")
_LINE = re.compile(r"(step-(\d{1,18})) crc32=([0-9a-f]{8})\n")


def check_int(name: str, value: object, least: int) -> int:
    """`value` as an int: any integer will do, numpy's and torch's too. Raises `BadRequest` for anything else."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # it raises for what has none
    except TypeError:
        number = least - 1
    if not least <= number < 10**18 or isinstance(value, bool):
        raise BadRequest(f"{name}={value!r}: it is a whole number from {least} on, of at most 18 digits")
    return number


def requested_step(step: object) -> int | None:
    """The number of a step that is asked for; None for the latest. Raises `BadRequest` for what is neither."""
    return None if step is None or (isinstance(step, str) and step == "latest") else check_int("step", step, 0)


def step_name(step: int) -> str:
    """The folder of a finished step. Raises `BadRequest` for what is no number of one."""
    return f"step-{check_int('step', step, 0)}"


def partial_name(step: int) -> str:
    """The folder of a step while it is written."""
    return step_name(step) + PARTIAL


def parse_step(name: str) -> int | None:
    """The step that a folder's name stands for; None where it is no finished step's name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def finished_steps(storage: Storage) -> list[int]:
    """The steps that can be loaded, in ascending order."""
    names = storage.list()
    steps = {step for name in names if (step := parse_step(name.removesuffix(ASIDE))) is not None}
    return sorted(step for step in steps if _folder(storage, step, names) is not None)


def steps(folder: str | os.PathLike[str] | Storage) -> list[int]:
    """The steps of a folder that can be loaded, in ascending order."""
    return finished_steps(storage_of(folder))


def list_partials(storage: Storage) -> list[str]:
    """The folders that are no finished steps: of saves under way or broken off, and what is left of removed ones."""
    names = storage.list()
    return sorted(name for name in names if names[name] is None and _is_rest(storage, name, names))


def writer_of(storage: Storage, partial: str) -> WriterIdentity | None:
    """The process that writes a partial step just now; None where the save was broken off."""
    owner = lock.lock_owner(storage, partial + OWNER)
    return owner if owner is not None and owner.lives() else None


def folder_of(storage: Storage, step: int) -> str:
    """The folder of a finished step. Raises `CheckpointingException` where there is none, saying what there is."""
    if (name := _folder(storage, step, storage.list())) is None:
        raise CheckpointingException(f"{storage}: there is no finished step {step}; {_what_there_is(storage, step)}")
    return name


def named_by_latest(storage: Storage) -> int | None:
    """The step that the file `latest` names, finished or not; None where there is no such file.

    Raises `CheckpointingException` where the file is damaged.
    """
    try:
        line = bytes(read_range(storage, LATEST, 0, 200))
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise CheckpointingException(f"{storage}/{LATEST}: the file is damaged: {error.strerror}") from error
    found = _LINE.fullmatch(line.decode("ascii", errors="replace"))
    if found is None or int(found[3], 16) != zlib.crc32(found[1].encode()):
        raise CheckpointingException(
            f"{storage}/{LATEST}: the file is damaged: {line[:60]!r}; {_what_there_is(storage)}; load one by its "
            "number, or remove the file, and the highest finished step counts"
        )
    return int(found[2])


def read_latest(storage: Storage) -> int | None:
    """The step that `latest` names; without such a file the highest finished one, None where there is none.

    Raises `CheckpointingException` where the file is damaged or names a step that is not there: the person decides.
    """
    step = named_by_latest(storage)
    while step is not None and _folder(storage, step, storage.list()) is None:
        named_before, step = step, named_by_latest(storage)
        if step == named_before:  # else another process has saved the next step, and removed this one
            raise CheckpointingException(
                f"{storage}/{LATEST} names step {step}, which is not there or not finished; "
                f"{_what_there_is(storage, step)}"
            )
    return max(finished_steps(storage), default=None) if step is None else step


def locate(storage: Storage, step: int | Literal["latest"] | None = "latest") -> str:
    """The path of a checkpoint's folder within the storage, "" where the storage's own folder is a checkpoint.

    Raises `CheckpointingException` where there is none, saying what there is instead.
    """
    number = requested_step(step)
    if number is not None:
        return folder_of(storage, number)
    if is_checkpoint(storage.list()):
        return ""
    if (latest := read_latest(storage)) is None:
        raise CheckpointingException(f"{storage}: there is no checkpoint; {_what_there_is(storage)}")
    return folder_of(storage, latest)


def is_checkpoint(names: Collection[str]) -> bool:
    """Whether a folder with these names in it is a checkpoint itself, ours or another program's."""
    return MANIFEST in names or METADATA in names


def begin_step(storage: Storage, step: int) -> str:
    """Claim the partial folder of a step, empty, and return its name. One rank does so, before any of them writes.

    Raises `CheckpointingException` where another process is at that step, or another save of this one, and where the
    step is a symbolic link.
    """
    name = partial_name(step)
    claim_step(storage, name, f"step {step}")
    return name


def claim_step(storage: Storage, partial: str, what: str) -> None:
    """Claim a partial folder for this process, and empty it. Raises `CheckpointingException` as `begin` does."""
    with locked_folder(storage):
        final = partial.removesuffix(PARTIAL)
        for name in (final, final + ASIDE, partial):
            refuse_link(storage, name)
        if (owner := writer_of(storage, partial)) is not None:
            raise CheckpointingException(f"{storage}/{partial}: {what} is being saved by {owner}")
        storage.remove(partial + OWNER)  # of a save that was broken off
        try:
            own = lock.claim_lock(NewFiles(storage), partial + OWNER)
        except FileExistsError:
            own = None
        if own is None or lock.lock_owner(storage, partial + OWNER) != own:  # the storage has no lock
            by = writer_of(storage, partial) or "another process"
            raise CheckpointingException(f"{storage}/{partial}: {what} is being saved by {by}")
        try:
            storage.remove(partial)
        except BaseException:
            lock.release_lock(storage, partial + OWNER)
            raise
        _tokens[f"{storage}/{partial}"] = own.token


_tokens: dict[str, str] = {}  # of the claims of this process


def refuse_link(storage: Storage, name: str) -> None:
    """Raise `CheckpointingException` where a name is a symbolic link: a save would replace what lies elsewhere."""
    if is_link(storage, name):
        raise CheckpointingException(f"{storage}/{name} is a symbolic link, and nothing was written: remove it first")


def _release(storage: Storage, partial: str) -> None:
    """End the claim of this process."""
    _tokens.pop(f"{storage}/{partial}", None)
    lock.release_lock(storage, partial + OWNER)


def _check_claim(storage: Storage, partial: str) -> None:
    """Raise `CheckpointingException` where another process has taken over the claim of this one."""
    owner = writer_of(storage, partial)
    if owner is not None and owner.token != _tokens.get(f"{storage}/{partial}"):
        raise CheckpointingException(f"{storage}/{partial} was taken over by {owner}; this save of it is given up")


def commit_step(storage: Storage, step: int) -> None:
    """Make a partial step a finished one, and the latest. Raises `CheckpointingException` where it has no manifest.

    The step gets its name first and `latest` after it, so `latest` never names what is not there. All that needs room
    on the disk is done before.
    """
    name = partial_name(step)
    with locked_folder(storage):
        _check_claim(storage, name)
        refuse_link(storage, step_name(step))
        if MANIFEST not in storage.list(name):
            raise CheckpointingException(
                f"{storage}/{name} has no {MANIFEST}: the save of step {step} did not come to its end"
            )
        _write_next(storage, step)
        storage.move(name, step_name(step))
        try:
            storage.move(step_name(step) + NEXT, LATEST)
        except OSError as error:
            raise CheckpointingException(
                f"{storage}/{step_name(step)} is complete, but {LATEST} could not be replaced and names what it named "
                f"before: {error}"
            ) from error
        _release(storage, name)


def commit_as(storage: Storage, partial: str, name: str) -> None:
    """Give a partial folder that this process has claimed its final name, which is no step's."""
    with locked_folder(storage):
        _check_claim(storage, partial)
        refuse_link(storage, name)
        storage.move(partial, name)
        _release(storage, partial)


def abandon_step(storage: Storage, step: int) -> None:
    """Give up a save of this process: nothing of it stays. What was finished before is as it was."""
    give_up_step(storage, partial_name(step), step_name(step) + NEXT)


def give_up_step(storage: Storage, partial: str, *others: str) -> None:
    """Remove a partial folder that this process has claimed, and `others` with it, and end the claim."""
    with contextlib.suppress(OSError):  # out of reach: the claim ends all the same
        _check_claim(storage, partial)
    try:
        with locked_folder(storage):
            for name in (partial, *others):
                storage.remove(name)
    finally:
        _release(storage, partial)


def write_latest(storage: Storage, step: int) -> None:
    """Point `latest` at a step, at once."""
    _write_next(storage, step)
    storage.move(step_name(step) + NEXT, LATEST)


def _write_next(storage: Storage, step: int) -> None:
    name = step_name(step)
    storage.write(name + NEXT, [f"{name} crc32={zlib.crc32(name.encode()):08x}\n".encode()])


def sweep(storage: Storage, keep: Collection[int] = (), *, patience: float = PATIENCE) -> list[str]:
    """Remove what saves and removals that were broken off have left. Returns the names that are gone.

    Left alone: steps in `keep`, and saves that are under way in this or another process; on other machines those that
    began less than `patience` seconds ago. A step that was put aside and is the only one of its number gets its name
    back.
    """
    with locked_folder(storage):
        return _sweep(storage, keep, patience)


def _sweep(storage: Storage, keep: Collection[int], patience: float) -> list[str]:
    names = storage.list()
    busy = set(keep)

    def being_saved(step: int) -> bool:
        owner = lock.lock_owner(storage, partial_name(step) + OWNER)
        return owner is not None and owner.lives(patience)

    for name in names:
        if name.endswith(PARTIAL + OWNER) and (step := _step_in(name)) is not None and being_saved(step):
            busy.add(step)  # also its folder under its own name, which may be half moved
    idle = {name: step for name in sorted(names) if (step := _step_in(name)) is not None and step not in busy}
    for name, step in idle.items():
        if name == step_name(step) + ASIDE and _folder(storage, step, names) == name:
            storage.remove(step_name(step))
            storage.move(name, step_name(step))
    names = storage.list()
    gone = []
    for name, step in idle.items():
        is_rest = _DRAFT.sub("", name).endswith((OWNER, NEXT)) or (
            names.get(name, 0) is None and _is_rest(storage, name, names)
        )
        if name in names and is_rest and not being_saved(step):  # by now, where the storage has no lock
            storage.remove(name)
            gone.append(name)
    return gone


def retain(storage: Storage, keep: int | None, keep_every: int | None = None) -> list[int]:
    """Remove old steps. Returns those that are gone, the oldest first.

    The newest `keep` stay, and those that are multiples of `keep_every`; None for `keep` removes nothing. The latest
    always stays. Steps with a higher number than the latest are from before somebody went back to an earlier one:
    they stay too, and do not count. Raises `BadRequest` for numbers below 1.
    """
    for word, number in (("keep", keep), ("keep_every", keep_every)):
        if number is not None and number < 1:
            raise BadRequest(f"{word}={number}: it is a number from 1 on, or None")
    if keep is None:
        return []
    with locked_folder(storage):
        latest = read_latest(storage)
        if latest is None:
            return []
        old = [step for step in finished_steps(storage) if step <= latest][:-keep]
        gone = [step for step in old if step != latest and (keep_every is None or step % keep_every)]
        for step in gone:
            remove(storage, step)
    return gone


def remove(folder: str | os.PathLike[str] | Storage, step: int) -> None:
    """Remove a finished step. Where it was the latest, `latest` names the highest one below it, or else above it.

    Raises `CheckpointingException` where there is no such step.
    """
    storage, step = storage_of(folder), check_int("step", step, 0)
    folder_of(storage, step)  # raises, before the lock makes a folder
    with locked_folder(storage):
        name = folder_of(storage, step)
        try:
            latest = read_latest(storage)
        except CheckpointingException:  # a damaged `latest` stays as it is: it says nothing about this step
            latest = None
        if latest == step:
            others = [each for each in finished_steps(storage) if each != step]
            if next_best := [each for each in others if each < step] or others[:1]:
                write_latest(storage, next_best[-1])
            else:
                storage.remove(LATEST)
        storage.remove(name)
        if name == step_name(step):
            storage.remove(name + ASIDE)


def _folder(storage: Storage, step: int, names: Collection[str]) -> str | None:
    base = step_name(step)
    return next((name for name in (base, base + ASIDE) if name in names and MANIFEST in storage.list(name)), None)


def _step_in(name: str) -> int | None:
    """The step that a name in the folder has to do with, whatever is added to it."""
    name = _DRAFT.sub("", name)
    return parse_step(name.removesuffix(NEXT).removesuffix(OWNER).removesuffix(PARTIAL).removesuffix(ASIDE))


def _is_rest(storage: Storage, name: str, names: Collection[str]) -> bool:
    if parse_step(name.removesuffix(PARTIAL)) is not None and name.endswith(PARTIAL):
        return True
    step = parse_step(name.removesuffix(ASIDE))
    return step is not None and _folder(storage, step, names) != name


def _what_there_is(storage: Storage, wanted: int | None = None) -> str:
    steps, rests = finished_steps(storage), list_partials(storage)
    there = f"finished are {', '.join(map(str, steps))}" if steps else "no step is finished"
    there += f"; not finished: {', '.join(rests)}" if rests else ""
    if wanted is not None and (name := step_name(wanted)) in rests:
        there += f"; {name}/{MANIFEST} is missing"
    return there


@dataclass(frozen=True)
class RetentionPolicy:
    """Which finished steps stay: the newest `keep`, and those that `keep_every` divides; None: all."""

    keep: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep", self.keep), ("keep_every", self.keep_every)):
            if value is not None:
                check_int(name, value, 1)


@dataclass
class CheckpointLocation:
    """A step of `folder`, the next one if `step` is None; or, with a `name`, a folder in it that is no step.

    Its methods are for rank 0 alone.
    """

    storage: Storage
    folder: str
    step: int | None = None
    name: str | None = None
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    _begun: bool = False

    def begin(self) -> str:
        """Choose the step, sweep what killed saves have left, and claim the partial folder; return its name."""
        if self.name is not None:
            claim_step(self.storage, self._partial, self.name)
            self._begun = True
            return self._partial
        with locked_folder(self.storage):
            sweep(self.storage)
            if self.step is None:
                self.step = max(finished_steps(self.storage), default=-1) + 1
            partial = begin_step(self.storage, self.step)
        self._begun = True
        return partial

    @property
    def shown(self) -> str:
        """The name of the finished checkpoint; "" before the step is chosen."""
        if self.name is not None:
            return self.name
        return "" if self.step is None else step_name(self.step)

    def commit(self) -> None:
        """Give the complete partial folder its final name, and remove old steps."""
        if self.name is not None:
            commit_as(self.storage, self._partial, self.name)
            return
        assert self.step is not None
        commit_step(self.storage, self.step)
        with contextlib.suppress(OSError, CheckpointingException):  # this step is safe; the next save tries again
            retain(self.storage, self.retention.keep, self.retention.keep_every)

    def abandon(self) -> None:
        """Remove the partial folder after a failure."""
        if not self._begun:
            return
        with contextlib.suppress(OSError, CheckpointingException):  # what is left is swept by the next save
            if self.name is not None:
                give_up_step(self.storage, self._partial)
            elif self.step is not None:
                abandon_step(self.storage, self.step)

    @property
    def _partial(self) -> str:
        return f"{self.name}{PARTIAL}"
