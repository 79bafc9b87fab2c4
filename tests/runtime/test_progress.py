"""A bar on one process; elsewhere the loop runs without one."""

from __future__ import annotations

import sys

import pytest

from rankbook.errors import InvalidArgument
from rankbook.runtime.logging import tqdm
from rankbook.runtime.process_state import PartialState


@pytest.fixture(autouse=True)
def console(monkeypatch):
    """Make tqdm draw text: it draws widgets if a kernel's modules, which other tests may import, are loaded."""
    for name in ("ipykernel.zmqshell", "tqdm.auto", "tqdm.autonotebook"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(("rank", "only", "is_shown"), [(0, True, True), (1, True, False), (1, False, True)])
def test_progress_bar_is_shown_on_the_requested_ranks(rank, only, is_shown, capsys, monkeypatch):
    PartialState(cpu=True).local_process_index = rank
    assert list(tqdm(range(3), main_process_only=only)) == [0, 1, 2]
    assert ("3/3" in capsys.readouterr().err) == is_shown


def test_a_bar_that_is_off_stays_off(capsys):
    PartialState(cpu=True)
    assert list(tqdm([1], disable=True)) == [1]
    assert capsys.readouterr().err == ""


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(InvalidArgument, match="pip install tqdm"):
        tqdm([])


def test_the_old_signature_is_an_error():
    PartialState(cpu=True)
    with pytest.raises(InvalidArgument, match="pass main_process_only by keyword"):
        tqdm(True, [1])
