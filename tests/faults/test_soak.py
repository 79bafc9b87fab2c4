"""Random faults, one after the other, in one kernel: every one is recovered from, and nothing adds up.

RANKBOOK_SOAK_FAULTS sets how many there are (40; 200 in .ci/full), RANKBOOK_SOAK_SEED which; both are printed.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import cluster_folders
from tests.faults.injection import FAULTS, HOLDINGS, HUNG, Case, FaultInjector, open_injector

WORLD = 3
FAULTS_IN_ALL = int(os.environ.get("RANKBOOK_SOAK_FAULTS", "40"))
ROOM = (16, 8)
"""Growth allowed for the descriptors and threads of all processes, in the median of the last third of the faults
against that of the first.

The last error of a cell may keep a former generation's connections until the next cell: 4 descriptors and 2 threads of
each of the three ranks.
"""
LASTING = ("rank 0", "kernel", "forkserver")
"""The processes that live through all of it."""
MEMORY_MB = 20.0
"""Growth allowed for the memory of a process, in the same medians."""

SHARED = "processes and files"
ResourceCounts = dict[str, tuple[int, int]]
"""Descriptors and threads of each process, by its role; and under `SHARED` the number of processes and of files."""

ENDS = """%%distributed
import gc, sys
sys.last_value = sys.last_traceback = sys.last_exc = None
gc.collect()"""


@pytest.fixture(
    params=[
        pytest.param(False, id="gloo", marks=pytest.mark.slow),
        pytest.param(True, id="stand_in", marks=pytest.mark.full),
    ]
)
def injector(request: pytest.FixtureRequest) -> Iterator[FaultInjector]:
    with open_injector(WORLD, stand_in=request.param) as injector:
        yield injector


def roles(injector: FaultInjector) -> dict[str, psutil.Process]:
    """The kernel, its forkserver and the ranks."""
    processes = {f"rank {rank}": psutil.Process(pid) for rank, pid in injector.pids.items()}
    processes["kernel"] = psutil.Process(injector.notebook.pid)
    processes["forkserver"] = processes["rank 0"].parent()
    return processes


def resource_counts(injector: FaultInjector) -> ResourceCounts:
    """Return the descriptors and threads of each process, and the numbers of processes and shared files."""
    counted = {
        role: (len([*Path(f"/proc/{item.pid}/fd").iterdir()]), len([*Path(f"/proc/{item.pid}/task").iterdir()]))
        for role, item in roles(injector).items()
    }
    paths = (path for folder in cluster_folders(injector.notebook.pid) for path in folder.rglob("*"))
    # a rank has one file for each stream that it has ever written to, and may write to one for the first time
    files = len({re.sub(r"(output-[\d.]+)\.\w+$", r"\1", str(path)) for path in paths})
    torch_files = sum(1 for path in Path("/dev/shm").glob("torch_*") if _of(path, injector))
    return {**counted, SHARED: (len(injector.notebook.processes()), files + torch_files)}


def _of(path: Path, injector: FaultInjector) -> bool:
    match = re.match(r"torch_(\d+)_", path.name)
    return match is not None and int(match[1]) in injector.pids.values()


def memory(process: psutil.Process) -> float:
    """Return the memory of the process that is not shared with files, including its parent's, in MB.

    A proportional size would grow as others, who share some of it, go.
    """
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    (kilobytes,) = re.findall(r"^Anonymous:\s+(\d+) kB$", rollup, re.MULTILINE)
    return int(kilobytes) / 1024


def details(injector: FaultInjector) -> dict[str, list[str]]:
    """Return the descriptors of all processes, for the message of a failure."""
    return {role: describe(item) for role, item in roles(injector).items()}


def describe(process: psutil.Process) -> list[str]:
    """Return the descriptors of a process."""
    names = []
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(re.sub(r"\d+", "#", str(entry.readlink())))
    return sorted(f"{names.count(name)} {name}" for name in set(names))


@pytest.mark.timeout(900)
def test_random_faults_leave_nothing_behind(injector):
    seed = int(os.environ.get("RANKBOOK_SOAK_SEED") or random.randrange(1_000_000))
    print(f"{FAULTS_IN_ALL} faults, seed {seed}")
    chance = random.Random(seed)
    warm = FAULTS_IN_ALL // 4
    samples: list[ResourceCounts] = []
    used: list[list[float]] = []
    slowest = (0.0, "")
    for number in range(FAULTS_IN_ALL):
        case = draw(chance)
        fault = case.fault
        try:
            times = injector.inject(case, recovery=chance.choice(["restart", "heal"]))
        except BaseException:
            print(f"fault {number}, seed {seed}: {fault.name}")
            raise
        assert times.works < HUNG, f"fault {number}, seed {seed}: {fault.name}"
        slowest = max(slowest, (times.works, fault.name))
        if number >= warm:
            samples.append(settled(injector))
            used.append([memory(roles(injector)[role]) for role in LASTING])
    print(f"slowest: {slowest[1]}, {slowest[0]:.2f} s")
    third = len(samples) // 3
    before, after = in_all(samples[:third]), in_all(samples[-third:])
    print(f"descriptors and threads in all: {before}, and in the end {after}; of each process:", samples[-1])
    for was, now, room in zip(before, after, ROOM, strict=True):
        assert now <= was + room, (seed, details(injector))
    for n, what in enumerate(("processes", "files")):
        was, now = (min(sample[SHARED][n] for sample in part) for part in (samples[:third], samples[-third:]))
        assert now <= was, (seed, what)
    for n, role in enumerate(LASTING):
        was, now = (statistics.median(sample[n] for sample in part) for part in (used[:third], used[-third:]))
        print(f"{role}: {now - was:+.1f} MB over {len(used)} faults")
        assert now - was < MEMORY_MB, (role, seed)


def draw(chance: random.Random) -> Case:
    """Draw any fault, at any rank; but rank 0 is never killed, so that one rank survives all of them."""
    fault, culprit = chance.choice(FAULTS), chance.randrange(WORLD)
    if fault.kind == "kill":
        victim = chance.randrange(1, WORLD)
        culprit = victim - 1 if fault.victim == "another" else victim
    return Case(WORLD, fault, tuple(HOLDINGS), culprit)


def settled(injector: FaultInjector) -> ResourceCounts:
    """Return the resources in use after the ranks have discarded their last errors."""
    injector.hold(tuple(HOLDINGS))
    injector.notebook.ok(ENDS)
    return resource_counts(injector)


def in_all(samples: list[ResourceCounts]) -> tuple[float, float]:
    """Return the medians of how many descriptors and threads all processes together have."""
    sums = [[sum(counts[n] for role, counts in sample.items() if role != SHARED) for n in (0, 1)] for sample in samples]
    return statistics.median(item[0] for item in sums), statistics.median(element[1] for element in sums)
