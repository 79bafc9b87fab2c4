"""Messages with one field replaced by a value of another type, size or encoding, sent by a rank: only it may suffer."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest

from rankbook.coordinator import events as ev
from rankbook.coordinator.running_cell import CellEnded, RunningCell
from rankbook.coordinator.state_machine import RankState
from rankbook.magics.output_panel import as_message
from rankbook.protocol.messages import FromRank, Regroup
from rankbook.transport import Sender
from tests.conftest import wait_until
from tests.coordinator.test_driver import SOON, DriverHarness, exited

MESSAGES = 500
SIZES = (0, 1, 2**31, 2**63 - 1, 2**64 - 1, -1, -(2**63))
STRANGE: tuple[Any, ...] = (
    None,
    True,
    *SIZES,
    0.5,
    float("nan"),
    float("inf"),
    -1e308,
    "",
    "x" * 100_000,
    "\x1b[" + "9" * 5_000 + "A",
    "\x1b[" + "9" * 5_000 + "m",
    "\0\r\b\x1b]8;;",
    b"",
    b"\xff\xfe\xed",
    b"\x1b[" + b"9" * 5_000 + b"A\x1b[" + b"9" * 5_000 + b"m\n",
    [],
    [[]],
    ["x", 1, None],
    {},
    {"x": None},
    {"application/json": float("nan")},
    {"text/plain": 5, "text/html": ["x"], "image/png": {}},
    {5: "x"},
    msgspec.msgpack.Ext(5, b"x"),
)


class JupyterLike:
    """A sink that packs what it is given as a front end does."""

    def emit(self, items) -> None:
        for item in items:
            json.dumps(as_message(item, 7), allow_nan=False).encode()


def value_of(kind: msgspec.inspect.Type, cell: int) -> Any:
    """Return a valid value of a field's type."""
    match kind:
        case msgspec.inspect.IntType():
            return cell
        case msgspec.inspect.StrType():
            return "{}"
        case msgspec.inspect.BytesType():
            return b"text\n"
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.FloatType():
            return 0.5
        case msgspec.inspect.LiteralType(values=values):
            return values[0]
        case msgspec.inspect.DictType():
            return {"text/plain": "x"}
        case msgspec.inspect.VarTupleType(item_type=item) | msgspec.inspect.ListType(item_type=item):
            return [value_of(item, cell)]
        case msgspec.inspect.TupleType(item_types=items):
            return [value_of(item, cell) for item in items]
        case msgspec.inspect.UnionType(types=types):
            return value_of(max(types, key=lambda element: not isinstance(element, msgspec.inspect.NoneType)), cell)
        case msgspec.inspect.StructType():
            return fields_of(kind, cell)
        case _:
            return None


def fields_of(kind: msgspec.inspect.StructType, cell: int) -> dict[str, Any]:
    """Return a valid message, or a struct in one, as plain data."""
    tag = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
    return tag | {field.encode_name: value_of(field.type, cell) for field in kind.fields}


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of every value in a message, at any depth."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from places_of(item)


def hostile(chance: random.Random, kind: msgspec.inspect.StructType, cell: int) -> bytes:
    """Return the bytes of a message of this type with one value replaced, or with bytes cut off or changed."""
    message = fields_of(kind, cell)
    way = chance.random()
    if way < 0.8:
        container, key = chance.choice(list(places_of(message)))
        container[key] = chance.choice(STRANGE)
        return msgspec.msgpack.encode(message)
    data = msgspec.msgpack.encode(message)
    if way < 0.9:
        return data[: chance.randrange(len(data))]
    at = chance.randrange(len(data))
    return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]


class Hostile(DriverHarness):
    """A driver with two ranks, of which rank 0 sends anything at all."""

    def bring_back(self) -> None:
        """Give rank 0 a fresh process, and form the group again."""
        incarnation = self.state.ranks[0].incarnation
        self.launcher.tell(exited(0, -9, incarnation=incarnation))
        wait_until(lambda: self.state.ranks[0].state is RankState.DEAD, timeout=SOON, what="the death of rank 0")
        self.driver.post(ev.LaunchRanks((0,)))
        self.dial(0)

    def settle(self) -> None:
        """Answer whatever forms the group, until both ranks are idle."""
        handled = False
        while not handled:
            wait_until(self._settled, timeout=SOON, what="both ranks idle")
            # Both may be so in the middle of an event, of which the group is formed.
            is_over = threading.Event()
            self.driver.after(0.0, is_over.set)
            assert is_over.wait(SOON)
            handled = self._settled()

    def _settled(self) -> bool:
        for rank in (0, 1):
            while not self.nothing_for(rank):
                task = self.tasks[rank].pop(0)
                if isinstance(task, Regroup):
                    self.done(rank, task.cell)
        return all(rank.state is RankState.IDLE for rank in self.state.ranks.values())

    def killed(self) -> bool:
        """Return True if the driver has killed the current process of rank 0."""
        return any(kill.incarnation == self.state.ranks[0].incarnation for kill in self.launcher.killed)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.full)])
def test_random_messages_of_every_type_kill_at_most_their_sender(seed, monkeypatch):
    monkeypatch.setattr("sys.excepthook", lambda *_: None)  # what is reported, another test looks at
    kinds = [msgspec.inspect.type_info(kind) for kind in get_args(FromRank)]
    chance, harness = random.Random(seed), Hostile()
    try:
        harness.launch()
        cells: list[RunningCell] = []
        for number in range(MESSAGES // 2):
            cells.append(harness.submit(0, 1, sink=JupyterLike()))
            data = hostile(chance, kinds[number % len(kinds)], cells[-1].cell)
            harness.hub._up.append((Sender(0, harness.state.ranks[0].incarnation), (data, [])))
            harness.hub.wake()
            harness.done(1, cells[-1].cell)
            harness.done(0, cells[-1].cell)
            wait_until(
                lambda: harness.killed() or cells[-1].result is not None or harness.driver.failure is not None,
                timeout=SOON,
                what=f"the end of a cell in which rank 0 sent {data[:200]!r}",
            )
            assert harness.driver.failure is None, data[:200]
            if harness.killed():
                harness.bring_back()
            harness.settle()
            wait_until(lambda: cells[-1].result is not None, timeout=SOON, what="the end of the cell")
            for outcome in cells[-1].result:
                assert outcome.rank == 0 or outcome.status == "ok"
        assert all(kill.rank == 0 for kill in harness.launcher.killed)
        assert harness.launcher.killed, "no message was bad enough to cost its rank"
    finally:
        harness.close()


def test_messages_without_a_known_sender_are_ignored(monkeypatch):
    reported: list[BaseException] = []
    monkeypatch.setattr("sys.excepthook", lambda _, value, __: reported.append(value))
    harness = Hostile()
    try:
        harness.launch()
        for sender in ((7, 1), (2**32 - 1, 0), (0, 99)):
            harness.hub._up.append((Sender(*sender), (b"\xc1", [])))
        cell = harness.submit(0, 1)
        harness.done(0, cell.cell)
        harness.done(1, cell.cell)
        assert isinstance(cell.inbox.get(timeout=SOON), CellEnded)
        cell.result.raise_for_status()
        assert harness.launcher.killed == []
        assert len(reported) == 1
    finally:
        harness.close()
