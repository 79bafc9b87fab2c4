"""A cell's output by rank in the notebook: live while it runs, plain HTML from its end on.

Owns: the one output of the cell that is replaced, and what comes when it is over. Refuses: markup and messages
(widgets/output_panel.py), and which view is the notebook's (magic.py).

Where a cell's output goes, and where questions are asked.
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
    """The panel of the cell that `follow` is given; `page` is for its output. Shown once there is any."""

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
        """Its output is the panel's, until it ends, which it may have done already."""
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
        """What HTML cannot show lives below the panel, behind its label; in the panel stands its text."""
        before = self._below.get(key)
        self._below[key] = ranks
        label = {"text/plain": f"[{format_ranks(ranks)}]" if ranks else ""}
        found = [] if before == ranks else [RichOutput(label, {}, f"{self._name}-{key}-of", update=before is not None)]
        self._sink.emit([*found, RichOutput(dict(data), {}, f"{self._name}-{key}", update=before is not None)])

    def _late(self, changes: Sequence[Change]) -> None:
        """What ranks that still run, or threads that they have left, print is shown below."""
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
                    pass  # what stands in the cell's panel stays


def still_bundle(result: CellResult, view: str) -> dict[str, str]:
    """What a cell that has ended has shown, by rank, as a mime bundle: each rank's text, then its displays."""
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
    """What all ranks have shown alike is one piece."""
    found: list[OutputBlock] = []

    def add(values: dict[int, Any], **kind: Any) -> None:  # noqa: ANN401 - fields of a Piece
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
            found.append(OutputBlock(len(found), tuple(ranks), **field, **kind))

    add({each.rank: each.stdout for each in outcomes if each.stdout})
    add({each.rank: each.stderr for each in outcomes if each.stderr}, stream="stderr")
    for index in range(max((len(each.displays) for each in outcomes), default=0)):
        add({each.rank: each.displays[index] for each in outcomes if len(each.displays) > index})
    add({each.rank: each.result for each in outcomes if each.result is not None})
    return found


class JupyterSink:
    """Publishes into one cell of a Jupyter front end, from any thread, also after the cell has ended.

    `number`: results of the ranks are the cell's own, `Out[number]`; None: they are displays.
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
    """The Jupyter message, type and content, that shows `item`; a result is that of cell `number`, if there is one."""
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
    """Writes to a terminal or a file: text as it is, displays as their text/plain."""

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
    """The way to the cell that runs now. `number`: see `JupyterSink`."""
    kernel = getattr(shell, "kernel", None)
    return TerminalSink() if kernel is None else JupyterSink(kernel, number)


def ask_for(shell: InteractiveShell) -> Ask:
    """The front end's own prompt."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return ask_in_terminal

    def ask(prompt: str, password: bool) -> str:
        answer = kernel.getpass(prompt) if password else kernel.raw_input(prompt)
        return str(answer)

    return ask
