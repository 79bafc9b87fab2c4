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
    from rankbook.launch import local
    from rankbook.magics.magics import install

    install(shell)
    local.prestart_forkserver()


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Stop the ranks and remove the magics (`%unload_ext rankbook`)."""
    from rankbook.coordinator.default_cluster import stop
    from rankbook.launch import local
    from rankbook.magics.magics import uninstall

    stop()
    local.shutdown_prestarted()
    uninstall(shell)
