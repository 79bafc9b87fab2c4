"""How a new owner finds a kept cluster: what the ranks tell, what is made of it, where the state begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest

from rankbook.coordinator import actions as act
from rankbook.coordinator import events as ev
from rankbook.coordinator.deadlock import LOOK_AFTER_END
from rankbook.coordinator.reattach import (
    OutputReplay,
    RankReport,
    ReattachHandshake,
    recovered_state,
    recovered_tasks,
    select_detached,
)
from rankbook.coordinator.recovered_state import ReattachedDriver, RecoveredClusterState
from rankbook.coordinator.state_machine import RankState
from rankbook.errors import BadRequest, NoCluster
from rankbook.launch.registry import ClusterRecord, DetachedCluster, DetachedRank
from rankbook.output.merger import Emit, Stream
from rankbook.protocol.forkserver import RankExited
from rankbook.protocol.messages import Done, ErrorReport, FromRank, InputReply, InputRequest, Interrupt, RunCell, Text
from rankbook.protocol.reattach import Acknowledge, ReplayStart
from rankbook.transport.link import Sender
from tests.coordinator.test_driver import Keeper, Stage, request
from tests.coordinator.test_state_machine import waits

NONCE = "n"


def here(cell: int = 3, *, running: bool = False, seen: bool = False, entries: int = 0, **more: object) -> ReplayStart:
    fields = {"nonce": NONCE, "number": cell, "label": f"cell [{cell}]", "generation": 1, "dropped": 0, **more}
    return ReplayStart(cell=cell, running=running, seen=seen, entries=entries, **fields)


def text(cell: int, words: str) -> Text:
    return Text(cell=cell, stream="stdout", data=words.encode())


def account(answer: ReplayStart, *missed: FromRank) -> RankReport:
    return RankReport(answer, list(missed))


def done(cell: int, error: str | None = None, *, collectives: int = 0) -> Done:
    report = None if error is None else ErrorReport(name="ValueError", value=error, traceback=error, plain=error)
    status = "ok" if error is None else "error"
    return Done(cell=cell, status=status, seconds=0.1, error=report, collectives=collectives)


class Notes:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.items: list[Emit] = []

    def emit(self, items: Sequence[Emit]) -> None:
        self.items += items

    def text(self, name: str = "stdout") -> str:
        return "".join(each.text for each in self.items if isinstance(each, Stream) and each.name == name)


# Reunion


def test_what_was_on_the_wire_before_a_ranks_answer_is_left_to_what_it_repeats():
    reunion = ReattachHandshake({0: 1, 1: 4}, NONCE)
    reunion.take(Sender(0, 1), text(3, "old"), [])
    reunion.take(Sender(0, 1), here(nonce="of an attempt before", entries=1), [])
    reunion.take(Sender(0, 1), text(3, "old"), [])
    reunion.take(Sender(0, 1), here(entries=2), [])
    reunion.take(Sender(0, 1), text(3, "old"), [])
    assert reunion.missing == [0, 1]
    reunion.take(Sender(0, 1), text(3, "more"), [])
    assert reunion.missing == [1]
    reunion.take(Sender(0, 1), text(3, "now"), [])
    reunion.take(Sender(1, 3), here(), [])
    assert reunion.missing == [1], "an incarnation that is no more does not count"
    reunion.take(Sender(1, 4), here(), [])
    assert reunion.missing == []
    assert reunion.accounts[0].missed == [text(3, "old"), text(3, "more")]
    assert reunion.accounts[0].later == [(text(3, "now"), [])]


# What is made of it


def test_tasks_are_those_that_run_or_were_not_seen():
    accounts = {
        0: account(here(5, running=True)),
        1: account(here(5)),
        2: account(here(4, seen=True)),
        3: account(here(0)),
        4: account(here(3)),
    }
    told = [(task.cell, task.ranks, task.running) for task in recovered_tasks(accounts)]
    assert told == [(3, (4,), ()), (5, (0, 1), (0,))]


def test_the_state_begins_where_the_ranks_are():
    exited = RankExited(rank=2, incarnation=6, pid=1, code=-9, memory_kills=0, stdout=b"", stderr=b"")
    accounts = {0: account(here(5, running=True)), 1: account(here(5))}
    state = RecoveredClusterState(recovered_state(3, {0: 1, 1: 2}, {2: exited}, accounts))
    assert [rank.state for rank in state.ranks.values()] == [RankState.BUSY, RankState.IDLE, RankState.DEAD]
    assert [rank.incarnation for rank in state.ranks.values()] == [1, 2, 6]
    assert state.ranks[2].loss == "was killed by signal 9 (out of memory?)"
    assert not state.grouped
    assert state.resume() == [act.ScheduleCheck(LOOK_AFTER_END)]
    assert state.new_cell() == 6
    assert state.handle(ev.InterruptCell(5))[0] == act.SendInterrupt(5, (0,))
    assert state.handle(ev.CellDone(0, 1, 5)) == [act.EndCell(5, (), interrupted=True)]
    assert state.handle(ev.LaunchRanks((2,))) == [act.Fork(2, 7)]


def test_a_wait_for_a_rank_that_raised_while_nobody_was_there_is_broken_off_as_any_other():
    accounts = {0: account(here(5, running=True)), 1: account(here(5, entries=1), done(5, "bad", collectives=1))}
    state = RecoveredClusterState(recovered_state(2, {0: 1, 1: 1}, {}, accounts))
    assert state.resume() == [act.ScheduleCheck(LOOK_AFTER_END)]
    assert act.RequestCollectives((0, 1)) in state.handle(ev.CheckCollectives(10.0))
    state.handle(waits(0, 5, (0, 1), number=2, at=10.0))
    (aborted,) = [each for each in state.handle(ev.CheckCollectives(12.0)) if isinstance(each, act.SendAbort)]
    assert (aborted.ranks, aborted.cause) == ((0,), "rank 1 raised ValueError at cell [5]")
    after = state.handle(ev.CellDone(0, 1, 5, failed=True, words="raised CollectiveAborted", collectives=2))
    assert any(isinstance(each, act.FormGroup) for each in after)


@pytest.mark.parametrize(("collectives", "error", "anew"), [(3, "bad", True), (0, "bad", False), (3, None, False)])
def test_a_cell_that_failed_while_nobody_was_there_may_have_left_the_ranks_at_different_collectives(
    collectives, error, anew
):
    ended = [done(5, error, collectives=collectives), done(5, collectives=collectives)]
    accounts = {rank: account(here(5, entries=1), each) for rank, each in enumerate(ended)}
    state = RecoveredClusterState(recovered_state(2, {0: 1, 1: 1}, {}, accounts))
    assert [type(each) for each in state.resume()] == ([act.FormGroup, act.SendTask] if anew else [])


@pytest.mark.parametrize(
    ("answer", "stale"),
    [
        (here(5), True),
        (here(5, running=True), False),  # its own end decides
        (here(5, number=-1), False),  # it forms the group
    ],
    ids=["ended", "running", "internal"],
)
def test_only_a_failed_cell_that_has_ended_makes_the_inventory_stale(answer, stale):
    accounts = {0: account(answer), 1: account(here(5, number=answer.number), done(5, "bad", collectives=1))}
    assert recovered_state(2, {0: 1, 1: 1}, {}, accounts).stale is stale


def test_ranks_that_are_in_one_group_stay_in_it():
    accounts = {rank: account(here(5, seen=True, generation=2)) for rank in (0, 1)}
    state = RecoveredClusterState(recovered_state(2, {0: 1, 1: 1}, {}, accounts))
    assert state.grouped
    assert state.resume() == []


@pytest.mark.parametrize("generations", [(2, 1), (0, 0), (2, 0)])
def test_ranks_that_are_not_in_one_group_form_one_of_a_number_that_was_never_used(generations):
    accounts = {rank: account(here(5, seen=True, generation=each)) for rank, each in enumerate(generations)}
    state = RecoveredClusterState(recovered_state(2, {0: 1, 1: 1}, {}, accounts))
    regroup, send = state.resume()
    assert isinstance(regroup, act.FormGroup)
    assert regroup.generation > max(generations) + 1, "the old owner may have begun to form the next one"
    assert send == act.SendTask(regroup.cell, (0, 1))


def test_a_group_that_is_being_formed_is_waited_for():
    accounts = {
        0: account(here(5, running=True, number=-1, generation=0)),
        1: account(here(5, number=-1, generation=1)),
    }
    state = RecoveredClusterState(recovered_state(2, {0: 1, 1: 1}, {}, accounts))
    assert state.cells[5].internal
    assert state.resume() == []
    assert state.handle(ev.CellDone(0, 1, 5)) == [act.EndCell(5, (), interrupted=False)]
    assert state.grouped


def test_a_group_that_a_rank_could_not_join_while_nobody_was_there_is_formed_once_more():
    accounts = {
        0: account(here(5, running=True, number=-1, generation=0)),
        1: account(here(5, number=-1, generation=0, entries=1), done(5, "bad")),
    }
    state = RecoveredClusterState(recovered_state(2, {0: 1, 1: 1}, {}, accounts))
    assert any(isinstance(each, act.FormGroup) for each in state.resume())
    assert any(isinstance(each, act.SendTask) for each in state.handle(ev.CellDone(0, 1, 5)))


def test_a_cell_that_ended_is_shown_below_a_heading_with_its_errors_and_its_result():
    sink = Notes()
    accounts = {
        0: account(here(5, entries=2), text(5, "same\n"), done(5)),
        1: account(here(5, entries=2), text(5, "same\n"), done(5, "bad")),
    }
    adoption = OutputReplay(accounts, cluster_key="k", sink=sink)
    (result,) = adoption.tell()
    assert sink.text() == "cell [5] ended on ranks 0-1; its output:\n[0-1] same\n"
    assert "rank 1: ValueError: bad" in sink.text("stderr")
    assert (result.status, result.stdout) == ("error", {0: "same\n", 1: "same\n"})
    assert adoption.cells == []


def test_a_cell_that_runs_is_followed_and_its_question_is_asked():
    sink = Notes()
    question = InputRequest(cell=5, prompt="?", password=False)
    accounts = {
        0: account(here(5, running=True), text(5, "first\n"), question),
        1: account(here(5), text(5, "first\n"), done(5)),
    }
    adoption = OutputReplay(accounts, cluster_key="k", sink=sink)
    assert adoption.tell() == []
    (cell,) = adoption.cells
    assert cell.state == "running"
    assert cell.inbox.get_nowait().request is question
    assert "cell [5] still runs on rank 0 (rank 1 finished); its output so far, and what follows:\n" in sink.text()
    cell.done(0, done(5), [])
    cell.end(())
    assert cell.result.ok
    assert sink.text().count("first") == 1


def test_of_a_cell_that_runs_it_is_told_on_whom_it_has_failed():
    sink = Notes()
    ended = {1: done(5, "bad"), 2: done(5), 3: done(5)}
    accounts = {rank: account(here(5, entries=1), each) for rank, each in ended.items()}
    OutputReplay({0: account(here(5, running=True)), **accounts}, cluster_key="k", sink=sink).tell()
    assert "still runs on rank 0 (rank 1 raised ValueError at cell [5]; ranks 2-3 finished); its out" in sink.text()


def test_what_threads_printed_and_what_was_left_out_is_told_and_the_forming_of_a_group_is_not():
    sink = Notes()
    accounts = {
        0: account(here(5, seen=True, entries=1, dropped=3), text(4, "tick\n")),
        1: account(here(6, number=-1), done(6)),
    }
    assert OutputReplay(accounts, cluster_key="k", sink=sink).tell() == []
    assert sink.text() == "printed meanwhile by threads of cells that had ended:\n[0] tick\n"
    assert sink.text("stderr") == "rank 0: the oldest of the output is left out, there was too much of it\n"


def test_output_of_a_cell_that_was_seen_is_shown_once_whether_or_not_it_still_runs():
    heading = "printed meanwhile by threads of cells that had ended:\n"
    for running, shown in ((False, f"{heading}[0] tick\n"), (True, "[0] tick\n")):
        sink = Notes()
        accounts = {0: account(here(5, seen=True, running=running), text(5, "tick\n"))}
        adoption = OutputReplay(accounts, cluster_key="k", sink=sink)
        adoption.tell()
        for cell in adoption.cells:
            cell.end((0,))
        assert sink.text().endswith(shown)
        assert sink.text().count("tick") == 1


def test_the_last_words_of_a_rank_that_died_meanwhile_are_told():
    sink = Notes()
    told = RankExited(rank=1, incarnation=1, pid=1, code=-11, memory_kills=0, stdout=b"", stderr=b"Fatal Python error")
    silent = RankExited(rank=2, incarnation=1, pid=2, code=-9, memory_kills=0, stdout=b"", stderr=b"")
    OutputReplay({}, cluster_key="k", sink=sink, exits={1: told, 2: silent}).tell()
    words = "rank 1 was killed by signal 11 (segmentation fault); the last that it wrote:\nFatal Python error\n"
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


def test_the_only_one_needs_no_key_and_of_several_one_is_named():
    one, two = record("9-1"), record("9-2")
    assert select_detached(DetachedCluster((one,)), None) is one
    assert select_detached(DetachedCluster((one, two)), "9-2") is two
    with pytest.raises(BadRequest, match=r"2 sets of ranks are kept; .*KEY takes one:\n9-1: 1 rank on cpu.*\n9-2"):
        select_detached(DetachedCluster((one, two)), None)
    with pytest.raises(BadRequest, match="no ranks are kept as 'x'; there are: 9-1, 9-2"):
        select_detached(DetachedCluster((one, two)), "x")
    with pytest.raises(NoCluster, match=r"start --keep makes such\nsome have ended"):
        select_detached(DetachedCluster((), ("some have ended",)), None)


def test_without_a_key_this_notebooks_ranks_are_chosen_and_never_another_notebooks(monkeypatch):
    mine, other = (dataclasses.replace(record(f"9-{name}"), session=f"work/{name}.ipynb") for name in ("a", "b"))
    unknown = record("9-c")
    monkeypatch.setenv("JPY_SESSION_NAME", "work/a.ipynb")
    assert select_detached(DetachedCluster((other, mine, unknown)), None) is mine
    assert select_detached(DetachedCluster((other, unknown)), None) is unknown
    assert select_detached(DetachedCluster((other, unknown)), "9-b") is other
    with pytest.raises(BadRequest, match=r"kept, but not by this notebook; .*KEY takes one:\n9-b \(b.ipynb\)"):
        select_detached(DetachedCluster((other,)), None)
    monkeypatch.delenv("JPY_SESSION_NAME")
    assert select_detached(DetachedCluster((other,)), None) is other


# The driver tells what was seen


class KeptStage(Stage):
    """The driver tests' stage, with a driver of kept ranks."""

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
def stage() -> Iterator[KeptStage]:
    made = KeptStage()
    yield made
    made.close()


def test_every_rank_hears_that_a_cell_was_seen_once_it_has_ended_on_all(stage):
    stage.launch()
    cell = stage.submit(0, 1)
    for rank in (0, 1):
        assert isinstance(stage.next_task(rank), RunCell)
    stage.done(0, cell.cell)
    stage.wait_states(RankState.IDLE, RankState.BUSY)
    assert stage.nothing_for(0)
    stage.done(1, cell.cell)
    stage.wait_end(cell)
    for rank in (0, 1):
        assert stage.next_task(rank) == Acknowledge(cell=cell.cell)


def test_a_rank_that_goes_on_after_its_cell_was_given_up_hears_it_when_it_has_ended(stage):
    stage.launch()
    cell = stage.submit(0, 1)
    for rank in (0, 1):
        stage.next_task(rank)
    stage.done(0, cell.cell)
    stage.wait_states(RankState.IDLE, RankState.BUSY)
    for _ in range(2):
        stage.driver.post(ev.InterruptCell(cell.cell))
    stage.wait_end(cell)
    assert stage.next_task(0) == Acknowledge(cell=cell.cell)
    assert stage.next_task(1) == stage.next_task(1) == Interrupt(cell=cell.cell)
    assert stage.next_task(1) == InputReply(cell=cell.cell, reason="the cell has ended, so nobody answers here")
    assert stage.nothing_for(1)
    stage.done(1, cell.cell)
    assert stage.next_task(1) == Acknowledge(cell=cell.cell)


def test_a_driver_that_resumes_goes_on_with_the_cell_and_what_came_since(stage):
    stage.driver.close()
    accounts = {0: account(here(5, running=True)), 1: account(here(5, entries=1), done(5))}
    state = RecoveredClusterState(recovered_state(2, {0: 1, 1: 1}, {}, accounts))
    adoption = OutputReplay(accounts, cluster_key="k", sink=Keeper())
    adoption.tell()
    stage.state = state
    stage.driver = ReattachedDriver(state, stage.hub, stage.launcher, request)
    stage.ends = {rank: stage.hub.rank_end(stage.hub.open_downlink(rank, 1)) for rank in (0, 1)}
    later = [(Sender(0, 1), text(5, "since\n"), []), (Sender(0, 1), done(5), [])]
    stage.driver.resume(state, adoption.cells, adoption.ended, later)
    stage.driver.start()
    (cell,) = adoption.cells
    stage.wait_end(cell)
    assert cell.result.stdout == {0: "since\n", 1: ""}
    for rank in (0, 1):
        assert stage.next_task(rank) == Acknowledge(cell=5)
    stage.wait_states(RankState.IDLE, RankState.IDLE)
