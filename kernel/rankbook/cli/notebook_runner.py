"""Execute a notebook in a kernel of this interpreter, without a browser: `rankbook run`.

nbclient maintains the executed document: outputs, displays that are updated later, and the state of widgets. It reads
the kernel's IOPub channel only while a cell runs, and drops messages of any other cell. A background cell publishes
output after it has ended, so here one task reads the channel for as long as the kernel lives, and the parent header of
every message identifies its cell.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import errno
import itertools
import json
import logging
import os
import queue
import re
import shutil
import signal
import tempfile
import warnings
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpec, KernelSpecManager, NoSuchKernel
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionComplete
from nbformat import NotebookNode
from nbformat.v4 import new_output
from nbformat.warnings import DuplicateCellId, MissingIDFieldWarning
from traitlets.log import get_logger

from rankbook.cli.console import Console, last_state
from rankbook.errors import InvalidArgument
from rankbook.formatting import signal_name
from rankbook.jupyter.spec import UNREADABLE, spec_for

STARTUP_TIMEOUT = 120.0  # seconds; a cold disk can take long over a first import
INTERRUPT_GRACE = 5.0  # grace period in seconds for a cell that was interrupted at its time limit
IDLE_TIMEOUT = (
    10.0  # seconds without a message, after a cell's reply, after which the rest of its output counts as lost
)
_QUIET_SECONDS = 0.1  # seconds without a message after which a dead kernel's output is complete
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOG_TAIL, _LOG_LINES = 16_384, 30  # bytes kept and lines shown of a dead kernel's own stdout and stderr
# Evaluated in the kernel, where Rankbook may not be imported. The value is "", or how ranks have exited that have not
# saved everything.
_STOP_RANKS = (
    "getattr(__import__('sys').modules.get('rankbook.coordinator.cluster_processes'), 'stop_all_clusters', str)()"
)
_CELL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # of nbformat's schema
_SOCKET_FOLDER_MAX = 90  # bytes; the path of a unix socket is limited to 104 on macOS and 108 on Linux


class RunError(Exception):
    """The run ended before its last cell; `code` is the exit code of the command."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(eq=False)
# One object per cell, and not only for the current one: messages of a background cell arrive while later cells run.
# `clear_before_next_output` is nbclient's flag for `clear_output(wait=True)`.
class _CellRun:
    """A cell that was sent to the kernel."""

    cell: NotebookNode
    index: int
    number: int
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    started: bool = False
    error_shown: bool = False
    clear_before_next_output: bool = False
    interrupted: bool = False

    @property
    def may_fail(self) -> bool:
        """Return True for a cell with the tag "raises-exception", as in nbclient and nbconvert."""
        return "raises-exception" in self.cell.metadata.get("tags", [])


# A notebook names a kernel that may be missing here, or that belongs to another environment. What a user expects of
# `rankbook run` is the interpreter that runs it.
class _OneKernelSpec(KernelSpecManager):
    """A kernel spec manager that returns one spec for every name, whatever the user has installed."""

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__()
        self._spec = spec

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:  # noqa: ARG002
        return self._spec


class NotebookRunner(NotebookClient):
    """Execute `notebook` with `folder` as the working directory, and print its output to `console`.

    `ranks` is the default number of ranks for starts that specify none, `timeout` the time limit of a cell in seconds,
    `kernel` the name of an installed kernel to use instead of this interpreter.
    """

    # nbclient's attributes, with the types that this class makes: `km` manages the kernel's process, `kc` talks to it.
    km: AsyncKernelManager
    kc: AsyncKernelClient

    def __init__(
        self,
        notebook: NotebookNode,
        console: Console,
        *,
        folder: Path,
        ranks: int | None = None,
        timeout: float | None = None,
        kernel: str | None = None,
    ) -> None:
        super().__init__(
            notebook,
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
            extra_arguments=["--HistoryManager.hist_file=:memory:"],  # concurrent runs would lock the user's file
        )
        self._console, self._ranks, self._seconds_per_cell = console, ranks, timeout
        self._specs = _kernel_specs(notebook, kernel, ranks)
        self._kernel = kernel
        self._runs: dict[str, _CellRun] = {}  # by the id of the request
        self._current: _CellRun | None = None
        self._live_views: set[str] = set()  # display ids of live views, whose updates are not printed
        # By display id: the cell that has started a background cell, and the state of its handle.
        self._handles: dict[str, tuple[_CellRun, str]] = {}
        # Set by a signal. `_wait_first` waits for it beside everything else, so a signal ends the run at any point.
        self._stopped: asyncio.Future[RunError]
        self._all_ran = False  # whether the last cell has ended, without an error
        self._ending = False
        # Counts published messages, by which `_wait_idle` tells a slow kernel from lost messages.
        self._published = 0
        self._log = b""
        self._signalling: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Execute the cells, up to the first that fails. The kernel has ended when this returns or raises.

        Raises `RunError` when a cell failed, the kernel died or a signal stopped the run.
        """
        self._stopped = asyncio.get_running_loop().create_future()
        with tempfile.TemporaryDirectory(prefix="rankbook-run-") as folder, self._signal_handlers():
            # The connection file and the sockets are in the folder, which is removed after the kernel has ended.
            self.km = self._make_manager(folder)
            try:
                await self._wait_first(self._start_kernel())
                # Three tasks, and the first one to end decides:
                #
                #     _execute_cells    all cells have run, or one has failed (RunError)
                #     _read_published   never ends, unless it raises
                #     _watch_kernel     the kernel has died (RunError)
                await self._wait_first(self._execute_cells(), self._read_published(), self._watch_kernel())
            finally:
                self._ending = True
                await self._end_kernel()
                self.set_widgets_metadata()

    async def _wait_first(self, *coroutines: Coroutine[Any, Any, None]) -> None:
        """Wait until one of `coroutines` ends or a signal stops the run, and cancel the others."""
        tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
        ends: list[asyncio.Future[Any]] = [*tasks, self._stopped]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.done():
                raise self._stopped.result()
            # Raises the task's exception, if it has one.
            next(task for task in tasks if task.done()).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # The kernel -----------------------------------------------------------------------------------------------------

    def _make_manager(self, folder: str) -> AsyncKernelManager:
        manager = AsyncKernelManager(
            kernel_name=self._kernel or NATIVE_KERNEL_NAME,
            kernel_spec_manager=self._specs,
            connection_file=f"{folder}/kernel.json",
        )
        if len(os.fsencode(folder)) <= _SOCKET_FOLDER_MAX and self._kernel is None:
            # Unix sockets in a private folder: no other user can connect, and no TCP port is used. A kernel that the
            # user has named may not know them.
            manager.transport, manager.ip = "ipc", f"{folder}/socket"
        return manager

    async def _start_kernel(self) -> None:
        # The kernel writes its own stdout and stderr to this pipe. `log` is read by the event loop, so the kernel never
        # blocks on a full pipe; it is closed at the end of the file, when no process has the other end any more.
        log, log_end = os.pipe()
        try:
            os.set_blocking(log, False)
            asyncio.get_running_loop().add_reader(log, self._read_log, log)
            env = _kernel_environment(self._ranks)
            with _quiet_jupyter():
                await self.async_start_new_kernel(env=env, stdout=log_end, stderr=log_end)
        except OSError as error:  # for example, the environment of the kernel was removed
            raise RunError(1, f"the kernel did not start: {error.filename}: {error.strerror}") from error
        finally:
            os.close(log_end)
        self.kc = self.km.client()
        self.kc.context.rcvhwm = 0  # no limit on waiting messages: ZeroMQ drops those above its default
        self.kc.start_channels(hb=False, stdin=False)
        try:
            await self.kc.wait_for_ready(timeout=STARTUP_TIMEOUT)
        except RuntimeError as error:  # the kernel died, or did not answer in time
            raise RunError(1, f"the kernel did not start: {error}{self._log_tail()}") from error

    def _read_log(self, log: int) -> None:
        """Keep the tail of the kernel process's own stdout and stderr.

        Nearly all of it repeats published messages, but the last lines of a dying process appear nowhere else.
        """
        data = os.read(log, 65_536)
        self._log = (self._log + data)[-_LOG_TAIL:]
        if not data:
            asyncio.get_running_loop().remove_reader(log)
            os.close(log)

    def _log_tail(self) -> str:
        lines = self._log.decode(errors="replace").splitlines()[-_LOG_LINES:]
        return "; its last output:\n" + "\n".join(lines) if lines else ""

    async def _watch_kernel(self) -> None:
        """Wait for the kernel's death, and raise `RunError` once its last output is shown."""
        provisioner = self.km.provisioner
        assert provisioner is not None
        # The provisioner is the part of jupyter_client that knows the process. Its `wait` returns the exit code, or the
        # negative number of the signal.
        code = await provisioner.wait()
        await self._read_published(until_quiet=True)
        if self._all_ran and code == 0:  # the last cell has called `exit()`
            return
        how = f"was killed by {signal_name(-code)}" if code and code < 0 else f"exited with code {code}"
        where = f" while running cell [{self._current.number}]" if self._current else ""
        raise RunError(1, f"the kernel {how}{where}{self._log_tail()}")

    async def _end_kernel(self) -> None:
        if await self.km.is_alive():
            await self.km.shutdown_kernel()
        else:
            await self.km.cleanup_resources()
        if self.kc is not None:  # the start succeeded as far as creating a client
            await self._read_published(until_quiet=True)
            self.kc.stop_channels()
        self._console.finish()

    # Signals --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        # A signal that is ignored at the start stays ignored: SIGHUP under nohup, SIGINT in the background of a script.
        handled = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in handled:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        """Interrupt the cell on the first SIGINT, and stop the run on any other signal.

        While the kernel ends, SIGINT kills it.
        """
        run = self._current
        if self._ending:
            # The kernel is asked to end, which takes it some seconds. Whoever presses Ctrl-C again has waited long
            # enough. Other signals may come twice by themselves: SIGHUP comes from the shell and from the system.
            if number == signal.SIGINT:
                self._send_to_kernel(signal.SIGKILL)
        elif self._stopped.done():
            return
        elif number == signal.SIGINT and run and not run.interrupted:
            run.interrupted = True
            self._console.note(f"interrupting cell [{run.number}]; interrupt again to stop the run")
            self._send_to_kernel(signal.SIGINT)
        else:
            where = f" in cell [{run.number}]" if run else ""
            self._stopped.set_result(RunError(128 + number, f"stopped by {number.name}{where}"))

    def _send_to_kernel(self, number: signal.Signals) -> None:
        """Send a signal in a task, without waiting for it."""
        # asyncio keeps only a weak reference to a task, so the set keeps it alive until it is done.
        task = asyncio.ensure_future(self._signal_kernel(number))
        self._signalling.add(task)
        task.add_done_callback(self._signalling.discard)

    async def _signal_kernel(self, number: signal.Signals) -> None:
        # The process may have ended between the signal and this task.
        if not self.km.has_kernel:
            return
        if number == signal.SIGINT:
            await self.km.interrupt_kernel()  # some kernels expect a message instead of a signal
        else:
            await self.km.signal_kernel(number)

    # Cells ----------------------------------------------------------------------------------------------------------

    async def _execute_cells(self) -> None:
        for index, cell in enumerate(self.nb.cells):
            skipped = self.skip_cells_with_tag in cell.metadata.get("tags", [])
            if cell.cell_type == "code" and cell.source.strip() and not skipped:
                await self._execute_cell(cell, index)
        self._all_ran = True
        failed = self._check_background_cells()
        if ended := await self._stop_ranks():
            failed.append(f"{ended}: a background save has failed")
        if failed:
            raise RunError(1, ", ".join(failed))

    def _check_background_cells(self) -> list[str]:
        """Print a note about background cells that still run. Return messages about those that have failed."""
        failed = []
        for run, state in self._handles.values():
            name = f"background cell [{run.number}]"
            if state == "active":
                self._console.note(f"{name} still runs and is stopped; .wait() of its handle waits for it")
            elif state == "failed" and not run.may_fail:
                failed.append(f"{name} failed")
        return failed

    async def _stop_ranks(self) -> str:
        """Stop the ranks with the time of `%distributed stop`, in which a background save can finish.

        A kernel that ends by itself gives them only 2 s. Returns how the ranks have exited that have not saved
        everything, or "".
        """
        if self._specs.get_kernel_spec(NATIVE_KERNEL_NAME).language.lower() != "python":
            return ""
        # An expression is evaluated in the kernel's own process, also where plain cells run on the ranks.
        request = self.kc.execute(
            "", silent=True, store_history=False, allow_stdin=False, user_expressions={"ended": _STOP_RANKS}
        )
        reply = await self._wait_reply(request)
        value = reply.get("user_expressions", {}).get("ended", {}).get("data", {}).get("text/plain", "''")
        return str(ast.literal_eval(value))

    async def _execute_cell(self, cell: NotebookNode, index: int) -> None:
        run = self._current = _CellRun(cell, index, number=len(self._runs) + 1)
        # `stop_on_error` makes the kernel discard requests that it has queued, which there are none of here.
        request = self.kc.execute(cell.source, stop_on_error=not run.may_fail, allow_stdin=False)
        self._runs[request] = run
        try:
            async with asyncio.timeout(self._seconds_per_cell):
                reply = await self._wait_reply(request)
        except TimeoutError:
            await self._interrupt_late(request, run)
            message = f"cell [{run.number}] did not finish within {self._seconds_per_cell:g} s"
            raise RunError(1, message) from None
        # The reply comes on one channel and the output on another. Only the idle status says that the output is
        # complete.
        await self._wait_idle(run)
        self._console.finish(run.number)
        self._current = None
        if reply["status"] == "ok" or run.may_fail:
            return
        if not run.error_shown:
            self._console.display(run.number, "\n".join(reply.get("traceback", [])), error=True)
        error = f"{reply.get('ename', reply['status'])}: {reply.get('evalue', '')}".removesuffix(": ").splitlines()[0]
        raise RunError(128 + signal.SIGINT if run.interrupted else 1, f"cell [{run.number}] failed: {error}")

    async def _wait_reply(self, request: str) -> dict[str, Any]:
        while True:
            # Replies to other requests are possible, for example to an interrupted one.
            message = await self.kc.get_shell_msg()
            if message["parent_header"].get("msg_id") == request:
                content: dict[str, Any] = message["content"]
                return content

    async def _wait_idle(self, run: _CellRun) -> None:
        """Wait for the idle status of a cell whose reply has arrived.

        Give up if no message arrives for `IDLE_TIMEOUT` seconds: the status must have been lost.
        """
        while not run.idle.is_set():
            published = self._published
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(run.idle.wait(), IDLE_TIMEOUT)
            if not run.idle.is_set() and self._published == published:
                self._console.note(f"the end of the output of cell [{run.number}] was lost in transit from the kernel")
                return

    async def _interrupt_late(self, request: str, run: _CellRun) -> None:
        """Interrupt a cell at its time limit, so that its traceback shows the line that it was executing."""
        await self.km.interrupt_kernel()
        try:
            async with asyncio.timeout(INTERRUPT_GRACE):
                await self._wait_reply(request)
                await run.idle.wait()
        except TimeoutError:
            self._console.note(f"cell [{run.number}] did not respond to the interrupt")

    # Output ---------------------------------------------------------------------------------------------------------

    async def _read_published(self, *, until_quiet: bool = False) -> None:
        """Print and store the messages that the kernel publishes.

        `until_quiet`: return after `_QUIET_SECONDS` seconds without a message; otherwise run until cancelled.
        """
        while True:
            try:
                message = await self.kc.get_iopub_msg(timeout=_QUIET_SECONDS if until_quiet else self._console.due())
            except queue.Empty:
                if until_quiet:
                    return
            else:
                self._published += 1
                run = self._runs.get(message["parent_header"].get("msg_id", ""), self._current)
                if run is not None:
                    self._print(run, message["msg_type"], message["content"])
                    self._store(run, message)
            self._console.tick()
            await asyncio.sleep(0)  # much output keeps the socket readable; let signal handlers and the reply run too

    def _print(self, run: _CellRun, kind: str, content: dict[str, Any]) -> None:
        console = self._console
        display_id = (content.get("transient") or {}).get("display_id")
        metadata = content.get("metadata") or {}
        live_view = metadata.get("rankbook_still")  # set by widgets/live_view.py
        if display_id is not None and (state := metadata.get("rankbook_handle")):  # set by magics/cell_handle.py
            self._handles[display_id] = (self._handles.get(display_id, (run, ""))[0], state)
        if kind == "execute_input" and not run.started:
            run.started, run.number = True, content["execution_count"]
            console.header(run.number, run.cell.source)
        elif kind == "stream":
            console.text(run.number, content["text"], error=content["name"] == "stderr")
        elif live_view:
            self._live_views.add(live_view)
        elif kind in ("display_data", "execute_result"):
            console.display(run.number, _plain(content["data"]), key=display_id)
        elif kind == "update_display_data" and display_id is not None and display_id not in self._live_views:
            console.update(display_id, _plain(content["data"]))
        elif kind == "clear_output":
            console.clear(run.number)
        elif kind == "error":
            run.error_shown = True
            console.display(run.number, "\n".join(content["traceback"]), error=True)

    def _store(self, run: _CellRun, message: dict[str, Any]) -> None:
        # nbclient has one flag, since it runs one cell at a time; with background cells every cell needs its own.
        self.clear_before_next_output = run.clear_before_next_output
        try:
            self.process_message(message, run.cell, run.index)
        except CellExecutionComplete:
            run.idle.set()
        run.clear_before_next_output = self.clear_before_next_output


def _kernel_specs(notebook: NotebookNode, kernel: str | None, ranks: int | None) -> KernelSpecManager:
    """Return a manager with the kernel's spec. Raises `InvalidArgument` when no kernel fits the notebook."""
    if kernel is None:
        spec = notebook.metadata.get("kernelspec", {})
        name = spec.get("name", "")
        if (spec.get("language") or "python").lower() != "python":
            raise InvalidArgument(
                f"the notebook is written in {spec['language']}, not Python; run it with `--kernel {name}`"
            )
        kernel_spec = spec_for(name) if name else None
        kernel_spec = kernel_spec or KernelSpec(resource_dir="", **get_kernel_dict())
    else:
        specs = KernelSpecManager()
        try:
            kernel_spec = specs.get_kernel_spec(kernel)
        except NoSuchKernel as error:
            installed = ", ".join(sorted(specs.find_kernel_specs())) or "none"
            raise InvalidArgument(f"unknown kernel {kernel!r}; installed kernels: {installed}") from error
        except UNREADABLE as error:
            raise InvalidArgument(f"the kernel spec of {kernel!r} cannot be read: {error}") from error
    if ranks is not None:
        kernel_spec.env.pop("RANKBOOK_RANKS", None)  # it would override `ranks`
    return _OneKernelSpec(kernel_spec)


@contextmanager
def _quiet_jupyter() -> Iterator[None]:
    """Drop the log of jupyter_client, which contains the traceback of every exception that it raises as well."""
    log: Any = get_logger()
    logger: logging.Logger = getattr(log, "logger", log)  # it may be a LoggerAdapter
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _kernel_environment(ranks: int | None) -> dict[str, str]:
    """Return the environment of the kernel's process, with the default number of ranks."""
    # A variable that the user has set wins over ours.
    env = {"RANKBOOK_STRIP": "off", **os.environ}  # status lines are useless in a log
    # Names the notebook of the front end that has started this command, by `!rankbook run`; this run is another one.
    env.pop("JPY_SESSION_NAME", None)
    if ranks is not None:
        env["RANKBOOK_RANKS"] = str(ranks)
    return env


def _plain(data: dict[str, Any]) -> str:
    """Return a display's text, or the names of its MIME types if it has none."""
    text = data.get("text/plain")
    return text if isinstance(text, str) else f"<{', '.join(sorted(data)) or 'nothing to show'}>"


# The file -----------------------------------------------------------------------------------------------------------


def read_notebook(path: Path) -> NotebookNode:
    """Read a notebook as version 4, without its old outputs. Raises `InvalidArgument`."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise InvalidArgument(f"{path} is not a notebook: {error}") from error
    if not (isinstance(content, dict) and "nbformat" in content and ("cells" in content or "worksheets" in content)):
        raise InvalidArgument(f"{path} is not a notebook: it has no cells")
    _repair(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MissingIDFieldWarning)  # nbformat repairs both, and the run needs no ids
            warnings.simplefilter("ignore", DuplicateCellId)
            # `reads` converts older formats; worksheets are those of version 3.
            notebook: NotebookNode = nbformat.reads(json.dumps(content), as_version=4)
            nbformat.validate(notebook)
    except (nbformat.ValidationError, nbformat.NBFormatError) as error:
        raise InvalidArgument(f"{path} is not a valid notebook: {str(error).splitlines()[0]}") from error
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def _repair(content: dict[str, Any]) -> None:
    """Correct what is invalid in a notebook of version 4 and does not matter to the run.

    Hand-written and converted notebooks have such parts, and Jupyter, nbconvert and papermill execute them.
    """
    cells = content.get("cells")
    if content["nbformat"] != 4 or not isinstance(cells, list):
        return
    if isinstance(minor := content.get("nbformat_minor", 5), int):
        content["nbformat_minor"] = max(minor, 5)  # earlier ones do not allow cell ids
    metadata = content["metadata"] = _as_dict(content.get("metadata"))
    # Not dropped for want of a name: a language other than Python is refused.
    if isinstance(spec := metadata.get("kernelspec"), dict):
        spec.update({key: "" for key in ("name", "display_name") if not isinstance(spec.get(key), str)})
    else:
        metadata.pop("kernelspec", None)
    if not isinstance(_as_dict(metadata.get("language_info")).get("name"), str):
        metadata.pop("language_info", None)
    for cell in cells:
        if not isinstance(cell, dict):
            continue
        cell["metadata"] = _as_dict(cell.get("metadata"))
        if not (isinstance(name := cell.get("id"), str) and _CELL_ID.fullmatch(name)):
            cell.pop("id", None)
        if cell.get("cell_type") == "code":
            cell["outputs"], cell["execution_count"] = [], None


def _as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def write_notebook(notebook: NotebookNode, path: Path) -> None:
    """Write a notebook, with adjacent stream outputs merged as a front end saves them.

    A file is replaced atomically, and keeps its permissions: a user may have closed it to others. A device, a pipe, the
    target of a link and a mounted file are written in place.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _merge_streams(cell.outputs)
    text = nbformat.writes(notebook) + "\n"
    if _is_written_in_place(path):
        path.write_text(text, encoding="utf-8")
        return
    # Written beside the target and renamed, so that an interrupted run leaves the old file or the new one, never a
    # half.
    partial = _partial_of(path)
    try:
        with partial.open("w", encoding="utf-8") as file:
            # Before it has a content. There may be no file yet, and not every file system has permissions.
            with contextlib.suppress(OSError):
                shutil.copymode(path, partial)
            file.write(text)
        partial.replace(path)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        # A file that is mounted from the same file system, which no other call tells.
        path.write_text(text, encoding="utf-8")
    finally:
        partial.unlink(missing_ok=True)


def _is_written_in_place(path: Path) -> bool:
    """Return True if a rename would replace something other than a file, or fail."""
    return path.is_symlink() or (path.exists() and not path.is_file()) or os.path.ismount(path)


def _partial_of(path: Path) -> Path:
    # The process id keeps concurrent runs apart.
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def check_output(path: Path) -> None:
    """Raise `InvalidArgument` if `write_notebook` cannot write to `path`. For use before the run, which may be long."""
    try:
        if path.is_dir():
            raise InvalidArgument(f"cannot write {path}: it is a folder; choose a file for --output")
        if _is_written_in_place(path):  # an attempt would change it
            # A link may lead to a file that does not exist yet.
            target = path if path.exists() else Path(os.path.realpath(path)).parent
            if not os.access(target, os.W_OK):
                raise InvalidArgument(f"cannot write {path}: it is not writable; choose another file for --output")
            return
        # Only an attempt finds out: permissions do not tell of a read-only or full file system.
        partial = _partial_of(path)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}; choose another file for --output") from error


def save_notebook(notebook: NotebookNode, path: Path, fallbacks: Sequence[Path]) -> str:
    """Write a notebook to `path` or, if that fails, into the first of the folders `fallbacks` that can be written to.

    Return "", or what went wrong and where the notebook is.
    """
    try:
        write_notebook(notebook, path)
    except OSError as error:
        trouble = f"cannot write {path}: {error.strerror}"
    else:
        return ""
    for folder in fallbacks:
        # The name is new: the folder may be that of the input, which is not changed.
        other = folder / f"{path.stem}-{os.getpid()}{path.suffix}"
        with contextlib.suppress(OSError):
            write_notebook(notebook, other)
            return f"{trouble}; wrote {other} instead"
    return f"{trouble}; no other folder can be written to, so the results are lost"


def _merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    merged: list[NotebookNode] = []
    for name, group in itertools.groupby(outputs, key=lambda output: output.get("name")):  # only a stream has a name
        if name is None:
            merged += group
        else:
            text = "".join(output.text for output in group)
            # A progress bar is stored as its last state, as JupyterLab shows it.
            text = "\n".join(last_state(line) for line in text.split("\n"))
            merged.append(new_output("stream", name=name, text=text))
    return merged
