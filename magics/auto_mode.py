"""Auto mode: run plain cells on the ranks after `%distributed auto on`, and decide which cells stay in the notebook."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

RANK_MAGICS = frozenset(
    (
        *("aimport", "autoreload", "capture", "cd", "debug", "dirs", "env", "matplotlib", "pdb", "pdef", "pdoc"),
        *("pfile", "pinfo", "pinfo2", "popd", "precision", "prun", "psearch", "psource", "pushd", "pwd", "rerun"),
        *("reset", "reset_selective", "run", "sc", "set_env", "sx", "system", "tb", "time", "timeit", "who"),
        *("who_ls", "whos", "xdel", "xmode"),
    )
)
"""Line magics that act on code or variables, and therefore run where the cell's code runs."""
RANK_EXTENSIONS = frozenset(("autoreload",))
"""Extensions that act on code, as `RANK_MAGICS` do."""
_EXTENSION_MAGICS = frozenset(("load_ext", "reload_ext", "unload_ext"))
# `%config InlineBackend.figure_format = "svg"` is about the ranks' figures. Other settings, such as those of the
# completer, are about the process that the front end talks to.
_RANK_SETTINGS = re.compile(r"InlineBackend\b")
# Matches `exit`, `exit()` and `quit();`. Only a cell that consists of this line ends the notebook process.
_EXIT = re.compile(r"(?:exit|quit)[ \t]*(?:\(.*\))?[ \t]*;?")
# `losses = %distributed pull loss`, and whatever else may be assigned to: `first, second`, `losses[0]`
_ASSIGNMENT = re.compile(r"[^=%]+=[ \t]*%distributed\b")
# A line of code or of a magic with the lines that continue it, except for the last one. No comment is continued.
_CONTINUED = re.compile(r"^(?![ \t]*#)(?:.*\\\n)+", re.MULTILINE)
_MAGIC_LINE = "%%distributed --auto\n"
# Beginning of the Python code that IPython makes of `_MAGIC_LINE`.
_TRANSFORMED = "get_ipython().run_cell_magic('distributed', '--auto'"
RANK_CELL_MAGICS = frozenset(
    ("!", "bash", "capture", "debug", "prun", "python", "sh", "sx", "system", "time", "timeit")
)

_MOST_BEGUN = 100
"""Number of the latest requests to remember. Those of cells that still run are among them."""
_OWN_MAGICS = frozenset(("distributed", "local"))


def runs_locally(cell: str) -> bool:
    """Return True if a cell runs in the notebook process in auto mode.

    These are: empty cells, cell magics except for `RANK_CELL_MAGICS` (`%%local`, `%%distributed` and other
    extensions'), `exit` and `quit`, which end the notebook process, and cells of line magics and comments only, one of
    which is not for the ranks (`%distributed status`).
    """
    lines = [line.strip() for line in _CONTINUED.sub(lambda match: match[0].replace("\\\n", " "), cell).splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        return True
    # `%%time` and similar magics act on the code below them, so they run where that code runs.
    if lines[0].startswith("%%"):
        stacked = takewhile(lambda line: line.startswith("%%"), lines)
        names = [words[0] for line in stacked if (words := line[2:].split())]
        # A magic above `%%distributed` or `%%local` acts on what the notebook process runs.
        return not names or names[0] not in RANK_CELL_MAGICS or not _OWN_MAGICS.isdisjoint(names)
    if len(lines) == 1 and _EXIT.fullmatch(lines[0]):
        return True
    # A cell that mixes magics with code runs on the ranks, where IPython's magics exist as well.
    magics = [line for line in lines if line.startswith("%") or _ASSIGNMENT.match(line)]
    return len(magics) == len(lines) and not all(line.startswith("%") and _is_rank_magic(line) for line in magics)


def _is_rank_magic(line: str) -> bool:
    """Return True for a line magic that runs where the cell's code runs."""
    name, _, rest = line[1:].partition(" ")
    if name == "config":
        return _RANK_SETTINGS.match(rest.strip()) is not None
    return name in RANK_MAGICS or (name in _EXTENSION_MAGICS and rest.strip() in RANK_EXTENSIONS)


def run_locally(lines: list[str]) -> list[str]:
    """Transform IPython's input: replace `%%local` by a comment, so that the rest is an ordinary cell.

    If another cell magic follows, which must be in the first line, `%%local` is removed.
    """
    if not lines or lines[0].strip() != "%%local":
        return lines
    body = "".join(lines[1:]).lstrip()
    return body.splitlines(keepends=True) if body.startswith("%%") else ["# %%local\n", *lines[1:]]


class Distribute:
    """Transform IPython's input: put `%%distributed` before cells that run on the ranks.

    Only cells that a front end sends are transformed. Code that a running cell passes back to IPython, as `%%time` and
    `%%capture` do, stays where that cell runs. Requests of the front end itself, which are silent or not stored in the
    history, stay in the notebook process: VS Code inspects that process before the first cell.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        # Requests whose cells have begun: code of the same request that reaches the transformer comes from the running
        # cell. Several ones, because subshells run cells side by side. The events of IPython alone would not do: comm
        # does not trigger `post_execute` if a callback fails, and an empty cell triggers nothing else.
        self._begun: deque[str] = deque(maxlen=_MOST_BEGUN)
        # In a terminal, which has no requests: the number of cells that are being executed.
        self._running = 0
        self._is_checking = False

    def __call__(self, lines: list[str]) -> list[str]:
        """Return the cell's transformed lines."""
        if not lines or self._is_checking or not self._is_new_cell() or runs_locally("".join(lines)):
            return lines
        return [_MAGIC_LINE, *lines]

    def _is_new_cell(self) -> bool:
        """Return True for a cell that a user runs, and not for code of a running cell, a callback or the front end."""
        request = self._request()
        if request is None:
            return not self._running
        header, content = request.get("header", {}), request.get("content", {})
        if header.get("msg_type") != "execute_request" or header.get("msg_id") in self._begun:
            return False
        return not content.get("silent") and bool(content.get("store_history", True))

    def _request(self) -> dict[str, Any] | None:
        """Return the request that is being handled; None in a terminal."""
        kernel = getattr(self._shell, "kernel", None)
        # Requests on the control channel have a parent of their own.
        return None if kernel is None else kernel.get_parent("shell") or {}

    def _store_inputs(self, line_num: int, source: str, source_raw: str | None = None) -> None:
        """Store the source that the user wrote in IPython's history."""
        # `In` has the transformed code. Without this it would show the call of `run_cell_magic` in place of the user's
        # cell.
        written = source_raw if source_raw is not None and source.startswith(_TRANSFORMED) else source
        self._stock_store(line_num, written, source_raw)

    def _check_complete(self, cell: str) -> tuple[str, int | None]:
        """Check the source that the user wrote for completeness.

        The transformed cell, a cell magic, would be complete only after an empty line.
        """
        self._is_checking = True
        try:
            return self._stock_check(cell)
        finally:
            self._is_checking = False

    def attach(self) -> None:
        """Start to transform cells."""
        self._note_request()  # of the cell that turns auto mode on
        # IPython transforms a cell before it triggers `pre_execute`, so the cell has not begun then. Unlike
        # `pre_run_cell` and `post_run_cell`, these two events are also triggered for silent requests.
        self._shell.events.register("pre_execute", self._enter)
        self._shell.events.register("post_execute", self._leave)
        history: Any = self._shell.history_manager
        manager = self._shell.input_transformer_manager
        self._stock_store: Callable[..., None] = history.store_inputs
        # Replaced in the instances, so that `detach` uncovers the methods of the classes by deleting the attributes.
        history.store_inputs = self._store_inputs
        self._stock_check: Callable[[str], tuple[str, int | None]] = manager.check_complete
        manager.check_complete = self._check_complete
        # These transformations get the whole cell, before IPython translates magics.
        transformations = self._shell.input_transformer_manager.cleanup_transforms
        transformations.insert(transformations.index(run_locally), self)  # before `run_locally`, to see %%local

    def detach(self) -> None:
        """Stop transforming cells."""
        self._shell.events.unregister("pre_execute", self._enter)
        self._shell.events.unregister("post_execute", self._leave)
        history: Any = self._shell.history_manager
        del (
            history.store_inputs,
            self._shell.input_transformer_manager.check_complete,
        )  # uncovers the methods of the classes
        self._shell.input_transformer_manager.cleanup_transforms.remove(self)

    def _enter(self) -> None:
        self._running += 1
        self._note_request()

    def _note_request(self) -> None:
        header = (self._request() or {}).get("header", {})
        # Once, however much code it passes back to IPython, and without callbacks: others must not be forgotten for it.
        if header.get("msg_type") == "execute_request" and header["msg_id"] not in self._begun:
            self._begun.append(header["msg_id"])

    def _leave(self) -> None:
        self._running = max(0, self._running - 1)  # the cell that turned auto mode on has only the second event


def is_enabled(shell: InteractiveShell) -> bool:
    """Return True if plain cells run on the ranks."""
    return any(isinstance(transform, Distribute) for transform in shell.input_transformer_manager.cleanup_transforms)


def set_enabled(shell: InteractiveShell, *, on: bool) -> None:
    """Turn auto mode on or off."""
    for transform in tuple(shell.input_transformer_manager.cleanup_transforms):
        if isinstance(transform, Distribute):
            transform.detach()
    if on:
        Distribute(shell).attach()


def install(shell: InteractiveShell) -> None:
    """Register `%%local`. A second call changes nothing."""
    transformations = shell.input_transformer_manager.cleanup_transforms
    if run_locally not in transformations:
        transformations.append(run_locally)


def uninstall(shell: InteractiveShell) -> None:
    """Turn auto mode off and unregister `%%local`."""
    set_enabled(shell, on=False)
    transformations = shell.input_transformer_manager.cleanup_transforms
    if run_locally in transformations:
        transformations.remove(run_locally)
