"""The agent: represents another host. `python -m rankbook.agent --connect FILE` offers its slots to a notebook.

To its forkserver and its ranks an agent is what the notebook's process is at home: it has the same `LocalLauncher`, the
same `ZmqHub` and the same folders. What its ranks send, it relays to the coordinator as it is, and what comes from
there, to the ranks. It has one thread and imports no torch.

Four things are done here because they need this host:

- Environment, working directory and `sys.path` of a new rank are completed with those of the agent.
- Segments of shared memory cross between the hosts in parts. A message that needs one waits until it is complete.
- The files that a dead rank has left are read and sent with the report of its exit.
- A rank that owes a reply is looked at, as the notebook does with its own ranks.

The agent exits, after it has killed its ranks and removed its folders, when the coordinator tells it to or was not
reached for `lost_after` seconds, when nobody listens at the coordinator's address any more, when its parent process has
ended, and on SIGTERM, SIGHUP, SIGINT and SIGUSR2. Started with nohup, it outlives its parent and SIGHUP. If it is
killed itself, the forkserver does the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import secrets
import signal
import sys
import time
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rankbook.engines.engine import OWN_KEY, read_identity
from rankbook.errors import InvalidArgument, ProtocolError, RankbookError, UnreadableMessage
from rankbook.formatting import format_bytes
from rankbook.launch.code_sync import digest
from rankbook.launch.connection import CONNECT, Connection, decode_connection, interface_addresses
from rankbook.launch.local import LocalLauncher
from rankbook.launch.placement import (
    OWN_FOLDERS,
    core_ids,
    path_on_host,
    rank_environment,
    threads_per_rank,
    usable_cores,
)
from rankbook.launch.registry import make_folders
from rankbook.process_identity import package_version, process_info
from rankbook.protocol import PROTOCOL_VERSION, Message
from rankbook.protocol.forkserver import (
    MESSAGES,
    VALUES,
    CloseHost,
    ClusterOpened,
    DropSegments,
    ForkRank,
    FromRank,
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
    decode_to_agent,
    encode_description,
    not_started,
)
from rankbook.protocol.messages import Display, Done, FromForkserver, decode_from_rank, encode, message_segments
from rankbook.transport import agent_link
from rankbook.transport.agent_link import AgentLink, source_address
from rankbook.transport.framed_socket import RequestListener, modules_folder
from rankbook.transport.output_journal import journal_path, read_crash, read_journal
from rankbook.transport.shared_memory import (
    AHEAD,
    Bytes,
    SegmentReceiver,
    SegmentSender,
    SegmentStore,
    ensure_private_folder,
)
from rankbook.transport.zmq_link import ZmqHub

_EXIT_DELAY = 0.02
"""Seconds after a rank's exit during which its last messages may still be on the local link."""
_LATEST_EXIT = 1.0
"""Seconds after which an exit is reported, although the local link was never empty since."""
_LOOK_AFTER = 0.3
"""Seconds after which the process of a rank that has not replied is looked at, and again every second."""
_BATCH = 1 << 20
"""Bytes of messages of ranks that are sent to the coordinator as one message."""
_MESSAGES_AT_ONCE, _BYTES_AT_ONCE = 500, 2 << 20
"""Messages of ranks that are relayed before the agent looks at everything else: some ranks send faster than that."""
_LARGEST = 512 << 20
"""Bytes of one message of a rank that the link carries. Large values are segments, see `MOST_IN_FRAMES`."""
_MOST_WAITING = 256 << 20
"""Bytes that wait for the coordinator, above which displays are dropped."""
_LONGEST_WAIT = 0.5
"""Seconds after which the parent process and the connection are looked at, without any event."""
_FIRST_CONNECTION = 30.0
"""Seconds at least for the first connection: the notebook may be busy with its start, and there is nothing to lose."""
_REFUSED_SECONDS = 5.0
"""Seconds for which the coordinator's host refuses connections until its process counts as ended."""
_LEAVE_SECONDS = 0.5
"""Seconds in which the last message to the coordinator may leave."""
_STOPPED = "the cluster was stopped"
"""The reason of an agent's end after which its exit code is 0."""


class HostLost(RankbookError):
    """The coordinator has given this host up while it could not be reached."""


class AgentRefused(RankbookError):
    """The coordinator has refused this host."""


@dataclass
class _Held:
    """A message to ranks that waits for segments."""

    message: ToRanks
    frames: Sequence[Bytes]
    ranks: set[int]
    needs: set[str]


class Agent:
    """Represent this host to the coordinator of `connection`, over `link`, with `slots` slots (None: one per device).

    The ranks are started through `launcher`, which ends with the agent. With `outlives_terminal`, neither SIGHUP nor
    the end of its parent ends the agent. Raises `StartError` if the folders cannot be made.
    """

    def __init__(
        self,
        connection: Connection,
        link: AgentLink,
        launcher: LocalLauncher,
        *,
        address: str,
        slots: int | None,
        outlives_terminal: bool = False,
    ) -> None:
        self._connection = connection
        self._link = link
        self._slots = slots
        self._outlives_terminal = outlives_terminal
        self._interface = interface_addresses().get(address, "").partition(":")[0]  # without the label of an address
        self._parent = os.getppid()
        self._folders = make_folders()
        self._launcher = launcher
        self._launcher.request_open((self._folders.sockets, self._folders.segments))
        self._hub = ZmqHub(self._folders.sockets)
        self._segments = SegmentStore(self._folders.segments)
        self._requests = RequestListener(self._folders.sockets / "store")
        self._modules = ModuleCopies(self._folders.sockets)
        self._ended = ""
        self._unreachable_since: float | None = time.monotonic()
        self._refusals = agent_link.RefusalProbe(connection.address, connection.port)
        self._liveness = agent_link.LivenessPort(address)
        self._was_accepted = False
        self._pids: dict[int, tuple[int, int]] = {}
        # Ranks that owe a reply, with the time at which their process is looked at.
        self._asked: dict[int, float] = {}
        self._exits: list[tuple[float, RankExited]] = []
        self._sender = SegmentSender(self._segments)
        self._receiver = SegmentReceiver(self._segments)
        self._held: list[_Held] = []
        self._drops_displays = False
        # The cells in whose answers segments stay here, by rank.
        self._stay: dict[int, int] = {}
        self._signal_read, self._signal_write = os.pipe()
        for end in (self._signal_read, self._signal_write):
            os.set_blocking(end, False)

    # The loop

    def run(self) -> str:
        """Serve until the end, and return its reason.

        Raises `AgentRefused`, or `HostLost` if the agent is to start anew.
        """
        with self._signals():
            try:
                while not self._ended:
                    self._step()
            except (HostLost, AgentRefused) as error:
                self._ended = str(error)
                raise
            finally:
                self._close()
        return self._ended

    def _step(self) -> None:
        files = {*self._link.filenos(), self._launcher.fileno(), self._signal_read, *self._requests.filenos()}
        files.update(self._modules.filenos())
        if self._liveness.port:
            files.add(self._liveness.fileno())
        if not self._launcher.alive:
            files.discard(self._launcher.fileno())
        received, ready = self._hub.wait(self._timeout(), files)
        if self._signal_read in ready:
            os.read(self._signal_read, 4096)  # the handlers have run
        if received:
            self._relay_up()
        if self._launcher.fileno() in ready:
            for report in self._launcher.read():
                self._handle_report(report)
        self._send_exits()
        if self._liveness.port and self._liveness.fileno() in ready:
            self._liveness.accept()
        if not ready.isdisjoint(self._requests.filenos()):
            for connection, request in self._requests.receive():
                self._send(StoreRequest(connection), request)
        if not ready.isdisjoint(self._modules.filenos()):
            for needed in self._modules.receive():
                self._send(needed)
        for event in self._link.receive():
            self._handle_event(event)
        self._send_parts()
        self._link.run_timers(time.monotonic())
        self._look_at_ranks()
        self._check_end()

    def _timeout(self) -> float:
        now = time.monotonic()
        if self._link.has_message():
            return 0.0
        times = [now + _LONGEST_WAIT, *(when for when, _ in self._exits), *self._asked.values()]
        if (deadline := self._link.deadline()) is not None:
            times.append(deadline)
        return max(0.0, min(times) - now)

    def _check_end(self) -> None:
        if os.getppid() != self._parent and not self._outlives_terminal:
            self._ended = "its parent process has ended"
        if self._unreachable_since is None:
            self._refusals.reset()
        else:
            now = time.monotonic()
            seconds = now - self._unreachable_since
            # No network answers like this: the coordinator listens for as long as its process runs.
            if self._was_accepted and self._refusals.look(now) > _REFUSED_SECONDS:
                self._ended = "the notebook's process has ended"
            lost_after = self._connection.lost_after
            if seconds > (lost_after if self._was_accepted else max(lost_after, _FIRST_CONNECTION)):
                where = f"{self._connection.address}:{self._connection.port}"
                # Perhaps an address of another network, or a port that a firewall closes.
                advice = "" if self._was_accepted else "; choose what hosts can reach with --address and --port"
                self._ended = f"the notebook was not reached at {where} for {seconds:.0f} s{advice}"
        if not self._launcher.alive and not self._ended:
            self._ended = f"the forkserver has exited: {self._launcher.exit_message()}"
            self._send(HostFailed(self._ended))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        # Set explicitly: a job launcher may have started this process with signals ignored, which exec does not reset.
        def end(number: int, _frame: object) -> None:
            self._ended = self._ended or f"it received {signal.Signals(number).name}"

        # SIGUSR2 is what srun passes on when the engine `slurm` ends it.
        ends = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2]
        if not self._outlives_terminal:
            ends.append(signal.SIGHUP)
        before = {number: signal.signal(number, end) for number in ends}
        # Users ask Slurm to send this one before the end of a job; the coordinator knows of that end.
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda *_: None)
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        wakeup = signal.set_wakeup_fd(self._signal_write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _close(self) -> None:
        # Every step is taken, also after an error in one of them. The last callback comes first.
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, self._signal_write)
            stack.callback(os.close, self._signal_read)
            # After the link: until then the coordinator learns the reason of the end from a message.
            stack.callback(self._liveness.close)
            stack.callback(self._link.close, _LEAVE_SECONDS)
            stack.callback(self._refusals.reset)
            if self._was_accepted and self._unreachable_since is None:
                stack.callback(self._send, HostLeaving(self._ended or "of an error"))
            stack.callback(self._folders.remove)
            stack.callback(self._hub.close)
            stack.callback(self._requests.close)
            stack.callback(self._modules.close)
            # The ranks first: they must have ended when the coordinator learns of it.
            stack.callback(self._launcher.terminate)

    # From the coordinator

    def _handle_event(self, event: agent_link.LinkEvent) -> None:
        match event:
            case agent_link.Accepted():
                self._was_accepted = True
                self._unreachable_since = None
            case agent_link.Reachable():
                self._unreachable_since = None
            case agent_link.Unreachable():
                self._unreachable_since = self._unreachable_since or time.monotonic()
            case agent_link.Refused(reason):
                # Nothing more is read of what this agent sends.
                self._unreachable_since = self._unreachable_since or time.monotonic()
                raise HostLost(reason) if self._was_accepted else AgentRefused(reason)
            case agent_link.LinkMessage(_, _, frames):
                self._handle_message(frames)

    def _handle_message(self, frames: Sequence[Bytes]) -> None:
        message = decode_to_agent(bytes(frames[0]))
        match message:
            case ToRanks():
                self._held.append(_Held(message, frames[1:], set(message.ranks), set(message.needs)))
                if message.stay is not None:
                    self._stay.update(dict.fromkeys(message.ranks, message.stay))
                self._deliver()
            case SegmentPart():
                if (refused := self._receiver.receive(message, frames[1])) is not None:
                    self._link.send(VALUES, [encode(refused)])
                self._deliver()
            case SegmentFailed(name, reason):
                self._receiver.fail(name, reason)
                self._deliver()
            case SegmentRefused(name):
                self._sender.cancel(name)
                self._link.send(VALUES, [encode(SegmentFailed(name, ""))])
            case DropSegments(names):
                self._receiver.drop(names)
                # Who still waits for one of them learns that it is gone.
                for held in self._held:
                    held.needs.difference_update(names)
                self._deliver()
            case ForkRank():
                self._fork(message)
            case KillRank(rank, incarnation):
                self._launcher.kill(rank, incarnation)
            case StoreReply(connection):
                self._requests.reply(connection, bytes(frames[1]))
            case ModuleFiles(connection, names, removed):
                try:
                    self._modules.write(connection, dict(zip(names, map(bytes, frames[1:]), strict=True)), removed)
                except OSError as error:
                    self._send(HostNote(f"modules of the notebook's folder could not be written: {error}"))
                    self._modules.refuse(connection)
            case CloseHost(reason):
                self._ended = f"the notebook does not use this host: {reason}" if reason else _STOPPED

    def _deliver(self) -> None:
        waiting: list[_Held] = []
        blocked: set[int] = set()
        for held in self._held:
            message = held.message
            late = not self._receiver.settled.issuperset(held.needs)
            # A task waits for its values, and later tasks of the rank wait for it. Control messages overtake both.
            if late or (message.ordered and not blocked.isdisjoint(held.ranks)):
                waiting.append(held)
                blocked.update(held.ranks)
                continue
            data, *frames = held.frames
            for rank in message.ranks:
                if rank not in held.ranks:
                    continue
                if b"GetStack" in bytes(data[:32]):
                    self._asked.setdefault(rank, time.monotonic() + _LOOK_AFTER)
                self._hub.send_encoded(rank, bytes(data), [_frozen(frame) for frame in frames])
        self._held = waiting

    def _fork(self, request: ForkRank) -> None:
        given = {os.fsdecode(name): os.fsdecode(value) for name, value in request.env.items()}
        environment = rank_environment(os.environ, given, threads=request.threads, interface=self._interface)
        # Paths need not be valid text, but a note has to be.
        cwd = Path(os.fsdecode(request.cwd))
        # The functions of `os` raise no error below a folder that is closed to this user.
        if not (os.path.isdir(cwd) and os.access(cwd, os.X_OK)):  # noqa: PTH112
            cwd = _working_directory()
            missing, used = (os.fsencode(folder).decode(errors="backslashreplace") for folder in (request.cwd, cwd))
            text = f"{missing} does not exist on this host or cannot be entered"
            self._send(HostNote(f"{text}: rank {request.rank} starts in {used}"))
        known = [entry for entry in request.path if entry in (b"", OWN_FOLDERS) or os.path.exists(entry)]  # noqa: PTH110
        self._modules.own_folder = cwd
        self._pids.pop(request.rank, None)
        self._asked.pop(request.rank, None)
        # What still waits for values is for an earlier process of the rank.
        for held in self._held:
            held.ranks.discard(request.rank)
        try:
            downlink = self._hub.open_downlink(request.rank, request.incarnation)
            # The hub has made the folder again if it was removed.
            self._requests.renew()
            self._modules.renew()
            self._launcher.fork(
                msgspec.structs.replace(
                    request,
                    # Of the environment: the variable may be the notebook's, or that of this host.
                    threads=threads_per_rank(environment, request.threads),
                    env={os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
                    cwd=os.fsencode(cwd),
                    path=path_on_host(known, map(os.fsencode, sys.path)),
                    uplink=self._hub.uplink,
                    downlink=downlink,
                    segments=str(self._folders.segments),
                    logs=str(self._folders.logs),
                    store=self._requests.address,
                    modules=self._modules.address if request.modules else "",
                )
            )
        except (RankbookError, OSError) as error:
            self._send(not_started(request, error))

    # From this host

    def _handle_report(self, report: FromForkserver) -> None:
        match report:
            case ClusterOpened(port, devices, problem, unexpected):
                slots = self._slots if self._slots is not None else devices or 1
                cores, ids, liveness_port = usable_cores(), core_ids(), self._liveness.port
                if cores != len(ids):  # agents of one node share its quota, whatever their cores are
                    ids = ()
                self._send(HostReady(slots, devices, cores, port, liveness_port, problem, unexpected, ids))
            case RankForked(rank, incarnation, pid):
                self._pids[rank] = (incarnation, pid)
                self._send(report)
            case RankExited(rank, incarnation):
                path = journal_path(self._folders.segments, rank, incarnation)
                exited = msgspec.structs.replace(
                    report, journal=tuple(read_journal(path)), crash=read_crash(path), ordered=True
                )
                # What the rank has sent comes over another socket, in no particular order.
                self._exits.append((time.monotonic() + _EXIT_DELAY, exited))
            case _:
                pass

    def _send_exits(self) -> None:
        now = time.monotonic()
        if all(when > now for when, _ in self._exits):
            return
        latest = now if self._relay_up() else now - _LATEST_EXIT
        for entry in [entry for entry in self._exits if entry[0] <= latest]:
            self._exits.remove(entry)
            if self._pids.get(entry[1].rank, (0, 0))[0] == entry[1].incarnation:
                self._pids.pop(entry[1].rank)
                self._asked.pop(entry[1].rank, None)
            # Not what other hosts have sent: their processes may have the same PID.
            self._segments.clear(entry[1].pid, keep=self._receiver.names)
            self._send(entry[1])

    def _relay_up(self) -> bool:
        """Relay what the ranks have sent. Return False if some may be left."""
        senders: list[FromRank] = []
        batch: list[Bytes] = []
        size = relayed = messages = 0
        while is_next := messages < _MESSAGES_AT_ONCE and relayed < _BYTES_AT_ONCE:
            messages += 1
            try:
                received = self._hub.receive_encoded()
            except UnreadableMessage:
                continue
            if received is None:
                break
            sender, data, frames = received
            self._asked.pop(sender.rank, None)
            message_size = len(data) + sum(map(len, frames))
            relayed += message_size
            if message_size > _LARGEST:
                text = f"rank {sender.rank} was killed because it sent a message of {format_bytes(message_size)}"
                self._send(HostNote(f"{text}, more than {format_bytes(_LARGEST)}"))
                self._launcher.kill(*sender)
                continue
            if self._must_drop(sender.rank, data, size + message_size):
                continue
            # A name of a segment in the bytes is not proof of one, but rare otherwise.
            needs, cell = _segments_of(data) if b"segment-" in bytes(data) else ((), None)
            if needs:
                self._flush(senders, batch)
                senders, batch, size = [], [], 0
                single = (FromRank(*sender, 1 + len(frames)),)
                if cell is not None and cell == self._stay.get(sender.rank):
                    self._receiver.settled.update(needs)
                    self._send(FromRanks(single, stay=needs), data, *frames)
                else:
                    self._send_segments(needs)
                    self._send(FromRanks(single, needs), data, *frames)
                continue
            senders.append(FromRank(*sender, 1 + len(frames)))
            batch += [data, *frames]
            size += message_size
            if size > _BATCH:
                self._flush(senders, batch)
                senders, batch, size = [], [], 0
        self._flush(senders, batch)
        return is_next

    # While the coordinator is not reached, or reads slowly, messages of the ranks wait in the link. The ranks are not
    # made to wait, because their control threads send over the same socket, and a rank that floods the link must still
    # be interrupted. Most messages are bounded by themselves: a rank sends `MAX_CELL_OUTPUT` bytes of text in a cell,
    # one result, and replies to what it was asked. Displays have no limit, and can be large. (Messages of widgets have
    # none either, but are small, and a widget that misses one is wrong from then on.)
    def _must_drop(self, rank: int, data: memoryview, size: int) -> bool:
        """Return True for a display for which there is no room. The first one is reported."""
        waiting = self._link.pending(MESSAGES) + size
        if waiting <= _MOST_WAITING:
            self._drops_displays &= waiting > _MOST_WAITING // 2
            return False
        if not _is_display(data):
            return False
        if not self._drops_displays:
            self._drops_displays = True
            text = f"displays of rank {rank} and perhaps of others were dropped"
            self._send(HostNote(f"{text}: {format_bytes(_MOST_WAITING)} of output wait for the notebook"))
        return True

    def _flush(self, senders: list[FromRank], frames: list[Bytes]) -> None:
        if senders:
            self._send(FromRanks(tuple(senders)), *frames)

    def _send_segments(self, names: tuple[str, ...]) -> None:
        for name in names:
            if (failed := self._sender.add(name, unlink=True)) is not None:
                self._link.send(VALUES, [encode(failed)])
        self._send_parts()

    def _send_parts(self) -> None:
        while self._link.pending(VALUES) < AHEAD and (part := self._sender.next_part()) is not None:
            self._link.send(VALUES, [encode(part[0]), part[1]])

    def _look_at_ranks(self) -> None:
        now = time.monotonic()
        for rank, due in tuple(self._asked.items()):
            if now < due:
                continue
            if rank not in self._pids:  # its request came after the exit of the process, or before its start
                del self._asked[rank]
                continue
            self._asked[rank] = now + 1.0
            incarnation, pid = self._pids[rank]
            info = process_info(pid)
            if info is None:
                self._send(ProcessState(rank, incarnation, "", 0.0, False, False))
            else:
                self._send(ProcessState(rank, incarnation, info.status, info.cpu_seconds, info.stopped, info.traced))

    def _send(self, message: Message, *frames: Bytes) -> None:
        self._link.send(MESSAGES, [encode(message), *frames])


class ModuleCopies:
    """The modules of the notebook's folder that ranks of this host have imported, in a folder below `folder`.

    `own_folder` is the working directory of the ranks, which may have the same files.
    """

    def __init__(self, folder: Path) -> None:
        self.own_folder = _working_directory()
        self._listener = RequestListener(folder / "modules")
        self.address = self._listener.address
        self.filenos = self._listener.filenos
        self.close = self._listener.close
        self._folder = modules_folder(self.address)
        self._folder.mkdir(mode=0o700)
        # The notebook sends a file once.
        self._written: dict[str, bytes] = {}
        self._unwritten: dict[str, bytes] = {}

    def renew(self) -> None:
        """Make what was removed of the folders and files again, and listen again. Raises `OSError`."""
        ensure_private_folder(self._folder.parent)
        self._listener.renew()
        was_removed = not self._folder.exists()
        ensure_private_folder(self._folder)
        if was_removed:
            for name, content in {**self._written, **self._unwritten}.items():
                self._write_file(name, content, is_change=True)

    def receive(self) -> list[ModuleRequest]:
        """Return what to ask the notebook for."""
        return [
            ModuleRequest(connection, request.decode(errors="replace"), self._digests(request))
            for connection, request in self._listener.receive()
        ]

    def write(self, connection: int, files: dict[str, bytes], removed: tuple[str, ...] = ()) -> None:
        """Write and remove files as the notebook has asked, and reply to the rank that waits for them, if one does.

        What could not be written is written at the next call. Raises `OSError`.
        """
        for name in (*files, *removed):
            if not (self._folder / name).resolve().is_relative_to(self._folder.resolve()):
                raise ProtocolError(f"invalid name of a module's file: {name!r}")
        self._unwritten |= files
        for name in removed:
            self._remove(name)
        if has_written := bool(self._unwritten):
            self.renew()
        for name, content in tuple(self._unwritten.items()):
            self._write_file(name, content, is_change=not connection)
            self._unwritten.pop(name, None)
        self._listener.reply(connection, b"1" if has_written else b"")

    def refuse(self, connection: int) -> None:
        """Reply to the rank that waits for files that it does not get them."""
        self._listener.reply(connection, b"")

    def _write_file(self, name: str, content: bytes, *, is_change: bool) -> None:
        path = self._folder / name
        if name.endswith("/"):
            self._written[name] = content
            path.mkdir(parents=True, exist_ok=True)
            return
        # A change of a file in a folder that this host shares with the notebook's.
        if is_change and not path.exists() and self._digest(name) == digest(content):
            return
        self._written[name] = content
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.fresh")
        fresh.write_bytes(content)
        fresh.replace(path)
        self._remove_compiled(path)

    def _remove(self, name: str) -> None:
        self._written.pop(name, None)
        self._unwritten.pop(name, None)
        path = self._folder / name
        if name.endswith("/"):
            with contextlib.suppress(OSError):  # it has other modules
                path.rmdir()
            return
        path.unlink(missing_ok=True)
        self._remove_compiled(path)
        # A folder without files would be imported as an empty package.
        folder = path.parent
        while folder != self._folder and f"{folder.relative_to(self._folder).as_posix()}/" not in self._written:
            with contextlib.suppress(OSError):
                (folder / "__pycache__").rmdir()
            try:
                folder.rmdir()
            except OSError:  # it has other modules, or was removed before
                break
            folder = folder.parent

    @staticmethod
    def _remove_compiled(path: Path) -> None:
        # Compiled files are compared by seconds, and a file may change twice in one.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)

    def _digests(self, request: bytes) -> dict[str, str]:
        """Return the digests of this host's own files of the module, which are imported if they are the same."""
        name = request.decode(errors="replace").replace(".", "/")
        # Modules of a package that was sent are looked for where it lies.
        if (self._folder / name).parent != self._folder and (self._folder / name).parent.is_dir():
            return {}
        digests = {file: self._digest(file) for file in (f"{name}/__init__.py", f"{name}.py")}
        return {file: value for file, value in digests.items() if value}

    def _digest(self, file: str) -> str:
        try:
            return digest((self.own_folder / file).read_bytes())
        except (OSError, ValueError):
            return ""


def _segments_of(data: memoryview) -> tuple[tuple[str, ...], int | None]:
    """Return the segments that a rank's message refers to, and the cell that it answers."""
    try:
        message = decode_from_rank(data)
    except ProtocolError:  # the coordinator reports it
        return (), None
    return message_segments(message), message.cell if isinstance(message, Done) else None


def _is_display(data: memoryview) -> bool:
    try:
        return isinstance(decode_from_rank(data), Display)
    except ProtocolError:  # the coordinator reports it
        return False


def _working_directory() -> Path:
    """Return the working directory; the root folder if it was removed."""
    try:
        return Path.cwd()
    except OSError:
        return Path("/")


def _frozen(frame: Bytes) -> bytes | memoryview:
    return bytes(frame) if isinstance(frame, bytearray) else frame


# Command line ---------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent and return the exit code: 0 after a stop, 1 after any other end, 2 for invalid arguments."""
    options = _parser().parse_args(arguments)
    try:
        return _serve(_read_connection(options.connect), options)
    except AgentRefused as error:
        _report(f"the notebook refused this host: {error}")
        return 1
    except InvalidArgument as error:
        _report(str(error))
        return 2
    except RankbookError as error:
        _report(str(error))
        return 1


def _serve(connection: Connection, options: argparse.Namespace) -> int:
    """Offer this host until the end, also after the notebook has given it up. Return the exit code."""
    # First of all: the forkserver imports torch, which takes longer than everything below.
    launcher = LocalLauncher()
    try:
        if connection.has_own_key and options.connect == "-":
            _wait_allowed(connection)
        while True:
            try:
                reason = _make_agent(connection, launcher, options).run()
            except HostLost as error:
                _report(f"{error}; starting again")
                launcher = LocalLauncher()
                continue
            _report(f"ends because {reason}")
            return 0 if reason == _STOPPED else 1
    finally:
        launcher.terminate()


def _report(text: str) -> None:
    sys.stderr.write(f"rankbook.agent: {text}\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rankbook.agent",
        description="Offer this host to a notebook that waits with `%%distributed start --launcher env`.".replace(
            "%%", "%"
        ),
    )
    parser.add_argument(
        "--connect",
        metavar="FILE",
        help=f"connection file that the notebook has written; - reads it from standard input, and the variable"
        f" {CONNECT} may hold its text",
    )
    parser.add_argument("--slots", type=_positive, metavar="N", help="ranks that this host takes (one per CUDA device)")
    parser.add_argument("--node", type=int, metavar="N", help="number of this node, from 0, for the order of the ranks")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _read_connection(name: str | None) -> Connection:
    # Removed at once: the ranks inherit this process's environment.
    text = os.environ.pop(CONNECT, "")
    if name is None:
        if not text:
            raise InvalidArgument("no connection file: use --connect FILE, or --connect - for standard input")
        return decode_connection(text, CONNECT)
    if name == "-":
        return decode_connection(sys.stdin.readline(), "standard input")
    try:
        return decode_connection(Path(name).read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            f"cannot read {name} ({getattr(error, 'strerror', None) or error}): the notebook writes it when it starts"
            " and removes it when it stops; use --connect - if the hosts do not share a folder"
        ) from error


def _wait_allowed(connection: Connection) -> None:
    """Say the public key, and wait for a line that says that the notebook allows it."""
    sys.stdout.write(f"{OWN_KEY}{connection.keys.client_public.decode()}\n")
    sys.stdout.flush()
    # If who has started this process ends, so does the input.
    if not sys.stdin.readline():
        raise InvalidArgument("the launcher has ended before the notebook knew the key of this agent")


def _make_agent(connection: Connection, launcher: LocalLauncher, options: argparse.Namespace) -> Agent:
    identity = read_identity(os.environ)
    # A launcher that has started several tasks on this node has started one agent per rank.
    is_task = options.slots is None and (identity.local_size or 1) > 1
    node = options.node if options.node is not None else identity.node
    # Without a number of its own, the node of a single task has that of the task.
    if node is None and not is_task:
        node = identity.rank
    _forget_torchrun(os.environ, is_task=is_task)
    address = source_address(connection.address, connection.port)
    description = HostDescription(
        name=os.environ.get("SLURMD_NODENAME") or platform.node(),
        rankbook=package_version("rankbook"),
        protocol=str(PROTOCOL_VERSION),
        torch=package_version("torch"),
        python=".".join(platform.python_version_tuple()[:2]),
        pid=str(os.getpid()),
        address=address,
        node="" if node is None else str(node),
        rank=str(identity.rank) if is_task else "",
        local_rank=str(identity.local_rank) if is_task and identity.local_rank is not None else "",
    )
    link = AgentLink(
        connection.address, connection.port, connection.keys, secrets.token_hex(8), encode_description(description)
    )
    return Agent(
        connection,
        link,
        launcher,
        address=address,
        slots=1 if is_task else options.slots,
        outlives_terminal=_outlives_terminal(options.connect),
    )


_FOR_WORKERS = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS")
"""Variables that torchrun sets for its own workers: this agent is one, and its ranks are none."""


def _forget_torchrun(environment: MutableMapping[str, str], *, is_task: bool) -> None:
    """Remove what torchrun has set by itself for its worker, which the ranks would inherit.

    Source: `torch.distributed.elastic.agent.server.local_elastic_agent` and `torch.distributed.run`.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return
    for name in _FOR_WORKERS:
        environment.pop(name, None)
    # Its defaults, where the user has set none. The number of threads is set for several tasks on a node.
    if environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "1":
        del environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    if is_task and environment.get("OMP_NUM_THREADS") == "1":
        del environment["OMP_NUM_THREADS"]


def _outlives_terminal(source: str | None) -> bool:
    """Return True for an agent that was started by hand with nohup. `source` is where the connection comes from.

    Who writes the connection to the standard input, or sets a variable, ends the agent with its parent.
    """
    return source not in (None, "-") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


if __name__ == "__main__":
    sys.exit(main())
