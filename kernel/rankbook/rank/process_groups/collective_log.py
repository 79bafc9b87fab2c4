"""Log of the collectives of a process group: numbers, shapes, and the ones that have not completed.

The notebook collects the logs of all ranks and compares them to find deadlocks and mismatches; this module only records
and describes.

All members of a group must launch the same operations in the same order, with equal arguments. `Signature.code` is a
checksum of the arguments that must be equal: the operation and, depending on it, dtype, shape, reduction and root. The
log folds the codes into a running digest, so that two integers tell whether all collectives of
two ranks matched, however many there were. The sizes in an all_to_all differ between ranks, but what one rank sends
must be what its peer expects. For these, the log adds a checksum of every size that it sends and subtracts one of every
size that it expects (the balance); if all sizes match, the sum over all ranks is 0.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from rankbook.protocol import telemetry
from rankbook.protocol.telemetry import CollectiveLaunch, GroupReport, encode_members

_REMEMBERED = 32
"""Number of completed collectives to remember per group, for the comparison with the other ranks."""
_MAX_PENDING = 128
"""Number of pending collectives in a report."""
_MASK = 0xFFFFFFFF
"""Digests and balances are 32-bit integers."""
_MAX_SIGNATURES = 1024
"""Number of different calls whose signatures are kept per group."""
_MAX_SHAPES = 4
"""Number of shapes to name in the description of a call with several tensors."""
_CALLER = 6
"""Depth of the caller of a function such as `dist.all_reduce`, as seen from `CollectiveLog._position`.

In between are `launch`, `_launch`, the method of the process group, torch's function and a decorator.
"""
_MAX_DEPTH = 4
"""Number of frames from there on to search for a cell.

Python creates a frame object for every one; a search through a deep stack would cost more than the rest of the log.
"""


class Op(NamedTuple):
    """A method of a process group that launches a collective or a point-to-point operation.

    `function` is the name of the function in torch.distributed. `tensors` is the index of the argument with this rank's
    data. `alike` is True if its shape must be the same on every rank. `peer` is the index of the argument that names
    the other rank of a send or recv. `completes_alone` is True if gloo completes the operation without a waiting
    thread; the others must be waited for in a single call. `rooted`: one rank is the source or destination, and
    `reduces`: there is a reduction; both must be the same on every rank. `parts` is the index of the list with one
    tensor per rank: where these differ in size, as NCCL allows, the list must be the same on every rank. `exchanges`:
    every rank sends a part to every other rank, see the balance in the module docstring. `elementwise`: torch wants
    the same number of elements only. Shapes that differ by dimensions of size 1 are the same then; others, such as
    [2, 3] and [3, 2], are more likely a mistake.
    """

    function: str
    tensors: int | None
    alike: bool = True
    peer: int | None = None
    completes_alone: bool = True
    rooted: bool = False
    reduces: bool = False
    parts: int | None = None
    exchanges: bool = False
    elementwise: bool = False


OPS: dict[str, Op] = {
    "allreduce": Op("all_reduce", 0, reduces=True, elementwise=True),
    "allreduce_coalesced": Op("all_reduce_coalesced", 0, reduces=True),
    "broadcast": Op("broadcast", 0, rooted=True, elementwise=True),
    "reduce": Op("reduce", 0, rooted=True, reduces=True, elementwise=True),
    "allgather": Op("all_gather", 1, parts=0),
    "allgather_coalesced": Op("all_gather_coalesced", 1),
    "_allgather_base": Op("all_gather_into_tensor", 1),
    "all_gather_single": Op("all_gather_into_tensor", 1),
    "allgather_into_tensor_coalesced": Op("all_gather_into_tensor_coalesced", 1),
    "all_gather_single_coalesced": Op("all_gather_into_tensor_coalesced", 1),
    "gather": Op("gather", 1, rooted=True),
    "scatter": Op("scatter", 0, rooted=True),
    "reduce_scatter": Op("reduce_scatter", 0, completes_alone=False, reduces=True, parts=1),
    "_reduce_scatter_base": Op("reduce_scatter_tensor", 0, completes_alone=False, reduces=True),
    "reduce_scatter_single": Op("reduce_scatter_tensor", 0, completes_alone=False, reduces=True),
    "reduce_scatter_tensor_coalesced": Op("reduce_scatter_tensor_coalesced", 0, completes_alone=False, reduces=True),
    "reduce_scatter_single_coalesced": Op("reduce_scatter_tensor_coalesced", 0, completes_alone=False, reduces=True),
    "alltoall": Op("all_to_all", 1, alike=False, exchanges=True),
    "alltoall_base": Op("all_to_all_single", 1, alike=False, exchanges=True),
    "all_to_all_single": Op("all_to_all_single", 1, alike=False, exchanges=True),
    "barrier": Op("barrier", None),
    "monitored_barrier": Op("monitored_barrier", None, completes_alone=False),
    "send": Op("send", 0, alike=False, peer=1, completes_alone=False),
    "recv": Op("recv", 0, alike=False, peer=1, completes_alone=False),
    "recv_anysource": Op("recv", 0, alike=False, completes_alone=False),
}
"""The methods of torch's ProcessGroup that launch an operation (torch 2.11 to 2.13; every version has most of them)."""


_Data = tuple[tuple[object, tuple[int, ...]], ...]
"""dtype and shape of every tensor."""
_Sizes = tuple[int, ...]
_NO_OPTIONS: Mapping[str, Any] = {}
_NO_SIZES: _Sizes = ()
_NO_CHECKSUMS = (0, 0)


class Signature(NamedTuple):
    """Description of a call. `code` is the checksum of what must be equal on all ranks; `data` names the tensors."""

    code: int
    data: str
    reduction: str = ""


class CurrentCell:
    """The files of the cells with their numbers, and the number of the cell that runs; shared by all logs."""

    def __init__(self) -> None:
        self.files: Mapping[str, int] = {}
        self.number = 0


_Position = tuple[types.CodeType, int, int]
"""Position of a launch: the innermost code of a cell, the instruction in it, and the number of the cell that ran."""


def _describe_position(position: _Position, files: Mapping[str, int]) -> str:
    """Return `line 3`, or `cell [2] line 3` for a function that another cell defined."""
    code, instruction, running = position
    line = code.co_firstlineno
    # Called for reports only. The launch itself stores the instruction, whose line is looked up here.
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    cell = files.get(code.co_filename, running)
    return f"line {line}" if cell == running else f"cell [{cell}] line {line}"


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

    any_completed_early = False
    """True once a future was completed by `complete_early`. gloo may complete it a second time, which terminates the
    thread that does."""

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

    def complete_early(self, value: object) -> bool:
        """Complete the future with `value` if it is pending. Any thread.

        C++ waits for the future in a call that no exception reaches. Return True if the future was pending.
        """
        future = self._future
        if self.is_completed() or future is None:
            return False
        # Before the result is set, because gloo's thread may fail at once.
        FutureWork.any_completed_early = True
        with contextlib.suppress(RuntimeError):  # it has just been completed by gloo
            future.set_result(value)
        return True


class CollectiveCall:
    """Record of one launched operation of this rank.

    `number` counts the collectives of its group; it is 0 for a send or recv. `sends` and `expects` are the sizes of an
    all_to_all, by rank of the group. `checksums` are the log's digest and balance after this launch, `before` those
    before it. `is_waited_for`: a thread is in the `wait` of its work.
    """

    # Slots, because one object is made for every collective.
    __slots__ = (
        "__weakref__",
        "before",
        "began",
        "checksums",
        "completes_alone",
        "expects",
        "is_waited_for",
        "number",
        "op",
        "peer",
        "position",
        "sends",
        "signature",
        "work",
    )

    def __init__(self, number: int, op: Op, signature: Signature, peer: int | None) -> None:
        self.number = number
        self.op = op.function
        self.signature = signature
        self.peer = peer
        self.completes_alone = op.completes_alone
        self.sends = self.expects = _NO_SIZES
        self.checksums = self.before = _NO_CHECKSUMS
        self.position: _Position | None = None
        self.began = time.monotonic()
        self.work: Callable[[], CollectiveWork | None] | None = None
        self.is_waited_for = False

    @property
    def is_any_source(self) -> bool:
        """Return True for a recv from any source."""
        return self.op == "recv" and self.peer is None

    def __str__(self) -> str:
        """Return a description such as `all_reduce #41 (float32[4, 4])`."""
        number = f" #{self.number}" if self.number else ""
        return f"{self.op}{number}" + (f" ({self.signature.data})" if self.signature.data else "")


class CollectiveLog:
    """The log of one group. The thread that runs cells writes; any thread reads.

    `ranks` are the members' global ranks, and `rank` is the index of this rank among them.

    `count` collectives were launched since the group was formed, and `total` operations in all. `reported` is the total
    at the end of the last cell. `checksums` are the digest and the balance, see the module docstring.

    Readers take no lock: they copy a container in one step (`.copy()`). `tuple(...)` of an iterator may run the garbage
    collector (up to Python 3.11), whose finalizers may let the other thread write.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], *, rank: int = 0, cell: CurrentCell | None = None) -> None:
        self.name = name
        self.ranks = ranks
        self._rank = rank
        self.generation = 0
        self.count = 0
        self.total = 0
        self.reported = 0
        self.checksums = _NO_CHECKSUMS
        self.broken = False
        self._cell = cell or CurrentCell()
        # Operations that have not completed, in the order of their launches. `_recent` also has completed ones.
        self._open: dict[int, CollectiveCall] = {}
        self._recent: deque[CollectiveCall] = deque(maxlen=_REMEMBERED)
        self._signatures: dict[tuple[Any, ...], Signature] = {}
        # Keys are never used again: a wait may end after a regroup has cleared the log.
        self._keys = itertools.count()

    # Writing: the thread that runs cells

    def restart(self, generation: int = 0) -> None:
        """Forget everything after a regroup: all ranks count from 0 again, in this generation of the group."""
        self.generation = generation
        # `total` continues: it only tells how much has been launched, see `GroupManager.launched`.
        self.count = 0
        self.checksums = _NO_CHECKSUMS
        self.broken = False
        self._open.clear()
        self._recent.clear()

    def launch(
        self, op: Op, args: tuple[Any, ...], options: Mapping[str, Any] = _NO_OPTIONS
    ) -> tuple[int, CollectiveCall]:
        """Record that this rank launches `op`, with the arguments of torch's method.

        Return the key for `end` and the record.
        """
        # Otherwise works whose `wait` nobody calls would stay, with their tensors, until the next report.
        if self._open:
            self._release_completed()
        # The rest of this method runs for every collective, so it formats nothing and takes no lock.
        peer: int | None = None
        number = 0
        if op.peer is not None:
            place = args[op.peer]
            if not 0 <= place < len(self.ranks):  # gloo would wait for it
                raise ValueError(f"{op.function}: invalid rank {place}: the group has {len(self.ranks)} ranks")
            peer = self.ranks[place]
        # Sends and receives have no number: the other ranks do not see them.
        if peer is None and op.function != "recv":
            number = self.count + 1
        # A barrier has no tensors.
        data = () if op.tensors is None or len(args) <= op.tensors else _data_of(args[op.tensors])
        if op.parts is not None and len(args) > op.parts and data:
            parts = _data_of(args[op.parts])
            # Parts of equal size are described by one of them. Only unequal ones have to match in full.
            if any(part != data[0] for part in parts):
                data = parts
        root, reduction = _options_of(op, args, options) if op.rooted or op.reduces else (None, None)
        # By the number of the reduction: torch takes a microsecond to compare two of them.
        operator = getattr(reduction, "op", reduction)
        call = (op.function, data, root, getattr(operator, "value", operator), peer)
        # Computed once per different call: a training loop makes the same calls in every step.
        signature = self._signatures.get(call) or self._sign(op, data, root, reduction, peer, call)
        launched = CollectiveCall(number, op, signature, peer)
        if number:
            launched.before = self.checksums
            digest, balance = launched.before
            if op.exchanges:
                launched.sends, launched.expects = _exchanged_sizes(args, len(self.ranks))
                balance = (balance + self._imbalance(launched)) & _MASK
            # An order-dependent digest: equal for two ranks only if all their codes so far were equal and in the same
            # order, apart from collisions.
            launched.checksums = (digest * 1_000_003 + signature.code) & _MASK, balance
            launched.position = self._position()
            if telemetry.collective_observer is not None and op.tensors is not None and len(args) > op.tensors:
                telemetry.collective_observer(self.name, number, launched.__str__, self._sent(op, args, root), args[0])
            # Nothing may raise from here on: a call that is not made does not count.
            self.count, self.checksums = number, launched.checksums
        self.total += 1
        key = next(self._keys)
        self._open[key] = launched
        self._recent.append(launched)
        return key, launched

    def _sent(self, op: Op, args: tuple[Any, ...], root: int | None) -> object:
        """Return the tensors that this rank brings into a collective."""
        assert op.tensors is not None
        if op.function == "broadcast" and root != self._rank:  # what is in the buffer until then does not matter
            return ()
        # These are described by their outputs.
        return args[1] if op.function.startswith(("reduce_scatter", "scatter")) else args[op.tensors]

    def _sign(
        self,
        op: Op,
        data: _Data,
        root: int | None,
        reduction: object,
        peer: int | None,
        call: tuple[Any, ...],
    ) -> Signature:
        """Describe a call that has not occurred before."""
        parts = [_describe_data(data)] if data else []
        if root is not None:
            # torch refuses another one.
            parts.append(f"root {self.ranks[root] if 0 <= root < len(self.ranks) else root}")
        if peer is not None:
            parts.append(f"{'to' if op.function == 'send' else 'from'} rank {peer}")
        name = str(getattr(reduction, "op", reduction)).rpartition(".")[2].lower() if op.reduces else ""
        # Of an all_to_all only the dtype must be equal, as the balance compares the sizes.
        alike: object = data if op.alike else [dtype for dtype, _ in data[:1]] if op.exchanges else None
        if op.elementwise:
            alike = [(dtype, *(size for size in shape if size != 1)) for dtype, shape in data]
        code = zlib.crc32(f"{op.function} {alike} {root} {name}".encode())
        # A program with ever new shapes must not fill the memory. Dropping all is simple, and the frequent ones come
        # back.
        if len(self._signatures) >= _MAX_SIGNATURES:
            self._signatures.clear()
        signature = self._signatures[call] = Signature(code, " ".join(parts), name)
        return signature

    def _imbalance(self, launched: CollectiveCall) -> int:
        """Return the checksum of what this rank sends, minus that of what it expects; 0 in the sum over all ranks."""
        number, rank = launched.number, self._rank
        sent = sum(_checksum_of(number, rank, other, size) for other, size in enumerate(launched.sends))
        return sent - sum(_checksum_of(number, other, rank, size) for other, size in enumerate(launched.expects))

    def _position(self) -> _Position | None:
        """Return where a cell called torch's function; None if that is too many calls away. Called by `launch`."""
        frame: types.FrameType | None
        try:
            # Frames are counted and not searched from the start, because this runs for every collective.
            frame = sys._getframe(_CALLER)
        except ValueError:  # called from C++, on a thread of its own
            return None
        files = self._cell.files
        for _ in range(_MAX_DEPTH):
            if frame is None:
                return None
            code = frame.f_code
            if code.co_filename in files:
                return code, frame.f_lasti, self._cell.number
            frame = frame.f_back
        return None

    def _release_completed(self) -> None:
        """Release the completed works that C++ held as futures, and their tensors: `wait` is never called for these."""
        # Oldest first. The search ends at the first one that is pending, since later ones rarely complete earlier. No
        # copy, because a device may be hundreds of calls behind.
        while True:
            try:
                key, launched = next(iter(self._open.items()))
            except (StopIteration, RuntimeError):  # nothing is open, or another thread has just ended a call
                return
            if not isinstance(launched.work, FutureWork) or not launched.work.is_completed():
                return
            self.end(key)

    def withdraw(self, key: int) -> None:
        """Undo `launch` for a call that torch refused before anything was sent."""
        launched = self._open.pop(key, None)
        if launched is None:
            return
        self.total -= 1
        # Only the newest call can be withdrawn, since it is withdrawn by the thread that has just launched it.
        self.count -= launched.number > 0
        if self._recent and self._recent[-1] is launched:
            self._recent.pop()
        if launched.number:
            self.checksums = launched.before

    def end(self, key: int) -> None:
        """Record that the operation has completed, or that its work is gone."""
        self._open.pop(key, None)

    # Reading: any thread

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
            # In most cases a weak reference: a work that nobody holds any more is not waited for by anybody.
            work = launched.work()
            if work is None or work.is_completed():
                self.end(key)
            else:
                yield launched

    def report(self, line: int | str | None = None) -> GroupReport:
        """Return the state that the notebook compares between ranks.

        `line` is that of the running cell, for pending collectives whose line is not known.
        """
        now = time.monotonic()
        default = "" if line is None else f"line {line}"
        # The oldest ones decide who waits for whom. With a device that is behind there may be thousands.
        oldest = itertools.islice(filter(_may_block, self.pending()), _MAX_PENDING)
        pending = tuple(self._to_message(call, now, default) for call in oldest)
        return GroupReport(
            name=self.name,
            members=encode_members(self.ranks),
            count=self.count,
            pending=pending,
            recent=tuple(self._to_message(call, now) for call in self._recent.copy() if call.number),
            broken=self.broken,
            generation=self.generation,
        )

    def _to_message(self, launched: CollectiveCall, now: float, position: str = "") -> CollectiveLaunch:
        return CollectiveLaunch(
            number=launched.number,
            op=launched.op,
            data=launched.signature.data,
            peer=launched.peer,
            seconds=now - launched.began,
            reduction=launched.signature.reduction,
            position=position if launched.position is None else _describe_position(launched.position, self._cell.files),
            sends=launched.sends,
            expects=launched.expects,
            code=launched.signature.code,
            digest=launched.checksums[0],
            balance=launched.checksums[1],
            on_device=getattr(launched.work, "on_device", False),
        )


def _may_block(call: CollectiveCall) -> bool:
    """Return True if the rank may be waiting in this call.

    gloo does not tell whether a send or recv has completed before it is waited for. Until then the rank may compute.
    """
    return bool(call.number) or call.is_waited_for or not isinstance(call.work, weakref.ref)


def _data_of(value: Any) -> _Data:  # noqa: ANN401 - a tensor, or nested lists of tensors
    # The frequent case is a list of one tensor, which needs no recursion.
    while isinstance(value, (list, tuple)):
        if len(value) != 1:
            return tuple(itertools.chain.from_iterable(map(_data_of, value)))
        value = value[0]
    try:
        return ((value.dtype, value.shape),)
    except AttributeError:
        return ()


def _describe_data(data: _Data) -> str:
    """Return `float32[4]`, or `float32[4], float32[2] and 7 more`; equal tensors are named once."""
    described = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in data]
    more = len(described) - 1
    if more and len(set(described)) == 1:
        return f"{described[0]} and {more} more"
    named = ", ".join(described[:_MAX_SHAPES])
    return named + (f" and {len(described) - _MAX_SHAPES} more" if len(described) > _MAX_SHAPES else "")


def _options_of(op: Op, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[int | None, object]:
    """Return the root's rank in the group and the reduction, None where `op` has none.

    torch's own functions pass both in a struct, the last argument. Other callers of a process group may pass them as
    arguments, or rely on the defaults: rank 0 and the sum.
    """
    struct = options["opts"] if "opts" in options else args[-1]
    root: int | None = None
    reduction: object = None
    if op.rooted:
        try:
            root = struct.rootRank
        except AttributeError:
            root = options.get("root", next((value for value in args if type(value) is int), 0))
    if op.reduces:
        try:
            reduction = struct.reduceOp
        except AttributeError:
            reduction = options.get("op", next((value for value in args if type(value).__name__ in _REDUCTIONS), "SUM"))
    return root, reduction


_REDUCTIONS = ("ReduceOp", "RedOpType")
"""Names of the types of a reduction in torch."""


def _exchanged_sizes(args: tuple[Any, ...], world_size: int) -> tuple[_Sizes, _Sizes]:
    """Return the numbers of elements that an all_to_all sends to, and expects from, every rank of the group."""
    output, source, *splits = args
    # all_to_all has one tensor per rank. all_to_all_single has one tensor, and the sizes of its parts.
    if isinstance(source, (list, tuple)):
        return tuple(part.numel() for part in source), tuple(part.numel() for part in output)
    expected, sent = (splits[0], splits[1]) if len(splits) > 1 else ((), ())
    return _split_sizes(source, sent, world_size), _split_sizes(output, expected, world_size)


def _checksum_of(number: int, sender: int, receiver: int, size: int) -> int:
    """Return a checksum of one part of an all_to_all.

    Python's hash of a tuple of integers is the same in every process. Its square makes sure that checksums of different
    sizes do not cancel out: the hashes of 2 and 3 elements differ by the same number for every pair of ranks.
    """
    value = hash((number, sender, receiver, size))
    return (value * value >> 16) & _MASK


def _split_sizes(tensor: Any, splits: Any, world_size: int) -> _Sizes:  # noqa: ANN401 - torch's
    if not splits:
        return (tensor.numel() // world_size,) * world_size
    # The sizes of parts count rows of the first dimension.
    row = tensor.numel() // max(tensor.shape[0], 1)
    return tuple(row * int(split) for split in splits)
