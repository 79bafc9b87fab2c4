"""Test the ownership of a cluster over real sockets; the tests act as notebooks."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankbook.protocol.forkserver import CloseCluster
from rankbook.protocol.messages import (
    ClaimAccepted,
    ClaimCluster,
    ClaimRejected,
    DetachCluster,
    FromForkserver,
    Message,
    decode_from_forkserver,
    decode_to_forkserver,
)
from rankbook.rank import os_utils
from rankbook.rank.forkserver import Ownership
from rankbook.transport.framed_socket import MessageStream

TOKEN = "secret"


class Harness:
    """An owner at one end of a socket, its first notebook at the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ours, forkserver_socket = socket.socketpair()
        self.notebook = MessageStream(ours, decode_from_forkserver)
        self.owner = Ownership(MessageStream(forkserver_socket, decode_to_forkserver), os.getppid())
        self.callers: list[MessageStream[FromForkserver]] = []

    def keep(self, seconds: float = 60.0) -> None:
        self.owner.detach(DetachCluster(address=str(self.folder / "owner"), token=TOKEN, seconds=seconds))

    def leave(self) -> None:
        self.notebook.close()
        list(self.owner.stream.read())

    def call(self, message: Message) -> MessageStream[FromForkserver]:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.folder / "owner"))
        caller = MessageStream(connection, decode_from_forkserver)
        caller.send(message)
        self.callers.append(caller)
        return caller

    def close(self) -> None:
        self.notebook.close()
        self.owner.close_in_child()
        for caller in self.callers:
            caller.close()


@pytest.fixture
def harness() -> Iterator[Harness]:
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as folder:
        owner_harness = Harness(Path(folder))
        yield owner_harness
        owner_harness.close()


def answers(caller: MessageStream[FromForkserver]) -> list[FromForkserver]:
    select.select([caller], [], [], 5)
    return list(caller.read())


def claim(token: str = TOKEN) -> ClaimCluster:
    return ClaimCluster(token=token, pid=os.getpid())


def test_cluster_that_is_not_kept_ends_with_its_owner(harness):
    assert harness.owner.check_owner()
    harness.leave()
    assert not harness.owner.check_owner()
    assert not harness.owner.is_owned()


def test_kept_cluster_survives_its_owner_for_the_stated_time(harness):
    harness.keep(seconds=60)
    harness.leave()
    assert harness.owner.check_owner()
    assert not harness.owner.is_owned()
    harness.owner.lost_at -= 61
    assert not harness.owner.check_owner()


def test_claim_with_the_token_sets_a_new_owner_that_may_also_end(harness):
    harness.keep()
    harness.leave()
    harness.owner.check_owner()
    caller = harness.call(claim())
    assert harness.owner.accept_claims(2)
    assert answers(caller) == [ClaimAccepted(ranks=2, lost=harness.owner.lost_at)]
    assert harness.owner.is_owned()
    assert harness.owner.check_owner()
    caller.send(CloseCluster())
    assert list(harness.owner.stream.read()) == [CloseCluster()]
    caller.close()
    list(harness.owner.stream.read())
    assert harness.owner.check_owner()
    assert not harness.owner.is_owned()
    assert harness.call(claim())
    assert harness.owner.accept_claims(0)


@pytest.mark.parametrize("message", [claim("wrong"), claim(""), claim("sécret"), CloseCluster()])
def test_claim_without_the_token_is_refused(harness, message):
    harness.keep()
    harness.leave()
    harness.owner.check_owner()
    caller = harness.call(message)
    assert not harness.owner.accept_claims(0)
    assert answers(caller) == [ClaimRejected(owner=0)]
    assert not harness.owner.is_owned()
    assert harness.owner.check_owner()


def test_as_long_as_there_is_an_owner_a_claim_is_refused_with_its_process_id(harness):
    harness.keep()
    caller = harness.call(claim())
    assert not harness.owner.accept_claims(0)
    assert answers(caller) == [ClaimRejected(owner=os.getppid())]
    assert harness.owner.is_owned()


def test_one_of_two_concurrent_claims_succeeds(harness):
    harness.keep()
    harness.leave()
    harness.owner.check_owner()
    first, second = harness.call(claim()), harness.call(claim())
    assert harness.owner.accept_claims(0)
    assert answers(first) == [ClaimAccepted(ranks=0, lost=harness.owner.lost_at)]
    assert answers(second) == [ClaimRejected(owner=os.getpid())]


def test_connection_with_invalid_messages_is_closed(harness):
    harness.keep()
    harness.leave()
    harness.owner.check_owner()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(harness.folder / "owner"))
    with connection:
        connection.sendall(b"\x03\x00\x00\x00GET")
        assert not harness.owner.accept_claims(0)
        assert connection.recv(16) == b""


def test_forkserver_ends_with_its_owner_after_the_cluster_was_closed(harness):
    harness.keep()
    harness.owner.stop_accepting()
    assert not harness.owner.is_detached
    harness.leave()
    assert not harness.owner.check_owner()


@pytest.mark.processes
def test_a_child_process_sees_whether_there_is_an_owner(harness):
    harness.keep()
    read, write = os.pipe()
    go_read, go_write = os.pipe()
    child = os.fork()
    if child == 0:
        harness.notebook.close()
        os.write(write, b"ready")
        os.read(go_read, 1)
        os.write(write, b"yes" if harness.owner.is_owned() else b"no")
        os._exit(0)
    assert os.read(read, 8) == b"ready"
    harness.leave()
    harness.owner.check_owner()
    os.write(go_write, b"g")
    assert os.read(read, 8) == b"no"
    os.waitpid(child, 0)
    for end in (read, write, go_read, go_write):
        os.close(end)


@pytest.mark.processes
def test_zombie_process_counts_as_ended():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended = os_utils.exit_watcher(process.pid)
    assert not ended()
    process.communicate(b"go\n")
    assert ended()
    assert os_utils.exit_watcher(process.pid)()


def test_dead_owner_counts_as_ended_although_its_child_has_the_socket():
    ours, forkserver_socket = socket.socketpair()
    with ours:
        owner = Ownership(
            MessageStream(forkserver_socket, decode_to_forkserver), os.getpid()
        )  # which is not our parent
        assert not owner.check_owner()
        assert not owner.is_owned()
