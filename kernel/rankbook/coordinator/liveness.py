"""Track which ranks reply to stack requests; describe unresponsive ranks, and how ranks exited.

There is no heartbeat: ranks are asked only when something needs to know, and a rank's control thread replies while its
main thread runs a cell. A rank that does not reply is unresponsive but never counts as dead; only the launcher reports
an exit. For an unresponsive rank the operating system's view of its process (running, stopped, CPU time) is reported.

The output of a crashed rank that never arrived is in three places: its output journal, the pipes of its process (read
by the forkserver), and the stacks that Python's faulthandler wrote (`read_remains`).
"""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankbook.coordinator.channels import CommChannels, DapChannels, QueryClient
from rankbook.coordinator.running_cell import RunningCell
from rankbook.formatting import signal_name
from rankbook.process_identity import ProcessInfo, describe_process, process_info
from rankbook.protocol.forkserver import JournalTail, RankExited
from rankbook.protocol.messages import CommFromRank, DapFromRank, Done, GetStack, Stack, Text
from rankbook.protocol.queries import Answer
from rankbook.transport.output_journal import journal_path, read_crash, read_journal
from rankbook.transport.serialization import cell_number
from rankbook.transport.shared_memory import SegmentStore

_PROCESS_CHECK_DELAY = 0.3
"""Seconds after which an unresponsive rank's process is checked: a stopped one will not reply, others may be slow."""

_PROCESS_CHECK_INTERVAL = 0.05
"""Seconds between two checks of the processes of ranks that may be exiting."""

_RECENT = 1.0
"""Seconds after a message, or after a request, in which no rank counts as unresponsive unless it is stopped."""

RESTART_ADVICE_AFTER = 10.0
"""Seconds of silence after which a restart is advised, which costs the rank's variables."""


@dataclass
class RankProcess:
    """A rank's process: PID, last cell, and the folder of its shared memory."""

    pid: int | None = None
    last_cell: int | None = None
    segments: str = ""


# A request opens a debt, and any message of the rank settles it: a reply may queue behind output, and output proves as
# well that the control thread works. Only a debt makes a rank unresponsive. A rank that nobody has asked is silent
# because it has nothing to say. Within a second of the rank's last message a debt does not count, because the reply may
# be on its way, except for a process that the system reports as stopped.
class LivenessTracker:
    """Ask ranks for stacks and track which ones owe a reply.

    `send` sends a message to a rank, `pid_of` returns the PID of its process, and `look` the state of the process, by
    default that of the PID on this host. The condition `changed` is notified of every reply. Any thread.
    """

    def __init__(
        self,
        changed: threading.Condition,
        send: Callable[..., bool],
        pid_of: Callable[[int], int | None],
        look: Callable[[int], ProcessInfo | None] | None = None,
    ) -> None:
        self._changed = changed
        self._send = send
        self._pid_of = pid_of
        self._look = look or (lambda rank: process_info(pid_of(rank)))
        self.queries = QueryClient(send)
        self.comms = CommChannels(send)
        self.debugs = DapChannels(send)
        self._tokens = itertools.count()
        # Replies by token, for the calls that are waiting now. `_requested_at` is independent of tokens: any message
        # settles the debt of a rank, because it proves that the control thread works.
        self._stacks: dict[int, dict[int, Stack]] = {}
        self._requested_at: dict[int, float] = {}
        self._last_received: dict[int, float] = {}
        self._forgotten: Counter[int] = Counter()

    def forget(self, rank: int) -> None:
        """Reset the state of a rank whose process is gone or new, and wake waiting threads."""
        self.comms.forget(rank)
        self.debugs.forget(rank)
        with self._changed:
            self._forgotten[rank] += 1
            self._requested_at.pop(rank, None)
            self._last_received.pop(rank, None)
            self._changed.notify_all()

    def record_message(self, rank: int) -> None:
        """Record the arrival of any message from the rank."""
        # Called for every message, on the driver thread: the lock is taken only if the rank owes a reply.
        # Assigning to a dict is atomic, and only this thread assigns here.
        self._last_received[rank] = time.monotonic()
        if rank in self._requested_at:
            with self._changed:
                self._requested_at.pop(rank, None)
                self._changed.notify_all()

    def dispatch(
        self, rank: int, message: Stack | Answer | CommFromRank | DapFromRank, frames: Sequence[memoryview] = ()
    ) -> None:
        """Pass a reply, comm or debugger message to its receiver. Replies after their timeout are dropped."""
        if isinstance(message, CommFromRank):
            self.comms.message_received(rank, message, frames)
            return
        if isinstance(message, DapFromRank):
            self.debugs.message_received(rank, message)
            return
        if not isinstance(message, Stack):
            self.queries.take(rank, message)
            return
        with self._changed:
            if message.token in self._stacks:
                self._stacks[message.token][rank] = message
                self._changed.notify_all()

    def ask(self, ranks: Iterable[int]) -> None:
        """Send a stack request to those of `ranks` that owe no reply. Does not wait."""
        for rank in ranks:
            if rank not in self._requested_at:
                self._ask(rank, next(self._tokens))

    def received_within(self, rank: int, seconds: float) -> bool:
        """Return True if any message from the rank arrived in the last `seconds`."""
        return time.monotonic() - self.last_received(rank) <= seconds

    def last_received(self, rank: int) -> float:
        """Return the time of the rank's last message, on the monotonic clock; 0.0 before the first one."""
        return self._last_received.get(rank, 0.0)

    def wait_stacks(self, ranks: Iterable[int], *, timeout: float) -> dict[int, Stack]:
        """Ask `ranks` for their stacks; return the replies within `timeout` seconds. Not on the driver thread."""
        deadline = time.monotonic() + timeout
        with self._collect_stacks() as (token, answers):
            requested = {rank for rank in ranks if self._ask(rank, token)}
            with self._changed:
                while len(answers) < len(requested) and (remaining := deadline - time.monotonic()) > 0:
                    self._changed.wait(remaining)
        return answers

    @contextlib.contextmanager
    def _collect_stacks(self) -> Iterator[tuple[int, dict[int, Stack]]]:
        """Collect the replies to a new token until the end of the context, which an interrupt may end too."""
        # A token per call, so that a late reply to an earlier call is not taken for one to this call.
        token = next(self._tokens)
        answers = self._stacks[token] = {}
        try:
            yield token, answers
        finally:
            del self._stacks[token]

    def wait_unresponsive(self, ranks: Iterable[int], *, timeout: float) -> dict[int, UnresponsiveRank]:
        """Return the ranks that do not reply within `timeout` seconds; earlier if all of them are stopped.

        With a `timeout` of 0 no request is sent, and the result is the ranks that owe a reply already.
        """
        requested = tuple(ranks)
        if timeout > 0:
            self.ask(requested)
        start = time.monotonic()
        # Two waits. After the first, short one the processes are inspected: if all ranks that are left are stopped,
        # waiting longer is in vain.
        self._wait_answers(requested, start + min(timeout, _PROCESS_CHECK_DELAY))
        unresponsive = self.unresponsive(requested)
        if not unresponsive or not all(unresponsive_rank.stopped for unresponsive_rank in unresponsive.values()):
            self._wait_answers(requested, start + timeout)
            unresponsive = self.unresponsive(requested)
        return unresponsive

    def wait_exited(self, ranks: Iterable[int], *, timeout: float) -> set[int]:
        """Return the ranks whose process has ended by now. Any thread but the driver's.

        Only a reply to a request made now proves that a rank is alive, because other messages may have been sent before
        it was killed. A rank that neither replies nor exits within `timeout` seconds (less if it is stopped) counts as
        alive.
        """
        with self._collect_stacks() as (token, answers):
            return self._wait_exited(set(ranks), token, answers, timeout)

    def _wait_exited(self, unknown: set[int], token: int, answers: Mapping[int, Stack], timeout: float) -> set[int]:
        # A link that is closed already is no reply: the process may have ended a moment ago.
        for rank in unknown:
            self._ask(rank, token)
        forgotten = dict(self._forgotten)
        ended = set[int]()
        start = time.monotonic()
        with self._changed:
            # An end of a process is noticed by polling, because the forkserver's report comes later, and it is this
            # delay that the caller wants to bridge.
            while (unknown := unknown - answers.keys()) and (remaining := start + timeout - time.monotonic()) > 0:
                # A reply ends the wait early.
                self._changed.wait(min(remaining, _PROCESS_CHECK_INTERVAL))
                # The exit of a rank that was forgotten meanwhile has been reported.
                unknown = {rank for rank in unknown if self._forgotten[rank] == forgotten.get(rank, 0)}
                infos = {rank: self._look(rank) for rank in unknown - answers.keys()}
                ended |= {rank for rank, process in infos.items() if process is None}
                late = time.monotonic() - start > _PROCESS_CHECK_DELAY
                unknown = {
                    rank for rank, process in infos.items() if process is not None and not (late and process.stopped)
                }
        return ended

    def unresponsive(self, ranks: Iterable[int]) -> dict[int, UnresponsiveRank]:
        """Return the ranks that owe a reply, with information about their processes.

        A rank that was heard from a moment ago is left out, unless its process is stopped: its reply may be on the way
        behind its output.
        """
        now = time.monotonic()
        unresponsive = {}
        # `process_info` reads from the system for every rank, so only those that owe a reply are inspected.
        for rank in ranks:
            requested = self._requested_at.get(rank)
            if requested is not None:
                pid = self._pid_of(rank)
                last_received = self._last_received.get(rank, requested)
                unresponsive_rank = UnresponsiveRank(rank, pid, now - requested, now - last_received, self._look(rank))
                if unresponsive_rank.stopped or not self.received_within(rank, _RECENT):
                    unresponsive[rank] = unresponsive_rank
        return unresponsive

    def straggler(self, rank: int) -> UnresponsiveRank | None:
        """Return why a rank that should have ended its cell does not reply; None if it may reply."""
        unresponsive_rank = self.unresponsive((rank,)).get(rank)
        if unresponsive_rank is not None and (unresponsive_rank.stopped or unresponsive_rank.seconds >= _RECENT):
            return unresponsive_rank
        # The rank owes no reply, perhaps because none was requested. A stopped process is recognized all the same.
        pid, now = self._pid_of(rank), time.monotonic()
        unasked_rank = UnresponsiveRank(rank, pid, 0.0, now - self._last_received.get(rank, now), self._look(rank))
        return unasked_rank if unasked_rank.stopped else None

    def _ask(self, rank: int, token: int) -> bool:
        with self._changed:  # before sending, because the reply may arrive at once
            # The time of the first unanswered request stays: the silence began there.
            self._requested_at.setdefault(rank, time.monotonic())
        sent = self._send(rank, GetStack(token=token))
        # The link to the rank is closed. It will be reported as dead, not as unresponsive.
        if not sent:
            self.forget(rank)
        return sent

    def _wait_answers(self, ranks: tuple[int, ...], until: float) -> None:
        with self._changed:
            while any(rank in self._requested_at for rank in ranks) and (remaining := until - time.monotonic()) > 0:
                self._changed.wait(remaining)


@dataclass(frozen=True)
class UnresponsiveRank:
    """A rank that has owed a reply for `seconds`.

    Its last message arrived `message_age` seconds ago; `process` is the operating system's information about its
    process.
    """

    rank: int
    pid: int | None
    seconds: float
    message_age: float
    process: ProcessInfo | None

    @property
    def stopped(self) -> bool:
        """Return True if the process is stopped by a signal or a tracer, and so certain not to reply."""
        return self.process is not None and (self.process.stopped or self.process.traced)

    @property
    def silence(self) -> float:
        """Return the seconds without a message; only those since the request for a rank that is not stopped."""
        return max(self.seconds, self.message_age) if self.stopped else self.seconds


def describe_unresponsive(unresponsive_rank: UnresponsiveRank) -> str:
    """Describe the rank's state, as in `unresponsive for 12 s, process running, 3.1 s of CPU time`."""
    if unresponsive_rank.seconds >= 1:
        since = f"unresponsive for {unresponsive_rank.seconds:.0f} s"
    else:
        since = (
            f"unresponsive, last heard from {max(unresponsive_rank.message_age, unresponsive_rank.seconds):.0f} s ago"
        )
    return f"{since}, {describe_process(unresponsive_rank.process, unresponsive_rank.pid)}"


def describe_straggler(rank: int, unresponsive_rank: UnresponsiveRank | None) -> str:
    """Describe a rank that still runs a cell that has ended in the notebook.

    A restart is advised only after a long silence, because it costs the rank's variables.
    """
    if unresponsive_rank is None:
        return f"rank {rank} still runs; %distributed stacks shows where"
    hint = f"; {restart_advice(rank)}" if unresponsive_rank.silence >= RESTART_ADVICE_AFTER else ""
    if unresponsive_rank.stopped:
        process = describe_process(unresponsive_rank.process, unresponsive_rank.pid)
        return f"rank {rank} is stopped ({process}){hint}"
    reason = "it may be in C code that holds the GIL"
    hint = hint or "; %distributed status shows whether it replies again"
    return f"rank {rank} still runs, {describe_unresponsive(unresponsive_rank)}; {reason}{hint}"


def restart_advice(rank: int) -> str:
    """Return the advice to restart an unresponsive rank, with its price."""
    return f"%distributed restart {rank} starts a new process without its variables"


_CELL_FILE = re.compile(r'File "(<ipython-input-.*?|.*?/ipykernel_\d+/\d+\.py)"')
"""File name of a cell, in a rank's tracebacks and in ipykernel's debugger."""
_OWN_END = re.compile(r"exited with code |was killed by SIG(SEGV|BUS|ABRT|FPE|ILL|SYS|TRAP)\b")


@dataclass(frozen=True)
class CrashRemains:
    """Files left behind by a rank's process: the output journal's tails, and the stacks of a crash."""

    journal: tuple[JournalTail, ...] = ()
    crash: str = ""


def read_remains(message: RankExited, segments: str) -> CrashRemains:
    """Read and remove the files left behind by the rank's process."""
    # The process was never forked, so it has no files; or it ran on another host, whose agent has read them.
    if not segments:
        return CrashRemains(message.journal, message.crash)
    # Values that it has sent may still be read.
    SegmentStore(Path(segments)).clear_unfinished(message.pid)
    path = journal_path(Path(segments), message.rank, message.incarnation)
    return CrashRemains(tuple(read_journal(path)), read_crash(path))


def replay_remains(
    message: RankExited, remains: CrashRemains, cells: Mapping[int, RunningCell], running: RunningCell | None
) -> None:
    """Feed the cells the output that was sent but did not arrive, then the pipes' contents, then the crash stacks.

    The journal counts the bytes of a cell's stream, and `RunningCell.received_bytes` those that arrived; the difference
    is missing.
    """
    # In the order in which the rank wrote them: what it sent came before what is still in the pipes, and the crash
    # report is the last thing that a process writes.
    for tail in remains.journal:
        cell = cells.get(tail.cell)
        if cell is not None and (data := tail.missing(cell.received_bytes[message.rank, tail.stream])):
            cell.add_output(message.rank, Text(cell=cell.cell, stream=tail.stream, data=data))  # type: ignore[arg-type]
    if running is not None:
        # Only for a process that a signal has ended. After a regular exit the file is empty, or belongs to a crash that
        # was survived.
        crash = describe_crash(remains.crash).encode() if message.code < 0 else b""
        for stream, data in (("stdout", message.stdout), ("stderr", message.stderr), ("stderr", crash)):
            if data:
                running.add_output(message.rank, Text(cell=running.cell, stream=stream, data=data))  # type: ignore[arg-type]


def describe_crash(text: str) -> str:
    """Return faulthandler's report reduced to the frames of the cell, or all threads if it contains none.

    See https://docs.python.org/3/library/faulthandler.html: the frames of every thread, the innermost first.
    """
    if not text.strip():
        return ""
    # faulthandler separates threads by empty lines, after a heading such as `Fatal Python error: Segmentation fault`.
    heading, _, rest = text.strip().partition("\n\n")
    blocks = rest.partition("\n\nExtension modules:")[0].split("\n\n")
    for block in blocks:
        header, *frames = block.splitlines() or [""]
        # The thread that has crashed is marked as current. Its innermost frame comes first, so the frames after the
        # cell's last one are those of IPython and Rankbook.
        cells = [number for number, frame in enumerate(frames) if _CELL_FILE.search(frame)]
        if header.startswith("Current thread") and cells:
            lines = [_CELL_FILE.sub(_name_cell, frame) for frame in frames[: cells[-1] + 1]]
            return "\n".join([f"{heading}, innermost call first:", *lines]) + "\n"
    return "\n".join([heading, *blocks]).strip() + "\n"


def _name_cell(file: re.Match[str]) -> str:
    """Name a cell as tracebacks do. A cell of another notebook keeps its file name."""
    number = cell_number(file[1])
    return file[0] if number is None else f"Cell In[{number}]"


def describe_exit(message: RankExited) -> str:
    """Describe how a rank's process exited, worded to follow `rank 2`."""
    if message.reason:
        return message.reason
    if message.code >= 0:
        return f"exited with code {message.code}"
    # `subprocess` and `os.waitstatus_to_exitcode` report the end by a signal as its negative number.
    number = -message.code
    # The counter proves that the OOM killer has been at work in this control group, but not in which process. Without
    # it, the message only asks.
    if message.memory_kills > 0 and number == signal.SIGKILL:
        return "was killed by the operating system because memory ran out (SIGKILL)"
    hints = {
        signal.SIGKILL: " (out of memory?)",
        signal.SIGSEGV: " (segmentation fault)",
        signal.SIGBUS: " (bus error)",
    }
    return f"was killed by {signal_name(number)}{hints.get(number, '')}"  # type: ignore[call-overload]


def has_ended_itself(loss: str) -> bool:
    """Return True if a description by `describe_exit` is of a process that its own code has ended, as by a crash.

    Nobody ends a process by these exit codes and signals from outside.
    """
    return bool(_OWN_END.match(loss))


def describe_failure(done: Done, cell: RunningCell | None) -> str:
    """Describe an error, as in `raised ValueError at cell [5] line 3`; empty if the cell succeeded.

    A call has no lines of its own: `raised ValueError at line 3 of cell 2`.
    """
    if done.status == "ok":
        return ""
    name, line, memory = ("", None, "") if done.error is None else (done.error.name, done.error.line, done.error.memory)
    raised = "was interrupted" if done.status == "interrupted" else f"raised {name}"
    if memory and "MemoryError" not in name:  # torch has no error class for it on the CPU; peers look for these words
        raised += " (out of memory)"
    numbered = cell is not None and cell.number > 0
    positions = [cell.label if cell is not None and numbered else "", f"line {line}" if line is not None else ""]
    position = " ".join(filter(None, positions))
    # A call has no number, so the place of the innermost line of the user's code is named instead.
    if not numbered and done.error is not None and done.error.place:
        position = done.error.place
    return raised + (f" at {position}" if position else "")
