"""Kernel class: IPython's kernel with the extension loaded, auto mode on and the ranks started in the background.

The kernel does not wait for the ranks; the first cell that needs them does.
"""

from __future__ import annotations

from typing import Any

from ipykernel.ipkernel import IPythonKernel

from rankbook import __version__
from rankbook.coordinator import default_cluster


class RankbookKernel(IPythonKernel):
    """IPython kernel whose plain cells run on the ranks.

    `%%local` keeps one cell in the kernel's process, `%distributed auto off` all following cells.
    """

    implementation = "rankbook"
    implementation_version = __version__
    distributes_cells = True
    """Read by the extension when it is loaded: turns auto mode on."""

    banner = f"Rankbook {__version__}: cells run on all ranks; %%local runs a cell in the kernel's process\n"

    def do_history(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # noqa: ANN401 - ipykernel's
        """Return IPython's reply, with the number of this session wherever IPython writes 0 for it."""
        reply: dict[str, Any] = super().do_history(*args, **kwargs)
        shell: Any = self.shell
        current = shell.history_manager.session_number
        # Entries are (session, line, source).
        reply["history"] = [(session or current, *rest) for session, *rest in reply["history"]]
        return reply

    def start(self) -> None:
        """Start to handle requests, load the extension, and start the ranks in the background."""
        # The ranks start last, in the background. Meanwhile the kernel answers the front end.
        super().start()
        shell: Any = self.shell
        shell.extension_manager.load_extension("rankbook")
        default_cluster.prestart_ranks()
