"""Test that a breakpoint stops a task, without torch: .ci/run has these tests on all versions of Python.

pydevd traces in another way since Python 3.12.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

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
