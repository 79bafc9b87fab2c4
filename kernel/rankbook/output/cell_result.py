"""Folds what the ranks of one cell send into one immutable `CellResult`.

Owns: what is kept of each rank's output, how a cell as a whole went, and the words for what went wrong. Refuses: to
wait, to show anything, or to hold a rank's objects: what is here is text and mime bundles.
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
    """How the cell went on one rank.

    `stdout` and `stderr` are what it printed, from the start, and `truncated` whether that is not all. `displays` are
    the mime bundles that it displayed (the first 100, each in its last state), `result` that of its last expression.
    `loss` says in plain words what became of a rank that did not answer. A rank that never ran the cell counts as
    interrupted.
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
    """How one cell went, on all its ranks. `number` is the notebook's execution count, 0 where there is none.

    Iterating gives each rank's `RankOutcome`, in rank order; `result[2]` is that of rank 2.
    """

    cell: int
    number: int
    outcomes: tuple[RankOutcome, ...]
    seconds: float

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the cell, ascending."""
        return tuple(outcome.rank for outcome in self.outcomes)

    @property
    def ok(self) -> bool:
        """Whether it went well on every rank."""
        return all(outcome.status == "ok" for outcome in self.outcomes)

    @property
    def status(self) -> Literal["ok", "error", "interrupted"]:
        """The worst of the ranks: a lost rank is an error."""
        found = {outcome.status for outcome in self.outcomes}
        if not found.isdisjoint(("error", "lost")):
            return "error"
        return "interrupted" if "interrupted" in found else "ok"

    @property
    def stdout(self) -> dict[int, str]:
        """What each rank printed."""
        return {outcome.rank: outcome.stdout for outcome in self.outcomes}

    @property
    def stderr(self) -> dict[int, str]:
        """What each rank wrote to stderr."""
        return {outcome.rank: outcome.stderr for outcome in self.outcomes}

    @property
    def errors(self) -> dict[int, ErrorReport]:
        """The error of each rank that raised one."""
        return {each.rank: each.error for each in self.outcomes if each.status == "error" and each.error is not None}

    def text(self, rank: int) -> str | None:
        """The last expression of `rank` as plain text; None if it had none. Raises `BadRequest`."""
        text = (self[rank].result or {}).get("text/plain")
        return text if isinstance(text, str) else None

    def raise_for_status(self) -> None:
        """Raise what went wrong, with every rank's story in its text; a cell that went well passes.

        Raises `LostRank` if a rank is lost, for that may be why others failed; else a `CellError` that also is of the
        first failed rank's built-in type; else KeyboardInterrupt.
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
        told = ", ".join(f"{status} on {name_ranks(groups[status])}" for status in order)
        number = f" [{self.number}]" if self.number else ""
        return f"CellResult{number}: {told} in {self.seconds:.2f} s"


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
        """A character of which the cut left only a part is left out."""
        return codecs.utf_8_decode(b"".join(self.pieces), "replace", not self.cut)[0]


@dataclass(eq=False)
class _Part:
    """One rank's part, as far as it has come."""

    streams: dict[str, _TextBytes] = field(default_factory=dict)
    displays: list[Display] = field(default_factory=list)
    result: Display | None = None
    done: Done | None = None
    loss: str | None = None
    truncated: bool = False


class ResultBuilder:
    """Collects what `ranks` send, in any order; `keep` is how many bytes of each stream of a rank are kept."""

    def __init__(self, cell: int, number: int, ranks: Sequence[int], *, keep: int = 1 << 20) -> None:
        self._cell = cell
        self._number = number
        self._ranks = tuple(sorted(ranks))
        self._keep = keep
        self._parts: dict[int, _Part] = {}
        self._built = False

    def feed(self, rank: int, message: Text | TextCut | Display) -> None:
        """A rank has printed or displayed something. What comes after `build` is in no result."""
        if self._built:
            return
        part = self._part(rank)
        match message:
            case Text(stream=stream, data=data):
                kept = part.streams.get(stream)
                if kept is None:
                    kept = part.streams[stream] = _TextBytes(self._keep)
                kept.add(data)
            case TextCut():
                part.truncated = True
            case Display(kind="update"):
                part.displays = [message if _same_display(each, message) else each for each in part.displays]
                if part.result is not None and _same_display(part.result, message):
                    part.result = message
            case Display(kind="result"):
                part.result = message
            case Display() if len(part.displays) < _MOST_DISPLAYS:
                part.displays.append(message)
            case Display():
                part.truncated = True

    def done(self, rank: int, message: Done) -> None:
        """A rank has answered."""
        self._part(rank).done = message

    def lost(self, rank: int, words: str) -> None:
        """A rank will not answer: `words` is the whole sentence. One that has answered is not lost."""
        part = self._part(rank)
        if part.loss is None:
            part.loss = words

    def build(self, seconds: float) -> CellResult:
        """The result, with `seconds` for the whole cell."""
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
            truncated=part.truncated or any(kept.cut for kept in streams.values()),
        )


def _same_display(one: Display, other: Display) -> bool:
    return one.display_id is not None and one.display_id == other.display_id


def describe_errors(outcomes: Sequence[RankOutcome], *, plain: bool = False) -> str:
    """What went wrong, one traceback for each distinct error, headed by the ranks that had it. Coloured, or `plain`.

    Empty where nothing went wrong. Ranks that were fine are named in the last line.
    """
    blocks = [*_tell_losses(outcomes, plain), *_tell_errors(outcomes, plain), *_tell_interrupts(outcomes, plain)]
    fine = [outcome.rank for outcome in outcomes if outcome.status == "ok"]
    if blocks and fine:
        blocks.append(f"{name_ranks(fine)} finished without an error")
    return "\n".join(blocks)


def _tell_losses(outcomes: Sequence[RankOutcome], plain: bool) -> Iterator[str]:
    for words in dict.fromkeys(outcome.loss for outcome in outcomes if outcome.status == "lost"):
        yield _red(words or "", plain)


def _tell_errors(outcomes: Sequence[RankOutcome], plain: bool) -> Iterator[str]:
    groups: dict[str, list[RankOutcome]] = {}
    for outcome in outcomes:
        if outcome.status == "error":
            groups.setdefault(_likeness(outcome.error.plain) if outcome.error else "", []).append(outcome)
    for group in sorted(groups.values(), key=lambda group: is_consequence(group[0].error)):
        who, error = name_ranks(outcome.rank for outcome in group), group[0].error
        if error is None:
            yield _red(f"{who}: failed, and did not say how", plain)
            continue
        words = f"{error.name}: {error.value}".removesuffix(": ")
        yield _red(f"{who}: {words.splitlines()[0]}", plain)
        if error.plain.strip() != words.splitlines()[0]:
            yield (error.plain if plain else error.traceback).strip("\n")
        yield from _tell_memory(group)


def _tell_memory(group: Sequence[RankOutcome]) -> Iterator[str]:
    """What held the memory where that ran out, once for all ranks of which the same is to be said."""
    reports = group_ranks((outcome.rank, outcome.error.memory) for outcome in group if outcome.error is not None)
    for text, ranks in reports.items():
        if text:
            yield f"{name_ranks(ranks)}, {text}"


def _likeness(plain: str) -> str:
    """What is the same for ranks with the same error: not where its objects lie, nor which lines around it are shown.

    For a function on one line (`def f(): ...`) that is a matter of chance: stack_data takes the first of a set.
    """
    lines = (" ".join(line.split()) for line in plain.splitlines() if not _CONTEXT.match(line))
    return _ADDRESS.sub("0x", "\n".join(lines))


def _tell_interrupts(outcomes: Sequence[RankOutcome], plain: bool) -> Iterator[str]:
    interrupted = [outcome for outcome in outcomes if outcome.status == "interrupted"]
    for words, ranks in group_ranks((outcome.rank, _describe_interrupt(outcome)) for outcome in interrupted).items():
        yield _red(f"{name_ranks(ranks)}: {words}", plain)


def _describe_interrupt(outcome: RankOutcome) -> str:
    if outcome.error is None:
        return "interrupted"
    return "KeyboardInterrupt" if outcome.error.line is None else f"KeyboardInterrupt at line {outcome.error.line}"


def _red(text: str, plain: bool) -> str:
    return text if plain else f"{_RED}{text}{_NORMAL}"
