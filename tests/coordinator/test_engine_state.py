"""Test what the events and limits of an engine mean for the hosts, without threads or clocks."""

from __future__ import annotations

import pytest

from rankbook.coordinator.engine_monitor import EngineState, LoseHost, SaveAndStop, Show
from rankbook.engines import HostEnded, HostOutput, HostQueued, HostStarted, Limits, Notice
from rankbook.errors import StartError

NOW = 1_700_000_000.0


@pytest.fixture
def state() -> EngineState:
    return EngineState("slurm", grace=40.0)


def test_the_end_of_an_agent_loses_its_host_once(state):
    assert state.handle(HostStarted(1, "node7")) == []
    lost = LoseHost(1, "was lost: the agent on node7 ended because it was killed by SIGKILL")
    assert state.handle(HostEnded(1, "it was killed by SIGKILL")) == [lost]
    assert state.handle(HostEnded(1, "it was killed by SIGKILL")) == []
    assert state.handle(HostEnded(2, "x")) == [LoseHost(2, "was lost: the agent on host 2 ended because x")]


def test_the_end_of_all_agents_loses_all_hosts(state):
    assert state.handle(HostEnded(None, "of a timeout")) == [
        LoseHost(None, "was lost: the hosts of slurm ended because of a timeout")
    ]


def test_a_place_in_the_queue_is_shown_when_it_changes(state):
    (shown,) = state.handle(HostQueued("Resources", NOW))
    assert isinstance(shown, Show)
    assert shown.text.startswith("slurm: waiting in the queue (Resources, expected start 2023-11-1")
    assert "interrupt to cancel" in shown.text
    assert state.handle(HostQueued("Resources", NOW)) == []
    assert state.handle(HostQueued("Priority")) == [Show("slurm: waiting in the queue (Priority); interrupt to cancel")]
    assert "Priority" in state.describe(NOW)
    state.handle(HostStarted(0))
    assert state.describe(NOW) == ""


def test_two_jobs_that_wait_are_shown_once_and_again_when_one_of_them_has_left_the_queue(state):
    jobs = [HostQueued("job 8, Priority"), HostQueued("job 9, Priority", NOW)]
    assert [len(state.handle(job)) for job in jobs * 3] == [1, 1, 0, 0, 0, 0]
    state.handle(HostEnded(2, "it was cancelled"))
    assert [len(state.handle(job)) for job in jobs[:1] * 3] == [1, 0, 0]


def test_a_queue_after_the_start_is_left_by_a_stop_and_not_by_an_interrupt(state):
    state.handle(HostStarted(0))
    assert "; interrupt to cancel" in state.handle(HostQueued("Resources"))[0].text, "other hosts are still awaited"
    state.start_succeeded = True
    (shown,) = state.handle(HostQueued("Priority"))
    assert shown == Show("slurm: waiting in the queue (Priority); %distributed stop cancels it")
    assert state.describe(NOW) == f"launcher {shown.text}"


def test_the_end_of_the_time_is_announced_ten_minutes_and_one_minute_before(state):
    assert state.set_limits(Limits(NOW + 3600), NOW) == []
    assert "in 60 minutes" in state.describe(NOW)
    assert state.tick(NOW + 2999) == []
    (shown,) = state.tick(NOW + 3001)
    assert "in 10 minutes" in shown.text
    assert state.tick(NOW + 3100) == []
    (shown,) = state.tick(NOW + 3541)
    assert "in 59 seconds" in shown.text
    assert state.tick(NOW + 3550) == []
    assert state.tick(NOW + 3561) == [SaveAndStop(39.0)]
    assert state.tick(NOW + 3562) == []
    assert state.tick(NOW + 9999) == []


def test_a_short_time_is_announced_once_and_a_longer_one_anew(state):
    (shown,) = state.set_limits(Limits(NOW + 300), NOW)
    assert "in 5 minutes" in shown.text
    assert state.set_limits(Limits(NOW + 300), NOW + 30) == []
    assert state.set_limits(Limits(NOW + 3900), NOW + 60) == []  # prolonged
    (shown,) = state.tick(NOW + 3310)
    assert "in 10 minutes" in shown.text
    assert state.set_limits(Limits(None), NOW + 3320) == []
    assert state.tick(NOW + 9999) == []


@pytest.mark.parametrize(
    "event",
    [None, "ended", 7, HostEnded("node1", "x"), HostEnded(-1, "x"), HostStarted(0.5), HostOutput(0, b"x"), Notice(3)],  # type: ignore[arg-type]
)
def test_nonsense_is_shown_and_ignored(state, event):
    (shown,) = state.handle(event)
    assert isinstance(shown, Show)
    assert "the launcher slurm reported" in shown.text and "ignored" in shown.text
    assert state.start_problem() == "" and state.set_limits("soon", NOW) == []


def test_a_start_fails_with_the_end_of_an_agent_and_what_it_has_written(state):
    assert state.start_problem() == ""
    state.handle(HostStarted(1, "node7"))
    state.handle(HostOutput(1, "ssh: Could not resolve hostname node7\n"))
    state.handle(HostEnded(1, "it exited with code 255"))
    assert state.start_problem() == (
        "the agent on node7 ended because it exited with code 255\nssh: Could not resolve hostname node7"
    )


def test_the_end_of_a_replacement_is_described_with_what_it_has_written_itself(state):
    for event in (HostOutput(None, "old warning\n"), HostStarted(0, "node1"), HostEnded(0, "it was killed")):
        state.handle(event)
    assert state.describe_end(0) == "the agent on node1 ended because it was killed\nold warning"
    state.start_succeeded = True
    assert state.describe_end(0) == "the agent on node1 ended because it was killed", "output of another program"
    for event in (HostOutput(2, "execve(): No such file\n"), HostStarted(2, "node3"), HostEnded(2, "exit code 2")):
        state.handle(event)
    assert state.describe_end(2) == "the agent on node3 ended because exit code 2\nexecve(): No such file"
    state.handle(HostEnded(5, "down"))
    assert state.describe_end(5) == "the agent on host 5 ended because down"


def test_what_hosts_and_the_program_have_written_can_be_shown(state):
    assert state.describe_output() == ""
    for event in (HostOutput(None, "No module named rankbook\n"), HostOutput(0, " \n"), HostOutput(1, "a\nb")):
        state.handle(event)
    assert state.describe_output() == "\nNo module named rankbook\na\nb"


def test_an_error_of_the_engine_is_shown_once_and_ends_a_start(state):
    assert state.fail("start", StartError("srun is not installed")) == [
        Show("the launcher slurm failed in start(): StartError: srun is not installed")
    ]
    assert state.fail("start", StartError("srun is not installed")) == []
    assert "srun is not installed" in state.start_problem()
    assert "srun is not installed" in state.describe(NOW)
