"""Test the pause of a rank's main thread at the end of an optimizer step."""

from __future__ import annotations

import threading

import torch

from rankbook.numerics import step_ends
from rankbook.protocol.queries import HoldAtStep, HoldReply
from rankbook.rank.inspect.step_hold import HoldHandler
from tests.conftest import wait_until


class NeverIdle:
    """Main thread that is always in a cell."""

    def run_when_idle(self, function):
        """Call nothing."""

    def check_numbers(self, check):
        """Check nothing."""


def test_a_thread_that_is_to_go_on_to_a_later_step_does_not_pause_any_more():
    handler, seen = HoldHandler(NeverIdle()), []
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(1)

    def ask(position, seconds=60.0):
        reply = handler.answer(HoldAtStep(1, "steps", position, seconds))
        assert isinstance(reply, HoldReply)
        return reply

    def check():
        wait_until(lambda: ask(1).holds, timeout=30, what="the thread pauses at step 1")
        seen.append(ask(2))
        wait_until(lambda: ask(2).holds, timeout=30, what="the thread pauses at step 2")
        seen.append(ask(2))
        ask(0, seconds=0.0)

    ask(1)
    checking = threading.Thread(target=check)
    checking.start()
    try:
        optimizer.step()
        optimizer.step()
    finally:
        checking.join(60)
        step_ends._remove(handler._after_step)
    assert [(reply.holds, reply.steps) for reply in seen] == [(False, 1), (True, 2)]
