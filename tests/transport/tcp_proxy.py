"""A TCP proxy between two ends of a link, which tests cut and freeze."""

from __future__ import annotations

import contextlib
import select
import socket
import threading

LOOPBACK = "127.0.0.1"


class Proxy:
    """Forward TCP connections to `port`; `cut` closes them and refuses new ones, `freeze` forwards nothing.

    With `record`, `recorded` collects what the clients send.
    """

    def __init__(self, port: int, *, record: bool = False) -> None:
        self._record = record
        self.recorded = b""
        self._target = port
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.forwarding = True
        self.accepting = True
        self._open = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self) -> None:
        self.accepting = False
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):  # it has ended already
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self._listener.close()
        for pair in self._pairs:
            for end in pair:
                end.close()

    def _run(self) -> None:
        while self._open:
            ends = {a: b for pair in self._pairs for a, b in (pair, pair[::-1])} if self.forwarding else {}
            ready, _, _ = select.select([self._listener, *ends], [], [], 0.01)
            for end in ready:
                if end is self._listener:
                    connection, _ = self._listener.accept()
                    if not self.accepting:
                        connection.close()
                        continue
                    self._pairs.append((connection, socket.create_connection((LOOPBACK, self._target))))
                    continue
                try:
                    data = end.recv(1 << 16)
                    ends[end].sendall(data)
                    if self._record and any(end is client for client, _ in self._pairs):
                        self.recorded += data
                except OSError:
                    data = b""
                if not data:
                    self._pairs = [pair for pair in self._pairs if end not in pair]
                    end.close()
                    ends[end].close()
                    break
