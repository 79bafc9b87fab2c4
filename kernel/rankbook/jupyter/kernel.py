"""The kernel: IPython's, with the extension loaded, auto mode on and the ranks on their way.

Owns: what is different from the start. Refuses: to wait for the ranks; the first cell does, where it needs them.
"""

from __future__ import annotations

from typing import Any

from ipykernel.ipkernel import IPythonKernel

from rankbook import __version__
from rankbook.coordinator import default_cluster


class RankbookKernel(IPythonKernel):
    """Plain cells run on the ranks; `%%local` keeps one in the kernel's process, `%distributed auto off` all."""

    implementation = "rankbook"
    implementation_version = __version__
    distributes_cells = True
    """Read by the extension as it is loaded."""

    banner = f"Rankbook {__version__}: cells run on every rank; %%local keeps one in the kernel's own process\n"

    def do_history(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # noqa: ANN401 - ipykernel's
        """As IPython's, but this session by its number in every kind of reply, and not as 0 in some."""
        reply: dict[str, Any] = super().do_history(*args, **kwargs)
        shell: Any = self.shell
        here = shell.history_manager.session_number
        reply["history"] = [(session or here, *rest) for session, *rest in reply["history"]]
        return reply

    def start(self) -> None:
        """Answer from here on; the ranks come in the background."""
        super().start()
        shell: Any = self.shell
        shell.extension_manager.load_extension("rankbook")
        default_cluster.prestart_ranks()
