"""Test the pictures of comparisons: which module and phase differ, and which ranks."""

from __future__ import annotations

import re

from rankbook.coordinator.sync_check import Finding, SyncReport
from rankbook.numerics.comparison import Comparison, Difference, count_by_module
from rankbook.numerics.recording import FORWARD, GRADIENT, START, STATE, Summary
from rankbook.widgets.rendering import SKY, VERMILLION

EQUAL = Summary((2,), "float32", 1.0, 1.0, "")
PHASES = ((FORWARD, 2, 0.0, 1e-5, 0), (GRADIENT, 3, 0.5, 1e-4, 2))


def cells_of(html: str, name: str) -> list[str]:
    """Return the texts of a row of the last table."""
    row = re.search(rf"<tr><th[^>]*>{re.escape(name)}</th>(.*?)</tr>", html.rpartition("<caption>")[2])
    assert row is not None, html
    return re.findall(r"<td[^>]*>([^<]*)</td>", row[1])


def difference(name: str, phase: str = GRADIENT) -> Difference:
    return Difference(phase, name, 0, 0.5, 1e-4)


def test_tensors_are_counted_by_module_and_phase():
    keys = [
        (START, "fc.weight"),
        (FORWARD, "fc"),
        (GRADIENT, "fc.weight"),
        (GRADIENT, "fc.bias"),
        (STATE, "fc.bias: step"),
    ]
    counts = count_by_module([dict.fromkeys(keys, EQUAL)], [difference("fc.bias"), difference("fc.bias")])
    assert counts == (("fc", START, 1, 0), ("fc", FORWARD, 1, 0), ("fc", GRADIENT, 2, 1), ("fc", STATE, 1, 0))


def test_the_picture_marks_where_two_layouts_part_first():
    modules = (("fc", FORWARD, 1, 0), ("head", FORWARD, 1, 0), ("fc", GRADIENT, 2, 1), ("head", GRADIENT, 1, 1))
    result = Comparison(("one rank", "ddp"), 2, PHASES, difference("head.weight"), (1,), modules=modules)
    html = result._repr_mimebundle_()["text/html"]
    assert cells_of(html, "fc") == ["=", "1/2"] and cells_of(html, "head") == ["=", "▶ 1/1"]
    assert html.count(VERMILLION) == 1
    assert "<caption>" not in Comparison(("a", "b"), 2, PHASES)._repr_mimebundle_()["text/html"]


def test_a_first_difference_without_counts_is_marked_and_many_modules_are_cut():
    modules = tuple((f"<{number}>", GRADIENT, 1, 0) for number in range(50))
    result = Comparison(("a", "b"), 2, PHASES, difference("<3>.weight"), (1,), modules=modules)
    html = result._repr_mimebundle_()["text/html"]
    assert cells_of(html, "&lt;3&gt;") == ["", "▶ ="] and "&lt;39&gt;" in html and "&lt;40&gt;" not in html
    assert "10 more modules are not shown" in html


def test_the_picture_of_a_sync_check_shows_the_ranks_that_differ():
    finding = Finding("net.fc", "parameter", (1,), (0, 3), "differs from ranks 0, 3")
    html = SyncReport((0, 1, 2, 3), [finding], compared=2, nbytes=8).bundle()["text/html"]
    assert cells_of(html, "net.fc") == ["=", "differs", "="] and SKY in html and VERMILLION in html
    assert "<caption>" not in SyncReport((0, 1), [], compared=2, nbytes=8).bundle()["text/html"]
    many = Finding("w", "parameter", (1,), tuple(range(2, 64)), "differs")
    assert "<caption>" not in SyncReport((0, 1), [many], compared=2, nbytes=8).bundle()["text/html"]
