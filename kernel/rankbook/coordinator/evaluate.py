"""Evaluate expressions on the ranks while they run; complete and inspect names there, with a strict timeout."""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from rankbook.coordinator.cluster_processes import ClusterProcesses
from rankbook.coordinator.driver import Driver
from rankbook.errors import InvalidArgument, RankbookError
from rankbook.protocol.queries import (
    Answer,
    Completion,
    CompletionsReply,
    GetCompletions,
    GetInspection,
    GetValue,
    Hint,
    InspectionReply,
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
