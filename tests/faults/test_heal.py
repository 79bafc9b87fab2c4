"""Test the replacement of a dead rank with the state of a healthy one, through a real kernel."""

from __future__ import annotations

import os
import signal

import pytest

from tests.conftest import Kernel, Notebook, wait_until

pytestmark = pytest.mark.processes

SETUP = """%%distributed
import collections
import numpy as np
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.layer(x) * scale

scale = 0.5
torch.manual_seed(0)
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
mesh = init_device_mesh("cpu", (3,))
pair = dist.new_group([0, 2])
sharded = fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
numbers = (i for i in range(3))
table = {"x": np.arange(3)}
linked = [table]

def step():
    loss = model(torch.randn(8, 8)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def factorial(n):
    return 1 if n < 2 else n * factorial(n - 1)

def counter():
    seen = collections.Counter()
    def count(x):
        seen[x] += 1
        return count if x > 1 else seen[x]
    return count

count = counter()
count(1)
step()
"""

EQUAL = """%%distributed
step()
def same(tensor):
    found = [torch.zeros_like(tensor) for _ in range(world_size)]
    dist.all_gather(found, tensor.detach().contiguous())
    return all(torch.equal(tensor, each) for each in found)
first = next(model.parameters())
print("model", same(first), "optimizer", same(optimizer.state[first]["exp_avg"]))
print("steps", int(optimizer.state[first]["step"]), "tied", optimizer.param_groups[0]["params"][0] is first)
print(factorial(5), count(1), np.__name__, table["x"].tolist(), linked[0] is table, type(model.module).__name__)
total = torch.ones(1)
dist.all_reduce(total, group=mesh.get_group())
if rank != 1:
    dist.all_reduce(total, group=pair)
print("sums", total.item())
"""

SAVED = """%%distributed
import rankbook.checkpoint
rankbook.checkpoint.save({{"weight": sharded.weight}}, {folder!r}, step=7)"""


def kill(notebook: Notebook, rank: int) -> None:
    row = next(line for line in notebook.ok("%distributed status").text.splitlines() if line.startswith(f"{rank} "))
    os.kill(int(row.split()[3]), signal.SIGKILL)
    wait_until(
        lambda: "dead" in notebook.ok("%distributed status").text, timeout=20, what=f"rank {rank} is told to be dead"
    )


@pytest.fixture(scope="module")
def three(kernel: Kernel) -> Notebook:
    notebook = kernel(ranks=3)
    notebook.ok(SETUP)
    return notebook


@pytest.mark.parametrize("victim", [2, 0, 1])
def test_heal_restores_a_dead_rank_with_the_state_of_a_live_rank(three, victim, tmp_path):
    three.ok(SETUP)
    if victim == 0:
        three.ok(SAVED.format(folder=str(tmp_path)))
    kill(three, victim)
    healed = three.ok("%distributed heal")
    assert f"rank {victim} was healed with the state of rank {0 if victim else 1}" in healed.stdout
    saved = "" if victim else f"; the last checkpoint is {tmp_path}/step-7"
    assert f"sharded: it is sharded over the ranks: the shard of the dead rank is lost{saved}\n" in healed.stdout
    assert "numbers: " in healed.stdout
    assert "generator" in healed.stdout
    if victim == 0:  # its peer was no member of the pair
        three.ok("%%distributed\npair = dist.new_group([0, 2])")
    reported = three.ok(EQUAL, timeout=20).stdout
    assert "[0-2] model True optimizer True" in reported
    assert "tied True" in reported
    assert "120" in reported
    assert "numpy [0, 1, 2] True Net" in reported
    assert "sums 3.0" in reported
    assert "sums 6.0" in reported


SETTINGS = """
import os
def settings():
    of_torch = (torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_grad_enabled(),
                torch.are_deterministic_algorithms_enabled())
    return (*of_torch, os.environ.get("OF_A_CELL"), "PYTHONDONTWRITEBYTECODE" in os.environ,
            os.environ["RANK"] == str(rank))
"""


def test_heal_brings_the_settings_of_torch_and_the_environment_of_the_cells(three):
    three.ok(
        f"""%%distributed{SETTINGS}
torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("high")
torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_grad_enabled(False)
os.environ["OF_A_CELL"] = "7"
kept = os.environ.pop("PYTHONDONTWRITEBYTECODE")"""
    )
    kill(three, 1)
    three.ok("%distributed heal")
    assert (
        "[0-2] (torch.float64, 'high', False, True, '7', False, True)"
        in three.ok("%%distributed\nprint(settings())").stdout
    )
    three.ok(
        """%%distributed
torch.set_default_dtype(torch.float32)
torch.set_float32_matmul_precision("highest")
torch.use_deterministic_algorithms(False)
torch.set_grad_enabled(True)
del os.environ["OF_A_CELL"]
os.environ["PYTHONDONTWRITEBYTECODE"] = kept"""
    )


def test_heal_without_state_leaves_an_empty_rank_and_complete_groups(three):
    three.ok(SETUP)
    kill(three, 2)
    assert "rank 2 was healed with an empty namespace" in three.ok("%distributed heal 2 --empty").stdout
    reported = three.ok(
        "%%distributed\nprint('model' in globals())\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item())"
    )
    assert "[0-1] True" in reported.stdout
    assert "[2] False" in reported.stdout
    assert "3.0" in reported.text
    three.ok(SETUP)


def test_heal_without_dead_ranks_and_of_a_live_rank_is_refused(three):
    assert "no rank is dead" in three.ok("%distributed heal").stdout
    refused = three.run("%distributed heal 1")
    assert refused.status == "error"
    assert "rank 1 is not dead; %distributed restart" in refused.traceback + refused.text


def test_cell_after_a_death_names_restart_and_heal(three):
    kill(three, 1)
    refused = three.run("%%distributed\nstep()")
    assert "%distributed heal restores it" in refused.traceback + refused.text
    refused = three.run("%%distributed --ranks 0,2\ndist.all_reduce(torch.ones(1))")
    assert "rank 1 was killed by SIGKILL" in refused.traceback + refused.text
    assert "so this rank cannot begin all_reduce" in refused.traceback + refused.text
    three.ok("%distributed heal")
    assert "[0-2] model True" in three.ok(EQUAL, timeout=20).stdout


DRAW = """%%distributed
import random
drawn = [torch.rand(1).item(), random.random(), np.random.rand()]
everyone = [None] * world_size
dist.all_gather_object(everyone, drawn)
print("common", [len(set(numbers)) == 1 for numbers in zip(*everyone)], "different", len(set(map(str, everyone))))
"""


@pytest.mark.parametrize(("seed", "drawn"), [("0", "common [True, True, True]"), ("rank", "different 3")])
def test_a_new_rank_draws_the_random_numbers_of_the_others_only_if_they_were_seeded_alike(three, seed, drawn):
    three.ok(f"%%distributed\nimport rankbook\nrankbook.set_seed({seed})")
    assert drawn in three.ok(DRAW).stdout
    kill(three, 1)
    three.ok("%distributed heal")
    assert drawn in three.ok(DRAW).stdout


BAD = """%%distributed --ranks 0,2
class Bad:
    def __reduce__(self):
        return int, ("no number",)
bad = Bad()"""


def test_a_variable_that_cannot_be_opened_is_listed_and_the_others_come_back(three):
    three.ok(BAD)
    kill(three, 1)
    healed = three.ok("%distributed heal").stdout
    assert "rank 1 was healed with the state of rank 0" in healed
    assert "  bad: cannot unpickle the value: ValueError" in healed
    three.ok("%%distributed --ranks 0,2\ndel bad")
    assert "[0-2] model True" in three.ok(EQUAL, timeout=20).stdout


def test_the_status_notes_an_empty_rank(three):
    three.ok("%distributed restart 1")
    row = next(line for line in three.ok("%distributed status").text.splitlines() if line.startswith("1 "))
    assert "its namespace is empty; %distributed heal 1 copies the variables of another rank" in row
    assert "rank 1 was healed with the state of rank 0" in three.ok("%distributed heal 1").stdout
    assert "empty" not in three.ok("%distributed status").text
