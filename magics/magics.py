"""The magics `%%distributed`, `%distributed` and `%%local`: run cells on the ranks, execute commands.

Arguments are parsed in arguments.py; output is published through the sinks in output_panel.py.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class, no_var_expand
from IPython.display import display

from rankbook.coordinator import default_cluster
from rankbook.coordinator.cluster import Cluster, RankStatus
from rankbook.coordinator.deferred_interrupts import deferred_interrupts, set_ending_check
from rankbook.coordinator.running_cell import RunningCell, Sink
from rankbook.errors import BadRequest, RankbookError
from rankbook.formatting import plural, suggest
from rankbook.magics import arguments, auto_mode, completion, debugger, reports
from rankbook.magics.cell_handle import CellHandle, status_line_factory
from rankbook.magics.comm_bridge import CommBridge
from rankbook.magics.errors import raise_cell_error
from rankbook.magics.output_panel import JupyterSink, ask_for, sink_for
from rankbook.magics.profiling import Measuring
from rankbook.output.cell_result import CellResult
from rankbook.output.merger import Stream
from rankbook.ranks import format_ranks, name_ranks
from rankbook.transport.cell_sources import set_cell_numbers
from rankbook.widgets.rendering import table

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from rankbook.magics.output_panel import Panel
CELL_MAGICS = ("distributed", "local")
_TO_THE_CELL = 2
"""Stack frames from IPython's expansion of `$name` and `{name}` to the frame whose variables it uses."""


@magics_class
class DistributedMagics(Magics):
    """The magics that `%load_ext rankbook` registers."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._shell = shell
        self._view = "merged"
        self._last: CellResult | None = None
        self._bridge: CommBridge | None = None
        self._knows_kept = False  # whether the kept ranks were reported

    @no_var_expand
    @line_cell_magic
    def distributed(self, line: str, cell: str | None = None) -> CellHandle | None:
        """Run cells on the ranks, and manage the ranks."""
        if cell is not None or not arguments.is_peek(line):  # braces in a peek expression are Python's, not IPython's
            line = self._shell.var_expand(line, depth=_TO_THE_CELL)
        with short_errors():
            if cell is None:
                command = arguments.parse_line(line)
                _COMMANDS[command.command](self, command)
                return None
            return self._run(line, cell)

    @cell_magic
    def local(self, line: str, cell: str) -> None:
        """Run this cell in the notebook process, also while `%distributed auto` is on."""
        if line.strip():
            raise UsageError(f"%%local takes no options, not {line.strip()!r}")
        result = self._shell.run_cell("%%local\n" + cell, store_history=False)  # auto_mode.run_locally removes %%local
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            error._render_traceback_ = list  # run_cell has shown the traceback; only the status is left to report
            raise error

    # Cells

    def _run(self, line: str, cell: str) -> CellHandle | None:
        chosen = arguments.parse_cell_line(line)
        if not cell.strip():
            raise BadRequest("%%distributed: the cell is empty; write the code for the ranks below this line")
        if chosen.out is not None and not chosen.out.isidentifier():
            raise BadRequest(f"%%distributed: --out {chosen.out!r} is no name for a variable")
        number = _cell_number(self._shell)
        measuring = Measuring(chosen, number) if chosen.time or chosen.profile is not None else None
        cluster, shown = self._cluster(), not chosen.quiet
        sink = sink_for(self._shell, number if chosen.auto else None)
        if isinstance(sink, JupyterSink):
            self._bridge_to(cluster, sink).parent = sink.parent
        ranks = cluster.select(chosen.ranks)
        if "?" in cell and completion.show_inspection(cluster, ranks, cell):
            return None
        # The ranks get the magic's line as a comment, so that lines in tracebacks and breakpoints match the cell.
        # A cell magic in the body has to stay in the first line.
        head = "" if chosen.auto or cell.lstrip().startswith("%%") else f"# %%distributed {line}".rstrip() + "\n"
        keep = self._keeper(chosen.out)
        ask = ask_for(self._shell)
        panel = self._panel(sink, number, ranks, chosen.view) if shown else None
        file = self._known_to_debugger(ranks, head + cell)
        has_status_line = shown and not chosen.background and isinstance(sink, JupyterSink)
        # An interrupt between submission and wait would leave a running cell that nothing waits for. It is deferred,
        # and `wait` forwards it to the ranks.
        with deferred_interrupts():
            before = None if measuring is None else measuring.prepare(cluster, ranks)
            submitted = cluster.submit_code(
                head + cell,
                number=number,
                ranks=ranks,
                sink=sink if shown else None,
                page=panel.page if panel is not None else None,
                head=status_line_factory(cluster) if has_status_line else None,
                measure=None if measuring is None else measuring.measure,
                file=file,
            )
            if panel is not None:
                panel.follow(submitted)
            if measuring is not None:
                keep = measuring.show_after(keep, cluster, submitted, sink, background=chosen.background)
            if chosen.background:
                handle = CellHandle(cluster, submitted, sink, ask, keep)
                handle.follow(timeout=chosen.timeout)
                return handle
            first = submitted if before is None else before
            if first.started is None and first.waiting_behind:
                sink.emit([Stream("stderr", _queued(submitted, first.waiting_behind))])
            cluster.wait(submitted, timeout=chosen.timeout, ask=ask)
        assert submitted.result is not None
        keep(submitted.result)
        raise_cell_error(submitted, submitted.result, self._shell.user_ns)
        return None

    def _keeper(self, name: str | None) -> Callable[[CellResult], None]:
        def keep(result: CellResult) -> None:
            self._last = result
            if name is not None:
                self._shell.user_ns[name] = result

        return keep

    def _known_to_debugger(self, ranks: tuple[int, ...], source: str) -> str:
        """Return the name under which the front end's debugger knows the cell, or "".

        Also attach a debugger to these ranks, if a front end is debugging.
        """
        debugging = debugger.debugging_of(self._shell)
        if debugging is None:
            return ""
        for rank, trouble in sorted(debugging.prepare(ranks).items()):
            self._say(f"rank {rank} runs without a debugger: {trouble}")
        return debugging.file_of(source)

    def _bridge_to(self, cluster: Cluster, sink: JupyterSink) -> CommBridge:
        if self._bridge is None or self._bridge.cluster is not cluster:
            self._bridge = CommBridge(cluster, sink.kernel)
        return self._bridge

    def _panel(self, sink: Sink, number: int, ranks: tuple[int, ...], view: str | None) -> Panel | None:
        """Return a panel for the cell's output by rank; None for merged output or without a front end."""
        if (view is None and self._view == "merged") or not isinstance(sink, JupyterSink):
            return None
        from rankbook.magics.output_panel import Panel

        return Panel(sink, number, ranks, view or self._view)

    def _cluster(self) -> Cluster:
        running = default_cluster.wait_default()
        if running is not None:
            self._tell_kept()
            return running
        return self._start(None, None)

    def _tell_kept(self) -> None:
        """Report once which kept ranks can be attached."""
        if not self._knows_kept and (text := reports.describe_waiting()):
            self._say(text)
        self._knows_kept = True

    def _start(self, n: int | None, backend: str | None, keep: float | None = None) -> Cluster:
        running = None if default_cluster.is_starting() else default_cluster.default_or_none()
        self._knows_kept = self._knows_kept and running is not None
        self._tell_kept()
        cluster = default_cluster.start(n, backend=backend, keep=keep or False)
        state = "running already" if running is cluster else "ready"
        verb = "is" if cluster.world_size == 1 else "are"
        self._say(
            f"{plural(cluster.world_size, 'rank')} {verb} {state}: "
            f"{cluster.describe()}{reports.describe_keeping(cluster)}"
        )
        return cluster

    def _say(self, text: str) -> None:
        sink_for(self._shell).emit([Stream("stdout", text + "\n")])

    # Commands

    def _command_start(self, command: argparse.Namespace) -> None:
        self._start(command.n, command.backend, command.keep)

    def _command_attach(self, command: argparse.Namespace) -> None:
        sink = sink_for(self._shell)
        cluster = default_cluster.attach(command.key, sink=sink)
        self._knows_kept = True
        self._say(reports.describe_attached(cluster))
        for cell in cluster.cells():
            handle = CellHandle(cluster, cell, sink, ask_for(self._shell), lambda _: None)
            handle.follow()
            if cell.number:
                display(handle)

    def _command_status(self, _command: argparse.Namespace) -> None:
        running = default_cluster.default_or_none()
        if running is None and default_cluster.is_starting():
            self._say("the ranks are starting; a cell waits for them")
            return
        if running is None:
            self._say("no ranks are running; %distributed start or the first %%distributed starts them")
            if text := reports.describe_kept():
                self._say(text)
            return
        rows = [
            (str(status.rank), status.state, status.device, str(status.pid or ""), status.cell or "", _note_of(status))
            for status in running.status()
        ]
        self._show(table(("rank", "state", "device", "pid", "runs", "note"), rows))
        for cell in running.cells():
            if cell.started is None:
                self._say(_queued(cell, cell.waiting_behind).rstrip())

    def _command_interrupt(self, command: argparse.Namespace) -> None:
        hit = default_cluster.current().interrupt(command.ranks)
        self._say(f"interrupted {name_ranks(hit)}" if hit else "nothing is running there")

    def _command_restart(self, command: argparse.Namespace) -> None:
        cluster = default_cluster.current()
        restarted = cluster.restart(command.ranks)
        self._say(f"{name_ranks(restarted)} restarted with an empty namespace; {cluster.describe_group()}")

    def _command_heal(self, command: argparse.Namespace) -> None:
        healed = default_cluster.current().heal(command.ranks, empty=command.empty)
        self._say(str(healed) if healed is not None else "no rank is dead")

    def _command_stop(self, _command: argparse.Namespace) -> None:
        running = default_cluster.default_or_none()
        if default_cluster.stop() and running is not None:
            self._say(f"{plural(running.world_size, 'rank')} stopped")
        else:
            self._say("no ranks are running")

    def _command_stacks(self, _command: argparse.Namespace) -> None:
        cluster = default_cluster.current()
        stacks = cluster.stacks()
        silent = None in stacks.values()  # ask for the states of ranks without a stack, without waiting again
        states = {status.rank: status.state for status in cluster.status(timeout=0)} if silent else {}
        self._say(reports.describe_stacks(stacks, states))

    def _command_debug(self, command: argparse.Namespace) -> None:
        debugging = debugger.debugging_of(self._shell)
        if debugging is None:
            raise BadRequest("%distributed debug: this front end has no debugger; breakpoint() opens one on a rank")
        if command.moves is not None:
            debugging.desk.stopped.single = command.moves == "chosen"
        self._say(debugging.describe())

    def _command_vars(self, command: argparse.Namespace) -> None:
        cluster = default_cluster.current()
        ranks = cluster.select(command.ranks)
        variables = cluster.variables(ranks)
        rows = reports.variable_rows(variables, command.names) if variables else []
        if silent := tuple(rank for rank in ranks if rank not in variables):
            self._say(f"{name_ranks(silent)} did not answer; %distributed status tells why")
        if rows:
            self._show(table(reports.VARIABLE_HEADINGS, rows))
        elif variables:
            self._say("no variables")

    def _command_peek(self, command: argparse.Namespace) -> None:
        cluster = default_cluster.current()
        text, trouble = reports.describe_peeks(
            cluster.peek(command.expression, ranks=command.ranks, timeout=command.timeout)
        )
        if not text:
            raise BadRequest(f"%distributed peek: {trouble.rstrip()}")
        sink = sink_for(self._shell)
        sink.emit([Stream("stdout", text), *([Stream("stderr", trouble)] if trouble else [])])

    def _command_push(self, command: argparse.Namespace) -> None:
        cluster = self._cluster()
        cluster.push({name: self._own(name) for name in command.names}, ranks=command.ranks)

    def _own(self, name: str) -> Any:  # noqa: ANN401 - any variable
        if name not in self._shell.user_ns:
            near = suggest(name, self._shell.user_ns)
            raise BadRequest(f"%distributed push: there is no variable {name!r} in the notebook{near}")
        return self._shell.user_ns[name]

    def _command_pull(self, command: argparse.Namespace) -> None:
        target = command.target or command.name
        if not target.isidentifier():
            raise BadRequest(f"%distributed pull: {target!r} is no name for a variable; say --as NAME")
        cluster = default_cluster.current()
        ranks = cluster.select(command.ranks)
        self._shell.user_ns[target] = cluster.pull(command.name, ranks=ranks)
        self._say(f"{target}: a list with the value of {name_ranks(ranks)}, in that order")

    def _command_auto(self, command: argparse.Namespace) -> None:
        auto_mode.set_enabled(self._shell, on=command.state == "on")
        if (debugging := debugger.debugging_of(self._shell)) is not None:
            debugging.move_in()
        self._say(
            "plain cells run on the ranks now; %%local keeps one in the notebook"
            if command.state == "on"
            else "plain cells run in the notebook now"
        )

    def _command_view(self, command: argparse.Namespace) -> None:
        from rankbook.magics.output_panel import still_bundle

        self._view = command.view
        self._say(f"cells show their output {_VIEWS[command.view]} from now on")
        if self._last is not None:
            self._show(still_bundle(self._last, command.view))

    def _show(self, bundle: dict[str, str]) -> None:
        from rankbook.output.merger import RichOutput

        sink_for(self._shell).emit([RichOutput(dict(bundle), {})])


_VIEWS = {"merged": "as one stream", "tabs": "rank by rank, in tabs", "grid": "rank by rank, side by side"}
_COMMANDS: dict[str, Callable[[DistributedMagics, argparse.Namespace], None]] = {
    name: getattr(DistributedMagics, f"_command_{name}") for name in arguments.COMMANDS
}


def _cell_number(shell: InteractiveShell) -> int:
    """Return the `n` of the running cell's `In[n]`.

    From some release of IPython 9 on, the shell's own execution count is already one ahead.
    """
    running = shell.displayhook.exec_result
    number = None if running is None else running.execution_count
    return int(shell.execution_count if number is None else number)


def _note_of(status: RankStatus) -> str:
    if status.loss is None and status.empty:
        return f"its namespace is empty; %distributed heal {status.rank} copies the variables of another rank"
    return status.loss or ""


def _queued(cell: RunningCell, behind: Sequence[int]) -> str:
    return f"{cell.label} is queued: it waits for {name_ranks(behind)} ({format_ranks(cell.ranks)} wanted)\n"


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Show Rankbook's own errors in one line, without their Python traceback."""
    try:
        yield
    except BadRequest as error:
        # An error from a rank includes the class name.
        raise UsageError(str(error).replace(f": {BadRequest.__name__}: ", ": ")) from None
    except RankbookError as error:
        if not hasattr(error, "_render_traceback_"):
            lines = f"{type(error).__name__}: {error}".splitlines()
            error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
        raise


def _misplaced(name: str) -> Callable[[str], None]:
    """Return a line magic that rejects `%%name` below a cell's first line.

    IPython parses such a line as the line magic `%name`, and would report it as unknown.
    """

    def refuse(_line: str) -> None:
        raise UsageError(f"%%{name} has to be the first line of its cell; not even a comment may stand above it")

    return refuse


def install(shell: InteractiveShell) -> None:
    """Register the magics. A second call changes nothing."""
    DistributedMagics.distributed.__doc__ = arguments.help_text()
    auto_mode.install(shell)
    debugger.install(shell)
    completion.install(shell)
    set_ending_check(lambda: bool(getattr(shell, "exit_now", False)))  # set by a kernel on a shutdown request
    shell.register_magics(DistributedMagics(shell))
    for name in CELL_MAGICS:
        shell.magics_manager.register_function(_misplaced(name), "line", f"%{name}")
    set_cell_numbers(shell.compile._filename_map)
    if getattr(getattr(shell, "kernel", None), "distributes_cells", False):  # jupyter/kernel.py
        auto_mode.set_enabled(shell, on=True)


def uninstall(shell: InteractiveShell) -> None:
    """Unregister the magics."""
    auto_mode.uninstall(shell)
    debugger.uninstall(shell)
    completion.uninstall(shell)
    manager = shell.magics_manager
    manager.magics["line"].pop("distributed", None)
    for name in CELL_MAGICS:
        manager.magics["cell"].pop(name, None)
        manager.magics["line"].pop(f"%{name}", None)
    manager.registry.pop("DistributedMagics", None)
