"""Tab, Shift-Tab and `x?` in cells of the ranks, in any Jupyter kernel.

Owns: the two methods of the kernel that answer a front end, for cells of the ranks; the kernel's own stay for the rest.
Refuses: to be late, and to look into the notebook's process for what the ranks have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core import page

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


class Hints:
    """Answers in the place of `kernel`'s own `do_complete` and `do_inspect`."""

    def __init__(self, shell: InteractiveShell, kernel: Any) -> None:  # noqa: ANN401 - an ipykernel, loosely typed
        self._shell = shell
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
        match cursor.place_of(code, at, auto=auto.is_on(self._shell)):
            case OnRanks() as place:
                return _reply(*self._complete_on_ranks(place, at), at)
            case OnLine() as place:
                found = [Completion(each, "magic") for each in self._complete_line(place)]
                return _reply(at - len(place.begun), found, at)
        return self._stock_complete(code, cursor_pos)

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
    """Answer for the ranks in the shell's kernel, if it has one. A second time changes nothing."""
    kernel: Any = getattr(shell, "kernel", None)
    if kernel is not None and not isinstance(getattr(kernel.do_complete, "__self__", None), Hints):
        Hints(shell, kernel).attach()


def uninstall(shell: InteractiveShell) -> None:
    """Leave nothing behind."""
    kernel: Any = getattr(shell, "kernel", None)
    hints = getattr(getattr(kernel, "do_complete", None), "__self__", None)
    if isinstance(hints, Hints):
        hints.detach()
