"""Test the last state of a widget, derived from its messages."""

from __future__ import annotations

from rankbook.magics.comm_bridge import WidgetStateCache

SLIDER = {"state": {"_model_name": "M", "_model_module": "m", "_model_module_version": "1", "value": 3}}


def test_widget_state_is_the_last_update_of_either_side():
    states = WidgetStateCache()
    states.open("a", SLIDER, ())
    states.update("a", {"method": "update", "state": {"value": 4}}, ())
    states.update("a", {"method": "echo_update", "state": {"max": 9}}, ())
    states.update("a", {"method": "custom", "content": {"value": 5}, "state": {"value": 6}}, ())
    states.update("unknown", {"method": "update", "state": {"value": 7}}, ())
    states.update("a", ["method"], ())  # data of a comm is any JSON value
    (reported,) = states.all_states().states.values()
    assert reported == {
        "model_name": "M",
        "model_module": "m",
        "model_module_version": "1",
        "state": {**SLIDER["state"], "value": 4, "max": 9},
    }
    states.close("a")
    states.close("a")
    assert states.all_states() == ({}, [], []) and states.state_message("a") is None


def test_binary_buffers_are_stored_and_removed_with_their_state():
    states = WidgetStateCache()
    opened = {"state": {"n": 1, "rows": [None, None]}, "buffer_paths": [["value"], ["rows", 0], ["rows", 1]]}
    states.open("a", opened, [memoryview(b"v"), b"0", b"1"])
    states.open("b", {"state": {}, "buffer_paths": [["value"]]}, [b"other"])
    states.update("a", {"method": "update", "state": {"rows": [None]}, "buffer_paths": [["rows", 0]]}, [b"new"])
    reported, paths, buffers = states.all_states()
    assert reported["a"]["state"] == {"n": 1, "rows": [None]}
    assert dict(zip(map(tuple, paths), buffers, strict=True)) == {
        ("a", "state", "value"): b"v",
        ("a", "state", "rows", 0): b"new",
        ("b", "state", "value"): b"other",
    }
    update = {"method": "update", "state": {"n": 1, "rows": [None]}, "buffer_paths": [["value"], ["rows", 0]]}
    assert states.state_message("a") == (update, [b"v", b"new"])
    states.update("a", {"method": "update", "state": {"value": None, "rows": []}}, ())
    assert states.state_message("a") == (
        {"method": "update", "state": {"n": 1, "rows": [], "value": None}, "buffer_paths": []},
        [],
    )
    states.update("a", {"method": "update", "state": {}, "buffer_paths": [["n"]]}, [b"bytes now"])
    reported, _, buffers = states.all_states()
    assert "n" not in reported["a"]["state"] and b"bytes now" in buffers
