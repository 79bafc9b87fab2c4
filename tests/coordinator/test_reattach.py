"""Test how a new notebook process takes over a detached cluster: replay, output and state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from rankbook.coordinator import actions as act
from rankbook.coordinator import events as ev
from rankbook.coordinator.deadlock import CHECK_AFTER_DONE
from rankbook.coordinator.driver import ReattachedDriver
from rankbook.coordinator.reattach import (
    OutputReplay,
    ReattachHandshake,
    ReplayReport,
    keep_newest_displays,
    recovered_state,
    recovered_tasks,
    replay_handshake,
    select_detached,
)
from rankbook.coordinator.state_machine import RankState, RecoveredClusterState
from rankbook.coordinator.states import choose_donor
from rankbook.errors import InvalidArgument, NoClusterError
from rankbook.launch.registry import ClusterRecord, DetachedCluster, DetachedRank
from rankbook.output.merger import Emit, RichOutput, Stream
from rankbook.protocol.forkserver import RankExited, RankForked
from rankbook.protocol.messages import (
    Acknowledge,
    Clear,
    Display,
    Done,
    ErrorReport,
    FromRank,
    InputReply,
    InputRequest,
    Interrupt,
    ReplayStart,
    RequestReplay,
    RunCell,
    Text,
)
from rankbook.transport import Sender
from tests.coordinator.test_driver import DriverHarness, Keeper, request
from tests.coordinator.test_state_machine import waits

NONCE = "n"


def replay_start(
    cell: int = 3, *, running: bool = False, seen: bool = False, entries: int = 0, **more: object
) -> ReplayStart:
    fields = {"nonce": NONCE, "number": cell, "label": f"cell [{cell}]", "generation": 1, "dropped": 0, **more}
    return ReplayStart(cell=cell, running=running, seen=seen, entries=entries, **fields)


def text(cell: int, words: str) -> Text:
    return Text(cell=cell, stream="stdout", data=words.encode())


def picture(cell: int, words: str) -> Display:
    return Display(cell=cell, kind="display", data={"text/plain": words}, metadata={})


def account(answer: ReplayStart, *missed: FromRank) -> ReplayReport:
    return ReplayReport(answer, list(missed))


def done(cell: int, error: str | None = None, *, collectives: int = 0) -> Done:
    report = None if error is None else ErrorReport(name="ValueError", value=error, traceback=error, plain=error)
    status = "ok" if error is None else "error"
    return Done(cell=cell, status=status, seconds=0.1, error=report, collectives=collectives)


class RecordingSink:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.items: list[Emit] = []

    def emit(self, items: Sequence[Emit]) -> None:
        self.items += items

    def text(self, name: str = "stdout") -> str:
        return "".join(item.text for item in self.items if isinstance(item, Stream) and item.name == name)


# Handshake


def test_messages_in_flight_before_the_replay_are_discarded():
    handshake = ReattachHandshake({0: 1, 1: 4}, NONCE)
    handshake.take(Sender(0, 1), text(3, "old"), [])
    handshake.take(Sender(0, 1), replay_start(nonce="of an attempt before", entries=1), [])
    handshake.take(Sender(0, 1), text(3, "old"), [])
    handshake.take(Sender(0, 1), replay_start(entries=2), [])
    handshake.take(Sender(0, 1), text(3, "old"), [])
    assert handshake.missing == [0, 1]
    handshake.take(Sender(0, 1), text(3, "more"), [])
    assert handshake.missing == [1]
    handshake.take(Sender(0, 1), text(3, "now"), [])
    handshake.take(Sender(1, 3), replay_start(), [])
    assert handshake.missing == [1], "an incarnation that is no more does not count"
    handshake.take(Sender(1, 4), replay_start(), [])
    assert handshake.missing == []
    assert handshake.reports[0].missed == [text(3, "old"), text(3, "more")]
    assert handshake.reports[0].later == [(text(3, "now"), [])]


@pytest.mark.parametrize("replies", [False, True])
def test_a_rank_that_exits_during_the_handshake_is_not_waited_for(replies):
    exits = [RankExited(rank=1, incarnation=4, pid=11, code=0, memory_kills=0, stdout=b"", stderr=b"")]
    sent: list[tuple[int, RequestReplay]] = []

    def received() -> Iterator[tuple[Sender, FromRank, list]]:
        for rank, request_replay in sent:
            if rank == 0 or replies:
                header = replay_start(nonce=request_replay.nonce)
                yield Sender(rank, {0: 1, 1: 4}[rank]), header, []

    answers = received()
    hub = SimpleNamespace(
        send=lambda rank, message: sent.append((rank, message)),
        wait=lambda _timeout, _files: None,
        receive=lambda: next(answers, None),
    )
    launcher = SimpleNamespace(
        forked={rank: RankForked(rank, incarnation, 10 + rank) for rank, incarnation in ((0, 1), (1, 4))},
        exited={},
        later=[],
        alive=True,
        fileno=lambda: -1,
        read=lambda: [exits.pop()] if exits else [],
    )
    reports = replay_handshake(hub, launcher, {0: 1, 1: 4}, token="", since=0.0, timeout=10.0)
    assert sorted(reports) == ([0, 1] if replies else [0])
    # What it has replied is shown, and its exit is handled by the driver.
    assert (list(launcher.exited), len(launcher.later)) == (([], 1) if replies else ([1], 0))


# What is made of it


def test_tasks_are_those_that_run_or_were_not_seen():
    accounts = {
        0: account(replay_start(5, running=True)),
        1: account(replay_start(5)),
        2: account(replay_start(4, seen=True)),
        3: account(replay_start(0)),
        4: account(replay_start(3)),
    }
    reported = [(task.cell, task.ranks, task.running) for task in recovered_tasks(accounts)]
    assert reported == [(3, (4,), ()), (5, (0, 1), (0,))]


def test_reattached_state_starts_from_the_state_of_the_ranks():
    exited = RankExited(rank=2, incarnation=6, pid=1, code=-9, memory_kills=0, stdout=b"", stderr=b"")
    accounts = {0: account(replay_start(5, running=True)), 1: account(replay_start(5))}
    state = RecoveredClusterState(recovered_state(3, {0: 1, 1: 2}, {2: exited}, accounts))
    assert [rank.state for rank in state.ranks.values()] == [RankState.BUSY, RankState.IDLE, RankState.DEAD]
    assert [rank.incarnation for rank in state.ranks.values()] == [1, 2, 6]
    assert state.ranks[2].loss == "was killed by SIGKILL (out of memory?)"
    assert not state.grouped
    assert state.resume() == [act.ScheduleCheck(CHECK_AFTER_DONE)]
    assert state.new_cell() == 6
    assert state.handle(ev.InterruptCell(5))[0] == act.SendInterrupt(5, (0,))
    assert state.handle(ev.CellDone(0, 1, 5)) == [act.EndCell(5, (), interrupted=True)]
    assert state.handle(ev.LaunchRanks((2,))) == [act.Fork(2, 7)]


def test_a_rank_that_was_restarted_before_the_kernel_ended_is_not_the_donor():
    accounts = {rank: account(replay_start(5, seen=True)) for rank in range(2)}
    state = RecoveredClusterState(recovered_state(2, {0: 2, 1: 1}, {}, accounts, {0: 2, 1: 1}))
    assert choose_donor(state.ranks.values()) == 1
    state.handle(ev.LaunchRanks((0,)))
    assert state.ranks[0].since == 3, "later than all launches before"


def test_an_empty_rank_is_not_the_donor_before_a_cell_has_given_it_variables():
    quiet = {rank: account(replay_start(5, seen=True)) for rank in range(2)}
    state = RecoveredClusterState(recovered_state(2, {0: 2, 1: 1}, {}, quiet, empty={0}))
    assert [rank.empty for rank in state.ranks.values()] == [True, False]
    assert choose_donor(state.ranks.values()) == 1


@pytest.mark.parametrize(
    ("number", "error", "empty"), [(5, None, False), (5, "bad", True), (0, None, True), (-1, None, True)]
)
def test_an_empty_rank_gets_variables_by_a_cell_that_ends_while_detached_or_later(number, error, empty):
    ended = account(replay_start(5, number=number, entries=1), done(5, error))
    runs = account(replay_start(5, number=number, running=True))
    state = RecoveredClusterState(recovered_state(2, {0: 1, 1: 1}, {}, {0: ended, 1: runs}, empty={0, 1}))
    assert [rank.empty for rank in state.ranks.values()] == [empty, True]
    state.handle(ev.CellDone(1, 1, 5, failed=error is not None, reason=error or ""))
    assert state.ranks[1].empty is empty


def test_wait_for_a_rank_that_raised_while_detached_is_aborted():
    accounts = {
        0: account(replay_start(5, running=True)),
        1: account(replay_start(5, entries=1), done(5, "bad", collectives=1)),
    }
    state = RecoveredClusterState(recovered_state(2, {0: 1, 1: 1}, {}, accounts))
    assert state.resume() == [act.ScheduleCheck(CHECK_AFTER_DONE)]
    assert act.RequestCollectives((0, 1)) in state.handle(ev.CheckCollectives(10.0))
    state.handle(waits(0, 5, (0, 1), number=2, at=10.0))
    (aborted,) = [item for item in state.handle(ev.CheckCollectives(12.0)) if isinstance(item, act.SendAbort)]
    assert (aborted.ranks, aborted.cause) == ((0,), "rank 1 raised ValueError at cell [5]")
    after = state.handle(ev.CellDone(0, 1, 5, failed=True, reason="raised CollectiveAborted", collectives=2))
    assert any(isinstance(element, act.FormGroup) for element in after)


@pytest.mark.parametrize(("collectives", "error", "anew"), [(3, "bad", True), (0, "bad", False), (3, None, False)])
def test_cell_that_failed_while_detached_makes_the_group_stale(collectives, error, anew):
    ended = [done(5, error, collectives=collectives), done(5, collectives=collectives)]
    accounts = {rank: account(replay_start(5, entries=1), item) for rank, item in enumerate(ended)}
    state = RecoveredClusterState(recovered_state(2, {0: 1, 1: 1}, {}, accounts))
    assert [type(element) for element in state.resume()] == ([act.FormGroup, act.SendTask] if anew else [])


@pytest.mark.parametrize(
    ("answer", "stale"),
    [
        (replay_start(5), True),
        (replay_start(5, running=True), False),  # its own end decides
        (replay_start(5, number=-1), False),  # it forms the group
    ],
    ids=["ended", "running", "internal"],
)
def test_only_a_failed_cell_that_has_ended_makes_the_inventory_stale(answer, stale):
    accounts = {0: account(answer), 1: account(replay_start(5, number=answer.number), done(5, "bad", collectives=1))}
    assert recovered_state(2, {0: 1, 1: 1}, {}, accounts).stale is stale


def test_ranks_that_are_in_one_group_stay_in_it():
    accounts = {rank: account(replay_start(5, seen=True, generation=2)) for rank in (0, 1)}
    state = RecoveredClusterState(recovered_state(2, {0: 1, 1: 1}, {}, accounts))
    assert state.grouped
    assert state.resume() == []


@pytest.mark.parametrize("generations", [(2, 1), (0, 0), (2, 0)])
def test_ranks_that_are_not_in_one_group_form_one_of_a_number_that_was_never_used(generations):
    accounts = {rank: account(replay_start(5, seen=True, generation=item)) for rank, item in enumerate(generations)}
    state = RecoveredClusterState(recovered_state(2, {0: 1, 1: 1}, {}, accounts))
    regroup, send = state.resume()
    assert isinstance(regroup, act.FormGroup)
    assert regroup.generation > max(generations) + 1, "the old owner may have begun to form the next one"
    assert send == act.SendTask(regroup.cell, (0, 1))


def test_a_group_that_is_being_formed_is_waited_for():
    accounts = {
        0: account(replay_start(5, running=True, number=-1, generation=0)),
        1: account(replay_start(5, number=-1, generation=1)),
    }
    state = RecoveredClusterState(recovered_state(2, {0: 1, 1: 1}, {}, accounts))
    assert state.cells[5].internal
    assert state.resume() == []
    assert state.handle(ev.CellDone(0, 1, 5)) == [act.EndCell(5, (), interrupted=False)]
    assert state.grouped


def test_group_that_failed_to_form_while_detached_is_formed_again():
    accounts = {
        0: account(replay_start(5, running=True, number=-1, generation=0)),
        1: account(replay_start(5, number=-1, generation=0, entries=1), done(5, "bad")),
    }
    state = RecoveredClusterState(recovered_state(2, {0: 1, 1: 1}, {}, accounts))
    assert any(isinstance(item, act.FormGroup) for item in state.resume())
    assert any(isinstance(element, act.SendTask) for element in state.handle(ev.CellDone(0, 1, 5)))


def test_a_cell_that_ended_is_shown_below_a_heading_with_its_errors_and_its_result():
    sink = RecordingSink()
    accounts = {
        0: account(replay_start(5, entries=2), text(5, "same\n"), done(5)),
        1: account(replay_start(5, entries=2), text(5, "same\n"), done(5, "bad")),
    }
    adoption = OutputReplay(accounts, cluster_key="k", sink=sink)
    (result,) = adoption.show_output()
    assert sink.text() == "cell [5] ended on ranks 0-1; its output:\n[0-1] same\n"
    assert "rank 1: ValueError: bad" in sink.text("stderr")
    assert (result.status, result.stdout) == ("error", {0: "same\n", 1: "same\n"})
    assert adoption.cells == []


def test_a_cell_that_runs_is_followed_and_its_question_is_asked():
    sink = RecordingSink()
    question = InputRequest(cell=5, prompt="?", password=False)
    accounts = {
        0: account(replay_start(5, running=True), text(5, "first\n"), question),
        1: account(replay_start(5), text(5, "first\n"), done(5)),
    }
    adoption = OutputReplay(accounts, cluster_key="k", sink=sink)
    assert adoption.show_output() == []
    (cell,) = adoption.cells
    assert cell.state == "running"
    assert cell.inbox.get_nowait().request is question
    heading = "cell [5] still runs on rank 0 (rank 1 finished); its output so far, followed by new output:\n"
    assert heading in sink.text()
    cell.rank_done(0, done(5), [])
    cell.end(())
    assert cell.result.ok
    assert sink.text().count("first") == 1


def test_failed_ranks_of_a_running_cell_are_reported():
    sink = RecordingSink()
    ended = {1: done(5, "bad"), 2: done(5), 3: done(5)}
    accounts = {rank: account(replay_start(5, entries=1), item) for rank, item in ended.items()}
    OutputReplay({0: account(replay_start(5, running=True)), **accounts}, cluster_key="k", sink=sink).show_output()
    assert "still runs on rank 0 (rank 1 raised ValueError at cell [5]; ranks 2-3 finished); its out" in sink.text()


def test_output_of_threads_and_omissions_are_reported_and_regroups_are_not():
    sink = RecordingSink()
    accounts = {
        0: account(replay_start(5, seen=True, entries=1, dropped=3), text(4, "tick\n")),
        1: account(replay_start(6, number=-1), done(6)),
    }
    assert OutputReplay(accounts, cluster_key="k", sink=sink).show_output() == []
    assert sink.text() == "output of background threads of cells that had already ended:\n[0] tick\n"
    assert sink.text("stderr") == "rank 0: the oldest output was dropped because there was too much of it\n"


def test_output_of_a_cell_that_was_seen_is_shown_once_whether_or_not_it_still_runs():
    heading = "output of background threads of cells that had already ended:\n"
    for running, expected_output in ((False, f"{heading}[0] tick\n"), (True, "[0] tick\n")):
        sink = RecordingSink()
        accounts = {0: account(replay_start(5, seen=True, running=running), text(5, "tick\n"))}
        adoption = OutputReplay(accounts, cluster_key="k", sink=sink)
        adoption.show_output()
        for cell in adoption.cells:
            cell.end((0,))
        assert sink.text().endswith(expected_output)
        assert sink.text().count("tick") == 1


def test_missed_displays_are_few_enough_for_the_front_ends_queue():
    sink = RecordingSink()
    many = [picture(5, f"{number}") for number in range(300)]
    accounts = {
        0: account(replay_start(5, entries=302), text(5, "kept\n"), *many, done(5)),
        1: account(replay_start(5, entries=2), picture(5, "lone"), done(5)),
    }
    (result,) = OutputReplay(accounts, cluster_key="k", sink=sink).show_output()
    assert result.ok
    shown = [item.data["text/plain"] for item in sink.items if isinstance(item, RichOutput)]
    assert sorted(shown) == sorted(["[1] lone", *(f"[0] {number}" for number in range(175, 300))])
    assert "[0] kept\n" in sink.text()
    assert sink.text("stderr") == "rank 0: the oldest output was dropped because there was too much of it\n"


def test_text_that_was_cleared_is_not_shown_again_when_displays_are_dropped():
    clear = Clear(cell=5, wait=False)
    messages = [text(5, "old"), clear, text(5, "new"), picture(5, "a"), picture(5, "b"), text(5, "end"), clear]
    assert keep_newest_displays(messages, 4) == messages
    assert keep_newest_displays(messages, 3) == [messages[2], *messages[3:]]
    assert keep_newest_displays(messages, 2) == [messages[2], *messages[4:]]
    assert keep_newest_displays(messages, 1) == [messages[2], messages[5], messages[6]]


def test_the_last_output_of_a_rank_that_died_meanwhile_are_reported():
    sink = RecordingSink()
    reported = RankExited(
        rank=1, incarnation=1, pid=1, code=-11, memory_kills=0, stdout=b"", stderr=b"Fatal Python error"
    )
    silent = RankExited(rank=2, incarnation=1, pid=2, code=-9, memory_kills=0, stdout=b"", stderr=b"")
    OutputReplay({}, cluster_key="k", sink=sink, exits={1: reported, 2: silent}).show_output()
    words = "rank 1 was killed by SIGSEGV (segmentation fault); its last output:\nFatal Python error\n"
    assert sink.text("stderr") == words


# Which one


def record(key: str) -> ClusterRecord:
    ranks = (DetachedRank(0, 1, 5, "cpu"),)
    places = dict.fromkeys(("address", "uplink", "sockets", "segments", "logs"), "/x")
    return ClusterRecord(
        key=key,
        token="t",
        seconds=1.0,
        notebook=9,
        forkserver=8,
        started=0.0,
        master_port=1,
        backend="gloo",
        threads=1,
        ranks=ranks,
        **places,
    )


def test_single_detached_cluster_needs_no_key_and_several_need_one():
    one, two = record("9-1"), record("9-2")
    assert select_detached(DetachedCluster((one,)), None) is one
    assert select_detached(DetachedCluster((one, two)), "9-2") is two
    with pytest.raises(
        InvalidArgument, match=r"found 2 kept clusters; select one with .*KEY:\n9-1: 1 rank on cpu.*\n9-2"
    ):
        select_detached(DetachedCluster((one, two)), None)
    with pytest.raises(InvalidArgument, match="no kept cluster has the key 'x'; choose from 9-1, 9-2"):
        select_detached(DetachedCluster((one, two)), "x")
    with pytest.raises(NoClusterError, match=r"no kept ranks found; .*start --keep .*other hosts cannot\)\nsome have"):
        select_detached(DetachedCluster((), ("some have ended",)), None)


def test_attach_without_a_key_selects_only_this_notebooks_ranks(monkeypatch):
    own_record, other_record = (
        dataclasses.replace(record(f"9-{name}"), session=f"work/{name}.ipynb") for name in ("a", "b")
    )
    unknown = record("9-c")
    monkeypatch.setenv("JPY_SESSION_NAME", "work/a.ipynb")
    assert select_detached(DetachedCluster((other_record, own_record, unknown)), None) is own_record
    assert select_detached(DetachedCluster((other_record, unknown)), None) is unknown
    assert select_detached(DetachedCluster((other_record, unknown)), "9-b") is other_record
    with pytest.raises(InvalidArgument, match=r"1 kept cluster, but none of this notebook; .*KEY:\n9-b \(b.ipynb\)"):
        select_detached(DetachedCluster((other_record,)), None)
    monkeypatch.delenv("JPY_SESSION_NAME")
    assert select_detached(DetachedCluster((other_record,)), None) is other_record


# The driver tells what was seen


class DetachedHarness(DriverHarness):
    """The harness of the driver's tests, with the driver of a reattached cluster."""

    def __init__(self) -> None:
        super().__init__()
        self.driver.close()
        self.driver = ReattachedDriver(self.state, self.hub, self.launcher, request)
        self.driver.start()

    def launch(self) -> None:
        super().launch()
        for rank in self.state.ranks:
            assert self.next_task(rank) == Acknowledge(cell=1), "the cell that formed the group"


@pytest.fixture
def harness() -> Iterator[DetachedHarness]:
    detached_harness = DetachedHarness()
    yield detached_harness
    detached_harness.close()


def test_cell_is_acknowledged_to_all_ranks_after_it_has_ended_on_all(harness):
    harness.launch()
    cell = harness.submit(0, 1)
    for rank in (0, 1):
        assert isinstance(harness.next_task(rank), RunCell)
    harness.done(0, cell.cell)
    harness.wait_states(RankState.IDLE, RankState.BUSY)
    assert harness.nothing_for(0)
    harness.done(1, cell.cell)
    harness.wait_end(cell)
    for rank in (0, 1):
        assert harness.next_task(rank) == Acknowledge(cell=cell.cell)


def test_abandoned_cell_is_acknowledged_to_a_rank_after_it_has_ended_there(harness):
    harness.launch()
    cell = harness.submit(0, 1)
    for rank in (0, 1):
        harness.next_task(rank)
    harness.done(0, cell.cell)
    harness.wait_states(RankState.IDLE, RankState.BUSY)
    for _ in range(2):
        harness.driver.post(ev.InterruptCell(cell.cell))
    harness.wait_end(cell)
    assert harness.next_task(0) == Acknowledge(cell=cell.cell)
    assert harness.next_task(1) == harness.next_task(1) == Interrupt(cell=cell.cell)
    assert harness.next_task(1) == InputReply(cell=cell.cell, reason="the cell has ended, so input is not available")
    assert harness.nothing_for(1)
    harness.done(1, cell.cell)
    assert harness.next_task(1) == Acknowledge(cell=cell.cell)


def test_a_cell_that_was_removed_from_the_queue_is_not_acknowledged(harness):
    harness.launch()
    running = harness.submit(0)
    assert isinstance(harness.next_task(0), RunCell)
    queued = harness.submit(0, 1)
    harness.driver.post(ev.InterruptCell(queued.cell))
    harness.wait_end(queued)
    harness.done(0, running.cell)
    assert harness.next_task(0) == Acknowledge(cell=running.cell)
    assert harness.nothing_for(0) and harness.nothing_for(1)


def test_resumed_driver_continues_the_cell_and_its_queued_messages(harness):
    harness.driver.close()
    accounts = {0: account(replay_start(5, running=True)), 1: account(replay_start(5, entries=1), done(5))}
    state = RecoveredClusterState(recovered_state(2, {0: 1, 1: 1}, {}, accounts))
    adoption = OutputReplay(accounts, cluster_key="k", sink=Keeper())
    adoption.show_output()
    harness.state = state
    harness.driver = ReattachedDriver(state, harness.hub, harness.launcher, request)
    harness.ends = {rank: harness.hub.rank_end(harness.hub.open_downlink(rank, 1)) for rank in (0, 1)}
    later = [(Sender(0, 1), text(5, "since\n"), []), (Sender(0, 1), done(5), [])]
    harness.driver.resume(state, adoption.cells, adoption.ended, later)
    harness.driver.start()
    (cell,) = adoption.cells
    harness.wait_end(cell)
    assert cell.result.stdout == {0: "since\n", 1: ""}
    for rank in (0, 1):
        assert harness.next_task(rank) == Acknowledge(cell=5)
    harness.wait_states(RankState.IDLE, RankState.IDLE)
