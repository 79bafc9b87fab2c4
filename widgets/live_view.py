"""Base widget of live views: updated while a browser shows it, kept in the notebook as static HTML.

Parts:

EarlyMessageWidget  a widget that handles the browser's messages at once, also while a cell runs
LiveView            the view: opens its models while it is visible, sends their state, answers requests
Throttle            at most ten updates a second, and always the last one
start_thread        threads that may end with the interpreter
show_display        display and update outputs of the notebook

Visibility is a lease: a browser that shows the view sends `look` every 5 s, and the view stops watching the ranks when
no browser has done so for `LEASE` seconds (40 times as long if messages wait for the running cell). A browser that
disappears without sending `away` ends by this timeout. Several browsers may show one view; the parts that any of them
shows are open.

State flows from a model's thread through the throttle to the traits `NAME_fixed` and `NAME_state`, which ipywidgets
synchronizes. Every `REMEMBER` seconds, and when the last browser stops looking, the static HTML below the view is
renewed, which is what a saved notebook shows.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import count
from pathlib import Path
from threading import Event, Lock, RLock, Thread, Timer
from typing import Any

import anywidget
import traitlets
from IPython.core.getipython import get_ipython
from IPython.display import display

from rankbook.errors import RankbookError
from rankbook.widgets.view_model import ViewModel


class EarlyMessageWidget(anywidget.AnyWidget):
    """Widget that handles messages as soon as they arrive, also while a cell runs.

    ipywidgets delivers messages on the main thread, after the running cell. `_handle` is called with every message in a
    new thread instead; `arrived` numbers the messages, because these threads may overtake one another.
    """

    def __init__(self, **traits: object) -> None:
        self._arriving = Lock()  # held only briefly: the kernel's thread needs it
        self._taken: set[str] = set()  # ids handled early; ipywidgets may deliver them hours later
        self._arrivals = count()
        self._late = False  # True if messages arrive only after the running cell has ended
        super().__init__(**traits)
        self.on_msg(lambda _widget, content, _buffers: self._arrived(content))
        self._take_messages_early()

    def _handle(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _take_messages_early(self) -> None:
        # ipykernel calls a comm's `_reply_subshell_for` on the thread of the shell channel, to choose the subshell that
        # gets a message, before the message waits for the main thread. `take` handles the message there, and does not
        # change the choice. Versions of ipykernel without this method deliver messages only after the running cell.
        comm = self.comm
        if not hasattr(comm, "_reply_subshell_for"):
            self._late = hasattr(comm, "kernel")
            return

        def take(data: object, addressed: str | None) -> str | None:
            if isinstance(data, Mapping) and data.get("method") == "custom":
                self._arrived(data.get("content"), early=True)
            return addressed

        comm._reply_subshell_for = take

    def _arrived(self, content: object, *, early: bool = False) -> None:
        """Handle a message once. ipywidgets delivers messages that were handled early a second time."""
        if not isinstance(content, Mapping) or not isinstance(content.get("rankbook"), str):
            return
        with self._arriving:
            if content["rankbook"] in self._taken:
                if not early:
                    self._taken.discard(content["rankbook"])
                return
            if early:
                self._taken.add(content["rankbook"])
            message = {**content, "arrived": next(self._arrivals)}
        start_thread(Thread(target=self._handle, args=(message,), name="rankbook-click"))


STATIC = Path(__file__).parent / "static"
FIRST_STATE = 0.6  # seconds that a display waits for the ranks' first answer
LEASE = 15.0  # seconds after a browser's last `look` message; it sends one every 5 s
REMEMBER = 30.0  # seconds between two updates of the static HTML; an update costs the page some 40 ms


def script(*names: str, last: str) -> str:
    """Return the ES module of a view: its files in static/ and its last line."""
    return "\n".join([*((STATIC / f"{name}.js").read_text(encoding="utf-8") for name in ("common", *names)), last])


class LiveView(EarlyMessageWidget):
    """Widget that updates its parts while a browser shows them.

    Every part has two traits, `NAME_fixed` and `NAME_state`.
    """

    _css = STATIC / "view.css"
    still = traitlets.Unicode("").tag(sync=True)  # CSS class of the static HTML

    def __init__(self, parts: Sequence[ViewModel]) -> None:
        self._parts = {part.name: part for part in parts}
        self._opened: set[str] = set()
        self._lookers: dict[str, tuple[float, frozenset[str]]] = {}
        self._heard: dict[str, int] = {}  # browser view: number of its last message
        self._lock, self._sending = RLock(), Lock()
        self._ended = False
        self._first = Event()
        self._lease: Timer | None = None
        self._shown = False
        self._remembered = 0.0
        self._pacer = Throttle(self._send_state)
        super().__init__(still=f"rankbook-still-{uuid.uuid4().hex[:12]}")
        self._patience = 40 if self._late else 1

    # ------------------------------------------------------------------ display

    def _repr_mimebundle_(self, **_options: object) -> Any:  # noqa: ANN401 - as IPython has it
        """Return the widget with its current state as HTML and text."""
        self._look("display", frozenset(self._parts))
        self._first.wait(FIRST_STATE)
        self._send_state()
        bundle = super()._repr_mimebundle_()
        data, metadata = bundle if isinstance(bundle, tuple) else ({}, {})
        return {**data, "text/plain": self.text(), "text/html": self.html()}, metadata

    def _ipython_display_(self, **_options: object) -> None:
        """Display two outputs: the live view, and static HTML, which the live view hides.

        Without the widget's JavaScript or kernel only the second one is visible. One output with both formats would not
        do: JupyterLab shows an error for a widget without a kernel, not the HTML beside it. A closed view displays its
        HTML only.
        """
        if self.comm is None:
            show_display({"text/html": self.html(), "text/plain": self.text()})
            return
        data, _ = self._repr_mimebundle_()
        if not has_front_end():
            show_display({"text/plain": data["text/plain"]})
            return
        still = {"text/html": data.pop("text/html"), "text/plain": data["text/plain"]}
        show_display({**data, "text/plain": self.summary()}, still=self.still)
        show_display(still, display_id=self.still)
        self._shown, self._remembered = True, time.monotonic()

    def text(self) -> str:
        """Return the current state as text for a terminal."""
        return "\n\n".join(part.text() for part in self._parts.values())

    def summary(self) -> str:
        """Return the current state in one line."""
        return "; ".join(part.summary() for part in self._parts.values())

    def html(self) -> str:
        """Return the current state as HTML that needs no JavaScript or kernel."""
        return f'<div class="{self.still}">' + "".join(part.html() for part in self._parts.values()) + "</div>"

    def to_svg(self) -> str:
        """Return the current state as an SVG document."""
        return next(iter(self._parts.values())).svg()

    def save(self, path: str | Path) -> Path:
        """Write the SVG document to a file and return its path."""
        target = Path(path)
        target.write_text(self.to_svg(), encoding="utf-8")
        return target

    def close(self) -> None:
        """Stop watching the ranks and close the widget; the static HTML stays."""
        self._pacer.close()
        with self._lock:
            self._ended = True
            self._lookers.clear()
            self._follow()
            if self._lease is not None:
                self._lease.cancel()
        self._remember(at_once=True)
        super().close()

    def move_away(self, words: str) -> None:
        """Close the view because it is shown elsewhere, and leave the line `words` in its place."""
        self._shown, shown = False, self._shown
        self.close()
        if shown:
            show_display({"text/html": f"<p>{escape(words)}</p>", "text/plain": words}, self.still, update=True)

    # ------------------------------------------------------------------ visibility

    def _look(self, looker: str, parts: frozenset[str]) -> None:
        with self._lock:
            if self._ended:  # a page may not know yet that the view is closed
                return
            self._lookers[looker] = (time.monotonic() + LEASE * self._patience, parts & self._parts.keys())
            self._follow()
            if self._lease is None:
                self._expect_expiry()

    def _away(self, looker: str) -> None:
        with self._lock:
            self._lookers.pop(looker, None)
            self._follow()

    def _follow(self) -> None:
        """Open the parts that a browser shows, and close the others."""
        visible = frozenset().union(*(parts for _, parts in self._lookers.values()))
        for name in sorted(visible - self._opened):
            self._opened.add(name)
            self._parts[name].open(self._changed)
        for name in sorted(self._opened - visible):
            self._opened.discard(name)
            self._parts[name].close()

    def _expect_expiry(self) -> None:
        self._lease = Timer(LEASE / 3, self._expire)
        self._lease.name = "rankbook-lease"
        start_thread(self._lease)

    def _expire(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._lookers = {name: look for name, look in self._lookers.items() if look[0] > now}
            self._follow()
            self._lease = None
            if self._lookers:
                self._expect_expiry()
        if not self._lookers:
            self._remember(at_once=True)

    # ------------------------------------------------------------------ to the browser

    def _changed(self) -> None:
        if not self._first.is_set() and all(part.ready() for part in self._parts.values()):
            self._first.set()
        self._pacer.note()

    def _send_state(self) -> None:
        with self._sending:  # a thread must not send a state older than one already sent
            for name, part in self._parts.items():
                for trait, value in ((f"{name}_fixed", part.fixed()), (f"{name}_state", part.state())):
                    if getattr(self, trait) != value:
                        setattr(self, trait, value)
        self._remember()

    def _remember(self, *, at_once: bool = False) -> None:
        """Renew the static HTML that a saved notebook shows."""
        now = time.monotonic()
        if self._shown and (at_once or now - self._remembered > REMEMBER):
            self._remembered = now
            show_display({"text/html": self.html(), "text/plain": self.text()}, self.still, update=True)

    # ------------------------------------------------------------------ from the browser

    def _handle(self, message: dict[str, Any]) -> None:
        op, looker = str(message.get("op")), str(message.get("view"))
        try:
            if op in {"look", "away"}:
                with self._lock:
                    if message["arrived"] >= self._heard.get(looker, 0):
                        self._heard[looker] = message["arrived"]
                        if op == "look":
                            self._look(looker, frozenset(message.get("parts", ())))
                            self._away("display")
                        else:
                            self._away(looker)
                if op == "look":
                    self.send({"seen": message["rankbook"]})  # without it the browser marks its state as stale
                elif not self._lookers:
                    self._remember(at_once=True)
                return
            answer = {"answer": self._parts[str(message.get("part"))].answer(op, message)}
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


def has_front_end() -> bool:
    """Return True in a Jupyter kernel, False in a terminal."""
    return getattr(get_ipython(), "kernel", None) is not None


def show_display(
    bundle: Mapping[str, Any], display_id: str | None = None, *, update: bool = False, still: str | None = None
) -> None:
    """Display a mime bundle as a new output, or update the output with this `display_id`.

    `still` is the display id of the output below with the same contents as static HTML; `rankbook run` prints only that
    one.
    """
    if display_id is None:
        display(dict(bundle), raw=True, metadata={"rankbook_still": still} if still else None)
    else:
        display(dict(bundle), raw=True, display_id=display_id, update=update)


INTERVAL = 0.1  # seconds: Jupyter drops messages above a thousand a second, and readers are slower


class Throttle:
    """Call `send` after every `note`, in a separate thread, at most once per `interval` seconds.

    Notes in between are combined into one call. No thread runs while there is nothing to send.
    """

    def __init__(self, send: Callable[[], None], interval: float = INTERVAL) -> None:
        self._send, self._interval = send, interval
        self._lock, self._sending = Lock(), Lock()
        self._timer: Timer | None = None
        self._due = 0.0
        self._closed = False

    def note(self) -> None:
        """Schedule a call of `send`."""
        with self._lock:
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
            self._timer = None
            # A late call does not delay the next one, so the rate stays at ten a second, and never exceeds eleven.
            self._due = max(self._due + self._interval, time.monotonic() + self._interval / 2)
        with self._sending:
            if not self._closed:
                self._send()
