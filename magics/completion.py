"""Completion (Tab) and inspection (Shift-Tab, `x?`) in cells for the ranks, in Jupyter kernels and IPython's terminal.

The methods here replace those of the kernel or the terminal, and call the replaced ones for code of the notebook.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from IPython.core import completer, page

from rankbook.coordinator import default_cluster
from rankbook.coordinator.cluster import Cluster
from rankbook.errors import InvalidArgument, RankbookError
from rankbook.magics import arguments
from rankbook.magics import auto_mode as auto
from rankbook.protocol.queries import Completion

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_TYPES = "_jupyter_types_experimental"
"""Key of a completion reply under which front ends find the type of every match."""
_PAGE_SECONDS = 2.0
"""Timeout of `x?`. It is longer than that of completion: a long source has to be read from its file."""

# Magics that are followed by code on the same line: `%timeit model(x)`.
_MAGIC_WITH_CODE = re.compile(r"[ \t]*%(?:time|timeit|prun)\b")
# `?model`, `model.fc??`, `layers[0]?`: names, attributes and items, which can be looked up without running code.
_QUESTION = re.compile(r"(\?{0,2})[ \t]*([^\W\d]\w*(?:\.\w+|\[[\w'\"-]+\])*)[ \t]*(\?{0,2})")
# Also in an assignment: `x = %distributed pull loss`.
_LINE_MAGIC = re.compile(r"[ \t]*(?:\w+[ \t]*=[ \t]*)?%distributed[ \t]+")


@dataclass(frozen=True)
class RankCode:
    """Code that runs on `ranks`: `text`, which starts at character `offset` of the cell."""

    text: str
    offset: int
    ranks: str | None


@dataclass(frozen=True)
class MagicLine:
    """A line of `%%distributed` (`command` is None) or `%distributed`.

    `words` are the words before the cursor; `prefix` is the incomplete word at the cursor.
    """

    command: str | None
    words: tuple[str, ...]
    prefix: str


def target_of(cell: str, cursor: int, *, auto_mode: bool) -> RankCode | MagicLine | None:
    """Return the code or magic line at the cursor if it is for the ranks, or None for code of the notebook."""
    # The line of the cursor decides: a cell for the ranks may have lines of magics that are not.
    start = cell.rfind("\n", 0, cursor) + 1
    line = cell[start:cursor]
    header, newline, body = cell.partition("\n")
    if (magic := _LINE_MAGIC.match(line)) is not None:
        # "%distributed push lo" has the words "push" and "lo": the command, and the prefix at the cursor. After a blank
        # the prefix is empty. Not `shlex`, which refuses the open quote of an incomplete line.
        words = line[magic.end() :].split(" ")
        command = words[0] if len(words) > 1 else ""
        return MagicLine(command, tuple(words[1:-1]), words[-1])
    if header.startswith("%%distributed"):
        # The cursor is in the magic's own line. Directly behind its name there is nothing to complete yet.
        if not start:
            words = line.removeprefix("%%distributed").split(" ")
            return MagicLine(None, tuple(words[1:-1]), words[-1]) if len(words) > 1 else None
        return _rank_code(body, len(header) + len(newline), start, line, _ranks_of(header))
    if not auto_mode or auto.runs_locally(cell):
        return None
    return _rank_code(cell, 0, start, line, None)


def _rank_code(text: str, offset: int, start: int, line: str, ranks: str | None) -> RankCode | None:
    begin = start - offset
    if line.lstrip().startswith("%"):
        magic = _MAGIC_WITH_CODE.match(line)
        if magic is None:
            return None
        end = magic.end()
        # The magic is replaced by blanks, so that the positions of the completions stay right.
        text = text[:begin] + " " * end + text[begin + end :]
    # IPython in the notebook process completes shell commands.
    return None if line.lstrip().startswith("!") else RankCode(text, offset, ranks)


def _ranks_of(header: str) -> str | None:
    """Return the rank selection on a `%%distributed` line, which may be incomplete."""
    try:
        # The options may be incomplete while the user types. Then all ranks qualify, of which `Cluster.complete` asks
        # one.
        ranks: str | None = arguments.parse_cell_line(header.removeprefix("%%distributed")).ranks
    except InvalidArgument:
        return None
    return ranks


def parse_question(cell: str) -> tuple[str, bool] | None:
    """Return the expression of a cell that is `x?`, `x??` or `?x`, and True if its source is requested."""
    question = _QUESTION.fullmatch(cell.strip())
    if question is None or not (question[1] or question[3]):
        return None
    return question[2], "??" in (question[1], question[3])


def split_question(cell: str) -> tuple[str, str]:
    """Return the code of a cell, and its last line if that is `x?`, `x??` or `?x` and other code precedes it.

    In the code, `pass` stands for the question: line numbers stay, and no value becomes the cell's last one.
    """
    code, newline, last = cell.rstrip().rpartition("\n")
    # The body of a cell magic is the magic's own, and an indented last line belongs to a block.
    if not code.strip() or code.lstrip().startswith("%%") or last[:1].isspace() or parse_question(last) is None:
        return cell, ""
    return f"{code}{newline}pass", last


def keyword_completions(text: str, cursor: int) -> tuple[int, list[str]]:
    """Return the start of the name at the cursor, and Python's keywords and builtins that complete it.

    Nothing else is known while no ranks are running.
    """
    start = cursor
    while start and (text[start - 1].isalnum() or text[start - 1] == "_"):
        start -= 1
    prefix = text[start:cursor]
    if not prefix or text[:start].rstrip().endswith("."):
        return cursor, []
    names = {*keyword.kwlist, *vars(builtins)}
    return start, sorted(name for name in names if name.startswith(prefix) and (prefix[0] == "_" or name[0] != "_"))


class _Completion:
    """Complete code for the ranks and lines of the magics."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell

    def _complete(self, code: str, at: int) -> tuple[int, list[Completion]] | None:
        """Return the start of the text to replace and its completions; None for code of the notebook."""
        match target_of(code, at, auto_mode=auto.is_enabled(self._shell)):
            case RankCode() as target:
                return self._complete_code(target, at)
            case MagicLine() as line:
                return at - len(line.prefix), [Completion(word, "magic") for word in self._complete_line(line)]
        return None

    def _complete_code(self, code: RankCode, at: int) -> tuple[int, list[Completion]]:
        cluster = default_cluster.default_or_none()
        if cluster is None:
            start, names = keyword_completions(code.text, at - code.offset)
            return start + code.offset, [Completion(name, "keyword") for name in names]
        # The kernel's main thread waits here, at most for `COMPLETION_TIMEOUT`. A rank replies from another thread than
        # the one that runs its cell.
        start, completions = cluster.complete(code.text, at - code.offset, ranks=_selected(cluster, code.ranks))
        return start + code.offset, list(completions)

    def _complete_line(self, line: MagicLine) -> list[str]:
        cluster = default_cluster.default_or_none()

        def notebook_names() -> list[str]:
            hidden = self._shell.user_ns_hidden
            return [name for name in self._shell.user_ns if name not in hidden and not name.startswith("_")]

        def rank_names() -> list[str]:
            if cluster is None:
                return []
            # Behind a dot, the attributes of a variable.
            at = len(line.prefix)
            start, completions = cluster.complete(line.prefix, at, variables="." not in line.prefix)
            return [line.prefix[:start] + completion.text for completion in completions]

        return arguments.complete(
            line.command,
            line.words,
            line.prefix,
            world_size=0 if cluster is None else cluster.world_size,
            notebook_names=notebook_names,
            rank_names=rank_names,
        )


class KernelCompletion(_Completion):
    """Replace a kernel's `do_complete` and `do_inspect`."""

    def __init__(self, shell: InteractiveShell, kernel: Any) -> None:  # noqa: ANN401 - an ipykernel, loosely typed
        super().__init__(shell)
        self._kernel = kernel
        self._stock_complete = kernel.do_complete
        self._stock_inspect = kernel.do_inspect

    def attach(self) -> None:
        """Replace the kernel's methods."""
        # ipykernel looks both methods up for every request, so attributes of the instance replace them.
        self._kernel.do_complete = self.do_complete
        self._kernel.do_inspect = self.do_inspect

    def detach(self) -> None:
        """Restore the kernel's methods."""
        del self._kernel.do_complete, self._kernel.do_inspect  # uncovers the methods of the class

    def do_complete(self, code: str, cursor_pos: int | None) -> Any:  # noqa: ANN401 - a reply's content, or an awaitable of it
        """Complete code; see `ipykernel.ipkernel.IPythonKernel.do_complete`."""
        at = len(code) if cursor_pos is None else cursor_pos
        result = self._complete(code, at)
        return self._stock_complete(code, cursor_pos) if result is None else _reply(*result, at)

    def do_inspect(
        self,
        code: str,
        cursor_pos: int,
        detail_level: int = 0,
        omit_sections: Any = (),  # noqa: ANN401 - as above
    ) -> Any:  # noqa: ANN401
        """Inspect the name at the cursor; see `ipykernel.ipkernel.IPythonKernel.do_inspect`."""
        target = target_of(code, cursor_pos, auto_mode=auto.is_enabled(self._shell))
        if not isinstance(target, RankCode):
            return self._stock_inspect(code, cursor_pos, detail_level, omit_sections)
        cluster, text = default_cluster.default_or_none(), ""
        if cluster is not None:
            ranks = _selected(cluster, target.ranks)
            text = cluster.inspect(target.text, cursor_pos - target.offset, ranks=ranks, source=detail_level > 0)
        data = {"text/plain": text} if text else {}
        return {"status": "ok", "found": bool(text), "data": data, "metadata": {}}


class TerminalCompletion(_Completion):
    """Replace the `completions` method of the shell's completer, which the terminal calls."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._completer: Any = shell.Completer
        self._stock = self._completer.completions

    def attach(self) -> None:
        """Replace the completer's method."""
        self._completer.completions = self.completions

    def detach(self) -> None:
        """Restore the completer's method."""
        del self._completer.completions  # uncovers the method of the class

    def completions(self, text: str, offset: int) -> Iterator[Any]:
        """Yield completions; see `IPython.core.completer.IPCompleter.completions`."""
        result = self._complete(text, offset)
        # Code of the notebook, which IPython completes itself.
        if result is None:
            yield from self._stock(text, offset)
            return
        start, names = result
        # Outside of such a block IPython raises: the class is provisional, and its warning about that is made an error.
        with completer.provisionalcompleter():
            matches = [
                completer.Completion(start, offset, completion.text, type=completion.type) for completion in names
            ]
        yield from matches


def _selected(cluster: Cluster, ranks: str | None) -> tuple[int, ...] | None:
    """Return the ranks of an incomplete selection, or None (all ranks) if it is invalid."""
    try:
        return cluster.select(ranks)
    except RankbookError:
        return None


def _reply(start: int, completions: list[Completion], at: int) -> dict[str, Any]:
    # The fields of ipykernel's own `_experimental_do_complete`. All matches replace the same text.
    types = [
        {"start": start, "end": at, "text": completion.text, "type": completion.type, "signature": ""}
        for completion in completions
    ]
    matches = [completion.text for completion in completions]
    return {"matches": matches, "cursor_start": start, "cursor_end": at, "metadata": {_TYPES: types}, "status": "ok"}


def show_inspection(cluster: Cluster, ranks: tuple[int, ...], cell: str) -> bool:
    """Show the inspection of `x` if the cell is `x?` or `x??`; return True if something was shown.

    The first of `ranks` is asked.
    """
    question = parse_question(cell)
    if question is None:
        return False
    name, source = question
    text = cluster.inspect(name, ranks=ranks, source=source, timeout=_PAGE_SECONDS)
    if text:
        # In a kernel this text appears in the front end's pager, otherwise in that of the terminal.
        page.page({"text/plain": text})
    return bool(text)


def install(shell: InteractiveShell) -> None:
    """Install completion for the shell's kernel or its terminal. A second call changes nothing."""
    # Only the shell of a kernel has this attribute.
    kernel: Any = getattr(shell, "kernel", None)
    if _installed(shell) is None:
        (TerminalCompletion(shell) if kernel is None else KernelCompletion(shell, kernel)).attach()


def uninstall(shell: InteractiveShell) -> None:
    """Restore the completion methods of the kernel or the terminal."""
    completion = _installed(shell)
    if completion is not None:
        completion.detach()


def _installed(shell: InteractiveShell) -> KernelCompletion | TerminalCompletion | None:
    kernel: Any = getattr(shell, "kernel", None)
    method = shell.Completer.completions if kernel is None else kernel.do_complete
    # A replaced method is a bound method of the object that has replaced it.
    completion = getattr(method, "__self__", None)
    return completion if isinstance(completion, (KernelCompletion, TerminalCompletion)) else None
