"""Test on which rank a second copy lies, and which generation is overwritten."""

from __future__ import annotations

import pytest

from rankbook.runtime.snapshot_copies import Announcement, choose_generation, find_target, latest_complete
from rankbook.snapshot_files import SnapshotHeader, SnapshotVersion, merge_headers, remove_others

OLD, NEW = SnapshotVersion(4, 0, 4), SnapshotVersion(5, 0, 5)


@pytest.mark.parametrize(
    ("hosts", "targets"),
    [
        ([[0, 1]], [None, None]),
        ([[0, 1], [2, 3]], [2, 3, 0, 1]),
        ([[0], [1], [2]], [1, 2, 0]),
        ([[0, 1, 2], [3]], [3, 3, 3, 0]),
        ([[0], [1, 2]], [1, 0, 0]),
    ],
)
def test_a_copy_lies_on_the_next_host(hosts, targets):
    assert [find_target(rank, hosts) for rank in range(len(targets))] == targets


def test_the_generation_that_all_ranks_have_is_not_overwritten():
    assert choose_generation({}, None) in (0, 1)
    assert choose_generation({0: OLD}, OLD) == 1
    assert choose_generation({0: OLD, 1: NEW}, NEW) == 0
    # Another rank lacks the newer one, since it was interrupted.
    assert choose_generation({0: OLD, 1: NEW}, OLD) == 1
    assert choose_generation({1: NEW}, None) == 0


def test_the_newest_version_of_all_ranks_counts():
    assert latest_complete([Announcement({0: OLD, 1: NEW}, 0, False), Announcement({1: OLD}, 0, False)]) == OLD
    assert latest_complete([Announcement({0: OLD}, 0, False), Announcement({}, 0, False)]) is None


def test_headers_of_several_hosts_are_merged():
    header = SnapshotHeader(OLD, 1.0, 10, 1)
    assert merge_headers([{0: [header], 1: []}, {0: [header], 1: [header]}]) == {0: [header], 1: [header]}


def test_snapshots_of_other_ranks_are_removed(tmp_path):
    for name in ("snapshot-1-0.header", "snapshot-1-1.data", "snapshot-12-0.data", "segment-5"):
        (tmp_path / name).touch()
    remove_others(tmp_path, keep=[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["segment-5", "snapshot-1-0.header", "snapshot-1-1.data"]
