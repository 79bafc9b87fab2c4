"""Reattach a notebook to a detached cluster: find it, replay missed output, take over its running cells.

`select_detached` chooses among the detached clusters. `ReattachedProcesses` takes one over:

1. `ReattachedLauncher` claims the cluster from its forkserver, which reports the processes that live or have exited.
2. `replay_handshake` sends `RequestReplay` with a new nonce to every living rank. A rank replies with `ReplayStart` and
   that nonce, then repeats the messages that no notebook has acknowledged, then sends new ones. Messages before that
   `ReplayStart` are dropped, because they are among the repeated ones. `ReattachHandshake` sorts the messages into one
   `RankReport` per rank: `missed` holds the repeated messages, `later` those sent afterwards.
3. `recovered_state` derives the initial state of the state machine from the reports: which ranks are dead, which cells
   are still running, and whether the process group must be formed anew.
4. `OutputReplay` shows the missed output and completes the cells that have ended.
5. A `ReattachedDriver` acknowledges the ended cells, handles the `later` messages and continues as usual.

Ranks are never started here. If a step fails, the cluster is left detached as before.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from rankbook.coordinator.cluster_processes import ClusterProcesses, register_for_exit
from rankbook.coordinator.deferred_interrupts import deferred_interrupts
from rankbook.coordinator.exit_status import describe_exit, describe_failure
from rankbook.coordinator.recovered_state import (
    ReattachedDriver,
    RecoveredCell,
    RecoveredClusterState,
    RecoveredRank,
    RecoveredState,
)
from rankbook.coordinator.running_cell import RunningCell, Sink
from rankbook.errors import BadRequest, NoCluster, StartError, UnreadableMessage
from rankbook.launch.environment import DeviceAssignment
from rankbook.launch.local import ReattachedLauncher
from rankbook.launch.paths import ClusterPaths
from rankbook.launch.registry import ClusterRecord, DetachedCluster, session_id
from rankbook.output.cell_result import CellResult, describe_errors
from rankbook.output.merger import Stream
from rankbook.protocol.forkserver import RankExited
from rankbook.protocol.messages import Clear, Display, Done, FromRank, InputRequest, Text, TextCut
from rankbook.protocol.reattach import ReplayStart, RequestReplay
from rankbook.ranks import group_ranks, name_ranks
from rankbook.transport.link import HubLink, Sender
from rankbook.transport.shared_memory import SegmentStore
from rankbook.transport.zmq_link import ZmqHub

_REUNION_TIMEOUT = 10.0


def select_detached(found: DetachedCluster, key: str | None) -> ClusterRecord:
    """Return the cluster to attach to: that of `key`, else this notebook's, else the only one of unknown notebook.

    Raises `NoCluster` if there is none, and `BadRequest` if none matches or several do.
    """
    notes = "".join(f"\n{note}" for note in found.notes)
    if not found.records:
        raise NoCluster(f"no ranks are kept here; %distributed start --keep makes such{notes}")
    if key is None:
        session = session_id()
        candidates = [record for record in found.records if session and record.session == session]
        candidates = [record for record in candidates if not record.owned] or candidates
        if not candidates:
            candidates = [record for record in found.records if not (session and record.session)]
        if len(candidates) == 1:
            return candidates[0]
        lines = "".join(f"\n{record.describe()}, from kernel {record.notebook}" for record in found.records)
        several = f"{len(found.records)} sets of ranks are kept" if len(found.records) > 1 else "ranks are kept"
        whose = "" if candidates else ", but not by this notebook"
        raise BadRequest(f"{several}{whose}; %distributed attach KEY takes one:{lines}{notes}")
    for record in found.records:
        if record.key == key:
            return record
    keys = ", ".join(record.key for record in found.records)
    raise BadRequest(f"no ranks are kept as {key!r}; there are: {keys}{notes}")


class ReattachedProcesses(ClusterProcesses):
    """Attach to the detached cluster of `record` and show its missed output in `sink`.

    Raises `BadRequest` while another notebook owns the cluster, and `StartError` if it does not answer; then it stays
    detached.
    """

    missed: list[CellResult]

    def __init__(self, record: ClusterRecord, *, sink: Sink | None) -> None:
        self._name(record.key, record.seconds, record.token)
        self._folders = ClusterPaths(Path(record.sockets), Path(record.segments), Path(record.logs))
        self._port = record.master_port
        self.placement = DeviceAssignment(record.devices, record.backend, record.threads)
        self.segments = SegmentStore(self._folders.segments)
        with deferred_interrupts():
            launcher = self._launcher = ReattachedLauncher(record)
            try:
                self._hub = ZmqHub(self._folders.sockets)
                self._take_over(launcher, record, self._hub, sink)
            except BaseException:
                self.leave()
                raise
            self._created = record.created or self._created
            register_for_exit(self)
            if record.interrupted and sink is not None:
                sink.emit([Stream("stderr", f"{record.interrupted}, perhaps by its restart\n")])

    def _take_over(self, launcher: ReattachedLauncher, record: ClusterRecord, hub: ZmqHub, sink: Sink | None) -> None:
        # No driver thread runs until the end of this method, so this thread receives from the hub itself.
        incarnations = {rank: process.incarnation for rank, process in launcher.forked.items()}
        pids = {rank: process.pid for rank, process in launcher.forked.items()}
        for rank, incarnation in incarnations.items():
            hub.open_downlink(rank, incarnation)
        accounts = replay_handshake(
            hub, pids, incarnations, token=record.token, since=launcher.lost, timeout=_REUNION_TIMEOUT
        )
        self.state = state = RecoveredClusterState(
            recovered_state(len(record.ranks), incarnations, launcher.exited, accounts)
        )
        adoption = OutputReplay(accounts, cluster_key=record.key, sink=sink, exits=launcher.exited)
        self.missed = adoption.tell()
        self._discard_answers([*adoption.cells, *adoption.ended])
        if not any(account.here.running for account in accounts.values()):
            self.segments.clear()  # their readers are gone, or have mapped them already
        self._driver = driver = ReattachedDriver(state, hub, launcher, self._request)
        for rank, info in driver.infos.items():
            info.pid = pids.get(rank)
        driver.resume(state, adoption.cells, adoption.ended, _later(accounts, incarnations))
        driver.start()
        self._record()

    def _discard_answers(self, cells: Sequence[RunningCell]) -> None:
        """Discard the results of calls and pulls, whose callers ended with the previous notebook."""
        for cell in cells:
            for payload, _ in cell.values.values():
                for buffer in payload.buffers:
                    if buffer.segment is not None:
                        self.segments.discard(buffer.segment)
            cell.values.clear()


def _later(
    accounts: Mapping[int, RankReport], incarnations: Mapping[int, int]
) -> Iterator[tuple[Sender, FromRank, list[memoryview]]]:
    for rank, account in accounts.items():
        for message, frames in account.later:
            yield Sender(rank, incarnations[rank]), message, frames


@dataclass
class RankReport:
    """Replies of one rank: its last task, the messages that were never acknowledged, and those sent `later`."""

    here: ReplayStart
    missed: list[FromRank] = field(default_factory=list)
    later: list[tuple[FromRank, list[memoryview]]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Return True if all repeated messages have arrived."""
        return len(self.missed) >= self.here.entries


class ReattachHandshake:
    """Sort the messages of these incarnations of the ranks that arrive after a request with `nonce`."""

    def __init__(self, incarnations: Mapping[int, int], nonce: str) -> None:
        self.accounts: dict[int, RankReport] = {}
        self._incarnations = dict(incarnations)
        self._nonce = nonce

    @property
    def missing(self) -> list[int]:
        """Return the ranks whose repeated messages have not all arrived."""
        complete = {rank for rank, account in self.accounts.items() if account.complete}
        return sorted(set(self._incarnations) - complete)

    def take(self, sender: Sender, message: FromRank, frames: list[memoryview]) -> None:
        """Record a message; drop it if it precedes the rank's `ReplayStart` or is of another incarnation."""
        if self._incarnations.get(sender.rank) != sender.incarnation:
            return
        account = self.accounts.get(sender.rank)
        if isinstance(message, ReplayStart):
            if message.nonce == self._nonce:
                self.accounts[sender.rank] = RankReport(message)
        elif account is not None and account.complete:
            account.later.append((message, frames))
        elif account is not None:
            account.missed.append(message)

    def leave_out(self, sender: Sender, error: UnreadableMessage) -> None:
        """Record a line on stderr in place of a message that cannot be decoded."""
        account = self.accounts.get(sender.rank)
        warning = f"a message of rank {sender.rank} cannot be read, so it is left out ({error})\n"
        cell = 0 if account is None else account.here.cell
        self.take(sender, Text(cell=cell, stream="stderr", data=warning.encode()), [])


def replay_handshake(
    hub: HubLink, pids: Mapping[int, int], incarnations: Mapping[int, int], *, token: str, since: float, timeout: float
) -> dict[int, RankReport]:
    """Ask the ranks to repeat missed messages; return the complete reports of all ranks.

    `token` is the cluster's secret. `since` is the time on the monotonic clock at which the previous owner was lost:
    messages sent after it are repeated even if their cell was acknowledged. Raises `StartError` with the ranks that do
    not answer within `timeout` seconds.
    """
    reunion = ReattachHandshake(incarnations, secrets.token_hex(8))
    deadline = time.monotonic() + timeout
    for rank in incarnations:
        hub.send(rank, RequestReplay(token=token, nonce=reunion._nonce, since=since))
    while reunion.missing and (remaining := deadline - time.monotonic()) > 0:
        hub.wait(remaining, ())
        while _take_next(hub, reunion):
            pass
    if reunion.missing:
        silent = ", ".join(str(pids[rank]) for rank in reunion.missing)
        raise StartError(
            f"{name_ranks(reunion.missing)} (pid {silent}) did not answer within {timeout:.0f} s; it may be in C code"
            " that holds the interpreter. Try again, or kill it and attach without it"
        )
    return reunion.accounts


def _take_next(hub: HubLink, reunion: ReattachHandshake) -> bool:
    """Take the next message; return True if there was one. An unreadable message is replaced by a note."""
    try:
        parcel = hub.receive()
    except UnreadableMessage as error:
        if error.sender is not None:
            reunion.leave_out(Sender(*error.sender), error)
        return True
    if parcel is not None:
        reunion.take(*parcel)
    return parcel is not None


_INTERNAL = -1


@dataclass(frozen=True)
class RecoveredTask:
    """A task that ranks were running when the owner left, or whose end the owner has not seen.

    `answers` maps the ranks that have finished to their error, in words; empty if they succeeded.
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
        """Return True if the task forms the process group."""
        return self.number == _INTERNAL


def recovered_tasks(accounts: Mapping[int, RankReport]) -> list[RecoveredTask]:
    """Return the tasks that are running or whose end was not seen, oldest first."""
    by_cell = group_ranks(
        (rank, account.here.cell)
        for rank, account in accounts.items()
        if account.here.cell and (account.here.running or not account.here.seen)
    )
    tasks = []
    for cell, ranks in sorted(by_cell.items()):
        start = accounts[ranks[0]].here
        running = tuple(rank for rank in sorted(ranks) if accounts[rank].here.running)
        ended = {rank: message for rank in ranks for message in accounts[rank].missed if _ends(message, cell)}
        made = RunningCell(cell, start.number, {}, cluster_key="", sink=None, label=start.label)
        answers = {rank: describe_failure(message, made) for rank, message in ended.items()}
        collectives = sum(message.collectives for message in ended.values())
        tasks.append(
            RecoveredTask(cell, start.number, start.label, tuple(sorted(ranks)), running, answers, collectives)
        )
    return tasks


def _ends(message: FromRank, cell: int) -> TypeGuard[Done]:
    return isinstance(message, Done) and message.cell == cell


def recovered_state(
    world_size: int,
    incarnations: Mapping[int, int],
    exits: Mapping[int, RankExited],
    accounts: Mapping[int, RankReport],
) -> RecoveredState:
    """Return the initial state for the state machine."""
    ranks = []
    for rank in range(world_size):
        account, gone = accounts.get(rank), exits.get(rank)
        if account is None:
            incarnation = gone.incarnation if gone is not None else 0
            reason = describe_exit(gone) if gone is not None else "was not there any more"
            ranks.append(RecoveredRank(rank, incarnation, reason))
        else:
            ranks.append(RecoveredRank(rank, incarnations[rank]))
    tasks = recovered_tasks(accounts)
    running = tuple(
        RecoveredCell(task.cell, task.ranks, task.running, task.answers, task.collectives, task.internal)
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
    # The group being formed may have a generation that no rank reports yet. Skipping a number does no harm.
    return RecoveredState(tuple(ranks), running, last_cell, max(generations, default=0) + 1, grouped, stale)


class OutputReplay:
    """Feed missed messages into cells, which show them in `sink`, every cell below a heading."""

    def __init__(
        self,
        accounts: Mapping[int, RankReport],
        *,
        cluster_key: str,
        sink: Sink | None,
        exits: Mapping[int, RankExited] | None = None,
    ) -> None:
        self.cells: list[RunningCell] = []
        self.ended: list[RunningCell] = []
        self._accounts = accounts
        self._exits = exits or {}
        self._key = cluster_key
        self._sink = sink

    def tell(self) -> list[CellResult]:
        """Show the missed output and return the results of the cells that ended."""
        self._tell_stray()
        self._tell_exits()
        results = []
        for task in recovered_tasks(self._accounts):
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
        """Show output of background threads that was printed after their cells had ended."""
        stray = {
            rank: [entry for entry in account.missed if getattr(entry, "cell", None) != self._open_cell(account)]
            for rank, account in self._accounts.items()
        }
        stray = {rank: messages for rank, messages in stray.items() if messages}
        if not stray:
            return
        self._say("printed meanwhile by threads of cells that had ended:")
        cell = RunningCell(
            0, 0, dict.fromkeys(stray, _NOTHING), cluster_key=self._key, sink=self._sink, label="threads"
        )
        for rank, messages in stray.items():
            for message in messages:
                if isinstance(message, Text | TextCut | Display | Clear):
                    cell.feed(rank, message)
        cell.end(())

    def _tell_exits(self) -> None:
        """Show the last output of the ranks that died meanwhile; nothing else of their output is left."""
        for rank, gone in sorted(self._exits.items()):
            text = (gone.stdout + gone.stderr).decode(errors="replace").strip()
            if text:
                self._say(f"rank {rank} {describe_exit(gone)}; the last that it wrote:\n{text}", "stderr")

    @staticmethod
    def _open_cell(account: RankReport) -> int | None:
        return None if account.here.seen and not account.here.running else account.here.cell

    def _make(self, task: RecoveredTask) -> RunningCell:
        tasks = dict.fromkeys(task.ranks, _NOTHING)
        sink = None if task.internal else self._sink
        return RunningCell(task.cell, task.number, tasks, cluster_key=self._key, sink=sink, label=task.label)

    def _feed(self, cell: RunningCell) -> None:
        messages = [(rank, entry) for rank in cell.ranks for entry in self._accounts[rank].missed]
        messages = [(rank, entry) for rank, entry in messages if getattr(entry, "cell", None) == cell.cell]
        for rank, message in messages:
            if isinstance(message, Text | TextCut | Display | Clear):
                cell.feed(rank, message)
        for rank, message in messages:  # after all output, so that output that is equal on several ranks is merged
            if isinstance(message, InputRequest):
                cell.ask(rank, message)
            elif isinstance(message, Done):
                cell.done(rank, message, [])

    def _say(self, text: str, stream: str = "stdout") -> None:
        if self._sink is not None:
            self._sink.emit([Stream(stream, text.rstrip("\n") + "\n")])  # type: ignore[arg-type]


_NOTHING: tuple[Done, tuple[bytes, ...]] = (Done(cell=0, status="ok", seconds=0.0), ())
"""Placeholder for the task, which the ranks have already received."""


def _heading(task: RecoveredTask) -> str:
    if task.running:
        done = [rank for rank in task.ranks if rank not in task.running and not task.answers.get(rank)]
        outcomes = [f"rank {rank} {outcome}" for rank, outcome in sorted(task.answers.items()) if outcome]
        outcomes += [f"{name_ranks(done)} finished"] if done else []
        rest = f" ({'; '.join(outcomes)})" if outcomes else ""
        return f"{task.label} still runs on {name_ranks(task.running)}{rest}; its output so far, and what follows:"
    return f"{task.label} ended on {name_ranks(task.ranks)}; its output:"
