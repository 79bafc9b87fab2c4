"""The IPython shell that a rank's cells run in: display, `input()`, and shell commands (`!`).

The shell sends through a `ShellSession`, the rank's executor, and knows nothing of the wire format. Several overrides
avoid work that IPython does for every cell and that would dominate the time of a small one.
"""

from __future__ import annotations

import ast
import builtins
import codecs
import contextlib
import fcntl
import getpass
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tokenize
import traceback
import types
import warnings
from base64 import b64encode
from bdb import BdbQuit
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Protocol, TextIO
from zlib import crc32

import psutil
from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.events import EventManager, available_events
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell, InteractiveShellABC
from IPython.core.magics import script
from IPython.utils.text import LSString, SList
from traitlets import Type
from traitlets.config import Config

from rankbook.errors import TransferError
from rankbook.formatting import PACKAGE_MAGICS, PACKAGE_NOTE
from rankbook.ipython_compat import cell_numbers
from rankbook.protocol import RESULT, WIDGET_VIEW
from rankbook.rank import comms
from rankbook.rank.output_capture import TurnTakingStream
from rankbook.rank.tracebacks import text_of
from rankbook.transport.serialization import set_cell_numbers
from rankbook.transport.shared_memory import ensure_private_folder

_NAME = re.compile(r"[^\W\d]\w*")
# `pip install x`, `/opt/bin/pip3 uninstall -y x`, `python -m pip --quiet install x`, `uv pip install x`
_CHANGES_PACKAGES = re.compile(
    rf"(?<![\w.-])(?:{'|'.join(PACKAGE_MAGICS)})[\d.]*\s(?:[^;&|\n]*\s)?"
    r"(?:add|create|install|remove|sync|uninstall|update|upgrade)(?!\S)"
)
_LAYOUT = frozenset((tokenize.COMMENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.NEWLINE, tokenize.NL))
_LINES_BEFORE = re.compile(r"(?:[^\S\n]*(?:#[^\n]*)?\n)+")
_EMPTY_LINES = re.compile(r"(?:[^\S\n]*\n)+")
_MUST_BE_FIRST = "must be the first line of its cell; no comment may precede it"
_MISPLACED_MAGICS = {
    "distributed": "runs in the notebook process and must be in a separate cell",
    "%distributed": _MUST_BE_FIRST,
    "%local": _MUST_BE_FIRST,
}
"""Line magics that are misplaced in a rank's cell, for which IPython would report an unknown magic."""
_MAX_DEPTH = 200
"""Maximum nesting of lists and dicts in a display."""
_CELL_FLAGS = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class ShellSession(Protocol):
    """Interface through which the shell reaches its rank."""

    cell: int
    """The cell that runs, or that ran last: a number that no other cell of the cluster has."""

    @property
    def host_folder(self) -> Path:
        """Return a folder that the cluster's ranks of this host share."""

    def display(self, kind: str, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None) -> None:
        """Send a mime bundle."""

    @property
    def interrupted(self) -> bool:
        """Return True if an interrupt has reached the running cell."""

    def clear(self, *, wait: bool) -> None:
        """Send a clear_output."""

    def ask(self, prompt: str, *, password: bool) -> str:
        """Request a line of input from the front end and wait for it."""


class RankDisplayPublisher(DisplayPublisher):
    """Send the output of `display()` to the notebook."""

    session: ShellSession | None = None

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: object = None,  # noqa: ARG002 - IPython's signature
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **kwargs: Any,  # noqa: ANN401, ARG002 - IPython's signature
    ) -> None:
        """See IPython's DisplayPublisher."""
        # The shell is made in the forkserver, which has no session.
        if self.session is None:
            return
        display_id = (transient or {}).get("display_id")
        self.session.display(
            "update" if update else "display",
            plain_bundle(data),
            plain_bundle(metadata or {}),
            None if display_id is None else text_of(display_id),
        )

    def clear_output(self, wait: bool = False) -> None:
        """See IPython's DisplayPublisher."""
        if self.session is not None:
            self.session.clear(wait=bool(wait))


class RankDisplayHook(DisplayHook):
    """Send the value of a cell's last expression to the notebook."""

    session: ShellSession | None = None
    source = ""
    keeps_values = False
    """True while a cell runs whose value stays in `Out`, `_` and `_5`: the cells of auto mode.

    Other cells keep nothing: the ranks would hold every displayed tensor in device memory, and nobody expects it.
    """

    @property
    def prompt_count(self) -> int:
        """Return the number of the running cell; IPython's counter is one ahead."""
        assert self.shell is not None
        return int(self.shell.execution_count)

    def update_user_ns(self, result: object) -> None:
        """Keep a cell's value, unless the cell is not part of the session."""
        if self.keeps_values:
            super().update_user_ns(result)

    def quiet(self) -> bool:
        """Return True if the cell ends with a semicolon.

        IPython's implementation reads the source from its history, which ranks do not keep.
        """
        # The frequent case, without the tokenizer.
        if ";" not in self.source or self.shell is None:
            return False
        return _ends_with_semicolon(self.shell.transform_cell(self.source))

    def write_output_prompt(self) -> None:
        """Write no prompt: the notebook numbers the cells."""

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        """Send the result's mime bundle."""
        if self.session is not None and format_dict:
            metadata = {**plain_bundle(md_dict or {}), RESULT: True}
            self.session.display("result", plain_bundle(format_dict), metadata, None)

    def log_output(self, format_dict: dict[str, Any]) -> None:
        """Store nothing: IPython's history would keep every displayed figure alive."""

    def finish_displayhook(self) -> None:
        """Write nothing, because no prompt was written."""


def _ends_with_semicolon(source: str) -> bool:
    """Return True if the last token of Python code, apart from comments, is a semicolon."""
    last = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            last = token.string
    return last == ";"


def plain_bundle(bundle: dict[str, Any]) -> dict[str, Any]:
    """Return a mime bundle as plain JSON data: text as keys, bytes encoded in base64.

    Drops the view of a widget whose model the front end does not have, because it would show an error and not the text.
    Raises `TransferError` in the user's cell if a value is not plain data.
    """
    plain: dict[str, Any] = {}
    for key, value in bundle.items():
        if key == WIDGET_VIEW and not (isinstance(value, dict) and comms.is_open(value.get("model_id"))):
            continue
        name = text_of(key)
        try:
            plain[name] = _plain(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TransferError(f"cannot display {name}: expected plain data ({error})") from error
    return plain


def _plain(value: object) -> Any:  # noqa: ANN401 - a JSON value
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, bytes):
        return b64encode(value).decode()
    # Through JSON and back, which is what the front end gets in any case. So the message contains exactly what can be
    # shown, and no object of the user's classes.
    plain = json.loads(json.dumps(value, default=comms.plain_value), parse_int=_plain_number)
    if _is_deeper(plain, _MAX_DEPTH):
        raise ValueError(f"expected at most {_MAX_DEPTH} levels of nesting")
    return plain


def _plain_number(digits: str) -> int | float:
    """Parse an integer; beyond 64 bits, the limit of a message, return the nearest float as a browser would."""
    number = int(digits)
    return number if -(1 << 63) <= number < 1 << 64 else float(number)


def _is_deeper(value: object, levels: int) -> bool:
    """Return True if a list or dict is nested more than `levels` deep.

    The notebook process, which decodes the message, has less stack left than the rank.
    """
    if not isinstance(value, (list, dict)):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deeper(part, levels - 1) for part in parts)


class RankCompiler(CachingCompiler):
    """Name code objects by CRC-32: IPython's SHA-1 takes a tenth of a small cell's time."""

    source = file = ""
    """The running cell's source, and the name by which a debugger knows it."""

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        """Return a file name in the form that IPython's tracebacks recognize, or the debugger's name."""
        # Only for the source of the cell itself. IPython also compiles other code with this compiler, such as that of
        # magics.
        if self.file and raw_code == self.source:
            return self.file
        # The checksum makes the names of two versions of a cell differ, as IPython's own names do.
        return f"<ipython-input-{number}-{crc32(transformed_code.encode(errors='surrogatepass')):08x}>"


class RankHistory(HistoryManager):
    """The cells of this session, for `In` and `%rerun`. IPython searches its database, which ranks do not have."""

    def get_tail(
        self,
        n: int | None = 10,
        raw: bool = True,
        output: bool = False,  # noqa: ARG002 - IPython's signature
        include_latest: bool = False,
    ) -> list[tuple[int, int, Any]]:
        """Return the last `n` cells as (session, number, source), without the running one."""
        cells = self._cells(raw=raw)
        cells = cells if include_latest else cells[:-1]
        return cells[-n:] if n else []

    def search(  # type: ignore[override]
        self,
        pattern: str = "*",
        raw: bool = True,
        **_: Any,  # noqa: ANN401 - IPython's signature
    ) -> list[tuple[int, int, Any]]:
        """Return the cells that match a pattern such as `*loss*`."""
        return [cell for cell in self._cells(raw=raw) if fnmatchcase(cell[2], pattern)]

    def _cells(self, *, raw: bool) -> list[tuple[int, int, Any]]:
        sources = self.input_hist_raw if raw else self.input_hist_parsed
        return [(0, number, source) for number, source in enumerate(sources) if source]


class RankEvents(EventManager):
    """IPython's events, such as `pre_run_cell`, whose callbacks can be interrupted.

    IPython's own `trigger` prints an interrupt of a callback and then runs the cell, which nothing would interrupt any
    more.
    """

    def trigger(self, event: str, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - IPython's signature
        """Call the callbacks of `event`. Report their errors, and raise KeyboardInterrupt."""
        for callback in tuple(self.callbacks[event]):
            try:
                callback(*args, **kwargs)
            except Exception:  # noqa: BLE001 - a callback of user code
                if getattr(self, "print_on_error", True):  # IPython 7 has no such setting
                    print(f"Error in callback {callback} (for {event}):")  # noqa: T201 - output of the cell
                self.shell.showtraceback()


class PackageCommands:
    """Run commands that change the installed packages on one rank of a host, while the other ranks wait.

    All ranks of a cell come to the same command, and would write into one folder at the same time. The first one runs
    it, with a lock on the file `path`, and records its exit code and output there for the others. Only that it is the
    same command of the same cell says so: if ranks run different commands, or a cell runs one twice, all of them run,
    one by one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cell = 0
        self._calls: Counter[str] = Counter()

    def run(self, cell: int, command: str, run: Callable[[], tuple[int, str]]) -> tuple[int, str]:
        """Return the exit code and output of `command`, after `run()` here or on another rank of this host."""
        if cell != self._cell:
            self._cell = cell
            self._calls.clear()
        self._calls[command] += 1
        call = [cell, command, self._calls[command]]
        ensure_private_folder(self._path.parent)
        # The lock ends with the file. So it does not outlive a rank that dies, and an interrupt ends the wait for it.
        with self._path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            ended = [json.loads(line) for line in file]
            results = [(int(code), str(output)) for other, code, output in ended if other == call]
            result = results[0] if results else run()
            if not results:
                file.write(json.dumps([call, *result]) + "\n")
        importlib.invalidate_caches()
        return result


class RankShell(InteractiveShell):
    """An IPython shell whose front end is in another process."""

    _session: ShellSession
    _package_commands: PackageCommands
    compiler_class = Type(RankCompiler)
    display_pub_class = Type(RankDisplayPublisher)
    displayhook_class = Type(RankDisplayHook)

    def __init__(self, **traits: Any) -> None:  # noqa: ANN401 - traitlets'
        self._stock_transformations: tuple[list[object], ...] = ()
        self.predefined_names: dict[str, object] = {}
        super().__init__(**traits)
        self._stock_transformations = tuple(list(functions) for functions in self._transformations())

    def init_history(self) -> None:
        """Create the history of this session; nothing is written to a file."""
        self.history_manager = RankHistory(shell=self, parent=self)
        # As IPython's method does, so that `%config` finds the object.
        configurables: list[Any] = self.configurables
        configurables.append(self.history_manager)

    def init_events(self) -> None:
        """Create the events, with IPython's own callbacks."""
        super().init_events()
        stock = self.events.callbacks
        self.events = RankEvents(self, available_events)
        for event, callbacks in stock.items():
            for callback in callbacks:
                self.events.register(event, callback)

    def define_names(self, names: dict[str, object], *, keep: bool = False) -> None:
        """Define names for every cell and hide them from lists of variables. `keep`: they have their values already."""
        self.predefined_names = dict(names)
        if keep:
            self.user_ns_hidden.update(names)
        else:
            self.push(names, interactive=False)

    def init_user_ns(self) -> None:
        """Define the rank's names as well: `%reset` calls this too."""
        super().init_user_ns()
        # IPython's versions ask for confirmation at the terminal.
        self.push({"exit": sys.exit, "quit": sys.exit, **self.predefined_names}, interactive=False)

    def run(self, source: str, number: int, file: str = "", *, session: bool = False) -> None:
        """Run a cell and raise its error. `session`: keep it in `In`, and its value in `Out`.

        If the cell itself succeeds, raise the first error that IPython would only print, such as a failed repr. `file`
        is the name by which a debugger knows the cell.
        """
        self.execution_count = number
        assert isinstance(self.displayhook, RankDisplayHook)
        assert isinstance(self.compile, RankCompiler)
        self.compile.source, self.compile.file = source, file
        self.displayhook.source = source
        self.displayhook.keeps_values = session
        if session:
            self._store_input(source, number)
        # Filled by `showtraceback`, which IPython calls for errors that it does not put into the result.
        self._errors: list[BaseException] = []
        # `store_history=False`: IPython would count and store the cell itself.
        result = self.run_cell(source, store_history=False)
        if not session:
            result.result = None  # IPython's `last_execution_result` would keep it in memory through the next cell
        errors, self._errors = [result.error_before_exec, result.error_in_exec, *self._errors], []
        for error in errors:
            if error is not None:
                raise error

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Let `%autoreload` do for the block what it does for a cell.

        It loads modules anew whose files have changed, and notes the files of modules that the block imports. Other
        callbacks of IPython's events are for cells, and are not called.
        """
        magics = self.magics_manager.registry.get("AutoreloadMagics")
        if magics is None:
            yield
            return
        # From IPython 9 on with the description of the cell.
        magics.pre_run_cell(*(None for _ in signature(magics.pre_run_cell).parameters))
        try:
            yield
        finally:
            magics.post_execute_hook()

    def _store_input(self, source: str, number: int) -> None:
        """Store a cell as `In[number]`. The numbers of cells that ran elsewhere have no text."""
        history: Any = self.history_manager
        lists = (history.input_hist_parsed, history.input_hist_raw)
        for stored in lists:
            # Lists are indexed by the number of the cell.
            stored.extend([""] * (number - len(stored)))
        if all(len(stored) == number for stored in lists):
            history.store_inputs(number, source)
            return
        for stored in lists:  # the numbers of a new notebook begin at 1 again
            stored[number : number + 1] = [source]

    # Transforming and compiling a cell

    def transform_cell(self, raw_cell: str) -> str:
        """Return the cell as Python source; skip IPython's tokenizer for a cell that already is plain Python.

        The tokenizer takes a quarter of a small cell's time. It runs for a single line that may be a magic without its
        `%`; for a cell with a backslash, about which Python may warn; and if user code has changed the input
        transformers.
        """
        before = _LINES_BEFORE.match(raw_cell)  # such as the line of `%%distributed`, which is a comment on a rank
        code = raw_cell if before is None else raw_cell[before.end() :]
        if self._may_be_magic(code.strip()):
            return raw_cell[: len(raw_cell) - len(code)] + str(super().transform_cell(code))
        if "\\" not in raw_cell and self._transformations() == self._stock_transformations:
            with contextlib.suppress(SyntaxError, ValueError, MemoryError, RecursionError):
                # Compiling is the test whether it is plain Python. The tree is thrown away; IPython compiles the cell
                # again later.
                compile(raw_cell, "<cell>", "exec", _CELL_FLAGS, dont_inherit=True)
                return raw_cell if raw_cell.endswith("\n") else raw_cell + "\n"
        transformed = str(super().transform_cell(raw_cell))
        # IPython drops leading empty lines, which shifts the line numbers.
        empty = _EMPTY_LINES.match(raw_cell)
        return transformed if empty is None else "\n" * empty[0].count("\n") + transformed.lstrip("\n")

    def _may_be_magic(self, cell: str) -> bool:
        """Return True if the cell is one line that begins with the name of a magic, such as `pwd`."""
        name = None if "\n" in cell else _NAME.match(cell)
        return name is not None and self.find_line_magic(name[0]) is not None

    def should_run_async(self, raw_cell: str, **kwargs: Any) -> bool:  # noqa: ANN401 - IPython's signature
        """Return True if the cell has a top-level `await`.

        IPython compiles the cell to find out; skip that if neither `await` nor `async` occurs in it.
        """
        return ("await" in raw_cell or "async" in raw_cell) and bool(super().should_run_async(raw_cell, **kwargs))

    def _transformations(self) -> tuple[list[object], ...]:
        manager = self.input_transformer_manager
        lists = (manager.cleanup_transforms, manager.line_transforms, manager.token_transformers)
        return (*lists, self.input_transformers_post)

    # Errors, which the executor reports

    def showtraceback(self, exc_tuple: Any = None, *_: Any, **__: Any) -> None:  # noqa: ANN401 - IPython's signature
        """Record the error without formatting it.

        The executor formats it once, at the end of the cell, where an interrupt is handled.
        """
        try:
            _, value, where = self._get_exc_info(exc_tuple)
        except ValueError:  # `%tb` without an error
            sys.stderr.write("No traceback available to show.\n")
            return
        if threading.current_thread() is not threading.main_thread():  # a widget's callback is not part of the cell
            traceback.print_exception(value, file=sys.stderr)
            return
        self._errors.append(value)
        if self.call_pdb and not isinstance(value, (UsageError, SystemExit)):
            self.InteractiveTB.tb = where  # IPython up to 8 would take that of an earlier cell
            sys.stderr.write("".join(traceback.format_exception_only(value)))
            self.debugger(force=True)

    def _showtraceback(self, etype: type, evalue: BaseException, stb: list[str]) -> None:  # noqa: ARG002 - as above
        """Record the error only: the executor reports it at the end of the cell."""
        self._errors.append(evalue)

    def show_usage_error(self, exc: BaseException) -> None:
        """Print nothing: the executor reports the error."""

    @contextlib.contextmanager
    def _tee(self, channel: str) -> Iterator[None]:  # noqa: ARG002 - IPython's signature
        """Capture nothing: IPython's history would keep all printed text."""
        yield

    def _update_code_co_name(self, code: types.CodeType) -> types.CodeType:
        """Keep the name `<module>`; IPython 7 would name the code of a cell `<cell line: 1>`."""
        return code

    # Input and shell commands

    def attach(self, session: ShellSession) -> None:
        """Send display and input through `session` from now on."""
        assert isinstance(self.display_pub, RankDisplayPublisher)
        assert isinstance(self.displayhook, RankDisplayHook)
        self.display_pub.session = self.displayhook.session = self._session = session
        self._package_commands = PackageCommands(session.host_folder / "package-commands")

        # Replaces `input` for all code on this rank. The prompt is converted here, because it may be any object.
        def ask(prompt: object = "", /) -> str:
            sys.stdout.flush()
            try:
                return session.ask(text_of(prompt), password=False)
            except KeyboardInterrupt:
                if sys._getframe(1).f_globals.get("__name__") == "cmd":  # pdb would only prompt again
                    raise BdbQuit from None
                raise

        def ask_password(prompt: object = "Password: ", stream: object = None, **_: object) -> str:  # noqa: ARG001
            return session.ask(text_of(prompt), password=True)

        builtins.input = ask
        getpass.getpass = ask_password

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:  # noqa: ANN401 - IPython's types
        """Run a cell magic; raise KeyboardInterrupt if an interrupt ended its script.

        Older versions of IPython report such a cell as successful.
        """
        # Not of the publisher, which `%%capture` replaces.
        assert isinstance(self.displayhook, RankDisplayHook)
        # Read before and after the magic: only an interrupt during it explains its result.
        session = self.displayhook.session
        before = session is None or session.interrupted
        value = super().run_cell_magic(magic_name, line, cell)
        is_script = getattr(self.find_cell_magic(magic_name), "__module__", "") == script.__name__
        if is_script and not before and session is not None and session.interrupted:
            raise KeyboardInterrupt
        return value

    def system(self, cmd: str) -> None:
        """Run `!cmd` in the rank's process group and on its descriptors.

        So an interrupt reaches the command, and its output is captured. A command that changes the installed packages
        runs on one rank of this host.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        command = str(self.var_expand(cmd, depth=1))
        # `%%capture` and `contextlib.redirect_stdout` replace the stream: the command's output goes there as well.
        replaced = None if isinstance(sys.stdout, TurnTakingStream) else sys.stdout
        self._run_in_turn(command, partial(_run_command, command, replaced))

    system_piped = system
    system_raw = system

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:  # noqa: ANN401 - IPython's types
        """Run `x = !cmd` and return its output.

        IPython's version treats an interrupt as the command's own and continues the cell.
        """
        command = str(self.var_expand(cmd, depth=depth + 1))
        text = self._run_in_turn(command, partial(_read_command, command))
        return SList(text.splitlines()) if split else LSString(text)

    def _run_in_turn(self, command: str, run: Callable[[], tuple[int, str]]) -> str:
        """Run a shell command and return its output; on one rank of this host if it changes the installed packages."""
        changes = _CHANGES_PACKAGES.search(command) is not None
        code, text = self._package_commands.run(self._session.cell, command, run) if changes else run()
        self.user_ns["_exit_code"] = code  # as IPython does, for a later cell
        if code and getattr(self, "system_raise_on_error", False):  # older versions of IPython do not have it
            raise subprocess.CalledProcessError(code, command)
        return text

    def enable_gui(self, gui: str | None = None) -> None:
        """Refuse the event loops of desktop toolkits: a rank has no display."""
        # Older versions of IPython and matplotlib name these two backends as if they were event loops.
        if gui not in (None, "inline", "widget", "ipympl"):
            raise UsageError(f"%gui {gui}: a rank has no display; use %matplotlib inline to show figures")


def _user_shell() -> str | None:
    """Return the shell in which IPython runs commands: that of the user, or None for the system's."""
    return shutil.which(os.environ.get("SHELL", ""))


def _run_command(command: str, output: TextIO | None) -> tuple[int, str]:
    """Run a shell command and return its exit code. Its output goes to the rank's descriptors, or to `output`."""
    # IPython's own version uses a pseudo-terminal on Unix, whose output would not go through the rank's pipes.
    with subprocess.Popen(  # noqa: S602 - `!` runs a shell command
        command,
        shell=True,
        executable=_user_shell(),
        stdin=subprocess.DEVNULL,
        stdout=None if output is None else subprocess.PIPE,
        stderr=None if output is None else subprocess.STDOUT,
    ) as process:
        try:
            if output is not None:
                assert isinstance(process.stdout, io.BufferedReader)  # `read1` returns what there is
                for text in codecs.iterdecode(iter(partial(process.stdout.read1, 1 << 16), b""), "utf-8", "replace"):
                    output.write(text)
            return process.wait(), ""
        except KeyboardInterrupt:
            _end(process)
            raise


def _read_command(command: str) -> tuple[int, str]:
    """Run a shell command and return its exit code and output."""
    with subprocess.Popen(  # noqa: S602 - as above
        command,
        shell=True,
        executable=_user_shell(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            text = process.communicate()[0].decode(errors="replace")
        except KeyboardInterrupt:
            _end(process)
            raise
    return process.returncode, text


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait 0.2 s for an interrupted command, then kill it and its children.

    The interrupt has already reached its whole process group.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.2)
        return
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.kill()
    process.wait()


def _refuse(name: str, why: str) -> Callable[[str], None]:
    def refuse(_line: str) -> None:
        raise UsageError(f"%{name} {why}")

    return refuse


def _with_note(run: Callable[[str], None], note: str) -> Callable[[str], None]:
    def run_and_print(line: str) -> None:
        run(line)
        print(note)  # noqa: T201 - the user's output

    run_and_print.__doc__ = run.__doc__
    return run_and_print


def make_shell() -> RankShell:
    """Return the shell. Called in the forkserver, so that forked ranks share it."""
    config = Config()
    config.HistoryManager.enabled = False
    # The singleton, because `get_ipython()` and libraries ask for that.
    shell: RankShell = RankShell.instance(config=config)
    set_cell_numbers(cell_numbers(shell.compile))
    load_magics = getattr(shell.magics_manager, "load_all_lazy_magics", None)  # absent from older versions of IPython
    if load_magics is not None:
        # An interrupt of the import at a magic's first use would break the magic for good.
        load_magics()
    # Registered as line magics: that is how IPython sees them in the middle of a cell.
    for name, why in _MISPLACED_MAGICS.items():
        shell.magics_manager.register_function(_refuse(name, why), "line", name)
    for name in PACKAGE_MAGICS:
        run = shell.find_line_magic(name)  # older versions of IPython have fewer
        if run is not None:
            shell.magics_manager.register_function(_with_note(run, PACKAGE_NOTE), "line", name)
    # Enter the trap once. IPython would change `builtins` before and after every cell, and every change invalidates the
    # interpreter's inline caches for all uses of builtins.
    shell.builtin_trap.__enter__()
    # A rank is no terminal at which a person types. Lightning, which looks for the prompt, would refuse to train on it.
    for name in ("ps1", "ps2", "ps3"):
        vars(sys).pop(name, None)
    warnings.filterwarnings("ignore", message="To exit: use 'exit'", category=UserWarning)
    warnings.filterwarnings("ignore", message=".*run_cell_async' was never awaited")  # interrupted before the await
    return shell


InteractiveShellABC.register(RankShell)
