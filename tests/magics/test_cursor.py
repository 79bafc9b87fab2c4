"""Whom the code at a cursor is for, and what may stand on a magic's line, without a kernel."""

from __future__ import annotations

import pytest

from rankbook.magics.cursor import OnLine, OnRanks, asked_about, may_stand, place_of, without_ranks

CURSOR = "|"


def place(marked, *, auto=False):
    return place_of(marked.replace(CURSOR, ""), marked.index(CURSOR), auto=auto)


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
        assert place(marked, auto=auto) == OnRanks(text, offset, ranks)


@pytest.mark.parametrize(
    "marked",
    ["mod|", "x = 1\nmod|", "%time mod|", "%%local\nmod|", "%%time\nmod|", "%%dist|", "%dist|", "%%distributed|"],
)
def test_the_rest_is_the_notebooks_own(marked):
    assert place(marked) is None


def test_in_auto_mode_plain_cells_are_for_the_ranks():
    assert place("x = 1\nmod|", auto=True) == OnRanks("x = 1\nmod", 0, None)
    assert place("%%time\nmod|", auto=True) == OnRanks("%%time\nmod", 0, None)
    assert place("%time mod|", auto=True) == OnRanks(" " * 6 + "mod", 0, None)
    for marked in ("%%local\nmod|", "%who|s", "!ls mod|", "x\n!ls mod|", "%pip ins|"):
        assert place(marked, auto=True) is None


@pytest.mark.parametrize(
    ("marked", "line"),
    [
        ("%%distributed |", OnLine(None, (), "")),
        ("%%distributed --ra|", OnLine(None, (), "--ra")),
        ("%%distributed --ranks 0,|\nx", OnLine(None, ("--ranks",), "0,")),
        ("%distributed st|", OnLine("", (), "st")),
        ("%distributed push a b|", OnLine("push", ("a",), "b")),
        ("x = 1\n  %distributed pull |", OnLine("pull", (), "")),
    ],
)
def test_the_magics_own_lines(marked, line):
    assert place(marked) == place(marked, auto=True) == line


def stand(marked, ranks=4):
    found = place(marked)
    assert isinstance(found, OnLine)
    return may_stand(found, ranks, lambda: ["mine", "model"], lambda: ["theirs", "model"])


def test_commands_options_ranks_and_variables_may_stand_there():
    assert stand("%distributed st|") == ["stacks", "start", "status", "stop"]
    assert stand("%distributed auto |") == ["off", "on"]
    assert stand("%distributed push |") == stand("%distributed push model |") == ["mine", "model"]
    assert stand("%distributed push m|") == ["mine", "model"]
    assert stand("%distributed pull t|") == ["theirs"]
    assert stand("%distributed pull model -|") == ["--as", "--ranks", "-r"]
    assert stand("%distributed pull model --as |") == []
    assert stand("%distributed heal 1 --e|") == ["--empty"]
    assert stand("%distributed interrupt |") == ["all", "main", "0", "1", "2", "3"]
    assert stand("%distributed start --backend g|") == ["gloo"]
    assert stand("%distributed nonsense |") == []
    options = stand("%%distributed --|")
    assert {"--ranks", "--background", "--out", "--timeout", "--quiet"} <= set(options) and "--auto" not in options
    assert "--ranks" not in stand("%%distributed --ranks 0 --|")
    assert stand("%%distributed --ranks |") == ["all", "main", "0", "1", "2", "3"]
    assert stand("%%distributed -r 0,2,|", ranks=12)[:3] == ["0,2,1", "0,2,3", "0,2,4"]
    assert stand("%%distributed --ranks |", ranks=0) == ["all", "main"]


@pytest.mark.parametrize(
    ("cell", "asked"),
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
def test_cells_that_ask_about_a_name(cell, asked):
    assert asked_about(cell) == asked


def test_without_ranks_there_are_the_languages_own_names():
    assert without_ranks("x = zi", 6) == (4, ["zip"])
    assert without_ranks("model.zi", 8) == (8, [])
    assert without_ranks("", 0) == (0, [])
