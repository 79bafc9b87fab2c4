"""Test timeouts and interrupts of cells that wait for busy ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal

import numpy as np
import pytest

import rankbook
from rankbook import CellTimeout, Cluster, InvalidArgument
from rankbook.launch import local
from tests.conftest import wait_until

pytestmark = pytest.mark.processes


SOON = 10.0
"""Seconds within which a call with a timeout of 0.3 s returns on a busy machine; the cell in its way takes a minute."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with rankbook.start(2) as cluster:
        yield cluster
    local.shutdown_prestarted()


@pytest.fixture
def busy(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, with a cell on rank 0 that takes a minute."""
    cell = cluster.submit_code("import time; time.sleep(60)", number=0, ranks=[0], sink=None)
    wait_until(lambda: cell.started is not None, timeout=10, what="rank 0 is busy")
    yield cluster
    cluster.interrupt_cell(cell)
    wait_until(lambda: cell.result is not None, timeout=10, what="rank 0 is free")


CALLS = {
    "run": lambda cluster: cluster.run("never = 1", timeout=0.3),
    "apply": lambda cluster: cluster.apply(int, timeout=0.3),
    "push": lambda cluster: cluster.push({"never": 1}, timeout=0.3),
    "pull": lambda cluster: cluster.pull("rank", timeout=0.3),
    "scatter": lambda cluster: cluster.scatter("never", [1, 2], timeout=0.3),
    "gather": lambda cluster: cluster.gather("rank", timeout=0.3),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_timeout_of_a_call_counts_while_it_waits_for_a_busy_rank(busy, call):
    start = time.monotonic()
    problem = r"did not start within 0\.3 s \(waiting for rank 0\) and was removed from the queue"
    with pytest.raises(CellTimeout, match=problem):
        call(busy)
    assert time.monotonic() - start < SOON
    assert [cell.state for cell in busy.cells()] == ["running"], "what waited is gone"


TAKES_TIMEOUT = {
    "run": lambda cluster, timeout: cluster.run("never = 1", timeout=timeout),
    "apply": lambda cluster, timeout: cluster.apply(int, timeout=timeout),
    "push": lambda cluster, timeout: cluster.push({"never": 1}, timeout=timeout),
    "pull": lambda cluster, timeout: cluster.pull("rank", timeout=timeout),
    "scatter": lambda cluster, timeout: cluster.scatter("never", [1, 2], timeout=timeout),
    "gather": lambda cluster, timeout: cluster.gather("rank", timeout=timeout),
    "watch_numbers": lambda cluster, timeout: cluster.watch_numbers("nan", timeout=timeout),
    "sync_check": lambda cluster, timeout: cluster.sync_check(timeout=timeout),
    "gradients": lambda cluster, timeout: cluster.gradients(timeout=timeout),
    "placement": lambda cluster, timeout: cluster.placement(timeout=timeout),
    "detail": lambda cluster, timeout: cluster.detail(0, timeout=timeout),
    "variables": lambda cluster, timeout: cluster.variables(timeout=timeout),
    "shards": lambda cluster, timeout: cluster.shards("rank", timeout=timeout),
    "statistic": lambda cluster, timeout: cluster.statistic("rank", "", 0, timeout=timeout),
    "complete": lambda cluster, timeout: cluster.complete("ra", 2, timeout=timeout),
    "inspect": lambda cluster, timeout: cluster.inspect("rank", timeout=timeout),
    "peek": lambda cluster, timeout: cluster.peek("rank", timeout=timeout),
    "stacks": lambda cluster, timeout: cluster.stacks(timeout=timeout),
    "status": lambda cluster, timeout: cluster.status(timeout=timeout),
    "protect": lambda cluster, timeout: cluster.protect(timeout=timeout),
    "restart": lambda cluster, timeout: cluster.restart(timeout=timeout),
    "resize": lambda cluster, timeout: cluster.resize(1, timeout=timeout),
    "heal": lambda cluster, timeout: cluster.heal(timeout=timeout),
    "start": lambda _, timeout: Cluster(1, timeout=timeout),
}


@pytest.mark.parametrize("timeout", ["30", timedelta(minutes=5), float("nan")], ids=["text", "timedelta", "nan"])
def test_a_timeout_that_is_no_number_of_seconds_is_refused_before_anything_is_submitted(cluster, timeout):
    for name, call in TAKES_TIMEOUT.items():
        with pytest.raises(InvalidArgument) as caught:
            call(cluster, timeout)
        assert str(caught.value) == f"timeout must be a number of seconds, got {timeout!r}", name
    assert cluster.cells() == []
    assert cluster.run("print('never' in globals())").stdout == {0: "False\n", 1: "False\n"}


def test_a_cell_that_is_waited_for_with_such_a_timeout_is_not_affected(cluster):
    cell = cluster.submit_code("ran = 1", number=0, ranks=None, sink=None)
    with pytest.raises(InvalidArgument, match="timeout must be a number of seconds, got '30'"):
        cluster.wait(cell, timeout="30")
    with pytest.raises(InvalidArgument, match="timeout must be a number of seconds, got '30'"):
        cluster.wait(cell, patience="30")
    cluster.wait(cell, patience=SOON)
    assert cell.result is not None
    assert cell.result.ok


@pytest.mark.parametrize("timeout", [Decimal("0.3"), np.float32(0.3)], ids=["Decimal", "numpy"])
def test_a_timeout_may_be_any_type_of_number(busy, timeout):
    with pytest.raises(CellTimeout, match=r"did not start within 0\.3 s"):
        busy.pull("rank", timeout=timeout)
    assert busy.peek("rank", ranks=[1], timeout=10 * timeout)[0].text == "1"


def test_a_timeout_may_be_infinite(cluster):
    infinite = float("inf")
    assert cluster.pull("rank", timeout=infinite) == [0, 1]
    assert [entry.state for entry in cluster.status(timeout=infinite)] == ["idle", "idle"]
    assert len(cluster.stacks(timeout=infinite)) == 2
    assert len(cluster.placement(timeout=infinite).ranks) == 2
    assert [peeked.text for peeked in cluster.peek("rank", timeout=infinite)] == ["0", "1"]


def test_a_cell_that_was_removed_never_runs(cluster):
    cell = cluster.submit_code("import time; time.sleep(60)", number=0, ranks=[0], sink=None)
    with pytest.raises(CellTimeout):
        cluster.run("never = 1", timeout=0.3)
    cluster.interrupt_cell(cell)
    cluster.wait(cell, patience=SOON)
    assert cluster.run("print('never' in globals())").stdout == {0: "False\n", 1: "False\n"}


def test_an_interrupt_removes_the_cells_that_wait(cluster):
    running = cluster.submit_code("import time; time.sleep(60)", number=0, ranks=[0], sink=None)
    waiting = [cluster.submit_code("never = 1", number=0, ranks=None, sink=None) for _ in range(3)]
    assert cluster.interrupt() == (0,)
    for cell in (running, *waiting):
        cluster.wait(cell, patience=SOON)
        assert cell.result is not None
        assert cell.result.status == "interrupted"
    assert cluster.run("print('never' in globals())").stdout == {0: "False\n", 1: "False\n"}


def test_an_interrupt_of_some_ranks_leaves_the_cells_that_wait_for_others(cluster):
    first = cluster.submit_code("import time; time.sleep(60)", number=0, ranks=[0], sink=None)
    second = cluster.submit_code("import time; time.sleep(60)", number=0, ranks=[1], sink=None)
    waits = cluster.submit_code("ran = 1", number=0, ranks=[1], sink=None)
    assert cluster.interrupt([0]) == (0,)
    cluster.wait(first, patience=SOON)
    assert waits.state == "queued"
    cluster.interrupt_cell(second)
    cluster.wait(waits, patience=SOON)
    assert waits.result is not None
    assert waits.result.ok
