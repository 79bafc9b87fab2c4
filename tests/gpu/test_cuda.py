"""Test the basic functions on CUDA devices."""

from __future__ import annotations

import re

import pytest

from tests.gpu.ranks import ON_CUDA, cuda_devices

pytestmark = ON_CUDA

REDUCE = """%%distributed
t = torch.full((4, 4), float(rank + 1), device=device)
dist.all_reduce(t)
c = torch.ones(2)
dist.all_reduce(c)
print(device, dist.get_backend(), t[0, 0].item(), c[0].item(), torch.cuda.is_initialized())"""


def test_one_rank_has_a_device_of_its_own_and_nccl_beside_gloo(fresh_notebook):
    started = fresh_notebook.ok("%distributed start -n 1")
    assert "cuda:0" in started.stdout
    assert "nccl" in started.stdout
    assert "[0] cuda:0" in fresh_notebook.ok(REDUCE).stdout


def test_default_is_one_rank_per_device(fresh_notebook):
    fresh_notebook.ok("%distributed start")
    reported = fresh_notebook.ok("import rankbook; rankbook.current().world_size")
    assert reported.displays[-1]["text/plain"] == str(cuda_devices())


def test_several_ranks_share_a_device_over_gloo(fresh_notebook):
    ranks = 2 * cuda_devices()
    started = fresh_notebook.ok(f"%distributed start -n {ranks}")
    assert "(shared)" in started.stdout
    total = float(ranks * (ranks + 1) // 2)
    output = fresh_notebook.ok(REDUCE).stdout
    assert f"gloo {total} {float(ranks)} True" in output


def test_cuda_that_is_initialised_in_the_notebook_is_in_nobodys_way(fresh_notebook):
    fresh_notebook.ok("import torch; here = torch.ones(3, device='cuda')")
    fresh_notebook.ok("%distributed start -n 2")
    assert "True" in fresh_notebook.ok(REDUCE).stdout
    fresh_notebook.ok("%distributed push here")
    outcome = fresh_notebook.ok("%%distributed\nprint(here.sum().item(), here.device)")
    assert "[0-1] 3.0 cpu" in outcome.stdout
    fresh_notebook.ok("%%distributed\ny = torch.arange(4., device=device)")
    fresh_notebook.ok("%distributed pull y")
    assert fresh_notebook.ok("[t.device.type for t in y]").displays[-1]["text/plain"] == "['cpu', 'cpu']"


def test_a_measured_cell_says_when_the_device_was_done(fresh_notebook):
    fresh_notebook.ok("%distributed start -n 1")
    fresh_notebook.ok("%%distributed\ntorch.ones(3, device=device).sum().item()")  # the context exists
    outcome = fresh_notebook.ok("%%distributed --time\ntorch.cuda._sleep(2_000_000_000)")
    (table,) = [display["text/plain"] for display in outcome.displays if "waited" in display["text/plain"]]
    header, row = (re.split(r"  +", line) for line in table.splitlines())
    assert header[1:3] == ["wall", "device done"]
    assert row[1].endswith((" ms", " µs")) and row[2].endswith(" s"), "the kernel runs for about a second"


def test_ranks_have_the_devices_that_are_visible_at_the_start(fresh_notebook):
    fresh_notebook.ok("import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''")
    assert "cpu" in fresh_notebook.ok("%distributed start -n 2").stdout
    assert "cpu gloo 3.0 2.0 False" in fresh_notebook.ok(REDUCE).stdout
    fresh_notebook.ok("%distributed stop")
    fresh_notebook.ok("import os; os.environ['CUDA_VISIBLE_DEVICES'] = '0'")
    assert "cuda:0" in fresh_notebook.ok("%distributed start -n 1").stdout


def test_ranks_on_the_cpu_of_a_machine_with_devices_touch_none(fresh_notebook):
    assert "2 ranks are ready: cpu, gloo" in fresh_notebook.ok("%distributed start -n 2 --device cpu").stdout
    assert "cpu gloo 3.0 2.0 False" in fresh_notebook.ok(REDUCE).stdout
    code = "import rankbook\nprint(rankbook.Accelerator().device, torch.cuda.is_available())"
    assert "[0-1] cpu False" in fresh_notebook.ok(f"%%distributed\n{code}", timeout=60).stdout
    refused = fresh_notebook.run("%distributed start --device cuda")
    assert "2 ranks are already running on the CPU" in refused.stderr + refused.traceback
    fresh_notebook.ok("%distributed stop")
    assert "cuda:0" in fresh_notebook.ok("%distributed start -n 1 --device cuda").stdout
    assert "[0] cuda:0" in fresh_notebook.ok(REDUCE).stdout


def test_a_start_that_asks_for_devices_which_are_hidden_fails_and_says_so(fresh_notebook):
    fresh_notebook.ok("import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''")
    refused = fresh_notebook.run("%distributed start --device cuda")
    assert "no CUDA device can be used" in refused.traceback + refused.stderr
    assert "CUDA_VISIBLE_DEVICES=''" in refused.traceback + refused.stderr


def test_ranks_are_forked_from_a_process_that_has_not_initialised_cuda(fresh_notebook):
    fresh_notebook.ok("%distributed start -n 1")
    code = "print('bad fork', torch.cuda._is_in_bad_fork())"
    assert "[0] bad fork False" in fresh_notebook.ok(f"%%distributed\n{code}").stdout
    # Also those of a later start, by the same process.
    fresh_notebook.ok("%distributed stop")
    fresh_notebook.ok("%distributed start -n 1")
    assert "[0] bad fork False" in fresh_notebook.ok(f"%%distributed\n{code}").stdout


def test_a_ddp_step_trains_on_the_device(fresh_notebook):
    fresh_notebook.ok("%distributed start -n 2")
    outcome = fresh_notebook.ok(
        """%%distributed
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.full((4, 8), float(rank), device=device)).sum().backward()
optimizer.step()
print(round(model.module.weight.sum().item(), 4))""",
        timeout=120,
    )
    assert "[0-1] " in outcome.stdout


@pytest.mark.device_alone
def test_out_of_memory_error_names_the_holders_and_frees_the_memory(fresh_notebook):
    fresh_notebook.ok("%distributed start -n 1")
    fresh_notebook.ok("%%distributed\nkept = torch.zeros(1 << 20, device=device)")
    failed = fresh_notebook.run(
        """%%distributed
def grow():
    held = []
    while True:
        held.append(torch.zeros(1 << 30, device=device))
grow()""",
        timeout=120,
    )
    assert "OutOfMemoryError" in failed.traceback
    assert "rank 0, memory of cuda:0: " in failed.traceback
    assert "grow(): held[0]" in failed.traceback
    outcome = fresh_notebook.ok("%%distributed\nprint(torch.cuda.memory_reserved() < 1 << 30, kept.sum().item())")
    assert "[0] True 0.0" in outcome.stdout
