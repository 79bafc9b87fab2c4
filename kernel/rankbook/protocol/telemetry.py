"""Structs that describe a rank's state, and the hooks through which its parts report them.

Two mechanisms: a single `listener` receives one-time events (`report_value`), such as a prepared model. Counters and
positions are polled: their owners register a source (`offer_source`), which is called at every `snapshot`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

Struct = msgspec.Struct
"""Base class of all structs of this module."""


class CollectiveLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One collective on one rank.

    `number` counts the collectives of its group since the group was formed; it is 0 for a send or a receive, whose
    other rank is `peer`. `data` describes this rank's tensors (`float32[4, 4]`); `alike`: it should be equal on all
    ranks. The collective started `seconds` ago.
    """

    number: int
    op: str
    data: str
    alike: bool
    peer: int | None
    seconds: float


class GroupReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of one process group on one rank.

    `ranks` are the members' global ranks. `count` collectives were started; `pending` have not ended; `recent` are the
    last ones. `broken`: the group's connections are broken, so that a pending collective cannot complete either.
    """

    name: str
    ranks: tuple[int, ...]
    count: int
    pending: tuple[CollectiveLaunch, ...]
    recent: tuple[CollectiveLaunch, ...]
    broken: bool = False


class Prepared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model, an optimizer or a loader that a rank has prepared.

    `kind` is "model", "optimizer" or "loader"; `name` is unique within its kind. `parameters` counts the elements of
    the whole model; `bytes` is the size of the local part. `layout` maps DTensor placements (`Replicate()`,
    `Shard(dim=0)`) to the number of parameters that have them; it is empty if every rank holds whole tensors.
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
    """Training progress of this rank: optimizer steps and batches so far.

    `rate` is in steps per second since the last snapshot, None in the first.
    """

    steps: int
    batches: int
    rate: float | None


class LoaderPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Position in a prepared loader: `delivered` of `batches` batches.

    `batches` is None if the loader's length is unknown.
    """

    name: str
    epoch: int
    delivered: int
    batches: int | None


class CheckpointSave(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Progress of a save on this rank: `written` of `total` bytes, `seconds` after it started.

    `phase` is planning, staging, writing, committing, done or failed. The checkpoint's name and step are known from
    writing on. `rate` is in bytes per second since writing started. `background`: the save is asynchronous, the cell
    continues.
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
    """Memory use of the rank's device, in bytes.

    `total` is the sum of `parameters`, `gradients`, `optimizer`, `other` and `free`. On CUDA, `total` and `free` are
    those of the device, which other processes can use as well; on a CPU, `total - free` is the resident size of the
    process and `free` the machine's available memory. `parameters`, `gradients` and `optimizer` are held by the rank's
    own models and optimizers; `other` is the rest, such as activations. `shared` is the part of a CPU rank's memory
    that it shares with other processes.
    """

    total: int
    parameters: int
    gradients: int
    optimizer: int
    other: int
    free: int
    shared: int


class Holding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model, an optimizer or a loader on a rank.

    `kind` is "model", "optimizer" or "loader"; `name` is the variable that leads to it, or its name from `prepare`;
    `wrapper` is "", "DDP", "FSDP2" or "tp". `parameters` counts the elements of the whole model; `bytes` is the size of
    the local part of a model's parameters or an optimizer's state. `detail` is the layout of the parameters, or the
    position of a loader.
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
    """State of one rank at one moment.

    `state` is "starting", "idle", "running", "waiting" (blocked in a collective for some time), "unresponsive" or
    "dead". `cell` is the notebook's number of the running cell, 0 for a call; `line` is the line being executed.
    `waits_for` is the oldest pending collective (`all_reduce #41 (float32[4, 4])`). `utilisation` is the device's, from
    0 to 1. `steps` counts optimizer steps; `rate` is their number per second over the last seconds. `lags`: other ranks
    wait for this one, or have taken clearly more steps.
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
    """State of all ranks of a cluster.

    `cluster` is "" if there is only one. `at` is in seconds since the Unix epoch.
    """

    ranks: tuple[RankPlacement, ...]
    at: float
    cluster: str


class Variable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A variable in a rank's namespace. `preview` is its value, if that is a short plain value."""

    name: str
    type: str
    shape: tuple[int, ...] | None
    dtype: str
    device: str
    bytes: int | None
    preview: str


class RankDetail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's main-thread stack, innermost frame last, its last lines of output, and its variables."""

    rank: int
    stack: tuple[str, ...]
    output: tuple[str, ...]
    variables: tuple[Variable, ...]


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shard of a global tensor on `rank`, in elements.

    `replica` numbers the copies of the same region from 0.
    """

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
    """Shards of all tensors of a variable. A tensor that is not sharded counts as a replica of the whole.

    `kind` is "model", "optimizer", "state dict", "DTensor", "ShardedTensor" or "tensor". `trouble` lists missing
    tensors and the reason.
    """

    name: str
    kind: str
    tensors: tuple[ShardedTensorMap, ...]
    trouble: str = ""


class Statistic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Statistic of one tensor's local shard on `rank`.

    Minimum, mean and maximum are over the finite values; they are None if there are none.
    """

    rank: int
    minimum: float | None
    mean: float | None
    maximum: float | None
    nans: int
    infinities: int


class RankSave(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Save progress of one rank."""

    rank: int
    save: CheckpointSave


class Saves(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Saves in progress, and those that have ended while they were watched.

    `at` is in seconds since the Unix epoch.
    """

    saves: tuple[RankSave, ...]
    at: float


class StoredCheckpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One checkpoint in a folder.

    `state` is "finished", "partial" (in progress or aborted; `detail` says which) or "foreign" (written by another
    program). `checked` is "", "verified" or "damaged"; `detail` locates the damage. `created` is in seconds since the
    Unix epoch.
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
    """Checkpoints in one folder. `trouble` explains why the folder could not be read."""

    folder: str
    checkpoints: tuple[StoredCheckpoint, ...]
    trouble: str


Source = Callable[[], msgspec.Struct | None]

this_rank: int | None = None
"""Rank of this process in a notebook cluster; None in other processes."""
listener: Callable[[msgspec.Struct], None] | None = None
"""Callback for one-time events such as `Prepared`; None if nothing listens."""
_sources: dict[str, Source] = {}


def report_value(struct: msgspec.Struct) -> None:
    """Send `struct` to the listener, if any."""
    if listener is not None:
        listener(struct)


def offer_source(name: str, source: Source) -> None:
    """Register `source` under `name`; every `snapshot` calls it until it returns None.

    The source is called on any thread.
    """
    _sources[name] = source


def withdraw_source(name: str) -> None:
    """Unregister the source `name`, if registered."""
    _sources.pop(name, None)


def snapshot(prefix: str = "") -> tuple[msgspec.Struct, ...]:
    """Return the current values of all sources whose name starts with `prefix`.

    Counters are only read here, so an unwatched rank has no cost. Any thread may call this.
    """
    answers = []
    for name, source in tuple(_sources.items()):
        if not name.startswith(prefix):
            continue
        answer = source()
        if answer is None:
            _sources.pop(name, None)
        else:
            answers.append(answer)
    return tuple(answers)
