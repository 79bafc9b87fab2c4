"""The forkserver of a kept cluster, from its new owner's side.

Owns: the claim, and what the forkserver answers to it. Refuses: to start a forkserver, and to talk to the ranks.
"""

from __future__ import annotations

import io
import os
import select
import signal
import socket
import subprocess
import time

import psutil

from rankbook.errors import BadRequest, StartError
from rankbook.launch.local import LocalLauncher
from rankbook.launch.registry import Record
from rankbook.protocol.forkserver import CloseCluster, ClusterClosed, ForkserverUp, RankExited, RankForked
from rankbook.protocol.messages import FromForkserver, decode_from_forkserver
from rankbook.protocol.reattach import Claim, Claimed, ClaimRefused
from rankbook.transport.framed_socket import MessageStream

_CLAIM_TIMEOUT = 10.0


class _Foreign:
    """A process that is not our child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)

    def poll(self) -> int | None:
        gone = not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE
        return 0 if gone else None

    def wait(self, timeout: float | None = None) -> int:
        try:
            self._process.wait(timeout)
        except psutil.TimeoutExpired as error:
            if self.poll() is None:
                raise subprocess.TimeoutExpired("the forkserver", timeout or 0.0) from error
        return 0


class KeptLauncher(LocalLauncher):
    """Claims the cluster of `record`. It ends with that cluster, for it is not this notebook's own.

    Raises `BadRequest` while another notebook owns it, `StartError` when it does not answer.
    """

    def __init__(self, record: Record) -> None:
        self._errors = io.BytesIO()
        self._given_up = 0
        self.up = ForkserverUp(torch="", python="", seconds=0.0)
        self.forked: dict[int, RankForked] = {}
        self.exited: dict[int, RankExited] = {}
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._process = _Foreign(record.forkserver)
            connection.connect(record.address)
            self._stream: MessageStream[FromForkserver] = MessageStream(connection, decode_from_forkserver)
            self.lost = self._claim(record)
        except (OSError, psutil.NoSuchProcess) as error:
            connection.close()
            raise StartError(f"the ranks of {record.key} do not answer ({error}); try again in a second") from error
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
                os.kill(self._process.pid, signal.SIGKILL)
        self.terminate()

    def _claim(self, record: Record) -> float:
        self._stream.send(Claim(token=record.token, pid=os.getpid()))
        claimed: Claimed | None = None
        deadline = time.monotonic() + _CLAIM_TIMEOUT
        while claimed is None or len(self.forked) + len(self.exited) < claimed.ranks:
            left = deadline - time.monotonic()
            if left <= 0 or self._stream.closed:
                raise StartError(f"the ranks of {record.key} do not answer; try again in a second")
            select.select([self._stream], [], [], left)
            for message in self._stream.read():
                match message:
                    case Claimed():
                        claimed = message
                    case ClaimRefused(owner=0):
                        raise StartError(f"the ranks of {record.key} refused: their record is not the one they know")
                    case ClaimRefused(owner=owner):
                        raise BadRequest(
                            f"the kernel {owner} still has the ranks of {record.key}; one notebook at a time can:"
                            " shut that one down first"
                        )
                    case RankForked():
                        self.forked[message.rank] = message
                    case RankExited():
                        self.exited[message.rank] = message
                    case _:
                        pass
        return claimed.lost
