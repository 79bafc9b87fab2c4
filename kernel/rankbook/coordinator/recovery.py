"""Recovery of a dead rank: hand over the variables of a healthy rank to its replacement.

The exported payloads are passed on as they are, never unpickled here. `states.choose_donor` chooses the donor.

While new ranks get their state, a file in the cluster's folder names them (`heal_record`). If the notebook's process
ends meanwhile, the next one that attaches to the ranks discards those, which have the state of no step.

Such a record is one file, in MessagePack (`write_record`; resize.py has another one). It is written before what it
describes begins, and removed when it has ended, because a notebook's process may be killed at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rankbook.errors import TransferError
from rankbook.formatting import format_bytes, format_duration, plural, truncate_list
from rankbook.ranks import group_ranks, name_ranks
from rankbook.snapshot_files import SnapshotHeader, SnapshotVersion, TrainingPlace, are_together, latest_common
from rankbook.transport.shared_memory import ensure_private_folder

_T = TypeVar("_T")


def write_record(folder: Path, name: str, value: object) -> None:
    """Write the record `name`, or replace it by one with another value."""
    ensure_private_folder(folder)
    draft = folder / f"{name}.draft"
    draft.write_bytes(msgspec.msgpack.encode(value))
    draft.replace(folder / name)


def read_record(folder: Path, name: str, kind: type[_T]) -> _T | None:
    """Return the value of the record `name`, which is of type `kind`, or None without this record."""
    try:
        return msgspec.msgpack.decode((folder / name).read_bytes(), type=kind)
    except FileNotFoundError:
        return None


def remove_record(folder: Path, name: str) -> None:
    """Remove the record `name`, if there is one."""
    (folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class Healed:
    """Result of a heal: the replaced ranks, and the numbers of variables, functions and imports they received.

    `ranks` is empty if no rank was replaced, and all have returned to a snapshot.
    `missing` maps the names that could not be copied to the reasons. `donor` is None if the ranks start empty.
    `lost_save` describes a background save that was lost with a dead rank, if that was not said before. `restored`
    says to which step the protected training state has returned, or why it has not; empty without protection.
    `restored_from` is "snapshot" or "replicas" if it has returned. `was_refused`: a snapshot did not fit the objects
    that are prepared now.
    """

    ranks: tuple[int, ...]
    donor: int | None
    variables: int = 0
    functions: int = 0
    imports: int = 0
    missing: Mapping[str, str] | None = None
    lost_save: str = ""
    restored: str = ""
    was_refused: bool = False
    restored_from: str = ""

    def __str__(self) -> str:
        if not self.ranks:
            return self.restored
        verb = "was" if len(self.ranks) == 1 else "were"
        subject = f"{name_ranks(self.ranks)} {verb} healed"
        if self.donor is None:
            return f"{subject} with an empty namespace"
        lines = [f"{subject} with the state of rank {self.donor}: {self.describe_copied()}"]
        if self.restored:
            lines.append(self.restored)
        if self.missing:
            lines.append("not copied:")
            lines += [f"  {name}: {reason}" for name, reason in self.missing.items()]
        if self.lost_save:
            lines.append(self.lost_save)
        return "\n".join(lines)

    def describe_copied(self) -> str:
        """Return what the new ranks have received, for the user."""
        counted = [
            (self.variables, "variable", "variables"),
            (self.functions, "function or class", "functions and classes"),
            (self.imports, "import", "imports"),
        ]
        return ", ".join(plural(*item) for item in counted if item[0]) or "nothing to copy"


def summarize_recovery(
    ranks: tuple[int, ...], donor: int, adopted: Mapping[str, Any], missing: Mapping[str, str], lost_save: str
) -> Healed:
    """Return the result of a heal from a new rank's reply `adopted`, the names `missing` before, and the lost save."""
    missing = {**missing, **adopted["missing"]}
    return Healed(ranks, donor, adopted["variables"], adopted["functions"], adopted["imports"], missing, lost_save)


@dataclass(frozen=True)
class ProtectionStatus:
    """Snapshots of the training state: the interval and the step of the last one that all ranks have.

    `age` is in seconds, `size` the bytes of the snapshot on all ranks; `copies` of them are in memory. `step` is None
    if there is no snapshot that all ranks have.
    """

    every: int
    step: int | None = None
    age: float = 0.0
    size: int = 0
    copies: int = 2

    def __str__(self) -> str:
        interval = "every step" if self.every == 1 else f"every {self.every} steps"
        if self.step is None:
            return f"protected {interval}; no snapshot that all ranks have yet"
        memory = f"{format_bytes(self.size)} of state, {format_bytes(self.copies * self.size)} of shared memory"
        return f"protected {interval}: snapshot of step {self.step}, {format_duration(self.age)} old, {memory}"


@dataclass(frozen=True)
class Protection:
    """Answer of `Cluster.protect`: the status, None if the protection is off, and the variables that it leaves out.

    `unprotected` maps their names on rank 0 to what they are.
    """

    status: ProtectionStatus | None
    unprotected: Mapping[str, str]

    def __str__(self) -> str:
        lines = [str(self.status) if self.status is not None else "the training state is not protected"]
        if self.unprotected:
            lines.append("not part of a snapshot:" if self.status is not None else "would not be part of a snapshot:")
            lines += [f"  {name}: {what}" for name, what in self.unprotected.items()]
        return "\n".join(lines)


def describe_protection(
    headers: Mapping[int, list[SnapshotHeader]],
    now: float,
    *,
    copies: int = 2,
    clock_offset: Callable[[int], float] = lambda _rank: 0.0,
) -> ProtectionStatus | None:
    """Return the status of the protection from the headers of all ranks, None if no rank has a snapshot.

    `copies` is the number of snapshots of a rank that are in memory. `clock_offset(rank)` is the number of seconds by
    which the clock of a rank's host is ahead of the one that says `now`.
    """
    every = next((header.every for found in headers.values() for header in found), None)
    if every is None:
        return None
    version = latest_common(dict(headers))
    if version is None:
        return ProtectionStatus(every)
    chosen = [(rank, header) for rank, found in headers.items() for header in found if header.version == version]
    oldest = min(header.seconds - clock_offset(rank) for rank, header in chosen)
    size = sum(header.size for _, header in chosen)
    return ProtectionStatus(every, version.step, max(0.0, now - oldest), size, copies)


def summarize_restore(answers: Mapping[int, Mapping[str, Any]], replaced: Sequence[int]) -> tuple[str, bool]:
    """Return to which step the ranks have returned, from their answers (`RestoredSnapshot`), and if one refused."""
    refused = [answer["refused"] for answer in answers.values() if answer["refused"]]
    if refused:
        return f"the protected state was not restored: {refused[0]}", True
    step = next(iter(answers.values()))["step"]
    lost = max((answer["lost"] for rank, answer in answers.items() if rank not in replaced), default=0)
    text = f"back at step {step}: {plural(lost, 'step') if lost else 'no step'} to repeat"
    # A list of losses, or a counter of the user, is ahead by the steps to repeat.
    ahead = dict.fromkeys(name for answer in answers.values() for name in answer.get("unprotected", ()))
    if lost and ahead:
        text += f"\nnot part of the snapshot, and not set back: {', '.join(truncate_list(list(ahead), 8))}"
    return text, False


def choose_snapshot(headers: Mapping[int, list[SnapshotHeader]]) -> tuple[SnapshotVersion | None, int]:
    """Return the version to return to, None if there is no snapshot that all ranks have, and the interval."""
    every = next((header.every for found in headers.values() for header in found), 1)
    return latest_common(dict(headers)), every


def choose_random(states: Mapping[int, bytes], donor: int) -> tuple[bytes, bool]:
    """Return the random state from which new ranks begin, and whether they are to begin with other numbers than its.

    `states` are those of the ranks with variables; empty for a rank whose generators nobody has seeded. Ranks that were
    seeded alike have the same numbers, so that a new one continues with them. If their numbers differ, those of the
    dead rank are lost, and a new rank must not draw what another one draws. Without a seed it keeps those of its start.

    Example::

        choose_random({0: b"a", 2: b"a"}, donor=0)  # (b'a', False)
        choose_random({0: b"a", 2: b"b"}, donor=0)  # (b'a', True)
    """
    state = states[donor]
    return state, bool(state) and any(other != state for other in states.values())


def describe_no_snapshot(headers: Mapping[int, list[SnapshotHeader]], last_saved: str) -> str:
    """Return what there is to say if no snapshot is of all ranks; nothing if no rank has one.

    `last_saved` is a hint at the last checkpoint, or empty.
    """
    if not any(headers.values()):
        return ""
    lost = [rank for rank, found in headers.items() if not found]
    reason = f" (no snapshot of {name_ranks(lost)} is left)" if lost else ""
    return (
        f"the protected state was not restored: there is no snapshot of one step that all ranks have{reason}; what is "
        f"sharded has to be loaded from a checkpoint{last_saved}"
    )


def describe_places(places: Mapping[int, TrainingPlace]) -> str:
    """Return where the ranks of a protected training are, and what to do, if they are not together; mostly nothing."""
    if are_together(list(places.values())):
        return ""
    updates = {place.updates for place in places.values()}
    groups = group_ranks((rank, _describe_place(place, len(updates) > 1)) for rank, place in places.items())
    parts = [f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {where}" for where, ranks in groups.items()]
    version = latest_common({rank: list(place.snapshots) for rank, place in places.items()})
    remedy = (
        "no snapshot of one step is on all ranks: load a checkpoint"
        if version is None
        else f"%distributed heal brings all ranks back to the snapshot of step {version.step}"
    )
    return f"the ranks are at different places of the training: {', '.join(parts)}; {remedy}"


def _describe_place(place: TrainingPlace, with_updates: bool) -> str:
    if place.is_mixed:
        return f"in the middle of the optimizer's step {place.step + 1}"
    begun = f", and has begun step {place.step + 1}" if place.has_begun else ""
    updates = f" with {plural(place.updates, 'step')} of the scheduler" if with_updates else ""
    return f"at step {place.step}{updates}{begun}"


_HEALING = "heal-pending"


@contextmanager
def heal_record(folder: Path, ranks: tuple[int, ...]) -> Iterator[None]:
    """Record in `folder`, for another notebook process, that `ranks` have not got all of their state yet."""
    write_record(folder, _HEALING, ranks)
    try:
        yield
    finally:
        remove_heal_record(folder)


def read_heal_record(folder: Path) -> tuple[int, ...]:
    """Return the ranks of a heal that the previous notebook process has not ended."""
    return read_record(folder, _HEALING, tuple[int, ...]) or ()


def remove_heal_record(folder: Path) -> None:
    """Remove the record when its ranks have all of their state, or are dead."""
    remove_record(folder, _HEALING)


def copy_variables(names: Sequence[str], attempt: Callable[[Sequence[str]], str]) -> dict[str, str]:
    """Copy the variables `names` together, except those that cannot be copied; return their reasons, by name.

    `attempt(names)` tries to copy and returns the reason of a failure, or an empty string. Variables are copied
    together to preserve shared references. If that fails, both halves are tried, recursively, until every variable at
    fault is known. Raises `TransferError` if variables fail together that succeed in parts.
    """
    # The frequent case needs one attempt. Only if it fails, the search begins, with at most two attempts per level and
    # failing variable.
    if not attempt(names):
        return {}
    refused = _find_uncopyable(names, attempt)
    # The search has copied the variables in parts, which has lost the references between them. So all that can be
    # copied is copied once more, together.
    if problem := attempt([name for name in names if name not in refused]):
        raise TransferError(f"the variables can be copied separately but not together: {problem}")
    return refused


# Example: one of eight variables cannot be copied. The attempts are: all eight, two halves of four, two of two, two
# single variables, and at last the seven that are left, together. That makes eight attempts.
def _find_uncopyable(names: Sequence[str], attempt: Callable[[Sequence[str]], str]) -> dict[str, str]:
    refused: dict[str, str] = {}
    middle = len(names) // 2
    for half in (names[:middle], names[middle:]):
        if half and (problem := attempt(half)):
            refused |= {half[0]: problem} if len(half) == 1 else _find_uncopyable(half, attempt)
    return refused
