"""What a rank can tell about itself, as plain structs.

Owns: their fields, and one hook for what happens and one table for what counts. Refuses: to know who tells and who
listens.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One collective of one rank.

    `number` counts those of its group since the group was formed, 0 for sends and receives, whose other rank is `peer`.
    `data` is this rank's, in words (`float32[4, 4]`); `alike`: all ranks should have the same there. It began `seconds`
    ago.
    """

    number: int
    op: str
    data: str
    alike: bool
    peer: int | None
    seconds: float


class GroupReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one rank is in one process group: `count` collectives begun; those that have not ended, and the last ones.

    `ranks` are the group's members, as the world counts them. `broken`: its connections are, so that what is pending on
    another rank cannot end either.
    """

    name: str
    ranks: tuple[int, ...]
    count: int
    pending: tuple[Launch, ...]
    recent: tuple[Launch, ...]
    broken: bool = False


class Prepared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model, an optimizer or a loader that a rank has prepared.

    `kind` is "model", "optimizer" or "loader"; `name` tells it from others of its kind. `parameters` counts the
    elements of the whole model, `bytes` what this rank holds of them. `layout` maps how parameters lie on the ranks
    (`Replicate()`, `Shard(dim=0)`) to how many tensors do; it is empty where each rank has all.
    """

    kind: str
    name: str
    class_name: str
    wrapper: str = ""
    parameters: int = 0
    trainable: int = 0
    bytes: int = 0
    dtypes: tuple[str, ...] = ()
    device: str = ""
    precision: str = ""
    layout: dict[str, int] = {}
    batches: int | None = None


class TrainingStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where this rank's training is: optimizer steps and batches so far.

    `rate`: steps per second since the last snapshot; None at the first.
    """

    steps: int
    batches: int
    rate: float | None


class LoaderPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a loop over a prepared loader is: `delivered` batches of `batches`, which is None where nobody knows."""

    name: str
    epoch: int
    delivered: int
    batches: int | None


class CheckpointSave(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far this rank's part of a save is: `written` of `total` bytes, `seconds` after it began.

    `phase` is planning, staging, writing, committing, done or failed; the name and the step of the checkpoint are known
    from writing on. `rate`: bytes per second since the writing began. `background`: the cell that saves has gone on.
    """

    folder: str
    name: str
    step: int | None
    phase: str
    written: int
    total: int
    seconds: float
    rate: float | None
    background: bool
    error: str


Source = Callable[[], msgspec.Struct | None]

listener: Callable[[msgspec.Struct], None] | None = None
"""Who is told what happens once, such as `Prepared`. Nobody, at first."""
_sources: dict[str, Source] = {}


def report(struct: msgspec.Struct) -> None:
    """Tell the listener, if there is one."""
    if listener is not None:
        listener(struct)


def offer(name: str, source: Source) -> None:
    """Have `source` asked at each `snapshot`, under `name`, until it answers None. It is asked on any thread."""
    _sources[name] = source


def withdraw(name: str) -> None:
    """Ask that source no more."""
    _sources.pop(name, None)


def snapshot() -> tuple[msgspec.Struct, ...]:
    """What the sources say now: whatever counts by itself is read here, and costs nothing until then. Any thread."""
    found = []
    for name, source in tuple(_sources.items()):
        answer = source()
        if answer is None:
            _sources.pop(name, None)
        else:
            found.append(answer)
    return tuple(found)
