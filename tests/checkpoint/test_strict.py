from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankbook.checkpoint.loading import StrictHandling, decide_keys
from rankbook.errors import InvalidArgument

KEYS = st.sets(st.sampled_from("abcdef"))


@given(st.lists(KEYS, min_size=1, max_size=4), KEYS, st.sampled_from(StrictHandling))
def test_strict_mode_decides_which_keys_are_reported(requested, stored, mode):
    unexpected = set().union(*requested) - stored
    missing = stored - set().union(*requested) if mode.name.endswith("_ALL") and mode.name != "IGNORE_ALL" else set()
    reported = decide_keys(requested, stored, mode, "step-4")
    raises = mode.name.startswith(("RAISE", "ASSUME")) and bool(unexpected | missing)
    logs = mode.name.startswith("LOG") and bool(unexpected | missing)
    returns = mode.name.startswith("RETURN")
    assert (bool(reported.error), bool(reported.warning), mode.returns_keys) == (raises, logs, returns)
    assert reported.skipped == (set() if raises else unexpected)
    assert reported.unexpected == (unexpected if returns else set())
    assert reported.missing == (missing if returns else set())
    assert all(repr(key) in reported.error + reported.warning for key in unexpected | missing if raises or logs)


def test_error_message_names_keys_ranks_and_the_remedy():
    reported = decide_keys([{"a", "b"}, {"a"}, {"a", "c"}], {"c", "d"}, StrictHandling.RAISE_ALL, "step-4")
    assert reported.error == (
        "step-4: unexpected keys (requested, but not in the checkpoint): 'a' (ranks 0-2), 'b' (rank 0); "
        "missing keys (in the checkpoint, but not requested by any rank): 'd'. "
        "Pass strict='log_all' to load all other keys"
    )
    many = decide_keys([{f"k{n}" for n in range(30)}], set(), StrictHandling.ASSUME_OK_UNEXPECTED, "step-4")
    assert "and 22 more. Pass strict='log_unexpected' to load all other keys" in many.error


def test_a_mode_is_found_by_its_name():
    assert StrictHandling.of("log_all") is StrictHandling.of("LOG_ALL") is StrictHandling.LOG_ALL
    assert StrictHandling.of(StrictHandling.IGNORE_ALL) is StrictHandling.IGNORE_ALL
    with pytest.raises(InvalidArgument, match="choose from assume_ok_unexpected, log_unexpected"):
        StrictHandling.of("strict")
    with pytest.raises(InvalidArgument, match="False"):
        StrictHandling.of(False)
