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
from rankbook.magics import auto_mode
from rankbook.magics.debug_multiplexer import DebugMultiplexer, Message
from rankbook.package_folders import PACKAGE_FOLDERS

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_OURS = [f"{folder}**" for folder in PACKAGE_FOLDERS]
"""Files in which the notebook's own debugger must not stop: exceptions in them are not the user's."""
_LONG = 200
"""Characters of a cell above which looking its file name up is faster than computing it."""
_START_SECONDS = 60.0
"""Timeout for the debuggers of all ranks to start."""


class _KernelDebugger:
    """The kernel's own debugger; see `debug_multiplexer.KernelDebugger`."""

    def __init__(self, kernel: Any) -> None:  # noqa: ANN401 - an ipykernel Kernel, whose types are loose
        self._kernel = kernel
        self._process = kernel.do_debug_request
        if hasattr(kernel.debugger, "kernel_modules"):  # it makes its rules from these
            kernel.debugger.kernel_modules = [*kernel.debugger.kernel_modules, *_OURS]

    async def process(self, request: Message) -> Message:
        if request["command"] == "attach":
            rules = [{"path": folder, "include": False} for folder in _OURS]
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
        self.desk = DebugMultiplexer(_KernelDebugger(kernel), self)

    def start(self) -> None:
        """Replace the kernel's method.

        A front end that is already debugging the kernel, as after a restart, debugs the ranks too.
        """
        self._kernel.do_debug_request = self.do_debug_request
        debugger = self._kernel.debugger
        if getattr(debugger, "is_started", False):
            self._loop = self._kernel.control_thread.io_loop.asyncio_loop
            self.desk.adopt(debugger.breakpoint_list)

    def stop(self) -> None:
        """Restore the kernel's method."""
        del self._kernel.do_debug_request  # uncovers the method of the class
        if self._cluster is not None:
            self._cluster.debugs.listener = None

    async def do_debug_request(self, request: Message) -> Message:
        """Answer a request of the front end. Called by the kernel's control thread."""
        self._loop = asyncio.get_running_loop()
        self._look()
        return await self.desk.handle(request)

    def describe(self) -> str:
        """Describe whether a front end debugs the ranks, and which ones continue and step apply to."""
        desk = self.desk
        whom = "the rank whose frame is chosen in the call stack" if desk.stopped.single else "all paused ranks"
        state = "a front end debugs the ranks" if desk.on else "no front end debugs; its bug starts it"
        return f"{state}; continue and step are for {whom}"

    # Called by the main thread

    def prepare(self, ranks: Collection[int]) -> dict[int, str]:
        """Attach a debugger to these ranks, if a front end is debugging.

        Returns the ranks that failed with the reason.
        """
        if not self.desk.on or self._loop is None:
            return {}

        async def attach() -> dict[int, str]:
            self._look()
            return await self.desk.attach(ranks)

        try:
            return asyncio.run_coroutine_threadsafe(attach(), self._loop).result(_START_SECONDS)
        except TimeoutError:
            return dict.fromkeys(ranks, f"it has not started within {_START_SECONDS:g} s")

    def file_of(self, source: str) -> str:
        """Return the name under which the front end's debugger knows the running cell.

        `source` is the cell as it is sent to the ranks; "" is returned if its lines differ from the cell's. The name is
        also sent while no front end is debugging, because a breakpoint may be set later in a function that this cell
        defines.
        """
        running = self._shell.displayhook.exec_result
        if running is None or running.info is None:
            return ""
        cell = str(running.info.raw_cell)
        written, sent = cell.rstrip().split("\n"), source.rstrip().split("\n")
        if len(written) != len(sent) or written[-1].strip() != sent[-1].strip():
            return ""
        return self._name_of(cell)

    def _name_of(self, cell: str) -> str:
        """Return the running cell's file name, as ipykernel computes it.

        Computing it takes 0.15 ms per kilobyte, and ipykernel did so just before this call: long cells are looked up.
        """
        if len(cell) > _LONG:
            running, numbers = self._shell.displayhook.exec_result, self._shell.compile._filename_map
            count = None if running is None else running.execution_count
            count = self._shell.execution_count if count is None else count  # the shell's count may be one ahead
            names = [str(name) for name, number in numbers.items() if number == count]
            if len(names) == 1:  # several if a silent request ran since the last cell
                return names[0]
        from ipykernel.compiler import get_file_name

        return str(get_file_name(cell))

    def move_in(self) -> None:
        """Move the breakpoints to where plain cells now run, after auto mode was turned on or off."""
        if self.desk.on and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self.desk.move_in(), self._loop).result(_START_SECONDS)

    # Called on the event loop: see `debug_multiplexer.RankGateway`

    @property
    def _there(self) -> Cluster | None:
        """Return the cluster, or None if it has stopped.

        The last messages of the ranks' debuggers arrive when the cluster is already stopped.
        """
        return None if self._cluster is None or self._cluster.stopped else self._cluster

    def ranks(self) -> tuple[int, ...]:
        """Return every rank in the cluster."""
        return () if self._there is None else self._there.select(None)

    def busy(self) -> tuple[int, ...]:
        """Return the ranks that are executing a cell."""
        cells = [] if self._there is None else self._there.cells()
        return tuple({rank for cell in cells if cell.started is not None for rank in cell.ranks})

    def tell(self, rank: int, content: str) -> bool:
        """Send a message to a rank's debugger; return False if the rank or the cluster has exited."""
        return self._there is not None and self._there.debugs.tell(rank, content)

    def publish(self, event: Message) -> None:
        """Publish an event as the kernel's own debugger does."""
        self._kernel._publish_debug_event(event)

    def note(self, rank: int, path: str, line: int) -> None:
        """Record in the cluster's status where a rank is paused; see `RankGateway.note`."""
        cluster = self._there
        if cluster is None:
            return
        if not line:
            cluster.debugs.paused.pop(rank, None)
            return
        where = "" if line < 0 else f" at line {line}" if _is_cell(path) else f" at {Path(path).name}:{line}"
        cluster.debugs.paused[rank] = f"paused{where}"

    def is_for_ranks(self, path: str) -> bool:
        """Return True if the file is a cell that starts with `%%distributed` or that auto mode sends to the ranks."""
        if not _is_cell(path) or not Path(path).is_file():
            return False
        text = Path(path).read_text(encoding="utf-8")
        return text.startswith("%%distributed") or (
            auto_mode.is_enabled(self._shell) and not auto_mode.runs_locally(text)
        )

    async def variables(self, rank: int) -> list[Message] | None:
        """Return a rank's variables from `Cluster.variables`, which runs no code of the variables."""
        cluster = self._of_cells(rank)
        if cluster is None:
            return None
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

    async def show(self, rank: int, name: str) -> Message | None:
        """Return the text that `Cluster.peek` gives for a variable.

        It has no other formats: a variable's own display code may be slow or never return.
        """
        cluster = self._of_cells(rank)
        if cluster is None:
            return None
        text = ""
        if name.isidentifier():
            ask = functools.partial(cluster.peek, name, ranks=(rank,))
            (answer,) = await asyncio.get_running_loop().run_in_executor(None, ask)
            text = answer.text or answer.trouble
        return {"data": {"text/plain": text} if text else {}, "metadata": {}}

    def _of_cells(self, rank: int) -> Cluster | None:
        """Return the cluster if it has this rank and plain cells run on the ranks."""
        cluster = self._cluster
        applies = cluster is not None and auto_mode.is_enabled(self._shell) and rank < cluster.world_size
        return cluster if applies else None

    def _look(self) -> None:
        """Connect to the current cluster, if it is another one than before."""
        running = default_cluster.default_or_none()
        if running is self._cluster:
            return
        self.desk.lose_all()
        self._cluster = running
        if running is not None:
            loop, desk = self._loop, self.desk
            assert loop is not None

            def listener(rank: int, content: str | None) -> None:
                if running is self._cluster:
                    with contextlib.suppress(RuntimeError):  # the kernel is ending and has closed its loop
                        loop.call_soon_threadsafe(desk.hear, rank, content or "")

            running.debugs.listener = listener


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
