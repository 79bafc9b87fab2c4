"""Test the transfer of segments in parts: in turn, given up at either end, and with what a peer must not send."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from rankbook.errors import ProtocolError, TransferError
from rankbook.protocol.forkserver import SegmentFailed, SegmentPart, SegmentRefused
from rankbook.transport import shared_memory
from rankbook.transport.shared_memory import PART_SIZE, SegmentReceiver, SegmentSender, SegmentStore

NAME = "segment-1-0123456789abcdef"


@pytest.fixture
def sender_store(tmp_path: Path) -> SegmentStore:
    (tmp_path / "sender_store").mkdir()
    return SegmentStore(tmp_path / "sender_store")


@pytest.fixture
def receiver_store(tmp_path: Path) -> SegmentStore:
    (tmp_path / "receiver_store").mkdir()
    return SegmentStore(tmp_path / "receiver_store")


def write(store: SegmentStore, data: bytes) -> str:
    segment = store.write([[data]])
    assert segment is not None
    return segment.name


def files(store: SegmentStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_segments_arrive_whole_and_take_turns(sender_store, receiver_store):
    contents = [bytes([number]) * (PART_SIZE * count + 7) for number, count in ((1, 3), (2, 1))]
    sender, receiver = SegmentSender(sender_store), SegmentReceiver(receiver_store)
    names = [write(sender_store, content) for content in contents]
    for name in names:
        assert sender.add(name) is None
    order = []
    while (part := sender.next_part()) is not None:
        order.append(names.index(part[0].name))
        assert receiver.receive(*part) is None
    assert order == [0, 1, 0, 1, 0, 0], "the small one does not wait for the large one"
    assert receiver.settled == set(names) and not receiver.transfers and not sender.transfers
    assert [bytes(receiver_store.read(name)) for name in names] == contents


def test_an_empty_segment_has_one_part(sender_store, receiver_store):
    sender, receiver = SegmentSender(sender_store), SegmentReceiver(receiver_store)
    (sender_store.folder / NAME).touch()
    sender.add(NAME)
    part = sender.next_part()
    assert part is not None and sender.next_part() is None
    receiver.receive(*part)
    assert receiver.settled == {NAME} and len(receiver_store.read(NAME)) == 0


def test_a_segment_that_is_gone_is_an_error_for_its_reader_only(sender_store, receiver_store):
    sender, receiver = SegmentSender(sender_store), SegmentReceiver(receiver_store)
    failed = sender.add(NAME)
    assert isinstance(failed, SegmentFailed) and "no longer exists" in failed.reason
    receiver.fail(failed.name, failed.reason)
    assert receiver.settled == {NAME}
    with pytest.raises(TransferError, match="no longer exists"):
        receiver_store.read(NAME, unlink=True)
    assert files(receiver_store) == []


def test_lack_of_memory_is_reported_to_the_sender_at_once_and_to_the_reader_with_the_remedy(
    sender_store, receiver_store, monkeypatch
):
    sender, receiver = SegmentSender(sender_store), SegmentReceiver(receiver_store)
    name = write(sender_store, bytes(5 * PART_SIZE))
    sender.add(name)
    monkeypatch.setattr(shared_memory, "_free_bytes", lambda _: 4_000_000)
    first, second = sender.next_part(), sender.next_part()
    assert first is not None and second is not None
    assert receiver.receive(*first) == SegmentRefused(name)
    assert receiver.receive(*second) is None, "it was on the way already"
    sender.cancel(name)
    assert sender.next_part() is None and not sender.transfers
    assert receiver.settled == {name}, "the message with the value is delivered"
    with pytest.raises(TransferError, match=r"5\.24 MB does not fit into the shared memory of .*: 4 MB are free in .*"):
        receiver_store.read(name)
    receiver.fail(name, "")  # the answer to the refusal: nothing more comes
    with pytest.raises(TransferError, match="does not fit"):
        receiver_store.read(name, unlink=True)
    assert files(receiver_store) == []
    assert receiver.receive(SegmentPart(NAME, 0, 1), b"x") is None, "other values still arrive"


def test_room_that_other_segments_will_take_is_not_given_twice(receiver_store, monkeypatch):
    receiver = SegmentReceiver(receiver_store)
    monkeypatch.setattr(shared_memory, "_free_bytes", lambda _: 100)
    assert receiver.receive(SegmentPart(NAME, 0, 50), b"x" * 10) is None
    other = NAME.replace("segment-1", "segment-2")
    assert receiver.receive(SegmentPart(other, 0, 40), b"x") == SegmentRefused(other)


@pytest.mark.parametrize(
    ("name", "offset", "size"),
    [(NAME, 3, 10), (NAME, 0, 10), (NAME, 5, 11), (NAME, -1, 10), ("../escape", 0, 10), ("segment-1-x", 0, 10)],
)
def test_a_part_that_is_not_the_next_one_is_refused(receiver_store, name, offset, size):
    receiver = SegmentReceiver(receiver_store)
    receiver.receive(SegmentPart(NAME, 0, 10), b"12345")
    with pytest.raises(ProtocolError):
        receiver.receive(SegmentPart(name, offset, size), b"123")
    assert files(receiver_store) == [NAME]


def test_a_peer_cannot_write_into_a_segment_that_it_did_not_begin(sender_store, receiver_store):
    name = write(receiver_store, b"of another process")
    receiver = SegmentReceiver(receiver_store)
    with pytest.raises(ProtocolError, match="invalid part"):
        receiver.receive(SegmentPart(name, 3, 18), b"changed")
    assert receiver.receive(SegmentPart(name, 0, 18), b"changed") == SegmentRefused(name)
    assert bytes(receiver_store.read(name)) == b"of another process"


def test_partial_segments_are_removed_at_the_end(receiver_store):
    receiver = SegmentReceiver(receiver_store)
    receiver.receive(SegmentPart(NAME, 0, 10), b"12345")
    other = NAME.replace("segment-1", "segment-2")
    receiver.receive(SegmentPart(other, 0, 3), b"123")
    receiver.close()
    assert files(receiver_store) == [other], "a reader may still open it"
    receiver.drop([other])
    assert files(receiver_store) == [] and not receiver.names


def test_the_memory_of_a_large_segment_is_freed_by_another_thread_and_counts_as_free(receiver_store, monkeypatch):
    receiver = SegmentReceiver(receiver_store)
    receiver.receive(SegmentPart(NAME, 0, 5), b"large")
    freed, room_was_asked_for, freed_by = threading.Event(), threading.Event(), []
    monkeypatch.setattr(shared_memory, "_WORTH_A_THREAD", 5)

    def close(file: int) -> None:
        room_was_asked_for.wait(30)
        freed_by.append(threading.current_thread())
        os.close(file)
        freed.set()

    def free_bytes(_: Path) -> int:
        if freed.is_set():
            return 1000
        room_was_asked_for.set()
        return 0

    monkeypatch.setattr(shared_memory, "_free_later", close)
    monkeypatch.setattr(shared_memory, "_free_bytes", free_bytes)
    receiver.drop([NAME])
    assert files(receiver_store) == [] and not freed_by, "this thread goes on"
    other = NAME.replace("segment-1", "segment-2")
    assert receiver.receive(SegmentPart(other, 0, 5), b"other") is None, "it has room"
    assert [thread.name for thread in freed_by] == ["rankbook-free"]


def test_a_segment_that_nobody_reads_is_given_up_whatever_has_arrived_of_it(sender_store, receiver_store, monkeypatch):
    sender, receiver = SegmentSender(sender_store), SegmentReceiver(receiver_store)
    complete, half, nothing, refused = (write(sender_store, b"x" * PART_SIZE * 2) for _ in range(4))
    for name in (complete, half, refused):
        sender.add(name)
    parts = [sender.next_part() for _ in range(6)]
    for number in (0, 3, 1):
        assert receiver.receive(*parts[number]) is None
    monkeypatch.setattr(shared_memory, "_free_bytes", lambda _: 0)
    assert receiver.receive(*parts[2]) == SegmentRefused(refused), "no room: the sender knows already"
    given_up = [receiver.give_up(name) for name in (complete, half, nothing, refused)]
    assert given_up == [None, SegmentRefused(half), SegmentRefused(nothing), None]
    # What was on the way, and then the answers of the sender.
    for number in (4, 5):
        assert receiver.receive(*parts[number]) is None
    for name in (half, nothing, refused):
        receiver.fail(name, "")
    assert files(receiver_store) == [] and not receiver.names and not receiver._refused


def test_what_is_still_to_come_from_other_hosts_is_no_room_for_a_segment(sender_store, receiver_store, monkeypatch):
    monkeypatch.setattr(shared_memory, "_free_bytes", lambda _: 12 * PART_SIZE)
    receivers, names = [SegmentReceiver(receiver_store) for _ in range(3)], []
    for receiver in receivers:
        sender = SegmentSender(sender_store)
        names.append(write(sender_store, b"x" * PART_SIZE * 4))
        sender.add(names[-1])
        refused = receiver.receive(*sender.next_part())
        # The third one finds 3 + 3 of 12 parts promised, and may take half of the others.
        assert refused == (SegmentRefused(names[-1]) if len(names) == 3 else None), len(names)
    receivers[0].close()
    receivers[1].drop([names[1]])
    assert len(receiver_store.arriving) == 2, "a lost host is forgotten"
    sender = SegmentSender(sender_store)
    sender.add(names[0])
    assert receivers[2].receive(*sender.next_part()) is None
