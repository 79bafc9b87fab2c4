"""What the ranks do and hold, folded into one picture.

Owns: whom to ask next, what an answer changes, and every word of a `Placement`. Refuses: clocks, threads, links: `now`
comes in, and what goes out is data.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from rankbook.coordinator.states import RankState
from rankbook.protocol.queries import Looked, Sample
from rankbook.protocol.telemetry import Holding, Placement, RankPlacement, RankSave, Saves

UNRESPONSIVE_AFTER = 1.5
"""Seconds after a question that a rank has not answered."""
WAITING_AFTER = 0.25
"""Seconds in a collective after which a rank counts as waiting: one that trains is in some collective all the time."""
_RATE_OVER = 5.0
"""Seconds over which the rate of steps is taken."""
_BEHIND = 2
_BEHIND_SECONDS = 0.5
"""The ranks are not asked at the same moment: who is behind by less than this at the others' rate is not behind."""


@dataclass(frozen=True)
class RankView:
    """A rank as the cluster's state has it. `cell` is the notebook's number, `task` the cluster's own."""

    rank: int
    incarnation: int
    state: RankState
    pid: int
    device: str
    cell: int | None = None
    task: int | None = None
    returns: bool = False


@dataclass
class _Known:
    """What one process has told so far."""

    incarnation: int
    asked: float | None = None
    looked: Looked | None = None
    holdings: tuple[Holding, ...] = ()
    version: int = -1
    host: str = ""
    device_name: str = ""
    steps: deque[tuple[float, int]] = field(default_factory=deque)


class Board:
    """What is known of the ranks of the cluster `name`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[int, _Known] = {}
        self._due: tuple[int, ...] = ()

    def to_ask(self, views: Iterable[RankView]) -> dict[int, int]:
        """The ranks that can answer and owe no answer, each with the version of its holdings that is known here."""
        asked = {}
        for view in views:
            known = self._of(view)
            if view.state in (RankState.IDLE, RankState.BUSY) and known.asked is None:
                asked[view.rank] = known.version
        self._due = tuple(asked)
        return asked

    def asked(self, rank: int, now: float) -> None:
        """It was sent a question."""
        self._known[rank].asked = now

    def told(self, rank: int, looked: Looked) -> None:
        """It has answered."""
        known = self._known.get(rank)
        if known is None:
            return
        known.asked = None
        known.looked = looked
        if looked.holdings is not None:
            known.holdings, known.version = looked.holdings, looked.version
        known.host = looked.sample.host or known.host
        known.device_name = looked.sample.device_name or known.device_name
        _note_steps(known.steps, looked.sample)

    def refused(self, rank: int) -> None:
        """It could not be asked, or cannot tell."""
        known = self._known.get(rank)
        if known is not None:
            known.asked = None

    def owed(self) -> bool:
        """Whether one of the last ranks to ask has not answered yet."""
        return any(self._known[rank].asked is not None for rank in self._due)

    def placement(self, views: Iterable[RankView], *, now: float, wall: float) -> Placement:
        """All ranks, at `now` on the monotonic and `wall` on the wall clock."""
        rows = [self._row(view, now) for view in views]
        behind = lagging(rows)
        ranks = tuple(msgspec.structs.replace(row, lags=True) if row.rank in behind else row for row in rows)
        return Placement(ranks, wall, self._name)

    def saves(self, views: Iterable[RankView], *, wall: float) -> Saves:
        """The saves of all ranks."""
        found = [
            RankSave(view.rank, save)
            for view in views
            if (looked := self._of(view).looked) is not None
            for save in looked.saves
        ]
        return Saves(tuple(found), wall)

    def _of(self, view: RankView) -> _Known:
        known = self._known.get(view.rank)
        if known is None or known.incarnation != view.incarnation:
            known = self._known[view.rank] = _Known(view.incarnation)
        return known

    def _row(self, view: RankView, now: float) -> RankPlacement:
        known = self._of(view)
        sample = known.looked.sample if known.looked is not None else None
        state = _state_of(view, known, now)
        alive = state != "dead"
        fresh = sample if sample is not None and sample.cell == view.task else None
        return RankPlacement(
            rank=view.rank,
            host=known.host,
            pid=view.pid,
            device=view.device,
            device_name=known.device_name,
            state=state,
            cell=view.cell if alive else None,
            line=fresh.line if fresh is not None and alive else None,
            waits_for=fresh.waits_for if fresh is not None and alive else "",
            memory=sample.memory if sample is not None and alive else None,
            utilisation=sample.utilisation if sample is not None and alive else None,
            steps=sample.steps or 0 if sample is not None else 0,
            rate=_rate_of(known.steps) if alive else None,
            holdings=known.holdings if alive else (),
        )


def _state_of(view: RankView, known: _Known, now: float) -> str:
    if view.state is RankState.STARTING or view.returns:
        return "starting"
    if view.state not in (RankState.IDLE, RankState.BUSY):
        return "dead"
    if known.asked is not None and now - known.asked > UNRESPONSIVE_AFTER:
        return "unresponsive"
    if view.state is RankState.IDLE:
        return "idle"
    sample = known.looked.sample if known.looked is not None else None
    waits = sample is not None and sample.cell == view.task and sample.waits_for and sample.waited >= WAITING_AFTER
    return "waiting" if waits else "running"


def _note_steps(history: deque[tuple[float, int]], sample: Sample) -> None:
    if sample.steps is None:
        return
    if history and sample.steps < history[-1][1]:  # another optimizer, or a checkpoint was loaded
        history.clear()
    history.append((sample.at, sample.steps))
    while len(history) > 2 and history[1][0] < sample.at - _RATE_OVER:
        history.popleft()


def _rate_of(history: deque[tuple[float, int]]) -> float | None:
    if len(history) < 2:
        return None
    (began, first), (ended, last) = history[0], history[-1]
    return (last - first) / (ended - began) if ended > began else None


def lagging(rows: Iterable[RankPlacement]) -> set[int]:
    """The ranks that hold up the others of their cell, or have taken clearly fewer steps than those."""
    groups: dict[int, list[RankPlacement]] = {}
    for row in rows:
        if row.cell is not None and row.state in {"running", "waiting", "unresponsive"}:
            groups.setdefault(row.cell, []).append(row)
    found: set[int] = set()
    for group in groups.values():
        late = [row for row in group if row.state != "waiting"]
        if len(late) == 1 and len(group) > 1:
            found.add(late[0].rank)
        for row in group:
            others = [each for each in group if each is not row]
            if others and _is_behind(row, others):
                found.add(row.rank)
    return found


def _is_behind(row: RankPlacement, others: list[RankPlacement]) -> bool:
    steps = statistics.median(each.steps for each in others)
    rates = [each.rate for each in others if each.rate is not None]
    return steps - row.steps > max(_BEHIND, _BEHIND_SECONDS * statistics.median(rates or [0.0]))
