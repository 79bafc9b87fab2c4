"""The record of a group's collectives: numbers that all ranks agree on, what is pending, and the words for it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from rankbook.rank.process_groups.collective_log import OPS, CollectiveCall, CollectiveLog, FutureWork, Op


class Work:
    """What torch gives for an asynchronous call."""

    completed = False

    def is_completed(self) -> bool:
        return self.completed


@dataclass
class Rooted:
    """Options with a root, as broadcast's; it counts in the group."""

    rootRank: int


@pytest.fixture
def ledger() -> CollectiveLog:
    return CollectiveLog("0", (0, 2, 3))


def begin(ledger: CollectiveLog, name: str = "allreduce", *args: object) -> tuple[int, CollectiveCall]:
    return ledger.launch(OPS[name], args or ([torch.ones(4, 4)], None))


def test_collectives_are_numbered_from_one_and_sends_are_not(ledger):
    assert [begin(ledger)[1].number, begin(ledger, "barrier")[1].number] == [1, 2]
    assert begin(ledger, "send", [torch.ones(1)], 1, 0)[1].number == 0
    assert begin(ledger, "recv_anysource", [torch.ones(1)], 0)[1].number == 0
    assert begin(ledger)[1].number == 3
    assert (ledger.count, ledger.total) == (3, 5)


def test_what_was_refused_takes_no_number(ledger):
    begin(ledger)
    key, _ = begin(ledger, "barrier")
    ledger.withdraw(key)
    assert (ledger.count, ledger.total) == (1, 1)
    assert ledger.latest.op == "all_reduce"
    assert begin(ledger, "barrier")[1].number == 2
    assert [each.number for each in ledger.report().recent] == [1, 2]


def test_a_send_that_was_refused_takes_no_collectives_number_away(ledger):
    begin(ledger)
    key, _ = begin(ledger, "send", [torch.ones(1)], 1, 0)
    ledger.withdraw(key)
    assert (ledger.count, ledger.total) == (1, 1)
    ledger.withdraw(key)
    assert (ledger.count, ledger.total) == (1, 1), "only once"


def test_pending_is_what_is_being_begun_and_what_has_not_ended_oldest_first(ledger):
    _, first = begin(ledger)
    key, second = begin(ledger, "barrier")
    assert [*ledger.pending()] == [first, second]
    ledger.end(key)
    assert [*ledger.pending()] == [first]


def test_a_work_ends_what_is_pending_when_it_is_completed(ledger):
    _, launched = begin(ledger)
    work = Work()
    launched.work = weakref.ref(work)
    assert [*ledger.pending()] == [launched]
    work.completed = True
    assert [*ledger.pending()] == []
    work.completed = False
    assert [*ledger.pending()] == [], "and that is final"


def test_a_work_that_nobody_has_any_more_is_nothing_to_wait_for(ledger):
    _, launched = begin(ledger)
    work = Work()
    launched.work = weakref.ref(work)
    del work
    gc.collect()
    assert [*ledger.pending()] == []


def test_a_promised_work_is_waited_for_when_nobody_else_has_it(ledger):
    _, launched = begin(ledger)
    work = Work()
    launched.work = FutureWork(work, work)
    gc.collect()
    assert [*ledger.pending()] == [launched]
    work.completed = True
    assert [*ledger.pending()] == []


def test_promised_works_that_are_done_are_not_kept_until_somebody_asks(ledger):
    works = []
    for _ in range(3):
        _, launched = begin(ledger)
        works.append(Work())
        launched.work = FutureWork(works[-1], works[-1])
    watched = [weakref.ref(each) for each in works]
    works[0].completed = works[1].completed = True
    begin(ledger)
    works.clear()
    gc.collect()
    assert [each() is not None for each in watched] == [False, False, True]


def test_a_new_start_counts_from_one_forgets_all_and_still_knows_how_many_there_were(ledger):
    begin(ledger)
    begin(ledger)
    ledger.restart()
    assert (ledger.count, ledger.total, ledger.latest, [*ledger.pending()]) == (0, 2, None, [])
    assert begin(ledger)[1].number == 1


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("allreduce", ([torch.ones(4, 4)], None), "all_reduce #1 (float32[4, 4])"),
        ("allreduce_coalesced", ([torch.ones(2)] * 2, None), "all_reduce_coalesced #1 (float32[2] and 1 more)"),
        ("broadcast", ([torch.ones(2, dtype=torch.int64)], Rooted(1)), "broadcast #1 (int64[2] root 2)"),
        ("allgather", ([[torch.ones(2)] * 3], [torch.ones(2)], None), "all_gather #1 (float32[2])"),
        ("_reduce_scatter_base", (torch.ones(2), torch.ones(6), None), "reduce_scatter_tensor #1 (float32[2])"),
        ("barrier", (None,), "barrier #1"),
        ("send", ([torch.ones(())], 2, 0), "send (float32[] to rank 3)"),
        ("recv", ([torch.ones(1)], 1, 0), "recv (float32[1] from rank 2)"),
        ("gather", ([], [torch.ones(2)], Rooted(0)), "gather #1 (float32[2] root 0)"),
        ("scatter", ([], None), "scatter #1"),
    ],
)  # fmt: skip
def test_the_words_name_what_where_from_and_to_whom_as_the_world_counts(ledger, name, arguments, words):
    assert str(begin(ledger, name, *arguments)[1]) == words


def test_a_report_tells_ranks_count_what_is_pending_and_what_was(ledger):
    key, _ = begin(ledger)
    ledger.end(key)
    begin(ledger, "recv", [torch.ones(1)], 1, 0)
    begin(ledger, "barrier")
    report = ledger.report()
    assert (report.name, report.ranks, report.count) == ("0", (0, 2, 3), 2)
    assert [(each.op, each.number, each.peer) for each in report.pending] == [("recv", 0, 2), ("barrier", 2, None)]
    assert [(each.op, each.number) for each in report.recent] == [("all_reduce", 1), ("barrier", 2)]
    assert all(each.seconds >= 0 for each in report.pending)


def test_only_the_last_ones_are_remembered_but_all_that_are_pending(ledger):
    for _ in range(100):
        begin(ledger)
    assert len(ledger.report().pending) == 100
    assert [each.number for each in ledger.report().recent] == list(range(85, 101))


def test_every_method_of_torchs_groups_that_launches_something_is_known():
    launches = {
        name
        for name in vars(dist.ProcessGroup)
        if any(
            word in name for word in ("reduce", "gather", "scatter", "alltoall", "all_to_all", "broadcast", "barrier")
        )
        or name in ("send", "recv", "recv_anysource")
    }
    assert launches - set(OPS) == set()


def test_what_is_no_tensor_has_no_words():
    ledger = CollectiveLog("", (0, 1))
    assert str(ledger.launch(Op("new_group", None, alike=False), ())[1]) == "new_group #1"


def test_a_report_bears_that_collecting_garbage_on_its_way_begins_and_ends_collectives(ledger):
    class Dropped:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            ledger.end(begin(ledger, "barrier")[0])
            begin(ledger, "barrier")

    kept = gc.get_threshold()
    gc.freeze()  # torch's objects, which would be looked through each time
    try:
        for allocations in range(1, 80):
            gc.disable()
            ledger.restart()
            for _ in range(20):
                begin(ledger, "barrier")
            gc.collect()  # the interpreter keeps no tuples to give again
            Dropped()
            gc.set_threshold(allocations)
            gc.enable()
            assert len(ledger.report().pending) >= 20
    finally:
        gc.set_threshold(*kept)
        gc.unfreeze()
        gc.enable()
