"""Test process groups that user code creates in place of the predefined one."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.slow


# Chosen by rank 0 right before it is used, so that no other process is likely to take it.
FREE_PORT = """import socket
with socket.create_server(('127.0.0.1', 0)) as probe:
    ports = [probe.getsockname()[1]]
dist.broadcast_object_list(ports)
(port,) = ports"""
ADD = "x = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item())"


@pytest.mark.parametrize("of", ["tcp", "env"])
def test_a_group_with_a_store_of_the_users_own_works_and_outlives_an_abort(fresh_notebook, of):
    fresh_notebook.ok("%distributed start -n 2")
    where = "init_method=f'tcp://127.0.0.1:{port}', rank=rank, world_size=world_size" if of == "tcp" else ""
    address = "import os\nos.environ['MASTER_PORT'] = str(port)" if of == "env" else ""
    make = f"{FREE_PORT}\ndist.destroy_process_group()\n{address}\ndist.init_process_group('gloo', {where})"
    assert "[0-1] 2.0" in fresh_notebook.ok(f"%%distributed\n{make}\n{ADD}").stdout
    outcome = fresh_notebook.run(f"%%distributed\nif rank == 1: raise ValueError('alone')\n{ADD}")
    assert "ValueError: alone" in outcome.traceback
    assert "[0-1] 2.0" in fresh_notebook.ok(f"%%distributed\n{ADD}").stdout


def test_collectives_of_a_group_that_was_made_anew_are_counted_and_not_compared_with_those_before(fresh_notebook):
    fresh_notebook.ok("%distributed start -n 2")
    fresh_notebook.ok("%%distributed\nfor _ in range(6): dist.barrier()")
    generation = "%%distributed\nprint(dist.group.WORLD.log.generation)"
    before = fresh_notebook.ok(generation).stdout
    anew = "dist.destroy_process_group()\ndist.init_process_group('gloo')\nfor _ in range(2): dist.barrier()"
    outcome = fresh_notebook.ok(f"%%distributed --time\n{anew}")
    rows = outcome.displays[-1]["text/plain"].splitlines()[1:3]
    assert all(re.search(r" (ms|µs|s) +3( |$)", row) for row in rows), rows  # with the group itself
    after = fresh_notebook.ok(generation).stdout
    assert before != after and before.startswith("[0-1] ") and after.startswith("[0-1] ")
