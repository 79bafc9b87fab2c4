"""The wire's vocabulary."""

from __future__ import annotations

import msgspec
import pytest

from rankbook.errors import ProtocolError
from rankbook.protocol import messages
from rankbook.protocol.queries import QueryReply, QueryRequest


def test_a_message_travels():
    sent = messages.Done(cell=3, status="error", seconds=0.5, error=messages.ErrorReport("E", "v", "t", "p", 2))
    assert messages.decode_from_rank(messages.encode(sent)) == sent


def test_an_unknown_type_an_unknown_field_and_the_wrong_direction_are_protocol_errors():
    for data in (
        msgspec.msgpack.encode({"type": "Surprise"}),
        msgspec.msgpack.encode({"type": "Interrupt", "cell": 1, "extra": 2}),
        msgspec.msgpack.encode({"type": "Interrupt", "cell": "one"}),
        messages.encode(messages.Clear(cell=1, wait=True)),
        b"no msgpack at all",
        b"",
    ):
        with pytest.raises(ProtocolError):
            messages.decode_to_rank(data)


def test_every_message_belongs_to_a_direction():
    directions = (messages.ToRank, messages.FromRank, messages.ToForkserver, messages.FromForkserver)
    known = {kind for union in directions for kind in union.__args__}
    kinds = set(messages.Message.__subclasses__()) - {QueryRequest, QueryReply}
    assert known == kinds | {*QueryRequest.__subclasses__(), *QueryReply.__subclasses__()}
