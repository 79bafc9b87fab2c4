"""A view that lives in the browser while somebody looks, and stays in the notebook as HTML.

Owns: what is sent, how often, to whom; who looks. Refuses: to know what is shown.

Threads of views, which may end with the interpreter at any moment.

Puts outputs into the notebook.

At most so many updates a second, and the last one always.

A widget that hears its browser at once, also while a cell runs.
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
    """`_handle` is called with each message, on a thread of its own; `arrived` numbers them, for they may overtake."""

    def __init__(self, **traits: object) -> None:
        self._arriving = Lock()  # held for moments only, by the kernel's thread
        self._taken: set[str] = set()  # heard early, and not yet delivered: that may be hours later
        self._arrivals = count()
        self._late = False  # whether messages may be delivered only once the cell that runs has ended
        super().__init__(**traits)
        self.on_msg(lambda _widget, content, _buffers: self._arrived(content))
        self._take_messages_early()

    def _handle(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _take_messages_early(self) -> None:
        comm = self.comm
        if not hasattr(comm, "_reply_subshell_for"):
            self._late = hasattr(comm, "kernel")
            return

        def take(data: object, addressed: str | None) -> str | None:
            if isinstance(data, Mapping) and data.get("method") == "custom":
                self._arrived(data.get("content"), early=True)
            return addressed

        comm._reply_subshell_for = take  # the one place on the way in that is never busy

    def _arrived(self, content: object, *, early: bool = False) -> None:
        """A message. What was heard early comes once more, as ipywidgets delivers it."""
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
FIRST_STATE = 0.6  # seconds that opening waits for the ranks to say something
LEASE = 15.0  # seconds that a browser counts as looking after it last said so; it says so every 5
REMEMBER = 30.0  # seconds between two updates of what a saved notebook will show: some 40 ms of the page each


def script(*names: str, last: str) -> str:
    """The ES module of a view, from its pieces in static/ and its last line."""
    return "\n".join([*((STATIC / f"{name}.js").read_text(encoding="utf-8") for name in ("common", *names)), last])


class LiveView(EarlyMessageWidget):
    """Shows its parts for as long as somebody looks. Each part has two traits, `NAME_fixed` and `NAME_state`."""

    _css = STATIC / "view.css"
    still = traitlets.Unicode("").tag(sync=True)  # the class of the HTML that stands in for the view

    def __init__(self, parts: Sequence[ViewModel]) -> None:
        self._parts = {part.name: part for part in parts}
        self._opened: set[str] = set()
        self._lookers: dict[str, tuple[float, frozenset[str]]] = {}
        self._heard: dict[str, int] = {}  # by looker, the number of its last message
        self._lock, self._sending = RLock(), Lock()
        self._ended = False
        self._first = Event()
        self._lease: Timer | None = None
        self._shown = False
        self._remembered = 0.0
        self._pacer = Throttle(self._send_state)
        super().__init__(still=f"rankbook-still-{uuid.uuid4().hex[:12]}")
        self._patience = 40 if self._late else 1

    # ------------------------------------------------------------------ what it shows

    def _repr_mimebundle_(self, **_options: object) -> Any:  # noqa: ANN401 - as IPython has it
        """The widget, and its state at this moment in HTML and text."""
        self._look("display", frozenset(self._parts))
        self._first.wait(FIRST_STATE)
        self._send_state()
        found = super()._repr_mimebundle_()
        data, metadata = found if isinstance(found, tuple) else ({}, {})
        return {**data, "text/plain": self.text(), "text/html": self.html()}, metadata

    def _ipython_display_(self, **_options: object) -> None:
        """Two outputs: the live view, and below it, hidden by it, what a notebook shows where nothing is installed.

        One would do, had not JupyterLab, for a widget whose kernel is gone, an error instead of the HTML beside it.
        Of a view that was closed there is the HTML.
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
        """The state at this moment, for a terminal."""
        return "\n\n".join(part.text() for part in self._parts.values())

    def summary(self) -> str:
        """The state at this moment, in one line."""
        return "; ".join(part.summary() for part in self._parts.values())

    def html(self) -> str:
        """The state at this moment, as HTML that needs nothing installed."""
        return f'<div class="{self.still}">' + "".join(part.html() for part in self._parts.values()) + "</div>"

    def to_svg(self) -> str:
        """The state at this moment, as a picture."""
        return next(iter(self._parts.values())).svg()

    def save(self, path: str | Path) -> Path:
        """Write the picture to an .svg file; its path."""
        target = Path(path)
        target.write_text(self.to_svg(), encoding="utf-8")
        return target

    def close(self) -> None:
        """End it: nothing is asked of the ranks, and the output goes."""
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
        """End it, because it is shown elsewhere from now on; a line of `words` stays in its place."""
        self._shown, shown = False, self._shown
        self.close()
        if shown:
            show_display({"text/html": f"<p>{escape(words)}</p>", "text/plain": words}, self.still, update=True)

    # ------------------------------------------------------------------ who looks

    def _look(self, looker: str, parts: frozenset[str]) -> None:
        with self._lock:
            if self._ended:  # a page may not know it yet
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
        """Open what is looked at, close what is not."""
        wanted = frozenset().union(*(parts for _, parts in self._lookers.values()))
        for name in sorted(wanted - self._opened):
            self._opened.add(name)
            self._parts[name].open(self._changed)
        for name in sorted(self._opened - wanted):
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
        with self._sending:  # of two threads neither may send what it has read before the other one
            for name, part in self._parts.items():
                for trait, value in ((f"{name}_fixed", part.fixed()), (f"{name}_state", part.state())):
                    if getattr(self, trait) != value:
                        setattr(self, trait, value)
        self._remember()

    def _remember(self, *, at_once: bool = False) -> None:
        """Renew what a saved notebook will show."""
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
                    self.send({"seen": message["rankbook"]})  # else the browser says that what it shows may be old
                elif not self._lookers:
                    self._remember(at_once=True)
                return
            answer = {"answer": self._parts[str(message.get("part"))].answer(op, message)}
        except RankbookError as error:
            answer = {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - shown, whole, where the click was
            answer = {"error": f"{type(error).__name__}: {error}"}
        self.send({"reply": message["rankbook"], **answer})


def call_if_set(end: Callable[[], None] | None) -> None:
    """Call what ends a watch, if there is one."""
    if end is not None:
        end()


def start_thread(thread: Thread) -> bool:
    """Start `thread` as a daemon; return False if the interpreter shuts down.

    From Python 3.12 on no thread can start from then on, while the threads that run already still get what the end of
    the ranks brings: an update of a view that nobody sees any more.
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
    """Whether this is a Jupyter front end, and not a terminal."""
    return getattr(get_ipython(), "kernel", None) is not None


def show_display(
    bundle: Mapping[str, Any], display_id: str | None = None, *, update: bool = False, still: str | None = None
) -> None:
    """Show a mime bundle as an output, or as the new state of the one that has that id.

    `still`: the id of the output below, which says all of it where nothing is live; `rankbook run` shows that alone.
    """
    if display_id is None:
        display(dict(bundle), raw=True, metadata={"rankbook_still": still} if still else None)
    else:
        display(dict(bundle), raw=True, display_id=display_id, update=update)


INTERVAL = 0.1  # seconds: past a thousand messages a second Jupyter drops the rest, and nobody reads faster


class Throttle:
    """Calls `send` after each `note`, on a thread of its own, at most once per `interval` seconds.

    Notes that come in between are one. Nothing runs while there is nothing to send.
    """

    def __init__(self, send: Callable[[], None], interval: float = INTERVAL) -> None:
        self._send, self._interval = send, interval
        self._lock, self._sending = Lock(), Lock()
        self._timer: Timer | None = None
        self._due = 0.0
        self._closed = False

    def note(self) -> None:
        """There is something new."""
        with self._lock:
            if self._timer is None and not self._closed:
                self._timer = Timer(max(0.0, self._due - time.monotonic()), self._fire)
                self._timer.name = "rankbook-view"
                self._closed = not start_thread(self._timer)

    def close(self) -> None:
        """Send nothing any more."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()

    def _fire(self) -> None:
        with self._lock:
            self._timer = None
            # A late one does not push the next one back, so that ten a second are ten, and never more than eleven.
            self._due = max(self._due + self._interval, time.monotonic() + self._interval / 2)
        with self._sending:
            if not self._closed:
                self._send()
