"""The file that a rank leaves behind."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankbook.transport import last_words
from rankbook.transport.last_words import LastWords, Said, take_last_words, words_of


@pytest.fixture
def file(tmp_path):
    return words_of(tmp_path, 2, 1)


def test_what_was_sent_last_is_there_and_the_file_is_gone(file):
    words = LastWords(file)
    words.note(5, "stdout", b"one\n")
    words.note(5, "stderr", b"oh\n")
    words.note(5, "stdout", b"two\n")
    assert [*take_last_words(file)] == [Said(5, "stdout", 8, b"one\ntwo\n"), Said(5, "stderr", 3, b"oh\n")]
    assert not file.exists()
    assert [*take_last_words(file)] == []


def test_another_cell_counts_anew(file):
    words = LastWords(file)
    words.note(5, "stdout", b"a long line of the cell before\n")
    words.note(6, "stdout", b"new\n")
    assert next(take_last_words(file)) == Said(6, "stdout", 4, b"new\n")


@pytest.mark.parametrize(("heard", "missing"), [(0, b"one\ntwo\n"), (4, b"two\n"), (8, b""), (9, b"")])
def test_only_what_has_not_come_is_missing(heard, missing):
    assert Said(5, "stdout", 8, b"one\ntwo\n").missing(heard) == missing


def test_of_more_than_there_is_room_for_the_end_is_there():
    assert Said(5, "stdout", 1000, b"the end").missing(0) == b"the end"


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_any_pieces_leave_the_end_of_their_whole(tmp_path_factory, pieces):
    file = tmp_path_factory.mktemp("words") / "words"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(last_words, "_ROOM", 16)
        words = LastWords(file)
        for piece in pieces:
            words.note(1, "stdout", piece)
        whole = b"".join(pieces)
        for said in take_last_words(file):
            if said.cell:
                assert (said.total, said.tail) == (len(whole), whole[-16:])


def test_a_file_that_cannot_be_made_or_written_does_no_harm(tmp_path, file, monkeypatch):
    LastWords(tmp_path / "no such folder" / "words").note(1, "stdout", b"text")
    LastWords(None).note(1, "stdout", b"text")
    words = LastWords(file)

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    words.note(1, "stdout", b"text")
    monkeypatch.undo()
    words.note(1, "stdout", b"text")
    assert [*take_last_words(file)] == []
