"""The IPython shell that a rank's cells run in: display, `input()`, and shell commands (`!`).

The shell sends through a `ShellSession`, the rank's executor, and knows nothing of the wire format. Several overrides
avoid work that IPython does for every cell and that would dominate the time of a small one.
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
"""Line magics that are misplaced in a rank's cell, for which IPython would report an unknown magic."""
_DEEPEST = 200
"""Maximum nesting of lists and dicts in a display."""
_AS_A_CELL = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class ShellSession(Protocol):
    """Interface through which the shell reaches its rank."""

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

    def quiet(self) -> bool:
        """Return True if the cell ends with a semicolon.

        IPython's implementation reads the source from its history, which ranks do not keep.
        """
        if ";" not in self.source or self.shell is None:
            return False
        return bool(self.semicolon_at_end_of_expression(self.shell.transform_cell(self.source)))

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


def plain_bundle(bundle: dict[str, Any]) -> dict[str, Any]:
    """Return a mime bundle as plain JSON data: text as keys, bytes encoded in base64.

    Drops the view of a widget whose model the front end does not have, because it would show an error and not the text.
    Raises `TransferError` in the user's cell if a value is not plain data.
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


def _plain(value: object) -> Any:  # noqa: ANN401 - a JSON value
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, bytes):
        return b64encode(value).decode()
    plain = json.loads(json.dumps(value, default=_plain_bytes), parse_int=_plain_number)
    if _is_deeper(plain, _DEEPEST):
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
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


def _plain_bytes(value: object) -> str:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} is not JSON")


class RankCompiler(CachingCompiler):
    """Name code objects by CRC-32: IPython's SHA-1 takes a tenth of a small cell's time."""

    source = file = ""
    """The running cell's source, and the name by which a debugger knows it."""

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        """Return a file name in the form that IPython's tracebacks recognize, or the debugger's name."""
        if self.file and raw_code == self.source:
            return self.file
        return f"<ipython-input-{number}-{crc32(transformed_code.encode(errors='surrogatepass')):08x}>"


class RankShell(InteractiveShell):
    """An IPython shell whose front end is in another process."""

    compiler_class = Type(RankCompiler)
    display_pub_class = Type(RankDisplayPublisher)
    displayhook_class = Type(RankDisplayHook)

    def __init__(self, **traits: Any) -> None:  # noqa: ANN401 - traitlets'
        self._stock: tuple[list[object], ...] = ()
        self._given: dict[str, object] = {}
        super().__init__(**traits)
        self._stock = tuple(list(functions) for functions in self._transformations())

    def give(self, names: dict[str, object]) -> None:
        """Define names for every cell and hide them from lists of variables."""
        self._given = dict(names)
        self.push(names, interactive=False)

    def init_user_ns(self) -> None:
        """Define the rank's names as well: `%reset` calls this too."""
        super().init_user_ns()
        self.push(self._given, interactive=False)

    def run(self, source: str, number: int, file: str = "") -> None:
        """Run a cell and raise its error.

        If the cell itself succeeds, raise the first error that IPython would only print, such as a failed repr. `file`
        is the name by which a debugger knows the cell.
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
        """Return the cell as Python source; skip IPython's tokenizer for a cell that already is plain Python.

        The tokenizer takes a quarter of a small cell's time. It runs for a single line, which may be a magic without
        its `%`, unless that line is an assignment; for a cell with a backslash, about which Python may warn; and if
        user code has changed the input transformers.
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
        empty = _EMPTY_LINES.match(raw_cell)  # IPython drops leading empty lines, which shifts the line numbers
        return transformed if empty is None else "\n" * empty[0].count("\n") + transformed.lstrip("\n")

    def should_run_async(self, raw_cell: str, **kwargs: Any) -> bool:  # noqa: ANN401 - IPython's signature
        """Return True if the cell has a top-level `await`.

        IPython compiles the cell to find out; skip that if neither `await` nor `async` occurs in it.
        """
        return ("await" in raw_cell or "async" in raw_cell) and bool(super().should_run_async(raw_cell, **kwargs))

    def _transformations(self) -> tuple[list[object], ...]:
        manager = self.input_transformer_manager
        lists = (manager.cleanup_transforms, manager.line_transforms, manager.token_transformers)
        return (*lists, self.input_transformers_post)

    def showtraceback(self, exc_tuple: Any = None, *_: Any, **__: Any) -> None:  # noqa: ANN401 - IPython's signature
        """Record the error without formatting it.

        The executor formats it once, at the end of the cell, where an interrupt is handled.
        """
        _, value, _ = self._get_exc_info(exc_tuple)
        if threading.current_thread() is not threading.main_thread():  # a widget's callback is not part of the cell
            traceback.print_exception(value, file=sys.stderr)
            return
        self._errors.append(value)
        if self.call_pdb:
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
                if sys._getframe(1).f_globals.get("__name__") == "cmd":  # pdb would only prompt again
                    raise BdbQuit from None
                raise

        def ask_secretly(prompt: object = "Password: ", stream: object = None, **_: object) -> str:  # noqa: ARG001
            return session.ask(text_of(prompt), password=True)

        builtins.input = ask
        getpass.getpass = ask_secretly

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:  # noqa: ANN401 - IPython's types
        """Run a cell magic; raise KeyboardInterrupt if an interrupt ended its script.

        Older versions of IPython report such a cell as successful.
        """
        assert isinstance(self.display_pub, RankDisplayPublisher)
        session = self.display_pub.session
        before = session is None or session.interrupted
        value = super().run_cell_magic(magic_name, line, cell)
        is_script = getattr(self.find_cell_magic(magic_name), "__module__", "") == script.__name__
        if is_script and not before and session is not None and session.interrupted:
            raise KeyboardInterrupt
        return value

    def system(self, cmd: str) -> None:
        """Run `!cmd` in the rank's process group and on its descriptors.

        So an interrupt reaches the command, and its output is captured.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        command = self.var_expand(cmd, depth=1)
        with subprocess.Popen(  # noqa: S602 - `!` runs a shell command
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
        """Run `x = !cmd` and return its output.

        IPython's version treats an interrupt as the command's own and continues the cell.
        """
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
        """Refuse the event loops of desktop toolkits: a rank has no display."""
        if gui not in (None, "inline"):
            raise UsageError(f"%gui {gui}: a rank has no screen; figures are shown with %matplotlib inline")


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


def make_shell() -> RankShell:
    """Return the shell. Called in the forkserver, so that forked ranks share it."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.cache_size = 0  # Out[n] would keep every displayed tensor in device memory
    shell: RankShell = RankShell.instance(config=config)
    set_cell_numbers(shell.compile._filename_map)
    load_magics = getattr(shell.magics_manager, "load_all_lazy_magics", None)  # absent from older versions of IPython
    if load_magics is not None:
        load_magics()  # an interrupt of the import at a magic's first use would break the magic for good
    for name, why in _NOT_HERE.items():
        shell.magics_manager.register_function(_refuse(name, why), "line", name)
    for namespace in (shell.user_ns, shell.user_ns_hidden):
        namespace.update(exit=sys.exit, quit=sys.exit)  # IPython's versions ask for confirmation at the terminal
    # Enter the trap once. IPython would change `builtins` before and after every cell, and every change invalidates the
    # interpreter's inline caches for all uses of builtins.
    shell.builtin_trap.__enter__()
    warnings.filterwarnings("ignore", message="To exit: use 'exit'", category=UserWarning)
    warnings.filterwarnings("ignore", message=".*run_cell_async' was never awaited")  # interrupted before the await
    return shell


InteractiveShellABC.register(RankShell)
