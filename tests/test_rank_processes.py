"""Test the fixture that runs ranks as processes: it reports errors and leaves no process."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import psutil
import pytest
import torch.distributed as dist

from tests.rank_processes import RankFailed, run_ranks

pytestmark = pytest.mark.processes


def test_results_are_in_rank_order_and_the_processes_have_ended():
    base = 10
    results = run_ranks(lambda more: (base + more + dist.get_rank(), os.getpid()), 2, 5)
    assert [result[0] for result in results] == [15, 16]
    assert not any(psutil.pid_exists(item[1]) for item in results)
    assert not multiprocessing.active_children()


def test_an_error_on_one_rank_is_reported_and_one_that_waits_is_ended_and_shown():
    def on_rank():
        if dist.get_rank() == 1:
            raise ValueError("of rank 1")
        threading.Event().wait()

    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)rank 0: it had not ended.*in wait.*rank 1: .*ValueError: of rank 1"):
        run_ranks(on_rank, 2, patience=0.5)
    assert time.monotonic() - start < 10
    assert not multiprocessing.active_children()


def test_the_stack_of_a_hung_rank_s_child_is_shown():
    def on_rank():
        if dist.get_rank() == 1:
            dist.barrier()
            raise ValueError("the child waits")

        def in_child():
            ours.close()
            theirs.send(None)
            theirs.poll(None)  # ends with the rank

        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=in_child)
        child.start()
        theirs.close()
        ours.recv()
        dist.barrier()
        child.join()

    with pytest.raises(RankFailed, match=r"(?s)in on_rank.*its child \d+, sleeping:.*in in_child"):
        run_ranks(on_rank, 2, patience=1)


def test_a_rank_that_is_killed_and_one_that_takes_too_long_are_reported():
    def on_rank():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), 9)

    with pytest.raises(RankFailed, match="the process ended with -9 and said nothing"):
        run_ranks(on_rank, 2, patience=0.2)
    with pytest.raises(RankFailed, match="it had not ended"):
        run_ranks(lambda: threading.Event().wait(), 1, timeout=0.5)
