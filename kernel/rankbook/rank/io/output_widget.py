"""Support for ipywidgets' `Output` on a rank: output within `with output:` appears in the widget.

The stock implementation captures all messages of a cell by its message id. In a cluster this does not work, because the
ranks of a cell share one message. Instead the rank itself collects the output and sets the widget's `outputs` state.

On the main thread all output of the process is captured, including subprocesses and C++ code; on another thread, as of
a callback, only text and displays of Python code. Without a front end, as in a script, nothing is captured.

`OutputWidgetHook` patches the class, `OutputWidgetTarget` collects events and limits the rate of updates, and
`OutputWidgetModel` turns the events into a list of notebook outputs.
"""

from __future__ import annotations

import _thread
import codecs
import contextlib
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rankbook.output.merger import ClearOutput, Emit, RichOutput, Stream
from rankbook.protocol import StreamName
from rankbook.protocol.messages import ErrorReport
from rankbook.rank import tracebacks
from rankbook.rank.io import comms
from rankbook.rank.io.output_capture import OutputCapture

_FLUSH_DELAY = 0.02
"""Seconds to wait for more output before an update."""
_MIN_FLUSH_INTERVAL = 0.1
"""Minimum seconds between two updates of a widget."""
_MAX_RATE = 300_000
"""Maximum characters per second: Jupyter's server drops output beyond a million, and this is one rank of several."""
_MODULE = "ipywidgets.widgets.widget_output"


class OutputWidgetTarget:
    """Collects the output for one widget. Any thread writes; the flushing thread sets the widget's state."""

    def __init__(self, widget: Any, queue_up: Callable[[OutputWidgetTarget], None]) -> None:  # noqa: ANN401 - an ipywidgets.Output
        self._widget = widget
        self._queue_up = queue_up
        self._model = OutputWidgetModel()
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}
        self._events: list[Event] = []
        self._queued = False
        # Two locks, because setting the widget's state calls its observers, which may print into the widget: that must
        # be possible during a flush.
        self._adding, self._flushing = threading.Lock(), threading.RLock()
        self._flushed, self._size = 0.0, 0
        self.due = 0.0

    def write(self, name: StreamName, data: bytes) -> None:
        """Add bytes of the stream `name`."""
        text = self._decoders[name].decode(data)
        if text:
            self._add(Stream(name, text))

    def display(self, kind: str, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None) -> bool:
        """Add a MIME bundle. Return False for an update of a display id that is not in this widget."""
        if kind != "update":
            self._add(RichOutput(data, metadata, display_id))
            return True
        # The ids are known only once the events are applied.
        self.flush()
        exists = self._model.has_display(display_id)
        if exists:
            self._add(RichOutput(data, metadata, display_id, update=True))
        return exists

    def clear(self, *, wait: bool) -> None:
        """Clear the output as `clear_output` does."""
        self._add(ClearOutput(wait))

    def fail(self, report: ErrorReport) -> None:
        """Add the error that ended the capture."""
        self._add(Error(report.name, report.value, report.traceback))

    def _add(self, event: Event) -> None:
        with self._adding:
            self._events.append(event)
            queued, self._queued = self._queued, True
        # The first event after a flush queues the widget. Every flush sends the whole state, so the time to the next
        # one grows with the size of the state.
        if not queued:
            self.due = max(
                time.monotonic() + _FLUSH_DELAY, self._flushed + max(_MIN_FLUSH_INTERVAL, self._size / _MAX_RATE)
            )
            self._queue_up(self)

    def flush(self) -> None:
        """Set the widget's state. Raises the exceptions of its observers."""
        with self._flushing:
            with self._adding:
                # Taken together with the flag, so that an event that comes now queues the widget again.
                events, self._events, self._queued = self._events, [], False
            if events:
                outputs = self._model.apply(self._widget.outputs, events)
                self._flushed, self._size = time.monotonic(), size_of(outputs)
                self._widget.outputs = tuple(outputs)


class OutputWidgetHook:
    """Redirects the output of this process into Output widgets.

    `shield` holds interrupts back; `report` formats an exception.
    """

    def __init__(
        self,
        capture: OutputCapture,
        shield: Callable[[], AbstractContextManager[None]],
        report: Callable[[BaseException], ErrorReport],
    ) -> None:
        self._capture = capture
        self._shield = shield
        self._report = report
        self._queue: queue.SimpleQueue[OutputWidgetTarget] = queue.SimpleQueue()
        self._started = _thread.allocate_lock()

    def patch_class(self, data: object) -> None:
        """Patch `ipywidgets.Output` when its first widget opens a comm; `data` is the data of comm_open."""
        # The class exists as soon as one of its objects opens a comm. Importing ipywidgets on every rank would be slow.
        output = getattr(sys.modules.get(_MODULE), "Output", None)
        state = data.get("state") if isinstance(data, dict) else None
        if not isinstance(state, dict) or state.get("_model_name") != "OutputModel" or output is None:
            return

        def enter(widget: Any) -> None:  # noqa: ANN401 - an ipywidgets.Output
            self.enter(widget)

        def leave(widget: Any, *ended: Any) -> Any:  # noqa: ANN401 - as above
            return self.leave(widget, *ended)

        # Once. The wrappers are functions, so that Python binds the widget to them.
        if not hasattr(output, "_rankbook_stock"):
            output._rankbook_stock = (output.__enter__, output.__exit__)
            output.__enter__, output.__exit__ = enter, leave

    def enter(self, widget: Any) -> None:  # noqa: ANN401 - an ipywidgets.Output
        """Begin `with widget:`. Nothing is captured if no front end knows the widget."""
        if not self._is_shown(widget):
            widget._rankbook_stock[0](widget)
            return
        with self._shield():
            self._capture.redirect(
                # One target per widget, which keeps the display ids and a pending clear from one `with` to the next.
                vars(widget).setdefault("_rankbook_target", OutputWidgetTarget(widget, self._queue_up))
            )

    def leave(self, widget: Any, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> Any:  # noqa: ANN401 - True, or what is false
        """End `with widget:`. As in stock ipywidgets an error is shown in the widget, and the cell continues."""
        target: OutputWidgetTarget | None = vars(widget).get("_rankbook_target")
        # The redirect may have ended with its cell, or the widget was not shown when the block began.
        if target is None or self._capture.current_redirect() is not target:
            return widget._rankbook_stock[1](widget, kind, error, trace) if not self._is_shown(widget) else None
        with self._shield():
            self._capture.end_redirect()
            # KeyboardInterrupt ends the cell, as without the widget.
            if isinstance(error, Exception):
                target.fail(self._error_report(error))
            target.flush()
        return isinstance(error, Exception)

    def _is_shown(self, widget: Any) -> bool:  # noqa: ANN401 - as above
        return not self._capture.forked and comms.is_open(getattr(widget.comm, "comm_id", None))

    def _error_report(self, error: Exception) -> ErrorReport:
        if threading.current_thread() is threading.main_thread():
            return self._report(error)
        text = "".join(traceback.format_exception(error))  # only the main thread may use the shell's formatter
        return tracebacks.as_report(tracebacks.name_of(error), tracebacks.text_of(error), text, None)

    def _queue_up(self, target: OutputWidgetTarget) -> None:
        self._queue.put(target)
        if self._started.acquire(blocking=False):
            _thread.start_new_thread(self._run, ())  # Thread.start waits, and an interrupt could hit it

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the signal must wake up the main thread
        waiting: list[OutputWidgetTarget] = []
        while True:
            # Sleep until the earliest target is due, or until another one is queued; without targets, without end.
            pause = max(0.0, min(target.due for target in waiting) - time.monotonic()) if waiting else None
            try:
                waiting.append(self._queue.get(timeout=pause))
            except queue.Empty:
                due = [target for target in waiting if target.due <= time.monotonic()]
                waiting = [target for target in waiting if target not in due]
                for target in due:
                    _flush_and_print_error(target)


def _flush_and_print_error(target: OutputWidgetTarget) -> None:
    try:
        target.flush()
    except BaseException as error:  # noqa: BLE001 - a user's observer of the widget; printed to the rank's stderr
        with contextlib.suppress(BaseException):  # sys.stderr may be a user's object
            traceback.print_exception(error, file=sys.stderr)


MAX_TEXT = 256 << 10
"""Maximum characters of text in one widget: every change sends all of it."""
CUT = "(earlier output is left out)\n"

Output = dict[str, Any]
"""An output in the format of a notebook file."""


@dataclass(frozen=True)
class Error:
    """The exception that ended `with output:`."""

    name: str
    value: str
    traceback: str


Event = Emit | Error


class OutputWidgetModel:
    """Turns events into the widget's next outputs. It remembers a pending clear and the display ids."""

    def __init__(self) -> None:
        self._clearing = False
        self._ids: dict[str, Output] = {}

    def has_display(self, display_id: str | None) -> bool:
        """Return True if a display with this id is in the widget."""
        return display_id in self._ids

    def apply(self, outputs: Iterable[Output], events: Iterable[Event]) -> list[Output]:
        """Return the outputs that result from `outputs` and `events`."""
        # The caller's outputs may differ from those of the last call: user code may set `widget.outputs` itself.
        now = list(outputs)
        for event in events:
            match event:
                case ClearOutput(wait=True):
                    self._clearing = True
                    continue
                case RichOutput(display_id=str(name), update=True):
                    old, new = self._ids[name], _bundle(event)
                    now = [new if output is old else output for output in now]
                    self._ids[name] = new
                    continue
            # `clear_output(wait=True)` is carried out by the next output.
            if self._clearing or isinstance(event, ClearOutput):
                now, self._clearing = [], False
                self._ids.clear()
            self._append(now, event)
        return _truncate(now)

    def _append(self, now: list[Output], event: Event) -> None:
        match event:
            case Stream(name, text):
                # Text joins the last output if that is text of the same stream, as in a notebook file.
                last = now[-1] if now else {}
                joins = (last.get("output_type"), last.get("name")) == ("stream", name)
                content = apply_carriage_returns(last["text"] + text if joins else text)
                # Replaces the last output if the text joins it (`joins` is 1), else appends.
                now[len(now) - joins :] = [{"output_type": "stream", "name": name, "text": content}]
            case RichOutput(display_id=display_id):
                now.append(_bundle(event))
                if display_id is not None:
                    self._ids[display_id] = now[-1]
            case Error(name, value, traceback):
                lines = traceback.split("\n")
                now.append({"output_type": "error", "ename": name, "evalue": value, "traceback": lines})


def _bundle(event: RichOutput) -> Output:
    return {"output_type": "display_data", "data": event.data, "metadata": event.metadata}


def apply_carriage_returns(text: str) -> str:
    """Return the text as a terminal shows it: text after a carriage return overwrites the line."""
    if "\r" not in text:
        return text
    return "\n".join(map(_line, text.replace("\r\n", "\n").split("\n")))


def _line(line: str) -> str:
    # With colours the columns cannot be compared, so the text after a carriage return replaces the line.
    visible, coloured = "", "\x1b" in line
    # Example: "10%\r5%" is shown as "5%%": the later text covers as many columns as it has.
    for part in line.split("\r"):
        visible = part + ("" if coloured else visible[len(part) :]) if part else visible
    return visible + ("\r" if line.endswith("\r") else "")


def _truncate(outputs: list[Output]) -> list[Output]:
    # Text is cut at the beginning. Displays stay: they are few.
    over = sum(len(output["text"]) for output in outputs if "text" in output) - MAX_TEXT
    if over <= 0:
        return outputs
    truncated: list[Output] = []
    for output in outputs:
        if over > 0 and "text" in output:
            text = output["text"]
            over -= len(text)
            if over >= 0:
                continue
            text, over = text[len(text) + over :], 0
            truncated.append({**output, "text": CUT + text[text.find("\n") + 1 :]})
        else:
            truncated.append(output)
    return truncated


def size_of(outputs: Iterable[Output]) -> int:
    """Return the approximate number of characters in a message with these outputs."""
    return sum(
        len(output.get("text", ""))
        + sum(len(value) for value in output.get("data", {}).values() if isinstance(value, str))
        for output in outputs
    )
