"""Test the files of snapshots: which one counts, and what a rank that dies in between leaves behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rankbook import snapshot_files
from rankbook.errors import InvalidArgument
from rankbook.snapshot_files import (
    SnapshotFile,
    SnapshotHeader,
    SnapshotVersion,
    TrainingPlace,
    are_together,
    check_memory,
    latest_common,
    offsets_of,
    read_headers,
    remove_all,
    remove_rank,
    wait_for_peers,
)


def version(number: int, updates: int = 0) -> SnapshotVersion:
    return SnapshotVersion(number, updates, number)


def header(number: int, updates: int = 0) -> SnapshotHeader:
    return SnapshotHeader(version(number, updates), 0.0, 8, 1)


def write(folder: Path, rank: int, generation: int, number: int, updates: int = 0) -> SnapshotFile:
    file = SnapshotFile(folder, rank, generation)
    file.allocate(8)[:] = bytes([number]) * 8
    file.commit(header(number, updates), b"content")
    return file


def test_what_was_committed_is_read_and_another_version_is_not(tmp_path):
    write(tmp_path, 1, 0, 7)
    snapshot = SnapshotFile(tmp_path, 1, 0).read(version(7))
    assert snapshot is not None
    assert (snapshot[0], snapshot[1][:]) == (b"content", bytes([7]) * 8)
    assert SnapshotFile(tmp_path, 1, 0).read(version(8)) is None


def test_a_generation_that_is_being_written_does_not_count(tmp_path):
    write(tmp_path, 0, 0, 1)
    write(tmp_path, 0, 1, 2).invalidate()
    assert [latest.version for latest in read_headers(tmp_path, [0])[0]] == [version(1)]


def test_a_half_written_header_does_not_count(tmp_path):
    file = write(tmp_path, 0, 0, 1)
    file.header.write_bytes(file.header.read_bytes()[:9])
    assert read_headers(tmp_path, [0]) == {0: []}


def test_what_a_reader_has_mapped_does_not_change_with_the_next_snapshot(tmp_path):
    file = write(tmp_path, 0, 0, 1)
    snapshot = file.read(version(1))
    assert snapshot is not None
    write(tmp_path, 0, 0, 3)
    assert snapshot[1][:] == bytes([1]) * 8


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({0: [(4, 0), (3, 0)], 1: [(4, 0), (3, 0)]}, (4, 0)),
        ({0: [(5, 0), (4, 0)], 1: [(4, 0), (3, 0)]}, (4, 0)),
        ({0: [(4, 1), (3, 1)], 1: [(4, 0), (3, 1)]}, (3, 1)),  # rank 1 died before its scheduler's step
        ({0: [(4, 0), (3, 0)], 1: [(3, 0)]}, (3, 0)),  # rank 1 died in its snapshot
        ({0: [(4, 0)], 1: []}, None),
        ({0: [(4, 0), (3, 0)], 1: [(2, 0), (1, 0)]}, None),
        ({}, None),
    ],
)
def test_the_newest_snapshot_that_all_ranks_have_counts(versions, expected):
    headers = {rank: [header(*fields) for fields in entries] for rank, entries in versions.items()}
    assert latest_common(headers) == (None if expected is None else version(*expected))


def test_a_step_whose_scheduler_has_not_stepped_counts_only_if_there_is_no_other():
    before, unfinished = header(3, 1), SnapshotHeader(version(4), 0.0, 8, 1, is_final=False)
    assert latest_common({0: [unfinished, before], 1: [unfinished, before]}) == version(3, 1)
    assert latest_common({0: [unfinished], 1: [unfinished, before]}) == version(4)


def place(steps: dict[int, int], updates: int = 0, has_begun: bool = False, is_mixed: bool = False) -> TrainingPlace:
    return TrainingPlace(min(steps.values(), default=0), steps, updates, has_begun, is_mixed, ())


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (place({0: 4}), place({0: 4}), True),
        (place({0: 4}), place({0: 3}), False),
        (place({0: 4}, updates=1), place({0: 4}), False),
        (place({0: 4}, has_begun=True), place({0: 4}), False),
        (place({0: 4}, has_begun=True), place({0: 4}, has_begun=True), True),
        (place({0: 4}, is_mixed=True), place({0: 4}, is_mixed=True), False),
        (place({0: 4, 1: 20}), place({0: 4, 1: 19}), False),  # two optimizers
        (place({0: 4, 7: 9}), place({0: 4}), True),  # one of an earlier training, which a traceback keeps
    ],
)
def test_ranks_are_together_if_they_can_go_on_from_one_step(one, other, expected):
    assert are_together([one, other, one]) is expected


def test_a_rank_waits_for_the_last_snapshot_of_the_others(tmp_path):
    write(tmp_path, 1, 0, 4, 1)
    assert wait_for_peers(tmp_path, [1], version(4, 1), timeout=0) == [{version(4, 1)}]
    wait_for_peers(tmp_path, [1], version(3, 2), timeout=0)
    with pytest.raises(InvalidArgument, match="rank 1 has not made the step"):
        wait_for_peers(tmp_path, [1], version(4, 2), timeout=0)
    with pytest.raises(InvalidArgument, match=r"rank 2 has no snapshot after 0 s.*protect on protects all ranks"):
        wait_for_peers(tmp_path, [1, 2], version(4, 1), timeout=0)


def test_removing_leaves_other_files(tmp_path):
    for rank, generation in ((0, 0), (0, 1), (3, 1)):
        write(tmp_path, rank, generation, 2)
    remove_rank(tmp_path, 0)
    assert {path.stem for path in tmp_path.iterdir()} == {"snapshot-3-1"}
    (tmp_path / "segment-1").touch()
    remove_all(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["segment-1"]
    remove_all(tmp_path / "absent")


def test_buffers_are_aligned():
    assert offsets_of([1, 64, 65, 0, 8]) == ([0, 64, 128, 256, 256], 320)


def test_too_little_memory_is_refused_with_the_arithmetic(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_files, "free_memory", lambda _: (1 << 30, "/dev/shm"))
    check_memory(tmp_path, 100 << 20, 4)
    with pytest.raises(InvalidArgument, match=r"2 copies x 200 MB x 4 ranks = 1\.6 GB .* /dev/shm has 1\.07 GB free"):
        check_memory(tmp_path, 200_000_000, 4)


def test_the_memory_of_the_present_snapshots_is_part_of_what_is_needed(tmp_path, monkeypatch):
    size, reserve = 4 << 20, 64 << 20
    SnapshotFile(tmp_path, 0, 0).allocate(size)
    # Room for one more.
    monkeypatch.setattr(snapshot_files, "free_memory", lambda _: (reserve + size + (1 << 16), "/dev/shm"))
    check_memory(tmp_path, size, 1)
    with pytest.raises(InvalidArgument, match=r"free without the present snapshots, of which"):
        check_memory(tmp_path, 2 * size, 1)


def test_the_age_is_that_of_the_oldest_part():
    from rankbook.coordinator.recovery import describe_protection

    now = time.time()
    parts = {rank: [SnapshotHeader(version(9), now - age, 500, 2)] for rank, age in enumerate((3, 1))}
    status = describe_protection(parts, now)
    assert status is not None
    assert (status.step, status.size, round(status.age)) == (9, 1000, 3)
    assert "protected every 2 steps: snapshot of step 9, 3" in str(status)
    assert "2 kB of shared memory" in str(status)
    assert "4 kB of shared memory" in str(describe_protection(parts, now, copies=4))  # on two hosts
    behind = describe_protection(parts, now, clock_offset=lambda rank: -2.0 if rank == 0 else 0.0)
    assert behind is not None and round(behind.age) == 1
    assert describe_protection({0: [], 1: []}, now) is None
    alone = describe_protection({0: parts[0], 1: []}, now)
    assert "no snapshot that all ranks have" in str(alone)
