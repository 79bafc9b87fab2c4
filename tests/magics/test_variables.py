"""Test the table of the ranks' variables."""

from __future__ import annotations

import re

import pytest

from rankbook.errors import InvalidArgument
from rankbook.magics.reports import VARIABLE_HEADINGS, variable_rows
from rankbook.protocol.telemetry import Variable


def tensor(name, *shape, dtype="float32", device="cpu"):
    return Variable(name, "Tensor", shape, dtype, device, 4000, "")


def plain(name, value):
    return Variable(name, type(value).__name__, None, "", "", None, repr(value))


def reported(variables, *names):
    rows = variable_rows(variables, names)
    return [{key: cell for key, cell in zip(VARIABLE_HEADINGS, row, strict=True) if cell} for row in rows]


def test_variable_that_is_equal_on_all_ranks_is_one_row():
    assert reported({rank: (tensor("x", 2, 3), plain("n", 5)) for rank in range(4)}) == [
        {"name": "x", "ranks": "all", "type": "Tensor", "shape": "[2, 3]", "dtype": "float32"}
        | {"device": "cpu", "size": "4 kB"},
        {"name": "n", "ranks": "all", "type": "int", "value": "5"},
    ]


def test_another_make_is_another_row_that_says_in_what():
    rows = reported({0: (tensor("x", 2),), 1: (tensor("x", 2),), 2: (tensor("x", 3, dtype="bfloat16"),)})
    assert [(row["ranks"], row["shape"], row["dtype"]) for row in rows] == [
        ("0-1", "[2]", "float32"),
        ("2", "[3]", "bfloat16"),
    ]
    assert [row.get("differs in") for row in rows] == ["shape, dtype", None]


def test_values_of_the_same_make_share_a_row_with_their_ranks():
    (row,) = reported({rank: (plain("n", rank // 2),) for rank in range(4)})
    assert (row["ranks"], row["value"], row["differs in"]) == ("all", "[0-1] 0 · [2-3] 1", "value")
    (row,) = reported({rank: (plain("n", rank),) for rank in range(40)})
    assert row["value"] == "[0] 0 · [1] 1 · [2] 2 · [3] 3 · …"


def test_variable_that_some_ranks_lack_is_marked():
    (row,) = reported({0: (), 1: (plain("n", 5),), 2: ()})
    assert (row["ranks"], row["differs in"]) == ("1", "not on ranks 0,2")


def test_names_and_patterns_choose():
    variables = {0: (plain("loss", 1), plain("loss_sum", 2), plain("n", 3))}
    assert [row["name"] for row in reported(variables, "loss*")] == ["loss", "loss_sum"]
    assert [row["name"] for row in reported(variables, "n", "loss")] == ["loss", "n"]
    with pytest.raises(InvalidArgument, match="no variable matches 'los' on rank 0; did you mean: loss"):
        reported(variables, "los")


@pytest.mark.processes
def test_vars_is_answered_while_a_cell_runs(notebook):
    assert "no variables" in notebook.ok("%distributed vars").stdout
    notebook.ok(
        "%%distributed\nweights = torch.ones(2 + rank)\nshared = 'same'\nmine = rank * 10\nif rank: only_second = 1"
    )
    notebook.ok("%%distributed --background\nimport time\ntime.sleep(60)")
    try:
        text = notebook.ok("%distributed vars").displays[-1]["text/plain"]
    finally:
        notebook.ok("%distributed interrupt")
    lines = {tuple(line.split()[:2]): line for line in text.splitlines()}
    assert "[2]" in lines["weights", "0"] and "shape" in lines["weights", "0"] and "[3]" in lines["weights", "1"]
    assert "'same'" in lines["shared", "all"] and "value" not in lines["shared", "all"]
    assert "[0] 0 · [1] 10" in lines["mine", "all"]
    assert "not on rank 0" in lines["only_second", "1"]
    assert "torch" not in text and "world_size" not in text
    assert notebook.ok("%distributed vars mine --ranks 1").text.count("mine") == 1
    assert "did you mean: mine" in notebook.run("%distributed vars min").stderr


@pytest.mark.processes
def test_a_predefined_name_with_a_users_value_is_a_variable(notebook):
    notebook.ok("%%distributed\nmine, dist = 1, 7.5")
    table = notebook.ok("%distributed vars").displays[-1]["text/plain"]
    assert re.search(r"^dist\b.* 7\.5$", table, flags=re.MULTILINE)
    notebook.ok("%%distributed\ndist = torch.distributed")
    assert "dist" not in notebook.ok("%distributed vars").displays[-1]["text/plain"]
