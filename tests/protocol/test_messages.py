"""Test the encoding of messages, and that the protocol's version changes with them."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from rankbook.errors import InvalidArgument, ProtocolError
from rankbook.protocol import PROTOCOL_VERSION, forkserver, messages
from rankbook.protocol.queries import QueryReply, QueryRequest


def test_a_message_travels():
    sent = messages.Done(cell=3, status="error", seconds=0.5, error=messages.ErrorReport("E", "v", "t", "p", 2))
    assert messages.decode_from_rank(messages.encode(sent)) == sent


def test_text_that_utf_8_cannot_encode_is_an_invalid_argument():
    with pytest.raises(InvalidArgument, match=r"found '\\udce9'.*write its escape"):
        messages.encode(messages.RunCell(cell=1, source="print('caf\udce9')", number=1))


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


DIRECTIONS = (
    *(messages.ToRank, messages.FromRank),
    *(messages.ToForkserver, messages.FromForkserver),
    *(forkserver.ToAgent, forkserver.FromAgent),
)


def test_every_message_belongs_to_a_direction():
    directed = {kind for union in DIRECTIONS for kind in union.__args__}
    kinds = set(messages.Message.__subclasses__()) - {QueryRequest, QueryReply}
    assert directed == kinds | {*QueryRequest.__subclasses__(), *QueryReply.__subclasses__()}


WIRE = (4, "c2fd8599e7595780")
"""The protocol's version, and a digest of the messages and their fields that it stands for."""


def test_a_changed_message_has_a_new_protocol_version():
    kinds = [kind for union in DIRECTIONS for kind in union.__args__]
    _, components = msgspec.json.schema_components(kinds)
    for component in components.values():
        component.pop("description", None)
    digest = hashlib.sha256(msgspec.json.encode(components, order="deterministic")).hexdigest()[:16]
    assert (PROTOCOL_VERSION, digest) == WIRE, "increase PROTOCOL_VERSION once per release, then record both here"


def test_the_first_message_of_an_agent_keeps_its_format():
    """Keep these bytes: every version must be able to refuse every other one."""
    recorded = {"name": "node1", "rankbook": "0.1", "protocol": "4", "torch": "2.9", "python": "3.12", "pid": "7"}
    data = msgspec.msgpack.encode({**recorded, "of a later version": "ignored"})
    description = forkserver.decode_description(data)
    assert {name: getattr(description, name) for name in recorded} == recorded
    assert description.address == description.node == description.rank == "", "an earlier version does not have them"
    again = msgspec.msgpack.decode(forkserver.encode_description(description))
    assert recorded.items() <= again.items() and all(isinstance(value, str) for value in again.values())
    for invalid in (b"", b"\xc1", msgspec.msgpack.encode(["name"]), msgspec.msgpack.encode({"name": 1})):
        with pytest.raises(ProtocolError):
            forkserver.decode_description(invalid)
