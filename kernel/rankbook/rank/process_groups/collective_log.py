"""Log of the collectives of a process group: numbers, shapes, and the ones that have not completed.

The notebook collects the logs of all ranks and compares them to find deadlocks and mismatches; this module only records
and describes.
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
"""Number of completed collectives to remember per group, for the comparison with the other ranks."""


class Op(NamedTuple):
    """A method of a process group that launches a collective or a point-to-point operation.

    `word` is the name of the function in torch.distributed. `tensors` is the index of the argument with this rank's
    data. `alike` is True if its shape must be the same on every rank. `peer` is the index of the argument that names
    the other rank of a send or recv. `alone` is True if gloo completes the operation without a waiting thread; the
    others must be waited for in a single call.
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
"""The methods of torch's ProcessGroup that launch an operation (torch 2.11 to 2.13; every version has most of them)."""


_Data = tuple[object, tuple[int, ...], int]
"""dtype and shape of the first tensor, and the number of further tensors."""


class CollectiveWork(Protocol):
    """Interface of a work that is asked for its completion."""

    def is_completed(self) -> bool:
        """Return True if the collective has completed."""


class Future(Protocol):
    """Interface of torch's Future."""

    def set_result(self, result: object) -> None:
        """Complete the future. Raises RuntimeError if it is completed."""


class FutureWork:
    """A work that C++ keeps only as a future, as DDP does in `backward()`."""

    any_forsaken = False
    """True once a future was completed by `forsake`. gloo may complete it a second time, which terminates the thread
    that does."""

    def __init__(self, work: CollectiveWork, future: Future) -> None:
        self._work: CollectiveWork | None = work
        self._future: Future | None = future

    def __call__(self) -> FutureWork:
        """Return this object, as a weak reference to a work would."""
        return self

    def is_completed(self) -> bool:
        """Return True if the collective has completed, and release the work and its tensors."""
        work = self._work
        if work is not None and work.is_completed():
            self._work = self._future = None
        return self._work is None

    def forsake(self, value: object) -> bool:
        """Complete the future with `value` if it is pending. Any thread.

        C++ waits for the future in a call that no exception reaches. Return True if the future was pending.
        """
        future = self._future
        if self.is_completed() or future is None:
            return False
        FutureWork.any_forsaken = True
        with contextlib.suppress(RuntimeError):  # it has just been completed by gloo
            future.set_result(value)
        return True


class CollectiveCall:
    """Record of one launched operation of this rank.

    `number` counts the collectives of its group; it is 0 for a send or recv.
    """

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
        """Return True for a recv from any source."""
        return self.op == "recv" and self.peer is None

    def __str__(self) -> str:
        """Return a description such as `all_reduce #41 (float32[4, 4])`."""
        number = f" #{self.number}" if self.number else ""
        data = self.describe_data()
        return f"{self.op}{number}" + (f" ({data})" if data else "")

    def describe_data(self) -> str:
        """Return the dtype and shape of the data, and the root or peer rank."""
        parts = []
        if self.data is not None:
            dtype, shape, more = self.data
            parts.append(f"{str(dtype).removeprefix('torch.')}{list(shape)}" + (f" and {more} more" if more else ""))
        if self.root is not None:
            parts.append(f"root {self.root}")
        if self.peer is not None:
            parts.append(f"{'to' if self.op == 'send' else 'from'} rank {self.peer}")
        return " ".join(parts)


class CollectiveLog:
    """The log of one group. The thread that runs cells writes; any thread reads. `ranks` are the global ranks.

    Readers take no lock: they copy a container in one step (`.copy()`). `tuple(...)` of an iterator may run the garbage
    collector (up to Python 3.11), whose finalizers may let the other thread write.
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
        """Forget everything after a regroup: all ranks count from 0 again."""
        self.count = 0
        self.broken = False
        self._open.clear()
        self._recent.clear()

    def launch(self, op: Op, args: tuple[Any, ...]) -> tuple[int, CollectiveCall]:
        """Record that this rank launches `op`. Return the key for `end` and the record."""
        self._forget_kept()
        self.total += 1
        peer: int | None = None
        number = 0
        if op.peer is not None:
            peer = self.ranks[args[op.peer]]  # sends and receives have no number: the other ranks do not see them
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
        """Release the completed works that C++ held as futures, and their tensors: `wait` is never called for these."""
        for key in self._open.copy():
            launched = self._open.get(key)
            if launched is None or not isinstance(launched.work, FutureWork) or not launched.work.is_completed():
                return
            self.end(key)

    def withdraw(self, key: int) -> None:
        """Undo `launch` for a call that torch refused before anything was sent."""
        launched = self._open.pop(key, None)
        if launched is None:
            return
        self.total -= 1
        self.count -= launched.number > 0
        if self._recent and self._recent[-1] is launched:
            self._recent.pop()

    def end(self, key: int) -> None:
        """Record that the operation has completed, or that its work is gone."""
        self._open.pop(key, None)

    @property
    def latest(self) -> CollectiveCall | None:
        """Return the operation that was launched last, completed or not."""
        return self._recent[-1] if self._recent else None

    def pending(self) -> Iterator[CollectiveCall]:
        """Yield the operations that have not completed, oldest first."""
        for key, launched in self._open.copy().items():
            if launched.work is None:
                yield launched  # the launch itself has not returned
                continue
            work = launched.work()
            if work is None or work.is_completed():
                self.end(key)
            else:
                yield launched

    def report(self) -> GroupReport:
        """Return the state that the notebook compares between ranks."""
        now = time.monotonic()
        pending = tuple(self._tell(call, now) for call in self.pending())
        return GroupReport(
            name=self.name,
            ranks=self.ranks,
            count=self.count,
            pending=pending,
            recent=tuple(self._tell(call, now) for call in self._recent.copy() if call.number),
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
