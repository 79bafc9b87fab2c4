"""Test IPython's terminal with the extension, and `jupyter console` with the kernel."""

from __future__ import annotations

import io
import os
import re
import sys
import uuid
from collections.abc import Iterator

import pytest

from tests.conftest import MARK, check_nothing_left, leftovers, patient_ipython
from tests.jupyter.conftest import install

pexpect = pytest.importorskip("pexpect")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

_install = install  # the fixture, under a name that no test shadows
_CODES = re.compile(r"\x1b(?:\[[0-9;?]*[a-zA-Z]|[()][A-B]|[>=])|\x1b\][^\x07]*\x07")


class Terminal:
    """A person at a terminal, who sees each prompt before typing on."""

    def __init__(self, *arguments: str, folder: str) -> None:
        self.mark, self.number = uuid.uuid4().hex, 1
        plain = {"TERM": "xterm", "NO_COLOR": "1", "PROMPT_TOOLKIT_NO_CPR": "1", "PAGER": "cat"}
        variables = {MARK: self.mark, "IPYTHONDIR": folder, "JUPYTER_CONFIG_DIR": folder}
        self.seen = io.StringIO()
        self.process = pexpect.spawn(
            sys.executable, ["-m", *arguments], env={**os.environ, **plain, **variables}, cwd=folder,
            encoding="utf-8", timeout=30, dimensions=(50, 150),
        )  # fmt: skip
        self.process.logfile_read = self.seen
        self.wait_prompt()

    def wait_prompt(self) -> str:
        """Wait for the prompt of the next cell; what stands before it, without its colours."""
        self.process.expect(rf"In \[(?:\x1b\[[0-9;]*m)*{self.number}(?:\x1b\[[0-9;]*m)*\]: ")
        self.number += 1
        return _CODES.sub("", self.process.before)

    def wait_for(self, text: str) -> None:
        """Wait until it is there."""
        self.process.expect_exact(text)

    def run(self, *lines: str) -> str:
        """Type a cell and wait for its end. A Tab in it is followed by the rest once its completion is there."""
        for line in lines:
            head, tab, tail = line.partition("\t")
            self.process.send(head)
            if tab:
                self.wait_for(head[-4:])
                self.process.send("\t")
                completed, _, tail = tail.partition("|")
                self.wait_for(completed)
            self.process.send(tail + "\r")
        if lines[0].startswith("%%"):
            self.process.send("\r\r")  # an empty line ends it
        return self.wait_prompt()

    def close(self) -> None:
        """Exit as a user does, unless the terminal has ended."""
        if self.process.isalive():
            self.process.sendcontrol("d")
        self.process.expect(pexpect.EOF)
        self.process.close()


@pytest.fixture
def opened(tmp_path) -> Iterator:
    before, terminals, folder = leftovers(), [], str(patient_ipython(tmp_path))

    def make(*arguments: str) -> Terminal:
        terminals.append(Terminal(*arguments, folder=folder))
        return terminals[-1]

    yield make
    for terminal in terminals:
        terminal.close()
        check_nothing_left(terminal.mark, before, timeout=5)


def interrupt(terminal):
    """Press Ctrl-C, which ends a cell of both ranks."""
    terminal.process.send("import time; print('begun'); time.sleep(600)\r")
    terminal.wait_for("[0-1] begun")
    terminal.process.sendcontrol("c")
    assert "KeyboardInterrupt" in terminal.wait_prompt()


def ask_each(terminal: Terminal) -> None:
    """Let every rank ask for input, in any order, and show the answer."""
    terminal.seen.seek(0)
    terminal.seen.truncate()
    terminal.process.send("input('name? ')\r")
    for _ in range(2):
        terminal.process.expect(r"\[(\d)\] name\? ")
        terminal.process.send(f"person {terminal.process.match[1]}\r")
    terminal.wait_prompt()
    reported = _CODES.sub("", terminal.seen.getvalue())
    assert "[0] 'person 0'" in reported and "[1] 'person 1'" in reported


def test_ipython_with_the_extension(opened):
    terminal = opened("IPython", "--no-banner", "--no-confirm-exit")
    terminal.run("%load_ext rankbook")
    assert "2 ranks are ready" in terminal.run("%distributed start --r\tanks| 2")
    terminal.run("%%distributed", "unique_name_on_ranks = 7")
    assert "[0-1] 42\r\n" in terminal.run("%%distributed", "print(unique_na\tme_on_ranks| * 6)")
    assert "idle" in terminal.run("%distributed stat\tus|")
    terminal.run("unique_name_here = 'here'")
    assert "'here'" in terminal.run("unique_na\tme_here|"), "a plain cell is the notebook's"
    terminal.run("%distributed auto on")
    assert "[0-1] 3\r\n" in terminal.run("unique_name_on_ranks.bit_len\tgth|()")
    assert re.search(r"Type: +int", terminal.run("unique_name_on_ranks?"))

    ask_each(terminal)

    terminal.process.send("stopped = breakpoint() if rank == 1 else None\r")
    terminal.wait_for("[1] (Pdb) ")
    terminal.process.send("p rank * 100 + 1\r")
    terminal.wait_for("[1] 101")
    terminal.process.send("c\r")
    terminal.wait_prompt()

    interrupt(terminal)
    assert "[0-1] 7" in terminal.run("unique_name_on_ranks")


@pytest.mark.full
def test_jupyter_console_on_our_kernel(opened, install):
    pytest.importorskip("jupyter_console")
    assert install("-n", "2").returncode == 0
    quiet = ("--ZMQTerminalInteractiveShell.banner=", "--JupyterConsoleApp.confirm_exit=False")
    terminal = opened("jupyter_console", "--kernel", "rankbook-2", *quiet)
    terminal.run("unique_name_on_ranks = 7")
    assert "[0-1] 42" in terminal.run("print(unique_na\tme_on_ranks| * 6)")
    assert "[0-1] 3" in terminal.run("unique_name_on_ranks.bit_len\tgth|()")
    assert re.search(r"Type: +int", terminal.run("unique_name_on_ranks?"))

    ask_each(terminal)

    assert "rank 1: ZeroDivisionError" in terminal.run("1 / (1 - rank)")
    terminal.process.send("%debug\r")
    terminal.wait_for("[1] ipdb> ")
    terminal.process.send("p rank * 100 + 1\r")
    terminal.wait_for("[1] 101")
    terminal.process.send("q\r")
    terminal.wait_prompt()

    interrupt(terminal)
    assert "[0-1] 7" in terminal.run("unique_name_on_ranks")

    terminal.process.send("exit\r")
    terminal.process.expect(pexpect.EOF)
