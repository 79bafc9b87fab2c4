"""Test the agent's handling of messages, without processes and sockets."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from rankbook import agent as agent_module
from rankbook.agent import Agent
from rankbook.protocol.forkserver import FromRanks, HostNote, decode_from_agent
from rankbook.protocol.messages import Display, Done, FromRank, Text, decode_from_rank, encode_from_rank
from rankbook.transport import Sender


class Link:
    """A link whose peer acknowledges only on request."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []
        self.waiting = 0

    def pending(self, _stream: int) -> int:
        return self.waiting

    def send(self, _stream: int, frames: list[bytes]) -> None:
        self.sent.append([bytes(frame) for frame in frames])
        self.waiting += sum(map(len, frames))

    def acknowledge(self) -> None:
        self.waiting = 0

    def take(self) -> tuple[list[object], list[str]]:
        """Return the messages of ranks and the notes that were sent since the last call."""
        messages: list[object] = []
        notes: list[str] = []
        for first, *frames in self.sent:
            match decode_from_agent(first):
                case FromRanks():
                    messages += map(decode_from_rank, frames)
                case HostNote(text):
                    notes.append(text)
        self.sent.clear()
        return messages, notes


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def from_ranks() -> deque[tuple[Sender, memoryview, list[memoryview]]]:
    return deque()


@pytest.fixture
def agent(link, from_ranks) -> Agent:
    made = object.__new__(Agent)
    made._link = link  # type: ignore[assignment]
    made._hub = SimpleNamespace(receive_encoded=lambda: from_ranks.popleft() if from_ranks else None)  # type: ignore[assignment]
    made._asked = {}
    made._drops_displays = False
    return made


def test_displays_are_dropped_while_too_much_waits_for_the_coordinator_and_nothing_else_is(
    agent, link, from_ranks, monkeypatch
):
    monkeypatch.setattr(agent_module, "_MOST_WAITING", 10_000)

    def relay(*messages: FromRank) -> None:
        from_ranks.extend((Sender(3, 1), memoryview(encode_from_rank(message)), []) for message in messages)
        agent._relay_up()

    display = Display(1, "display", {"text/plain": "x" * 1000}, {})
    relay(*[display] * 1000)
    messages, notes = link.take()
    assert link.waiting <= 12_000
    assert messages == [display] * len(messages) and 8 <= len(messages) <= 9
    assert notes == ["displays of rank 3 and perhaps of others were dropped: 10 kB of output wait for the notebook"]
    relay(display, Text(1, "stdout", b"y" * 1000), Done(1, "ok", 0.1))
    messages, notes = link.take()
    assert [type(message) for message in messages] == [Text, Done] and not notes, "reported once"
    link.acknowledge()
    relay(*[display] * 5)
    assert link.take() == ([display] * 5, [])
    relay(*[display] * 100)
    assert len(link.take()[1]) == 1, "and again in the next flood"
