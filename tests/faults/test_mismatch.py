"""Ranks that give a collective different things: it costs the cell, never a process.

In plain PyTorch gloo ends the process that receives more than it expected, from a thread where nobody can catch it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rankbook.rank.process_groups import gloo
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
        pytest.param(f"{BACKWARD} if rank else dist.all_reduce(torch.ones(1_000_000))"),
        pytest.param(f"{BACKWARD} if rank else dist.all_reduce(torch.ones(3))"),
        "dist.reduce_scatter_tensor(torch.ones(1 + 1000 * rank), torch.ones(world_size * (1 + 1000 * rank)))",
    ],
)
def test_mismatched_tensors_fail_the_cell_and_kill_no_process(ranks, code):
    pids = ranks.ok("[each.pid for each in __import__('rankbook').current().status()]").text
    for _ in range(2):
        failed = ranks.run(f"%%distributed --timeout 3\n{code}", timeout=20)
        assert failed.status == "error"
        assert failed.seconds < 15
        after = ranks.ok(AFTER, timeout=20)
        assert "sum" in after.stdout
    assert ranks.ok("[each.pid for each in __import__('rankbook').current().status()]").text == pids


def test_the_error_names_the_collective_and_the_tensors_of_all_ranks(ranks):
    failed = ranks.run(
        "%%distributed\ntensor = torch.ones(1_000_000 + 1000 * (rank > 0))\ndist.all_reduce(tensor)", timeout=20
    )
    reported = failed.traceback + failed.text
    assert re.search(
        r"CollectiveAborted: all_reduce #\d+: rank 0 gave float32\[1000000\], ranks? [-\d]+ float32\[1001000\], "
        r"at line 3",
        reported,
    )
    assert "the process group is re-formed" in reported
    ranks.ok(AFTER, timeout=20)


def test_sends_and_receives_of_different_sizes_are_reported_apart_from_collectives(ranks):
    code = "dist.send(torch.ones(1000), 1) if rank == 0 else dist.recv(torch.ones(4), 0) if rank == 1 else None"
    failed = ranks.run(f"%%distributed --timeout 5\n{code}", timeout=20)
    reported = failed.traceback + failed.text
    assert "CollectiveAborted: the tensors of a collective differ in size or type between ranks" in reported
    ranks.ok(AFTER, timeout=20)


def test_wrong_result_fails_the_cell_even_if_no_rank_waited(ranks):
    failed = ranks.run("%%distributed\ntotal = torch.ones(6).view(2 + (rank > 0), -1)\ndist.all_reduce(total)")
    reported = failed.traceback + failed.text
    assert re.search(
        r"RuntimeError: all_reduce #\d+: rank 0 gave float32\[2, 3\], ranks? [-\d]+ float32\[3, 2\], at line 3; ranks "
        r"[-\d]+ have already completed it: their results are wrong",
        reported,
    )
    assert "collectives did not match: the process group is re-formed" in reported
    ranks.ok(AFTER, timeout=20)


HELPER = """%%distributed
import warnings
warnings.simplefilter("ignore")

def call(op, size, *, dtype=torch.float32, root=0, how=dist.ReduceOp.SUM):
    tensor = torch.ones(size, dtype=dtype)
    parts = [torch.ones(size, dtype=dtype) for _ in range(world_size)]
    mine = dist.get_rank() == root
    if op == "all_reduce":
        dist.all_reduce(tensor, how)
    elif op == "asynchronous":
        dist.all_reduce(tensor, how, async_op=True).wait()
    elif op == "all_reduce_coalesced":
        dist.all_reduce_coalesced([torch.ones(7, dtype=dtype), tensor], how)
    elif op == "broadcast":
        dist.broadcast(tensor, root)
    elif op == "reduce":
        dist.reduce(tensor, root, how)
    elif op == "all_gather":
        dist.all_gather(parts, tensor)
    elif op == "all_gather_into_tensor":
        dist.all_gather_into_tensor(torch.cat(parts), tensor)
    elif op == "gather":
        dist.gather(tensor, parts if mine else None, root)
    elif op == "scatter":
        dist.scatter(tensor, parts if mine else None, root)
    elif op == "reduce_scatter":
        dist.reduce_scatter(tensor, parts, how)
    elif op == "reduce_scatter_tensor":
        dist.reduce_scatter_tensor(tensor, torch.cat(parts), how)
    elif op == "all_to_all":
        dist.all_to_all([torch.empty_like(part) for part in parts], parts)
    elif op == "all_to_all_single":
        dist.all_to_all_single(torch.cat(parts), torch.cat(parts))
    elif op == "barrier":
        dist.barrier()
    else:
        raise ValueError(op)
"""

SIZED = (
    "all_reduce",
    "asynchronous",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
EXCHANGES = ("all_to_all", "all_to_all_single")
MAX, PRODUCT = "how=dist.ReduceOp.MAX", "how=dist.ReduceOp.PRODUCT"


def pairs() -> Iterator[tuple[str, str, str, bool]]:
    """Yield what rank 0 runs, what the others run, and a pattern of what the cell must say; from 2 bytes to 2 MB.

    True for a further permutation, which `.ci/full` runs.
    """
    gave = r"#\d+: rank 0 gave {}.*?, ranks? [-\d]+ .*?{}.*?, at cell \[\d+\] line \d+"
    message = r"collective #\d+: rank 0 began {}\b.*, ranks? [-\d]+ {}\b"
    for op in SIZED:
        small, large, shape = ("2", "3"), ("524_288", "524_100"), ("(2, 3)", "(3, 2)")
        for one, other in (small, large, shape):
            sizes = [re.escape(str(size).replace("_", "").strip("()")) for size in (one, other)]
            values = [rf"float32\[{size}\]" for size in sizes]
            if op == "all_reduce_coalesced":
                values = [rf"float32\[7\], {value}" for value in values]
            further = op != "all_reduce" and (one, other) != small
            yield f"call('{op}', {one})", f"call('{op}', {other})", gave.format(*values), further
        doubled = "dtype=torch.float64"
        words = gave.format(r".*?float32\[5\]", r"float64\[5\]")
        yield f"call('{op}', 5)", f"call('{op}', 5, {doubled})", words, op != "all_reduce"
    yield (
        "call('all_reduce', 1, dtype=torch.float16)",
        "call('all_reduce', 2, dtype=torch.float16)",
        gave.format(r"float16\[1\]", r"float16\[2\]"),
        False,
    )
    for op in EXCHANGES:
        for one, other in ((2, 3), (170_000, 170_001)):
            sent = r"#\d+: rank \d sends \d+ elements to rank \d, which expects \d+, at cell"
            yield f"call('{op}', {one})", f"call('{op}', {other})", sent, one != 2
        doubled = f"call('{op}', 5, dtype=torch.float64)"
        yield f"call('{op}', 5)", doubled, gave.format("float32", "float64"), True
    for op in ("all_reduce", "reduce", "reduce_scatter_tensor"):
        yield f"call('{op}', 5)", f"call('{op}', 5, {MAX})", gave.format(r".*sum", "max"), op != "all_reduce"
    yield f"call('all_reduce', 5, {PRODUCT})", f"call('all_reduce', 5, {MAX})", gave.format(".*product", "max"), True
    for op in ("broadcast", "reduce", "gather", "scatter"):
        further = op in ("gather", "scatter")
        yield f"call('{op}', 5)", f"call('{op}', 5, root=1)", gave.format(".*root 0", "root 1"), further
    for number, (first, second) in enumerate(
        (
            ("all_reduce", "barrier"),
            ("all_reduce", "broadcast"),
            ("all_gather", "all_reduce"),
            ("reduce_scatter_tensor", "all_to_all_single"),
            ("gather", "scatter"),
            ("all_reduce", "reduce"),
        )
    ):
        forth, back = f"call('{first}', 5)", f"call('{second}', 5)"
        yield f"{forth}; {back}", f"{back}; {forth}", message.format(first, second), number > 2


PAIRS = list(pairs())


@pytest.fixture(scope="module")
def helped(ranks) -> Notebook:
    ranks.ok(HELPER)
    return ranks


@functools.cache
def gloo_has_all_to_all() -> bool:
    """Return True if torch's own gloo group of one rank can exchange lists of tensors: 2.10 and 2.11 cannot."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
    try:
        group.alltoall([torch.empty(1)], [torch.ones(1)], dist.AllToAllOptions()).wait()
    except RuntimeError as error:
        if "does not support" not in str(error):
            raise
        return False
    return True


def test_matrix_has_the_documented_number_of_pairs():
    assert len(PAIRS) >= 60


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        pytest.param(*pair, id=f"{pair[0]} - {pair[1]}", marks=[pytest.mark.full] if is_further else [])
        for *pair, is_further in PAIRS
    ],
)
def test_every_pair_is_named_with_the_values_of_all_ranks_and_the_next_cell_works(helped, one, other, words):
    if "'all_to_all'" in one + other and not gloo_has_all_to_all():
        pytest.skip("gloo of this version of torch has no all_to_all")
    failed = helped.run(f"%%distributed\nif rank == 0:\n    {one}\nelse:\n    {other}", timeout=20)
    assert failed.status == "error", failed.text
    reported = failed.traceback + failed.text
    assert re.search(words, reported), reported
    assert "KeyboardInterrupt" not in reported
    assert "sum" in helped.ok(AFTER, timeout=20).stdout


@pytest.mark.parametrize(
    "text", ["download aborted", "the server socket has failed to listen", "connection reset by the file server"]
)
def test_an_error_of_the_users_own_is_shown_as_it_is(ranks, text):
    """Check it: gloo's errors have such words too, and mean that the connections between the ranks are broken."""
    ranks.ok("%%distributed\ndist.all_reduce(torch.ones(2))")
    failed = ranks.run(f"%%distributed\nif rank == 0:\n    raise RuntimeError({text!r})", timeout=20)
    assert f"RuntimeError: {text}" in failed.traceback
    assert "CollectiveAborted" not in failed.traceback + failed.text
    assert "sum" in ranks.ok(AFTER, timeout=20).stdout


def test_a_message_is_waited_for_longer_than_gloo_may_take_to_connect(ranks):
    """Check it: gloo waits for a send or recv as long as the timeout with which it was connected, unless told."""
    outcome = ranks.ok(
        f"""%%distributed
import threading
large = torch.full((1_000_000,), float(rank))
late = threading.Event()
if rank == 0:
    dist.recv(large, 1)
    dist.send(large + 1, 1)
elif rank == 1:
    late.wait({gloo._ATTEMPT_TIMEOUTS[0] + 0.5})
    dist.send(large, 0)
    late.wait({gloo._ATTEMPT_TIMEOUTS[0] + 0.5})
    dist.recv(large, 0)
print(large[-1].item())""",
        timeout=30,
    )
    assert {"[0] 1.0", "[1] 2.0"} <= set(outcome.stdout.splitlines())


SCATTER = "dist.reduce_scatter_tensor(value, torch.ones(world_size))"


@pytest.mark.parametrize(
    "code",
    [
        "value = torch.tensor(7) if rank == 0 else torch.zeros(1, dtype=torch.long)\ndist.broadcast(value, 0)",
        "value = torch.ones(1, 6, 1) if rank else torch.ones(6)\ndist.all_reduce(value)\nvalue = value.max()",
        f"with torch.inference_mode():\n    value = torch.empty(1)\n    {SCATTER}",
        f"value = torch.nn.Parameter(torch.zeros(1))\nwith torch.no_grad():\n    {SCATTER}",
    ],
    ids=["broadcast", "all_reduce", "inference", "parameter"],
)
def test_what_torch_allows_is_no_mismatch_and_no_error(ranks, code):
    outcome = ranks.ok(f"%%distributed\n{code}\nprint('done', value.item() in (7, world_size))", timeout=20)
    assert outcome.stdout.endswith("] done True\n"), outcome.stdout


def test_a_new_group_waits_for_a_late_rank_as_long_as_its_timeout(ranks):
    outcome = ranks.ok(
        """%%distributed
import threading
from datetime import timedelta
from rankbook.rank.process_groups import manager
before, manager.JOIN_TIMEOUT = manager.JOIN_TIMEOUT, timedelta(seconds=1)
try:
    if rank == 0:
        threading.Event().wait(1.5)
    group = dist.new_group(timeout=timedelta(minutes=10))
finally:
    manager.JOIN_TIMEOUT = before
print(group.size() == world_size, dist.distributed_c10d._get_default_store().timeout)""",
        timeout=30,
    )
    assert outcome.stdout.endswith("] True 0:30:00\n"), outcome.stdout


@pytest.mark.parametrize("code", ["dist.all_reduce(torch.ones(1), group=group)", "dist.barrier(group=group)"])
def test_a_timeout_is_named(ranks, code):
    failed = ranks.run(
        f"""%%distributed
import threading
from datetime import timedelta
group = dist.new_group(timeout=timedelta(seconds=1))
if rank == 1:
    threading.Event().wait(2.5)
{code}""",
        timeout=30,
    )
    assert "a wait of 1 s has reached the timeout of its process group" in failed.traceback
    assert "sum" in ranks.ok(AFTER, timeout=20).stdout


def test_a_monitored_barrier_waits_for_rank_0_and_names_who_does_not_come(ranks):
    """Check it: gloo's own waits for rank 0 no longer than it may take to connect."""
    waits = f"""%%distributed
import threading
from datetime import timedelta
late = threading.Event()
if rank == 0:
    late.wait({gloo._ATTEMPT_TIMEOUTS[0] + 0.5})
dist.monitored_barrier()
print("all are here")"""
    assert ranks.ok(waits, timeout=20).stdout.endswith("] all are here\n")
    failed = ranks.run(
        """%%distributed
if rank != 1:
    dist.monitored_barrier(timeout=timedelta(seconds=0.5))""",
        timeout=20,
    )
    assert "Rank 1 failed to pass monitoredBarrier in 500 ms" in failed.traceback
    assert "sum" in ranks.ok(AFTER, timeout=20).stdout
