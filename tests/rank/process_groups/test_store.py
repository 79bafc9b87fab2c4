"""The rendezvous store, as torch calls it and as processes share it."""

from __future__ import annotations

import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from rankbook.errors import CollectiveAborted, ProtocolError
from rankbook.rank.process_groups.store import RendezvousStore, _AgentConnection, open_store
from rankbook.transport.store_keys import KeyFolder, RemoteKeys, perform


@pytest.fixture(params=["this host", "other host"])
def store(request, tmp_path) -> RendezvousStore:
    """Return the store as the ranks of the notebook's host have it, and as those of another host have it."""
    if request.param == "this host":
        return open_store(tmp_path / "store", "", threading.Event())
    keys = KeyFolder(tmp_path / "store")
    return RendezvousStore(RemoteKeys(lambda operation: perform(keys, operation)), threading.Event())


def test_an_operation_that_fails_on_the_notebooks_host_is_an_error_there_and_not_here(tmp_path):
    keys = KeyFolder(tmp_path / "store")
    remote = RemoteKeys(lambda operation: perform(keys, operation))
    remote.write("text", b"no number")
    with pytest.raises(OSError, match="the store on the notebook's host reported ValueError"):
        remote.add("text", 1)
    for request in (b"", b"x", b"\xff" * 100, b"\x81\xa6method\xa4none"):
        with pytest.raises(ProtocolError, match="invalid request to the store"):
            perform(keys, request)


def test_a_wait_for_the_agent_ends_when_it_is_cancelled_and_the_next_request_gets_its_own_reply(tmp_path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "agent"))
    listener.listen()
    keys, cancel = KeyFolder(tmp_path / "store"), threading.Event()
    silent = [True]

    def serve() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                while head := connection.recv(4):
                    result = perform(keys, connection.recv(struct.unpack("<I", head)[0]))
                    if not silent[0]:
                        connection.sendall(struct.pack("<I", len(result)) + result)

    agent = threading.Thread(target=serve, daemon=True)
    agent.start()
    connection = _AgentConnection(str(tmp_path / "agent"), cancel)
    rendezvous_store = RendezvousStore(RemoteKeys(connection.ask), cancel)
    cancel.set()
    with pytest.raises(CollectiveAborted):
        rendezvous_store.set("key", "value")
    silent[0] = False
    cancel.clear()
    assert rendezvous_store.get("key") == b"value", "the operation had arrived, only its reply had not"
    assert rendezvous_store.add("sum", 2) == 2
    assert connection._socket is not None
    connection._socket.close()
    agent.join(20)
    listener.close()


def test_store_behaves_like_a_hash_store(store):
    answers = []
    for current_store in (dist.HashStore(), store):
        prefixed = dist.PrefixStore("a/b", current_store)
        prefixed.set("text", "value")
        prefixed.set("bytes", b"\xff\x00")
        answers.append(
            (
                prefixed.get("text"),
                prefixed.get("bytes"),
                prefixed.check(["text", "bytes"]),
                prefixed.check(["text", "none"]),
                prefixed.add("sum", 3),
                prefixed.add("sum", -1),
                prefixed.get("sum"),
                prefixed.compare_set("compared", "", "new"),
                prefixed.compare_set("compared", "other", "newer"),
                prefixed.compare_set("compared", "new", "newer"),
                prefixed.compare_set("absent", "old", "new"),
                prefixed.delete_key("text"),
                prefixed.delete_key("text"),
                prefixed.wait(["bytes", "sum"]),
                current_store.check(["a/b/bytes"]),
            )
        )
    assert answers[1] == answers[0]


@pytest.mark.parametrize("key", ["", ".", "..", "../lock", "/etc/passwd", "a\0b", "ü" * 300, "lock", "x" * 5000])
def test_any_key_is_a_file_in_the_folder(store, tmp_path, key):
    store.set(key, "value")
    assert store.get(key) == b"value"
    assert store.num_keys() == 1
    assert {path.name for path in tmp_path.iterdir()} == {"store"}


def test_long_keys_are_not_mixed_up(store):
    for last in "ab":
        store.set("x" * 1000 + last, last)
    assert store.get("x" * 1000 + "a") == b"a"


def test_store_file_is_readable_by_its_user_only(store, tmp_path):
    store.set("key", "value")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store", *(tmp_path / "store").iterdir())]
    assert modes == [0o700, 0o600]


def test_a_folder_that_others_can_enter_is_refused(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o755)
    with pytest.raises(PermissionError, match="open to other users"):
        open_store(tmp_path / "store", "", threading.Event())


def test_a_folder_that_is_put_in_its_place_is_not_read(store, tmp_path):
    store.set("key", "value")
    (tmp_path / "store").rename(tmp_path / "moved")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "key-key").write_text("false")
    assert store.get("key") == b"value"


def test_a_wait_ends_after_its_timeout_and_names_what_is_missing(store):
    store.set("here", "")
    for current_store in (store, dist.PrefixStore("", store)):
        with pytest.raises(RuntimeError, match=r"100ms.*absent"):
            current_store.wait(["here", "absent"], timedelta(milliseconds=100))


def test_a_wait_ends_when_the_rank_gives_up(tmp_path):
    give_up = threading.Event()
    store = open_store(tmp_path / "store", "", give_up)
    timer = threading.Timer(0.1, give_up.set)
    timer.start()
    with pytest.raises(CollectiveAborted):
        store.get("absent")
    timer.join()


def test_keys_of_earlier_generations_are_deleted_and_no_others(store):
    for number in (1, 2, 10):
        dist.PrefixStore(f"generation-{number}/agreement", store).set("key", "value")
    store.set("generation-1", "value")
    store.forget_generations(10)
    assert store.check(["generation-10/agreement/key", "generation-1"])
    assert store.num_keys() == 2


ADD = """
import sys, threading
from pathlib import Path
from rankbook.rank.process_groups.store import open_store
store = open_store(Path(sys.argv[1]), "", threading.Event())
print(flush=True)
while True:
    store.add("sum", 1)
    store.set("value", "x" * 100_000)
"""


@pytest.mark.slow
def test_killed_processes_leave_every_value_complete(store, tmp_path):
    command = [sys.executable, "-c", ADD, str(tmp_path / "store")]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        store.wait(["value"], timedelta(seconds=30))
        before = store.add("sum", 0)
        for writer in writers:
            deadline = time.monotonic() + 0.2
            while time.monotonic() < deadline:
                assert len(store.get("value")) == 100_000
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
        assert store.add("sum", 0) > before
        assert len(store.get("value")) == 100_000
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


@pytest.mark.slow
def test_gloo_rendezvous_through_the_store(tmp_path):
    code = (
        "import sys, threading\nfrom pathlib import Path\nimport torch, torch.distributed as dist\n"
        "from rankbook.rank.process_groups.store import open_store\n"
        "store = open_store(Path(sys.argv[1]), '', threading.Event())\n"
        "dist.init_process_group('gloo', store=store, rank=int(sys.argv[2]), world_size=2)\n"
        "t = torch.ones(1)\ndist.all_reduce(t)\nprint(t.item())\ndist.destroy_process_group()"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "store"), str(rank)], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == [b"2.0\n", b"2.0\n"]


def test_many_values_are_one_operation_for_the_notebooks_host(tmp_path):
    keys, operations = KeyFolder(tmp_path / "store"), []

    def ask(operation: bytes) -> bytes:
        operations.append(operation)
        return perform(keys, operation)

    store = RendezvousStore(RemoteKeys(ask), threading.Event())
    for name in "abc":
        keys.write(name, name.encode())
    assert store.get_all(["c", "a", "b"]) == [b"c", b"a", b"b"]
    assert len(operations) == 1
    with pytest.raises(dist.DistStoreError, match="was deleted"):
        store.get_all(["a", "none"])
