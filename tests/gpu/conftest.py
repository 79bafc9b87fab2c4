"""Kernels for the GPU tests, their turns on the device, and what the report shows beside the results."""

from __future__ import annotations

import contextlib
import fcntl
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Notebook, running_kernel
from tests.gpu.ranks import REDUCE, SharedRanks

FAILED = pytest.StashKey[bool]()
Measured = Callable[[str, float], None]


class _Report:
    """Shows a failure at once, in case the run does not come to its end, and at the end what recovery took."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid}, {report.when}, {report.duration:.1f} s:\n{report.longreprtext}")
            for title, text in report.sections:
                terminal.write_line(f"--- {title}\n{text}")
        if report.when == "teardown":
            for what, seconds in report.user_properties:
                self._seconds[what].append(float(str(seconds)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._seconds:
            terminalreporter.section("times")
        for what, seconds in self._seconds.items():
            median, longest = statistics.median(seconds), max(seconds)
            terminalreporter.write_line(f"{what}: median {median:.2f} s, longest {longest:.2f} s of {len(seconds)}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "device_alone: no other test may use the device meanwhile")
    config.pluginmanager.register(_Report(config))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note a failure for the test's fixtures, and add to it what the ranks say of themselves."""
    report: pytest.TestReport = yield
    if report.failed:
        item.stash[FAILED] = True
        notebook = getattr(item, "funcargs", {}).get("nccl")
        if report.when == "call" and notebook is not None:
            with contextlib.suppress(Exception, pytest.fail.Exception):
                for command in ("status", "stacks"):
                    report.sections.append((command, notebook.run(f"%distributed {command}", timeout=10).text))
    return report


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Measured:
    """Return the function that notes seconds, by what they were measured for."""
    return lambda what, seconds: request.node.user_properties.append((what, seconds))


@pytest.fixture(autouse=True)
def _turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the tests of all workers use the device together, but one with the mark `device_alone` by itself."""
    alone = request.node.get_closest_marker("device_alone") is not None
    folder = Path(tempfile.gettempdir())
    with (folder / "rankbook-gpu-gate").open("w") as gate, (folder / "rankbook-gpu-device").open("w") as device:
        fcntl.flock(gate, fcntl.LOCK_EX)  # while one waits to be alone, no other one begins
        fcntl.flock(device, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@pytest.fixture(scope="module")
def nccl_kernel() -> Iterator[SharedRanks]:
    """Return the kernel that a module's tests on two NCCL ranks share."""
    shared = SharedRanks()
    yield shared
    shared.close()


@pytest.fixture
def nccl(nccl_kernel: SharedRanks, request: pytest.FixtureRequest) -> Iterator[Notebook]:
    """Return a kernel with two NCCL ranks, which must have a working group afterwards; another one after a failure."""
    notebook = nccl_kernel.take()
    yield notebook
    cell = f"%%distributed\n{REDUCE}c = torch.ones(2)\ndist.all_reduce(c)\nprint(t[0].item(), c[0].item())"
    try:
        assert notebook.ok(cell, timeout=20).stdout.count("3.0 2.0") >= 1
    except BaseException:
        nccl_kernel.close()
        if not request.node.stash.get(FAILED, False):
            raise


@pytest.fixture(scope="module")
def preloaded_kernel() -> Iterator[Notebook]:
    """Return a kernel whose ranks have the runtime imported, so that they start at once."""
    with running_kernel(env={"RANKBOOK_PRELOAD": "start"}) as notebook:
        yield notebook


@pytest.fixture
def preloaded(preloaded_kernel: Notebook) -> Iterator[Notebook]:
    """Return the module's kernel, without ranks."""
    yield preloaded_kernel
    preloaded_kernel.run("%distributed stop")
    preloaded_kernel.ok("%reset -f")
