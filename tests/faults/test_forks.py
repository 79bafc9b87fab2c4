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


PRINT = """%%distributed --ranks 0
import multiprocessing, threading
has_ended = False
def keep_printing():
    while not has_ended:
        print('a thread of the rank')
threads = [threading.Thread(target=keep_printing) for _ in range(2)]
for thread in threads:
    thread.start()
codes = []
try:
    for _ in range(40):
        child = multiprocessing.get_context('fork').Process(target=print, args=('a child',))
        child.start()
        child.join(10)
        child.kill()
        child.join()
        codes.append(child.exitcode)
finally:
    has_ended = True
    for thread in threads:
        thread.join()"""


def test_a_child_can_print_that_is_forked_while_threads_print(notebook):
    notebook.ok(PRINT)
    assert "True" in notebook.ok("%%distributed --ranks 0\nprint(codes == [0] * 40)").stdout
