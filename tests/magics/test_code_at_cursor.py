"""Test where the code at a cursor would run: on the ranks, in the notebook, or as a magic's own line."""

from __future__ import annotations

import pytest

from rankbook.magics.completion import (
    MagicLine,
    RankCode,
    keyword_completions,
    parse_question,
    split_question,
    target_of,
)

CURSOR = "|"


def target(marked, *, auto=False):
    return target_of(marked.replace(CURSOR, ""), marked.index(CURSOR), auto_mode=auto)


@pytest.mark.parametrize(
    ("marked", "text", "offset", "ranks"),
    [
        ("%%distributed\nmod|", "mod", 14, None),
        ("%%distributed --ranks 1\nx\nmod|el", "x\nmodel", 24, "1"),
        ("%%distributed --ranks 9-\nmod|", "mod", 25, "9-"),
        ("%%distributed --nonsense\nmod|", "mod", 25, None),
        ("%%distributed\n%time mod|", " " * 6 + "mod", 14, None),
    ],
)
def test_the_body_of_a_distributed_cell_is_for_its_ranks(marked, text, offset, ranks):
    for auto in (False, True):
        assert target(marked, auto=auto) == RankCode(text, offset, ranks)


@pytest.mark.parametrize(
    "marked",
    ["mod|", "x = 1\nmod|", "%time mod|", "%%local\nmod|", "%%time\nmod|", "%%dist|", "%dist|", "%%distributed|"],
)
def test_other_cells_are_completed_by_the_notebook(marked):
    assert target(marked) is None


def test_in_auto_mode_plain_cells_are_for_the_ranks():
    assert target("x = 1\nmod|", auto=True) == RankCode("x = 1\nmod", 0, None)
    assert target("%%time\nmod|", auto=True) == RankCode("%%time\nmod", 0, None)
    assert target("%time mod|", auto=True) == RankCode(" " * 6 + "mod", 0, None)
    for marked in ("%%local\nmod|", "%who|s", "!ls mod|", "x\n!ls mod|", "%pip ins|"):
        assert target(marked, auto=True) is None


@pytest.mark.parametrize(
    ("marked", "line"),
    [
        ("%%distributed |", MagicLine(None, (), "")),
        ("%%distributed --ra|", MagicLine(None, (), "--ra")),
        ("%%distributed --ranks 0,|\nx", MagicLine(None, ("--ranks",), "0,")),
        ("%distributed st|", MagicLine("", (), "st")),
        ("%distributed push a b|", MagicLine("push", ("a",), "b")),
        ("x = 1\n  %distributed pull |", MagicLine("pull", (), "")),
    ],
)
def test_magic_lines_are_completed_by_the_magics(marked, line):
    assert target(marked) == target(marked, auto=True) == line


@pytest.mark.parametrize(
    ("cell", "question"),
    [
        ("x?", ("x", False)),
        ("model.layers[0]??\n", ("model.layers[0]", True)),
        ("?x", ("x", False)),
        ("??x", ("x", True)),
        ("x", None),
        ("x = y?", None),
        ("x?\ny", None),
        ("%time?", None),
        ("x*?", None),
        ("", None),
    ],
)
def test_cells_that_ask_about_a_name(cell, question):
    assert parse_question(cell) == question


def test_completion_without_ranks_offers_keywords_and_builtins():
    assert keyword_completions("x = zi", 6) == (4, ["zip"])
    assert keyword_completions("model.zi", 8) == (8, [])
    assert keyword_completions("", 0) == (0, [])


@pytest.mark.parametrize(
    ("cell", "code", "question"),
    [
        ("y = 1\nx?", "y = 1\npass", "x?"),
        ("y = 1\nx??\n\n", "y = 1\npass", "x??"),
        ("y = 1\n\n?x", "y = 1\n\npass", "?x"),
        ("x?", "x?", ""),
        ("\nx?", "\nx?", ""),
        ("%%time\nx?", "%%time\nx?", ""),
        ("if y:\n    x?", "if y:\n    x?", ""),
        ("x?\ny = 1", "x?\ny = 1", ""),
        ("y = 1\n%time?", "y = 1\n%time?", ""),
    ],
)
def test_question_below_code_is_separated_from_it(cell, code, question):
    assert split_question(cell) == (code, question)
