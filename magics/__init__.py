"""IPython magics: `%%distributed`, `%distributed` and `%%local`, and the other integrations with IPython and Jupyter.

This package connects the coordinator, the cells' results and the front end.

magics.py             the magics and commands themselves
arguments.py          parsers, help and completion of their arguments
auto_mode.py          plain cells that run on the ranks
cell_handle.py        the handle of a background cell, the status line of a running one, errors of failed cells
output_panel.py       a cell's output by rank, and the sinks that publish output to Jupyter or a terminal
reports.py            text and tables that the commands show
profiling.py          `--time` and `--profile`: measurement, table and Chrome trace of all ranks
completion.py         Tab, Shift-Tab and `x?` in cells for the ranks
comm_bridge.py        comms between widgets on the ranks and the front end
debugger.py           the front end's debugger for cells on the ranks: installation and threads
debug_multiplexer.py  its requests, answered by the debuggers of the kernel and the ranks
views.py              `rankbook.placement()`, `shards`, `checkpoints` and `dashboard`
launchers.py          `notebook_launcher` and `debug_launcher`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics (`%load_ext rankbook`) and start the forkserver, so that the first ranks start fast."""
    from rankbook.coordinator import default_cluster
    from rankbook.launch import local
    from rankbook.magics.magics import install

    install(shell)
    # Ranks that have stayed through `%reload_ext rankbook` have a forkserver. Another one would only hold memory.
    if not default_cluster.is_starting() and default_cluster.default_or_none() is None:
        local.prestart_forkserver()


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove the magics (`%unload_ext rankbook`). The ranks keep running, until `rankbook.stop()` or the kernel's end.

    They stay because IPython also calls this function for `%reload_ext rankbook`, which it names itself when the
    extension is loaded a second time: nobody expects to lose the variables of the ranks by that.
    """
    from rankbook.coordinator.default_cluster import default_or_none
    from rankbook.formatting import plural
    from rankbook.launch import local
    from rankbook.magics.magics import uninstall

    uninstall(shell)
    local.shutdown_prestarted()
    if (running := default_or_none()) is not None:
        verb = "keeps" if running.world_size == 1 else "keep"
        print(f"{plural(running.world_size, 'rank')} {verb} running; rankbook.stop() ends the ranks")  # noqa: T201 - the answer to a magic
