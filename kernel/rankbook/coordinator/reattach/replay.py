"""A kept cluster as its new owner takes it over: which cells run, which ended unseen, what is said about them.

Owns: the cells made anew from what the ranks tell, and the headings above their output. Refuses: links and processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from rankbook.coordinator.exit_status import describe_exit, describe_failure
from rankbook.coordinator.reattach.handshake import Account
from rankbook.coordinator.reattach.state import FoundCell, FoundRank, Inventory
from rankbook.coordinator.running_cell import Cell, Sink
from rankbook.output.cell_result import CellResult, describe_errors
from rankbook.output.merger import Stream
from rankbook.protocol.forkserver import RankExited
from rankbook.protocol.messages import Clear, Display, Done, FromRank, InputRequest, Text, TextCut
from rankbook.ranks import group_ranks, name_ranks

_INTERNAL = -1


@dataclass(frozen=True)
class Task:
    """A task that some of the ranks had when the owner went, or had finished without the owner having seen it.

    `answers`: how it went wrong on each rank that has answered, in words; empty where it went well.
    """

    cell: int
    number: int
    label: str
    ranks: tuple[int, ...]
    running: tuple[int, ...]
    answers: Mapping[int, str]
    collectives: int

    @property
    def internal(self) -> bool:
        """Whether it forms the group."""
        return self.number == _INTERNAL


def tasks_of(accounts: Mapping[int, Account]) -> list[Task]:
    """The tasks of which something is to be told, oldest first."""
    by_cell = group_ranks(
        (rank, account.here.cell)
        for rank, account in accounts.items()
        if account.here.cell and (account.here.running or not account.here.seen)
    )
    tasks = []
    for cell, ranks in sorted(by_cell.items()):
        here = accounts[ranks[0]].here
        running = tuple(rank for rank in sorted(ranks) if accounts[rank].here.running)
        ended = {rank: each for rank in ranks for each in accounts[rank].missed if _ends(each, cell)}
        made = Cell(cell, here.number, {}, cluster_key="", sink=None, label=here.label)
        answers = {rank: describe_failure(each, made) for rank, each in ended.items()}
        collectives = sum(each.collectives for each in ended.values())
        tasks.append(Task(cell, here.number, here.label, tuple(sorted(ranks)), running, answers, collectives))
    return tasks


def _ends(message: FromRank, cell: int) -> TypeGuard[Done]:
    return isinstance(message, Done) and message.cell == cell


def take_stock(
    world_size: int, incarnations: Mapping[int, int], exits: Mapping[int, RankExited], accounts: Mapping[int, Account]
) -> Inventory:
    """What the state begins with."""
    ranks = []
    for rank in range(world_size):
        account, gone = accounts.get(rank), exits.get(rank)
        if account is None:
            incarnation = gone.incarnation if gone is not None else 0
            words = describe_exit(gone) if gone is not None else "was not there any more"
            ranks.append(FoundRank(rank, incarnation, words))
        else:
            ranks.append(FoundRank(rank, incarnations[rank]))
    tasks = tasks_of(accounts)
    running = tuple(
        FoundCell(task.cell, task.ranks, task.running, task.answers, task.collectives, task.internal)
        for task in tasks
        if task.running
    )
    stale = any(
        task.collectives and any(task.answers.values()) for task in tasks if not task.running and not task.internal
    )
    generations = {account.here.generation for account in accounts.values()}
    forming = any(cell.internal and not any(cell.answers.values()) for cell in running)
    grouped = len(accounts) == world_size and (forming or (len(generations) == 1 and 0 not in generations))
    last_cell = max((account.here.cell for account in accounts.values()), default=0)
    # A group that was being formed may have a number that no rank tells yet; a number may be left out.
    return Inventory(tuple(ranks), running, last_cell, max(generations, default=0) + 1, grouped, stale)


class Adoption:
    """Feeds what was missed into cells, which show it in `sink` below a heading each."""

    def __init__(
        self,
        accounts: Mapping[int, Account],
        *,
        cluster_key: str,
        sink: Sink | None,
        exits: Mapping[int, RankExited] | None = None,
    ) -> None:
        self.cells: list[Cell] = []
        self.ended: list[Cell] = []
        self._accounts = accounts
        self._exits = exits or {}
        self._key = cluster_key
        self._sink = sink

    def tell(self) -> list[CellResult]:
        """Show what was missed; the results of the cells that ended."""
        self._tell_stray()
        self._tell_exits()
        results = []
        for task in tasks_of(self._accounts):
            cell = self._make(task)
            if not task.internal:
                self._say(_heading(task))
            cell.start()
            self._feed(cell)
            if task.running:
                self.cells.append(cell)
                continue
            cell.end(())
            self.ended.append(cell)
            if cell.result is not None and not task.internal:
                results.append(cell.result)
                if not cell.result.ok:
                    self._say(describe_errors(cell.result.outcomes), "stderr")
        dropped = [rank for rank, account in self._accounts.items() if account.here.dropped]
        if dropped:
            self._say(
                f"{name_ranks(dropped)}: the oldest of the output is left out, there was too much of it", "stderr"
            )
        return results

    def _tell_stray(self) -> None:
        """What background threads printed after their cell had ended."""
        stray = {
            rank: [each for each in account.missed if getattr(each, "cell", None) != self._open_cell(account)]
            for rank, account in self._accounts.items()
        }
        stray = {rank: messages for rank, messages in stray.items() if messages}
        if not stray:
            return
        self._say("printed meanwhile by threads of cells that had ended:")
        cell = Cell(0, 0, dict.fromkeys(stray, _NOTHING), cluster_key=self._key, sink=self._sink, label="threads")
        for rank, messages in stray.items():
            for message in messages:
                if isinstance(message, Text | TextCut | Display | Clear):
                    cell.feed(rank, message)
        cell.end(())

    def _tell_exits(self) -> None:
        """What a rank that died meanwhile wrote last: all that is left of what it printed."""
        for rank, gone in sorted(self._exits.items()):
            words = (gone.stdout + gone.stderr).decode(errors="replace").strip()
            if words:
                self._say(f"rank {rank} {describe_exit(gone)}; the last that it wrote:\n{words}", "stderr")

    @staticmethod
    def _open_cell(account: Account) -> int | None:
        return None if account.here.seen and not account.here.running else account.here.cell

    def _make(self, task: Task) -> Cell:
        tasks = dict.fromkeys(task.ranks, _NOTHING)
        sink = None if task.internal else self._sink
        return Cell(task.cell, task.number, tasks, cluster_key=self._key, sink=sink, label=task.label)

    def _feed(self, cell: Cell) -> None:
        told = [(rank, each) for rank in cell.ranks for each in self._accounts[rank].missed]
        told = [(rank, each) for rank, each in told if getattr(each, "cell", None) == cell.cell]
        for rank, message in told:
            if isinstance(message, Text | TextCut | Display | Clear):
                cell.feed(rank, message)
        for rank, message in told:  # once all output is there, so that what the ranks have alike is shown as one
            if isinstance(message, InputRequest):
                cell.ask(rank, message)
            elif isinstance(message, Done):
                cell.done(rank, message, [])

    def _say(self, text: str, stream: str = "stdout") -> None:
        if self._sink is not None:
            self._sink.emit([Stream(stream, text.rstrip("\n") + "\n")])  # type: ignore[arg-type]


_NOTHING: tuple[Done, tuple[bytes, ...]] = (Done(cell=0, status="ok", seconds=0.0), ())
"""In place of the task, which the ranks have had long since."""


def _heading(task: Task) -> str:
    if task.running:
        done = [rank for rank in task.ranks if rank not in task.running and not task.answers.get(rank)]
        told = [f"rank {rank} {words}" for rank, words in sorted(task.answers.items()) if words]
        told += [f"{name_ranks(done)} finished"] if done else []
        rest = f" ({'; '.join(told)})" if told else ""
        return f"{task.label} still runs on {name_ranks(task.running)}{rest}; its output so far, and what follows:"
    return f"{task.label} ended on {name_ranks(task.ranks)}; its output:"
