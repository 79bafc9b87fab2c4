"""Pauses of all ranks at the end of the same optimizer step, for checks of their numbers while a cell runs.

`choose` decides, from what the ranks have answered: it is pure. `StepHold` asks and waits.

The ranks of a training loop cannot overtake one another by more than a step, because they wait for one another in
collectives. So the end of a step that no rank has reached yet is one that all of them will reach. A request that comes
too late for a rank finds it beyond that step, and the others may already wait there: then a later step is named, and
they go on to it. Ranks that run no cell pause where they are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from rankbook.coordinator.driver import Driver
from rankbook.formatting import plural
from rankbook.protocol.numbers import HashState, MeasureDifferences, MeasureGradients
from rankbook.protocol.queries import Answer, CheckNumbers, HoldAtStep, HoldReply, NumbersReply, QueryFailed

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
