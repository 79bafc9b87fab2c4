"""Link between the coordinator and the agents of other hosts: ZeroMQ over TCP, encrypted and authenticated by CURVE.

`AgentHub` is the coordinator's end, a ROUTER that is bound to one address. `AgentLink` is an agent's end, a DEALER.
Both have a `Session` per agent, which makes up for what a broken connection loses.

Authentication. The keys are made per cluster (`make_keys`). An agent proves with the client's key pair that it has read
the connection file, and the hub proves with the server's key that it has written it. libzmq asks the hub about every
client key (ZAP, https://rfc.zeromq.org/spec/27/); all are refused and counted but that one, and the keys that single
agents have made for themselves (`AgentHub.allow`). Of a connection that has not authenticated itself nothing else
arrives here.

First packets. On every connection the agent sends `RBAGENT1`, its id, whether it was accepted before, and its
description. These frames never change, so that any version can refuse any other one. The hub answers with `RBACCEPT`,
or `RBREFUSE` and a reason. After that both send packets of the session, which continues on a new connection where the
old one has ended.

Loss of a connection. An agent judges by the connection: libzmq's heartbeats, which its own thread sends and answers, so
that a coordinator that is busy for a minute is not taken for dead. It connects again with a new socket, after 0.1 to 2
seconds. The hub judges by messages: an agent is never busy for long, and answers a `RBPING` at once, with the time of
its clocks.

End of a process. The system closes the connections of a process that was killed, which a broken network does not. But a
proxy or a firewall may close them too, so that this alone proves nothing. An agent therefore listens at a port of its
own (`LivenessPort`), and the other end at the hub's: where the host answers that nobody listens there any more, the
process has ended (`RefusalProbe`).

The descriptors to poll are edge-triggered (https://libzmq.readthedocs.io/en/latest/zmq_getsockopt.html, ZMQ_FD): call
`has_message` before a wait, and `receive` after it. Any thread may send; one thread polls.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import zmq
from zmq.utils import z85

from rankbook.errors import InvalidArgument, ProtocolError, StartError
from rankbook.transport.framed_socket import wait_readable
from rankbook.transport.session import Bytes, Session

_HELLO, _ACCEPT, _REFUSE, _PING, _PONG = b"RBAGENT1", b"RBACCEPT", b"RBREFUSE", b"RBPING", b"RBPONG"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"rankbook"
_MAX_FRAME = 2 << 20
_MAX_HELLO = 64 << 10
_MAX_BAD_PACKETS = 10
_MAX_BAD_CONNECTIONS = 1000
_MAX_RECEIVED = 500
_MAX_RECEIVED_BYTES = 2 << 20
"""Packets and bytes that one call of `receive` handles, so that values do not keep the caller from its other work."""
_IO_THREADS = 2
"""Threads of libzmq at the coordinator's end. libzmq gives a new connection to the one with the fewest connections.

Handshakes of strangers then delay the messages of some agents only, and the traffic of several hosts is encrypted on
two cores.
"""
_PING_INTERVAL = 1.0
_PROBE_INTERVAL = 1.0
_UNREACHABLE_AFTER = 3.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_OFFSETS = 16
"""Round trips of which the shortest tells the offset of an agent's clocks."""
_CLOCKS = struct.Struct("<dd")
# As plain numbers: to combine zmq's flags takes as long as to send a small frame.
_MORE, _LAST, _READABLE = int(zmq.SNDMORE | zmq.NOBLOCK), int(zmq.NOBLOCK), int(zmq.POLLIN)
_WITHOUT_COPY = 64 << 10
"""Bytes from which a frame is handed to libzmq without a copy; below, copying is faster."""


class SecretKey(bytes):
    """A secret key, which no `repr` shows: tracebacks can include the local variables of their frames."""

    def __repr__(self) -> str:
        return "SecretKey(...)"

    __str__ = __repr__


@dataclass(frozen=True)
class LinkKeys:
    """Keys of an agent, in Z85 (https://rfc.zeromq.org/spec/32/): the server's public key and the client's pair."""

    server_public: bytes
    client_public: bytes
    client_secret: SecretKey = field(repr=False)


def make_keys() -> tuple[LinkKeys, SecretKey]:
    """Make the keys of a new cluster: those of its agents, and the server's secret key."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return LinkKeys(server_public, client_public, SecretKey(client_secret)), SecretKey(server_secret)


def make_agent_keys(server_public: bytes) -> LinkKeys:
    """Make a key pair for one agent, which is refused until `AgentHub.allow` has its public key."""
    client_public, client_secret = zmq.curve_keypair()
    return LinkKeys(server_public, client_public, SecretKey(client_secret))


# Events -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """A new agent, to be answered with `accept` or `refuse`. `hello` is its description."""

    agent: str
    hello: bytes


@dataclass(frozen=True)
class LinkMessage:
    """A message. `agent` is empty at the agent's end."""

    agent: str
    stream: int
    frames: Sequence[Bytes] = field(repr=False)


@dataclass(frozen=True)
class Unreachable:
    """The peer is not reached for some seconds, or the connection has broken."""

    agent: str = ""


@dataclass(frozen=True)
class Reachable:
    """The peer is reached again. Nothing was lost."""

    agent: str = ""


@dataclass(frozen=True)
class Accepted:
    """The coordinator has accepted this agent."""


@dataclass(frozen=True)
class Refused:
    """The coordinator has refused this agent."""

    reason: str


HubEvent = Hello | LinkMessage | Unreachable | Reachable
LinkEvent = Accepted | Refused | LinkMessage | Unreachable | Reachable


# The coordinator's end ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClockOffset:
    """Seconds by which the clocks of an agent's host are ahead of this host's."""

    wall: float = 0.0
    monotonic: float = 0.0


@dataclass
class _Peer:
    """An agent, as the hub knows it. `connection` is libzmq's id of its newest connection."""

    connection: bytes
    accepted: bool = False
    reachable: bool = True
    session: Session = field(default_factory=Session)
    last_received: float = 0.0
    next_ping: float = 0.0
    round_trip: float | None = None
    # The last round trips, with the offset that each of them tells.
    offsets: deque[tuple[float, ClockOffset]] = field(default_factory=lambda: deque(maxlen=_OFFSETS))


class AgentHub:
    """Listen for agents at `address` (never all interfaces) and `port` (0: a free one).

    Raises `StartError` if it cannot listen there.
    """

    def __init__(self, address: str, port: int, keys: LinkKeys, server_secret: SecretKey) -> None:
        if address in ("", "*", "0.0.0.0", "::"):  # noqa: S104 - refused
            raise InvalidArgument(f"invalid address {address!r}: expected the address of one interface")
        self.address = address
        self.refusals = 0
        self.dropped = 0
        # Agents whose end of the connection was closed just after a message, and that have not connected again. After
        # some seconds without a message this end may have closed it, which says nothing about the agent.
        self.closed: set[str] = set()
        self._allowed = {z85.decode(keys.client_public)}
        self._lock = threading.RLock()
        self._peers: dict[str, _Peer] = {}
        self._agents: dict[bytes, str] = {}
        self._bad_packets: dict[bytes, int] = {}
        self._forgotten: set[str] = set()
        self._last_poll = time.monotonic()
        # No timer of a peer is due before. It may be early: `run_timers` is the only one to look at all peers.
        self._timers_due = math.inf
        self._context = zmq.Context(_IO_THREADS)
        # Before the other socket, which asks it about its first connection.
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP_ADDRESS)
        self._socket = self._context.socket(zmq.ROUTER)
        _set_options(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.BACKLOG, 1024)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, server_secret)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.server_public)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        try:
            self._socket.bind(f"tcp://{address}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise StartError(f"cannot listen at {address}:{port}: {error}; choose another port with --port") from error
        self.port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2].rstrip("\0"))

    def filenos(self) -> list[int]:
        """Return the descriptors to poll."""
        return [int(self._socket.getsockopt(zmq.FD)), int(self._zap.getsockopt(zmq.FD))]

    def has_message(self) -> bool:
        """Return True if `receive` has something to do now."""
        with self._lock:
            return _is_readable(self._socket) or _is_readable(self._zap)

    def receive(self) -> list[HubEvent]:
        """Return what has happened since the last call, messages before values.

        Raises nothing, whatever a peer has sent.
        """
        events: list[HubEvent] = []
        with self._lock:
            now = time.monotonic()
            # While nobody polled, nothing was received: that is no silence of the agents. A notebook without a cell
            # polls only when the next ping is due, which is a little later than the interval.
            if now - self._last_poll > 2 * _PING_INTERVAL:
                for peer in self._peers.values():
                    peer.last_received += now - self._last_poll
            self._last_poll = now
            senders: set[bytes] = set()
            # No more than some packets: a peer that sends without a pause must not keep the caller here.
            for _ in range(_MAX_RECEIVED):
                if not _is_readable(self._zap):
                    break
                self._authenticate()
            size = count = 0
            while count < _MAX_RECEIVED and size < _MAX_RECEIVED_BYTES and _is_readable(self._socket):
                connection, *packet = _receive_frames(self._socket)
                count += 1
                size += sum(map(len, packet))
                senders.add(connection.bytes)
                if not self._take(connection.bytes, [frame.buffer for frame in packet], now, events):
                    self._close_connection(connection)
            # Others have nothing to send before their timers.
            for sender in senders:
                if sender in self._agents:
                    self._flush(self._peers[self._agents[sender]], now)
        return sorted(events, key=_is_value)

    def accept(self, agent: str) -> None:
        """Accept a new agent."""
        with self._lock:
            peer = self._peers[agent]
            peer.accepted = True
            self._send_frames(peer, [_ACCEPT])

    def refuse(self, agent: str, reason: str) -> None:
        """Refuse a new agent."""
        with self._lock:
            self._send_frames(self._peers[agent], [_REFUSE, reason.encode(errors="replace")])
            self._drop(agent)

    def forget(self, agent: str) -> None:
        """Give an agent up. It is told so if it is still connected, and refused when it returns."""
        with self._lock:
            self._forgotten.add(agent)
            if agent in self._peers:
                self._send_frames(self._peers[agent], [_REFUSE, b"the notebook has given this host up"])
            self._drop(agent)

    def send(self, agent: str, stream: int, frames: Sequence[Bytes]) -> None:
        """Send a message to an accepted agent, also while it is not reached. Any thread."""
        with self._lock:
            peer = self._peers.get(agent)
            if peer is not None:
                peer.session.send(stream, frames)
                self._flush(peer, time.monotonic())

    def pending(self, agent: str, stream: int) -> int:
        """Return the bytes that are queued for an agent or not acknowledged."""
        with self._lock:
            peer = self._peers.get(agent)
            return 0 if peer is None else peer.session.pending(stream)

    def round_trip(self, agent: str) -> float | None:
        """Return the smoothed round trip to an agent in seconds, or None before the first one."""
        peer = self._peers.get(agent)
        return None if peer is None else peer.round_trip

    def clock_offset(self, agent: str) -> ClockOffset:
        """Return the offset of the clocks of an agent's host, zero before the first round trip.

        As in NTP (RFC 5905), of the last round trips the shortest one counts. The error is at most half of it.
        """
        with self._lock:
            peer = self._peers.get(agent)
            return ClockOffset() if peer is None or not peer.offsets else min(peer.offsets, key=itemgetter(0))[1]

    def repeated(self, agent: str) -> int:
        """Return how many packets of an agent were dropped because they were repeated or not the next ones."""
        peer = self._peers.get(agent)
        return 0 if peer is None else peer.session.repeated + peer.session.out_of_order

    def silence(self, agent: str) -> float:
        """Return the seconds since the last packet of an agent; 0.0 for an unknown one."""
        peer = self._peers.get(agent)
        return 0.0 if peer is None else time.monotonic() - peer.last_received

    def deadline(self) -> float | None:
        """Return the time of the next timer. Before it, `run_timers` does nothing."""
        due = self._timers_due
        return None if due == math.inf else due

    def run_timers(self, now: float) -> list[HubEvent]:
        """Ask silent agents for a sign of life, and return those that have given none for too long."""
        events: list[HubEvent] = []
        with self._lock:
            if now < self._timers_due:
                return []
            self._timers_due = math.inf
            for agent, peer in self._peers.items():
                if now >= peer.next_ping:
                    peer.next_ping = now + _PING_INTERVAL
                    self._send_frames(peer, [_PING, repr(now).encode()])
                self._wake_by(peer.next_ping)
                if peer.reachable and now - peer.last_received > _UNREACHABLE_AFTER:
                    peer.reachable = False
                    events.append(Unreachable(agent))
                self._flush(peer, now)
        return events

    def close(self, linger: float = 0.5) -> None:
        """Close the link. Messages that were sent get `linger` seconds to leave."""
        with self._lock:
            self._socket.close(linger=int(1000 * linger))
            self._zap.close(linger=0)
            self._peers.clear()
        self._context.term()

    def allow(self, client_public: str) -> None:
        """Accept the agent that has made this key (`make_agent_keys`). Any thread. Raises `InvalidArgument`."""
        try:
            key = z85.decode(client_public)
        except (ValueError, LookupError, struct.error):  # another length, another character, a number that is too large
            key = b""
        if len(key) != 32:
            raise InvalidArgument(f"invalid public key of an agent: expected 40 characters, got {client_public!r:.80}")
        with self._lock:
            self._allowed.add(key)

    def _authenticate(self) -> None:
        request = self._zap.recv_multipart(zmq.NOBLOCK)
        # Version, request id, domain, address, identity, mechanism, and for CURVE the client's key.
        allowed = len(request) == 7 and request[5] == b"CURVE" and request[6] in self._allowed
        self.refusals += not allowed
        status = [b"200", b"OK"] if allowed else [b"400", b"unknown key"]
        self._zap.send_multipart([b"1.0", request[1] if len(request) > 1 else b"", *status, b"", b""])

    def _take(self, connection: bytes, packet: Sequence[memoryview], now: float, events: list[HubEvent]) -> bool:
        """Handle a packet. Return False if too many of its connection were invalid."""
        if self._bad_packets.get(connection, 0) >= _MAX_BAD_PACKETS:
            self.dropped += 1
            return False
        try:
            if packet and packet[0] == _HELLO:
                self._greet(connection, packet, now, events)
            else:
                agent = self._agents[connection]
                self._receive(agent, self._peers[agent], packet, now, events)
        # A KeyError for a connection that has not said who it is, or was given up.
        except (ProtocolError, UnicodeDecodeError, ValueError, LookupError):
            self.dropped += 1
            count = self._bad_packets.pop(connection, 0) + 1
            self._bad_packets[connection] = count  # the newest one last
            if len(self._bad_packets) > _MAX_BAD_CONNECTIONS:
                del self._bad_packets[next(iter(self._bad_packets))]
            return count < _MAX_BAD_PACKETS
        return True

    def _close_connection(self, packet: zmq.Frame) -> None:
        """Close the connection that a frame came over. An agent connects again, and its session loses nothing.

        ZeroMQ has no call for this, so the TCP connection below is shut down. Its descriptor may have been closed and
        used again meanwhile, so it must be a connection of this hub's port.
        """
        # The connection may have ended already.
        with (
            contextlib.suppress(OSError, zmq.ZMQError),
            socket.socket(fileno=os.dup(int(packet.get(zmq.SRCFD)))) as connection,
        ):
            if connection.getsockname()[:2] == (self.address, self.port):
                connection.shutdown(socket.SHUT_RDWR)

    def _greet(self, connection: bytes, packet: Sequence[memoryview], now: float, events: list[HubEvent]) -> None:
        if len(packet) != 4 or sum(map(len, packet)) > _MAX_HELLO:
            raise ProtocolError("invalid first packet of an agent")
        agent, resumes, hello = bytes(packet[1]).decode("ascii"), bytes(packet[2]) == b"1", bytes(packet[3])
        known = self._peers.get(agent)
        # An agent that resumes has a session with unacknowledged packets. It can only continue with the hub that has
        # the other end of it. After the hub has given the host up, the ranks there count as dead and may have been
        # replaced, so that the agent must not come back with them.
        if agent in self._forgotten or (known is None and resumes):
            refused = _Peer(connection)
            self._send_frames(refused, [_REFUSE, b"the notebook has given this host up while it was not reached"])
            return
        self._agents[connection] = agent
        if known is None:
            self._peers[agent] = _Peer(connection, last_received=now, next_ping=now + _PING_INTERVAL)
            self._wake_by(now + _PING_INTERVAL)
            events.append(Hello(agent, hello))
            return
        # The same agent over a new connection. What came over the old one is not read any more.
        self._agents.pop(known.connection, None)
        self._agents[connection] = agent
        # The session stays and only the connection is exchanged: numbers go on, and both ends send again what the other
        # one has not acknowledged. Neither end can know how much of it the old connection has delivered.
        known.connection = connection
        known.session.reconnected(now)
        if known.accepted:
            self._send_frames(known, [_ACCEPT])
        self._alive(agent, known, now, events)

    def _receive(
        self, agent: str, peer: _Peer, packet: Sequence[memoryview], now: float, events: list[HubEvent]
    ) -> None:
        if packet[0] == _PONG and len(packet) == 3:
            seconds = now - float(bytes(packet[1]))
            if not 0 <= seconds < 3600 or len(packet[2]) != _CLOCKS.size:
                raise ProtocolError("invalid answer to a ping")
            wall, monotonic = _CLOCKS.unpack(packet[2])
            if not (math.isfinite(wall) and math.isfinite(monotonic)):
                raise ProtocolError("invalid clocks in an answer to a ping")
            # The agent has read its clocks in the middle between the question and the answer, about.
            half = seconds / 2
            peer.offsets.append((seconds, ClockOffset(wall - (time.time() - half), monotonic - (now - half))))
            peer.round_trip = seconds if peer.round_trip is None else 0.8 * peer.round_trip + 0.2 * seconds
        else:
            if not peer.accepted:
                raise ProtocolError("a packet of an agent that was not accepted")
            events += [LinkMessage(agent, stream, frames) for stream, frames in peer.session.receive(packet, now)]
        self._alive(agent, peer, now, events)

    def _alive(self, agent: str, peer: _Peer, now: float, events: list[HubEvent]) -> None:
        peer.last_received = now
        self.closed.discard(agent)
        if not peer.reachable:
            peer.reachable = True
            events.append(Reachable(agent))

    def _drop(self, agent: str) -> None:
        self.closed.discard(agent)
        peer = self._peers.pop(agent, None)
        if peer is not None:
            self._agents.pop(peer.connection, None)

    def _flush(self, peer: _Peer, now: float) -> None:
        if peer.accepted:
            for packet in peer.session.packets(now):
                self._send_frames(peer, packet)
        if (due := peer.session.deadline()) is not None:
            self._wake_by(due)

    def _wake_by(self, due: float) -> None:
        self._timers_due = min(self._timers_due, due)

    def _send_frames(self, peer: _Peer, frames: Sequence[Bytes]) -> None:
        # A connection that has ended is not known any more. The session sends again over the next one.
        try:
            self._socket.send(peer.connection, _MORE)
            _send_frames(self._socket, frames)
        except zmq.ZMQError as error:
            agent = self._agents.get(peer.connection)
            recent = time.monotonic() - peer.last_received < _UNREACHABLE_AFTER
            if agent is not None and error.errno == errno.EHOSTUNREACH and recent:
                self.closed.add(agent)


# An agent's end -----------------------------------------------------------------------------------------------------


class AgentLink:
    """Connect to the coordinator at `address` and `port` as the agent `agent_id`, with the description `hello`."""

    def __init__(self, address: str, port: int, keys: LinkKeys, agent_id: str, hello: bytes) -> None:
        self._endpoint = f"tcp://{address}:{port}"
        self._keys = keys
        self._hello = [agent_id.encode("ascii"), hello]
        self._context = zmq.Context()
        self._session = Session()
        self._accepted = False
        self._connected = False
        self._pause = _FIRST_PAUSE
        self._reconnect_at: float | None = None
        self._connect()

    def filenos(self) -> list[int]:
        """Return the descriptors to poll. They change with every connection."""
        if self._reconnect_at is not None:
            return []
        return [int(self._socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))]

    def has_message(self) -> bool:
        """Return True if `receive` has something to do now."""
        return self._reconnect_at is None and (_is_readable(self._socket) or _is_readable(self._monitor))

    def receive(self) -> list[LinkEvent]:
        """Return what has happened since the last call, messages before values."""
        events: list[LinkEvent] = []
        now = time.monotonic()
        size = 0
        while size < _MAX_RECEIVED_BYTES and self._reconnect_at is None and _is_readable(self._socket):
            packet = [frame.buffer for frame in _receive_frames(self._socket)]
            size += sum(map(len, packet))
            self._receive(packet, now, events)
        while self._reconnect_at is None and _is_readable(self._monitor):
            event, _ = _MONITOR_EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            if event in _BROKEN:
                self._disconnect(now)
                if self._connected:
                    self._connected = False
                    events.append(Unreachable())
        self._flush(now)
        return sorted(events, key=_is_value)

    def send(self, stream: int, frames: Sequence[Bytes]) -> None:
        """Send a message, also while the coordinator is not reached."""
        self._session.send(stream, frames)
        self._flush(time.monotonic())

    def pending(self, stream: int) -> int:
        """Return the bytes that are queued or not acknowledged."""
        return self._session.pending(stream)

    def deadline(self) -> float | None:
        """Return the time of the next timer."""
        # Without a connection the session cannot send what is due. It starts anew with the next one.
        session_due = self._session.deadline() if self._connected else None
        times = [due for due in (self._reconnect_at, session_due) if due is not None]
        return min(times, default=None)

    def run_timers(self, now: float) -> None:
        """Connect again when it is time, and send what is due."""
        if self._reconnect_at is not None and now >= self._reconnect_at:
            self._connect()
        self._flush(now)

    def close(self, linger: float = 0.5) -> None:
        """Close the link. What was sent gets up to `linger` seconds to be acknowledged."""
        deadline = time.monotonic() + linger
        while self._connected and self._accepted and (remaining := deadline - time.monotonic()) > 0:
            if not self.pending(0) and not self.pending(1):
                break
            if not self.has_message():
                wait_readable(self.filenos(), min(0.05, remaining))
            self.receive()
        if self._reconnect_at is None:
            self._close_socket(linger)
        self._context.term()

    def _connect(self) -> None:
        self._reconnect_at = None
        self._socket = self._context.socket(zmq.DEALER)
        _set_options(self._socket)
        # libzmq does not connect again by itself: it would do so silently, and packets would be lost between two
        # connections without a `reconnected` of the session. A broken connection ends this socket (`_disconnect`).
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server_public)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.client_public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.client_secret)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, 5_000)
        self._monitor = self._socket.get_monitor_socket(sum(_BROKEN))
        self._socket.connect(self._endpoint)
        agent_id, hello = self._hello
        try:
            _send_frames(self._socket, [_HELLO, agent_id, b"1" if self._accepted else b"0", hello])
        except zmq.Again:  # the connection was refused already
            self._disconnect(time.monotonic())

    def _disconnect(self, now: float) -> None:
        self._close_socket(0.0)
        self._reconnect_at = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _close_socket(self, linger: float) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(1000 * linger))

    def _receive(self, packet: list[memoryview], now: float, events: list[LinkEvent]) -> None:
        kind = packet[0]
        if kind == _PING:
            self._send([_PONG, *packet[1:2], _CLOCKS.pack(time.time(), time.monotonic())])
        elif kind == _ACCEPT:
            self._pause = _FIRST_PAUSE
            first, self._accepted, self._connected = not self._accepted, True, True
            # At the first connection nothing was sent before. Afterwards, packets may have been lost with the
            # connection.
            if not first:
                self._session.reconnected(now)
            events.append(Accepted() if first else Reachable())
        elif kind == _REFUSE:
            reason = bytes(packet[1]).decode(errors="replace") if len(packet) > 1 else "no reason given"
            events.append(Refused(reason))
        else:
            # The peer has proved that it is the coordinator: a malformed packet is a defect, which is not hidden.
            events += [LinkMessage("", stream, frames) for stream, frames in self._session.receive(packet, now)]

    def _flush(self, now: float) -> None:
        if self._connected:
            for packet in self._session.packets(now):
                self._send(packet)

    def _send(self, frames: Sequence[Bytes]) -> None:
        # zmq.Again: the connection has just ended, which the monitor tells next. The session sends again over the next
        # one.
        with contextlib.suppress(zmq.Again):
            _send_frames(self._socket, frames)


class RefusalProbe:
    """Tell for how long the host at `address` has refused connections to `port`: no process listens there any more.

    A broken network, a busy process and a host that is switched off do not answer at all. ZeroMQ does not tell the one
    from the others, so this connects a plain socket every `interval` seconds, without waiting for it.
    """

    def __init__(self, address: str, port: int, interval: float = _PROBE_INTERVAL) -> None:
        self._endpoint = (address, port)
        self._interval = interval
        self._socket: socket.socket | None = None
        self._error = 0
        self._next = 0.0
        self._since: float | None = None

    def look(self, now: float) -> float:
        """Return for how many seconds all connections were refused. Call it repeatedly."""
        if now >= self._next:
            self._next = now + self._interval
            self._finish(now)
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            self._error = self._socket.connect_ex(self._endpoint)
        return 0.0 if self._since is None else now - self._since

    def reset(self) -> None:
        """Forget what was seen, because the host is reached."""
        self._since, self._next = None, 0.0
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _finish(self, now: float) -> None:
        """Take over the result of the last connection, which was begun an interval ago."""
        if self._socket is None:
            return
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or self._error
        self._socket.close()
        if error != errno.ECONNREFUSED:
            self._since = None
        elif self._since is None:
            self._since = now - self._interval


class LivenessPort:
    """Listen at a free port of `address` for as long as this process lives, for the `RefusalProbe` of the other end.

    Nothing is read from its connections. `port` is 0 if the process may not listen there.
    """

    def __init__(self, address: str) -> None:
        self.port = 0
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        with contextlib.suppress(OSError):
            self._listener.bind((address, 0))
            self._listener.listen(16)
            self.port = self._listener.getsockname()[1]

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._listener.fileno()

    def accept(self) -> None:
        """Accept the connections that wait, and close them."""
        # BlockingIOError when none waits any more, ConnectionError for one that has ended.
        with contextlib.suppress(OSError):
            while True:
                self._listener.accept()[0].close()

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()


_MONITOR_EVENT = struct.Struct("=Hi")  # zmq_socket_monitor(3): the event and its value
_BROKEN = (
    zmq.EVENT_DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_CLOSED,
)
"""Events of libzmq's monitor after which a connection does not work any more."""


def source_address(address: str, port: int) -> str:
    """Return the address of this host from which `address` is reached. Raises `StartError` if there is no route."""
    # Connecting a UDP socket sends nothing: the system only chooses the route and, with it, the address.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise StartError(f"cannot reach {address}: {error.strerror or error}") from error
        return str(probe.getsockname()[0])


def _set_options(link_socket: zmq.Socket[bytes]) -> None:
    link_socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME)
    link_socket.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
    link_socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    link_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 8_000)
    link_socket.setsockopt(zmq.HEARTBEAT_TTL, 8_000)
    link_socket.setsockopt(zmq.TCP_MAXRT, 10_000)
    # The sessions bound what is on the way; a full queue would drop packets.
    link_socket.setsockopt(zmq.SNDHWM, 0)
    link_socket.setsockopt(zmq.LINGER, 0)


def _is_value(event: HubEvent | LinkEvent) -> bool:
    # To write a part of a value takes as long as to handle many messages.
    return isinstance(event, LinkMessage) and event.stream > 0


def _is_readable(link_socket: zmq.Socket[bytes]) -> bool:
    return bool(int(link_socket.getsockopt(zmq.EVENTS)) & _READABLE)


def _receive_frames(link_socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    # As `recv_multipart`, which asks the socket after every frame whether there is another one.
    frames = [link_socket.recv(_LAST, copy=False)]
    while frames[-1].more:
        frames.append(link_socket.recv(_LAST, copy=False))
    return frames


def _send_frames(link_socket: zmq.Socket[bytes], frames: Sequence[Bytes]) -> None:
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        link_socket.send(frame, _MORE if number < last else _LAST, copy=len(frame) < _WITHOUT_COPY)
