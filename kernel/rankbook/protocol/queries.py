"""Queries that a rank answers while its main thread runs a cell, their replies, and checks of numbers.

The queries serve status displays, completion, inspection, shard maps and the evaluation of expressions. A rank sends a
reply only in response to a query, so an unwatched cluster has no such traffic.

`HashState`, `MeasureDifferences` and `MeasureGradients` are tasks of a rank's main thread: hashes of tensors,
differences between ranks, norms of gradients. Their results travel as the values of the tasks, or, while a cell runs,
in a `NumbersReply`.
"""

from __future__ import annotations

import msgspec

from rankbook.protocol import Message
from rankbook.protocol.telemetry import CheckpointSave, Holding, MemoryUse, RankDetail, Statistic
from rankbook.snapshot_files import SnapshotHeader


class HashState(Message, frozen=True):
    """Answer with `StateHashes` of the variables `names`; without names, of all that the ranks' layout keeps equal."""

    cell: int
    names: tuple[str, ...] = ()


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks of a tensor that differ between the rank `source` and `ranks`. `nbytes` are the tensor's on `source`."""

    key: str
    source: int
    ranks: tuple[int, ...]
    blocks: tuple[int, ...]
    nbytes: int


class MeasureDifferences(Message, frozen=True):
    """Answer with a list of `PieceDifference`, one per piece that this rank compares. A collective of all ranks.

    `names` are those of the `HashState` whose result named the pieces.
    """

    cell: int
    names: tuple[str, ...]
    pieces: tuple[Piece, ...]


class MeasureGradients(Message, frozen=True):
    """Answer with the `LocalGradients` of the model `name`. A collective if gradients are still to be reduced."""

    cell: int
    name: str


class StateEntry(msgspec.Struct, frozen=True):
    """A tensor, or a small value, on one rank.

    `key` names it on all ranks: "model.fc.weight". `place` is the coordinate of a shard, empty for whole tensors; only
    entries of one place are compared. `ranks` are those that hold replicas, () for all. `digest` has 8 bytes per block;
    `value` is the value in words, in place of a digest. `first` is the key of the first name of the same tensor, which
    differs from `key` for tied weights. `due` says when the layout makes the replicas equal again, if it does.
    `optional` is the name of the model, if ranks need not have one of this name.
    """

    key: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    place: str = ""
    ranks: tuple[int, ...] = ()
    digest: bytes = b""
    value: str = ""
    nbytes: int = 0
    trainable: bool | None = None
    first: str = ""
    due: str = ""
    optional: str = ""


class StateHashes(msgspec.Struct, frozen=True):
    """Entries of one rank. `steps` is the number of optimizer steps taken, None if unknown.

    `missing` are requested names that are not defined here or cannot be compared, with the reasons. `skipped` are
    objects that are not meant to be equal, with the reasons. `unreadable` are tensors whose values cannot be read.
    """

    entries: tuple[StateEntry, ...]
    steps: int | None = None
    missing: dict[str, str] = {}
    skipped: dict[str, str] = {}
    unreadable: dict[str, str] = {}


class PieceDifference(msgspec.Struct, frozen=True):
    """Difference of one piece on one rank to its source.

    `largest` is the largest absolute difference, `differing` of `compared` elements differ. `nonfinite` of the
    differing elements are NaN or infinite on one of the two ranks only.
    """

    key: str
    rank: int
    largest: float
    differing: int
    compared: int
    nonfinite: int = 0


class GradientEntry(msgspec.Struct, frozen=True):
    """Gradient of one parameter on one rank. `norm` is the 2-norm of the local shard, None without a gradient."""

    key: str
    place: str
    norm: float | None
    parameter_norm: float
    elements: int
    nonfinite: int = 0


class LocalGradients(msgspec.Struct, frozen=True):
    """Gradients of a model on one rank.

    `reduced` is False while the ranks accumulate gradients on their own. `scale` is the fp16 loss scale that the
    gradients still have and the norms have not.
    """

    entries: tuple[GradientEntry, ...]
    reduced: bool = True
    scale: float = 1.0


# The base classes let the control thread and the driver recognize queries and replies by their type. A rank may answer
# in any order, and several clients may ask at once, so that replies are matched by token and not by type.
class QueryRequest(Message, frozen=True):
    """Base class of queries. The reply has the same token."""

    token: int


class QueryReply(Message, frozen=True):
    """Base class of replies to a `QueryRequest` with the same token."""

    token: int


# Parts of replies ---------------------------------------------------------------------------------------------------


# Taken on the rank at `at`. The coordinator compares only differences of `at`, because the ranks' clocks may differ
# from its own.
class RankSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of a rank at one moment.

    `cell` is the cluster's number of the running cell, `waits_for` the oldest pending collective, `waited` how long it
    has been pending, in seconds. `steps` is None if optimizer steps are not counted. `at` is the rank's monotonic
    clock, in seconds. `snapshots` are the headers of the rank's snapshots, newest first.
    """

    host: str
    device_name: str
    cell: int | None
    line: int | str | None
    waits_for: str
    waited: float
    memory: MemoryUse | None
    utilisation: float | None
    steps: int | None
    at: float
    snapshots: tuple[SnapshotHeader, ...] = ()


# A box is in the axes of the global tensor. A rank that holds several pieces of a tensor has several boxes.
class Box(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Region of a global tensor that `rank` holds, in elements.

    `replica` is the index of the copy, -1 if the copies are not numbered yet.
    """

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    replica: int = -1


# Example: a model with 300 parameters that are all sharded along dim 0 has few different shapes, so `grids` has few
# entries, and each tensor only an index into it.
class RankTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor on one rank.

    `shape` is the global shape; `grid` is the index into `ShardsReply.grids`. `bytes` is the size of the local shard if
    it does not follow from its shape, as that of a quantized tensor; memory that an earlier tensor of the reply has too
    does not count.
    """

    key: str
    dtype: str
    itemsize: int
    device: str
    shape: tuple[int, ...]
    grid: int
    bytes: int | None = None


class ModelGradients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Gradients of a model on one rank, by module: the keys of the entries are modules.

    They are those of the optimizer step `step`; None between two cells, and 0 for an optimizer that does not count.
    """

    model: str
    step: int | None
    gradients: LocalGradients


# Queries ------------------------------------------------------------------------------------------------------------


# A round of a watching view: GetStatus(holdings=True, known=7, ...) is answered by StatusReply(version=7,
# holdings=None) as long as the rank's models and optimizers are those of version 7, and by version 8 with all of them
# otherwise.
class GetStatus(QueryRequest, frozen=True):
    """Request a `StatusReply`.

    `holdings`: include the rank's models, optimizers and loaders, unless they still are version `known`. `fresh`: take
    a new sample rather than the last one. `saves`: include checkpoint saves. `norms_every`: measure the norms of
    gradients at the ends of steps whose number is a multiple of it, 0 for never; `norms_known` is the version that the
    client has.
    """

    holdings: bool
    known: int
    fresh: bool
    saves: bool
    norms_every: int = 0
    norms_known: int = 0


class GetDetail(QueryRequest, frozen=True):
    """Request a `DetailReply`."""


# `others` is asked of one rank only, for ranks that do not answer: from its own layout a rank can compute theirs.
class GetShards(QueryRequest, frozen=True):
    """Request a `ShardsReply` about the variable `name`.

    `others`: also compute the regions that the other ranks hold.
    """

    name: str
    others: bool


class GetStatistic(QueryRequest, frozen=True):
    """Request a `StatisticReply` about the local shard of tensor `key` in the variable `name`."""

    name: str
    key: str


class Completion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One completion candidate.

    `type` is function, class, module, instance, keyword or param, the names that editors use.
    """

    text: str
    type: str


# `cursor` counts characters of `text`, as Jupyter's protocol does, and not UTF-16 code units, as JavaScript does.
class GetCompletions(QueryRequest, frozen=True):
    """Request a `CompletionsReply` for `text` with the cursor at `cursor`.

    `variables`: complete only variables that cells have defined.
    """

    text: str
    cursor: int
    variables: bool


class GetInspection(QueryRequest, frozen=True):
    """Request an `InspectionReply` about the name under the cursor in `text`.

    `source`: include its source code.
    """

    text: str
    cursor: int
    source: bool


# The rank gives up after `seconds` and says so. The notebook waits a little longer, for that answer.
class GetValue(QueryRequest, frozen=True):
    """Request a `ValueReply` with the value of the expression `source`, evaluated for at most `seconds`."""

    source: str
    seconds: float


# Asked again and again until all ranks pause at the same step. The rank answers at once, so that no reply is awaited
# while it trains. It continues by itself after `seconds`: the notebook may have gone.
class HoldAtStep(QueryRequest, frozen=True):
    """Request a `HoldReply`, and pause the main thread at an end of an optimizer step, or between two cells.

    It pauses at the first end of a step at which `clock` has reached `position`, for at most `seconds` from now; 0.0
    lets it continue. `clock` is "steps", "collectives" (those of the default group) or "any" (the next step); "" only
    reports the position.
    """

    clock: str
    position: int
    seconds: float


class CheckNumbers(QueryRequest, frozen=True):
    """Request a `NumbersReply` with the result of `check`, from the main thread of a rank that pauses at a step."""

    check: HashState | MeasureDifferences | MeasureGradients


# Replies ------------------------------------------------------------------------------------------------------------


class StatusReply(QueryReply, frozen=True):
    """State of the rank, as requested by `GetStatus`.

    `holdings` is None if they were not requested, or are unchanged since the version that the request named. `version`
    is the current one. `norms` and `norms_version` are the same for the norms of gradients, and `norms_seconds` is the
    time of the last measurement.
    """

    sample: RankSample
    version: int
    holdings: tuple[Holding, ...] | None
    saves: tuple[CheckpointSave, ...]
    norms: tuple[ModelGradients, ...] | None = None
    norms_version: int = 0
    norms_seconds: float = 0.0


class DetailReply(QueryReply, frozen=True):
    """Stack and variables of the rank.

    The coordinator, which received the output, fills in `RankDetail.output`.
    """

    detail: RankDetail


class ShardsReply(QueryReply, frozen=True):
    """Tensors and regions that the rank holds of a variable.

    Tensors that are sharded alike share one entry of `grids`.
    """

    kind: str
    tensors: tuple[RankTensor, ...]
    grids: tuple[tuple[Box, ...], ...]
    trouble: str


class StatisticReply(QueryReply, frozen=True):
    """Statistic of one local shard."""

    statistic: Statistic


class CompletionsReply(QueryReply, frozen=True):
    """Candidates that can replace `text[start:cursor]`."""

    start: int
    completions: tuple[Completion, ...]


class InspectionReply(QueryReply, frozen=True):
    """Documentation to display; empty if the name under the cursor is missing or unknown."""

    text: str


# Exactly one of `text` and `trouble` is not empty, except for an expression whose text is empty.
class ValueReply(QueryReply, frozen=True):
    """Printed value of an expression, or the `trouble` with it.

    `cell` is the cell that the rank was running at that moment.
    """

    text: str
    trouble: str
    cell: int | None


class HoldReply(QueryReply, frozen=True):
    """Position of the main thread, as requested by `HoldAtStep`.

    `holds`: it pauses. `idle`: it does so between two cells. `steps` and `collectives` are those at the last end of a
    step since the first request, None if none has ended. `steps` is also None for an optimizer that does not count
    them, and `collectives` if there were none since the end before. `ends` is the number of these ends.
    """

    holds: bool
    idle: bool
    steps: int | None
    collectives: int | None
    ends: int


class NumbersReply(QueryReply, frozen=True):
    """Result of a `CheckNumbers`; `differences` answers `MeasureDifferences`. The others are None."""

    hashes: StateHashes | None = None
    differences: tuple[PieceDifference, ...] = ()
    gradients: LocalGradients | None = None


class QueryFailed(QueryReply, frozen=True):
    """Report that the rank cannot answer the query, and why."""

    trouble: str


# Four kinds, because the rank answers them on different threads: a slow look at the namespace must not delay
# completion, an expression may take any time, and a check of numbers waits for the main thread.
Hint = GetCompletions | GetInspection
"""Queries that an editor sends while the user types, which have to be answered at once."""
Look = GetStatus | GetDetail | GetShards | GetStatistic
Hold = HoldAtStep | CheckNumbers
"""Queries that pause the main thread at the end of an optimizer step."""
Question = Look | Hint | GetValue | Hold
Answer = (
    StatusReply
    | DetailReply
    | ShardsReply
    | StatisticReply
    | CompletionsReply
    | InspectionReply
    | ValueReply
    | HoldReply
    | NumbersReply
    | QueryFailed
)
