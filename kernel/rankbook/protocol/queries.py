"""The vocabulary of looks at the ranks while they work.

Owns: the questions that a rank answers whatever its main thread does, and the answers. Refuses: to be sent unasked:
where nobody looks, none of these is on the wire.
"""

from __future__ import annotations

import msgspec

from rankbook.protocol.base import Message
from rankbook.protocol.telemetry import CheckpointSave, Holding, MemoryUse, RankDetail, Statistic


class Asked(Message, frozen=True):
    """A question; its answer has the same token."""

    token: int


class Answered(Message, frozen=True):
    """An answer."""

    token: int


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class HeldTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor on one rank: `grid` is its place in `ShardsTold.grids`; `shape` is the global one."""

    key: str
    dtype: str
    itemsize: int
    device: str
    shape: tuple[int, ...]
    grid: int


class AskLook(Asked, frozen=True):
    """Answer with `Looked`. `holdings`: what lives there too, unless that still is version `known`; `fresh`: look now.

    `saves`: checkpoints too.
    """

    holdings: bool
    known: int
    fresh: bool
    saves: bool


class AskDetail(Asked, frozen=True):
    """Answer with `DetailTold`."""


class AskShards(Asked, frozen=True):
    """Answer with `ShardsTold` about the variable `name`. `others`: with the parts of the other ranks, as computed."""

    name: str
    others: bool


class AskStatistic(Asked, frozen=True):
    """Answer with `StatisticTold` about what is here of the tensor `key` of the variable `name`."""

    name: str
    key: str


class Completion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name that may stand there. `type`: function, class, module, instance, keyword, param, as editors show it."""

    text: str
    type: str


class AskCompletions(Asked, frozen=True):
    """Answer with `CompletionsTold`: what may follow `text[:cursor]`. `variables`: the cells' own variables alone."""

    text: str
    cursor: int
    variables: bool


class AskInspection(Asked, frozen=True):
    """Answer with `InspectionTold` about what is under the cursor in `text`. `source`: with its source."""

    text: str
    cursor: int
    source: bool


class AskPeek(Asked, frozen=True):
    """Answer with `PeekTold`: what the expression `source` gives, within `seconds` of evaluating it."""

    source: str
    seconds: float


class Looked(Answered, frozen=True):
    """What was seen. Without `holdings` they are what they were, or were not asked for."""

    sample: Sample
    version: int
    holdings: tuple[Holding, ...] | None
    saves: tuple[CheckpointSave, ...]


class DetailTold(Answered, frozen=True):
    """What the rank is at; its output is known where it was sent."""

    detail: RankDetail


class ShardsTold(Answered, frozen=True):
    """What the rank holds of a variable. Each of `grids` is shared by the tensors that are cut alike."""

    kind: str
    tensors: tuple[HeldTensor, ...]
    grids: tuple[tuple[Box, ...], ...]
    trouble: str


class StatisticTold(Answered, frozen=True):
    """The numbers."""

    statistic: Statistic


class CompletionsTold(Answered, frozen=True):
    """What may take the place of `text[start:cursor]`."""

    start: int
    completions: tuple[Completion, ...]


class InspectionTold(Answered, frozen=True):
    """What is known of it, for people; "" where there is nothing under the cursor, or nothing of that name."""

    text: str


class PeekTold(Answered, frozen=True):
    """What an expression gave, as people read it, or the `trouble` with it. `cell` is what the rank ran meanwhile."""

    text: str
    trouble: str
    cell: int | None


class NothingTold(Answered, frozen=True):
    """The rank cannot answer, and says why."""

    trouble: str


Hint = AskCompletions | AskInspection
"""What an editor asks while a person types: it cannot wait."""
Look = AskLook | AskDetail | AskShards | AskStatistic
Question = Look | Hint | AskPeek
Answer = Looked | DetailTold | ShardsTold | StatisticTold | CompletionsTold | InspectionTold | PeekTold | NothingTold
