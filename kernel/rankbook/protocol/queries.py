"""The vocabulary of looks at the ranks while they work.

Owns: the questions that a rank answers whatever its main thread does, and the answers. Refuses: to be sent unasked:
where nobody looks, none of these is on the wire.
"""

from __future__ import annotations

import msgspec

from rankbook.protocol.base import Message
from rankbook.protocol.telemetry import CheckpointSave, Holding, MemoryUse, RankDetail, Statistic


class QueryRequest(Message, frozen=True):
    """A question; its answer has the same token."""

    token: int


class QueryReply(Message, frozen=True):
    """An answer."""

    token: int


class RankSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank at one moment. `cell` is the cluster's number of what it runs, `waited` the seconds of `waits_for`.

    `steps` is None where nobody counts optimizer steps; `at` is the rank's monotonic clock.
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
    """The part of a tensor that `rank` holds, in elements. `replica` is -1 where the copies have no numbers yet."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    replica: int = -1


class RankTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor on one rank: `grid` is its place in `ShardsReply.grids`; `shape` is the global one."""

    key: str
    dtype: str
    itemsize: int
    device: str
    shape: tuple[int, ...]
    grid: int


class GetStatus(QueryRequest, frozen=True):
    """Answer with `StatusReply`.

    `holdings`: with what lives there, unless that still is version `known`. `fresh`: look now. `saves`: with
    checkpoints.
    """

    holdings: bool
    known: int
    fresh: bool
    saves: bool


class GetDetail(QueryRequest, frozen=True):
    """Answer with `DetailReply`."""


class GetShards(QueryRequest, frozen=True):
    """Answer with `ShardsReply` about the variable `name`. `others`: with the parts of the other ranks, as computed."""

    name: str
    others: bool


class GetStatistic(QueryRequest, frozen=True):
    """Answer with `StatisticReply` about what is here of the tensor `key` of the variable `name`."""

    name: str
    key: str


class Completion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name that may stand there. `type`: function, class, module, instance, keyword, param, as editors show it."""

    text: str
    type: str


class GetCompletions(QueryRequest, frozen=True):
    """Answer with `CompletionsReply`: what may follow `text[:cursor]`. `variables`: the cells' own variables alone."""

    text: str
    cursor: int
    variables: bool


class GetInspection(QueryRequest, frozen=True):
    """Answer with `InspectionReply` about what is under the cursor in `text`. `source`: with its source."""

    text: str
    cursor: int
    source: bool


class GetValue(QueryRequest, frozen=True):
    """Answer with `ValueReply`: what the expression `source` gives, within `seconds` of evaluating it."""

    source: str
    seconds: float


class StatusReply(QueryReply, frozen=True):
    """What was seen. Without `holdings` they are what they were, or were not asked for."""

    sample: RankSample
    version: int
    holdings: tuple[Holding, ...] | None
    saves: tuple[CheckpointSave, ...]


class DetailReply(QueryReply, frozen=True):
    """What the rank is at; its output is known where it was sent."""

    detail: RankDetail


class ShardsReply(QueryReply, frozen=True):
    """What the rank holds of a variable. Each of `grids` is shared by the tensors that are cut alike."""

    kind: str
    tensors: tuple[RankTensor, ...]
    grids: tuple[tuple[Box, ...], ...]
    trouble: str


class StatisticReply(QueryReply, frozen=True):
    """The numbers."""

    statistic: Statistic


class CompletionsReply(QueryReply, frozen=True):
    """What may take the place of `text[start:cursor]`."""

    start: int
    completions: tuple[Completion, ...]


class InspectionReply(QueryReply, frozen=True):
    """What is known of it, for people; "" where there is nothing under the cursor, or nothing of that name."""

    text: str


class ValueReply(QueryReply, frozen=True):
    """What an expression gave, as people read it, or the `trouble` with it. `cell` is what the rank ran meanwhile."""

    text: str
    trouble: str
    cell: int | None


class QueryFailed(QueryReply, frozen=True):
    """The rank cannot answer, and says why."""

    trouble: str


Hint = GetCompletions | GetInspection
"""What an editor asks while a person types: it cannot wait."""
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
