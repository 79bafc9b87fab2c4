"""Which notebook the forkserver serves: the one that started it, or one that has claimed a kept cluster since.

Owns: the way to the owner, whether it is there, the socket at which a new one claims, and when it is too late. Refuses:
the ranks. Two notebooks never own one cluster; who claims shows the cluster's token, and is the same user.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import socket
import time
from collections.abc import Callable

from rankbook.errors import ProtocolError
from rankbook.protocol.messages import Message, ToForkserver, decode_to_forkserver
from rankbook.protocol.reattach import Claim, Claimed, ClaimRefused, KeepCluster
from rankbook.rank import os_utils
from rankbook.transport.framed_socket import MessageStream

_CLAIM_SECONDS = 5.0
"""How long a process that has connected may take to say what it wants."""

Stream = MessageStream[ToForkserver]


class Owner:
    """The owner, seen from the forkserver: first the process `notebook`, its parent, over `stream`."""

    def __init__(self, stream: Stream, notebook: int) -> None:
        self.stream = stream
        self.lost = 0.0
        self._gone: Callable[[], bool] = lambda: os.getppid() != notebook
        self._pid = notebook
        self._kept: KeepCluster | None = None
        self._listener: socket.socket | None = None
        self._callers: list[tuple[Stream, int, float]] = []
        self._flag = mmap.mmap(-1, 1)  # shared with every process that is forked from here on
        self._flag[0] = 1

    def there(self) -> bool:
        """Whether there is one. In the ranks too: this is how they know."""
        return self._flag[0] == 1

    @property
    def keeps(self) -> bool:
        """Whether the cluster outlives its owner."""
        return self._kept is not None

    def files(self) -> list[int]:
        """The descriptors to watch."""
        files = [each.fileno() for each, _, _ in self._callers]
        if self._listener is not None:
            files.append(self._listener.fileno())
        if self.there():
            files.append(self.stream.fileno())
        return files

    def send(self, message: Message) -> None:
        """Tell the owner, if there is one."""
        if self.there():
            self.stream.send(message)

    def keep(self, message: KeepCluster) -> None:
        """From now on the cluster outlives its owner."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(message.address)
        self._listener.listen(8)
        self._kept = message

    def let_go(self) -> None:
        """There is no cluster any more that could outlive anybody."""
        self._kept = None
        self._hang_up()

    def forget(self) -> None:
        """In a child of the forkserver: close what is not its own."""
        self.stream.close()
        self._hang_up()

    def look(self) -> bool:
        """Notice that the owner is gone; False when that ends the cluster."""
        if self.there() and (self.stream.closed or self._gone()):
            self.stream.close()
            self._flag[0] = 0
            self.lost = time.monotonic()
        return self.there() or (self._kept is not None and time.monotonic() - self.lost < self._kept.seconds)

    def hear_claims(self, ranks: int) -> bool:
        """Answer whoever has connected; whether one of them is the owner now, and waits to hear of `ranks` ranks."""
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
        self._callers = [each for each in self._callers if each[0] is not self.stream and not each[0].closed]
        return claimed

    def _welcome(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        pid, user = os_utils.peer(connection)
        if user not in (None, os.getuid()):
            connection.close()
            return
        caller = MessageStream(connection, decode_to_forkserver)
        self._callers.append((caller, pid or 0, time.monotonic() + _CLAIM_SECONDS))

    def _answer(self, caller: Stream, pid: int, message: ToForkserver, ranks: int) -> bool:
        if not isinstance(message, Claim) or not self._knows(message.token):
            caller.send(ClaimRefused(owner=0))
            caller.close()
            return False
        if self.there():
            caller.send(ClaimRefused(owner=self._pid))
            caller.close()
            return False
        self._pid = pid or message.pid
        self._gone = os_utils.end_of(self._pid)
        self.stream = caller
        self._flag[0] = 1
        caller.send(Claimed(ranks=ranks, lost=self.lost))
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
