"""Test messages of the page for widgets that a cell is still constructing."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import pytest
import torch

from rankbook.protocol import telemetry
from rankbook.protocol.messages import CommFromRank, CommToRank
from rankbook.rank import comms
from rankbook.rank.comms import HeldMessages, RankComm, attach_comms
from rankbook.rank.control_thread import Interrupts


class Rank:
    """Sends and receives the messages of a rank; `delivered` reached the handlers of the widgets."""

    def __init__(self) -> None:
        self.delivered: list[str] = []
        self.held = HeldMessages(lambda received: self.delivered.append(received[0].content))

    def opens(self, name: str, content: str = "{}") -> None:
        self.held.message_sent("open", name, content)

    def handle_message(self, name: str, content: str) -> None:
        self.held.message_received((CommToRank("msg", name, content, "{}"), ()))


def test_messages_for_a_new_widget_wait_for_its_display_and_keep_their_order():
    rank = Rank()
    rank.opens("earlier")
    rank.held.begin_cell()
    rank.opens("figure")
    rank.handle_message("figure", "one")
    rank.handle_message("figure", "two")
    rank.handle_message("earlier", "of an earlier cell")
    assert rank.delivered == ["of an earlier cell"]
    rank.held.release()
    rank.handle_message("figure", "three")
    assert rank.delivered == ["of an earlier cell", "one", "two", "three"]


def test_a_widget_to_which_another_one_refers_is_complete():
    rank = Rank()
    rank.held.begin_cell()
    rank.opens("child-1")
    rank.opens("other-2")
    rank.handle_message("child-1", "for the child")
    rank.handle_message("other-2", "for the other")
    rank.held.message_sent("msg", "box", '{"state": {"children": ["IPY_MODEL_child-1"]}}')
    assert rank.delivered == ["for the child"]
    rank.held.end_cell()
    assert rank.delivered == ["for the child", "for the other"]


def test_between_cells_and_on_the_thread_that_handles_messages_nothing_waits():
    rank = Rank()
    rank.opens("a")
    rank.held.begin_cell()
    rank.held.comm_thread = threading.get_ident()
    rank.opens("b")
    for name in "ab":
        rank.handle_message(name, name)
    assert rank.delivered == ["a", "b"]


def test_an_interrupt_during_a_message_is_raised_when_all_of_its_parts_are_sent(monkeypatch):
    interrupts = Interrupts()
    sent: list[object] = []

    def send(message: CommFromRank, frames: list[memoryview]) -> None:
        sent.append(message.kind)
        interrupts._on_signal(2, None)  # pyzmq sends the parts of a message in a loop of Python code
        sent.extend(bytes(frame) for frame in frames)

    monkeypatch.setattr(comms, "_registry", comms._CommRegistry())
    monkeypatch.setattr(comms.os, "register_at_fork", lambda **_: None)
    attach_comms(SimpleNamespace(send=send), interrupts.shield)
    widget_comm = RankComm(target_name="jupyter.widget", primary=False)
    monkeypatch.setattr(interrupts, "_armed_cell", 1)
    with pytest.raises(KeyboardInterrupt):
        widget_comm.send({}, buffers=[b"x", b"y"])
    assert sent == ["msg", b"x", b"y"]


def test_the_callbacks_of_widgets_use_the_device_of_the_rank(monkeypatch):
    chosen: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(telemetry, "this_device", "cuda:1")
    monkeypatch.setattr(torch.cuda, "set_device", chosen.put)
    threading.Thread(target=comms._CommRegistry().run, daemon=True).start()
    assert chosen.get(timeout=10) == "cuda:1"


@pytest.mark.parametrize("runs_cell", [True, False])
def test_a_widget_that_is_moved_while_a_cell_runs_does_not_trigger_the_events_of_a_cell(monkeypatch, runs_cell):
    events: list[str] = []
    shell = SimpleNamespace(events=SimpleNamespace(trigger=events.append))
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    monkeypatch.setattr(comms._registry.held, "in_cell", runs_cell)
    end = RankComm(target_name="any", comm_id="moved", primary=False)
    end.on_msg(lambda message: events.append(message["content"]))
    end.handle_msg({"content": "moved"})
    assert events == (["moved"] if runs_cell else ["pre_execute", "moved", "post_execute"])
