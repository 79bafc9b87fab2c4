"""What is said where no rank can be started on this machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rankbook.errors import StartError
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
    told = "Rankbook runs on Linux and macOS; this is win32. On Windows use it under WSL 2.\n"
    assert (run.stdout, run.returncode) == (told, 0), run.stderr


def test_without_torch_one_line_names_the_python_that_lacks_it(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launcher = LocalLauncher()
    try:
        with pytest.raises(StartError) as caught:
            launcher.wait_ready(timeout=60)
    finally:
        launcher.terminate()
    assert str(caught.value) == f"there is no torch for {sys.executable}: install it there, then %distributed start"
