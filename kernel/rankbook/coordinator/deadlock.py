"""Deadlock and mismatch detection for collectives, from the ranks' reports.

Pure functions and one class, without I/O or clocks (`now` is passed in). The ranks report, per process group, how many
collectives they have started and which ones are still pending. From these counts follow three verdicts:

- `blocked_ranks`: ranks that wait for a peer that will never join, because it raised, died or finished its cell.
- `find_mismatch`: ranks that gave different operations, tensors, reductions or roots to the same collective of a group.
- `find_deadlock`: ranks that wait for one another in a cycle.

A collective that is merely slow is never condemned: a wait is hopeless only if the missing peer cannot start the
collective any more. A mismatch is certain, whoever waits: it is compared by number, also with the logs of ranks that
have completed the collective or have finished the cell. `CollectiveMonitor` keeps the reports and decides on the
actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Literal

from rankbook.coordinator import actions as act
from rankbook.coordinator.states import CellEntry, CellState, GracePeriods, RankEntry, RankState
from rankbook.protocol.messages import Collectives
from rankbook.protocol.telemetry import CollectiveLaunch, GroupReport, Members, decode_members
from rankbook.ranks import format_ranks, group_ranks, name_ranks

Outcome = Literal["failed", "dead", "finished"]
_INTERRUPT_HINT = "interrupt the cell (■, or %distributed interrupt) to end the wait"
NOT_SELECTED = "was not selected for this cell"
"""Reason of an inactive rank that does not take part in the cell of the waiting rank."""
# If several ranks are missing, the one that raised or died explains the wait best: the user has to mend its error.
_PRIORITY = {"failed": 0, "dead": 0, "finished": 1}


@dataclass(frozen=True)
class InactiveRank:
    """A rank that starts no more collectives in this cell.

    `reason` describes why, and `since` is the time at which this was first observed.
    """

    outcome: Outcome
    reason: str
    since: float


@dataclass(frozen=True)
class CollectiveReport:
    """A rank's report of its collectives and the time of its arrival."""

    report: Collectives
    received_at: float

    def group(self, name: str) -> GroupReport | None:
        """Return the rank's report of the group `name`; None if it has none."""
        return next((report for report in self.report.groups if report.name == name), None)


@dataclass(frozen=True)
class BlockedRank:
    """A rank that waits in `launch` of `group` for the rank `missing`, which will never join.

    `outcome` and `reason` describe what happened to `missing`; both conditions have held for `seconds`.
    """

    rank: int
    group: str
    launch: CollectiveLaunch
    line: int | str | None
    missing: int
    outcome: Outcome
    reason: str
    seconds: float


GroupKey = tuple[str, int, Members]
"""Name, generation and members of a process group; equal on all members."""


@dataclass(frozen=True)
class CollectiveMismatch:
    """Ranks that gave different things to the collective `number` of `group`.

    `text` says what every rank gave. `waiting` are the ranks that wait in the group, and `completed` those that have
    completed the collective, with a wrong result. `settled`: the youngest of the launches is older than the patience.
    """

    group: GroupKey
    number: int
    text: str
    waiting: tuple[int, ...] = ()
    completed: tuple[int, ...] = ()
    settled: bool = True

    def describe(self) -> str:
        """Return the text, with the ranks whose results are wrong."""
        if not self.completed:
            return self.text
        if len(self.completed) == 1:
            return f"{self.text}; rank {self.completed[0]} has already completed it: its result is wrong"
        return f"{self.text}; {name_ranks(self.completed)} have already completed it: their results are wrong"


def blocked_ranks(
    reports: Mapping[int, CollectiveReport], inactive_ranks: Mapping[int, InactiveRank], now: float
) -> list[BlockedRank]:
    """Return the ranks that wait for a rank in `inactive_ranks`, directly or through other blocked ranks.

    `reports` has the latest reports. A blocked rank will not start another collective either, so the ranks that wait
    for it are blocked too: the search repeats with the blocked ranks added until it finds no more.
    """
    # The waits of all ranks in one collective have one answer, which is looked up by group and number. So the time of a
    # round is proportional to the number of ranks. Every round adds at least one rank to `ended`, so the search ends.
    begun_collectives = _BegunCollectives(reports)
    waiting = {
        rank: report
        for rank, report in reports.items()
        if rank not in inactive_ranks and any(group.pending for group in report.report.groups)
    }
    blocked: dict[int, BlockedRank] = {}
    ended = dict(inactive_ranks)
    while waiting:
        missing_ranks = _MissingRanks(ended, begun_collectives)
        more = [
            verdict
            for rank, report in waiting.items()
            if (verdict := _find_blocked(rank, report, ended, missing_ranks, now)) is not None
        ]
        if not more:
            break
        for verdict in more:
            del waiting[verdict.rank]
            blocked[verdict.rank] = verdict
            # The blocked rank inherits the first cause, so that a chain of waits is reported with the error at its
            # beginning.
            ended[verdict.rank] = InactiveRank(verdict.outcome, verdict.reason, now - verdict.seconds)
    return sorted(blocked.values(), key=lambda entry: entry.rank)


# Example: ranks 0, 1 and 2 have begun 7, 7 and 6 collectives of a group, and rank 2 has raised. The waits of ranks 0
# and 1 in #7 are hopeless, because rank 2 will not begin #7. A wait in #6 is not: rank 2 has begun it, and its part may
# still complete.
def _find_blocked(
    rank: int,
    report: CollectiveReport,
    ended: Mapping[int, InactiveRank],
    missing_ranks: _MissingRanks,
    now: float,
) -> BlockedRank | None:
    for group in report.report.groups:
        for launch in group.pending:
            worst = missing_ranks.worst(rank, group, launch)
            if worst is not None:
                inactive = ended[worst]
                # The rank has measured its wait when it sent the report; the time since then is added. The wait is
                # hopeless only since the missing rank became inactive.
                seconds = min(launch.seconds + now - report.received_at, now - inactive.since)
                return BlockedRank(
                    rank, group.name, launch, report.report.line, worst, inactive.outcome, inactive.reason, seconds
                )
    return None


class _BegunCollectives:
    """Numbers of collectives that the ranks have begun, by the name of the group."""

    def __init__(self, reports: Mapping[int, CollectiveReport]) -> None:
        self._counts: dict[str, dict[int, int]] = {}
        for rank, report in reports.items():
            for view in report.report.groups:
                # A broken connection carries no data any more, even if both ranks have begun the collective.
                self._counts.setdefault(view.name, {}).setdefault(rank, 0 if view.broken else view.count)

    def missing(self, ranks: Iterable[int], group: str, launch: CollectiveLaunch) -> list[int]:
        """Return those of `ranks` that have not started that collective, so that it cannot complete yet.

        Sends and receives have no number (0) and cannot be counted: nobody has started them.
        """
        if not launch.number:
            return list(ranks)
        counts = self._counts.get(group, {})
        return [rank for rank in ranks if counts.get(rank, 0) < launch.number]


class _MissingRanks:
    """The ranks among `ended` that other ranks wait for. One answer per collective serves all ranks that wait in it."""

    def __init__(self, ended: Mapping[int, InactiveRank], begun_collectives: _BegunCollectives) -> None:
        self._ended = ended
        self._begun = begun_collectives
        self._worst: dict[_WaitKey, int | None] = {}

    def worst(self, rank: int, group: GroupReport, launch: CollectiveLaunch) -> int | None:
        """Return the ended rank that explains best why `rank`, which has not ended, waits in vain; None without one."""
        # A send or recv waits for one rank, a collective for all members.
        if launch.peer is not None:
            return self._find((launch.peer,), group.name, launch) if launch.peer != rank else None
        # A recv from any source: another sender may still exist.
        if not launch.number:
            if any(member not in self._ended for member in group.ranks if member != rank):
                return None
            return self._find(group.ranks, group.name, launch)
        key = _wait_key(group, launch)
        if key not in self._worst:
            self._worst[key] = self._find(group.ranks, group.name, launch)
        return self._worst[key]

    def _find(self, members: Iterable[int], group: str, launch: CollectiveLaunch) -> int | None:
        ended = [member for member in members if member in self._ended]
        return min(
            self._begun.missing(ended, group, launch),
            key=lambda candidate: (_PRIORITY[self._ended[candidate].outcome], self._ended[candidate].since),
            default=None,
        )


def find_mismatch(
    views: Mapping[int, GroupReport], *, patience: float = 0.0, named: bool = False
) -> CollectiveMismatch | None:
    """Return the first collective to which the members of a group gave different things; None if all match.

    `views` are the reports of one group, by rank. A mismatch is settled once the launches of all ranks are older than
    `patience` seconds, because torch may still refuse a call that has just begun; with broken connections it is at
    once. `named`: the text names the group by its ranks.
    """
    # The frequent case: the digests of the last collectives are equal, and so are all before them.
    if len(views) < 2 or _all_match(views):
        return None
    launches = {rank: _launches_of(view) for rank, view in sorted(views.items())}
    # In ascending order: the first difference is the cause, and later ones may be its consequences.
    for number in sorted({number for numbered in launches.values() for number in numbered}):
        sides = {rank: numbered[number] for rank, numbered in launches.items() if number in numbered}
        members = next(iter(views.values())).ranks
        if len({side.code for side in sides.values()}) > 1:
            details = _describe_values(sides)
        # The codes are equal, so compare the sizes of an all_to_all, which differ between ranks by nature.
        elif not (details := _describe_sizes(sides, members)):
            # Nothing differs in this collective, but the digests, which cover all collectives so far, do. The
            # difference is older than the logs.
            if len({side.digest for side in sides.values()}) > 1 or _is_unbalanced(sides, members):
                return _forgotten_mismatch(views, number)
            continue
        which = f" in the process group of {name_ranks(members)}" if named else ""
        operations = {side.op for side in sides.values()}
        heading = f"{operations.pop() if len(operations) == 1 else 'collective'} #{number}{which}: "
        late = [rank for rank, view in sorted(views.items()) if view.count < number]
        details += f"; {name_ranks(late)} {'has' if len(late) == 1 else 'have'} not begun it" if late else ""
        broken = any(view.broken for view in views.values())
        return CollectiveMismatch(
            group_key(next(iter(views.values()))),
            number,
            heading + details,
            waiting=find_waiting(views),
            completed=tuple(rank for rank in sides if _has_completed(views[rank], number)),
            settled=broken or all(side.seconds >= patience for side in sides.values()),
        )
    return None


def find_waiting(views: Mapping[int, GroupReport]) -> tuple[int, ...]:
    """Return the ranks that wait in the group, or will."""
    return tuple(rank for rank, view in sorted(views.items()) if view.pending)


def group_key(view: GroupReport) -> GroupKey:
    """Return the key under which the reports of a group's members are compared."""
    return view.name, view.generation, view.members


def _all_match(views: Mapping[int, GroupReport]) -> bool:
    """Return True if all ranks have launched the same collectives, by their digests. Otherwise they may match too."""
    latest = {rank: view.recent[-1] for rank, view in views.items() if view.recent}
    same = {(launch.number, launch.digest) for launch in latest.values()}
    return len(latest) == len(views) and len(same) == 1 and not _is_unbalanced(latest, next(iter(views.values())).ranks)


def _launches_of(view: GroupReport) -> dict[int, CollectiveLaunch]:
    """Return the collectives that are in the report, by number."""
    # Both lists, because `recent` is limited: a collective that waits for long may not be in it any more.
    return {launch.number: launch for launch in (*view.recent, *view.pending) if launch.number}


def _is_unbalanced(sides: Mapping[int, CollectiveLaunch], members: tuple[int, ...]) -> bool:
    """Return True if a size of an all_to_all, up to this collective, was not the one that the other rank expected."""
    # The sum says something only if all members are in it.
    return len(sides) == len(members) and sum(side.balance for side in sides.values()) % (1 << 32) != 0


def _will_complete(view: GroupReport, views: Mapping[int, GroupReport]) -> bool:
    """Return True if the pending collectives of `view` are on a device, and all members have launched them.

    The answer to a send or recv is not known.
    """
    return (
        any(launch.on_device for launch in view.pending)
        and all(launch.number for launch in view.pending)
        and all(
            (other := views.get(member)) is not None and not other.broken and other.count >= view.count
            for member in view.ranks
        )
    )


def _has_completed(view: GroupReport, number: int) -> bool:
    return not view.broken and not any(launch.number == number for launch in view.pending)


def _describe_values(sides: Mapping[int, CollectiveLaunch]) -> str:
    """Return what every rank gave: `rank 0 gave float32[2], rank 1 float32[3], at line 1`."""
    different_operations = len({side.op for side in sides.values()}) > 1
    different_reductions = len({side.reduction for side in sides.values()}) > 1
    positions = {side.position for side in sides.values()}
    descriptions = {}
    for rank, side in sides.items():
        parts = [side.op if different_operations else "", side.data, side.reduction if different_reductions else ""]
        if len(positions) > 1 and side.position:
            parts.append(f"at {side.position}")
        descriptions[rank] = " ".join(filter(None, parts))
    verb = " began " if different_operations else " gave "
    texts = []
    for description, ranks in group_ranks(descriptions.items()).items():
        texts.append(f"{name_ranks(ranks)}{verb}{description}")
        verb = " "
    position = positions.pop() if len(positions) == 1 else ""
    return ", ".join(texts) + (f", at {position}" if position else "")


def _describe_sizes(sides: Mapping[int, CollectiveLaunch], members: tuple[int, ...]) -> str:
    """Return the first size of an all_to_all that differs from what its receiver expects; empty if all match."""
    senders = {rank: side for rank, side in sides.items() if side.sends}
    receivers = {rank: side for rank, side in sides.items() if side.expects}
    index = {rank: number for number, rank in enumerate(members)} if senders else {}
    for sender, sent in senders.items():
        for receiver, expected in receivers.items():
            size = sent.sends[index[receiver]]
            expected_size = expected.expects[index[sender]]
            if size != expected_size:
                whom = "itself, and" if sender == receiver else f"rank {receiver}, which"
                position = f", at {sent.position}" if sent.position else ""
                return f"rank {sender} sends {size} elements to {whom} expects {expected_size}{position}"
    return ""


def _forgotten_mismatch(views: Mapping[int, GroupReport], number: int) -> CollectiveMismatch:
    """Return a mismatch that is older than the ranks' logs, which begin with collective `number`."""
    view = next(iter(views.values()))
    text = (
        f"the ranks gave different operations or tensors to a collective of {name_ranks(view.ranks)} before "
        f"#{number}; the logs do not reach back so far, and all results since then may be wrong"
    )
    return CollectiveMismatch(group_key(view), 0, text, waiting=find_waiting(views))


# Example: rank 0 waits for rank 1 in a collective of one group, and rank 1 for rank 0 in one of another group. Each of
# them waits for a rank that waits as well, so both remain. If rank 1 is computing instead, it is not among the waiting
# ranks; rank 0 then waits for none of them and is removed. So a rank that is merely late is never reported.
def find_deadlock(reports: Mapping[int, CollectiveReport], *, patience: float, since: float = 0.0) -> str | None:
    """Describe a cycle of ranks that have waited for one another for `patience` seconds; None if there is none.

    Such ranks started collectives of several groups in different orders, or receive from one another. The algorithm
    starts with all waiting ranks and repeatedly removes those that wait for none of the remaining ones.

    Sends and receives count only in reports that were received at time `since` or later. They have no numbers, so that
    the reports of other ranks do not show which of them have ended.
    """
    pending = {
        rank: [
            (group, launch)
            for group in report.report.groups
            for launch in group.pending
            if launch.number or report.received_at >= since
        ]
        for rank, report in reports.items()
    }
    # A rank that waits in several operations (asynchronous ones, or send and recv at once) needs only one of them to be
    # old enough.
    waiting = {rank: waits for rank, waits in pending.items() if any(launch.seconds >= patience for _, launch in waits)}
    begun_collectives = _BegunCollectives(reports)
    late = _late_ranks(waiting, begun_collectives)
    while stuck := [rank for rank in waiting if not _waits_for_any(rank, waiting, late)]:
        for rank in stuck:  # not deadlocked: the rank it waits for is still making progress
            del waiting[rank]
        for ranks in late.values():
            ranks.difference_update(stuck)
    if not waiting:
        return None
    lines = [f"  {_describe_wait(rank, *waiting[rank][0], reports[rank].report.line)}" for rank in sorted(waiting)]
    return (
        "\n".join(["these ranks wait for one another, and none of them can continue:", *lines, _INTERRUPT_HINT]) + "\n"
    )


_Waits = Mapping[int, list[tuple[GroupReport, CollectiveLaunch]]]
_WaitKey = tuple[str, Members, int]
_LateRanks = dict[_WaitKey, set[int]]


def _late_ranks(waiting: _Waits, begun_collectives: _BegunCollectives) -> _LateRanks:
    """Return, for every collective that a rank waits in, the waiting ranks that have not started it."""
    late: _LateRanks = {}
    for waits in waiting.values():
        for group, launch in waits:
            key = _wait_key(group, launch)
            if launch.peer is None and launch.number and key not in late:
                members = [member for member in group.ranks if member in waiting]
                late[key] = set(begun_collectives.missing(members, group.name, launch))
    return late


def _wait_key(group: GroupReport, launch: CollectiveLaunch) -> _WaitKey:
    return group.name, group.members, launch.number


def _waits_for_any(rank: int, waiting: _Waits, late: _LateRanks) -> bool:
    """Return True if another waiting rank has not started an operation that `rank` waits in."""
    for group, launch in waiting[rank]:
        if launch.peer is None:
            # `rank` is among them if its own connections are broken.
            ranks = late[_wait_key(group, launch)] if launch.number else ()
            if len(ranks) > (rank in ranks):
                return True
        # A transfer between two waiting ranks completes if the other one waits in the counterpart of it. A recv from
        # any source is a counterpart too (peer None).
        elif launch.peer in waiting:
            answers = {"send": "recv", "recv": "send"}
            if not any(
                counterpart.op == answers.get(launch.op) and counterpart.peer in (rank, None)
                for _, counterpart in waiting[launch.peer]
            ):
                return True
    return False


def _describe_wait(rank: int, group: GroupReport, launch: CollectiveLaunch, line: int | str | None) -> str:
    number = f" #{launch.number}" if launch.number else ""
    data = f" {launch.data}" if launch.data else ""
    position = f", waiting at line {line}" if line is not None else ""
    return f"rank {rank}: {launch.op}{number}{data} in the process group of {name_ranks(group.ranks)}{position}"


def format_warning(blocked_rank: BlockedRank, ranks: Iterable[int]) -> str:
    """Return the warning that `ranks` wait, as in `blocked_rank`, for a rank that has finished its cell."""
    waiting = tuple(ranks)
    position = f" at line {blocked_rank.line}" if blocked_rank.line is not None else ""
    number = f" #{blocked_rank.launch.number}" if blocked_rank.launch.number else ""
    data = f" ({blocked_rank.launch.data})" if blocked_rank.launch.data else ""
    return (
        f"{name_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in "
        f"{blocked_rank.launch.op}{number}{data}{position} for rank {blocked_rank.missing}, "
        f"which {blocked_rank.reason}; {_INTERRUPT_HINT}\n"
    )


CHECK_INTERVAL = 0.7
"""Seconds between two checks of a running cell."""
CHECK_AFTER_DONE = 0.1
"""Seconds from a rank's end of a cell to the first check of the ranks that still run it."""
_CHECK_INTERVAL_PARTLY_DONE = 0.2
"""Seconds between two checks while some ranks of a cell have ended and others have not."""
_MISMATCH_PATIENCE = 0.2
"""Seconds after the launches of a collective before a mismatch is reported: torch may still refuse one of the calls."""

_DEADLOCK_PATIENCE = 2.0
"""The same for a deadlock: a rank may compute after an asynchronous launch and wait for it later."""

_LATEST_REPORT = 2 * CHECK_INTERVAL
"""Seconds after which a rank has not answered a request: the waits of its last report may have ended."""


class CollectiveMonitor:
    """Latest reports of the ranks' collectives, and the actions that follow from them.

    Waits for a rank that raised or died are aborted after the grace period `raised`, and waits in a collective to which
    the ranks gave different things at once. Waits for a rank that finished and deadlocks are only reported to the user,
    once per cell. A mismatch in which no rank waits is reported at once, and makes the cell fail at its end.
    """

    def __init__(self, grace: GracePeriods) -> None:
        self._grace = grace
        self._reports: dict[int, CollectiveReport] = {}
        self._groups: dict[int, dict[GroupKey, GroupReport]] = {}
        self._asked: set[int] = set()
        self._broken: set[tuple[int, GroupKey]] = set()
        self._mismatches: dict[GroupKey, CollectiveMismatch] = {}
        self._failed: set[GroupKey] = set()
        self._since: dict[tuple[int, Outcome, int | None], float] = {}
        self._reported: set[tuple[object, ...]] = set()

    def record_report(self, rank: int, report: CollectiveReport) -> None:
        """Store a rank's report."""
        self._reports[rank] = report
        self.record_groups(rank, report.report.groups)

    def record_groups(self, rank: int, groups: Iterable[GroupReport]) -> None:
        """Store the state of some of a rank's groups; the rank may have finished its cell."""
        groups_of_rank = self._groups.setdefault(rank, {})
        for view in groups:
            key = group_key(view)
            if key not in groups_of_rank:  # the group was formed anew: nothing that is known of it matters any more
                for old in [old for old in groups_of_rank if old[0] == view.name]:
                    del groups_of_rank[old]
                    self._broken.discard((rank, old))
                    self._mismatches.pop(old, None)
                    self._failed.discard(old)
            groups_of_rank[key] = view

    def react(self, rank: int, ranks: Mapping[int, RankEntry], cells: Mapping[int, CellEntry]) -> list[act.Action]:
        """Return the actions that follow from the report of `rank` at once, before the next check.

        A mismatch is looked for when all ranks have answered a request, and the ranks are asked when a connection of
        `rank` has broken for no known reason, as it does when gloo notices that the tensors of two ranks differ.
        """
        if not self._running(cells):
            return []
        # Broken connections that were not seen before. The other ranks know what they have given to the same
        # collective, so all are asked.
        broken = {(rank, key) for key, view in self._groups.get(rank, {}).items() if view.broken}
        if not broken <= self._broken:
            self._broken |= broken
            return self.request(ranks)
        if rank not in self._asked:
            return []
        # Compared when the last reply is in. With some reports missing, the logs would be of different moments.
        self._asked.discard(rank)
        return [] if self._asked else self._check_mismatches(ranks, cells)

    def forget(self, rank: int) -> None:
        """Drop the report of a rank whose process has ended."""
        self._reports.pop(rank, None)
        self._groups.pop(rank, None)
        self._asked.discard(rank)

    def finished_mismatch(self, cell: CellEntry, world_size: int) -> CollectiveMismatch | None:
        """Return a mismatch between the collectives that the ranks have launched until the end of `cell`, once."""
        for key, views in self._views().items():
            if key in self._failed or set(decode_members(key[2])).isdisjoint(cell.ranks):
                continue
            mismatch = self._mismatches.get(key) or find_mismatch(views, named=len(decode_members(key[2])) < world_size)
            if mismatch is not None:
                self._failed.add(key)
                return mismatch
        return None

    def was_reported(self, mismatch: CollectiveMismatch) -> bool:
        """Return True if the user was told of the mismatch while the cell was running."""
        return mismatch.group in self._mismatches

    def _views(self) -> dict[GroupKey, dict[int, GroupReport]]:
        """Return the latest state of every group, by member."""
        views: dict[GroupKey, dict[int, GroupReport]] = {}
        for rank, groups in sorted(self._groups.items()):
            for key, view in groups.items():
                views.setdefault(key, {})[rank] = view
        return views

    def waiting_for(self, lost_ranks: AbstractSet[int]) -> set[int]:
        """Return the ranks that wait in a group with one of `lost_ranks`."""
        waiting: dict[Members, set[int]] = {}
        for rank, report in self._reports.items():
            for group in report.report.groups:
                if group.pending:
                    waiting.setdefault(group.members, set()).add(rank)
        affected = (ranks for members, ranks in waiting.items() if not lost_ranks.isdisjoint(decode_members(members)))
        return set().union(*affected)

    def only_behind(self, ranks: Iterable[int]) -> set[int]:
        """Return those of `ranks` whose devices will execute all that they have queued, given time.

        All members of the groups concerned have launched the same number of collectives. An abort would cut these
        short, and what is queued behind them, such as an optimizer step, would use partial results.
        """
        views = self._views()
        behind = set()
        for rank in ranks:
            waits = {key: view for key, view in self._groups.get(rank, {}).items() if view.pending}
            if waits and all(
                key not in self._mismatches and _will_complete(view, views[key]) for key, view in waits.items()
            ):
                behind.add(rank)
        return behind

    def check(self, now: float, ranks: Mapping[int, RankEntry], cells: Mapping[int, CellEntry]) -> list[act.Action]:
        """Return the actions for waits that cannot end, new requests for reports, and the time of the next check."""
        running = self._running(cells)
        if not running:
            self._since.clear()
            self._reported.clear()
            return []
        inactive_ranks = self._inactive_ranks(now, ranks, running)
        # A report that was sent in an earlier cell says nothing about the waits of this one.
        reports = {rank: report for rank, report in self._reports.items() if report.report.cell == ranks[rank].cell}
        actions = self._check_mismatches(ranks, cells)
        actions += self._check_blocked(now, reports, inactive_ranks, ranks, cells)
        text = find_deadlock(reports, patience=_DEADLOCK_PATIENCE, since=now - _LATEST_REPORT)
        if text is not None:
            actions += self._notify_once(running[0], text, "deadlock")
        ended = any(len(cell.running) < len(cell.ranks) for cell in running)
        return [
            *actions,
            *self.request(ranks),
            act.ScheduleCheck(_CHECK_INTERVAL_PARTLY_DONE if ended else CHECK_INTERVAL),
        ]

    @staticmethod
    def _running(cells: Mapping[int, CellEntry]) -> list[CellEntry]:
        """Return the user's cells that are running."""
        return [
            cell
            for cell in cells.values()
            if not cell.internal and cell.state in (CellState.RUNNING, CellState.ENDING) and cell.running
        ]

    def request(self, ranks: Mapping[int, RankEntry]) -> list[act.Action]:
        """Ask all living ranks for reports."""
        alive = tuple(rank for rank, entry in ranks.items() if entry.state in (RankState.IDLE, RankState.BUSY))
        self._asked = set(alive)
        return [act.RequestCollectives(alive)]

    def _check_mismatches(self, ranks: Mapping[int, RankEntry], cells: Mapping[int, CellEntry]) -> list[act.Action]:
        """Abort the waits in collectives that do not match; report those that no rank waits in."""
        actions: list[act.Action] = []
        for key, views in self._views().items():
            members = decode_members(key[2])
            mismatch = find_mismatch(views, patience=_MISMATCH_PATIENCE, named=len(members) < len(ranks))
            if mismatch is None or not mismatch.settled:
                continue
            # The cell of a waiting rank first. If none waits, that of any member.
            numbers = (ranks[rank].cell for rank in (*mismatch.waiting, *members))
            running = (cells[number] for number in numbers if number is not None and number in cells)
            cell = next((cell for cell in running if not cell.internal), None)
            if cell is None:
                continue
            first = key not in self._mismatches
            # The first one found in a group stays: what follows in it are consequences.
            mismatch = self._mismatches.setdefault(key, mismatch)
            # A rank that runs a cell and has not reported since it began may be in a group that was formed anew.
            waiting = tuple(rank for rank in find_waiting(views) if ranks[rank].cell in (None, self._cell_of(rank)))
            # A rank can have a pending collective without running a cell, if it launched one asynchronously and did not
            # wait for it. Nobody waits then, and there is nothing to abort.
            if any(ranks[rank].cell is not None for rank in waiting):
                cell.aborted = True
                actions.append(act.SendAbort(waiting, (key[0],), mismatch.describe(), mismatch=True))
            elif first and key not in self._failed:
                actions.append(act.NotifyUser(cell.cell, f"{mismatch.describe()}\n"))
        return actions

    def _cell_of(self, rank: int) -> int | None:
        """Return the cell that the rank ran at its last report."""
        return self._reports[rank].report.cell if rank in self._reports else None

    def _inactive_ranks(
        self, now: float, ranks: Mapping[int, RankEntry], running: list[CellEntry]
    ) -> dict[int, InactiveRank]:
        """Return the ranks that start no more collectives in the running cells, with the reason.

        A rank that is busy, also with another cell, may still start some. `_since` remembers when a reason was first
        observed.
        """
        inactive: dict[int, InactiveRank] = {}
        for number, rank in ranks.items():
            if rank.state is RankState.BUSY:
                continue
            # A rank may have answered several of the running cells. If it failed in one of them, that is the reason to
            # report.
            answers = [(cell.cell, cell.answers[number]) for cell in running if number in cell.answers]
            failed = next((answer for answer in answers if answer[1]), None)
            if rank.state is not RankState.IDLE:
                outcome, reason, cell = "dead", f"rank {number} {rank.loss or 'is not running'}", None
            elif failed is not None:
                outcome, reason, cell = "failed", f"rank {number} {failed[1]}", failed[0]
            else:
                outcome, reason, cell = "finished", "has finished this cell" if answers else NOT_SELECTED, None
            # The key contains the cell for a failure: the same rank may fail in several cells, at different times.
            since = self._since.setdefault((number, outcome, cell), now)  # type: ignore[arg-type]
            inactive[number] = InactiveRank(outcome, reason, since)  # type: ignore[arg-type]
        return inactive

    def _check_blocked(
        self,
        now: float,
        reports: Mapping[int, CollectiveReport],
        inactive_ranks: Mapping[int, InactiveRank],
        ranks: Mapping[int, RankEntry],
        cells: Mapping[int, CellEntry],
    ) -> list[act.Action]:
        actions: list[act.Action] = []
        broken: dict[str, list[tuple[int, str]]] = {}
        late: dict[tuple[int, str], list[BlockedRank]] = {}
        for blocked_rank in blocked_ranks(reports, inactive_ranks, now):
            number = ranks[blocked_rank.rank].cell
            cell = cells.get(number) if number is not None else None
            if cell is None:
                continue
            # A rank that has finished without an error may be used by a later cell that completes the collective. So
            # these waits are only reported, and the user decides.
            if blocked_rank.outcome == "finished":
                if blocked_rank.reason == NOT_SELECTED:
                    selected = format_ranks(cell.ranks)
                    blocked_rank = replace(  # noqa: PLW2901
                        blocked_rank, reason=f"{NOT_SELECTED} (`%%distributed --ranks {selected}`)"
                    )
                wait = (blocked_rank.rank, blocked_rank.group, blocked_rank.launch.number)
                if blocked_rank.seconds >= self._grace.finished and (cell.cell, *wait) not in self._reported:
                    self._reported.add((cell.cell, *wait))
                    same = format_warning(blocked_rank, [blocked_rank.missing])  # equal but for the waiting ranks
                    late.setdefault((cell.cell, same), []).append(blocked_rank)
            elif blocked_rank.seconds >= self._grace.raised:
                cell.aborted = True
                broken.setdefault(blocked_rank.reason, []).append((blocked_rank.rank, blocked_rank.group))
        for (key, _), late_ranks in late.items():
            actions.append(
                act.NotifyUser(key, format_warning(late_ranks[0], [blocked_rank.rank for blocked_rank in late_ranks]))
            )
        # One message per reason: the ranks report it as the cause of their error.
        for reason, waits in broken.items():
            waiting = tuple(sorted({rank for rank, _ in waits}))
            actions.append(act.SendAbort(waiting, tuple(sorted({group for _, group in waits})), reason))
        return actions

    def _notify_once(self, cell: CellEntry, text: str, *key: object) -> list[act.Action]:
        if (cell.cell, *key) in self._reported:
            return []
        self._reported.add((cell.cell, *key))
        return [act.NotifyUser(cell.cell, text)]
