"""Track which ranks reply to stack requests, and describe unresponsive ranks.

There is no heartbeat: ranks are asked only when something needs to know, and a rank's control thread replies while its
main thread runs a cell. A rank that does not reply is unresponsive but never counts as dead; only the launcher reports
an exit. For an unresponsive rank the operating system's view of its process (running, stopped, CPU time) is reported.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rankbook.coordinator.channels import CommChannels, DapChannels
from rankbook.coordinator.queries import QueryClient
from rankbook.launch.process_info import ProcessInfo, describe_process, process_info
from rankbook.protocol.comm import CommFromRank, DapFromRank
from rankbook.protocol.messages import GetStack, Stack
from rankbook.protocol.queries import Answer

_LOOK_AFTER = 0.3
"""Seconds after which an unresponsive rank's process is checked: a stopped one will not reply, others may be slow."""

_LOOK_EVERY = 0.05
"""Seconds between two checks of the processes of ranks that may be exiting."""


@dataclass
class RankProcess:
    """A rank's process: PID, last cell, and the folder of its shared memory."""

    pid: int | None = None
    last_cell: int | None = None
    segments: str = ""


class LivenessTracker:
    """Ask ranks for stacks and track which ones owe a reply.

    `send` sends a message to a rank, and `pid_of` returns the PID of its process. The condition `changed` is notified
    of every reply. Any thread.
    """

    def __init__(
        self,
        changed: threading.Condition,
        send: Callable[..., bool],
        pid_of: Callable[[int], int | None],
    ) -> None:
        self._changed = changed
        self._send = send
        self._pid_of = pid_of
        self.questions = QueryClient(send)
        self.comms = CommChannels(send)
        self.debugs = DapChannels(send)
        self._tokens = itertools.count()
        self._stacks: dict[int, dict[int, Stack]] = {}
        self._asked: dict[int, float] = {}
        self._heard: dict[int, float] = {}

    def forget(self, rank: int) -> None:
        """Reset the state of a rank whose process is gone or new, and wake waiting threads."""
        self.comms.forget(rank)
        self.debugs.forget(rank)
        with self._changed:
            self._asked.pop(rank, None)
            self._heard.pop(rank, None)
            self._changed.notify_all()

    def hear(self, rank: int) -> None:
        """Record the arrival of any message from the rank."""
        # Called for every message, on the driver thread: the lock is taken only if the rank owes a reply.
        self._heard[rank] = time.monotonic()
        if rank in self._asked:
            with self._changed:
                self._asked.pop(rank, None)
                self._changed.notify_all()

    def answer(
        self, rank: int, stack: Stack | Answer | CommFromRank | DapFromRank, frames: Sequence[memoryview] = ()
    ) -> None:
        """Pass a reply, comm or debugger message to its receiver. Replies after their timeout are dropped."""
        if isinstance(stack, CommFromRank):
            self.comms.said(rank, stack, frames)
            return
        if isinstance(stack, DapFromRank):
            self.debugs.said(rank, stack)
            return
        if not isinstance(stack, Stack):
            self.questions.take(rank, stack)
            return
        with self._changed:
            if stack.token in self._stacks:
                self._stacks[stack.token][rank] = stack
                self._changed.notify_all()

    def ask(self, ranks: Iterable[int]) -> None:
        """Send a stack request to those of `ranks` that owe no reply. Does not wait."""
        for rank in ranks:
            if rank not in self._asked:
                self._ask(rank, next(self._tokens))

    def heard_within(self, rank: int, seconds: float) -> bool:
        """Return True if any message from the rank arrived in the last `seconds`."""
        return time.monotonic() - self._heard.get(rank, 0.0) <= seconds

    def wait_stacks(self, ranks: Iterable[int], *, timeout: float) -> dict[int, Stack]:
        """Ask `ranks` for their stacks; return the replies within `timeout` seconds. Not on the driver thread."""
        token = next(self._tokens)
        answers = self._stacks[token] = {}
        requested = {rank for rank in ranks if self._ask(rank, token)}
        deadline = time.monotonic() + timeout
        with self._changed:
            while len(answers) < len(requested) and (remaining := deadline - time.monotonic()) > 0:
                self._changed.wait(remaining)
            return self._stacks.pop(token)

    def wait_silent(self, ranks: Iterable[int], *, timeout: float) -> dict[int, UnresponsiveRank]:
        """Return the ranks that do not reply within `timeout` seconds; earlier if all of them are stopped.

        With a `timeout` of 0 no request is sent, and the result is the ranks that owe a reply already.
        """
        requested = tuple(ranks)
        if timeout > 0:
            self.ask(requested)
        began = time.monotonic()
        self._wait_answers(requested, began + min(timeout, _LOOK_AFTER))
        silent = self.silent(requested)
        if not all(silence.stopped for silence in silent.values()):
            self._wait_answers(requested, began + timeout)
            silent = self.silent(requested)
        return silent

    def wait_ended(self, ranks: Iterable[int], *, timeout: float) -> set[int]:
        """Return the ranks whose process has ended by now. Any thread but the driver's.

        Only a reply to a request made now proves that a rank is alive, because other messages may have been sent before
        it was killed. A rank that neither replies nor exits within `timeout` seconds (less if it is stopped) counts as
        alive.
        """
        token = next(self._tokens)
        answers = self._stacks[token] = {}
        unknown = {rank for rank in ranks if self._ask(rank, token)}
        ended = set[int]()
        began = time.monotonic()
        with self._changed:
            while (unknown := unknown - answers.keys()) and (remaining := began + timeout - time.monotonic()) > 0:
                self._changed.wait(min(remaining, _LOOK_EVERY))
                looks = {rank: process_info(self._pid_of(rank)) for rank in unknown - answers.keys()}
                ended |= {rank for rank, look in looks.items() if look is None}
                late = time.monotonic() - began > _LOOK_AFTER
                unknown = {rank for rank, look in looks.items() if look is not None and not (late and look.stopped)}
            del self._stacks[token]
        return ended

    def silent(self, ranks: Iterable[int]) -> dict[int, UnresponsiveRank]:
        """Return the ranks that owe a reply, with information about their processes."""
        now = time.monotonic()
        unresponsive = {}
        for rank in ranks:
            requested = self._asked.get(rank)
            if requested is not None:
                pid = self._pid_of(rank)
                heard = self._heard.get(rank, requested)
                unresponsive[rank] = UnresponsiveRank(rank, pid, now - requested, now - heard, process_info(pid))
        return unresponsive

    def straggler(self, rank: int) -> UnresponsiveRank | None:
        """Return why a rank that should have ended its cell does not reply; None if it may reply."""
        silence = self.silent((rank,)).get(rank)
        if silence is not None:
            return silence
        pid, now = self._pid_of(rank), time.monotonic()
        unasked = UnresponsiveRank(rank, pid, 0.0, now - self._heard.get(rank, now), process_info(pid))
        return unasked if unasked.stopped else None

    def _ask(self, rank: int, token: int) -> bool:
        with self._changed:  # before sending, because the reply may arrive at once
            self._asked.setdefault(rank, time.monotonic())
        sent = self._send(rank, GetStack(token=token))
        if not sent:
            self.forget(rank)
        return sent

    def _wait_answers(self, ranks: tuple[int, ...], until: float) -> None:
        with self._changed:
            while any(rank in self._asked for rank in ranks) and (remaining := until - time.monotonic()) > 0:
                self._changed.wait(remaining)


@dataclass(frozen=True)
class UnresponsiveRank:
    """A rank that has owed a reply for `seconds`.

    Its last message arrived `heard` seconds ago; `look` is the operating system's information about its process.
    """

    rank: int
    pid: int | None
    seconds: float
    heard: float
    look: ProcessInfo | None

    @property
    def stopped(self) -> bool:
        """Return True if the process is stopped by a signal or a tracer, and so certain not to reply."""
        return self.look is not None and (self.look.stopped or self.look.traced)


def describe_unresponsive(silence: UnresponsiveRank) -> str:
    """Describe the rank's state, as in `unresponsive for 12 s, process running, 3.1 s of CPU time`."""
    if silence.seconds >= 1:
        since = f"unresponsive for {silence.seconds:.0f} s"
    else:
        since = f"unresponsive, last heard from {max(silence.heard, silence.seconds):.0f} s ago"
    return f"{since}, {describe_process(silence.look, silence.pid)}"


def describe_straggler(rank: int, silence: UnresponsiveRank | None) -> str:
    """Describe a rank that still runs a cell that has ended in the notebook."""
    fresh = f"%distributed restart {rank} gives it a fresh process"
    if silence is None:
        return f"rank {rank} still runs; %distributed stacks shows where"
    if silence.stopped:
        return f"rank {rank} is stopped ({describe_process(silence.look, silence.pid)}); {fresh}"
    reason = "it may be in C code that holds the interpreter"
    return f"rank {rank} still runs, {describe_unresponsive(silence)}: {reason}; {fresh}"
