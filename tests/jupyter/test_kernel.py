"""The kernel: what is there from the start, and what it tells a front end that looks around."""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.conftest import Notebook, running_kernel
from tests.jupyter.conftest import spec_folder

pytestmark = pytest.mark.processes


def started(name: str, **env: str) -> contextlib.AbstractContextManager[Notebook]:
    """Run the kernel of a kernelspec."""
    return running_kernel(load="", kernel_name=name, env=env)


@pytest.fixture(scope="module")
def kernel(install) -> Iterator[Notebook]:
    assert install("-n", "2").returncode == 0
    with started("rankbook-2") as notebook:
        yield notebook


# The kernelspec ------------------------------------------------------------------------------------------------------


def test_specs_stand_side_by_side_and_nobody_elses_is_overwritten(install):
    assert install().returncode == install("-n", "3", "--name", "three", "--display-name", "Three").returncode == 0
    stock, three = (json.loads((spec_folder(name) / "kernel.json").read_text()) for name in ("rankbook", "three"))
    assert (stock["display_name"], stock["env"]) == ("Python 3 (Rankbook)", {})
    assert (three["display_name"], three["env"]) == ("Three", {"RANKBOOK_RANKS": "3"})
    assert {each.name for each in spec_folder("three").iterdir()} >= {
        "logo-32x32.png",
        "logo-64x64.png",
        "logo-svg.svg",
    }
    refused = install("--name", "python3")
    assert refused.returncode == 1 and "another kernel's name" in refused.stderr and "--name" in refused.stderr
    assert "no number of ranks" in install("-n", "0").stderr
    assert "a kernel name" in install("--name", "two words").stderr.lower() or install("--name", "a b").returncode == 1


# From the start ------------------------------------------------------------------------------------------------------


def test_it_answers_before_the_ranks_are_there_and_the_first_cell_waits_for_them(kernel):
    assert kernel.ok("%distributed status").stdout.startswith("the ranks are starting"), "the kernel waited for them"
    outcome = kernel.ok("value = rank * 2\nprint('on', rank, world_size)\nvalue")
    assert outcome.stdout == "[0] on 0 2\n[1] on 1 2\n", "and nothing else is said"
    results = [each["content"] for each in outcome.messages if each["msg_type"] == "execute_result"]
    assert [(each["data"]["text/plain"], each["execution_count"]) for each in results] == [("[0] 0", 2), ("[1] 2", 2)]
    assert all(each["metadata"] == {} for each in results)
    assert kernel.ok("%%local\n'rank' in globals()").displays == [{"text/plain": "False"}]


def test_history_holds_the_cells_as_they_were_written(kernel):
    outcome = kernel.ok("first = 1\nfirst")
    assert kernel.ok(f"%%local\nIn[{outcome.count}]").displays == [{"text/plain": "'first = 1\\nfirst'"}]
    assert kernel.ok(f"%history {outcome.count}").stdout == "first = 1\nfirst\n"
    assert kernel.ok(f"%history -t {outcome.count}").stdout == "first = 1\nfirst\n"


def test_who_and_whos_tell_of_the_ranks(kernel):
    kernel.ok("%reset -f\nonly_here = rank")
    assert "only_here" in kernel.ok("%who").stdout
    told = kernel.ok("%whos").stdout
    assert "only_here" in told and "[0] " in told and "int" in told
    assert "world_size" not in told, "that was there before any cell"


def test_a_cell_is_complete_when_it_is_as_python(kernel):
    def status(code: str) -> str:
        kernel.client.is_complete(code)
        return str(kernel.client.get_shell_msg(timeout=10)["content"]["status"])

    assert [status(each) for each in ("x = 1", "for x in y:", "x = = 1", "f(\n")] == [
        "complete",
        "incomplete",
        "invalid",
        "incomplete",
    ]


def test_what_looks_after_the_ranks_says_that_it_is_in_the_wrong_place_on_one(kernel):
    for code in ("rankbook.dashboard()", "rankbook.start(2)", "rankbook.current()", "rankbook.attach()"):
        failed = kernel.run(f"import rankbook\n{code}")
        assert failed.status == "error" and "this runs on rank 0" in failed.stderr
        assert "%%local as the cell's first line" in failed.stderr
    assert kernel.ok("%%local\nimport rankbook\nrankbook.current().world_size").displays == [{"text/plain": "2"}]


def test_auto_off_turns_it_into_a_stock_kernel_and_back(kernel):
    kernel.ok("%distributed auto off")
    try:
        assert kernel.ok("'rank' in globals()").displays == [{"text/plain": "False"}]
        assert kernel.ok("In[-2:]").displays[0]["text/plain"].count("run_cell_magic") == 0
        assert kernel.ok("%%distributed\nrank").text == "[0] 0\n[1] 1\n"
    finally:
        kernel.ok("%distributed auto on")
    assert kernel.ok("print(rank)").stdout == "[0] 0\n[1] 1\n"


def test_what_a_front_end_asks_for_itself_stays_in_the_kernels_process(kernel):
    """VS Code's first messages: kernel_info, silent probes, comm_info, completions, and only then a person's cell."""
    client = kernel.client

    def reply(message: str) -> dict:
        while True:
            received = client.get_shell_msg(timeout=20)
            if received["parent_header"]["msg_id"] == message:
                return received["content"]

    assert reply(client.kernel_info())["implementation"] == "rankbook"
    assert reply(client.comm_info())["status"] == "ok"
    probe = client.execute("import sys as _probe\nprint('here', 'rank' in globals())", store_history=False)
    outcome = kernel.finish(probe)
    assert outcome.stdout == "here False\n"
    silent = client.execute("_seen = 'silently'", silent=True, user_expressions={"seen": "_seen"})
    assert reply(silent)["user_expressions"]["seen"]["data"]["text/plain"] == "'silently'"
    with contextlib.suppress(queue.Empty):
        while True:
            client.get_iopub_msg(timeout=0.2)
    assert reply(client.complete("pri", 3))["matches"] == ["print"]
    assert kernel.ok("print(rank)").stdout == "[0] 0\n[1] 1\n"
    assert kernel.ok("%%local\n_seen").displays == [{"text/plain": "'silently'"}]


# Other beginnings ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_that_cannot_start_are_told_of_in_the_first_cell_that_wants_them(install):
    assert install().returncode == 0
    with started("rankbook", RANKBOOK_RANKS="many") as kernel:
        failed = kernel.run("x = 1")
        assert (failed.status, failed.stderr.strip()) == (
            "error",
            "UsageError: RANKBOOK_RANKS=many is no number of ranks",
        )
        assert kernel.ok("%%local\n1").displays == [{"text/plain": "1"}], "the kernel is well"
        kernel.ok("%%local\nimport os\nos.environ['RANKBOOK_RANKS'] = '1'")
        assert kernel.ok("x = 1\nprint(world_size)").text.endswith(" 1\n"), "the next cell is another try"


@pytest.mark.full
def test_a_start_with_another_number_takes_the_place_of_ranks_that_nobody_has_used(install):
    assert install("-n", "2").returncode == 0
    with started("rankbook-2") as kernel:
        assert "3 ranks are ready" in kernel.ok("%distributed start -n 3").stdout
        assert kernel.ok("print(world_size)").stdout == "[0-2] 3\n"
        assert "are running already" in kernel.run("%distributed start -n 2").stderr, "these are used"


@pytest.mark.full
def test_an_interrupt_of_a_cell_that_waits_for_the_ranks_leaves_them_on_their_way(install):
    assert install("-n", "2").returncode == 0
    with started("rankbook-2") as kernel:
        sent = kernel.send("%%local\nprint('waits', flush=True)\n%distributed stacks")
        while kernel.client.get_iopub_msg(timeout=20)["msg_type"] != "stream":
            pass
        kernel.interrupt()
        assert kernel.finish(sent, timeout=20).ename == "KeyboardInterrupt"
        assert kernel.ok("print(rank)").stdout == "[0] 0\n[1] 1\n"


@pytest.mark.full
def test_ranks_that_an_earlier_kernel_has_kept_are_attached_in_the_place_of_new_ones(install):
    assert install("-n", "2").returncode == 0
    folder = tempfile.mkdtemp(prefix="rb-", dir="/tmp")  # pytest's are too long for a socket
    try:
        with started("rankbook-2", RANKBOOK_RUNTIME_DIR=folder) as kernel:
            kernel.ok("%distributed start --keep 60")
            kernel.ok("value = rank * 3")
            kernel.manager.restart_kernel(now=True)
            kernel.client.wait_for_ready(timeout=60)
            kernel.ok("%distributed attach")
            assert kernel.ok("print(value)").stdout == "[0] 0\n[1] 3\n"
            kernel.ok("%distributed stop")
    finally:
        shutil.rmtree(folder)


def test_a_kernel_that_ends_while_its_ranks_start_leaves_nothing(install):
    assert install("-n", "2").returncode == 0
    with started("rankbook-2"):
        pass
