"""The table of mutants fits the sources, and an entry that does not is refused."""

from __future__ import annotations

import re

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, check_table

FILE = "kernel/rankbook/ranks.py"


def test_mutants_match_the_sources_and_name_existing_tests(tmp_path):
    check_table(MUTANTS, tmp_path)
    assert len(set(MUTANTS)) == len(MUTANTS) >= 40
    missing = {
        test
        for mutant in MUTANTS
        for test in mutant.tests.split()
        for file, _, name in [test.partition("::")]
        if not (ROOT / "tests" / file).is_file() or f"def {name}" not in (ROOT / "tests" / file).read_text()
    }
    assert not missing


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("no such text", "", "expected this fragment exactly once, found it 0 times:\nno such text"),
        ("return", "", "expected this fragment exactly once, found it"),
        ("def parse_ranks(", "parse_ranks(", "(ranks.py, line "),
    ],
    ids=["absent", "repeated", "invalid"],
)
def test_an_entry_that_does_not_fit_the_sources_is_refused(tmp_path, old, new, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_table([Mutant(FILE, old, new, "test_ranks.py")], tmp_path)
