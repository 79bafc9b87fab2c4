"""Test `rankbook run` with a real kernel: output, exit codes, the executed document, and leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import queue
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from unittest import mock

import nbformat
import psutil
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from rankbook.cli import main as cli
from rankbook.cli import notebook_runner
from rankbook.cli.console import Console
from rankbook.errors import InvalidArgument
from rankbook.jupyter.spec import make_spec
from tests.conftest import Gate, ipython_folder, wait_until

MARK = "RANKBOOK_TEST_RUN"
GONE_WITHIN = 10.0  # seconds after the command's end; what would be left stays for minutes

# Publishes as a thread of Rankbook's does: with the parent of the cell it belongs to, whichever cell runs by then.
PUBLISH = """
def publisher():
    kernel = get_ipython().kernel
    parent = kernel.get_parent()
    def publish(text):
        content = {"name": "stdout", "text": text}
        kernel.session.send(kernel.iopub_socket, "stream", content, parent=parent, ident=b"stream.stdout")
    return publish
"""


class Command:
    """`rankbook run …` as a process of its own, in a folder for temporary files that must be empty afterwards."""

    def __init__(self, folder: Path, *args: str, tmp: str | None = None) -> None:
        self.mark = str(uuid.uuid4())
        self.tmp = tempfile.TemporaryDirectory(prefix="rb-", dir=tmp)  # pytest's are too long for a socket
        self.errors = (folder / "stderr.txt").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rankbook.cli", "run", *args],
            cwd=folder,
            env={"IPYTHONDIR": ipython_folder(), **os.environ, MARK: self.mark, "TMPDIR": self.tmp.name},
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )
        assert self.process.stdout is not None
        self._stdout: IO[bytes] = self.process.stdout
        self.out = ""
        self.tidy = True

    def wait_output(self, text: str, *, timeout: float = 60) -> None:
        """Read stdout until it contains `text`."""
        deadline = time.monotonic() + timeout
        while text not in self.out:
            assert self._read(deadline), f"{text!r} did not come; stdout:\n{self.out}\nstderr:\n{self.err}"

    def wait_end(self, *, timeout: float = 60) -> int:
        """Read stdout to its end and return the exit code."""
        deadline = time.monotonic() + timeout
        while self._read(deadline):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, deadline: float) -> bool:
        if not select.select([self._stdout], [], [], max(0, deadline - time.monotonic()))[0]:
            raise AssertionError(f"nothing came in time; stdout:\n{self.out}\nstderr:\n{self.err}")
        piece = os.read(self._stdout.fileno(), 65_536)
        self.out += piece.decode()
        return bool(piece)

    @property
    def err(self) -> str:
        return os.pread(self.errors.fileno(), 1_000_000, 0).decode()

    def family(self) -> list[psutil.Process]:
        """Return the processes that inherited the mark of this run: the command, its kernel, ranks, forkservers."""
        processes = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return processes

    def was_killed(self) -> None:
        """Expect a temporary folder to remain."""
        self.tidy = False

    def close(self) -> None:
        """Fail if the run has left a process or a file behind."""
        ended = self.process.poll() is not None
        if ended:
            with contextlib.suppress(pytest.fail.Exception):
                wait_until(lambda: not self.family(), timeout=GONE_WITHIN, what="the end of its processes")
        remaining = self.family()
        files = sorted(path.name for path in Path(self.tmp.name).iterdir()) if ended and self.tidy else []
        survivors = [str(process) for process in remaining]
        for process in remaining:
            process.kill()
        self.process.wait()
        self._stdout.close()
        self.errors.close()
        self.tmp.cleanup()
        assert ended, "the test ended before its command"
        assert not survivors, f"left running: {survivors}"
        assert not files, f"left in the temporary folder: {files}"


Run = Callable[..., Command]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Start `rankbook run` on a notebook of these cells; check at teardown that nothing is left."""
    commands: list[Command] = []

    def start(
        cells: list[str | NotebookNode], *args: str, tmp: str | None = None, path: str = "notebook.ipynb"
    ) -> Command:
        notebook = new_notebook(cells=[new_code_cell(cell) if isinstance(cell, str) else cell for cell in cells])
        nbformat.write(notebook, tmp_path / "notebook.ipynb")
        commands.append(Command(tmp_path, path, *args, tmp=tmp))
        return commands[-1]

    yield start
    for command in commands:
        command.close()


@contextlib.contextmanager
def inherited(number: signal.Signals, action: signal.Handlers) -> Iterator[None]:
    """Let processes that start in this context inherit this action for the signal."""
    previous = signal.signal(number, action)
    try:
        yield
    finally:
        signal.signal(number, previous)


def stored_text(path: Path, index: int) -> str:
    cell = nbformat.read(path, as_version=4).cells[index]
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


@pytest.mark.full
def test_every_output_of_a_plain_cell_is_printed_under_its_header(run: Run) -> None:
    command = run(
        [
            new_markdown_cell("# Not run"),
            "import sys\nprint('to stdout'); print('to stderr', file=sys.stderr)\n6 * 7",
            "   ",
            "from IPython.display import HTML\ndisplay({'a': 1}); display(HTML('<b>x</b>'))\nprint('half', end='')",
            new_code_cell("1 / 0", metadata={"tags": ["skip-execution"]}),
            "print('last')",
        ]
    )
    assert command.wait_end() == 0
    assert command.out == (
        "[1] import sys …\nto stdout\n42\n"
        "[2] from IPython.display import HTML …\n{'a': 1}\n<IPython.core.display.HTML object>\nhalf\n"
        "[3] print('last')\nlast\n"
    )
    assert command.err == "to stderr\n"


@pytest.mark.full
@pytest.mark.processes
def test_output_is_printed_while_the_cell_still_runs(run: Run, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    command = run(["print('first')", f"print('before')\n{gate.wait}\nprint('after')"])
    command.wait_output("first\n[2]")
    command.wait_output("before\n")
    assert "after" not in command.out
    gate.open()
    assert command.wait_end() == 0
    assert command.out.endswith("before\nafter\n")


@pytest.mark.slow
def test_a_failing_cell_ends_the_run_with_its_traceback(run: Run, tmp_path: Path) -> None:
    old = new_code_cell("print('never')", execution_count=9, outputs=[nbformat.v4.new_output("stream", text="old")])
    command = run(["print('one')", "def f():\n    raise ValueError('broken')\nf()", old], "--output", "out.ipynb")
    assert command.wait_end() == 1
    assert "never" not in command.out
    assert "ValueError: broken" in command.err
    assert "----> 2     raise ValueError('broken')" in command.err
    assert command.err.endswith("rankbook: cell [2] failed: ValueError: broken\n")
    assert "\x1b" not in command.err
    cells = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells
    assert [cell.execution_count for cell in cells] == [1, 2, None]
    assert cells[1].outputs[-1].ename == "ValueError"
    assert cells[2].outputs == []


@pytest.mark.full
def test_a_cell_that_is_tagged_may_fail(run: Run) -> None:
    command = run([new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]}), "print('on')"])
    assert command.wait_end() == 0
    assert "ZeroDivisionError" in command.err
    assert command.out.endswith("on\n")


@pytest.mark.processes
def test_the_executed_notebook_is_written(run: Run, tmp_path: Path) -> None:
    progress = "print('10 %', end='\\r'); print('100 %'); print('done')"
    display = "shown = display('start', display_id=True)\nshown.update('end')\n'result'"
    figure = "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);"
    command = run([progress, display, figure], "--output", "out.ipynb")
    assert command.wait_end() == 0
    notebook = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    nbformat.validate(notebook)
    first, second, third = notebook.cells
    assert [dict(output) for output in first.outputs] == [
        {"output_type": "stream", "name": "stdout", "text": "100 %\ndone\n"}
    ]
    assert [output.data["text/plain"] for output in second.outputs] == ["'end'", "'result'"]
    assert "image/png" in third.outputs[0].data
    assert nbformat.read(tmp_path / "notebook.ipynb", as_version=4).cells[0].outputs == []


@pytest.mark.full
def test_output_that_comes_after_its_cell_ended_is_printed_and_kept(run: Run, tmp_path: Path) -> None:
    background = "publish = publisher()\nprint('started')"
    foreground = "print('mine ', end='', flush=True)\npublish('late '); publish('line\\n')\nprint('still mine')"
    command = run([PUBLISH, background, foreground], "--output", "out.ipynb")
    assert command.wait_end() == 0
    assert "\ncell [2]: late line\n" in command.out
    assert stored_text(tmp_path / "out.ipynb", 1) == "started\nlate line\n"
    assert stored_text(tmp_path / "out.ipynb", 2) == "mine still mine\n"


@pytest.mark.full
def test_log_contains_first_and_last_state_of_live_output(run: Run) -> None:
    bar = "bar = display('0', display_id=True)\nfor step in range(1, 2000):\n    bar.update(str(step))"
    frames = (
        "from IPython.display import clear_output\n"
        "for step in range(300):\n    clear_output(wait=True)\n    print('frame', step)"
    )
    command = run([bar, frames])
    assert command.wait_end() == 0
    lines = command.out.splitlines()
    assert lines[1] == "'0'"
    assert lines[lines.index("[2] from IPython.display import clear_output …") - 1] == "'1999'"
    assert lines[-1] == "frame 299"
    assert len(lines) < 40


@pytest.mark.full
def test_the_number_of_ranks_reaches_the_kernel(run: Run) -> None:
    command = run(["import os; print(os.environ['RANKBOOK_RANKS'])"], "-n", "3")
    assert command.wait_end() == 0
    assert command.out.endswith("\n3\n")


@pytest.mark.full
def test_the_kernel_is_this_interpreter_in_the_notebooks_folder(run: Run, tmp_path: Path) -> None:
    command = run(["import os, sys; print(sys.executable, os.getcwd())"])
    assert command.wait_end() == 0
    assert command.out.endswith(f"\n{sys.executable} {tmp_path}\n")


@pytest.mark.full
def test_a_temporary_folder_too_long_for_sockets_does_no_harm(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    command = run(["print('ran')"], tmp=str(folder))
    assert command.wait_end() == 0
    assert command.out.endswith("ran\n")


@pytest.mark.full
def test_a_cell_that_takes_too_long_is_interrupted_and_fails(run: Run) -> None:
    command = run(["import time\ntime.sleep(600)", "print('never')"], "--timeout", "1")
    assert command.wait_end() == 1
    assert "----> 2 time.sleep(600)" in command.err
    assert command.err.endswith("rankbook: cell [1] did not finish within 1 s\n")
    assert "never" not in command.out


@pytest.mark.slow
def test_a_kernel_that_dies_is_reported(run: Run) -> None:
    command = run(["print('alive')", "import os\nos.kill(os.getpid(), 9)"])
    assert command.wait_end() == 1
    assert "the kernel was killed by SIGKILL while running cell [2]" in command.err


@pytest.mark.slow
def test_an_interrupt_ends_the_cell_and_the_run(run: Run, tmp_path: Path) -> None:
    command = run(["import time\nprint('go')\ntime.sleep(600)", "print('never')"], "--output", "out.ipynb")
    command.wait_output("go\n")
    command.process.send_signal(signal.SIGINT)
    assert command.wait_end() == 128 + signal.SIGINT
    assert "KeyboardInterrupt" in command.err
    assert "never" not in command.out
    assert stored_text(tmp_path / "out.ipynb", 0) == "go\n"


@pytest.mark.full
def test_a_cell_that_handles_the_interrupt_goes_on_and_a_second_one_stops_the_run(run: Run) -> None:
    again = "except KeyboardInterrupt:\n    print('caught')\n    time.sleep(600)"
    caught = f"try:\n    print('go')\n    time.sleep(600)\n{again}"
    command = run(["import time", caught, "print('never')"])
    command.wait_output("go\n")
    command.process.send_signal(signal.SIGINT)
    command.wait_output("caught\n")
    command.process.send_signal(signal.SIGINT)
    assert command.wait_end() == 128 + signal.SIGINT
    assert "stopped by SIGINT in cell [2]" in command.err
    assert "never" not in command.out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.full
def test_a_stop_signal_shuts_the_kernel_down(run: Run, number: signal.Signals) -> None:
    with inherited(number, signal.SIG_DFL):
        command = run(["import time\nprint('go')\ntime.sleep(600)"])
    command.wait_output("go\n")
    assert len(command.family()) >= 2
    command.process.send_signal(number)
    assert command.wait_end(timeout=10) == 128 + number


@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
@pytest.mark.slow
def test_a_signal_that_nohup_or_a_script_ignores_stays_ignored(
    run: Run, tmp_path: Path, number: signal.Signals
) -> None:
    gate = Gate(tmp_path / "gate")
    with inherited(number, signal.SIG_IGN):
        command = run([f"print('go')\n{gate.wait}", "print('on')"])
    command.wait_output("go\n")
    command.process.send_signal(number)
    gate.open()
    assert command.wait_end() == 0
    assert "on\n" in command.out


@pytest.mark.full
def test_a_stop_signal_while_the_kernel_starts_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    os.mkfifo(tmp_path / "started")
    (startup / "00.py").write_text(f"open({str(tmp_path / 'started')!r}, 'w').close()\nimport time\ntime.sleep(600)")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    command = run(["print('never')"])
    (tmp_path / "started").read_text()  # blocks until the kernel opens it
    command.process.send_signal(signal.SIGTERM)
    assert command.wait_end(timeout=15) == 128 + signal.SIGTERM
    assert command.out == ""


@pytest.mark.full
def test_a_kernel_that_ignores_every_request_is_killed(run: Run) -> None:
    ignore_interrupts = (
        "import signal, time\nfor number in (signal.SIGINT, signal.SIGTERM):\n    signal.signal(number, signal.SIG_IGN)"
    )
    command = run([f"{ignore_interrupts}\nprint('go')\ntime.sleep(600)"])
    command.wait_output("go\n")
    command.process.send_signal(signal.SIGTERM)
    assert command.wait_end(timeout=20) == 128 + signal.SIGTERM


@pytest.mark.full
def test_a_reader_that_goes_away_ends_the_run(run: Run) -> None:
    command = run(["import time\nprint('go')", "for _ in range(100_000):\n    print('on and on')\ntime.sleep(600)"])
    command.wait_output("go\n")
    command._stdout.close()
    assert command.process.wait(30) == 1


LOAD = "%load_ext rankbook"


@pytest.mark.full
def test_ranks_print_behind_their_numbers_also_when_their_cell_is_over(run: Run, tmp_path: Path) -> None:
    background = "%%distributed --background\nprint('from all')\nprint('from', rank)"
    command = run([LOAD, background, "%%distributed\nprint('next')"], "--output", "out.ipynb", "-n", "3")
    assert command.wait_end(timeout=100) == 0
    lines = [line.removeprefix("cell [2]: ") for line in command.out.splitlines()]
    assert {"[0-2] from all", "[0] from 0", "[1] from 1", "[2] from 2", "[0-2] next"} <= set(lines)
    assert "[0-2] from all\n[0] from 0\n[1] from 1\n[2] from 2\n" in stored_text(tmp_path / "out.ipynb", 1)


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run_with_its_traceback(run: Run) -> None:
    command = run([LOAD, "%%distributed\n1 / (rank - 1)", "print('never')"])
    assert command.wait_end(timeout=100) == 1
    assert "rank 1: ZeroDivisionError: division by zero" in command.err
    assert "cell [2] failed: ZeroDivisionError: " in command.err
    assert "never" not in command.out


@pytest.mark.parametrize(
    "number",
    [*(pytest.param(number, marks=pytest.mark.full) for number in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL],
)
@pytest.mark.slow
def test_no_rank_outlives_the_run(run: Run, number: signal.Signals) -> None:
    command = run([LOAD, "%%distributed\nimport time\nprint('go', flush=True)\ntime.sleep(600)"])
    command.wait_output("[0-1] go\n", timeout=100)
    assert len(command.family()) >= 5  # the command, its kernel, the forkserver, two ranks
    command.process.send_signal(number)
    if number == signal.SIGKILL:
        command.process.wait()
        command.was_killed()
    else:
        assert command.wait_end() == 128 + number


@pytest.mark.full
def test_a_background_save_is_finished_before_the_ranks_end(run: Run, tmp_path: Path) -> None:
    from rankbook.checkpoint import steps
    from tests.magics.test_background_saves import SAVE

    save = SAVE.format(folder=str(tmp_path / "saved"), seconds=4, step=1)  # longer than a kernel's exit waits
    command = run([LOAD, save], "-n", "2")
    assert command.wait_end(timeout=100) == 0
    assert "[0-1] under way\n" in command.out
    assert (steps(tmp_path / "saved"), command.err) == ([1], "")


@pytest.mark.full
def test_a_background_save_that_fails_behind_the_last_cell_fails_the_run(run: Run, tmp_path: Path) -> None:
    save = f"""%%distributed
import threading
from rankbook.checkpoint import save
from rankbook.checkpoint.storage.backends import LocalStorage
LocalStorage.write = lambda *_: threading.Event().wait(2) or 1 / 0
handle = save({{"weights": torch.arange(4.0)}}, {str(tmp_path / "saved")!r}, step=1, async_=True)
print("done" if handle.done else "under way")"""
    command = run([LOAD, save], "-n", "2")
    assert command.wait_end(timeout=100) == 1
    assert "[0-1] under way\n" in command.out
    assert "ZeroDivisionError" in command.out + command.err
    assert command.err.endswith("rankbook: ranks 0-1 exited with code 1: a background save has failed\n")


@pytest.mark.slow
def test_a_background_cell_that_fails_lets_the_others_run_and_fails_the_run(run: Run) -> None:
    command = run([LOAD, "%%distributed --background\n1 / 0", "%%distributed\nprint('goes on')"], "-n", "2")
    assert command.wait_end(timeout=100) == 1
    assert "[0-1] goes on\n" in command.out
    assert command.err.endswith("rankbook: background cell [2] failed\n")


class KernelStub:
    """Client of a kernel in which every cell succeeds, except for the source "fail".

    `shown` has the states of background cells' handles that a cell shows, by its source.
    """

    def __init__(self) -> None:
        self.err = io.StringIO()
        self.shown: dict[str, dict[str, str]] = {}
        self.requests: list[tuple[str, bool]] = []
        self.stopped: dict[str, Any] = {}  # what the request that stops the ranks returns
        self.runner: notebook_runner.NotebookRunner | None = None

    def execute(
        self,
        code: str,
        *,
        silent: bool = False,
        store_history: bool = True,
        user_expressions: dict[str, str] | None = None,
        **_: bool,
    ) -> str:
        assert silent is not store_history
        self.requests.append((code or "".join((user_expressions or {}).values()), silent))
        return str(len(self.requests))

    async def get_iopub_msg(self, **_: float) -> dict[str, Any]:
        raise queue.Empty

    async def get_shell_msg(self) -> dict[str, Any]:
        assert self.runner is not None
        request = str(len(self.requests))
        if request in self.runner._runs:
            run = self.runner._runs[request]
            for name, state in self.shown.get(run.cell.source, {}).items():
                content = {"data": {}, "metadata": {"rankbook_handle": state}, "transient": {"display_id": name}}
                self.runner._print(run, "update_display_data", content)
            run.idle.set()
        status = "error" if self.requests[-1][0] == "fail" else "ok"
        return {
            "parent_header": {"msg_id": request},
            "content": {"status": status, "ename": "ValueError", "evalue": "", **self.stopped},
        }


def stub_runner(*sources: str, **options: Any) -> tuple[notebook_runner.NotebookRunner, KernelStub]:
    stub = KernelStub()
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    console = Console(io.StringIO(), stub.err, clock=time.monotonic)
    stub.runner = runner = notebook_runner.NotebookRunner(notebook, console, folder=Path(), **options)
    runner.kc = stub  # type: ignore[assignment]
    return runner, stub


def test_ranks_are_stopped_behind_the_last_cell_but_not_after_a_failure() -> None:
    runner, stub = stub_runner("1", "2")
    asyncio.run(runner._execute_cells())
    assert stub.requests == [("1", False), ("2", False), (notebook_runner._STOP_RANKS, True)]
    runner, stub = stub_runner("1", "fail", "2")
    with pytest.raises(notebook_runner.RunError):
        asyncio.run(runner._execute_cells())
    assert stub.requests == [("1", False), ("fail", False)]


def test_the_last_cell_may_end_the_kernel() -> None:
    async def exit_code() -> int:
        return 0

    runner, _ = stub_runner("exit()")
    runner.km = mock.Mock(provisioner=mock.Mock(wait=exit_code))
    with pytest.raises(notebook_runner.RunError, match="the kernel exited with code 0"):
        asyncio.run(runner._watch_kernel())
    asyncio.run(runner._execute_cells())
    asyncio.run(runner._watch_kernel())


def test_a_failed_background_cell_fails_the_run_when_all_cells_have_run() -> None:
    runner, stub = stub_runner("start", "more", "end")
    stub.shown = {"start": {"a": "active", "b": "active"}, "more": {"a": "failed", "c": "active", "d": "failed"}}
    stub.shown["end"] = {"a": "failed", "b": "ended", "d": "ended"}
    with pytest.raises(notebook_runner.RunError, match=r"^background cell \[1\] failed$") as ended:
        asyncio.run(runner._execute_cells())
    assert ended.value.code == 1
    assert [source for source, _ in stub.requests] == ["start", "more", "end", notebook_runner._STOP_RANKS]
    assert stub.err.getvalue() == (
        "rankbook: background cell [2] still runs and is stopped; .wait() of its handle waits for it\n"
    )


def test_a_background_cell_that_is_tagged_may_fail() -> None:
    runner, stub = stub_runner("start")
    runner.nb.cells[0].metadata.tags = ["raises-exception"]
    stub.shown = {"start": {"a": "failed"}}
    asyncio.run(runner._execute_cells())
    assert stub.err.getvalue() == ""


def test_ranks_that_have_not_saved_everything_fail_the_run() -> None:
    runner, stub = stub_runner("1")
    value = {"status": "ok", "data": {"text/plain": "'ranks 0-1 exited with code 1'"}, "metadata": {}}
    stub.stopped = {"user_expressions": {"ended": value}}
    with pytest.raises(notebook_runner.RunError) as ended:
        asyncio.run(runner._execute_cells())
    assert (ended.value.code, str(ended.value)) == (
        1,
        "ranks 0-1 exited with code 1: a background save has failed",
    )


def test_ranks_are_stopped_only_where_rankbook_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "rankbook.coordinator.cluster_processes"
    stop = mock.Mock(return_value="rank 0 exited with code 1")
    monkeypatch.setitem(sys.modules, name, mock.Mock(spec_set=["stop_all_clusters"], stop_all_clusters=stop))
    assert eval(notebook_runner._STOP_RANKS) == "rank 0 exited with code 1"
    stop.assert_called_once_with()
    monkeypatch.delitem(sys.modules, name)
    assert eval(notebook_runner._STOP_RANKS) == ""
    assert name not in sys.modules


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot read given.ipynb: No such file or directory"),
        ("{", "given.ipynb is not a notebook: "),
        ('{"a": 1}', "given.ipynb is not a notebook: it has no cells"),
        ("[1]", "given.ipynb is not a notebook: it has no cells"),
        (
            '{"cells": [{}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}',
            "given.ipynb is not a valid notebook: ",
        ),
    ],
)
def test_invalid_notebook_is_one_line_and_exit_code_2(
    content: str | None,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("given.ipynb").write_text(content)
    assert cli.main(["run", "given.ipynb"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rankbook: {complaint}")
    assert error.count("\n") == 1


CODE = {"cell_type": "code", "source": "1", "metadata": {}, "outputs": [], "execution_count": None}


@pytest.mark.parametrize(
    "changes",
    [
        {"nbformat_minor": 4, "cells": [CODE | {"id": "a"}]},
        {"cells": [{"cell_type": "code", "source": "1", "metadata": {}}]},
        {"cells": [{"cell_type": "code", "source": "1"}, {"cell_type": "markdown", "source": "text"}]},
        {"cells": [CODE | {"outputs": [{"output_type": "stream", "text": "x"}, {"output_type": "display_data"}]}]},
        {"metadata": {"kernelspec": {"name": "python3", "language": "python"}}},
        {"metadata": {"kernelspec": None}},
        {"cells": [CODE | {"id": "a b"}, CODE | {"id": "x" * 65}, CODE | {"id": None}]},
        {"metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": None}}},
        {"metadata": None, "nbformat_minor": 2},
    ],
)
def test_a_notebook_is_repaired_where_the_run_does_not_need_what_is_invalid(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    content = {"cells": [CODE | {"id": "a"}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5} | changes
    path = tmp_path / "given.ipynb"
    path.write_text(json.dumps(content))
    with warnings.catch_warnings(action="error"):
        notebook = notebook_runner.read_notebook(path)
        nbformat.validate(notebook)
    assert [cell.source for cell in notebook.cells] == [cell["source"] for cell in content["cells"]]
    assert notebook_runner._kernel_specs(notebook, None, None).get_kernel_spec("any").language == "python"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--kernel", "no-such-kernel"], "unknown kernel 'no-such-kernel'; installed kernels: "),
        (["--output", "no/such/folder.ipynb"], "cannot write no/such/folder.ipynb"),
        (["--output", "."], "cannot write .: it is a folder"),
        (["--output", "/proc/executed.ipynb"], "cannot write /proc/executed.ipynb: "),
        (["--output", f"{'x' * 300}.ipynb"], "cannot write xxx"),
    ],
)
def test_options_that_cannot_be_met_are_one_line_and_exit_code_2(
    options: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    nbformat.write(new_notebook(), "given.ipynb")
    assert cli.main(["run", "given.ipynb", *options]) == 2
    assert capsys.readouterr().err.startswith(f"rankbook: {complaint}")
    assert [path.name for path in tmp_path.iterdir()] == ["given.ipynb"]


@pytest.mark.slow
def test_results_are_not_lost_with_the_folder_of_the_output(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    command = run(["print('kept')", "import os; os.rmdir('out')"], "--output", "out/notebook.ipynb")
    assert command.wait_end() == 1
    (saved,) = tmp_path.glob("notebook-*.ipynb")
    assert f"cannot write out/notebook.ipynb: No such file or directory; wrote {saved} instead" in command.err
    assert stored_text(saved, 0) == "kept\n"
    assert not nbformat.read(tmp_path / "notebook.ipynb", as_version=4).cells[0].outputs, "the input is not changed"


def test_results_go_to_the_first_folder_that_can_be_written_to(tmp_path: Path) -> None:
    notebook, gone = new_notebook(cells=[new_code_cell("1")]), tmp_path / "gone"
    trouble = notebook_runner.save_notebook(notebook, gone / "out.ipynb", [gone, tmp_path])
    (saved,) = tmp_path.iterdir()
    assert trouble.endswith(f"; wrote {saved} instead")
    assert nbformat.read(saved, as_version=4).cells[0].source == "1"
    saved.unlink()
    trouble = notebook_runner.save_notebook(notebook, gone / "out.ipynb", [gone])
    assert trouble.endswith("; no other folder can be written to, so the results are lost")
    assert notebook_runner.save_notebook(notebook, tmp_path / "out.ipynb", []) == ""


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe, read = tmp_path / "out.ipynb", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    notebook_runner.check_output(pipe)
    assert notebook_runner.save_notebook(new_notebook(cells=[new_code_cell("1")]), pipe, []) == ""
    reader.join(20)
    assert nbformat.reads(read[0], as_version=4).cells[0].source == "1"
    assert pipe.is_fifo()


@pytest.mark.parametrize("exists", [True, False])
def test_the_target_of_a_link_is_written(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "out.ipynb", tmp_path / "there" / "target.ipynb"
    link.symlink_to(target)
    if exists:
        target.write_text("old")
    notebook_runner.check_output(link)
    assert target.exists() is exists
    assert notebook_runner.save_notebook(new_notebook(cells=[new_code_cell("1")]), link, []) == ""
    assert link.is_symlink()
    assert nbformat.read(target, as_version=4).cells[0].source == "1"


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "out.ipynb"
    path.touch(0o600)
    assert notebook_runner.save_notebook(new_notebook(cells=[new_code_cell("1")]), path, []) == ""
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_size
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_into_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "out.ipynb"
    link.symlink_to(tmp_path / "gone" / "target.ipynb")
    with pytest.raises(InvalidArgument, match="it is not writable"):
        notebook_runner.check_output(link)


def test_a_mounted_file_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.ipynb"
    path.write_text("old")
    before = path.stat().st_ino
    monkeypatch.setattr(Path, "replace", mock.Mock(side_effect=OSError(errno.EBUSY, "busy")))
    assert notebook_runner.save_notebook(new_notebook(cells=[new_code_cell("1")]), path, []) == ""
    assert nbformat.read(path, as_version=4).cells[0].source == "1"
    assert (path.stat().st_ino, list(tmp_path.iterdir())) == (before, [path])


@pytest.mark.full
def test_notebook_without_cell_ids_runs_unchanged(run: Run, tmp_path: Path) -> None:
    cell = '{"cell_type": "code", "source": "print(1)", "metadata": {}, "outputs": [], "execution_count": null}'
    (tmp_path / "old.ipynb").write_text(
        f'{{"cells": [{cell}, {cell}], "metadata": {{}}, "nbformat": 4, "nbformat_minor": 5}}'
    )
    command = run([], path="old.ipynb")
    assert command.wait_end() == 0
    assert command.out == "[1] print(1)\n1\n[2] print(1)\n1\n"
    assert command.err == ""


def test_a_notebook_in_another_language_names_its_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = {"name": "ir", "display_name": "R", "language": "R"}
    nbformat.write(new_notebook(metadata={"kernelspec": spec}), tmp_path / "given.ipynb")
    assert cli.main(["run", str(tmp_path / "given.ipynb")]) == 2
    assert "written in R, not Python; run it with `--kernel ir`" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize(
    ("spec", "code", "complaint"),
    [
        ("{", 2, "the kernel spec of 'given' cannot be read: "),
        ("[]", 2, "the kernel spec of 'given' cannot be read: "),
        ('{"argv": ["/gone/python"]}', 1, "the kernel did not start: /gone/python: No such file or directory\n"),
    ],
)
def test_a_kernel_that_cannot_start_is_one_line(
    spec: str,
    code: int,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "kernels" / "given"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(spec)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    notebook = new_notebook(metadata={"kernelspec": {"name": "given", "display_name": "", "language": "python"}})
    nbformat.write(notebook, tmp_path / "given.ipynb")
    assert cli.main(["run", str(tmp_path / "given.ipynb"), "--kernel", "given"]) == code
    error = capsys.readouterr().err
    assert error.startswith(f"rankbook: {complaint}")
    assert error.count("\n") == 1 and not caplog.records
    kernel = notebook_runner._kernel_specs(notebook, None, None).get_kernel_spec("given")
    assert kernel.argv[0] == sys.executable


@pytest.mark.parametrize("kernel", ["rankbook-4", None])
def test_the_number_of_ranks_on_the_command_line_overrides_only_that_of_the_kernel(
    kernel: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels" / "rankbook-4"
    folder.mkdir(parents=True)
    spec = make_spec(sys.executable, 4, None)
    spec["env"]["NCCL_DEBUG"] = "WARN"
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    notebook = new_notebook(metadata={"kernelspec": {"name": "rankbook-4", "display_name": "", "language": "python"}})

    def env_of(ranks: int | None) -> dict[str, str]:
        return notebook_runner._kernel_specs(notebook, kernel, ranks).get_kernel_spec(kernel or "").env

    assert env_of(None) == {"RANKBOOK_RANKS": "4", "NCCL_DEBUG": "WARN"}
    assert env_of(2) == {"NCCL_DEBUG": "WARN"}


def test_the_kernel_does_not_take_itself_for_the_notebook_that_has_started_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "outer.ipynb")
    env = notebook_runner._kernel_environment(3)
    assert "JPY_SESSION_NAME" not in env
    assert (env["RANKBOOK_RANKS"], env["PATH"]) == ("3", os.environ["PATH"])


@pytest.mark.parametrize("options", [["-n", "0"], ["-n", "two"], ["--timeout", "0"], ["--timeout", "nan"]])
def test_numbers_that_make_no_sense_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "given.ipynb", *options])
    assert ended.value.code == 2


def test_without_nbclient_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "rankbook.cli.notebook_runner", raising=False)
    monkeypatch.delattr("rankbook.cli.notebook_runner", raising=False)
    monkeypatch.setitem(sys.modules, "nbclient", None)
    assert cli.main(["run", "given.ipynb"]) == 2
    message = 'rankbook: running a notebook requires nbclient; run pip install "jupyterlab>=4.2" "nbclient>=0.10"\n'
    assert capsys.readouterr().err == message


@pytest.mark.processes
def test_command_imports_no_heavy_packages() -> None:
    heavy = "{'torch', 'IPython', 'nbclient', 'jupyter_client', 'zmq'}"
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys, rankbook.cli.main; assert not {heavy} & sys.modules.keys(), sys.modules.keys()",
        ],
        check=True,
    )


@pytest.mark.processes
def test_the_installed_command_reports_its_version() -> None:
    command = Path(sysconfig.get_path("scripts")) / "rankbook"
    result = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("rankbook 0.")


def test_a_command_without_anything_to_do_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "run" in capsys.readouterr().err
