"""Whose a cluster is, over real sockets; the tests are the notebooks."""

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
from rankbook.protocol.messages import FromForkserver, Message, decode_from_forkserver, decode_to_forkserver
from rankbook.protocol.reattach import ClaimAccepted, ClaimCluster, ClaimRejected, DetachCluster
from rankbook.rank import os_utils
from rankbook.rank.forkserver import Ownership
from rankbook.transport.framed_socket import MessageStream

TOKEN = "secret"


class Stage:
    """An owner at one end of a socket, its first notebook at the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ours, theirs = socket.socketpair()
        self.notebook = MessageStream(ours, decode_from_forkserver)
        self.owner = Ownership(MessageStream(theirs, decode_to_forkserver), os.getppid())
        self.callers: list[MessageStream[FromForkserver]] = []

    def keep(self, seconds: float = 60.0) -> None:
        self.owner.keep(DetachCluster(address=str(self.folder / "owner"), token=TOKEN, seconds=seconds))

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
        self.owner.forget()
        for caller in self.callers:
            caller.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as folder:
        made = Stage(Path(folder))
        yield made
        made.close()


def answers(caller: MessageStream[FromForkserver]) -> list[FromForkserver]:
    select.select([caller], [], [], 5)
    return list(caller.read())


def claim(token: str = TOKEN) -> ClaimCluster:
    return ClaimCluster(token=token, pid=os.getpid())


def test_one_that_is_not_kept_ends_with_its_owner(stage):
    assert stage.owner.look()
    stage.leave()
    assert not stage.owner.look()
    assert not stage.owner.there()


def test_a_kept_one_goes_on_for_its_time(stage):
    stage.keep(seconds=60)
    stage.leave()
    assert stage.owner.look()
    assert not stage.owner.there()
    stage.owner.lost -= 61
    assert not stage.owner.look()


def test_a_claim_with_the_token_makes_a_new_owner_which_can_go_as_well(stage):
    stage.keep()
    stage.leave()
    stage.owner.look()
    caller = stage.call(claim())
    assert stage.owner.hear_claims(2)
    assert answers(caller) == [ClaimAccepted(ranks=2, lost=stage.owner.lost)]
    assert stage.owner.there()
    assert stage.owner.look()
    caller.send(CloseCluster())
    assert list(stage.owner.stream.read()) == [CloseCluster()]
    caller.close()
    list(stage.owner.stream.read())
    assert stage.owner.look()
    assert not stage.owner.there()
    assert stage.call(claim())
    assert stage.owner.hear_claims(0)


@pytest.mark.parametrize("message", [claim("wrong"), claim(""), claim("sécret"), CloseCluster()])
def test_whoever_has_no_token_is_refused(stage, message):
    stage.keep()
    stage.leave()
    stage.owner.look()
    caller = stage.call(message)
    assert not stage.owner.hear_claims(0)
    assert answers(caller) == [ClaimRejected(owner=0)]
    assert not stage.owner.there()
    assert stage.owner.look()


def test_as_long_as_there_is_an_owner_a_claim_is_refused_with_its_process_id(stage):
    stage.keep()
    caller = stage.call(claim())
    assert not stage.owner.hear_claims(0)
    assert answers(caller) == [ClaimRejected(owner=os.getppid())]
    assert stage.owner.there()


def test_of_two_that_claim_at_once_one_is_the_owner(stage):
    stage.keep()
    stage.leave()
    stage.owner.look()
    first, second = stage.call(claim()), stage.call(claim())
    assert stage.owner.hear_claims(0)
    assert answers(first) == [ClaimAccepted(ranks=0, lost=stage.owner.lost)]
    assert answers(second) == [ClaimRejected(owner=os.getpid())]


def test_who_sends_no_message_of_ours_is_hung_up_on(stage):
    stage.keep()
    stage.leave()
    stage.owner.look()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(stage.folder / "owner"))
    with connection:
        connection.sendall(b"\x03\x00\x00\x00GET")
        assert not stage.owner.hear_claims(0)
        assert connection.recv(16) == b""


def test_after_the_cluster_was_closed_it_ends_with_its_owner_again(stage):
    stage.keep()
    stage.owner.let_go()
    assert not stage.owner.keeps
    stage.leave()
    assert not stage.owner.look()


@pytest.mark.processes
def test_a_child_process_sees_whether_there_is_an_owner(stage):
    stage.keep()
    read, write = os.pipe()
    go_read, go_write = os.pipe()
    child = os.fork()
    if child == 0:
        stage.notebook.close()
        os.write(write, b"ready")
        os.read(go_read, 1)
        os.write(write, b"yes" if stage.owner.there() else b"no")
        os._exit(0)
    assert os.read(read, 8) == b"ready"
    stage.leave()
    stage.owner.look()
    os.write(go_write, b"g")
    assert os.read(read, 8) == b"no"
    os.waitpid(child, 0)
    for end in (read, write, go_read, go_write):
        os.close(end)


@pytest.mark.processes
def test_a_process_that_nobody_has_waited_for_yet_has_ended_all_the_same():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended = os_utils.exit_watcher(process.pid)
    assert not ended()
    process.communicate(b"go\n")
    assert ended()
    assert os_utils.exit_watcher(process.pid)()


def test_a_dead_owner_counts_as_gone_though_its_child_has_the_socket_still():
    ours, theirs = socket.socketpair()
    with ours:
        owner = Ownership(MessageStream(theirs, decode_to_forkserver), os.getpid())  # which is not our parent
        assert not owner.look()
        assert not owner.there()
