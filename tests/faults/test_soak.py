"""Random faults, one after the other, in one kernel: every one is recovered from, and nothing adds up.

RANKBOOK_SOAK_FAULTS sets how many there are (40; 200 in .ci/full), RANKBOOK_SOAK_SEED which; both are printed.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import cluster_folders, wait_until
from tests.faults.scenes import FAULTS, HOLDINGS, HUNG, Case, Stage, stage

WORLD = 3
FAULTS_IN_ALL = int(os.environ.get("RANKBOOK_SOAK_FAULTS", "40"))
ROOM = {"rank": (16, 8), "kernel": (4, 2), "forkserver": (4, 2), "processes and files": (0, 0)}
"""How many descriptors and threads more than before there may be in the end; one for each fault would be 150.

A rank that has been there for long has more of them than a fresh one: gloo's first connections stay.
"""
MEMORY_MB = 20.0
"""What a process that lives through all of it may have more in the end."""

Held = dict[str, tuple[int, int]]

ENDS = """%%distributed
import gc, sys
sys.last_value = sys.last_traceback = sys.last_exc = None
gc.collect()"""


@pytest.fixture
def scene() -> Iterator[Stage]:
    with stage(WORLD) as scene:
        yield scene


def roles(scene: Stage) -> dict[str, psutil.Process]:
    """The kernel, its forkserver and the ranks."""
    found = {f"rank {rank}": psutil.Process(pid) for rank, pid in scene.pids.items()}
    found["kernel"] = psutil.Process(scene.notebook.pid)
    found["forkserver"] = found["rank 0"].parent()
    return found


def held(scene: Stage) -> Held:
    """Descriptors and threads of each process, and how many processes and shared files there are in all."""
    counted = {
        role: (len([*Path(f"/proc/{each.pid}/fd").iterdir()]), len([*Path(f"/proc/{each.pid}/task").iterdir()]))
        for role, each in roles(scene).items()
    }
    paths = (path for folder in cluster_folders(scene.notebook.pid) for path in folder.rglob("*"))
    # a rank has one file for each stream that it has ever written to, and may write to one for the first time
    files = len({re.sub(r"(words-[\d.]+)\.\w+$", r"\1", str(path)) for path in paths})
    torch_files = sum(1 for path in Path("/dev/shm").glob("torch_*") if _of(path, scene))
    return {**counted, "processes and files": (len(scene.notebook.processes()), files + torch_files)}


def _of(path: Path, scene: Stage) -> bool:
    found = re.match(r"torch_(\d+)_", path.name)
    return found is not None and int(found[1]) in scene.pids.values()


def memory(process: psutil.Process) -> float:
    """What it has of its own and of its parent's, in MB, without files.

    A proportional size would grow as others, who share some of it, go.
    """
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    (kilobytes,) = re.findall(r"^Anonymous:\s+(\d+) kB$", rollup, re.MULTILINE)
    return int(kilobytes) / 1024


def details(scene: Stage) -> dict[str, list[str]]:
    """What the descriptors are, for the message of a failure."""
    return {role: describe(each) for role, each in roles(scene).items()}


def describe(process: psutil.Process) -> list[str]:
    """What its descriptors are."""
    names = []
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(re.sub(r"\d+", "#", str(entry.readlink())))
    return sorted(f"{names.count(name)} {name}" for name in set(names))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_faults_leave_nothing_behind(scene):
    seed = int(os.environ.get("RANKBOOK_SOAK_SEED") or random.randrange(1_000_000))
    print(f"{FAULTS_IN_ALL} faults, seed {seed}")
    chance = random.Random(seed)
    warm = FAULTS_IN_ALL // 4
    memory_before: dict[str, float] = {}
    before: Held = {}
    slowest = (0.0, "")
    for number in range(FAULTS_IN_ALL):
        if number == warm:
            before = settled(scene)
            memory_before = {role: memory(each) for role, each in roles(scene).items()}
        case = draw(chance)
        fault = case.fault
        try:
            times = scene.strike(case)
        except BaseException:
            print(f"fault {number}, seed {seed}: {fault.name}")
            raise
        assert times.works < HUNG, f"fault {number}, seed {seed}: {fault.name}"
        slowest = max(slowest, (times.works, fault.name))
    after = settled(scene)
    print(f"slowest: {slowest[1]}, {slowest[0]:.2f} s")
    print("(descriptors, threads) before and after:", before, after, sep="\n")
    wait_until(lambda: not too_many(before, held(scene)), timeout=10, what=f"no more than before: {details(scene)}")
    for role in ("rank 0", "kernel", "forkserver"):
        grown = memory(roles(scene)[role]) - memory_before[role]
        print(f"{role}: {grown:+.1f} MB over {FAULTS_IN_ALL - warm} faults")
        assert grown < MEMORY_MB, (role, seed)


def draw(chance: random.Random) -> Case:
    """Any fault, at any rank; but rank 0 is never killed, so that there is one that lives through all of them."""
    fault, culprit = chance.choice(FAULTS), chance.randrange(WORLD)
    if fault.kind == "kill":
        victim = chance.randrange(1, WORLD)
        culprit = victim - 1 if fault.victim == "another" else victim
    return Case(WORLD, fault, tuple(HOLDINGS), culprit)


def settled(scene: Stage) -> Held:
    """What is held once the ranks have let go of their last errors."""
    scene.hold(tuple(HOLDINGS))
    scene.notebook.ok(ENDS)
    return held(scene)


def too_many(before: Held, after: Held) -> list[str]:
    """Where there is more than before. Any rank is measured by the one that had the most."""
    most = tuple(max(each[n] for role, each in before.items() if role.startswith("rank")) for n in (0, 1))
    return [
        f"{role}: {found}"
        for role, found in after.items()
        for n in (0, 1)
        if found[n] > (most if role.startswith("rank") else before[role])[n] + ROOM[role.rstrip(" 0123456789")][n]
    ]
