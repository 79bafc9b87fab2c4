"""Which ranks answer.

Owns: what is known of the ranks' processes, what their control threads were asked, when, and what they answered.
Refuses: a beat of its own: nobody is asked unless somebody wants to know. Silence is never taken for death, of which
only the launcher tells.

What a rank's silence means, in words.
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
"""Seconds after which a silent rank's process is looked at: one that is stopped will not answer, however long one
waits. Any other may only be slow, and gets the whole time."""

_LOOK_EVERY = 0.05
"""Seconds between two looks at the processes of ranks that may be ending."""


@dataclass
class RankProcess:
    """What is known of a rank's process."""

    pid: int | None = None
    last_cell: int | None = None
    segments: str = ""


class LivenessTracker:
    """Asks through `send`, in which `pid_of` tells a rank's process. `changed` is told of every answer. Any thread."""

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
        """The rank's process is gone or new."""
        self.comms.forget(rank)
        self.debugs.forget(rank)
        with self._changed:
            self._asked.pop(rank, None)
            self._heard.pop(rank, None)
            self._changed.notify_all()

    def hear(self, rank: int) -> None:
        """A message of the rank's has arrived, whatever it says."""
        self._heard[rank] = time.monotonic()
        if rank in self._asked:
            with self._changed:
                self._asked.pop(rank, None)
                self._changed.notify_all()

    def answer(
        self, rank: int, stack: Stack | Answer | CommFromRank | DapFromRank, frames: Sequence[memoryview] = ()
    ) -> None:
        """The rank has answered, or something on it speaks; an answer that nobody waits for any more is dropped."""
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
        """Ask those of `ranks` that owe no answer yet, and wait for none."""
        for rank in ranks:
            if rank not in self._asked:
                self._ask(rank, next(self._tokens))

    def heard_within(self, rank: int, seconds: float) -> bool:
        """Whether anything came from the rank in the last `seconds`."""
        return time.monotonic() - self._heard.get(rank, 0.0) <= seconds

    def wait_stacks(self, ranks: Iterable[int], *, timeout: float) -> dict[int, Stack]:
        """Ask `ranks` where they are; what came back within `timeout` seconds. Any thread but the driver's."""
        token = next(self._tokens)
        answers = self._stacks[token] = {}
        asked = {rank for rank in ranks if self._ask(rank, token)}
        deadline = time.monotonic() + timeout
        with self._changed:
            while len(answers) < len(asked) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._stacks.pop(token)

    def wait_silent(self, ranks: Iterable[int], *, timeout: float) -> dict[int, UnresponsiveRank]:
        """Those of `ranks` that do not answer within `timeout` seconds; sooner where only stopped ones are left.

        With no time nobody is asked: these are the ones that owe an answer already.
        """
        asked = tuple(ranks)
        if timeout > 0:
            self.ask(asked)
        began = time.monotonic()
        self._wait_answers(asked, began + min(timeout, _LOOK_AFTER))
        silent = self.silent(asked)
        if not all(each.stopped for each in silent.values()):
            self._wait_answers(asked, began + timeout)
            silent = self.silent(asked)
        return silent

    def wait_ended(self, ranks: Iterable[int], *, timeout: float) -> set[int]:
        """Those of `ranks` whose process has ended by now. Any thread but the driver's.

        Alive is who answers a question that is asked now: another message may have been on its way when the rank was
        killed. Who neither answers nor ends within `timeout` seconds, sooner where it is stopped, counts as alive.
        """
        token = next(self._tokens)
        answers = self._stacks[token] = {}
        unknown = {rank for rank in ranks if self._ask(rank, token)}
        ended = set[int]()
        began = time.monotonic()
        with self._changed:
            while (unknown := unknown - answers.keys()) and (left := began + timeout - time.monotonic()) > 0:
                self._changed.wait(min(left, _LOOK_EVERY))
                looks = {rank: process_info(self._pid_of(rank)) for rank in unknown - answers.keys()}
                ended |= {rank for rank, look in looks.items() if look is None}
                late = time.monotonic() - began > _LOOK_AFTER
                unknown = {rank for rank, look in looks.items() if look is not None and not (late and look.stopped)}
            del self._stacks[token]
        return ended

    def silent(self, ranks: Iterable[int]) -> dict[int, UnresponsiveRank]:
        """Those of `ranks` that owe an answer, with a look at their processes."""
        now = time.monotonic()
        found = {}
        for rank in ranks:
            asked = self._asked.get(rank)
            if asked is not None:
                pid = self._pid_of(rank)
                heard = self._heard.get(rank, asked)
                found[rank] = UnresponsiveRank(rank, pid, now - asked, now - heard, process_info(pid))
        return found

    def straggler(self, rank: int) -> UnresponsiveRank | None:
        """The silence of a rank that should have ended its cell by now; None for one that may answer."""
        silence = self.silent((rank,)).get(rank)
        if silence is not None:
            return silence
        pid, now = self._pid_of(rank), time.monotonic()
        unasked = UnresponsiveRank(rank, pid, 0.0, now - self._heard.get(rank, now), process_info(pid))
        return unasked if unasked.stopped else None

    def _ask(self, rank: int, token: int) -> bool:
        with self._changed:  # before it is sent, for the answer may be quick
            self._asked.setdefault(rank, time.monotonic())
        sent = self._send(rank, GetStack(token=token))
        if not sent:
            self.forget(rank)
        return sent

    def _wait_answers(self, ranks: tuple[int, ...], until: float) -> None:
        with self._changed:
            while any(rank in self._asked for rank in ranks) and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)


@dataclass(frozen=True)
class UnresponsiveRank:
    """A rank that has not answered for `seconds` and was last heard `heard` seconds ago; `look` is at its process."""

    rank: int
    pid: int | None
    seconds: float
    heard: float
    look: ProcessInfo | None

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped, which is certain and needs no patience."""
        return self.look is not None and (self.look.stopped or self.look.traced)


def describe_unresponsive(silence: UnresponsiveRank) -> str:
    """The rank's state: `unresponsive for 12 s, process running, 3.1 s of CPU time`."""
    if silence.seconds >= 1:
        since = f"unresponsive for {silence.seconds:.0f} s"
    else:
        since = f"unresponsive, last heard from {max(silence.heard, silence.seconds):.0f} s ago"
    return f"{since}, {describe_process(silence.look, silence.pid)}"


def describe_straggler(rank: int, silence: UnresponsiveRank | None) -> str:
    """What is to be said of a rank that still runs a cell which the notebook waits for no more."""
    fresh = f"%distributed restart {rank} gives it a fresh process"
    if silence is None:
        return f"rank {rank} still runs; %distributed stacks shows where"
    if silence.stopped:
        return f"rank {rank} is stopped ({describe_process(silence.look, silence.pid)}); {fresh}"
    held = "it may be in C code that holds the interpreter"
    return f"rank {rank} still runs, {describe_unresponsive(silence)}: {held}; {fresh}"
