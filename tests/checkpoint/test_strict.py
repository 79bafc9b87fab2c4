from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankbook.checkpoint.loading import StrictHandling, decide_keys
from rankbook.errors import BadRequest

KEYS = st.sets(st.sampled_from("abcdef"))


@given(st.lists(KEYS, min_size=1, max_size=4), KEYS, st.sampled_from(StrictHandling))
def test_every_mode_does_what_its_name_says(asked, stored, mode):
    unexpected = set().union(*asked) - stored
    missing = stored - set().union(*asked) if mode.name.endswith("_ALL") and mode.name != "IGNORE_ALL" else set()
    told = decide_keys(asked, stored, mode, "step-4")
    raises = mode.name.startswith(("RAISE", "ASSUME")) and bool(unexpected | missing)
    logs = mode.name.startswith("LOG") and bool(unexpected | missing)
    returns = mode.name.startswith("RETURN")
    assert (bool(told.error), bool(told.warning), mode.returns_keys) == (raises, logs, returns)
    assert told.skipped == (set() if raises else unexpected)
    assert told.unexpected == (unexpected if returns else set())
    assert told.missing == (missing if returns else set())
    assert all(repr(key) in told.error + told.warning for key in unexpected | missing if raises or logs)


def test_a_message_names_keys_ranks_and_what_to_do():
    told = decide_keys([{"a", "b"}, {"a"}, {"a", "c"}], {"c", "d"}, StrictHandling.RAISE_ALL, "step-4")
    assert told.error == (
        "step-4: unexpected keys, asked for and not in the checkpoint: 'a' (ranks 0-2), 'b' (rank 0); "
        "missing keys, in the checkpoint and asked for by no rank: 'd'. strict='log_all' loads the rest"
    )
    many = decide_keys([{f"k{n}" for n in range(30)}], set(), StrictHandling.ASSUME_OK_UNEXPECTED, "step-4")
    assert "and 22 more. strict='log_unexpected' loads the rest" in many.error


def test_a_mode_is_found_by_its_name():
    assert StrictHandling.of("log_all") is StrictHandling.of("LOG_ALL") is StrictHandling.LOG_ALL
    assert StrictHandling.of(StrictHandling.IGNORE_ALL) is StrictHandling.IGNORE_ALL
    with pytest.raises(BadRequest, match="one of assume_ok_unexpected, log_unexpected"):
        StrictHandling.of("strict")
    with pytest.raises(BadRequest, match="False"):
        StrictHandling.of(False)
