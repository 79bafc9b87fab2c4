"""Drive and measure one kernel as a front end does, over Jupyter's own channels, by jupyter_client.

Records when messages arrive and how many bytes they have, whatever tool the cell uses. A cell's time is measured here:
from before the request is made until both its reply and its *idle* status have come.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import processes
import psutil
import zmq
from jupyter_client import BlockingKernelClient, KernelManager
from jupyter_client.kernelspec import KernelSpecManager

STOCK = ("-m", "ipykernel_launcher", "-f", "{connection_file}")
_DELIMITER = b"<IDS|MSG>"
_DISPLAY_ID = re.compile(rb'"display_id": ?"([^"]+)"')


@dataclass(slots=True)
class Message:
    """Message on the output channel: its arrival, its bytes on the wire, its content still as JSON."""

    kind: str
    at: float
    size: int
    raw: bytes

    @property
    def content(self) -> dict[str, Any]:
        return json.loads(self.raw)  # type: ignore[no-any-return]


@dataclass(slots=True)
class Cell:
    """Result of a cell: `seconds` until reply and idle, `last_output` until its last output."""

    status: str = ""
    error: str = ""
    seconds: float = 0.0
    last_output: float = 0.0
    size: int = 0
    messages: list[Message] = field(default_factory=list)

    def errors(self) -> str:
        """The error in a few words, for a report."""
        return self.error or "; ".join(
            f"{m.content.get('ename')}: {m.content.get('evalue')}" for m in self.messages if m.kind == "error"
        )


class CellTimeoutError(Exception):
    """A cell did not end within its limit; `cell` is what had come."""

    def __init__(self, cell: Cell, limit: float) -> None:
        super().__init__(f"not back after {limit:.0f} s")
        self.cell = cell


class Frontend:
    """A kernel process of `python` and this program as its front end. A context manager: nothing of it stays."""

    def __init__(
        self,
        python: str,
        *,
        arguments: tuple[str, ...] = STOCK,
        environment: dict[str, str] | None = None,
        interrupt_mode: str = "signal",
    ) -> None:
        self.marker = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self._client: BlockingKernelClient | None = None
        spec = self.folder / "kernels" / "measured"
        spec.mkdir(parents=True)
        (spec / "kernel.json").write_text(
            json.dumps(
                {
                    "argv": [python, *arguments],
                    "display_name": "measured",
                    "language": "python",
                    "interrupt_mode": interrupt_mode,
                }
            )
        )
        self._environment = _environment(python, self.folder) | {processes.MARKER: self.marker} | (environment or {})
        specs = KernelSpecManager(kernel_dirs=[str(self.folder / "kernels")], ensure_native_kernel=False)
        self._manager = KernelManager(
            kernel_name="measured",
            kernel_spec_manager=specs,
            connection_file=str(self.folder / "connection.json"),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self._client is not None:
                self._client.stop_channels()
                self._manager.shutdown_kernel(now=True)
        finally:
            processes.end(self.marker)
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def client(self) -> BlockingKernelClient:
        """The channels."""
        assert self._client is not None, "start() first"
        return self._client

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return int(self._manager.provisioner.pid)  # type: ignore[union-attr]

    def start(self, *, timeout: float) -> None:
        """Launch the kernel and wait until it answers on both channels."""
        with (self.folder / "kernel.log").open("wb") as log:
            self._manager.start_kernel(env=self._environment, cwd=str(self.folder), stdout=log, stderr=log)
        self._client = self._manager.blocking_client()
        self._client.start_channels(hb=False, stdin=True)
        self._shell: zmq.Socket[bytes] = self._client.shell_channel.socket
        self._iopub: zmq.Socket[bytes] = self._client.iopub_channel.socket
        self._poller = zmq.Poller()
        self._poller.register(self._shell, zmq.POLLIN)
        self._poller.register(self._iopub, zmq.POLLIN)
        self._wait_ready(timeout=timeout)

    def _wait_ready(self, *, timeout: float) -> None:
        """Ask until an answer came on the shell *and* something on the output channel, which joins later."""
        limit = time.monotonic() + timeout
        answered = finished = False
        while not (answered and finished):
            if time.monotonic() > limit:
                raise TimeoutError(f"the kernel does not answer within {timeout:.0f} s")
            if not self._manager.is_alive():
                raise RuntimeError("the kernel ended while it started")
            self.client.kernel_info()
            for socket, _ in self._poller.poll(100):
                socket.recv_multipart()
                answered, finished = answered or socket is self._shell, finished or socket is self._iopub
        while self._poller.poll(50):  # the answers to the other questions
            for socket, _ in self._poller.poll(0):
                socket.recv_multipart()

    def execute(self, code: str, *, timeout: float) -> Cell:
        """Run a cell to its end."""
        return self.wait_cell(self.send(code), timeout=timeout)

    def check(self, code: str, *, timeout: float) -> Cell:
        """Run a cell that must succeed."""
        cell = self.execute(code, timeout=timeout)
        if cell.status != "ok":
            raise RuntimeError(f"{code.strip().splitlines()[0]!r} ended with {cell.status}: {cell.errors()}")
        return cell

    def send(self, code: str) -> tuple[str, float]:
        """Send a cell; `wait_cell` takes what this returns."""
        start = time.perf_counter()
        return self.client.execute(code, store_history=True, allow_stdin=False), start

    def wait_cell(self, sent: tuple[str, float], *, timeout: float, after: float = 0.0) -> Cell:
        """Wait for a cell's reply and idle, and then until no output has come for `after` seconds."""
        request, start = sent
        limit = start + timeout
        cell = Cell()
        updates: dict[bytes, Message] = {}
        replied = idle = False
        while not (replied and idle):
            ready = dict(self._poller.poll(int(max(0.0, min(1.0, limit - time.perf_counter())) * 1000)))
            now = time.perf_counter()
            if self._iopub in ready:
                idle = self._receive_output(cell, request, start, updates) or idle
            if self._shell in ready:
                header, parent, raw, _ = _parts(self._shell.recv_multipart())
                if parent == request and header == "execute_reply":
                    reply, replied = json.loads(raw), True
                    cell.status = reply["status"]
                    cell.error = ": ".join(filter(None, (reply.get("ename"), reply.get("evalue"))))
            if now > limit:
                cell.seconds = now - start
                raise CellTimeoutError(cell, timeout)
            if not ready and not self._manager.is_alive():
                raise RuntimeError("the kernel died")
        cell.seconds = time.perf_counter() - start
        while self._iopub.poll(int(after * 1000)):
            self._receive_output(cell, request, start, updates)
        return cell

    def _receive_output(self, cell: Cell, request: str, start: float, updates: dict[bytes, Message]) -> bool:
        """Take everything that lies on the output channel; was the request's idle among it?"""
        idle = False
        for _ in range(1000):  # a flood must not keep the caller from its time limit
            try:
                frames = self._iopub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            kind, parent, raw, size = _parts(frames)
            message = Message(kind, time.perf_counter() - start, size, raw)
            cell.size += size
            if kind == "status":
                idle = idle or (parent == request and b'"idle"' in raw)
                continue
            if kind not in {"execute_input", "comm_open", "comm_msg", "comm_close"}:
                cell.last_output = message.at
            if kind == "update_display_data":
                _forget_replaced(message, updates)
            cell.messages.append(message)
        return idle

    def open_comm(self, target: str) -> None:
        """Open a comm from this side, as a front end's extension does."""
        message = self.client.session.msg("comm_open", {"comm_id": uuid.uuid4().hex, "target_name": target, "data": {}})
        self.client.shell_channel.send(message)

    def interrupt(self) -> None:
        """Interrupt the kernel, like the ■ button."""
        self._manager.interrupt_kernel()

    def wait_quiet(self) -> None:
        """Wait until the kernel and what it started do nothing."""
        processes.wait_quiet(self.marker, timeout=120)

    def processes(self) -> list[psutil.Process]:
        """The kernel and everything that descends from it."""
        return list(processes.marked(self.marker))


def _parts(frames: list[bytes]) -> tuple[str, str, bytes, int]:
    """Return a message's kind, its request's id, its content and its bytes on the wire."""
    body = frames.index(_DELIMITER) + 2
    header, parent = json.loads(frames[body]), json.loads(frames[body + 1])
    return header["msg_type"], parent.get("msg_id", ""), frames[body + 3], sum(map(len, frames))


def _forget_replaced(message: Message, updates: dict[bytes, Message]) -> None:
    """Keep only the last update of each display: a tool that sends its whole text each time would fill the memory."""
    if match := _DISPLAY_ID.search(message.raw[-400:]) or _DISPLAY_ID.search(message.raw):
        if match[1] in updates:
            updates[match[1]].raw = b"{}"
        updates[match[1]] = message


def _environment(python: str, folder: Path) -> dict[str, str]:
    """The person's environment with the kernel's own Python first and nothing of their IPython or Jupyter settings."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JUPYTER_", "IPYTHON", "PYTHON")) and name != "VIRTUAL_ENV"
    }
    return inherited | {
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
    }
