"""Test a debugger that is on before the ranks start, as after a restart of the kernel."""

from __future__ import annotations

import pytest

from tests.conftest import Notebook, check_nothing_left, leftovers, wait_until
from tests.debugger import FrontEnd, finish

CELL = "%%distributed\nbase = 10\nvalue = base + rank\nprint('value', value)"


LOCAL = "%distributed start -n 2"
ON_HOSTS = (
    "import rankbook, rankbook.testing\n"
    "cluster = rankbook.start(2, launcher=rankbook.testing.FakeEngine(2), address='127.0.0.1')"
)


def start_while_debugging(notebook: Notebook, start: str = LOCAL) -> None:
    """Turn the debugger on, start two ranks, and stop both of them at a breakpoint."""
    front_end = FrontEnd(notebook)
    front_end.start()
    assert front_end.breakpoints(CELL, 3) == [3]
    notebook.ok("%load_ext rankbook")
    notebook.ok(start, timeout=90)
    engines = [command for command in notebook.processes().values() if "pydevd" in command]
    assert not engines, "the debugger attached itself to a process of ours"
    cell = notebook.send(CELL)
    front_end.wait_paused(2)
    front_end.move("continue")
    assert sorted(finish(front_end, cell).stdout.splitlines()) == ["[0] value 10", "[1] value 11"]


@pytest.mark.full
def test_ranks_start_while_the_debugger_is_on_also_after_a_restart_of_the_kernel():
    before = leftovers()
    notebook = Notebook()
    try:
        start_while_debugging(notebook)
        first = set(notebook.processes())
        notebook.manager.restart_kernel(now=False)
        notebook.client.wait_for_ready(timeout=60)
        wait_until(lambda: not first & set(notebook.processes()), timeout=10, what="the end of the first processes")
        notebook.late.clear()
        start_while_debugging(notebook)
    finally:
        notebook.close()
    check_nothing_left(notebook.mark, before)


@pytest.mark.full
def test_ranks_on_other_hosts_start_while_the_debugger_is_on():
    before = leftovers()
    notebook = Notebook()
    try:
        start_while_debugging(notebook, ON_HOSTS)
        notebook.ok("%distributed stop", timeout=60)
    finally:
        notebook.close()
    check_nothing_left(notebook.mark, before)
