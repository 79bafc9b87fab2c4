"""State of trainings on NCCL ranks that share a device: protection, resize, checkpoints, hosts, and the pages' code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.agent.agents import Agents, cluster_on_hosts
from tests.conftest import wait_until
from tests.faults.protected import RANKS, Training
from tests.faults.test_resize import SAMPLES, Epoch
from tests.gpu.ranks import NCCL_OVER_SOCKETS, ON_CUDA, nccl_cluster
from tests.test_pages import cells

ROOT = Path(__file__).parents[2]

pytestmark = [*ON_CUDA, pytest.mark.timeout(120)]


@pytest.mark.parametrize(("layout", "moment"), [("ddp", "backward"), ("fsdp", "optimizer"), ("fsdp_tp", "forward")])
def test_a_killed_rank_comes_back_from_the_snapshots_with_the_same_losses(layout, moment):
    with nccl_cluster(RANKS) as cluster:
        training = Training(cluster, layout, steps=10)
        training.kill(1, moment, after=3)
        assert "rank 1 was healed with the state of rank" in str(training.heal())
        training.check(4)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_training_goes_on_with_another_number_of_ranks(layout, tmp_path):
    """Check it, and with it that a checkpoint has the same state and is loaded by another number of ranks."""
    with nccl_cluster(2) as cluster:
        epoch = Epoch(cluster, layout, tmp_path)
        for n in (3, 2):
            epoch.train(4)
            assert f" to {n} rank" in epoch.resize(n)
        epoch.train(1000)
        assert sorted(epoch.seen) == list(range(SAMPLES))


def test_ranks_of_two_hosts_use_the_device_of_their_host(tmp_path, monkeypatch):
    start = Agents.start

    def start_as_another_host(agents: Agents, *options: str, **more: Any) -> object:
        with monkeypatch.context() as patch:  # the notebook's own would go to all hosts
            patch.setenv("NCCL_HOSTID", f"host-{len(agents.processes)}")
            return start(agents, *options, **more)

    monkeypatch.setattr(Agents, "start", start_as_another_host)
    for name, value in NCCL_OVER_SOCKETS.items():
        monkeypatch.setenv(name, value)
    reduce = "t = torch.full((4,), rank + 1.0, device=device)\ndist.all_reduce(t)\ntotal = t[0].item()"
    with cluster_on_hosts(tmp_path, monkeypatch, 2, [1, 1]) as (cluster, _):
        assert {status.device for status in cluster.status()} == {"cuda:0"}
        assert cluster.backend == "cpu:gloo,cuda:nccl"
        cluster.run(f"kept = torch.arange(3, device=device)\n{reduce}")
        assert cluster.pull("total") == [3.0, 3.0]
        psutil.Process(cluster.status()[1].pid).kill()
        wait_until(lambda: cluster.status()[1].state == "dead", timeout=30, what="the death of rank 1")
        assert "rank 1 was healed with the state of rank 0" in str(cluster.heal())
        cluster.run(f"{reduce}\nwhere = str(kept.device), kept.tolist()")
        assert cluster.pull("total") == [3.0, 3.0]
        assert cluster.pull("where") == [("cuda:0", [0, 1, 2])] * 2


# Their ranks are the two of the kernel. The outputs are not compared: they name the devices.
@pytest.mark.parametrize(
    "page",
    [
        "howto/check-numbers.md",
        "howto/compare-layouts.md",
        "howto/find-a-nan.md",
        "howto/live-views.md",
        "tutorials/checkpoints.md",
        "tutorials/dead-ranks.md",
        "tutorials/fsdp2.md",
        "tutorials/tensor-parallel.md",
        "tutorials/train-on-all-devices.md",
    ],
)
def test_the_code_of_a_page_works_on_a_device(nccl, page, tmp_path):
    nccl.ok(f"%distributed stop\nimport os\nos.chdir({str(tmp_path)!r})")
    todo, failures = cells(page), []
    if not any(cell.code.startswith("%load_ext") for cell in todo):
        nccl.ok("%distributed start -n 2")
    for cell in todo:
        outcome = nccl.run(cell.code, timeout=60)
        if (outcome.status == "error" or "UsageError" in outcome.text) != cell.raises:
            failures.append(f"line {cell.line}:\n{cell.code}\n{outcome.traceback or outcome.text}")
    nccl.run("%distributed stop")
    nccl.ok("%reset -f\nimport os\nos.chdir('/')\n%distributed start -n 2")
    assert not failures, "\n".join(failures)


def test_the_numbers_example_works_on_a_device(nccl, tmp_path):
    notebook = json.loads((ROOT / "examples" / "numbers.ipynb").read_text())
    nccl.ok(f"%distributed stop\nimport os\nos.chdir({str(tmp_path)!r})")
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            nccl.ok("".join(cell["source"]), timeout=60)
    nccl.ok("%reset -f\nimport os\nos.chdir('/')\n%distributed start -n 2")
