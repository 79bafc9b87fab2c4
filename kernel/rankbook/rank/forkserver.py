"""The forkserver: a process that imports torch and IPython once and forks the ranks.

`python -m rankbook.rank.forkserver FD` speaks the forkserver's messages over the socket FD: it forks, kills and reaps
ranks. It uses neither CUDA nor threads, because a process that does cannot fork safely. When the socket closes, the
notebook is gone: the sessions of all ranks are killed, the cluster's folders are removed, and the process exits. A
detached cluster first waits some time for another notebook to claim it.

`Forkserver` is the main loop. `Ownership` tracks which notebook it serves: the one that started it, or one that has
claimed a detached cluster since. `control_groups.RecentKills` reads the OOM killer's counter, so that a rank's
exit by SIGKILL can be explained.
"""

from __future__ import annotations

import contextlib
import gc
import hmac
import importlib
import importlib.util
import json
import mmap
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from rankbook.control_groups import RecentKills, find_counter
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
    not_started,
)
from rankbook.protocol.messages import (
    ClaimAccepted,
    ClaimCluster,
    ClaimRejected,
    DetachCluster,
    Message,
    ToForkserver,
    decode_to_forkserver,
)
from rankbook.rank import os_utils
from rankbook.transport.framed_socket import MessageStream, wait_readable

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


_FIRST_RANKS_SECONDS = 10.0
"""Seconds after the start of a cluster in which its first ranks are expected, and nothing is preloaded.

They would wait for it, and a forkserver that still imports torch on the same cores would too."""

_PRELOAD = b"RANKBOOK_PRELOAD"
"""Environment variable: `start` imports `PRELOAD_WHEN_IDLE` before the first rank is forked, not only when idle."""

_VISIBLE = b"CUDA_VISIBLE_DEVICES"
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)([a-z]?)")

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
        self._opened = OpenCluster(folders=())
        self._locks: list[int] = []
        self._not_imported = deque(PRELOAD_WHEN_IDLE)
        self._preload_from = 0.0
        self._oom_kills = RecentKills(find_counter())
        # Nothing is ever written to this pipe. The forkserver holds its only write end, which the system closes with
        # the process, however that ends. The ranks watch the read end.
        self._liveness_read, self._liveness_write = os.pipe()
        self._signal_read, self._signal_write = os.pipe()
        for end in (self._signal_read, self._signal_write):
            os.set_blocking(end, False)
        # The handler does nothing, but without one the signal would be ignored and `set_wakeup_fd` would write no byte.
        # The byte ends the `select`, so that an exit is reported at once.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._signal_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Serve until the notebook is gone and, if the cluster is detached, no other one has claimed it in time."""
        owner = self._owner
        while True:
            # Only while nobody needs the process: no message, no rank that runs or is expected, no detached cluster. Or
            # for a rank that replaces a dead one and restores its training state, for which a new process would need
            # seconds.
            is_idle = not self._children and time.monotonic() >= self._preload_from
            may_preload = self._not_imported and not owner.is_detached and (is_idle or self._is_protected())
            # The timeout lets the owner's exit and the OOM counter be looked at without an event. While modules are
            # preloaded, it is the pause before the next one.
            readable = self._wait(0.05 if may_preload else 1.0)
            if may_preload and not readable:
                self._preload_next()
            # Before a detached cluster's owner counts as gone, its last messages are read: one may be CloseCluster.
            if not owner.is_detached and not owner.check_owner():
                break
            for message in owner.stream.read():
                self._handle(message)
            self._oom_kills.update(time.monotonic())
            self._reap()
            if not owner.check_owner():
                break
            if owner.accept_claims(len(self._children) + len(self._exits)):
                self._send_rank_states()
        self._close()

    def _wait(self, timeout: float) -> bool:
        has_unread = self._owner.stream.has_unread
        readable = wait_readable([*self._owner.files(), self._signal_read], 0.0 if has_unread else timeout)
        if self._signal_read in readable:
            os_utils.read_available(self._signal_read)
        return bool(readable) or has_unread

    def _is_protected(self) -> bool:
        return any(any(Path(folder).glob("snapshot-*.header")) for folder in self._opened.folders)

    def _preload_next(self) -> None:
        name = self._not_imported.popleft()
        # A module that fails is left out: a rank that needs it reports the error itself.
        watched = _exit_with_notebook(self._owner.stream, self._notebook, self._opened)
        with watched, contextlib.suppress(Exception):
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)

    # Messages of the owner

    def _handle(self, message: ToForkserver) -> None:
        match message:
            case OpenCluster():
                self._open(message)
            case ForkRank():
                # The notebook may have set it after it has started this process.
                if message.env.get(_PRELOAD) == b"start":
                    while self._not_imported:
                        self._preload_next()
                self._fork(message)
            case KillRank():
                for child in self._children.values():
                    # An incarnation that has exited is in no list any more, so a kill that comes late does nothing.
                    if (child.request.rank, child.request.incarnation) == (message.rank, message.incarnation):
                        self._kill(child.pid)
            case DetachCluster():
                self._owner.detach(message)
            case CloseCluster():
                self._owner.stop_accepting()
                self._close()
                self._owner.send(ClusterClosed())

    def _open(self, message: OpenCluster) -> None:
        # From here on this process removes the folders, whichever way the notebook ends. Its locks keep other notebooks
        # from sweeping them, also after the notebook has gone.
        self._opened = message
        self._preload_from = time.monotonic() + _FIRST_RANKS_SECONDS
        self._locks = [lock for folder in message.folders if (lock := hold_folder(Path(folder))) is not None]
        # A driver that hangs is a reason to ask for the CPU.
        found = DeviceCount(0) if message.device == "cpu" else count_devices(message.env)
        self._owner.send(ClusterOpened(_free_port(), found.usable, found.problem, found.unexpected))

    def _fork(self, message: ForkRank) -> None:
        mark = f"{self._token}-{message.rank}-{message.incarnation}"
        # Inherited by every process that a cell starts, so that leftovers can be found whose parents have ended.
        message.env[_OWNER.encode()] = mark.encode()
        # Otherwise the garbage collector would write to, and so copy, all pages of torch in every rank.
        gc.freeze()
        pipes: list[int] = []
        try:
            pipes += os_utils.output_pipe()
            pipes += os_utils.output_pipe()
            pid = os.fork()
        # No process, descriptor or memory is free. The other ranks would end with this process.
        except OSError as error:
            for descriptor in pipes:
                os.close(descriptor)
            self._exits[message.rank] = exited = not_started(message, error)
            self._owner.send(exited)
            return
        out_read, out_write, err_read, err_write = pipes
        if pid == 0:
            # The copies of the other ranks' pipes are closed: `Child.started` takes a process that holds a pipe for one
            # of its rank's.
            self._become_child()
            for child in self._children.values():
                for descriptor in child.outputs:
                    os.close(descriptor)
            from rankbook.rank.main import run_rank

            outputs = (out_read, out_write, err_read, err_write)
            run_rank(message, outputs=outputs, liveness=self._liveness_read, is_owned=self._owner.is_owned)
        # The parent keeps the read ends only, to read what a dead rank has left.
        os.close(out_write)
        os.close(err_write)
        self._children[pid] = Child(message, pid, (out_read, err_read), mark)
        # A new owner must not be told of the exit of an earlier process.
        self._exits.pop(message.rank, None)
        self._owner.send(RankForked(rank=message.rank, incarnation=message.incarnation, pid=pid))

    def _become_child(self) -> None:
        # Before anything else: the parent may die at any moment.
        os_utils.die_with_parent()
        # A session of its own, so that all processes of a rank can be killed together, and an interrupt of its group
        # reaches no other rank.
        os.setsid()
        # The pipe belongs to the parent. A signal of the child would wake the forkserver.
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in (self._liveness_write, self._signal_read, self._signal_write):
            os.close(descriptor)
        self._owner.close_in_child()

    # Exits, and the end of the cluster

    def _reap(self) -> None:
        while True:
            # One SIGCHLD may stand for several exits, so all are collected.
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is not None:
                self._report_exit(child, os.waitstatus_to_exitcode(status))

    # Kill what the rank started before reading the pipes, so that no writer is left. The exit is stored for a later
    # owner, with its output only if there is no owner now.
    def _report_exit(self, child: Child, code: int) -> None:
        os_utils.kill_session(child.pid)
        # A rank that was forked a moment ago may not have closed its copies of this rank's pipes yet.
        os_utils.kill_leftovers(lambda process: process.pid not in self._children and child.started(process))
        texts = [os_utils.read_available(descriptor, most=4 << 20) for descriptor in child.outputs]
        for descriptor in child.outputs:
            os.close(descriptor)
        exited = RankExited(
            rank=child.request.rank,
            incarnation=child.request.incarnation,
            pid=child.pid,
            code=code,
            memory_kills=self._oom_kills.recent(time.monotonic()),
            stdout=texts[0],
            stderr=texts[1],
        )
        self._owner.send(exited)
        self._exits[exited.rank] = (
            # Without the output if the owner has just received it: a later owner would show it again.
            msgspec.structs.replace(exited, stdout=b"", stderr=b"") if self._owner.is_owned() else exited
        )

    def _send_rank_states(self) -> None:
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
        # A process in uninterruptible sleep cannot be killed. The notebook should not wait for it forever.
        deadline = time.monotonic() + 5
        while self._children and time.monotonic() < deadline:
            self._reap()
            wait_readable([self._signal_read], 0.05)
        # After the ranks have ended: now everything that carries the mark has lost its rank.
        os_utils.kill_leftovers(self._is_leftover)
        _remove(self._opened)
        self._opened = OpenCluster(folders=())
        self._preload_from = 0.0
        # The locks last, so that no other process sweeps folders that are just being removed.
        while self._locks:
            os.close(self._locks.pop())
        self._exits.clear()

    def _is_leftover(self, process: psutil.Process) -> bool:
        """Return True if a rank of this cluster started the process. Called when all ranks are gone."""
        return sys.platform == "linux" or os_utils.environment_of(process).get(_OWNER, "").startswith(self._token)


class DeviceCount(NamedTuple):
    """Number of CUDA devices that torch can use, and why it can use no more. See `ClusterOpened`."""

    usable: int
    problem: str = ""
    unexpected: bool = False


def count_devices(env: Mapping[bytes, bytes]) -> DeviceCount:
    """Count the CUDA devices that torch can use with the variables `env`.

    A child process counts: this may initialize CUDA, and a process that has initialized it cannot fork ranks.
    """
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        problem = f"torch {torch.__version__} is built without CUDA; install a build with CUDA to use a GPU"
        return DeviceCount(0, problem, unexpected=_has_nvidia_device() and _VISIBLE not in env)
    read, write = os.pipe()
    # The child counts and exits without a destructor of CUDA's context. An empty answer means that it has crashed: no
    # device can be used.
    pid = os.fork()
    if pid == 0:
        # Whatever is raised, this copy of the forkserver must not run on.
        try:
            if env:
                os.environb.clear()
                os.environb.update(env)
            os.write(write, json.dumps(_usable_devices()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        answer = stream.read()
    os.waitpid(pid, 0)
    if not answer:
        return DeviceCount(0, "the process that counts the CUDA devices has crashed", unexpected=True)
    return DeviceCount(*json.loads(answer))


def _usable_devices() -> DeviceCount:
    """Count the CUDA devices that torch can use. Initializes CUDA."""
    import torch

    # Counted by the driver's library for management, which also finds devices that torch cannot use.
    devices = torch.cuda.device_count()
    is_chosen = _VISIBLE in os.environb
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings are the reasons below
        if not devices or not torch.cuda.is_available():
            return DeviceCount(0, _no_device(), unexpected=devices > 0 or (_has_nvidia_device() and not is_chosen))
        # Now as CUDA counts them: of a card that is divided (MIG), a process sees one part only.
        torch.cuda.init()
        devices = torch.cuda.device_count()
        architectures = torch.cuda.get_arch_list()
        for index in range(devices):
            major, minor = torch.cuda.get_device_capability(index)
            if not has_kernels((major, minor), architectures):
                device = f"cuda:{index} ({torch.cuda.get_device_name(index)}, compute capability {major}.{minor})"
                problem = f"torch {torch.__version__} has no kernels for {device}, only for {' '.join(architectures)}"
                # Ranks have successive devices, and by default the slowest ones are last.
                advice = "install another build of torch, or choose other devices with CUDA_VISIBLE_DEVICES"
                return DeviceCount(index, f"{problem}; {advice}", unexpected=True)
    return DeviceCount(devices)


def _no_device() -> str:
    """Return why torch finds no CUDA device, in the words of the error that it raises for the first use."""
    import torch

    try:
        torch.cuda.init()
    except Exception as error:  # noqa: BLE001 - shown in the notebook
        reason = next(iter(str(error).splitlines()), type(error).__name__)
    else:
        reason = "torch finds no CUDA device"
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        reason += f" (with CUDA_VISIBLE_DEVICES={visible!r})"
    return reason


def has_kernels(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Return True if a build of torch for `architectures` runs on a CUDA device of this compute capability.

    Machine code (`sm_80`) runs on devices of the same major version and at least this minor version; code for the
    driver's compiler (`compute_90`) on all devices of at least this version; code with an "a" (`sm_90a`) on devices of
    exactly this version.

    Example::

        has_kernels((8, 9), ["sm_75", "sm_80", "sm_90"])  # True
        has_kernels((5, 0), ["sm_75", "sm_80", "sm_90"])  # False
    """
    version = 10 * capability[0] + capability[1]
    known = [match for name in architectures if (match := _ARCHITECTURE.fullmatch(name))]
    if not known:  # ROCm has other names
        return True
    for kind, number, letter in (match.groups() for match in known):
        built_for = int(number)
        is_compatible = kind == "compute" or built_for // 10 == capability[0]
        if built_for == version or (built_for < version and is_compatible and letter != "a"):
            return True
    return False


def _has_nvidia_device() -> bool:
    """Return True if the driver of an NVIDIA GPU has made its device file, which torch need not be able to use."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _free_port() -> int:
    with socket.socket() as probe:
        # The port is free again at once, and another process may take it. Nothing of Rankbook uses it; it is there for
        # user code that hosts a store.
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _remove(opened: OpenCluster) -> None:
    for folder in opened.folders:
        shutil.rmtree(folder, ignore_errors=True)
    for file in opened.files:
        with contextlib.suppress(OSError):  # as with the folders: the rest has to be removed
            Path(file).unlink(missing_ok=True)


def main() -> None:
    """Run the forkserver. Entry point of the process."""
    start = time.perf_counter()
    # Read first of all. If the notebook dies later, this process gets another parent, which is how its end is noticed.
    notebook = os.getppid()
    # Set before the long imports. The ranks install their own handlers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os_utils.adopt_orphans()
    stream: MessageStream[ToForkserver] = MessageStream(
        socket.socket(fileno=int(sys.argv[1])), decode_to_forkserver, reads_while_sending=True
    )
    with _exit_with_notebook(stream, notebook, OpenCluster(folders=())):
        # Almost all of the 200,000 objects that the imports make stay: hundreds of runs of the garbage collector would
        # find next to nothing. Without them, the imports take some 6 % less CPU time.
        gc.disable()
        import torch
        import torch.distributed

        from rankbook.rank import main as rank_main

        rank_main.warm_up_shell()
        # Otherwise the first run would go over all of them. The garbage among them, about 1 MB, stays.
        gc.freeze()
        gc.enable()
    stream.send(
        ForkserverUp(torch=str(torch.__version__), python=sys.version.split()[0], seconds=time.perf_counter() - start)
    )
    Forkserver(stream, notebook).serve()


@contextlib.contextmanager
def _exit_with_notebook(stream: MessageStream[ToForkserver], notebook: int, opened: OpenCluster) -> Iterator[None]:
    """Exit soon after the notebook does, inside a context in which nothing reads the stream (long imports).

    A timer signal checks every 0.2 s. Also removes what `opened` names, and an unread OpenCluster.
    """

    def check(_number: int, _frame: object) -> None:
        if os.getppid() != notebook or os_utils.is_hung_up(stream.fileno()):
            _remove(opened)
            for message in stream.read():
                if isinstance(message, OpenCluster):
                    _remove(message)
            os._exit(1)

    # A thread would be the other way, but a process with threads must not fork.
    signal.signal(signal.SIGALRM, check)
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

    The first owner is the parent process `notebook`, over `stream`. Forked ranks share the flag behind `is_owned`.
    """

    def __init__(self, stream: Stream, notebook: int) -> None:
        self.stream = stream
        self.lost_at = 0.0
        self._owner_exited: Callable[[], bool] = lambda: os.getppid() != notebook
        self._owner_pid = notebook
        self._detach_request: DetachCluster | None = None
        self._listener: socket.socket | None = None
        self._claimants: list[tuple[Stream, int, float]] = []
        self._owned_flag = mmap.mmap(-1, 1)  # shared with all ranks forked from here on
        self._owned_flag[0] = 1

    def is_owned(self) -> bool:
        """Return True while the cluster has an owner. Works in the ranks too, through shared memory."""
        return self._owned_flag[0] == 1

    @property
    def is_detached(self) -> bool:
        """Return True if the cluster outlives its owner."""
        return self._detach_request is not None

    def files(self) -> list[int]:
        """Return the file descriptors to poll."""
        files = [claimant.fileno() for claimant, _, _ in self._claimants]
        if self._listener is not None:
            files.append(self._listener.fileno())
        if self.is_owned():
            files.append(self.stream.fileno())
        return files

    def send(self, message: Message) -> None:
        """Send a message to the owner, if there is one."""
        if self.is_owned():
            self.stream.send(message)

    def detach(self, message: DetachCluster) -> None:
        """Detach the cluster: let it outlive its owner, and listen for claims."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The main loop accepts whatever is pending, and never waits for a connection.
        self._listener.setblocking(False)
        self._listener.bind(message.address)
        self._listener.listen(8)
        self._detach_request = message

    def stop_accepting(self) -> None:
        """Stop accepting claims: the cluster is being closed."""
        # Without a request, the next loss of the owner ends the cluster.
        self._detach_request = None
        self._close_listener()

    def close_in_child(self) -> None:
        """Close the parent's sockets. Called in a forked child."""
        self.stream.close()
        self._close_listener()

    def check_owner(self) -> bool:
        """Check whether the owner is gone; return False if the cluster must end."""
        # Two signs. The socket closes when the owner exits, unless a process that it has forked holds a copy of it;
        # then the owner's exit is the other sign.
        if self.is_owned() and (self.stream.closed or self._owner_exited()):
            self.stream.close()
            self._owned_flag[0] = 0
            self.lost_at = time.monotonic()
        return self.is_owned() or (
            self._detach_request is not None and time.monotonic() - self.lost_at < self._detach_request.seconds
        )

    def accept_claims(self, ranks: int) -> bool:
        """Answer pending claims; return True if one was accepted.

        `ranks` is the number of RankForked and RankExited messages that the new owner then receives.
        """
        if self._listener is not None:
            # Until `accept` finds no further connection.
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._add_claimant(self._listener.accept()[0])
        claimed = False
        for claimant, pid, deadline in self._claimants:
            if claimant.closed or time.monotonic() > deadline:
                claimant.close()
                continue
            # `continue` leaves this block if all messages were valid. After an invalid one, the connection is closed
            # below.
            with contextlib.suppress(ProtocolError):
                for message in claimant.read():
                    claimed = self._answer_claim(claimant, pid, message, ranks) or claimed
                continue
            claimant.close()
        self._claimants = [claim for claim in self._claimants if claim[0] is not self.stream and not claim[0].closed]
        return claimed

    def _add_claimant(self, connection: socket.socket) -> None:
        # On macOS, an accepted socket inherits the mode of the listener.
        connection.setblocking(True)
        pid, user = os_utils.peer_credentials(connection)
        # The folder of the socket is closed to other users already. This is a second check.
        if user not in (None, os.getuid()):
            connection.close()
            return
        claimant = MessageStream(connection, decode_to_forkserver, reads_while_sending=True)
        self._claimants.append((claimant, pid or 0, time.monotonic() + _CLAIM_SECONDS))

    def _answer_claim(self, claimant: Stream, pid: int, message: ToForkserver, ranks: int) -> bool:
        if not isinstance(message, ClaimCluster) or not self._is_valid_token(message.token):
            claimant.send(ClaimRejected(owner=0))
            claimant.close()
            return False
        if self.is_owned():
            claimant.send(ClaimRejected(owner=self._owner_pid))
            claimant.close()
            return False
        # The system's answer, where it gives one, cannot be forged.
        self._owner_pid = pid or message.pid
        self._owner_exited = os_utils.exit_watcher(self._owner_pid)
        self.stream = claimant
        # Set after the stream: the ranks send as soon as they see the flag, and exits are reported to the new owner.
        self._owned_flag[0] = 1
        claimant.send(ClaimAccepted(ranks=ranks, lost=self.lost_at))
        return True

    def _is_valid_token(self, token: str) -> bool:
        # Compared in constant time, so that the time does not tell how many characters were right.
        return self._detach_request is not None and hmac.compare_digest(
            token.encode(), self._detach_request.token.encode()
        )

    def _close_listener(self) -> None:
        for claimant, _, _ in self._claimants:
            claimant.close()
        self._claimants = []
        if self._listener is not None:
            self._listener.close()
            self._listener = None


if __name__ == "__main__":
    main()
