"""Test the memory limits of control groups and the counters of the OOM killer, with files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankbook import control_groups, snapshot_files
from rankbook.control_groups import RecentKills, cpu_quota, find_counter, free_memory, read_counter

EVENTS = "low 0\nhigh 17\nmax 4031\noom 3\noom_kill {}\noom_group_kill 1\n"
OOM_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


def machine(tmp_path: Path, *, groups: str, mounts: str, file: str, text: str) -> Path:
    """Create a process folder whose mounts lie below `tmp_path`, and the one file with a counter."""
    process = tmp_path / "proc"
    process.mkdir()
    (process / "cgroup").write_text(groups)
    (process / "mountinfo").write_text(mounts.replace("@", str(tmp_path)))
    counter = tmp_path / file
    counter.parent.mkdir(parents=True)
    counter.write_text(text)
    return process


MACHINES = {
    "version 2": {
        "groups": "0::/user.slice/user-1000.slice/session-2.scope\n",
        "mounts": "25 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        "34 25 0:29 / @/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
        "file": "cgroup/user.slice/user-1000.slice/session-2.scope/memory.events",
        "text": EVENTS.format(2),
    },
    "version 2 in a container that sees its own group at the top": {
        "groups": "0::/\n",
        "mounts": "612 605 0:29 / @/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw\n",
        "file": "cgroup/memory.events",
        "text": EVENTS.format(2),
    },
    "version 1": {
        "groups": "4:memory:/user.slice\n3:cpu,cpuacct:/\n1:name=systemd:/user.slice\n",
        "mounts": "33 25 0:28 / @/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 25 0:32 / @/cgroup/memory rw,relatime shared:12 - cgroup cgroup rw,memory\n",
        "file": "cgroup/memory/user.slice/memory.oom_control",
        "text": OOM_CONTROL.format(2),
    },
    "version 1 in a container that sees only its own group, by a longer name": {
        "groups": "9:memory:/docker/4f2a\n0::/docker/4f2a\n",
        "mounts": "1 2 0:32 /docker/4f2a @/cgroup/memory ro master:12 - cgroup memory rw,memory\n",
        "file": "cgroup/memory/memory.oom_control",
        "text": OOM_CONTROL.format(2),
    },
    "both, with the memory in version 1": {
        "groups": "4:memory:/jobs/one\n0::/\n",
        "mounts": "35 25 0:32 / @/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "44 25 0:33 / @/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        "file": "cgroup/memory/jobs/one/memory.oom_control",
        "text": OOM_CONTROL.format(2),
    },
    "a mount with a space in its name": {
        "groups": "0::/one\n",
        "mounts": "44 25 0:33 / @/control\\040groups rw - cgroup2 cgroup2 rw\n",
        "file": "control groups/one/memory.events",
        "text": EVENTS.format(2),
    },
}


@pytest.mark.parametrize("layout", MACHINES.values(), ids=MACHINES)
def test_the_counter_of_our_own_group_is_found(tmp_path, layout):
    counter = find_counter(machine(tmp_path, **layout))
    assert counter == tmp_path / layout["file"]
    assert read_counter(counter) == 2


@pytest.mark.parametrize(
    "text", ["", "oom_kill_disable 0\nunder_oom 0\n", "low 0\noom 1\n"], ids=["empty", "an old kernel", "no kills"]
)
def test_missing_counter_is_not_reported(tmp_path, text):
    assert find_counter(machine(tmp_path, **{**MACHINES["version 2"], "text": text})) is None
    assert find_counter(tmp_path / "no such process") is None
    assert RecentKills(None).recent(1.0) == 0


def test_the_groups_of_others_do_not_count(tmp_path):
    process = machine(tmp_path, **{**MACHINES["version 2"], "file": "cgroup/memory.events"})
    assert find_counter(process) is None


def test_a_kill_counts_for_some_seconds(tmp_path):
    counter = tmp_path / "memory.events"
    counter.write_text(EVENTS.format(5))
    kills = RecentKills(counter)
    kills.update(100.0)
    assert kills.recent(101.0) == 0, "those before our time are not ours"
    counter.write_text(EVENTS.format(7))
    assert kills.recent(102.0) == 2
    assert kills.recent(109.0) == 2, "whoever ends a little later may have been one of them"
    for second in range(110, 130):
        kills.update(float(second))
    assert kills.recent(130.0) == 0, "whoever ends now was not"
    counter.write_text(EVENTS.format(8))
    assert kills.recent(130.1) == 1


NO_LIMIT_1 = 9223372036854771712
MEMORY_FILES = {
    "version 1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "version 2": ("memory.max", "memory.current", "inactive_file"),
}


@pytest.mark.parametrize("version", MEMORY_FILES)
def test_the_narrowest_limit_of_the_group_and_those_around_it_counts(tmp_path, version):
    limit, usage, inactive = MEMORY_FILES[version]
    process = machine(tmp_path, **MACHINES[version])
    own = (tmp_path / MACHINES[version]["file"]).parent

    def write(folder: Path, maximum: int | str, used: int, cached: int) -> None:
        (folder / limit).write_text(f"{maximum}\n")
        (folder / usage).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\nworkingset_{inactive} 5\n{inactive} {cached}\nshmem 7\n")

    assert free_memory(process) is None
    write(own, 5000, 2000, 300)
    assert free_memory(process) == 3300
    write(own.parent, 4000, 2500, 400)
    assert free_memory(process) == 1900
    write(own.parent, 2000, 2500, 0)
    assert free_memory(process) == 0
    write(own.parent, NO_LIMIT_1 if version == "version 1" else "max", 2500, 400)
    assert free_memory(process) == 3300
    (tmp_path / limit).write_text("1\n")  # outside of the file system of control groups
    assert free_memory(process) == 3300


CPU_MACHINES = {
    "version 1": {
        "groups": "4:memory:/user.slice\n3:cpu,cpuacct:/pods/one\n",
        "mounts": "33 25 0:28 / @/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 25 0:32 / @/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "file": "cgroup/cpu/pods/one/cpu.cfs_period_us",
        "text": "100000\n",
    },
    "version 2": {**MACHINES["version 2"], "text": ""},
}


@pytest.mark.parametrize("version", CPU_MACHINES)
def test_the_smallest_cpu_quota_of_the_group_and_those_around_it_counts(tmp_path, version):
    process = machine(tmp_path, **CPU_MACHINES[version])
    own = (tmp_path / CPU_MACHINES[version]["file"]).parent

    def write(folder: Path, quota: int, period: int = 100000) -> None:
        if version == "version 1":
            (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (folder / "cpu.cfs_period_us").write_text(f"{period}\n")
        else:
            (folder / "cpu.max").write_text(f"{quota if quota >= 0 else 'max'} {period}\n")

    assert cpu_quota(process) is None
    write(own, -1)
    assert cpu_quota(process) is None
    write(own.parent, 800000)
    assert cpu_quota(process) == 8.0
    write(own, 75000, 50000)
    assert cpu_quota(process) == 1.5
    write(tmp_path, 1000)  # outside of the file system of control groups
    assert cpu_quota(process) == 1.5


def test_a_limit_below_the_shared_memory_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(control_groups, "free_memory", lambda: None)
    free, place = snapshot_files.free_memory(tmp_path)
    assert place in (str(tmp_path.parent), "the machine")
    monkeypatch.setattr(control_groups, "free_memory", lambda: free + (1 << 40))
    assert snapshot_files.free_memory(tmp_path)[1] == place
    monkeypatch.setattr(control_groups, "free_memory", lambda: 4096)
    assert snapshot_files.free_memory(tmp_path) == (4096, "the control group of this process")
