"""`start --keep`: the kernel goes, the ranks stay, and the next kernel attaches to them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Notebook, check_nothing_left, leftovers, marked_processes, wait_until

Open = Callable[[], Notebook]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for this test's clusters alone, where no other's are found. The test itself ends what it keeps."""
    folder = Path(tempfile.mkdtemp(prefix="rb-", dir="/tmp"))  # pytest's are too long for a socket
    try:
        yield folder
        wait_until(lambda: not list(folder.glob("rankbook-*")), timeout=2, what=f"nothing left in {folder}")
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def open_notebook(place) -> Iterator[Open]:
    """Makes kernels with the extension loaded. Nothing of them may be left once they are closed."""
    before = leftovers()
    opened: list[Notebook] = []

    def make() -> Notebook:
        opened.append(Notebook(env={"RANKBOOK_RUNTIME_DIR": str(place)}))
        opened[-1].ok("%load_ext rankbook")
        return opened[-1]

    try:
        yield make
        for each in opened:
            each.close()
            check_nothing_left(each.mark, before)
    finally:
        for each in opened:
            with contextlib.suppress(RuntimeError):
                each.close()
            for pid in marked_processes(each.mark):  # a test that failed leaves nothing to the next one
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def notebook(open_notebook) -> Notebook:
    """Two kept ranks."""
    made = open_notebook()
    made.ok("%distributed start -n 2 --keep 60")
    return made


def restart(notebook: Notebook) -> None:
    notebook.manager.restart_kernel(now=True)
    settle(notebook)


def settle(notebook: Notebook) -> None:
    notebook.client.wait_for_ready(timeout=60)
    notebook.ok("%load_ext rankbook")


def kill(notebook: Notebook) -> None:
    os.kill(notebook.pid, signal.SIGKILL)
    wait_until(lambda: not notebook.manager.is_alive(), timeout=10, what="the kernel's end")


def ranks_of(notebook: Notebook) -> list[int]:
    return [
        int(pid)
        for pid in notebook.ok(
            "import rankbook\nfor each in rankbook.current().status(): print(each.pid)"
        ).stdout.split()
    ]


def test_the_start_line_says_how_long_the_ranks_stay(open_notebook):
    notebook = open_notebook()
    assert "they stay for 10 minutes: %distributed attach" in notebook.ok("%distributed start --keep").stdout
    notebook.ok("%distributed stop")
    assert "they stay for 45 s" in notebook.ok("import rankbook\nrankbook.start(keep=45)\n%distributed start").stdout
    notebook.ok("%distributed stop")


def test_after_a_restart_everything_works_as_before_and_after_a_second_one_too(notebook):
    notebook.ok("%%distributed\nx = rank + 10")
    pids = ranks_of(notebook)
    for _ in range(2):
        restart(notebook)
        assert "%distributed attach takes them over" in notebook.ok("%distributed status").stdout
        assert "ranks 0-1 attached" in notebook.ok("%distributed attach").stdout
        assert ranks_of(notebook) == pids
        assert notebook.ok("%distributed status").text.count("idle") == 2
        outcome = notebook.ok("%%distributed\nt = torch.ones(1) * x\ndist.all_reduce(t)\nprint(x, t.item())")
        assert "[0] 10 21.0" in outcome.stdout
        assert "[1] 11 21.0" in outcome.stdout
    notebook.ok("import numpy; big = numpy.arange(1 << 20)\n%distributed push big")
    notebook.ok("%distributed pull big\nassert all((each == numpy.arange(1 << 20)).all() for each in big)")
    assert "all ranks are in one process group" in notebook.ok("%distributed restart 1").stdout
    outcome = notebook.ok("%%distributed\nprint('x' in globals()); dist.barrier()")
    assert "[0] True" in outcome.stdout
    assert "[1] False" in outcome.stdout
    assert "2 ranks stopped" in notebook.ok("%distributed stop").stdout
    wait_until(lambda: set(notebook.processes()) == {notebook.pid}, timeout=2, what="the end of the ranks")
