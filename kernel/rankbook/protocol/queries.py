"""Queries that a rank answers while its main thread runs a cell, and their replies.

They serve status displays, completion, inspection, shard maps and the evaluation of expressions. A rank sends a reply
only in response to a query, so an unwatched cluster has no such traffic.
"""

from __future__ import annotations

import msgspec

from rankbook.protocol.base import Message
from rankbook.protocol.telemetry import CheckpointSave, Holding, MemoryUse, RankDetail, Statistic


class QueryRequest(Message, frozen=True):
    """Base class of queries. The reply has the same token."""

    token: int


class QueryReply(Message, frozen=True):
    """Base class of replies to a `QueryRequest` with the same token."""

    token: int


class RankSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of a rank at one moment.

    `cell` is the cluster's number of the running cell, `waits_for` the oldest pending collective, `waited` how long it
    has been pending, in seconds. `steps` is None if optimizer steps are not counted. `at` is the rank's monotonic
    clock, in seconds.
    """

    host: str
    device_name: str
    cell: int | None
    line: int | None
    waits_for: str
    waited: float
    memory: MemoryUse | None
    utilisation: float | None
    steps: int | None
    at: float


class Box(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Region of a global tensor that `rank` holds, in elements.

    `replica` is the index of the copy, -1 if the copies are not numbered yet.
    """

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    replica: int = -1


class RankTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor on one rank.

    `shape` is the global shape; `grid` is the index into `ShardsReply.grids`.
    """

    key: str
    dtype: str
    itemsize: int
    device: str
    shape: tuple[int, ...]
    grid: int


class GetStatus(QueryRequest, frozen=True):
    """Request a `StatusReply`.

    `holdings`: include the rank's models, optimizers and loaders, unless they still are version `known`. `fresh`: take
    a new sample rather than the last one. `saves`: include checkpoint saves.
    """

    holdings: bool
    known: int
    fresh: bool
    saves: bool


class GetDetail(QueryRequest, frozen=True):
    """Request a `DetailReply`."""


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


class GetValue(QueryRequest, frozen=True):
    """Request a `ValueReply` with the value of the expression `source`, evaluated for at most `seconds`."""

    source: str
    seconds: float


class StatusReply(QueryReply, frozen=True):
    """State of the rank, as requested by `GetStatus`.

    `holdings` is None if they were not requested, or are unchanged since the version that the request named. `version`
    is the current one.
    """

    sample: RankSample
    version: int
    holdings: tuple[Holding, ...] | None
    saves: tuple[CheckpointSave, ...]


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


class ValueReply(QueryReply, frozen=True):
    """Printed value of an expression, or the `trouble` with it.

    `cell` is the cell that the rank was running at that moment.
    """

    text: str
    trouble: str
    cell: int | None


class QueryFailed(QueryReply, frozen=True):
    """Report that the rank cannot answer the query, and why."""

    trouble: str


Hint = GetCompletions | GetInspection
"""Queries that an editor sends while the user types, which have to be answered at once."""
Look = GetStatus | GetDetail | GetShards | GetStatistic
Question = Look | Hint | GetValue
Answer = (
    StatusReply
    | DetailReply
    | ShardsReply
    | StatisticReply
    | CompletionsReply
    | InspectionReply
    | ValueReply
    | QueryFailed
)
