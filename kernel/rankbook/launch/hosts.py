"""Ranks on other hosts: the coordinator's side of the agents.

`Hosts` keeps the table of the hosts and exchanges messages with their agents. `HostsLink` and `HostsLauncher` combine
it with the link and the launcher of this host to one `HubLink` and one `Launcher` for all ranks, so that the driver
does not know on which host a rank runs. Which rank runs where is decided by `placement` and kept in `Hosts.seats`.

There is no thread of its own. The driver thread polls the descriptors of the agents' link together with its other ones
(`HostsLink.wait`), and `Hosts.poll` handles what has arrived: messages of ranks go into a queue from which
`HostsLink.receive` takes them, reports of processes into one from which `HostsLauncher.read` does. Before there is a
driver, the thread that starts the cluster polls.

Large values. A value lies in a segment of shared memory, of which a message has only the name. The segments that a
message to another host names are sent there, once per host and in parts (`transport.shared_memory`), and the agent
delivers the message when they are complete. A segment that comes from another host is written into this host's folder
under the same name.

The state for a healed rank stays on the donor's host if all of its readers run there (`ExportState.stays`).

Loss of a host. A host that cannot be reached keeps its ranks for `lost_after` seconds. After that, or as soon as the
end of its agent is known, every rank of it counts as exited. The agent reports its end itself; if it was killed, the
engine does. Without an engine that knows at once (`probe_agents`), its closed connection and its closed port show it.
An agent that returns later is refused; it ends its ranks and offers its slots again as a new host.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankbook.engines.engine import Engine, check_engine_name
from rankbook.errors import InvalidArgument, ProtocolError, StartError, TransferError
from rankbook.formatting import format_bytes, plural
from rankbook.launch.code_sync import ModuleFolder, SentModules
from rankbook.launch.connection import Connection, choose_address, write_connection
from rankbook.launch.local import LocalLauncher
from rankbook.launch.placement import HOME, HostSlots, RankSeat, describe_no_device, free_seat, number_nodes
from rankbook.process_identity import ProcessInfo, package_version
from rankbook.protocol import PROTOCOL_VERSION, Message
from rankbook.protocol.forkserver import (
    MESSAGES,
    VALUES,
    CloseHost,
    DropSegments,
    ForkRank,
    FromRanks,
    HostDescription,
    HostFailed,
    HostLeaving,
    HostNote,
    HostReady,
    KillRank,
    ModuleFiles,
    ModuleRequest,
    ProcessState,
    RankExited,
    RankForked,
    SegmentFailed,
    SegmentPart,
    SegmentRefused,
    StoreReply,
    StoreRequest,
    ToRanks,
    decode_description,
    decode_from_agent,
)
from rankbook.protocol.messages import Done, ExportState, FromForkserver, FromRank, Task, encode, message_segments
from rankbook.transport import Frames, Sender, agent_link, read_from_rank
from rankbook.transport.agent_link import AgentHub, ClockOffset, RefusalProbe, make_keys
from rankbook.transport.framed_socket import wait_readable
from rankbook.transport.shared_memory import AHEAD, MOST_IN_FRAMES, Bytes, SegmentReceiver, SegmentSender, SegmentStore
from rankbook.transport.store_keys import KeyFolder, perform
from rankbook.transport.zmq_link import ZmqHub

LOST_AFTER = 60.0
"""Default seconds after which an unreachable host is lost."""
_MAX_BAD_MESSAGES = 10
_BAD_MESSAGES_SECONDS = 60.0
"""Seconds in which `_MAX_BAD_MESSAGES` messages that cannot be handled cost a host."""
_CLOSE_SECONDS = 2.0
_PROBE_INTERVAL = 0.5
_PROBE_TEST = 3 * _PROBE_INTERVAL
"""Seconds after the start of an agent in which a refused connection shows that its port says nothing."""
# Most values cross in less; a line about them would only flicker.
_PROGRESS_AFTER = 1.0
_STATE_AGE = 5.0
"""Seconds for which the last report of a process's state is used."""
_MAX_REASON = 2000
"""Characters of the reason with which an agent ends."""


@dataclass
class Host:
    """One agent's host. `slots` is None until it can start ranks; `lost` says why it cannot any more."""

    id: str
    description: HostDescription
    name: str
    slots: HostSlots | None = None
    port: int = 0
    unreachable_since: float | None = None
    lost: str = ""
    bad_messages: int = 0
    bad_times: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_BAD_MESSAGES), repr=False)
    """Times of the last messages that could not be handled."""
    segments: set[str] = field(default_factory=set)
    """Segments of the notebook's host that this host has or is getting."""
    code: SentModules = field(default_factory=SentModules, repr=False)
    probe: RefusalProbe | None = None
    sender: SegmentSender = field(kw_only=True, repr=False)
    receiver: SegmentReceiver = field(kw_only=True, repr=False)

    def end_probe(self, *, for_good: bool) -> None:
        """Close the probe's connection, and give the probe up if it says nothing."""
        if self.probe is not None:
            self.probe.reset()
        if for_good:
            self.probe = None


@dataclass(frozen=True)
class HostStatus:
    """Status of one host, for `%distributed status`.

    `round_trip` is in seconds, `unreachable` the seconds since the last message of an unreachable host. `dropped`
    counts messages that could not be handled, and `repeated` packets that had arrived already, as some do after a
    broken connection, or that came out of order.
    """

    name: str
    slots: int
    ranks: tuple[int, ...]
    round_trip: float | None = None
    dropped: int = 0
    repeated: int = 0
    unreachable: float | None = None
    lost: str = ""


@dataclass
class _Process:
    """The newest process of a rank on another host."""

    host: str
    incarnation: int
    pid: int = 0
    state: tuple[float, ProcessInfo | None] | None = None


class Hosts:
    """Exchange messages with the agents of other hosts over `hub`.

    `segments` is the notebook's shared memory, `keys` the store of the ranks. `report` shows a line to the user.
    With `probe_agents`, the end of an agent that was killed is looked for, because no engine reports it.
    """

    def __init__(
        self,
        hub: AgentHub,
        segments: MirroredSegments,
        keys: KeyFolder,
        *,
        lost_after: float,
        report: Callable[[str], None],
    ) -> None:
        self.hub = hub
        self.seats: dict[int, RankSeat] = {}
        self.messages: deque[tuple[Sender, FromRank | ProtocolError, list[memoryview]]] = deque()
        self.reports: deque[FromForkserver] = deque()
        self.report = report
        self.segments = segments
        segments.drop = self.drop_segment
        self._keys = keys
        self._lost_after = lost_after
        self.modules: ModuleFolder | None = None
        self.device: str | None = None
        """Type of device that all ranks are to have; None for CUDA devices where there are some."""
        self.own_devices = False
        """Whether every rank has a CUDA device of its own, as NCCL needs."""
        self.lacks_device = ""
        """Why a host was refused that has no such device."""
        self.probe_agents = False
        self._hosts: dict[str, Host] = {}
        # New hosts, with the end of the time in which their probe is tested.
        self._tested: dict[str, float] = {}
        self._processes: dict[int, _Process] = {}
        # Messages that wait for segments of their host.
        self._held: list[tuple[Host, tuple[str, ...], Sender, FromRank, list[memoryview]]] = []
        self._abandoned: set[int] = set()
        # Reentrant: a poll may send. Any thread sends, one polls.
        self._lock = threading.RLock()

    # The table of hosts

    @property
    def slots(self) -> list[HostSlots]:
        """Return the slots of the hosts that can start ranks."""
        return [host.slots for host in list(self._hosts.values()) if host.slots is not None and not host.lost]

    def name_of(self, rank: int) -> str:
        """Return the name of the host of a rank; empty for the notebook's host."""
        seat = self.seats.get(rank)
        host = None if seat is None else self._hosts.get(seat.host)
        return "" if host is None else host.name

    def address_of(self, rank: int) -> str:
        """Return the address of the host of a rank, and for the notebook's host that of the link."""
        host = self._hosts.get(self.seats[rank].host)
        return self.hub.address if host is None else host.description.address

    def port_of(self, rank: int, home: int) -> int:
        """Return a TCP port that was free on the host of a rank when it started; `home` on the notebook's host."""
        host = self._hosts.get(self.seats[rank].host)
        return home if host is None else host.port

    def on_one_agent(self, ranks: Iterable[int]) -> bool:
        """Return True if all `ranks` run on the same host, and this is not the notebook's."""
        hosts = {self.seats[rank].host for rank in ranks}
        return len(hosts) == 1 and HOME not in hosts

    def ranks_near(self, ranks: Collection[int]) -> set[int]:
        """Return all ranks that have a host in common with one of `ranks`."""
        hosts = {self.seats[rank].host for rank in ranks}
        return {rank for rank, seat in self.seats.items() if seat.host in hosts}

    def status(self) -> list[HostStatus]:
        """Return the status of every host that was accepted, except lost ones whose ranks have all moved."""
        statuses = []
        now = time.monotonic()
        ranks_of: dict[str, list[int]] = {}
        for rank, seat in list(self.seats.items()):
            ranks_of.setdefault(seat.host, []).append(rank)
        for host in list(self._hosts.values()):
            ranks = tuple(ranks_of.get(host.id, ()))
            if host.lost and not ranks:
                continue
            since = host.unreachable_since
            statuses.append(
                HostStatus(
                    name=host.name,
                    slots=0 if host.slots is None else host.slots.slots,
                    ranks=ranks,
                    round_trip=self.hub.round_trip(host.id),
                    dropped=host.bad_messages,
                    repeated=self.hub.repeated(host.id),
                    unreachable=None if since is None else now - since,
                    lost=host.lost,
                )
            )
        return sorted(statuses, key=lambda host: (host.ranks[:1] or (1 << 30,), host.name))

    def clock_offset(self, rank: int) -> ClockOffset:
        """Return the seconds by which the clocks of a rank's host are ahead of this host's."""
        host = self.seats[rank].host
        return ClockOffset() if host == HOME else self.hub.clock_offset(host)

    def describe_transfers(self) -> str:
        """Return how far the values are that have been on the way for a second; empty without one.

        For example `1.2 GB of 4.29 GB to node1, 300 MB of 512 MB from node2`.
        """
        texts = []
        now = time.monotonic()
        # Another thread, the driver's, changes the tables.
        with self._lock:
            for host in self._hosts.values():
                for direction, table in (("to", host.sender.transfers), ("from", host.receiver.transfers)):
                    if any(now - transfer.began > _PROGRESS_AFTER for transfer in table.values()):
                        done = sum(transfer.done for transfer in table.values())
                        size = sum(transfer.size for transfer in table.values())
                        texts.append(f"{format_bytes(done)} of {format_bytes(size)} {direction} {host.name}")
        return ", ".join(texts)

    def unreachable(self, rank: int) -> float | None:
        """Return the seconds for which the host of a rank was not reached; None if it is."""
        seat = self.seats.get(rank)
        host = None if seat is None else self._hosts.get(seat.host)
        if host is None or host.lost or host.unreachable_since is None:
            return None
        return time.monotonic() - host.unreachable_since

    def move_lost(self, ranks: Collection[int], replacements: Mapping[int, int]) -> list[int]:
        """Give the `ranks` whose host is lost a seat on another one. Return those for which there is none.

        `replacements` has the node numbers of hosts that were started in place of lost ones.
        """
        home = [
            HostSlots(HOME, platform.node(), sum(seat.host == HOME for seat in self.seats.values()))
        ]  # its ranks stay there
        missing = []
        for rank in ranks:
            hosts = [*home, *self.slots]
            if self.own_devices:
                hosts = [replace(host, slots=min(host.slots, host.devices)) for host in hosts]
            node = self.node_of(rank)
            started = [host for host in hosts if node is not None and host.node == replacements.get(node, -1)]
            seat = free_seat(self.seats[rank], self.seats.values(), started)
            seat = seat or free_seat(self.seats[rank], self.seats.values(), hosts)
            if seat is None:
                missing.append(rank)
            else:
                self.seats[rank] = seat
        if not missing:
            # Only now it is known how many ranks every host has, with those that were there before.
            seats = number_nodes(list(self.seats.values()), self.slots)
            self.seats.update({seat.rank: seat for seat in seats})
        return missing

    def lose_node(self, node: int | None, reason: str) -> None:
        """Lose the host of this node number at once, or all hosts (None). Any thread.

        The engine that has started its agent knows of its end before the connection does.
        """
        with self._lock:
            for host in list(self._hosts.values()):
                if not host.lost and node in (None, _number(host.description.node)):
                    self._lose(host, reason)

    def node_of(self, rank: int) -> int | None:
        """Return the node number of the host of a rank; None for this host, and if the host has no number."""
        host = self._hosts.get(self.seats[rank].host)
        return None if host is None else _number(host.description.node)

    def is_lost(self, rank: int) -> bool:
        """Return True if the host of a rank is lost."""
        host = self._hosts.get(self.seats[rank].host)
        return host is not None and bool(host.lost)

    def has_node(self, node: int) -> bool:
        """Return True if the host of this node number can start ranks."""
        return any(slots.node == node for slots in self.slots)

    def has_free_slot(self, node: int) -> bool:
        """Return True if the host of this node number can start a further rank."""
        taken = Counter(seat.host for seat in self.seats.values())
        return any(slots.node == node and taken[slots.id] < slots.slots for slots in self.slots)

    def abandon(self, cell: int) -> None:
        """Let the next poll deliver the answers to `cell` without values that are on the way. Any thread.

        Nobody reads them any more, and the rank counts as busy until its answer is there.
        """
        self._abandoned.add(cell)

    # Polling

    def filenos(self) -> list[int]:
        """Return the descriptors to poll."""
        return self.hub.filenos()

    def deadline(self) -> float | None:
        """Return the time at which `poll` has something to do without an event."""
        times = [
            host.unreachable_since + self._lost_after
            for host in list(self._hosts.values())
            if host.unreachable_since is not None and not host.lost
        ]
        if self._tested or self.hub.closed:
            times.append(time.monotonic() + _PROBE_INTERVAL)
        if (deadline := self.hub.deadline()) is not None:
            times.append(deadline)
        return min(times, default=None)

    def poll(self) -> None:
        """Handle everything that has arrived, and the loss of hosts. Driver thread."""
        with self._lock:
            for event in [*self.hub.receive(), *self.hub.run_timers(time.monotonic())]:
                match event:
                    # The link has authenticated the agent. Whether it can be used is decided here.
                    case agent_link.Hello(agent, hello):
                        self._greet(agent, hello)
                    case agent_link.Unreachable(agent):
                        self._set_unreachable(agent)
                    case agent_link.Reachable(agent):
                        if (host := self._hosts.get(agent)) is not None and host.unreachable_since is not None:
                            host.unreachable_since = None
                            self.report(f"{host.name} is reachable again")
                    case agent_link.LinkMessage(agent, _stream, frames):
                        self._receive(agent, frames)
                    case _:
                        pass
            while self._abandoned:
                self._give_up_answers(self._abandoned.pop())
            # After the events, which may have made room in the link for further parts, or have shown that a host is
            # there.
            now = time.monotonic()
            for host in list(self._hosts.values()):
                if host.sender.transfers and not host.lost:
                    self._send_parts(host)
                since = host.unreachable_since
                if since is not None and not host.lost and now - since >= self._lost_after:
                    self._lose(host, f"was lost: {host.name} was not reachable for {now - since:.0f} s")
            for agent in {*self._tested, *self.hub.closed}:
                if agent in self._hosts:
                    self._probe(self._hosts[agent], now)

    def _greet(self, agent: str, hello: bytes) -> None:
        try:
            # Its format never changes, so that an agent of any version can be told why it is refused.
            description = decode_description(hello)
        except ProtocolError as error:
            self.hub.refuse(agent, str(error))
            return
        if problem := _incompatible(description):
            self.report(f"refused {description.name}: {problem}")
            self.hub.refuse(agent, problem)
            return
        names = {host.name for host in self._hosts.values() if not host.lost}
        name = description.name
        # Several agents may run on one host, and hosts may have the same name.
        if name in names:
            name = next(f"{name}#{number}" for number in range(2, 1 << 20) if f"{name}#{number}" not in names)
        self._hosts[agent] = Host(
            agent, description, name, sender=SegmentSender(self.segments), receiver=SegmentReceiver(self.segments)
        )
        self.hub.accept(agent)

    def _set_unreachable(self, agent: str) -> None:
        host = self._hosts.get(agent)
        if host is None or host.lost or host.unreachable_since is not None:
            return
        # From its last message on, which was some seconds ago.
        host.unreachable_since = time.monotonic() - self.hub.silence(agent)
        ranks = [rank for rank, seat in self.seats.items() if seat.host == agent]
        if ranks:
            self.report(f"{host.name} cannot be reached; its ranks are lost after {self._lost_after:.0f} s")

    def _probe(self, host: Host, now: float) -> None:
        """Lose a host whose agent has ended without a message: its system refuses what it accepted before."""
        is_refused = host.probe is not None and host.probe.look(now) > 0.0
        if host.id not in self._tested:
            if is_refused:
                self._lose(host, f"was lost: the agent on {host.name} has ended, perhaps killed: its port is closed")
            return
        # Refused from the start: by a firewall, or because the address is that of another network.
        if is_refused or now > self._tested[host.id]:
            del self._tested[host.id]
            host.end_probe(for_good=is_refused)

    def _lose(self, host: Host, reason: str) -> None:
        # First of all: nothing below may send to this host any more.
        host.lost = reason
        host.slots = None
        host.end_probe(for_good=True)
        self._tested.pop(host.id, None)
        self.hub.forget(host.id)
        host.receiver.close()
        self._held = [held for held in self._held if held[0] is not host]
        # The driver handles these like reports of a forkserver. It need not know that a host is behind them.
        for rank, process in self._processes.items():
            if process.host == host.id:
                self.reports.append(_lost_rank(rank, process, reason))

    # Messages of agents

    def _receive(self, agent: str, frames: Sequence[Bytes]) -> None:
        host = self._hosts.get(agent)
        if host is None or host.lost:
            return
        try:
            self._handle(host, frames)
        # Nothing that an agent sends may end the driver. Its host is given up after some of them.
        except (ProtocolError, TransferError, IndexError, ValueError) as error:
            host.bad_messages += 1
            host.bad_times.append(time.monotonic())
            self.report(f"dropped a message of {host.name}: {error}")
            is_full = len(host.bad_times) == _MAX_BAD_MESSAGES
            if is_full and host.bad_times[-1] - host.bad_times[0] <= _BAD_MESSAGES_SECONDS:
                self._lose(host, f"was lost: {host.name} sent {_MAX_BAD_MESSAGES} messages that cannot be handled")

    def _handle(self, host: Host, frames: Sequence[Bytes]) -> None:
        message = decode_from_agent(bytes(frames[0]))
        match message:
            # A message of the ranks of this host, perhaps with values in segments that are still on the way.
            case FromRanks():
                self._receive_from_ranks(host, message, [memoryview(frame) for frame in frames[1:]])
            case SegmentPart():
                if (refused := host.receiver.receive(message, frames[1])) is not None:
                    self.hub.send(host.id, VALUES, [encode(refused)])
                self._release(host)
            # The message that waits for the segment is delivered: who reads the value gets the reason as an error.
            case SegmentFailed(name, reason):
                host.receiver.fail(name, reason)
                self._release(host)
            # The host has no room. The receiver has the reason already, so the answer needs none.
            case SegmentRefused(name):
                host.sender.cancel(name)
                self.hub.send(host.id, VALUES, [encode(SegmentFailed(name, ""))])
            case RankForked() | RankExited() | ProcessState():
                self._handle_process(host, message)
            case StoreRequest(connection):
                self._send(host.id, StoreReply(connection), perform(self._keys, bytes(frames[1])))
            case ModuleRequest(connection, name, known):
                files = {} if self.modules is None else self.modules.find(name, host.code, known, host=host.name)
                self._send_modules(host, connection, files)
            case HostReady():
                self._ready(host, message)
            # Texts come from another machine, so their length is limited. The last line of a traceback has the cause.
            case HostFailed(reason):
                reason = reason[-_MAX_REASON:].strip()
                self.report(f"{host.name} cannot start ranks: {reason}")
                cause = reason.rpartition("\n")[2]
                self._lose(host, f"was lost: {host.name} cannot start ranks ({cause})")
            # Without waiting for `lost_after`: the agent itself says that it does not return.
            case HostLeaving(reason):
                self._lose(host, f"was lost: the agent on {host.name} ended because {reason[:_MAX_REASON]}")
            case HostNote(text):
                self.report(f"{host.name}: {text[:500]}")

    def _ready(self, host: Host, ready: HostReady) -> None:
        slots, devices, cores = ready.slots, ready.devices, ready.cores
        if not 1 <= slots <= 1024:
            raise ProtocolError(f"invalid number of slots: {slots}")
        if not 0 <= ready.liveness_port < 1 << 16:
            raise ProtocolError(f"invalid port: {ready.liveness_port}")
        if self.device == "cpu":
            devices = 0
        elif not devices and self.device == "cuda":
            self.lacks_device = describe_no_device(ready.problem[:500], host.name)
            if self.seats:  # a start that waits for hosts raises it
                self.report(self.lacks_device)
            self._send(host.id, CloseHost(self.lacks_device))
            return
        description = host.description
        host.port = ready.port
        if self.probe_agents and ready.liveness_port and host.probe is None:
            # A number: the look-up of a name could take long.
            address = str(ipaddress.IPv4Address(description.address))
            host.probe = RefusalProbe(address, ready.liveness_port, _PROBE_INTERVAL)
            self._tested[host.id] = time.monotonic() + _PROBE_TEST
        host.slots = HostSlots(
            id=host.id,
            name=host.name,
            slots=slots,
            devices=devices,
            cores=cores,
            node=_number(description.node),
            rank=_number(description.rank),
            local_rank=_number(description.local_rank),
            machine=description.name,
            core_ids=frozenset(ready.core_ids),
        )
        what = f"{devices} CUDA devices" if devices else f"{cores} cores"
        problem = f"; {ready.problem[:500]}" if ready.unexpected and self.device != "cpu" else ""
        self.report(f"{host.name} has joined: {plural(slots, 'slot')}, {what}{problem}")

    def _handle_process(self, host: Host, message: RankForked | RankExited | ProcessState) -> None:
        rank, incarnation = message.rank, message.incarnation
        if isinstance(message, RankExited):
            # Its last messages wait for values, which nobody would read.
            sender = Sender(rank, incarnation)
            dropped = [held for held in self._held if held[2] == sender]
            self._held = [held for held in self._held if held[2] != sender]
            for _, needs, *_ in dropped:
                self._give_up(host, needs)
        process = self._processes.get(rank)
        if process is not None and incarnation < process.incarnation:
            return  # it was replaced, here or on another host, before the report arrived
        if process is None or (process.host, process.incarnation) != (host.id, incarnation):
            raise ProtocolError(f"{host.name} has no process {incarnation} of rank {rank}")
        if isinstance(message, ProcessState):
            info = ProcessInfo(message.status, message.cpu_seconds, message.stopped, message.traced, host.name)
            process.state = (time.monotonic(), info if message.status else None)
            return
        if isinstance(message, RankForked):
            process.pid = message.pid
        self.reports.append(message)

    def _receive_from_ranks(self, host: Host, message: FromRanks, frames: list[memoryview]) -> None:
        host.segments.update(message.stay)
        position = 0
        for item in message.senders:
            rank, incarnation = item.rank, item.incarnation
            data, *rest = frames[position : position + item.frames]
            position += item.frames
            process = self._processes.get(rank)
            # A process that was replaced meanwhile may have sent it, so that this is not an error.
            if process is None or (process.host, process.incarnation) != (host.id, incarnation):
                self._give_up(host, message.needs)
                continue
            sender = Sender(rank, incarnation)
            decoded: FromRank | ProtocolError
            try:
                decoded = read_from_rank(sender, data)
            except ProtocolError as error:
                decoded = error
            if not isinstance(decoded, ProtocolError) and message.needs:
                self._held.append((host, message.needs, sender, decoded, rest))
                self._release(host)
            else:
                self.messages.append((sender, decoded, rest))

    def _give_up(self, host: Host, names: Iterable[str]) -> None:
        """Remove segments of `host` that nobody will read, and end their transfer."""
        for name in names:
            # A name that a rank has made up stands for nothing.
            with contextlib.suppress(ProtocolError):
                if (refused := host.receiver.give_up(name)) is not None:
                    self.hub.send(host.id, VALUES, [encode(refused)])

    def _give_up_answers(self, cell: int) -> None:
        held, self._held = self._held, []
        for entry in held:
            host, needs, sender, message, frames = entry
            if isinstance(message, Done) and message.cell == cell:
                self._give_up(host, needs)
                self.messages.append((sender, message, frames))
            else:
                self._held.append(entry)

    def _release(self, host: Host) -> None:
        waiting = []
        for held in self._held:
            holder, needs, sender, message, frames = held
            if holder is host and host.receiver.settled.issuperset(needs):
                self.messages.append((sender, message, frames))
                # Who takes the value removes the file.
                host.receiver.settled.difference_update(needs)
            else:
                waiting.append(held)
        self._held = waiting

    # Messages to agents

    def fork(self, request: ForkRank) -> None:
        """Ask the agent of the rank's host to start it."""
        host = self.seats[request.rank].host
        with self._lock:
            # From now on the loss of the host is an exit of this process.
            self._processes[request.rank] = _Process(host, request.incarnation)
            if not self._send(host, request):
                raise StartError(f"the host of rank {request.rank} is lost")

    def kill(self, rank: int, incarnation: int) -> None:
        """Ask the agent to kill this incarnation of a rank."""
        process = self._processes.get(rank)
        if process is not None and process.incarnation == incarnation:
            self._send(process.host, KillRank(rank, incarnation))

    def send_to_ranks(
        self, host: str, ranks: tuple[int, ...], message: Message, encoded: bytes, frames: Frames
    ) -> bool:
        """Send a message, which is also given `encoded`, to ranks of one host. Return False if the host is lost."""
        needs = message_segments(message)
        with self._lock:
            target = self._hosts.get(host)
            # Modules that have changed since they were sent go before the task, which may import or reload them.
            if self.modules is not None and isinstance(message, Task) and target is not None and target.code.versions:
                self._send_modules(target, 0, self.modules.changed(target.code, host=target.name))
            # Segments first: the agent must know of a segment before a message that names it.
            for name in needs:
                self._send_segment(host, name)
            stay = message.cell if isinstance(message, ExportState) and message.stays else None
            return self._send(host, ToRanks(ranks, needs, isinstance(message, Task), stay), encoded, *frames)

    def _send_modules(self, host: Host, connection: int, files: dict[str, bytes]) -> None:
        removed = tuple(host.code.removed)
        host.code.removed.clear()
        if files or removed or connection:
            self._send(host.id, ModuleFiles(connection, tuple(files), removed), *files.values())

    def drop_segment(self, name: str) -> None:
        """Remove the copies of a segment on other hosts."""
        with self._lock:
            for host in self._hosts.values():
                # Only hosts that have a copy, or are getting one.
                if name in host.segments:
                    host.segments.discard(name)
                    host.sender.cancel(name)
                    # Behind the parts, which may still be on the way.
                    if not host.lost:
                        self.hub.send(host.id, VALUES, [encode(DropSegments((name,)))])

    def process_info(self, rank: int) -> ProcessInfo | None:
        """Return the state of a rank's process, as its agent has reported it."""
        process = self._processes.get(rank)
        if process is None:
            return None
        # Without a recent report, the process counts as alive: its agent would have reported its end.
        if process.state is None or time.monotonic() - process.state[0] > _STATE_AGE:
            return ProcessInfo("running", 0.0, host=self.name_of(rank))
        return process.state[1]

    def close(self) -> None:
        """Tell all agents to exit, and wait a short time for their last messages."""
        with self._lock:
            for host in self._hosts.values():
                if not host.lost:
                    self._send(host.id, CloseHost())
        # An agent reports the end of its ranks, and then its own, upon which it counts as lost. A host that does not
        # answer must not hold up the end of the session.
        deadline = time.monotonic() + _CLOSE_SECONDS
        while any(not host.lost and host.unreachable_since is None for host in self._hosts.values()):
            if time.monotonic() > deadline:
                break
            if not self.hub.has_message():
                wait_readable(self.filenos(), 0.05)
            self.poll()
        for host in self._hosts.values():
            host.end_probe(for_good=True)
        self.hub.close()
        self._keys.close()

    def _send_segment(self, agent: str, name: str) -> None:
        host = self._hosts.get(agent)
        if host is None or host.lost or name in host.segments:
            return
        # One copy per host serves all of its ranks, and later messages.
        host.segments.add(name)
        if (failed := host.sender.add(name)) is not None:
            self.hub.send(agent, VALUES, [encode(failed)])
        self._send_parts(host)

    def _send_parts(self, host: Host) -> None:
        # Only some parts ahead of the link: the memory that a transfer takes stays small, and it can be given up in the
        # middle.
        while self.hub.pending(host.id, VALUES) < AHEAD and (part := host.sender.next_part()) is not None:
            self.hub.send(host.id, VALUES, [encode(part[0]), part[1]])

    def _send(self, agent: str, message: Message, *frames: Bytes) -> bool:
        host = self._hosts.get(agent)
        if host is None or host.lost:
            return False
        self.hub.send(agent, MESSAGES, [encode(message), *frames])
        return True


@dataclass(frozen=True)
class HostOptions:
    """Options for ranks on other hosts.

    `launcher`: the name of the engine that starts the agents, or an engine; with env the user starts them. `nodes` is
    the number of hosts, None for the engine's choice, and `arguments` the engine's part of the start line. `address`
    and `port` are where this host listens for agents, by default the address of the default route and a free port.
    `home` is the number of ranks on this host. `lost_after`: seconds after which a host that cannot be reached is lost.
    `env` names variables that the ranks inherit from the notebook's process, beside those with a prefix of
    `placement.INHERITED_PREFIXES`. `sync_code`: send modules of the notebook's folder to the hosts that import them.
    """

    launcher: str | Engine = "env"
    address: str | None = None
    port: int = 0
    home: int = 0
    lost_after: float = LOST_AFTER
    env: tuple[str, ...] = ()
    nodes: int | None = None
    arguments: tuple[str, ...] = ()
    sync_code: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.launcher, str):
            check_engine_name(self.launcher)
        if self.nodes is not None and self.nodes < 1:
            raise InvalidArgument(f"invalid number of nodes: {self.nodes}")
        if not 0 <= self.port < 1 << 16:
            raise InvalidArgument(f"invalid port {self.port}: expected 0 (a free one) to 65535")
        if self.home < 0:
            raise InvalidArgument(f"invalid number of ranks on this host: {self.home}")
        if not 1 <= self.lost_after <= 86_400:
            raise InvalidArgument(f"invalid lost_after={self.lost_after}: expected 1 to 86400 seconds")


def listen(options: HostOptions, cluster: str, segments: Path, *, report: Callable[[str], None]) -> tuple[Hosts, Path]:
    """Listen for the agents of the cluster, whose shared memory is in `segments`. Returns its connection file too.

    Raises `StartError` and `InvalidArgument`.
    """
    address = choose_address(options.address)
    keys, server_secret = make_keys()
    hub = AgentHub(address, options.port, keys, server_secret)
    try:
        file = write_connection(Connection(cluster, address, hub.port, options.lost_after, keys))
    except BaseException:
        hub.close()
        raise
    store = KeyFolder(segments / "store")
    hosts = Hosts(hub, MirroredSegments(segments), store, lost_after=options.lost_after, report=report)
    # Ray reports the end of a node only when it has missed its heartbeats for a while.
    hosts.probe_agents = options.launcher in ("env", "ray")
    if options.sync_code:
        # `report` is replaced when the cluster has started.
        hosts.modules = ModuleFolder(Path.cwd(), lambda text: hosts.report(text))  # noqa: PLW0108
    return hosts, file


class HostsLink:
    """The notebook's end of the links to all ranks: those of this host over `home`, the others over `hosts`."""

    def __init__(self, home: ZmqHub, hosts: Hosts, launcher: HostsLauncher) -> None:
        self._home = home
        self._hosts = hosts
        self._launcher = launcher
        self.uplink = home.uplink

    def open_downlink(self, rank: int, incarnation: int) -> str:
        """See `HubLink`. On another host, the agent opens it."""
        if self._hosts.seats[rank].host != HOME:
            return ""
        return self._home.open_downlink(rank, incarnation)

    def send(self, rank: int, message: Message, frames: Frames = ()) -> bool:
        """See `HubLink`."""
        host = self._hosts.seats[rank].host
        if host == HOME:
            return self._home.send(rank, message, frames)
        sent = self._hosts.send_to_ranks(host, (rank,), message, encode(message), frames)
        self._home.wake()  # sending may have consumed what the descriptor of the agents' link announced
        return sent

    def send_many(self, ranks: Iterable[int], message: Message, frames: Frames = ()) -> None:
        """See `HubLink`. One message goes to every host."""
        # A cell for all ranks is encoded once, and crosses the network once per host.
        encoded = encode(message)
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self._hosts.seats[rank].host, []).append(rank)
        for host, host_ranks in by_host.items():
            if host == HOME:
                self._home.send_many_encoded(host_ranks, encoded, frames)
            else:
                self._hosts.send_to_ranks(host, tuple(host_ranks), message, encoded, frames)
        self._home.wake()

    def wait(self, timeout: float | None, files: Collection[int]) -> tuple[bool, set[int]]:
        """See `HubLink`."""
        # The driver's own timers are in `timeout`. A host may have to be given up before, or the link have a timer.
        deadline = self._hosts.deadline()
        if deadline is not None:
            remaining = max(0.0, deadline - time.monotonic())
            timeout = remaining if timeout is None else min(timeout, remaining)
        # The pipe of the launcher is never readable, so it is not polled. It stands for the reports of the hosts and
        # the descriptors of all launchers. Only for a caller that will read them: what is not read stays readable, and
        # this would return at once for as long as a job is queued.
        file = self._launcher.fileno()
        reads_reports = file in files
        watched = self._launcher.filenos() if reads_reports else []
        # What was queued by an earlier poll makes no descriptor readable.
        if self._hosts.messages or (reads_reports and self._hosts.reports) or self._hosts.hub.has_message():
            timeout = 0.0
        polled = {*self._hosts.filenos(), *watched}
        received, ready = self._home.wait(timeout, {*files, *polled} - {file})
        self._hosts.poll()
        if self._hosts.reports or not ready.isdisjoint(watched):
            ready.add(file)
        # The descriptors of the agents' link were polled for this object only. The driver gets those that it has asked
        # for.
        return received or bool(self._hosts.messages), ready & {*files}

    def receive(self) -> tuple[Sender, FromRank, list[memoryview]] | None:
        """See `HubLink`."""
        # What `Hosts.poll` has queued comes first. The socket of this host keeps its messages meanwhile.
        if not self._hosts.messages:
            return self._home.receive()
        sender, message, frames = self._hosts.messages.popleft()
        # Not when it arrived, but where the link of this host raises it too: the driver handles it there.
        if isinstance(message, ProtocolError):
            raise message
        return sender, message, frames

    def wake(self) -> None:
        """See `HubLink`."""
        self._home.wake()

    def close(self) -> None:
        """See `HubLink`."""
        self._home.close()


class HostsLauncher:
    """Launcher of ranks on this host, through `home`, and on other hosts, through their agents."""

    def __init__(self, home: LocalLauncher, hosts: Hosts) -> None:
        self.home = home
        self._hosts = hosts
        self._home_ranks: dict[int, int] = {}
        self._home_lost = False
        # Never readable: `HostsLink.wait` reports it when there is something to read.
        self._file, self._other_end = os.pipe()

    @property
    def pid(self) -> int:
        """Return the process id of this host's forkserver."""
        return self.home.pid

    @property
    def alive(self) -> bool:
        """See `Launcher`. The end of this host's forkserver ends only the ranks of this host."""
        return True

    def fileno(self) -> int:
        """See `Launcher`."""
        return self._file

    def filenos(self) -> list[int]:
        """Return the descriptors of the forkserver of this host."""
        return [] if self._home_lost else [self.home.fileno()]

    def fork(self, request: ForkRank) -> None:
        """See `Launcher`."""
        if self._hosts.seats[request.rank].host != HOME:
            self._hosts.fork(request)
            return
        self._home_ranks[request.rank] = request.incarnation
        self.home.fork(request)

    def kill(self, rank: int, incarnation: int) -> None:
        """See `Launcher`."""
        # A rank that was moved away may have had a process on this host before; the incarnation tells which one is
        # meant.
        if self._home_ranks.get(rank) == incarnation:
            self.home.kill(rank, incarnation)
        else:
            self._hosts.kill(rank, incarnation)

    def process_info(self, rank: int, pid: int | None) -> ProcessInfo | None:
        """See `Launcher`."""
        if self._hosts.seats[rank].host != HOME:
            return self._hosts.process_info(rank)
        return self.home.process_info(rank, pid)

    def read(self) -> Iterator[FromForkserver]:
        """See `Launcher`."""
        while self._hosts.reports:
            yield self._hosts.reports.popleft()
        if self._home_lost:
            return
        yield from self.home.read()
        # The forkserver was their parent: with it, the ranks of this host have ended. Those of other hosts run on.
        if not self.home.alive:
            self._home_lost = True
            for rank, incarnation in self._home_ranks.items():
                process = _Process(HOME, incarnation)
                yield _lost_rank(rank, process, "was lost because the forkserver exited")

    def close(self) -> None:
        """See `Launcher`."""
        self._hosts.close()
        self.home.close()
        with contextlib.suppress(OSError):
            os.close(self._file)
            os.close(self._other_end)


class MirroredSegments(SegmentStore):
    """The notebook's shared memory, of which other hosts have copies. `drop` is called for every removed segment."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, most_in_frames=MOST_IN_FRAMES)
        self.drop: Callable[[str], None] = lambda _name: None

    def discard(self, name: str, *, wait: bool = True) -> None:
        """See `SegmentStore`."""
        super().discard(name, wait=wait)
        self.drop(name)


def local_versions() -> dict[str, str]:
    """Return the versions that an agent must have too."""
    return {
        "rankbook": package_version("rankbook"),
        "torch": package_version("torch"),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "protocol": str(PROTOCOL_VERSION),
    }


def _incompatible(description: HostDescription) -> str:
    """Return why a host cannot be used; empty if it can."""
    # Values are pickled, and a message belongs to one version of the protocol. So both ends must have the same code.
    different = [
        f"{name} {getattr(description, name) or 'unknown'} instead of {version or 'unknown'}"
        for name, version in local_versions().items()
        if getattr(description, name) != version
    ]
    return f"it has {', '.join(different)}; install the same versions" if different else ""


def _lost_rank(rank: int, process: _Process, reason: str) -> RankExited:
    return RankExited(
        rank=rank,
        incarnation=process.incarnation,
        pid=process.pid,
        code=-9,
        memory_kills=0,
        stdout=b"",
        stderr=b"",
        reason=reason,
        ordered=True,
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
