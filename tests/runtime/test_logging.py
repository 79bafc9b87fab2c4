"""Test which rank's records are logged, and the source line that they name."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
import torch.distributed as dist

from rankbook.runtime.logging import get_logger
from rankbook.runtime.process_state import PartialState
from tests.rank_processes import run_ranks


def test_a_record_names_its_rank_and_the_line_that_made_it(caplog):
    log = get_logger("rankbook.test", "debug")
    log.debug("before there is a state: %d", 1)
    PartialState(cpu=True)
    log.info("after", extra={"more": 2})
    log.warning("to all", main_process_only=False, in_order=True)
    first, second, third = caplog.records
    assert first.getMessage() == "before there is a state: 1"
    assert (first.rank, first.world_size, second.more) == (0, 1, 2)
    assert {record.filename for record in caplog.records} == {"test_logging.py"}
    assert {record.funcName for record in caplog.records} == {"test_a_record_names_its_rank_and_the_line_that_made_it"}
    assert third.getMessage() == "to all"


def test_an_adapter_around_it_names_the_line_of_its_own_caller(caplog):
    class Own(logging.LoggerAdapter):
        def log(self, level, msg, *args, **kwargs):
            self.logger.log(level, msg, *args, **{"stacklevel": kwargs.pop("levels", 3), **kwargs})

    log = Own(get_logger("rankbook.test"), {})
    log.warning("here")
    for levels in (1, 2):
        log.warning("in the adapter", levels=levels)
    assert [record.funcName for record in caplog.records] == [
        "test_an_adapter_around_it_names_the_line_of_its_own_caller", "log", "log"
    ]  # fmt: skip
    assert {record.filename for record in caplog.records} == {"test_logging.py"}


def test_a_level_that_is_off_is_off(caplog, monkeypatch):
    get_logger("rankbook.test", "error").warning("no")
    monkeypatch.setenv("RANKBOOK_LOG_LEVEL", "info")
    get_logger("rankbook.test").info("yes")
    assert [record.getMessage() for record in caplog.records] == ["yes"]


def test_a_warning_is_given_once(caplog):
    log = get_logger("rankbook.test.once", "warning")
    for text in ("a", "a", "b"):
        log.warning_once(text)
    assert [record.getMessage() for record in caplog.records] == ["a", "b"]


@pytest.mark.processes
def test_a_notebook_shows_the_turns_in_order_also_of_a_rank_that_comes_late(fresh_notebook):
    notebook = fresh_notebook
    notebook.ok("%distributed start -n 3")
    outcome = notebook.ok(
        "%%distributed\nimport rankbook, sys, logging\n"
        "log = rankbook.get_logger('turns', 'info')\n"
        "log.logger.addHandler(logging.StreamHandler(sys.stdout))\nlog.logger.propagate = False\n"
        "log.info('first, without a state, rank %d', rank)\nassert not rankbook.PartialState._shared_state\n"
        "store = dist.distributed_c10d._get_default_store()\n"
        "for step in range(3):\n    if rank == 1:\n        store.wait([f'{step} 0', f'{step} 2'])  # they wait for it\n"
        "    for line in range(rank % 2 * 3):\n        print('before', step, line)\n"
        "    store.set(f'{step} {rank}', '')\n"
        "    log.info('turn %d of rank %d', step, rank, in_order=True)"
    )
    assert [line for line in outcome.stdout.splitlines() if "first" in line] == ["[0] first, without a state, rank 0"]
    turns = [line.partition(" ")[2] for line in outcome.stdout.splitlines() if "turn" in line]
    assert turns == [f"turn {step} of rank {rank}" for step in range(3) for rank in range(3)]


@pytest.mark.processes
def test_on_several_ranks_the_first_one_speaks_or_all_in_turn():
    def on_rank():
        state, store = PartialState(), dist.distributed_c10d._get_default_store()
        messages = []

        class Keep(logging.Handler):
            def emit(self, record):
                if record.getMessage() == "turn" and state.is_main_process:
                    with pytest.raises(RuntimeError, match=r"(?i)timeout"):  # for that long no other one takes its turn
                        store.wait(["too early"], timedelta(seconds=0.3))
                elif record.getMessage() == "turn":
                    store.set("too early", "")
                messages.append((record.getMessage(), record.rank, store.add("turn", 1)))

        log = get_logger("test", "info")
        log.logger.addHandler(Keep())
        log.info("main")
        state.wait_for_everyone()
        log.info("turn", main_process_only=False, in_order=True)
        log.debug("too low, and still everybody's turn", main_process_only=False, in_order=True)
        log.info("all", in_order=True)
        return messages

    assert run_ranks(on_rank, 3) == [
        [("main", 0, 1), ("turn", 0, 2), ("all", 0, 5)],
        [("turn", 1, 3), ("all", 1, 6)],
        [("turn", 2, 4), ("all", 2, 7)],
    ]
