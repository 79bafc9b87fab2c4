"""Test that the keys of a cluster are in no command line, environment, log, notebook, repr or traceback."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
from zmq.utils import z85

from rankbook.launch.connection import decode_connection
from tests.conftest import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(240)]

START = """
%load_ext rankbook
%distributed start -n 2 --launcher env --address 127.0.0.1
"""
STATUS = """
%distributed status
"""
REPRS = """
import gc, traceback
import rankbook
from rankbook.transport import agent_link

cluster = rankbook.current()
print(cluster, repr(cluster), vars(cluster), cluster.hosts(), cluster.status())
for item in gc.get_objects():
    if str(type(item).__module__).startswith("rankbook"):
        print(repr(item))
"""
ERRORS = """
import sys, traceback
from unittest import mock

def attempt(work):
    try:
        work()
    except BaseException as error:
        shown = traceback.TracebackException.from_exception(error, capture_locals=True)
        print("an error:", type(error).__name__)
        text = "".join(shown.format())
        print(text)
        for keys, secret in made:
            assert secret.decode() not in text and keys.client_secret.decode() not in text, "a key is in a traceback"

def listen_on_a_used_port():
    from rankbook.launch.hosts import HostOptions
    port = cluster._processes.hosts.hub.port
    rankbook.Cluster(1, hosts=HostOptions(address="127.0.0.1", port=port))

def write_nowhere():
    from rankbook.launch.hosts import HostOptions
    with mock.patch.dict("os.environ", RANKBOOK_CONNECT_DIR="/dev/null/connect"):
        rankbook.Cluster(1, hosts=HostOptions(address="127.0.0.1"))

def wait_in_vain():
    from rankbook.launch.hosts import HostOptions
    rankbook.Cluster(1, hosts=HostOptions(address="127.0.0.1"), timeout=1)

made = []
make_keys = agent_link.make_keys

def make_and_keep():
    made.append(make_keys())
    return made[-1]

mock.patch("rankbook.launch.hosts.make_keys", make_and_keep).start()
for work in (listen_on_a_used_port, write_nowhere, wait_in_vain, lambda: cluster.run("1 / 0")):
    attempt(work)
"""
RANKS = """
%%distributed
import gc, os, traceback
print(dict(os.environ))
for item in gc.get_objects():
    if str(type(item).__module__).startswith("rankbook"):
        try:
            print(repr(item))
        except Exception as error:
            print(error)
try:
    1 / 0
except ZeroDivisionError as error:
    print("".join(traceback.TracebackException.from_exception(error, capture_locals=True).format()))
"""
GATE = """
import pathlib, time
pathlib.Path("ready").touch()
for _ in range(6000):
    if pathlib.Path("gate").exists():
        break
    time.sleep(0.02)
"""


def test_the_keys_are_nowhere_but_in_the_connection_file(tmp_path):
    cells = [nbformat.v4.new_code_cell(text.strip()) for text in (START, STATUS, REPRS, ERRORS, RANKS, GATE, STATUS)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "source.ipynb")
    folders = {name: tmp_path / name for name in ("connect", "logs", "run")}
    folders["run"].mkdir()
    environment = {
        **os.environ,
        "RANKBOOK_CONNECT_DIR": str(folders["connect"]),
        "RANKBOOK_LOG_DIR": str(folders["logs"]),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "rankbook.cli", "run", "source.ipynb", "--output", "executed.ipynb"]
    with (tmp_path / "run.log").open("wb") as log, (tmp_path / "agents.log").open("wb") as agents_log:
        notebook = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        agents: list[subprocess.Popen[bytes]] = []
        try:
            wait_until(lambda: any(folders["connect"].glob("*.json")), timeout=60, what="the connection file")
            (file,) = folders["connect"].glob("*.json")
            text = file.read_text()
            agent = [sys.executable, "-m", "rankbook.agent", "--slots", "1"]
            # One agent has the file's text in its environment, the other one reads it from its standard input.
            agents.append(
                subprocess.Popen(agent, env={**environment, "RANKBOOK_CONNECT": text}, stderr=agents_log, cwd=tmp_path)
            )
            agents.append(
                subprocess.Popen(
                    [*agent, "--connect", "-"], env=environment, stdin=subprocess.PIPE, stderr=agents_log, cwd=tmp_path
                )
            )
            assert agents[1].stdin is not None
            agents[1].stdin.write(text.encode())
            agents[1].stdin.close()
            wait_until(
                lambda: (tmp_path / "ready").exists() or notebook.poll() is not None, timeout=150, what="the last cell"
            )
            assert notebook.poll() is None, (tmp_path / "run.log").read_text(errors="replace")
            processes = psutil.Process().children(recursive=True)
            ranks = [process for agent in agents for process in psutil.Process(agent.pid).children(recursive=True)]
            assert len(ranks) >= 4  # a forkserver and a rank each
            places = {
                "ps": "\n".join(
                    " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
                ),
                "environments": "\n".join(
                    environment_of(process) for process in processes if process.pid != agents[0].pid
                ),
                "files in shared memory and sockets": read_all(Path("/dev/shm"), Path("/tmp") / "rankbook-0"),
            }
            (tmp_path / "gate").touch()
            assert notebook.wait(60) == 0, (tmp_path / "run.log").read_text(errors="replace")[-3000:]
            assert [agent.wait(30) for agent in agents] == [0, 0]
        finally:
            for process in (notebook, *agents):
                process.kill()
                process.wait()
    assert not list(folders["connect"].iterdir())
    places |= {
        "notebook": (tmp_path / "executed.ipynb").read_text(),
        "printed": (tmp_path / "run.log").read_text(errors="replace"),
        "agents' log": (tmp_path / "agents.log").read_text(errors="replace"),
        "logs": read_all(folders["logs"]),
    }
    # The places are those that they should be.
    assert "rankbook.agent" in places["ps"] and "RANK" in places["environments"]
    assert "ZeroDivisionError" in places["notebook"] and "AgentHub" in places["notebook"]
    assert places["notebook"].count("an error:") >= 4 and "StartError" in places["notebook"]
    for name, content in places.items():
        for secret in secrets(text):
            assert secret not in content, f"a key is in: {name}"


def secrets(text: str) -> list[str]:
    """Return the secret key of the connection file, in the forms in which it could be shown."""
    key = decode_connection(text, "file").keys.client_secret
    raw = z85.decode(key)
    return [
        key.decode(),
        key.decode()[:12],
        raw.hex(),
        base64.b64encode(raw).decode()[:40],
        repr(raw)[2:40],
        repr(bytes(key))[2:20],
    ]


def environment_of(process: psutil.Process) -> str:
    """Return the environment of a process; "" if it ends meanwhile, which none does that has keys."""
    try:
        return str(process.environ())
    except psutil.Error:
        return ""


def read_all(*folders: Path) -> str:
    """Return what all files in the folders contain."""
    files = [path for folder in folders if folder.exists() for path in folder.rglob("*") if path.is_file()]
    return "\n".join(path.read_bytes().decode("latin-1") for path in files if path.stat().st_size < 10_000_000)
