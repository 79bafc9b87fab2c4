"""The record of a group's collectives: numbers that all ranks agree on, what is pending, and the words for it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from rankbook.protocol import telemetry
from rankbook.rank.process_groups.collective_log import OPS, CollectiveCall, CollectiveLog, CurrentCell, FutureWork, Op


class Work:
    """Work of an asynchronous call."""

    completed = False

    def is_completed(self) -> bool:
        return self.completed


@dataclass
class Rooted:
    """Options with a root, as broadcast's; it counts in the group."""

    rootRank: int


@pytest.fixture
def log() -> CollectiveLog:
    return CollectiveLog("0", (0, 2, 3))


def begin(log: CollectiveLog, name: str = "allreduce", *args: object) -> tuple[int, CollectiveCall]:
    return log.launch(OPS[name], args or ([torch.ones(4, 4)], None))


def test_collectives_are_numbered_from_one_and_sends_are_not(log):
    assert [begin(log)[1].number, begin(log, "barrier")[1].number] == [1, 2]
    assert begin(log, "send", [torch.ones(1)], 1, 0)[1].number == 0
    assert begin(log, "recv_anysource", [torch.ones(1)], 0)[1].number == 0
    assert begin(log)[1].number == 3
    assert (log.count, log.total) == (3, 5)


def test_a_rank_that_does_not_exist_is_refused_before_it_counts(log):
    for rank in (3, -1):
        with pytest.raises(ValueError, match=f"send: invalid rank {rank}: the group has 3 ranks"):
            begin(log, "send", [torch.ones(1)], rank, 0)
    assert log.total == 0 and not list(log.pending())
    key, launched = begin(log, "broadcast", [torch.ones(1)], Rooted(5))  # torch says why, and the call is withdrawn
    assert "root 5" in str(launched)
    log.withdraw(key)
    assert log.total == 0


def test_refused_call_takes_no_number(log):
    begin(log)
    before = log.checksums
    key, _ = begin(log, "barrier")
    assert log.checksums != before
    log.withdraw(key)
    assert (log.count, log.total, log.checksums) == (1, 1, before)
    assert log.latest.op == "all_reduce"
    assert begin(log, "barrier")[1].number == 2
    assert [launch.number for launch in log.report().recent] == [1, 2]


def test_a_call_that_an_observer_has_refused_takes_no_number(log, monkeypatch):
    begin(log)
    before = log.count, log.total, log.checksums

    def refuse(*_: object) -> None:
        raise NotImplementedError("no kernel for this type")

    monkeypatch.setattr(telemetry, "collective_observer", refuse)
    with pytest.raises(NotImplementedError):
        begin(log)
    assert (log.count, log.total, log.checksums) == before
    assert len([*log.pending()]) == 1


@pytest.mark.parametrize("root", [0, 1])
def test_an_observer_gets_what_the_rank_sends_and_no_buffer_that_it_receives_into(log, monkeypatch, root):
    sent: list[object] = []
    monkeypatch.setattr(telemetry, "collective_observer", lambda _group, _number, _describe, data, _: sent.append(data))
    buffer, parts = [torch.full((1,), float("nan"))], [[torch.ones(1)] * 3] if root == 0 else []
    begin(log, "broadcast", buffer, Rooted(root))
    begin(log, "scatter", buffer, parts, Rooted(root))
    assert sent[0] is buffer if root == 0 else sent[0] == ()
    assert sent[1] is parts


def test_a_send_that_was_refused_takes_no_collectives_number_away(log):
    begin(log)
    key, _ = begin(log, "send", [torch.ones(1)], 1, 0)
    log.withdraw(key)
    assert (log.count, log.total) == (1, 1)
    log.withdraw(key)
    assert (log.count, log.total) == (1, 1), "only once"


def test_pending_lists_unfinished_calls_oldest_first(log):
    _, first = begin(log)
    key, second = begin(log, "barrier")
    assert [*log.pending()] == [first, second]
    log.end(key)
    assert [*log.pending()] == [first]


def test_a_work_ends_what_is_pending_when_it_is_completed(log):
    _, launched = begin(log)
    work = Work()
    launched.work = weakref.ref(work)
    assert [*log.pending()] == [launched]
    work.completed = True
    assert [*log.pending()] == []
    work.completed = False
    assert [*log.pending()] == [], "and that is final"


def test_unreferenced_work_is_not_waited_for(log):
    _, launched = begin(log)
    work = Work()
    launched.work = weakref.ref(work)
    del work
    gc.collect()
    assert [*log.pending()] == []


def test_registered_work_is_waited_for_without_other_references(log):
    _, launched = begin(log)
    work = Work()
    launched.work = FutureWork(work, work)
    gc.collect()
    assert [*log.pending()] == [launched]
    work.completed = True
    assert [*log.pending()] == []


def test_completed_registered_works_are_released_without_a_query(log):
    works = []
    for _ in range(3):
        _, launched = begin(log)
        works.append(Work())
        launched.work = FutureWork(works[-1], works[-1])
    watched = [weakref.ref(work_or_reference) for work_or_reference in works]
    works[0].completed = works[1].completed = True
    begin(log)
    works.clear()
    gc.collect()
    assert [work_or_reference() is not None for work_or_reference in watched] == [False, False, True]


def test_reset_restarts_numbers_at_one_and_keeps_the_total(log):
    begin(log)
    begin(log)
    log.restart()
    assert (log.count, log.total, log.latest, [*log.pending()]) == (0, 2, None, [])
    assert begin(log)[1].number == 1


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
        ("scatter", ([], None), "scatter #1 (root 0)"),
    ],
)  # fmt: skip
def test_description_names_operation_data_line_and_global_peer(log, name, arguments, words):
    assert str(begin(log, name, *arguments)[1]) == words


def test_report_has_ranks_count_pending_and_recent_calls(log):
    key, _ = begin(log)
    log.end(key)
    begin(log, "recv", [torch.ones(1)], 1, 0)
    begin(log, "barrier")
    report = log.report()
    assert (report.name, report.ranks, report.count) == ("0", (0, 2, 3), 2)
    assert [(launch.op, launch.number, launch.peer) for launch in report.pending] == [
        ("recv", 0, 2),
        ("barrier", 2, None),
    ]
    assert [(launch.op, launch.number) for launch in report.recent] == [("all_reduce", 1), ("barrier", 2)]
    assert all(launch.seconds >= 0 for launch in report.pending)


@dataclass
class Reducing:
    """Options with a reduction, as all_reduce's."""

    reduceOp: object


SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("allreduce", ([torch.ones(2)], None), ([torch.ones(3)], None)),
        ("allreduce", ([torch.ones(2, 3)], None), ([torch.ones(3, 2)], None)),
        ("allreduce", ([torch.ones(2)], None), ([torch.ones(2, dtype=torch.float64)], None)),
        ("allreduce", ([torch.ones(2)], Reducing(SUM)), ([torch.ones(2)], Reducing(MAX))),
        ("allreduce", ([torch.ones(2)], SUM), ([torch.ones(2)], MAX)),
        ("allreduce_coalesced", ([torch.ones(2), torch.ones(3)], None), ([torch.ones(2), torch.ones(4)], None)),
        ("broadcast", ([torch.ones(2)], Rooted(0)), ([torch.ones(2)], Rooted(1))),
        ("broadcast", (torch.ones(2), 0), (torch.ones(2), 1)),
        ("scatter", ([torch.ones(2)], [], Rooted(0)), ([torch.ones(3)], [], Rooted(0))),
    ],
)  # fmt: skip
def test_values_that_must_agree_change_the_digest(name, one, other):
    digests = []
    for arguments in (one, other, one):
        log = CollectiveLog("0", (0, 1))
        begin(log, name, *arguments)
        begin(log, "barrier")
        digests.append(log.report().recent[-1].digest)
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("allreduce", ([torch.ones(2)], Reducing(SUM)), (torch.ones(2),)),
        ("broadcast", ([torch.ones(2)], Rooted(0)), (torch.ones(2), 0)),
        (
            "alltoall",
            ([torch.ones(2)] * 2, [torch.ones(1)] * 2, None),
            ([torch.ones(1)] * 2, [torch.ones(2)] * 2, None),
        ),
        ("send", ([torch.ones(2)], 1, 0), ([torch.ones(7)], 0, 0)),
        ("gather", ([[torch.ones(2)] * 2], [torch.ones(2)], Rooted(0)), ([], [torch.ones(2)], Rooted(0))),
        (
            "allgather",
            ([[torch.ones(2), torch.ones(3)]], [torch.ones(2)], None),
            ([[torch.ones(2), torch.ones(3)]], [torch.ones(3)], None),
        ),
    ],
)  # fmt: skip
def test_values_that_may_differ_do_not_change_the_digest(name, one, other):
    logs = CollectiveLog("0", (0, 1)), CollectiveLog("0", (0, 1))
    for log, arguments in zip(logs, (one, other), strict=True):
        begin(log, name, *arguments)
    assert logs[0].checksums[0] == logs[1].checksums[0]


def test_the_order_of_collectives_changes_the_digest():
    one, other = CollectiveLog("0", (0, 1)), CollectiveLog("0", (0, 1))
    for log, names in ((one, ("barrier", "allreduce")), (other, ("allreduce", "barrier"))):
        for name in names:
            begin(log, name)
    assert one.count == other.count
    assert one.checksums != other.checksums


@pytest.mark.parametrize(("expected", "balanced"), [(3, True), (4, False)])
def test_balances_of_all_ranks_sum_to_zero_if_sizes_match(expected, balanced):
    rows = torch.ones(5, 2)
    logs = [CollectiveLog("0", (4, 7), rank=rank) for rank in range(2)]
    for _ in range(3):
        begin(logs[0], "all_to_all_single", torch.ones(4, 2), rows, [2, 2], [2, 3], None)
        begin(logs[1], "all_to_all_single", torch.ones(3 + expected, 2), rows, [expected, 3], [2, 3], None)
        (*_, last) = logs[0].report().recent
        assert (last.sends, last.expects) == ((4, 6), (4, 4))
    assert (sum(log.checksums[1] for log in logs) % (1 << 32) == 0) is balanced


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_with_parts_of_different_sizes_are_not_balanced_by_their_symmetry(world_size):
    logs = [CollectiveLog("0", tuple(range(world_size)), rank=rank) for rank in range(world_size)]
    for rank, log in enumerate(logs):
        tensor = torch.ones(world_size * (3 if rank else 2))
        begin(log, "all_to_all_single", tensor, tensor, [], [], None)
    assert sum(log.checksums[1] for log in logs) % (1 << 32) != 0


def test_equal_parts_and_lists_of_parts_are_counted_in_elements():
    log = CollectiveLog("0", (0, 1))
    begin(log, "all_to_all_single", torch.ones(4, 3), torch.ones(4, 3), [], [], None)
    begin(log, "alltoall", [torch.ones(2), torch.ones(7)], [torch.ones(1), torch.ones(2, 2)], None)
    first, second = log.report().recent
    assert (first.sends, first.expects) == ((6, 6), (6, 6))
    assert (second.sends, second.expects) == ((1, 4), (2, 7))


def test_the_line_of_a_launch_is_that_of_the_cell_that_called_torch():
    cell = CurrentCell()
    cell.files, cell.number = {"first": 3, "second": 4}, 4
    log = CollectiveLog("0", (0, 1), cell=cell)

    def layers(count: int) -> None:
        if count:
            layers(count - 1)
        else:
            begin(log)

    def positions(file: str, depth: int) -> str:
        exec(compile(f"\n\nlayers({depth})", file, "exec"), {"layers": layers})
        return log.report().recent[-1].position

    assert positions("second", 4) == "line 3"
    assert positions("first", 4) == "cell [3] line 3"
    assert positions("elsewhere", 4) == ""
    assert positions("second", 400) == ""


def test_a_pending_collective_without_a_line_has_that_of_the_running_cell():
    log = CollectiveLog("0", (0, 1))
    begin(log)
    report = log.report(7)
    assert (report.pending[0].position, report.recent[0].position) == ("line 7", "")


def test_many_different_calls_are_described_without_keeping_all_descriptions():
    log = CollectiveLog("0", (0, 1))
    for size in range(3000):
        begin(log, "allreduce", [torch.empty(size)], None)
    assert log.report().recent[-1].data == "float32[2999]"
    assert len(log._signatures) <= 1024


def test_only_the_last_ones_are_remembered_but_all_that_are_pending(log):
    for _ in range(100):
        begin(log)
    assert len(log.report().pending) == 100
    assert [launch.number for launch in log.report().recent] == list(range(69, 101))


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


def test_values_other_than_tensors_have_no_description():
    log = CollectiveLog("", (0, 1))
    assert str(log.launch(Op("new_group", None, alike=False), ())[1]) == "new_group #1"


def test_report_allows_garbage_collection_to_start_and_end_collectives(log):
    class Dropped:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            log.end(begin(log, "barrier")[0])
            begin(log, "barrier")

    thresholds = gc.get_threshold()
    gc.freeze()  # torch's objects, which would be looked through each time
    try:
        for allocations in range(1, 80):
            gc.disable()
            log.restart()
            for _ in range(20):
                begin(log, "barrier")
            gc.collect()  # the interpreter keeps no tuples to give again
            Dropped()
            gc.set_threshold(allocations)
            gc.enable()
            assert len(log.report().pending) >= 20
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        gc.enable()


def test_a_message_is_reported_as_pending_only_while_its_rank_may_wait_for_it():
    """Check it: gloo does not tell whether a send has completed before it is waited for."""
    log = CollectiveLog("0", (0, 1))
    _, sent = log.launch(OPS["send"], ([torch.ones(1)], 1, 0))
    assert [call.op for call in log.report().pending] == ["send"], "the launch has not returned"
    work = Work()
    sent.work = weakref.ref(work)
    assert log.report().pending == ()
    sent.is_waited_for = True
    assert [call.op for call in log.report().pending] == ["send"]
