"""JupyterLab's own debugger, on the ranks: the bug, the gutter, the call stack, the variables, the buttons."""

from __future__ import annotations

import re

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed", exc_type=ImportError).expect

from tests.browser.test_looks import PICTURES, differs

pytestmark = [pytest.mark.full, pytest.mark.browser, pytest.mark.timeout(240)]

CELLS = [
    "scale = 10",
    """\
def train(step):
    loss = scale + step * (rank + 1)
    return loss

losses = []
for step in range(3):
    losses.append(train(step))""",
    "print(losses)",
]


def test_the_call_stack_shows_the_ranks_and_a_click_on_one_its_variables(own_kernel, shots):
    notebook = own_kernel(CELLS)
    page = notebook.page
    notebook.run(0, timeout=60)
    page.locator(".jp-DebuggerBugButton").click()
    expect(page.locator(".jp-DebuggerBugButton")).to_have_attribute("aria-pressed", "true")
    notebook.cell(1).locator(".cm-breakpoint-gutter .cm-gutterElement").nth(3).click()
    expect(page.locator(".jp-DebuggerBreakpoint")).to_have_count(1)
    notebook.start(1)

    frames = page.locator(".jp-DebuggerCallstackFrame")
    expect(frames).to_have_count(4)
    highlighted = notebook.cell(1).locator(".jp-DebuggerEditor-highlight")
    expect(highlighted).to_have_text("    return loss")
    variables = page.locator(".jp-DebuggerVariables-body").first
    proceed = page.locator("jp-button[data-command='debugger:continue']")
    proceed.click()
    expect(variables).to_contain_text(re.compile(r"step\W*1"))
    expect(frames).to_have_count(4)
    page.locator(".jp-DebuggerCallstackFrame", has_text="rank 1 · train").click()
    expect(variables).to_contain_text(re.compile(r"loss\W*12"))
    page.locator(".jp-DebuggerCallstackFrame", has_text="rank 0 · train").click()
    expect(variables).to_contain_text(re.compile(r"loss\W*11"))
    page.locator(".jp-DebuggerCallstackFrame", has_text="rank 1 · train").click()
    expect(variables).to_contain_text(re.compile(r"loss\W*12"))

    page.mouse.move(2, 2)
    stack, panel = (
        page.locator(".jp-DebuggerCallstack").bounding_box(),
        page.locator(".jp-NotebookPanel").bounding_box(),
    )
    right, below = stack["x"] + stack["width"], stack["y"] + 130
    clip = {"x": panel["x"], "y": panel["y"], "width": right - panel["x"], "height": below - panel["y"]}
    page.screenshot(path=shots / "debugger-light.png", clip=clip)
    wrong = differs(shots / "debugger-light.png", PICTURES / "debugger-light.png")

    proceed.click()
    expect(variables).to_contain_text(re.compile(r"step\W*2"))
    proceed.click()
    expect(frames).to_have_count(0)
    notebook.run(2, timeout=30)
    expect(notebook.cell(2).locator(".jp-OutputArea").first).to_contain_text("[1] [10, 12, 14]")
    assert not wrong, f"{wrong}: look at {shots}; RANKBOOK_PICTURES=write keeps it as it is now"
