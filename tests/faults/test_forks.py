"""Test that a forked child of a rank, such as a DataLoader worker, ends nothing of the rank."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

FAILS = """%%distributed
dist.all_reduce(torch.ones(1))
if rank == 0:
    raise ValueError"""

KEEP = """%%distributed
import gc, os
gc.disable()  # so that it is certain who collects what is left of former connections
held = [dist.group.WORLD._inner]
held.append(held)"""

FORK = """%%distributed
import select
del held
reads, writes = os.pipe()
child = os.fork()
if not child:
    gc.collect()
    os.write(writes, b'x')
    os._exit(0)
ended = bool(select.select([reads], [], [], 5)[0])
if not ended:
    os.kill(child, 9)
print('child', ended, os.waitpid(child, 0)[1], gc.collect() > 0)
gc.enable()
for end in (reads, writes):
    os.close(end)"""


def test_former_connections_that_are_garbage_are_not_taken_down_in_a_child(notebook):
    assert "ValueError" in notebook.run(FAILS).traceback
    notebook.ok(KEEP)
    assert "ValueError" in notebook.run(FAILS).traceback
    assert "[0-1] child True 0 True" in notebook.ok(FORK).stdout
    assert (
        "[0-1] 2.0" in notebook.ok("%%distributed\none = torch.ones(1)\ndist.all_reduce(one)\nprint(one.item())").stdout
    )
