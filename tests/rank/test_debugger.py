"""Test a rank's debugger: when it runs, whom it trusts, and what it leaves behind."""

from __future__ import annotations

import contextlib
import io
import json
import queue
import socket
import sys
import threading
import time

import pytest

from rankbook import Cluster
from rankbook.rank import debugger
from rankbook.rank.debugger import read_message
from tests.conftest import wait_until


def listens(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


class Client:
    """Speaks to the debugger of a cluster's only rank."""

    def __init__(self, cluster):
        self.cluster, self.seq, self.messages = cluster, 0, queue.SimpleQueue()
        cluster.debugs.listener = lambda _, content: self.messages.put(content)

    def ask(self, command, **arguments):
        self.seq += 1
        request = {"type": "request", "seq": self.seq, "command": command, "arguments": arguments}
        self.cluster.debugs.send(0, json.dumps(request))
        return self.wait(lambda message: message.get("request_seq") == self.seq)

    def wait(self, is_it):
        while True:
            content = self.messages.get(timeout=20)
            message = json.loads(content) if content else {"event": "ended"}
            if is_it(message):
                return message

    def start(self):
        assert self.ask("initialize", clientID="test", adapterID="test")["success"]
        assert self.ask("attach")["success"]
        assert self.ask("configurationDone")["success"]

    def stop(self):
        assert self.ask("disconnect")["success"]


# The port is chosen right before it is used, so that no other process is likely to take it.
LISTEN = """import debugpy, socket
with socket.create_server(('127.0.0.1', 0)) as probe:
    port = probe.getsockname()[1]
debugpy.listen(('127.0.0.1', port), in_process_debug_adapter=True)"""
STATE = """import sys
print('debugpy' in sys.modules, sys.gettrace() is not None, sys.breakpointhook is sys.__breakpointhook__)"""


@pytest.mark.processes
def test_debugger_starts_on_request_and_leaves_no_tracing():
    with Cluster(1) as cluster:
        client = Client(cluster)
        assert cluster.run(STATE).outcomes[0].stdout == "False False True\n"
        client.start()
        refused = client.ask("pause", threadId=1)
        assert not refused["success"], "the next cell would stop at its start"
        assert "cannot pause: the rank is idle" in refused["message"]
        assert cluster.run(STATE).outcomes[0].stdout == "True True False\n", "breakpoint() opens it now"
        client.stop()
        assert cluster.run(STATE).outcomes[0].stdout == "True False True\n"
        refused = client.ask("disconnect")
        assert not refused["success"] and "the debugger has stopped" in refused["message"]
        client.start()
        cell = cluster.submit_code("x = 1\nbreakpoint()\ny = 2", number=1, ranks=None, sink=None)
        reported = client.wait(lambda message: message.get("event") == "stopped")
        stack = cluster.stacks()[0]
        assert stack.paused and stack.frames[-1].line == 3, "as ipykernel's: at the line behind it"
        client.ask("continue", threadId=reported["body"]["threadId"])
        cluster.wait(cell)
        assert cell.result.ok
        client.stop()
        cluster.run(LISTEN)
        (port,) = cluster.pull("port")
        wait_until(lambda: listens(port), timeout=10, what="a debugger of one's own, where it was told to be")
        refused = client.ask("initialize", clientID="test", adapterID="test")
        assert "another debugger is already attached to this rank" in refused["message"]


def test_messages_are_read_whole_or_not_at_all():
    content = json.dumps({"type": "event", "event": "é"}).encode()
    head = b"Content-Length: %d\r\nContent-Type: x\r\n\r\n" % len(content)
    stream = io.BytesIO(head + content + head + content[:-1])
    assert read_message(stream) == {"type": "event", "event": "é"}
    assert read_message(stream) is None
    assert read_message(stream) is None


def test_connection_without_the_token_is_closed():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        bytes_read = []

        def serve(connection, answer):
            with connection, connection.makefile("rb") as stream:
                bytes_read.append(read_message(stream)["command"])
                content = json.dumps(answer).encode()
                connection.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
                bytes_read.append(stream.read(1))

        def answer(word):
            return {"type": "response", "request_seq": debugger._FIRST_SEQ, "body": {"clientAccessToken": word}}

        threads = []
        for item in ({"type": "event", "event": "x", "body": None}, answer(None), answer("wrong"), answer("right")):
            connection = socket.create_connection(address)  # in this order they are accepted
            threads.append(threading.Thread(target=serve, args=(connection, item)))
            threads[-1].start()
        start = time.monotonic()
        debug_seconds, debugger._TIMEOUT = debugger._TIMEOUT, 2.0
        try:
            connection, stream = debugger._wait_for_engine(listener, "right")
        finally:
            debugger._TIMEOUT = debug_seconds
        assert time.monotonic() - start < 20
        assert connection.getpeername()[0] == "127.0.0.1"
        stream.close()
        connection.close()
        for thread in threads:
            thread.join(timeout=20)
        assert bytes_read.count("pydevdAuthorize") == 4


@pytest.mark.parametrize("requested", [True, False])
def test_end_of_a_session_is_reported_once_and_permits_another(monkeypatch, requested):
    reported: queue.SimpleQueue = queue.SimpleQueue()
    debuggee, engine_closed = debugger.Debuggee(reported.put, lambda _: None), threading.Event()
    monkeypatch.setattr(debugger, "_engine", lambda: None if engine_closed.is_set() else object())
    debuggee._disconnect_seq, debuggee._original_hook = 7 if requested else None, sys.breakpointhook
    ours, its = socket.socketpair()
    reader = threading.Thread(target=debuggee._read, args=(ours, ours.makefile("rb")))
    reader.start()
    content = json.dumps({"type": "response", "request_seq": 7, "success": True}).encode()
    with its:
        if requested:
            its.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
    with pytest.raises(queue.Empty):
        reported.get(timeout=0.2)
    engine_closed.set()
    content = reported.get(timeout=10).content
    reader.join(timeout=10)
    assert json.loads(content)["request_seq"] == 7 if requested else content == ""
    assert reported.empty()  # an end told late would be taken for that of the next one


@pytest.mark.parametrize("words", ["ImportError: no debugpy here"])
def test_rank_without_a_debugger_reports_the_reason(words, monkeypatch):
    reported: queue.SimpleQueue = queue.SimpleQueue()
    debuggee = debugger.Debuggee(reported.put, lambda _: None)

    def fail():
        raise ImportError(words.removeprefix("ImportError: "))

    monkeypatch.setattr(debuggee, "_start", fail)
    debuggee.queue_message(debugger.DapToRank(json.dumps({"type": "request", "seq": 3, "command": "initialize"})))
    answer = json.loads(reported.get(timeout=10).content)
    assert (answer["success"], answer["request_seq"], answer["message"]) == (False, 3, words)
