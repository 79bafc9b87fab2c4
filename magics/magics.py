"""The magics `%%distributed`, `%distributed` and `%%local`: run cells on the ranks, execute commands.

Arguments are parsed in arguments.py; output is published through the sinks in output_panel.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class, no_var_expand
from IPython.display import display

from rankbook.coordinator import default_cluster
from rankbook.coordinator.cluster import START_TIMEOUT, Cluster, RankStatus
from rankbook.coordinator.liveness import RESTART_ADVICE_AFTER, restart_advice
from rankbook.coordinator.running_cell import Sink
from rankbook.coordinator.wait import deferred_interrupts, set_ending_check
from rankbook.errors import InvalidArgument, RankbookError
from rankbook.formatting import PACKAGE_MAGICS, PACKAGE_NOTE, is_variable_name, plural, python_name, suggest
from rankbook.ipython_compat import MAGIC_WRAPPER_FRAMES, cell_numbers
from rankbook.magics import arguments, auto_mode, completion, debugger, reports
from rankbook.magics.cell_handle import CellHandle, raise_cell_error, status_line_factory, without_frames
from rankbook.magics.comm_bridge import forward_comms
from rankbook.magics.output_panel import JupyterSink, ask_for, sink_for
from rankbook.magics.profiling import Measuring
from rankbook.numerics.settings import parse_conditions
from rankbook.output.cell_result import CellResult
from rankbook.output.merger import Stream
from rankbook.ranks import name_ranks
from rankbook.transport.serialization import set_cell_numbers
from rankbook.widgets.rendering import table

if TYPE_CHECKING:
    from types import FrameType

    from IPython.core.interactiveshell import InteractiveShell

    from rankbook.magics.output_panel import Panel
CELL_MAGICS = ("distributed", "local")
_INDENT = re.compile(r"(?:[ \t]*\n)*([ \t]*)")
"""Matches up to the first character of a cell; the group is the indentation of its line."""
_CALLER_DEPTH = 2 + MAGIC_WRAPPER_FRAMES
"""Stack frames from IPython's expansion of `$name` and `{name}` to the frame whose variables it uses."""


@magics_class
class DistributedMagics(Magics):
    """The magics that `%load_ext rankbook` registers."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._shell = shell
        self._output_view = "merged"
        self._last_result: CellResult | None = None
        self._detached_reported = False  # whether the kept ranks were reported
        self._has_printed = False  # whether this cell shows a message of `_print`
        self.runs_plain_cells: bool | None = None
        """Whether auto mode was on when the extension was unloaded; None before that."""

    @no_var_expand
    @line_cell_magic
    def distributed(self, line: str, cell: str | None = None) -> CellHandle | list[Any] | None:
        """Run cells on the ranks, and manage the ranks."""
        # `no_var_expand` keeps IPython from expanding `$name` and `{name}` by itself, so it is done here, except for a
        # peek.
        if cell is not None or not arguments.is_peek(line):  # braces in a peek expression are Python's, not IPython's
            line = self._shell.var_expand(line, depth=_CALLER_DEPTH)
        with short_errors():
            if cell is None:
                command = arguments.parse_line(line)
                command.is_statement = _is_statement(sys._getframe(_CALLER_DEPTH))
                return _COMMANDS[command.command](self, command)
            return self._run(line, cell)

    @cell_magic
    def local(self, line: str, cell: str) -> None:
        """Run this cell in the notebook process, also while `%distributed auto` is on."""
        if line.strip():
            raise UsageError(f"%%local takes no options, got {line.strip()!r}")
        # Through IPython again, so that magics, `await` and the last value work as in a plain cell. The outer call has
        # stored the cell in the history.
        result = self._shell.run_cell("%%local\n" + cell, store_history=False)  # auto_mode.run_locally removes %%local
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            error._render_traceback_ = list  # run_cell has shown the traceback; only the status is left to report
            raise error

    # Cells

    def _run(self, line: str, cell: str) -> CellHandle | None:
        # Everything that can be refused is checked before ranks are started, which takes seconds.
        chosen = arguments.parse_cell_line(line)
        if not cell.strip():
            raise InvalidArgument("%%distributed: the cell is empty; write the code for the ranks below this line")
        if chosen.out is not None and not is_variable_name(chosen.out):
            raise InvalidArgument(f"%%distributed: invalid --out {chosen.out!r}: expected a Python identifier")
        self._has_printed = False
        number = _cell_number(self._shell)
        measuring = Measuring(chosen, number) if chosen.time or chosen.profile is not None else None
        cluster, is_shown = self._cluster(), not chosen.quiet
        sink = sink_for(self._shell, number if chosen.auto else None, background=chosen.background)
        forward_comms(cluster, sink)
        ranks = cluster.select(chosen.ranks)
        # The whole cell is `x?`: nothing is executed on the ranks.
        if "?" in cell and completion.show_inspection(cluster, ranks, cell):
            return None
        # The ranks get the magic's line as a comment, so that lines in tracebacks and breakpoints match the cell.
        # A cell magic in the body has to stay in the first line. IPython removes an indentation that all lines share.
        indent = _INDENT.match(cell)
        head = f"{'' if indent is None else indent[1]}# %%distributed {line}".rstrip() + "\n"
        if chosen.auto or cell.lstrip().startswith("%%"):
            head = ""
        on_result = self._result_callback(chosen.out and python_name(chosen.out))
        ask = ask_for(self._shell)
        panel = self._panel(sink, number, ranks, chosen.view, cluster.key) if is_shown else None
        file = self._prepare_debugger(ranks, head + cell)
        # All ranks would show the same text, each when it comes to it.
        code, question = (cell, "") if chosen.background else completion.split_question(cell)
        has_status_line = is_shown and not chosen.background and isinstance(sink, JupyterSink) and sink.shows_live
        # An interrupt between submission and wait would leave a running cell that nothing waits for. It is deferred,
        # and `wait` forwards it to the ranks.
        with deferred_interrupts() as interrupts:
            interrupts.ignore_repeats = getattr(self._shell, "kernel", None) is not None
            # The ranks run cells in the order of submission, so the profiler's first start precedes the cell.
            before = None if measuring is None else measuring.prepare(cluster, ranks)
            submitted = cluster.submit_code(
                head + code,
                number=number,
                ranks=ranks,
                sink=sink if is_shown else None,
                page=panel.page if panel is not None else None,
                head=status_line_factory(cluster) if has_status_line else None,
                measure=None if measuring is None else measuring.measure,
                file=file,
                session=auto_mode.is_enabled(self._shell),
                has_other_output=self._has_printed or (not chosen.auto and _is_called_by_code(sink)),
            )
            if panel is not None:
                # The cell may have ended already; `follow` handles this.
                panel.follow(submitted)
            if measuring is not None:
                on_result = measuring.show_after(on_result, cluster, submitted, sink, background=chosen.background)
            if chosen.background:
                handle = CellHandle(cluster, submitted, sink, ask, on_result)
                handle.follow(timeout=chosen.timeout)
                return handle
            # If another cell occupies the ranks, this one waits without any output. Say so, as a terminal shows no
            # status line.
            first = submitted if before is None else before
            if first.started is None and first.waiting_behind:
                submitted.has_other_output = True
                sink.emit([Stream("stderr", submitted.describe_queue(first.waiting_behind) + "\n")])
            cluster.wait(submitted, timeout=chosen.timeout, ask=ask)
        # Views that the cell has asked for are made in threads. Some front ends read no output after the end of the
        # cell.
        sink.views.wait_shown()
        assert submitted.result is not None
        # The result is stored before the error of a failed cell is raised, so that `--out` has it in any case.
        on_result(submitted.result)
        raise_cell_error(submitted, submitted.result, self._shell.user_ns)
        if question and not completion.show_inspection(cluster, ranks, question):
            if "." not in question:
                self._print(f"Object `{question.strip(' ?')}` not found.")
                return None
            # IPython on a rank may know it, which runs code to find out: a property, a name of a lazy package.
            last = self._last_result
            self._run(f"--ranks {ranks[0]}", question)
            self._last_result = last
        return None

    def _result_callback(self, name: str | None) -> Callable[[CellResult], None]:
        def store_result(result: CellResult) -> None:
            self._last_result = result
            if name is not None:
                self._shell.user_ns[name] = result

        return store_result

    def _prepare_debugger(self, ranks: tuple[int, ...], source: str) -> str:
        """Return the name under which the front end's debugger knows the cell, or "".

        Also attach a debugger to these ranks, if a front end is debugging.
        """
        debugging = debugger.debugging_of(self._shell)
        if debugging is None:
            return ""
        for rank, trouble in sorted(debugging.prepare(ranks).items()):
            self._print(f"rank {rank} runs without a debugger: {trouble}")
        return debugging.file_of(source)

    def _panel(
        self, sink: Sink, number: int, ranks: tuple[int, ...], view: str | None, cluster_key: str
    ) -> Panel | None:
        """Return a panel for the cell's output by rank; None for merged output or without a front end."""
        if (view is None and self._output_view == "merged") or not isinstance(sink, JupyterSink):
            return None
        from rankbook.magics.output_panel import Panel

        sink.shows_live = True  # the panel is a widget, which changes wherever it is displayed
        return Panel(sink, number, ranks, view or self._output_view, cluster_key)

    def _cluster(self) -> Cluster:
        running = default_cluster.wait_default()
        if running is not None:
            self._report_detached()
            for note in running.take_notes():
                self._print(note)
            return running
        default_cluster.check_not_ended()
        return self._start()

    def _report_detached(self) -> None:
        """Report once which kept ranks can be attached."""
        if not self._detached_reported and (text := reports.describe_available()):
            self._print(text)
        self._detached_reported = True

    def _start(self, n: int | None = None, **options: Any) -> Cluster:  # noqa: ANN401 - those of `default_cluster.start`
        running = None if default_cluster.is_starting() else default_cluster.default_or_none()
        # With no cluster running, a new start reports again: ranks may have been kept since the last report.
        self._detached_reported = self._detached_reported and running is not None
        if not options.get("keep"):
            self._report_detached()
        cluster = default_cluster.start(n, **options)
        self._report_detached()  # not before a start with `keep`, which may be refused because of them
        state = "already running" if running is cluster else "ready"
        verb = "is" if cluster.world_size == 1 else "are"
        self._print(
            f"{plural(cluster.world_size, 'rank')} {verb} {state}: "
            f"{cluster.describe()}{reports.describe_keeping(cluster)}"
        )
        return cluster

    def _print(self, text: str) -> None:
        self._has_printed = True
        sink_for(self._shell).emit([Stream("stdout", text + "\n")])

    # Commands

    # One method per command, found by its name in `_COMMANDS`.
    def _command_start(self, command: argparse.Namespace) -> None:
        self._start(
            command.n,
            backend=command.backend,
            device=command.device,
            keep=command.keep or False,
            timeout=command.timeout,
            launcher=command.launcher,
            nodes=command.nodes,
            launcher_args=command.launcher_args,
            address=command.address,
            port=command.port,
            home=command.home,
            lost_after=command.lost_after,
            env=command.env,
            sync_code=command.sync_code == "on",
        )

    def _command_attach(self, command: argparse.Namespace) -> None:
        sink = sink_for(self._shell, background=True)
        cluster = default_cluster.attach(command.key, sink=sink)
        # Ranks keep no comm messages for a later kernel, so widgets are forwarded from here on.
        forward_comms(cluster, sink)
        self._detached_reported = True
        # Cells that have been running since the previous kernel become background cells of this one.
        self._print(reports.describe_attached(cluster))
        for cell in cluster.cells():
            handle = CellHandle(cluster, cell, sink, ask_for(self._shell), lambda _: None)
            handle.follow()
            if cell.number:
                display(handle)

    def _command_status(self, _command: argparse.Namespace) -> None:
        running = default_cluster.default_or_none()
        if running is None and default_cluster.is_starting():
            self._print("the ranks are starting; cells wait until they are ready")
            return
        if running is None:
            self._print("no ranks are running; %distributed start or the first %%distributed starts them")
            if text := reports.describe_kept():
                self._print(text)
            return
        for note in running.take_notes():
            self._print(note)
        hosts = running.hosts()
        statuses = running.status()
        # The ranks of a host together, the hosts in the order of their first ranks.
        first = {status.host: status.rank for status in reversed(statuses)}
        rows = [
            (
                *(str(status.rank), status.state, status.device, *([status.host or "this host"] if hosts else [])),
                *(str(status.pid or ""), status.cell or "", _note_of(status)),
            )
            for status in sorted(statuses, key=lambda status: (first[status.host], status.rank))
        ]
        self._show(table(("rank", "state", "device", *(["host"] if hosts else []), "pid", "cell", "note"), rows))
        for host in hosts:
            self._print(reports.describe_host(host))
        if refusals := running.describe_refusals():
            self._print(f"link to the hosts: {refusals}")
        if launcher := running.describe_launcher():
            self._print(launcher)
        if (protection := running.protection()) is not None:
            self._print(str(protection))
        for cell in running.cells():
            if cell.started is None:
                self._print(cell.describe_queue())

    def _command_interrupt(self, command: argparse.Namespace) -> None:
        cluster = default_cluster.current()
        chosen = set(cluster.select(command.ranks))
        queued = [cell.label for cell in cluster.cells() if cell.started is None and not chosen.isdisjoint(cell.ranks)]
        hit = cluster.interrupt(command.ranks)
        done = [f"interrupted {name_ranks(hit)}"] if hit else []
        done += [f"removed {', '.join(queued)} from the queue"] if queued else []
        self._print("; ".join(done) or "no cell is running on these ranks")

    def _command_restart(self, command: argparse.Namespace) -> None:
        cluster = default_cluster.current()
        restarted = cluster.restart(command.ranks)
        self._print(f"{name_ranks(restarted)} restarted with an empty namespace; {cluster.describe_group()}")

    def _command_heal(self, command: argparse.Namespace) -> None:
        cluster = default_cluster.current()
        timeout = command.timeout or START_TIMEOUT
        healed = cluster.heal(command.ranks, empty=command.empty, shrink=command.shrink, timeout=timeout)
        self._print(str(healed) if healed is not None else "no rank is dead, and none is empty since a restart")

    def _command_resize(self, command: argparse.Namespace) -> None:
        resized = default_cluster.current().resize(command.n, timeout=command.timeout or START_TIMEOUT)
        self._print(str(resized))

    def _command_protect(self, command: argparse.Namespace) -> None:
        if command.every is not None and command.state != "on":
            raise InvalidArgument(
                f"%distributed protect: --every goes with on: %distributed protect on --every {command.every}"
            )
        if command.every is not None and command.every < 1:
            raise InvalidArgument(f"%distributed protect: expected --every to be 1 or more, got {command.every}")
        cluster = default_cluster.current()
        if command.state == "on":
            running = cluster.protect(None).status if command.every is None else None
            every = command.every or (1 if running is None else running.every)
        else:
            every = None if command.state is None else 0
        self._print(str(cluster.protect(every)))

    def _command_stop(self, command: argparse.Namespace) -> None:
        with contextlib.suppress(RankbookError):  # of a start in the background, which has told of it
            default_cluster.wait_default()
        running = default_cluster.default_or_none()
        if command.key is not None and (running is None or running.key != command.key):
            default_cluster.stop(command.key)
            self._print(f"the kept ranks of {command.key} stopped")
        elif default_cluster.stop() and running is not None:
            self._print(f"{plural(running.world_size, 'rank')} stopped")
        else:
            self._print("no ranks are running")

    def _command_stacks(self, _command: argparse.Namespace) -> None:
        cluster = default_cluster.current()
        stacks = cluster.stacks()
        silent = None in stacks.values()  # ask for the states of ranks without a stack, without waiting again
        states = {status.rank: status.state for status in cluster.status(timeout=0)} if silent else {}
        self._print(reports.describe_stacks(stacks, states))

    def _command_debug(self, command: argparse.Namespace) -> None:
        debugging = debugger.debugging_of(self._shell)
        if debugging is None:
            raise InvalidArgument(
                "%distributed debug: this front end has no debugger; breakpoint() starts one on a rank"
            )
        if command.moves is not None:
            debugging.multiplexer.stopped.single = command.moves == "chosen"
        self._print(debugging.describe())

    def _command_vars(self, command: argparse.Namespace) -> None:
        cluster = default_cluster.current()
        ranks = cluster.select(command.ranks)
        variables = cluster.variables(ranks)
        rows = reports.variable_rows(variables, command.names) if variables else []
        if silent := tuple(rank for rank in ranks if rank not in variables):
            self._print(f"{name_ranks(silent)} did not reply; %distributed status shows the reason")
        if rows:
            self._show(table(reports.VARIABLE_HEADINGS, rows))
        elif variables:
            self._print("no variables")

    def _command_peek(self, command: argparse.Namespace) -> None:
        cluster = default_cluster.current()
        text, trouble = reports.describe_peeks(
            cluster.peek(command.expression, ranks=command.ranks, timeout=command.timeout)
        )
        if not text:
            raise InvalidArgument(f"%distributed peek: {trouble.rstrip()}")
        sink = sink_for(self._shell)
        sink.emit([Stream("stdout", text), *([Stream("stderr", trouble)] if trouble else [])])

    def _command_sync_check(self, command: argparse.Namespace) -> None:
        cluster = default_cluster.current()
        self._show(cluster.sync_check(command.names, ranks=command.ranks, timeout=command.timeout).bundle())

    def _command_push(self, command: argparse.Namespace) -> None:
        cluster = self._cluster()
        ranks = cluster.select(command.ranks)
        names = tuple(dict.fromkeys(map(python_name, command.names)))
        for name in names:
            if not is_variable_name(name):  # the ranks' variable may have that attribute, with another value
                raise InvalidArgument(
                    f"%distributed push: {name!r} is not the name of a variable; push the whole variable, or assign "
                    "the value to one first"
                )
        missing = tuple(name for name in names if name not in self._shell.user_ns)
        for name in missing:
            self._check_on_ranks(cluster, ranks, name)
        values = {name: self._shell.user_ns[name] for name in names if name not in missing}
        if values:
            cluster.push(values, ranks=ranks)
            self._print(f"{', '.join(values)}: copied to {name_ranks(ranks)}")
        if missing:
            predicate = "is" if len(missing) == 1 else "are"
            self._print(
                f"{', '.join(missing)}: nothing to copy, {predicate} not in the notebook but already on "
                f"{name_ranks(ranks)}"
            )

    def _check_on_ranks(self, cluster: Cluster, ranks: Sequence[int], name: str) -> None:
        """Raise `InvalidArgument` unless all `ranks` have the variable `name`, which the notebook does not have."""
        try:
            # A name that exists only on the ranks needs no copy; only a name that exists nowhere is an error.
            cluster.pull(f"{name}.__class__.__name__", ranks=ranks)  # is defined where `name` is, and is small
        except InvalidArgument as error:
            suggestion = suggest(name, self._shell.user_ns)
            raise InvalidArgument(
                f"%distributed push: variable {name!r} is defined neither in the notebook nor on "
                f"{name_ranks(ranks)}{suggestion}"
            ) from error

    def _command_pull(self, command: argparse.Namespace) -> list[Any] | None:
        # `losses = %distributed pull loss`: IPython assigns the returned value to the name. No other one is assigned.
        target = command.target or (command.name if command.is_statement else None)
        if target is not None and not is_variable_name(target):
            raise InvalidArgument(
                f"%distributed pull: invalid variable name {target!r}: expected a Python identifier; use --as NAME"
            )
        cluster = default_cluster.current()
        ranks = cluster.select(command.ranks)
        pulled = cluster.pull(command.name, ranks=ranks)
        if target is not None:
            self._shell.user_ns[python_name(target)] = pulled
            values, order = ("value", "") if len(ranks) == 1 else ("values", ", in this order")
            self._print(f"{target}: a list with the {values} of {name_ranks(ranks)}{order}")
        return None if command.is_statement else pulled

    def _command_watch(self, command: argparse.Namespace) -> None:
        if not command.conditions:
            running = default_cluster.default_or_none()
            self._print(f"watch: {running.watched_numbers if running is not None else 'off'}")
            return
        parse_conditions(*command.conditions)  # before ranks are started
        cluster = self._cluster()
        cluster.watch_numbers(*command.conditions)
        self._print(
            "the watch is off"
            if cluster.watched_numbers == "off"
            else f"watching {cluster.watched_numbers}: a cell ends at the first step with such a value, before the "
            "optimizer uses it"
        )

    def _command_auto(self, command: argparse.Namespace) -> None:
        auto_mode.set_enabled(self._shell, on=command.state == "on")
        if (debugging := debugger.debugging_of(self._shell)) is not None:
            debugging.move_breakpoints()
        self._print(
            "plain cells now run on the ranks; %%local runs a cell in the notebook"
            if command.state == "on"
            else "plain cells now run in the notebook"
        )

    def _command_view(self, command: argparse.Namespace) -> None:
        from rankbook.magics.output_panel import static_bundle

        self._output_view = command.view
        self._print(f"cells show their output {_VIEWS[command.view]} from now on")
        if self._last_result is not None:
            self._show(static_bundle(self._last_result, command.view))

    def _show(self, bundle: dict[str, str]) -> None:
        from rankbook.output.merger import RichOutput

        sink_for(self._shell).emit([RichOutput(dict(bundle), {})])


_VIEWS = {"merged": "as one stream", "tabs": "rank by rank, in tabs", "grid": "rank by rank, side by side"}
_COMMANDS: dict[str, Callable[[DistributedMagics, argparse.Namespace], list[Any] | None]] = {
    name: getattr(DistributedMagics, f"_command_{name.replace('-', '_')}") for name in arguments.COMMANDS
}


def _is_statement(caller: FrameType) -> bool:
    """Return True if the line magic that `caller` runs is a statement, and not the value of an assignment.

    A value that is returned to a statement would be shown as the cell's result.
    """
    # IPython translates `%distributed …` into a call that begins its line, and `x = %distributed …` into an assignment
    # of the same call. linecache has the translated source, but not that of `%time` and `%%time`.
    line = linecache.getline(caller.f_code.co_filename, caller.f_lineno).strip()
    if line:
        return line.startswith("get_ipython().run_line_magic(")
    following = (step.opname for step in dis.get_instructions(caller.f_code) if step.offset > caller.f_lasti)
    return next(following, "") in {"POP_TOP", "RETURN_VALUE"}  # the value is dropped, or is that of `%time`


def _cell_number(shell: InteractiveShell) -> int:
    """Return the `n` of the running cell's `In[n]`.

    From some release of IPython 9 on, the shell's own execution count is already one ahead.
    """
    running = shell.displayhook.exec_result
    number = None if running is None else running.execution_count
    return int(shell.execution_count if number is None else number)


def _is_called_by_code(sink: Sink) -> bool:
    """Return True if code of the notebook's cell calls the magic, for example in a loop, and may have shown more."""
    if not isinstance(sink, JupyterSink):
        return False
    code = (sink.parent or {}).get("content", {}).get("code", "")
    return not str(code).lstrip().startswith("%%distributed")


def _note_of(status: RankStatus) -> str:
    if status.silence >= RESTART_ADVICE_AFTER:
        return restart_advice(status.rank)
    if status.lost_device:
        return f"{status.lost_device}; %distributed heal replaces the rank, pull still reads its variables on the CPU"
    if status.loss is None and status.empty:
        return f"its namespace is empty; %distributed heal {status.rank} copies the variables of another rank"
    return status.loss or ""


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Show Rankbook's own errors in one line, without their Python traceback."""
    with without_frames():
        try:
            yield
        except InvalidArgument as error:
            # An error from a rank includes the class name.
            raise UsageError(str(error).replace(f": {InvalidArgument.__name__}: ", ": ")) from None


def _misplaced_magic(name: str) -> Callable[[str], None]:
    """Return a line magic that rejects `%%name` below a cell's first line.

    IPython parses such a line as the line magic `%name`, and would report it as unknown.
    """

    def refuse(_line: str) -> None:
        raise UsageError(f"%%{name} must be the first line of its cell; no comment may precede it")

    return refuse


class _PackageMagic:
    """A line magic that installs packages: ranks that start later use them, and for those in use it says how."""

    def __init__(self, run: Callable[[str], None]) -> None:
        self.run = run
        self.__doc__ = run.__doc__

    def __call__(self, line: str) -> None:
        self.run(line)
        if not default_cluster.renew_unused():
            print(PACKAGE_NOTE)  # noqa: T201 - below the note that IPython prints


def _wrap_package_magics(shell: InteractiveShell) -> None:
    for name in PACKAGE_MAGICS:
        run = shell.find_line_magic(name)  # older versions of IPython have fewer
        if run is not None and not isinstance(run, _PackageMagic):
            shell.magics_manager.register_function(_PackageMagic(run), "line", name)


def _unwrap_package_magics(shell: InteractiveShell) -> None:
    for name in PACKAGE_MAGICS:
        if isinstance(magic := shell.find_line_magic(name), _PackageMagic):
            shell.magics_manager.register_function(magic.run, "line", name)


def install(shell: InteractiveShell) -> None:
    """Register the magics. A second call changes nothing."""
    # IPython shows the docstring for `%distributed?`.
    DistributedMagics.distributed.__doc__ = arguments.help_text()
    auto_mode.install(shell)
    debugger.install(shell)
    completion.install(shell)
    set_ending_check(lambda: bool(getattr(shell, "exit_now", False)))  # set by a kernel on a shutdown request
    # After `%reload_ext`, the object of before, so that the view and auto mode stay as they were.
    magics = shell.magics_manager.registry.get(DistributedMagics.__name__)
    if not isinstance(magics, DistributedMagics):
        magics = DistributedMagics(shell)
    shell.register_magics(magics)
    for name in CELL_MAGICS:
        # IPython takes one percent sign off a line magic. The rest of `%%distributed` is the name "%distributed".
        shell.magics_manager.register_function(_misplaced_magic(name), "line", f"%{name}")
    _wrap_package_magics(shell)
    set_cell_numbers(cell_numbers(shell.compile))
    runs_plain_cells = magics.runs_plain_cells
    if runs_plain_cells is None:
        runs_plain_cells = getattr(getattr(shell, "kernel", None), "distributes_cells", False)  # jupyter/kernel.py
    if runs_plain_cells:
        auto_mode.set_enabled(shell, on=True)


def uninstall(shell: InteractiveShell) -> None:
    """Unregister the magics. Their object stays in IPython's registry, for a later `install`."""
    manager = shell.magics_manager
    if isinstance(magics := manager.registry.get(DistributedMagics.__name__), DistributedMagics):
        magics.runs_plain_cells = auto_mode.is_enabled(shell)
    auto_mode.uninstall(shell)
    debugger.uninstall(shell)
    completion.uninstall(shell)
    _unwrap_package_magics(shell)
    # IPython has no function that removes magics, so they are removed from its tables.
    manager.magics["line"].pop("distributed", None)
    for name in CELL_MAGICS:
        manager.magics["cell"].pop(name, None)
        manager.magics["line"].pop(f"%{name}", None)
