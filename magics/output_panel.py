"""Publish a cell's output in the notebook: the panel with the output by rank, sinks, and input prompts.

`Panel` shows the output by rank: a live widget while the cell runs, replaced by static HTML when the cell ends. The
HTML and the widget's messages are in widgets/output_panel.py. `JupyterSink`, `OutputWidgetSink`, `TerminalSink` and
`CapturedSink` publish merged output, `sink_for` and `ask_for` choose the sink and the prompt of the running front end.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock, RLock, Thread, Timer, current_thread
from typing import TYPE_CHECKING, Any

from IPython.core.displaypub import CapturingDisplayPublisher

from rankbook.coordinator.running_cell import RunningCell, Sink
from rankbook.coordinator.wait import Ask, ask_in_terminal
from rankbook.errors import RankbookError
from rankbook.formatting import strip_ansi
from rankbook.output.by_rank import BlockAdded, BlockRemoved, ByRankOutput, Change, OutputBlock, TextAppended
from rankbook.output.cell_result import CellResult, RankOutcome
from rankbook.output.merger import ClearOutput, Emit, RichOutput, Stream
from rankbook.protocol import RESULT, VIEW
from rankbook.ranks import format_ranks
from rankbook.widgets.live_view import still_metadata, widget_metadata
from rankbook.widgets.output_panel import CellPanel, choice_of, is_live, piece_html, skeleton, text_of, with_rows

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from rankbook.widgets.live_view import LiveView

_LATE_INTERVAL = 1.0
"""Seconds between two additions to an `Output` widget's state, which is sent as a whole. The front end needs some of
them to report what the widget has captured."""


class Panel:
    """The output panel of one cell, displayed when its first output arrives.

    Pass `page` to the cell as the destination of its output, and the submitted cell to `follow`. Output arrives on the
    coordinator's driver thread, also after the cell has ended: `_lock` orders it with the end. `cluster_key` is that of
    the ranks' cluster.
    """

    def __init__(self, sink: Sink, number: int, ranks: Sequence[int], view: str, cluster_key: str = "") -> None:
        self._sink = sink
        self._name = name = _new_name()
        # The widget is made with the first output: a cell without output shows no empty panel.
        self._make_widget: Callable[[], CellPanel] = lambda: CellPanel(name, f"cell [{number}]", ranks, view)
        self._widget: CellPanel | None = None
        # Also held while output is published, so that messages are sent in the order of the changes.
        self._lock = RLock()
        self._ended = False
        # Blocks without their text, by key: text may be appended to them after the end.
        self._ended_blocks: dict[int, OutputBlock] = {}
        # Blocks that are displayed below the panel, with the ranks in their headings.
        self._displays_below: dict[int, tuple[int, ...]] = {}
        self.page = ByRankOutput(self._apply_changes, key=self._name, cluster_key=cluster_key)

    def follow(self, cell: RunningCell) -> None:
        """Replace the live panel by static HTML when the cell ends, which may already have happened."""
        # The driver thread calls this. If the cell ends between these two statements, `_close` is called twice, and the
        # second call does nothing.
        cell.on_change.append(lambda: self._close() if cell.result is not None else None)
        if cell.result is not None:
            self._close()

    def _apply_changes(self, changes: Sequence[Change]) -> None:
        with self._lock:
            # Output that arrives after the end, for example from a thread of a rank, cannot change the static panel.
            if self._ended:
                self._emit_late(changes)
                return
            if self._widget is not None:
                self._widget.apply(changes)
            else:
                self._widget = self._make_widget()
                self._widget.apply(changes)
                self._sink.emit([RichOutput(self._widget.bundle(), {}, self._name)])
            for change in changes:
                match change:
                    case BlockAdded(block) if block.data is not None and is_live(block.data):
                        self._show_below(block.key, block.ranks, block.data)
                    # An update that the panel itself shows. The key stays: a later one may be shown below again.
                    case BlockAdded(block) if block.data is not None and block.key in self._displays_below:
                        self._show_below(block.key, (), {"text/plain": ""})
                    case BlockRemoved(key, forgotten=False):
                        self._hide_below(key)

    def _close(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            blocks = self.page.blocks
            self._ended_blocks = {block.key: replace(block, text="") for block in blocks if block.data is None}
            # The driver keeps the last cells, and so this panel; the widget has its whole HTML.
            widget, self._widget = self._widget, None
            if widget is not None:
                update = getattr(self._sink, "updates_displays", True)
                self._sink.emit([RichOutput(dict(widget.end(blocks)), {}, self._name, update=update)])

    def _show_below(self, key: int, ranks: tuple[int, ...], data: Mapping[str, Any]) -> None:
        """Display output below the panel with its ranks: a widget, or output that is late.

        The panel itself contains the text of a widget.
        """
        update, before = key in self._displays_below, self._displays_below.get(key, ())
        self._displays_below[key] = ranks
        label = {"text/plain": f"[{format_ranks(ranks)}]" if ranks else ""}
        heading = [] if before == ranks else [RichOutput(label, {}, f"{self._name}-{key}-of", update=update)]
        self._sink.emit([*heading, RichOutput(dict(data), {}, f"{self._name}-{key}", update=update)])

    def _hide_below(self, key: int) -> None:
        # A message can update an output but not remove it, so a removed display and its heading become empty text.
        if key in self._displays_below:
            self._show_below(key, (), {"text/plain": ""})
            del self._displays_below[key]

    def _emit_late(self, changes: Sequence[Change]) -> None:
        """Publish output that arrives after the cell's end, from ranks that still run or from their threads."""
        for change in changes:
            match change:
                # Displays and progress bars change, so they are updated in place.
                case BlockAdded(block) if block.data is not None:
                    self._show_below(block.key, block.ranks, block.data)
                case BlockAdded(block) if block.live:
                    self._show_below(block.key, (), {"text/plain": text_of([block])})
                case BlockRemoved(key, forgotten=False):
                    self._hide_below(key)
                case BlockAdded(block):
                    self._ended_blocks[block.key] = replace(block, text="")
                    self._sink.emit([Stream(block.stream, text_of([block]) + "\n")])
                case TextAppended(key, text):
                    block = replace(self._ended_blocks.get(key, OutputBlock(key, ())), text=text)
                    self._sink.emit([Stream(block.stream, text_of([block]) + "\n")])
                case _:
                    pass  # the static panel does not change


def static_bundle(result: CellResult, view: str) -> dict[str, str]:
    """Return the output of a finished cell by rank as a mime bundle: the ranks' text, then their displays."""
    ranks = [outcome.rank for outcome in result.outcomes]
    blocks = _group_blocks(result.outcomes)
    name = _new_name()
    inner = with_rows([piece_html(block, ranks) for block in blocks], [block.ranks for block in blocks], ranks)
    title = f"cell [{result.number}]"
    html = skeleton(name, title, ranks, choice_of(view, ranks), pieces=inner)
    return {"text/html": html, "text/plain": text_of(blocks)}


def _new_name() -> str:
    return f"rankbook-panel-{uuid.uuid4().hex[:12]}"


def _group_blocks(outcomes: Sequence[RankOutcome]) -> list[OutputBlock]:
    """Group the ranks' output into blocks; equal output of several ranks is one block."""
    blocks: list[OutputBlock] = []

    def add(values: dict[int, Any], **kind: Any) -> None:  # noqa: ANN401 - fields of an OutputBlock
        alike: list[tuple[Any, list[int]]] = []
        for rank, value in values.items():
            # Compared one by one: mime bundles are dicts, which cannot be keys.
            for other, ranks in alike:
                if other == value:
                    ranks.append(rank)
                    break
            else:
                alike.append((value, [rank]))
        for value, ranks in alike:
            field = {"text": value} if isinstance(value, str) else {"data": value}
            blocks.append(OutputBlock(len(blocks), tuple(ranks), **field, **kind))

    add({outcome.rank: outcome.stdout for outcome in outcomes if outcome.stdout})
    add({outcome.rank: outcome.stderr for outcome in outcomes if outcome.stderr}, stream="stderr")
    for index in range(max((len(outcome.displays) for outcome in outcomes), default=0)):
        add({outcome.rank: outcome.displays[index] for outcome in outcomes if len(outcome.displays) > index})
    add({outcome.rank: outcome.result for outcome in outcomes if outcome.result is not None})
    return blocks


class RequestedViews:
    """Show the live views that a cell on the ranks asks for (`VIEW`), each of them once.

    A view is made on a thread of its own: it asks the ranks, and the sink's thread receives their answers.
    """

    def __init__(self, publish: Callable[[Sequence[Emit]], None]) -> None:
        self._publish = publish
        self._views: dict[str, LiveView] = {}
        # The thread that shows a view. After a clear it publishes nothing: the next request has a thread of its own.
        self._shown: dict[str, Thread] = {}
        self._lock = Lock()
        self._threads: list[Thread] = []

    def show(self, request: Mapping[str, Any]) -> None:
        """Show the view, unless the cell shows it already."""
        # Every rank of the cell sends the same request.
        if (key := repr(request)) not in self._shown:
            before = self._threads[-1:]
            # Not on this thread: it is the one that receives the ranks' answers, which the view waits for.
            thread = Thread(target=self._make, args=(key, request, before), name="rankbook-view", daemon=True)
            self._shown[key] = thread
            self._threads.append(thread)
            thread.start()

    def output_cleared(self) -> None:
        """Show views again that are requested from now on: the merger repeats the output that a clear may not lose."""
        with self._lock:
            self._shown.clear()

    def wait_shown(self, *, timeout: float = 10.0) -> None:
        """Wait until the requested views are shown. Call it before the cell ends: some front ends read no further."""
        # The last thread has waited for all earlier ones.
        for thread in self._threads[-1:]:
            thread.join(timeout)

    def _make(self, key: str, request: Mapping[str, Any], before: Sequence[Thread]) -> None:
        from rankbook.magics import views

        for thread in before:  # views appear in the order of their requests
            thread.join()
        try:
            if key not in self._views:
                self._views[key] = views.make_requested(request)
            items: list[Emit] = [
                RichOutput(dict(out.data), still_metadata(out.still) or {}, out.display_id)
                for out in self._views[key].outputs()
            ]
        except RankbookError as error:
            items = [Stream("stderr", f"{error}\n")]
        with self._lock:
            if self._shown.get(key) is current_thread():
                self._publish(items)


class JupyterSink:
    """Publish output into one cell of a Jupyter front end, from any thread, also after the cell has ended.

    `number`: publish the ranks' results as the cell's own, `Out[number]`; None: as displays. `views`: the views that
    the cell has asked for. `updates_displays`: the front end changes a display when an update of it is published.
    """

    shows_live = True
    updates_displays = True

    def __init__(self, kernel: Any, number: int | None = None) -> None:  # noqa: ANN401 - an ipykernel Kernel, whose types are loose
        self.kernel = kernel
        self._number = number
        self._session = kernel.session
        self._socket = kernel.iopub_socket
        # Taken when the cell starts. Output that arrives later belongs to this cell, whichever cell runs then.
        self.parent = kernel.get_parent("shell")
        self.views = RequestedViews(self.emit)
        # Called after the cell's output was cleared, with everything that is not the ranks'.
        self.on_clear: list[Callable[[], None]] = []

    def emit(self, items: Sequence[Emit]) -> None:
        """See `Sink`."""
        for item in items:
            if isinstance(item, RichOutput) and VIEW in item.data:
                self.views.show(item.data[VIEW])
                continue
            if isinstance(item, ClearOutput):
                self.views.output_cleared()
            self._send(item)
            if isinstance(item, ClearOutput):
                for callback in self.on_clear:
                    callback()

    def _send(self, item: Emit) -> None:
        kind, content = as_message(item, self._number)
        # Not IPython's `display`: that would use the parent of the current thread, and output arrives on the driver
        # thread. A session may send from any thread through ipykernel's iopub socket.
        self._session.send(self._socket, kind, content, parent=self.parent, ident=kind.encode())


class OutputWidgetSink(JupyterSink):
    """Publish the output of a cell that an `ipywidgets.Output` captures, as in `with output:` of a button's callback.

    The widget ignores updates of the displays in it, so that nothing is shown live. After the `with` block, as from a
    background cell, the front end drops messages of the callback: output is then added to the widget's state.
    """

    shows_live = False
    updates_displays = False
    _late_lock = Lock()  # one for all sinks, as several may add to the same widget

    def __init__(self, kernel: Any, number: int | None, widget: Any) -> None:  # noqa: ANN401 - an ipykernel Kernel and an Output
        super().__init__(kernel, number)
        self._widget = widget
        self._late: list[Emit] = []
        self._late_displays: dict[str, dict[str, Any]] = {}

    def _send(self, item: Emit) -> None:
        # The same display may also be shown outside of the widget, where an update changes it.
        is_update = isinstance(item, RichOutput) and item.update
        if is_update or self._widget.msg_id == _message_id(self.parent):
            super()._send(item)
            return
        with self._late_lock:
            self._late.append(item)
            if len(self._late) == 1:
                timer = Timer(_LATE_INTERVAL, self._add_late)
                timer.daemon = True
                timer.start()

    def _add_late(self) -> None:
        with self._late_lock:
            late, self._late = self._late, []
            outputs = list(self._widget.outputs)
            for item in late:
                if isinstance(item, ClearOutput):
                    outputs.clear()
                    continue
                kind, content = as_message(item)
                display_id = content.pop("transient", {}).get("display_id")  # a part of messages only
                output = {"output_type": kind, **content}
                if display_id is not None:
                    # The end of a panel replaces its widget, which is closed.
                    if (earlier := self._late_displays.get(display_id)) in outputs:
                        outputs.remove(earlier)
                    self._late_displays[display_id] = output
                outputs.append(output)
            self._widget.outputs = tuple(outputs)


def output_widget_sink(shell: InteractiveShell, number: int | None = None) -> OutputWidgetSink | None:
    """Return a sink for the `ipywidgets.Output` that captures the running cell; None if there is no such widget."""
    # Not imported here: a notebook that has not done so has no such widget.
    module = sys.modules.get("ipywidgets.widgets.widget_output")
    kernel = getattr(shell, "kernel", None)
    message_id = "" if kernel is None or module is None else _message_id(kernel.get_parent("shell"))
    if module is None or not message_id:
        return None
    base = sys.modules["ipywidgets.widgets.widget"]
    widgets = base._instances if hasattr(base, "_instances") else base.Widget.widgets  # the latter before ipywidgets 8
    # The newest first: it is the innermost one, unless the user has nested them in another order.
    for widget in reversed(list(widgets.values())):
        if isinstance(widget, module.Output) and widget.msg_id == message_id:
            return OutputWidgetSink(kernel, number, widget)
    return None


def _message_id(parent: Mapping[str, Any] | None) -> str:
    return str((parent or {}).get("header", {}).get("msg_id", ""))


def as_message(item: Emit, number: int | None = None) -> tuple[str, dict[str, Any]]:
    """Return the Jupyter message that shows `item`: its type and content.

    A result becomes that of cell `number`, if given.
    """
    match item:
        case Stream(name, text):
            return "stream", {"name": name, "text": text}
        case RichOutput(data, metadata, display_id, update):
            # RESULT is Rankbook's own mark for the value of a cell's last expression.
            output_metadata = {key: value for key, value in metadata.items() if key != RESULT} | widget_metadata(data)
            if number is not None and RESULT in metadata and not update:
                return "execute_result", {"data": data, "metadata": output_metadata, "execution_count": number}
            content: dict[str, Any] = {"data": data, "metadata": output_metadata, "transient": {}}
            if display_id is not None:
                content["transient"] = {"display_id": display_id}
            return ("update_display_data" if update else "display_data"), content
        case ClearOutput(wait):
            return "clear_output", {"wait": wait}


class TerminalSink:
    """Write output to a terminal or a file: text unchanged, displays as their text/plain.

    `owns_cursor`: nothing else writes to the terminal until the cell ends, as the prompt does during a background cell.
    """

    can_clear = False

    def __init__(self, *, owns_cursor: bool = True) -> None:
        # The streams of the running cell, which `%%capture` may have replaced.
        self._out, self._err = sys.stdout, sys.stderr
        # A progress bar changes ten times a second. Where it cannot be written again in place, only its last state is.
        self.shows_live = owns_cursor and _can_move_cursor(self._out)
        self._display_texts: dict[str, str] = {}
        self._last_display: str | None = None
        self.views = RequestedViews(self.emit)

    def emit(self, items: Sequence[Emit]) -> None:
        """See `Sink`."""
        for item in items:
            match item:
                case Stream(name, text):
                    self._write(self._out if name == "stdout" else self._err, text)
                case RichOutput(data) if VIEW in data:
                    self.views.show(data[VIEW])
                case RichOutput(data, _, display_id, _):
                    text = str(data.get("text/plain", "")).rstrip("\n") + "\n"
                    before = None if display_id is None else self._display_texts.get(display_id)
                    if before != text:
                        self._write(self._out, self._erase(display_id, before) + text)
                        if display_id is not None:
                            self._display_texts[display_id] = text
                            self._last_display = display_id
                case ClearOutput():
                    pass

    def _erase(self, display_id: str | None, text: str | None) -> str:
        """Return what erases the display, which shows `text`, if it is the last output; "" if it stays.

        Further up, a terminal cannot change what it shows: the new text is printed below.
        """
        if text is None or not self.shows_live or display_id != self._last_display:
            return ""
        columns = shutil.get_terminal_size().columns
        rows = sum(-(-max(1, len(strip_ansi(line))) // columns) for line in text.splitlines())
        return f"\x1b[{rows}F\x1b[J"

    def _write(self, stream: Any, text: str) -> None:  # noqa: ANN401 - whatever sys.stdout is
        stream.write(text)
        stream.flush()
        self._last_display = None


def _can_move_cursor(stream: Any) -> bool:  # noqa: ANN401 - whatever sys.stdout is
    is_terminal = getattr(stream, "isatty", None)
    return is_terminal is not None and is_terminal() and os.environ.get("TERM") != "dumb"


class CapturedSink(TerminalSink):
    """Output of a cell of `kernel` whose text or displays are captured, as by `%%capture` or `redirect_stdout`.

    Streams that were replaced get their text, and `publisher` the displays. The front end gets the rest: the text of
    the other streams and, without a publisher, the displays. `number`: see `JupyterSink`.
    """

    def __init__(
        self,
        kernel: Any,  # noqa: ANN401 - ipykernel's
        number: int | None = None,
        publisher: CapturingDisplayPublisher | None = None,
    ) -> None:
        super().__init__()
        self.shows_live = False  # a line that was shown live would not be part of the text
        self.kernel, self.parent = kernel, kernel.get_parent("shell")
        self._front_end = JupyterSink(kernel, number)
        self._publisher = publisher
        self._captures = {"stdout": _is_redirected(self._out), "stderr": _is_redirected(self._err)}

    def emit(self, items: Sequence[Emit]) -> None:
        """See `Sink`."""
        for item in items:
            match item:
                case RichOutput(data) if VIEW not in data and self._publisher is not None:
                    _, content = as_message(item)
                    self._publisher.publish(
                        content["data"], content["metadata"], transient=content["transient"], update=item.update
                    )
                case Stream(name) if self._captures[name]:
                    super().emit([item])
                case RichOutput(data) if VIEW in data:
                    super().emit([item])
                case _:
                    self._front_end.emit([item])


def _is_redirected(stream: Any) -> bool:  # noqa: ANN401 - whatever sys.stdout is
    # Objects of other types, such as one that also writes a log, may pass the text on to the kernel's own stream, which
    # takes text of the driver thread for that of another cell.
    return type(stream) in (io.StringIO, io.TextIOWrapper)


def sink_for(
    shell: InteractiveShell, number: int | None = None, *, background: bool = False
) -> JupyterSink | TerminalSink:
    """Return a sink for the running cell. `number`: see `JupyterSink`. `background`: the cell's magic returns first.

    What the notebook has printed so far is sent first.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return TerminalSink(owns_cursor=not background)
    # ipykernel sends text with a delay of up to 0.2 s, which a message of the sink would overtake.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a stream that the user has put there, for example a closed one
            stream.flush()
    publisher = shell.display_pub if isinstance(shell.display_pub, CapturingDisplayPublisher) else None
    if publisher is not None or _is_redirected(sys.stdout) or _is_redirected(sys.stderr):
        return CapturedSink(kernel, number, publisher)
    return output_widget_sink(shell, number) or JupyterSink(kernel, number)


def ask_for(shell: InteractiveShell) -> Ask:
    """Return the front end's input prompt."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return ask_in_terminal

    def ask(prompt: str, password: bool) -> str:
        answer = kernel.getpass(prompt) if password else kernel.raw_input(prompt)
        return str(answer)

    return ask
