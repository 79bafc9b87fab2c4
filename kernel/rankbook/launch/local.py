"""Launchers of ranks: their Protocol, and those of ranks on this machine, through a forkserver process.

`Launcher` is what the driver needs of a launcher. `LocalLauncher` starts a forkserver, which imports torch; this
process does not. A forkserver serves one cluster at a time and is kept for the next one: `prestart_forkserver` starts
it early, `acquire_forkserver` takes it. One that is outdated is replaced: its ranks would have the modules that it has
imported, and not the packages that are installed now, and libraries that have read other environment variables.
`ReattachedLauncher` claims the forkserver of a detached cluster.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import IO, Protocol, TypeVar

import psutil

from rankbook.debugger_patch import without_debugger
from rankbook.errors import InvalidArgument, StartError
from rankbook.launch.registry import ClusterRecord
from rankbook.process_identity import ProcessInfo, describe_process, process_info
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
from rankbook.protocol.messages import (
    ClaimAccepted,
    ClaimCluster,
    ClaimRejected,
    DetachCluster,
    FromForkserver,
    decode_from_forkserver,
)
from rankbook.transport.framed_socket import MessageStream, wait_readable


# `local.LocalLauncher` starts a forkserver of this notebook, `local.ReattachedLauncher` talks to that of an earlier
# one. The driver thread makes all calls, and waits on `fileno` together with its sockets.
class Launcher(Protocol):
    """Start and kill ranks, and report their exits."""

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `read` has messages."""

    def fork(self, request: ForkRank) -> None:
        """Start one rank. `read` always reports its exit."""

    def kill(self, rank: int, incarnation: int) -> None:
        """Kill this incarnation of the rank, and its children."""

    def read(self) -> Iterator[FromForkserver]:
        """Yield the messages received since the last call. Never blocks."""

    def process_info(self, rank: int, pid: int | None) -> ProcessInfo | None:
        """Return the state of the process of `rank`; None if it has ended."""

    @property
    def alive(self) -> bool:
        """Return True while it can start ranks."""

    def close(self) -> None:
        """Kill the remaining processes of the cluster, wait for their end, and release resources."""


_T = TypeVar("_T")
_IMPORT_TIMEOUT = 300.0
_CLOSE_TIMEOUT = 10.0
_NO_TORCH = "ModuleNotFoundError: No module named 'torch'"


class Process(Protocol):
    """Interface to the forkserver's process."""

    @property
    def pid(self) -> int:
        """Return the process id."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to exit. Raises `subprocess.TimeoutExpired`."""


class InstalledPackages:
    """The folders of installed packages on `sys.path`, and the times of their last changes."""

    def __init__(self) -> None:
        names = ("site-packages", "dist-packages")
        self._changed_at = {folder: _time_of_change(folder) for folder in sys.path if PurePath(folder).name in names}

    @property
    def changed(self) -> bool:
        """Return True if a package was installed, updated or removed since this object was made."""
        # Each of these adds or removes an entry of the folder, whichever program it is done with.
        return any(_time_of_change(folder) != changed_at for folder, changed_at in self._changed_at.items())


_READ_AT_IMPORT = ("TORCH", "PYTORCH", "ATEN_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NPY_")
"""Beginnings of the names of variables that torch, NumPy and the libraries that they load read when they are loaded."""


def import_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables on which the import of torch and NumPy depends."""
    # OMP_NUM_THREADS is often set between two starts, and needs no new import: ranks tell torch the number of threads.
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and name != "OMP_NUM_THREADS"
    }


def _time_of_change(folder: str) -> int | None:
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return None


class LocalLauncher:
    """Start ranks through one forkserver process, which serves one cluster at a time."""

    _process: Process
    _stderr: IO[bytes]

    def __init__(self) -> None:
        if sys.platform not in ("linux", "darwin"):
            raise StartError(
                f"Rankbook runs on Linux and macOS; this is {sys.platform}. On Windows use it under WSL 2."
            )
        # Before the process can import anything.
        self._packages, self._variables = InstalledPackages(), import_variables(os.environ)
        # A socket pair and not a pipe: both ends notice at once that the other process has ended, however it ended. No
        # other process can connect.
        local_end, remote_end = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open while the process runs
        with remote_end, without_debugger():
            self._process = subprocess.Popen(
                # `-P`: a file of the user called `torch.py` or `signal.py` in the working directory must not be
                # imported.
                [sys.executable, "-P", "-m", "rankbook.rank.forkserver", str(remote_end.fileno())],
                pass_fds=(remote_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A file and not a pipe, because nobody reads it until an error is to be described.
                stderr=self._stderr,
                # Otherwise `torch.cuda.is_available()` initializes the driver, and a module that calls it while it is
                # imported would make CUDA unusable in all ranks. They have the notebook's environment.
                env={"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **os.environ},
                # A session of its own, so that Ctrl-C at a terminal, and a signal to the notebook's process group, do
                # not reach it.
                start_new_session=True,
            )
        self._stream: MessageStream[FromForkserver] = MessageStream(local_end, decode_from_forkserver)
        self.ready_message: ForkserverUp | None = None
        # Clusters that were closed before they were opened: pending ClusterClosed replies.
        self._unconfirmed_closes = 0

    @property
    def pid(self) -> int:
        """Return the forkserver's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """See `Launcher`."""
        return not self._stream.closed and self._process.poll() is None

    @property
    def is_outdated(self) -> bool:
        """Return True if a new forkserver would import other modules than this one has."""
        return self._packages.changed or import_variables(os.environ) != self._variables

    def fileno(self) -> int:
        """See `Launcher`."""
        return self._stream.fileno()

    def request_open(self, folders: tuple[Path, ...], files: tuple[Path, ...] = (), *, device: str = "") -> None:
        """Request that the forkserver opens a cluster, and removes `folders` and `files` however this process ends.

        With the `device` "cpu", CUDA devices are not counted.
        """
        names, paths = tuple(map(str, folders)), tuple(map(str, files))
        self._stream.send(OpenCluster(folders=names, files=paths, env=dict(os.environb), device=device))

    def wait_opened(
        self, *, timeout: float = _IMPORT_TIMEOUT, interrupted: Callable[[], bool] = lambda: False
    ) -> ClusterOpened:
        """Wait until torch is imported and the forkserver has opened the requested cluster.

        Raises `StartError` after ending the process, and KeyboardInterrupt soon after `interrupted()` returns True.
        """
        try:
            # A cluster that was closed during the import left a `ClusterClosed` in the stream, which must not be taken
            # for the reply to a later close.
            while self._unconfirmed_closes:
                self._wait_for(ClusterClosed, timeout=timeout, interrupted=interrupted)
                self._unconfirmed_closes -= 1
            return self._wait_for(ClusterOpened, timeout=timeout, interrupted=interrupted)
        except StartError:
            # Without this, the process would stay, and the next start would wait for it in vain as well.
            self.terminate()
            raise

    def detach(self, address: str, *, token: str, seconds: float) -> None:
        """Detach the cluster: let it outlive this process for `seconds`.

        A process that knows `token` may claim it at the Unix socket `address`.
        """
        self._stream.send(DetachCluster(address=address, token=token, seconds=seconds))

    def disconnect(self) -> None:
        """Disconnect from a detached cluster, which keeps running."""
        # Closing this end is all: the forkserver notices, and keeps the ranks.
        self._stream.close()
        self._stderr.close()
        if isinstance(self._process, subprocess.Popen):
            self._process.returncode = 0  # Popen warns of a child that is still running

    def fork(self, request: ForkRank) -> None:
        """See `Launcher`. Raises `StartError` when the forkserver has ended."""
        if not self.alive:
            raise StartError(
                "the forkserver has exited; start a new one with %distributed stop, then %distributed start"
            )
        self._stream.send(request)

    def kill(self, rank: int, incarnation: int) -> None:
        """See `Launcher`."""
        self._stream.send(KillRank(rank=rank, incarnation=incarnation))

    def read(self) -> Iterator[FromForkserver]:
        """See `Launcher`."""
        for message in self._stream.read():
            if isinstance(message, ForkserverUp):
                self.ready_message = message
            yield message

    def process_info(self, rank: int, pid: int | None) -> ProcessInfo | None:  # noqa: ARG002 - other hosts need it
        """See `Launcher`."""
        return process_info(pid)

    def close(self) -> None:
        """See `Launcher`. A forkserver that responds is kept for the next cluster."""
        if (
            self.alive and self.ready_message is None
        ):  # still importing torch: it has no ranks, and the next cluster needs it
            self._stream.send(CloseCluster())
            self._unconfirmed_closes += 1
            _keep_prestarted(self)
        elif self.alive:
            self._stream.send(CloseCluster())
            try:
                self._wait_for(ClusterClosed, timeout=_CLOSE_TIMEOUT)
            except StartError:
                self.terminate()
            else:
                _keep_prestarted(self)
                return
        else:
            self.terminate()

    def terminate(self) -> None:
        """End the forkserver, and with it all of its ranks."""
        # The forkserver exits at the end of the stream, after it has killed the ranks. Only if it does not, it is
        # killed, with its process group. The ranks have sessions of their own; they die with their parent.
        self._stream.end()
        try:
            self._process.wait(timeout=_CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process in uninterruptible sleep cannot be killed
                self._process.wait(timeout=_CLOSE_TIMEOUT)
        self._stderr.close()

    def _wait_for(self, kind: type[_T], *, timeout: float, interrupted: Callable[[], bool] = lambda: False) -> _T:
        deadline = time.monotonic() + timeout
        while self.alive and (remaining := deadline - time.monotonic()) > 0:
            # In steps of 0.1 s, because `interrupted` has to be asked meanwhile.
            wait_readable([self.fileno()], min(remaining, 0.1))
            if interrupted():
                raise KeyboardInterrupt
            # Other messages are dropped. While this method runs, no driver reads, and none of them concerns a cluster
            # that is not open yet.
            for message in self.read():
                if isinstance(message, kind):
                    return message
        if self.alive:
            raise StartError(f"the forkserver was not ready within {timeout:g} s: {self._describe_progress()}")
        text = self.exit_message()
        if text.endswith(_NO_TORCH):
            raise StartError(f"torch is not installed for {sys.executable}; install it, then run %distributed start")
        raise StartError(f"the forkserver exited before it could start ranks:\n{text}")

    def _describe_progress(self) -> str:
        """Describe how far the forkserver has come, its process state, and its stderr."""
        pid = self._process.pid
        stage = "torch is not imported yet" if self.ready_message is None else "torch is imported"
        return "\n".join(
            filter(None, [f"{stage}, {describe_process(process_info(pid), pid)} (pid {pid})", self._error_text()])
        )

    def exit_message(self) -> str:
        """Return why the forkserver has exited: what it has written to stderr, or its exit code. Waits some seconds."""
        try:
            code: int | None = self._process.wait(timeout=_CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            code = None
        ending = "it closed its connection, but has not exited" if code is None else f"it exited with code {code}"
        return self._error_text() or ending

    def _error_text(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace").strip()[-2000:]


_lock = threading.Lock()
_prestarted: LocalLauncher | None = None


def prestart_forkserver() -> None:
    """Start the next cluster's forkserver in advance, because importing torch takes seconds.

    One that was prestarted before is replaced if it is outdated.
    """
    global _prestarted
    with _lock:
        if _prestarted is not None and (not _prestarted.alive or _prestarted.is_outdated):
            _prestarted.terminate()
            _prestarted = None
        if _prestarted is None:
            _prestarted = LocalLauncher()


def acquire_forkserver() -> LocalLauncher:
    """Return the prestarted forkserver, or a new one."""
    global _prestarted
    with _lock:
        # Taken and removed under the lock, so that two clusters never share one.
        launcher, _prestarted = _prestarted, None
        if launcher is not None and launcher.alive and not launcher.is_outdated:
            return launcher
        if launcher is not None:
            launcher.terminate()
    return LocalLauncher()


def _keep_prestarted(launcher: LocalLauncher) -> None:
    global _prestarted
    with _lock:
        if _prestarted is None:
            _prestarted = launcher
            return
    # One spare forkserver is enough: it holds the memory of torch.
    launcher.terminate()


def shutdown_prestarted() -> None:
    """End the prestarted forkserver, if there is one."""
    global _prestarted
    with _lock:
        launcher, _prestarted = _prestarted, None
    if launcher is not None:
        launcher.terminate()


def _forget_prestarted() -> None:
    global _prestarted
    # The child of a fork shares the socket, and would end the parent's forkserver when it exits.
    _prestarted = None


atexit.register(shutdown_prestarted)
if hasattr(os, "register_at_fork"):  # missing on Windows, which `LocalLauncher` rejects
    os.register_at_fork(after_in_child=_forget_prestarted)  # the forkserver belongs to the parent


_CLAIM_TIMEOUT = 10.0


class _ForeignProcess:
    """A process that is not our child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)

    def poll(self) -> int | None:
        # psutil compares the start time as well, so a later process with this PID is not taken for it. A zombie has
        # ended: its parent has not collected it yet.
        ended = not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE
        return 0 if ended else None

    def wait(self, timeout: float | None = None) -> int:
        try:
            self._process.wait(timeout)
        except psutil.TimeoutExpired as error:
            if self.poll() is None:
                raise subprocess.TimeoutExpired("the forkserver", timeout or 0.0) from error
        return 0


class ReattachedLauncher(LocalLauncher):
    """Claim the detached cluster of `record`. Its forkserver ends with the cluster.

    `forked` and `exited` hold the state of the ranks at the claim, and `later` what was reported while they replied.
    Raises `InvalidArgument` while another notebook owns the cluster, and `StartError` if it does not respond.
    """

    def __init__(self, record: ClusterRecord) -> None:
        # The stderr of the forkserver belongs to the process that started it, and is out of reach.
        self._stderr = io.BytesIO()
        self._unconfirmed_closes = 0
        self.ready_message = ForkserverUp(torch="", python="", seconds=0.0)
        self.forked: dict[int, RankForked] = {}
        self.exited: dict[int, RankExited] = {}
        self.later: list[FromForkserver] = []
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Raises if the process has ended meanwhile, before the socket is tried.
            self._process = _ForeignProcess(record.forkserver)
            connection.connect(record.address)
            self._stream: MessageStream[FromForkserver] = MessageStream(connection, decode_from_forkserver)
            self.owner_lost_at = self._claim(record)
        except (OSError, psutil.NoSuchProcess) as error:
            connection.close()
            raise StartError(f"the ranks of {record.key} do not respond ({error}); try again in a second") from error
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """See `Launcher`."""
        if self.alive:
            self._stream.send(CloseCluster())
            try:
                self._wait_for(ClusterClosed, timeout=_CLOSE_TIMEOUT)
            except StartError:
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(self._process.pid, signal.SIGKILL)
        self.terminate()

    # ClaimAccepted says how many ranks there are; a RankForked or RankExited per rank follows. Wait for all of them.
    def _claim(self, record: ClusterRecord) -> float:
        self._stream.send(ClaimCluster(token=record.token, pid=os.getpid()))
        claimed: ClaimAccepted | None = None
        deadline = time.monotonic() + _CLAIM_TIMEOUT
        while claimed is None or len(self.forked) + len(self.exited) < claimed.ranks:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or self._stream.closed:
                raise StartError(f"the ranks of {record.key} do not respond; try again in a second")
            wait_readable([self.fileno()], remaining)
            for message in self._stream.read():
                match message:
                    case ClaimAccepted():
                        claimed = message
                    case ClaimRejected(owner=0):
                        raise StartError(
                            f"the ranks of {record.key} rejected the claim: the token in their record is wrong"
                        )
                    case ClaimRejected(owner=owner):
                        raise InvalidArgument(
                            f"the ranks of {record.key} are still attached to the kernel with pid {owner};"
                            " only one notebook at a time can attach: shut that kernel down first"
                        )
                    case RankForked():
                        self.forked[message.rank] = message
                    case RankExited():
                        self.exited[message.rank] = message
                    case _:
                        pass
        return claimed.lost
