"""`%%distributed` and `%distributed`.

Owns: parsing, submitting, and wiring coordinator, results and front end together; the only place that does. Refuses:
work of its own on the ranks.

arguments.py  arguments of the two lines: parsers, help and completion
magic.py     the magics themselves
handle.py    the handle of a background cell
comms.py     widgets that live on ranks, in the front end
debug.py     the front end's debugger, for cells of the ranks
debug_desk.py  who answers what it asks
stopped_threads.py  the ranks that are stopped, as threads, frames and variables of a front end
panel.py     a cell's output by rank
status_line.py  the line above a cell that runs for longer than a moment
measured.py  what is said of cells that were measured
reports.py   text and tables that the commands show
profile.py   the profile of all ranks, as a table and a file
launchers.py  functions that run on the ranks
frontend.py  where output goes: a Jupyter cell or a terminal; prompts
failures.py  how a cell's failure looks
hints.py     Tab, Shift-Tab and `x?` for cells of the ranks
auto.py      plain cells that run on the ranks
views.py     the live views of the notebook's ranks
shelf.py     a folder of checkpoints, as the views see it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext rankbook`: registers the magics and starts the forkserver, so that it is warm when it is needed."""
    from rankbook.launch import local
    from rankbook.magics.magics import install

    install(shell)
    local.prestart_forkserver()


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """`%unload_ext rankbook`: stops the ranks and takes the magics away."""
    from rankbook.coordinator.default_cluster import stop
    from rankbook.launch import local
    from rankbook.magics.magics import uninstall

    stop()
    local.shutdown_prestarted()
    uninstall(shell)
