"""Test the recovery of a dead rank's last output from its journal."""

from __future__ import annotations

import os

import pytest

from rankbook.protocol.forkserver import JournalTail
from rankbook.transport import output_journal
from rankbook.transport.output_journal import OutputJournal, journal_path, read_journal

pytestmark = pytest.mark.skipif(
    not hasattr(os, "splice"), reason="the system does not move what is in a pipe to a file"
)


@pytest.fixture
def path(tmp_path):
    return journal_path(tmp_path, 2, 1)


@pytest.fixture
def pipe():
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    os.close(read)
    os.close(write)


def say(words, pipe, cell, data, stream="stdout", most=1 << 20):
    os.write(pipe[1], data)
    return words.transfer(pipe[0], stream, cell, most)


def test_last_bytes_are_recovered_and_the_files_removed(path, pipe):
    words = OutputJournal(path)
    assert say(words, pipe, 5, b"one\n") == b"one\n"
    assert say(words, pipe, 5, b"oh\n", "stderr") == b"oh\n"
    assert say(words, pipe, 5, b"two\n") == b"two\n"
    assert [*read_journal(path)] == [
        JournalTail(5, "stdout", 8, b"one\ntwo\n"),
        JournalTail(5, "stderr", 3, b"oh\n"),
    ]
    assert [*path.parent.iterdir()] == []
    assert [*read_journal(path)] == []


def test_another_cell_counts_again(path, pipe):
    words = OutputJournal(path)
    say(words, pipe, 5, b"a long line of the cell before\n")
    say(words, pipe, 6, b"new\n")
    assert next(read_journal(path)) == JournalTail(6, "stdout", 4, b"new\n")


def test_transfer_takes_at_most_the_limit(path, pipe):
    words = OutputJournal(path)
    assert say(words, pipe, 5, b"one two", most=3) == b"one"
    assert os.read(pipe[0], 10) == b" two"


def test_a_long_file_begins_again_and_still_counts_all(path, pipe, monkeypatch):
    monkeypatch.setattr(output_journal, "_MAX_SIZE", 30)
    words = OutputJournal(path)
    for _ in range(3):
        say(words, pipe, 5, b"0123456789" * 2)
    assert next(read_journal(path)) == JournalTail(5, "stdout", 60, b"0123456789" * 2)


def test_ended_journal_recovers_nothing(path, pipe):
    words = OutputJournal(path)
    say(words, pipe, 5, b"text")
    words.end()
    assert [*read_journal(path)] == []


@pytest.mark.parametrize(("received", "missing"), [(0, b"one\ntwo\n"), (4, b"two\n"), (8, b""), (9, b"")])
def test_only_undelivered_output_is_recovered(received, missing):
    assert JournalTail(5, "stdout", 8, b"one\ntwo\n").missing(received) == missing


def test_journal_keeps_the_end_of_long_output():
    assert JournalTail(5, "stdout", 1000, b"the end").missing(0) == b"the end"


def test_journal_errors_are_ignored(tmp_path, path, pipe, monkeypatch):
    assert say(OutputJournal(tmp_path / "no such folder" / "words"), pipe, 1, b"a") is None
    assert say(OutputJournal(None), pipe, 1, b"b") is None
    words = OutputJournal(path)
    assert say(words, pipe, 1, b"c") == b"abc"

    def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "splice", full)
    assert say(words, pipe, 1, b"text") is None
    monkeypatch.undo()
    assert say(words, pipe, 1, b"more") is None
    assert [*read_journal(path)] == []
    assert os.read(pipe[0], 10) == b"textmore"
