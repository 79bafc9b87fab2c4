"""Test the interrupt of a cell: on all its ranks, wherever they wait, and of no other cell."""

from __future__ import annotations

import IPython
import psutil
import pytest

from tests.conftest import ASSIGNS_COMMANDS, Gate, Notebook, Outcome, wait_until

pytestmark = pytest.mark.processes

SET_RELEASE = """import dataclasses, rankbook
_state = rankbook.current()._state
_state.grace = dataclasses.replace(_state.grace, interrupt_release={})"""
HUNG = 10.0  # seconds; what waits here would take a minute
WAITS = {
    "a loop": "i = 0\nwhile True: i += 1",
    "a sleep": "import time\ntime.sleep(60)",
    "a lock": "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "a queue": "import queue\nqueue.Queue().get()",
    "a socket": "import socket\none, other = socket.socketpair()\none.recv(1)",
    "a shell command": "!sleep 60",
    "a command that ignores it": "!trap '' INT; sleep 60",
    **({"a command's output": "lines = !sleep 60"} if ASSIGNS_COMMANDS else {}),
    "a subprocess": "import subprocess\nsubprocess.run(['sleep', '60'])",
    "a subprocess's child": "import subprocess\nsubprocess.run('sleep 60; echo not reached', shell=True)",
    "await": "import asyncio\nawait asyncio.sleep(60)",
    "printing": "while True: print('on and on', rank)",
    "timeit": "%timeit -n 1 -r 1 __import__('time').sleep(60)",
    "a DataLoader": """import time
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        time.sleep(60)
        return i
for batch in DataLoader(Slow(), num_workers=2): pass""",
}


def have_begun(text: str, ranks: str, line: str = "begun") -> bool:
    """Return True if all of `ranks` have printed `line`, together or in turn."""
    return f"[{ranks}] {line}" in text or all(f"[{rank}] {line}" in text for rank in ranks.split("-"))


def interrupt_in(notebook: Notebook, code: str, *, ranks: str = "0-1", commands: bool = False) -> Outcome:
    """Run a cell, press the button once every rank of it has begun, and wait for its end.

    `commands`: it starts `sleep 60` on each rank, and has begun only then.
    """
    pressed = []

    def press(outcome):
        if not pressed and have_begun(outcome.text, ranks):
            if commands:
                wait_until(lambda: len(sleepers(notebook)) >= 2, timeout=20, what="the commands run")
            pressed.append(notebook.interrupt())

    outcome = notebook.finish(notebook.send(f"%%distributed --ranks {ranks}\n{code}"), seen=press, timeout=20)
    assert pressed, outcome.text + outcome.traceback
    return outcome


def sleepers(notebook: Notebook) -> list[int]:
    """The commands that the cells started and that still run."""
    return [pid for pid, line in notebook.processes().items() if line.startswith("sleep 60")]


@pytest.mark.parametrize("code", WAITS.values(), ids=WAITS)
def test_every_rank_is_interrupted_and_the_next_cell_works_at_once(notebook, code):
    commands = "sleep 60" in code or "'sleep', '60'" in code
    outcome = interrupt_in(notebook, f"print('begun')\n{code}", commands=commands)
    assert (outcome.status, outcome.ename) == ("error", "KeyboardInterrupt")
    assert "rank 1: Key" in outcome.traceback or "ranks 0-1: Key" in outcome.traceback
    assert outcome.seconds < HUNG
    assert notebook.ok("%%distributed\nprint('next')").stdout == "[0-1] next\n"
    wait_until(lambda: not sleepers(notebook), timeout=10, what="the commands are gone too")


def test_a_bash_cell_is_interrupted(notebook):
    code = "%%bash\necho begun\nsleep 60"
    if IPython.version_info < (8,):  # it shows what a script prints when the script has ended
        code = "print('begun')\nget_ipython().run_cell_magic('bash', '', 'sleep 60')"
    outcome = interrupt_in(notebook, code, commands=True)
    assert (outcome.status, outcome.ename) == ("error", "KeyboardInterrupt"), outcome.traceback
    wait_until(lambda: not sleepers(notebook), timeout=10, what="the commands are gone too")


def test_worker_that_ends_long_after_its_interrupt_fails_no_later_cell(notebook):
    """Torch's SIGCHLD handler raises an error in whatever the main thread does by then."""
    interrupted = interrupt_in(
        notebook,
        """import multiprocessing, os, signal, time
from torch.utils.data import DataLoader, Dataset
has_begun, may_end = multiprocessing.Event(), multiprocessing.Event()
class Slow(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        try:
            has_begun.set()
            time.sleep(60)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            may_end.wait(60)
            os._exit(1)
batches = iter(DataLoader(Slow(), num_workers=1))
worker = batches._workers[0]
has_begun.wait()
print('begun')
next(batches)""",
    )
    assert interrupted.ename == "KeyboardInterrupt", interrupted.traceback
    later = notebook.ok(
        "%%distributed\nmay_end.set()\n"
        "ended = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)\nprint(ended.si_status)"
    )
    assert (later.stdout, later.stderr) == ("[0-1] 1\n", "")
    notebook.ok("%%distributed\ndel batches, worker, has_begun, may_end")


def test_next_cell_works_after_repeated_interrupts(notebook):
    for turn in range(8):
        outcome = interrupt_in(notebook, "print('begun')\nimport time\nwhile True: time.sleep(0.001)")
        assert (outcome.status, outcome.ename) == ("error", "KeyboardInterrupt"), turn
        assert notebook.ok(f"%%distributed\nprint({turn})").stdout == f"[0-1] {turn}\n"


def test_a_cell_that_is_sent_before_the_interrupt_is_over_runs_untouched(notebook):
    waiting = []

    def press(outcome):
        if have_begun(outcome.text, "0-1") and not waiting:
            notebook.interrupt()
            waiting.append(notebook.send("%%distributed\nimport time\ntime.sleep(0.3)\nprint('whole')"))

    message = notebook.client.execute(
        "%%distributed\nprint('begun')\nimport time\ntime.sleep(60)", stop_on_error=False, allow_stdin=True
    )
    assert notebook.finish(message, seen=press, timeout=20).ename == "KeyboardInterrupt"
    outcome = notebook.finish(waiting[0], timeout=20)
    assert (outcome.status, have_begun(outcome.stdout, "0-1", "whole")) == ("ok", True), outcome.text


def test_interrupt_is_delivered_during_fork(notebook):
    notebook.ok(
        """%%distributed
import os, time
slow = True
os.register_at_fork(after_in_parent=lambda: slow and time.sleep(0.005))"""
    )
    for turn in range(4):
        outcome = interrupt_in(
            notebook,
            """print("begun")
while True:
    pid = os.fork()
    if not pid: os._exit(0)
    os.waitpid(pid, 0)""",
        )
        assert (outcome.status, outcome.ename) == ("error", "KeyboardInterrupt"), turn
    notebook.ok("%%distributed\nslow = False")


def test_output_before_the_interrupt_is_complete(notebook):
    outcome = interrupt_in(
        notebook,
        """import sys, time
print("half a line", end="")
print("begun", file=sys.stderr)
time.sleep(60)""",
    )
    assert have_begun(outcome.stdout, "0-1", "half a line"), outcome.stdout


def test_the_traceback_names_the_line(notebook):
    outcome = interrupt_in(notebook, "import time\n\nprint('begun'); time.sleep(60)  # line 4")
    assert "ranks 0-1: KeyboardInterrupt at line 4" in outcome.traceback


def test_the_innermost_line_is_named_with_its_cell(notebook):
    defined = notebook.ok("%%distributed\nimport time\ndef waits():\n    print('begun')\n    time.sleep(60)")
    outcome = interrupt_in(notebook, "x = 1\nwaits()")
    assert f"ranks 0-1: KeyboardInterrupt at line 5 of cell {defined.count}" in outcome.traceback


def test_variables_survive(notebook):
    interrupt_in(notebook, "import time\nsteps = 7\nprint('begun')\nwhile True: time.sleep(0.001)")
    assert notebook.ok("%%distributed\nprint(steps)").stdout == "[0-1] 7\n"


def test_user_code_may_catch_the_interrupt(notebook):
    outcome = interrupt_in(
        notebook,
        """import time
try:
    print("begun")
    time.sleep(60)
except KeyboardInterrupt:
    print("stopped early")""",
    )
    assert outcome.status == "ok"
    assert outcome.stdout.count("stopped early") in (1, 2)


def test_finally_blocks_run(notebook):
    outcome = interrupt_in(
        notebook,
        """import time
cleaned = False
try:
    print("begun")
    time.sleep(60)
finally:
    cleaned = True""",
    )
    assert outcome.ename == "KeyboardInterrupt"
    assert notebook.ok("%%distributed\nprint(cleaned)").stdout == "[0-1] True\n"


def test_interrupt_reaches_only_the_selected_ranks(notebook):
    outcome = interrupt_in(notebook, "import time\nprint('begun')\ntime.sleep(60)", ranks="1")
    assert "rank 1: KeyboardInterrupt" in outcome.traceback
    assert "rank 0" not in outcome.traceback


def test_a_task_of_an_interrupted_await_does_not_run_on(notebook):
    interrupt_in(
        notebook,
        """import asyncio
async def loud():
    while True:
        print("begun")
        await asyncio.sleep(0.05)
await asyncio.gather(loud(), asyncio.sleep(60))""",
    )
    outcome = notebook.ok("%%distributed\nawait asyncio.sleep(0.2)\nprint('quiet')")
    assert outcome.stdout == "[0-1] quiet\n"


def test_coroutines_that_resist_do_not_hold_the_rank(notebook):
    outcome = interrupt_in(
        notebook,
        """import asyncio
async def stubborn():
    print("begun")
    while True:
        try: await asyncio.sleep(60)
        except asyncio.CancelledError: pass
await stubborn()""",
    )
    assert outcome.ename == "KeyboardInterrupt"
    assert outcome.seconds < HUNG


def test_interrupted_queued_cell_never_runs(notebook, tmp_path):
    gate = Gate(tmp_path / "gate")
    wait = f"import os, time\n{gate.wait}"
    notebook.ok(f"%%distributed --background\n{wait}\nprint('first')")
    notebook.ok("first = _")
    pressed = []

    def press(outcome):
        if "queued" in outcome.text and not pressed:
            pressed.append(notebook.interrupt())

    outcome = notebook.finish(notebook.send("%%distributed\nprint('never')"), seen=press)
    assert (outcome.status, outcome.ename) == ("error", "KeyboardInterrupt")
    assert "never" not in outcome.text
    gate.open()
    assert notebook.ok("first.wait().ok").displays[-1]["text/plain"] == "True", "the cell before it is left alone"
    assert notebook.ok("%%distributed\nprint('after')").text == "[0-1] after\n"


def test_an_interrupt_while_nothing_runs_changes_nothing(notebook):
    for _ in range(3):
        notebook.interrupt()
    assert notebook.ok("%%distributed\nprint('fine')").stdout == "[0-1] fine\n"


def test_the_ranks_processes_are_the_same_afterwards(notebook):
    before = notebook.ok("%%distributed\nimport os\nos.getpid()").displays
    interrupt_in(notebook, "print('begun')\nimport time\ntime.sleep(60)")
    after = notebook.ok("%%distributed\nos.getpid()").displays
    assert sorted(map(str, before)) == sorted(map(str, after))
    assert all(psutil.pid_exists(int(data["text/plain"].split()[-1])) for data in after)


def test_a_second_press_gives_control_back_whatever_the_ranks_do(notebook, tmp_path):
    gate = Gate(tmp_path / "gate")
    notebook.ok(SET_RELEASE.format(60))
    presses = []

    def press(outcome):
        if (have_begun(outcome.text, "0-1") and not presses) or ("no!" in outcome.text and len(presses) == 1):
            presses.append(notebook.interrupt())

    message = notebook.send(
        f"""%%distributed
import os, time
print("begun")
while not os.path.exists({str(gate.path)!r}):
    try: time.sleep(0.01)
    except KeyboardInterrupt: print("no!")"""
    )
    outcome = notebook.finish(message, seen=press, timeout=20)
    assert outcome.status == "error"
    assert "still runs" in outcome.traceback
    assert outcome.seconds < HUNG, "not only after the patience with one press is over"
    notebook.ok(SET_RELEASE.format(5))
    gate.open()
    assert notebook.ok("%%distributed\nprint('next')", timeout=20).stdout == "[0-1] next\n"


@pytest.mark.slow
def test_ranks_that_print_are_not_called_unresponsive_however_often_the_button_is_pressed(notebook, tmp_path):
    gate = Gate(tmp_path / "gate")
    presses = []

    def press(outcome):
        if have_begun(outcome.text, "0-1") and not presses:
            presses.extend(notebook.interrupt() for _ in range(8))

    message = notebook.send(
        f"""%%distributed
import os
print("begun")
while not os.path.exists({str(gate.path)!r}):
    try: print("on and on", rank)
    except KeyboardInterrupt: pass"""
    )
    outcome = notebook.finish(message, seen=press, timeout=20)
    gate.open()
    assert presses and outcome.status == "error"
    assert "unresponsive" not in outcome.text + outcome.traceback
    assert "restart" not in outcome.traceback
    assert notebook.ok("%%distributed\nprint('next')", timeout=20).stdout == "[0-1] next\n"
