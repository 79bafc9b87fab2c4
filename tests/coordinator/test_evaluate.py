"""Test the evaluation of expressions on real ranks that are running a cell."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

import rankbook
from rankbook.coordinator import queries
from rankbook.coordinator.queries import check_expression
from rankbook.errors import CellError, InvalidArgument
from tests.conftest import wait_until

TRAIN = """
def train():
    total = torch.zeros(1)
    while True:
        dist.all_reduce(total)
        total += rank + 1
train()
"""


@pytest.mark.parametrize("source", ["", "x = 1", "x += 1", "del x", "import os", "x; y", "!ls", "return 1", "if x: y"])
def test_peek_refuses_code_that_is_not_an_expression(source):
    with pytest.raises(InvalidArgument):
        check_expression(source)


@pytest.mark.parametrize(
    ("source", "why"),
    [("(x := 1)", "assigns to x"), ("[await x]", "contains await or yield"), ("(yield)", "contains await or yield")],
)
def test_an_expression_that_does_more_than_read_is_refused(source, why):
    with pytest.raises(InvalidArgument, match=why):
        check_expression(source)


def test_peek_strips_the_expression():
    assert check_expression(" {k: v for k, v in x.items()}  # all ") == "{k: v for k, v in x.items()}  # all"


@pytest.fixture(scope="module")
def cluster():
    with rankbook.Cluster(2) as cluster:
        yield cluster


@pytest.mark.processes
def test_peek_during_training_does_not_disturb_it(cluster, monkeypatch):
    monkeypatch.setattr(queries, "_GRACE", 10.0)
    ended = []

    def run():
        with contextlib.suppress(KeyboardInterrupt, CellError):
            cluster.run(TRAIN)
        ended.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: not any(part.trouble for part in cluster.peek("total")), timeout=20, what="the loop")
        replies = cluster.peek("(rank, total.numel())")
        assert [element.text for element in replies] == ["(0, 1)", "(1, 1)"]
        assert {entry.cell for entry in replies} == {"a call"}
        barred = cluster.peek("dist.all_reduce(torch.ones(1))")
        assert all("a peek cannot begin all_reduce:" in member.trouble for member in barred)
        start = time.monotonic()
        assert [part.trouble for part in cluster.peek("time.sleep(30) or 1", timeout=20)] == [
            "NameError: name 'time' is not defined"
        ] * 2
        hung = cluster.peek("__import__('time').sleep(30)", timeout=0.3, ranks=[1])
        assert [(value.rank, value.trouble) for value in hung] == [(1, "timed out after 0.3 s")]
        assert time.monotonic() - start < 20
        assert cluster.stacks()[1] is not None, "the control thread answers beside a peek that hangs"
        interrupted = time.monotonic()
        cluster.interrupt()
        thread.join(20)
        assert ended and ended[0] - interrupted < 20
    finally:
        cluster.interrupt()
        thread.join(20)
    assert cluster.run("x = torch.ones(1); dist.all_reduce(x); print(x.item())").ok
    assert [(item.text, item.cell) for item in cluster.peek("x")] == [("tensor([2.])", "")] * 2


@pytest.mark.slow
def test_rank_whose_interpreter_lock_is_held_is_reported_and_answers_after_its_release(cluster):
    hold_interpreter = "__import__('ctypes').PyDLL(None).usleep(4_000_000)"  # sleeps without letting the interpreter go
    replies = cluster.peek(f"rank and {hold_interpreter}", timeout=1)
    assert (replies[0].text, replies[1].text) == ("0", "")
    assert "no reply within 2 s" in replies[1].trouble
    assert [item.text for item in cluster.peek("rank", timeout=30)] == ["0", "1"]


@pytest.mark.processes
def test_dead_rank_is_reported_with_the_replies_of_the_others():
    with rankbook.Cluster(2) as cluster:
        with contextlib.suppress(CellError, rankbook.RankLostError):
            cluster.run("import os; os._exit(3)", ranks=[1])
        replies = cluster.peek("rank")
        assert (replies[0].text, replies[1].text) == ("0", "")
        assert "not running" in replies[1].trouble
