"""Compare the deadlock detection with its rules applied rank by rank, on random reports of a few ranks."""

from __future__ import annotations

import random

import pytest

from rankbook.coordinator.deadlock import (
    CollectiveReport,
    InactiveRank,
    blocked_ranks,
    find_deadlock,
)
from rankbook.protocol.messages import Collectives
from rankbook.protocol.telemetry import CollectiveLaunch, GroupReport, encode_members

NOW = 100.0
GROUPS = {"all": (0, 1, 2, 3, 4), "left": (0, 1, 2), "right": (2, 4, 3), "pair": (1, 3)}


def random_launch(random: random.Random, rank: int, members: tuple[int, ...], count: int) -> CollectiveLaunch:
    kind = random.choice(["collective", "collective", "collective", "transfer", "any"])
    number = max(1, count - random.randint(0, 1)) if kind == "collective" else 0
    op = "all_reduce" if number else "recv" if kind == "any" else random.choice(["send", "recv"])
    peer = random.choice([member for member in members if member != rank]) if kind == "transfer" else None
    return CollectiveLaunch(number=number, op=op, data="float32[4]", peer=peer, seconds=random.choice([0.1, 3.0, 9.0]))


def random_report(random: random.Random, rank: int) -> CollectiveReport:
    groups = []
    for name, members in GROUPS.items():
        if rank in members and random.random() < 0.8:
            count = random.randint(0, 2)
            pending = tuple(random_launch(random, rank, members, count) for _ in range(random.choice([0, 0, 1, 1, 2])))
            broken = random.random() < 0.1
            groups.append(
                GroupReport(
                    name=name, members=encode_members(members), count=count, pending=pending, recent=(), broken=broken
                )
            )
    return CollectiveReport(Collectives(token=0, cell=1, line=rank, groups=tuple(groups)), NOW)


def has_begun(reports: dict[int, CollectiveReport], rank: int, name: str, launch: CollectiveLaunch) -> bool:
    view = reports[rank].group(name) if rank in reports else None
    return bool(launch.number) and view is not None and view.count >= launch.number and not view.broken


def waits(reports: dict[int, CollectiveReport], rank: int) -> list[tuple[GroupReport, CollectiveLaunch]]:
    return [(group, launch) for group in reports[rank].report.groups for launch in group.pending]


def missing_in(reports, ended, rank, group, launch) -> set[int]:
    """Return the ended ranks that this wait needs, if it needs one of them for certain."""
    peers = {member for member in group.ranks if member != rank} if launch.peer is None else {launch.peer}
    missing = {other for other in peers & set(ended) if not has_begun(reports, other, group.name, launch)}
    return missing if launch.number or missing == peers else set()


def blocked_by_definition(reports, inactive) -> dict[int, tuple[str, CollectiveLaunch, int, str]]:
    """Return for every blocked rank its group, launch and missing rank, and the reason, found round by round."""
    ended = dict(inactive)
    blocked = {}
    while True:
        newly_blocked = {}
        for rank in set(reports) - set(ended):
            for group, launch in waits(reports, rank):
                if rank not in newly_blocked and (missing := missing_in(reports, ended, rank, group, launch)):
                    order = sorted(missing, key=group.ranks.index)
                    worst = min(order, key=lambda other: (ended[other].outcome == "finished", ended[other].since))
                    newly_blocked[rank] = (group.name, launch, worst, ended[worst].reason)
        if not newly_blocked:
            return blocked
        blocked.update(newly_blocked)
        for rank, (_, launch, worst, reason) in newly_blocked.items():
            since = NOW - min(launch.seconds, NOW - ended[worst].since)
            ended[rank] = InactiveRank(ended[worst].outcome, reason, since)


def deadlocked_by_definition(reports, patience: float) -> set[int]:
    """Return the largest set of old enough waits in which every rank waits for another one of the set."""
    ranks = {rank for rank in reports if any(launch.seconds >= patience for _, launch in waits(reports, rank))}

    def waits_for(rank: int, other: int) -> bool:
        for group, launch in waits(reports, rank):
            if launch.peer is None:
                is_late = other != rank and other in group.ranks and not has_begun(reports, other, group.name, launch)
                if launch.number and is_late:
                    return True
            elif launch.peer == other:
                counterpart = {"send": "recv", "recv": "send"}[launch.op]
                answers = [answer for _, answer in waits(reports, other) if answer.op == counterpart]
                if not any(answer.peer in (rank, None) for answer in answers):
                    return True
        return False

    while free := {rank for rank in ranks if not any(waits_for(rank, other) for other in ranks)}:
        ranks -= free
    return ranks


@pytest.mark.parametrize("seed", range(20))
def test_the_verdicts_are_those_of_the_rules_applied_rank_by_rank(seed):
    generator = random.Random(seed)
    blocked_seen = deadlocks_seen = 0
    for _ in range(200):
        reports = {rank: random_report(generator, rank) for rank in range(5) if generator.random() < 0.9}
        inactive = {
            rank: InactiveRank(generator.choice(["failed", "dead", "finished"]), f"rank {rank} ended", NOW - rank)
            for rank in range(5)
            if generator.random() < 0.25
        }
        verdicts = {
            verdict.rank: (verdict.group, verdict.launch, verdict.missing, verdict.reason)
            for verdict in blocked_ranks(reports, inactive, NOW)
        }
        assert verdicts == blocked_by_definition(reports, inactive)
        blocked_seen += bool(verdicts)
        deadlocked = deadlocked_by_definition(reports, 2.0)
        text = find_deadlock(reports, patience=2.0) or ""
        assert {rank for rank in range(5) if f"  rank {rank}: " in text} == deadlocked
        deadlocks_seen += bool(deadlocked)
    assert blocked_seen > 50
    assert deadlocks_seen > 20
