"""Test that waits which have nothing to do with a fault are not ended by it."""

from __future__ import annotations

import pytest

from tests.conftest import Kernel, Notebook

pytestmark = pytest.mark.slow

TRAIN = """import threading
for _ in range(60):
    total = torch.ones(1)
    dist.all_reduce(total, group=pair)
    assert total.item() == 2
    threading.Event().wait(0.05)
print("trained")"""

DEAF = """%%distributed --ranks 0 --timeout 0.3
product = torch.randn(4000, 4000)
product @ product"""  # seconds in one call, which no signal ends, so that the collectives are broken off


@pytest.fixture(scope="module")
def three(kernel: Kernel) -> Notebook:
    return kernel(ranks=3)


def test_an_interrupt_of_one_ranks_cell_breaks_no_group_that_it_is_no_member_of(three):
    three.ok("%%distributed\npair = dist.new_group([1, 2])")
    magic = "get_ipython().run_cell_magic('distributed', '--ranks 1-2 --background', "
    three.ok(f"handle = {magic}{TRAIN!r})")
    interrupted = three.run(DEAF, timeout=20)
    assert interrupted.status == "error"
    trained = three.ok("handle.wait(); handle.result.stdout", timeout=20)
    assert trained.text.count("trained") == 2
    assert "3.0" in three.ok("%%distributed\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()", timeout=20).text


def test_a_receive_from_anybody_ends_when_nobody_can_send_any_more(three):
    code = "if rank == 0:\n    raise ValueError('no')\nif rank == 1:\n    dist.recv(torch.ones(1))\ndist.barrier()"
    failed = three.run(f"%%distributed\n{code}", timeout=20)
    reported = failed.traceback + failed.text
    assert "rank 0 raised ValueError at cell [" in reported
    assert "while this rank waited in recv (float32[1]) at line" in reported
    assert failed.seconds < 15
    interrupted = three.run("%%distributed --timeout 1\ndist.recv(torch.ones(1))", timeout=20)
    assert "KeyboardInterrupt" in interrupted.traceback + interrupted.text
    assert interrupted.seconds < 15
    sent = (
        "if rank == 1:\n    print('from', dist.recv(torch.ones(1)))\nelif rank == 0:\n    dist.send(torch.ones(1), 1)"
    )
    assert "[1] from 0" in three.ok(f"%%distributed\n{sent}", timeout=20).stdout
