"""Publish a cell's output in the notebook: the panel with the output by rank, sinks, and input prompts.

`Panel` shows the output by rank: a live widget while the cell runs, replaced by static HTML when the cell ends. The
HTML and the widget's messages are in widgets/output_panel.py. `JupyterSink` and `TerminalSink` publish merged output,
`sink_for` and `ask_for` choose the sink and the prompt of the running front end.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any

from rankbook.coordinator.running_cell import RunningCell, Sink
from rankbook.coordinator.wait import Ask, ask_in_terminal
from rankbook.output.by_rank import BlockAdded, BlockRemoved, ByRankOutput, Change, OutputBlock, TextAppended
from rankbook.output.cell_result import CellResult, RankOutcome
from rankbook.output.merger import ClearOutput, Emit, RichOutput, Stream
from rankbook.protocol.base import RESULT
from rankbook.ranks import format_ranks
from rankbook.widgets.output_panel import CellPanel, choice_of, is_live, piece_html, skeleton, text_of

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class Panel:
    """The output panel of one cell, displayed when its first output arrives.

    Pass `page` to the cell as the destination of its output, and the submitted cell to `follow`. Output arrives on the
    coordinator's driver thread, also after the cell has ended: `_lock` orders it with the end.
    """

    def __init__(self, sink: Sink, number: int, ranks: Sequence[int], view: str) -> None:
        self._sink = sink
        self._name = name = _new_name()
        self._make: Callable[[], CellPanel] = lambda: CellPanel(name, f"cell [{number}]", ranks, view)
        self._widget: CellPanel | None = None
        self._lock = RLock()
        self._ended = False
        self._ranks_of: dict[int, tuple[int, ...]] = {}
        self._below: dict[int, tuple[int, ...]] = {}
        self.page = ByRankOutput(self._told, key=self._name)

    def follow(self, cell: RunningCell) -> None:
        """Replace the live panel by static HTML when the cell ends, which may already have happened."""
        cell.on_change.append(lambda: self._end() if cell.result is not None else None)
        if cell.result is not None:
            self._end()

    def _told(self, changes: Sequence[Change]) -> None:
        with self._lock:
            if self._ended:
                self._late(changes)
                return
            if self._widget is not None:
                self._widget.tell(changes)
            else:
                self._widget = self._make()
                self._widget.tell(changes)
                self._sink.emit([RichOutput(self._widget.bundle(), {}, self._name)])
            for change in changes:
                match change:
                    case BlockAdded(piece) if piece.data is not None and is_live(piece.data):
                        self._show_below(piece.key, piece.ranks, piece.data)
                    case BlockRemoved(key, forgotten=False) if key in self._below:
                        self._show_below(key, (), {"text/plain": ""})
                        del self._below[key]

    def _end(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            pieces = self.page.pieces
            self._ranks_of = {piece.key: piece.ranks for piece in pieces}
            if self._widget is not None:
                self._sink.emit([RichOutput(dict(self._widget.end(pieces)), {}, self._name, update=True)])

    def _show_below(self, key: int, ranks: tuple[int, ...], data: Mapping[str, Any]) -> None:
        """Display output that static HTML cannot show, such as a widget, below the panel with its ranks.

        The panel itself contains its text.
        """
        before = self._below.get(key)
        self._below[key] = ranks
        label = {"text/plain": f"[{format_ranks(ranks)}]" if ranks else ""}
        heading = (
            [] if before == ranks else [RichOutput(label, {}, f"{self._name}-{key}-of", update=before is not None)]
        )
        self._sink.emit([*heading, RichOutput(dict(data), {}, f"{self._name}-{key}", update=before is not None)])

    def _late(self, changes: Sequence[Change]) -> None:
        """Publish output that arrives after the cell's end, from ranks that still run or from their threads."""
        for change in changes:
            match change:
                case BlockAdded(piece) if piece.data is not None:
                    label = {"text/plain": f"[{format_ranks(piece.ranks)}]"}
                    self._sink.emit([RichOutput(label, {}), RichOutput(dict(piece.data), {})])
                case BlockAdded(piece):
                    self._ranks_of[piece.key] = piece.ranks
                    self._sink.emit([Stream(piece.stream, text_of([piece]) + "\n")])
                case TextAppended(key, text):
                    piece = OutputBlock(key, self._ranks_of.get(key, ()), text=text)
                    self._sink.emit([Stream("stdout", text_of([piece]) + "\n")])
                case _:
                    pass  # the static panel does not change


def still_bundle(result: CellResult, view: str) -> dict[str, str]:
    """Return the output of a finished cell by rank as a mime bundle: the ranks' text, then their displays."""
    ranks = [outcome.rank for outcome in result.outcomes]
    pieces = _pieces_of(result.outcomes)
    name = _new_name()
    inner = "".join(piece_html(piece, ranks) for piece in pieces)
    title = f"cell [{result.number}]"
    html = skeleton(name, title, ranks, choice_of(view, ranks), pieces=inner)
    return {"text/html": html, "text/plain": text_of(pieces)}


def _new_name() -> str:
    return f"rankbook-panel-{uuid.uuid4().hex[:12]}"


def _pieces_of(outcomes: Sequence[RankOutcome]) -> list[OutputBlock]:
    """Group the ranks' output into blocks; equal output of several ranks is one block."""
    blocks: list[OutputBlock] = []

    def add(values: dict[int, Any], **kind: Any) -> None:  # noqa: ANN401 - fields of an OutputBlock
        alike: list[tuple[Any, list[int]]] = []
        for rank, value in values.items():
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


class JupyterSink:
    """Publish output into one cell of a Jupyter front end, from any thread, also after the cell has ended.

    `number`: publish the ranks' results as the cell's own, `Out[number]`; None: as displays.
    """

    def __init__(self, kernel: Any, number: int | None = None) -> None:  # noqa: ANN401 - an ipykernel Kernel, whose types are loose
        self.kernel = kernel
        self._number = number
        self._session = kernel.session
        self._socket = kernel.iopub_socket
        self.parent = kernel.get_parent("shell")

    def emit(self, items: Sequence[Emit]) -> None:
        """See `Sink`."""
        for item in items:
            kind, content = as_message(item, self._number)
            self._session.send(self._socket, kind, content, parent=self.parent, ident=kind.encode())


def as_message(item: Emit, number: int | None = None) -> tuple[str, dict[str, Any]]:
    """Return the Jupyter message that shows `item`: its type and content.

    A result becomes that of cell `number`, if given.
    """
    match item:
        case Stream(name, text):
            return "stream", {"name": name, "text": text}
        case RichOutput(data, metadata, display_id, update):
            shown = {key: value for key, value in metadata.items() if key != RESULT}
            if number is not None and RESULT in metadata and not update:
                return "execute_result", {"data": data, "metadata": shown, "execution_count": number}
            content: dict[str, Any] = {"data": data, "metadata": shown, "transient": {}}
            if display_id is not None:
                content["transient"] = {"display_id": display_id}
            return ("update_display_data" if update else "display_data"), content
        case ClearOutput(wait):
            return "clear_output", {"wait": wait}


class TerminalSink:
    """Write output to a terminal or a file: text unchanged, displays as their text/plain."""

    def __init__(self) -> None:
        self._out, self._err = sys.stdout, sys.stderr
        self._live: dict[str, str] = {}

    def emit(self, items: Sequence[Emit]) -> None:
        """See `Sink`."""
        for item in items:
            match item:
                case Stream(name, text):
                    self._write(self._out if name == "stdout" else self._err, text)
                case RichOutput(data, _, display_id, _):
                    text = str(data.get("text/plain", "")).rstrip("\n") + "\n"
                    if display_id is None or self._live.get(display_id) != text:
                        self._write(self._out, text)
                        if display_id is not None:
                            self._live[display_id] = text
                case ClearOutput():
                    pass

    @staticmethod
    def _write(stream: Any, text: str) -> None:  # noqa: ANN401 - whatever sys.stdout is
        stream.write(text)
        stream.flush()


def sink_for(shell: InteractiveShell, number: int | None = None) -> JupyterSink | TerminalSink:
    """Return a sink for the running cell. `number`: see `JupyterSink`."""
    kernel = getattr(shell, "kernel", None)
    return TerminalSink() if kernel is None else JupyterSink(kernel, number)


def ask_for(shell: InteractiveShell) -> Ask:
    """Return the front end's input prompt."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return ask_in_terminal

    def ask(prompt: str, password: bool) -> str:
        answer = kernel.getpass(prompt) if password else kernel.raw_input(prompt)
        return str(answer)

    return ask
