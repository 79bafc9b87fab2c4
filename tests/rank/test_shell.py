"""Test the IPython shell of a rank."""

from __future__ import annotations

from typing import cast

import pytest
from IPython.core.error import UsageError

from rankbook.rank.shell import RankShell


def test_event_loops_of_desktop_toolkits_are_refused_and_backends_for_notebooks_are_not():
    shell = cast("RankShell", object())
    for backend in (None, "inline", "widget", "ipympl"):  # as older versions of IPython name them
        RankShell.enable_gui(shell, backend)
    with pytest.raises(UsageError, match="%gui qt: a rank has no display"):
        RankShell.enable_gui(shell, "qt")
