"""Test the lines of other hosts in `%distributed status`."""

from __future__ import annotations

import pytest

from rankbook.launch.hosts import HostStatus
from rankbook.magics.reports import describe_host


@pytest.mark.parametrize(
    ("host", "line"),
    [
        (HostStatus("node1", 2, (0, 1), 0.0004), "host node1: 2 slots, ranks 0-1, round trip 0.4 ms"),
        (HostStatus("node1", 1, ()), "host node1: 1 slot, no rank, reachable"),
        (HostStatus("node1", 1, (3,), 0.1, unreachable=7.4), "host node1: 1 slot, rank 3, not reachable for 7 s"),
        (HostStatus("a", 0, (3,), lost="was lost: it ended"), "host a: 0 slots, rank 3, lost (it ended)"),
        (
            HostStatus("a", 1, (3,), 0.001, dropped=1, repeated=2),
            "host a: 1 slot, rank 3, round trip 1.0 ms, 1 message dropped, 2 repeated packets dropped",
        ),
    ],
)
def test_a_host_has_its_slots_ranks_connection_and_what_was_dropped(host, line):
    assert describe_host(host) == line
