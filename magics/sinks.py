"""Where a cell's output goes, and where questions are asked.

Owns: the way to the front end: Jupyter messages with the cell's own parent, or a terminal. Refuses: to know what the
output means.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rankbook.coordinator.wait import Ask, ask_in_terminal
from rankbook.output.merger import ClearOutput, Emit, Rich, Stream
from rankbook.protocol.base import RESULT

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


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
        case Rich(data, metadata, display_id, update):
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
                case Rich(data, _, display_id, _):
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
