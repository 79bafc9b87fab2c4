"""Differences between IPython 7.34 with ipykernel 6.17, which Colab and Kaggle install, and later versions.

These platforms' images pin the two packages, and a notebook there cannot replace them without a restart. Functions here
use what later versions provide, and do the same themselves where it is missing. Tried with IPython 7.34.0 and 9.18
and with ipykernel 6.17.1 and 7.4.
"""

from __future__ import annotations

import asyncio
import linecache
import sys
import types
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import IPython
from IPython.core import async_helpers

if TYPE_CHECKING:
    from IPython.core.compilerop import CachingCompiler

IS_IPYTHON_7 = IPython.version_info < (8,)
MAGIC_WRAPPER_FRAMES = 2 if IS_IPYTHON_7 else 0
"""Stack frames between IPython and a magic: IPython 7 wraps magics with the package `decorator`."""

EVALUATION = {} if IS_IPYTHON_7 else {"evaluation": "limited"}
"""Options of a completer that must not run user code. IPython 7 has none: it evaluates what it is given."""


def ipykernel_version() -> tuple[int, int]:
    """Return the major and minor version of ipykernel, without importing it."""
    major, minor, *_ = version("ipykernel").split(".")
    return int(major), int(minor)


def cell_numbers(compiler: CachingCompiler) -> dict[str, int]:
    """Return the compiler's table of cell numbers by file name, which it extends with every cell.

    IPython 7 has no such table, so its `cache` method is wrapped to keep one. The wrapper also removes the time from
    linecache's entry of a cell, as IPython 8 does: the entry then looks like that of a source without a file.
    """
    numbers: dict[str, int] | None = getattr(compiler, "_filename_map", None)
    if numbers is not None:
        return numbers
    table: dict[str, int] = {}
    stock_cache = compiler.cache

    def cache(transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        name = str(stock_cache(transformed_code, number, raw_code))
        table[name] = number
        size, _, lines, file = linecache.cache[name]  # type: ignore[misc] # a lazy entry has no lines; this one has
        # IPython 7 puts its own entries back after every `linecache.checkcache`
        linecache.cache[name] = linecache._ipython_cache[name] = (size, None, lines, file)  # type: ignore[attr-defined]
        return name

    compiler.cache = cache  # type: ignore[method-assign]
    compiler._filename_map = table  # where later versions of IPython have it
    return table


def name_cells(text: str, numbers: Mapping[str, int]) -> str:
    """Return a traceback with `Cell In[5]` for the names of cells' files, as IPython 8 writes it."""
    if IS_IPYTHON_7:
        # IPython 7 names a cell's file like "<ipython-input-5-0123456789ab>" in tracebacks.
        for file, number in numbers.items():
            text = text.replace(file, f"Cell In[{number}]")
    return text


def asyncio_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop in which IPython runs a cell's `await`."""
    if IS_IPYTHON_7:
        # The loop that IPython 7 makes at import, and runs for each cell.
        runner: Any = async_helpers._asyncio_runner
        loop: asyncio.AbstractEventLoop = runner.loop
    else:
        loop = async_helpers.get_asyncio_loop()
    return loop


def replace_ipykernel_comm(comm: type[Any], manager: type[Any]) -> None:
    """Make ipywidgets create `comm` objects in a process without a kernel, also with ipykernel before 6.18.

    That ipykernel does not use the package `comm`, and ipywidgets then imports `ipykernel.comm`, whose class needs a
    kernel. Call this before anything imports ipywidgets.
    """
    if ipykernel_version() >= (6, 18):
        return
    # Placed in `sys.modules` before ipywidgets is imported: its `from ipykernel.comm import Comm` then finds this one.
    module: Any = types.ModuleType("ipykernel.comm", "Replaced by rankbook: comms of a rank.")
    module.Comm, module.CommManager = comm, manager
    sys.modules["ipykernel.comm"] = module
