"""Debugger support of a rank: debugpy's engine (pydevd), connected to the notebook.

The engine starts with the first Debug Adapter Protocol message, and ends with a `disconnect` request. It traces the
main thread during a task, and treats only the user's files as user code. A rank that is not debugged does not even
import debugpy.

`debugpy.listen` would start one more process per rank, or leave a port open to every user of this host. Instead, the
engine connects to a port of ours, which is closed again at once. The process that connected must know a random token,
which proves that it is the engine.

Threads: the control thread queues messages (`queue_message`); a writer thread starts the engine and sends them to it; a
reader thread passes the engine's messages to the notebook; the main thread switches tracing on and off around a task.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from rankbook.formatting import PACKAGE_FOLDERS
from rankbook.protocol.messages import DapFromRank, DapToRank
from rankbook.queues import get_within

_TIMEOUT = 10.0
"""Time limit for the engine to connect, and to end."""
_FIRST_SEQ = 1 << 30
"""First sequence number of our own requests; a front end counts from 1."""
_STEPS = frozenset({"next", "stepIn", "stepOut", "pause"})
_ENGINE_VARIABLES = {
    # Silences the warning about frozen modules, which would appear in the cell.
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    # Since Python 3.12, pydevd would watch all threads of the process with sys.monitoring. Only `sys.settrace` traces
    # one thread alone; otherwise the control thread could be paused.
    "PYDEVD_USE_SYS_MONITORING": "0",
}
"""Environment variables that pydevd reads when it is imported."""

Message = dict[str, Any]


class Debuggee:
    """Connect this rank's debugger engine to the notebook.

    `send` sends a message to the notebook. `suspend_timeouts(True)` suspends the timeouts of collectives, because the
    debugger may pause a rank for any time; `suspend_timeouts(False)` restores them.
    """

    def __init__(self, send: Callable[[DapFromRank], None], suspend_timeouts: Callable[[bool], None]) -> None:
        self.attached = False
        self._send = send
        self._suspend_timeouts = suspend_timeouts
        self._requests: queue.SimpleQueue[str] = queue.SimpleQueue()
        # A lock that is acquired once and never released, so that exactly one thread is started.
        self._started = _thread.allocate_lock()
        self._stream: IO[bytes] | None = None
        self._socket: socket.socket | None = None
        # Requests come from the writer thread and, in `end`, from the main thread.
        self._sending = threading.Lock()
        self._engine: Any = None
        self._tracing_engine: Any = None
        self._original_hook: Any = None
        self._debugpy_hook: Any = None
        self._last_thread: int | None = None
        self._paused_thread: int | None = None
        self._stepping = False
        self._last_seq = _FIRST_SEQ
        self._answers: dict[int, queue.SimpleQueue[Message]] = {}
        self._disconnect_seq: int | None = None
        self._engine_ended = threading.Event()
        self._engine_ended.set()

    # Any thread

    def queue_message(self, message: DapToRank) -> None:
        """Queue a message for the debugger; the writer thread handles it. Any thread."""
        # An unbounded queue: the control thread must never wait for the debugger.
        self._requests.put(message.content)
        if self._started.acquire(blocking=False):
            os.register_at_fork(after_in_child=self._stop_in_child)
            _thread.start_new_thread(self._run, ())  # Thread.start waits, and an interrupt could end it

    @property
    def paused(self) -> bool:
        """Return True if a thread of this rank is paused in the debugger. Any thread."""
        return self._paused_thread is not None

    # Main thread, around a task

    def begin(self) -> None:
        """Start tracing this thread. Main thread, before a task."""
        # Remembered until `end`, because another thread may detach the engine meanwhile.
        self._tracing_engine = self._engine
        if self._tracing_engine is not None:
            self._tracing_engine.enable_tracing()

    def end(self) -> None:
        """Stop tracing, and continue a thread that is paused or stepping. Main thread, after a task.

        A finished task is not paused any more, however it ended.
        """
        if self._tracing_engine is None:
            return
        self._tracing_engine.disable_tracing()
        self._tracing_engine = None
        paused, stepping = self._paused_thread, self._stepping
        if (paused is not None or stepping) and self._last_thread is not None:
            with contextlib.suppress(OSError):
                self._request("continue", {"threadId": self._last_thread})
            if self._paused_thread is not None:  # the engine sends no event when an interrupt ends a pause
                body = {"threadId": paused, "allThreadsContinued": True}
                self._send_message({"type": "event", "seq": 0, "event": "continued", "body": body})
        self._stepping = False

    def _stop_in_child(self) -> None:
        """Disable tracing in a forked subprocess, which no front end could ever continue."""
        if self._engine is not None:
            self._engine.disable_tracing()
            self._engine = self._tracing_engine = None
            self.attached = False

    # Writer thread

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # SIGINT must wake the main thread
        while True:
            content = self._requests.get()
            request: Message = json.loads(content)
            try:
                self._forward(request)
            except Exception as error:  # noqa: BLE001 - reported in the response; it must not end this thread
                message = f"{type(error).__name__}: {error}"
                self._send(DapFromRank(json.dumps(_failure(request, message))))

    def _forward(self, request: Message) -> None:
        command = request["command"]
        if not self.attached and command != "disconnect":
            self._start()
        if command == "attach":
            # Rankbook's own frames are in the stack of every cell. The user has not asked for them.
            rules = [{"path": f"{folder}**", "include": False} for folder in PACKAGE_FOLDERS]
            options = {"justMyCode": True, "rules": rules, "stopAllThreadsOnSuspend": False, "subProcess": False}
            request["arguments"] = {**request.get("arguments", {}), **options}
        # Remembered, so that `end` can tell the engine to go on.
        if command in _STEPS:
            self._stepping, self._last_thread = True, request["arguments"]["threadId"]
            if (
                command == "pause" and self._tracing_engine is None
            ):  # the engine would pause the next task, at its first line
                self._stepping = False
                message = "cannot pause: the rank is idle, or its cell started before the debugger attached"
                self._send(DapFromRank(json.dumps(_failure(request, message))))
                return
        if command == "disconnect":
            self._disconnect_seq = request["seq"]
        self._write(request)

    def _write(self, request: Message) -> None:
        content = json.dumps(request).encode()
        connection = self._socket
        # The reader thread has seen the end of the connection.
        if connection is None:
            raise ConnectionError("the debugger has stopped")
        with self._sending:
            connection.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))

    def _request(self, command: str, arguments: Message) -> None:
        """Send a request of our own to the engine, and wait at most one second for the response."""
        self._last_seq += 1
        answer = self._answers[self._last_seq] = queue.SimpleQueue()
        try:
            self._write({"type": "request", "seq": self._last_seq, "command": command, "arguments": arguments})
            with contextlib.suppress(queue.Empty):
                get_within(answer, 1.0)
        finally:
            del self._answers[self._last_seq]

    def _start(self) -> None:
        """Start the engine and connect it to this process. Raises OSError; ImportError without debugpy."""
        # The import replaces `sys.breakpointhook`. Until the engine is connected, `breakpoint()` must keep its usual
        # meaning.
        hook, before = sys.breakpointhook, {name: os.environ.get(name) for name in _ENGINE_VARIABLES}
        os.environ.update(_ENGINE_VARIABLES)
        try:
            import debugpy.server  # the import installs debugpy's hooks in the engine
            import pydevd
        finally:
            for name, value in before.items():
                del os.environ[name]
                if value is not None:
                    os.environ[name] = value
            debugpy_hook, sys.breakpointhook = sys.breakpointhook, hook
        self._original_hook, self._debugpy_hook = hook, self._debugpy_hook or debugpy_hook
        # A front end may attach again while the last engine is still ending.
        self._engine_ended.wait(_TIMEOUT)
        if _engine() is not None:
            raise ConnectionError("another debugger is already attached to this rank")
        if _watches_all_threads():
            raise ConnectionError("a cell has used debugpy on this rank, which can be debugged again after a restart")
        token = secrets.token_hex(16)
        # Open for the one connection only, and on the loopback interface.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_TIMEOUT)
            pydevd.settrace(
                host="127.0.0.1",
                port=listener.getsockname()[1],
                suspend=False,
                trace_only_current_thread=True,  # this thread, until disable_tracing() below
                patch_multiprocessing=False,
                wait_for_ready_to_run=False,
                dont_trace_start_patterns=(str(Path(debugpy.__file__).parent),),  # or breakpoint() would stop in it
                client_access_token=token,
                notify_stdin=False,
            )
            pydevd.SetupHolder.setup = None  # or debugpy.listen() in a later cell would use this port
            engine = _engine()
            engine.disable_tracing()
            self._socket, self._stream = _wait_for_engine(listener, token)
        self._engine_ended.clear()
        self._engine, self._disconnect_seq, self.attached = engine, None, True
        sys.breakpointhook = self._debugpy_hook
        self._suspend_timeouts(True)
        _thread.start_new_thread(self._read, (self._socket, self._stream))

    # Reader thread

    def _read(self, connection: socket.socket, stream: IO[bytes]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        # The response to `disconnect`, which is held back until the engine has ended.
        last: Message | None = None
        with connection, stream:
            with contextlib.suppress(OSError):
                while (message := read_message(stream)) is not None:
                    if self._disconnect_seq is not None and message.get("request_seq") == self._disconnect_seq:
                        last = message
                        break
                    if self._update_state(message):
                        self._send_message(message)
            # The state is reset before the front end hears of the end, because it may attach at once.
            self.attached, self._engine, self._socket, self._paused_thread = False, None, None, None
            sys.breakpointhook = self._original_hook
            self._suspend_timeouts(False)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # a child that was forked meanwhile has the socket open too
        _wait_until(lambda: _engine() is None)
        self._engine_ended.set()
        # Answer `disconnect` only now: a front end that then attaches again must not see this engine's end as its own.
        if last is not None:
            self._send_message(last)
        else:
            self._send(DapFromRank(""))

    def _update_state(self, message: Message) -> bool:
        """Update the state from an engine's message; return True if it is for the front end."""
        if message["type"] == "response":
            answer = self._answers.get(message["request_seq"])
            if answer is not None:
                answer.put(message)
            return bool(message["request_seq"] < _FIRST_SEQ)
        body = message.get("body") or {}
        if message["event"] == "stopped":
            self._last_thread = self._paused_thread = body["threadId"]
            self._stepping = False
        elif message["event"] == "continued":
            self._paused_thread = None
        return True

    def _send_message(self, message: Message) -> None:
        if message.get("event") == "continued":
            self._paused_thread = None
        self._send(DapFromRank(json.dumps(message)))


def read_message(stream: IO[bytes]) -> Message | None:
    """Return the next message of the Debug Adapter Protocol, or None at the end. Raises OSError."""
    size = 0
    while line := stream.readline():
        if line.startswith(b"Content-Length:"):
            size = int(line.split(b":")[1])
        elif not line.strip():
            content = stream.read(size)
            return json.loads(content) if len(content) == size else None
    return None


def _wait_for_engine(listener: socket.socket, token: str) -> tuple[socket.socket, IO[bytes]]:
    """Return the connection of the process that knows `token`. Raises TimeoutError."""
    request = {"type": "request", "seq": _FIRST_SEQ, "command": "pydevdAuthorize", "arguments": {}}
    content = json.dumps(request).encode()
    # Any process of this machine may connect. The one that does not know the token is turned away.
    while True:
        connection, _ = listener.accept()
        connection.settimeout(_TIMEOUT)
        stream = connection.makefile("rb")
        with contextlib.suppress(OSError, ValueError):
            connection.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
            while (message := read_message(stream)) is not None:
                if message.get("request_seq") == _FIRST_SEQ:
                    if secrets.compare_digest(str((message.get("body") or {}).get("clientAccessToken")), token):
                        connection.settimeout(None)
                        return connection, stream
                    break
        stream.close()
        connection.close()


def _engine() -> Any:  # noqa: ANN401 - pydevd has no type annotations
    from _pydevd_bundle.pydevd_constants import get_global_debugger

    return get_global_debugger()


def _watches_all_threads() -> bool:
    """Return True if pydevd uses sys.monitoring, because it was imported without `_ENGINE_VARIABLES`."""
    from _pydevd_bundle import pydevd_constants

    return getattr(pydevd_constants, "PYDEVD_USE_SYS_MONITORING", False)


def _failure(request: Message, reason: str) -> Message:
    response = {"type": "response", "seq": 0, "request_seq": request["seq"], "command": request["command"]}
    return {**response, "success": False, "message": reason, "body": {}}


def _wait_until(condition: Callable[[], bool]) -> None:
    """Wait until `condition()` is true, for `_TIMEOUT` at most."""
    deadline, never = time.monotonic() + _TIMEOUT, threading.Event()
    while not condition() and time.monotonic() < deadline:
        never.wait(0.02)
