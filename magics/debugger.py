"""Debugger integration: let a front end's debugger, such as JupyterLab's, debug cells on the ranks.

Replaces the method of the kernel that answers the front end, connects the `DebugMultiplexer`, which decides how a
request is answered, to the cluster, and maps cells to the file names that the debugger knows them by. The multiplexer
runs on the event loop of the kernel's control thread; the main thread calls it through
`asyncio.run_coroutine_threadsafe`. Ranks get a debugger only while a front end is debugging.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankbook.coordinator import default_cluster
from rankbook.coordinator.cluster import Cluster
from rankbook.formatting import PACKAGE_FOLDERS
from rankbook.ipython_compat import cell_numbers
from rankbook.magics import auto_mode
from rankbook.magics.debug_multiplexer import DebugMultiplexer, Message

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_PACKAGE_PATTERNS = [f"{folder}**" for folder in PACKAGE_FOLDERS]
"""Files in which the notebook's own debugger must not stop: exceptions in them are not the user's."""
_MIN_LOOKUP_LENGTH = 200
"""Characters of a cell above which looking its file name up is faster than computing it."""
_START_SECONDS = 60.0
"""Timeout for the debuggers of all ranks to start."""


class _KernelDebugger:
    """The kernel's own debugger; see `debug_multiplexer.KernelDebugger`."""

    def __init__(self, kernel: Any) -> None:  # noqa: ANN401 - an ipykernel Kernel, whose types are loose
        self._kernel = kernel
        self._process = kernel.do_debug_request
        # ipykernel skips frames of these files. Without this, "raised exceptions" would stop in Rankbook's own code.
        if hasattr(kernel.debugger, "kernel_modules"):  # it makes its rules from these
            kernel.debugger.kernel_modules = [*kernel.debugger.kernel_modules, *_PACKAGE_PATTERNS]

    async def process(self, request: Message) -> Message:
        # debugpy takes its rules with the attach request.
        if request["command"] == "attach":
            rules = [{"path": folder, "include": False} for folder in _PACKAGE_PATTERNS]
            request = {**request, "arguments": {**(request.get("arguments") or {}), "rules": rules}}
        return dict(await self._process(request) or {})

    @property
    def paused(self) -> bool:
        return bool(self._kernel.debugger.stopped_threads)

    def accepts(self, name: str) -> bool:
        return bool(self._kernel.debugger.accept_variable(name))


class Debugging:
    """Replacement of `kernel`'s own `do_debug_request`; also the multiplexer's `RankGateway`."""

    def __init__(self, shell: InteractiveShell, kernel: Any) -> None:  # noqa: ANN401 - as above
        self._shell = shell
        self._kernel = kernel
        self._cluster: Cluster | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.multiplexer = DebugMultiplexer(_KernelDebugger(kernel), self)

    def start(self) -> None:
        """Replace the kernel's method.

        A front end that is already debugging the kernel, as after a restart, debugs the ranks too.
        """
        # Replaced in the instance. ipykernel looks the method up for every request.
        self._kernel.do_debug_request = self.do_debug_request
        debugger = self._kernel.debugger
        if getattr(debugger, "is_started", False):
            self._loop = self._kernel.control_thread.io_loop.asyncio_loop
            self.multiplexer.adopt_breakpoints(debugger.breakpoint_list)

    def stop(self) -> None:
        """Restore the kernel's method, and end the debuggers of the ranks, which keep running."""
        del self._kernel.do_debug_request  # uncovers the method of the class
        if self.multiplexer.is_active and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self.multiplexer.close(), self._loop).result(_START_SECONDS)
        if self._cluster is not None:
            self._cluster.debugs.listener = None

    async def do_debug_request(self, request: Message) -> Message:
        """Answer a request of the front end. Called by the kernel's control thread."""
        # The loop of the control thread, known from the first request on. The main thread submits coroutines to it.
        self._loop = asyncio.get_running_loop()
        self._connect_cluster()
        return await self.multiplexer.handle(request)

    def describe(self) -> str:
        """Describe whether a front end debugs the ranks, and which ones continue and step apply to."""
        multiplexer = self.multiplexer
        targets = (
            "the rank whose frame is selected in the call stack" if multiplexer.stopped.single else "all paused ranks"
        )
        state = (
            "a front end is debugging the ranks"
            if multiplexer.is_active
            else "no front end is debugging; its bug button starts the debugger"
        )
        return f"{state}; continue and step apply to {targets}"

    # Called by the main thread

    def prepare(self, ranks: Collection[int]) -> dict[int, str]:
        """Attach a debugger to these ranks, if a front end is debugging.

        Returns the ranks that failed with the reason.
        """
        if not self.multiplexer.is_active or self._loop is None:
            return {}

        async def attach() -> dict[int, str]:
            self._connect_cluster()
            return await self.multiplexer.attach(ranks)

        try:
            # The main thread waits here, before the cell is sent; otherwise the first breakpoints of the cell would be
            # missed.
            return asyncio.run_coroutine_threadsafe(attach(), self._loop).result(_START_SECONDS)
        except TimeoutError:
            return dict.fromkeys(ranks, f"it did not start within {_START_SECONDS:g} s")

    def file_of(self, source: str) -> str:
        """Return the name under which the front end's debugger knows the running cell.

        `source` is the cell as it is sent to the ranks; "" is returned if its lines differ from the cell's. The name is
        also sent while no front end is debugging, because a breakpoint may be set later in a function that this cell
        defines.
        """
        # IPython sets this for the time of a cell. It has the cell as the user wrote it.
        running = self._shell.displayhook.exec_result
        if running is None or running.info is None:
            return ""
        cell = str(running.info.raw_cell)
        # Breakpoints are set by line numbers of the cell. They fit only if the ranks get the same lines.
        written, sent = cell.rstrip().split("\n"), source.rstrip().split("\n")
        if len(written) != len(sent) or written[-1].strip() != sent[-1].strip():
            return ""
        return self._name_of(cell)

    def _name_of(self, cell: str) -> str:
        """Return the running cell's file name, as ipykernel computes it.

        Computing it takes 0.15 ms per kilobyte, and ipykernel did so just before this call: long cells are looked up.
        """
        if len(cell) > _MIN_LOOKUP_LENGTH:
            running, numbers = self._shell.displayhook.exec_result, cell_numbers(self._shell.compile)
            count = None if running is None else running.execution_count
            count = self._shell.execution_count if count is None else count  # the shell's count may be one ahead
            # ipykernel's compiler maps file names to execution counts.
            names = [str(name) for name, number in numbers.items() if number == count]
            if len(names) == 1:  # several if a silent request ran since the last cell
                return names[0]
        from ipykernel.compiler import get_file_name

        return str(get_file_name(cell))

    def move_breakpoints(self) -> None:
        """Move the breakpoints to where plain cells now run, after auto mode was turned on or off."""
        if self.multiplexer.is_active and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self.multiplexer.move_breakpoints(), self._loop).result(_START_SECONDS)

    # Called on the event loop: see `debug_multiplexer.RankGateway`

    @property
    def _running_cluster(self) -> Cluster | None:
        """Return the cluster, or None if it has stopped.

        The last messages of the ranks' debuggers arrive when the cluster is already stopped.
        """
        return None if self._cluster is None or self._cluster.stopped else self._cluster

    def ranks(self) -> tuple[int, ...]:
        """Return every rank in the cluster."""
        return () if self._running_cluster is None else self._running_cluster.select(None)

    def busy(self) -> tuple[int, ...]:
        """Return the ranks that are executing a cell."""
        cells = [] if self._running_cluster is None else self._running_cluster.cells()
        return tuple({rank for cell in cells if cell.started is not None for rank in cell.ranks})

    def send(self, rank: int, content: str) -> bool:
        """Send a message to a rank's debugger; return False if the rank or the cluster has exited."""
        return self._running_cluster is not None and self._running_cluster.debugs.send(rank, content)

    def publish(self, event: Message) -> None:
        """Publish an event as the kernel's own debugger does."""
        self._kernel._publish_debug_event(event)

    def record_pause(self, rank: int, path: str, line: int) -> None:
        """Record in the cluster's status where a rank is paused; see `RankGateway.note`."""
        cluster = self._running_cluster
        if cluster is None:
            return
        if not line:
            cluster.debugs.paused.pop(rank, None)
            return
        # Where IPython itself has no such table, `cell_numbers` has made it when the magics were installed.
        number = self._shell.compile._filename_map.get(path)
        # The status line of the running cell shows this text.
        cluster.debugs.paused[rank] = describe_pause("" if _is_cell(path) else Path(path).name, line, number)

    def is_for_ranks(self, path: str) -> bool:
        """Return True if the file is a cell that starts with `%%distributed` or that auto mode sends to the ranks."""
        # ipykernel writes a cell to its file when the front end sends `dumpCell`, and names the file in its reply.
        if not _is_cell(path) or not Path(path).is_file():
            return False
        text = Path(path).read_text(encoding="utf-8")
        return text.startswith("%%distributed") or (
            auto_mode.is_enabled(self._shell) and not auto_mode.runs_locally(text)
        )

    async def variables(self, rank: int) -> list[Message] | None:
        """Return a rank's variables from `Cluster.variables`, which runs no code of the variables."""
        cluster = self._cluster_of_cells(rank)
        if cluster is None:
            return None
        # `Cluster.variables` waits for the ranks. In an executor it does not block the control thread's loop, on which
        # the kernel also receives interrupts.
        variables = await asyncio.get_running_loop().run_in_executor(None, cluster.variables, (rank,))
        return [
            {
                "name": variable.name,
                "evaluateName": variable.name,
                "type": variable.type,
                "value": variable.preview
                or " ".join(map(str, filter(None, (variable.type, variable.dtype, variable.shape)))),
                "variablesReference": 0,
            }
            for variable in variables.get(rank, ())
        ]

    async def display_bundle(self, rank: int, name: str) -> Message | None:
        """Return the text that `Cluster.peek` gives for a variable.

        It has no other formats: a variable's own display code may be slow or never return.
        """
        cluster = self._cluster_of_cells(rank)
        if cluster is None:
            return None
        text = ""
        if name.isidentifier():
            ask = functools.partial(cluster.peek, name, ranks=(rank,))
            (answer,) = await asyncio.get_running_loop().run_in_executor(None, ask)
            text = answer.text or answer.trouble
        return {"data": {"text/plain": text} if text else {}, "metadata": {}}

    def _cluster_of_cells(self, rank: int) -> Cluster | None:
        """Return the cluster if it has this rank and plain cells run on the ranks."""
        cluster = self._cluster
        applies = cluster is not None and auto_mode.is_enabled(self._shell) and rank < cluster.world_size
        return cluster if applies else None

    def _connect_cluster(self) -> None:
        """Connect to the current cluster, if it is another one than before."""
        running = default_cluster.default_or_none()
        if running is self._cluster:
            return
        self.multiplexer.drop_ranks()
        self._cluster = running
        if running is not None:
            loop, multiplexer = self._loop, self.multiplexer
            assert loop is not None

            # Called by the coordinator's driver thread; the multiplexer runs on the loop only. A message of a cluster
            # that was replaced meanwhile is dropped.
            def listener(rank: int, content: str | None) -> None:
                if running is self._cluster:
                    with contextlib.suppress(RuntimeError):  # the kernel is ending and has closed its loop
                        loop.call_soon_threadsafe(multiplexer.message_received, rank, content or "")

            running.debugs.listener = listener


def describe_pause(file: str, line: int, number: int | None) -> str:
    """Return where a rank is paused; `line` -1 if that is not known. `file` is "" for a cell, `number` the cell's."""
    if line < 0:
        return "paused"
    if file:
        return f"paused at {file}:{line}"
    return f"paused at line {line}" + ("" if number is None else f" of cell [{number}]")


def _is_cell(path: str) -> bool:
    from ipykernel.compiler import get_tmp_directory

    return Path(path).parent == Path(get_tmp_directory())


def debugging_of(shell: InteractiveShell) -> Debugging | None:
    """Return the `Debugging` of the shell's kernel, or None if it cannot debug."""
    kernel = getattr(shell, "kernel", None)
    owner = getattr(getattr(kernel, "do_debug_request", None), "__self__", None)
    return owner if isinstance(owner, Debugging) else None


def install(shell: InteractiveShell) -> None:
    """Install the debugger integration, if the shell's kernel has a debugger. A second call changes nothing."""
    kernel: Any = getattr(shell, "kernel", None)
    if kernel is not None and hasattr(kernel, "debugger") and debugging_of(shell) is None:
        Debugging(shell, kernel).start()


def uninstall(shell: InteractiveShell) -> None:
    """Restore the kernel's own debugger method."""
    debugging = debugging_of(shell)
    if debugging is not None:
        debugging.stop()
