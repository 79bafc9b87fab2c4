"""Runs a notebook's cells in a kernel of this very interpreter, without a browser.

Owns: the kernel process from start to end, the order of the cells, which cell each output belongs to, interrupts and
time limits, and the executed document. Refuses: torch, ranks, argument parsing and how output looks.

One task reads everything that the kernel publishes, for as long as it lives, and goes by each message's parent: output
of a background cell that arrives after the cell ended still lands in that cell.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpec, KernelSpecManager, NoSuchKernel
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionComplete
from nbformat import NotebookNode

from rankbook.cli.console import Console
from rankbook.errors import BadRequest
from rankbook.jupyter.spec import spec_for

STARTUP_TIMEOUT = 120.0  # seconds; a cold disk can take long over a first import
INTERRUPT_GRACE = 5.0  # seconds that a cell that ran out of time gets to end by the interrupt
LOST_AFTER = 10.0  # seconds without a message, after a cell's reply, that mean: its last messages do not come any more
_QUIET = 0.1  # seconds without a message that mean: the dead kernel has said everything
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOG_TAIL, _LOG_LINES = 16_384, 30  # bytes kept and lines shown of what a dead kernel wrote to its own stderr
_SOCKET_FOLDER_MAX = 90  # bytes; a unix socket's whole path may have 104 on macOS and 108 on Linux
_OUTPUTS = {"stream", "display_data", "update_display_data", "execute_result", "error", "clear_output"}
_STORED = {"status", "execute_input", *_OUTPUTS}


@dataclass(frozen=True)
class Outcome:
    """How the run ended: the exit code, and one sentence where it is not 0."""

    code: int
    message: str = ""


@dataclass(eq=False)
class _Run:
    """One cell that was sent to the kernel."""

    cell: NotebookNode
    index: int
    number: int
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    started: bool = False
    told_error: bool = False
    clear_before_next_output: bool = False
    interrupts: int = 0


class _ThisInterpreter(KernelSpecManager):
    """Knows one kernel of the running interpreter, whatever is installed for the user: Rankbook's own, or ipykernel."""

    def __init__(self, own: KernelSpec | None) -> None:
        super().__init__()
        self._spec = own or KernelSpec(resource_dir="", **get_kernel_dict())

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:  # noqa: ARG002  # there is one, whatever the name
        return self._spec


class NotebookRun:
    """Executes `notebook`, which lies in `folder`, and tells `console` what happens.

    `ranks` is how many ranks a start without a number makes, `timeout` the seconds that each cell may take, `kernel`
    the name of an installed kernel that replaces this interpreter's own.
    """

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
        self._notebook, self._console = notebook, console
        self._folder, self._ranks, self._timeout = folder, ranks, timeout
        self._specs = _kernel_specs(notebook, kernel, ranks)
        self._kernel = kernel or NATIVE_KERNEL_NAME
        self._manager: AsyncKernelManager
        self._client: AsyncKernelClient
        self._document = NotebookClient(notebook, record_timing=False)
        self._runs: dict[str, _Run] = {}
        self._stills: set[str] = set()
        self._current: _Run | None = None
        self._stopped: asyncio.Future[Outcome]
        self._ending = False
        self._published = 0
        self._log = b""
        self._signalling: set[asyncio.Task[None]] = set()

    async def execute(self) -> Outcome:
        """Runs every cell, up to the first that fails. The kernel is gone when this returns or raises."""
        self._stopped = asyncio.get_running_loop().create_future()
        with tempfile.TemporaryDirectory(prefix="rankbook-run-") as folder, self._handle_signals():
            self._manager = self._make_manager(folder)
            try:
                return await self._execute()
            finally:
                self._ending = True
                await self._end_kernel()

    async def _execute(self) -> Outcome:
        outcome = await self._wait_first(self._start_kernel())
        if outcome is not None:
            return outcome
        outcome = await self._wait_first(self._run_cells(), self._publications(), self._kernel_death())
        self._document.set_widgets_metadata()
        return outcome or Outcome(0)

    async def _wait_first(self, *work: Coroutine[Any, Any, Outcome | None]) -> Outcome | None:
        """What the first of `work` to end says, or the person who stopped the run. The others are cancelled."""
        tasks = [asyncio.ensure_future(one) for one in work]
        try:
            ends: list[asyncio.Future[Any]] = [*tasks, self._stopped]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.done():
                return self._stopped.result()
            return next(task for task in tasks if task.done()).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # The kernel -----------------------------------------------------------------------------------------------------

    def _make_manager(self, folder: str) -> AsyncKernelManager:
        manager = AsyncKernelManager(
            kernel_name=self._kernel, kernel_spec_manager=self._specs, connection_file=f"{folder}/kernel.json"
        )
        if len(os.fsencode(folder)) <= _SOCKET_FOLDER_MAX and isinstance(self._specs, _ThisInterpreter):
            # unix sockets in a folder of our own: no other user reaches them, and no port is taken
            manager.transport, manager.ip = "ipc", f"{folder}/socket"
        return manager

    async def _start_kernel(self) -> Outcome | None:
        env = {"RANKBOOK_STRIP": "off", **os.environ}  # a log is not read while a cell runs
        if self._ranks is not None:
            env["RANKBOOK_RANKS"] = str(self._ranks)
        history = ["--HistoryManager.hist_file=:memory:"]  # many runs at once would lock the user's history file
        log, log_end = os.pipe()
        try:
            os.set_blocking(log, False)
            asyncio.get_running_loop().add_reader(log, self._read_log, log)
            await self._manager.start_kernel(
                cwd=str(self._folder), env=env, stdout=log_end, stderr=log_end, extra_arguments=history
            )
        finally:
            os.close(log_end)
        client = self._client = self._document.kc = self._manager.client()
        client.context.rcvhwm = 0  # any number of messages may wait for us: ZeroMQ drops what is over its default
        client.start_channels(hb=False, stdin=False)
        try:
            await client.wait_for_ready(timeout=STARTUP_TIMEOUT)
        except RuntimeError as error:  # the one class jupyter_client has for both
            return Outcome(1, f"the kernel did not start: {error}{self._last_words()}")
        return None

    def _read_log(self, log: int) -> None:
        """Keeps the end of what the kernel process writes to its own stdout and stderr.

        Nearly all of it is an echo of what it publishes anyway; only what a dying process said is seen nowhere else.
        """
        piece = os.read(log, 65_536)
        self._log = (self._log + piece)[-_LOG_TAIL:]
        if not piece:
            asyncio.get_running_loop().remove_reader(log)
            os.close(log)

    def _last_words(self) -> str:
        lines = self._log.decode(errors="replace").splitlines()[-_LOG_LINES:]
        return "; its last words:\n" + "\n".join(lines) if lines else ""

    async def _kernel_death(self) -> Outcome:
        provisioner = self._manager.provisioner
        assert provisioner is not None
        code = await provisioner.wait()
        await self._publications(until_quiet=True)
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code and code < 0 else f"ended ({code})"
        where = f" while running cell [{self._current.number}]" if self._current else ""
        return Outcome(1, f"the kernel {how}{where}{self._last_words()}")

    async def _end_kernel(self) -> None:
        if await self._manager.is_alive():
            await self._manager.shutdown_kernel()
        else:
            await self._manager.cleanup_resources()
        if self._document.kc is not None:  # it got as far as having a client
            await self._publications(until_quiet=True)
            self._client.stop_channels()
        self._console.finish()

    # Signals --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _handle_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        run = self._current
        if self._ending:
            self._send_to_kernel(signal.SIGKILL)
        elif number == signal.SIGINT and run and not run.interrupts and not self._stopped.done():
            run.interrupts += 1
            self._console.note(f"interrupting cell [{run.number}]; once more stops the run")
            self._send_to_kernel(signal.SIGINT)
        elif not self._stopped.done():
            where = f" in cell [{run.number}]" if run else ""
            self._stopped.set_result(Outcome(128 + number, f"stopped by {number.name}{where}"))

    def _send_to_kernel(self, number: signal.Signals) -> None:
        """Signals the kernel from a place that cannot wait."""
        if self._manager.has_kernel:
            task = asyncio.ensure_future(self._signal_kernel(number))
            self._signalling.add(task)
            task.add_done_callback(self._signalling.discard)

    async def _signal_kernel(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            await self._manager.interrupt_kernel()  # which some kernels want as a message
        elif self._manager.has_kernel:
            await self._manager.signal_kernel(number)

    # Cells ----------------------------------------------------------------------------------------------------------

    async def _run_cells(self) -> Outcome:
        for index, cell in enumerate(self._notebook.cells):
            skipped = self._document.skip_cells_with_tag in cell.metadata.get("tags", [])
            if cell.cell_type == "code" and cell.source.strip() and not skipped:
                outcome = await self._run_cell(cell, index)
                if outcome.code:
                    return outcome
        return Outcome(0)

    async def _run_cell(self, cell: NotebookNode, index: int) -> Outcome:
        may_fail = "raises-exception" in cell.metadata.get("tags", [])
        request = self._client.execute(cell.source, stop_on_error=not may_fail, allow_stdin=False)
        run = self._runs[request] = self._current = _Run(cell, index, number=len(self._runs) + 1)
        try:
            async with asyncio.timeout(self._timeout):
                reply = await self._wait_reply(request)
        except TimeoutError:
            await self._interrupt_late(request, run)
            return Outcome(1, f"cell [{run.number}] did not end in {self._timeout:g} s")
        await self._wait_idle(run)
        self._console.finish(run.number)
        self._current = None
        if reply["status"] == "ok" or may_fail:
            return Outcome(0)
        if not run.told_error:
            self._console.display(run.number, "\n".join(reply.get("traceback", [])), error=True)
        error = f"{reply.get('ename', reply['status'])}: {reply.get('evalue', '')}".removesuffix(": ")
        error = error.splitlines()[0]
        return Outcome(128 + signal.SIGINT if run.interrupts else 1, f"cell [{run.number}] failed: {error}")

    async def _wait_reply(self, request: str) -> dict[str, Any]:
        while True:
            message = await self._client.get_shell_msg()
            if message["parent_header"].get("msg_id") == request:
                content: dict[str, Any] = message["content"]
                return content

    async def _wait_idle(self, run: _Run) -> None:
        """Wait for the last of what the kernel publishes of the cell, whose reply has come, or until it is lost."""
        while not run.idle.is_set():
            published = self._published
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(run.idle.wait(), LOST_AFTER)
            if not run.idle.is_set() and self._published == published:
                self._console.note(f"the end of what cell [{run.number}] printed was lost on its way from the kernel")
                return

    async def _interrupt_late(self, request: str, run: _Run) -> None:
        """Interrupts a cell that took too long, so that its traceback says where it was."""
        await self._manager.interrupt_kernel()
        try:
            async with asyncio.timeout(INTERRUPT_GRACE):
                await self._wait_reply(request)
                await run.idle.wait()
        except TimeoutError:
            self._console.note(f"cell [{run.number}] did not react to the interrupt")

    # Output ---------------------------------------------------------------------------------------------------------

    async def _publications(self, *, until_quiet: bool = False) -> None:
        """Shows and stores what the kernel publishes, for ever or until it has nothing more to say."""
        while True:
            try:
                message = await self._client.get_iopub_msg(timeout=_QUIET if until_quiet else self._console.due())
            except queue.Empty:
                if until_quiet:
                    return
            else:
                self._published += 1
                run = self._runs.get(message["parent_header"].get("msg_id", ""), self._current)
                if run is not None:
                    self._show(run, message["msg_type"], message["content"])
                    self._store(run, message)
            self._console.tick()
            await asyncio.sleep(0)  # a flood keeps the socket ready; signals and the reply need their turn as well

    def _show(self, run: _Run, kind: str, content: dict[str, Any]) -> None:
        console = self._console
        key = (content.get("transient") or {}).get("display_id")
        still = (content.get("metadata") or {}).get("rankbook_still")  # of a live view, as widgets/screen.py has it
        if kind == "execute_input" and not run.started:
            run.started, run.number = True, content["execution_count"]
            console.header(run.number, run.cell.source)
        elif kind == "stream":
            console.text(run.number, content["text"], error=content["name"] == "stderr")
        elif still:
            self._stills.add(still)
        elif kind in ("display_data", "execute_result"):
            console.display(run.number, _plain(content["data"]), key=key)
        elif kind == "update_display_data" and key is not None and key not in self._stills:
            console.update(key, _plain(content["data"]))
        elif kind == "clear_output":
            console.clear(run.number)
        elif kind == "error":
            run.told_error = True
            console.display(run.number, "\n".join(content["traceback"]), error=True)

    def _store(self, run: _Run, message: dict[str, Any]) -> None:
        kind: str = message["msg_type"]
        if kind not in _STORED and not kind.startswith("comm_"):
            return
        # nbclient keeps one such flag, since it knows one cell at a time; background cells need their own
        self._document.clear_before_next_output = run.clear_before_next_output
        try:
            self._document.process_message(message, run.cell, run.index)
        except CellExecutionComplete:
            run.idle.set()
        run.clear_before_next_output = self._document.clear_before_next_output


def _kernel_specs(notebook: NotebookNode, kernel: str | None, ranks: int | None) -> KernelSpecManager:
    """Where the kernel's command is found. Raises `BadRequest` where there is none for this notebook."""
    if kernel is None:
        spec = notebook.metadata.get("kernelspec", {})
        if spec.get("language", "python").lower() != "python":
            name = spec.get("name", "")
            raise BadRequest(f"the notebook is written for {spec['language']}, not Python; `--kernel {name}` runs it")
        own = spec_for(spec.get("name", ""))
        if own is not None and ranks is not None:
            own.env = {}  # it would have the last word
        return _ThisInterpreter(own)
    specs = KernelSpecManager()
    try:
        specs.get_kernel_spec(kernel)
    except NoSuchKernel as error:
        known = ", ".join(sorted(specs.find_kernel_specs())) or "none"
        raise BadRequest(f"there is no kernel named {kernel}; installed: {known}") from error
    return specs


def _plain(data: dict[str, Any]) -> str:
    """A display's text; where it has none, the names of what it has."""
    text = data.get("text/plain")
    return text if isinstance(text, str) else f"<{', '.join(sorted(data)) or 'nothing to show'}>"
