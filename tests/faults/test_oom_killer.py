"""Ranks that the kernel's OOM killer ends, in a control group with little memory, where one can be made."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankbook.control_groups import find_counter
from tests.conftest import Notebook, running_kernel, wait_until
from tests.faults.test_death import full_text, pids

pytestmark = pytest.mark.slow

LIMIT = 1 << 30  # a forkserver and two ranks take a half
EAT = "%%distributed --ranks 1\nheld = []\nwhile True:\n    held.append(bytearray(64 << 20))"


def make_group() -> Path:
    """Create a control group with a limit below our own. Skips the test, with the reason, where it cannot."""
    counter = find_counter()
    if counter is None:
        pytest.skip("no control group with a counter of the OOM killer's victims")
    group = counter.parent / f"rankbook-test-{uuid.uuid4().hex[:8]}"
    limits = ("memory.max", "memory.swap.max") if counter.name == "memory.events" else ("memory.limit_in_bytes",)
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        (group / limits[0]).write_text(str(LIMIT))
        for limit in limits[1:]:
            (group / limit).write_text("0")
    except OSError as error:
        group.rmdir()
        pytest.skip(f"no limit can be set in a new control group: {error}")
    if counter.name == "memory.oom_control":
        with contextlib.suppress(OSError):  # no swap at all
            (group / "memory.swappiness").write_text("0")
    return group


@pytest.fixture
def small() -> Iterator[Notebook]:
    """Provide a kernel whose forkserver and two ranks have little memory; the kernel itself is not in their group."""
    group = make_group()
    try:
        with running_kernel(load="") as notebook:
            try:
                (group / "cgroup.procs").write_text(str(notebook.pid))
            except OSError as error:
                pytest.skip(f"no process can be moved into a new control group: {error}")
            notebook.ok("%load_ext rankbook")
            (group.parent / "cgroup.procs").write_text(str(notebook.pid))  # the forkserver stays
            notebook.ok("%distributed start -n 2")
            yield notebook
    finally:
        wait_until(lambda: _removed(group), timeout=20, what="the control group is empty")


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


@pytest.mark.full
def test_a_rank_that_the_oom_killer_ends_is_reported_as_that(small):
    failed = small.run(EAT, timeout=60)
    assert "rank 1 was killed by the operating system because memory ran out (SIGKILL)" in full_text(failed)
    assert "[0] here" in small.ok("%%distributed --ranks 0\nprint('here')").stdout
    assert "because memory ran out" in small.ok("%distributed status").text
    assert "rank 1 restarted" in small.ok("%distributed restart 1", timeout=20).stdout


@pytest.mark.full
def test_kill_in_a_memory_cgroup_is_reported_as_possible_oom(small):
    os.kill(pids(small)[1], signal.SIGKILL)
    wait_until(lambda: "dead" in small.ok("%distributed status").text, timeout=20, what="its end is told")
    assert "was killed by SIGKILL (out of memory?)" in small.ok("%distributed status").text
