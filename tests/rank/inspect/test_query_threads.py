"""Test which thread answers a query while the rank computes."""

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

    def cheap_answer(self, question):
        if question.token == 13:
            raise ValueError("unlucky")
        return None if question.fresh else QueryFailed(question.token, threading.current_thread().name)


def test_cheap_queries_are_answered_on_the_control_thread():
    replies = queue.SimpleQueue()
    query_threads = QueryThreads(replies.put, Looks)

    def ask(token, *, fresh=False):
        question = GetStatus(token, False, -1, fresh, False)
        control = threading.Thread(target=query_threads.put, args=(question,), name="control")
        control.start()
        control.join()
        answer = replies.get(timeout=20)
        wait_until(
            lambda: query_threads._queued_count == query_threads._answered_count,
            timeout=20,
            what="the thread apart is free again",
        )
        return answer.token, answer.trouble

    assert ask(1) == (1, "apart: True"), "nobody was there to answer before"
    assert ask(2) == (2, "control")
    assert ask(3, fresh=True) == (3, "apart: True")
    token, trouble = ask(13)
    assert token == 13 and "the query failed on the rank: unlucky" in trouble and "Traceback" in trouble
