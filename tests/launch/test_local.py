"""Test the errors when no rank can be started on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import psutil
import pytest

from rankbook.coordinator.cluster import Cluster
from rankbook.errors import StartError
from rankbook.launch import local
from rankbook.launch.local import LocalLauncher

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
    assert psutil.Process(stopped_launcher.pid).environ()["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


def test_a_start_says_why_the_ranks_cannot_use_the_devices(monkeypatch, capsys):
    wait = LocalLauncher.wait_opened

    def wait_opened(launcher, **options):
        return msgspec.structs.replace(wait(launcher, **options), problem="the driver is too old")

    monkeypatch.setattr(LocalLauncher, "wait_opened", wait_opened)
    with Cluster(1):
        assert "the ranks of this host use the CPU: the driver is too old\n" in capsys.readouterr().out


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


def test_a_launch_that_times_out_is_bounded_by_the_timeout_of_the_start(stopped_launcher, monkeypatch):
    monkeypatch.setattr(local, "_CLOSE_TIMEOUT", 0.5)
    monkeypatch.setattr(local, "_prestarted", stopped_launcher)
    with pytest.raises(StartError, match="the forkserver was not ready within 1 s"):
        Cluster(2, timeout=1)
