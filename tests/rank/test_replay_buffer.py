"""Test what a detached rank keeps of its messages."""

from __future__ import annotations

import threading
from collections.abc import Collection

import pytest

from rankbook.protocol.messages import (
    Abort,
    Acknowledge,
    Assign,
    CallFunction,
    CommToRank,
    DapToRank,
    Display,
    Done,
    FetchValue,
    GetCollectives,
    GetStack,
    InputReply,
    InputRequest,
    Interrupt,
    Message,
    Payload,
    RankReady,
    Regroup,
    ReplayStart,
    RequestReplay,
    RunCell,
    Shutdown,
    Text,
    ToRank,
)
from rankbook.protocol.queries import GetCompletions, GetInspection, GetStatus, GetValue
from rankbook.rank.replay_buffer import DetachableLink, ReplayBuffer
from rankbook.transport import Frames

TOKEN = "secret"


def text(cell: int, words: str) -> Text:
    return Text(cell=cell, stream="stdout", data=words.encode())


def done(cell: int, status: str = "ok") -> Done:
    return Done(cell=cell, status=status, seconds=0.0)


def picture(kind: str, words: str, display_id: str | None = None) -> Display:
    return Display(cell=1, kind=kind, data={"text/plain": words}, metadata={}, display_id=display_id)


def recalled(buffer: ReplayBuffer, since: float = 100.0) -> list[Message]:
    return list(buffer.replay("n", since)[1])


def test_a_cell_is_reported_from_its_beginning_until_it_was_seen():
    buffer = ReplayBuffer()
    buffer.begin(RunCell(cell=1, source="", number=7))
    buffer.add(text(1, "a"), 0.0)
    start, messages = buffer.replay("nonce", 100.0)
    assert (start.nonce, start.cell, start.number, start.label) == ("nonce", 1, 7, "cell [7]")
    assert (start.running, start.seen, start.entries) == (True, False, 1)
    buffer.add(done(1), 1.0)
    start, messages = buffer.replay("nonce", 100.0)
    assert messages == [text(1, "a"), done(1)]
    assert (start.running, start.seen) == (False, False)
    buffer.acknowledge(1)
    start, messages = buffer.replay("nonce", 100.0)
    assert messages == []
    assert start.seen


def test_a_new_task_says_that_the_one_before_was_seen():
    buffer = ReplayBuffer()
    for cell in (1, 2):
        buffer.begin(RunCell(cell=cell, source="", number=cell))
        buffer.add(text(cell, "a"), 0.0)
        buffer.add(done(cell), 0.0)
    assert recalled(buffer) == [text(2, "a"), done(2)]


def test_a_cell_that_was_queued_before_the_groups_were_formed_anew_is_not_seen():
    buffer = ReplayBuffer()
    buffer.begin(Regroup(cell=3, generation=2))
    buffer.add(done(3), 0.0)
    buffer.begin(RunCell(cell=2, source="", number=2))
    buffer.add(done(2), 0.0)
    start, messages = buffer.replay("nonce", 100.0)
    assert (start.cell, start.seen, messages) == (2, False, [done(2)])


@pytest.mark.parametrize(
    "tasks",
    [
        (Regroup(cell=3, generation=2), RunCell(cell=2, source="", number=2)),  # which the regroup has overtaken
        (RunCell(cell=2, source="", number=2),),  # another cell was removed from the queue
    ],
)
def test_the_end_of_another_cell_does_not_say_that_the_running_one_was_seen(tasks):
    buffer = ReplayBuffer()
    for task in tasks:
        buffer.begin(task)
        if task is not tasks[-1]:
            buffer.add(done(task.cell), 0.0)
    buffer.add(text(2, "before"), 0.0)
    buffer.acknowledge(3)
    buffer.add(done(2), 0.0)
    start, messages = buffer.replay("nonce", 100.0)
    assert (start.cell, start.seen, messages) == (2, False, [text(2, "before"), done(2)])
    buffer.acknowledge(2)
    assert buffer.replay("nonce", 100.0)[0].seen


def test_output_of_threads_is_replayed_from_the_loss_of_the_owner_on():
    buffer = ReplayBuffer()
    buffer.begin(RunCell(cell=1, source="", number=1))
    buffer.add(done(1), 0.0)
    buffer.acknowledge(1)
    buffer.add(text(1, "shown"), 5.0)
    buffer.add(text(1, "missed"), 7.0)
    assert recalled(buffer, since=6.0) == [text(1, "missed")]


def test_full_buffer_drops_the_oldest_and_never_done():
    buffer = ReplayBuffer(limit=1_000)
    buffer.begin(RunCell(cell=1, source="", number=1))
    for i in range(20):
        buffer.add(text(1, f"{i:>100}"), 0.0)
    buffer.add(done(1), 0.0)
    for i in range(20, 40):
        buffer.add(text(1, f"{i:>100}"), 0.0)
    start, messages = buffer.replay("n", 100.0)
    assert done(1) in messages
    assert messages[-1] == text(1, f"{39:>100}")
    assert len(messages) + start.dropped == 41
    assert start.dropped > 30
    buffer.acknowledge(1)
    assert buffer.replay("n", 100.0)[0].dropped == 0


def test_updated_display_is_replayed_in_its_last_state():
    buffer = ReplayBuffer()
    buffer.begin(RunCell(cell=1, source="", number=1))
    buffer.add(picture("display", "0%", "bar"), 0.0)
    buffer.add(text(1, "between"), 0.0)
    for i in range(1_000):
        buffer.add(picture("update", f"{i}", "bar"), 0.0)
    assert recalled(buffer) == [picture("display", "999", "bar"), text(1, "between")]
    buffer.add(picture("update", "of an older cell's", "other"), 0.0)
    assert len(recalled(buffer)) == 3


def test_the_group_that_a_rank_is_in_is_the_last_one_that_it_joined():
    buffer = ReplayBuffer()
    for generation, status, expected in ((1, "ok", 1), (2, "error", 0), (3, "ok", 3)):
        buffer.begin(Regroup(cell=generation, generation=generation))
        buffer.add(done(generation, status), 0.0)
        start = buffer.replay("n", 0.0)[0]
        assert (start.generation, start.number, start.label) == (expected, -1, "forming the group")
    buffer.begin(RunCell(cell=9, source="", number=4))
    buffer.add(done(9, "error"), 0.0)
    assert buffer.replay("n", 0.0)[0].generation == 3


@pytest.mark.parametrize(
    ("task", "label"),
    [
        (RunCell(cell=1, source="", number=0), "a cell"),
        (Assign(cell=1, payload=Payload(())), "a push"),
        (CallFunction(cell=1, payload=Payload(())), "a call"),
        (FetchValue(cell=1, name="x.y"), "a pull of x.y"),
    ],
)
def test_task_label_is_the_one_that_users_see(task, label):
    buffer = ReplayBuffer()
    buffer.begin(task)
    assert buffer.replay("n", 0.0)[0].label == label


class FakeLink:
    """Takes what it is offered while it has room."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.coming: list[ToRank] = []
        self.full = 0

    def offer(self, message: Message, frames: Frames = ()) -> bool:  # noqa: ARG002 - as the real one
        if self.full:
            self.full -= 1
            return False
        self.sent.append(message)
        return True

    send = offer

    def receive(self) -> tuple[ToRank, list[memoryview]] | None:
        return (self.coming.pop(0), []) if self.coming else None

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:  # noqa: ARG002
        return bool(self.coming), set()


class Rank:
    """A kept link, whose notebook can be taken away."""

    def __init__(self) -> None:
        self.wire = FakeLink()
        self.owned = True
        self.link = DetachableLink(self.wire, TOKEN, lambda: self.owned)

    def gets(self, *messages: ToRank) -> list[ToRank]:
        self.wire.coming += messages
        received = []
        while (received_message := self.link.receive()) is not None:
            received.append(received_message[0])
        return received


def test_messages_without_a_notebook_are_buffered_without_waiting():
    rank = Rank()
    cell = RunCell(cell=1, source="", number=1)
    assert rank.gets(cell) == [cell]
    rank.owned = False
    rank.wire.full = 1 << 60
    rank.link.send(text(1, "alone"))
    rank.link.send(done(1))
    assert rank.wire.sent == []
    rank.owned, rank.wire.full = True, 0
    assert rank.gets(RequestReplay(token=TOKEN, nonce="n", since=0.0)) == []
    assert isinstance(rank.wire.sent[0], ReplayStart)
    assert rank.wire.sent[1:] == [text(1, "alone"), done(1)]


def test_a_full_link_is_waited_for_as_long_as_there_is_a_notebook():
    rank = Rank()
    rank.wire.full = 3
    rank.link.send(text(1, "late"))
    assert rank.wire.sent == [text(1, "late")]


def test_a_message_that_begins_in_the_middle_of_a_send_or_a_replay_follows_it():
    rank = Rank()
    rank.gets(RunCell(cell=1, source="", number=1))
    offer, later = rank.wire.offer, [text(1, "c"), text(1, "b")]

    def interrupted(message: Message, frames: Frames = ()) -> bool:
        if later:
            rank.link.send(later.pop())  # as a finalizer does
        return offer(message, frames)

    def play() -> None:
        rank.link.send(text(1, "a"))
        later.append(text(1, "d"))
        rank.gets(RequestReplay(token=TOKEN, nonce="n", since=0.0))

    rank.wire.offer = interrupted
    thread = threading.Thread(target=play, daemon=True)  # it would wait for its own lock
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()
    start = rank.wire.sent.index(next(message for message in rank.wire.sent if isinstance(message, ReplayStart)))
    assert rank.wire.sent[:start] == [text(1, "a"), text(1, "b"), text(1, "c")]
    assert rank.wire.sent[start + 1 :] == [text(1, "a"), text(1, "b"), text(1, "c"), text(1, "d")]


@pytest.mark.parametrize("token", ["", "wrong", "sécret"])
def test_request_without_the_token_is_ignored(token):
    rank = Rank()
    assert rank.gets(RequestReplay(token=token, nonce="n", since=0.0)) == []
    assert rank.wire.sent == []


def test_acknowledged_messages_are_not_replayed():
    rank = Rank()
    rank.gets(RunCell(cell=1, source="", number=1))
    rank.link.send(done(1))
    assert rank.gets(Acknowledge(cell=1)) == []
    rank.gets(RequestReplay(token=TOKEN, nonce="n", since=1e12))
    assert rank.wire.sent[1].entries == 0


@pytest.mark.parametrize("end", [InputReply(cell=1, text="Ada"), Interrupt(cell=1), None])
def test_a_question_is_repeated_until_it_was_answered_or_interrupted(end):
    rank = Rank()
    rank.gets(RunCell(cell=1, source="", number=1))
    question = InputRequest(cell=1, prompt="?", password=False)
    rank.link.send(question)
    if end is not None:
        assert rank.gets(end) == [end]
    rank.gets(RequestReplay(token=TOKEN, nonce="n", since=0.0))
    assert rank.wire.sent[2:] == ([question] if end is None else [])


@pytest.mark.parametrize(
    "aside",
    [
        GetStack(token=1),
        GetCollectives(token=1),
        Abort(groups=(), cause="it was interrupted", shut=True, ranks=()),
        Shutdown(patience=0.0),
        GetStatus(1, holdings=True, known=0, fresh=False, saves=False),
        GetCompletions(1, text="x.", cursor=2, variables=False),
        GetInspection(1, text="x", cursor=1, source=False),
        GetValue(1, source="x", seconds=1.0),
        CommToRank(kind="msg", comm="a slider", content="{}", metadata="{}"),
        DapToRank(content="{}"),
    ],
    ids=lambda item: type(item).__name__,
)
def test_queries_beside_a_cell_do_not_replace_it_in_the_replay(aside):
    rank = Rank()
    rank.gets(RunCell(cell=1, source="", number=7))
    rank.link.send(text(1, "before"))
    assert rank.gets(aside) == [aside]
    rank.gets(RequestReplay(token=TOKEN, nonce="n", since=1e12))
    start = rank.wire.sent[1]
    assert (start.cell, start.number, start.running, start.seen, start.entries) == (1, 7, True, False, 1)
    rank.link.send(done(1))
    assert rank.gets(aside) == [aside]
    rank.gets(RequestReplay(token=TOKEN, nonce="n", since=1e12))
    start = rank.wire.sent[4]
    assert (start.cell, start.number, start.running, start.seen, start.entries) == (1, 7, False, False, 2)


def test_messages_without_a_cell_are_not_buffered():
    rank = Rank()
    hello = RankReady(rank=0, pid=1, incarnation=1, device="cpu", backend="gloo", threads=1)
    rank.link.send(hello)
    rank.gets(RequestReplay(token=TOKEN, nonce="n", since=0.0))
    assert rank.wire.sent[0] == hello
    assert rank.wire.sent[1].entries == 0
