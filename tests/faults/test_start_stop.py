"""Test starting and stopping ranks from a notebook, and the errors that prevent it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import (
    RESTORE,
    Gate,
    Kernel,
    Notebook,
    Outcome,
    cluster_folders,
    running_kernel,
    wait_until,
)

pytestmark = pytest.mark.processes

HELLO = "%%distributed\nprint('hello')"


@pytest.fixture(scope="module")
def one_kernel(kernel: Kernel) -> Notebook:
    notebook = kernel()
    notebook.ok("import os, sys")
    return notebook


@pytest.fixture
def loaded(one_kernel: Notebook) -> Iterator[Notebook]:
    """The extension is loaded, no ranks run. Afterwards they are stopped, and then only the forkserver is there."""
    yield one_kernel
    one_kernel.ok(f"{RESTORE}\n%distributed stop")
    wait_until(lambda: len(one_kernel.processes()) == 2, timeout=10, what="only the kernel and its forkserver are left")
    assert cluster_folders(one_kernel.pid) == []


def one_line(outcome: Outcome) -> str:
    assert outcome.status == "error", outcome.text
    output = outcome.traceback + outcome.stderr  # a UsageError is a line on stderr, as of any magic
    assert output.strip().count("\n") == 0, output
    return output


@pytest.mark.full
def test_second_start_reuses_the_ranks_and_another_size_is_an_error(loaded):
    assert "2 ranks are ready" in loaded.ok("%distributed start -n 2").stdout
    loaded.ok("%%distributed\nx = 5")
    assert "2 ranks are already running" in loaded.ok("%distributed start").stdout
    assert "2 ranks are already running" in loaded.ok("%distributed start -n 2").stdout
    refused = one_line(loaded.run("%distributed start -n 3"))
    assert "2 ranks" in refused
    assert "%distributed stop" in refused
    assert "[0-1] 5" in loaded.ok("%%distributed\nprint(x)").stdout


def test_second_stop_does_nothing(loaded):
    loaded.ok("%distributed start -n 2")
    assert "2 ranks stopped" in loaded.ok("%distributed stop").stdout
    assert "no ranks are running" in loaded.ok("%distributed stop").stdout
    assert "no ranks are running" in loaded.ok("%distributed status").stdout


def test_ranks_can_be_stopped_while_they_run_something_and_started_again(loaded):
    loaded.ok("%distributed start -n 2")
    loaded.ok("%%distributed --background\nimport time\nx = 1\ntime.sleep(600)")
    stopped = loaded.ok("%distributed stop")
    assert stopped.seconds < 20
    loaded.ok("%distributed start -n 3")
    assert "[0-2] False" in loaded.ok("%%distributed\nprint('x' in globals())").stdout


def test_the_first_cell_starts_the_ranks_and_says_so(loaded):
    outcome = loaded.ok(HELLO)
    assert "2 ranks are ready" in outcome.stdout
    assert "[0-1] hello" in outcome.stdout


@pytest.mark.parametrize("command", ["restart", "interrupt", "stacks", "pull x"])
def test_a_command_without_ranks_says_how_to_start_them(loaded, command):
    refused = one_line(loaded.run(f"%distributed {command}"))
    assert "no ranks are running" in refused
    assert "%distributed start" in refused


@pytest.mark.parametrize("count", ["0", "-1", "100000"])
def test_error_for_an_invalid_number_of_ranks_names_valid_numbers(loaded, count):
    refused = one_line(loaded.run(f"%distributed start -n {count}"))
    assert count in refused
    assert "expected 1 to" in refused


def test_the_environment_names_the_default_number_of_ranks(loaded):
    loaded.ok("os.environ['RANKBOOK_RANKS'] = '3'")
    assert "3 ranks are ready" in loaded.ok("%distributed start").stdout
    loaded.ok("%distributed stop")
    assert "1 rank is ready" in loaded.ok("%distributed start -n 1").stdout


@pytest.mark.parametrize("nonsense", ["many", "0", "-2", "2.5", "100000"])
def test_a_default_number_without_sense_is_reported_with_its_name_or_range(loaded, nonsense):
    loaded.ok(f"os.environ['RANKBOOK_RANKS'] = '{nonsense}'")
    refused = one_line(loaded.run("%distributed start"))
    assert "RANKBOOK_RANKS" in refused
    assert nonsense in refused


def test_eight_ranks_start_and_reduce(loaded):
    assert "8 ranks are ready" in loaded.ok("%distributed start -n 8").stdout
    code = "%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nprint(t.item(), world_size, torch.get_num_threads())"
    assert "[0-7] 8.0 8 1" in loaded.ok(code).stdout


def test_the_torch_environment_contract_is_set(loaded):
    loaded.ok("%distributed start -n 2")
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT"
    reported = loaded.ok(f"%%distributed\nimport os\nprint(*(os.environ[name] for name in '{names}'.split()))").stdout
    first, second = (line.split() for line in sorted(reported.splitlines()))
    assert first[:6] == ["[0]", "0", "0", "2", "2", "0"]
    assert second[:6] == ["[1]", "1", "1", "2", "2", "0"]
    assert first[6:] == second[6:]
    joined = (
        "%%distributed\nimport os\nstore = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), "
        "is_master=rank == 0)\nstore.set(f'here {rank}', 'yes')\nstore.wait(['here 0', 'here 1'])\n"
        "print(dist.is_initialized(), dist.get_rank() == rank, dist.get_world_size() == world_size, device)"
    )
    for _ in range(3):
        outcome = loaded.run(joined)
        if "EADDRINUSE" not in outcome.traceback:
            break
        loaded.ok("%distributed stop\n%distributed start -n 2")  # nothing reserves the port
    assert "[0-1] True True True cpu" in outcome.stdout, outcome.traceback
    again = (
        "%%distributed\ndist.destroy_process_group()\ndist.init_process_group('gloo')\nt = torch.ones(1)\n"
        "dist.all_reduce(t)\nprint(t.item(), dist.get_world_size(), type(dist.group.WORLD).__name__)"
    )
    assert "[0-1] 2.0 2 RecoverableProcessGroup" in loaded.ok(again).stdout


def test_folder_environment_and_path_of_the_notebook_reach_the_ranks(loaded, tmp_path):
    (tmp_path / "beside_the_notebook.py").write_text("value = 'imported'")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "on_the_path.py").write_text("value = 'found'")
    loaded.ok(f"os.chdir({str(tmp_path)!r}); sys.path.append({str(elsewhere)!r}); os.environ['GIVEN'] = 'yes'")
    loaded.ok("import pathlib; sys.path.append(pathlib.Path('/no/text')); os.environb[b'ODD'] = b'\\xff'")
    loaded.ok("%distributed start -n 2")
    code = """%%distributed
import os, beside_the_notebook, on_the_path
print(os.getcwd(), os.environ['GIVEN'], os.environb[b'ODD'], beside_the_notebook.value, on_the_path.value)"""
    assert f"[0-1] {tmp_path} yes b'\\xff' imported found" in loaded.ok(code).stdout
    loaded.ok(f"os.chdir({str(elsewhere)!r}); os.environ['GIVEN'] = 'anew'\n%distributed restart 1")
    reported = loaded.ok("%%distributed\nimport os\nprint(os.getcwd(), os.environ['GIVEN'])").stdout
    assert f"[0] {tmp_path} yes" in reported
    assert f"[1] {elsewhere} anew" in reported


def test_removed_working_directory_is_reported(loaded, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    loaded.ok(f"os.chdir({str(folder)!r}); os.rmdir({str(folder)!r})")
    refused = one_line(loaded.run("%distributed start -n 2"))
    assert "StartError" in refused
    assert "working directory does not exist" in refused
    assert "os.chdir" in refused


@pytest.mark.parametrize("kind", ["missing", "file", "too long"])
def test_a_runtime_folder_that_cannot_be_used_is_named_with_what_to_set(loaded, tmp_path, kind):
    folder = tmp_path / ("x" * 100 if kind == "too long" else kind)
    if kind == "file":
        folder.touch()
    loaded.ok(f"os.environ['RANKBOOK_RUNTIME_DIR'] = {str(folder)!r}")
    for code in ("%distributed start -n 2", HELLO):
        refused = one_line(loaded.run(code))
        assert str(folder) in refused
        assert "RANKBOOK_RUNTIME_DIR" in refused
    loaded.ok("del os.environ['RANKBOOK_RUNTIME_DIR']")
    assert "[0-1] hello" in loaded.ok(HELLO).stdout


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """Provide a file system of 4 MB and 32 files; `mount -o remount` changes that."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can make a small file system to fill")
    folder = Path("/tmp") / f"rb-{os.getpid()}"
    folder.mkdir()
    completed = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=32", "rankbook-test", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode:
        folder.rmdir()
        pytest.skip(f"no file system can be mounted here: {completed.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
    folder.rmdir()


def fill(folder: Path) -> None:
    """Use up every file the file system can have."""
    with contextlib.suppress(OSError):
        for number in range(1000):
            (folder / f"full-{number}").touch()


def test_a_runtime_folder_that_cannot_be_written_says_so(loaded, mounted):
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    loaded.ok(f"os.environ['RANKBOOK_RUNTIME_DIR'] = {str(mounted)!r}")
    refused = one_line(loaded.run("%distributed start -n 2"))
    assert f"{mounted}" in refused
    assert "Read-only file system" in refused
    assert "RANKBOOK_RUNTIME_DIR" in refused


def test_a_runtime_folder_that_is_full_says_so_and_leaves_nothing_in_it(loaded, mounted):
    fill(mounted)
    loaded.ok(f"os.environ['RANKBOOK_RUNTIME_DIR'] = {str(mounted)!r}")
    refused = one_line(loaded.run("%distributed start -n 2"))
    assert "No space left on device" in refused
    assert "RANKBOOK_RUNTIME_DIR" in refused
    (mounted / "full-0").unlink()  # room for the folder and for no socket in it
    refused = one_line(loaded.run("%distributed start -n 2"))
    assert "No space left on device" in refused
    assert "RANKBOOK_RUNTIME_DIR" in refused
    (mounted / "full-1").unlink()  # and for the notebook's socket, but for none of a rank's
    refused = loaded.run("%distributed start -n 2")
    assert refused.status == "error"
    assert "No space left on device" in refused.traceback
    assert not list(mounted.glob("rankbook-*"))


def test_a_runtime_folder_without_room_for_a_value_costs_no_rank(loaded, mounted):
    loaded.ok(f"os.environ['RANKBOOK_RUNTIME_DIR'] = {str(mounted)!r}")
    loaded.ok("%distributed start -n 2")
    outcome = loaded.run("import numpy\nbig = numpy.ones(2 << 20)\n%distributed push big")
    if outcome.status == "ok":  # another way was found
        assert "[0-1] 2097152.0" in loaded.ok("%%distributed\nprint(big.sum())").stdout
    else:
        assert "No space left" in outcome.traceback
    pulled = loaded.run("%%distributed\nhuge = torch.ones(4 << 20)")
    assert pulled.status == "ok"
    outcome = loaded.run("%distributed pull huge")
    if outcome.status == "ok":
        assert loaded.ok("[t.sum().item() for t in huge]").displays[0]["text/plain"] == "[4194304.0, 4194304.0]"
    else:
        assert "No space left" in outcome.traceback
    assert "[0-1] hello" in loaded.ok(HELLO).stdout


@pytest.mark.slow
def test_files_with_the_names_of_modules_break_nothing(tmp_path):
    names = ("random", "queue", "socket", "heapq", "magics", "widgets", "kernel", "rank", "transport", "messages")
    for name in names:
        (tmp_path / f"{name}.py").write_text("raise ImportError('the wrong one')")
    with running_kernel(cwd=tmp_path) as notebook:
        assert "[0-1] hello" in notebook.ok(HELLO).stdout
        notebook.ok("%distributed restart 1")
        assert "[0-1] hello" in notebook.ok(HELLO).stdout


def test_an_interrupt_while_ranks_start_leaves_none_and_the_next_start_works(loaded):
    for _ in range(5):  # it may be over before the interrupt comes
        earlier_pids = set(loaded.processes())
        message = loaded.send("%distributed start -n 8")
        wait_until(
            lambda earlier_pids=earlier_pids: len(set(loaded.processes()) - earlier_pids) >= 2,
            timeout=20,
            what="the first rank",
        )
        loaded.interrupt()
        outcome = loaded.finish(message)
        if outcome.status == "error":
            break
        loaded.ok("%distributed stop")
    assert outcome.ename == "KeyboardInterrupt"
    assert "no ranks are running" in loaded.ok("%distributed status").stdout
    wait_until(lambda: len(loaded.processes()) == 2, timeout=10, what="only the kernel and its forkserver are left")
    assert "2 ranks are ready" in loaded.ok("%distributed start -n 2").stdout


def test_interrupt_during_the_import_of_torch_is_delivered_at_once(loaded, tmp_path):
    import_started, proceed = tmp_path / "begun", Gate(tmp_path / "proceed")
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "psutil.py").write_text(
        f"open({str(import_started)!r}, 'w').close()\nimport sys\n"
        f"{proceed.wait}\nsys.path.remove({str(slow)!r})\ndel sys.modules['psutil']\n"
        "import psutil"
    )
    loaded.ok("%unload_ext rankbook")
    loaded.ok(f"os.environ['PYTHONPATH'] = {os.pathsep.join([str(slow), os.environ.get('PYTHONPATH', '')])!r}")
    loaded.ok("%load_ext rankbook")
    wait_until(import_started.exists, timeout=20, what="the import")
    message = loaded.send("%distributed start -n 2")
    wait_until(lambda: bool(cluster_folders(loaded.pid)), timeout=10, what="the start")
    loaded.interrupt()
    outcome = loaded.finish(message, timeout=20)
    assert outcome.ename == "KeyboardInterrupt"
    assert not proceed.is_open, "the import goes on"
    proceed.open()
    assert "2 ranks are ready" in loaded.ok("%distributed start -n 2").stdout
    assert "[0-1] hello" in loaded.ok(HELLO).stdout


@pytest.mark.full
def test_a_variable_that_torch_reads_when_it_is_imported_counts_if_it_is_set_before_the_start(loaded):
    loaded.ok("%env TORCH_DISTRIBUTED_DEBUG=DETAIL\n%distributed start -n 2")
    cell = "%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nprint(t.item(), dist.get_debug_level().name)"
    assert loaded.ok(cell).stdout == "[0-1] 2.0 DETAIL\n"


def test_the_ranks_keep_their_variables_when_the_extension_is_loaded_again_or_unloaded(loaded):
    loaded.ok("%distributed start -n 2")
    loaded.ok("%%distributed\nx = rank + 10")
    processes = loaded.processes()
    loaded.ok("%distributed auto on")
    outcome = loaded.ok("%load_ext rankbook\n%reload_ext rankbook")
    assert "2 ranks keep running; rankbook.stop() ends the ranks" in outcome.stdout
    assert loaded.ok("print(x)").stdout == "[0] 10\n[1] 11\n", "plain cells still run on the ranks"
    assert loaded.processes() == processes, "the same ranks, and no second forkserver"
    loaded.ok("%unload_ext rankbook")
    assert loaded.run("%distributed status").status == "error"
    assert loaded.ok("import rankbook\nrankbook.current().pull('x')").text.strip() == "[10, 11]"
    loaded.ok("%load_ext rankbook\n%distributed auto off")
    assert loaded.ok("print('plain')").stdout == "plain\n"
    assert "2 ranks stopped" in loaded.ok("%distributed stop").stdout
    loaded.ok("%reload_ext rankbook")
    assert loaded.ok("print('plain')").stdout == "plain\n", "auto mode is still off"
