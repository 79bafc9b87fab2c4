"""Structs that describe a rank's state, and the hooks through which its parts report them.

Two mechanisms: a single `listener` receives one-time events (`report_value`), such as a prepared model. Counters and
positions are polled: their owners register a source (`offer_source`), which is called at every `snapshot`.

The structs of measured cells (times, op statistics and traces) travel as the payload of a cell's `Done`, for a cell
that was started with `Measure`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec

Struct = msgspec.Struct
"""Base class of all structs of this module."""


# Collectives --------------------------------------------------------------------------------------------------------


# Example: two ranks call all_reduce of float32[4] as the third collective of the group, but rank 1 passes float32[5]:
#
#     rank 0: number 3, op "all_reduce", data "float32[4]", reduction "sum", code 0x1a2b
#     rank 1: number 3, op "all_reduce", data "float32[5]", reduction "sum", code 0x9c8d
#
# `coordinator.deadlock` compares launches of one number. When one of them is no longer in the log, `digest` still
# tells that something has differed since the last comparison, though not what.
class CollectiveLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One collective on one rank.

    `number` counts the collectives of its group since the group was formed; it is 0 for a send or a receive, whose
    other rank is `peer`. `data` describes this rank's tensors and the root (`float32[4, 4] root 1`), and `reduction` is
    `sum`, `max`, ... or empty. The collective started `seconds` ago. `position` is its line (`line 3`, `cell [2] line
    3` if it is not in the running cell), empty if unknown. `sends` and `expects` are the numbers of elements that an
    all_to_all sends to and expects from the ranks of the group. `code` is a checksum of what should be equal on all
    ranks, `digest` one of the codes of all collectives up to this one, and `balance` one of all sizes in an all_to_all:
    its sum over all ranks, modulo 2**32, should be 0. `on_device`: it is queued on a device, which executes it later.
    """

    number: int
    op: str
    data: str
    peer: int | None
    seconds: float
    reduction: str = ""
    position: str = ""
    sends: tuple[int, ...] = ()
    expects: tuple[int, ...] = ()
    code: int = 0
    digest: int = 0
    balance: int = 0
    on_device: bool = False


Members = tuple[tuple[int, int, int], ...]
"""Ranks of a group in their order, as runs of equal distance: first rank, distance, number of ranks."""
_MOST_MEMBERS = 1 << 16


@functools.lru_cache(maxsize=4096)
def encode_members(ranks: tuple[int, ...]) -> Members:
    """Return the ranks of a group as runs: every rank of a large group names all of its members in every report.

    Example::

        encode_members((0, 1, 2, 3, 8, 16))  # ((0, 1, 4), (8, 8, 2))
    """
    runs: list[tuple[int, int, int]] = []
    for rank in ranks:
        if runs:
            first, distance, count = runs[-1]
            if count == 1 or rank == first + distance * count:
                runs[-1] = (first, rank - first if count == 1 else distance, count + 1)
                continue
        runs.append((rank, 1, 1))
    return tuple(runs)


@functools.lru_cache(maxsize=4096)
def decode_members(members: Members) -> tuple[int, ...]:
    """Return the ranks of a group. Raises `ValueError` if no group can have these members."""
    if any(count < 1 for _, _, count in members) or sum(count for _, _, count in members) > _MOST_MEMBERS:
        raise ValueError(f"invalid members of a group: expected 1 to {_MOST_MEMBERS} ranks in runs")
    return tuple(first + distance * number for first, distance, count in members for number in range(count))


# `recent` is the tail of a bounded log. A rank that is far ahead of another one may have dropped the entry that the
# other one is waiting in.
class GroupReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of one process group on one rank.

    `members` are the group's global ranks (`encode_members`). `count` collectives were started; `pending` have not
    ended; `recent` are the last ones. `broken`: the group's connections are broken, so that a pending collective cannot
    complete either. `generation` is that of the connections: numbers of different generations are not related.
    """

    name: str
    members: Members
    count: int
    pending: tuple[CollectiveLaunch, ...]
    recent: tuple[CollectiveLaunch, ...]
    broken: bool = False
    generation: int = 0

    def __post_init__(self) -> None:
        # msgspec reports a ValueError as an invalid message.
        decode_members(self.members)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the members' global ranks, in the order of the group."""
        return decode_members(self.members)


# Training -----------------------------------------------------------------------------------------------------------


# Examples: kind "model", wrapper "FSDP2", layout {"Shard(dim=0)": 7_240_000}; kind "loader", batches 100. The names of
# the kinds are those of `Holding`, which shows the same objects in the placement view.
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


# Polled, not sent per batch: a loader with fast batches would otherwise cause thousands of messages a second.
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
    writing on. `rate` is the average while writing, in bytes per second. `background`: the save is asynchronous, the
    cell continues.
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


# State of a rank ----------------------------------------------------------------------------------------------------


# Example of a GPU with 80 GB of which the rank uses 30 GB and another program 10 GB: total 80, free 40, parameters 7,
# gradients 7, optimizer 14, other 2. Views draw them as one bar.
class MemoryUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory use of the rank's device, in bytes.

    On CUDA, `total` and `free` are those of the device, which other processes can use as well; on a CPU, `total - free`
    is the resident size of the process and `free` the machine's available memory. `parameters`, `gradients` and
    `optimizer` are held by the rank's own models and optimizers; `other` is the rest of this rank's memory, such as
    activations and, on CUDA, what torch has reserved. `shared` is the part of a CPU rank's memory that it shares with
    other processes.
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


# Kept small, because the view of 64 ranks is sent ten times a second; what is rarely needed is in `RankDetail`.
class RankPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of one rank at one moment.

    `state` is "starting", "idle", "running", "waiting" (blocked in a collective for some time), "unresponsive", "dead"
    or "stopped". `cell` is the notebook's number of the running cell, 0 for a call; `line` is the line being executed,
    or a text such as "3 of cell 5" for the line of another cell. `waits_for` is the oldest pending collective
    (`all_reduce #41 (float32[4, 4])`). `utilisation` is the device's, from 0 to 1. `steps` counts optimizer steps;
    `rate` is their number per second over the last seconds. `lags`: other ranks wait for this one, or have taken
    clearly more steps.
    """

    rank: int
    host: str
    pid: int
    device: str
    device_name: str
    state: str
    cell: int | None = None
    line: int | str | None = None
    waits_for: str = ""
    memory: MemoryUse | None = None
    utilisation: float | None = None
    steps: int = 0
    rate: float | None = None
    lags: bool = False
    holdings: tuple[Holding, ...] = ()


class GradientNorms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Norms of the gradients of the model `model` over all ranks, at the end of the optimizer step `step`.

    `step` is None between two cells, and for an optimizer that does not count its steps. `norm` is the 2-norm of all
    gradients, and `modules` are those of the modules with parameters of their own, in the order of the model, None for
    a module without gradients. `note` says what is wrong with them, "" if nothing.
    """

    model: str
    step: int | None
    norm: float
    modules: tuple[tuple[str, float | None], ...]
    note: str = ""


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of all ranks of a cluster.

    `cluster` is "" if there is only one. `at` is in seconds since the Unix epoch. `protection` describes the snapshots
    of the training state, "" without protection. `gradients` are the norms of the models' last known gradients.
    """

    ranks: tuple[RankPlacement, ...]
    at: float
    cluster: str
    protection: str = ""
    gradients: tuple[GradientNorms, ...] = ()


# `bytes` is None where the size is unknown, as for most objects that are not tensors or arrays.
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


# Shards -------------------------------------------------------------------------------------------------------------


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


# Example: a matrix of shape (4, 6), cut by columns over two ranks:
#
#     shards = (Shard(rank=0, offset=(0, 0), shape=(4, 3), replica=0, ...),
#               Shard(rank=1, offset=(0, 3), shape=(4, 3), replica=0, ...))
#
# If the ranks 2 and 3 hold the same columns, as with data parallelism, theirs are replica 1.
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


# Checkpoints --------------------------------------------------------------------------------------------------------


class RankSave(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Save progress of one rank."""

    rank: int
    save: CheckpointSave


# A save has one entry per rank. `widgets.checkpoints.combine_saves` adds them up to one row.
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


# Hooks --------------------------------------------------------------------------------------------------------------

# These hooks are module attributes and not a class: the runtime and the checkpoint package report through them without
# knowing who listens, and without importing the rank. On a rank, `rank.inspect.query_handlers` listens and takes the
# snapshots. Under torchrun nobody does, and reports cost one comparison.


Source = Callable[[], msgspec.Struct | None]

this_rank: int | None = None
"""Rank of this process in a notebook cluster; None in other processes."""
this_device = ""
"""Device of this rank, which stays the same when the ranks are numbered anew; empty in other processes."""
listener: Callable[[msgspec.Struct], None] | None = None
"""Callback for one-time events such as `Prepared`; None if nothing listens."""
output_barrier: Callable[[str], None] | None = None
"""Marks a place in this rank's output, see `messages.OutputBarrier`; None if no notebook shows the output."""
collective_observer: Callable[[str, int, Callable[[], str], object, object], None] | None = None
"""Called at every launch of a collective by the thread that launches it, with the group's name, the number, a function
that describes the call, this rank's tensors and those for its result; None while nobody watches."""
_sources: dict[str, Source] = {}


def report_value(struct: msgspec.Struct) -> None:
    """Send `struct` to the listener, if any."""
    if listener is not None:
        listener(struct)


def offer_source(name: str, source: Source) -> None:
    """Register `source` under `name`; every `snapshot` calls it until it returns None.

    The source is called on any thread.
    """
    # Assignment to a dict is atomic under the GIL, so this needs no lock either.
    _sources[name] = source


def withdraw_source(name: str) -> None:
    """Unregister the source `name`, if registered."""
    _sources.pop(name, None)


def snapshot(prefix: str = "") -> tuple[msgspec.Struct, ...]:
    """Return the current values of all sources whose name starts with `prefix`.

    Counters are only read here, so an unwatched rank has no cost. Any thread may call this.
    """
    answers = []
    # A copy, because sources come and go on other threads. They are called without a lock, and have to return quickly.
    for name, source in tuple(_sources.items()):
        if not name.startswith(prefix):
            continue
        answer = source()
        if answer is None:
            _sources.pop(name, None)
        else:
            answers.append(answer)
    return tuple(answers)


# Measurements -------------------------------------------------------------------------------------------------------


# All ranks get the same `epoch`, so that their traces can be put side by side.
class Measure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request that a cell's times are measured.

    `profile`: also trace ops with the torch profiler. `epoch` is the zero of the trace's time axis, in nanoseconds
    since the Unix epoch, by the clock of the rank's host. `ahead` is the number of seconds by which its monotonic clock
    is ahead of the notebook's.
    """

    profile: bool
    epoch: int
    ahead: float = 0.0


# `array_like`: encoded as a list without field names, because a cell can have thousands of spans. The late rank of a
# collective is the one that launched it last, while the others were waiting (`magics.profiling.caused_waits`).
class CollectiveSpan(msgspec.Struct, frozen=True, array_like=True):
    """Times of one collective on one rank, in seconds on the monotonic clock of the notebook's host.

    `launched` is when the rank launched it; from `waits` to `ends` the rank waited for it (both 0.0 if it did not).
    """

    group: str
    number: int
    launched: float
    waits: float = 0.0
    ends: float = 0.0


class Times(msgspec.Struct, frozen=True):
    """Times of one cell on one rank, in seconds.

    `wall` is elapsed time, `cpu` the CPU time of all threads of the process, `main_cpu` that of the main thread.
    `waited` is the time that the main thread was blocked in a pending collective. On CUDA, collectives run on the
    device and block the host only where it needs their result; device time is not included. `collectives` is a count,
    and `spans` are the times of the first thousands of them. `device` is the time from the start of the cell until the
    device had executed what the cell has queued; None on the CPU, or if the cell has failed.
    """

    wall: float
    cpu: float
    main_cpu: float
    waited: float
    collectives: int
    spans: tuple[CollectiveSpan, ...] = ()
    device: float | None = None


# Self time, so that the column can be added up: of a linear layer of 5 ms that spends 4 ms in addmm, 1 ms is its own.
class OpTime(msgspec.Struct, frozen=True):
    """Total self time (without called ops) of all calls of one op, in seconds.

    `where` is "cpu", or the device that ran the kernel.
    """

    name: str
    where: str
    calls: int
    seconds: float


class Profile(msgspec.Struct, frozen=True):
    """Op statistics and trace of one cell. `events` is part of a Chrome trace: comma-separated JSON objects."""

    ops: tuple[OpTime, ...]
    events: bytes


class Measured(msgspec.Struct, frozen=True):
    """Measurements of one cell on one rank.

    `trouble` explains why `profile` is None although a profile was requested.
    """

    times: Times
    profile: Profile | None = None
    trouble: str = ""
