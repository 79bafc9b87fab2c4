"""Test the errors when no rank can be started on this machine."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from rankbook.coordinator.cluster import Cluster
from rankbook.errors import InvalidArgument, StartError
from rankbook.launch import local
from rankbook.launch.local import LocalLauncher
from rankbook.launch.registry import find_detached
from tests.conftest import wait_until

pytestmark = pytest.mark.processes

ELSEWHERE = """
import cloudpickle, msgspec, numpy, platformdirs, psutil, zmq  # which take the platform at its word
import os, signal, sys
for name in "fork killpg register_at_fork setsid getuid".split():
    delattr(os, name)
for name in "SIGALRM SIGCHLD SIGHUP SIGKILL".split():
    delattr(signal, name)
sys.platform = "win32"
import rankbook
try:
    rankbook.start(2)
except rankbook.StartError as error:
    print(error)
"""


def test_a_platform_without_fork_hears_where_rankbook_runs():
    run = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=False, timeout=60)
    reported = "Rankbook runs on Linux and macOS; this is win32. On Windows use it under WSL 2.\n"
    assert (run.stdout, run.returncode) == (reported, 0), run.stderr


def test_without_torch_one_line_names_the_python_that_lacks_it(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launcher = LocalLauncher()
    try:
        launcher.request_open(())
        with pytest.raises(StartError) as caught:
            launcher.wait_opened(timeout=60)
    finally:
        launcher.terminate()
    assert str(caught.value) == f"torch is not installed for {sys.executable}; install it, then run %distributed start"


@pytest.fixture
def stopped_launcher() -> Iterator[LocalLauncher]:
    """Provide a launcher whose forkserver is stopped by a signal before it has imported torch."""
    launcher = LocalLauncher()
    os.kill(launcher.pid, signal.SIGSTOP)
    try:
        yield launcher
    finally:
        launcher.terminate()


def test_no_import_of_a_forkserver_initializes_cuda(stopped_launcher):
    """torch looks for devices by other means than the driver: a process that has initialized it cannot fork ranks."""
    process = psutil.Process(stopped_launcher.pid)
    # In the middle of `execve` the environment is empty.
    wait_until(lambda: bool(process.environ()), timeout=10, what="the forkserver has its environment")
    assert process.environ()["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    process.resume()  # else the launcher waits for its end for the whole grace period


# A build of torch for GPUs, on a machine with two of them: torch calls it at the end of its import.
GPUS = """
import os, torch

def count():
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    open(os.environ["COUNTED"], "a").write(f"{visible}\\n")
    return len(visible.replace(",", ""))

def install():
    torch.version.cuda = "13.0"
    torch.cuda.device_count = count
    torch.cuda.is_available = lambda: count() > 0
    torch.cuda.init = lambda: None
    torch.cuda.get_arch_list = lambda: ["sm_80"]
    torch.cuda.get_device_capability = lambda index: (5, 0)
    torch.cuda.get_device_name = lambda index: "GTX 750"
"""
NO_KERNELS = r"torch \S+ has no kernels for cuda:0 \(GTX 750, compute capability 5.0\), only for sm_80; install another"


@pytest.fixture
def old_gpus(tmp_path, monkeypatch):
    """Provide a machine with two GPUs that torch sees and has no kernels for; the file of who has counted them."""
    package = tmp_path / "old_gpus-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: old-gpus\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nold_gpus = old_gpus:install\n")
    (tmp_path / "old_gpus.py").write_text(GPUS)
    counted = tmp_path / "counted"
    counted.touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("COUNTED", str(counted))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    local.shutdown_prestarted()
    yield counted
    local.shutdown_prestarted()


def test_a_start_says_why_the_ranks_cannot_use_the_devices_unless_it_asks_for_the_cpu(old_gpus, capsys):
    with Cluster(1) as cluster:
        shown = capsys.readouterr().out
        assert re.search(rf"^the ranks of this host use the CPU: {NO_KERNELS}", shown), shown
        assert cluster.device == "cpu" and old_gpus.read_text().startswith("0,1\n")
    old_gpus.write_text("")
    with Cluster(1, device="cpu"):
        assert capsys.readouterr().out == ""
        assert old_gpus.read_text() == "", "no process has touched the devices"


def test_a_start_that_asks_for_devices_which_torch_cannot_use_fails_and_says_why_and_what_to_do(old_gpus):
    advice = "to start the ranks on the CPU, use %distributed start --device cpu, or rankbook.start"
    with pytest.raises(StartError, match=f"^no CUDA device can be used: {NO_KERNELS}.*; {advice}"):
        Cluster(1, device="cuda")
    assert old_gpus.read_text()


HIDDEN = "hidden = __import__('os').environ.get('CUDA_VISIBLE_DEVICES'), str(device), torch.cuda.is_available()"
ON_CPU = ("", "cpu", False)


@pytest.mark.slow
@pytest.mark.usefixtures("old_gpus")
def test_ranks_on_the_cpu_stay_there_after_a_restart_a_resize_and_for_another_notebook():
    with Cluster(1, device="cpu", keep=60) as cluster:
        cluster.run(f"{HIDDEN}\nimport rankbook\naccelerator = str(rankbook.Accelerator().device)")
        assert cluster.pull("hidden") == [ON_CPU] and cluster.pull("accelerator") == ["cpu"]
        assert (cluster.device, cluster.backend) == ("cpu", "gloo")
        cluster.restart([0])
        cluster.run(HIDDEN)
        cluster.resize(2)
        assert cluster.run(HIDDEN) and cluster.pull("hidden") == [ON_CPU] * 2
        cluster._processes.detach()
        (record,) = find_detached().records
    with Cluster.adopt(record) as cluster:
        cluster.restart([1])
        assert cluster.run(HIDDEN) and cluster.pull("hidden") == [ON_CPU] * 2


@pytest.mark.slow
def test_a_restarted_rank_of_a_kept_cluster_is_empty_for_another_notebook_until_it_has_run_a_cell():
    def recorded() -> list[bool]:
        (record,) = find_detached().records
        return [rank.empty for rank in record.ranks]

    with Cluster(2, device="cpu", keep=60) as cluster:
        cluster.run("x = rank")
        assert recorded() == [False, False]
        cluster.restart([0])
        assert recorded() == [True, False]
        cluster._processes.detach()
        (record,) = find_detached().records
    with Cluster.adopt(record) as cluster:
        assert [status.empty for status in cluster.status()] == [True, False]
        assert cluster.heal().donor == 1
        assert recorded() == [False, False]
        cluster.restart([1])
        assert recorded() == [False, True]
        cluster.run("y = rank", ranks=[1])
        assert recorded() == [False, False]


@pytest.mark.slow
def test_another_notebook_knows_how_many_devices_there_are_beside_those_in_use():
    with Cluster(1, device="cpu", keep=60) as cluster:
        cluster._processes._cuda_devices = 4  # as on a machine with four of them
        cluster.restart([0])
        cluster._processes.detach()
        (record,) = find_detached().records
    with Cluster.adopt(record) as cluster:
        assert cluster._processes.assign(3).devices == ("cuda:0", "cuda:1", "cuda:2")
        (again,) = find_detached().records
        assert again.cuda_devices == 4


MANY_FILES = """
import os, resource, sys
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limit))
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
import rankbook
"""


@pytest.mark.slow
def test_ranks_start_and_are_attached_in_a_process_with_many_open_files(short_path):
    """Test descriptors above 1023, which `select` does not take."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"a process may have no more than {hard} open files")
    begin = "rankbook.start(1, keep=30).run('x = 7')\nsys.stdout.flush()\nos._exit(0)"
    attach = "print(rankbook.attach().pull('x'))\nrankbook.stop()"
    environment = {**os.environ, "RANKBOOK_RUNTIME_DIR": str(short_path)}
    for code, output in ((begin, ""), (attach, "[7]\n")):
        run = subprocess.run(
            [sys.executable, "-c", MANY_FILES + code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (run.stdout, run.returncode) == (output, 0), run.stderr


def test_nccl_on_the_cpu_is_refused_before_a_process_is_started(monkeypatch):
    monkeypatch.setattr(local, "acquire_forkserver", pytest.fail)
    with pytest.raises(InvalidArgument, match="nccl needs a CUDA device per rank: 2 ranks, 0 devices; use gloo"):
        Cluster(2, backend="nccl", device="cpu")
    with pytest.raises(InvalidArgument, match="invalid device='gpu': expected 'cpu', 'cuda', or None"):
        Cluster(2, device="gpu")


def test_a_start_says_what_a_forkserver_that_does_not_answer_does(stopped_launcher, monkeypatch):
    monkeypatch.setattr(local, "_CLOSE_TIMEOUT", 0.5)
    pid = stopped_launcher.pid
    stopped_launcher.request_open(())
    with pytest.raises(StartError) as caught:
        stopped_launcher.wait_opened(timeout=1)
    assert str(caught.value) == (
        "the forkserver was not ready within 1 s: torch is not imported yet, "
        f"process stopped; kill -CONT {pid} resumes it (pid {pid})"
    )
    assert not psutil.pid_exists(pid)


def test_the_start_after_one_that_timed_out_has_a_new_forkserver(stopped_launcher, monkeypatch):
    monkeypatch.setattr(local, "_CLOSE_TIMEOUT", 0.5)
    stopped_launcher.request_open(())
    with pytest.raises(StartError):
        stopped_launcher.wait_opened(timeout=1)
    stopped_launcher.close()  # as a start that failed does
    launcher = local.acquire_forkserver()
    try:
        assert launcher is not stopped_launcher
        assert launcher.alive
    finally:
        launcher.terminate()


def test_a_forkserver_that_closes_its_connection_and_stays_is_named(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import os, sys, time\nos.close(int(sys.argv[1]))\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(local, "_CLOSE_TIMEOUT", 0.5)
    launcher = LocalLauncher()
    try:
        launcher.request_open(())
        with pytest.raises(StartError, match="it closed its connection, but has not exited"):
            launcher.wait_opened(timeout=60)
    finally:
        launcher.terminate()


def test_a_forkserver_ends_although_a_forked_child_has_a_copy_of_the_connection():
    launcher = LocalLauncher()
    launcher.request_open(())
    launcher.wait_opened(timeout=60)
    with multiprocessing.get_context("fork").Pool(1):
        launcher.terminate()
    assert launcher._process.returncode == 0, "it was killed"


def test_a_launch_that_times_out_is_bounded_by_the_timeout_of_the_start(stopped_launcher, monkeypatch):
    monkeypatch.setattr(local, "_CLOSE_TIMEOUT", 0.5)
    monkeypatch.setattr(local, "_prestarted", stopped_launcher)
    with pytest.raises(StartError, match="the forkserver was not ready within 1 s"):
        Cluster(2, timeout=1)


@pytest.fixture
def forkservers(tmp_path, monkeypatch) -> Iterator[list[int]]:
    """Provide the process ids of the forkservers that are started, which import a module in place of torch."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    local.shutdown_prestarted()
    started: list[int] = []
    start = LocalLauncher.__init__

    def record(self):
        start(self)
        started.append(self.pid)

    monkeypatch.setattr(LocalLauncher, "__init__", record)
    yield started
    local.shutdown_prestarted()
    assert not any(map(psutil.pid_exists, started))


@pytest.mark.parametrize("take", [local.prestart_forkserver, local.acquire_forkserver])
@pytest.mark.parametrize("what", ["package", "TORCH_LOGS", "KMP_AFFINITY"])
def test_a_forkserver_is_replaced_when_its_imports_are_out_of_date(forkservers, tmp_path, monkeypatch, take, what):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(packages)

    def change():
        if what == "package":
            (packages / "new-2.0.dist-info").mkdir()
        else:
            monkeypatch.setenv(what, "other")

    for _ in range(2):
        local.prestart_forkserver()
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert len(forkservers) == 1, "nothing has changed that is read when torch is imported"
    change()
    launcher = take()
    assert len(forkservers) == 2 and not psutil.pid_exists(forkservers[0])
    if launcher is not None:
        assert launcher.pid == forkservers[1]
        launcher.terminate()
