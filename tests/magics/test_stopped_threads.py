"""Test the stopped ranks as a front end sees them: events, call stack and references."""

from __future__ import annotations

from rankbook.magics.debug_multiplexer import REFERENCES, THREADS, ReferenceMap, StoppedThreads, rank_of_thread


def names(events):
    return [(event["event"], rank_of_thread(event["body"]["threadId"])) for event in events]


def stop(stopped, *ranks):
    return [event for rank in ranks for event in stopped.stop(rank, {"threadId": rank + 7, "reason": "step"})]


def one_view(**attributes):
    """Return the threads of a front end with one call stack, as JupyterLab."""
    stopped = StoppedThreads()
    vars(stopped).update({"one_view": True, **attributes})
    return stopped


def test_a_reference_leads_to_its_rank_until_that_resumes():
    references = ReferenceMap()
    first, second = references.add(0, 4), references.add(1, 4)
    assert REFERENCES <= first < second < 1 << 31 and references.add(0, 4) == first
    assert references.add(0, 0) == 0, "which stands for nothing to look into"
    references.drop(0)
    assert (references.find(first), references.find(second)) == (None, (1, 4))
    assert references.add(0, 4) not in (first, second), "what is the rank's number 4 now is something else"


def test_every_stopped_rank_is_a_stopped_thread():
    stopped = StoppedThreads()
    assert names(stop(stopped, 2, 0)) == [("stopped", 2), ("stopped", 0)]
    (event,) = stopped.stop(1, {"threadId": 3, "reason": "exception", "text": "ValueError", "allThreadsStopped": True})
    body = {"reason": "exception", "text": "ValueError", "threadId": THREADS + 1, "allThreadsStopped": False}
    assert event["body"] == {**body, "description": "rank 1"} and stopped.threads[1] == 3


def test_ranks_that_resume_are_reported_once():
    stopped = StoppedThreads()
    stop(stopped, 0, 1)
    assert names(stopped.resume((0, 1))) == [("continued", 0), ("continued", 1)]
    assert stopped.resume((0, 1)) == [], "what a rank itself tells of it comes after this, and is nothing new"


def test_a_view_that_is_emptied_as_one_rank_resumes_is_reported_with_one_that_is_still_stopped():
    stopped = one_view()
    stop(stopped, 0, 1, 2)
    assert names(stopped.resume((0,))) == [("continued", 0), ("stopped", 1)]
    assert names(stopped.resume((1, 2))) == [("continued", 1), ("continued", 2)]
    stopped.one_view = False
    stop(stopped, 0, 1)
    assert names(stopped.resume((0,))) == [("continued", 0)]


def test_an_empty_call_stack_begins_with_the_chosen_rank_and_its_rows_then_stay_in_place():
    stopped = one_view()
    stop(stopped, 1, 0)
    assert stopped.call_stack() == [0, 1]
    stopped.selected_rank = 1
    assert stopped.call_stack() == [0, 1], "it is selected already, and the rows need not move"
    stopped.resume((0, 1))
    stop(stopped, 0, 1)
    assert (stopped.call_stack(), stopped.call_stack()) == ([1, 0], [0, 1])
    stopped.resume((0, 1))
    stop(stopped, 0)
    assert stopped.call_stack() == [0], "the chosen rank is not waited for"
    stop(stopped, 1)
    assert stopped.call_stack() == [0, 1]


def test_a_rank_that_moves_alone_is_shown_first_when_it_stops_again():
    stopped = one_view(single=True, chosen=1)
    stop(stopped, 0, 1, 2)
    assert names(stopped.resume((1,))) == [("continued", 1), ("stopped", 0)]
    stopped.call_stack()
    stopped.selected_rank = 0  # JupyterLab selects what it is shown meanwhile
    assert names(stop(stopped, 1)) == [("continued", 1), ("stopped", 1)], "which makes JupyterLab forget rank 0"
    assert stopped.call_stack() == [1, 0, 2]


def test_continue_and_step_are_for_all_stopped_ranks_or_for_one():
    stopped = StoppedThreads()
    stop(stopped, 3, 0, 1)
    assert stopped.targets(1, single=False) == stopped.targets(THREADS + 3, single=False) == [0, 1, 3]
    assert stopped.targets(THREADS + 3, single=True) == [3]
    assert stopped.targets(THREADS + 2, single=True) == [0], "which does not stand for a rank that runs"
    stopped.single = True
    assert stopped.targets(THREADS + 3, single=False) == [3]
    stopped.one_view, stopped.selected_rank = True, 1
    assert stopped.targets(1, single=False) == [1]
    assert stopped.targets(THREADS + 3, single=False) == [1], "JupyterLab names the thread that stopped last"
    assert StoppedThreads().targets(1, single=True) == []


def test_responses_have_our_references_and_frames_name_their_rank():
    references = ReferenceMap()
    stack = {"stackFrames": [{"id": 4, "name": "train", "line": 3}], "totalFrames": 1}
    (frame,) = references.translate(1, "stackTrace", stack)["stackFrames"]
    assert (frame["name"], references.find(frame["id"])) == ("rank 1 · train", (1, 4))
    scopes = references.translate(1, "scopes", {"scopes": [{"name": "Locals", "variablesReference": 6}]})["scopes"]
    assert references.find(scopes[0]["variablesReference"]) == (1, 6)
    evaluated = references.translate(1, "evaluate", {"result": "[1]", "variablesReference": 9})
    assert references.find(evaluated["variablesReference"]) == (1, 9)
    plain = references.translate(1, "variables", {"variables": [{"name": "a", "variablesReference": 0}]})
    assert plain["variables"][0]["variablesReference"] == 0
    assert references.translate(1, "completions", {"targets": []}) == {"targets": []}
