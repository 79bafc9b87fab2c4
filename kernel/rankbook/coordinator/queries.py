"""Queries to ranks that run a cell: expressions, completion, inspection, and pauses at one step.

`peek` evaluates an expression, and `CompletionClient` completes and inspects names, with a strict timeout.

`StepHold` pauses all ranks at the end of the same optimizer step, for checks of their numbers while a cell runs.
`choose` decides, from what the ranks have answered: it is pure. The ranks of a training loop cannot overtake one
another by more than a step, because they wait for one another in collectives. So the end of a step that no rank has
reached yet is one that all of them will reach. A request that comes too late for a rank finds it beyond that step, and
the others may already wait there: then a later step is named, and they go on to it. Ranks that run no cell pause
where they are.
"""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

import msgspec

from rankbook.coordinator.cluster_processes import ClusterProcesses
from rankbook.coordinator.driver import Driver
from rankbook.errors import InvalidArgument, RankbookError
from rankbook.formatting import plural
from rankbook.protocol.queries import (
    Answer,
    CheckNumbers,
    Completion,
    CompletionsReply,
    GetCompletions,
    GetInspection,
    GetValue,
    HashState,
    Hint,
    HoldAtStep,
    HoldReply,
    InspectionReply,
    MeasureDifferences,
    MeasureGradients,
    NumbersReply,
    QueryFailed,
    ValueReply,
)

_GRACE = 1.0
"""Seconds that a rank has to report a timeout."""


@dataclass(frozen=True)
class Peeked:
    """Value of an expression on `rank` as IPython shows it, or the error `trouble`. `cell` was running there."""

    rank: int
    text: str
    trouble: str
    cell: str


def check_expression(source: str) -> str:
    """Return the stripped expression. Raises `InvalidArgument` for a statement, an assignment, `await` or `yield`."""
    source = source.strip()
    if not source:
        raise InvalidArgument("peek expects an expression, such as loss.item()")
    # Parsed here too, although the rank compiles it again: a mistake is reported at once, and once for all ranks.
    try:
        tree = ast.parse(source, "<peek>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise InvalidArgument(f"{_shorten(source)!r} is not a Python expression ({why}); peek is read-only") from None
    # An assignment expression would change nothing on the rank, where the expression sees a copy of the variables. It
    # would only look as if it did.
    for node in ast.walk(tree):
        if isinstance(node, ast.NamedExpr):
            raise InvalidArgument(f"{_shorten(source)!r} assigns to {node.target.id}; peek is read-only")
        if isinstance(node, ast.Await | ast.Yield | ast.YieldFrom):
            raise InvalidArgument(f"{_shorten(source)!r} contains await or yield; peek is read-only")
    return source


def peek(driver: Driver, ranks: Collection[int], source: str, *, timeout: float) -> list[Peeked]:
    """Evaluate the expression on `ranks`, for at most `timeout` seconds. Raises `InvalidArgument`."""
    source = check_expression(source)
    answers = driver.liveness.queries.wait_answers(
        [rank for rank in ranks if rank in driver.live_ranks()],
        lambda token, _: GetValue(token, source, timeout),
        # The rank itself ends the evaluation after `timeout` and reports it. The margin lets this report arrive.
        timeout=timeout + _GRACE,
        live_ranks=driver.live_ranks,
    )
    # A negative number is an internal task, which the user does not know.
    labels = {entry.cell: entry.label if entry.number >= 0 else "" for entry in driver.cells()}
    values = []
    for rank in ranks:
        match answers.get(rank):
            case ValueReply(text=text, trouble=trouble, cell=cell):
                values.append(Peeked(rank, text, trouble, "" if cell is None else labels.get(cell, "a cell")))
            case QueryFailed(trouble=trouble):
                values.append(Peeked(rank, "", trouble, ""))
            # The answer is missing although the rank lives: C code that holds the GIL keeps it from answering.
            case _ if rank in driver.live_ranks():
                values.append(Peeked(rank, "", f"no reply within {timeout + _GRACE:g} s; see %distributed status", ""))
            case _:
                values.append(Peeked(rank, "", "not running; %distributed status shows the reason", ""))
    return values


def _shorten(source: str) -> str:
    return source if len(source) <= 60 else f"{source[:57]}…"


COMPLETION_TIMEOUT = 0.09
"""Seconds: the front end should show a completion within 0.1 s, and needs part of that itself."""


class CompletionClient:
    """Request completions and inspections from the ranks of `processes`. Any thread but the driver's."""

    def __init__(self, processes: ClusterProcesses) -> None:
        self._processes = processes

    def complete(
        self, text: str, cursor: int, ranks: tuple[int, ...], *, variables: bool, timeout: float
    ) -> tuple[int, tuple[Completion, ...]]:
        """See `Cluster.complete`."""
        answer = self._ask(GetCompletions(0, text[:cursor], cursor, variables), ranks, timeout)
        return (answer.start, answer.completions) if isinstance(answer, CompletionsReply) else (cursor, ())

    def inspect(self, text: str, cursor: int, ranks: tuple[int, ...], *, source: bool, timeout: float) -> str:
        """See `Cluster.inspect`."""
        answer = self._ask(GetInspection(0, text, cursor, source), ranks, timeout)
        return answer.text if isinstance(answer, InspectionReply) else ""

    def _ask(self, question: Hint, ranks: tuple[int, ...], timeout: float) -> Answer | None:
        """Return the reply of the first of `ranks` that can reply; None if it does not in time."""
        try:
            driver = self._processes.driver
        except RankbookError:  # the ranks are stopped
            return None
        live_ranks = driver.live_ranks()
        chosen = next((rank for rank in ranks if rank in live_ranks), None)
        # No rank can reply; the front end shows its own completions only.
        if chosen is None:
            return None
        answers = driver.liveness.queries.wait_answers(
            (chosen,),
            lambda token, _: msgspec.structs.replace(question, token=token),
            timeout=timeout,
            live_ranks=driver.live_ranks,
        )
        return answers.get(chosen)


POLL_INTERVAL = 0.01
"""Seconds between two requests, while the ranks go on to the step."""
_REPLY_TIMEOUT = 1.0
_MAX_MARGIN = 64
"""Steps, at most, from the furthest rank to the step that is named."""
_LIMIT_AFTER = 30.0
"""Seconds that a rank pauses beyond the limit, for the checks. The coordinator normally ends the pause."""


@dataclass(frozen=True)
class Target:
    """Step at whose end the ranks pause. See `HoldAtStep`. `margin` is its distance from the furthest rank."""

    clock: str = ""
    position: int = 0
    margin: int = 1


def choose(replies: Mapping[int, HoldReply], target: Target, idle_first: Collection[int]) -> Target | None:
    """Return the target to ask for next, which may be the same; None if the ranks pause at one step.

    `idle_first` are the ranks that ran no cell at the beginning. Others that are between two cells have ended theirs:
    they do not go on, so the running ranks have to reach the end of their cells, too, or a step at which they are as
    far. That is why they are only accepted together.
    """
    if all(reply.holds and reply.idle for reply in replies.values()):
        return None
    running = {rank: reply for rank, reply in replies.items() if not (reply.holds and reply.idle)}
    if not target.clock:
        counted = all(reply.steps is not None for reply in running.values())
        # Whether the collectives advance from step to step, only two ends can tell.
        if all(reply.ends >= (1 if counted else 2) for reply in running.values()):
            return _first_target(list(running.values()), counted=counted)
        return target
    ended = [rank for rank in replies if rank not in running and rank not in idle_first]
    positions = [position for reply in running.values() if (position := _position(reply, target.clock)) is not None]
    if all(reply.holds for reply in running.values()):
        same = target.clock == "any" or len(set(positions)) == 1
        if same and not ended:
            return None
        return _later(target, positions)
    passed = any(
        not reply.holds and (position := _position(reply, target.clock)) is not None and position >= target.position
        for reply in running.values()
    )
    return _later(target, positions) if passed else target


def _first_target(running: list[HoldReply], *, counted: bool) -> Target:
    clock = "steps" if counted else "collectives"
    positions = [position for reply in running if (position := _position(reply, clock)) is not None]
    if len(positions) < len(running):
        return Target("any")  # ranks that train on their own: no step of one rank is that of another
    return _later(Target(clock), positions)


def _later(target: Target, positions: list[int]) -> Target:
    position = max([target.position, *positions]) + target.margin
    return Target(target.clock, position, min(2 * target.margin, _MAX_MARGIN))


def _position(reply: HoldReply, clock: str) -> int | None:
    return reply.steps if clock == "steps" else reply.collectives


class StepHold:
    """A pause of `ranks`. A context manager: at its end, all of them continue.

    `held` are the ranks that pause, and `unanswered` says why others do not. `place` describes the step.
    """

    def __init__(self, driver: Driver, ranks: tuple[int, ...], timeout: float) -> None:
        self._driver = driver
        self._ranks = ranks
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._idle_first = [rank for rank in ranks if driver.cell_of(rank) is None]
        self._replies: dict[int, HoldReply] = {}
        self.unanswered: dict[int, str] = {}
        self.place = ""

    @property
    def held(self) -> tuple[int, ...]:
        """Return the ranks that pause."""
        return tuple(rank for rank in self._ranks if rank not in self.unanswered)

    def __enter__(self) -> Self:
        """Wait until the ranks pause, or the time is over."""
        try:
            self._wait()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Let the ranks continue."""
        self._release()

    def _wait(self) -> None:
        target: Target | None = Target()
        pause = threading.Event()
        while target is not None and (remaining := self._deadline - time.monotonic()) > 0:
            current = target
            answers = self._ask(
                lambda token, _, current=current, seconds=remaining: HoldAtStep(
                    token, current.clock, current.position, seconds + _LIMIT_AFTER
                ),
                min(_REPLY_TIMEOUT, remaining),
            )
            replies = {rank: answer for rank, answer in answers.items() if isinstance(answer, HoldReply)}
            # Replies may be missing because the time is over. What the ranks have said before still holds then.
            self._replies |= replies
            live = [rank for rank in self._ranks if rank in self._driver.live_ranks()]
            if not live:
                break
            if not all(rank in replies for rank in live):
                continue  # the query has waited for the answer already
            target = choose({rank: replies[rank] for rank in live}, current, self._idle_first)
            if target == current:
                pause.wait(POLL_INTERVAL)
        self._describe()

    def _describe(self) -> None:
        steps = {reply.steps for reply in self._replies.values() if reply.holds and not reply.idle}
        ended = len(steps) == 1 and (step := next(iter(steps))) is not None
        if ended:
            self.place = f"at the end of optimizer step {step}"
        elif steps:
            self.place = "at the end of an optimizer step"
        for rank in self._ranks:
            reply = self._replies.get(rank)
            if reply is not None and reply.holds:
                continue
            cell = self._driver.cell_of(rank)
            doing = f"it is running {cell.label}" if cell is not None else "it is busy"
            if rank not in self._driver.live_ranks():
                reason = "it is not running"
            elif reply is None:
                reason = f"it has not replied within {self._timeout:g} s"
            else:
                waits = self._describe_progress(reply)
                reason = f"{doing}, and has reached {waits} within {self._timeout:g} s"
            self.unanswered[rank] = reason

    def _describe_progress(self, reply: HoldReply) -> str:
        if not reply.ends:
            return "no end of an optimizer step"
        done = f", the last one after step {reply.steps}" if reply.steps is not None else ""
        return f"{plural(reply.ends, 'end of a step', 'ends of steps')}, but not together with the other ranks{done}"

    def _release(self) -> None:
        self._ask(lambda token, _: HoldAtStep(token, "", 0, 0.0), 0.0)

    def check(
        self, make: HashState | MeasureDifferences | MeasureGradients, timeout: float
    ) -> tuple[dict[int, NumbersReply], dict[int, str]]:
        """Run a check on the ranks that pause. Return their replies, and the reasons of those that have not replied."""
        answers = self._ask(lambda token, _: CheckNumbers(token, make), timeout, self.held)
        replies = {rank: answer for rank, answer in sorted(answers.items()) if isinstance(answer, NumbersReply)}
        reasons = {
            rank: answer.trouble if isinstance(answer, QueryFailed) else f"the check has not ended in {timeout:g} s"
            for rank in self.held
            if rank not in replies
            for answer in (answers.get(rank),)
        }
        return replies, reasons

    def _ask(self, make: object, timeout: float, ranks: Collection[int] | None = None) -> dict[int, Answer]:
        return self._driver.liveness.queries.wait_answers(
            self._ranks if ranks is None else ranks,
            make,  # type: ignore[arg-type]
            timeout=timeout,
            live_ranks=self._driver.live_ranks,
        )
