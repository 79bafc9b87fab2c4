"""Prints the table of what each fault took, after the tests that measured it."""

from __future__ import annotations

import pytest

from tests.faults import scenes

MEASURED = pytest.StashKey[list[scenes.Times]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MEASURED] = []


@pytest.fixture(scope="session")
def measured(pytestconfig: pytest.Config) -> list[scenes.Times]:
    """Where a test puts what it has measured."""
    return pytestconfig.stash[MEASURED]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    measured = config.stash[MEASURED]
    if measured:
        terminalreporter.section("faults")
        terminalreporter.write_line(scenes.table(measured))
        scenes.write_table(measured)
