"""Whoever debugs ranks hears them, and hears of their end."""

from __future__ import annotations

import json

from rankbook.coordinator.channels import DapChannels
from rankbook.protocol.comm import DapFromRank, DapToRank


def test_what_is_said_reaches_the_listener_and_a_rank_that_is_gone_is_paused_no_more():
    sent, heard = [], []
    debugs = DapChannels(lambda rank, message: bool(sent.append((rank, message)) or rank < 2))
    debugs.said(0, DapFromRank("{}"))  # nobody listens
    debugs.listener = lambda rank, content: heard.append((rank, content))
    debugs.said(1, DapFromRank('{"a": 1}'))
    debugs.paused[1] = "paused at line 3"
    debugs.forget(1)
    assert heard == [(1, '{"a": 1}'), (1, None)] and debugs.paused == {}
    assert debugs.tell(1, "{}") and not debugs.tell(2, "{}")
    assert sent == [(1, DapToRank("{}")), (2, DapToRank("{}"))]


def test_ranks_are_let_go_by_a_disconnect():
    sent = []
    DapChannels(lambda rank, message: bool(sent.append((rank, message)) or True)).let_go((0, 3))
    assert [rank for rank, _ in sent] == [0, 3]
    assert json.loads(sent[0][1].content)["command"] == "disconnect"
