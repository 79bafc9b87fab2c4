"""Which ranks are paused, and the numbers of what a front end is shown of them."""

from __future__ import annotations

from rankbook.magics.pauses import HANDLES, THREADS, Handles, Pauses, rank_of, shown


def told(events):
    return [(each["event"], rank_of(each["body"]["threadId"])) for each in events]


def stop(pauses, *ranks):
    for rank in ranks:
        pauses.stop(rank, {"threadId": rank + 7, "reason": "step"})
    return pauses.tell()


def move(pauses, *ranks):
    return [*pauses.go_on(ranks), *pauses.tell()]


def test_a_number_leads_to_its_rank_until_that_goes_on():
    handles = Handles()
    first, second = handles.of(0, 4), handles.of(1, 4)
    assert HANDLES <= first < second < 1 << 31 and handles.of(0, 4) == first
    assert handles.of(0, 0) == 0, "which stands for nothing to look into"
    handles.forget(0)
    assert (handles.whose(first), handles.whose(second)) == (None, (1, 4))
    assert handles.of(0, 4) not in (first, second), "what is the rank's number 4 now is something else"


def test_each_rank_that_stops_is_a_thread_that_stops_and_the_chosen_one_stands_first():
    pauses = Pauses()
    assert told(stop(pauses, 2, 0)) == [("stopped", 2), ("stopped", 0)]
    assert pauses.order == (0, 2), "whoever was the first to stop, as long as nobody has chosen"
    pauses.chosen = 2
    assert pauses.order == (2, 0)
    assert told(stop(pauses, 1)) == [("stopped", 1)] and pauses.order == (2, 0, 1)
    pauses.stop(1, {"threadId": 3, "reason": "exception", "text": "ValueError", "allThreadsStopped": True})
    (event,) = pauses.tell()
    body = {"reason": "exception", "text": "ValueError", "threadId": THREADS + 1, "allThreadsStopped": False}
    assert event["body"] == {**body, "description": "rank 1"} and pauses.threads[1] == 3


def test_ranks_that_go_on_are_told_once_and_the_choice_is_kept_for_their_next_stop():
    pauses = Pauses()
    stop(pauses, 0, 1)
    pauses.chosen = 1
    assert told(move(pauses, 0, 1)) == [("continued", 0), ("continued", 1)]
    assert move(pauses, 0, 1) == [], "what a rank itself tells of it comes after this, and is nothing new"
    stop(pauses, 0, 1)
    assert pauses.order == (1, 0)


def test_a_front_end_that_forgets_all_as_one_goes_on_is_told_of_one_that_still_stands():
    pauses = Pauses()
    pauses.one_view = True
    stop(pauses, 0, 1, 2)
    assert told(move(pauses, 0)) == [("continued", 0), ("stopped", 1)]
    assert told(move(pauses, 1, 2)) == [("continued", 1), ("continued", 2)]
    pauses.one_view = False
    stop(pauses, 0, 1)
    assert told(move(pauses, 0)) == [("continued", 0)]


def test_what_is_looked_at_does_not_jump_to_whichever_rank_stops_first():
    pauses = Pauses()
    pauses.one_view = True
    pauses.stop(1, {"threadId": 8})
    assert pauses.waits({0, 1}), "nothing is chosen: the front end is to show rank 0"
    assert not pauses.waits({1}), "which does not run"
    pauses.stop(0, {"threadId": 7})
    assert not pauses.waits({0, 1}) and told(pauses.tell()) == [("stopped", 1), ("stopped", 0)]
    assert pauses.show() == (0, 1)
    pauses.chosen = 1
    assert pauses.show() == (0, 1), "it is shown, and stays chosen: the rows need not move"
    pauses.go_on((0, 1))
    pauses.stop(0, {"threadId": 7})
    assert pauses.waits({0, 1})
    pauses.stop(1, {"threadId": 8})
    assert not pauses.waits({0, 1})
    assert (pauses.show(), pauses.show()) == ((1, 0), (0, 1)), "first once, and in order from then on"


def test_a_chosen_rank_that_takes_long_comes_back_into_view_unless_a_person_has_chosen_another():
    pauses = Pauses()
    pauses.one_view = True
    for click in (False, True):
        stop(pauses, *({0, 1, 2} - set(pauses.threads)))
        pauses.show()
        pauses.choose(1)
        pauses.go_on((0, 1, 2))
        assert told(stop(pauses, 0)) == [("stopped", 0)], "the moment has passed"
        assert pauses.show() == (0,)
        pauses.choose(0)  # the front end itself
        assert told(stop(pauses, 2)) == [("stopped", 2)] and pauses.show() == (0, 2)
        if click:
            pauses.choose(2)
        events = told(stop(pauses, 1))
        assert events == ([] if click else [("continued", 1)]) + [("stopped", 1)]
        assert (pauses.chosen, pauses.show()) == ((2, (0, 1, 2)) if click else (1, (1, 0, 2)))
    assert not pauses.holds


def test_where_one_moves_alone_the_others_are_shown_after_it_or_after_a_moment():
    pauses = Pauses()
    pauses.one_view, pauses.chosen = True, 1
    stop(pauses, 0, 1)
    assert told(pauses.go_on((1,))) == [("continued", 1)] and pauses.waits({0, 1})
    pauses.stop(1, {"threadId": 8})
    assert not pauses.waits({0, 1}) and told(pauses.tell()) == [("stopped", 0), ("stopped", 1)]
    pauses.go_on((1,))
    assert pauses.go_on((0,)) and pauses.tell() == [], "of one that goes on before it was told of nothing is told"


def test_continue_and_step_are_for_all_paused_ranks_or_for_one():
    pauses = Pauses()
    stop(pauses, 0, 1, 3)
    pauses.chosen = 1
    assert pauses.meant(1, single=False) == (1, 0, 3)
    assert pauses.meant(THREADS + 3, single=False) == (1, 0, 3)
    assert pauses.meant(THREADS + 3, single=True) == (3,)
    assert pauses.meant(1, single=True) == (1,), "JupyterLab names no thread: the chosen one"
    assert pauses.meant(THREADS + 2, single=True) == (1,), "nor one that runs"
    assert Pauses().meant(1, single=True) == ()


def test_answers_have_our_numbers_and_frames_their_ranks_name():
    handles = Handles()
    stack = {"stackFrames": [{"id": 4, "name": "train", "line": 3}], "totalFrames": 1}
    (frame,) = shown(1, "stackTrace", stack, handles)["stackFrames"]
    assert (frame["name"], handles.whose(frame["id"])) == ("rank 1 · train", (1, 4))
    scopes = shown(1, "scopes", {"scopes": [{"name": "Locals", "variablesReference": 6}]}, handles)["scopes"]
    assert handles.whose(scopes[0]["variablesReference"]) == (1, 6)
    evaluated = shown(1, "evaluate", {"result": "[1]", "variablesReference": 9}, handles)
    assert handles.whose(evaluated["variablesReference"]) == (1, 9)
    plain = shown(1, "variables", {"variables": [{"name": "a", "variablesReference": 0}]}, handles)
    assert plain["variables"][0]["variablesReference"] == 0
    assert shown(1, "completions", {"targets": []}, handles) == {"targets": []}
