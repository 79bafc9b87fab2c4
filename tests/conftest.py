"""Fixtures: a real kernel that is driven as by a front end, and the check that it leaves nothing behind."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ipykernel
import IPython
import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.suite import (  # noqa: F401 - pytest finds its hooks and fixtures here
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_call,
    pytest_runtest_protocol,
    pytest_terminal_summary,
    pytest_xdist_auto_num_workers,
    runtime_folder,
    short_path,
    worker_folders,
)

MARK = "RANKBOOK_TEST_MARK"
IPYTHON_7 = IPython.version_info < (8,)
# It puts this folder on the path, whose package `tests` would be imported in place of ours.
sys.path[:] = [entry for entry in sys.path if not entry.endswith("IPython/extensions")]
IS_OUTDATED = IPYTHON_7 and sys.version_info >= (3, 12)
"""Whether IPython is older than its Python, and lacks what that has changed."""
ASSIGNS_COMMANDS = not IS_OUTDATED
"""Whether IPython knows `x = !command`; see docs/howto/kaggle-and-colab.md."""
needs_assigned_commands = pytest.mark.skipif(
    not ASSIGNS_COMMANDS, reason="IPython 7 raises a SyntaxError for x = !command on Python 3.12 and newer"
)
ANSI = re.compile(r"\x1b\[[0-9;]*m")

# A shell's background job, or one below nohup, ignores these, and so would every process that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
Answers = list[str] | Callable[[str], str]

_ONE_LOOK = 0.25
"""Seconds that one look and the pause behind it count for at most."""


def _wait_for_answers() -> None:
    """Let questions to the ranks have time on a busy machine where a test gives them none of its own."""
    import inspect

    from rankbook.coordinator.cluster import Cluster
    from rankbook.coordinator.monitor import StatusMonitor

    both = ("placement", "detail", "shards", "statistic")
    questions = [getattr(asked, name) for asked in (Cluster, StatusMonitor) for name in both]
    questions += [Cluster.status, Cluster.stacks, Cluster.variables, Cluster.peek, StatusMonitor.snapshots]
    for ask in questions:
        assert ask.__kwdefaults__["timeout"] < 10.0, "the name has changed"
        ask.__signature__ = inspect.signature(ask)  # what a user reads stays the same
        ask.__kwdefaults__["timeout"] = 10.0


_PATIENCE = f"""\
{inspect.getsource(_wait_for_answers)}

_wait_for_answers()
del _wait_for_answers


def _patience():
    from rankbook.coordinator.cluster import Cluster
    from rankbook.output import merger

    assert merger._HOLD < 1.0, "the name has changed"
    merger._HOLD = 1.0
    for ask in (Cluster.complete, Cluster.inspect):
        assert ask.__kwdefaults__["timeout"] < 5.0, "the name has changed"
        ask.__kwdefaults__["timeout"] = 5.0


_patience()
del _patience
import os, sys
sys.rankbook_tests_original = dict(os.environ), os.getcwd(), list(sys.path)
del os, sys
"""
"""Code that the tests' kernels run first. On a busy machine, a rank may take longer than a user would wait.

A person sees what one rank prints a tenth of a second later by itself, no completions that take as long, and a rank as
unresponsive that takes ten times that to say where it is.
"""


@pytest.fixture(scope="session", autouse=True)
def patience() -> None:
    """Give the ranks of clusters in the tests' own process as much time as those of kernels."""
    _wait_for_answers()


RESTORE = """import os, sys
os.environ.clear()
os.environ.update(sys.rankbook_tests_original[0])
os.chdir(sys.rankbook_tests_original[1])
sys.path[:] = sys.rankbook_tests_original[2]"""
"""Gives a kernel that is shared the environment, working folder and path that it began with."""


def wait_until(condition: Callable[[], bool], *, timeout: float, what: str) -> float:
    """Poll until `condition()` is true; return the seconds it took. Fails the test after `timeout` seconds.

    Those in which the machine stood still and nobody could do anything do not count.
    """
    start = before = time.monotonic()
    waited = 0.0
    while not condition():
        if waited > timeout:
            pytest.fail(f"not within {timeout} s: {what}")
        _pause(0.01)
        now = time.monotonic()
        waited += min(now - before, _ONE_LOOK)
        before = now
    return time.monotonic() - start


def stop_process(pid: int) -> None:
    """Stop a process with SIGSTOP and wait until it stands still.

    Until its main thread had a turn to take the signal, the other threads still run: on a busy machine long enough to
    answer a question.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, timeout=20, what="the process stops")


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def patient_ipython(folder: Path) -> Path:
    """Make `folder` IPython's own, where kernels and terminals find `_PATIENCE`."""
    startup = folder / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "patience.py").write_text(_PATIENCE)
    return folder


@functools.cache
def ipython_folder() -> str:
    """Return the IPython folder of all kernels of a test run."""
    folder = tempfile.mkdtemp(prefix="rb-ipython-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(patient_ipython(Path(folder)))


@dataclass(frozen=True)
class Gate:
    """A file that a cell waits for: `{gate.wait}` is a statement of its code, `gate.open()` lets it go on."""

    path: Path

    @property
    def wait(self) -> str:
        """Return one line of code that waits, and can be interrupted."""
        exists = f"__import__('os').path.exists({str(self.path)!r})"
        return f"while not {exists}: __import__('select').select([], [], [], 0.01)"

    @property
    def is_open(self) -> bool:
        return self.path.exists()

    def open(self) -> None:
        self.path.touch()


@dataclass
class Outcome:
    """Outcome of a cell, as seen by the front end."""

    status: str = ""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    cleared: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    payload: list[dict[str, Any]] = field(default_factory=list)
    count: int = 0

    @property
    def stdout(self) -> str:
        return self._stream("stdout")

    @property
    def stderr(self) -> str:
        return self._stream("stderr")

    @property
    def text(self) -> str:
        """Streams and text/plain of displays, in order; a display that was updated counts with its last state."""
        return "".join(
            o["text"] if o["type"] == "stream" else str(o["data"].get("text/plain", "")) + "\n" for o in self.outputs
        )

    @property
    def displays(self) -> list[dict[str, Any]]:
        return [output["data"] for output in self.outputs if output["type"] == "display"]

    def _stream(self, name: str) -> str:
        return "".join(o["text"] for o in self.outputs if o["type"] == "stream" and o["name"] == name)


class Notebook:
    """A kernel of its own, and the cells run in it.

    `patient`: it waits for long for a rank that is late with what the others print too, or with an answer.
    """

    def __init__(
        self,
        *,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        kernel_name: str = "python3",
        patient: bool = True,
    ) -> None:
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, MARK: self.mark, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
        if patient:
            environment.setdefault("IPYTHONDIR", ipython_folder())
        # Sockets in a folder of its own. jupyter_client would choose free TCP ports, which another process may take
        # before the kernel opens them.
        self._folder = tempfile.mkdtemp(prefix="rb-", dir="/tmp")  # others may be too long for a socket
        self.manager = KernelManager(kernel_name=kernel_name, transport="ipc", ip=f"{self._folder}/socket")
        self.manager.start_kernel(env=environment, cwd=str(cwd or tempfile.gettempdir()))
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=60)
        except BaseException:
            self.close()
            raise
        self.late: list[dict[str, Any]] = []
        self._may_abort = False

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)  # type: ignore[union-attr]

    def send(self, code: str) -> str:
        """Send a cell; its message id for `finish`."""
        if self._may_abort:  # ipykernel 6 drops cells until its loop has turned once more, in stock notebooks too
            self._reply(self.client.kernel_info(), 60)
            self._may_abort = False
        return str(self.client.execute(code, allow_stdin=True))

    def wait_for_arrival(self) -> None:
        """Wait until the cells that were sent have reached the kernel, which may be busy with one of them.

        They went before a request on the control channel that has been answered. After a failure, ipykernel 6 drops
        only the cells that are there by then.
        """
        self.ask_control("kernel_info_request", {}, timeout=60)

    def ask_control(self, kind: str, content: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """Send a request on the control channel and return the content of the reply."""
        request = self.client.session.msg(kind, content)
        self.client.control_channel.send(request)
        deadline = time.monotonic() + timeout
        while True:
            reply = self.client.get_control_msg(timeout=max(0.0, deadline - time.monotonic()))
            if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
                return dict(reply["content"])

    def run(self, code: str, *, timeout: float = 60, answers: Answers | None = None) -> Outcome:
        """Run a cell and wait for its end. `answers` are typed at its prompts, or say what to type at which."""
        return self.finish(self.send(code), timeout=timeout, answers=answers)

    def ok(self, code: str, *, timeout: float = 60) -> Outcome:
        """Run a cell that must succeed."""
        outcome = self.run(code, timeout=timeout)
        assert outcome.status == "ok", outcome.traceback or outcome.text
        return outcome

    def finish(
        self,
        message: str,
        *,
        timeout: float = 60,
        answers: Answers | None = None,
        seen: Callable[[Outcome], None] | None = None,
    ) -> Outcome:
        """Wait for a cell that was sent. `seen` is called after every output."""
        outcome, start = Outcome(), time.monotonic()
        prompts: list[str] = []
        waiting = answers if callable(answers) else list(answers or [])
        idle = False
        while not idle:
            remaining = timeout - (time.monotonic() - start)
            if remaining <= 0:
                stacks = stacks_of(self.processes())
                pytest.fail(f"the cell did not end within {timeout} s; so far: {outcome.text[-2000:]}\n{stacks}")
            if answers is not None:
                with contextlib.suppress(queue.Empty):
                    request = self.client.get_stdin_msg(timeout=0.02)
                    if request["parent_header"].get("msg_id") == message:
                        prompt = request["content"]["prompt"]
                        prompts.append(prompt)
                        self.client.input(waiting(prompt) if callable(waiting) else waiting.pop(0))
            try:
                received = self.client.get_iopub_msg(timeout=min(remaining, 0.05 if answers is not None else 1.0))
            except queue.Empty:
                continue
            if received["parent_header"].get("msg_id") != message:
                self.late.append(received)
                continue
            idle = self._note(received, outcome)
            if seen is not None:
                seen(outcome)
        self.take_reply(message, outcome, timeout=timeout)
        outcome.seconds = time.monotonic() - start
        if prompts:
            outcome.outputs.append({"type": "prompts", "data": {}, "prompts": prompts})
        return outcome

    def follow(self, message: str, outcome: Outcome, until: Callable[[Outcome], bool], *, timeout: float = 30) -> None:
        """Continue to read messages of a cell that has ended, such as a background cell's output, into its outcome."""
        late, self.late = self.late, []
        for received in late:
            self._sort(received, message, outcome)
        deadline = time.monotonic() + timeout
        while not until(outcome):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                pytest.fail(f"not within {timeout} s after the cell; so far: {outcome.text[-2000:]}")
            with contextlib.suppress(queue.Empty):
                self._sort(self.client.get_iopub_msg(timeout=remaining), message, outcome)

    def take_reply(self, message: str, outcome: Outcome, *, timeout: float) -> None:
        """Wait for what the kernel says of a cell whose outputs were read."""
        reply = self._reply(message, timeout)
        outcome.status = reply["status"]
        self._may_abort = outcome.status != "ok" and ipykernel.version_info[0] < 7
        outcome.ename, outcome.evalue = reply.get("ename", ""), reply.get("evalue", "")
        outcome.payload, outcome.count = reply.get("payload", []), reply.get("execution_count", 0)

    def _sort(self, received: dict[str, Any], message: str, outcome: Outcome) -> None:
        if received["parent_header"].get("msg_id") == message:
            self._note(received, outcome)
        else:
            self.late.append(received)

    def _reply(self, message: str, timeout: float) -> dict[str, Any]:
        while True:
            reply = self.client.get_shell_msg(timeout=timeout)
            if reply["parent_header"].get("msg_id") == message:
                content: dict[str, Any] = reply["content"]
                return content

    @staticmethod
    def _note(received: dict[str, Any], outcome: Outcome) -> bool:
        kind, content = received["msg_type"], received["content"]
        outcome.messages.append(received)
        if kind == "status":
            return bool(content["execution_state"] == "idle")
        if kind == "stream":
            outcome.outputs.append({"type": "stream", "name": content["name"], "text": content["text"]})
        elif kind in ("display_data", "execute_result"):
            display_id = content.get("transient", {}).get("display_id")
            outcome.outputs.append(
                {"type": "display", "data": content["data"], "metadata": content["metadata"], "id": display_id}
            )
        elif kind == "update_display_data":
            for output in outcome.outputs:
                if output.get("id") == content["transient"]["display_id"]:
                    output["data"] = content["data"]
        elif kind == "clear_output":
            outcome.cleared += 1
            outcome.outputs.clear()
        elif kind == "error":
            outcome.traceback = "\n".join(content["traceback"])
        return False

    def interrupt(self) -> None:
        """Press ■."""
        self.manager.interrupt_kernel()

    def processes(self) -> dict[int, str]:
        """Return the processes that this kernel started, directly or not, with their command lines."""
        return marked_processes(self.mark)

    def close(self) -> None:
        """Shut the kernel down."""
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=False)
        self.client.stop_channels()
        self.manager.cleanup_resources()
        shutil.rmtree(self._folder, ignore_errors=True)  # a test may have closed it


def shows_frame(text: str, cell: int, line: int, call: str = "") -> bool:
    """Return whether a traceback without colours has a frame in this line of the cell, of `call` if given.

    IPython 7 writes the line only in front of its source, behind an arrow.
    """
    if IPYTHON_7:
        frames = re.findall(r"^Cell In\[(\d+)\] in (.+)\n(?: .*\n)*?-+> (\d+) ", text, re.MULTILINE)
        return any((int(at), int(arrow)) == (cell, line) and (not call or call == name) for at, name, arrow in frames)
    return f"Cell In[{cell}], line {line}" + (f", in {call}" if call else "") in text


def marked_processes(mark: str) -> dict[int, str]:
    """The living processes whose environment carries the mark."""
    command_lines = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                command_lines[process.pid] = " ".join(process.cmdline())
    return command_lines


def stacks_of(processes: dict[int, str]) -> str:
    """Return where every thread of these processes is, the latest ones first: the ranks come before the kernel."""
    printed = []
    for pid, command in sorted(processes.items(), reverse=True):
        commands = [["py-spy", "dump", "--pid", str(pid)]]
        if shutil.which("gdb"):  # it knows the threads of C++ too
            commands.append(["gdb", "-p", str(pid), "-batch", "-nx", "-ex", "thread apply all backtrace 14"])
        printed.append(f"--- {pid}: {command[:100]}")
        for look in commands:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                dump = subprocess.run(look, capture_output=True, text=True, timeout=60, check=False)
                printed.append(dump.stdout + (dump.stderr if dump.returncode else ""))
    return "\n".join(printed)


def cluster_folders(pid: int) -> list[Path]:
    """Return the runtime folders of the clusters of the process `pid`, wherever they may lie."""
    places = {runtime_folder(), Path(tempfile.gettempdir()), Path("/dev/shm"), Path("/tmp")}
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        places.add(Path(runtime))
    return sorted(folder for folder_root in places for folder in folder_root.glob(f"rankbook-*-{pid}-*"))


def leftovers() -> set[str]:
    """Return the cluster folders in this worker's runtime folder, except those of other living kernels."""
    matches = {path: re.match(r"rankbook-\d+-([0-9]{1,7})-", path.name) for path in runtime_folder().glob("rankbook-*")}
    pids = {path: int(match[1]) for path, match in matches.items() if match}
    return {str(path) for path, pid in pids.items() if pid == os.getpid() or not psutil.pid_exists(pid)}


def check_nothing_left(mark: str, before: set[str], *, timeout: float = 10.0) -> None:
    """Fail unless, within `timeout` seconds, no process and no folder of the kernel is left."""
    wait_until(lambda: not marked_processes(mark), timeout=timeout, what=f"processes gone: {marked_processes(mark)}")
    wait_until(lambda: leftovers() <= before, timeout=timeout, what=f"folders gone: {leftovers() - before}")


@contextlib.contextmanager
def running_kernel(
    *, ranks: int | None = None, load: str = "rankbook", timeout: float = 10.0, **options: Any
) -> Iterator[Notebook]:
    """Run a kernel with the extension `load` and, if given, that many ranks. Nothing of it may be left afterwards.

    `options` are those of `Notebook`; `timeout` is for the end of its processes, in seconds.
    """
    before = leftovers()
    notebook = Notebook(**options)
    try:
        if load:
            notebook.ok(f"%load_ext {load}")
        if ranks is not None:
            notebook.ok(f"%distributed start -n {ranks}")
        yield notebook
    finally:
        notebook.close()
    check_nothing_left(notebook.mark, before, timeout=timeout)


Kernel = Callable[..., Notebook]


@pytest.fixture
def no_safe_globals() -> Iterator[None]:
    """Take back what a library of another test on this worker, such as accelerate, told torch to be safe."""
    import torch

    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


@pytest.fixture
def fresh_notebook() -> Iterator[Notebook]:
    """Return a kernel of the test's own, with the extension loaded and no ranks yet."""
    with running_kernel() as notebook:
        yield notebook


class SharedKernel:
    """A kernel that the modules of a worker use one after the other: one process, a clean notebook for each module."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._notebook: Notebook | None = None

    def take(self, ranks: int = 2) -> Notebook:
        """Return the kernel with an empty namespace and fresh ranks; another kernel where it does not answer."""
        if self._notebook is not None:
            try:
                self._clean(self._notebook)
            except (AssertionError, pytest.fail.Exception, RuntimeError, queue.Empty):  # a test has broken it
                self.close()
        if self._notebook is None:
            # Imported once: the ranks of most modules train something.
            self._notebook = self._stack.enter_context(running_kernel(env={"RANKBOOK_PRELOAD": "start"}))
        self._notebook.ok(f"%distributed start -n {ranks}")
        return self._notebook

    def give_back(self) -> None:
        """Stop the ranks. Only the kernel and its forkserver may be left."""
        notebook = self._notebook
        assert notebook is not None
        notebook.run("%distributed stop", timeout=60)
        wait_until(lambda: len(notebook.processes()) <= 2, timeout=10, what=f"ranks gone: {notebook.processes()}")
        wait_until(lambda: not cluster_folders(notebook.pid), timeout=10, what="the cluster's folders removed")

    def close(self) -> None:
        """End the kernel."""
        self._notebook = None
        self._stack.close()

    @staticmethod
    def _clean(notebook: Notebook) -> None:
        notebook.late.clear()
        for get_message in (notebook.client.get_iopub_msg, notebook.client.get_control_msg):
            with contextlib.suppress(queue.Empty):
                while True:
                    get_message(timeout=0)
        # The forkserver is kept: its imports are most of the time that a start takes.
        notebook.ok("import sys\nfrom rankbook.launch import local\nsys.rankbook_forkserver = local._prestarted")
        forget = "get_ipython().magics_manager.registry.pop('DistributedMagics', None)"
        notebook.ok("import rankbook\nlocal._prestarted = None\nrankbook.stop()")
        notebook.ok(f"%unload_ext rankbook\n{forget}\n{RESTORE}")
        notebook.ok("from rankbook.launch import local\nlocal._prestarted = sys.rankbook_forkserver\n%reset -f")
        notebook.ok("%load_ext rankbook")


@pytest.fixture(scope="session")
def shared_kernel() -> Iterator[SharedKernel]:
    """Return the kernel that the modules of this worker share."""
    shared = SharedKernel()
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def kernel(shared_kernel: SharedKernel) -> Iterator[Kernel]:
    """Return a function that gives the module a kernel: `kernel(ranks=3)` the shared one, with fresh ranks.

    With `separate=True`, other options, or without ranks, it is a kernel of the module's own: see `running_kernel`.
    """
    with contextlib.ExitStack() as stack:

        def make(*, ranks: int | None = None, separate: bool = False, **options: Any) -> Notebook:
            if separate or options or ranks is None:
                return stack.enter_context(running_kernel(ranks=ranks, **options))
            notebook = shared_kernel.take(ranks)
            stack.callback(shared_kernel.give_back)
            return notebook

        yield make


@pytest.fixture(scope="module")
def module_notebook(shared_kernel: SharedKernel) -> Iterator[Notebook]:
    """Return a clean notebook with two fresh ranks, shared by the module's tests."""
    yield shared_kernel.take()
    shared_kernel.give_back()


@pytest.fixture
def notebook(module_notebook: Notebook) -> Iterator[Notebook]:
    """Return the module's kernel; afterwards both ranks must be idle and answer."""
    yield module_notebook
    outcome = module_notebook.run("%%distributed\nprint('still here')", timeout=20)
    assert outcome.status == "ok", f"the test left the ranks unusable: {outcome.traceback or outcome.text}"
    reported = set(outcome.stdout.splitlines())  # on a busy machine one rank may be too late for a common line
    assert "[0-1] still here" in reported or {"[0] still here", "[1] still here"} <= reported
