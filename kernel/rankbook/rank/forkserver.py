"""The forkserver: a process that imports torch and IPython once and forks the ranks.

`python -m rankbook.rank.forkserver FD` speaks the forkserver's messages over the socket FD: it forks, kills and reaps
ranks. It uses neither CUDA nor threads, because a process that does cannot fork safely. When the socket closes, the
notebook is gone: the sessions of all ranks are killed, the cluster's folders are removed, and the process exits. A
detached cluster first waits some time for another notebook to claim it.

`Forkserver` is the main loop. `Ownership` tracks which notebook it serves: the one that started it, or one that has
claimed a detached cluster since. `RecentKills` reads the OOM killer's counter of the control group, so that a rank's
exit by SIGKILL can be explained.
"""

from __future__ import annotations

import contextlib
import gc
import hmac
import importlib
import importlib.util
import mmap
import os
import secrets
import select
import shutil
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec
import psutil

from rankbook.errors import ProtocolError
from rankbook.process_identity import hold_folder
from rankbook.protocol.forkserver import (
    CloseCluster,
    ClusterClosed,
    ClusterOpened,
    ForkRank,
    ForkserverUp,
    KillRank,
    OpenCluster,
    RankExited,
    RankForked,
)
from rankbook.protocol.messages import Message, ToForkserver, decode_to_forkserver
from rankbook.protocol.reattach import ClaimAccepted, ClaimCluster, ClaimRejected, DetachCluster
from rankbook.rank import os_utils
from rankbook.transport.framed_socket import MessageStream

PRELOAD_WHEN_IDLE = (
    "torch.distributed.device_mesh",
    "torch.distributed.algorithms.join",
    "sympy",
    "torch.fx.passes.shape_prop",
    "torch.utils._sympy.functions",
    "torch.fx.experimental.symbolic_shapes",
    "torch._functorch.config",
    "torch._dynamo.config",
    "torch._dynamo.utils",
    "torch._dynamo",
    "torch.optim",
    "torch.distributed.fsdp",
    "rankbook.runtime.accelerator",
    "matplotlib_inline.backend_inline",
)
"""Modules that the first optimizer, DDP, Accelerator or figure imports (1.3 s for torch._dynamo).

In steps short enough that a request to fork never waits long for an import."""


_OWNER = "RANKBOOK_OWNER"
"""Environment variable of all processes that a rank's cells start. Its value names the cluster and the rank."""


@dataclass
class Child:
    """A rank's process, as seen by its parent.

    `outputs` are the read ends of its stdout and stderr pipes. `mark` is in the environment of all processes that its
    cells start.
    """

    request: ForkRank
    pid: int
    outputs: tuple[int, int]
    mark: str

    def started(self, process: psutil.Process) -> bool:
        """Return True if this rank started the process.

        Such a process has the mark in its environment or, if it was forked without exec, the output pipes.
        """
        if os_utils.environment_of(process).get(_OWNER) == self.mark:
            return True
        return any(os_utils.holds_pipe(process, os.fstat(descriptor).st_ino) for descriptor in self.outputs)


class Forkserver:
    """Serve one notebook process, whose process id is `notebook`, over `stream`."""

    def __init__(self, stream: MessageStream[ToForkserver], notebook: int) -> None:
        self._owner = Ownership(stream, notebook)
        self._notebook = notebook
        self._exits: dict[int, RankExited] = {}
        self._children: dict[int, Child] = {}
        self._token = secrets.token_hex(8)
        self._folders: tuple[str, ...] = ()
        self._locks: list[int] = []
        self._kills = RecentKills(find_counter())
        self._live_read, self._live_write = os.pipe()
        self._signal_read, self._signal_write = os.pipe()
        for end in (self._signal_read, self._signal_write):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._signal_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Serve until the notebook is gone and, if the cluster is detached, no other one has claimed it in time."""
        owner = self._owner
        preload = list(PRELOAD_WHEN_IDLE)
        while True:
            readable = self._wait(0.05 if preload else 1.0)
            if not readable and preload and not self._children and not owner.keeps:
                with _watching(owner.stream, self._notebook, self._folders):
                    self._preload(preload.pop(0))
            # Before a detached cluster's owner counts as gone, its last messages are read: one may be CloseCluster.
            if not owner.keeps and not owner.look():
                break
            for message in owner.stream.read():
                self._handle(message)
            self._kills.look(time.monotonic())
            self._reap()
            if not owner.look():
                break
            if owner.hear_claims(len(self._children) + len(self._exits)):
                self._tell_ranks()
        self._close()

    def _wait(self, timeout: float) -> bool:
        readable, _, _ = select.select([*self._owner.files(), self._signal_read], [], [], timeout)
        if self._signal_read in readable:
            os_utils.read_available(self._signal_read)
        return bool(readable)

    @staticmethod
    def _preload(name: str) -> None:
        try:
            known = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            known = False
        if known:
            importlib.import_module(name)

    def _handle(self, message: ToForkserver) -> None:
        match message:
            case OpenCluster():
                self._open(message)
            case ForkRank():
                self._fork(message)
            case KillRank():
                for child in self._children.values():
                    if (child.request.rank, child.request.incarnation) == (message.rank, message.incarnation):
                        self._kill(child.pid)
            case DetachCluster():
                self._owner.keep(message)
            case CloseCluster():
                self._owner.let_go()
                self._close()
                self._owner.send(ClusterClosed())

    def _open(self, message: OpenCluster) -> None:
        self._folders = message.folders
        self._locks = [lock for folder in message.folders if (lock := hold_folder(Path(folder))) is not None]
        self._owner.send(ClusterOpened(master_port=_free_port(), devices=self._count_devices()))

    def _count_devices(self) -> int:
        """Return the number of CUDA devices, counted in a child process.

        Counting may initialize CUDA, and a process that has initialized it cannot fork ranks.
        """
        import torch

        if torch.version.cuda is None and torch.version.hip is None:
            return 0
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, str(torch.cuda.device_count()).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as answer:
            text = answer.read()
        os.waitpid(pid, 0)
        return int(text or 0)

    def _fork(self, message: ForkRank) -> None:
        out_read, out_write = os_utils.output_pipe()
        err_read, err_write = os_utils.output_pipe()
        mark = f"{self._token}-{message.rank}-{message.incarnation}"
        message.env[_OWNER.encode()] = mark.encode()
        gc.freeze()  # or the garbage collector would write to, and so copy, all pages of torch in every rank
        pid = os.fork()
        if pid == 0:
            self._become_child()
            for child in self._children.values():
                for descriptor in child.outputs:
                    os.close(descriptor)
            from rankbook.rank.main import run_rank

            outputs = (out_read, out_write, err_read, err_write)
            run_rank(message, outputs=outputs, liveness=self._live_read, owned=self._owner.there)
        os.close(out_write)
        os.close(err_write)
        self._children[pid] = Child(message, pid, (out_read, err_read), mark)
        self._exits.pop(message.rank, None)
        self._owner.send(RankForked(rank=message.rank, incarnation=message.incarnation, pid=pid))

    def _become_child(self) -> None:
        os_utils.die_with_parent()
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in (self._live_write, self._signal_read, self._signal_write):
            os.close(descriptor)
        self._owner.forget()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is not None:
                self._tell_exit(child, os.waitstatus_to_exitcode(status))

    # Kill what the rank started before reading the pipes, so that no writer is left. The exit is stored for a later
    # owner, with its output only if there is no owner now.
    def _tell_exit(self, child: Child, code: int) -> None:
        os_utils.kill_session(child.pid)
        os_utils.kill_leftovers(child.started)
        texts = [os_utils.read_available(descriptor, most=4 << 20) for descriptor in child.outputs]
        for descriptor in child.outputs:
            os.close(descriptor)
        exited = RankExited(
            rank=child.request.rank,
            incarnation=child.request.incarnation,
            pid=child.pid,
            code=code,
            memory_kills=self._kills.recent(time.monotonic()),
            stdout=texts[0],
            stderr=texts[1],
        )
        self._owner.send(exited)
        self._exits[exited.rank] = (
            msgspec.structs.replace(exited, stdout=b"", stderr=b"") if self._owner.there() else exited
        )

    def _tell_ranks(self) -> None:
        """Send the state of every rank to a new owner."""
        for child in self._children.values():
            message = RankForked(rank=child.request.rank, incarnation=child.request.incarnation, pid=child.pid)
            self._owner.send(message)
        for exited in self._exits.values():
            self._owner.send(exited)

    @staticmethod
    def _kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)  # just forked, it may not lead a session yet
        os_utils.kill_session(pid)

    def _close(self) -> None:
        for pid in tuple(self._children):
            self._kill(pid)
        deadline = time.monotonic() + 5
        while self._children and time.monotonic() < deadline:
            self._reap()
            select.select([self._signal_read], [], [], 0.05)
        os_utils.kill_leftovers(self._is_leftover)
        _remove(self._folders)
        self._folders = ()
        while self._locks:
            os.close(self._locks.pop())
        self._exits.clear()

    def _is_leftover(self, process: psutil.Process) -> bool:
        """Return True if a rank of this cluster started the process. Called when all ranks are gone."""
        return sys.platform == "linux" or os_utils.environment_of(process).get(_OWNER, "").startswith(self._token)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _remove(folders: tuple[str, ...]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run the forkserver. Entry point of the process."""
    began = time.perf_counter()
    notebook = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os_utils.adopt_orphans()
    stream: MessageStream[ToForkserver] = MessageStream(socket.socket(fileno=int(sys.argv[1])), decode_to_forkserver)
    with _watching(stream, notebook, ()):
        import torch
        import torch.distributed

        from rankbook.rank import main as rank_main

        rank_main.warm_up_shell()
    stream.send(
        ForkserverUp(torch=str(torch.__version__), python=sys.version.split()[0], seconds=time.perf_counter() - began)
    )
    Forkserver(stream, notebook).serve()


@contextlib.contextmanager
def _watching(stream: MessageStream[ToForkserver], notebook: int, folders: tuple[str, ...]) -> Iterator[None]:
    """Exit soon after the notebook does, inside a context in which nothing reads the stream (long imports).

    A timer signal checks every 0.2 s. Also removes the folders, and those of an unread OpenCluster.
    """

    def look(_number: int, _frame: object) -> None:
        if os.getppid() != notebook or os_utils.is_hung_up(stream.fileno()):
            _remove(folders)
            for message in stream.read():
                if isinstance(message, OpenCluster):
                    _remove(message.folders)
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.siginterrupt(signal.SIGALRM, False)  # restart the system calls of imports in progress
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


_CLAIM_SECONDS = 5.0
"""Seconds that a process may take, once connected, to send its claim."""

Stream = MessageStream[ToForkserver]


class Ownership:
    """Track which notebook process owns the cluster, and accept claims for a detached cluster.

    The first owner is the parent process `notebook`, over `stream`. Forked ranks share the flag behind `there`.
    """

    def __init__(self, stream: Stream, notebook: int) -> None:
        self.stream = stream
        self.lost = 0.0
        self._gone: Callable[[], bool] = lambda: os.getppid() != notebook
        self._pid = notebook
        self._kept: DetachCluster | None = None
        self._listener: socket.socket | None = None
        self._callers: list[tuple[Stream, int, float]] = []
        self._flag = mmap.mmap(-1, 1)  # shared with all ranks forked from here on
        self._flag[0] = 1

    def there(self) -> bool:
        """Return True while the cluster has an owner. Works in the ranks too, through shared memory."""
        return self._flag[0] == 1

    @property
    def keeps(self) -> bool:
        """Return True if the cluster outlives its owner."""
        return self._kept is not None

    def files(self) -> list[int]:
        """Return the file descriptors to poll."""
        files = [caller.fileno() for caller, _, _ in self._callers]
        if self._listener is not None:
            files.append(self._listener.fileno())
        if self.there():
            files.append(self.stream.fileno())
        return files

    def send(self, message: Message) -> None:
        """Send a message to the owner, if there is one."""
        if self.there():
            self.stream.send(message)

    def keep(self, message: DetachCluster) -> None:
        """Detach the cluster: let it outlive its owner, and listen for claims."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(message.address)
        self._listener.listen(8)
        self._kept = message

    def let_go(self) -> None:
        """Stop accepting claims: the cluster is being closed."""
        self._kept = None
        self._hang_up()

    def forget(self) -> None:
        """Close the parent's sockets. Called in a forked child."""
        self.stream.close()
        self._hang_up()

    def look(self) -> bool:
        """Check whether the owner is gone; return False if the cluster must end."""
        if self.there() and (self.stream.closed or self._gone()):
            self.stream.close()
            self._flag[0] = 0
            self.lost = time.monotonic()
        return self.there() or (self._kept is not None and time.monotonic() - self.lost < self._kept.seconds)

    def hear_claims(self, ranks: int) -> bool:
        """Answer pending claims; return True if one was accepted.

        `ranks` is the number of RankForked and RankExited messages that the new owner then receives.
        """
        if self._listener is not None:
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._welcome(self._listener.accept()[0])
        claimed = False
        for caller, pid, deadline in self._callers:
            if caller.closed or time.monotonic() > deadline:
                caller.close()
                continue
            with contextlib.suppress(ProtocolError):
                for message in caller.read():
                    claimed = self._answer(caller, pid, message, ranks) or claimed
                continue
            caller.close()
        self._callers = [claim for claim in self._callers if claim[0] is not self.stream and not claim[0].closed]
        return claimed

    def _welcome(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        pid, user = os_utils.peer_credentials(connection)
        if user not in (None, os.getuid()):
            connection.close()
            return
        caller = MessageStream(connection, decode_to_forkserver)
        self._callers.append((caller, pid or 0, time.monotonic() + _CLAIM_SECONDS))

    def _answer(self, caller: Stream, pid: int, message: ToForkserver, ranks: int) -> bool:
        if not isinstance(message, ClaimCluster) or not self._knows(message.token):
            caller.send(ClaimRejected(owner=0))
            caller.close()
            return False
        if self.there():
            caller.send(ClaimRejected(owner=self._pid))
            caller.close()
            return False
        self._pid = pid or message.pid
        self._gone = os_utils.exit_watcher(self._pid)
        self.stream = caller
        self._flag[0] = 1
        caller.send(ClaimAccepted(ranks=ranks, lost=self.lost))
        return True

    def _knows(self, token: str) -> bool:
        return self._kept is not None and hmac.compare_digest(token.encode(), self._kept.token.encode())

    def _hang_up(self) -> None:
        for caller, _, _ in self._callers:
            caller.close()
        self._callers = []
        if self._listener is not None:
            self._listener.close()
            self._listener = None


_PROCESS = Path("/proc/self")
_EVERY = 1.0
_RECENT = 10.0
"""Seconds in which a kill counts as recent: a victim with much memory takes some time to exit."""


def find_counter(process: Path = _PROCESS) -> Path | None:
    """Return the file with the OOM kill count of our control group, or None.

    The kernel counts a kill in the victim's group, whichever limit or shortage caused it (cgroup-v2.rst, `oom_kill`;
    version 1 has the same line in `memory.oom_control`).
    """
    return next((file for file in _counters(process) if read_counter(file) is not None), None)


def read_counter(file: Path) -> int | None:
    """Return the number of OOM kills so far; None if the file does not count them."""
    try:
        lines = file.read_text().splitlines()
    except OSError:  # no memory controller, or the root group, which has no counter
        return None
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None


class RecentKills:
    """Count the OOM killer's victims of the last seconds.

    Older kills say nothing about a rank that exits now.
    """

    def __init__(self, counter: Path | None) -> None:
        self._counter = counter
        self._changes: deque[tuple[float, int]] = deque()
        self._next = 0.0

    def look(self, now: float) -> None:
        """Read the counter, at most once a second; `now` is in seconds on any clock."""
        if now >= self._next:
            self._read(now)

    def recent(self, now: float) -> int:
        """Return the number of recent OOM kills; 0 if it is unknown."""
        self._read(now)
        return self._changes[-1][1] - self._changes[0][1] if self._changes else 0

    def _read(self, now: float) -> None:
        self._next = now + _EVERY
        count = read_counter(self._counter) if self._counter is not None else None
        if count is not None and (not self._changes or self._changes[-1][1] != count):
            self._changes.append((now, count))
        while len(self._changes) > 1 and self._changes[1][0] < now - _RECENT:
            self._changes.popleft()


def _counters(process: Path) -> Iterator[Path]:
    """Yield the files that may contain the counter.

    A machine can mount both versions of control groups; the memory controller belongs to one of them.
    """
    try:
        groups = (process / "cgroup").read_text().splitlines()
        mounts = [_Mount(line) for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:  # not Linux
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        kind, name = ("cgroup", "memory.oom_control") if controllers else ("cgroup2", "memory.events")
        for mount in mounts:
            if mount.kind == kind and (not controllers or "memory" in mount.options):
                yield mount.folder_of(path) / name


class _Mount:
    """One line of `/proc/self/mountinfo` (proc_pid_mountinfo(5))."""

    def __init__(self, line: str) -> None:
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        self.root = PurePosixPath(_plain(fields[3]))
        self.point = Path(_plain(fields[4]))
        self.kind = kinds[0]
        self.options = kinds[-1].split(",")

    def folder_of(self, group: str) -> Path:
        """Return the folder of the control group `group`.

        A container sees its own group at the mount point, whatever the group's path is outside.
        """
        path = PurePosixPath(group)
        return self.point / path.relative_to(self.root) if path.is_relative_to(self.root) else self.point


def _plain(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


if __name__ == "__main__":
    main()
