"""Faults of ranks that use NCCL, two or three of them on one CUDA device (see `tests.gpu.ranks`)."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.conftest import Notebook, Outcome, running_kernel, wait_until
from tests.faults.injection import raise_on_rank_1
from tests.gpu.ranks import ON_CUDA, REDUCE, nccl_ranks

pytestmark = [*ON_CUDA, pytest.mark.timeout(180)]

INDENTED_REDUCE = REDUCE.replace("\n", "\n    ").rstrip()
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


def when_said(notebook: Notebook, cell: str, strike: Callable[[], object]) -> tuple[Outcome, float]:
    """Run a cell, and call `strike` once both ranks have printed `now`. Return the seconds from there to the end."""
    struck: list[float] = []

    def look(outcome: Outcome) -> None:
        if not struck and re.search(r"\[0-1\] now|\[0\] now[^$]*\[1\] now|\[1\] now[^$]*\[0\] now", outcome.stdout):
            struck.append(time.monotonic())
            strike()

    outcome = notebook.finish(notebook.send(cell), timeout=60, seen=look)
    return outcome, time.monotonic() - struck[0]


def test_ranks_on_one_device_reduce_tensors_of_the_device_and_of_the_cpu(nccl):
    outcome = nccl.ok(f"%%distributed\n{REDUCE}c = torch.ones(2)\ndist.all_reduce(c)\nprint(t.tolist(), c.tolist())")
    assert "[0-1] [3.0, 3.0, 3.0, 3.0] [2.0, 2.0]" in outcome.stdout
    assert "[0-1] cpu:gloo,cuda:nccl" in nccl.ok("%%distributed\nprint(dist.get_backend_config())").stdout


FSDP = """from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
sharded = fully_shard(torch.nn.Linear(64, 64).to(device), reshard_after_forward=True)
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
    measured("cell in which a rank raises (grace period 0.3 s)", outcome.seconds)
    assert "CollectiveAborted: rank 1 raised ValueError" in outcome.traceback
    assert "went on" not in outcome.stdout


def test_a_wait_in_the_first_collective_is_broken_off(nccl):
    nccl.ok("%%distributed\nsub = dist.new_group([0, 1])")
    code = "t = torch.ones(4, device=device)\ndist.all_reduce(t, group=sub)\nt.tolist()"
    # The first one of a new group, and the first one after the group was formed anew.
    for _ in range(2):
        outcome = raise_on_rank_1(nccl, code, timeout=60)
        assert "CollectiveAborted" in outcome.traceback


def test_the_status_answers_while_ranks_wait_for_the_device(nccl, tmp_path):
    """The control thread makes no CUDA call: one hangs while the main thread waits for the device."""
    go = tmp_path / "go"
    wait = f"    while not os.path.exists({str(go)!r}): time.sleep(0.05)"
    cell = f"import os, time\nif rank == 1:\n{wait}\n{REDUCE}print(t.tolist())"
    message = nccl.send(f"%%distributed --background\n{cell}")
    outcome = nccl.finish(message)
    waits = "waiting in all_reduce"
    wait_until(lambda: waits in nccl.ok("%distributed stacks").text, timeout=30, what="rank 0 waits for the device")
    for _ in range(5):
        begun = time.monotonic()
        text = nccl.ok("%distributed status").text
        assert time.monotonic() - begun < 1 and "unresponsive" not in text, text
    go.touch()
    nccl.follow(message, outcome, lambda so_far: "[3.0, 3.0, 3.0, 3.0]" in so_far.stdout, timeout=60)


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
    measured("interrupt to the end of the cell", seconds)
    assert outcome.ename in ("KeyboardInterrupt", "CollectiveAborted")


@pytest.mark.parametrize(
    ("one", "words"),
    [
        ("dist.broadcast(t, 0)", r"rank 0 began all_reduce float32\[4\]"),
        # NCCL tells nothing of these two: it ends both, or one of them, with a wrong result.
        ("dist.all_reduce(torch.ones(8, device=device))", r"rank 0 gave float32\[4\].*, rank 1 float32\[8\]"),
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
    assert re.search(words, outcome.traceback)


def test_a_killed_rank_is_healed_and_training_goes_on(nccl, measured):
    nccl.ok(f"%%distributed\n{DDP}")
    output = nccl.ok("%%distributed\nimport os\nprint('pid', os.getpid())").stdout
    pid = int(re.findall(r"\[1\] pid (\d+)", output)[0])
    cell = f"%%distributed\nimport time\nprint('now')\nif rank == 1: time.sleep(60)\n{REDUCE}t.tolist()"
    outcome, seconds = when_said(nccl, cell, lambda: psutil.Process(pid).kill())
    measured("SIGKILL to the end of the cell", seconds)
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


@pytest.mark.timeout(240)
def test_the_watchdog_of_nccl_ends_no_process_after_a_timeout_also_none_that_heal_has_started():
    """Its monitor would end a process by the key of a dump in the store, long after the error that caused it."""
    with nccl_ranks(2, variables={"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5"}) as notebook:
        outcome = notebook.run(
            """%%distributed
import time
from datetime import timedelta
sub = dist.new_group([0, 1], timeout=timedelta(seconds=5))
if rank == 0:
    dist.all_reduce(torch.ones(4, device=device), group=sub)
    torch.cuda.synchronize()
else:
    time.sleep(10)  # longer than the timeout""",
            timeout=60,
        )
        assert "longer than the timeout of its process group" in outcome.traceback
        processes = "%%distributed\nimport os\nprint('pid', os.getpid())"
        pids = dict(re.findall(r"\[(\d)\] pid (\d+)", notebook.ok(processes).stdout))
        psutil.Process(int(pids["1"])).kill()
        wait_until(lambda: "dead" in notebook.ok("%distributed status").text, timeout=30, what="the death of rank 1")
        notebook.ok("%distributed heal", timeout=120)
        pids = dict(re.findall(r"\[(\d)\] pid (\d+)", notebook.ok(processes).stdout))
        # Six times the timeout of the watchdog's heartbeat, in which both ranks use the device.
        notebook.ok(
            f"%%distributed\nimport time\nfor _ in range(30):\n    time.sleep(1)\n    {INDENTED_REDUCE}", timeout=90
        )
        assert dict(re.findall(r"\[(\d)\] pid (\d+)", notebook.ok(processes).stdout)) == pids


HEALED = """%%distributed
weight = model[0].weight
other = [None, None]
dist.all_gather_object(other, [
    weight is model[1].weight, weight.group, weight.device == device, row.untyped_storage().data_ptr() ==
    weight.untyped_storage().data_ptr(), row.storage_offset(), generator.device == device, where == device,
    [tensor.sum().item() for tensor in large], torch.rand(2).tolist(), torch.rand(2, device=device).tolist()])
print("same", other[0] == other[1], other[0][:7])
"""


def test_heal_brings_tensors_of_the_device_back_as_they_were_and_copies_them_once(nccl):
    if psutil.disk_usage("/dev/shm").free < 9 << 30:
        pytest.skip("wants 9 GB of shared memory")
    nccl.ok("%distributed restart", timeout=60)  # a sharded model of another test cannot be healed
    nccl.ok(
        """%%distributed
import os, rankbook
rankbook.set_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(device)
model[1].weight = model[0].weight
model[0].weight.group = "decay"
row, where, generator = model[0].weight.detach()[5], device, torch.Generator(device)
large = [torch.full((1 << 28,), float(number), device=device) for number in range(4)]  # 1 GB each"""
    )
    output = nccl.ok("%%distributed\nprint('pid', os.getpid())").stdout
    pids = {int(rank): int(pid) for rank, pid in re.findall(r"\[(\d)\] pid (\d+)", output)}
    psutil.Process(pids[1]).kill()
    wait_until(lambda: "dead" in nccl.ok("%distributed status").text, timeout=30, what="the death of rank 1")
    with peak_memory(pids[0]) as peak:
        healed = nccl.ok("%distributed heal", timeout=120)
    assert "not copied" not in healed.stdout, healed.stdout
    assert "same True [True, 'decay', True, True, 320, True, True]" in nccl.ok(HEALED, timeout=60).stdout
    # The segment is 4 GB of shared memory, of which the donor maps what it writes.
    assert peak[0] < 1.3 * 4 * (1 << 30), f"the donor and the segment took {peak[0] / (1 << 30):.1f} GB"


@contextlib.contextmanager
def peak_memory(pid: int) -> Iterator[list[int]]:
    """Provide a list with the largest use of memory during the block: the process's own, and the shared memory."""

    def use() -> int:
        memory = psutil.Process(pid).memory_info()
        return int(memory.rss - memory.shared + psutil.disk_usage("/dev/shm").used)

    before, peak, ended = use(), [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], use() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def test_the_scale_of_fp16_is_one_value_on_all_ranks_after_a_break_off(nccl):
    nccl.ok(
        """%%distributed
from rankbook import Accelerator, set_seed
set_seed(0)
accelerator = Accelerator(mixed_precision="fp16")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
def train(factor=1.0):
    accelerator.backward((factor * model(torch.ones(4, 64, device=device))).square().mean())
    optimizer.step()
    optimizer.zero_grad()
train()""",
        timeout=60,
    )
    # The step of rank 0 overflows, and would lower its scale.
    outcome = raise_on_rank_1(nccl, "train(float('inf'))\naccelerator.scaler.get_scale()", timeout=60)
    assert "CollectiveAborted" in outcome.traceback
    report = (
        "scales = [None, None]\ndist.all_gather_object(scales, accelerator.scaler.get_scale())\nprint(len(set(scales)))"
    )
    assert "[0-1] 1" in nccl.ok(f"%%distributed\ntrain()\n{report}", timeout=60).stdout


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
        notebook.ok("%distributed pull kept --ranks 0")
        assert notebook.ok("kept").displays[-1]["text/plain"] == "[5]", "the rank lives, and what it has on the CPU"
        output = notebook.ok("%distributed heal", timeout=120).stdout
        assert "rank 0 was healed with the state of rank 1" in output
        assert "[0-1] 6" in notebook.ok("%%distributed\nprint(kept)").stdout


def test_nccl_error_text_is_shown_to_the_user():
    with nccl_ranks(2, hosts=False) as notebook:
        outcome = notebook.run(f"%%distributed\n{REDUCE}t.tolist()", timeout=60)
        assert "Duplicate GPU detected" in outcome.traceback + outcome.text


@pytest.mark.device_alone
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


def test_a_restart_of_an_idle_rank_waits_for_nobody(nccl, measured):
    """Check that it leaves at once: NCCL's own way to end a communicator waits for all ranks of the machine."""
    output = nccl.ok("%%distributed\nimport os\nprint('pid', os.getpid())").stdout
    leaving = psutil.Process(int(re.findall(r"\[1\] pid (\d+)", output)[0]))
    message, begun = nccl.send("%distributed restart 1"), time.monotonic()
    psutil.wait_procs([leaving], timeout=60)
    measured("restart to the end of the idle rank's process", time.monotonic() - begun)
    assert time.monotonic() - begun < 1
    assert nccl.finish(message, timeout=60).status == "ok"
