"""A front end's debugger, as JupyterLab's: what it sends on the control channel, and what it makes of the events."""

from __future__ import annotations

import contextlib
import queue
import time
from typing import Any

import pytest

from tests.conftest import Notebook, Outcome


class FrontEnd:
    """Debugs the notebook's kernel."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        self.events: list[dict[str, Any]] = []
        self.thread = 1
        self._seq = 0

    def ask(self, command: str, *, timeout: float = 30, **arguments: Any) -> dict[str, Any]:
        """The answer to a request."""
        self._seq += 1
        content = {"type": "request", "seq": self._seq, "command": command, "arguments": arguments}
        return self.notebook.ask_control("debug_request", content, timeout=timeout)

    def body(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The body of an answer that must be a good one."""
        reply = self.ask(command, **arguments)
        assert reply["success"], reply
        return dict(reply["body"])

    def start(self, client: str = "jupyterlab") -> None:
        """The bug is clicked. What was told before is forgotten."""
        before = -1
        while len(self.notebook.late) > before:
            before = len(self.notebook.late)
            self._next()
        self.notebook.late = [item for item in self.notebook.late if item["msg_type"] != "debug_event"]
        self.ask("debugInfo")
        self.body("initialize", clientID=client, clientName=client, adapterID="", pathFormat="path",
                  linesStartAt1=True, columnsStartAt1=True, supportsVariableType=True, supportsVariablePaging=True,
                  supportsRunInTerminalRequest=True, locale="en")  # fmt: skip
        assert self.ask("attach")["success"]

    def stop(self) -> None:
        """The bug is clicked again."""
        assert self.ask("disconnect", restart=False, terminateDebuggee=False)["success"]

    def breakpoints(self, code: str, *lines: int) -> list[int]:
        """The gutter is clicked: the lines where they are then."""
        path = self.body("dumpCell", code=code)["sourcePath"]
        self.ask("debugInfo")
        requested = [{"line": line} for line in lines]
        placed = self.body("setBreakpoints", breakpoints=requested, source={"path": path}, sourceModified=False)
        return [item["line"] for item in placed["breakpoints"]]

    def wait(self, name: str, count: int = 1, *, timeout: float = 20) -> list[dict[str, Any]]:
        """The bodies of the next `count` events of that name; what other messages come meanwhile is kept for later."""
        bodies: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout
        while len(bodies) < count:
            if time.monotonic() > deadline:
                pytest.fail(f"{len(bodies)} events {name!r} within {timeout} s, and not {count}: {self.events}")
            event = self._next()
            if event is not None:
                self.events.append(event)
                if event["event"] == name:
                    self.thread = event["body"]["threadId"]
                    bodies.append(event["body"])
        return bodies

    def wait_paused(self, count: int, *, timeout: float = 20) -> None:
        """Wait until so many threads are paused, whatever was told of them."""
        deadline = time.monotonic() + timeout
        while len(threads := self.body("debugInfo")["stoppedThreads"]) < count:
            if time.monotonic() > deadline:
                pytest.fail(f"not {count} paused within {timeout} s: {self.events}")
            self._next()
        self.thread = threads[0]

    def wait_text(self, text: str, *, timeout: float = 20) -> None:
        """Wait until a cell has printed that."""
        deadline = time.monotonic() + timeout
        while not any(text in item["content"].get("text", "") for item in self.notebook.late):
            if time.monotonic() > deadline:
                pytest.fail(f"{text!r} was not printed within {timeout} s")
            event = self._next()
            if event is not None:
                self.events.append(event)

    def _next(self) -> dict[str, Any] | None:
        """The next event; a cell's messages are left for whoever waits for it."""
        notebook = self.notebook
        for index, received in enumerate(notebook.late):
            if received["msg_type"] == "debug_event":
                return dict(notebook.late.pop(index)["content"])
        with contextlib.suppress(queue.Empty):
            notebook.late.append(notebook.client.get_iopub_msg(timeout=0.2))
        return None

    def stack(self) -> list[tuple[str, int]]:
        """The names and lines in the call stack."""
        return [(frame["name"], frame["line"]) for frame in self.frames()]

    def frames(self) -> list[dict[str, Any]]:
        """The call stack."""
        return list(self.body("stackTrace", threadId=self.thread)["stackFrames"])

    def variables(self, frame: dict[str, Any]) -> dict[str, str]:
        """The local variables of a frame that is clicked."""
        scopes = self.body("scopes", frameId=frame["id"])["scopes"]
        values = self.body("variables", variablesReference=scopes[0]["variablesReference"])["variables"]
        return {item["name"]: item["value"] for item in values}

    def move(self, command: str) -> dict[str, Any]:
        """Press a button; JupyterLab has forgotten the thread by then."""
        return self.body(command, threadId=1)


def finish(front_end: FrontEnd, message: str) -> Outcome:
    """The outcome of a cell of which some messages were taken already."""
    outcome = Outcome()
    notebook = front_end.notebook
    notebook.follow(message, outcome, lambda progress: any(is_end(item) for item in progress.messages), timeout=30)
    notebook.take_reply(message, outcome, timeout=30)
    return outcome


def is_end(received: dict[str, Any]) -> bool:
    """Return True if a cell ends with this message."""
    return received["msg_type"] == "status" and received["content"]["execution_state"] == "idle"


def said_by_both(outcome: Outcome) -> str:
    """The one line that both ranks have printed; one that was held up for long has it to itself."""
    lines = sorted(outcome.stdout.splitlines())
    texts = {line.split("] ", 1)[1] for line in lines}
    assert [line.split("] ", 1)[0] for line in lines] in (["[0-1"], ["[0", "[1"]), outcome.stdout
    (text,) = texts
    return text
