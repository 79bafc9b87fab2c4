"""What the ranks of a kept cluster tell their new owner.

Owns: asking them, and sorting what comes: what was on the wire before a rank's `Here` is not counted, for the rank
repeats it. Refuses: to show or decide anything (adoption.py, state.py).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rankbook.errors import StartError, UnreadableMessage
from rankbook.protocol.messages import FromRank, Text
from rankbook.protocol.reattach import Here, Recall
from rankbook.ranks import name_ranks
from rankbook.transport.link import HubLink, Sender


@dataclass
class Account:
    """What one rank says: its last task, and what of it nobody has seen. `later` came after that."""

    here: Here
    missed: list[FromRank] = field(default_factory=list)
    later: list[tuple[FromRank, list[memoryview]]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all that the rank repeats is there."""
        return len(self.missed) >= self.here.entries


class Reunion:
    """Sorts what arrives from these incarnations of the ranks, once they were asked with `nonce`."""

    def __init__(self, incarnations: Mapping[int, int], nonce: str) -> None:
        self.accounts: dict[int, Account] = {}
        self._incarnations = dict(incarnations)
        self._nonce = nonce

    @property
    def missing(self) -> list[int]:
        """The ranks that have not told all yet."""
        told = {rank for rank, account in self.accounts.items() if account.complete}
        return sorted(set(self._incarnations) - told)

    def take(self, sender: Sender, message: FromRank, frames: list[memoryview]) -> None:
        """A message has come."""
        if self._incarnations.get(sender.rank) != sender.incarnation:
            return
        account = self.accounts.get(sender.rank)
        if isinstance(message, Here):
            if message.nonce == self._nonce:
                self.accounts[sender.rank] = Account(message)
        elif account is not None and account.complete:
            account.later.append((message, frames))
        elif account is not None:
            account.missed.append(message)

    def leave_out(self, sender: Sender, error: UnreadableMessage) -> None:
        """Take a line on stderr in the place of a message that cannot be read."""
        account = self.accounts.get(sender.rank)
        told = f"a message of rank {sender.rank} cannot be read, so it is left out ({error})\n"
        cell = 0 if account is None else account.here.cell
        self.take(sender, Text(cell=cell, stream="stderr", data=told.encode()), [])


def wait_reunited(
    hub: HubLink, pids: Mapping[int, int], incarnations: Mapping[int, int], *, token: str, since: float, timeout: float
) -> dict[int, Account]:
    """Ask the ranks and wait for what all of them tell. Raises `StartError` that names those which do not answer."""
    reunion = Reunion(incarnations, secrets.token_hex(8))
    deadline = time.monotonic() + timeout
    for rank in incarnations:
        hub.send(rank, Recall(token=token, nonce=reunion._nonce, since=since))
    while reunion.missing and (left := deadline - time.monotonic()) > 0:
        hub.wait(left, ())
        while _take_next(hub, reunion):
            pass
    if reunion.missing:
        silent = ", ".join(str(pids[rank]) for rank in reunion.missing)
        raise StartError(
            f"{name_ranks(reunion.missing)} (pid {silent}) did not answer within {timeout:.0f} s; it may be in C code"
            " that holds the interpreter. Try again, or kill it and attach without it"
        )
    return reunion.accounts


def _take_next(hub: HubLink, reunion: Reunion) -> bool:
    """Take the next message; return whether there was one. One that cannot be read is told in its place."""
    try:
        parcel = hub.receive()
    except UnreadableMessage as error:
        if error.sender is not None:
            reunion.leave_out(Sender(*error.sender), error)
        return True
    if parcel is not None:
        reunion.take(*parcel)
    return parcel is not None
