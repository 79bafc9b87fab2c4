"""What a rank can tell about itself, as plain structs.

Owns: their fields, and one hook for what happens and one table for what counts. Refuses: to know who tells and who
listens.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

Struct = msgspec.Struct
"""What all of these are."""


class CollectiveLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    pending: tuple[CollectiveLaunch, ...]
    recent: tuple[CollectiveLaunch, ...]
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


class MemoryUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of the device that a rank computes on: `total` is the sum of the five after it.

    CUDA: `total` and `free` are the device's, whoever uses it; on a CPU `total - free` is the process's resident size
    and `free` what the machine has left. `parameters`, `gradients` and `optimizer` are what the rank's own models and
    optimizers hold; `other` is the rest, activations among it. `shared` are those of a CPU rank's bytes that other
    processes have too.
    """

    total: int
    parameters: int
    gradients: int
    optimizer: int
    other: int
    free: int
    shared: int


class Holding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model, an optimizer or a loader that lives on a rank.

    `kind` is "model", "optimizer" or "loader"; `name` the variable that leads to it, or what it was prepared as;
    `wrapper` is "", "DDP", "FSDP2" or "tp". `parameters` counts the elements of the whole model, `bytes` what this rank
    holds: of a model's parameters, of an optimizer's state. `detail`: how the parameters lie, or where a loader is.
    """

    kind: str
    name: str
    class_name: str
    wrapper: str = ""
    parameters: int = 0
    bytes: int = 0
    dtypes: tuple[str, ...] = ()
    device: str = ""
    detail: str = ""


class RankPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank at one moment.

    `state` is "starting", "idle", "running", "waiting" (in a collective, for a while), "unresponsive" or "dead"; `cell`
    is the notebook's number of the cell, 0 for a call, and `line` where in it the rank is. `waits_for` is its oldest
    collective that has not ended (`all_reduce #41 (float32[4, 4])`). `utilisation` is the device's, from 0 to 1;
    `steps` are optimizer steps, `rate` those per second over the last seconds. `lags`: the others wait for it, or have
    taken clearly more steps.
    """

    rank: int
    host: str
    pid: int
    device: str
    device_name: str
    state: str
    cell: int | None = None
    line: int | None = None
    waits_for: str = ""
    memory: MemoryUse | None = None
    utilisation: float | None = None
    steps: int = 0
    rate: float | None = None
    lags: bool = False
    holdings: tuple[Holding, ...] = ()


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All ranks of `cluster` ("" where it needs no name), at the wall clock's second `at`."""

    ranks: tuple[RankPlacement, ...]
    at: float
    cluster: str


class Variable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A variable of a rank's namespace. `preview` is its value where that is plain and short."""

    name: str
    type: str
    shape: tuple[int, ...] | None
    dtype: str
    device: str
    bytes: int | None
    preview: str


class RankDetail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank is at: its main thread's stack, innermost frame last; its last lines of output; its variables."""

    rank: int
    stack: tuple[str, ...]
    output: tuple[str, ...]
    variables: tuple[Variable, ...]


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `rank` holds of a global tensor, in elements; `replica` counts the copies of the same part from 0."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    replica: int
    device: str
    bytes: int


class ShardedTensorMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A global tensor and its shards, in rank order. An empty shard has a 0 in its shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


class ShardMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the tensors of a variable lie. A tensor that is not sharded counts as a copy of the whole.

    `kind` is "model", "optimizer", "state dict", "DTensor", "ShardedTensor" or "tensor"; `trouble` says what is missing
    here, and why.
    """

    name: str
    kind: str
    tensors: tuple[ShardedTensorMap, ...]
    trouble: str = ""


class Statistic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of what `rank` holds of one tensor: the finite values' minimum, mean and maximum, and how many are not finite."""

    rank: int
    minimum: float | None
    mean: float | None
    maximum: float | None
    nans: int
    infinities: int


class RankSave(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's part of a save."""

    rank: int
    save: CheckpointSave


class Saves(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The saves that are under way, and those that have ended while somebody looked, at the wall clock's `at`."""

    saves: tuple[RankSave, ...]
    at: float


class StoredCheckpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One checkpoint in a folder.

    `state` is "finished", "partial" (under way or broken off, `detail` says which) or "foreign" (written by something
    else). `checked` is "", "verified" or "damaged" with `detail` saying where. `created`: seconds since the epoch.
    """

    name: str
    step: int | None
    created: float | None
    bytes: int
    world_size: int | None
    state: str
    checked: str
    latest: bool
    detail: str


class CheckpointFolder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lies in a folder of checkpoints. `trouble` says why it could not be read."""

    folder: str
    checkpoints: tuple[StoredCheckpoint, ...]
    trouble: str


Source = Callable[[], msgspec.Struct | None]

this_rank: int | None = None
"""Which rank of a notebook this process is, if it is one."""
listener: Callable[[msgspec.Struct], None] | None = None
"""Who is told what happens once, such as `Prepared`. Nobody, at first."""
_sources: dict[str, Source] = {}


def report_value(struct: msgspec.Struct) -> None:
    """Tell the listener, if there is one."""
    if listener is not None:
        listener(struct)


def offer_source(name: str, source: Source) -> None:
    """Have `source` asked at each `snapshot`, under `name`, until it answers None. It is asked on any thread."""
    _sources[name] = source


def withdraw_source(name: str) -> None:
    """Ask that source no more."""
    _sources.pop(name, None)


def snapshot(prefix: str = "") -> tuple[msgspec.Struct, ...]:
    """What the sources say now whose names begin so: what counts by itself is read here, and costs nothing until then.

    Any thread.
    """
    found = []
    for name, source in tuple(_sources.items()):
        if not name.startswith(prefix):
            continue
        answer = source()
        if answer is None:
            _sources.pop(name, None)
        else:
            found.append(answer)
    return tuple(found)
