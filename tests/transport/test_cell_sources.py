"""Test pickled functions with and without the source of their cell."""

from __future__ import annotations

import linecache
import pickle
import types

import cloudpickle
import pytest

from rankbook.transport import serialization
from rankbook.transport.serialization import pack, unpack

CELL = "def outer():\n    def inner():\n        raise ValueError(7)\n    return inner\n"


@pytest.fixture
def cell(monkeypatch):
    """Provide a function of cell [7] in a process without other cells, and the table of its cells."""
    monkeypatch.setattr(linecache, "cache", {"<cell>": (len(CELL), None, CELL.splitlines(keepends=True), "<cell>")})
    monkeypatch.setattr(serialization, "_cell_numbers", None)
    numbers = {"<cell>": 7}
    serialization.set_cell_numbers(numbers)
    space = {"__name__": "__main__"}
    exec(compile(CELL, "<cell>", "exec"), space)
    return space["outer"], numbers


def test_cell_source_is_sent_once_and_registered_by_the_receiver(cell, tmp_path):
    outer, numbers = cell
    packed = pack([outer, outer()], store=None)
    stream = b"".join(packed.frames)
    assert stream.count(b"raise ValueError") == 1
    linecache.cache.clear()
    numbers.clear()
    _, inner = unpack(packed.payload, packed.frames, unlink=False, folder=tmp_path)
    assert linecache.getline("<cell>", 3) == "        raise ValueError(7)\n"
    assert numbers == {"<cell>": 7}
    with pytest.raises(ValueError, match="7"):
        inner()


@pytest.mark.parametrize("modified", [None, 1.0], ids=["cell", "file"])
def test_code_keeps_its_file_if_the_pickler_omits_it(cell, tmp_path, monkeypatch, modified):
    def reduce_without_file(code):
        make, args = plain(code)
        return make, tuple("<dynamic-code>" if value == code.co_filename else value for value in args)

    outer, _ = cell
    linecache.cache["<cell>"] = (len(CELL), modified, CELL.splitlines(keepends=True), "<cell>")
    plain = cloudpickle.Pickler.dispatch_table[types.CodeType]
    monkeypatch.setitem(cloudpickle.Pickler._dispatch_table, types.CodeType, reduce_without_file)
    packed = pack(outer, store=None)
    received = unpack(packed.payload, packed.frames, unlink=False, folder=tmp_path)
    assert (received.__code__.co_filename, received().__code__.co_filename) == ("<cell>", "<cell>")


def test_code_of_a_file_is_sent_without_source(cell):
    outer, _ = cell
    linecache.cache["<cell>"] = (len(CELL), 1.0, CELL.splitlines(keepends=True), "<cell>")
    packed = pack(outer, store=None)
    assert b"raise ValueError" not in b"".join(packed.frames)
    assert pickle.loads(packed.frames[0])()
