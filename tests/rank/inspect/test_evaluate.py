"""Test the evaluation of expressions and its end, without a rank."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
import torch

from rankbook.protocol.queries import GetValue
from rankbook.rank.inspect.query_threads import Evaluator, describe, names_in, read_locals
from rankbook.rank.process_groups import interruptible_work
from tests.conftest import wait_until


class Work:
    running: int | None = 4

    def __init__(self, **variables):
        self.variables = variables

    def namespace(self):
        return dict(self.variables)


def peek(source, work=None, seconds=5.0, peeks=None):
    peeks = peeks or Evaluator(work or Work(), torch.device("cpu"))
    return peeks.answer(GetValue(3, source, seconds))


@pytest.mark.parametrize(
    ("source", "text", "trouble"),
    [
        ("x + 1", "8", ""),
        ("[x for _ in range(2)]", "[7, 7]", ""),
        ("(w * 2).requires_grad", "False", ""),
        ("y", "", "NameError: name 'y' is not defined"),
        ("xx", "", "NameError: name 'xx' is not defined; did you mean: x?"),
        ("exit_now()", "", "SystemExit: 3"),
        ("1 +", "", "SyntaxError: invalid syntax (<peek>, line 1)"),
        ("'a\\nb' + 1 / 0", "", "ZeroDivisionError: division by zero"),
    ],
)
def test_an_answer_is_a_text_or_one_line_of_trouble(source, text, trouble):
    work = Work(x=7, w=torch.ones(2, requires_grad=True), exit_now=lambda: sys.exit(3))
    reply = peek(source, work)
    assert (reply.token, reply.cell, reply.text, reply.trouble) == (3, 4, text, trouble)


def test_a_long_answer_is_cut_before_it_is_made():
    assert len(describe("x" * 10_000_000)) < 2100
    assert describe("x" * 10_000_000).endswith("10,000,000 characters in total")
    assert len(describe(list(range(10**6)))) < 2100
    assert describe("short") == "'short'"


def test_endless_expressions_time_out_and_too_many_are_refused():
    gate = threading.Event()
    peeks = Evaluator(Work(gate=gate), torch.device("cpu"))
    assert peek("[0 for _ in iter(int, 1)]", seconds=0.1, peeks=peeks).trouble == "timed out after 0.1 s"
    (spinning,) = peeks._timed_out
    assert spinning.ended.wait(20), "Python code goes on after it was given up"
    for _ in range(4):
        assert peek("gate.wait(60)", seconds=0.01, peeks=peeks).trouble == "timed out after 0.01 s"
    assert "4 earlier peeks have timed out and are still running" in peek("1", peeks=peeks).trouble
    gate.set()
    wait_until(lambda: peek("1", peeks=peeks).text == "1", timeout=20, what="room for another peek")


def test_only_a_peeks_thread_is_kept_from_collectives():
    assert not interruptible_work.thread_state.collectives_forbidden
    assert peek("thread_state.collectives_forbidden", Work(thread_state=interruptible_work.thread_state)).text == "True"
    assert not interruptible_work.thread_state.collectives_forbidden


def test_names_are_those_of_comprehensions_and_lambdas_too():
    assert names_in(compile("[a + (lambda: b)() for c in d]", "<peek>", "eval")) >= {"a", "b", "d"}


class Thing:
    pass


def run_stopped(code, look):
    """Call `look(ident)` while a thread stands in `code` at `stop()`."""
    arrived, leave = threading.Event(), threading.Event()

    def stop():
        arrived.set()
        leave.wait(20)

    namespace = {"stop": stop, "Thing": Thing}
    exec(compile(code, "<ipython-input-5-00000000>", "exec"), namespace)
    thread = threading.Thread(target=namespace["outer"])
    thread.start()
    assert arrived.wait(10)
    try:
        return look(thread.ident)
    finally:
        leave.set()
        thread.join()


NESTED = """
def outer():
    x, only_outer = 1, 2
    def inner():
        x, y = 10, only_outer
        stop()
    inner()
"""


def test_the_innermost_function_of_the_user_goes_first():
    values = run_stopped(NESTED, lambda ident: read_locals({"x", "y", "only_outer", "stop", "timeout"}, ident))
    assert values == {"x": 10, "y": 2, "only_outer": 2}, "the library's own `timeout` is none of the user's"


def test_evaluation_keeps_no_local_variables_alive():
    code = "def outer():\n    thing = Thing()\n    made.append(weakref.ref(thing))\n    del thing\n    stop()\n"
    code = code.replace("    del thing\n    stop()\n", "    stop()\n    del thing\n    stop2()\n")
    references, types = [], []
    arrived, leave, again, end = (threading.Event() for _ in range(4))
    namespace = {
        "Thing": Thing,
        "weakref": weakref,
        "made": references,
        "stop": lambda: (arrived.set(), leave.wait(20)),
        "stop2": lambda: (again.set(), end.wait(20)),
    }
    exec(compile(code, "<ipython-input-6-00000000>", "exec"), namespace)
    thread = threading.Thread(target=namespace["outer"])
    thread.start()
    try:
        assert arrived.wait(10)
        types.append(type(read_locals({"thing"}, thread.ident)["thing"]))
        leave.set()
        assert again.wait(10)
        gc.collect()
        assert types == [Thing] and references[0]() is None
    finally:
        leave.set()
        end.set()
        thread.join()


def test_a_function_that_asks_for_its_locals_keeps_what_it_got():
    code = "def outer():\n    x = 1\n    mine = locals()\n    stop()\n    result.append(dict(mine))\n"
    result = []
    code = code.replace("def outer():", "result = []\ndef outer():")

    def look(ident):
        frame = sys._current_frames()[ident]
        while frame.f_code.co_name != "outer":
            frame = frame.f_back
        result.append(frame.f_globals["result"])
        return read_locals({"x"}, ident)

    assert run_stopped(code, look) == {"x": 1}
    assert result[0][0]["x"] == 1
