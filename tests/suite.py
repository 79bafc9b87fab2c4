"""The pytest hooks of this suite: its layers, its workers, and the guard that pure tests start no process.

Layers are markers. A test that carries none of them is pure code, and belongs to `pytest -m fast`:

`processes`  starts processes: a kernel, ranks, workers of a loader, a subprocess. Part of `pytest`.
`fast`       a scenario with processes that `pytest -m fast` runs all the same.
`slow`       takes seconds, or shows what is rarely broken. Part of `.ci/run`.
`full`       a further permutation of what another test shows. Part of `.ci/full`.

Workers are processes of pytest-xdist. Each has a folder of its own for sockets, shared memory and logs, so that what
one test leaves behind cannot be hidden, or removed, by another worker. The tests of a file run on one worker.
"""

from __future__ import annotations

import gc
import multiprocessing.process
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

MAY_START_PROCESSES = ("processes", "slow", "full", "gpu")
MAX_WORKERS = 6
PROCESS_EVENTS = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.startfile", "pty.spawn"}
)


def runtime_folder() -> Path:
    """Return this worker's folder for sockets and shared memory; in a benchmark, which has none, that of segments."""
    return Path(os.environ.get("RANKBOOK_RUNTIME_DIR", "/dev/shm"))


@pytest.fixture(scope="session", autouse=True)
def worker_folders() -> Iterator[None]:
    """Give this worker folders of its own. At its end nothing of a cluster may lie there."""
    shared = Path("/dev/shm")
    # A socket's path has a hundred characters at most, and pytest's own folders have more than that.
    base = Path(tempfile.mkdtemp(prefix="rb-", dir=shared if shared.is_dir() else "/tmp"))
    runtime, logs = base / "r", base / "logs"
    runtime.mkdir(mode=0o700)
    logs.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKBOOK_RUNTIME_DIR", str(runtime))
        patch.setenv("RANKBOOK_LOG_DIR", str(logs))
        yield
        # A forkserver removes the folder of its cluster last, perhaps after the end of the last test.
        deadline = time.monotonic() + 10
        while (remaining := sorted(map(str, runtime.glob("rankbook-*")))) and time.monotonic() < deadline:
            threading.Event().wait(0.05)
    shutil.rmtree(base, ignore_errors=True)
    assert not remaining, f"folders of clusters are left: {remaining}"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Return an empty folder whose path is short enough for sockets, unlike pytest's `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as folder:
        yield Path(folder)


# Workers -------------------------------------------------------------------------------------------------------------


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many workers `-n auto` makes: none where single files are asked for, else one more than cores.

    Half of the tests' time is waiting, for processes that start and for ranks that are given time.
    """
    arguments = config.option.file_or_dir
    if arguments and all(".py" in item for item in arguments):
        return 0
    return min((os.cpu_count() or 1) + 1, MAX_WORKERS)


# Layers --------------------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis take its time, and watch for processes from here on."""
    # How long an example takes says on a busy machine nothing of the code.
    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suite")
    sys.addaudithook(_refuse_process)
    multiprocessing.process.BaseProcess.start = _start  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)  # ahead of the deselection by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark pure tests as fast, and put the files that start processes first: they take longest."""
    longest = set()
    for item in items:
        if not _may_start(item):
            item.add_marker(pytest.mark.fast)
        else:
            longest.add(item.path)
    items.sort(key=lambda item: item.path not in longest)  # stable: within files the order stays


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collections, of which tests of memory make many."""
    gc.collect()
    gc.freeze()


def _may_start(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in MAY_START_PROCESSES)


# Failures ------------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """List the failures with their errors before the long reports, which a log may cut off."""
    for report in [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]:
        crash = getattr(report.longrepr, "reprcrash", None)
        terminalreporter.line(f"{report.nodeid} ({report.when}): {crash.message[:500] if crash else report.longrepr}")
    return (yield)


# The guard -----------------------------------------------------------------------------------------------------------

_ours = os.getpid()
_guarded: str | None = None
"""The test that runs, if it may start no process."""
_started: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Guard a test without a marker that lets it start processes."""
    global _guarded
    _guarded = None if _may_start(item) else item.nodeid
    try:
        return (yield)
    finally:
        _guarded = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that tried to start a process, also where it caught the error."""
    _started.clear()
    try:
        return (yield)
    finally:
        if _started:
            pytest.fail(f"it starts a process ({_started[0]}): mark it with @pytest.mark.processes")


def _refuse_process(event: str, args: tuple[Any, ...]) -> None:
    if event in PROCESS_EVENTS:
        _refuse(event, args)


def _refuse(how: str, args: tuple[Any, ...]) -> None:
    if _guarded is None or os.getpid() != _ours:
        return
    _started.append(f"{how} {args}"[:300])
    raise RuntimeError(f"{_guarded} starts a process, and has no marker that says so: @pytest.mark.processes")


_plain_start = multiprocessing.process.BaseProcess.start


def _start(process: multiprocessing.process.BaseProcess) -> None:
    """Start a process of multiprocessing, which raises no audit event where it asks its fork server."""
    _refuse("multiprocessing", (process,))
    _plain_start(process)
