"""Driver thread of a cluster: performs the actions of the state machine and receives the ranks' messages.

This page is the theory of operation of the coordinator. `Driver` runs the thread. Its helpers are `TimerQueue`
(callbacks that are due later), `MessageReceiver` (receives messages, and handles those that are unreadable or make a
handler raise) and `ShutdownManager` (asks a rank to exit and kills it after a grace period). `ReattachedDriver`, for
a kept cluster, also acknowledges finished cells to the ranks, which keep their messages until then.

Threads. A cluster has one driver thread. Only this thread receives: the ranks' messages on the hub link, process events
from the launcher, and expired timers. Only this thread merges and shows the ranks' output and ends cells. Every other
thread (the notebook's main thread, a view's thread, a user's thread) acts on the cluster through `post`, which takes
the lock `changed`, lets the state machine decide, and performs the resulting actions before it returns. Decisions are
therefore serialized, whichever thread brings the event, and a task is sent by the thread that submits it, without a
thread switch. `post` leaves three actions to the driver thread because they show output: notes to the user, the loss of
a cell's rank, and the end of a cell. After an event from another thread the driver thread is woken, because the event
may have set a deadline earlier than the one it sleeps until.

Messages. The notebook sends a rank tasks (`RunCell`, `CallFunction`, `Assign`, `FetchValue`, `Regroup`, ...), which the
rank runs one at a time. It also sends `Interrupt`, `Abort`, `InputReply`, `Shutdown` and the queries of the live views,
which the rank's control thread handles at once. A rank sends `RankReady` when its process is ready; `Text`, `Display`
and `Clear` while a task runs; `InputRequest` when the task calls `input()`; one `Done` per task; and replies to
queries. The forkserver reports every process that it has forked and every process that has ended.

A cell, from submission to end:

1. The main thread makes a `RunningCell` and calls `submit`. If the cell's ranks are idle, the state machine answers
   with `SendTask`, and the tasks have been sent when `submit` returns. Otherwise the cell is queued until the
   `CellDone` of other cells frees its ranks.
2. The main thread calls `wait.wait_for_cell` and sleeps on the queue `cell.inbox`. Three things wake it: a question for
   the user, the end of the cell, and SIGINT, whose handler puts None into the queue.
3. Output arrives. The driver thread merges it (`RunningCell.add_output`) and emits what is due (`OutputFlusher.flush`),
   at most every 50 ms.
4. An `InputRequest` becomes an `InputQuestion` in the queue. The main thread asks the user and sends the answer with
   `reply`.
5. A rank's `Done` becomes the event `CellDone`. After the last rank's, the state machine decides on `EndCell`. This
   action is deferred until the driver thread has handled everything that has arrived: an event from another thread,
   such as a second interrupt, must not end a cell while the driver thread is merging its output.
6. The driver thread ends the cell: it shows the rest of the output, builds the `CellResult`, calls the cell's callbacks
   (`on_change`), and puts `CellEnded` into the queue. The main thread returns from `wait_for_cell`; all of the output
   has been shown by then. Ranks that are still running (stragglers) may send more output, which is shown in the same
   cell.

Failures. After an interrupt (`InterruptCell`), grace periods (`StartTimer`) determine when the cell's collectives are
aborted and when the cell ends without its stragglers. The end of a process is handled 20 ms after the forkserver has
reported it, because the rank's last messages may still be on the link; `RankGone` then settles everything that waited
for the rank. When all exits that have been received are handled, one message tells the other ranks of them. While a
cell runs, the event `CheckCollectives` compares the ranks' reports of their collectives and finds ranks that wait for a
peer that will never join. If a message cannot be handled, only its sender is affected (`MessageReceiver`). Any other
exception on the driver thread ends all cells (`Driver._fail`), so that no thread waits forever; those of the callbacks
of others (`Driver.after`, `RunningCell.on_change`) are only reported.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rankbook.coordinator import actions as act
from rankbook.coordinator import events as ev
from rankbook.coordinator.deadlock import CollectiveReport
from rankbook.coordinator.liveness import (
    LivenessTracker,
    RankProcess,
    describe_exit,
    describe_failure,
    describe_straggler,
    read_remains,
    replay_remains,
)
from rankbook.coordinator.running_cell import OutputFlusher, RunningCell, input_unavailable
from rankbook.coordinator.state_machine import ClusterState, RecoveredClusterState
from rankbook.coordinator.states import GracePeriods, RankEntry, RankState
from rankbook.errors import ClusterStopped, ProtocolError, RankbookError, UnreadableMessage
from rankbook.launch.local import Launcher
from rankbook.protocol.forkserver import ForkRank, RankExited, RankForked
from rankbook.protocol.messages import (
    Abort,
    Acknowledge,
    Clear,
    Collectives,
    CommFromRank,
    DapFromRank,
    Display,
    Done,
    FromForkserver,
    FromRank,
    GetCollectives,
    InputReply,
    InputRequest,
    Interrupt,
    LimitOutput,
    OutputBarrier,
    RankReady,
    RanksLost,
    Regroup,
    ReplayStart,
    Shutdown,
    ShutdownDelayed,
    Stack,
    StartFailed,
    Text,
    TextCut,
)
from rankbook.protocol.queries import QueryReply
from rankbook.transport import HubLink, Sender

_EXIT_DELAY = 0.02
"""Seconds after a rank's exit during which its last messages may still be on the link."""
_CLOSE_DELAY = 0.25
"""Seconds until a widget that a rank has closed is closed in the front end: its display may wait in a merger."""
_LOSS_REPORT_INTERVAL = 0.01
"""Seconds between two messages that tell the ranks which others have exited: a thousand exits do not arrive at once."""
_RECENT_CELLS = 64
"""Number of ended cells that still receive the output of their background threads."""
STOPPED = "the ranks were stopped; start new ones with rankbook.start() or %distributed start"


@dataclass(frozen=True, eq=False)
class _RankLoss:
    """A rank that `cell` has lost; `reason` is a whole sentence."""

    cell: RunningCell
    rank: int
    reason: str


class Driver:
    """Run one cluster until `close`.

    `request(rank, incarnation, downlink)` returns the `ForkRank` message that the launcher needs to fork that rank.
    """

    kept = False  # True if the ranks outlive this process

    def __init__(
        self, state: ClusterState, hub: HubLink, launcher: Launcher, request: Callable[[int, int, str], ForkRank]
    ) -> None:
        self.state = state
        self.rank_processes = {rank: RankProcess() for rank in state.ranks}
        # The lock is reentrant: `submit`, `Cluster.interrupt` and `ClusterProcesses.discard` call `post` while they
        # hold it.
        self.changed = threading.Condition(threading.RLock())
        self.start_errors: dict[int, str] = {}
        self.failed_exits: dict[int, str] = {}  # of ranks that were asked to exit, and ended with an exit code
        self.liveness = LivenessTracker(
            self.changed,
            hub.send,
            lambda rank: self.rank_processes[rank].pid,
            lambda rank: launcher.process_info(rank, self.rank_processes[rank].pid),
        )
        self.failure: BaseException | None = None
        # Called on the driver thread when a cell has given an empty rank variables.
        self.on_filled: Callable[[], None] = lambda: None
        self._hub = hub
        self._launcher = launcher
        self._request = request
        # Variables of all ranks, if ranks have moved to other hosts: those that stayed have to be told.
        self.places: tuple[dict[str, str], ...] = ()
        self._cells: dict[int, RunningCell] = {}
        self._recent: deque[int] = deque()
        self._flusher = OutputFlusher(self._cells, lambda number, ranks: hub.send_many(ranks, LimitOutput(cell=number)))
        # Actions that show output, deferred to the driver thread, in the order in which they were decided. The order
        # matters: a rank's loss must be shown before the end of the cell that it causes.
        self._ending: deque[act.EndCell | _RankLoss] = deque()
        self._next_loss_report: float | None = None
        self._last_loss_report = -math.inf
        self._timers = TimerQueue()
        self.shutdown_manager = ShutdownManager(hub, launcher, self.after, state.grace)
        self._receiver = MessageReceiver(hub, state.ranks, self._receive, self.cell_of, launcher.kill)
        self._next_check: float | None = None
        self._closing = False
        self._notify_due = False
        self._thread_id: int | None = None
        self._watched_files: tuple[int, ...] = (launcher.fileno(),)
        # A daemon thread, because the interpreter joins all other threads before it calls the functions of `atexit`,
        # and the one that stops the clusters is such a function. Any other thread would make the notebook's process
        # hang at its exit.
        self._thread = threading.Thread(target=self._run, name="rankbook-driver", daemon=True)
        vars(self._thread)["pydev_do_not_trace"] = True  # a debugger that pauses the notebook must not stop this thread

    def start(self) -> None:
        """Start the driver thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the driver thread and join it. The ranks must have exited or been abandoned before."""
        # The flag first: `wake` ends the wait, after which the thread reads the flag. The loop does not handle what
        # arrives after that.
        self._closing = True
        self._hub.wake()
        if self._thread.is_alive():
            self._thread.join()

    def check_running(self) -> None:
        """Raise `ClusterStopped` after `close`, and `RankbookError` if the driver has failed."""
        if self._closing:
            raise ClusterStopped(STOPPED)
        if self.failure is not None:
            raise RankbookError(f"the coordinator failed ({self.failure}); stop and start again")

    def submit(self, cell: RunningCell) -> None:
        """Run `cell` as soon as its ranks are idle. Raises as `check_running`, and `RankLostError`. Any thread."""
        with self.changed:
            # Under the lock: nothing would end a cell that is queued after its rank has died or the driver has ended.
            self.check_running()
            self.state.check_available(cell.ranks)
            # The cell is stored before the event is posted, because `SendTask` looks it up while `post` performs the
            # actions.
            self._cells[cell.cell] = cell
            self.post(ev.Submit(cell.cell, cell.ranks, cell.defines_variables))

    def post(self, event: ev.Event) -> None:
        """Pass an event to the state machine and perform the resulting actions. Any thread."""
        is_driver = threading.get_ident() == self._thread_id
        with self.changed:
            # Decide and perform under one lock. If the lock were released in between, two threads could send the
            # messages of two decisions in the other order.
            for action in self.state.handle(event):
                self._perform(action)
            # The driver thread wakes others once, at the end of its round. A thread that wakes up competes for the
            # interpreter: one wake-up for each of 1,000 replies would take as long as the replies.
            if is_driver:
                self._notify_due = True
                return
            self.changed.notify_all()
        # After the lock has been released: otherwise the driver thread would wake up only to wait for the lock.
        self.wake()

    def wake(self) -> None:
        """Make the driver thread check its queue and its timers. Any thread."""
        # The driver thread computes its deadline anew after every event that it handles, so it needs no wake-up of its
        # own. After `_closing`, the link may have been closed already.
        if threading.get_ident() != self._thread_id and not self._closing:
            self._hub.wake()

    def reply(self, rank: int, reply: InputReply) -> None:
        """Send the user's answer to a rank that called `input()`. Any thread."""
        self._hub.send(rank, reply)

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` on the driver thread in `seconds`. Its errors are reported, and end nothing. Any thread."""

        def call() -> None:
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - shown in full; cells and ranks are unaffected
                sys.excepthook(type(error), error, error.__traceback__)

        self._schedule(seconds, call)

    def _schedule(self, seconds: float, callback: Callable[[], None]) -> None:
        # An error of one of the driver's own callbacks is not caught: other threads may wait for its event forever.
        self._timers.add(seconds, callback)
        self.wake()

    def live_ranks(self) -> tuple[int, ...]:
        """Return the ranks that can answer a query: those that are idle or busy."""
        return self.state.live_ranks()

    def wait_stacks(self, *, timeout: float) -> dict[int, Stack]:
        """Ask every rank for its stack; return the replies within `timeout` seconds. Not on the driver thread."""
        return self.liveness.wait_stacks(self.live_ranks(), timeout=timeout)

    def cell_of(self, rank: int) -> RunningCell | None:
        """Return the cell that the rank is running."""
        number = self.state.ranks[rank].cell
        return None if number is None else self._cells.get(number)

    def cells(self) -> list[RunningCell]:
        """Return the cells that run, are queued, or ended recently, oldest first."""
        return list(self._cells.values())

    def active_cells(self) -> list[RunningCell]:
        """Return the cells that have not ended, oldest first."""
        return [cell for cell in self.cells() if cell.result is None and cell.number >= 0]

    # Actions
    #
    # These methods run on the thread that called `post`, with `changed` held. They must not call `post` themselves: the
    # actions of the event that is being handled are not all performed yet. What has to be posted, or shown, is left to
    # the driver thread by `after(0.0, ...)` or `_schedule`.

    def _perform(self, action: act.Action) -> None:
        match action:
            case act.Fork(rank, incarnation):
                # A new process: its PID is not known before the forkserver reports it, and the replies that the old
                # process owed will not come.
                self.rank_processes[rank] = RankProcess()
                self.liveness.forget(rank)
                self._fork(rank, incarnation)
            case act.Kill(rank, incarnation, idle):
                self.shutdown_manager.shut_down(rank, incarnation, graceful=idle)
            case act.FormGroup() | act.ReplaceRanks():
                self._perform_grouping(action)
            case act.SendTask(number, ranks):
                cell = self._cells[number]
                for rank in ranks:
                    # The number is still needed when the rank is idle again: if its process dies then, what is left of
                    # its output belongs to the cell that it ran last.
                    self.rank_processes[rank].last_cell = number
                # Ranks that follow one another with the same task are sent it together, so that it is encoded once.
                for _, group in itertools.groupby(ranks, lambda rank: tuple(map(id, cell.tasks[rank]))):
                    same = tuple(group)
                    self._hub.send_many(same, *cell.tasks[same[0]])
                if cell.start():
                    self._flusher.add(number)
            case act.SendInterrupt(number, ranks):
                self._hub.send_many(ranks, Interrupt(cell=number))
            case (
                act.StartTimer()
                | act.ScheduleCheck()
                | act.RequestCollectives()
                | act.SendAbort()
                | act.ScheduleLossReport()
                | act.SendLosses()
            ):
                self._perform_monitoring(action)
            # Only the driver thread may show output, and this thread may be another one.
            case act.NotifyUser(noted, text):
                self.after(0.0, lambda: self._cells[noted].note(text))
            case act.NotifyQueued(number, busy):
                self._cells[number].waiting_behind = busy
                self._cells[number].notify_change()
            case act.NotifyRankLost(rank, reason, number, _expected):
                self._record_rank_lost(rank, reason, number)
            case act.EndCell():
                self._ending.append(action)

    def _perform_grouping(self, action: act.FormGroup | act.ReplaceRanks) -> None:
        if isinstance(action, act.FormGroup):
            number, ranks = action.cell, self.state.ranks
            regroup = Regroup(number, action.generation, len(ranks), action.anew, self.places)
            self._cells[number] = RunningCell(
                number, -1, dict.fromkeys(ranks, (regroup, ())), cluster_key="", sink=None, label="forming the group"
            )
            return
        # The processes of former ranks have ended, and nobody looks for them.
        for rank in self.state.ranks:
            self.rank_processes.setdefault(rank, RankProcess())
        self._receiver.ranks = self.state.ranks

    def _perform_monitoring(
        self,
        action: act.StartTimer
        | act.ScheduleCheck
        | act.RequestCollectives
        | act.SendAbort
        | act.ScheduleLossReport
        | act.SendLosses,
    ) -> None:
        match action:
            case act.StartTimer(ending, seconds, step):
                self._schedule(seconds, lambda: self.post(ev.TimerFired(ending, step)))
            case act.ScheduleCheck(seconds):
                # Keep the earlier of the two times, except one that has passed or was never set (0.0).
                now, before = time.monotonic(), self._next_check or 0.0
                self._next_check = before if now <= before <= now + seconds else now + seconds
            case act.RequestCollectives(ranks):
                self._hub.send_many(ranks, GetCollectives(token=0))
            case act.SendAbort(ranks, groups, cause, mismatch):
                # All ranks learn the cause; only `ranks` abort their collectives (`shut`).
                live = self.live_ranks()
                aborted = set(ranks)
                not_aborted = [rank for rank in live if rank not in aborted]
                for members, shut in ((sorted(aborted.intersection(live)), True), (not_aborted, False)):
                    if members:
                        self._hub.send_many(members, Abort(groups, cause, shut, ranks, mismatch=mismatch))
            case act.ScheduleLossReport():
                # At once after a quiet moment, at the end of this round.
                self._next_loss_report = self._last_loss_report + _LOSS_REPORT_INTERVAL
            case act.SendLosses(ranks, causes):
                self._hub.send_many(ranks, RanksLost(causes))

    def _record_rank_lost(self, rank: int, reason: str, number: int | None) -> None:
        if (cell := self._cells.get(number or 0)) is not None:
            self._ending.append(_RankLoss(cell, rank, f"rank {rank} {reason} while running {cell.label}"))
        # Queued cells of this rank fail too. If the rank is being restarted, they wait for its new process.
        for cell in self.active_cells():
            if cell.started is None and rank in cell.ranks and not self.state.ranks[rank].refork:
                self._ending.append(_RankLoss(cell, rank, f"rank {rank} {reason} before {cell.label} could run"))

    def _fork(self, rank: int, incarnation: int) -> None:
        try:
            # The downlink is bound before the process exists, so that the rank can connect at once. Its address is part
            # of the request.
            request = self._request(rank, incarnation, self._hub.open_downlink(rank, incarnation))
            self.rank_processes[rank].segments = request.segments
            self._launcher.fork(request)
        except (RankbookError, OSError) as error:  # the folder is full or was deleted, or the forkserver has ended
            reason = f"could not be started: {error}"
            self.start_errors[rank] = f"rank {rank} {reason}"
            # Not posted here, in the middle of another event's actions. `RankGone` handles it as a death: the rank has
            # left no process.
            self._schedule(0.0, lambda: self.post(ev.RankGone(rank, incarnation, reason)))

    # Driving

    def _run(self) -> None:
        self._thread_id = threading.get_ident()
        try:
            while not self._closing:
                received, files = self._hub.wait(self._seconds_to_deadline(), self._watched_files)
                if not self._closing:
                    self._handle(received, files)
        except Exception as error:  # noqa: BLE001 - reported to all waiting threads and to sys.excepthook
            self._fail(error)

    # The order matters. A rank's messages come first, because they were sent before its exit. Ends of cells come after
    # all events of this round, then the threads that wait for them, and last the output, which may be due because of
    # any of them.
    def _handle(self, received: bool, files: set[int]) -> None:
        if received:
            self._receiver.receive()
        if files:
            for message in self._launcher.read():
                self._handle_forkserver_message(message)
            # At end of file the descriptor stays readable, and polling it again would return at once, forever.
            if not self._launcher.alive:
                self._watched_files = ()
                self._lose_launcher()
        self._timers.run_due()
        # Both are reset before posting: a check itself schedules the next one, and another thread may report a loss.
        if self._next_loss_report is not None and (now := time.monotonic()) >= self._next_loss_report:
            self._next_loss_report, self._last_loss_report = None, now
            self.post(ev.LossReportDue(now))
        if self._next_check is not None and (now := time.monotonic()) >= self._next_check:
            self._next_check = None
            self.post(ev.CheckCollectives(now))
        self._end_cells()
        if self._notify_due:
            self._notify_due = False
            with self.changed:
                self.changed.notify_all()
        self._flusher.flush(time.monotonic())

    def _seconds_to_deadline(self) -> float | None:
        """Return the seconds until the next deadline; None without one."""
        # Another thread may have added an end after `_end_cells` has run, and an event may have been posted while
        # output was shown. Neither must wait for the next message.
        if self._ending or self._notify_due:
            return 0.0
        due = [self._timers.next, self._flusher.deadline, self._next_loss_report]
        # Without a cell there is nothing to check, and an idle notebook should not wake up.
        if self.state.cells:
            due.append(self._next_check)
        times = [deadline for deadline in due if deadline is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _end_cells(self) -> None:
        while self._ending:
            ending = self._ending.popleft()
            # A loss is part of a cell's output and of its result, so it comes before the cell's end in the queue.
            if isinstance(ending, _RankLoss):
                ending.cell.rank_lost(ending.rank, ending.reason)
                continue
            cell = self._cells[ending.cell]
            if ending.mismatch:
                cell.fail(ending.mismatch)
            cell.end(ending.stragglers, lambda rank: describe_straggler(rank, self.liveness.straggler(rank)))
            # A straggler may be in `input()`, or may call it later. Nobody waits for its questions any more, so without
            # this reply it would wait forever.
            for rank in ending.stragglers:
                self._hub.send(rank, input_unavailable(ending.cell))
            # Background threads of ended cells may still print. The oldest cells are dropped, but not while a straggler
            # has yet to finish.
            self._recent.append(ending.cell)
            while len(self._recent) > _RECENT_CELLS:
                oldest = self._recent.popleft()
                if self._cells[oldest].closed:
                    del self._cells[oldest]
                    self._flusher.discard(oldest)
                else:
                    self._recent.append(oldest)
                    break
            # Wakes `ClusterProcesses.launch`, which waits until no internal cell is left.
            self._notify_due = True

    def _receive(self, sender: Sender, message: FromRank, frames: list[memoryview]) -> None:
        # `MessageReceiver` has dropped the messages of earlier incarnations.
        rank, incarnation = sender
        self.liveness.record_message(rank)
        match message:
            case Done():  # first, since every rank sends one for every cell
                self._done(rank, incarnation, message, frames)
            case RankReady():
                self.post(ev.RankConnected(rank, incarnation))
            case StartFailed():
                self.start_errors[rank] = f"rank {rank} could not be set up:\n{message.report.plain}"
            case ShutdownDelayed():
                self.shutdown_manager.extend_deadline(rank, incarnation, message.seconds)
            case CommFromRank(kind="close"):
                self.after(_CLOSE_DELAY, lambda: self._close_comm(rank, message, frames))
            case Stack() | QueryReply() | CommFromRank() | DapFromRank():
                self.liveness.dispatch(rank, message, frames)
            case Collectives():
                self.post(ev.CollectivesReceived(rank, incarnation, CollectiveReport(message, time.monotonic())))
            # A rank may ask after the end of its cell: from a background thread, or as a straggler.
            case InputRequest():
                cell = self._cells.get(message.cell)
                if cell is not None and cell.result is None:
                    cell.ask(rank, message)
                else:
                    self._hub.send(rank, input_unavailable(message.cell))
            case ReplayStart():
                pass  # a late reply to a handshake (reattach.py) that timed out
            # Text, TextCut, Display, Clear and OutputBarrier. Output of a cell that has been dropped is lost, as
            # documented at `_RECENT_CELLS`.
            case _:
                if message.cell in self._cells:
                    self._cells[message.cell].add_output(rank, message)
                    self._flusher.add(message.cell)

    def _done(self, rank: int, incarnation: int, message: Done, frames: list[memoryview]) -> None:
        cell = self._cells.get(message.cell)
        # The result is recorded before the event is posted. The event may end the cell, and the result must be complete
        # then.
        if cell is not None:
            cell.rank_done(rank, message, frames)
            self._flusher.add(message.cell)
            if cell.number < 0:
                self._note_start_error(rank, message)
        failure, was_empty = describe_failure(message, cell), self.state.ranks[rank].empty
        self.post(
            ev.CellDone(
                rank,
                incarnation,
                message.cell,
                bool(failure),
                failure,
                message.collectives,
                message.groups,
                message.lost_device,
                message.place,
            )
        )
        if was_empty and not self.state.ranks[rank].empty:
            self.on_filled()
        # A late `Done` of a straggler: those who show the cell as still running must learn that it has ended.
        if cell is not None and cell.result is not None:
            cell.notify_change()

    def _note_start_error(self, rank: int, message: Done) -> None:
        """Note why a rank could not form the process group.

        The internal cell has no output in which it could be seen. `ClusterProcesses.launch` raises it, and the cells
        that need the group show it: they run all the same.
        """
        is_abort = message.error is not None and message.error.name == "CollectiveAborted"
        if (is_abort or message.status == "interrupted") and self.start_errors:
            return  # a consequence of the error of another rank
        if message.status == "interrupted":
            self.start_errors[rank] = f"rank {rank} was interrupted while the process group was formed"
        elif message.error is not None:
            self.start_errors[rank] = f"rank {rank}: {message.error.plain}"
            reason = message.error.value.removeprefix("cannot form the process group: ")
            for waiting in self.active_cells():
                waiting.note_once(f"the process group could not be formed: {reason}\n")

    def _close_comm(self, rank: int, message: CommFromRank, frames: list[memoryview]) -> None:
        for cell in self.active_cells():
            cell.forget_widget(message.comm)
        self.liveness.dispatch(rank, message, frames)

    def _handle_forkserver_message(self, message: FromForkserver) -> None:
        match message:
            case RankForked():
                self.rank_processes[message.rank].pid = message.pid
            case RankExited():
                # The exit and the messages come over different sockets, in no particular order. An agent has waited.
                if message.ordered:
                    self._handle_rank_exit(message)
                else:
                    self._schedule(_EXIT_DELAY, lambda: self._handle_rank_exit(message))
            case _:
                pass

    def _handle_rank_exit(self, message: RankExited) -> None:
        # Order: show the output that did not arrive, then post the event, which may end the cell, and at last wake the
        # threads that wait for replies of this rank. The files are removed also for an earlier incarnation.
        rank = self.state.ranks.get(message.rank)
        # Read and remove the files even if the process belongs to an earlier incarnation, and even if no cell wants the
        # text.
        process = self.rank_processes.setdefault(message.rank, RankProcess())
        sent = read_remains(message, process.segments)
        if rank is None or message.incarnation != rank.incarnation:
            return
        # An idle rank may die too, for example by a background thread. Its last output belongs to the last cell.
        number = rank.cell if rank.cell is not None else self.rank_processes[message.rank].last_cell
        cell = self._cells.get(number) if number is not None else None
        replay_remains(message, sent, self._cells, cell)
        reason = self._receiver.kill_reason(message.rank, message.incarnation) or describe_exit(message)
        # A death while the group is formed is an error of the start, like a death before `RankReady`.
        forming = cell is not None and cell.number < 0 and cell.result is None
        if rank.state is RankState.STARTING or forming:
            during = "while the process group was formed" if forming else "while it started"
            stderr = message.stderr.decode(errors="replace").strip()[-2000:]
            # `StartFailed` and a failed regroup, which arrived before, say more than the exit status.
            self.start_errors.setdefault(message.rank, f"rank {message.rank} {reason} {during}\n{stderr}".rstrip())
        if rank.state is RankState.LEAVING and message.code > 0:
            self.failed_exits[message.rank] = reason
        self.post(ev.RankGone(message.rank, message.incarnation, reason))
        self.liveness.forget(message.rank)  # last: threads that wait for a reply then find the rank dead

    def _lose_launcher(self) -> None:
        # The ranks die with the forkserver (`os_utils.die_with_parent`, or the liveness pipe), and no process is left
        # that could report it.
        for rank in self.state.ranks.values():
            if rank.state not in (RankState.ABSENT, RankState.DEAD):
                self.post(ev.RankGone(rank.rank, rank.incarnation, "was lost because the forkserver exited"))

    def _fail(self, error: BaseException) -> None:
        """End all cells with `error`, a bug of the driver or a broken link. The driver thread ends."""
        # `failure` is set before the cells end: a thread that wakes up and asks for the driver gets this error.
        with self.changed:
            self.failure = error
            for cell in self.active_cells():
                for rank in cell.ranks:
                    cell.rank_lost(rank, f"rank {rank} was lost because the coordinator failed: {error}")
                cell.end(())
            self.changed.notify_all()
        sys.excepthook(type(error), error, error.__traceback__)


class TimerQueue:
    """Callbacks ordered by the time they are due. Any thread may add one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        # Breaks ties between equal times: callbacks cannot be compared.
        self._count = itertools.count()

    def add(self, seconds: float, callback: Callable[[], None]) -> None:
        """Schedule `callback` in `seconds`."""
        with self._lock:
            heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._count), callback))

    @property
    def next(self) -> float | None:
        """Return the time of the first callback, on the monotonic clock."""
        with self._lock:
            return self._heap[0][0] if self._heap else None

    def run_due(self) -> None:
        """Run every callback that is due."""
        # Another thread may add an earlier callback between the two locks. It is then popped first, and it is due as
        # well. Only this thread removes callbacks, so the queue is not empty. The callback runs without the lock,
        # because it may add timers.
        while (due := self.next) is not None and due <= time.monotonic():
            with self._lock:
                callback = heapq.heappop(self._heap)[2]
            callback()


# Messages whose loss leaves nobody waiting: output, and replies whose requests have timeouts.
_DISPENSABLE = (
    Text,
    TextCut,
    Display,
    Clear,
    OutputBarrier,
    CommFromRank,
    DapFromRank,
    Stack,
    Collectives,
    QueryReply,
    ShutdownDelayed,
)
_MAX_ERROR_LENGTH = 500
"""Characters of an error quoted in a reason. An `IllegalTransition` has a long message: the recent events."""


class MessageReceiver:
    """Receive the messages of `ranks` over `hub` and pass them to `handle(sender, message, frames)`.

    `cell_of(rank)` returns the cell that the rank runs; `kill(rank, incarnation)` kills the rank. Driver thread only.

    Every message names the incarnation of its sender, and messages of earlier processes of a rank are dropped. If a
    message cannot be decoded, or its handler raises, the rank is killed, because a lost `Done` or `RankReady` would
    block the cluster. If the message is one that nothing waits for (`_DISPENSABLE`), only that message is dropped, with
    a note in the rank's cell.
    """

    def __init__(
        self,
        hub: HubLink,
        ranks: Mapping[int, RankEntry],
        handle: Callable[[Sender, FromRank, list[memoryview]], None],
        cell_of: Callable[[int], RunningCell | None],
        kill: Callable[[int, int], None],
    ) -> None:
        self._hub = hub
        self.ranks = ranks
        self._handle = handle
        self._cell_of = cell_of
        self._kill = kill
        self._reasons: dict[Sender, str] = {}
        self._reported: set[object] = set()

    def receive(self) -> None:
        """Handle every message that has arrived."""
        while True:
            try:
                received = self._hub.receive()
            except UnreadableMessage as error:
                self._reject(None if error.sender is None else Sender(*error.sender), error)
                continue
            if received is None:
                return
            self.take(*received)

    def take(self, sender: Sender, message: FromRank, frames: list[memoryview]) -> None:
        """Handle one message, unless it is from an earlier process of its rank."""
        # Messages of a killed process are ordinary: they were on the way. Only a rank that never existed is an error.
        if not self._is_current(sender):
            if sender.rank not in self.ranks:
                self._report(None, ProtocolError(f"received a message from rank {sender.rank}, which does not exist"))
            return
        try:
            self._handle(sender, message, frames)
        except Exception as error:  # noqa: BLE001 - shown in full by `_report`; other ranks are unaffected
            self._drop_message(sender, message, error)

    def kill_reason(self, rank: int, incarnation: int) -> str | None:
        """Return why this process was killed for a message, worded to follow `rank 2`; None if it was not."""
        return self._reasons.get(Sender(rank, incarnation))

    def _is_current(self, sender: Sender) -> bool:
        rank = self.ranks.get(sender.rank)
        return rank is not None and rank.incarnation == sender.incarnation and sender not in self._reasons

    def _reject(self, sender: Sender | None, error: UnreadableMessage) -> None:
        if sender is None or sender.rank not in self.ranks:
            self._report(None, error)
        elif self._is_current(sender):
            self._kill_sender(sender, f"was killed because it sent a message that cannot be decoded ({_brief(error)})")

    def _drop_message(self, sender: Sender, message: FromRank, error: Exception) -> None:
        kind = type(message).__name__
        # Once per kind and process: a rank may send thousands of messages of one kind.
        first = self._report((sender, kind), error)
        if not isinstance(message, _DISPENSABLE):
            self._kill_sender(sender, f"was killed because it sent a {kind} that cannot be handled ({_brief(error)})")
        elif first:
            warning = f"dropped a {kind} from rank {sender.rank} that cannot be handled ({_brief(error)})\n"
            if (cell := self._cell_of(sender.rank)) is not None:
                cell.note(warning)

    def _kill_sender(self, sender: Sender, reason: str) -> None:
        # Set before the kill: from now on `_is_current` drops the messages of this process.
        self._reasons[sender] = reason
        self._kill(*sender)

    def _report(self, key: object, error: Exception) -> bool:
        """Report the whole error once per `key`. Return True if this was the first time."""
        if key in self._reported:
            return False
        self._reported.add(key)
        sys.excepthook(type(error), error, error.__traceback__)
        return True


def _brief(error: Exception) -> str:
    text = str(error) if isinstance(error, ProtocolError) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0][:_MAX_ERROR_LENGTH]


class ShutdownManager:
    """Graceful shutdown: ask a rank to exit, kill it after a grace period.

    `after(seconds, callback)` schedules a callback on the driver thread.
    """

    def __init__(
        self,
        hub: HubLink,
        launcher: Launcher,
        after: Callable[[float, Callable[[], None]], None],
        grace: GracePeriods,
    ) -> None:
        self._hub, self._launcher, self._after = hub, launcher, after
        self._grace_seconds = grace.leave
        self._deadlines: dict[tuple[int, int], float] = {}
        self.patience = grace.save

    def shut_down(self, rank: int, incarnation: int, *, graceful: bool) -> None:
        """Make the rank exit: ask it to if `graceful` and its link works, otherwise kill it at once."""
        # A busy rank cannot exit gracefully: its main thread runs the user's code. It is killed at once.
        if graceful:
            # Before the request: the driver thread may handle the rank's answer, which extends the deadline, while the
            # caller's thread still is in here.
            self._deadlines[rank, incarnation] = time.monotonic() + self._grace_seconds
            if self._hub.send(rank, Shutdown(patience=self.patience)):
                self._after(self._grace_seconds, lambda: self._kill_if_due(rank, incarnation))
                return
            del self._deadlines[rank, incarnation]
        self._launcher.kill(rank, incarnation)

    def extend_deadline(self, rank: int, incarnation: int, seconds: float) -> None:
        """Extend the rank's deadline by the `seconds` it asked for, at most `patience`."""
        if (rank, incarnation) in self._deadlines:
            self._deadlines[rank, incarnation] = time.monotonic() + min(seconds, self.patience) + self._grace_seconds

    @property
    def deadline(self) -> float:
        """Return the latest time at which a rank will be killed, by `time.monotonic()`."""
        return max(self._deadlines.values(), default=0.0)

    def _kill_if_due(self, rank: int, incarnation: int) -> None:
        remaining = self._deadlines[rank, incarnation] - time.monotonic()
        # The rank asked for more time (`extend_deadline`) after this timer had been set.
        if remaining > 0:
            self._after(remaining, lambda: self._kill_if_due(rank, incarnation))
        else:
            del self._deadlines[rank, incarnation]
            # The process may have exited long ago. The forkserver then knows no child of this incarnation and does
            # nothing.
            self._launcher.kill(rank, incarnation)


# Kept clusters --------------------------------------------------------------------------------------------------------


class ReattachedDriver(Driver):
    """Driver of a kept cluster, whose ranks keep messages until they are acknowledged.

    A cell is acknowledged to its ranks once its end has been shown, and to stragglers once their late `Done` has
    arrived.
    """

    kept = True

    def __init__(
        self, state: ClusterState, hub: HubLink, launcher: Launcher, request: Callable[[int, int, str], ForkRank]
    ) -> None:
        super().__init__(state, hub, launcher, request)
        self._unacknowledged: list[tuple[act.EndCell, tuple[int, ...]]] = []

    def resume(
        self,
        state: RecoveredClusterState,
        cells: Iterable[RunningCell],
        ended: Iterable[RunningCell],
        later: Iterable[tuple[Sender, FromRank, list[memoryview]]],
        reports: Iterable[FromForkserver] = (),
    ) -> None:
        """Acknowledge the `ended` cells, continue `cells`, handle the `later` messages. Called before `start`.

        `reports` of the forkserver have arrived meanwhile too.
        """
        # Their output has been shown, so the ranks can drop their copies.
        for cell in ended:
            self._acknowledge(cell.cell, cell.ranks)
        # As in `Driver.submit`, the cells are stored before actions are performed on them.
        with self.changed:
            for cell in cells:
                self._cells[cell.cell] = cell
                self._flusher.add(cell.cell)
            for action in state.resume():
                self._perform(action)
        # At last: they are newer than everything that was recovered.
        for received in later:
            self._receiver.take(*received)
        for report in reports:
            self._handle_forkserver_message(report)

    def _perform(self, action: act.Action) -> None:
        super()._perform(action)
        if isinstance(action, act.EndCell):
            # Acknowledged when the driver thread has ended the cell, not now: if this process died in between, the
            # output would be lost. Ranks to which a queued cell was never sent have nothing to acknowledge.
            cell = self._cells[action.cell]
            self._unacknowledged.append((action, cell.ranks if cell.started is not None else ()))

    def _end_cells(self) -> None:
        super()._end_cells()
        # `_ending` contains the cells that are still to be ended.
        for pending in [pending for pending in self._unacknowledged if pending[0] not in self._ending]:
            self._unacknowledged.remove(pending)
            action, ranks = pending
            self._acknowledge(action.cell, [rank for rank in ranks if rank not in action.stragglers])

    def _done(self, rank: int, incarnation: int, message: Done, frames: list[memoryview]) -> None:
        cell = self._cells.get(message.cell)
        # Read before the message is handled, which may end the cell.
        late = cell is None or cell.result is not None
        super()._done(rank, incarnation, message, frames)
        if late:
            self._acknowledge(message.cell, (rank,))

    def _acknowledge(self, cell: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._hub.send(rank, Acknowledge(cell=cell))
