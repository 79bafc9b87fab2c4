"""Comms of the widgets that are created on this rank, and the output that ipywidgets' `Output` shows.

Outgoing comm messages are sent to the notebook. Incoming ones are handled on a thread of their own, which the first
message starts: a slider that is moved while a cell runs changes its value at once, and its observers run beside the
cell.

The page may answer the opening of a comm while the cell is still constructing its widget, as ipympl's page does for a
figure. So the messages for a comm that a cell opens are held until the widget is displayed, until another widget refers
to it, or until the cell ends.

Output within `with output:` appears in the widget `Output`. The stock implementation captures all messages of a cell by
its message id. In a cluster this does not work, because the ranks of a cell share one message. Instead the rank itself
collects the output and sets the widget's `outputs` state. On the main thread all output of the process is captured,
including subprocesses and C++ code; on another thread, as of a callback, only text and displays of Python code. Without
a front end, as in a script, nothing is captured. `OutputWidgetHook` patches the class, `OutputWidgetTarget` collects
events and limits the rate of updates, and `OutputWidgetModel` turns the events into a list of notebook outputs.
"""

from __future__ import annotations

import _thread
import codecs
import contextlib
import json
import os
import queue
import re
import signal
import sys
import threading
import time
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import date
from numbers import Integral, Real
from typing import Any, Literal, NoReturn, cast

import comm
from comm.base_comm import BaseComm, CommManager

from rankbook.ipython_compat import replace_ipykernel_comm
from rankbook.output.merger import ClearOutput, Emit, RichOutput, Stream
from rankbook.protocol import StreamName, telemetry
from rankbook.protocol.messages import CommFromRank, CommToRank, ErrorReport
from rankbook.queues import get_within
from rankbook.rank import tracebacks
from rankbook.rank.output_capture import OutputCapture
from rankbook.rank.tracebacks import text_of
from rankbook.transport import RankLink

_Kind = Literal["open", "msg", "close"]

_REFERENCE = re.compile("IPY_MODEL_([0-9a-zA-Z-]+)")
"""Reference to another widget in the state of a widget."""


# The way of a message, from a slider in the browser to its observer on the rank and back:
#
#     browser -> notebook's kernel -> magics/comm_bridge.py -> CommToRank -> control thread -> `receive_comm`
#     comm thread: `_CommRegistry.run` -> ipywidgets sets the trait and calls observers
#     an observer changes another trait -> `publish_msg` -> CommFromRank -> the notebook -> browser
class RankComm(BaseComm):
    """The rank's end of a comm."""

    kernel: object = "rankbook"
    """ipywidgets 7 sends messages only over a comm that has a kernel."""

    def publish_msg(
        self,
        msg_type: str,
        data: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        buffers: Sequence[bytes | memoryview] | None = None,
        **_keys: Any,  # noqa: ANN401 - comm's own
    ) -> None:
        """Send a comm message to the notebook, see `comm.base_comm.BaseComm`."""
        # None in the forkserver and in a forked child.
        if _registry.link is not None:
            if msg_type not in ("comm_open", "comm_msg", "comm_close"):
                raise ValueError(f"invalid msg_type={msg_type!r}: expected 'comm_open', 'comm_msg' or 'comm_close'")
            if msg_type == "comm_open" and _registry.on_open is not None:
                _registry.on_open(data or {})
            kind = cast("_Kind", msg_type.removeprefix("comm_"))
            name, content = text_of(self.comm_id), json.dumps({} if data is None else data, default=plain_value)
            # Before the opening leaves: the front end's answer must already find its comm held.
            _registry.held.message_sent(kind, name, content)
            about = json.dumps(metadata or {}, default=plain_value)
            message = CommFromRank(kind, name, text_of(self.target_name), content, about)
            frames = [_as_bytes(memoryview(buffer)) for buffer in buffers or ()]
            with _registry.shield():  # an interrupt would leave half of the message on the wire
                _registry.link.send(message, frames)

    def handle_msg(self, msg: dict[str, Any]) -> None:
        """Handle a message of the front end; while a cell runs, without IPython's events of a cell's begin and end.

        At these, matplotlib's inline backend shows and closes the figures of the process, also one that the cell draws.
        """
        if not _registry.held.in_cell:
            super().handle_msg(msg)
        elif self._msg_callback is not None:
            self._msg_callback(msg)

    def __reduce__(self) -> NoReturn:
        # A copy on another rank would have the id of this comm, and move or close this rank's widget.
        raise TypeError("a widget belongs to the process that has made it")

    def __del__(self) -> None:
        """Send no message: the garbage collector may run in the middle of another message."""


def plain_value(value: object) -> str | int | float:
    """Return a value that JSON lacks as the nearest one that it has, as Jupyter's kernels do. Raises TypeError."""
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, Integral):  # NumPy's numbers
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _as_bytes(view: memoryview) -> memoryview:
    # An empty view, or one in another order, cannot be cast.
    return view.cast("B") if view.c_contiguous and view.nbytes else memoryview(bytes(view))


_Received = tuple[CommToRank, Sequence[memoryview]]


class HeldMessages:
    """The messages for comms that the running cell has opened and whose widgets may not be complete. Any thread.

    `deliver` takes the messages that are not held, in the order in which they came.
    """

    def __init__(self, deliver: Callable[[_Received], None]) -> None:
        self._deliver = deliver
        self._lock = threading.Lock()
        # By comm id. An entry without messages is a comm whose messages will be held.
        self._held: dict[str, list[_Received]] = {}
        self.in_cell = False
        """True while the rank runs a task."""
        self.comm_thread = 0
        """The thread that handles the messages, which cannot come before it has constructed a widget itself."""

    def begin_cell(self) -> None:
        """Hold the messages for comms that are opened from now on."""
        self.in_cell = True

    def end_cell(self) -> None:
        """Deliver everything, and hold nothing until the next cell begins."""
        self.in_cell = False
        self.release()

    def message_sent(self, kind: str, name: str, content: str) -> None:
        """Record what the rank sends: an opening begins to hold; a state that refers to a widget releases that."""
        # The frequent case is that nothing is held.
        if self._held:
            self.release(_REFERENCE.findall(content))
        if kind == "open" and self.in_cell and threading.get_ident() != self.comm_thread:
            with self._lock:
                self._held[name] = []

    def message_received(self, received: _Received) -> None:
        """Hold or deliver a message."""
        # Delivering under the lock keeps the order of the messages of a comm. `deliver` only puts into a queue.
        with self._lock:
            pending = self._held.get(received[0].comm)
            if pending is None:
                self._deliver(received)
            else:
                pending.append(received)

    def release(self, names: Iterable[str] | None = None) -> None:
        """Deliver the messages of the comms `names`, by default of all, and hold no more of them."""
        with self._lock:
            for name in self._held.copy() if names is None else names:
                for received in self._held.pop(name, ()):
                    self._deliver(received)


class _CommRegistry:
    """The comms of this process, and the thread that handles incoming messages."""

    def __init__(self) -> None:
        self.manager = CommManager()
        self.link: RankLink | None = None
        self.shield: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.on_open: Callable[[dict[str, Any]], None] | None = None
        self.inbox: queue.SimpleQueue[_Received] = queue.SimpleQueue()
        self.held = HeldMessages(self.inbox.put)
        # Acquired once and never released, so that exactly one thread is started, by the first message.
        self.started = _thread.allocate_lock()

    def run(self) -> None:
        """Handle incoming messages forever."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the signal must wake up the main thread
        self.held.comm_thread = threading.get_ident()
        if telemetry.this_device.startswith("cuda"):
            import torch  # the rank has imported it

            torch.cuda.set_device(telemetry.this_device)  # the current device belongs to the thread
        while True:
            message, frames = self.inbox.get()
            end = self.manager.comms.get(message.comm)
            # The rank has closed the comm meanwhile.
            if end is None:
                continue
            content = {"comm_id": message.comm, "data": json.loads(message.content)}
            msg = {"content": content, "metadata": json.loads(message.metadata), "buffers": list(frames)}
            try:
                if message.kind == "close":
                    # Before the handlers run, as in `CommManager.comm_close`.
                    self.manager.unregister_comm(end)
                    end.handle_close(msg)
                else:
                    end.handle_msg(msg)
            except BaseException as error:  # noqa: BLE001 - user code; printed to the rank's stderr
                with contextlib.suppress(BaseException):  # sys.stderr may be a user's object
                    traceback.print_exception(error, file=sys.stderr)


_registry = _CommRegistry()


def prepare_comms() -> None:
    """Make the `comm` package create `RankComm` objects.

    Called in the forkserver, before anything imports ipywidgets.
    """
    # These two functions of the package `comm` exist to be replaced.
    comm.create_comm = RankComm
    comm.get_comm_manager = lambda: _registry.manager
    replace_ipykernel_comm(RankComm, CommManager)


def attach_comms(
    link: RankLink,
    shield: Callable[[], AbstractContextManager[None]],
    on_open: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Send the comm messages of this process over `link`. A forked child process sends none: the link is its parent's.

    `shield` holds interrupts back; `on_open` is called with the data of every comm_open message.
    """
    _registry.link, _registry.shield, _registry.on_open = link, shield, on_open
    os.register_at_fork(after_in_child=_detach)


def _detach() -> None:
    _registry.link = None
    _registry.held = HeldMessages(_registry.inbox.put)  # another thread may have held the lock of the old one


def receive_comm(message: CommToRank, frames: Sequence[memoryview]) -> None:
    """Queue a message for the comm thread."""
    _registry.held.message_received((message, frames))
    if _registry.started.acquire(blocking=False):
        _thread.start_new_thread(_registry.run, ())  # Thread.start would wait for the new thread


def begin_cell() -> None:
    """Hold the messages for the comms that the cell opens until their widgets are complete."""
    _registry.held.begin_cell()


def release_messages() -> None:
    """Deliver the messages that are held: a widget is displayed."""
    _registry.held.release()


def end_cell() -> None:
    """Deliver the messages that are held, and hold no more."""
    _registry.held.end_cell()


def is_open(name: object) -> bool:
    """Return True if a comm with this id is open."""
    return isinstance(name, str) and name in _registry.manager.comms


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
        return not self._capture.forked and is_open(getattr(widget.comm, "comm_id", None))

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
                waiting.append(get_within(self._queue, pause))
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
