"""Plain cells that run on the ranks, after `%distributed auto on`.

Owns: which cells stay in the notebook. Refuses: to change a cell's text beyond the line it puts before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

RANK_MAGICS = frozenset(
    (
        *("autoreload", "capture", "cd", "debug", "env", "matplotlib", "pdb", "pinfo", "precision", "prun", "psearch"),
        *("pwd", "reset", "run", "tb", "time", "timeit", "who", "who_ls", "whos", "xmode"),
    )
)
"""Line magics that are about the code and its variables, and so belong where these are."""
_PUT_BEFORE = "%%distributed --auto\n"
_TRANSFORMED = "get_ipython().run_cell_magic('distributed', '--auto'"
RANK_CELL_MAGICS = frozenset(("bash", "capture", "prun", "python", "sh", "time", "timeit"))


def runs_locally(cell: str) -> bool:
    """Whether a cell runs in the notebook in auto mode.

    Those are: empty ones, cell magics but for `RANK_CELL_MAGICS` (`%%local`, `%%distributed` and other extensions'),
    and cells of nothing but line magics and comments, one of which is not in `RANK_MAGICS` (`%distributed status`).
    """
    lines = [line.strip() for line in cell.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        return True
    if lines[0].startswith("%%"):
        return lines[0][2:].split(" ")[0] not in RANK_CELL_MAGICS
    magics = [line for line in lines if line.startswith("%")]
    return len(magics) == len(lines) and any(line[1:].split(" ")[0] not in RANK_MAGICS for line in magics)


def run_locally(lines: list[str]) -> list[str]:
    """IPython's input transformation: `%%local` becomes a comment, so that the rest is a plain cell in every respect.

    Where a cell magic follows, which has to come first, the line goes.
    """
    if not lines or lines[0].strip() != "%%local":
        return lines
    body = "".join(lines[1:]).lstrip()
    return body.splitlines(keepends=True) if body.startswith("%%") else ["# %%local\n", *lines[1:]]


class Distribute:
    """IPython's input transformation: `%%distributed` before a cell that runs on the ranks.

    That is for cells that a front end sends. What a running cell hands to IPython in turn, as `%%time` and `%%capture`
    do, stays where that cell runs. So does what a front end asks for itself, silently or to be in no history: it looks
    at the notebook's process, as VS Code does before the first cell.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._running = 0

    def __call__(self, lines: list[str]) -> list[str]:
        """The cell's lines, transformed."""
        if not lines or self._running or self._asks_for_itself() or runs_locally("".join(lines)):
            return lines
        return [_PUT_BEFORE, *lines]

    def _asks_for_itself(self) -> bool:
        kernel = getattr(self._shell, "kernel", None)
        if kernel is None:
            return False
        content = (kernel.get_parent("shell") or {}).get("content", {})
        return bool(content.get("silent")) or not content.get("store_history", True)

    def _store_inputs(self, line_num: int, source: str, source_raw: str | None = None) -> None:
        """As IPython's, with the cell as it was written."""
        written = source_raw if source_raw is not None and source.startswith(_TRANSFORMED) else source
        self._stock_store(line_num, written, source_raw)

    def _check_complete(self, cell: str) -> tuple[str, int | None]:
        """As IPython's, of the cell as it was written: a cell magic would only be complete with an empty line."""
        self._running += 1
        try:
            return self._stock_check(cell)
        finally:
            self._running -= 1

    def attach(self) -> None:
        """From now on."""
        self._shell.events.register("pre_execute", self._enter)
        self._shell.events.register("post_execute", self._leave)
        history: Any = self._shell.history_manager
        manager = self._shell.input_transformer_manager
        self._stock_store: Callable[..., None] = history.store_inputs
        history.store_inputs = self._store_inputs
        self._stock_check: Callable[[str], tuple[str, int | None]] = manager.check_complete
        manager.check_complete = self._check_complete
        transformations = self._shell.input_transformer_manager.cleanup_transforms
        transformations.insert(transformations.index(run_locally), self)  # it has to see %%local

    def detach(self) -> None:
        """No longer."""
        self._shell.events.unregister("pre_execute", self._enter)
        self._shell.events.unregister("post_execute", self._leave)
        history: Any = self._shell.history_manager
        del (
            history.store_inputs,
            self._shell.input_transformer_manager.check_complete,
        )  # the classes' own are there again
        self._shell.input_transformer_manager.cleanup_transforms.remove(self)

    def _enter(self) -> None:
        self._running += 1

    def _leave(self) -> None:
        self._running = max(0, self._running - 1)  # the cell that turned it on is left without having been entered


def is_enabled(shell: InteractiveShell) -> bool:
    """Whether plain cells run on the ranks."""
    return any(isinstance(each, Distribute) for each in shell.input_transformer_manager.cleanup_transforms)


def set_enabled(shell: InteractiveShell, *, on: bool) -> None:
    """Turn auto mode on or off."""
    for each in tuple(shell.input_transformer_manager.cleanup_transforms):
        if isinstance(each, Distribute):
            each.detach()
    if on:
        Distribute(shell).attach()


def install(shell: InteractiveShell) -> None:
    """Make `%%local` known. A second time changes nothing."""
    transformations = shell.input_transformer_manager.cleanup_transforms
    if run_locally not in transformations:
        transformations.append(run_locally)


def uninstall(shell: InteractiveShell) -> None:
    """Leave nothing behind."""
    set_enabled(shell, on=False)
    transformations = shell.input_transformer_manager.cleanup_transforms
    if run_locally in transformations:
        transformations.remove(run_locally)
