"""What a kept rank remembers of what it sent."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from rankbook.protocol.comm import CommToRank, DapToRank
from rankbook.protocol.messages import (
    Abort,
    Assign,
    CallFunction,
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
    RunCell,
    Shutdown,
    Text,
    ToRank,
)
from rankbook.protocol.queries import GetCompletions, GetInspection, GetStatus, GetValue
from rankbook.protocol.reattach import Acknowledge, ReplayStart, RequestReplay
from rankbook.rank.replay_buffer import DetachableLink, ReplayBuffer
from rankbook.transport.link import Frames

TOKEN = "secret"


def text(cell: int, words: str) -> Text:
    return Text(cell=cell, stream="stdout", data=words.encode())


def done(cell: int, status: str = "ok") -> Done:
    return Done(cell=cell, status=status, seconds=0.0)


def picture(kind: str, words: str, display_id: str | None = None) -> Display:
    return Display(cell=1, kind=kind, data={"text/plain": words}, metadata={}, display_id=display_id)


def recalled(outbox: ReplayBuffer, since: float = 100.0) -> list[Message]:
    return list(outbox.recall("n", since)[1])


def test_a_cell_is_told_from_its_beginning_until_it_was_seen():
    outbox = ReplayBuffer()
    outbox.begin(RunCell(cell=1, source="", number=7))
    outbox.add(text(1, "a"), 0.0)
    here, kept = outbox.recall("nonce", 100.0)
    assert (here.nonce, here.cell, here.number, here.label) == ("nonce", 1, 7, "cell [7]")
    assert (here.running, here.seen, here.entries) == (True, False, 1)
    outbox.add(done(1), 1.0)
    here, kept = outbox.recall("nonce", 100.0)
    assert kept == [text(1, "a"), done(1)]
    assert (here.running, here.seen) == (False, False)
    outbox.seen(1)
    here, kept = outbox.recall("nonce", 100.0)
    assert kept == []
    assert here.seen


def test_a_new_task_says_that_the_one_before_was_seen():
    outbox = ReplayBuffer()
    for cell in (1, 2):
        outbox.begin(RunCell(cell=cell, source="", number=cell))
        outbox.add(text(cell, "a"), 0.0)
        outbox.add(done(cell), 0.0)
    assert recalled(outbox) == [text(2, "a"), done(2)]


def test_what_a_thread_prints_after_its_cell_was_seen_is_told_from_when_the_owner_went():
    outbox = ReplayBuffer()
    outbox.begin(RunCell(cell=1, source="", number=1))
    outbox.add(done(1), 0.0)
    outbox.seen(1)
    outbox.add(text(1, "shown"), 5.0)
    outbox.add(text(1, "missed"), 7.0)
    assert recalled(outbox, since=6.0) == [text(1, "missed")]


def test_there_is_a_bound_the_oldest_goes_first_and_the_end_never():
    outbox = ReplayBuffer(most=1_000)
    outbox.begin(RunCell(cell=1, source="", number=1))
    for i in range(20):
        outbox.add(text(1, f"{i:>100}"), 0.0)
    outbox.add(done(1), 0.0)
    for i in range(20, 40):
        outbox.add(text(1, f"{i:>100}"), 0.0)
    here, kept = outbox.recall("n", 100.0)
    assert done(1) in kept
    assert kept[-1] == text(1, f"{39:>100}")
    assert len(kept) + here.dropped == 41
    assert here.dropped > 30
    outbox.seen(1)
    assert outbox.recall("n", 100.0)[0].dropped == 0


def test_of_a_display_that_changes_the_last_state_is_kept_in_its_place():
    outbox = ReplayBuffer()
    outbox.begin(RunCell(cell=1, source="", number=1))
    outbox.add(picture("display", "0%", "bar"), 0.0)
    outbox.add(text(1, "between"), 0.0)
    for i in range(1_000):
        outbox.add(picture("update", f"{i}", "bar"), 0.0)
    assert recalled(outbox) == [picture("display", "999", "bar"), text(1, "between")]
    outbox.add(picture("update", "of an older cell's", "other"), 0.0)
    assert len(recalled(outbox)) == 3


def test_the_group_that_a_rank_is_in_is_the_last_one_that_it_joined():
    outbox = ReplayBuffer()
    for generation, status, expected in ((1, "ok", 1), (2, "error", 0), (3, "ok", 3)):
        outbox.begin(Regroup(cell=generation, generation=generation))
        outbox.add(done(generation, status), 0.0)
        here = outbox.recall("n", 0.0)[0]
        assert (here.generation, here.number, here.label) == (expected, -1, "forming the group")
    outbox.begin(RunCell(cell=9, source="", number=4))
    outbox.add(done(9, "error"), 0.0)
    assert outbox.recall("n", 0.0)[0].generation == 3


@pytest.mark.parametrize(
    ("task", "label"),
    [
        (RunCell(cell=1, source="", number=0), "a cell"),
        (Assign(cell=1, payload=Payload(())), "a push"),
        (CallFunction(cell=1, payload=Payload(())), "a call"),
        (FetchValue(cell=1, name="x.y"), "a pull of x.y"),
    ],
)
def test_a_task_is_called_as_people_call_it(task, label):
    outbox = ReplayBuffer()
    outbox.begin(task)
    assert outbox.recall("n", 0.0)[0].label == label


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
        while (parcel := self.link.receive()) is not None:
            received.append(parcel[0])
        return received


def test_without_a_notebook_nothing_is_sent_and_nothing_waits():
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


@pytest.mark.parametrize("token", ["", "wrong", "sécret"])
def test_who_does_not_have_the_token_gets_no_answer(token):
    rank = Rank()
    assert rank.gets(RequestReplay(token=token, nonce="n", since=0.0)) == []
    assert rank.wire.sent == []


def test_what_was_seen_is_not_repeated():
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
    ids=lambda each: type(each).__name__,
)
def test_what_a_rank_is_asked_beside_its_cell_takes_the_cells_place_neither_while_it_runs_nor_afterwards(aside):
    rank = Rank()
    rank.gets(RunCell(cell=1, source="", number=7))
    rank.link.send(text(1, "before"))
    assert rank.gets(aside) == [aside]
    rank.gets(RequestReplay(token=TOKEN, nonce="n", since=1e12))
    here = rank.wire.sent[1]
    assert (here.cell, here.number, here.running, here.seen, here.entries) == (1, 7, True, False, 1)
    rank.link.send(done(1))
    assert rank.gets(aside) == [aside]
    rank.gets(RequestReplay(token=TOKEN, nonce="n", since=1e12))
    here = rank.wire.sent[4]
    assert (here.cell, here.number, here.running, here.seen, here.entries) == (1, 7, False, False, 2)


def test_what_is_about_no_cell_is_sent_and_not_kept():
    rank = Rank()
    hello = RankReady(rank=0, pid=1, incarnation=1, device="cpu", backend="gloo", threads=1)
    rank.link.send(hello)
    rank.gets(RequestReplay(token=TOKEN, nonce="n", since=0.0))
    assert rank.wire.sent[0] == hello
    assert rank.wire.sent[1].entries == 0
