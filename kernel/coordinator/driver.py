"""Performs what the state machine decides.

Owns: the driver's thread, the links, the launcher, the timers of one cluster. Refuses: to decide anything itself.

Any thread may hand in an event; the lock makes decisions one at a time, and what they need sent is sent at once, so
that a cell costs no thread switch on its way out. Everything that arrives is handled by whoever drives: the driver's
thread, or the one that waits for a cell (`taken_over`), which saves it the switch on the way back.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from rankbook.comms import CommSaid
from rankbook.coordinator import actions as act
from rankbook.coordinator import events as ev
from rankbook.coordinator.cell import Cell, Fed, nobody_to_ask
from rankbook.coordinator.exits import describe_exit, describe_failure, feed_last, sent_last
from rankbook.coordinator.farewells import Farewells
from rankbook.coordinator.inbox import Inbox
from rankbook.coordinator.presence import Presence, RankInfo
from rankbook.coordinator.silence import describe_straggler
from rankbook.coordinator.state import ClusterState
from rankbook.coordinator.tables import RankState
from rankbook.coordinator.timers import Timers
from rankbook.coordinator.watch import Told
from rankbook.debugging import DebugSaid
from rankbook.errors import RankbookError
from rankbook.forking import ForkRank, RankExited, RankForked
from rankbook.keeping import Here
from rankbook.launch.launcher import Launcher
from rankbook.looking import Answered
from rankbook.messages import (
    Abort,
    AskCollectives,
    Collectives,
    Done,
    FromForkserver,
    FromRank,
    Hello,
    InputReply,
    InputRequest,
    Interrupt,
    Lingering,
    Regroup,
    Stack,
    StartFailed,
)
from rankbook.transport.link import HubLink, Sender

_LAST_WORDS_SECONDS = 0.02
"""How long after a rank's end its last messages may still be on the link."""
_RECENT_CELLS = 64
"""How many ended cells still get what their background threads print."""


class Driver:
    """Runs one cluster until `close`. `request(rank, incarnation, downlink)` makes what the launcher needs."""

    kept = False  # whether its ranks outlive this process

    def __init__(
        self, state: ClusterState, hub: HubLink, launcher: Launcher, request: Callable[[int, int, str], ForkRank]
    ) -> None:
        self.state = state
        self.infos = {rank: RankInfo() for rank in state.ranks}
        self.changed = threading.Condition(threading.RLock())
        self.start_errors: dict[int, str] = {}
        self.presence = Presence(self.changed, hub.send, lambda rank: self.infos[rank].pid)
        self.failure: BaseException | None = None
        self._hub = hub
        self._launcher = launcher
        self._request = request
        self._cells: dict[int, Cell] = {}
        self._recent: deque[int] = deque()
        self._fed = Fed(self._cells)
        self._ending: deque[act.EndCell] = deque()
        self._timers = Timers()
        self.farewells = Farewells(hub, launcher, self.after, state.grace)
        self._inbox = Inbox(hub, state.ranks, self._receive, self.cell_of, launcher.kill)
        self._look_at: float | None = None
        self._closing = False
        self._watched: tuple[int, ...] = (launcher.fileno(),)
        self._wheel = threading.Lock()
        self._taken = False
        self._drives: int | None = None
        self._thread = threading.Thread(target=self._run, name="rankbook-driver", daemon=True)
        vars(self._thread)["pydev_do_not_trace"] = True  # a debugger that pauses the notebook must not pause the ranks

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. The ranks must be gone or be given up."""
        self._closing = True
        self._hub.wake()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, cell: Cell) -> None:
        """Run `cell` as soon as its ranks are free. Any thread."""
        with self.changed:
            self._cells[cell.cell] = cell
            self.post(ev.Submit(cell.cell, cell.ranks, cell.fills))

    def post(self, event: ev.Event) -> None:
        """Hand in an event and perform what follows. Any thread."""
        with self.changed:
            for action in self.state.handle(event):
                self._perform(action)
            self.changed.notify_all()
        if self._ending and threading.get_ident() != self._drives:
            self._hub.wake()

    def reply(self, rank: int, reply: InputReply) -> None:
        """Send an answer to a rank's question. Any thread."""
        self._hub.send(rank, reply)

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back on the thread that drives. Any thread."""
        self._timers.add(seconds, callback)
        if threading.get_ident() != self._drives:
            self._hub.wake()

    def answering(self) -> tuple[int, ...]:
        """The ranks that can be asked something."""
        return tuple(each.rank for each in self.state.ranks.values() if each.state in (RankState.IDLE, RankState.BUSY))

    def wait_stacks(self, *, timeout: float) -> dict[int, Stack]:
        """Ask every rank where it is; what came back within `timeout` seconds. Any thread but the driver's."""
        return self.presence.wait_stacks(self.answering(), timeout=timeout)

    def cell_of(self, rank: int) -> Cell | None:
        """The cell that the rank runs."""
        number = self.state.ranks[rank].cell
        return None if number is None else self._cells.get(number)

    def cells(self) -> list[Cell]:
        """Those that run, wait, or have ended lately, oldest first."""
        return list(self._cells.values())

    def active_cells(self) -> list[Cell]:
        """The cells that have not ended, oldest first."""
        return [cell for cell in self.cells() if cell.result is None and cell.number >= 0]

    # Actions

    def _perform(self, action: act.Action) -> None:
        match action:
            case act.Fork(rank, incarnation):
                self.infos[rank] = RankInfo()
                self.presence.forget(rank)
                self._fork(rank, incarnation)
            case act.Kill(rank, incarnation, idle):
                self.farewells.part(rank, incarnation, politely=idle)
            case act.Regroup(number, generation):
                tasks = {rank: (Regroup(cell=number, generation=generation), ()) for rank in self.state.ranks}
                self._cells[number] = Cell(number, -1, tasks, cluster_key="", sink=None, label="forming the group")
            case act.SendTask(number, ranks):
                cell = self._cells[number]
                for rank in ranks:
                    self.infos[rank].last_cell = number
                    self._hub.send(rank, *cell.tasks[rank])
                if cell.start():
                    self._fed.add(number)
            case act.SendInterrupt(number, ranks):
                for rank in ranks:
                    self._hub.send(rank, Interrupt(cell=number))
            case act.SetGrace() | act.LookSoon() | act.AskCollectives() | act.SendAbort():
                self._supervise(action)
            case act.TellPerson(told, text):
                self.after(0.0, lambda: self._cells[told].note(text))
            case act.TellQueued(number, busy):
                self._cells[number].waiting_behind = busy
                self._cells[number].tell()
            case act.TellLoss(rank, words, number, _expected):
                self._tell_loss(rank, words, number)
            case act.EndCell():
                self._ending.append(action)

    def _supervise(self, action: act.SetGrace | act.LookSoon | act.AskCollectives | act.SendAbort) -> None:
        match action:
            case act.SetGrace(ending, seconds, step):
                self.after(seconds, lambda: self.post(ev.GraceOver(ending, step)))
            case act.LookSoon(seconds):
                now, before = time.monotonic(), self._look_at or 0.0
                self._look_at = before if now <= before <= now + seconds else now + seconds
            case act.AskCollectives(ranks):
                for rank in ranks:
                    self._hub.send(rank, AskCollectives(token=0))
            case act.SendAbort(ranks, groups, cause, lost):
                whose, gone = (ranks, False) if lost is None else ((lost,), True)
                for rank in self.answering():
                    self._hub.send(rank, Abort(groups, cause, shut=rank in ranks, ranks=whose, lost=gone))

    def _tell_loss(self, rank: int, words: str, number: int | None) -> None:
        if (cell := self._cells.get(number or 0)) is not None:
            cell.lost(rank, f"rank {rank} {words} while running {cell.label}")
        for cell in self.active_cells():
            if cell.started is None and rank in cell.ranks and not self.state.ranks[rank].refork:
                cell.lost(rank, f"rank {rank} {words} before {cell.label} could run")

    def _fork(self, rank: int, incarnation: int) -> None:
        try:
            request = self._request(rank, incarnation, self._hub.open_downlink(rank, incarnation))
            self.infos[rank].segments = request.segments
            self._launcher.fork(request)
        except (RankbookError, OSError) as error:  # the folder is full or gone, the forkserver has ended
            words = f"could not be started: {error}"
            self.start_errors[rank] = f"rank {rank} {words}"
            self.after(0.0, lambda: self.post(ev.RankGone(rank, incarnation, words)))

    # Driving

    @contextlib.contextmanager
    def taken_over(self) -> Iterator[Callable[[float], None] | None]:
        """Drive from this thread: gives `turn(longest)`, which handles what comes within `longest` seconds.

        None when another thread has taken over already; then that one does the work.
        """
        with self.changed:
            mine = not self._taken and not self._closing
            self._taken = self._taken or mine
        if not mine:
            yield None
            return
        self._hub.take_over()
        self._wheel.acquire()
        self._drives = threading.get_ident()
        try:
            yield self._turn
        finally:
            self._drives = None
            self._hub.give_back()
            self._wheel.release()
            self._taken = False  # last: the next one takes over what was given back
            if self._closing or self._pause(None) is not None:
                self._hub.wake()  # the driver's thread knows neither

    def wake(self) -> None:
        """End the turn that waits. Any thread, and a signal handler."""
        self._hub.wake()

    def _run(self) -> None:
        ready: tuple[bool, set[int]] = (False, set())
        while not self._closing:
            with self._wheel:
                self._drives = threading.get_ident()
                self._handle(*ready)
                pause = self._pause(None)
                self._drives = None
            if not self._closing:
                ready = self._hub.wait(pause, self._watched)

    def _turn(self, longest: float) -> None:
        self._handle(*self._hub.wait_here(self._pause(longest), self._watched))

    def _handle(self, received: bool, files: set[int]) -> None:
        if self.failure is not None:
            self._closing = True
            return
        try:
            if received:
                self._inbox.receive()
            if files:
                for news in self._launcher.read():
                    self._hear(news)
                if not self._launcher.alive:
                    self._watched = ()
                    self._lose_launcher()
            self._timers.run_due()
            if self._look_at is not None and (now := time.monotonic()) >= self._look_at:
                self._look_at = None
                self.post(ev.Look(now))
            self._end_cells()
            self._fed.flush(time.monotonic())
        except Exception as error:  # noqa: BLE001 - `_fail` tells everyone who waits, and sys.excepthook the whole of it
            self._fail(error)

    def _pause(self, longest: float | None) -> float | None:
        if self._ending:
            return 0.0
        due = [self._timers.next, self._fed.deadline]
        if self.state.cells:
            due.append(self._look_at)
        times = [each for each in due if each is not None]
        if not times:
            return longest
        pause = max(0.0, min(times) - time.monotonic())
        return pause if longest is None else min(pause, longest)

    def _end_cells(self) -> None:
        while self._ending:
            ending = self._ending.popleft()
            cell = self._cells[ending.cell]
            cell.end(ending.stragglers, lambda rank: describe_straggler(rank, self.presence.straggler(rank)))
            for rank in ending.stragglers:
                self._hub.send(rank, nobody_to_ask(ending.cell))
            self._recent.append(ending.cell)
            while len(self._recent) > _RECENT_CELLS:
                oldest = self._recent.popleft()
                if self._cells[oldest].closed:
                    del self._cells[oldest]
                    self._fed.discard(oldest)
                else:
                    self._recent.append(oldest)
                    break
            with self.changed:
                self.changed.notify_all()

    def _receive(self, sender: Sender, message: FromRank, frames: list[memoryview]) -> None:
        rank, incarnation = sender
        self.presence.hear(rank)
        match message:
            case Hello():
                self.infos[rank].hello = message
                self.post(ev.SaidHello(rank, incarnation))
            case StartFailed():
                self.start_errors[rank] = f"rank {rank} could not be set up:\n{message.report.plain}"
            case Lingering():
                self.farewells.linger(rank, incarnation, message.seconds)
            case Stack() | Answered() | CommSaid() | DebugSaid():
                self.presence.answer(rank, message, frames)
            case Collectives():
                self.post(ev.CollectivesTold(rank, incarnation, Told(message, time.monotonic())))
            case Done():
                self._done(rank, incarnation, message, frames)
            case InputRequest():
                cell = self._cells.get(message.cell)
                if cell is not None and cell.result is None:
                    cell.ask(rank, message)
                else:
                    self._hub.send(rank, nobody_to_ask(message.cell))
            case Here():
                pass  # an answer to a question of reunion.py that had been given up
            case _:
                if message.cell in self._cells:
                    self._cells[message.cell].feed(rank, message)
                    self._fed.add(message.cell)

    def _done(self, rank: int, incarnation: int, message: Done, frames: list[memoryview]) -> None:
        cell = self._cells.get(message.cell)
        if cell is not None:
            cell.done(rank, message, frames)
            self._fed.add(message.cell)
            if cell.number < 0 and message.error is not None and message.status == "error":
                self.start_errors[rank] = f"rank {rank}: {message.error.plain}"
        words = describe_failure(message, cell)
        self.post(ev.CellDone(rank, incarnation, message.cell, bool(words), words, message.collectives))
        if cell is not None and cell.result is not None:
            cell.tell()

    def _hear(self, message: FromForkserver) -> None:
        match message:
            case RankForked():
                self.infos[message.rank].pid = message.pid
            case RankExited():
                self.after(_LAST_WORDS_SECONDS, lambda: self._bury(message))
            case _:
                pass

    def _bury(self, message: RankExited) -> None:
        rank = self.state.ranks[message.rank]
        sent = sent_last(message, self.infos[message.rank].segments)
        if message.incarnation != rank.incarnation:
            return
        number = rank.cell if rank.cell is not None else self.infos[message.rank].last_cell
        cell = self._cells.get(number) if number is not None else None
        feed_last(message, sent, self._cells, cell)
        words = self._inbox.reason(message.rank, message.incarnation) or describe_exit(message)
        forming = cell is not None and cell.number < 0 and cell.result is None
        if rank.state is RankState.STARTING or forming:
            during = "while the group was formed" if forming else "while it started"
            said = message.stderr.decode(errors="replace").strip()[-2000:]
            self.start_errors.setdefault(message.rank, f"rank {message.rank} {words} {during}\n{said}".rstrip())
        self.post(ev.RankGone(message.rank, message.incarnation, words))
        self.presence.forget(message.rank)  # last: who waits for an answer then finds it dead

    def _lose_launcher(self) -> None:
        for rank in self.state.ranks.values():
            if rank.state not in (RankState.ABSENT, RankState.DEAD):
                self.post(ev.RankGone(rank.rank, rank.incarnation, "was lost: the forkserver ended"))

    def _fail(self, error: BaseException) -> None:
        """A bug of ours or a broken wire: everyone who waits is told, nobody is left waiting."""
        with self.changed:
            self.failure = error
            for cell in self.active_cells():
                for rank in cell.ranks:
                    cell.lost(rank, f"rank {rank} cannot be followed any more: {error}")
                cell.end(())
            self.changed.notify_all()
        sys.excepthook(type(error), error, error.__traceback__)
