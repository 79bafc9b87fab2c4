"""Faults of ranks that use NCCL, two or three of them on one CUDA device.

NCCL refuses two ranks on one device, which it tells by the host and the bus. With another NCCL_HOSTID for every rank it
takes them for several hosts, and they talk over the loopback interface. NVIDIA does not support that, so the fixture
first proves one all_reduce, and skips with NCCL's words otherwise.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.conftest import Notebook, Outcome, running_kernel
from tests.faults.injection import raise_on_rank_1
from tests.gpu.test_cuda import cuda_devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_devices() == 0, reason="torch sees no CUDA device on this machine"),
    pytest.mark.timeout(180),
]

PLACE = """
from rankbook.coordinator import cluster_processes as _processes
from rankbook.launch.placement import DeviceAssignment as _Assignment
_processes.assign_devices = lambda n, *_, **__: _Assignment(('cuda:0',) * (n or 2), 'cpu:gloo,cuda:nccl', 1)
_environment = _processes.rank_environment
def _of_rank(base, place, **options):
    own = {'NCCL_HOSTID': f'rank-{place["RANK"]}'} if HOSTS else {}
    return {**_environment(base, place, **options), 'NCCL_SOCKET_IFNAME': 'lo', 'NCCL_NET': 'Socket',
            'NCCL_IB_DISABLE': '1', 'NCCL_P2P_DISABLE': '1', 'NCCL_SHM_DISABLE': '1', 'NCCL_NVLS_ENABLE': '0', **own}
_processes.rank_environment = _of_rank
"""
REDUCE = "t = torch.full((4,), rank + 1.0, device=device)\ndist.all_reduce(t)\n"
DDP = """from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(64, 64).to(device), device_ids=[device])
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
def step():
    optimizer.zero_grad()
    ddp(torch.full((4, 64), rank + 1.0, device=device)).square().mean().backward()
    optimizer.step()
step()
"""


@contextlib.contextmanager
def nccl_ranks(count: int, *, hosts: bool = True) -> Iterator[Notebook]:
    """Run a kernel with ranks that share cuda:0 and use NCCL."""
    with running_kernel(env={"RANKBOOK_ABORT_GRACE": "0.3"}) as notebook:
        notebook.ok(PLACE.replace("HOSTS", str(hosts)))
        started = notebook.run(f"%distributed start -n {count}", timeout=120)
        proof = (
            notebook.run(f"%%distributed\n{REDUCE}print(t.tolist())", timeout=60) if started.status == "ok" else started
        )
        if hosts and proof.status != "ok":
            pytest.skip(f"NCCL does not let ranks share a device: {(proof.traceback or proof.text)[-600:]}")
        yield notebook


@pytest.fixture(scope="module")
def ranks() -> Iterator[Notebook]:
    with nccl_ranks(2) as notebook:
        yield notebook


@pytest.fixture
def nccl(ranks: Notebook) -> Iterator[Notebook]:
    """Return the module's kernel, whose ranks must have a working group afterwards."""
    yield ranks
    outcome = ranks.ok(f"%%distributed\n{REDUCE}c = torch.ones(2)\ndist.all_reduce(c)\nprint(t[0].item(), c[0].item())")
    assert outcome.stdout.count("3.0 2.0") >= 1


def when_said(notebook: Notebook, cell: str, strike: Callable[[], object]) -> tuple[Outcome, float]:
    """Run a cell, and call `strike` once both ranks have printed `now`. Return the seconds from there to the end."""
    struck: list[float] = []

    def look(outcome: Outcome) -> None:
        if not struck and re.search(r"\[0-1\] now|\[0\] now[^$]*\[1\] now|\[1\] now[^$]*\[0\] now", outcome.stdout):
            struck.append(time.monotonic())
            strike()

    outcome = notebook.finish(notebook.send(cell), timeout=60, seen=look)
    return outcome, time.monotonic() - struck[0]


FSDP = """from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
sharded = fully_shard(torch.nn.Linear(64, 64).to(device))
sharded(torch.ones(4, 64, device=device)).sum().item()
"""


WAITS = {
    "item": f"{REDUCE}t.sum().item()",
    "work": "t = torch.ones(4, device=device)\nwork = dist.all_reduce(t, async_op=True)\nwork.wait()\nt.tolist()",
    "synchronize": f"{REDUCE}torch.cuda.synchronize()",
    "barrier": "dist.barrier(device_ids=[0])",
    "a barrier of gloo": "dist.barrier()",
    "objects": "dist.all_gather_object([None, None], 'an object')",
    "DDP backward": "step()\ntorch.cuda.synchronize()",
    "FSDP2 forward": "sharded(torch.ones(4, 64, device=device)).sum().item()",
}
PREPARED = {"DDP backward": DDP, "FSDP2 forward": FSDP}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_for_a_rank_that_raised_is_broken_off(nccl, measured, wait):
    if wait in PREPARED:
        nccl.ok(f"%%distributed\n{PREPARED[wait]}")
    outcome = raise_on_rank_1(nccl, WAITS[wait], timeout=60)
    measured.setdefault("cell in which a rank raises (grace period 0.3 s)", []).append(outcome.seconds)
    assert "CollectiveAborted: rank 1 raised ValueError" in outcome.traceback
    assert "went on" not in outcome.stdout


def test_a_wait_in_the_first_collective_is_broken_off(nccl):
    nccl.ok("%%distributed\nsub = dist.new_group([0, 1])")
    code = "t = torch.ones(4, device=device)\ndist.all_reduce(t, group=sub)\nt.tolist()"
    outcome = raise_on_rank_1(nccl, code, timeout=60)
    assert "CollectiveAborted" in outcome.traceback


def test_a_cell_does_not_end_before_its_collectives(nccl):
    outcome = raise_on_rank_1(nccl, "dist.all_reduce(torch.ones(4, device=device))", timeout=60)
    assert "CollectiveAborted: rank 1 raised ValueError" in outcome.traceback


def test_a_rank_that_comes_late_finds_the_others_waiting(nccl):
    nccl.ok("%%distributed\nsub = dist.new_group([0, 1])")
    outcome = nccl.ok(
        "%%distributed\nimport time\nif rank == 0: time.sleep(75)\n"
        "t = torch.ones(4, device=device)\ndist.all_reduce(t, group=sub)\nprint(t.tolist())",
        timeout=120,
    )
    assert "[0-1] [2.0, 2.0, 2.0, 2.0]" in outcome.stdout


def test_an_interrupt_ends_a_wait_for_the_device(nccl, measured):
    cell = f"%%distributed\nimport time\nprint('now')\nif rank == 1: time.sleep(60)\n{REDUCE}t.tolist()"
    outcome, seconds = when_said(nccl, cell, nccl.interrupt)
    measured.setdefault("interrupt to the end of the cell", []).append(seconds)
    assert outcome.ename in ("KeyboardInterrupt", "CollectiveAborted")


@pytest.mark.parametrize(
    ("one", "words"),
    [
        ("dist.broadcast(t, 0)", "rank 0 began all_reduce float32[4] sum, rank 1 broadcast"),
        ("dist.all_reduce(torch.ones(8, device=device))", "rank 0 gave float32[4], rank 1 float32[8]"),
    ],
    ids=["operations", "shapes"],
)
def test_mismatched_collectives_are_reported(nccl, one, words):
    outcome = nccl.run(
        f"%%distributed\nt = torch.ones(4, device=device)\nif rank == 1: {one}\nelse: dist.all_reduce(t)\n"
        "torch.cuda.synchronize()",
        timeout=60,
    )
    assert outcome.status == "error"
    assert words.split(" sum")[0] in outcome.traceback


def test_a_killed_rank_is_healed_and_training_goes_on(nccl, measured):
    nccl.ok(f"%%distributed\n{DDP}")
    output = nccl.ok("%%distributed\nimport os\nprint('pid', os.getpid())").stdout
    pid = int(re.findall(r"\[1\] pid (\d+)", output)[0])
    cell = f"%%distributed\nimport time\nprint('now')\nif rank == 1: time.sleep(60)\n{REDUCE}t.tolist()"
    outcome, seconds = when_said(nccl, cell, lambda: psutil.Process(pid).kill())
    measured.setdefault("SIGKILL to the end of the cell", []).append(seconds)
    assert "rank 1 was killed by SIGKILL" in outcome.traceback
    assert "[0]" in nccl.ok("%%distributed --ranks 0\nprint(torch.ones(3, device=device).sum().item())").stdout
    nccl.ok("%distributed heal", timeout=120)
    code = "for _ in range(10): step()\nprint(ddp.module.weight.detach().view(torch.int32).sum().item())"
    outcome = nccl.ok(f"%%distributed\n{code}", timeout=120)
    assert "[0-1] " in outcome.stdout  # the same bits on both ranks


def test_a_step_on_a_broken_off_gradient_is_taken_back(nccl):
    nccl.ok(f"%%distributed\n{DDP}step()\nstep()\nbefore = [each.tolist() for each in ddp.parameters()]")
    outcome = raise_on_rank_1(nccl, "step()\nddp.module.weight.sum().item()", timeout=60)
    assert "CollectiveAborted" in outcome.traceback
    outcome = nccl.ok("%%distributed\nprint([each.tolist() for each in ddp.parameters()] == before)")
    assert "[0-1] True" in outcome.stdout


def test_a_timeout_of_a_collective_is_an_error_and_does_not_end_the_process(nccl):
    """NCCL's watchdog finds it, and would later let the device go on with partial data."""
    outcome = nccl.run(
        """%%distributed
import time
from datetime import timedelta
sub = dist.new_group([0, 1], timeout=timedelta(seconds=5))
if rank == 1:
    time.sleep(15)
else:
    t = torch.ones(4, device=device)
    dist.all_reduce(t, group=sub)
    print('sum', t.tolist())""",
        timeout=60,
    )
    assert "longer than the timeout of its process group" in outcome.traceback
    assert "sum" not in outcome.stdout


def test_a_ring_of_three_exchanges_large_tensors():
    with nccl_ranks(3) as notebook:
        outcome = notebook.ok(
            """%%distributed
sent, received = torch.full((1 << 24,), float(rank), device=device), torch.zeros(1 << 24, device=device)
ring = [dist.P2POp(dist.isend, sent, (rank + 1) % 3), dist.P2POp(dist.irecv, received, (rank - 1) % 3)]
for work in dist.batch_isend_irecv(ring):
    work.wait()
print('right', received.unique().tolist() == [(rank - 1) % 3])""",
            timeout=120,
        )
        assert "[0-2] right True" in outcome.stdout


def test_device_side_assert_is_reported_and_its_rank_can_be_healed():
    with nccl_ranks(2) as notebook:
        notebook.ok("%%distributed\nkept, there = rank + 5, torch.ones(2, device=device)")
        cell = "%%distributed\nif rank == 0: torch.ones(2, device=device)[torch.tensor([5], device=device)]\n"
        outcome = notebook.run(f"{cell}{REDUCE}t.tolist()", timeout=60)
        assert "device-side assert" in outcome.traceback
        assert "has failed and executes nothing any more" in outcome.stderr
        assert "device lost" in notebook.ok("%distributed status").text
        assert "[1] 6" in notebook.ok("%%distributed --ranks 1\nprint(kept)").stdout
        output = notebook.ok("%distributed heal", timeout=120).stdout
        assert "rank 0 was healed with the state of rank 1" in output
        assert "[0-1] 6" in notebook.ok("%%distributed\nprint(kept)").stdout


def test_nccl_error_text_is_shown_to_the_user():
    with nccl_ranks(2, hosts=False) as notebook:
        outcome = notebook.run(f"%%distributed\n{REDUCE}t.tolist()", timeout=60)
        assert "Duplicate GPU detected" in outcome.traceback + outcome.text


def test_breaking_off_often_leaves_neither_memory_nor_threads(nccl):
    count = (
        "%%distributed\nimport os\n"
        "print('held', torch.cuda.mem_get_info()[0] >> 20, len(os.listdir('/proc/self/task')), rank)"
    )

    def resource_counts() -> tuple[int, int]:
        matches = re.findall(r"held (\d+) (\d+) 0", nccl.ok(count).stdout)
        return int(matches[0][0]), int(matches[0][1])

    for _ in range(3):
        raise_on_rank_1(nccl, WAITS["item"], timeout=60)
    before = resource_counts()
    for _ in range(20):
        raise_on_rank_1(nccl, WAITS["item"], timeout=60)
    after = resource_counts()
    assert after[0] > before[0] - 100
    assert after[1] <= before[1] + 2


def test_collectives_captured_by_a_graph_are_not_tracked():
    with running_kernel() as notebook:
        notebook.ok("%distributed start -n 1", timeout=60)
        outcome = notebook.ok(
            """%%distributed
t = torch.ones(4, device=device)
dist.all_reduce(t)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    dist.all_reduce(t)
pending = list(dist.group.WORLD.log.pending())
graph.replay()
torch.cuda._sleep(200_000_000)
dist.all_reduce(t)
print(len(pending), len(list(dist.group.WORLD.log.pending())))""",
            timeout=60,
        )
        assert "[0] 0 1" in outcome.stdout


def test_a_restart_of_an_idle_rank_waits_for_nobody(nccl):
    nccl.ok("%distributed restart 1", timeout=60)
