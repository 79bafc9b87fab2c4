"""The IPython shell that a rank's cells run in.

Owns: display, input and `!` on a rank. Refuses: the wire's details; it calls the rank's `ShellSession`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import getpass
import json
import re
import subprocess
import sys
import threading
import traceback
import warnings
from base64 import b64encode
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from zlib import crc32

import psutil
from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell, InteractiveShellABC
from IPython.core.magics import script
from IPython.utils.text import LSString, SList
from traitlets import Type
from traitlets.config import Config

from rankbook.errors import TransferError
from rankbook.protocol.base import RESULT
from rankbook.rank.io import comms
from rankbook.rank.tracebacks import text_of
from rankbook.transport.cell_sources import set_cell_numbers

_WIDGET = "application/vnd.jupyter.widget-view+json"
_ASSIGNS = re.compile(r"[^\W\d]\w*[ \t]*=(?!=)")
_EMPTY_LINES = re.compile(r"(?:[^\S\n]*\n)+")
_FIRST = "has to be the first line of its cell; not even a comment may stand above it"
_NOT_HERE = {
    "distributed": "is for the notebook's own process: give it a cell of its own",
    "%distributed": _FIRST,
    "%local": _FIRST,
}
"""Line magics that stand in a rank's cell by mistake; IPython would say that there are none."""
_DEEPEST = 200
"""Levels of lists and dicts that a display may have."""
_AS_A_CELL = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class ShellSession(Protocol):
    """What the shell needs of its rank."""

    def display(self, kind: str, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None) -> None:
        """Send a mime bundle."""

    @property
    def interrupted(self) -> bool:
        """Whether an interrupt has reached the cell that runs."""

    def clear(self, *, wait: bool) -> None:
        """Send a clear_output."""

    def ask(self, prompt: str, *, password: bool) -> str:
        """Ask the person for a line and wait for it."""


class RankDisplayPublisher(DisplayPublisher):
    """Sends what `display()` makes to the notebook."""

    session: ShellSession | None = None

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: object = None,  # noqa: ARG002 - IPython's signature; nobody uses it
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **kwargs: Any,  # noqa: ANN401, ARG002 - IPython's signature
    ) -> None:
        """See IPython's DisplayPublisher."""
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
    """Sends a cell's last expression to the notebook."""

    session: ShellSession | None = None
    source = ""

    def quiet(self) -> bool:
        """Whether the cell ends with a semicolon. IPython would look for it in its history, which ranks have not."""
        if ";" not in self.source or self.shell is None:
            return False
        return bool(self.semicolon_at_end_of_expression(self.shell.transform_cell(self.source)))

    def write_output_prompt(self) -> None:
        """The notebook writes no prompt: the cell's number is its own."""

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        """Send the bundle."""
        if self.session is not None and format_dict:
            metadata = {**plain_bundle(md_dict or {}), RESULT: True}
            self.session.display("result", plain_bundle(format_dict), metadata, None)

    def log_output(self, format_dict: dict[str, Any]) -> None:
        """Nothing: IPython's history would keep every figure that was ever shown."""

    def finish_displayhook(self) -> None:
        """Nothing to end: no prompt was begun."""


def plain_bundle(bundle: dict[str, Any]) -> dict[str, Any]:
    """The bundle with bytes as base64 and text as keys, checked to be plain data.

    Raises `TransferError`, in the user's cell.

    Without the view of a widget whose model the front end does not have: it would show an error and not the text.
    """
    plain: dict[str, Any] = {}
    for key, value in bundle.items():
        if key == _WIDGET and not (isinstance(value, dict) and comms.is_open(value.get("model_id"))):
            continue
        name = text_of(key)
        try:
            plain[name] = _plain(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TransferError(f"cannot display {name}: it is no plain data ({error})") from error
    return plain


def _plain(value: object) -> Any:  # noqa: ANN401 - what JSON can hold
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, bytes):
        return b64encode(value).decode()
    plain = json.loads(json.dumps(value, default=_plain_bytes), parse_int=_plain_number)
    if _is_deeper(plain, _DEEPEST):
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    return plain


def _plain_number(digits: str) -> int | float:
    """Return the number; one that has more than 64 bits, which no message can hold, as a browser would read it."""
    number = int(digits)
    return number if -(1 << 63) <= number < 1 << 64 else float(number)


def _is_deeper(value: object, levels: int) -> bool:
    """Whether a list or dict is nested more than `levels` deep: the notebook, which reads it, has less stack left."""
    if not isinstance(value, (list, dict)):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deeper(part, levels - 1) for part in parts)


def _plain_bytes(value: object) -> str:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} is not JSON")


class RankCompiler(CachingCompiler):
    """Names a cell's code without OpenSSL's SHA-1, which costs a small cell a tenth of its time."""

    source = file = ""
    """The cell that runs, and what a debugger knows it as."""

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        """A file name of the form that IPython's tracebacks know, or the debugger's."""
        if self.file and raw_code == self.source:
            return self.file
        return f"<ipython-input-{number}-{crc32(transformed_code.encode(errors='surrogatepass')):08x}>"


class RankShell(InteractiveShell):
    """An IPython shell whose person sits elsewhere."""

    compiler_class = Type(RankCompiler)
    display_pub_class = Type(RankDisplayPublisher)
    displayhook_class = Type(RankDisplayHook)

    def __init__(self, **traits: Any) -> None:  # noqa: ANN401 - traitlets'
        self._stock: tuple[list[object], ...] = ()
        self._given: dict[str, object] = {}
        super().__init__(**traits)
        self._stock = tuple(list(each) for each in self._transformations())

    def give(self, names: dict[str, object]) -> None:
        """Have these names in every cell, and hidden where variables are listed."""
        self._given = dict(names)
        self.push(names, interactive=False)

    def init_user_ns(self) -> None:
        """As IPython's, which `%reset` calls too: a rank without its number would be none."""
        super().init_user_ns()
        self.push(self._given, interactive=False)

    def run(self, source: str, number: int, file: str = "") -> None:
        """Run a cell; raises what it raises, or else the first error that IPython would only show: a failed repr.

        `file` is what a debugger knows it as.
        """
        self.execution_count = number
        assert isinstance(self.displayhook, RankDisplayHook)
        assert isinstance(self.compile, RankCompiler)
        self.compile.source, self.compile.file = source, file
        self.displayhook.source = source
        self._errors: list[BaseException] = []
        result = self.run_cell(source, store_history=False)
        errors, self._errors = [result.error_before_exec, result.error_in_exec, *self._errors], []
        for error in errors:
            if error is not None:
                raise error

    def transform_cell(self, raw_cell: str) -> str:
        """As IPython's, but for cells that are Python as they stand: its tokenizer would change nothing in these.

        It takes a quarter of the time of a small cell. One line may be a magic without its `%`, so that is asked for,
        unless it gives a name its value, as is a backslash, about which Python may warn.
        """
        if (
            (raw_cell.count("\n") > 1 or _ASSIGNS.match(raw_cell))
            and "\\" not in raw_cell
            and self._transformations() == self._stock
        ):
            with contextlib.suppress(SyntaxError, ValueError, MemoryError, RecursionError):
                compile(raw_cell, "<cell>", "exec", _AS_A_CELL, dont_inherit=True)
                return raw_cell if raw_cell.endswith("\n") else raw_cell + "\n"
        transformed = str(super().transform_cell(raw_cell))
        empty = _EMPTY_LINES.match(raw_cell)  # IPython leaves them out, and then no line has the number that it shows
        return transformed if empty is None else "\n" * empty[0].count("\n") + transformed.lstrip("\n")

    def should_run_async(self, raw_cell: str, **kwargs: Any) -> bool:  # noqa: ANN401 - IPython's signature
        """As IPython's, which compiles the cell to find out, but without that where no word of it says so."""
        return ("await" in raw_cell or "async" in raw_cell) and bool(super().should_run_async(raw_cell, **kwargs))

    def _transformations(self) -> tuple[list[object], ...]:
        manager = self.input_transformer_manager
        lists = (manager.cleanup_transforms, manager.line_transforms, manager.token_transformers)
        return (*lists, self.input_transformers_post)

    def showtraceback(self, exc_tuple: Any = None, *_: Any, **__: Any) -> None:  # noqa: ANN401 - IPython's signature
        """Keep the error, put it into no words yet: the executor does, once, and an interrupt may not come between."""
        _, value, _ = self._get_exc_info(exc_tuple)
        if threading.current_thread() is not threading.main_thread():  # what listens to a widget is no part of a cell
            traceback.print_exception(value, file=sys.stderr)
            return
        self._errors.append(value)
        if self.call_pdb:
            self.debugger(force=True)

    def _showtraceback(self, etype: type, evalue: BaseException, stb: list[str]) -> None:  # noqa: ARG002 - as above
        """Nothing: the executor reports the error, once, when the cell ends."""
        self._errors.append(evalue)

    def show_usage_error(self, exc: BaseException) -> None:
        """As above."""

    @contextlib.contextmanager
    def _tee(self, channel: str) -> Iterator[None]:  # noqa: ARG002 - IPython's signature
        """Nothing: IPython's history would keep all text that was ever printed."""
        yield

    def attach(self, session: ShellSession) -> None:
        """Send display and input through `session` from now on."""
        assert isinstance(self.display_pub, RankDisplayPublisher)
        assert isinstance(self.displayhook, RankDisplayHook)
        self.display_pub.session = self.displayhook.session = session

        def ask(prompt: object = "", /) -> str:
            sys.stdout.flush()
            try:
                return session.ask(text_of(prompt), password=False)
            except KeyboardInterrupt:
                if sys._getframe(1).f_globals.get("__name__") == "cmd":  # a debugger would only ask again
                    raise BdbQuit from None
                raise

        def ask_secretly(prompt: object = "Password: ", stream: object = None, **_: object) -> str:  # noqa: ARG001
            return session.ask(text_of(prompt), password=True)

        builtins.input = ask
        getpass.getpass = ask_secretly

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:  # noqa: ANN401 - IPython's types
        """A script that is interrupted is an interrupted cell; with older versions of IPython it would end well."""
        assert isinstance(self.display_pub, RankDisplayPublisher)
        session = self.display_pub.session
        before = session is None or session.interrupted
        value = super().run_cell_magic(magic_name, line, cell)
        is_script = getattr(self.find_cell_magic(magic_name), "__module__", "") == script.__name__
        if is_script and not before and session is not None and session.interrupted:
            raise KeyboardInterrupt
        return value

    def system(self, cmd: str) -> None:
        """`!cmd`: in the rank's process group, so that an interrupt ends it, and on its descriptors, so it is heard."""
        sys.stdout.flush()
        sys.stderr.flush()
        command = self.var_expand(cmd, depth=1)
        with subprocess.Popen(  # noqa: S602 - a shell is what `!` asks for
            command, shell=True, stdin=subprocess.DEVNULL
        ) as process:
            try:
                self.user_ns["_exit_code"] = process.wait()
            except KeyboardInterrupt:
                _end(process)
                raise

    system_piped = system
    system_raw = system

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:  # noqa: ANN401 - IPython's types
        """`x = !cmd`. IPython's would take an interrupt for the command's own and go on with the cell."""
        command = self.var_expand(cmd, depth=depth + 1)
        with subprocess.Popen(  # noqa: S602 - as above
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                text = process.communicate()[0].decode(errors="replace")
            except KeyboardInterrupt:
                _end(process)
                raise
        self.user_ns["_exit_code"] = process.returncode
        return SList(text.splitlines()) if split else LSString(text)

    def enable_gui(self, gui: str | None = None) -> None:
        """No event loops of desktop toolkits on a rank."""
        if gui not in (None, "inline"):
            raise UsageError(f"%gui {gui}: a rank has no screen; figures are shown with %matplotlib inline")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The interrupt reached its whole process group; this is for those who did not go."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.2)
        return
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.kill()
    process.wait()


def _refuse(name: str, why: str) -> Callable[[str], None]:
    def refuse(_line: str) -> None:
        raise UsageError(f"%{name} {why}")

    return refuse


def make_shell() -> RankShell:
    """The shell, made in the forkserver, so that each rank has it at once."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.cache_size = 0  # Out[n] would keep every tensor that was ever shown on its device
    shell: RankShell = RankShell.instance(config=config)
    set_cell_numbers(shell.compile._filename_map)
    load_magics = getattr(shell.magics_manager, "load_all_lazy_magics", None)  # not in older versions of IPython
    if load_magics is not None:
        load_magics()  # the first use of a magic is an import, and an interrupt in the middle of it breaks it for good
    for name, why in _NOT_HERE.items():
        shell.magics_manager.register_function(_refuse(name, why), "line", name)
    for namespace in (shell.user_ns, shell.user_ns_hidden):
        namespace.update(exit=sys.exit, quit=sys.exit)  # IPython's ask the terminal
    # IPython would change `builtins` before and after each cell, and with it void what the interpreter has learnt about
    # every use of a builtin, everywhere.
    shell.builtin_trap.__enter__()
    warnings.filterwarnings("ignore", message="To exit: use 'exit'", category=UserWarning)
    warnings.filterwarnings("ignore", message=".*run_cell_async' was never awaited")  # an interrupt came before it
    return shell


InteractiveShellABC.register(RankShell)
