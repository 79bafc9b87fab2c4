"""Test the kernel: its state after the start, and its replies to a front end."""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from rankbook.errors import InvalidArgument
from rankbook.jupyter.spec import install as install_spec
from tests.conftest import IS_OUTDATED, Notebook, running_kernel, stacks_of, wait_until
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


def test_kernelspecs_coexist_and_foreign_ones_are_not_overwritten(install):
    assert install().returncode == install("-n", "3", "--name", "three", "--display-name", "Three").returncode == 0
    stock, three = (json.loads((spec_folder(name) / "kernel.json").read_text()) for name in ("rankbook", "three"))
    assert (stock["display_name"], stock["env"]) == ("Python 3 (Rankbook)", {})
    assert (three["display_name"], three["env"]) == ("Three", {"RANKBOOK_RANKS": "3"})
    assert {path.name for path in spec_folder("three").iterdir()} >= {
        "logo-32x32.png",
        "logo-64x64.png",
        "logo-svg.svg",
    }
    refused = install("--name", "python3")
    assert refused.returncode == 1 and "is used by another kernel" in refused.stderr and "--name" in refused.stderr
    assert "ranks must be a positive integer, got 0" in install("-n", "0").stderr
    assert "a kernel name" in install("--name", "two words").stderr.lower() or install("--name", "a b").returncode == 1


@pytest.mark.parametrize("where", ["user", "prefix"])
def test_a_kernel_at_the_destination_is_not_overwritten_if_another_folder_comes_first(tmp_path, monkeypatch, where):
    data = tmp_path / "share" / "jupyter"
    ours, other = tmp_path / "first" / "kernels" / "mine", data / "kernels" / "mine"
    for folder, module in ((ours, "rankbook.jupyter"), (other, "other_kernel")):
        folder.mkdir(parents=True)
        spec = {"argv": ["python", "-m", module], "display_name": module, "language": "python"}
        (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "first"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(data))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    options = {"user": True} if where == "user" else {"prefix": str(tmp_path)}
    with pytest.raises(InvalidArgument, match="is used by another kernel"):
        install_spec(name="Mine", **options)
    assert "other_kernel" in (other / "kernel.json").read_text()
    assert install_spec(name="Fine", **options) == data / "kernels" / "fine"
    assert install_spec(name="fine", **options) == data / "kernels" / "fine", "ours is replaced"


# From the start ------------------------------------------------------------------------------------------------------


def test_kernel_replies_before_the_ranks_start_and_the_first_cell_waits(kernel):
    assert kernel.ok("%distributed status").stdout.startswith("the ranks are starting"), "the kernel waited for them"
    outcome = kernel.ok("value = rank * 2\nprint('on', rank, world_size)\nvalue")
    assert outcome.stdout == "[0] on 0 2\n[1] on 1 2\n", "and nothing else is said"
    results = [message["content"] for message in outcome.messages if message["msg_type"] == "execute_result"]
    assert [(result["data"]["text/plain"], result["execution_count"]) for result in results] == [
        ("[0] 0", 2),
        ("[1] 2", 2),
    ]
    assert all(item["metadata"] == {} for item in results)
    assert kernel.ok("%%local\n'rank' in globals()").displays == [{"text/plain": "False"}]


def test_history_holds_the_cells_as_they_were_written(kernel):
    outcome = kernel.ok("first = 1\nfirst")
    assert kernel.ok(f"%%local\nIn[{outcome.count}]").displays == [{"text/plain": "'first = 1\\nfirst'"}]
    assert kernel.ok(f"%history {outcome.count}").stdout == "first = 1\nfirst\n"
    assert kernel.ok(f"%history -t {outcome.count}").stdout == "first = 1\nfirst\n"


def test_who_and_whos_list_variables_of_the_ranks(kernel):
    kernel.ok("%reset -f\nonly_here = rank")
    assert "only_here" in kernel.ok("%who").stdout
    reported = kernel.ok("%whos").stdout
    assert "only_here" in reported and "[0] " in reported and "int" in reported
    assert "world_size" not in reported, "that was there before any cell"


def test_cell_is_complete_if_its_python_code_is(kernel):
    def status(code: str) -> str:
        kernel.client.is_complete(code)
        return str(kernel.client.get_shell_msg(timeout=10)["content"]["status"])

    assert [status(item) for item in ("x = 1", "for x in y:", "x = = 1", "f(\n")] == [
        "complete",
        "incomplete",
        "invalid",
        "incomplete",
    ]


def test_magics_for_the_notebook_are_refused_on_a_rank(kernel):
    for code in ("rankbook.start(2)", "rankbook.current()", "rankbook.attach()"):
        failed = kernel.run(f"import rankbook\n{code}")
        assert failed.status == "error" and "this code runs on rank 0" in failed.stderr
        assert "put %%local in the first line of the cell" in failed.stderr
    assert kernel.ok("%%local\nimport rankbook\nrankbook.current().world_size").displays == [{"text/plain": "2"}]


def test_the_ranks_have_ipythons_session(kernel):
    first = kernel.ok("rank * 10 + 1").count
    assert kernel.ok("_ + 1").text == "[0] 2\n[1] 12\n"
    kernel.ok("%%local\n'elsewhere'")
    assert kernel.ok(f"_{first}, Out[{first}] + 1, In[{first}]").text == (
        "[0] (1, 2, 'rank * 10 + 1')\n[1] (11, 12, 'rank * 10 + 1')\n"
    )
    assert kernel.ok(f"len(In) - {first}, In[{first + 2}]").text == "[0-1] (5, '')\n", "no rank has run that one"
    rerun = kernel.ok(f"%rerun {first}").stdout
    assert "=== Executing: ===\n[0-1] rank * 10 + 1\n" in rerun
    kernel.ok("print('again', rank)")
    assert "[1] again 1\n" in kernel.ok("%rerun").stdout and "[0] again 0\n" in kernel.ok("%rerun -g again").stdout
    assert kernel.ok("%sx echo words of $RANK").text == "[0] ['words of 0']\n[1] ['words of 1']\n"
    assert kernel.ok("_[0].split()[-1]").text == "[0] '0'\n[1] '1'\n"
    assert kernel.ok("'silent';").text == "" and kernel.ok("_").text == "[0] '0'\n[1] '1'\n"


@pytest.mark.skipif(IS_OUTDATED, reason="IPython 7's autoreload imports imp, which Python 3.12 lacks")
def test_autoreload_reaches_the_ranks(kernel, tmp_path):
    module = tmp_path / "edited_module.py"
    module.write_text("answer = 1\n")
    kernel.ok(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport edited_module")
    kernel.ok("%load_ext autoreload\n%autoreload 2")
    try:
        module.write_text("answer = 12345\n")
        assert kernel.ok("edited_module.answer").text == "[0-1] 12345\n"
    finally:
        kernel.ok("%autoreload 0")


VIEWS = """
import rankbook
model = torch.nn.Linear(2, 3)

def show():
    rankbook.placement()

show()
if rank == 1:
    rankbook.shards("model")
rankbook.checkpoints({folder!r}), rankbook.checkpoints({folder!r})
print("after")
view = rankbook.dashboard()
view
"""


def test_a_view_is_shown_once_wherever_a_cell_calls_for_it(kernel, tmp_path):
    outcome = kernel.ok(VIEWS.format(folder=str(tmp_path)))
    widgets = [display for display in outcome.displays if "application/vnd.jupyter.widget-view+json" in display]
    stills = [display["text/html"] for display in outcome.displays if "rankbook-still" in display.get("text/html", "")]
    assert len(widgets) == len(stills) == 4, outcome.displays
    assert "2 ranks" in stills[0] and "model (model): 2 tensors" in "".join(stills)
    lines = outcome.stdout.splitlines()  # on a busy machine the ranks print at different times
    assert lines == ["[0-1] after"] or sorted(lines) == ["[0] after", "[1] after"]
    assert outcome.stderr == ""
    failed = kernel.run("rankbook.placement().save('x.svg')")
    assert failed.ename == "AttributeError" and "put %%local" in failed.traceback


def test_auto_off_makes_the_kernel_behave_like_ipykernel(kernel):
    kernel.ok("%distributed auto off")
    try:
        assert kernel.ok("'rank' in globals()").displays == [{"text/plain": "False"}]
        assert kernel.ok("In[-2:]").displays[0]["text/plain"].count("run_cell_magic") == 0
        assert kernel.ok("%%distributed\nrank").text == "[0] 0\n[1] 1\n"
    finally:
        kernel.ok("%distributed auto on")
    assert kernel.ok("print(rank)").stdout == "[0] 0\n[1] 1\n"


def test_silent_requests_of_a_front_end_run_in_the_kernel(kernel):
    """Send VS Code's first messages: kernel_info, silent probes, comm_info, completions, and then a user's cell."""
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
def test_ranks_that_cannot_start_are_reported_in_the_first_cell_that_wants_them(install):
    assert install().returncode == 0
    with started("rankbook", RANKBOOK_RANKS="many") as kernel:
        failed = kernel.run("x = 1")
        assert (failed.status, failed.stderr.strip()) == (
            "error",
            "UsageError: invalid RANKBOOK_RANKS='many': expected a positive integer",
        )
        assert kernel.ok("%%local\n1").displays == [{"text/plain": "1"}], "the kernel is well"
        kernel.ok("%%local\nimport os\nos.environ['RANKBOOK_RANKS'] = '1'")
        assert kernel.ok("x = 1\nprint(world_size)").text.endswith(" 1\n"), "the next cell is another try"


@pytest.mark.parametrize("code", [pytest.param("exit", marks=pytest.mark.full), "quit()"])
@pytest.mark.slow
def test_exit_ends_the_kernel_and_its_ranks(install, code):
    assert install("-n", "2").returncode == 0
    with started("rankbook-2") as kernel:
        kernel.ok("x = 1")
        outcome = kernel.ok(code)
        assert outcome.payload == [{"source": "ask_exit", "keepkernel": False}]
        try:
            wait_until(lambda: not kernel.processes(), timeout=20, what="the kernel and its ranks end")
        except pytest.fail.Exception:
            print(stacks_of(kernel.processes()))
            raise


@pytest.mark.full
def test_a_start_with_another_number_takes_the_place_of_ranks_that_nobody_has_used(install):
    assert install("-n", "2").returncode == 0
    with started("rankbook-2") as kernel:
        assert "3 ranks are ready" in kernel.ok("%distributed start -n 3").stdout
        assert kernel.ok("print(world_size)").stdout == "[0-2] 3\n"
        assert "are already running" in kernel.run("%distributed start -n 2").stderr, "these are used"


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
