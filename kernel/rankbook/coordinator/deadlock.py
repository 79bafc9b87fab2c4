"""Deadlock and mismatch detection for collectives, from the ranks' reports.

Pure functions and one class, without I/O or clocks (`now` is passed in). The ranks report, per process group, how many
collectives they have started and which ones are still pending. From these counts follow three verdicts:

- `blocked_ranks`: ranks that wait for a peer that will never join, because it raised, died or finished its cell.
- `find_mismatches`: ranks that started different operations as the same collective of a group.
- `find_deadlock`: ranks that wait for one another in a cycle.

A collective that is merely slow is never condemned: a wait is hopeless only if the missing peer cannot start the
collective any more. `CollectiveMonitor` keeps the reports and decides on the actions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from rankbook.coordinator import actions as act
from rankbook.coordinator.grace import GracePeriods
from rankbook.coordinator.states import CellEntry, CellState, RankEntry, RankState
from rankbook.protocol.messages import Collectives
from rankbook.protocol.telemetry import CollectiveLaunch, GroupReport
from rankbook.ranks import group_ranks, name_ranks

How = Literal["failed", "dead", "finished"]
_WAY_OUT = "interrupt the cell (■, or %distributed interrupt) to end the wait"
_RANK = {"failed": 0, "dead": 0, "finished": 1}


@dataclass(frozen=True)
class InactiveRank:
    """A rank that starts no more collectives in this cell.

    `words` describe the reason, and `since` is the time at which it was first observed.
    """

    how: How
    words: str
    since: float


@dataclass(frozen=True)
class CollectiveReport:
    """A rank's report of its collectives and the time of its arrival."""

    report: Collectives
    at: float

    def group(self, name: str) -> GroupReport | None:
        """Return the rank's report of the group `name`; None if it has none."""
        return next((report for report in self.report.groups if report.name == name), None)


@dataclass(frozen=True)
class BlockedRank:
    """A rank that waits in `launch` of `group` for the rank `missing`, which will never join.

    `how` and `words` describe what happened to `missing`; both conditions have held for `seconds`.
    """

    rank: int
    group: str
    launch: CollectiveLaunch
    line: int | None
    missing: int
    how: How
    words: str
    seconds: float


@dataclass(frozen=True)
class CollectiveMismatch:
    """Ranks that started different operations as the same collective. `text` describes what they did."""

    group: str
    number: int
    text: str


def blocked_ranks(
    told: Mapping[int, CollectiveReport], out: Mapping[int, InactiveRank], now: float
) -> list[BlockedRank]:
    """Return the ranks that wait for a rank in `out`, directly or through other blocked ranks.

    `told` has the latest reports. A blocked rank will not start another collective either, so the ranks that wait for
    it are blocked too: the search repeats with the blocked ranks added until it finds no more.
    """
    blocked: dict[int, BlockedRank] = {}
    ended = dict(out)
    while True:
        more = [
            verdict
            for rank, report in told.items()
            if rank not in ended and (verdict := _doom_of(rank, report, ended, told, now)) is not None
        ]
        if not more:
            return sorted(blocked.values(), key=lambda entry: entry.rank)
        for verdict in more:
            blocked[verdict.rank] = verdict
            ended[verdict.rank] = InactiveRank(verdict.how, verdict.words, now - verdict.seconds)


def _doom_of(
    rank: int,
    own: CollectiveReport,
    ended: Mapping[int, InactiveRank],
    told: Mapping[int, CollectiveReport],
    now: float,
) -> BlockedRank | None:
    for group in own.report.groups:
        for launch in group.pending:
            members = group.ranks if launch.peer is None else (launch.peer,)
            others = [member for member in members if member != rank]
            missing = [
                member for member in others if member in ended and not _has_begun(told.get(member), group.name, launch)
            ]
            if not launch.number and len(missing) < len(others):
                continue  # recv from any source: another sender may still exist
            if missing:
                worst = min(missing, key=lambda candidate: (_RANK[ended[candidate].how], ended[candidate].since))
                inactive = ended[worst]
                seconds = min(launch.seconds + now - own.at, now - inactive.since)
                return BlockedRank(
                    rank, group.name, launch, own.report.line, worst, inactive.how, inactive.words, seconds
                )
    return None


def _has_begun(other: CollectiveReport | None, group: str, launch: CollectiveLaunch) -> bool:
    """Return True if the rank has started that collective, which therefore may still complete.

    Sends and receives have no number (0) and cannot be counted.
    """
    if other is None or not launch.number:
        return False
    view = other.group(group)
    return view is not None and view.count >= launch.number and not view.broken


def find_mismatches(told: Mapping[int, CollectiveReport], *, patience: float) -> Iterator[CollectiveMismatch]:
    """Yield the collectives in which ranks have waited for `patience` seconds while others started another operation.

    Operations match if their names are equal and, where all ranks must pass the same data, also dtype and shape.
    """
    seen: set[tuple[str, int]] = set()
    for report in told.values():
        for group in report.report.groups:
            for launch in group.pending:
                key = (group.name, launch.number)
                if launch.number and launch.seconds >= patience and key not in seen:
                    seen.add(key)
                    sides = _sides(group, launch.number, told)
                    if len({_likeness(side) for side, _, _ in sides}) > 1:
                        yield CollectiveMismatch(group.name, launch.number, _tell(group, launch.number, sides))


def find_deadlock(told: Mapping[int, CollectiveReport], *, patience: float) -> str | None:
    """Describe a cycle of ranks that have waited for one another for `patience` seconds; None if there is none.

    Such ranks started collectives of several groups in different orders, or receive from one another. The algorithm
    starts with all waiting ranks and repeatedly removes those that wait for none of the remaining ones.
    """
    waiting = {
        rank: [(group, launch) for group in report.report.groups for launch in group.pending]
        for rank, report in told.items()
        if any(launch.seconds >= patience for group in report.report.groups for launch in group.pending)
    }
    while stuck := [rank for rank in waiting if not any(_waits_for(rank, other, waiting, told) for other in waiting)]:
        for rank in stuck:  # not deadlocked: the rank it waits for is still making progress
            del waiting[rank]
    if not waiting:
        return None
    lines = [f"  {_tell_wait(rank, *waiting[rank][0], told[rank].report.line)}" for rank in sorted(waiting)]
    return "\n".join(["these ranks wait for one another, and none of them can go on:", *lines, _WAY_OUT]) + "\n"


def _waits_for(
    rank: int,
    other: int,
    waiting: Mapping[int, list[tuple[GroupReport, CollectiveLaunch]]],
    told: Mapping[int, CollectiveReport],
) -> bool:
    """Return True if the waiting rank `other` has not started the operation that `rank` waits in."""
    for group, launch in waiting[rank]:
        if launch.peer is None:
            if (
                launch.number
                and other != rank
                and other in group.ranks
                and not _has_begun(told[other], group.name, launch)
            ):
                return True
        elif launch.peer == other:
            answers = {"send": "recv", "recv": "send"}
            if not any(
                counterpart.op == answers.get(launch.op) and counterpart.peer in (rank, None)
                for _, counterpart in waiting[other]
            ):
                return True
    return False


def _tell_wait(rank: int, group: GroupReport, launch: CollectiveLaunch, line: int | None) -> str:
    number = f" #{launch.number}" if launch.number else ""
    data = f" {launch.data}" if launch.data else ""
    where = f", waiting at line {line}" if line is not None else ""
    return f"rank {rank}: {launch.op}{number}{data} of the group of {name_ranks(group.ranks)}{where}"


def _sides(
    group: GroupReport, number: int, told: Mapping[int, CollectiveReport]
) -> list[tuple[CollectiveLaunch, int, int | None]]:
    sides = []
    for rank in group.ranks:
        view = told[rank].group(group.name) if rank in told else None
        pending = () if view is None else view.pending
        recent = () if view is None else view.recent
        launch = next((candidate for candidate in (*pending, *recent) if candidate.number == number), None)
        if launch is not None:
            waits = any(candidate.number == number for candidate in pending)
            sides.append((launch, rank, told[rank].report.line if waits else None))
    return sides


def _likeness(launch: CollectiveLaunch) -> tuple[str, str]:
    return launch.op, launch.data if launch.alike else ""


def _describe_side(launch: CollectiveLaunch, line: int | None) -> str:
    operation = launch.op + (f" {launch.data}" if launch.data else "")
    return f"{operation}, waiting at line {line}" if line is not None else f"{operation}, and has gone on"


def _tell(group: GroupReport, number: int, sides: list[tuple[CollectiveLaunch, int, int | None]]) -> str:
    groups = group_ranks((rank, _describe_side(launch, line)) for launch, rank, line in sides)
    lines = [f"  {name_ranks(ranks)}: {side}" for side, ranks in groups.items()]
    which = f"the group of {name_ranks(group.ranks)}"
    head = f"the ranks disagree at collective #{number} of {which}, and none of them can go on:"
    return "\n".join([head, *lines, _WAY_OUT]) + "\n"


def format_warning(doom: BlockedRank, ranks: Iterable[int]) -> str:
    """Return the warning that `ranks` wait, as in `doom`, for a rank that has finished its cell."""
    waiting = tuple(ranks)
    where = f" at line {doom.line}" if doom.line is not None else ""
    number = f" #{doom.launch.number}" if doom.launch.number else ""
    data = f" ({doom.launch.data})" if doom.launch.data else ""
    return (
        f"{name_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in {doom.launch.op}{number}{data}{where} "
        f"for rank {doom.missing}, "
        f"which {doom.words}; {_WAY_OUT}\n"
    )


LOOK_EVERY = 0.7
"""Seconds between two checks of a running cell."""
LOOK_AFTER_END = 0.1
"""Seconds from a rank's end of a cell to the first check of the ranks that still run it."""
_LOOK_AGAIN = 0.2
"""Seconds between two checks while some ranks of a cell have ended and others have not."""
_DISAGREE_FOR = 0.5
"""Seconds of waiting in different collectives before a mismatch is reported: the slower rank may still catch up."""

_DEADLOCKED_FOR = 2.0
"""The same for a deadlock: a rank may compute after an asynchronous launch and wait for it later."""


class CollectiveMonitor:
    """Latest reports of the ranks' collectives, and the actions that follow from them.

    Waits for a rank that raised or died are aborted after the grace period `raised`. Waits for a rank that finished,
    mismatches and deadlocks are only reported to the user, once per cell.
    """

    def __init__(self, grace: GracePeriods) -> None:
        self._grace = grace
        self._told: dict[int, CollectiveReport] = {}
        self._since: dict[tuple[int, How, int | None], float] = {}
        self._said: set[tuple[object, ...]] = set()

    def hear(self, rank: int, told: CollectiveReport) -> None:
        """Store a rank's report."""
        self._told[rank] = told

    def forget(self, rank: int) -> None:
        """Drop the report of a rank whose process has ended."""
        self._told.pop(rank, None)

    def waiting_for(self, lost: Collection[int]) -> set[int]:
        """Return the ranks that wait in a group of which one of `lost` is a member."""
        return {
            rank
            for rank, report in self._told.items()
            for group in report.report.groups
            if group.pending and not set(group.ranks).isdisjoint(lost)
        }

    def look(self, now: float, ranks: Mapping[int, RankEntry], cells: Mapping[int, CellEntry]) -> list[act.Action]:
        """Return the actions for waits that cannot end, new requests for reports, and the time of the next check."""
        running = [
            cell
            for cell in cells.values()
            if not cell.internal and cell.state in (CellState.RUNNING, CellState.ENDING) and cell.running
        ]
        if not running:
            self._since.clear()
            self._said.clear()
            return []
        out = self._out(now, ranks, running)
        reports = {rank: report for rank, report in self._told.items() if report.report.cell == ranks[rank].cell}
        actions = self._judge(now, reports, out, ranks, cells)
        for mismatch in find_mismatches(reports, patience=_DISAGREE_FOR):
            actions += self._say(running[0], mismatch.text, mismatch.group, mismatch.number)
        if (text := find_deadlock(reports, patience=_DEADLOCKED_FOR)) is not None:
            actions += self._say(running[0], text, "deadlock")
        alive = tuple(rank for rank, entry in ranks.items() if entry.state in (RankState.IDLE, RankState.BUSY))
        ended = any(len(cell.running) < len(cell.ranks) for cell in running)
        return [*actions, act.RequestCollectives(alive), act.ScheduleCheck(_LOOK_AGAIN if ended else LOOK_EVERY)]

    def _out(self, now: float, ranks: Mapping[int, RankEntry], running: list[CellEntry]) -> dict[int, InactiveRank]:
        """Return the ranks that start no more collectives in the running cells, with the reason.

        A rank that is busy, also with another cell, may still start some. `_since` remembers when a reason was first
        observed.
        """
        inactive: dict[int, InactiveRank] = {}
        for number, rank in ranks.items():
            if rank.state is RankState.BUSY:
                continue
            answers = [(cell.cell, cell.answers[number]) for cell in running if number in cell.answers]
            failed = next((answer for answer in answers if answer[1]), None)
            if rank.state is not RankState.IDLE:
                how, reason, cell = "dead", f"rank {number} {rank.loss or 'is not there'}", None
            elif failed is not None:
                how, reason, cell = "failed", f"rank {number} {failed[1]}", failed[0]
            else:
                how, reason, cell = "finished", f"has {'finished' if answers else 'not begun'} this cell", None
            since = self._since.setdefault((number, how, cell), now)  # type: ignore[arg-type]
            inactive[number] = InactiveRank(how, reason, since)  # type: ignore[arg-type]
        return inactive

    def _judge(
        self,
        now: float,
        told: Mapping[int, CollectiveReport],
        out: Mapping[int, InactiveRank],
        ranks: Mapping[int, RankEntry],
        cells: Mapping[int, CellEntry],
    ) -> list[act.Action]:
        actions: list[act.Action] = []
        broken: dict[str, list[tuple[int, str]]] = {}
        late: dict[tuple[int, str], list[BlockedRank]] = {}
        for doom in blocked_ranks(told, out, now):
            number = ranks[doom.rank].cell
            cell = cells.get(number) if number is not None else None
            if cell is None:
                continue
            if doom.how == "finished":
                wait = (doom.rank, doom.group, doom.launch.number)
                if doom.seconds >= self._grace.finished and (cell.cell, *wait) not in self._said:
                    self._said.add((cell.cell, *wait))
                    same = format_warning(doom, [doom.missing])  # equal but for the waiting ranks
                    late.setdefault((cell.cell, same), []).append(doom)
            elif doom.seconds >= self._grace.raised:
                cell.aborted = True
                broken.setdefault(doom.words, []).append((doom.rank, doom.group))
        for (key, _), dooms in late.items():
            actions.append(act.NotifyUser(key, format_warning(dooms[0], [doom.rank for doom in dooms])))
        for reason, where in broken.items():
            waiting = tuple(sorted({rank for rank, _ in where}))
            actions.append(act.SendAbort(waiting, tuple(sorted({group for _, group in where})), reason))
        return actions

    def _say(self, cell: CellEntry, text: str, *what: object) -> list[act.Action]:
        if (cell.cell, *what) in self._said:
            return []
        self._said.add((cell.cell, *what))
        return [act.NotifyUser(cell.cell, text)]
