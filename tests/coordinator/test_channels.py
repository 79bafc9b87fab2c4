"""Test the channels of comms and debuggers to the ranks."""

from __future__ import annotations

import json

from rankbook.coordinator.channels import DapChannels
from rankbook.protocol.messages import DapFromRank, DapToRank


def test_dap_messages_reach_the_listener_and_a_lost_rank_is_not_paused():
    sent, received = [], []
    debugs = DapChannels(lambda rank, message: bool(sent.append((rank, message)) or rank < 2))
    debugs.message_received(0, DapFromRank("{}"))  # nobody listens
    debugs.listener = lambda rank, content: received.append((rank, content))
    debugs.message_received(1, DapFromRank('{"a": 1}'))
    debugs.paused[1] = "paused at line 3"
    debugs.forget(1)
    assert received == [(1, '{"a": 1}'), (1, None)] and debugs.paused == {}
    assert debugs.send(1, "{}") and not debugs.send(2, "{}")
    assert sent == [(1, DapToRank("{}")), (2, DapToRank("{}"))]


def test_disconnect_resumes_paused_ranks():
    sent = []
    DapChannels(lambda rank, message: bool(sent.append((rank, message)) or True)).disconnect((0, 3))
    assert [rank for rank, _ in sent] == [0, 3]
    assert json.loads(sent[0][1].content)["command"] == "disconnect"
