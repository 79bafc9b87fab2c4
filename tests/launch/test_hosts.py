"""Test the link to the ranks of several hosts without hosts."""

from __future__ import annotations

from types import SimpleNamespace

from rankbook.launch import hosts
from rankbook.launch.hosts import HOME, HostsLink
from rankbook.protocol.messages import Interrupt, encode


def test_a_message_to_ranks_of_several_hosts_is_encoded_once_and_goes_to_every_host_once(monkeypatch):
    sent: list[tuple[object, ...]] = []
    encoded: list[object] = []

    def count(message):
        encoded.append(message)
        return encode(message)

    monkeypatch.setattr(hosts, "encode", count)
    seats = {rank: SimpleNamespace(host=host) for rank, host in enumerate((HOME, HOME, "a", "b", "a"))}
    home = SimpleNamespace(
        uplink="", wake=lambda: None, send_many_encoded=lambda ranks, data, _: sent.append((HOME, tuple(ranks), data))
    )
    table = SimpleNamespace(
        seats=seats, send_to_ranks=lambda host, ranks, _, data, __: sent.append((host, ranks, data))
    )
    message = Interrupt(cell=7)
    HostsLink(home, table, SimpleNamespace()).send_many((0, 1, 2, 3, 4), message)
    data = encode(message)
    assert sent == [(HOME, (0, 1), data), ("a", (2, 4), data), ("b", (3,), data)]
    assert encoded == [message]
