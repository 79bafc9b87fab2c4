"""Attacks on the port of a cluster, in a process of their own: `python -m tests.agent.strangers FILE ATTACK COUNT`.

FILE is the connection file. Only the attacks of a member use the keys in it, and each begins with a new connection.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from rankbook.launch.connection import Connection, decode_connection
from rankbook.transport.agent_link import make_keys

FIRST_PACKET = [b"RBAGENT1", b"stranger", b"0", b"hello"]
# https://rfc.zeromq.org/spec/37/: signature, version 3.1, mechanism, as a client.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


class Bomb:
    """A value whose pickle makes a file when it is opened."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.file),)


def random_bytes(connection: Connection, count: int) -> None:
    """Send `count` pieces of random bytes in place of the handshake, and some after a valid greeting."""
    chance = random.Random(1)
    sent = 0
    while sent < count:
        try:
            with socket.create_connection(_address(connection), 5) as stranger:
                if chance.random() < 0.5:
                    stranger.sendall(GREETING)
                    sent += 1
                while sent < count:
                    sent += 1
                    stranger.sendall(chance.randbytes(chance.randrange(1, 200)))
        except ConnectionRefusedError:
            raise  # nothing listens any more, and nothing would ever be sent
        except OSError:
            continue


def without_key(connection: Connection, count: int) -> None:
    """Connect without encryption, with the wrong key of the server, and with an unknown key of a client."""
    other, _ = make_keys()
    context = zmq.Context()
    for number in range(count):
        stranger = context.socket(zmq.DEALER)
        if number % 3:
            stranger.curve_serverkey = (other if number % 3 == 1 else connection.keys).server_public
            stranger.curve_publickey, stranger.curve_secretkey = other.client_public, other.client_secret
        _send_until_refused(stranger, connection)
    context.destroy(linger=0)


def large_frames(connection: Connection, count: int) -> None:
    """Announce frames of 1 GB, and send as much of them as is accepted."""
    for number in range(count):
        with contextlib.suppress(OSError), socket.create_connection(_address(connection), 5) as stranger:
            kind = (b"\x02", b"\x06")[number % 2]  # a long message, a long command
            stranger.sendall(GREETING + kind + (1 << 30).to_bytes(8, "big"))
            for _ in range(64):
                stranger.sendall(bytes(1 << 20))


def pickles(connection: Connection, count: int, file: Path) -> None:
    """Send pickles that would make `file`, before and in place of the handshake, and as the first packet."""
    bomb = pickle.dumps(Bomb(file))
    for _ in range(count):
        for data in (bomb, GREETING + b"\x02" + len(bomb).to_bytes(8, "big") + bomb):
            with contextlib.suppress(OSError), socket.create_connection(_address(connection), 5) as stranger:
                stranger.sendall(data)
    without_key(connection, count)


def random_packets_of_a_member(connection: Connection, count: int) -> None:
    """Send packets of random frames, with the keys of the cluster."""
    chance = random.Random(2)
    context = zmq.Context()
    member = member_socket(context, connection)
    for number in range(count):
        frames = [chance.randbytes(chance.randint(0, 60)) for _ in range(chance.randint(1, 4))]
        member.send_multipart(FIRST_PACKET if number % 100 == 0 else frames)
    member.close(linger=20_000)
    context.term()


ATTACKS: dict[str, Callable[[Connection, int], None]] = {
    attack.__name__: attack for attack in (random_bytes, without_key, large_frames, random_packets_of_a_member)
}


def member_socket(context: zmq.Context[zmq.Socket[bytes]], connection: Connection) -> zmq.Socket[bytes]:
    """Return a socket with the keys of the cluster."""
    member = context.socket(zmq.DEALER)
    member.curve_serverkey = connection.keys.server_public
    member.curve_publickey, member.curve_secretkey = connection.keys.client_public, connection.keys.client_secret
    member.sndhwm = 1000
    member.sndtimeo = 30_000  # of a connection that does not come back, a send would wait for ever
    member.connect(f"tcp://{connection.address}:{connection.port}")
    return member


def _send_until_refused(stranger: zmq.Socket[bytes], connection: Connection) -> None:
    events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    failures = stranger.get_monitor_socket(events)
    stranger.connect(f"tcp://{connection.address}:{connection.port}")
    # After an error of the protocol, such as a missing mechanism, libzmq does not reconnect: it ends the pipe of the
    # connection. If it has done so before the message is sent, the DEALER has no pipe, and a blocking send never
    # returns.
    with contextlib.suppress(zmq.Again):
        stranger.send_multipart(FIRST_PACKET, zmq.DONTWAIT)
    failures.poll(5_000)
    stranger.disable_monitor()
    failures.close()
    stranger.close(linger=0)


def _address(connection: Connection) -> tuple[str, int]:
    return connection.address, connection.port


if __name__ == "__main__":
    description, name, number = Path(sys.argv[1]).read_text(), sys.argv[2], int(sys.argv[3])
    until = time.monotonic() + (float(sys.argv[4]) if len(sys.argv) > 4 else 0.0)
    while True:
        ATTACKS[name](decode_connection(description, "file"), number)
        if time.monotonic() > until:
            break
