"""The functions that make up for what IPython 7 and ipykernel 6.17 lack, with stand-ins for these versions."""

from __future__ import annotations

import linecache
import sys
import time

import pytest
from comm.base_comm import CommManager
from IPython.core.compilerop import CachingCompiler

from rankbook import ipython_compat
from rankbook.ipython_compat import cell_numbers, ipykernel_version, name_cells, replace_ipykernel_comm
from rankbook.rank.comms import RankComm
from rankbook.transport.serialization import CellSources


class OldCompiler:
    """Compiler like that of IPython 7: it stores the lines of a cell under the time, without its number."""

    def cache(self, transformed_code, number=0, raw_code=None):  # noqa: ARG002 - the signature of IPython
        name = f"<ipython-input-{number}-test>"
        lines = transformed_code.splitlines(keepends=True)
        entry = (len(transformed_code), time.time(), lines, name)
        linecache.cache[name] = linecache._ipython_cache[name] = entry
        return name


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.setattr(linecache, "cache", {})
    monkeypatch.setattr(linecache, "_ipython_cache", {}, raising=False)
    return linecache.cache


def test_an_old_compiler_gets_a_table_of_cell_numbers(lines):
    compiler = OldCompiler()
    numbers = cell_numbers(compiler)
    assert numbers == {}
    name = compiler.cache("x = 1\n", 5, raw_code="x = 1")
    assert numbers == {name: 5}
    assert cell_numbers(compiler) is numbers, "a second call wraps nothing again"
    assert lines[name] == linecache._ipython_cache[name] == (6, None, ["x = 1\n"], name)


def test_the_source_of_a_cell_of_an_old_compiler_travels_with_its_functions(lines):
    compiler = OldCompiler()
    cell_numbers(compiler)
    name = compiler.cache("def f(): pass\n", 7)
    scope = {}
    exec(compile("def f(): pass\n", name, "exec"), scope)
    reduced = CellSources().reduce(scope["f"].__code__, (print, ()))
    assert reduced[1][:2] == (name, "def f(): pass\n")


def test_the_table_of_the_installed_ipython_is_used():
    compiler = CachingCompiler()
    numbers = cell_numbers(compiler)
    name = compiler.cache("y = 2\n", 3)
    assert numbers[name] == 3
    del linecache.cache[name]
    getattr(linecache, "_ipython_cache", {}).pop(name, None)


@pytest.mark.parametrize(("old", "reported"), [(True, "Cell In[2] in f()"), (False, "<ipython-input-2-ab> in f()")])
def test_tracebacks_of_old_versions_name_the_cell(monkeypatch, old, reported):
    monkeypatch.setattr(ipython_compat, "IS_IPYTHON_7", old)
    assert name_cells("<ipython-input-2-ab> in f()", {"<ipython-input-2-ab>": 2}) == reported


@pytest.mark.parametrize("text", ["6.17.1", "6.18.0", "7.4.0"])
def test_ipywidgets_makes_comms_of_ranks_with_every_ipykernel(monkeypatch, text):
    monkeypatch.setattr(ipython_compat, "version", lambda _: text)
    monkeypatch.delitem(sys.modules, "ipykernel.comm", raising=False)
    assert ipykernel_version() == tuple(map(int, text.split(".")[:2]))
    replace_ipykernel_comm(RankComm, CommManager)
    assert ("ipykernel.comm" in sys.modules) == (text == "6.17.1")
    if text == "6.17.1":
        assert sys.modules["ipykernel.comm"].Comm is RankComm
        assert sys.modules["ipykernel.comm"].Comm.kernel is not None, "or ipywidgets 7 sends nothing"
