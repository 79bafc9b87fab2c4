"""`notebook_launcher` and `debug_launcher`, from a notebook."""

from __future__ import annotations

import inspect
import re

import pytest

import rankbook
from rankbook.magics.launchers import debug_launcher, notebook_launcher
from tests.conftest import wait_until

pytestmark = pytest.mark.processes

SETUP = """
import rankbook
from rankbook import notebook_launcher
offset = 10
def add(value, twice=False):
    import torch, torch.distributed as dist
    total = torch.tensor(float(value + offset))
    dist.all_reduce(total)
    print("total", total.item())
    return total.item(), dist.get_rank()
"""


@pytest.fixture
def ranks(notebook):
    notebook.ok("%distributed start -n 2")
    notebook.ok(SETUP)
    return notebook


def test_the_signatures_are_accelerates():
    assert list(inspect.signature(notebook_launcher).parameters) == [
        "function", "args", "num_processes", "mixed_precision", "use_port", "master_addr", "node_rank", "num_nodes",
        "rdzv_backend", "rdzv_endpoint", "rdzv_conf", "rdzv_id", "max_restarts", "monitor_interval",
        "log_line_prefix_template",
    ]  # fmt: skip
    assert list(inspect.signature(debug_launcher).parameters) == ["function", "args", "num_processes"]
    assert rankbook.notebook_launcher is notebook_launcher


def test_every_ranks_result_comes_back_and_what_they_print_is_shown(ranks):
    called = ranks.ok("notebook_launcher(add, (1,), num_processes=2)")
    assert "[(22.0, 0), (22.0, 1)]" in called.text
    assert "[0-1] total 22.0" in called.stdout


def test_closures_lambdas_and_classes_of_cells_travel(ranks):
    ranks.ok("class Net:\n    def __init__(self, n): self.n = n\nnet, k = Net(3), 4")
    assert "[7, 7]" in ranks.ok("notebook_launcher(lambda more: net.n + more, (k,))").text
    assert "[3, 3]" in ranks.ok("[each.n for each in notebook_launcher(lambda: net)]").text


def test_the_ranks_and_their_variables_stay_through_a_hundred_calls(ranks):
    ranks.ok("%%distributed\nkept = rank * 10\nimport os\npid = os.getpid()")
    before = ranks.ok("rankbook.current().pull('pid')").text
    assert (
        "[0, 1]"
        in ranks.ok(
            "for _ in range(100): found = notebook_launcher(lambda: int(__import__('os').environ['RANK']))\nfound"
        ).text
    )
    assert ranks.ok("rankbook.current().pull('pid')").text == before
    assert "[0, 10]" in ranks.ok("rankbook.current().pull('kept')").text


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.full)])
def test_loaders_of_classes_from_cells_have_workers_of_any_start_method(ranks, method):
    ranks.ok(
        "import torch\nclass Squares(torch.utils.data.Dataset):\n    def __len__(self): return 6\n"
        "    def __getitem__(self, index): return index * index\n"
        "def read(method):\n    from torch.utils.data import DataLoader\n"
        "    loader = DataLoader(Squares(), num_workers=1, multiprocessing_context=method)\n"
        "    return sum(int(batch) for batch in loader)"
    )
    assert "[55, 55]" in ranks.ok(f"notebook_launcher(read, ('{method}',))", timeout=60).text


def test_an_error_names_the_rank_that_caused_it_and_its_line_and_the_next_call_works(ranks):
    ranks.ok(
        "def fails():\n    import torch.distributed as dist\n    if dist.get_rank() == 1:\n"
        "        raise ValueError('of rank one')\n    dist.barrier()"
    )
    failed = ranks.run("notebook_launcher(fails)")
    assert failed.status == "error"
    assert failed.ename == "ValueError"
    assert "rank 1: ValueError: of rank one" in failed.evalue
    told = re.sub(r"\x1b\[[0-9;]*m", "", failed.traceback)
    assert "raise ValueError('of rank one')" in told
    assert "CollectiveAborted: rank 1 raised ValueError" in told
    assert "rankbook/coordinator" not in told
    caught = ranks.ok("try:\n    notebook_launcher(fails)\nexcept ValueError as error:\n    print('caught', error)")
    assert "caught rank 1: ValueError: of rank one" in caught.stdout
    assert "[(22.0, 0), (22.0, 1)]" in ranks.ok("notebook_launcher(add, (1,))").text


def test_an_interrupt_ends_the_call_and_leaves_the_ranks(ranks):
    ranks.ok("def waits():\n    import time\n    print('begun')\n    time.sleep(600)")
    message = ranks.send("notebook_launcher(waits)")

    pressed = []

    def press(outcome):
        if "begun" in outcome.text and not pressed:
            pressed.append(True)
            ranks.interrupt()

    stopped = ranks.finish(message, seen=press, timeout=20)
    assert (stopped.status, stopped.ename) == ("error", "KeyboardInterrupt")
    assert "[(22.0, 0), (22.0, 1)]" in ranks.ok("notebook_launcher(add, (1,))").text


def test_settings_of_a_call_are_its_own(ranks):
    ranks.ok(
        "%%distributed\nfrom rankbook import AcceleratorState, GradientState\n"
        "AcceleratorState(mixed_precision='bf16'); GradientState().sync_gradients = False"
    )
    look = "lambda: (rankbook.AcceleratorState().mixed_precision, rankbook.GradientState().sync_gradients)"
    assert "[('fp16', True), ('fp16', True)]" in ranks.ok(f"notebook_launcher({look}, mixed_precision='fp16')").text
    assert "[('no', True), ('no', True)]" in ranks.ok(f"notebook_launcher({look})").text
    after = ranks.ok("%%distributed\nAcceleratorState().mixed_precision, GradientState().sync_gradients")
    assert "('bf16', False)" in after.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("num_nodes=2", "num_nodes=2 cannot be honoured: one machine is all there is so far"),
        ("max_restarts=3", "max_restarts=3 cannot be honoured"),
        ("use_port='1234'", "use_port='1234' cannot be honoured"),
        ("num_processes=3", "num_processes=3, but 2 ranks are running"),
        ("num_processes='two'", "num_processes='two' is no number of ranks"),
        ("mixed_precision='fp8'", "mixed_precision='fp8' is not there; use one of no, fp16, bf16"),
        ("args=5", "args=5 is no tuple; for one argument write args=(5,)"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_an_error_that_says_why(ranks, options, words):
    refused = ranks.run(f"notebook_launcher(add, {options})")
    assert refused.ename == "BadRequest"
    assert words in refused.evalue


def test_on_a_rank_it_says_where_it_belongs(ranks):
    refused = ranks.run("%%distributed\nimport rankbook\nrankbook.notebook_launcher(print)")
    assert refused.status == "error"
    assert "this process is a rank already" in refused.text


def test_without_ranks_it_starts_them_and_they_stay(fresh_notebook):
    called = fresh_notebook.ok("import rankbook, os\nrankbook.notebook_launcher(os.getpid, num_processes=3)")
    pids = eval(called.text)
    assert len(set(pids)) == 3
    assert str(pids) in fresh_notebook.ok("rankbook.notebook_launcher(os.getpid)").text


@pytest.mark.full
def test_the_debug_launcher_has_ranks_of_its_own_on_the_cpu(ranks):
    before = set(ranks.processes())
    called = ranks.ok(
        "import os\nrankbook.debug_launcher(lambda: (str(rankbook.PartialState().device), os.getpid()), (), 3)"
    )
    found = eval(called.text)
    assert [device for device, _ in found] == ["cpu"] * 3
    assert not {pid for _, pid in found} & before
    # A forkserver stays warm for the next such call.
    wait_until(lambda: len(set(ranks.processes()) - before) <= 1, timeout=10, what="the end of its ranks")
