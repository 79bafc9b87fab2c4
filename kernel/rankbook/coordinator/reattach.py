"""Reattach a notebook to a detached cluster: find it, replay missed output, take over its running cells.

`select_detached` chooses among the detached clusters. `ReattachedProcesses` takes one over:

1. `ReattachedLauncher` claims the cluster from its forkserver, which reports the processes that live or have exited.
2. `replay_handshake` sends `RequestReplay` with a new nonce to every living rank. A rank replies with `ReplayStart` and
   that nonce, then repeats the messages that no notebook has acknowledged, then sends new ones. Messages before that
   `ReplayStart` are dropped, because they are among the repeated ones. `ReattachHandshake` sorts the messages into one
   `ReplayReport` per rank: `missed` holds the repeated messages, `later` those sent afterwards.
3. `recovered_state` derives the initial state of the state machine from the reports: which ranks are dead, which cells
   are still running, and whether the process group must be formed anew.
4. `OutputReplay` shows the missed output and completes the cells that have ended.
5. A `ReattachedDriver` acknowledges the ended cells, handles the `later` messages and continues as usual.

Ranks are never started here. If a step fails, the cluster is left detached as before.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from rankbook.coordinator.cluster_processes import ClusterProcesses, register_for_exit
from rankbook.coordinator.driver import ReattachedDriver
from rankbook.coordinator.liveness import describe_exit, describe_failure
from rankbook.coordinator.running_cell import RunningCell, Sink
from rankbook.coordinator.state_machine import RecoveredCell, RecoveredClusterState, RecoveredRank, RecoveredState
from rankbook.coordinator.states import GracePeriods
from rankbook.coordinator.wait import deferred_interrupts
from rankbook.errors import InvalidArgument, NoClusterError, StartError, UnreadableMessage
from rankbook.formatting import plural
from rankbook.launch.local import ReattachedLauncher
from rankbook.launch.placement import DeviceAssignment, abort_grace
from rankbook.launch.registry import ClusterPaths, ClusterRecord, DetachedCluster, session_id
from rankbook.output.cell_result import CellResult, describe_errors
from rankbook.output.merger import Stream
from rankbook.protocol.forkserver import RankExited
from rankbook.protocol.messages import (
    Clear,
    Display,
    Done,
    FromRank,
    InputRequest,
    ReplayStart,
    RequestReplay,
    Text,
    TextCut,
)
from rankbook.ranks import group_ranks, name_ranks
from rankbook.transport import HubLink, Sender
from rankbook.transport.shared_memory import SegmentStore
from rankbook.transport.zmq_link import ZmqHub

_HANDSHAKE_TIMEOUT = 10.0
MAX_DISPLAYS = 250
"""Maximum number of missed displays to show at once, of all ranks together.

ZeroMQ drops the messages of a front end that is 1,000 behind (its default limit), with them the one that ends the cell.
"""

Output = Text | TextCut | Display | Clear


def select_detached(detached: DetachedCluster, key: str | None) -> ClusterRecord:
    """Return the cluster to attach to: that of `key`, else this notebook's, else the only one of unknown notebook.

    Raises `NoClusterError` if there is none, and `InvalidArgument` if none matches or several do.
    """
    notes = "".join(f"\n{note}" for note in detached.notes)
    if not detached.records:
        raise NoClusterError(
            "no kept ranks found; %distributed start --keep starts ranks that outlive the notebook (ranks on other "
            f"hosts cannot){notes}"
        )
    if key is None:
        session = session_id()
        # Prefer the clusters of this notebook's file. Of these, one whose owner still runs can only be refused, so
        # others come first.
        candidates = [record for record in detached.records if session and record.session == session]
        candidates = [record for record in candidates if not record.owned] or candidates
        if not candidates:
            # A record without a session comes from a front end that does not name the notebook. Records of other
            # notebooks are never chosen without their key.
            candidates = [record for record in detached.records if not (session and record.session)]
        if len(candidates) == 1:
            return candidates[0]
        lines = "".join(f"\n{record.describe()}, from kernel {record.notebook}" for record in detached.records)
        count = plural(len(detached.records), "kept cluster")
        owner = "" if candidates else ", but none of this notebook"
        raise InvalidArgument(f"found {count}{owner}; select one with %distributed attach KEY:{lines}{notes}")
    for record in detached.records:
        if record.key == key:
            return record
    keys = ", ".join(record.key for record in detached.records)
    raise InvalidArgument(f"no kept cluster has the key {key!r}; choose from {keys}{notes}")


class ReattachedProcesses(ClusterProcesses):
    """Attach to the detached cluster of `record` and show its missed output in `sink`.

    Raises `InvalidArgument` while another notebook owns the cluster, and `StartError` if it does not answer; then it
    stays detached.
    """

    missed: list[CellResult]

    def __init__(self, record: ClusterRecord, *, sink: Sink | None) -> None:
        # Not the base class's constructor, which starts a forkserver. The fields are set from the record.
        self._init_state(record.key, record.seconds, record.token)
        self._folders = ClusterPaths(Path(record.sockets), Path(record.segments), Path(record.logs))
        self._port = record.master_port
        self.assignment = DeviceAssignment(record.devices, record.backend, record.threads)
        self.device = record.device
        self._cuda_devices = record.cuda_devices or len({device for device in record.devices if device != "cpu"})
        self.segments = SegmentStore(self._folders.segments)
        # An interrupt between the claim and the registration would leave ranks that nobody owns until the process ends.
        with deferred_interrupts():
            launcher = self._launcher = ReattachedLauncher(record)
            try:
                self._hub = ZmqHub(self._folders.sockets)
                self._take_over(launcher, record, self._hub, sink)
            except BaseException:
                # The connection to the forkserver is closed, upon which the ranks wait for another owner again.
                self.detach()
                raise
            self._created = record.created or self._created
            register_for_exit(self)
            if record.interrupted and sink is not None:
                sink.emit([Stream("stderr", f"{record.interrupted}, possibly by the restart of the kernel\n")])

    def _take_over(self, launcher: ReattachedLauncher, record: ClusterRecord, hub: ZmqHub, sink: Sink | None) -> None:
        # No driver thread runs until the end of this method, so this thread receives from the hub itself.
        incarnations = {rank: process.incarnation for rank, process in launcher.forked.items()}
        # Ranks that a resize had just started when the old owner ended. `heal` starts them again.
        unknown = {rank: incarnations.pop(rank) for rank in tuple(incarnations) if rank >= len(record.ranks)}
        for rank, incarnation in unknown.items():
            launcher.kill(rank, incarnation)
        # The addresses of the old owner's sockets are bound again. The ranks' sockets reconnect by themselves, as those
        # of ZeroMQ do.
        for rank, incarnation in incarnations.items():
            hub.open_downlink(rank, incarnation)
        reports = replay_handshake(
            hub, launcher, incarnations, token=record.token, since=launcher.owner_lost_at, timeout=_HANDSHAKE_TIMEOUT
        )
        # Without those that have exited meanwhile, as the previous owner may have asked them to.
        pids = {rank: launcher.forked[rank].pid for rank in reports}
        since = {rank.rank: rank.since for rank in record.ranks}
        empty = {rank.rank for rank in record.ranks if rank.empty}
        self.state = state = RecoveredClusterState(
            recovered_state(len(record.ranks), incarnations, launcher.exited, reports, since, empty),
            grace=GracePeriods(raised=abort_grace()),
        )
        state.reserve_incarnations(unknown)
        replay = OutputReplay(reports, cluster_key=record.key, sink=sink, exits=launcher.exited)
        self.missed = replay.show_output()
        self._discard_answers([*replay.cells, *replay.ended])
        # Values that were sent to the old notebook have no reader. While a task runs, its arguments may not have been
        # opened yet.
        if not any(report.start.running for report in reports.values()):
            self.segments.clear()  # their readers are gone, or have mapped them already
        self._driver = driver = ReattachedDriver(state, hub, launcher, self._fork_request)
        # The forkserver has reported the processes in reply to the claim, not to the driver.
        for rank, info in driver.rank_processes.items():
            info.pid, info.segments = pids.get(rank), record.segments
        driver.on_filled = self._record_filled
        # Before `start`: afterwards the driver thread would receive and handle newer messages first.
        driver.resume(state, replay.cells, replay.ended, _later_messages(reports, incarnations), launcher.later)
        driver.start()
        self._record()

    def _discard_answers(self, cells: Sequence[RunningCell]) -> None:
        """Discard the results of calls and pulls, whose callers ended with the previous notebook."""
        for cell in cells:
            for payload, _ in cell.values.values():
                for segment in payload.segments:
                    self.segments.discard(segment)
            cell.values.clear()


def _later_messages(
    reports: Mapping[int, ReplayReport], incarnations: Mapping[int, int]
) -> Iterator[tuple[Sender, FromRank, list[memoryview]]]:
    for rank, report in reports.items():
        for message, frames in report.later:
            yield Sender(rank, incarnations[rank]), message, frames


@dataclass
class ReplayReport:
    """Replies of one rank: its last task, the messages that were never acknowledged, and those sent `later`."""

    start: ReplayStart
    missed: list[FromRank] = field(default_factory=list)
    later: list[tuple[FromRank, list[memoryview]]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Return True if all repeated messages have arrived."""
        # The rank has announced the number of repeated messages, and messages of one rank stay in order.
        return len(self.missed) >= self.start.entries


# What arrives from one rank, in this order:
##
#     messages that were on the way to the previous notebook    dropped: they are repeated below
#     ReplayStart with our nonce, which announces n entries      begins the report
#     n repeated messages                                        `missed`
#     messages that the rank sends from now on                   `later`
class ReattachHandshake:
    """Sort the messages of these incarnations of the ranks that arrive after a request with `nonce`."""

    def __init__(self, incarnations: Mapping[int, int], nonce: str) -> None:
        self.reports: dict[int, ReplayReport] = {}
        self._incarnations = dict(incarnations)
        self._nonce = nonce

    def forget(self, rank: int) -> None:
        """Expect nothing from a rank that has exited."""
        self._incarnations.pop(rank, None)
        self.reports.pop(rank, None)

    @property
    def missing(self) -> list[int]:
        """Return the ranks whose repeated messages have not all arrived."""
        complete = {rank for rank, report in self.reports.items() if report.complete}
        return sorted(set(self._incarnations) - complete)

    def take(self, sender: Sender, message: FromRank, frames: list[memoryview]) -> None:
        """Record a message; drop it if it precedes the rank's `ReplayStart` or is of another incarnation."""
        if self._incarnations.get(sender.rank) != sender.incarnation:
            return
        report = self.reports.get(sender.rank)
        if isinstance(message, ReplayStart):
            # An answer to the request of an earlier attempt has another nonce.
            if message.nonce == self._nonce:
                self.reports[sender.rank] = ReplayReport(message)
        elif report is not None and report.complete:
            report.later.append((message, frames))
        # Before `ReplayStart` there is no report, and the message is dropped: it is repeated later.
        elif report is not None:
            report.missed.append(message)

    def record_unreadable(self, sender: Sender, error: UnreadableMessage) -> None:
        """Record a line on stderr in place of a message that cannot be decoded."""
        report = self.reports.get(sender.rank)
        warning = f"dropped a message from rank {sender.rank} that cannot be decoded ({error})\n"
        cell = 0 if report is None else report.start.cell
        # The note takes the place of the message, so that the count of repeated messages is right.
        self.take(sender, Text(cell=cell, stream="stderr", data=warning.encode()), [])


def replay_handshake(
    hub: HubLink,
    launcher: ReattachedLauncher,
    incarnations: Mapping[int, int],
    *,
    token: str,
    since: float,
    timeout: float,
) -> dict[int, ReplayReport]:
    """Ask these incarnations of the ranks to repeat missed messages; return the complete reports.

    A rank that exits before its report is complete has none, and is in `launcher.exited`; other reports of the
    forkserver are in `launcher.later`. `token` is the cluster's secret. `since` is the time on the monotonic clock at
    which the previous owner was lost: messages sent after it are repeated even if their cell was acknowledged. Raises
    `StartError` with the ranks that do not answer within `timeout` seconds.
    """
    handshake = ReattachHandshake(incarnations, secrets.token_hex(8))
    deadline = time.monotonic() + timeout
    for rank in incarnations:
        # The result is not checked: a rank that cannot be reached is among the missing ones at the deadline.
        hub.send(rank, RequestReplay(token=token, nonce=handshake._nonce, since=since))
    # If the forkserver has ended, so have the ranks, and its descriptor stays readable.
    while handshake.missing and launcher.alive and (remaining := deadline - time.monotonic()) > 0:
        hub.wait(remaining, (launcher.fileno(),))
        while _receive_next(hub, handshake):
            pass
        for message in launcher.read():
            if isinstance(message, RankExited) and message.rank in handshake.missing:
                launcher.exited[message.rank] = message
                handshake.forget(message.rank)
            else:
                launcher.later.append(message)
    if handshake.missing:
        silent = ", ".join(str(launcher.forked[rank].pid) for rank in handshake.missing)
        raise StartError(
            f"{name_ranks(handshake.missing)} (pid {silent}) did not reply within {timeout:.0f} s; it may be in C code"
            " that holds the GIL; try again, or kill the process and attach without it"
        )
    return handshake.reports


def _receive_next(hub: HubLink, handshake: ReattachHandshake) -> bool:
    """Take the next message; return True if there was one. An unreadable message is replaced by a note."""
    try:
        received = hub.receive()
    except UnreadableMessage as error:
        if error.sender is not None:
            handshake.record_unreadable(Sender(*error.sender), error)
        return True
    if received is not None:
        handshake.take(*received)
    return received is not None


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

    @property
    def is_cell(self) -> bool:
        """Return True if the task is a cell of the notebook."""
        return self.number > 0


def recovered_tasks(reports: Mapping[int, ReplayReport]) -> list[RecoveredTask]:
    """Return the tasks that are running or whose end was not seen, oldest first."""
    by_cell = group_ranks(
        (rank, report.start.cell)
        for rank, report in reports.items()
        # A task counts if it is running, or if its end has not been shown to anybody.
        if report.start.cell and (report.start.running or not report.start.seen)
    )
    tasks = []
    for cell, ranks in sorted(by_cell.items()):
        first = reports[ranks[0]].start
        running = tuple(rank for rank in sorted(ranks) if reports[rank].start.running)
        ended = {rank: message for rank in ranks for message in reports[rank].missed if _is_done_of(message, cell)}
        # Only for its label, with which the errors are described.
        restored = RunningCell(cell, first.number, {}, cluster_key="", sink=None, label=first.label)
        answers = {rank: describe_failure(message, restored) for rank, message in ended.items()}
        collectives = sum(message.collectives for message in ended.values())
        tasks.append(
            RecoveredTask(cell, first.number, first.label, tuple(sorted(ranks)), running, answers, collectives)
        )
    return tasks


def _is_done_of(message: FromRank, cell: int) -> TypeGuard[Done]:
    return isinstance(message, Done) and message.cell == cell


def recovered_state(
    world_size: int,
    incarnations: Mapping[int, int],
    exits: Mapping[int, RankExited],
    reports: Mapping[int, ReplayReport],
    since: Mapping[int, int] | None = None,
    empty: Collection[int] = (),
) -> RecoveredState:
    """Return the initial state for the state machine.

    `since` has the launches of the ranks and `empty` the empty ones when the record was written, see
    `states.RankEntry`.
    """
    launches = since or {}
    tasks = recovered_tasks(reports)
    # Cells that ended since then. Of a call, nobody knows any more whether it has defined variables.
    filled = {rank for task in tasks if task.is_cell for rank, error in task.answers.items() if not error}
    ranks = []
    for rank in range(world_size):
        report, exited = reports.get(rank), exits.get(rank)
        if report is None:
            incarnation = exited.incarnation if exited is not None else 0
            reason = describe_exit(exited) if exited is not None else "had already exited"
            ranks.append(RecoveredRank(rank, incarnation, reason, launches.get(rank, 0)))
        else:
            is_empty = rank in empty and rank not in filled
            ranks.append(RecoveredRank(rank, incarnations[rank], None, launches.get(rank, 0), is_empty))
    running = tuple(
        RecoveredCell(task.cell, task.ranks, task.running, task.answers, task.collectives, task.internal, task.is_cell)
        for task in tasks
        if task.running
    )
    # Ranks that have failed in a task with collectives may be at different ones. Running tasks decide this when they
    # end.
    stale = any(
        task.collectives and any(task.answers.values()) for task in tasks if not task.running and not task.internal
    )
    generations = {report.start.generation for report in reports.values()}
    # A task that forms the group is under way and has not failed on any rank.
    forming = any(cell.internal and not any(cell.answers.values()) for cell in running)
    # All ranks live, and report the same generation, which is 0 for a rank that is in no group.
    grouped = len(reports) == world_size and (forming or (len(generations) == 1 and 0 not in generations))
    last_cell = max((report.start.cell for report in reports.values()), default=0)
    # The group being formed may have a generation that no rank reports yet. Skipping a number does no harm.
    return RecoveredState(tuple(ranks), running, last_cell, max(generations, default=0) + 1, grouped, stale)


def keep_newest_displays(messages: Sequence[Output], limit: int) -> list[Output]:
    """Return the messages without all but the newest `limit` displays and clears.

    Text stays, unless it was cleared.
    """
    places = [place for place, message in enumerate(messages) if isinstance(message, Display | Clear)]
    start = places[-limit] if len(places) > limit else 0
    cleared = max((place for place in places if place < start and isinstance(messages[place], Clear)), default=-1)
    older = [message for message in messages[cleared + 1 : start] if not isinstance(message, Display)]
    return [*older, *messages[start:]]


class OutputReplay:
    """Feed missed messages into cells, which show them in `sink`, every cell below a heading."""

    def __init__(
        self,
        reports: Mapping[int, ReplayReport],
        *,
        cluster_key: str,
        sink: Sink | None,
        exits: Mapping[int, RankExited] | None = None,
    ) -> None:
        self.cells: list[RunningCell] = []
        self.ended: list[RunningCell] = []
        self._reports = reports
        self._exits = exits or {}
        self._key = cluster_key
        self._sink = sink
        self._shortened: set[int] = set()

    def show_output(self) -> list[CellResult]:
        """Show the missed output and return the results of the cells that ended."""
        # First what is older than the last task, and what the dead ranks have left.
        self._show_stray_output()
        self._show_exit_output()
        results = []
        for task in recovered_tasks(self._reports):
            cell = self._make_cell(task)
            if not task.internal:
                self._emit_text(_heading(task))
            # The ranks have started it long ago. The cell is marked as running, so that its result has a duration.
            cell.start()
            self._replay_messages(cell)
            if task.running:
                self.cells.append(cell)
                continue
            cell.end(())
            self.ended.append(cell)
            if cell.result is not None and not task.internal:
                results.append(cell.result)
                if not cell.result.ok:
                    self._emit_text(describe_errors(cell.result.outcomes), "stderr")
        dropped = [rank for rank, report in self._reports.items() if report.start.dropped or rank in self._shortened]
        if dropped:
            self._emit_text(
                f"{name_ranks(dropped)}: the oldest output was dropped because there was too much of it", "stderr"
            )
        return results

    def _show_stray_output(self) -> None:
        """Show output of background threads that was printed after their cells had ended."""
        stray = {
            # The messages that belong to no open task: output of threads after the end of their cell.
            rank: [entry for entry in report.missed if getattr(entry, "cell", None) != self._open_cell(report)]
            for rank, report in self._reports.items()
        }
        stray = {rank: messages for rank, messages in stray.items() if messages}
        if not stray:
            return
        self._emit_text("output of background threads of cells that had already ended:")
        cell = RunningCell(
            0, 0, dict.fromkeys(stray, _NO_TASK), cluster_key=self._key, sink=self._sink, label="threads"
        )
        for rank, messages in stray.items():
            self._add_output(cell, rank, messages, len(stray))
        # The cell exists only to merge and show the output.
        cell.end(())

    def _show_exit_output(self) -> None:
        """Show the last output of the ranks that died meanwhile; nothing else of their output is left."""
        for rank, exited in sorted(self._exits.items()):
            text = (exited.stdout + exited.stderr).decode(errors="replace").strip()
            if text:
                self._emit_text(f"rank {rank} {describe_exit(exited)}; its last output:\n{text}", "stderr")

    @staticmethod
    def _open_cell(report: ReplayReport) -> int | None:
        return None if report.start.seen and not report.start.running else report.start.cell

    def _make_cell(self, task: RecoveredTask) -> RunningCell:
        tasks = dict.fromkeys(task.ranks, _NO_TASK)
        sink = None if task.internal else self._sink
        return RunningCell(task.cell, task.number, tasks, cluster_key=self._key, sink=sink, label=task.label)

    def _replay_messages(self, cell: RunningCell) -> None:
        missed = {
            rank: [entry for entry in self._reports[rank].missed if getattr(entry, "cell", None) == cell.cell]
            for rank in cell.ranks
        }
        for rank, messages in missed.items():
            self._add_output(cell, rank, messages, len(missed))
        # After all output, so that output that is equal on several ranks is merged.
        for rank, messages in missed.items():
            for message in messages:
                if isinstance(message, InputRequest):
                    cell.ask(rank, message)
                elif isinstance(message, Done):
                    cell.rank_done(rank, message, [])

    def _add_output(self, cell: RunningCell, rank: int, messages: Sequence[object], ranks: int) -> None:
        output = [entry for entry in messages if isinstance(entry, Text | TextCut | Display | Clear)]
        newest = keep_newest_displays(output, max(1, MAX_DISPLAYS // ranks))
        if len(newest) < len(output):
            self._shortened.add(rank)
        for message in newest:
            cell.add_output(rank, message)

    def _emit_text(self, text: str, stream: str = "stdout") -> None:
        if self._sink is not None:
            self._sink.emit([Stream(stream, text.rstrip("\n") + "\n")])  # type: ignore[arg-type]


_NO_TASK: tuple[Done, tuple[bytes, ...]] = (Done(cell=0, status="ok", seconds=0.0), ())
"""Placeholder for the task, which the ranks have already received."""


def _heading(task: RecoveredTask) -> str:
    if task.running:
        done = [rank for rank in task.ranks if rank not in task.running and not task.answers.get(rank)]
        outcomes = [f"rank {rank} {outcome}" for rank, outcome in sorted(task.answers.items()) if outcome]
        outcomes += [f"{name_ranks(done)} finished"] if done else []
        rest = f" ({'; '.join(outcomes)})" if outcomes else ""
        return (
            f"{task.label} still runs on {name_ranks(task.running)}{rest}; its output so far, followed by new output:"
        )
    return f"{task.label} ended on {name_ranks(task.ranks)}; its output:"
