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

import msgspec

from rankbook.errors import CellError, InvalidArgument, RankLostError, cell_error, is_consequence
from rankbook.protocol.messages import Display, Done, ErrorReport, Text, TextCut
from rankbook.ranks import format_ranks, group_ranks, name_ranks

# Per rank. A loop that displays forever must not fill the notebook's memory.
_MAX_DISPLAYS = 100
# Context lines of IPython's tracebacks begin with their number, and the line of the error with an arrow.
_CONTEXT = re.compile(r" +\d+ ")
# As in `<object at 0x7f3c2a1b4d90>`, and in the C++ frames of PyTorch's messages, `f() + 0x98 (0x7f3c2a1b4d90 in …)`.
_ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]{6,}|(?<= \()0x[0-9a-f]{6,}(?= in )")
_RED = "\x1b[1;31m"
_NORMAL = "\x1b[0m"


@dataclass(frozen=True)
class RankOutcome:
    """Result of a cell on one rank.

    `stdout` and `stderr` are the text printed, from the start; `truncated` is True if output is missing from them or
    from `displays`. `displays` are the mime bundles that were displayed (the first 100, in their last state), and
    `result` is that of the last expression. `loss` describes why a rank did not answer; `still_running`: it still runs
    the cell. A rank that never ran the cell counts as interrupted.
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
    still_running: bool = False


@dataclass(frozen=True, repr=False)
class CellResult:
    """Result of one cell on all its ranks. `number` is the notebook's execution count, 0 outside a notebook.

    Iterating yields the `RankOutcome` of every rank in rank order; `result[2]` is that of rank 2.

    Example::

        result = rankbook.current().run("print(rank, end='')")
        result.stdout  # {0: '0', 1: '1'}
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
        # The worst one first: an error explains more than the interrupts that followed from it.
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

        Raises `InvalidArgument` if the rank did not take part in the cell.
        """
        text = (self[rank].result or {}).get("text/plain")
        return text if isinstance(text, str) else None

    def raise_for_status(self) -> None:
        """Raise an exception that describes the failures of all ranks; return if the cell succeeded.

        Raises `RankLostError` if a rank is lost, since that may be why others failed. Otherwise raises a `CellError`
        that is also an instance of the built-in exception type of the first failed rank, or KeyboardInterrupt if ranks
        were only interrupted.
        """
        __tracebackhide__ = True  # IPython and pytest show the caller's frames
        if self.ok:
            return
        # The text of an exception also goes to logs and into notebooks' files, so it has no colours.
        report = describe_errors(self.outcomes, plain=True)
        # A lost rank comes first, because the errors of others are often its consequence.
        lost_ranks = [outcome.rank for outcome in self.outcomes if outcome.status == "lost"]
        if lost_ranks:
            raise RankLostError(report, lost_ranks)
        if self.status == "error":
            raise cell_error(report, self.errors) if self.errors else CellError(report, {})
        raise KeyboardInterrupt(report)

    def __getitem__(self, rank: int) -> RankOutcome:
        for outcome in self.outcomes:
            if outcome.rank == rank:
                return outcome
        raise InvalidArgument(f"rank {rank} is not in this result; valid ranks are {format_ranks(self.ranks)}")

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
    """The first bytes of a stream. `remaining` more are kept."""

    __slots__ = ("chunks", "remaining", "truncated")

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining
        self.chunks: list[bytes] = []
        self.truncated = False

    def add(self, data: bytes) -> None:
        # The beginning is kept and the rest is counted as truncated. The output area shows everything.
        if len(data) > self.remaining:
            self.truncated = True
            data = data[: self.remaining]
        if data:
            self.remaining -= len(data)
            self.chunks.append(data)

    def text(self) -> str:
        """Decode the bytes. A character that the limit has cut in two is left out."""
        return codecs.utf_8_decode(b"".join(self.chunks), "replace", not self.truncated)[0]


@dataclass(eq=False)
class _RankMessages:
    """Messages of one rank so far."""

    streams: dict[str, _TextBytes] = field(default_factory=dict)
    displays: list[Display] = field(default_factory=list)
    result: Display | None = None
    done: Done | None = None
    loss: str | None = None
    still_running: bool = False
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
        self._messages: dict[int, _RankMessages] = {}
        self._built = False

    def add_output(self, rank: int, message: Text | TextCut | Display) -> None:
        """Record output of a rank. Output after `build` is not part of any result."""
        # Output of a straggler or of a background thread after the end of the cell.
        if self._built:
            return
        messages = self._messages_of(rank)
        match message:
            case Text(stream=stream, data=data):
                buffer = messages.streams.get(stream)
                if buffer is None:
                    buffer = messages.streams[stream] = _TextBytes(self._keep)
                buffer.add(data)
            case TextCut():
                messages.truncated = True
            # The result contains the last state of a display, as a notebook file does.
            case Display(kind="update"):
                messages.displays = [
                    message if _same_display(display, message) else display for display in messages.displays
                ]
                if messages.result is not None and _same_display(messages.result, message):
                    messages.result = message
            case Display(kind="result"):
                messages.result = message
            case Display() if len(messages.displays) < _MAX_DISPLAYS:
                messages.displays.append(message)
            case Display():
                messages.truncated = True

    def rank_done(self, rank: int, message: Done) -> None:
        """Record the reply of a rank."""
        self._messages_of(rank).done = message

    def rank_lost(self, rank: int, reason: str, *, still_running: bool = False) -> None:
        """Record that a rank will not answer; `reason` is a whole sentence. Ignored for a rank that has replied."""
        messages = self._messages_of(rank)
        # The first reason stays: a rank that was released as a straggler may die later.
        if messages.loss is None:
            messages.loss, messages.still_running = reason, still_running

    def fail(self, reason: str) -> None:
        """Turn the success of all ranks into an error: their results are wrong, and `reason` says why."""
        # A rank that has failed itself keeps its own error, which says more.
        text = f"{RuntimeError.__name__}: {reason}"
        report = ErrorReport(RuntimeError.__name__, reason, text, text)
        for messages in self._messages.values():
            if messages.done is not None and messages.done.status == "ok":
                messages.done = msgspec.structs.replace(messages.done, status="error", error=report)

    def build(self, seconds: float) -> CellResult:
        """Return the result; `seconds` is the duration of the whole cell."""
        outcomes = tuple(self._outcome(rank, self._messages.get(rank), seconds) for rank in self._ranks)
        # Freed, since the cell stays known for its background threads.
        self._messages, self._built = {}, True
        return CellResult(self._cell, self._number, outcomes, seconds)

    def _messages_of(self, rank: int) -> _RankMessages:
        messages = self._messages.get(rank)
        if messages is None:
            messages = self._messages[rank] = _RankMessages()
        return messages

    @staticmethod
    def _outcome(rank: int, messages: _RankMessages | None, seconds: float) -> RankOutcome:
        if messages is None:
            return RankOutcome(rank, "interrupted", 0.0)
        streams, done = messages.streams, messages.done
        return RankOutcome(
            rank=rank,
            # A rank that has answered and died later has succeeded.
            status=done.status if done is not None else "interrupted" if messages.loss is None else "lost",
            seconds=done.seconds if done is not None else seconds,
            stdout=streams["stdout"].text() if "stdout" in streams else "",
            stderr=streams["stderr"].text() if "stderr" in streams else "",
            displays=tuple(display.data for display in messages.displays),
            result=messages.result.data if messages.result is not None else None,
            error=done.error if done is not None else None,
            loss=messages.loss if done is None else None,
            still_running=messages.still_running and done is None,
            truncated=messages.truncated or (bool(streams) and any(buffer.truncated for buffer in streams.values())),
        )


def _same_display(one: Display, other: Display) -> bool:
    return one.display_id is not None and one.display_id == other.display_id


def describe_errors(outcomes: Sequence[RankOutcome], *, plain: bool = False) -> str:
    """Return the distinct errors of all ranks, with tracebacks, headed by the ranks that raised them.

    Empty without errors. The text is coloured with ANSI escapes unless `plain`. Its last line names the ranks that
    succeeded.
    """
    # The causes first: a lost rank, then errors, then the interrupts that may have followed from them.
    blocks = [*_format_losses(outcomes, plain), *_format_errors(outcomes, plain), *_format_interrupts(outcomes, plain)]
    fine = [outcome.rank for outcome in outcomes if outcome.status == "ok"]
    if blocks and fine:
        blocks.append(f"{name_ranks(fine)} finished without an error")
    return "\n".join(blocks)


def _format_losses(outcomes: Sequence[RankOutcome], plain: bool) -> Iterator[str]:
    # A rank that still runs was kept from ending by the loss of another one, the cause, which comes first.
    lost_outcomes = sorted(
        (outcome for outcome in outcomes if outcome.status == "lost"), key=lambda one: one.still_running
    )
    for loss in dict.fromkeys(outcome.loss for outcome in lost_outcomes):
        yield _red(loss or "", plain)


def _format_errors(outcomes: Sequence[RankOutcome], plain: bool) -> Iterator[str]:
    groups: dict[str, list[RankOutcome]] = {}
    for outcome in outcomes:
        if outcome.status == "error":
            groups.setdefault(_grouping_key(outcome.error.plain) if outcome.error else "", []).append(outcome)
    # Errors that are consequences of another rank's failure come last.
    for group in sorted(groups.values(), key=lambda group: is_consequence(group[0].error)):
        subject, error = name_ranks(outcome.rank for outcome in group), group[0].error
        if error is None:
            yield _red(f"{subject} failed without reporting an error", plain)
            continue
        message = f"{error.name}: {error.value}".removesuffix(": ")
        yield _red(f"{subject}: {message.splitlines()[0]}", plain)
        # Errors without a traceback, such as those of Rankbook, consist of this line alone.
        if error.plain.strip() != message.splitlines()[0]:
            yield (error.plain if plain else error.traceback).strip("\n")
        yield from _format_memory(group)


def _format_memory(group: Sequence[RankOutcome]) -> Iterator[str]:
    """Yield memory reports of ranks that ran out of memory, one per distinct report."""
    reports = group_ranks((outcome.rank, outcome.error.memory) for outcome in group if outcome.error is not None)
    for text, ranks in reports.items():
        if text:
            yield f"{name_ranks(ranks)}, {text}"


def _grouping_key(plain: str) -> str:
    """Return a traceback without the parts that differ between ranks with the same error, as a key for grouping.

    These are addresses of objects, and the context lines around an error: for a function on one line (`def f(): ...`)
    stack_data takes the first line of a set, so these vary from run to run.
    """
    lines = (" ".join(line.split()) for line in plain.splitlines() if not _CONTEXT.match(line))
    return _ADDRESS.sub("0x", "\n".join(lines))


def _format_interrupts(outcomes: Sequence[RankOutcome], plain: bool) -> Iterator[str]:
    interrupted = [outcome for outcome in outcomes if outcome.status == "interrupted"]
    for reason, ranks in group_ranks((outcome.rank, _describe_interrupt(outcome)) for outcome in interrupted).items():
        yield _red(f"{name_ranks(ranks)}: {reason}", plain)


def _describe_interrupt(outcome: RankOutcome) -> str:
    if outcome.error is None:
        return "interrupted"
    line = "" if outcome.error.line is None else f"line {outcome.error.line}"
    location = outcome.error.place or line
    return f"KeyboardInterrupt at {location}" if location else "KeyboardInterrupt"


def _red(text: str, plain: bool) -> str:
    return text if plain else f"{_RED}{text}{_NORMAL}"
