"""Prints what recovery took, after the tests that measured it."""

from __future__ import annotations

import statistics

import pytest

MEASURED = pytest.StashKey[dict[str, list[float]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MEASURED] = {}


@pytest.fixture(scope="session")
def measured(pytestconfig: pytest.Config) -> dict[str, list[float]]:
    """Return the dict that collects seconds, by what they were measured for."""
    return pytestconfig.stash[MEASURED]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if measured := config.stash[MEASURED]:
        terminalreporter.section("times")
        for what, seconds in measured.items():
            median, longest = statistics.median(seconds), max(seconds)
            terminalreporter.write_line(f"{what}: median {median:.2f} s, longest {longest:.2f} s of {len(seconds)}")
