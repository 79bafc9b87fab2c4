"""Tab, Shift-Tab and `x?` in cells of the ranks, in any Jupyter kernel, and Tab in IPython's own terminal.

Owns: the methods that answer a front end or the terminal, for cells of the ranks; the stock ones stay for the rest.
Refuses: to be late, and to look into the notebook's process for what the ranks have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from IPython.core import completer, page

from rankbook.coordinator import current as clusters
from rankbook.coordinator.cluster import Cluster
from rankbook.errors import RankbookError
from rankbook.looking import Completion
from rankbook.magics import auto, cursor
from rankbook.magics.cursor import OnLine, OnRanks

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_TYPES = "_jupyter_types_experimental"
"""Where front ends look for the kind of each match."""
_PAGE_SECONDS = 2.0
"""For `x?`, which nobody types ahead of; a long source has to be read from its file."""


class _Hints:
    """What may stand at a cursor, in the place of whoever else answers."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell

    def _find(self, code: str, at: int) -> tuple[int, list[Completion]] | None:
        """Where what is typed begins, and what may take its place; None: that is for the notebook to say."""
        match cursor.place_of(code, at, auto=auto.is_on(self._shell)):
            case OnRanks() as place:
                return self._complete_on_ranks(place, at)
            case OnLine() as place:
                return at - len(place.begun), [Completion(each, "magic") for each in self._complete_line(place)]
        return None

    def _complete_on_ranks(self, place: OnRanks, at: int) -> tuple[int, list[Completion]]:
        cluster = clusters.running_cluster()
        if cluster is None:
            start, names = cursor.without_ranks(place.text, at - place.offset)
            return start + place.offset, [Completion(each, "keyword") for each in names]
        start, found = cluster.complete(place.text, at - place.offset, ranks=_selected(cluster, place.ranks))
        return start + place.offset, list(found)

    def _complete_line(self, place: OnLine) -> list[str]:
        cluster = clusters.running_cluster()

        def own() -> list[str]:
            hidden = self._shell.user_ns_hidden
            return [name for name in self._shell.user_ns if name not in hidden and not name.startswith("_")]

        def theirs() -> list[str]:
            if cluster is None:
                return []
            return [each.text for each in cluster.complete(place.begun, len(place.begun), variables=True)[1]]

        return cursor.may_stand(place, 0 if cluster is None else cluster.world_size, own, theirs)


class KernelHints(_Hints):
    """Answers in the place of `kernel`'s own `do_complete` and `do_inspect`."""

    def __init__(self, shell: InteractiveShell, kernel: Any) -> None:  # noqa: ANN401 - an ipykernel, loosely typed
        super().__init__(shell)
        self._kernel = kernel
        self._stock_complete = kernel.do_complete
        self._stock_inspect = kernel.do_inspect

    def attach(self) -> None:
        """From now on."""
        self._kernel.do_complete = self.do_complete
        self._kernel.do_inspect = self.do_inspect

    def detach(self) -> None:
        """No longer."""
        del self._kernel.do_complete, self._kernel.do_inspect  # the class's own are there again

    def do_complete(self, code: str, cursor_pos: int | None) -> Any:  # noqa: ANN401 - a reply's content, or what awaits it
        """See ipykernel's."""
        at = len(code) if cursor_pos is None else cursor_pos
        found = self._find(code, at)
        return self._stock_complete(code, cursor_pos) if found is None else _reply(*found, at)

    def do_inspect(
        self,
        code: str,
        cursor_pos: int,
        detail_level: int = 0,
        omit_sections: Any = (),  # noqa: ANN401 - as above
    ) -> Any:  # noqa: ANN401
        """See ipykernel's."""
        place = cursor.place_of(code, cursor_pos, auto=auto.is_on(self._shell))
        if not isinstance(place, OnRanks):
            return self._stock_inspect(code, cursor_pos, detail_level, omit_sections)
        cluster, text = clusters.running_cluster(), ""
        if cluster is not None:
            ranks = _selected(cluster, place.ranks)
            text = cluster.inspect(place.text, cursor_pos - place.offset, ranks=ranks, source=detail_level > 0)
        data = {"text/plain": text} if text else {}
        return {"status": "ok", "found": bool(text), "data": data, "metadata": {}}


class TerminalHints(_Hints):
    """Answers in the place of the `completions` of the shell's completer, which the terminal asks."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._completer: Any = shell.Completer
        self._stock = self._completer.completions

    def attach(self) -> None:
        """From now on."""
        self._completer.completions = self.completions

    def detach(self) -> None:
        """No longer."""
        del self._completer.completions  # as above

    def completions(self, text: str, offset: int) -> Iterator[Any]:
        """See IPython's IPCompleter."""
        found = self._find(text, offset)
        if found is None:
            yield from self._stock(text, offset)
            return
        start, names = found
        with completer.provisionalcompleter():
            made = [completer.Completion(start, offset, each.text, type=each.type) for each in names]
        yield from made


def _selected(cluster: Cluster, ranks: str | None) -> tuple[int, ...] | None:
    """The selection on the cell's first line; all, where that says none yet."""
    try:
        return cluster.select(ranks)
    except RankbookError:
        return None


def _reply(start: int, found: list[Completion], at: int) -> dict[str, Any]:
    types = [{"start": start, "end": at, "text": each.text, "type": each.type, "signature": ""} for each in found]
    matches = [each.text for each in found]
    return {"matches": matches, "cursor_start": start, "cursor_end": at, "metadata": {_TYPES: types}, "status": "ok"}


def show_inspection(cluster: Cluster, ranks: tuple[int, ...], cell: str) -> bool:
    """Of a cell that is `x?` or `x??`: show what the first of `ranks` knows of it. Whether there was something."""
    asked = cursor.asked_about(cell)
    if asked is None:
        return False
    name, source = asked
    text = cluster.inspect(name, ranks=ranks, source=source, timeout=_PAGE_SECONDS)
    if text:
        page.page({"text/plain": text})
    return bool(text)


def install(shell: InteractiveShell) -> None:
    """Answer for the ranks, to the shell's kernel or to its terminal. A second time changes nothing."""
    kernel: Any = getattr(shell, "kernel", None)
    if _installed(shell) is None:
        (TerminalHints(shell) if kernel is None else KernelHints(shell, kernel)).attach()


def uninstall(shell: InteractiveShell) -> None:
    """Leave nothing behind."""
    hints = _installed(shell)
    if hints is not None:
        hints.detach()


def _installed(shell: InteractiveShell) -> KernelHints | TerminalHints | None:
    kernel: Any = getattr(shell, "kernel", None)
    method = shell.Completer.completions if kernel is None else kernel.do_complete
    hints = getattr(method, "__self__", None)
    return hints if isinstance(hints, (KernelHints, TerminalHints)) else None
