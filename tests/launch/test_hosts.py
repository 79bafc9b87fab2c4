"""Test the table of hosts and the link to their ranks without hosts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankbook.coordinator.cluster_processes import ClusterProcesses
from rankbook.launch import hosts
from rankbook.launch.hosts import HOME, Hosts, HostsLink, MirroredSegments, local_versions
from rankbook.launch.placement import HostSlots, place_ranks
from rankbook.protocol import Message
from rankbook.protocol.forkserver import (
    CloseHost,
    FromRank,
    FromRanks,
    HostDescription,
    HostFailed,
    HostReady,
    ProcessState,
    RankExited,
    RankForked,
    SegmentFailed,
    SegmentPart,
    SegmentRefused,
    decode_to_agent,
    encode_description,
)
from rankbook.protocol.messages import Buffer, Done, Interrupt, Payload, encode, encode_from_rank
from rankbook.transport.agent_link import Hello, LinkMessage, LivenessPort
from tests.conftest import wait_until
from tests.coordinator.fork_requests import request


def test_a_message_to_ranks_of_several_hosts_is_encoded_once_and_goes_to_every_host_once(monkeypatch):
    sent: list[tuple[object, ...]] = []
    encoded: list[object] = []

    def count(message):
        encoded.append(message)
        return encode(message)

    monkeypatch.setattr(hosts, "encode", count)
    seats = {rank: SimpleNamespace(host=host) for rank, host in enumerate((HOME, HOME, "a", "b", "a"))}
    home = SimpleNamespace(
        uplink="", wake=lambda: None, send_many_encoded=lambda ranks, data, _: sent.append((HOME, tuple(ranks), data))
    )
    table = SimpleNamespace(
        seats=seats, send_to_ranks=lambda host, ranks, _, data, __: sent.append((host, ranks, data))
    )
    message = Interrupt(cell=7)
    HostsLink(home, table, SimpleNamespace()).send_many((0, 1, 2, 3, 4), message)
    data = encode(message)
    assert sent == [(HOME, (0, 1), data), ("a", (2, 4), data), ("b", (3,), data)]
    assert encoded == [message]


class OneAgent:
    """A link with one agent, and the hosts that use it."""

    def __init__(
        self,
        folder: Path,
        port: int = 0,
        *,
        probed: bool = False,
        slots: int = 1,
        device: str | None = None,
        **ready: Any,
    ) -> None:
        self.closed: set[str] = set()
        description = HostDescription(name="node", pid="1", address="127.0.0.1", **local_versions())
        message = HostReady(**{"slots": slots, "devices": 0, "cores": 1, "port": 1, "liveness_port": port, **ready})
        self.events = [Hello("agent", encode_description(description)), LinkMessage("agent", 0, [encode(message)])]
        self.sent: list[Message] = []
        self.reported: list[str] = []
        self.send = lambda _agent, _stream, frames: self.sent.append(decode_to_agent(frames[0]))
        self.accept = self.forget = lambda _: None
        self.run_timers = lambda _: []
        self.deadline = lambda: None
        self.pending = self.repeated = lambda *_: 0
        self.round_trip = lambda _: None
        self.hosts = Hosts(self, MirroredSegments(folder), None, lost_after=60.0, report=self.reported.append)
        self.hosts.device = device
        self.hosts.probe_agents = probed

    def receive(self) -> list[object]:
        events, self.events = self.events, []
        return events

    def deliver(self, *messages: Message, frames: Sequence[bytes] = ()) -> list[Message]:
        """Handle messages of the agent, all with `frames`, and return the reports for the driver."""
        self.events += [LinkMessage("agent", 0, [encode(message), *frames]) for message in messages]
        self.hosts.poll()
        reports = list(self.hosts.reports)
        self.hosts.reports.clear()
        return reports

    def poll(self, *, times: int) -> bool:
        """Poll with a pause that is longer than the interval of the probes. Return True if the host can be used."""
        for _ in range(times):
            hosts.wait_readable([], 0.03)
            self.hosts.poll()
        return bool(self.hosts.slots)


@pytest.fixture
def short_intervals(monkeypatch) -> None:
    monkeypatch.setattr(hosts, "_PROBE_INTERVAL", 0.02)
    monkeypatch.setattr(hosts, "_PROBE_TEST", 0.1)


@pytest.mark.usefixtures("short_intervals")
def test_a_host_is_lost_when_its_agent_has_closed_its_connection_and_its_port(tmp_path):
    port = LivenessPort("127.0.0.1")
    agent = OneAgent(tmp_path, port.port, probed=True)
    assert agent.poll(times=10) and not agent.hosts._tested
    # A proxy has closed the connection: the agent lives.
    agent.closed.add("agent")
    assert agent.hosts.deadline() is not None
    assert agent.poll(times=10)
    # It ends, which no closed connection tells yet.
    agent.closed.clear()
    port.close()
    assert agent.hosts.deadline() is None
    assert agent.poll(times=10)
    agent.closed.add("agent")
    wait_until(lambda: not agent.poll(times=1), timeout=20, what="the host is lost")
    assert agent.hosts._hosts["agent"].lost == (
        "was lost: the agent on node has ended, perhaps killed: its port is closed"
    )


@pytest.mark.usefixtures("short_intervals")
@pytest.mark.parametrize("probed", [True, False])
def test_a_port_that_refuses_from_the_start_says_nothing_about_the_agent(tmp_path, probed):
    port = LivenessPort("127.0.0.1")
    port.close()
    agent = OneAgent(tmp_path, port.port, probed=probed)
    assert agent.poll(times=10) and not agent.hosts._tested
    agent.closed.add("agent")
    assert agent.poll(times=10)


TOO_OLD = "the driver is too old"


@pytest.mark.parametrize(
    ("device", "ready", "devices", "what"),
    [
        (None, {"devices": 2}, 2, "2 CUDA devices"),
        (None, {"problem": "no driver"}, 0, "1 cores"),
        (None, {"problem": TOO_OLD, "unexpected": True}, 0, f"1 cores; {TOO_OLD}"),
        ("cuda", {"devices": 1, "problem": TOO_OLD, "unexpected": True}, 1, f"1 CUDA devices; {TOO_OLD}"),
        ("cpu", {"devices": 2}, 0, "1 cores"),
        ("cpu", {"problem": TOO_OLD, "unexpected": True}, 0, "1 cores"),
    ],
)
def test_the_devices_of_a_host_count_unless_the_ranks_are_to_use_the_cpu(tmp_path, device, ready, devices, what):
    agent = OneAgent(tmp_path, device=device, **ready)
    assert agent.poll(times=1)
    assert [slots.devices for slots in agent.hosts.slots] == [devices] and not agent.hosts.lacks_device
    assert agent.reported == [f"node has joined: 1 slot, {what}"]


def test_a_host_without_a_device_that_torch_can_use_is_sent_away_if_all_ranks_are_to_have_one(tmp_path):
    agent = OneAgent(tmp_path, device="cuda", problem=TOO_OLD)
    assert not agent.poll(times=1) and agent.sent == [CloseHost(agent.hosts.lacks_device)]
    assert agent.hosts.lacks_device.startswith(f"no CUDA device can be used on node: {TOO_OLD}; to start the ranks on")
    assert agent.reported == [], "the start that waits for it raises it"
    later = OneAgent(tmp_path, device="cuda")
    later.hosts.seats[0] = place_ranks(1, [HostSlots("other", "node1", slots=1, devices=1)])[0]
    assert not later.poll(times=1) and later.reported == [later.hosts.lacks_device]


@pytest.mark.parametrize("name", ["rankbook", "torch", "python"])
def test_an_agent_with_another_version_is_refused_on_both_sides(tmp_path, name):
    agent = OneAgent(tmp_path)
    versions = local_versions()
    description = HostDescription(name="node", pid="1", address="127.0.0.1", **{**versions, name: "0.1"})
    agent.events = [Hello("agent", encode_description(description))]
    refused: list[str] = []
    agent.refuse = lambda _agent, reason: refused.append(reason)
    assert not agent.poll(times=1)
    assert refused == [f"it has {name} 0.1 instead of {versions[name]}; install the same versions"]
    assert agent.reported == [f"refused node: {refused[0]}"]


def test_a_host_that_cannot_start_ranks_is_lost_with_the_cause(tmp_path):
    agent = OneAgent(tmp_path)
    agent.deliver(HostFailed("Traceback\n" * 1000 + "ImportError: libcudart.so.12"))
    text = agent.reported[-1]
    assert text.startswith("node cannot start ranks: ") and text.endswith("\nImportError: libcudart.so.12")
    assert len(text) < 2100
    lost = next(iter(agent.hosts._hosts.values())).lost
    assert lost == "was lost: node cannot start ranks (ImportError: libcudart.so.12)"


def test_all_ranks_that_move_to_a_host_know_how_many_it_has(tmp_path):
    agent = OneAgent(tmp_path, slots=3)
    agent.poll(times=1)
    hosts = [HostSlots("lost", "node0", slots=2, node=0), HostSlots("agent", "node", slots=1, node=1)]
    agent.hosts.seats = {seat.rank: seat for seat in place_ranks(3, hosts)}
    assert agent.hosts.move_lost((0, 1), {}) == []
    moved = [agent.hosts.seats[rank] for rank in (0, 1)]
    assert [(seat.host, seat.local_rank, seat.local_world_size) for seat in moved] == [("agent", 1, 3), ("agent", 2, 3)]
    # So does the one that was there before.
    assert (agent.hosts.seats[2].host, agent.hosts.seats[2].local_world_size) == ("agent", 3)
    assert {(seat.group_rank, seat.group_world_size) for seat in agent.hosts.seats.values()} == {(0, 1)}
    # Once more, as while another rank waits for a host: nothing changes.
    assert agent.hosts.move_lost((0, 1), {}) == []
    assert [agent.hosts.seats[rank] for rank in (0, 1)] == moved


def test_ranks_that_need_a_device_of_their_own_do_not_move_to_a_host_without_one(tmp_path):
    agent = OneAgent(tmp_path, slots=2, devices=1)
    agent.poll(times=1)
    lost = HostSlots("lost", "node0", slots=2, devices=2, node=0)
    agent.hosts.seats = {seat.rank: seat for seat in place_ranks(2, [lost])}
    agent.hosts.own_devices = True
    assert agent.hosts.move_lost((0, 1), {}) == [1]
    assert agent.hosts.seats[0].device == "cuda:0"
    agent.hosts.own_devices = False
    assert agent.hosts.move_lost((1,), {}) == []


def exited(rank: int, incarnation: int) -> RankExited:
    return RankExited(rank=rank, incarnation=incarnation, pid=1, code=-9, memory_kills=0, stdout=b"", stderr=b"")


@pytest.fixture
def forked(tmp_path) -> OneAgent:
    """Return an agent whose host has ranks 0 to 11, in their second process."""
    agent = OneAgent(tmp_path, slots=12)
    agent.poll(times=1)
    agent.hosts.seats = {seat.rank: seat for seat in place_ranks(12, agent.hosts.slots)}
    for rank in range(12):
        for incarnation in (1, 2):
            agent.hosts.fork(request(rank, incarnation, ""))
    agent.reported.clear()
    return agent


def test_late_reports_of_processes_that_were_replaced_do_not_cost_their_host(forked):
    for rank in range(12):
        late = (RankForked(rank, 1, 7), ProcessState(rank, 1, "running", 0.0, False, False), exited(rank, 1))
        assert forked.deliver(*late) == []
    assert forked.hosts.slots and forked.reported == [] and forked.hosts.status()[0].dropped == 0
    assert forked.deliver(RankForked(3, 2, 8), exited(3, 2)) == [RankForked(3, 2, 8), exited(3, 2)]


def test_a_host_is_lost_after_ten_messages_that_cannot_be_handled_within_a_minute(forked, monkeypatch):
    now = 0.0
    monkeypatch.setattr(hosts, "time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(30):
        now += 7.0
        assert forked.deliver(exited(3, 9)) == []
    assert forked.hosts.slots and forked.hosts.status()[0].dropped == 30
    assert forked.reported == ["dropped a message of node: node has no process 9 of rank 3"] * 30
    now += 70.0
    for number in range(10):
        assert bool(forked.hosts.slots), number
        forked.deliver(RankForked(99, 1, 7))
    assert not forked.hosts.slots
    assert forked.hosts._hosts["agent"].lost == "was lost: node sent 10 messages that cannot be handled"


VALUES = ("segment-7-0123456789abcdef", "segment-7-1123456789abcdef")


def answer_with_large_values(agent: OneAgent, rank: int) -> None:
    """Deliver an answer whose values are on the way: the first one and half of the second one have arrived."""
    payload = Payload(tuple(Buffer(2, name) for name in VALUES))
    data = encode_from_rank(Done(5, "ok", 0.1, payload=payload))
    agent.deliver(SegmentPart(VALUES[0], 0, 2), frames=[b"xx"])
    agent.deliver(SegmentPart(VALUES[1], 0, 2), frames=[b"x"])
    agent.deliver(FromRanks((FromRank(rank, 2, 1),), VALUES), frames=[data])


@pytest.mark.parametrize("replaced", [False, True])
def test_the_values_of_a_rank_that_has_ended_are_removed_and_sent_no_further(forked, tmp_path, replaced):
    if replaced:
        forked.hosts.fork(request(3, 3, ""))
    forked.sent.clear()
    answer_with_large_values(forked, 3)
    if not replaced:
        assert sorted(path.name for path in tmp_path.glob("segment-*")) == sorted(VALUES) and not forked.sent
        assert forked.deliver(exited(3, 2)) == [exited(3, 2)]
    assert not list(tmp_path.glob("segment-*")) and not forked.hosts.messages
    # The agent sends no more of it, and says so behind the parts that were on the way.
    assert forked.sent == [SegmentRefused(VALUES[1])]
    forked.deliver(SegmentPart(VALUES[1], 1, 2), frames=[b"x"])
    forked.deliver(SegmentFailed(VALUES[1], ""))
    receiver = forked.hosts._hosts["agent"].receiver
    assert not list(tmp_path.glob("*segment-*")) and not receiver.names and not receiver._refused
    assert forked.hosts.status()[0].dropped == 0


def test_the_answer_to_a_cell_whose_values_nobody_reads_does_not_wait_for_them(forked, tmp_path):
    forked.sent.clear()
    answer_with_large_values(forked, 3)
    forked.hosts.abandon(6)
    forked.hosts.poll()
    assert not forked.hosts.messages and not forked.sent, "another cell"
    forked.hosts.abandon(5)
    forked.hosts.poll()
    assert [(sender, message.cell) for sender, message, _ in forked.hosts.messages] == [((3, 2), 5)]
    assert forked.sent == [SegmentRefused(VALUES[1])] and not list(tmp_path.glob("segment-*"))


def test_a_name_of_a_segment_that_a_rank_has_made_up_does_not_hide_its_end(forked):
    data = encode_from_rank(Done(5, "ok", 0.1, payload=Payload((Buffer(2, "../x"),))))
    forked.deliver(FromRanks((FromRank(3, 2, 1),), ("../x",)), frames=[data])
    assert forked.deliver(exited(3, 2)) == [exited(3, 2)]


@pytest.mark.parametrize("free", [True, False])
def test_a_lost_host_that_has_returned_is_used_before_the_launcher_is_asked(tmp_path, free):
    agent = OneAgent(tmp_path, slots=2)
    description = HostDescription(name="node", pid="1", address="127.0.0.1", **local_versions(), node="1")
    _, ready = agent.events
    agent.events = [Hello("before", encode_description(description)), LinkMessage("before", 0, ready.frames)]
    agent.poll(times=1)
    agent.hosts.seats = {seat.rank: seat for seat in place_ranks(2, agent.hosts.slots)}
    agent.hosts.lose_node(1, "was not reachable")
    agent.events = [Hello("agent", encode_description(description)), ready]
    agent.poll(times=1)
    if not free:  # other ranks have moved to it
        moved = place_ranks(2, agent.hosts.slots)
        agent.hosts.seats |= {seat.rank + 2: replace(seat, rank=seat.rank + 2) for seat in moved}
    asked: list[int] = []

    def answer(node: int, *, wait: bool) -> Future[int | None]:
        asked.append(node)
        future: Future[int | None] = Future()
        future.set_result(None)
        return future

    processes = object.__new__(ClusterProcesses)
    processes._engine = SimpleNamespace(replace=answer)
    replacements = processes._replace_hosts(agent.hosts, (0, 1), 0.0, lambda: False)
    assert (replacements, asked) == (({1: 1}, []) if free else ({}, [1]))
    assert agent.hosts.move_lost((0, 1), replacements) == ([] if free else [0, 1])
