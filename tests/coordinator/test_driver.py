"""Test the driver with links in memory and a launcher that records calls: real threads, no processes."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from rankbook.coordinator import driver
from rankbook.coordinator import events as ev
from rankbook.coordinator.cluster import Cluster
from rankbook.coordinator.driver import Driver
from rankbook.coordinator.liveness import describe_exit
from rankbook.coordinator.running_cell import CellEnded, InputQuestion, RunningCell
from rankbook.coordinator.state_machine import ClusterState, RankState
from rankbook.coordinator.states import GracePeriods
from rankbook.errors import CellTimeout, ClusterStopped, RankbookError, RankLostError, StartError
from rankbook.output.merger import OutputMerger, Stream
from rankbook.process_identity import ProcessInfo, process_info
from rankbook.protocol.forkserver import ForkRank, KillRank, RankExited, RankForked
from rankbook.protocol.messages import (
    MAX_CELL_OUTPUT,
    Assign,
    Buffer,
    CommFromRank,
    Done,
    ErrorReport,
    FetchValue,
    Frame,
    FromForkserver,
    GetCollectives,
    GetStack,
    InputReply,
    InputRequest,
    Interrupt,
    LimitOutput,
    Message,
    Payload,
    RankReady,
    RanksLost,
    Regroup,
    RunCell,
    Shutdown,
    Stack,
    Text,
)
from rankbook.protocol.telemetry import CollectiveLaunch, GroupReport, encode_members
from rankbook.transport import Sender
from tests.conftest import wait_until
from tests.coordinator.fork_requests import request
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


class RecordingLauncher:
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

    def process_info(self, rank: int, pid: int | None) -> ProcessInfo | None:  # noqa: ARG002 - the Protocol's
        return process_info(pid)

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


class DriverHarness:
    """A driver whose ranks and forkserver are played by the test."""

    def __init__(self, grace: GracePeriods | None = None, world_size: int = 2) -> None:
        self.hub = WaitingHub()
        self.launcher = RecordingLauncher()
        self.tasks: dict[int, list[Message]] = {}
        self.losses: list[tuple[int, RanksLost]] = []
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
        """Return the next message to the rank, except messages that its control thread answers."""
        wait_until(lambda: not self.nothing_for(rank), timeout=SOON, what=f"a message for rank {rank}")
        return self.tasks[rank].pop(0)

    def nothing_for(self, rank: int) -> bool:
        while (received := self.ends[rank].receive()) is not None:
            if isinstance(received[0], RanksLost):
                self.losses.append((rank, received[0]))
            elif isinstance(received[0], GetCollectives):
                self.asked += 1
            else:
                self.tasks.setdefault(rank, []).append(received[0])
        return not self.tasks.get(rank)

    def done(self, rank: int, cell: int, *, error: ErrorReport | None = None) -> None:
        self.say(rank, Done(cell=cell, status="ok" if error is None else "error", seconds=0.1, error=error))

    def launch(self) -> None:
        """Launch all ranks, until they are idle and in one group."""
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

    def submit_same(self, *ranks: int) -> RunningCell:
        """Submit a cell that is one object for all ranks."""
        number = self.state.new_cell()
        task = (RunCell(cell=number, source="x", number=7), ())
        cell = RunningCell(number, 7, dict.fromkeys(ranks, task), cluster_key="", sink=None)
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
def four_ranks():
    harness = DriverHarness(world_size=4)
    yield harness
    harness.close()


@pytest.fixture
def harness(request):
    harness = DriverHarness(getattr(request, "param", None))
    yield harness
    harness.close()
    assert "rankbook-driver" not in [thread.name for thread in threading.enumerate()]


def error_of(cell: RunningCell) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one it is, the caller looks at
        cell.result.raise_for_status()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_launch_forks_every_rank_with_a_downlink_of_its_own_and_forms_one_group(harness):
    harness.launch()
    assert [(fork.rank, fork.incarnation, fork.downlink) for fork in harness.launcher.forked] == [
        (0, 1, "memory:0.1"),
        (1, 1, "memory:1.1"),
    ]
    assert harness.state.grouped


class ThreadKeeper(Keeper):
    """A sink that also keeps the threads that it was called on."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def emit(self, items) -> None:
        self.threads.add(threading.current_thread().name)
        super().emit(items)


def test_the_output_of_a_lost_rank_is_shown_on_the_driver_thread_whoever_reports_the_loss(harness):
    harness.launch()
    sink = ThreadKeeper()
    cell = harness.submit(0, 1, sink=sink)
    assert isinstance(harness.next_task(1), RunCell)
    harness.say(1, Text(cell=cell.cell, stream="stdout", data=b"half a line"))
    wait_until(lambda: cell.tail(1), timeout=SOON, what="the output has arrived")
    harness.driver.post(ev.RankGone(1, 1, "was discarded"))
    assert isinstance(harness.next_task(0), RunCell)
    harness.done(0, cell.cell)
    harness.wait_end(cell)
    assert "half a line" in sink.text and sink.threads == {"rankbook-driver"}
    assert "rank 1 was discarded while running cell [7]" in error_of(cell)


def test_a_process_id_is_known_before_the_rank_says_ready(harness):
    harness.driver.post(ev.LaunchRanks((0, 1)))
    harness.launcher.tell(RankForked(rank=1, incarnation=1, pid=4711))
    wait_until(lambda: harness.driver.rank_processes[1].pid == 4711, timeout=SOON, what="the pid")


def test_an_event_from_another_thread_moves_the_drivers_deadline_forward(harness):
    """The driver thread sleeps without a deadline, and nothing else wakes it."""
    harness.launch()
    harness.submit(0, 1)
    wait_until(
        lambda: (harness.nothing_for(0), harness.asked)[1], timeout=SOON, what="a question about the collectives"
    )


def test_output_may_arrive_while_its_cell_is_sent_for_one_thread_alone_reads_it(harness, monkeypatch):
    """Check that only the driver thread reads the output. The submitting thread once read it too, during a change."""
    threads, deadline = set(), OutputMerger.deadline.fget

    def noted(merger):
        threads.add(threading.current_thread().name)
        return deadline(merger)

    monkeypatch.setattr(OutputMerger, "deadline", property(noted))
    harness.launch()
    cell = harness.submit(0, sink=Keeper())
    harness.next_task(0)
    harness.say(0, Text(cell=cell.cell, stream="stdout", data=b"half a line"))
    harness.done(0, cell.cell)
    harness.wait_end(cell)
    wait_until(lambda: threads, timeout=SOON, what="a look at the output")
    assert threads == {"rankbook-driver"}


def test_a_cell_reaches_its_ranks_and_ends_with_the_last_answer(harness):
    harness.launch()
    sink = Keeper()
    cell = harness.submit(0, 1, sink=sink)
    assert harness.next_task(0) == RunCell(cell=cell.cell, source="x", number=7)
    assert harness.next_task(1) == RunCell(cell=cell.cell, source="x", number=7)
    assert harness.driver.active_cells() == [cell]
    assert harness.driver.cell_of(0) is cell
    harness.say(0, Text(cell=cell.cell, stream="stdout", data=b"a line\n"))
    harness.done(0, cell.cell)
    harness.done(1, cell.cell)
    harness.wait_end(cell)
    cell.result.raise_for_status()
    assert sink.text == "[0] a line\n"
    assert harness.driver.active_cells() == []


def test_output_comes_before_the_end_and_also_while_the_cell_runs(harness):
    harness.launch()
    sink = Keeper()
    cell = harness.submit(0, sink=sink)
    harness.say(0, Text(cell=cell.cell, stream="stdout", data=b"live\n"))
    wait_until(lambda: "live" in sink.text, timeout=SOON, what="the line while the cell runs")
    assert cell.result is None
    harness.done(0, cell.cell)
    harness.wait_end(cell)


def test_ranks_are_limited_once_when_enough_text_of_the_cell_was_shown(harness):
    harness.launch()
    cell = harness.submit(0, 1, sink=Keeper())
    assert [harness.next_task(rank).cell for rank in (0, 1)] == [cell.cell] * 2
    line = b"x" * ((MAX_CELL_OUTPUT // 4) - 1) + b"\n"
    for number in range(6):
        harness.say(number % 2, Text(cell=cell.cell, stream="stdout", data=b"%d" % number + line))
    tasks = [harness.next_task(rank) for rank in (0, 1)]
    assert [isinstance(task, LimitOutput) for task in tasks] == [True, True] and tasks[0].cell == cell.cell
    harness.say(0, Text(cell=cell.cell, stream="stdout", data=line))
    harness.done(0, cell.cell)
    harness.done(1, cell.cell)
    harness.wait_end(cell)
    assert harness.nothing_for(0) and harness.nothing_for(1)


def test_equal_output_of_all_ranks_counts_once(harness):
    harness.launch()
    cell = harness.submit(0, 1, sink=Keeper())
    assert [harness.next_task(rank).cell for rank in (0, 1)] == [cell.cell] * 2
    line = b"x" * ((MAX_CELL_OUTPUT // 4) - 1) + b"\n"
    for _ in range(3):
        harness.say(0, Text(cell=cell.cell, stream="stdout", data=line))
        harness.say(1, Text(cell=cell.cell, stream="stdout", data=line))
    harness.done(0, cell.cell)
    harness.done(1, cell.cell)
    harness.wait_end(cell)
    assert harness.nothing_for(0) and harness.nothing_for(1)


def test_output_of_a_thread_after_the_end_reaches_its_cell(harness):
    harness.launch()
    sink = Keeper()
    cell = harness.submit(0, sink=sink)
    harness.done(0, cell.cell)
    harness.wait_end(cell)
    harness.say(0, Text(cell=cell.cell, stream="stdout", data=b"late\n"))
    wait_until(lambda: "late" in sink.text, timeout=SOON, what="the late line")


def test_a_cell_for_a_busy_rank_is_reported_whom_it_waits_for_and_starts_after_it(harness):
    harness.launch()
    first, second = harness.submit(0), harness.submit(0, 1)
    assert second.state == "queued"
    assert second.waiting_behind == (0,)
    assert harness.next_task(0).cell == first.cell
    assert harness.nothing_for(1)
    harness.done(0, first.cell)
    assert harness.next_task(0).cell == second.cell
    assert harness.next_task(1).cell == second.cell


def test_an_interrupt_goes_to_the_ranks_that_still_run_the_cell(harness):
    harness.launch()
    cell = harness.submit(0, 1)
    harness.next_task(0), harness.next_task(1)
    harness.done(0, cell.cell)
    harness.wait_states(RankState.IDLE, RankState.BUSY)
    harness.driver.post(ev.InterruptCell(cell.cell))
    assert harness.next_task(1) == Interrupt(cell=cell.cell)
    assert harness.nothing_for(0)


def test_a_death_is_reported_as_text_with_its_cell_after_its_last_output(harness):
    harness.launch()
    sink = Keeper()
    cell = harness.submit(1, sink=sink)
    harness.launcher.tell(exited(1, -9, stdout=b"nobody had read this"))
    harness.wait_end(cell)
    assert "rank 1 was killed by SIGKILL (out of memory?) while running cell [7]" in error_of(cell)
    assert "nobody had read this" in sink.text
    assert harness.state.ranks[1].loss == "was killed by SIGKILL (out of memory?)"
    harness.wait_states(RankState.IDLE, RankState.DEAD)


def test_messages_in_flight_at_an_exit_are_part_of_the_result(harness, monkeypatch):
    schedule, due, sink = harness.driver._schedule, [], Keeper()

    def later(seconds, callback):
        if seconds == driver._EXIT_DELAY:
            due.append(callback)
        else:
            schedule(seconds, callback)

    monkeypatch.setattr(harness.driver, "_schedule", later)
    harness.launch()
    cell = harness.submit(0, sink=sink)
    harness.launcher.tell(exited(0, 3))
    wait_until(lambda: due, timeout=SOON, what="the exit is heard")
    harness.say(0, Text(cell=cell.cell, stream="stdout", data=b"sent\n"))
    wait_until(lambda: sink.text, timeout=SOON, what="what was sent")
    schedule(0.0, due.pop())
    harness.wait_end(cell)
    assert cell.result.stdout[0] == "sent\n"
    assert "rank 0 exited with code 3 while running cell [7]" in error_of(cell)


def test_a_cell_whose_collectives_did_not_match_fails_on_its_ranks(harness):
    harness.launch()
    cell = harness.submit(0, 1)
    for rank in (0, 1):
        harness.next_task(rank)
        launch = CollectiveLaunch(
            number=1, op="all_reduce", data=f"float32[{rank}]", peer=None, seconds=1.0, code=rank, digest=rank
        )
        group = GroupReport(name="0", members=encode_members((0, 1)), count=1, pending=(), recent=(launch,))
        harness.say(rank, Done(cell=cell.cell, status="ok", seconds=0.1, collectives=1, groups=(group,)))
    harness.wait_end(cell)
    assert "RuntimeError: all_reduce #1: rank 0 gave float32[0], rank 1 float32[1]" in error_of(cell)


def test_exits_that_are_received_together_are_told_to_the_other_ranks_in_one_message(four_ranks):
    four_ranks.launch()
    cell = four_ranks.submit(0, 1, 2, 3)
    four_ranks.next_task(0)
    four_ranks.launcher.tell(*(msgspec.structs.replace(exited(rank, -11), ordered=True) for rank in (1, 2, 3)))
    assert four_ranks.next_task(0) == Interrupt(cell=cell.cell)
    ((told, losses),) = four_ranks.losses
    assert told == 0
    assert losses.causes == tuple(
        (rank, f"rank {rank} was killed by SIGSEGV (segmentation fault)") for rank in (1, 2, 3)
    )
    assert four_ranks.asked >= 1
    four_ranks.done(0, cell.cell)
    four_ranks.wait_end(cell)


def test_a_loss_that_another_thread_reports_is_told_to_the_other_ranks(harness):
    harness.launch()
    harness.driver.post(ev.RankGone(1, 1, "was discarded"))
    wait_until(
        lambda: (harness.nothing_for(0), harness.losses)[1] == [(0, RanksLost(((1, "rank 1 was discarded"),)))],
        timeout=SOON,
        what="the loss",
    )


def test_the_others_of_a_cell_that_lost_a_rank_are_interrupted_and_the_notebook_is_released(harness):
    harness.launch()
    cell = harness.submit(0, 1)
    harness.next_task(0)
    start = time.monotonic()
    harness.launcher.tell(exited(1, -11))
    assert harness.next_task(0) == Interrupt(cell=cell.cell)
    harness.wait_end(cell)
    assert time.monotonic() - start < SOON
    report = error_of(cell)
    assert "rank 1 was killed by SIGSEGV (segmentation fault) while running cell [7]" in report
    assert report.index("rank 0 still runs") > report.index("rank 1 was killed"), "the cause comes first"
    harness.done(0, cell.cell)
    harness.wait_states(RankState.IDLE, RankState.DEAD)


def test_a_queued_cell_that_loses_a_rank_says_that_it_never_ran(harness):
    harness.launch()
    harness.submit(0)
    queued = harness.submit(0, 1)
    harness.launcher.tell(exited(1, 1))
    harness.wait_end(queued)
    assert "rank 1 exited with code 1 before cell [7] could run" in error_of(queued)
    assert isinstance(harness.next_task(0), RunCell)
    assert harness.nothing_for(0)


def test_messages_of_an_earlier_process_of_a_rank_change_nothing(harness):
    harness.launch()
    old = harness.ends[0]
    harness.launcher.tell(exited(0, 1))
    harness.wait_states(RankState.DEAD, RankState.IDLE)
    harness.driver.post(ev.LaunchRanks((0,)))
    harness.dial(0)
    for rank in (0, 1):
        harness.done(rank, harness.next_task(rank).cell)
    harness.wait_states(RankState.IDLE, RankState.IDLE)
    cell = harness.submit(0)
    old.send(Done(cell=cell.cell, status="ok", seconds=0.0))
    old.send(Text(cell=cell.cell, stream="stdout", data=b"from the grave"))
    harness.launcher.tell(exited(0, -9, incarnation=1))
    harness.say(0, Text(cell=cell.cell, stream="stdout", data=b"alive\n"))
    harness.done(0, cell.cell)
    harness.wait_end(cell)
    cell.result.raise_for_status()
    assert harness.state.ranks[0].incarnation == 2


@pytest.mark.parametrize("harness", [GracePeriods(leave=2.0)], indirect=True)
def test_an_idle_rank_is_asked_to_leave_and_killed_when_it_does_not(harness):
    harness.launch()
    harness.driver.post(ev.Stop())
    assert harness.next_task(0) == Shutdown(patience=30)
    assert harness.next_task(1) == Shutdown(patience=30)
    assert harness.launcher.killed == []
    harness.launcher.tell(exited(1, 0))
    wait_until(lambda: KillRank(rank=0, incarnation=1) in harness.launcher.killed, timeout=SOON, what="the kill")
    harness.launcher.tell(exited(0, -9))
    harness.wait_states(RankState.ABSENT, RankState.ABSENT)


def test_a_busy_rank_that_is_restarted_is_killed_at_once_and_forked_again(harness):
    harness.launch()
    cell = harness.submit(0)
    harness.driver.post(ev.LaunchRanks((0,)))
    assert harness.launcher.killed == [KillRank(rank=0, incarnation=1)]
    harness.launcher.tell(exited(0, -9))
    harness.wait_end(cell)
    wait_until(lambda: len(harness.launcher.forked) == 3, timeout=SOON, what="the second fork of rank 0")
    assert (harness.launcher.forked[2].rank, harness.launcher.forked[2].incarnation) == (0, 2)


def test_the_end_of_the_forkserver_is_the_end_of_every_rank_and_of_every_cell(harness):
    harness.launch()
    cell = harness.submit(0, 1)
    harness.launcher.end()
    harness.wait_end(cell)
    assert "forkserver" in error_of(cell)
    harness.wait_states(RankState.DEAD, RankState.DEAD)


def test_rank_that_cannot_be_forked_is_dead_with_the_reason(harness):
    harness.launch()
    harness.launcher.tell(exited(1, 1))
    harness.wait_states(RankState.IDLE, RankState.DEAD)
    harness.launcher.failure = OSError(28, "No space left on device")
    harness.driver.post(ev.LaunchRanks((1,)))
    harness.wait_states(RankState.IDLE, RankState.DEAD)
    assert "No space left on device" in harness.driver.start_errors[1]


def test_a_rank_that_cannot_be_forked_again_after_its_end_stops_nobody_else(harness):
    harness.launch()
    harness.launcher.failure = OSError(28, "No space left on device")
    harness.driver.post(ev.LaunchRanks((1,)))
    harness.launcher.tell(exited(1, 0))
    harness.wait_states(RankState.IDLE, RankState.DEAD)
    cell = harness.submit(0)
    harness.done(0, cell.cell)
    harness.wait_end(cell)


def test_a_rank_that_dies_while_it_starts_is_reported_with_its_last_output(harness):
    harness.driver.post(ev.LaunchRanks((0, 1)))
    harness.dial(0)
    harness.launcher.tell(exited(1, 1, incarnation=1))
    harness.wait_states(RankState.IDLE, RankState.DEAD)
    assert harness.driver.start_errors == {1: "rank 1 exited with code 1 while it started"}


def test_input_request_and_its_answer_are_delivered(harness):
    harness.launch()
    cell = harness.submit(1)
    harness.next_task(1)
    request = InputRequest(cell=cell.cell, prompt="name? ", password=False)
    harness.say(1, request)
    assert cell.inbox.get(timeout=SOON) == InputQuestion(1, request)
    harness.driver.reply(1, InputReply(cell=cell.cell, text="Ada"))
    assert harness.next_task(1) == InputReply(cell=cell.cell, text="Ada")


def test_stacks_include_only_replies_before_the_timeout(harness):
    harness.launch()
    frame = Frame(file="Cell In[7]", line=2, function="train", source="loss.backward()")
    answered: dict[int, Stack] = {}
    asking = threading.Thread(target=lambda: answered.update(harness.driver.wait_stacks(timeout=2.0)))
    asking.start()
    request = harness.next_task(0)
    assert isinstance(request, GetStack)
    assert isinstance(harness.next_task(1), GetStack)
    harness.say(0, Stack(token=request.token, cell=None, frames=(frame,)))
    asking.join(SOON)
    assert answered == {0: Stack(token=request.token, cell=None, frames=(frame,))}


def test_stacks_are_not_waited_for_once_all_have_answered(harness):
    harness.launch()
    asking = threading.Thread(target=lambda: harness.driver.wait_stacks(timeout=60))
    asking.start()
    for rank in (0, 1):
        harness.say(rank, Stack(token=harness.next_task(rank).token, cell=None, frames=()))
    asking.join(SOON)
    assert not asking.is_alive()


def test_undecodable_message_kills_its_sender(harness):
    harness.launch()
    cell = harness.submit(0, 1)
    harness.hub._up.append((Sender(0, 1), (b"\xc1 no message", [])))
    harness.hub.wake()
    wait_until(lambda: harness.launcher.killed, timeout=SOON, what="the kill")
    assert harness.launcher.killed == [KillRank(rank=0, incarnation=1)]
    harness.done(1, cell.cell)
    harness.launcher.tell(exited(0, -9))
    harness.wait_end(cell)
    report = error_of(cell)
    assert "rank 0 was killed because it sent a message that cannot be decoded (" in report
    assert "expected a message of this protocol version" in report
    assert harness.driver.failure is None
    harness.wait_states(RankState.DEAD, RankState.IDLE)


def test_a_message_that_cannot_be_handled_is_reported_once_and_left_out(harness, monkeypatch):
    reported, sink = [], Keeper()
    monkeypatch.setattr("sys.excepthook", lambda _, value, __: reported.append(value))
    monkeypatch.setattr(harness.driver.liveness.comms, "listener", lambda *_: json.loads("no json"))
    harness.launch()
    cell = harness.submit(0, sink=sink)
    harness.next_task(0)
    harness.say(0, *[CommFromRank("open", "a", "b", "no json", "{}")] * 3)
    harness.say(0, Text(cell=cell.cell, stream="stdout", data=b"goes on\n"))
    harness.done(0, cell.cell)
    harness.wait_end(cell)
    assert sink.text.count("dropped a CommFromRank from rank 0 that cannot be handled (JSONDecodeError") == 1
    assert "goes on" in sink.text
    assert [type(error).__name__ for error in reported] == ["JSONDecodeError"]
    cell.result.raise_for_status()


def test_the_end_of_a_widget_that_cannot_be_handled_is_reported_and_ends_nothing(harness, monkeypatch):
    reported = []
    monkeypatch.setattr("sys.excepthook", lambda _, value, __: reported.append(value))
    monkeypatch.setattr(harness.driver.liveness.comms, "listener", lambda *_: json.loads("no json"))
    harness.launch()
    cell = harness.submit(0)
    harness.next_task(0)
    harness.say(0, CommFromRank("close", "a", "b", "no json", "{}"))
    wait_until(lambda: reported, timeout=SOON, what="the report")
    harness.done(0, cell.cell)
    harness.wait_end(cell)
    assert harness.driver.failure is None
    cell.result.raise_for_status()


def test_ready_message_of_a_running_rank_kills_it(harness, monkeypatch):
    reported = []
    monkeypatch.setattr("sys.excepthook", lambda _, value, __: reported.append(value))
    harness.launch()
    harness.say(1, RankReady(rank=1, pid=101, incarnation=1, device="cpu", backend="gloo", threads=1))
    wait_until(lambda: harness.launcher.killed, timeout=SOON, what="the kill")
    harness.launcher.tell(exited(1, -9))
    harness.wait_states(RankState.IDLE, RankState.DEAD)
    assert "was killed because it sent a RankReady that cannot be handled" in harness.state.ranks[1].loss
    assert [type(error).__name__ for error in reported] == ["IllegalTransition"]
    assert harness.driver.failure is None


def test_output_that_the_front_end_refuses_is_omitted_and_reported(harness, monkeypatch):
    class Refusing(Keeper):
        def emit(self, items) -> None:
            if any("refused" in item.text for item in items):
                raise ValueError("not this")
            super().emit(items)

    reported, sink = [], Refusing()
    monkeypatch.setattr("sys.excepthook", lambda _, value, __: reported.append(value))
    harness.launch()
    cell = harness.submit(0, sink=sink)
    harness.say(0, Text(cell=cell.cell, stream="stdout", data=b"refused\n"))
    wait_until(lambda: sink.text, timeout=SOON, what="the note")
    harness.say(0, Text(cell=cell.cell, stream="stdout", data=b"shown\n"))
    harness.done(0, cell.cell)
    harness.wait_end(cell)
    assert sink.text == "dropped output of cell [7] that cannot be shown (ValueError: not this)\n[0] shown\n"
    assert len(reported) == 1


def test_a_callback_is_called_on_the_drivers_thread_and_not_too_early(harness):
    called: list[tuple[str, float]] = []
    start = time.monotonic()
    harness.driver.after(0.05, lambda: called.append((threading.current_thread().name, time.monotonic() - start)))
    wait_until(lambda: bool(called), timeout=SOON, what="the callback")
    assert called[0][0] == "rankbook-driver"
    assert called[0][1] >= 0.05


def test_cells_that_end_in_the_queue_are_dropped_like_others(harness, monkeypatch):
    monkeypatch.setattr(driver, "_RECENT_CELLS", 2)
    harness.launch()
    running = harness.submit(0)
    queued = [harness.submit(0, 1) for _ in range(5)]
    for cell in queued:
        harness.driver.post(ev.InterruptCell(cell.cell))
        harness.wait_end(cell)
        assert cell.closed
    harness.done(0, running.cell)
    harness.wait_end(running)
    wait_until(lambda: len(harness.driver.cells()) == 2, timeout=SOON, what="the last two cells are left")
    assert harness.driver.cells() == [running, queued[-1]]


def test_a_cell_stays_while_a_straggler_runs_it(harness, monkeypatch):
    monkeypatch.setattr(driver, "_RECENT_CELLS", 0)
    harness.launch()
    cell = harness.submit(0, 1)
    harness.done(1, cell.cell)
    harness.wait_states(RankState.BUSY, RankState.IDLE)
    for _ in range(2):
        harness.driver.post(ev.InterruptCell(cell.cell))
    harness.wait_end(cell)
    assert cell.stragglers == (0,)
    assert not cell.closed
    assert cell in harness.driver.cells()
    harness.done(0, cell.cell)
    wait_until(lambda: cell.closed, timeout=SOON, what="the end of the straggler")


def test_an_error_of_a_callback_is_reported_and_ends_nothing(harness, monkeypatch):
    reported = []
    monkeypatch.setattr("sys.excepthook", lambda _, value, __: reported.append(str(value)))
    harness.launch()
    cell = harness.submit(0)
    cell.on_change.append(lambda: {}["x"])
    harness.driver.after(0.0, lambda: 1 / 0)
    wait_until(lambda: reported, timeout=SOON, what="the report")
    harness.done(0, cell.cell)
    harness.wait_end(cell)
    assert reported == ["division by zero", "'x'"]
    assert harness.driver.failure is None
    cell.result.raise_for_status()


def test_why_the_group_could_not_be_formed_is_shown_once_in_the_cell_that_needs_it(harness):
    def refuse_group() -> None:
        error = ErrorReport("StartError", "cannot form the process group: no route to host", "", "StartError: ...")
        for rank in (0, 1):
            task = harness.next_task(rank)
            assert isinstance(task, Regroup)
            harness.done(rank, task.cell, error=error)

    harness.launch()
    first = harness.submit(0, 1)
    for rank in (0, 1):
        assert isinstance(harness.next_task(rank), RunCell)
        error = ErrorReport("ValueError", "x", "", "ValueError: x")
        harness.say(rank, Done(cell=first.cell, status="error", seconds=0.1, error=error, collectives=1))
    harness.wait_end(first)
    refuse_group()
    harness.wait_states(RankState.IDLE, RankState.IDLE)
    sink = Keeper()
    cell = harness.submit(0, 1, sink=sink)
    refuse_group()
    for rank in (0, 1):
        assert harness.next_task(rank) == RunCell(cell=cell.cell, source="x", number=7)
        harness.done(rank, cell.cell)
    harness.wait_end(cell)
    assert sink.text == "the process group could not be formed: no route to host\n"


def test_what_a_cell_has_sent_is_not_kept_behind_its_end(harness):
    harness.launch()
    array = np.ones(1000)
    number = harness.state.new_cell()
    tasks = {0: (Assign(cell=number, payload=Payload(())), (memoryview(array),))}
    cell = RunningCell(number, 0, tasks, cluster_key="", sink=None)
    assert cell.defines_variables
    harness.driver.submit(cell)
    assert isinstance(harness.next_task(0), Assign)
    harness.done(0, number)
    harness.wait_end(cell)
    array_alive = weakref.ref(array)
    del array, tasks
    gc.collect()
    assert cell in harness.driver.cells() and array_alive() is None


def test_a_cell_is_not_queued_for_a_rank_that_has_died_since_it_was_checked(harness):
    harness.launch()
    harness.launcher.tell(exited(1, 1))
    harness.wait_states(RankState.IDLE, RankState.DEAD)
    advice = "%distributed heal restores it, %distributed restart 1 starts it with an empty namespace, --ranks 0 runs"
    with pytest.raises(RankLostError, match=f"rank 1 exited with code 1; {advice} without it") as caught:
        harness.submit(0, 1)
    assert caught.value.ranks == (1,)
    assert harness.driver.active_cells() == []


def test_no_cell_is_queued_after_the_end_of_the_driver(harness):
    harness.launch()
    harness.driver.failure = ValueError("a bug")
    with pytest.raises(RankbookError, match=r"the coordinator failed \(a bug\); stop and start again"):
        harness.submit(0)
    harness.driver.close()
    with pytest.raises(ClusterStopped, match="the ranks were stopped"):
        harness.submit(0)


def test_a_request_that_cannot_be_made_is_a_start_error_of_that_rank():
    harness = DriverHarness()
    harness.driver._request = refuse
    try:
        harness.driver.post(ev.LaunchRanks((0, 1)))
        harness.wait_states(RankState.DEAD, RankState.DEAD)
        assert "no folder" in harness.driver.start_errors[0]
    finally:
        harness.close()


def refuse(*_: object) -> ForkRank:
    raise StartError("no folder")


@pytest.mark.parametrize(
    ("code", "kills", "words"),
    [
        (0, 0, "exited with code 0"),
        (3, 0, "exited with code 3"),
        (-signal.SIGKILL, 0, "was killed by SIGKILL (out of memory?)"),
        (-signal.SIGKILL, 1, "was killed by the operating system because memory ran out (SIGKILL)"),
        (-signal.SIGSEGV, 0, "was killed by SIGSEGV (segmentation fault)"),
        (-signal.SIGSEGV, 1, "was killed by SIGSEGV (segmentation fault)"),
        (-signal.SIGABRT, 0, "was killed by SIGABRT"),
        (-63, 0, "was killed by signal 63"),
    ],
)
def test_exit_status_is_described_in_plain_text(code, kills, words):
    assert describe_exit(exited(0, code, memory_kills=kills)) == words


def test_a_task_is_sent_once_to_neighbouring_ranks_that_have_the_same_object(harness):
    harness.launch()
    sent = []
    send_many = harness.hub.send_many

    def recorded(ranks, message, frames=()):
        sent.append((tuple(ranks), message))
        send_many(ranks, message, frames)

    harness.hub.send_many = recorded
    cell = harness.submit_same(0, 1)
    assert [(ranks, type(message)) for ranks, message in sent if not isinstance(message, GetCollectives)] == [
        ((0, 1), RunCell)
    ]
    for rank in (0, 1):
        assert isinstance(harness.next_task(rank), RunCell)
        harness.done(rank, cell.cell)
    harness.wait_end(cell)


def test_what_a_dead_rank_was_writing_is_removed_from_shared_memory(harness, tmp_path):
    request = harness.driver._request
    harness.driver._request = lambda *args: msgspec.structs.replace(request(*args), segments=str(tmp_path))
    harness.launch()
    pid = exited(1, -9).pid
    names = {f"{begin}segment-{pid + more}-{0:016x}" for begin in ("", "writing-") for more in (0, 1)}
    for name in names:
        (tmp_path / name).touch()
    harness.launcher.tell(exited(1, -9))
    harness.wait_states(RankState.IDLE, RankState.DEAD)
    assert names - {path.name for path in tmp_path.iterdir()} == {f"writing-segment-{pid}-{0:016x}"}


def test_values_that_nobody_reads_are_removed_also_when_they_arrive_later():
    cell = RunningCell(1, 0, {rank: (FetchValue(cell=1, name="x"), ()) for rank in (0, 1)}, cluster_key="", sink=None)
    removed: list[str] = []
    done = [Done(1, "ok", 0.1, payload=Payload((Buffer(3), Buffer(9, f"segment-{rank}")))) for rank in (0, 1)]
    cell.rank_done(0, done[0], [])
    assert set(cell.values) == {0}
    cell.discard_values(removed.append)
    assert removed == ["segment-0"] and not cell.values
    cell.rank_done(1, done[1], [])
    assert removed == ["segment-0", "segment-1"] and not cell.values


@pytest.mark.parametrize("answers_late", [False, True])
def test_exported_state_that_comes_too_late_is_removed(answers_late):
    export = RunningCell(1, 0, {0: (FetchValue(cell=1, name="x"), ())}, cluster_key="", sink=None)
    answer = Done(1, "ok", 0.1, payload=Payload((Buffer(9, "segment-0"),)))
    removed: list[str] = []
    abandoned: list[int] = []

    def run_out_of_time(*_args):
        raise CellTimeout

    cluster = object.__new__(Cluster)
    vars(cluster).update(
        _processes=SimpleNamespace(hosts=SimpleNamespace(on_one_agent=lambda _: False, abandon=abandoned.append)),
        _segments=SimpleNamespace(discard=removed.append),
        _submit=lambda *_, **__: export,
        wait=lambda *_, **__: None,
        _check=run_out_of_time,
    )
    if not answers_late:
        export.rank_done(0, answer, [])
    with pytest.raises(CellTimeout):
        cluster._try_restore(0, (1,), None, None, 1.0)
    if answers_late:
        export.rank_done(0, answer, [])
    assert (removed, abandoned, export.values) == (["segment-0"], [1], {})
