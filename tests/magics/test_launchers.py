"""`notebook_launcher` and `debug_launcher`, from a notebook."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from types import SimpleNamespace

import pytest

import rankbook
from rankbook.errors import InvalidArgument
from rankbook.magics import launchers
from rankbook.magics.launchers import debug_launcher, notebook_launcher
from rankbook.protocol.queries import Completion
from rankbook.runtime.launch_environment import read_text
from rankbook.runtime.launched_function import run_launched
from tests.conftest import shows_frame, wait_until
from tests.magics.test_comm_bridge import WIDGET, comm_messages, move

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


@pytest.mark.slow
def test_widgets_of_a_function_are_live_before_any_cell_has_run_on_the_ranks(ranks):
    ranks.ok("%distributed stop\n%distributed start -n 1")
    ranks.ok(
        "def show():\n    import builtins, ipywidgets\n    from IPython.display import display\n"
        "    builtins.slider = ipywidgets.IntSlider(value=3, max=50)\n    display(builtins.slider)\n"
        "def wait_for(value):\n    import builtins, time\n    until = time.monotonic() + 20\n"
        "    while builtins.slider.value != value and time.monotonic() < until: time.sleep(0.01)\n"
        "    return builtins.slider.value"
    )
    shown = ranks.ok("notebook_launcher(show)")
    (name,) = [display[WIDGET]["model_id"] for display in shown.displays if WIDGET in display]
    assert name in [message["content"]["comm_id"] for message in comm_messages(shown, "open")]
    move(ranks, name, 41)
    assert "[41]" in ranks.ok("notebook_launcher(wait_for, (41,))", timeout=30).text
    shown = ranks.ok("rankbook.debug_launcher(show, (), 1)", timeout=60)
    (name,) = [display[WIDGET]["model_id"] for display in shown.displays if WIDGET in display]
    assert name in [message["content"]["comm_id"] for message in comm_messages(shown, "open")]
    ranks.ok("%distributed stop")


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


@pytest.mark.parametrize(
    "method",
    [
        "fork",
        pytest.param("spawn", marks=pytest.mark.slow),
        pytest.param("forkserver", marks=pytest.mark.full),
    ],
)
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
    reported = re.sub(r"\x1b\[[0-9;]*m", "", failed.traceback)
    assert "raise ValueError('of rank one')" in reported
    assert "CollectiveAborted: rank 1 raised ValueError" in reported
    assert "rankbook/coordinator" not in reported
    caught = ranks.ok("try:\n    notebook_launcher(fails)\nexcept ValueError as error:\n    print('caught', error)")
    assert "caught rank 1: ValueError: of rank one" in caught.stdout
    assert "[(22.0, 0), (22.0, 1)]" in ranks.ok("notebook_launcher(add, (1,))").text


def test_an_error_looks_like_that_of_a_cell(ranks):
    code = "import time\ndef fails():\n    return 1 / 0\ndef waits(seconds):\n    print('begun')\n    time.sleep(60)"
    defined = ranks.ok(code)
    failed = ranks.run("notebook_launcher(fails)")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", failed.traceback).splitlines()
    assert lines[0] == "ranks 0-1: ZeroDivisionError: division by zero"
    assert shows_frame("\n".join(lines), defined.count, 3, "fails()")
    assert not [line for line in lines if "rankbook/" in line or "hidden" in line or "notebook_launcher" in line]
    pressed = []

    def press(outcome):
        if "begun" in outcome.text and not pressed:
            pressed.append(ranks.interrupt())

    stopped = ranks.finish(ranks.send("notebook_launcher(waits, (1,))"), seen=press, timeout=20)
    assert f"KeyboardInterrupt at line 6 of cell {defined.count}" in stopped.traceback


def test_a_call_that_loses_a_rank_is_repeated_with_a_new_one(ranks):
    ranks.ok("%%distributed\nkept = 7")
    ranks.ok(
        "def train():\n    import os, signal, torch, torch.distributed as dist\n"
        "    count = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "    if dist.get_rank() == 1 and count < 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    total = torch.ones(1)\n    dist.all_reduce(total)\n"
        "    return total.item(), count, os.environ['TORCHELASTIC_MAX_RESTARTS']"
    )
    called = ranks.ok("notebook_launcher(train, max_restarts=3)")
    assert "[(2.0, 2, '3'), (2.0, 2, '3')]" in called.text
    assert "restart 1 of 3: rank 1 was killed by SIGKILL" in called.stderr and "restart 2 of 3" in called.stderr
    assert "7, 7" in ranks.ok("rankbook.current().pull('kept')").text


def test_a_call_that_fails_is_repeated_as_often_as_allowed(ranks):
    ranks.ok(
        "def train():\n    import os, torch.distributed as dist\n"
        "    if dist.get_rank() == 0: print('call', os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "    raise ValueError('again')"
    )
    failed = ranks.run("notebook_launcher(train, max_restarts=1)")
    assert failed.ename == "ValueError" and "again" in failed.evalue
    assert "call 0" in failed.stdout and "call 1" in failed.stdout and "call 2" not in failed.stdout
    ranks.ok("notebook_launcher(add, (1,))")


@pytest.mark.parametrize("option", ["num_nodes=0", "mixed_precision='int3'", "num_processes='two'", "num_processes=7"])
def test_a_wrong_option_is_one_line(ranks, option):
    failed = ranks.run(f"notebook_launcher(add, (1,), {option})")
    assert failed.ename == "InvalidArgument"
    assert failed.traceback.startswith("InvalidArgument: ") and "\n" not in failed.traceback


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


def test_settings_apply_to_one_call_only(ranks):
    ranks.ok(
        "%%distributed\nfrom rankbook import AcceleratorState, GradientState\n"
        "AcceleratorState(mixed_precision='bf16'); GradientState().sync_gradients = False"
    )
    look = "lambda: (rankbook.AcceleratorState().mixed_precision, rankbook.GradientState().sync_gradients)"
    ranks.ok("%%distributed\nAcceleratorState(mixed_precision='no')")
    ranks.ok("import os\nos.environ['RANKBOOK_MIXED_PRECISION'] = 'no'")
    assert "[('bf16', True), ('bf16', True)]" in ranks.ok(f"notebook_launcher({look}, mixed_precision='bf16')").text
    ranks.ok("del os.environ['RANKBOOK_MIXED_PRECISION']")
    ranks.ok("%%distributed\nAcceleratorState(mixed_precision='bf16')")
    assert "[('no', True), ('no', True)]" in ranks.ok(f"notebook_launcher({look})").text
    after = ranks.ok("%%distributed\nAcceleratorState().mixed_precision, GradientState().sync_gradients")
    assert "('bf16', False)" in after.text


def test_a_call_has_the_variables_that_the_notebook_has_set_since_and_the_ranks_keep_theirs(ranks):
    ranks.ok("%%distributed\nimport os\nos.environ['OF_THE_RANKS'] = 'theirs'")
    ranks.ok(
        "import os\nos.environ['SET_SINCE'] = 'new'\nos.environ['MASTER_PORT'] = '1'\nhome = os.environ.pop('HOME')\n"
        "def look():\n    names = 'SET_SINCE', 'OF_THE_RANKS', 'HOME'\n"
        "    return [os.environ.get(name) for name in names], os.environ['MASTER_PORT'] != '1'"
    )
    expected = "(['new', 'theirs', None], True)"
    assert f"[{expected}, {expected}]" in ranks.ok("notebook_launcher(look)").text
    after = ranks.ok("%%distributed\n'SET_SINCE' in os.environ, 'HOME' in os.environ").text
    assert "(False, True)" in after
    ranks.ok("os.environ['HOME'] = home\ndel os.environ['SET_SINCE'], os.environ['MASTER_PORT']")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("num_nodes=2", "num_nodes needs num_processes, the number of ranks of each node"),
        ("num_nodes=2, num_processes=1, use_port='a'", "use_port must be a number, got 'a'"),
        ("num_nodes='2'", "num_nodes must be an integer of at least 1, got '2'"),
        ("num_nodes=2, node_rank=1", "this notebook runs the ranks of all nodes"),
        ("max_restarts=-1", "max_restarts must be an integer of at least 0, got -1"),
        ("rdzv_backend='c10d'", "rdzv_backend='c10d' is not supported: the ranks meet at the notebook"),
        ("use_port='1234'", "use_port='1234' is not supported"),
        ("num_processes='two'", "num_processes must be an integer, got 'two'"),
        ("mixed_precision='fp16'", 'the ranks run on the CPU; use "bf16" or "no"'),
        ("mixed_precision='fp8'", "unknown mixed_precision 'fp8'; choose from no, fp16, bf16"),
        ("args=5", "args must be a tuple, got 5; for one argument write args=(5,)"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_an_error_that_says_why(ranks, options, words):
    refused = ranks.run(f"notebook_launcher(add, {options})")
    assert refused.ename == "InvalidArgument"
    assert words in refused.evalue


def test_ranks_that_hold_nothing_are_replaced_by_as_many_as_are_wanted(ranks):
    ranks.ok("%distributed restart")  # without the names of earlier tests
    ranks.ok("notebook_launcher(add, (1,))")
    assert "[(33.0, 0), (33.0, 1), (33.0, 2)]" in ranks.ok("notebook_launcher(add, (1,), num_processes=3)").text
    ranks.ok("%%distributed\ndef kept(): pass")
    refused = ranks.run("notebook_launcher(add, (1,), num_processes=2)")
    assert "num_processes=2, but 3 ranks are running" in refused.evalue
    ranks.ok("%%distributed\ndel kept\nvalue = 1")
    assert ranks.run("notebook_launcher(add, (1,), num_processes=2)").ename == "InvalidArgument"
    assert "[(33.0, 0)" in ranks.ok("notebook_launcher(add, (1,), num_processes=3)").text
    ranks.ok("%distributed stop")


def test_a_rank_that_answers_slowly_does_not_seem_to_hold_nothing():
    class SlowCluster:
        world_size = 1

        def status(self):
            return [SimpleNamespace(state="idle")]

        def variables(self):
            return {0: ()}

        def complete(self, _text, _cursor, *, ranks, variables, timeout=0.09):
            return 0, (Completion("kept", "function"),) if variables and ranks == 0 and timeout > 1 else ()

    assert not launchers._hold_nothing(SlowCluster())


@pytest.mark.parametrize(("launcher", "replaced"), [("slurm", []), ("env", ["stopped"])])
def test_ranks_on_the_hosts_of_a_scheduler_are_not_given_away(monkeypatch, launcher, replaced):
    stopped: list[str] = []
    running = SimpleNamespace(
        world_size=16,
        hosts=lambda: ["node1"],
        stop=lambda: stopped.append("stopped"),
        launcher=launcher,
    )
    monkeypatch.setattr(launchers.default_cluster, "default_or_none", lambda: running)
    monkeypatch.setattr(launchers.default_cluster, "start", lambda *_, **__: "new ranks")
    monkeypatch.setattr(launchers, "_hold_nothing", lambda _: True)
    with pytest.raises(InvalidArgument, match="num_processes=8, but 16 ranks are running on other hosts: omit it to"):
        launchers._ranks_of_one_host(8)
    assert stopped == []
    assert launchers._ranks_of_nodes(2, 8, "127.0.0.1", "29500") is launchers._ranks_of_one_host(None) is running
    if replaced:  # the call itself says how to start agents again
        assert launchers._ranks_of_nodes(2, 4, "127.0.0.1", "29500") == "new ranks"
    else:
        with pytest.raises(InvalidArgument, match="num_processes=4 are 8 ranks, but 16 ranks are running on other"):
            launchers._ranks_of_nodes(2, 4, "127.0.0.1", "29500")
    assert stopped == replaced


def test_the_precision_of_a_call_is_its_argument_and_not_the_notebooks_default(monkeypatch):
    def call(_cluster, function, args, environment):
        return [run_launched(function, args, environment)]

    cluster = SimpleNamespace(status=list, changed_variables=dict)
    monkeypatch.setattr(launchers, "_ranks_of_one_host", lambda _: cluster)
    monkeypatch.setattr(launchers, "Cluster", lambda *_, **__: contextlib.nullcontext(cluster))
    monkeypatch.setattr(launchers, "_call", call)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANKBOOK_MIXED_PRECISION", "fp16")
    assert notebook_launcher(_precision_by_default, mixed_precision="bf16") == ["bf16"]
    assert notebook_launcher(_precision_by_default) == debug_launcher(_precision_by_default) == ["no"]
    assert os.environ["RANKBOOK_MIXED_PRECISION"] == "fp16"


def _precision_by_default() -> str | None:
    return read_text("RANKBOOK_MIXED_PRECISION", "ACCELERATE_MIXED_PRECISION")  # as `AcceleratorState` does


def test_launcher_on_a_rank_is_an_error_with_the_remedy(ranks):
    refused = ranks.run("%%distributed\nimport rankbook\nrankbook.notebook_launcher(print)")
    assert refused.status == "error"
    assert "this process is already a rank" in refused.text


def test_launcher_starts_ranks_that_stay(fresh_notebook):
    called = fresh_notebook.ok("import rankbook, os\nrankbook.notebook_launcher(os.getpid, num_processes=3)")
    pids = eval(called.text)
    assert len(set(pids)) == 3
    assert str(pids) in fresh_notebook.ok("rankbook.notebook_launcher(os.getpid)").text


@pytest.mark.slow
def test_launched_functions_that_are_to_use_the_cpu_see_no_device(ranks):
    seen = "lambda: (os.environ.get('CUDA_VISIBLE_DEVICES'), str(rankbook.PartialState().device))"
    ranks.ok("import os\n%distributed stop\nos.environ['ACCELERATE_USE_CPU'] = '1'")
    try:
        assert (
            ranks.ok(f"notebook_launcher({seen}, num_processes=2)", timeout=60).text == "[('', 'cpu'), ('', 'cpu')]\n"
        )
    finally:
        ranks.ok("del os.environ['ACCELERATE_USE_CPU']")
    assert ranks.ok(f"rankbook.debug_launcher({seen}, (), 1)", timeout=60).text == "[('', 'cpu')]\n"


@pytest.mark.full
def test_debug_launcher_starts_separate_ranks_on_the_cpu(ranks):
    before = set(ranks.processes())
    called = ranks.ok(
        "import os\nrankbook.debug_launcher(lambda: (str(rankbook.PartialState().device), os.getpid()), (), 3)"
    )
    processes = eval(called.text)
    assert [device for device, _ in processes] == ["cpu"] * 3
    assert not {pid for _, pid in processes} & before
    # A forkserver stays warm for the next such call.
    wait_until(lambda: len(set(ranks.processes()) - before) <= 1, timeout=10, what="the end of its ranks")
