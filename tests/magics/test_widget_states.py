"""The last state of each widget, from what was said about it."""

from __future__ import annotations

from rankbook.magics.comm_bridge import WidgetStateCache

SLIDER = {"state": {"_model_name": "M", "_model_module": "m", "_model_module_version": "1", "value": 3}}


def test_a_widget_is_as_either_end_has_said_last():
    states = WidgetStateCache()
    states.open("a", SLIDER, ())
    states.change("a", {"method": "update", "state": {"value": 4}}, ())
    states.change("a", {"method": "echo_update", "state": {"max": 9}}, ())
    states.change("a", {"method": "custom", "content": {"value": 5}, "state": {"value": 6}}, ())
    states.change("unknown", {"method": "update", "state": {"value": 7}}, ())
    (told,) = states.all_states().states.values()
    assert told == {
        "model_name": "M",
        "model_module": "m",
        "model_module_version": "1",
        "state": {**SLIDER["state"], "value": 4, "max": 9},
    }
    states.close("a")
    states.close("a")
    assert states.all_states() == ({}, [], []) and states.update_of("a") is None


def test_bytes_stand_where_they_belong_and_go_with_what_they_were_part_of():
    states = WidgetStateCache()
    opened = {"state": {"n": 1, "rows": [None, None]}, "buffer_paths": [["value"], ["rows", 0], ["rows", 1]]}
    states.open("a", opened, [memoryview(b"v"), b"0", b"1"])
    states.open("b", {"state": {}, "buffer_paths": [["value"]]}, [b"other"])
    states.change("a", {"method": "update", "state": {"rows": [None]}, "buffer_paths": [["rows", 0]]}, [b"new"])
    told, paths, buffers = states.all_states()
    assert told["a"]["state"] == {"n": 1, "rows": [None]}
    assert dict(zip(map(tuple, paths), buffers, strict=True)) == {
        ("a", "state", "value"): b"v",
        ("a", "state", "rows", 0): b"new",
        ("b", "state", "value"): b"other",
    }
    update = {"method": "update", "state": {"n": 1, "rows": [None]}, "buffer_paths": [["value"], ["rows", 0]]}
    assert states.update_of("a") == (update, [b"v", b"new"])
    states.change("a", {"method": "update", "state": {"value": None, "rows": []}}, ())
    assert states.update_of("a") == (
        {"method": "update", "state": {"n": 1, "rows": [], "value": None}, "buffer_paths": []},
        [],
    )
    states.change("a", {"method": "update", "state": {}, "buffer_paths": [["n"]]}, [b"bytes now"])
    told, _, buffers = states.all_states()
    assert "n" not in told["a"]["state"] and b"bytes now" in buffers
