"""Result of a cell: per-rank status, output, displays and errors, and the formatting of errors of several ranks.

`ResultBuilder` collects the messages of all ranks while the cell runs, and builds an immutable `CellResult`. A result
contains text and mime bundles only, no live objects of a rank, so it can be kept after the cluster has ended.
`describe_errors` groups equal tracebacks and names the ranks.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rankbook.errors import BadRequest, CellError, LostRank, cell_error, is_consequence
from rankbook.protocol.messages import Display, Done, ErrorReport, Text, TextCut
from rankbook.ranks import group_ranks, name_ranks

_MOST_DISPLAYS = 100
_CONTEXT = re.compile(r" +\d+ ")
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_RED = "\x1b[1;31m"
_NORMAL = "\x1b[0m"


@dataclass(frozen=True)
class RankOutcome:
    """Result of a cell on one rank.

    `stdout` and `stderr` are the text printed, from the start; `truncated` is True if output is missing from them or
    from `displays`. `displays` are the mime bundles that were displayed (the first 100, in their last state), and
    `result` is that of the last expression. `loss` describes why a rank did not answer. A rank that never ran the cell
    counts as interrupted.
    """

    rank: int
    status: Literal["ok", "error", "interrupted", "lost"]
    seconds: float
    stdout: str = ""
    stderr: str = ""
    displays: tuple[dict[str, Any], ...] = ()
    result: dict[str, Any] | None = None
    error: ErrorReport | None = None
    loss: str | None = None
    truncated: bool = False


@dataclass(frozen=True, repr=False)
class CellResult:
    """Result of one cell on all its ranks. `number` is the notebook's execution count, 0 outside a notebook.

    Iterating yields the `RankOutcome` of every rank in rank order; `result[2]` is that of rank 2.
    """

    cell: int
    number: int
    outcomes: tuple[RankOutcome, ...]
    seconds: float

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the cell, ascending."""
        return tuple(outcome.rank for outcome in self.outcomes)

    @property
    def ok(self) -> bool:
        """True if the cell succeeded on every rank."""
        return all(outcome.status == "ok" for outcome in self.outcomes)

    @property
    def status(self) -> Literal["ok", "error", "interrupted"]:
        """Worst status of all ranks. A lost rank counts as an error."""
        statuses = {outcome.status for outcome in self.outcomes}
        if not statuses.isdisjoint(("error", "lost")):
            return "error"
        return "interrupted" if "interrupted" in statuses else "ok"

    @property
    def stdout(self) -> dict[int, str]:
        """Text printed to stdout, by rank."""
        return {outcome.rank: outcome.stdout for outcome in self.outcomes}

    @property
    def stderr(self) -> dict[int, str]:
        """Text printed to stderr, by rank."""
        return {outcome.rank: outcome.stderr for outcome in self.outcomes}

    @property
    def errors(self) -> dict[int, ErrorReport]:
        """Errors by rank, for the ranks that raised one."""
        return {
            outcome.rank: outcome.error
            for outcome in self.outcomes
            if outcome.status == "error" and outcome.error is not None
        }

    def text(self, rank: int) -> str | None:
        """Return the value of the last expression of `rank` as plain text, None if it had none.

        Raises `BadRequest` if the rank did not take part in the cell.
        """
        text = (self[rank].result or {}).get("text/plain")
        return text if isinstance(text, str) else None

    def raise_for_status(self) -> None:
        """Raise an exception that describes the failures of all ranks; return if the cell succeeded.

        Raises `LostRank` if a rank is lost, since that may be why others failed. Otherwise raises a `CellError` that is
        also an instance of the built-in exception type of the first failed rank, or KeyboardInterrupt if ranks were
        only interrupted.
        """
        __tracebackhide__ = True  # IPython and pytest show the caller's frames
        if self.ok:
            return
        story = describe_errors(self.outcomes, plain=True)
        lost = [outcome.rank for outcome in self.outcomes if outcome.status == "lost"]
        if lost:
            raise LostRank(story, lost)
        if self.status == "error":
            raise cell_error(story, self.errors) if self.errors else CellError(story, {})
        raise KeyboardInterrupt(story)

    def __getitem__(self, rank: int) -> RankOutcome:
        for outcome in self.outcomes:
            if outcome.rank == rank:
                return outcome
        raise BadRequest(f"there is no rank {rank} in this result; it has {name_ranks(self.ranks)}")

    def __len__(self) -> int:
        return len(self.outcomes)

    def __iter__(self) -> Iterator[RankOutcome]:
        return iter(self.outcomes)

    def __repr__(self) -> str:
        groups = group_ranks((outcome.rank, outcome.status) for outcome in self.outcomes)
        order = sorted(groups, key=("lost", "error", "interrupted", "ok").index)
        summary = ", ".join(f"{status} on {name_ranks(groups[status])}" for status in order)
        number = f" [{self.number}]" if self.number else ""
        return f"CellResult{number}: {summary} in {self.seconds:.2f} s"


class _TextBytes:
    """The first `room` bytes of a stream."""

    __slots__ = ("cut", "pieces", "room")

    def __init__(self, room: int) -> None:
        self.room = room
        self.pieces: list[bytes] = []
        self.cut = False

    def add(self, data: bytes) -> None:
        if len(data) > self.room:
            self.cut = True
            data = data[: self.room]
        if data:
            self.room -= len(data)
            self.pieces.append(data)

    def text(self) -> str:
        """Decode the bytes. A character that the limit has cut in two is left out."""
        return codecs.utf_8_decode(b"".join(self.pieces), "replace", not self.cut)[0]


@dataclass(eq=False)
class _Part:
    """Messages of one rank so far."""

    streams: dict[str, _TextBytes] = field(default_factory=dict)
    displays: list[Display] = field(default_factory=list)
    result: Display | None = None
    done: Done | None = None
    loss: str | None = None
    truncated: bool = False


class ResultBuilder:
    """Collect the messages of `ranks` in any order, and build a `CellResult`.

    `keep` is the number of bytes kept of every stream of a rank.
    """

    def __init__(self, cell: int, number: int, ranks: Sequence[int], *, keep: int = 1 << 20) -> None:
        self._cell = cell
        self._number = number
        self._ranks = tuple(sorted(ranks))
        self._keep = keep
        self._parts: dict[int, _Part] = {}
        self._built = False

    def feed(self, rank: int, message: Text | TextCut | Display) -> None:
        """Record output of a rank. Output after `build` is not part of any result."""
        if self._built:
            return
        part = self._part(rank)
        match message:
            case Text(stream=stream, data=data):
                buffer = part.streams.get(stream)
                if buffer is None:
                    buffer = part.streams[stream] = _TextBytes(self._keep)
                buffer.add(data)
            case TextCut():
                part.truncated = True
            case Display(kind="update"):
                part.displays = [message if _same_display(display, message) else display for display in part.displays]
                if part.result is not None and _same_display(part.result, message):
                    part.result = message
            case Display(kind="result"):
                part.result = message
            case Display() if len(part.displays) < _MOST_DISPLAYS:
                part.displays.append(message)
            case Display():
                part.truncated = True

    def done(self, rank: int, message: Done) -> None:
        """Record the reply of a rank."""
        self._part(rank).done = message

    def lost(self, rank: int, words: str) -> None:
        """Record that a rank will not answer; `words` is a whole sentence. Ignored for a rank that has replied."""
        part = self._part(rank)
        if part.loss is None:
            part.loss = words

    def build(self, seconds: float) -> CellResult:
        """Return the result; `seconds` is the duration of the whole cell."""
        outcomes = tuple(self._outcome(rank, self._parts.get(rank), seconds) for rank in self._ranks)
        self._parts, self._built = {}, True
        return CellResult(self._cell, self._number, outcomes, seconds)

    def _part(self, rank: int) -> _Part:
        part = self._parts.get(rank)
        if part is None:
            part = self._parts[rank] = _Part()
        return part

    @staticmethod
    def _outcome(rank: int, part: _Part | None, seconds: float) -> RankOutcome:
        if part is None:
            return RankOutcome(rank, "interrupted", 0.0)
        streams, done = part.streams, part.done
        return RankOutcome(
            rank=rank,
            status=done.status if done is not None else "interrupted" if part.loss is None else "lost",
            seconds=done.seconds if done is not None else seconds,
            stdout=streams["stdout"].text() if "stdout" in streams else "",
            stderr=streams["stderr"].text() if "stderr" in streams else "",
            displays=tuple(display.data for display in part.displays),
            result=part.result.data if part.result is not None else None,
            error=done.error if done is not None else None,
            loss=part.loss if done is None else None,
            truncated=part.truncated or any(buffer.cut for buffer in streams.values()),
        )


def _same_display(one: Display, other: Display) -> bool:
    return one.display_id is not None and one.display_id == other.display_id


def describe_errors(outcomes: Sequence[RankOutcome], *, plain: bool = False) -> str:
    """Return the distinct errors of all ranks, with tracebacks, headed by the ranks that raised them.

    Empty without errors. The text is coloured with ANSI escapes unless `plain`. Its last line names the ranks that
    succeeded.
    """
    blocks = [*_tell_losses(outcomes, plain), *_tell_errors(outcomes, plain), *_tell_interrupts(outcomes, plain)]
    fine = [outcome.rank for outcome in outcomes if outcome.status == "ok"]
    if blocks and fine:
        blocks.append(f"{name_ranks(fine)} finished without an error")
    return "\n".join(blocks)


def _tell_losses(outcomes: Sequence[RankOutcome], plain: bool) -> Iterator[str]:
    for loss in dict.fromkeys(outcome.loss for outcome in outcomes if outcome.status == "lost"):
        yield _red(loss or "", plain)


def _tell_errors(outcomes: Sequence[RankOutcome], plain: bool) -> Iterator[str]:
    groups: dict[str, list[RankOutcome]] = {}
    for outcome in outcomes:
        if outcome.status == "error":
            groups.setdefault(_likeness(outcome.error.plain) if outcome.error else "", []).append(outcome)
    for group in sorted(groups.values(), key=lambda group: is_consequence(group[0].error)):
        subject, error = name_ranks(outcome.rank for outcome in group), group[0].error
        if error is None:
            yield _red(f"{subject}: failed, and did not say how", plain)
            continue
        message = f"{error.name}: {error.value}".removesuffix(": ")
        yield _red(f"{subject}: {message.splitlines()[0]}", plain)
        if error.plain.strip() != message.splitlines()[0]:
            yield (error.plain if plain else error.traceback).strip("\n")
        yield from _tell_memory(group)


def _tell_memory(group: Sequence[RankOutcome]) -> Iterator[str]:
    """Yield memory reports of ranks that ran out of memory, one per distinct report."""
    reports = group_ranks((outcome.rank, outcome.error.memory) for outcome in group if outcome.error is not None)
    for text, ranks in reports.items():
        if text:
            yield f"{name_ranks(ranks)}, {text}"


def _likeness(plain: str) -> str:
    """Return a traceback without the parts that differ between ranks with the same error, as a key for grouping.

    These are addresses of objects, and the context lines around an error: for a function on one line (`def f(): ...`)
    stack_data takes the first line of a set, so these vary from run to run.
    """
    lines = (" ".join(line.split()) for line in plain.splitlines() if not _CONTEXT.match(line))
    return _ADDRESS.sub("0x", "\n".join(lines))


def _tell_interrupts(outcomes: Sequence[RankOutcome], plain: bool) -> Iterator[str]:
    interrupted = [outcome for outcome in outcomes if outcome.status == "interrupted"]
    for reason, ranks in group_ranks((outcome.rank, _describe_interrupt(outcome)) for outcome in interrupted).items():
        yield _red(f"{name_ranks(ranks)}: {reason}", plain)


def _describe_interrupt(outcome: RankOutcome) -> str:
    if outcome.error is None:
        return "interrupted"
    return "KeyboardInterrupt" if outcome.error.line is None else f"KeyboardInterrupt at line {outcome.error.line}"


def _red(text: str, plain: bool) -> str:
    return text if plain else f"{_RED}{text}{_NORMAL}"
