"""Looks after the collectives of the cells that run.

Owns: what the ranks told of them, since when a rank is out, what was said already. Refuses: clocks and links, and the
verdicts themselves, which are `watch.py`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rankbook.coordinator import actions as act
from rankbook.coordinator.deadlock import Doomed, How, Out, Told, deadlock, disagreements, doomed, warning
from rankbook.coordinator.grace import GracePeriods
from rankbook.coordinator.states import Cell, CellState, Rank, RankState

LOOK_EVERY = 0.7
"""Seconds between two looks at a cell that runs as it should."""
LOOK_AFTER_END = 0.1
"""Seconds from a rank's end to the first look at those that still run."""
_LOOK_AGAIN = 0.2
"""Seconds between two looks while some ranks of a cell have ended and others have not."""
_DISAGREE_FOR = 0.5
"""Seconds that ranks must have waited in different collectives before it is said: the slower one may be on its way."""

_DEADLOCKED_FOR = 2.0
"""The same for ranks that wait for one another: one may compute beside what it has begun, and wait for it later."""


class Supervisor:
    """What is known of the ranks' collectives."""

    def __init__(self, grace: GracePeriods) -> None:
        self._grace = grace
        self._told: dict[int, Told] = {}
        self._since: dict[tuple[int, How, int | None], float] = {}
        self._said: set[tuple[object, ...]] = set()

    def hear(self, rank: int, told: Told) -> None:
        """A rank has told where it is."""
        self._told[rank] = told

    def forget(self, rank: int) -> None:
        """Its process is gone."""
        self._told.pop(rank, None)

    def waiting_for(self, lost: Collection[int]) -> set[int]:
        """The ranks that wait in a group that one of `lost` is a member of."""
        return {
            rank
            for rank, told in self._told.items()
            for group in told.report.groups
            if group.pending and not set(group.ranks).isdisjoint(lost)
        }

    def look(self, now: float, ranks: Mapping[int, Rank], cells: Mapping[int, Cell]) -> list[act.Action]:
        """What is to be done about waits that cannot end; and when to look again."""
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
        told = {rank: each for rank, each in self._told.items() if each.report.cell == ranks[rank].cell}
        actions = self._judge(now, told, out, ranks, cells)
        for each in disagreements(told, patience=_DISAGREE_FOR):
            actions += self._say(running[0], each.text, each.group, each.number)
        if (text := deadlock(told, patience=_DEADLOCKED_FOR)) is not None:
            actions += self._say(running[0], text, "deadlock")
        alive = tuple(rank for rank, each in ranks.items() if each.state in (RankState.IDLE, RankState.BUSY))
        ended = any(len(cell.running) < len(cell.ranks) for cell in running)
        return [*actions, act.AskCollectives(alive), act.LookSoon(_LOOK_AGAIN if ended else LOOK_EVERY)]

    def _out(self, now: float, ranks: Mapping[int, Rank], running: list[Cell]) -> dict[int, Out]:
        """The ranks that begin no collective any more. One that runs another cell may."""
        found: dict[int, Out] = {}
        for number, rank in ranks.items():
            if rank.state is RankState.BUSY:
                continue
            answers = [(cell.cell, cell.answers[number]) for cell in running if number in cell.answers]
            failed = next((each for each in answers if each[1]), None)
            if rank.state is not RankState.IDLE:
                how, words, cell = "dead", f"rank {number} {rank.loss or 'is not there'}", None
            elif failed is not None:
                how, words, cell = "failed", f"rank {number} {failed[1]}", failed[0]
            else:
                how, words, cell = "finished", f"has {'finished' if answers else 'not begun'} this cell", None
            since = self._since.setdefault((number, how, cell), now)  # type: ignore[arg-type]
            found[number] = Out(how, words, since)  # type: ignore[arg-type]
        return found

    def _judge(
        self,
        now: float,
        told: Mapping[int, Told],
        out: Mapping[int, Out],
        ranks: Mapping[int, Rank],
        cells: Mapping[int, Cell],
    ) -> list[act.Action]:
        actions: list[act.Action] = []
        broken: dict[str, list[tuple[int, str]]] = {}
        late: dict[tuple[int, str], list[Doomed]] = {}
        for doom in doomed(told, out, now):
            number = ranks[doom.rank].cell
            cell = cells.get(number) if number is not None else None
            if cell is None:
                continue
            if doom.how == "finished":
                what = (doom.rank, doom.group, doom.launch.number)
                if doom.seconds >= self._grace.finished and (cell.cell, *what) not in self._said:
                    self._said.add((cell.cell, *what))
                    same = warning(doom, [doom.missing])  # but for who waits
                    late.setdefault((cell.cell, same), []).append(doom)
            elif doom.seconds >= self._grace.raised:
                cell.aborted = True
                broken.setdefault(doom.words, []).append((doom.rank, doom.group))
        for (key, _), dooms in late.items():
            actions.append(act.TellPerson(key, warning(dooms[0], [doom.rank for doom in dooms])))
        for words, where in broken.items():
            who = tuple(sorted({rank for rank, _ in where}))
            actions.append(act.SendAbort(who, tuple(sorted({group for _, group in where})), words))
        return actions

    def _say(self, cell: Cell, text: str, *what: object) -> list[act.Action]:
        if (cell.cell, *what) in self._said:
            return []
        self._said.add((cell.cell, *what))
        return [act.TellPerson(cell.cell, text)]
