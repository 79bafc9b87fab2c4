"""Test that a destroyed process group leaves no connections and no threads, and gives clear errors."""

from __future__ import annotations

import re

import pytest

from rankbook.ranks import parse_ranks
from tests.conftest import Notebook, wait_until

pytestmark = pytest.mark.processes

CREATE = "sub = dist.new_group([0, 1])\ndist.all_reduce(torch.ones(1), group=sub)\n"
DESTROY = "dist.destroy_process_group(sub)\n"
COUNT = """%%distributed
import gc, os, pathlib
gc.collect()
links = [os.readlink(file) for file in pathlib.Path('/proc/self/fd').iterdir() if file.is_symlink()]
print('loops', links.count('anon_inode:[eventpoll]'), len(links))"""


def counts(notebook: Notebook) -> dict[int, tuple[int, int]]:
    """Return the numbers of event loops and of descriptors of each rank. gloo has one loop for a connected group."""
    matches = re.findall(r"\[([\d-]+)\] loops (\d+) (\d+)", notebook.ok(COUNT).stdout)
    return {rank: (int(loops), int(files)) for ranks, loops, files in matches for rank in parse_ranks(ranks, 2)}


def loops(notebook: Notebook) -> list[int]:
    """Return the number of event loops of each rank."""
    return [loops for _, (loops, _) in sorted(counts(notebook).items())]


@pytest.fixture(autouse=True)
def _used_once(notebook):
    notebook.ok(f"%%distributed\n{CREATE}{DESTROY}print('a rank has a file for its output once it has printed')")


@pytest.mark.slow
def test_destroyed_group_frees_threads_and_descriptors_while_referenced(notebook):
    before = counts(notebook)
    notebook.ok("%%distributed\nkept = []\n" + f"{CREATE}kept.append(sub)\n{DESTROY}" * 5)
    wait_until(lambda: counts(notebook) == before, timeout=10, what=f"no more than before: {before}")


def test_its_log_is_reported_no_longer_than_until_the_next_cell(notebook):
    for _ in range(3):
        notebook.ok(f"%%distributed\n{CREATE}{DESTROY}")
    # those of creating groups, of the default group, and of the group of the last cell
    code = "from rankbook.rank.process_groups import manager\nprint('logs', len(manager._manager().report()))"
    assert "[0-1] logs 3" in notebook.ok(f"%%distributed\n{code}").stdout


def test_a_collective_in_it_names_the_reason(notebook):
    outcome = notebook.run(f"%%distributed\n{CREATE}{DESTROY}sub.allreduce([torch.ones(1)])")
    assert outcome.status == "error"
    reported = outcome.traceback + outcome.text
    assert "the process group was destroyed, so this rank cannot begin all_reduce" in reported, reported


def test_a_restarted_rank_frees_the_group_that_its_peer_has_destroyed(notebook):
    before = loops(notebook)
    notebook.ok(f"%%distributed\n{CREATE}")
    notebook.run("%%distributed --ranks 1\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    notebook.ok("%distributed restart 1")
    assert loops(notebook) == [count + 1 for count in before]
    notebook.ok(f"%%distributed --ranks 0\n{DESTROY}")
    # After an error in a cell that has used a group, the ranks connect all groups again.
    notebook.run("%%distributed\ndist.barrier()\nraise ValueError('on purpose')", timeout=20)
    wait_until(lambda: loops(notebook) == before, timeout=10, what="the default group's connections only")
