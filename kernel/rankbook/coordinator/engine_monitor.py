"""The coordinator's side of an engine: what its events mean for the hosts, and the thread that calls it.

`EngineState` decides without threads or clocks: events and limits in, actions out. `EngineMonitor` calls the engine on
a thread of its own, passes it the requests of the notebook (start, replace, stop), and performs the actions.

The engine is code of others, so that nothing it does may end the session: an exception is shown with the engine's name
and the method, an event that makes no sense is shown and dropped, and a call that does not return holds up neither the
ranks nor an interrupt, and a stop only for some seconds.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeAlias, TypeVar

from rankbook.engines.engine import (
    AgentConnection,
    Engine,
    HostEnded,
    HostOutput,
    HostQueued,
    HostStarted,
    Limits,
    Notice,
)
from rankbook.formatting import join_lines, plural
from rankbook.queues import get_within

_POLL_SECONDS = 0.2
_LIMITS_SECONDS = 30.0
_STOP_SECONDS = 15.0
"""Seconds that a stop waits for the engine."""
_ANNOUNCE_BEFORE = (600.0, 60.0)
"""Seconds before the end of the hosts at which it is announced."""
_MAX_TEXT = 2000
_MAX_COMPLAINTS = 20
"""Different mistakes of an engine that are shown."""
_MAX_EVENTS = 1000
"""Events that are taken from one call of the engine."""

Value = TypeVar("Value")


# Decisions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Show:
    """Show a line to the user."""

    text: str


@dataclass(frozen=True)
class LoseHost:
    """Treat a host as lost at once; None: all hosts of the engine. `reason` is worded to follow `rank 2`."""

    host: int | None
    reason: str


@dataclass(frozen=True)
class SaveAndStop:
    """Interrupt the cells, so that they can save, and stop the ranks: the hosts end in `seconds`."""

    seconds: float


Action: TypeAlias = Show | LoseHost | SaveAndStop


@dataclass
class EngineState:
    """State of the hosts of the engine `name`. The ranks are stopped `grace` seconds before the hosts end.

    `start_succeeded` is set when the hosts of the start have offered their slots.
    """

    name: str
    grace: float
    started: dict[int, str] = field(default_factory=dict)
    ended: dict[int | None, str] = field(default_factory=dict)
    queued: HostQueued | None = None
    ends_at: float | None = None
    failure: str = ""
    start_succeeded: bool = False
    _start_failure: str = ""
    _shown_queue: set[HostQueued] = field(default_factory=set)
    _reported: set[str] = field(default_factory=set)
    _output: dict[int | None, str] = field(default_factory=dict)
    _announced: float = float("inf")
    _stopping: bool = False

    def handle(self, event: object) -> list[Action]:
        """Return what an event of the engine asks for. An object that is no event is shown."""
        match event:
            case HostStarted(host, str(name)) if _is_host(host):
                self.started[host] = name
                self._leave_queue()
            case HostQueued(str()):
                self.queued = event
                if event not in self._shown_queue:  # several jobs may wait
                    self._shown_queue.add(event)
                    return [Show(f"{self.name}: {self.describe_queue()}")]
            case HostQueued():
                pass
            case HostEnded(host, str(reason)) if host is None or _is_host(host):
                return self._end(host, reason[:_MAX_TEXT])
            case HostOutput(host, str(text)) if host is None or _is_host(host):
                self._output[host] = (self._output.get(host, "") + text)[-_MAX_TEXT:]
            case Notice(str(text)):
                return [Show(text)]
            case _:
                return self._reject(event)
        return []

    def _reject(self, event: object) -> list[Action]:
        return self._show_once(
            f"the launcher {self.name} reported {repr(event)[:200]}, which is no event; it was ignored"
        )

    def _show_once(self, text: str) -> list[Action]:
        # The engine is called five times a second, and may make a new mistake every time.
        if text in self._reported or len(self._reported) >= _MAX_COMPLAINTS:
            return []
        self._reported.add(text)
        return [Show(text)]

    def _end(self, host: int | None, reason: str) -> list[Action]:
        if host in self.ended:
            return []
        self.ended[host] = reason
        self._leave_queue()
        if host is None:
            return [LoseHost(None, f"was lost: the hosts of {self.name} ended because {reason}")]
        name = self.started.get(host) or f"host {host}"
        return [LoseHost(host, f"was lost: the agent on {name} ended because {reason}")]

    def _leave_queue(self) -> None:
        self.queued = None
        self._shown_queue.clear()

    def set_limits(self, limits: object, now: float) -> list[Action]:
        """Take over the limits that the engine knows. Times are Unix times."""
        ends_at = limits.ends_at if isinstance(limits, Limits) else None
        # Another end than before is announced anew.
        if ends_at is not None and self.ends_at is not None and abs(ends_at - self.ends_at) > 1.0:
            self._announced, self._stopping = float("inf"), False
        self.ends_at = ends_at
        return self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Return what is due at the Unix time `now`: announcements of the end, and the stop before it."""
        if self.ends_at is None or self._stopping:
            return []
        left = self.ends_at - now
        if left <= self.grace:
            self._stopping = True
            return [SaveAndStop(max(0.0, left))]
        # The nearest one only: a walltime of five minutes is announced once at the start.
        due = [before for before in _ANNOUNCE_BEFORE if left <= before]
        if due and min(due) < self._announced:
            self._announced = min(due)
            return [
                Show(f"{self.name}: the hosts end at {_clock(self.ends_at)}, in {_duration(left)}; save what you need")
            ]
        return []

    def fail(self, method: str, error: BaseException) -> list[Action]:
        """Record an exception of the engine. Return what shows it."""
        text = f"the launcher {self.name} failed in {method}(): {type(error).__name__}: {error}"
        self.failure = text
        if method == "start":
            self._start_failure = text
        return self._show_once(text)

    def start_problem(self) -> str:
        """Return why a start cannot succeed any more; empty if it still can."""
        if self._start_failure:
            return self._start_failure
        for host in self.ended:
            if host is not None and host not in self.started:  # a mistake of the engine
                continue
            return self.describe_end(host)
        return ""

    def describe_end(self, host: int | None) -> str:
        """Describe why a host has ended, or all of them (None), with what it has written last."""
        reason = self.ended[host]
        where = "" if host is None else f" on {self.started.get(host) or f'host {host}'}"
        output = self._output.get(host, "").strip()
        if not output and not self.start_succeeded:  # later, a replacement has a program of its own
            output = self._output.get(None, "").strip()
        # The reason may quote all of the output already, in one line.
        told = "" if join_lines(output) in reason else f"\n{output}"
        return f"the agent{where} ended because {reason}{told}"

    def describe_output(self) -> str:
        """Return what the hosts and the engine's program have written last, on lines of its own; empty if nothing."""
        text = "\n".join(output.strip() for output in self._output.values() if output.strip())
        return f"\n{text[-_MAX_TEXT:]}" if text else ""

    def describe(self, now: float) -> str:
        """Return a line for `%distributed status`; empty if there is nothing to say."""
        parts = []
        if queue := self.describe_queue():
            parts.append(queue)
        if self.ends_at is not None:
            parts.append(f"the hosts end at {_clock(self.ends_at)}, in {_duration(max(0.0, self.ends_at - now))}")
        if self.failure:
            parts.append(self.failure)
        return f"launcher {self.name}: {'; '.join(parts)}" if parts else ""

    def describe_queue(self) -> str:
        """Describe the queue in which hosts wait, and how to leave it; empty if none waits."""
        queued = self.queued  # another thread changes it
        if queued is None:
            return ""
        when = "" if queued.starts_at is None else f", expected start {_clock(queued.starts_at)}"
        # An interrupt of `heal` ends its wait alone: the hosts may be needed by the next one.
        cancel = "%distributed stop cancels it" if self.start_succeeded else "interrupt to cancel"
        return f"waiting in the queue ({queued.reason}{when}); {cancel}"


def _is_host(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _clock(moment: float) -> str:
    try:
        return datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "an unknown time"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return plural(round(seconds), "second")
    minutes = round(seconds / 60)
    return plural(minutes, "minute") if minutes < 120 else f"{minutes / 60:.1f} hours"


# The thread ---------------------------------------------------------------------------------------------------------


class EngineMonitor:
    """Call `engine` on a thread of its own, and pass the actions that follow to `perform` on that thread."""

    def __init__(self, engine: Engine, name: str, *, grace: float, perform: Callable[[Action], None]) -> None:
        self._engine = engine
        self._perform = perform
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._limits_due = float("inf")
        self.state = EngineState(name, grace)
        self._thread = threading.Thread(target=self._run, name="rankbook-engine", daemon=True)
        self._thread.start()

    def start(self, hosts: int | None, slots: int, connection: AgentConnection) -> None:
        """Ask the engine to start. `state.start_problem` says if it cannot."""

        def start() -> None:
            self._engine.start(hosts, slots, connection)
            self._limits_due = 0.0

        self._call("start", start)

    def replace(self, host: int, *, wait: bool) -> Future[int | None]:
        """Ask the engine for another host in place of `host`."""

        def replace() -> int | None:
            number = self._engine.replace(host, wait=wait)
            if number is not None and not isinstance(number, int):
                raise TypeError(f"replace returned {number!r}, expected the number of a host or None")
            return number

        return self._call("replace", replace)

    def stop(self) -> str:
        """Stop the engine. Return what may be left if it has not stopped; empty if it has."""
        stopped = self._call("stop", self._engine.stop)
        self._requests.put(None)
        concurrent.futures.wait([stopped], _STOP_SECONDS)
        if not stopped.done():
            return f"the launcher {self.state.name} did not stop within {_STOP_SECONDS:.0f} s: look for its jobs"
        if (error := stopped.exception()) is not None:
            return (
                f"the launcher {self.state.name} failed in stop(): {type(error).__name__}: {error}; look for its jobs"
            )
        return ""

    def _call(self, method: str, function: Callable[[], Value]) -> Future[Value]:
        future: Future[Value] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - code of the engine; shown by `_fail`, and raised by `result`
                self._fail(method, error)
                future.set_exception(error)

        self._requests.put(run)
        return future

    def _run(self) -> None:
        while True:
            # Outside of the handler, so that no traceback of the engine shows `Empty` as its context.
            request: Callable[[], None] | None = self._poll
            with contextlib.suppress(queue.Empty):
                request = get_within(self._requests, _POLL_SECONDS)
            if request is None:
                return
            request()

    def _poll(self) -> None:
        actions: list[Action] = []
        try:
            for number, event in enumerate(self._engine.events()):
                if number == _MAX_EVENTS:
                    break
                actions += self.state.handle(event)
                if isinstance(event, HostStarted):
                    self._limits_due = 0.0
        except BaseException as error:  # noqa: BLE001 - code of the engine
            self._fail("events", error)
        try:
            if time.monotonic() >= self._limits_due:
                self._limits_due = time.monotonic() + _LIMITS_SECONDS
                actions += self.state.set_limits(self._engine.limits(), time.time())
        except BaseException as error:  # noqa: BLE001 - the same
            self._fail("limits", error)
        for action in [*actions, *self.state.tick(time.time())]:
            self._perform(action)

    def _fail(self, method: str, error: BaseException) -> None:
        # A mistake of the caller or the environment is told by its text; any other exception needs its traceback.
        for action in self.state.fail(method, error):
            text = action.text if isinstance(action, Show) else ""
            is_expected = type(error).__module__ == "rankbook.errors"
            self._perform(
                Show(text if is_expected else f"{text}\n{''.join(traceback.format_exception(error)).strip()}")
            )
