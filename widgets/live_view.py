"""Base widget of live views: updated while a browser shows it, kept in the notebook as static HTML.

Parts:

EarlyMessageWidget  a widget that handles the browser's messages at once, also while a cell runs
ViewModel           one view's state, independent of Jupyter, comms and threads
ClusterSource       protocol by which a view reads data of the ranks and performs what a user clicks
CheckpointSource    the same for the checkpoints in a folder
LiveView            the view: opens its models while it is visible, sends their state, answers requests
Throttle            at most ten updates a second, and always the last one
start_thread        threads that may end with the interpreter
show_display        display and update outputs of the notebook
widget_metadata     what Colab needs to show a widget

Visibility is a lease: a browser that shows the view sends `look` every 5 s, and the view stops watching the ranks when
no browser has done so for `LEASE` seconds. Where messages wait for the running cell, no lease ends before the cell. A
browser that disappears without sending `away` ends by this timeout. Several browsers may show one view; the parts that
any of them shows are open.

State flows from a model's thread through the throttle to the traits `NAME_fixed` and `NAME_state`, which ipywidgets
synchronizes. Every `STATIC_HTML_INTERVAL` seconds, and when the last browser stops looking, the static HTML below the
view is renewed, which is what a saved notebook shows.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from pathlib import Path
from threading import Event, Lock, RLock, Thread, Timer
from typing import Any, Protocol

import anywidget
import traitlets
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.getipython import get_ipython
from IPython.display import display
from msgspec import Struct

from rankbook.errors import RankbookError
from rankbook.protocol import WIDGET_VIEW
from rankbook.protocol.telemetry import CheckpointFolder

Message = Mapping[str, Any]


def to_json(value: object) -> str:
    """Encode `value` as JSON without spaces."""
    # JavaScript's JSON parser refuses NaN, so it is an error here rather than in the browser.
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


# A model has no lock of the view and knows no browser. `LiveView` decides when it is open, which thread asks it and
# when its state is sent, so that a test needs neither a kernel nor a widget.
class ViewModel(ABC):
    """Model of a view: the sources it watches, its state, its answers to the browser, and HTML, text and SVG versions.

    `static_json` is the part of the state that rarely changes, `dynamic_json` the part that may change ten times a
    second; both are JSON. `open` and `close` are called alternately, `open` first, when a browser starts to show the
    view. All other methods may be called at any time, on any thread.
    """

    # Also the prefix of the two traits of `LiveView` that carry the state.
    name: str

    @abstractmethod
    def open(self, changed: Callable[[], None]) -> None:
        """Start to update the state, and call `changed` after every change."""

    @abstractmethod
    def close(self) -> None:
        """Stop updating: no browser shows the view."""

    @abstractmethod
    def ready(self) -> bool:
        """Return True if there is a state to show."""

    @abstractmethod
    def load(self) -> None:
        """Ask the sources once for a state to show. Takes up to 2 s. Raises `RankbookError`."""

    @abstractmethod
    def static_json(self) -> str:
        """Return the part of the state that rarely changes, as JSON."""

    @abstractmethod
    def dynamic_json(self) -> str:
        """Return the part of the state that changes often, as JSON."""

    @abstractmethod
    def answer(self, op: str, message: Message) -> Any:  # noqa: ANN401 - any JSON value
        """Perform request `op` of the browser and return a JSON-serializable answer. Raises `RankbookError`."""

    @abstractmethod
    def summary(self) -> str:
        """Return the state as one line."""

    @abstractmethod
    def text(self) -> str:
        """Return the state as text for a terminal."""

    @abstractmethod
    def html(self) -> str:
        """Return the state as HTML that needs no JavaScript or kernel."""

    @abstractmethod
    def svg(self) -> str:
        """Return the state as an SVG document, for example for a paper."""


# Protocols, since the widgets must not import the coordinator. magics/views.py implements both for a cluster and a
# folder; tests have their own implementations.
class ClusterSource(Protocol):
    """Data source for the state of the ranks. All methods are thread-safe."""

    def watch(self, kind: str, callback: Callable[[Struct], None], **options: object) -> Callable[[], None]:
        """Call `callback` with every state of `kind`, at most ten times a second; the last state is never dropped.

        "placement" gives `Placement`, "saves" gives `Saves`. The callback may run on any thread. Returns a function
        that ends the subscription.
        """
        ...

    def ask(self, kind: str, **options: object) -> Struct:
        """Query the ranks once, also while a cell runs. Takes up to 2 s.

        "placement" gives `Placement`, "detail" with `rank` gives `RankDetail`, "shards" with `name` gives `ShardMap`,
        "statistic" with `name`, `key` and `rank` gives `Statistic`. Raises `RankbookError`.
        """
        ...

    def act(self, kind: str, rank: int | None) -> str:
        """Perform "interrupt" or "restart" and return a sentence about the result. Raises `RankbookError`."""
        ...


class CheckpointSource(Protocol):
    """A folder of checkpoints. All methods are thread-safe and may raise `RankbookError`."""

    def list_checkpoints(self) -> CheckpointFolder:
        """Return the checkpoints in the folder, without reading tensor data."""
        ...

    def verify(self, name: str) -> str:
        """Verify the checksums of a checkpoint and return a sentence; `list_checkpoints` then includes the result."""
        ...

    def load(self, name: str) -> str:
        """Load a checkpoint and return a sentence, or return instructions for loading it."""
        ...

    def delete(self, name: str) -> str:
        """Delete a checkpoint and return a sentence."""
        ...


class EarlyMessageWidget(anywidget.AnyWidget):
    """Widget that handles messages as soon as they arrive, also while a cell runs.

    ipywidgets delivers messages on the main thread, after the running cell. `_handle` is called with every message in a
    new thread instead; `arrived` numbers the messages, because these threads may overtake one another.
    """

    def __init__(self, **traits: object) -> None:
        self._messages_lock = Lock()  # held only briefly: the kernel's thread needs it
        self._handled_early: set[str] = set()  # ids handled early; ipywidgets may deliver them hours later
        self._message_numbers = count()
        self._delivered_late = False  # True if messages arrive only after the running cell has ended
        super().__init__(**traits)
        self.on_msg(lambda _widget, content, _buffers: self._message_received(content))
        # After `super().__init__`, which opens the comm.
        self._hook_early_messages()

    def _handle(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _hook_early_messages(self) -> None:
        # ipykernel calls a comm's `_reply_subshell_for` on the thread of the shell channel, to choose the subshell that
        # gets a message, before the message waits for the main thread. `handle_early` handles the message there, and
        # does not change the choice. Versions of ipykernel without this method deliver messages only after the running
        # cell.
        comm = self.comm
        if not hasattr(comm, "_reply_subshell_for"):
            self._delivered_late = getattr(comm, "kernel", None) is not None
            return

        def handle_early(data: object, addressed: str | None) -> str | None:
            if isinstance(data, Mapping) and data.get("method") == "custom":
                self._message_received(data.get("content"), early=True)
            return addressed

        comm._reply_subshell_for = handle_early

    def _message_received(self, content: object, *, early: bool = False) -> None:
        """Handle a message once. ipywidgets delivers messages that were handled early a second time."""
        if not isinstance(content, Mapping) or not isinstance(content.get("rankbook"), str):
            return
        # A message may come early on the shell channel's thread, and again on the main thread after the cell. The first
        # delivery is handled; the second one removes the id.
        with self._messages_lock:
            if content["rankbook"] in self._handled_early:
                if not early:
                    self._handled_early.discard(content["rankbook"])
                return
            if early:
                self._handled_early.add(content["rankbook"])
            message = {**content, "arrived": next(self._message_numbers)}
        # A thread per message: the caller is the kernel's thread, which must not wait for ranks.
        start_thread(Thread(target=self._handle, args=(message,), name="rankbook-view-message"))


STATIC = Path(__file__).parent / "static"
FIRST_STATE = 0.6  # seconds that a display waits for the ranks' first answer
LEASE = 15.0  # seconds after a browser's last `look` message; it sends one every 5 s
STATIC_HTML_INTERVAL = 30.0  # seconds between two updates of the static HTML; an update costs the page some 40 ms


def script(*names: str, last: str) -> str:
    """Return the ES module of a view: its files in static/ and its last line."""
    return "\n".join([*((STATIC / f"{name}.js").read_text(encoding="utf-8") for name in ("common", *names)), last])


@dataclass(frozen=True)
class ViewOutput:
    """One output of a view, with the arguments of `show_display`."""

    data: Mapping[str, Any]
    display_id: str | None = None
    still: str | None = None


class LiveView(EarlyMessageWidget):
    """Widget that updates its parts while a browser shows them.

    Every part has two traits, `NAME_fixed` and `NAME_state`.
    """

    _css = STATIC / "view.css"
    still = traitlets.Unicode("").tag(sync=True)  # CSS class of the static HTML

    def __init__(self, models: Sequence[ViewModel]) -> None:
        self._models = {model.name: model for model in models}
        self._opened: set[str] = set()
        self._closed_at: dict[str, str] = {}  # part: when it was last updated
        self._viewers: dict[str, tuple[float, frozenset[str]]] = {}
        self._last_messages: dict[str, int] = {}  # browser view: number of its last message
        self._lock, self._send_lock = RLock(), Lock()
        self._ended = False
        self._first_state = Event()
        self._lease: Timer | None = None
        self._displayed = False
        self._static_html_time, self._static_html_stale = 0.0, False
        self._throttle = Throttle(self._send_state)
        super().__init__(still=f"rankbook-still-{uuid.uuid4().hex[:12]}")
        if self._delivered_late:
            watch_cells()

    # ------------------------------------------------------------------ display

    def _repr_mimebundle_(self, **_options: object) -> Any:  # noqa: ANN401 - as IPython has it
        """Return the widget with its current state as HTML and text."""
        # No browser has sent `look` yet. The pseudo viewer "display" opens the models until the first one does.
        self._renew_lease("display", frozenset(self._models))
        self._first_state.wait(FIRST_STATE)
        self._send_state()
        bundle = super()._repr_mimebundle_()
        # anywidget returns None for a widget without a view name, otherwise data and metadata.
        data, metadata = bundle if isinstance(bundle, tuple) else ({}, {})
        return {**data, "text/plain": self.text(), "text/html": self.html()}, metadata

    def _ipython_display_(self, **_options: object) -> None:
        """Display two outputs: the live view, and static HTML, which the live view hides.

        Without the widget's JavaScript or kernel only the second one is visible. One output with both formats would not
        do: JupyterLab shows an error for a widget without a kernel, not the HTML beside it. A closed view displays its
        HTML only.
        """
        for output in self.outputs():
            show_display(output.data, output.display_id, still=output.still)

    def outputs(self) -> list[ViewOutput]:
        """Return what displaying the view shows, for a front end of this process."""
        # A closed widget has no comm any more.
        if self.comm is None:
            return [ViewOutput({"text/html": self.html(), "text/plain": self.text()})]
        data, _ = self._repr_mimebundle_()
        if not has_front_end():
            return [ViewOutput({"text/plain": data["text/plain"]})]
        still = {"text/html": data.pop("text/html"), "text/plain": data["text/plain"]}
        # From now on there is an output that the static HTML can be updated in.
        self._displayed, self._static_html_time = True, time.monotonic()
        if self._delivered_late:
            report_late_messages()
        # Without text: where the widget cannot be shown, the second output says everything, once.
        return [ViewOutput({**data, "text/plain": ""}, still=self.still), ViewOutput(still, self.still)]

    def text(self) -> str:
        """Return the current state as text for a terminal."""
        parts = [(self._age(name), model.text()) for name, model in self._models.items()]
        return "\n\n".join(f"{age}:\n{text}" if age else text for age, text in parts)

    def summary(self) -> str:
        """Return the current state in one line."""
        return "; ".join(model.summary() for model in self._models.values())

    def html(self) -> str:
        """Return the current state as HTML that needs no JavaScript or kernel."""
        parts = [(self._age(name), model.html()) for name, model in self._models.items()]
        shown = "".join(f"<p>{escape(age)}:</p>{html}" if age else html for age, html in parts)
        return f'<div class="{self.still}">{shown}</div>'

    def _age(self, name: str) -> str:
        """Return how old the state of a part is, if the view has others that may be newer."""
        if len(self._models) == 1 or name in self._opened or name not in self._closed_at:
            return ""
        return f"{name} as of {self._closed_at[name]}, when this part was last shown"

    def to_svg(self) -> str:
        """Return the current state as an SVG document; a dashboard, that of its placement.

        A view that was never shown asks the ranks first. If they do not answer, the document says so.
        """
        model = next(iter(self._models.values()))
        if not model.ready():
            model.load()
        return model.svg()

    def save(self, path: str | Path) -> Path:
        """Write the SVG document to a file and return its path; see `to_svg`."""
        target = Path(path)
        target.write_text(self.to_svg(), encoding="utf-8")
        return target

    def close(self) -> None:
        """Stop watching the ranks and close the widget; the static HTML stays."""
        # No state is sent to a closed comm.
        self._throttle.close()
        with self._lock:
            self._ended = True
            self._viewers.clear()
            self._open_visible()
            if self._lease is not None:
                self._lease.cancel()
        self._renew_static_html(at_once=True)
        super().close()
        self.__dict__.pop("_ipython_display_", None)  # ipywidgets 7 sets it to None, which hides our method

    def replace_by_message(self, message: str) -> None:
        """Close the view because it is shown elsewhere, and leave the line `message` in its place."""
        self._displayed, was_displayed = False, self._displayed
        self.close()
        if was_displayed:
            show_display({"text/html": f"<p>{escape(message)}</p>", "text/plain": message}, self.still, update=True)

    # ------------------------------------------------------------------ visibility

    def _renew_lease(self, viewer: str, names: frozenset[str]) -> None:
        with self._lock:
            if self._ended:  # a page may not know yet that the view is closed
                return
            self._viewers[viewer] = (time.monotonic() + LEASE, names & self._models.keys())
            self._open_visible()
            if self._lease is None:
                self._schedule_expiry()

    def _remove_viewer(self, viewer: str) -> None:
        with self._lock:
            self._viewers.pop(viewer, None)
            self._open_visible()

    def _open_visible(self) -> None:
        """Open the parts that a browser shows, and close the others."""
        # The lock is held: models are opened and closed alternately, as `ViewModel` requires.
        visible = frozenset().union(*(names for _, names in self._viewers.values()))
        for name in sorted(visible - self._opened):
            self._opened.add(name)
            self._models[name].open(self._changed)
        for name in sorted(self._opened - visible):
            self._opened.discard(name)
            self._models[name].close()
            self._closed_at[name] = time.strftime("%Y-%m-%d %H:%M:%S")

    def _schedule_expiry(self) -> None:
        # A lease ends at most LEASE / 3 seconds late.
        self._lease = Timer(LEASE / 3, self._expire)
        self._lease.name = "rankbook-lease"
        start_thread(self._lease)

    def _expire(self) -> None:
        with self._lock:
            now = time.monotonic()
            if self._delivered_late and _cell_runs:  # no browser can be heard before its end
                self._viewers = {name: (now + LEASE, parts) for name, (_, parts) in self._viewers.items()}
            self._viewers = {name: look for name, look in self._viewers.items() if look[0] > now}
            self._open_visible()
            self._lease = None
            if self._viewers:
                self._schedule_expiry()
        # Outside of the lock: the update is sent to the front end, which may take long.
        if not self._viewers:
            self._renew_static_html(at_once=True)
        elif self._static_html_stale:
            self._renew_static_html()

    # ------------------------------------------------------------------ to the browser

    def _changed(self) -> None:
        if not self._first_state.is_set() and all(model.ready() for model in self._models.values()):
            self._first_state.set()
        self._throttle.schedule()

    def _send_state(self) -> None:
        with self._send_lock:  # a thread must not send a state older than one already sent
            # Traits are set from this thread; ipywidgets sends a message for every change. An equal value is not sent
            # again.
            for name, model in self._models.items():
                for trait, value in ((f"{name}_fixed", model.static_json()), (f"{name}_state", model.dynamic_json())):
                    if getattr(self, trait) != value:
                        setattr(self, trait, value)
        self._renew_static_html()

    def _renew_static_html(self, *, at_once: bool = False) -> None:
        """Renew the static HTML that a saved notebook shows, or leave it to `_expire` if it was renewed just before."""
        now = time.monotonic()
        self._static_html_stale = not at_once and now - self._static_html_time <= STATIC_HTML_INTERVAL
        if self._displayed and not self._static_html_stale:
            self._static_html_time = now
            show_display({"text/html": self.html(), "text/plain": self.text()}, self.still, update=True)

    # ------------------------------------------------------------------ from the browser

    def _handle(self, message: dict[str, Any]) -> None:
        op, viewer = str(message.get("op")), str(message.get("view"))
        try:
            if op in {"look", "away"}:
                with self._lock:
                    # A thread with an older message may run after one with a newer message. The newest `look` or `away`
                    # of a browser counts.
                    if message["arrived"] >= self._last_messages.get(viewer, 0):
                        self._last_messages[viewer] = message["arrived"]
                        if op == "look":
                            self._renew_lease(viewer, frozenset(message.get("parts", ())))
                            self._remove_viewer("display")
                        else:
                            self._remove_viewer(viewer)
                if op == "look":
                    self.send({"seen": message["rankbook"]})  # without it the browser marks its state as stale
                elif not self._viewers:
                    self._renew_static_html(at_once=True)
                return
            answer = {"answer": self._models[str(message.get("part"))].answer(op, message)}
        except RankbookError as error:
            answer = {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - the browser shows the whole error
            answer = {"error": f"{type(error).__name__}: {error}"}
        self.send({"reply": message["rankbook"], **answer})


def call_if_set(end: Callable[[], None] | None) -> None:
    """Call the function that ends a subscription, if there is one."""
    if end is not None:
        end()


def start_thread(thread: Thread) -> bool:
    """Start `thread` as a daemon; return False if the interpreter is shutting down.

    From Python 3.12 on no thread can start during shutdown, while running threads may still get an update of a view,
    for example because the ranks end.
    """
    thread.daemon = True
    try:
        thread.start()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):
            raise
        return False
    return True


_cell_runs = False
_watched_shells: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_cells() -> None:
    """Keep `_cell_runs` up to date: whether the notebook runs a cell. The caller is part of one."""
    shell = get_ipython()
    if shell is not None and shell not in _watched_shells:
        _watched_shells.add(shell)
        _cell_begins()
        shell.events.register("pre_execute", _cell_begins)
        shell.events.register("post_execute", _cell_ends)


def _cell_begins() -> None:
    global _cell_runs
    _cell_runs = True


def _cell_ends() -> None:
    global _cell_runs
    _cell_runs = False


_late_messages_reported = False


def report_late_messages() -> None:
    """Say once that this kernel delivers the browser's messages late."""
    global _late_messages_reported
    if not _late_messages_reported:
        _late_messages_reported = True
        show_display({"text/plain": "With this version of ipykernel, views answer clicks after the running cell."})


def widget_metadata(bundle: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata with which Colab shows a widget of other packages than ipywidgets; {} in other front ends.

    Colab shows such a widget after `enable_custom_widget_manager()`, whose hook adds this metadata to what IPython
    displays on the thread that called it. Output of the ranks is sent by another thread, without IPython. The kernel
    of Colab has imported `google.colab`; elsewhere the package may be installed, but is not imported.
    """
    colab: Any = sys.modules.get("google.colab.output")
    if colab is None or WIDGET_VIEW not in bundle:
        return {}
    if colab._widgets._installed_url is None:
        colab.enable_custom_widget_manager()
    return {WIDGET_VIEW: {"colab": {"custom_widget_manager": {"url": colab._widgets._installed_url}}}}


def has_front_end() -> bool:
    """Return True in a Jupyter kernel, False in a terminal."""
    return getattr(get_ipython(), "kernel", None) is not None


def still_metadata(still: str | None) -> dict[str, Any] | None:
    """Return the metadata of an output whose static HTML has the display id `still`."""
    return {"rankbook_still": still} if still else None


def show_display(
    bundle: Mapping[str, Any], display_id: str | None = None, *, update: bool = False, still: str | None = None
) -> None:
    """Display a mime bundle as a new output, or update the output with this `display_id`.

    `still` is the display id of the output below with the same contents as static HTML; `rankbook run` prints only that
    one.
    """
    if display_id is None:
        metadata = {**widget_metadata(bundle), **(still_metadata(still) or {})}
        display(dict(bundle), raw=True, metadata=metadata or None)
        return
    shell: Any = get_ipython()
    if update and isinstance(getattr(shell, "display_pub", None), CapturingDisplayPublisher):
        # A cell under `%%capture` runs, which has not made this output: a thread renews it.
        kernel, content = shell.kernel, {"data": dict(bundle), "metadata": {}, "transient": {"display_id": display_id}}
        kernel.session.send(kernel.iopub_socket, "update_display_data", content, parent=shell.parent_header)
    else:
        display(dict(bundle), raw=True, display_id=display_id, update=update)


INTERVAL = 0.1  # seconds: Jupyter drops messages above a thousand a second, and readers are slower


class Throttle:
    """Call `send` after every `schedule`, in a separate thread, at most once per `interval` seconds.

    Notes in between are combined into one call. No thread runs while there is nothing to send.
    """

    def __init__(self, send: Callable[[], None], interval: float = INTERVAL) -> None:
        self._send, self._interval = send, interval
        self._lock, self._sending = Lock(), Lock()
        self._timer: Timer | None = None
        self._due = 0.0
        self._closed = False

    def schedule(self) -> None:
        """Schedule a call of `send`."""
        with self._lock:
            # A timer that is pending will send this change, too.
            if self._timer is None and not self._closed:
                self._timer = Timer(max(0.0, self._due - time.monotonic()), self._fire)
                self._timer.name = "rankbook-view"
                self._closed = not start_thread(self._timer)

    def close(self) -> None:
        """Cancel the scheduled call and ignore later notes."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()

    def _fire(self) -> None:
        with self._lock:
            # Before sending: a change during the call must schedule another call.
            self._timer = None
            # A late call does not delay the next one, so the rate stays at ten a second, and never exceeds eleven.
            self._due = max(self._due + self._interval, time.monotonic() + self._interval / 2)
        with self._sending:
            if not self._closed:
                self._send()
