"""The driver over links in memory and a launcher that only takes notes: real threads and timers, no processes."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from collections.abc import Collection, Iterator

import pytest

from rankbook.coordinator import driver
from rankbook.coordinator import events as ev
from rankbook.coordinator.driver import Driver
from rankbook.coordinator.exit_status import describe_exit
from rankbook.coordinator.grace import GracePeriods
from rankbook.coordinator.running_cell import CellEnded, InputQuestion, RunningCell
from rankbook.coordinator.state_machine import ClusterState, RankState
from rankbook.errors import StartError
from rankbook.output.merger import OutputMerger, Stream
from rankbook.protocol.comm import CommFromRank
from rankbook.protocol.forkserver import ForkRank, KillRank, RankExited, RankForked
from rankbook.protocol.messages import (
    Abort,
    Done,
    ErrorReport,
    Frame,
    FromForkserver,
    GetCollectives,
    GetStack,
    InputReply,
    InputRequest,
    Interrupt,
    Message,
    RankReady,
    Regroup,
    RunCell,
    Shutdown,
    Stack,
    Text,
)
from rankbook.transport.link import Sender
from tests.conftest import wait_until
from tests.transport.memory_link import MemoryHub, MemoryRank

SOON = 20.0


class WaitingHub(MemoryHub):
    """Both links in memory, with a pipe so that a thread can sleep on them."""

    def __init__(self) -> None:
        super().__init__()
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[0], False)

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        readable, _, _ = select.select([self._pipe[0], *files], [], [], timeout)
        if self._pipe[0] in readable:
            os.read(self._pipe[0], 4096)
        return bool(self._up), set(readable) - {self._pipe[0]}

    def wake(self) -> None:
        os.write(self._pipe[1], b"w")

    def close(self) -> None:
        super().close()
        for end in self._pipe:
            os.close(end)


class NotingLauncher:
    """Forks nothing; what the tests put into `news` is what it tells."""

    def __init__(self) -> None:
        self.alive = True
        self.forked: list[ForkRank] = []
        self.killed: list[KillRank] = []
        self.failure: OSError | None = None
        self._news: list[FromForkserver] = []
        self._pipe = os.pipe()

    def fileno(self) -> int:
        return self._pipe[0]

    def fork(self, request: ForkRank) -> None:
        if self.failure is not None:
            raise self.failure
        self.forked.append(request)

    def kill(self, rank: int, incarnation: int) -> None:
        self.killed.append(KillRank(rank=rank, incarnation=incarnation))

    def read(self) -> Iterator[FromForkserver]:
        os.read(self._pipe[0], 4096)
        news, self._news = self._news, []
        yield from news

    def tell(self, *news: FromForkserver) -> None:
        self._news += news
        os.write(self._pipe[1], b"n")

    def end(self) -> None:
        self.alive = False
        os.write(self._pipe[1], b"n")

    def close(self) -> None:
        for end in self._pipe:
            os.close(end)


class Keeper:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.text = ""

    def emit(self, items) -> None:
        self.text += "".join(item.text for item in items if isinstance(item, Stream))


def request(rank: int, incarnation: int, downlink: str) -> ForkRank:
    return ForkRank(
        rank=rank,
        incarnation=incarnation,
        world_size=2,
        backend="gloo",
        device="cpu",
        threads=1,
        env={},
        cwd="/",
        path=(),
        uplink="memory:up",
        downlink=downlink,
        segments="",
        logs="",
        cluster="test",
    )


def exited(rank: int, code: int, *, incarnation: int = 1, stdout: bytes = b"", memory_kills: int = 0) -> RankExited:
    return RankExited(
        rank=rank,
        incarnation=incarnation,
        pid=100 + rank,
        code=code,
        memory_kills=memory_kills,
        stdout=stdout,
        stderr=b"",
    )


class Stage:
    """A driver, and the tests in the place of its ranks and its forkserver."""

    def __init__(self, grace: GracePeriods | None = None, world_size: int = 2) -> None:
        self.hub = WaitingHub()
        self.launcher = NotingLauncher()
        self.tasks: dict[int, list[Message]] = {}
        self.aborts: list[tuple[int, Abort]] = []
        self.asked = 0
        self.state = ClusterState(world_size, grace=grace)
        self.driver = Driver(self.state, self.hub, self.launcher, request)
        self.driver.start()
        self.ends: dict[int, MemoryRank] = {}

    def say(self, rank: int, *messages: Message) -> None:
        for message in messages:
            self.ends[rank].send(message)
        self.hub.wake()

    def dial(self, rank: int) -> None:
        """The rank's newest process says Hello."""
        fork = next(fork for fork in reversed(self.launcher.forked) if fork.rank == rank)
        self.ends[rank] = self.hub.rank_end(fork.downlink)
        number = fork.incarnation
        self.say(
            rank, RankReady(rank=rank, pid=100 + rank, incarnation=number, device="cpu", backend="gloo", threads=1)
        )

    def next_task(self, rank: int) -> Message:
        """What the rank is sent next, but for what its control thread answers."""
        wait_until(lambda: not self.nothing_for(rank), timeout=SOON, what=f"a message for rank {rank}")
        return self.tasks[rank].pop(0)

    def nothing_for(self, rank: int) -> bool:
        while (received := self.ends[rank].receive()) is not None:
            if isinstance(received[0], Abort):
                self.aborts.append((rank, received[0]))
            elif isinstance(received[0], GetCollectives):
                self.asked += 1
            else:
                self.tasks.setdefault(rank, []).append(received[0])
        return not self.tasks.get(rank)

    def done(self, rank: int, cell: int, *, error: ErrorReport | None = None) -> None:
        self.say(rank, Done(cell=cell, status="ok" if error is None else "error", seconds=0.1, error=error))

    def launch(self) -> None:
        """All ranks there, idle and in one group."""
        ranks = tuple(self.state.ranks)
        self.driver.post(ev.LaunchRanks(ranks))
        for rank in ranks:
            self.dial(rank)
        for rank in ranks:
            task = self.next_task(rank)
            assert isinstance(task, Regroup)
            self.done(rank, task.cell)
        self.wait_states(*[RankState.IDLE] * len(ranks))

    def wait_states(self, *states: RankState) -> None:
        wait_until(
            lambda: tuple(rank.state for rank in self.state.ranks.values()) == states, timeout=SOON, what=f"{states}"
        )

    def submit(self, *ranks: int, sink: Keeper | None = None) -> RunningCell:
        number = self.state.new_cell()
        tasks = {rank: (RunCell(cell=number, source="x", number=7), ()) for rank in ranks}
        cell = RunningCell(number, 7, tasks, cluster_key="", sink=sink)
        self.driver.submit(cell)
        return cell

    def wait_end(self, cell: RunningCell) -> None:
        assert isinstance(cell.inbox.get(timeout=SOON), CellEnded)
        assert cell.result is not None

    def close(self) -> None:
        self.driver.close()
        self.hub.close()
        self.launcher.close()


@pytest.fixture
def stage(request):
    stage = Stage(getattr(request, "param", None))
    yield stage
    stage.close()
    assert "rankbook-driver" not in [thread.name for thread in threading.enumerate()]


def error_of(cell: RunningCell) -> str:
    with pytest.raises(Exception) as told:  # noqa: PT011 - which one it is, the caller looks at
        cell.result.raise_for_status()
    return f"{type(told.value).__name__}: {told.value}"


def test_a_launch_forks_every_rank_with_a_downlink_of_its_own_and_forms_one_group(stage):
    stage.launch()
    assert [(fork.rank, fork.incarnation, fork.downlink) for fork in stage.launcher.forked] == [
        (0, 1, "memory:0.1"),
        (1, 1, "memory:1.1"),
    ]
    assert stage.state.grouped


def test_a_process_id_is_known_before_the_rank_says_hello(stage):
    stage.driver.post(ev.LaunchRanks((0, 1)))
    stage.launcher.tell(RankForked(rank=1, incarnation=1, pid=4711))
    wait_until(lambda: stage.driver.infos[1].pid == 4711, timeout=SOON, what="the pid")


def test_an_event_from_another_thread_moves_the_drivers_deadline_forward(stage):
    """The driver thread sleeps without a deadline, and nothing else wakes it."""
    stage.launch()
    stage.submit(0, 1)
    wait_until(lambda: (stage.nothing_for(0), stage.asked)[1], timeout=SOON, what="a question about the collectives")


def test_output_may_arrive_while_its_cell_is_sent_for_one_thread_alone_reads_it(stage, monkeypatch):
    """Who submits once looked at the output too, and found it changed by the driver meanwhile."""
    threads, deadline = set(), OutputMerger.deadline.fget

    def noted(merger):
        threads.add(threading.current_thread().name)
        return deadline(merger)

    monkeypatch.setattr(OutputMerger, "deadline", property(noted))
    stage.launch()
    cell = stage.submit(0, sink=Keeper())
    stage.next_task(0)
    stage.say(0, Text(cell=cell.cell, stream="stdout", data=b"half a line"))
    stage.done(0, cell.cell)
    stage.wait_end(cell)
    wait_until(lambda: threads, timeout=SOON, what="a look at the output")
    assert threads == {"rankbook-driver"}


def test_a_cell_reaches_its_ranks_and_ends_with_the_last_answer(stage):
    stage.launch()
    sink = Keeper()
    cell = stage.submit(0, 1, sink=sink)
    assert stage.next_task(0) == RunCell(cell=cell.cell, source="x", number=7)
    assert stage.next_task(1) == RunCell(cell=cell.cell, source="x", number=7)
    assert stage.driver.active_cells() == [cell]
    assert stage.driver.cell_of(0) is cell
    stage.say(0, Text(cell=cell.cell, stream="stdout", data=b"a line\n"))
    stage.done(0, cell.cell)
    stage.done(1, cell.cell)
    stage.wait_end(cell)
    cell.result.raise_for_status()
    assert sink.text == "[0] a line\n"
    assert stage.driver.active_cells() == []


def test_output_comes_before_the_end_and_also_while_the_cell_runs(stage):
    stage.launch()
    sink = Keeper()
    cell = stage.submit(0, sink=sink)
    stage.say(0, Text(cell=cell.cell, stream="stdout", data=b"live\n"))
    wait_until(lambda: "live" in sink.text, timeout=SOON, what="the line while the cell runs")
    assert cell.result is None
    stage.done(0, cell.cell)
    stage.wait_end(cell)


def test_what_a_background_thread_prints_after_the_cell_ended_still_reaches_it(stage):
    stage.launch()
    sink = Keeper()
    cell = stage.submit(0, sink=sink)
    stage.done(0, cell.cell)
    stage.wait_end(cell)
    stage.say(0, Text(cell=cell.cell, stream="stdout", data=b"late\n"))
    wait_until(lambda: "late" in sink.text, timeout=SOON, what="the late line")


def test_a_cell_for_a_busy_rank_is_told_whom_it_waits_for_and_starts_after_it(stage):
    stage.launch()
    first, second = stage.submit(0), stage.submit(0, 1)
    assert second.state == "queued"
    assert second.waiting_behind == (0,)
    assert stage.next_task(0).cell == first.cell
    assert stage.nothing_for(1)
    stage.done(0, first.cell)
    assert stage.next_task(0).cell == second.cell
    assert stage.next_task(1).cell == second.cell


def test_an_interrupt_goes_to_the_ranks_that_still_run_the_cell(stage):
    stage.launch()
    cell = stage.submit(0, 1)
    stage.next_task(0), stage.next_task(1)
    stage.done(0, cell.cell)
    stage.wait_states(RankState.IDLE, RankState.BUSY)
    stage.driver.post(ev.InterruptCell(cell.cell))
    assert stage.next_task(1) == Interrupt(cell=cell.cell)
    assert stage.nothing_for(0)


def test_a_death_is_told_in_words_with_its_cell_after_its_last_words(stage):
    stage.launch()
    sink = Keeper()
    cell = stage.submit(1, sink=sink)
    stage.launcher.tell(exited(1, -9, stdout=b"nobody had read this"))
    stage.wait_end(cell)
    assert "rank 1 was killed by signal 9 (out of memory?) while running cell [7]" in error_of(cell)
    assert "nobody had read this" in sink.text
    assert stage.state.ranks[1].loss == "was killed by signal 9 (out of memory?)"
    stage.wait_states(RankState.IDLE, RankState.DEAD)


def test_what_the_link_still_carries_when_the_exit_is_told_is_part_of_the_result(stage, monkeypatch):
    after, due, sink = stage.driver.after, [], Keeper()

    def later(seconds, callback):
        if seconds == driver._LAST_WORDS_SECONDS:
            due.append(callback)
        else:
            after(seconds, callback)

    monkeypatch.setattr(stage.driver, "after", later)
    stage.launch()
    cell = stage.submit(0, sink=sink)
    stage.launcher.tell(exited(0, 3))
    wait_until(lambda: due, timeout=SOON, what="the exit is heard")
    stage.say(0, Text(cell=cell.cell, stream="stdout", data=b"sent\n"))
    wait_until(lambda: sink.text, timeout=SOON, what="what was sent")
    after(0.0, due.pop())
    stage.wait_end(cell)
    assert cell.result.stdout[0] == "sent\n"
    assert "rank 0 exited with code 3 while running cell [7]" in error_of(cell)


def test_the_others_of_a_cell_that_lost_a_rank_are_interrupted_and_the_notebook_is_released(stage):
    stage.launch()
    cell = stage.submit(0, 1)
    stage.next_task(0)
    began = time.monotonic()
    stage.launcher.tell(exited(1, -11))
    assert stage.next_task(0) == Interrupt(cell=cell.cell)
    stage.wait_end(cell)
    assert time.monotonic() - began < SOON
    told = error_of(cell)
    assert "rank 1 was killed by signal 11 (segmentation fault) while running cell [7]" in told
    assert "rank 0 still runs" in told
    stage.done(0, cell.cell)
    stage.wait_states(RankState.IDLE, RankState.DEAD)


def test_a_queued_cell_that_loses_a_rank_says_that_it_never_ran(stage):
    stage.launch()
    stage.submit(0)
    queued = stage.submit(0, 1)
    stage.launcher.tell(exited(1, 1))
    stage.wait_end(queued)
    assert "rank 1 exited with code 1 before cell [7] could run" in error_of(queued)
    assert isinstance(stage.next_task(0), RunCell)
    assert stage.nothing_for(0)


def test_news_of_an_earlier_process_of_a_rank_change_nothing(stage):
    stage.launch()
    old = stage.ends[0]
    stage.launcher.tell(exited(0, 1))
    stage.wait_states(RankState.DEAD, RankState.IDLE)
    stage.driver.post(ev.LaunchRanks((0,)))
    stage.dial(0)
    for rank in (0, 1):
        stage.done(rank, stage.next_task(rank).cell)
    stage.wait_states(RankState.IDLE, RankState.IDLE)
    cell = stage.submit(0)
    old.send(Done(cell=cell.cell, status="ok", seconds=0.0))
    old.send(Text(cell=cell.cell, stream="stdout", data=b"from the grave"))
    stage.launcher.tell(exited(0, -9, incarnation=1))
    stage.say(0, Text(cell=cell.cell, stream="stdout", data=b"alive\n"))
    stage.done(0, cell.cell)
    stage.wait_end(cell)
    cell.result.raise_for_status()
    assert stage.state.ranks[0].incarnation == 2


@pytest.mark.parametrize("stage", [GracePeriods(leave=2.0)], indirect=True)
def test_an_idle_rank_is_asked_to_leave_and_killed_when_it_does_not(stage):
    stage.launch()
    stage.driver.post(ev.Stop())
    assert stage.next_task(0) == Shutdown(patience=30)
    assert stage.next_task(1) == Shutdown(patience=30)
    assert stage.launcher.killed == []
    stage.launcher.tell(exited(1, 0))
    wait_until(lambda: KillRank(rank=0, incarnation=1) in stage.launcher.killed, timeout=SOON, what="the kill")
    stage.launcher.tell(exited(0, -9))
    stage.wait_states(RankState.ABSENT, RankState.ABSENT)


def test_a_busy_rank_that_is_restarted_is_killed_at_once_and_forked_again(stage):
    stage.launch()
    cell = stage.submit(0)
    stage.driver.post(ev.LaunchRanks((0,)))
    assert stage.launcher.killed == [KillRank(rank=0, incarnation=1)]
    stage.launcher.tell(exited(0, -9))
    stage.wait_end(cell)
    wait_until(lambda: len(stage.launcher.forked) == 3, timeout=SOON, what="the second fork of rank 0")
    assert (stage.launcher.forked[2].rank, stage.launcher.forked[2].incarnation) == (0, 2)


def test_the_end_of_the_forkserver_is_the_end_of_every_rank_and_of_every_cell(stage):
    stage.launch()
    cell = stage.submit(0, 1)
    stage.launcher.end()
    stage.wait_end(cell)
    assert "forkserver" in error_of(cell)
    stage.wait_states(RankState.DEAD, RankState.DEAD)


def test_a_rank_that_cannot_be_forked_is_dead_and_says_why(stage):
    stage.launch()
    stage.launcher.tell(exited(1, 1))
    stage.wait_states(RankState.IDLE, RankState.DEAD)
    stage.launcher.failure = OSError(28, "No space left on device")
    stage.driver.post(ev.LaunchRanks((1,)))
    stage.wait_states(RankState.IDLE, RankState.DEAD)
    assert "No space left on device" in stage.driver.start_errors[1]


def test_a_rank_that_cannot_be_forked_again_after_its_end_stops_nobody_else(stage):
    stage.launch()
    stage.launcher.failure = OSError(28, "No space left on device")
    stage.driver.post(ev.LaunchRanks((1,)))
    stage.launcher.tell(exited(1, 0))
    stage.wait_states(RankState.IDLE, RankState.DEAD)
    cell = stage.submit(0)
    stage.done(0, cell.cell)
    stage.wait_end(cell)


def test_a_rank_that_dies_while_it_starts_is_told_with_its_last_words(stage):
    stage.driver.post(ev.LaunchRanks((0, 1)))
    stage.dial(0)
    stage.launcher.tell(exited(1, 1, incarnation=1))
    stage.wait_states(RankState.IDLE, RankState.DEAD)
    assert stage.driver.start_errors == {1: "rank 1 exited with code 1 while it started"}


def test_a_question_and_its_answer_find_their_way(stage):
    stage.launch()
    cell = stage.submit(1)
    stage.next_task(1)
    asked = InputRequest(cell=cell.cell, prompt="name? ", password=False)
    stage.say(1, asked)
    assert cell.inbox.get(timeout=SOON) == InputQuestion(1, asked)
    stage.driver.reply(1, InputReply(cell=cell.cell, text="Ada"))
    assert stage.next_task(1) == InputReply(cell=cell.cell, text="Ada")


def test_stacks_are_those_that_came_in_time(stage):
    stage.launch()
    frame = Frame(file="Cell In[7]", line=2, function="train", source="loss.backward()")
    answered: dict[int, Stack] = {}
    asking = threading.Thread(target=lambda: answered.update(stage.driver.wait_stacks(timeout=2.0)))
    asking.start()
    asked = stage.next_task(0)
    assert isinstance(asked, GetStack)
    assert isinstance(stage.next_task(1), GetStack)
    stage.say(0, Stack(token=asked.token, cell=None, frames=(frame,)))
    asking.join(SOON)
    assert answered == {0: Stack(token=asked.token, cell=None, frames=(frame,))}


def test_stacks_are_not_waited_for_once_all_have_answered(stage):
    stage.launch()
    asking = threading.Thread(target=lambda: stage.driver.wait_stacks(timeout=60))
    asking.start()
    for rank in (0, 1):
        stage.say(rank, Stack(token=stage.next_task(rank).token, cell=None, frames=()))
    asking.join(SOON)
    assert not asking.is_alive()


def test_a_message_that_cannot_be_read_costs_the_rank_that_sent_it(stage):
    stage.launch()
    cell = stage.submit(0, 1)
    stage.hub._up.append((Sender(0, 1), (b"\xc1 no message", [])))
    stage.hub.wake()
    wait_until(lambda: stage.launcher.killed, timeout=SOON, what="the kill")
    assert stage.launcher.killed == [KillRank(rank=0, incarnation=1)]
    stage.done(1, cell.cell)
    stage.launcher.tell(exited(0, -9))
    stage.wait_end(cell)
    told = error_of(cell)
    assert "rank 0 was killed because it sent a message that cannot be read (" in told
    assert "no message of this version" in told
    assert stage.driver.failure is None
    stage.wait_states(RankState.DEAD, RankState.IDLE)


def test_a_message_that_cannot_be_handled_is_reported_once_and_left_out(stage, monkeypatch):
    reported, sink = [], Keeper()
    monkeypatch.setattr("sys.excepthook", lambda _, value, __: reported.append(value))
    monkeypatch.setattr(stage.driver.presence.comms, "listener", lambda *_: json.loads("no json"))
    stage.launch()
    cell = stage.submit(0, sink=sink)
    stage.next_task(0)
    stage.say(0, *[CommFromRank("open", "a", "b", "no json", "{}")] * 3)
    stage.say(0, Text(cell=cell.cell, stream="stdout", data=b"goes on\n"))
    stage.done(0, cell.cell)
    stage.wait_end(cell)
    assert sink.text.count("rank 0 sent a CommFromRank that cannot be handled, so it is left out (JSONDecodeError") == 1
    assert "goes on" in sink.text
    assert [type(error).__name__ for error in reported] == ["JSONDecodeError"]
    cell.result.raise_for_status()


def test_a_hello_of_a_rank_that_runs_costs_that_rank(stage, monkeypatch):
    reported = []
    monkeypatch.setattr("sys.excepthook", lambda _, value, __: reported.append(value))
    stage.launch()
    stage.say(1, RankReady(rank=1, pid=101, incarnation=1, device="cpu", backend="gloo", threads=1))
    wait_until(lambda: stage.launcher.killed, timeout=SOON, what="the kill")
    stage.launcher.tell(exited(1, -9))
    stage.wait_states(RankState.IDLE, RankState.DEAD)
    assert "was killed because it sent a RankReady that cannot be handled" in stage.state.ranks[1].loss
    assert [type(error).__name__ for error in reported] == ["IllegalTransition"]
    assert stage.driver.failure is None


def test_output_that_the_front_end_refuses_is_left_out_and_said(stage, monkeypatch):
    class Refusing(Keeper):
        def emit(self, items) -> None:
            if any("refused" in item.text for item in items):
                raise ValueError("not this")
            super().emit(items)

    reported, sink = [], Refusing()
    monkeypatch.setattr("sys.excepthook", lambda _, value, __: reported.append(value))
    stage.launch()
    cell = stage.submit(0, sink=sink)
    stage.say(0, Text(cell=cell.cell, stream="stdout", data=b"refused\n"))
    wait_until(lambda: sink.text, timeout=SOON, what="the note")
    stage.say(0, Text(cell=cell.cell, stream="stdout", data=b"shown\n"))
    stage.done(0, cell.cell)
    stage.wait_end(cell)
    assert sink.text == "output of cell [7] cannot be shown, so it is left out (ValueError: not this)\n[0] shown\n"
    assert len(reported) == 1


def test_a_callback_is_called_on_the_drivers_thread_and_not_too_early(stage):
    called: list[tuple[str, float]] = []
    began = time.monotonic()
    stage.driver.after(0.05, lambda: called.append((threading.current_thread().name, time.monotonic() - began)))
    wait_until(lambda: bool(called), timeout=SOON, what="the callback")
    assert called[0][0] == "rankbook-driver"
    assert called[0][1] >= 0.05


def test_a_request_that_cannot_be_made_is_a_start_error_of_that_rank():
    stage = Stage()
    stage.driver._request = refuse
    try:
        stage.driver.post(ev.LaunchRanks((0, 1)))
        stage.wait_states(RankState.DEAD, RankState.DEAD)
        assert "no folder" in stage.driver.start_errors[0]
    finally:
        stage.close()


def refuse(*_: object) -> ForkRank:
    raise StartError("no folder")


@pytest.mark.parametrize(
    ("code", "kills", "words"),
    [
        (0, 0, "exited with code 0"),
        (3, 0, "exited with code 3"),
        (-signal.SIGKILL, 0, "was killed by signal 9 (out of memory?)"),
        (-signal.SIGKILL, 1, "was killed by the kernel because memory ran out (signal 9)"),
        (-signal.SIGSEGV, 0, "was killed by signal 11 (segmentation fault)"),
        (-signal.SIGSEGV, 1, "was killed by signal 11 (segmentation fault)"),
        (-signal.SIGABRT, 0, "was killed by signal 6 (SIGABRT)"),
        (-63, 0, "was killed by signal 63 (unknown)"),
    ],
)
def test_how_a_rank_ended_in_plain_words(code, kills, words):
    assert describe_exit(exited(0, code, memory_kills=kills)) == words
