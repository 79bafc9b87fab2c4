"""Ranks that give a collective different things: it costs the cell, never a process.

In plain PyTorch gloo ends the process that receives more than it expected, from a thread where nobody can catch it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Notebook, running_kernel

pytestmark = pytest.mark.slow

AFTER = """%%distributed
assert kept == rank * 10, kept
total = torch.tensor(rank)
dist.all_reduce(total)
print("sum", total.item())"""

BACKWARD = "DDP(torch.nn.Linear(64, 64))(torch.ones(1, 64)).sum().backward()"


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.full), 3])
def ranks(request) -> Iterator[Notebook]:
    with running_kernel(ranks=request.param) as notebook:
        notebook.ok("%%distributed\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nkept = rank * 10")
        yield notebook


@pytest.mark.parametrize(
    "code",
    [
        "dist.all_reduce(torch.ones(4 + 1000 * rank))",
        "dist.all_reduce(torch.ones(1_000_000 + 1000 * rank))",
        "dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32))",
        "dist.all_gather([torch.ones(4 + rank) for _ in range(world_size)], torch.ones(4 + rank))",
        "work = dist.all_reduce(torch.ones(4 + 1000 * rank), async_op=True)\nsum(range(300_000))\nwork.wait()",
        "dist.send(torch.ones(1000), 1) if rank == 0 else dist.recv(torch.ones(4), 0) if rank == 1 else None",
        pytest.param(f"{BACKWARD} if rank else dist.all_reduce(torch.ones(1_000_000))"),
        pytest.param(f"{BACKWARD} if rank else dist.all_reduce(torch.ones(3))"),
        "dist.reduce_scatter_tensor(torch.ones(1 + 1000 * rank), torch.ones(world_size * (1 + 1000 * rank)))",
    ],
)
def test_tensors_that_differ_from_rank_to_rank_end_the_cell_and_no_process(ranks, code):
    pids = ranks.ok("[each.pid for each in __import__('rankbook').current().status()]").text
    for _ in range(2):
        failed = ranks.run(f"%%distributed --timeout 3\n{code}", timeout=20)
        assert failed.status == "error"
        assert failed.seconds < 15
        after = ranks.ok(AFTER, timeout=20)
        assert "sum" in after.stdout
    assert ranks.ok("[each.pid for each in __import__('rankbook').current().status()]").text == pids


def test_the_error_names_the_collective_and_its_tensors(ranks):
    failed = ranks.run(
        "%%distributed\ntensor = torch.ones(1_000_000 + 1000 * rank)\ndist.all_reduce(tensor)", timeout=20
    )
    told = failed.traceback + failed.text
    assert "CollectiveAborted: the tensors that the ranks gave to a collective differ in size or type" in told
    assert "(float32[100" in told
    assert "at line 3" in told
    assert "the process group is formed anew" in told
    ranks.ok(AFTER, timeout=20)


def test_different_collectives_are_named_and_an_interrupt_ends_them(ranks):
    pressed = []

    def press(outcome):
        if "the ranks disagree" in outcome.text and not pressed:
            pressed.append(ranks.interrupt())

    code = "%%distributed\nif rank:\n    dist.all_reduce(torch.ones(5))\nelse:\n    dist.barrier()"
    failed = ranks.finish(ranks.send(code), timeout=30, seen=press)
    assert failed.status == "error"
    told = failed.text + failed.traceback
    assert "the ranks disagree at collective #" in told
    assert "all_reduce float32[5], waiting at line 3" in told
    assert "rank 0: barrier, waiting at line 5" in told
    ranks.ok(AFTER, timeout=20)
