"""Shared memory of two ranks: what is given is never overwritten, and nothing of it has a name or stays."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch

from rankbook.runtime.data import slots
from rankbook.runtime.data.frames import BufferPool
from rankbook.runtime.data.slots import COUNT, NO_OFFER, OpenedSlot, SlotRing, host_key

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")


def filled(size, value):
    return torch.full((size,), value, dtype=torch.uint8)


@linux
def test_what_one_side_fills_the_other_side_empties():
    here = SlotRing(3000)
    assert not here.opened()
    there = OpenedSlot(here.offer)
    assert here.opened() and there.token == here.offer.token
    for turn in range(3 * COUNT):
        sent = [filled(1000, turn), filled(2000, 100 + turn)]
        slot = here.fill(sent)
        into = [filled(1000, 0), filled(2000, 0)]
        there.empty(slot, into)
        assert all(torch.equal(one, other) for one, other in zip(sent, into, strict=True))


@linux
def test_a_slot_is_filled_again_only_once_it_was_emptied():
    here = SlotRing(10)
    there = OpenedSlot(here.offer)
    used = [here.fill([filled(10, number)]) for number in range(COUNT)]
    assert sorted(used) == list(range(COUNT))
    assert here.fill([filled(10, 9)]) is None
    into = filled(10, 0)
    there.empty(used[1], [into])
    assert into[0] == 1
    assert here.fill([filled(10, 9)]) == used[1]
    assert here.fill([filled(10, 9)]) is None
    here.all_free()
    assert here.fill([filled(10, 9)]) is not None


@linux
def test_what_does_not_fit_is_not_taken():
    here = SlotRing(10)
    assert here.fill([filled(here.capacity, 1)]) is not None
    assert here.fill([filled(here.capacity, 1), filled(1, 1)]) is None


@linux
def test_what_was_written_to_its_room_is_not_copied():
    here = SlotRing(3 * 1000)
    assert here.room(1000) is None  # nobody has opened it
    there = OpenedSlot(here.offer)
    for number in range(2 * COUNT):
        rooms = [here.room(1000), here.room(500)]
        for each in rooms:
            each.fill_(number)
        before = here._memory.sum()
        slot = here.fill(rooms)
        assert here._memory.sum() == before
        into = [filled(1000, 99), filled(500, 99)]
        there.empty(slot, into)
        assert [each.unique().tolist() for each in into] == [[number], [number]]
    assert here.room(here.capacity + 1) is None


@linux
@pytest.mark.parametrize("how", ["another order", "something between", "forgotten"])
def test_what_lies_elsewhere_in_the_room_is_copied(how):
    here = SlotRing(3 * 1000)
    there = OpenedSlot(here.offer)
    one, other = here.room(1000).fill_(1), here.room(500).fill_(2)
    sent = {"another order": [other, one], "something between": [one, filled(10, 7), other], "forgotten": [one, other]}
    if how == "forgotten":
        here.begin()
    slot = here.fill(sent[how])
    one.fill_(50) if how != "forgotten" else None
    into = [torch.empty_like(each) for each in sent[how]]
    there.empty(slot, into)
    assert [each[0].item() for each in into] == {
        "another order": [2, 1],
        "something between": [1, 7, 2],
        "forgotten": [1, 2],
    }[how]


@linux
def test_what_is_not_taken_is_kept_from_what_comes_next():
    here = SlotRing(100)
    there = OpenedSlot(here.offer)
    for number in range(COUNT - 1):
        here.fill([filled(100, number)])
    lying, other = here.room(100).fill_(7), filled(10, 8)
    sent = [other, lying]
    assert here.fill(sent) is None  # in another order, and no other slot is free
    kept = here.outside(sent)
    assert kept[0] is other
    here.room(100).fill_(50)
    assert kept[1].unique().tolist() == [7]
    assert there.token == here.offer.token


@linux
def test_a_room_is_in_a_slot_that_nobody_reads():
    here = SlotRing(100)
    there = OpenedSlot(here.offer)
    used = [here.fill([filled(100, number)]) for number in range(COUNT)]
    assert here.room(100) is None
    there.empty(used[2], [filled(100, 0)])
    here.room(100).fill_(9)
    into = filled(100, 0)
    there.empty(used[0], [into])
    assert into[0] == 0 and into.unique().tolist() == [0]


@linux
def test_whoever_does_not_open_the_memory_is_given_up():
    here = SlotRing(10)
    assert [here.hopeless() for _ in range(10)][-1]
    OpenedSlot(here.offer)
    assert not here.hopeless()


@linux
def test_a_descriptor_that_is_something_else_by_now_is_not_opened():
    here = SlotRing(10)
    offer = here.offer
    with pytest.raises(OSError, match="not what was offered"):
        OpenedSlot(offer._replace(token=bytes(16)))
    del here
    gc.collect()
    with pytest.raises(OSError):  # noqa: PT011 - which one depends on who has the descriptor now
        OpenedSlot(offer)
    with pytest.raises(OSError):  # noqa: PT011 - the same
        OpenedSlot(NO_OFFER)


@linux
def test_nothing_has_a_name_and_nothing_stays():
    before = set(Path("/dev/shm").iterdir()), len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are enough
    here = SlotRing(1 << 20)
    there = OpenedSlot(here.offer)
    slot = here.fill([filled(100, 7)])
    assert set(Path("/dev/shm").iterdir()) <= before[0]
    del here
    into = filled(100, 0)
    there.empty(slot, [into])  # what one side has let go of is there until the other one has too
    assert into[0] == 7
    del there
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before[1]  # noqa: PTH208 - the same
    assert "rankbook-batches" not in Path("/proc/self/maps").read_text()


def test_where_there_is_no_such_memory_no_host_is_shared(monkeypatch):
    host_key.cache_clear()
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert slots.host_key() == bytes(16)
    host_key.cache_clear()


def test_memory_is_lent_again_once_no_view_of_it_is_left():
    lent = BufferPool()
    first = lent.take(100_000)
    place = first.ctypes.data
    tensor = torch.from_numpy(first)[10:20].view(torch.int16)
    seen = weakref.ref(first.base)
    del first
    other = lent.take(100_000)
    assert other.ctypes.data != place and seen() is not None
    row = tensor.numpy()[1:]
    del tensor
    assert seen() is not None
    del row
    assert seen() is None
    again = lent.take(90_000)
    assert again.nbytes == 90_000 and again.ctypes.data == place


def test_little_of_what_comes_back_is_kept():
    lent = BufferPool()
    taken = [lent.take(1000) for _ in range(100)]
    del taken
    assert 0 < len(lent._free) < 50
    lent.take(10_000_000)
    assert sum(each.nbytes for each in lent._free) < 11_000_000
