"""Test how the members of process groups are encoded in reports."""

from __future__ import annotations

import random

import msgspec
import pytest

from rankbook.errors import ProtocolError
from rankbook.protocol.messages import Collectives, decode_from_rank, encode
from rankbook.protocol.telemetry import GroupReport, decode_members, encode_members


def test_members_keep_their_order_and_large_groups_are_short():
    groups = [(), (5,), (0, 1, 2, 3, 8, 16), (3, 1, 0, 2), (7, 7), tuple(range(1023, -1, -1))]
    generator = random.Random(1)
    groups += [tuple(generator.sample(range(64), generator.randint(0, 64))) for _ in range(200)]
    assert [decode_members(encode_members(ranks)) for ranks in groups] == groups
    assert encode_members((0, 1, 2, 3, 8, 16)) == ((0, 1, 4), (8, 8, 2))
    assert encode_members(tuple(range(3, 1024, 8))) == ((3, 8, 128),)


def test_a_report_of_a_thousand_ranks_is_as_long_as_that_of_two():
    sizes = []
    for world_size in (2, 1024):
        members = encode_members(tuple(range(world_size)))
        report = GroupReport(name="0", members=members, count=1, pending=(), recent=())
        message = Collectives(token=0, cell=1, line=3, groups=(report,))
        decoded = decode_from_rank(encode(message))
        assert isinstance(decoded, Collectives) and decoded.groups[0].ranks == tuple(range(world_size))
        sizes.append(len(encode(message)))
    assert sizes[1] <= sizes[0] + 4


@pytest.mark.parametrize("runs", [[[0, 1, 1 << 40]], [[0, 1, 0]], [[0, 1, -5]], [[0, 1, 40_000], [0, 0, 40_000]]])
def test_members_that_no_group_has_are_a_protocol_error(runs):
    report = GroupReport(name="0", members=((0, 1, 2),), count=1, pending=(), recent=())
    message = msgspec.msgpack.decode(encode(Collectives(token=0, cell=1, line=3, groups=(report,))))
    message["groups"][0]["members"] = runs
    with pytest.raises(ProtocolError):
        decode_from_rank(msgspec.msgpack.encode(message))
