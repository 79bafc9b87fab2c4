"""What a process group was asked for: each collective numbered, with its shapes, and those that have not ended.

Owns: the record, and the words for it. Refuses: torch's groups, and to decide what is wrong; the notebook does.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from rankbook.protocol.telemetry import CollectiveLaunch, GroupReport

_REMEMBERED = 16
"""How many collectives of a group are remembered after their end, to compare them with what the other ranks did."""


class Op(NamedTuple):
    """One method of a process group.

    `word` is torch.distributed's name of it, `tensors` the argument that has this rank's data; `alike`: whether its
    shape has to be the same on every rank; `peer`: the argument that names the one other rank that takes part. `alone`:
    whether gloo ends it with nobody waiting; the others must be waited for in one piece.
    """

    word: str
    tensors: int | None
    alike: bool = True
    peer: int | None = None
    alone: bool = True


OPS: dict[str, Op] = {
    "allreduce": Op("all_reduce", 0),
    "allreduce_coalesced": Op("all_reduce_coalesced", 0),
    "broadcast": Op("broadcast", 0),
    "reduce": Op("reduce", 0),
    "allgather": Op("all_gather", 1),
    "allgather_coalesced": Op("all_gather_coalesced", 1),
    "_allgather_base": Op("all_gather_into_tensor", 1),
    "all_gather_single": Op("all_gather_into_tensor", 1),
    "allgather_into_tensor_coalesced": Op("all_gather_into_tensor_coalesced", 1),
    "all_gather_single_coalesced": Op("all_gather_into_tensor_coalesced", 1),
    "gather": Op("gather", 1),
    "scatter": Op("scatter", 0),
    "reduce_scatter": Op("reduce_scatter", 0, alone=False),
    "_reduce_scatter_base": Op("reduce_scatter_tensor", 0, alone=False),
    "reduce_scatter_single": Op("reduce_scatter_tensor", 0, alone=False),
    "reduce_scatter_tensor_coalesced": Op("reduce_scatter_tensor_coalesced", 0, alone=False),
    "reduce_scatter_single_coalesced": Op("reduce_scatter_tensor_coalesced", 0, alone=False),
    "alltoall": Op("all_to_all", 1, alike=False),
    "alltoall_base": Op("all_to_all_single", 1, alike=False),
    "all_to_all_single": Op("all_to_all_single", 1, alike=False),
    "barrier": Op("barrier", None),
    "monitored_barrier": Op("monitored_barrier", None),
    "send": Op("send", 0, alike=False, peer=1, alone=False),
    "recv": Op("recv", 0, alike=False, peer=1, alone=False),
    "recv_anysource": Op("recv", 0, alike=False, alone=False),
}
"""The methods of torch's ProcessGroup that launch something (2.11 to 2.13; each version has most of them)."""


_Data = tuple[object, tuple[int, ...], int]
"""dtype, shape of the first tensor, and how many more there are."""


class CollectiveWork(Protocol):
    """What tells whether a collective has ended."""

    def is_completed(self) -> bool:
        """Whether it has."""


class Future(Protocol):
    """torch's."""

    def set_result(self, result: object) -> None:
        """End it. Raises RuntimeError if it has ended."""


class FutureWork:
    """A work of which C++ keeps no more than the future: DDP's backward does so with its collectives."""

    any_forsaken = False
    """Whether one was ended that gloo may end once more, which ends its thread."""

    def __init__(self, work: CollectiveWork, future: Future) -> None:
        self._work: CollectiveWork | None = work
        self._future: Future | None = future

    def __call__(self) -> FutureWork:
        """As a weak reference to a work gives it."""
        return self

    def is_completed(self) -> bool:
        """Whether it has ended. Then the work and its tensors are let go."""
        work = self._work
        if work is not None and work.is_completed():
            self._work = self._future = None
        return self._work is None

    def forsake(self, value: object) -> bool:
        """End it with `value`, if it has not ended: C++ waits where nothing else reaches it. Any thread."""
        future = self._future
        if self.is_completed() or future is None:
            return False
        FutureWork.any_forsaken = True
        with contextlib.suppress(RuntimeError):  # it has just ended by itself
            future.set_result(value)
        return True


class CollectiveCall:
    """One collective of this rank. `number` counts those of its group; 0 for what only two ranks take part in."""

    __slots__ = ("__weakref__", "alike", "alone", "began", "data", "number", "op", "peer", "root", "work")

    def __init__(
        self, number: int, op: str, data: _Data | None, root: int | None, peer: int | None, *, alike: bool
    ) -> None:
        self.number = number
        self.op = op
        self.data = data
        self.root = root
        self.peer = peer
        self.alike = alike
        self.alone = True
        self.began = time.monotonic()
        self.work: Callable[[], CollectiveWork | None] | None = None

    @property
    def from_anybody(self) -> bool:
        """Whether it is a receive that does not say from whom."""
        return self.op == "recv" and self.peer is None

    def __str__(self) -> str:
        """As in `all_reduce #41 (float32[4, 4])`."""
        number = f" #{self.number}" if self.number else ""
        what = self.describe_data()
        return f"{self.op}{number}" + (f" ({what})" if what else "")

    def describe_data(self) -> str:
        """The data's type and shape, and the rank it comes from or goes to."""
        words = []
        if self.data is not None:
            dtype, shape, more = self.data
            words.append(f"{str(dtype).removeprefix('torch.')}{list(shape)}" + (f" and {more} more" if more else ""))
        if self.root is not None:
            words.append(f"root {self.root}")
        if self.peer is not None:
            words.append(f"{'to' if self.op == 'send' else 'from'} rank {self.peer}")
        return " ".join(words)


class CollectiveLog:
    """The record of one group. The thread that runs cells writes, any thread reads. `ranks` are the world's numbers.

    Who reads makes a copy, in one step: `tuple(...)` may collect garbage on its way (up to Python 3.11), and what that
    ends may let the other thread write.
    """

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        self.count = 0
        self.total = 0
        self.broken = False
        self._open: dict[int, CollectiveCall] = {}
        self._recent: deque[CollectiveCall] = deque(maxlen=_REMEMBERED)
        self._keys = itertools.count()

    def restart(self) -> None:
        """The group was formed anew: all ranks count from 0 again."""
        self.count = 0
        self.broken = False
        self._open.clear()
        self._recent.clear()

    def launch(self, op: Op, args: tuple[Any, ...]) -> tuple[int, CollectiveCall]:
        """This rank begins `op`. Gives the key for `end`."""
        self._forget_kept()
        self.total += 1
        peer: int | None = None
        number = 0
        if op.peer is not None:
            peer = self.ranks[args[op.peer]]
        elif op.word != "recv":
            self.count += 1
            number = self.count
        root = getattr(args[-1], "rootRank", None) if len(args) > 1 else None
        data = None if op.tensors is None or len(args) <= op.tensors else _shape_of(args[op.tensors])
        launched = CollectiveCall(
            number, op.word, data, None if root is None else self.ranks[root], peer, alike=op.alike
        )
        launched.alone = op.alone
        key = next(self._keys)
        self._open[key] = launched
        self._recent.append(launched)
        return key, launched

    def _forget_kept(self) -> None:
        """Drop the works, and with them the tensors, of what has ended: nobody waits for these by name."""
        for key in self._open.copy():
            launched = self._open.get(key)
            if launched is None or not isinstance(launched.work, FutureWork) or not launched.work.is_completed():
                return
            self.end(key)

    def withdraw(self, key: int) -> None:
        """It was refused before anything was sent: its arguments made no sense."""
        launched = self._open.pop(key, None)
        if launched is None:
            return
        self.total -= 1
        self.count -= launched.number > 0
        if self._recent and self._recent[-1] is launched:
            self._recent.pop()

    def end(self, key: int) -> None:
        """It has ended, or nobody can wait for it any more."""
        self._open.pop(key, None)

    @property
    def latest(self) -> CollectiveCall | None:
        """What was begun last, and may have ended."""
        return self._recent[-1] if self._recent else None

    def pending(self) -> Iterator[CollectiveCall]:
        """What has not ended, oldest first."""
        for key, launched in self._open.copy().items():
            if launched.work is None:
                yield launched  # it is being begun
                continue
            work = launched.work()
            if work is None or work.is_completed():
                self.end(key)
            else:
                yield launched

    def report(self) -> GroupReport:
        """What the notebook compares."""
        now = time.monotonic()
        pending = tuple(self._tell(each, now) for each in self.pending())
        return GroupReport(
            name=self.name,
            ranks=self.ranks,
            count=self.count,
            pending=pending,
            recent=tuple(self._tell(each, now) for each in self._recent.copy() if each.number),
            broken=self.broken,
        )

    @staticmethod
    def _tell(launched: CollectiveCall, now: float) -> CollectiveLaunch:
        return CollectiveLaunch(
            number=launched.number,
            op=launched.op,
            data=launched.describe_data(),
            alike=launched.alike,
            peer=launched.peer,
            seconds=now - launched.began,
        )


def _shape_of(value: Any) -> _Data | None:  # noqa: ANN401 - a tensor, or lists of them
    more = 0
    while isinstance(value, (list, tuple)):
        if not value:
            return None
        more += len(value) - 1
        value = value[0]
    shape = getattr(value, "shape", None)
    return None if shape is None else (value.dtype, tuple(shape), more)
