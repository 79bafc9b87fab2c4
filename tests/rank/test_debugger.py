"""Test a rank's debugger: when it runs, whom it trusts, and what it leaves behind."""

from __future__ import annotations

import contextlib
import io
import json
import queue
import socket
import subprocess
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
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        cluster.run(f"import debugpy\ndebugpy.listen(('127.0.0.1', {port}), in_process_debug_adapter=True)")
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


BREAKPOINT = """
import json, queue, sys, threading
from rankbook.protocol.messages import DapToRank
from rankbook.rank.debugger import Debuggee

path, messages = sys.argv[1], queue.SimpleQueue()
exec(sys.argv[2])
debuggee = Debuggee(lambda message: messages.put(json.loads(message.content)), lambda suspended: None)

def wait(key, value):
    while (message := messages.get(timeout=30)).get(key) != value:
        pass
    return message

def ask(seq, command, **arguments):
    debuggee.queue_message(DapToRank(json.dumps(dict(type="request", seq=seq, command=command, arguments=arguments))))
    return wait("request_seq", seq)

answer = ask(1, "initialize", clientID="test", adapterID="test")
if not answer["success"]:
    sys.exit(answer["message"])
ask(2, "attach")
ask(3, "setBreakpoints", source={"path": path}, breakpoints=[{"line": 2}])
ask(4, "configurationDone")

def go_on():
    thread = wait("event", "stopped")["body"]["threadId"]
    print("stopped at line", ask(5, "stackTrace", threadId=thread)["body"]["stackFrames"][0]["line"], flush=True)
    ask(6, "continue", threadId=thread)

front_end = threading.Thread(target=go_on)
front_end.pydev_do_not_trace = True
front_end.start()
debuggee.begin()
exec(compile(open(path).read(), path, "exec"))
debuggee.end()
front_end.join()
"""


# Without torch, so that .ci/run has these on all versions of Python: pydevd works otherwise since 3.12.
def meet_breakpoint(folder, before=""):
    file = folder / "cell.py"
    file.write_text("x = 1\nx += 1\nprint('x is', x)\n")
    command = [sys.executable, "-c", BREAKPOINT, str(file), before]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.processes
def test_a_breakpoint_stops_the_task(tmp_path):
    done = meet_breakpoint(tmp_path)
    assert done.stdout == "stopped at line 2\nx is 2\n", done.stdout + done.stderr


@pytest.mark.processes
@pytest.mark.skipif(sys.version_info < (3, 12), reason="pydevd has one way to trace before Python 3.12")
def test_a_debugger_that_could_meet_no_breakpoint_is_refused_with_the_reason(tmp_path):
    done = meet_breakpoint(tmp_path, "import debugpy.server")  # as a cell's `debugpy.listen()`
    assert "a cell has used debugpy on this rank" in done.stderr
