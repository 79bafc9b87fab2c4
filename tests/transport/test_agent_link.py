"""Test the link between hosts with real sockets: strangers, malformed packets, and connections that break."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
import zmq

from rankbook.errors import InvalidArgument, StartError
from rankbook.transport import agent_link, session
from rankbook.transport.agent_link import (
    Accepted,
    AgentHub,
    AgentLink,
    Hello,
    LinkKeys,
    LinkMessage,
    LivenessPort,
    Reachable,
    RefusalProbe,
    Refused,
    Unreachable,
    make_agent_keys,
    make_keys,
    source_address,
)
from rankbook.transport.framed_socket import wait_readable
from tests.transport.tcp_proxy import Proxy

pytestmark = pytest.mark.timeout(120)

LOOPBACK = "127.0.0.1"
KEYS, SERVER_SECRET = make_keys()


class Pair:
    """A hub with its links, which `until` polls in turn."""

    def __init__(self, hub: AgentHub) -> None:
        self.hub = hub
        self.links: list[AgentLink] = []
        self.at_hub: list = []
        self.at_link: dict[int, list] = {}
        self.refuse = ""

    def connect(self, *, port: int = 0, keys: LinkKeys = KEYS, name: str = "") -> AgentLink:
        link = AgentLink(LOOPBACK, port or self.hub.port, keys, name or f"agent-{len(self.links)}", b"hello")
        self.links.append(link)
        return link

    def poll(self) -> None:
        ends = [self.hub, *self.links]
        if not any(end.has_message() for end in ends):
            wait_readable([file for end in ends for file in end.filenos()], 0.01)
        for event in [*self.hub.receive(), *self.hub.run_timers(time.monotonic())]:
            self.at_hub.append(event)
            if isinstance(event, Hello):
                if self.refuse:
                    self.hub.refuse(event.agent, self.refuse)
                else:
                    self.hub.accept(event.agent)
        for link in self.links:
            self.at_link.setdefault(id(link), []).extend(link.receive())
            link.run_timers(time.monotonic())

    def until(self, condition, *, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, (self.at_hub[-5:], self.at_link)
            self.poll()

    def seen(self, link: AgentLink, kind: type) -> list:
        return [event for event in self.at_link.get(id(link), []) if isinstance(event, kind)]

    def texts(self, events) -> list[bytes]:
        return [bytes(event.frames[0]) for event in events if isinstance(event, LinkMessage)]


@pytest.fixture
def pair() -> Iterator[Pair]:
    linked_pair = Pair(AgentHub(LOOPBACK, 0, KEYS, SERVER_SECRET))
    yield linked_pair
    for link in linked_pair.links:
        link.close(0.0)
    linked_pair.hub.close(0.0)


@pytest.fixture
def proxy(pair: Pair) -> Iterator[Proxy]:
    running_proxy = Proxy(pair.hub.port)
    yield running_proxy
    running_proxy.close()


def test_messages_go_both_ways(pair):
    link = pair.connect()
    pair.until(lambda: pair.seen(link, Accepted))
    assert pair.at_hub[0] == Hello("agent-0", b"hello")
    link.send(0, [b"up", b"x" * 100_000])
    pair.hub.send("agent-0", 1, [b"down"])
    pair.until(lambda: pair.texts(pair.at_hub) and pair.seen(link, LinkMessage))
    (up,) = [event for event in pair.at_hub if isinstance(event, LinkMessage)]
    assert (up.agent, up.stream, bytes(up.frames[1])) == ("agent-0", 0, b"x" * 100_000)
    assert pair.texts(pair.seen(link, LinkMessage)) == [b"down"]
    pair.until(lambda: pair.hub.round_trip("agent-0") is not None and not link.pending(0))
    assert pair.hub.dropped == pair.hub.refusals == 0


def test_a_refused_agent_gets_the_reason(pair):
    pair.refuse = "another version"
    link = pair.connect()
    pair.until(lambda: pair.seen(link, Refused))
    assert pair.seen(link, Refused) == [Refused("another version")]


def test_an_agent_with_a_key_of_its_own_is_kept_out_until_it_is_allowed(pair):
    keys = make_agent_keys(KEYS.server_public)
    link = pair.connect(keys=keys)
    pair.until(lambda: pair.hub.refusals)
    assert not pair.at_hub
    pair.hub.allow(keys.client_public.decode())
    pair.until(lambda: pair.seen(link, Accepted))
    for key in ("", "short", "x" * 41, "~" * 40, "#" * 40):
        with pytest.raises(InvalidArgument, match="invalid public key of an agent: expected 40 characters"):
            pair.hub.allow(key)


@pytest.mark.parametrize("fault", ["no key", "wrong server key", "unknown client key"])
def test_strangers_are_kept_out(pair, fault):
    other, _ = make_keys()
    member = pair.connect(name="member")
    pair.until(lambda: pair.seen(member, Accepted))
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    if fault != "no key":
        stranger.curve_serverkey = other.server_public if fault == "wrong server key" else KEYS.server_public
        stranger.curve_publickey, stranger.curve_secretkey = other.client_public, other.client_secret
    failures = stranger.get_monitor_socket(
        zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    )
    stranger.connect(f"tcp://{LOOPBACK}:{pair.hub.port}")
    stranger.send_multipart([b"RBAGENT1", b"stranger", b"0", b"hello"])
    before = len(pair.at_hub)
    pair.until(lambda: failures.poll(0))
    assert pair.at_hub[before:] == [] and pair.texts(pair.at_hub) == []
    assert pair.hub.refusals == (fault == "unknown client key")
    member.send(0, [b"still here"])
    pair.until(lambda: pair.texts(pair.at_hub) == [b"still here"])
    stranger.disable_monitor()
    context.destroy(linger=0)


def test_random_bytes_before_the_handshake_do_not_affect_other_connections(pair):
    member = pair.connect(name="member")
    pair.until(lambda: pair.seen(member, Accepted))
    generator = random.Random(1)
    for _ in range(50):
        with socket.create_connection((LOOPBACK, pair.hub.port)) as stranger:
            stranger.settimeout(1.0)
            with contextlib.suppress(OSError):  # the hub has closed the connection
                stranger.sendall(generator.randbytes(generator.choice((1, 64, 5000, 100_000))))
        pair.poll()
    member.send(0, [b"still here"])
    pair.until(lambda: pair.texts(pair.at_hub) == [b"still here"])


@pytest.mark.slow
def test_random_frames_of_a_member_are_dropped_and_counted_and_memory_comes_back(pair):
    member = pair.connect(name="member")
    pair.until(lambda: pair.seen(member, Accepted))
    generator = random.Random(2)

    def flood(count: int) -> None:
        hostile = raw_member(context, pair.hub.port)
        for number in range(count):
            frames = [generator.randbytes(generator.randint(0, 60)) for _ in range(generator.randint(1, 4))]
            if number == 0:
                frames = [b"RBAGENT1", b"hostile", b"0", b"hello"]
            sent = False
            while not sent:  # while the queue is full, or the hub has closed the connection
                with contextlib.suppress(zmq.Again):
                    hostile.send_multipart(frames, zmq.NOBLOCK)
                    sent = True
                if number % 100 == 0 or not sent:
                    pair.poll()
        target = pair.hub.dropped
        pair.until(lambda: not pair.hub.has_message() or pair.hub.dropped > target + count)
        hostile.close(linger=0)

    context = zmq.Context()
    flood(20_000)
    gc.collect()
    before = psutil.Process().memory_info().rss
    flood(60_000)
    assert pair.hub.dropped > 1_000
    gc.collect()
    assert psutil.Process().memory_info().rss < 1.1 * before
    member.send(0, [b"still here"])
    pair.until(lambda: pair.texts(pair.at_hub) == [b"still here"])
    context.destroy(linger=0)


def test_a_connection_is_closed_after_ten_invalid_packets_and_its_agent_comes_back(pair):
    member = pair.connect(name="member")
    pair.until(lambda: pair.seen(member, Accepted))
    member.send(0, [b"before"])
    for _ in range(10):
        member._socket.send_multipart([b"invalid", b"packet"])
    pair.until(lambda: pair.seen(member, Unreachable))
    member.send(0, [b"after"])
    pair.until(lambda: pair.texts(pair.at_hub) == [b"before", b"after"])
    assert pair.seen(member, Reachable) and pair.hub.dropped == 10


def test_a_flood_of_packets_keeps_nobody_from_the_hub(pair, monkeypatch):
    monkeypatch.setattr(agent_link, "_MAX_RECEIVED", 3)
    member = pair.connect(name="member")
    pair.until(lambda: pair.seen(member, Accepted))
    for number in range(9):
        member.send(0, [b"%d" % number])
    counts = []
    while sum(counts) < 9:
        wait_readable(pair.hub.filenos(), 0.01)
        counts.append(len(pair.texts(pair.hub.receive())))
        assert counts[-1] <= 3


def test_a_frame_beyond_the_limit_ends_only_its_connection(pair):
    member = pair.connect(name="member")
    pair.until(lambda: pair.seen(member, Accepted))
    context = zmq.Context()
    hostile = raw_member(context, pair.hub.port)
    disconnects = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    hostile.send_multipart([b"RBAGENT1", b"hostile", b"0", bytes(8 << 20)])
    pair.until(lambda: disconnects.poll(0))
    member.send(0, [b"still here"])
    pair.until(lambda: pair.texts(pair.at_hub) == [b"still here"])
    hostile.disable_monitor()
    context.destroy(linger=0)


def test_a_cut_in_the_middle_of_a_transfer_loses_and_repeats_nothing(pair, proxy):
    link = pair.connect(port=proxy.port)
    pair.until(lambda: pair.seen(link, Accepted))
    parts = [random.Random(number).randbytes(1 << 20) for number in range(60)]
    for number, part in enumerate(parts):
        link.send(1, [part])
        link.send(0, [b"up %d" % number])
        pair.hub.send("agent-0", 0, [b"down %d" % number])
    for _ in range(3):
        count = len(pair.texts(pair.at_hub))
        pair.until(lambda count=count: len(pair.texts(pair.at_hub)) > count + 5)
        proxy.cut()
        pair.until(lambda: isinstance(pair.at_link[id(link)][-1], Unreachable))
        proxy.accepting = True
        pair.until(lambda: not link.deadline() or link.filenos())
    pair.until(lambda: not link.pending(0) and not link.pending(1) and not pair.hub.pending("agent-0", 0))
    received = [event for event in pair.at_hub if isinstance(event, LinkMessage)]
    assert [bytes(event.frames[0]) for event in received if event.stream == 1] == parts
    assert [bytes(event.frames[0]) for event in received if event.stream == 0] == [b"up %d" % n for n in range(60)]
    assert pair.texts(pair.seen(link, LinkMessage)) == [b"down %d" % number for number in range(60)]
    assert pair.seen(link, Reachable)
    # A packet that is recorded and sent once more is dropped and counted.
    before = pair.hub.repeated("agent-0")
    link._session.reconnected(time.monotonic())
    link.send(0, [b"once"])
    (packet,) = [link._session._packet(0, sent) for sent in link._session._out[0].packets]
    link._send(packet)
    pair.until(lambda: pair.hub.repeated("agent-0") > before and not link.pending(0))
    assert pair.texts(pair.at_hub)[-1] == b"once" and pair.texts(pair.at_hub).count(b"once") == 1


def test_stalled_connection_is_detected_and_recovers(pair, proxy, monkeypatch):
    monkeypatch.setattr(agent_link, "_UNREACHABLE_AFTER", 1.0)
    link = pair.connect(port=proxy.port)
    pair.until(lambda: pair.seen(link, Accepted))
    proxy.forwarding = False
    pair.until(lambda: Unreachable("agent-0") in pair.at_hub)
    pair.hub.send("agent-0", 0, [b"later"])
    proxy.forwarding = True
    pair.until(lambda: pair.texts(pair.seen(link, LinkMessage)) == [b"later"] and Reachable("agent-0") in pair.at_hub)


@pytest.mark.slow
def test_a_connection_that_was_closed_is_told_from_one_that_is_silent(pair, proxy, monkeypatch):
    monkeypatch.setattr(agent_link, "_UNREACHABLE_AFTER", 1.5)
    link = pair.connect(port=proxy.port)
    pair.until(lambda: pair.seen(link, Accepted))
    assert pair.hub.closed == set()
    proxy.cut()
    pair.until(lambda: pair.hub.closed == {"agent-0"})
    proxy.accepting = True
    pair.until(lambda: pair.seen(link, Reachable))
    assert pair.hub.closed == set()
    pair.until(lambda: pair.hub.round_trip("agent-0") is not None)
    proxy.forwarding = False
    pair.until(lambda: pair.at_hub[-1] == Unreachable("agent-0"))
    # Only now, as libzmq does when its heartbeats get no answer.
    proxy.cut()
    ended = time.monotonic() + 2.5  # two questions, the second of which finds no connection
    pair.until(lambda: time.monotonic() > ended)
    assert pair.hub.closed == set()


def test_a_silent_agent_is_noticed_by_a_hub_that_polls_only_at_its_deadlines(pair, proxy, monkeypatch):
    monkeypatch.setattr(agent_link, "_UNREACHABLE_AFTER", 1.5)
    link = pair.connect(port=proxy.port)
    pair.until(lambda: pair.seen(link, Accepted))
    proxy.forwarding = False
    events: list = []
    while Unreachable("agent-0") not in events:
        assert pair.hub.closed == set(), "libzmq has ended the connection before the silence was noticed"
        wait_readable(pair.hub.filenos(), max(0.0, pair.hub.deadline() - time.monotonic()))
        events += [*pair.hub.receive(), *pair.hub.run_timers(time.monotonic())]


def test_an_agent_without_a_connection_has_no_deadline_in_the_past(pair, proxy, monkeypatch):
    monkeypatch.setattr(session, "_RESEND_AFTER", 0.1)
    link = pair.connect(port=proxy.port)
    pair.until(lambda: pair.seen(link, Accepted))
    proxy.forwarding = False
    link.send(0, [b"nobody acknowledges this"])
    proxy.cut()
    pair.until(lambda: pair.seen(link, Unreachable))
    ended = time.monotonic() + 0.5
    while (now := time.monotonic()) < ended:
        pair.poll()
        due = link.deadline()
        assert due is None or due > now, "it would poll without a pause"
    proxy.forwarding = proxy.accepting = True
    pair.until(lambda: b"nobody acknowledges this" in pair.texts(pair.at_hub))


def test_a_liveness_port_is_open_as_long_as_its_process_lives():
    port = LivenessPort(LOOPBACK)
    probe = RefusalProbe(LOOPBACK, port.port, 0.5)
    assert [probe.look(now) for now in (0.0, 0.5, 1.0)] == [0.0] * 3
    port.accept()
    port.close()
    assert [probe.look(now) for now in (1.5, 2.0, 2.5)] == [0.0, 0.5, 1.0]
    probe.reset()
    unavailable = LivenessPort("192.0.2.1")
    assert unavailable.port == 0
    unavailable.close()


def test_an_agent_that_was_given_up_is_refused_when_it_returns(pair, proxy):
    link = pair.connect(port=proxy.port)
    pair.until(lambda: pair.seen(link, Accepted))
    pair.hub.forget("agent-0")
    proxy.cut()
    pair.until(lambda: pair.seen(link, Unreachable))
    proxy.accepting = True
    pair.until(lambda: pair.seen(link, Refused))
    assert "given this host up" in pair.seen(link, Refused)[0].reason


def test_an_agent_that_is_given_up_while_it_is_connected_is_told(pair):
    link = pair.connect()
    pair.until(lambda: pair.seen(link, Accepted))
    pair.hub.forget("agent-0")
    pair.until(lambda: pair.seen(link, Refused))
    assert pair.seen(link, Refused)[0].reason == "the notebook has given this host up"


def test_a_hub_that_was_busy_takes_no_agent_for_silent(pair, monkeypatch):
    link = pair.connect()
    pair.until(lambda: pair.seen(link, Accepted))
    clock = time.monotonic
    monkeypatch.setattr(agent_link.time, "monotonic", lambda: clock() + 60.0)
    pair.poll()
    pair.poll()
    assert Unreachable("agent-0") not in pair.at_hub


def test_keys_are_in_no_repr_and_every_address_is_refused():
    assert KEYS.client_secret.decode() not in repr(KEYS)
    for address in ("*", "0.0.0.0", ""):
        with pytest.raises(InvalidArgument, match="expected the address of one interface"):
            AgentHub(address, 0, KEYS, SERVER_SECRET)
    with pytest.raises(StartError, match="cannot listen at"):
        AgentHub("192.0.2.1", 0, KEYS, SERVER_SECRET)
    assert source_address(LOOPBACK, 9) == LOOPBACK


def raw_member(context: zmq.Context, port: int) -> zmq.Socket:
    """Return a socket with the keys of a member, which sends whatever it likes."""
    raw_socket = context.socket(zmq.DEALER)
    raw_socket.curve_serverkey = KEYS.server_public
    raw_socket.curve_publickey, raw_socket.curve_secretkey = KEYS.client_public, KEYS.client_secret
    raw_socket.sndhwm = 0
    raw_socket.connect(f"tcp://{LOOPBACK}:{port}")
    return raw_socket


def test_a_port_at_which_nobody_listens_any_more_is_told_from_one_that_is_only_slow():
    with socket.create_server((LOOPBACK, 0)) as listener:
        probe = RefusalProbe(LOOPBACK, listener.getsockname()[1])
        assert [probe.look(now) for now in (0.0, 0.5, 1.5, 3.0)] == [0.0] * 4
    refused = [probe.look(now) for now in (10.0, 11.0, 12.0, 15.0)]
    assert refused[0] == 0.0 and 4.0 <= refused[-1] <= 6.0
    probe.reset()
    assert probe.look(16.0) == 0.0
    probe.reset()
    with socket.create_server((LOOPBACK, 0), backlog=0) as busy, contextlib.ExitStack() as queued:
        # Nobody accepts them. While its queue is full, further connections get no answer.
        for _ in range(4):
            client = queued.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(busy.getsockname())
        silent = RefusalProbe(LOOPBACK, busy.getsockname()[1])
        assert [silent.look(now) for now in (0.0, 1.0, 9.0)] == [0.0] * 3
        silent.reset()


@pytest.mark.parametrize("receiver", ["hub", "link"])
def test_messages_come_before_values_that_arrived_earlier(pair, receiver):
    link = pair.connect()
    pair.until(lambda: pair.seen(link, Accepted))

    def send(stream: int, frames: list[bytes]) -> None:
        if receiver == "link":
            pair.hub.send("agent-0", stream, frames)
        else:
            link.send(stream, frames)

    def receive() -> list[bytes]:
        end = link if receiver == "link" else pair.hub
        if not end.has_message():
            wait_readable(end.filenos(), 1.0)
        return pair.texts(end.receive())

    for _ in range(1000):  # until both arrive together
        send(1, [b"value"])
        send(0, [b"message"])
        batches = [receive()]
        while sum(map(len, batches)) < 2:
            batches.append(receive())
        if len(batches) == 1:
            assert batches == [[b"message", b"value"]]
            return
    raise AssertionError("they never arrived together")


@pytest.mark.parametrize("receiver", ["hub", "link"])
def test_values_come_in_batches_of_limited_size(pair, receiver, monkeypatch):
    monkeypatch.setattr(agent_link, "_MAX_RECEIVED_BYTES", 50_000)
    link = pair.connect()
    pair.until(lambda: pair.seen(link, Accepted))
    parts = [bytes([number]) * 10_000 for number in range(20)]
    batches: list[list[bytes]] = []
    for part in parts:
        pair.hub.send("agent-0", 1, [part]) if receiver == "link" else link.send(1, [part])
    while sum(map(len, batches)) < len(parts):
        pair.at_hub.clear()
        pair.at_link.clear()
        pair.poll()
        batches.append(pair.texts(pair.at_hub if receiver == "hub" else pair.seen(link, LinkMessage)))
    assert [part for batch in batches for part in batch] == parts
    assert max(map(len, batches)) <= 5
