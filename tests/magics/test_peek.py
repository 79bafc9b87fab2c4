"""Test `%distributed peek`: the text of the answers, and peeks beside a running cell."""

from __future__ import annotations

import re

import pytest

from rankbook.coordinator.queries import Peeked
from rankbook.magics.reports import describe_peeks


def test_equal_answers_are_shown_once_and_a_moving_target_is_reported():
    peeks = [
        Peeked(0, "<L at 0x7f00aa>\nb", "", "cell [3]"),
        Peeked(1, "<L at 0x7f11bb>\nb", "", ""),
        Peeked(2, "5", "", "cell [3]"),
        Peeked(3, "", "timed out after 2 s", "cell [3]"),
    ]
    text, trouble = describe_peeks(peeks)
    assert text.startswith(
        "[0-1] <L at 0x7f00aa>\n[0-1] b\n[2] 5\n(cell [3] is running on ranks 0,2; the values were read"
    )
    assert trouble == "[3] timed out after 2 s\n"
    assert describe_peeks([Peeked(0, "1", "", "")]) == ("[0] 1\n", "")


def test_different_hexadecimal_values_are_shown_apart():
    text, _ = describe_peeks([Peeked(rank, f"0x5a3f1{rank}", "", "") for rank in range(2)])
    assert text == "[0] 0x5a3f10\n[1] 0x5a3f11\n"


@pytest.mark.processes
def test_a_peek_beside_a_cell_and_between_two(notebook):
    notebook.ok("rank_of_the_notebook = 1\n%distributed push rank_of_the_notebook")
    cell = (
        "import threading\n"
        "go = threading.Event()\n"
        "def train():\n"
        "    for step in range(3 + rank, 100):\n"
        "        loss = torch.full((2,), float(step))\n"
        "        go.wait(30)\n"
        "        return\n"
        "train()"
    )
    handle = notebook.send("%%distributed --background\n" + cell)
    notebook.finish(handle)
    outcome = notebook.run("%distributed peek loss.sum().item()  # of rank 1 too")
    while outcome.status == "error" or outcome.stderr:  # a rank has not come so far
        outcome = notebook.run("%distributed peek loss.sum().item()")
    assert re.search(r"^\[0\] 6\.0\n\[1\] 8\.0\n\(cell \[\d+\] is running on ranks 0-1", outcome.stdout)
    rank = 'rank = "the notebook\'s"\n'
    assert '[1] "1+"\n' in notebook.ok(rank + '%distributed peek f"{rank}+" --ranks 1').stdout.replace("'", '"')
    outcome = notebook.run("%distributed peek 1 // rank")
    assert outcome.stdout.startswith("[1] 1\n")
    assert outcome.stderr == "[0] ZeroDivisionError: integer division or modulo by zero\n"
    assert notebook.ok("%distributed peek go.set()").stdout.startswith("[0-1] None\n")
    notebook.ok("%%distributed\nvalue = 7")
    assert notebook.ok("%distributed peek value").stdout == "[0-1] 7\n"
    refused = notebook.run("%distributed peek value = 8")
    assert refused.status == "error" and "is not a Python expression" in refused.stderr
    failed = notebook.run("%distributed peek valeu")
    assert failed.status == "error"
    assert failed.stderr.endswith(
        "%distributed peek: [0-1] NameError: name 'valeu' is not defined; did you mean: value?\n"
    )


@pytest.mark.processes
def test_other_commands_expand_the_notebooks_names_as_before(notebook):
    notebook.ok("pushed, name = 5, 'pushed'\n%distributed push $name\n%distributed pull {name} --as back")
    assert notebook.ok("back").displays[-1]["text/plain"] == "[5, 5]"
    notebook.ok("def f():\n    inner = 'pushed'\n    get_ipython().run_line_magic('distributed', 'push $inner')\nf()")
