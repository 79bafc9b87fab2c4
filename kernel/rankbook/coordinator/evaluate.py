"""Evaluate a Python expression on the ranks while they run."""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass

from rankbook.coordinator.driver import Driver
from rankbook.errors import BadRequest
from rankbook.protocol.queries import GetValue, QueryFailed, ValueReply

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
    """Return the stripped expression. Raises `BadRequest` for a statement, an assignment, `await` or `yield`."""
    source = source.strip()
    if not source:
        raise BadRequest("a peek needs an expression, as in loss.item()")
    try:
        tree = ast.parse(source, "<peek>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise BadRequest(f"{_shorten(source)!r} is no Python expression ({why}); a peek only reads") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.NamedExpr):
            raise BadRequest(f"{_shorten(source)!r} gives {node.target.id} a value; a peek only reads")
        if isinstance(node, ast.Await | ast.Yield | ast.YieldFrom):
            raise BadRequest(f"{_shorten(source)!r} waits for something; a peek only reads")
    return source


def peek(driver: Driver, ranks: Collection[int], source: str, *, timeout: float) -> list[Peeked]:
    """Evaluate the expression on `ranks`, for at most `timeout` seconds. Raises `BadRequest`."""
    source = check_expression(source)
    answers = driver.presence.questions.wait_answers(
        [rank for rank in ranks if rank in driver.answering()],
        lambda token, _: GetValue(token, source, timeout),
        timeout=timeout + _GRACE,
        there=driver.answering,
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
            case _ if rank in driver.answering():
                values.append(Peeked(rank, "", f"no answer within {timeout + _GRACE:g} s; %distributed status", ""))
            case _:
                values.append(Peeked(rank, "", "not running; %distributed status tells why", ""))
    return values


def _shorten(source: str) -> str:
    return source if len(source) <= 60 else f"{source[:57]}…"
