"""Ending whoever waits on a socket of C++ code: from another thread, and no other socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rankbook.rank.process_groups import gloo
from rankbook.rank.process_groups.gloo import (
    NOBODY,
    has_connections,
    shutdown_sockets,
    tcp_sockets,
    track_new_sockets,
    user_of_peer,
)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listening(stack: ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_server(("127.0.0.1", 0)))


def connected(stack: ExitStack, listener: socket.socket) -> Pair:
    one = stack.enter_context(socket.create_connection(listener.getsockname()))
    other = stack.enter_context(listener.accept()[0])
    for connection in (one, other):
        connection.settimeout(5)
    return one, other


def count_descriptors() -> int:
    """Count the open descriptors of this process."""
    return len([*Path("/dev/fd").iterdir()])


def usable(pair: Pair) -> bool:
    pair[0].sendall(b"x")
    return pair[1].recv(1) == b"x"


def test_sockets_opened_during_the_call_are_recorded(stack):
    before = connected(stack, listening(stack))
    with track_new_sockets() as opened:
        listener = listening(stack)
        pair = connected(stack, listener)
        assert opened == {}, "only in the end"
    assert set(opened) == {listener.fileno(), *(connection.fileno() for connection in pair)}
    assert not set(opened) & {connection.fileno() for connection in before}


def test_sockets_are_recorded_if_the_call_fails(stack):
    watching = track_new_sockets()
    opened = watching.__enter__()
    pair = connected(stack, listening(stack))
    assert not watching.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert {connection.fileno() for connection in pair} <= set(opened)


def test_files_pipes_and_sockets_of_other_kinds_are_no_tcp_sockets(stack, tmp_path):
    ends = [stack.enter_context(os.fdopen(end, mode)) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True)]
    pair = [stack.enter_context(connection) for connection in socket.socketpair()]
    datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    file = stack.enter_context((tmp_path / "file").open("w"))
    listener = listening(stack)
    descriptors = set(tcp_sockets())
    assert listener.fileno() in descriptors
    assert not descriptors & {connection.fileno() for connection in (*ends, *pair, datagrams, file)}


def test_a_thread_that_waits_to_receive_is_woken_and_so_is_its_peer(stack):
    listener = listening(stack)
    with track_new_sockets() as opened:
        one, other = connected(stack, listener)
    one.settimeout(None)
    waits, received = threading.Event(), []

    def receive() -> None:
        waits.set()
        received.append(one.recv(1))

    thread = threading.Thread(target=receive)
    thread.start()
    assert waits.wait(5)
    shutdown_sockets(opened)
    thread.join(5)
    assert not thread.is_alive(), "it waits on"
    assert received == [b""]
    assert other.recv(1) == b""
    with pytest.raises(OSError, match="roken pipe"):
        one.sendall(b"x")


def test_listening_socket_is_not_shut_down(stack):
    with track_new_sockets() as opened:
        listener = listening(stack)
    shutdown_sockets(opened)
    assert usable(connected(stack, listener))


def test_reused_descriptor_is_not_shut_down(stack):
    listener = listening(stack)
    reused_pair = connected(stack, listener)
    with track_new_sockets() as opened:
        closed, _ = connected(stack, listener)
    number = closed.fileno()
    opened = {number: opened[number]}
    closed.close()
    os.dup2(reused_pair[0].fileno(), number)
    try:
        before = count_descriptors()
        shutdown_sockets(opened)
        assert count_descriptors() == before
        assert usable(reused_pair)
    finally:
        os.close(number)


def test_a_descriptor_that_is_closed_or_has_lost_its_peer_is_no_error(stack):
    listener = listening(stack)
    with track_new_sockets() as opened:
        one, other = connected(stack, listener)
        pair = connected(stack, listener)
    one.close()
    pair[1].close()
    shutdown_sockets(opened)
    shutdown_sockets(opened)
    assert other.recv(1) == b""


def test_neither_looking_nor_shutting_down_keeps_a_descriptor(stack):
    listener = listening(stack)
    before = count_descriptors()
    with track_new_sockets() as opened:
        pair = connected(stack, listener)
    assert count_descriptors() == before + 2
    shutdown_sockets(opened)
    assert count_descriptors() == before + 2
    for connection in pair:
        connection.close()
    assert count_descriptors() == before


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("by", ["sock_diag", "table"])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells whose a connection is")
def test_the_user_at_the_other_end_is_known(stack, monkeypatch, host, by):
    if by == "table":
        monkeypatch.setattr(gloo, "_diagnose", lambda *_: None)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = stack.enter_context(socket.create_server((host, 0), family=family))
    except OSError:
        pytest.skip("no IPv6 here")
    one = stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
    other = stack.enter_context(listener.accept()[0])
    address, peer = one.getsockname()[:2], listener.getsockname()[:2]
    assert user_of_peer(peer, address) == os.getuid()
    assert has_connections(peer)
    assert user_of_peer(peer, (host, 1)) == NOBODY
    one.close()
    assert user_of_peer(peer, address) == NOBODY, "it is nobody's any more, and not root's"
    assert other.recv(1) == b""


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize("by", ["sock_diag", "table"])
def test_another_user_at_the_other_end_is_known(stack, monkeypatch, by):
    if by == "table":
        monkeypatch.setattr(gloo, "_diagnose", lambda *_: None)
    listener = listening(stack)
    code = (
        "import os, socket, sys\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"connection = socket.socket()\nconnection.connect({listener.getsockname()!r})\nsys.stdin.read()"
    )
    listener.settimeout(30)
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1) as process:
        connection = stack.enter_context(listener.accept()[0])
        assert user_of_peer(connection.getsockname(), connection.getpeername()) == 65534
        process.communicate()


def test_who_does_not_tell_is_told_from_nobody(stack, monkeypatch):
    monkeypatch.setattr(gloo, "_diagnose", lambda *_: None)
    monkeypatch.setattr(gloo, "_TABLES", dict.fromkeys(gloo._TABLES, Path("/nowhere")))
    one, other = connected(stack, listening(stack))
    assert user_of_peer(other.getsockname(), one.getsockname()) is None
