"""Prints the table of what each fault took, after the tests that measured it."""

from __future__ import annotations

import pytest

from tests.faults import injection

MEASURED = pytest.StashKey[list[injection.Times]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MEASURED] = []


@pytest.fixture(scope="session")
def measured(pytestconfig: pytest.Config) -> list[injection.Times]:
    """Return the list that collects the times of all tests."""
    return pytestconfig.stash[MEASURED]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    measured = config.stash[MEASURED]
    if measured:
        terminalreporter.section("faults")
        terminalreporter.write_line(injection.table(measured))
        injection.write_table(measured)
