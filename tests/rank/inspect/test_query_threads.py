"""Who answers what a rank is asked while it computes."""

from __future__ import annotations

import queue
import threading

from rankbook.protocol.queries import GetStatus, QueryFailed
from rankbook.rank.inspect.query_threads import QueryThreads
from tests.conftest import wait_until


class Looks:
    """Answers with the thread's name; `at_once` what is not fresh."""

    def answer(self, question):
        return QueryFailed(question.token, f"apart: {threading.current_thread().name != 'control'}")

    def at_once(self, question):
        if question.token == 13:
            raise ValueError("unlucky")
        return None if question.fresh else QueryFailed(question.token, threading.current_thread().name)


def test_what_takes_next_to_nothing_is_answered_by_the_thread_that_hears_it():
    said = queue.SimpleQueue()
    inquiries = QueryThreads(said.put, Looks)

    def heard(token, *, fresh=False):
        question = GetStatus(token, False, -1, fresh, False)
        control = threading.Thread(target=inquiries.put, args=(question,), name="control")
        control.start()
        control.join()
        answer = said.get(timeout=20)
        wait_until(lambda: inquiries._asked == inquiries._answered, timeout=20, what="the thread apart is free again")
        return answer.token, answer.trouble

    assert heard(1) == (1, "apart: True"), "nobody was there to answer before"
    assert heard(2) == (2, "control")
    assert heard(3, fresh=True) == (3, "apart: True")
    token, trouble = heard(13)
    assert token == 13 and "a look at the rank failed: unlucky" in trouble and "Traceback" in trouble
