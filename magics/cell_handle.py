"""Handle of a background cell (`%%distributed --background`), status line of a running cell, and errors of failed ones.

The status line shows which ranks run the cell, for how long, and the line that every rank is executing.

`raise_cell_error` raises the exception of a failed cell, with the tracebacks of the ranks instead of the notebook's own
frames. It also names the variables that exist only in the notebook, and the `%distributed push` that copies them.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

from IPython.core.getipython import get_ipython
from IPython.display import display

from rankbook.coordinator.cluster import Cluster
from rankbook.coordinator.running_cell import RunningCell, Sink, StatusHeader
from rankbook.coordinator.wait import Ask
from rankbook.errors import CellError, CellTimeout, RankbookError
from rankbook.formatting import format_3g, format_duration
from rankbook.magics.output_panel import JupyterSink, OutputWidgetSink, output_widget_sink
from rankbook.output.cell_result import CellResult, describe_errors
from rankbook.output.merger import RichOutput, Stream
from rankbook.protocol.telemetry import RankPlacement
from rankbook.ranks import group_ranks, name_ranks
from rankbook.widgets.rendering import STALE_AFTER, HandleView, line

HANDLE_STATE = "rankbook_handle"
"""Key of a display's metadata, by which `rankbook run` follows background cells."""
_TIMEOUT_OPTION = "--timeout "
_UNDEFINED = re.compile(r"name '(\w+)' is not defined")


def raise_cell_error(cell: RunningCell, result: CellResult, notebook_names: Collection[str] = ()) -> None:
    """Raise the exception of `result.raise_for_status` or `CellTimeout`, unless the cell succeeded.

    `notebook_names` are the names of the notebook's variables, for a hint about names that the ranks lack.
    """
    if result.ok:
        return
    text = _describe_failure(cell, result) + _describe_notebook_names(result, notebook_names)
    if cell.timed_out is not None:
        _raise_with_text(CellTimeout(cell.describe_timeout(_TIMEOUT_OPTION)), text)
    try:
        result.raise_for_status()
    except (KeyboardInterrupt, RankbookError) as error:
        _raise_with_text(error, text)


def _describe_failure(cell: RunningCell, result: CellResult) -> str:
    """Return the errors of all ranks, with the time limit first if that has ended the cell."""
    errors = describe_errors(result.outcomes)
    if cell.timed_out is None:
        return errors
    timeout = cell.describe_timeout(_TIMEOUT_OPTION)
    # The ranks have nothing to report about a cell that never started.
    return timeout if cell.started is None else f"{timeout}\n{errors}"


def _describe_notebook_names(result: CellResult, notebook_names: Collection[str]) -> str:
    """Return a line about undefined names that are the notebook's variables, which ranks do not see; empty if none."""
    undefined = (_UNDEFINED.match(error.value) for error in result.errors.values() if error.name == "NameError")
    names = sorted({match[1] for match in undefined if match and match[1] in notebook_names})
    if not names:
        return ""
    predicate, pronoun = ("is a variable", "it") if len(names) == 1 else ("are variables", "them")
    push = f"%distributed push {' '.join(names)}"
    return f"\n{', '.join(names)} {predicate} of the notebook: {push} copies {pronoun} to the ranks"


@contextlib.contextmanager
def without_frames() -> Iterator[None]:
    """Let IPython show Rankbook's own errors as their text only, without a Python traceback."""
    # IPython and pytest omit frames that have this local variable.
    __tracebackhide__ = True
    try:
        yield
    except RankbookError as error:
        # IPython shows what this method returns in place of a traceback. An error of a cell has its own text already.
        if not hasattr(error, "_render_traceback_"):
            lines = f"{type(error).__name__}: {error}".splitlines()
            error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
        raise


def _raise_with_text(error: BaseException, text: str) -> None:
    # For an instance of SyntaxError, IPython would ignore `_render_traceback_` and show our own frames.
    if isinstance(error, CellError) and SyntaxError in type(error).__mro__:
        error = type("SyntaxError", (CellError,), {})(error.message, error.errors)
    # `from None`: the notebook's own frames and causes say nothing about the user's code.
    error._render_traceback_ = text.splitlines  # type: ignore[attr-defined]
    raise error from None


class CellHandle:
    """A cell that runs in the background. Its display follows its state until the cell ends."""

    def __init__(
        self, cluster: Cluster, cell: RunningCell, sink: Sink, ask: Ask, on_result: Callable[[CellResult], None]
    ) -> None:
        self._cluster = cluster
        self._cell = cell
        self._sink = sink
        self._ask = ask
        self._on_result = on_result
        # One id for all displays of the handle, so that one message updates all of them. The number of a cell is unique
        # only within its cluster.
        self._display_id = f"rankbook-handle-{cluster.key}-{cell.cell}"
        self._displayed: tuple[str, str] | None = None  # the text and the state of the latest display
        # `Output` widgets that show the running cell. They ignore the update at its end.
        self._output_widgets: list[OutputWidgetSink] = []
        self._lock = threading.Lock()
        self._reported = False
        self._failed: bool | None = None  # None until the cell has ended
        self._raised = False  # whether `wait` has raised the cell's error
        self._is_waiting = False  # whether `wait` answers questions
        self._noted_question = False  # whether the note about a question was shown since the last `wait`

    @property
    def state(self) -> str:
        """Return "queued", "running", "ok", "error" or "interrupted"."""
        return self._cell.result.status if self._cell.result is not None else self._cell.state

    @property
    def result(self) -> CellResult | None:
        """Return the `CellResult`, or None until the cell has ended."""
        return self._cell.result

    def wait(self, timeout: float | None = None) -> CellResult:
        """Wait for the cell to end and return its result.

        Answers the ranks' input requests meanwhile, and forwards an interrupt to them. Raises as `Cluster.run` does if
        the cell failed. Raises TimeoutError after `timeout` seconds; the cell continues to run.
        """
        self._noted_question = False
        if self._cell.result is None:
            self._is_waiting = True
            try:
                self._cluster.wait(self._cell, patience=timeout, ask=self._ask)
            finally:
                self._is_waiting = False
            self._note_question()
        # `wait` returns without a result after `patience` seconds.
        if self._cell.result is None:
            raise TimeoutError(f"{self._cell.label} did not finish within {timeout} s and continues to run")
        if not self._cell.result.ok:
            self._raised = True
            self._update()
        raise_cell_error(self._cell, self._cell.result)
        return self._cell.result

    def interrupt(self) -> None:
        """Interrupt the cell on its ranks."""
        self._cluster.interrupt_cell(self._cell)

    def follow(self, *, timeout: float | None = None) -> None:
        """Keep the display up to date, and interrupt the cell after `timeout` seconds."""
        if timeout is not None:
            self._cluster.interrupt_after(self._cell, timeout)
        # Called by the coordinator's driver thread. The state may have changed before the callback was added, hence the
        # call below.
        self._cell.on_change.append(self._cell_changed)
        if isinstance(self._sink, JupyterSink):
            self._sink.on_clear.append(self._show_again)
        self._cell_changed()

    def _note_question(self) -> None:
        """Tell the user that a rank waits for input, if nobody is there to answer."""
        ranks = sorted(self._cell.asking)
        if ranks and self._cell.result is None and not self._is_waiting and not self._noted_question:
            self._noted_question = True
            verb = "waits" if len(ranks) == 1 else "wait"
            text = f"{name_ranks(ranks)} {verb} for input: call .wait() of the cell's handle\n"
            self._sink.emit([Stream("stderr", text)])

    def _cell_changed(self) -> None:
        result = self._cell.result
        # Only now: the ranks may be stopped later. Whoever stops them, or interrupts the cell, has asked for its end.
        if result is not None and self._failed is None:
            intended = self._cluster.stopped or result.status == "interrupted"
            self._failed = not result.ok and (self._cell.timed_out is not None or not intended)
        self._update()
        self._note_question()
        # `on_change` may run again after the end, for output that arrives late.
        if result is not None and not self._reported:
            self._reported = True
            # `wait` raises the error of a failed cell, but may never be called. So the error is also shown below the
            # cell that started this one, to which the sink publishes.
            self._on_result(result)
            if not result.ok:
                self._sink.emit([Stream("stderr", _describe_failure(self._cell, result) + "\n")])

    def _update(self) -> None:
        # Nothing to update before the first display, and no message without a change.
        if self._displayed is not None:
            output, displayed = self._output(update=True)
            if displayed != self._displayed:
                self._displayed = displayed
                self._sink.emit([output])
        self._show_end_in_output_widgets()

    def _show_end_in_output_widgets(self) -> None:
        """Append the handle to the `Output` widgets that show it, once the cell has ended."""
        if self._cell.result is None:
            return
        with self._lock:
            sinks, self._output_widgets = self._output_widgets, []
        for sink in sinks:
            sink.emit([self._output()[0]])

    def _show_again(self) -> None:
        """Display the handle again after a rank has cleared the output of its cell."""
        if self._displayed is not None:
            output, self._displayed = self._output()
            self._sink.emit([output])
        self._noted_question = False
        self._note_question()

    def _ipython_display_(self) -> None:
        """Show a live display: both the cell's own output and later displays of the handle are updated."""
        output, displayed = self._output()
        display(output.data, metadata=output.metadata, raw=True, display_id=output.display_id)
        self._displayed = displayed
        if displayed[1] == "active" and (shell := get_ipython()) and (sink := output_widget_sink(shell)):
            with self._lock:
                self._output_widgets.append(sink)
        self._update()  # a change during the display reached only the earlier displays

    def _output(self, *, update: bool = False) -> tuple[RichOutput, tuple[str, str]]:
        """Return the handle's display, and its text and state."""
        view, state = self._view(), self._run_state()
        output = RichOutput(view.bundle(), {HANDLE_STATE: state}, self._display_id, update)
        return output, (view.text(), state)

    def _run_state(self) -> Literal["active", "ended", "failed"]:
        """Return "failed" for an error that `wait` has not raised."""
        if self._failed is None:
            return "active"
        return "failed" if self._failed and not self._raised else "ended"

    def _view(self) -> HandleView:
        cell, result = self._cell, self._cell.result
        if result is not None:
            return HandleView(cell.number, cell.ranks, result.status, result.seconds)
        return HandleView(cell.number, cell.ranks, cell.state, None, cell.waiting_behind)

    def __repr__(self) -> str:
        running = self._cell.result is None and self._cell.started is not None
        seconds = f" for {time.monotonic() - (self._cell.started or 0):.1f} s" if running else ""
        return f"<{self._view().text()}{seconds}>"


_STATUS_LINE_VARIABLE = "RANKBOOK_STRIP"
"""Environment variable that turns status lines off, with the value "off"."""
# States that are shown in place of a line number. A rank is "idle" while its cell runs if it has finished before the
# other ranks.
_STATES = {
    "unresponsive": "not responding",
    "starting": "starting",
    "dead": "dead",
    "stopped": "stopped",
    "idle": "done",
}


class StatusLine:
    """Status line of a running cell; see `StatusHeader`."""

    def __init__(self, cluster: Cluster, cell: RunningCell) -> None:
        self._cell = cell
        self._paused = cluster.debugs.paused
        # The driver thread calls the methods below and must not wait for ranks: this monitor returns the last samples.
        self._monitor = cluster.glance()

    def current_bundle(self) -> Mapping[str, str]:
        """See `StatusHeader`."""
        cell = self._cell
        seconds = time.monotonic() - (cell.started or 0.0)
        text = describe_running(cell.number, cell.ranks, seconds, self._monitor.placement().ranks, self._paused)
        # no live region: a screen reader would read it aloud every second
        return line(text, "running", role="none", stale_after=STALE_AFTER)

    def final_bundle(self, result: CellResult) -> Mapping[str, str]:
        """See `StatusHeader`."""
        self._monitor.close()
        return HandleView(self._cell.number, self._cell.ranks, result.status, result.seconds).bundle()


def status_line_factory(cluster: Cluster) -> Callable[[RunningCell], StatusHeader] | None:
    """Return a function that creates the status line of a cell, or None if status lines are turned off."""
    if os.environ.get(_STATUS_LINE_VARIABLE) == "off":
        return None
    return lambda cell: StatusLine(cluster, cell)


def describe_running(
    number: int, ranks: Sequence[int], seconds: float, rows: Sequence[RankPlacement], paused: Mapping[int, str]
) -> str:
    """Return the status line of cell `number`: ranks, duration, position of the ranks, and optimizer steps per second.

    `rows` may contain other ranks too. `paused` describes the ranks that a debugger has paused.
    """
    rows = [row for row in rows if row.rank in ranks]
    groups = group_ranks((row.rank, paused.get(row.rank) or _describe_rank(row)) for row in rows)
    parts = [text if len(groups) == 1 else f"{name_ranks(where)} {text}" for text, where in groups.items()]
    rates = [row.rate for row in rows if row.rate]
    if rates:
        parts.append(f"{format_3g(statistics.median(rates))} steps/s")
    return " · ".join([f"cell [{number}] on {name_ranks(ranks)}", format_duration(seconds), *parts])


def _describe_rank(row: RankPlacement) -> str:
    if row.state == "waiting":
        return f"waiting in {row.waits_for}"
    text = _STATES.get(row.state, "running" if row.line is None else f"at line {row.line}")
    return f"{text}, the others wait for it" if row.lags else text
