"""Test the Python API in a plain script: its output, its end, and that no process is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import MARK, check_nothing_left, leftovers, marked_processes, wait_until

pytestmark = pytest.mark.slow

GONE_WITHIN = 10.0  # seconds after the script's end; what would be left stays for minutes

TOUR = r"""
import sys
from dataclasses import dataclass

import numpy

import rankbook

factor = 3


@dataclass
class Point:
    x: int

    def scaled(self):
        return Point(self.x * factor)


class Base:
    def who(self):
        return type(self).__name__


class Derived(Base):
    def who(self):
        return "a " + super().who()


def scale(point):
    return point.scaled()


def recursive(n):
    return n if n < 2 else recursive(n - 1) + recursive(n - 2)


class Broken(Exception):
    pass


def fail():
    raise Broken("on purpose")


def adder(n):
    def add(m):
        return n + m
    return add


if __name__ == "__main__":
    cluster = rankbook.start(2)
    print("torch" in sys.modules, cluster)
    result = cluster.run("print('from', rank)\nrank * 10")
    print(result.stdout, [each.result["text/plain"] for each in result])
    print(cluster.apply(scale, Point(4)), cluster.apply(recursive, 10), cluster.apply(adder(1), 2))
    print(cluster.apply(lambda: Derived().who()), isinstance(cluster.apply(Point, 1)[0], Point))
    try:
        cluster.apply(fail)
    except rankbook.CellError as error:
        told = str(error)
        print(type(error).__name__, "Broken: on purpose" in told, 'raise Broken("on purpose")' in told)
    cluster.push({"array": numpy.arange(4), "point": Point(9)})
    print(cluster.run("int(array.sum()) + rank + point.scaled().x").text(1))
    array = cluster.pull("array")[0]
    array += 1
    print(array)
    cluster.scatter("part", [["a"], ["b", "c"]])
    print(cluster.pull("part"), cluster.gather("part"))
    print([(each.rank, each.state) for each in cluster.status()])
    try:
        cluster.pull("arry")
    except rankbook.InvalidArgument as error:
        print("array" in str(error))
    print(rankbook.start() is cluster, rankbook.current() is cluster)
    STOP
    print("end")
"""

EXPECTED_OUTPUT = """False <Cluster of 2 on cpu, gloo; 0: idle, 1: idle>
{0: 'from 0\\n', 1: 'from 1\\n'} ['0', '10']
[Point(x=12), Point(x=12)] [55, 55] [3, 3]
['a Derived', 'a Derived'] True
CellError True True
34
[1 2 3 4]
[['a'], ['b', 'c']] ['a', 'b', 'c']
[(0, 'idle'), (1, 'idle')]
True
True True
end
"""


class Script:
    """A running script."""

    def __init__(self, folder: Path, code: str) -> None:
        self.mark = uuid.uuid4().hex
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        (folder / "script.py").write_text(code)
        self.process = subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=folder,
            env={**os.environ, MARK: self.mark, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    @property
    def text(self) -> str:
        return os.pread(self.output.fileno(), 1 << 20, 0).decode()

    def wait_text(self, words: str) -> None:
        wait_until(lambda: words in self.text or self.process.poll() is not None, timeout=30, what=words)
        assert words in self.text, self.text

    def wait_end(self) -> int:
        return self.process.wait(30)


Run = Callable[[str], Script]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Start scripts; check at teardown that nothing of them is left after their end."""
    scripts: list[Script] = []
    before = leftovers()

    def start(code: str) -> Script:
        scripts.append(Script(tmp_path, code))
        return scripts[-1]

    yield start
    try:
        for script in scripts:
            assert script.process.poll() is not None, f"the script still runs:\n{script.text}"
            check_nothing_left(script.mark, before, timeout=GONE_WITHIN)
    finally:
        for script in scripts:
            script.output.close()
            for pid in marked_processes(script.mark):  # a test that failed leaves nothing to the next one
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            script.process.wait()


@pytest.mark.parametrize("stop", ["cluster.stop(); cluster.stop()", pytest.param("pass", marks=pytest.mark.full)])
def test_everything_works_in_a_script_which_may_forget_to_stop(run, stop):
    script = run(TOUR.replace("STOP", stop))
    assert script.wait_end() == 0, script.text
    assert script.text == EXPECTED_OUTPUT


def test_a_script_that_crashes_leaves_nothing_and_keeps_its_error(run):
    script = run(
        "import rankbook\nwith rankbook.start(2) as cluster:\n"
        '    cluster.run(\'import subprocess; subprocess.Popen(["sleep", "600"])\')\n'
        "    cluster.run('''def f():\\n    raise ValueError('on rank ' + str(rank))\\nf()''')"
    )
    assert script.wait_end() == 1
    assert "ValueError: on rank 0" in script.text
    assert "raise ValueError('on rank ' + str(rank))" in script.text


@pytest.mark.full
def test_a_script_whose_own_error_nobody_catches_leaves_nothing(run):
    script = run("import rankbook\ncluster = rankbook.start(2)\n1 / 0")
    assert script.wait_end() == 1
    assert script.text.rstrip().endswith("ZeroDivisionError: division by zero")


SLEEPS = """
import rankbook, subprocess
cluster = rankbook.start(2)
print("begun")
cluster.run("import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)")
"""


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(number, marks=pytest.mark.full) for number in (signal.SIGTERM, signal.SIGHUP))],
)
def test_a_script_that_is_killed_leaves_nothing(run, number):
    script = run(SLEEPS)
    script.wait_text("begun")
    wait_until(lambda: "sleep 600" in marked_processes(script.mark).values(), timeout=10, what="the ranks' sleep")
    script.process.send_signal(number)
    assert script.wait_end() == -number


INTERRUPTED = r"""
import rankbook
cluster = rankbook.start(2)
try:
    cluster.run("import time\nopen(f'running-{rank}', 'w').close()\ntime.sleep(600)")
except KeyboardInterrupt:
    print(cluster.run("1 + rank").text(1))
    print("interrupted", [each.state for each in cluster.status()])
    raise
"""


def test_ctrl_c_interrupts_the_ranks_and_then_the_script(run, tmp_path):
    script = run(INTERRUPTED)
    wait_until(lambda: len(list(tmp_path.glob("running-*"))) == 2, timeout=30, what="both ranks run")
    script.process.send_signal(signal.SIGINT)
    assert script.wait_end() == -signal.SIGINT
    assert script.text.startswith("2\ninterrupted ['idle', 'idle']\nTraceback")
    assert "KeyboardInterrupt" in script.text


@pytest.mark.full
def test_ctrl_c_while_ranks_start_leaves_nothing(run):
    script = run("import rankbook\nprint('begun')\nrankbook.start(8)\nprint('never')")
    script.wait_text("begun")
    wait_until(lambda: len(marked_processes(script.mark)) >= 2, timeout=10, what="the forkserver")
    script.process.send_signal(signal.SIGINT)
    assert script.wait_end() == -signal.SIGINT
    assert "never" not in script.text


def test_a_child_that_the_script_forks_may_end_in_any_way_and_the_ranks_stay(run):
    script = run(
        "import os, sys, rankbook\ncluster = rankbook.start(2)\n"
        "for end in (sys.exit, os._exit):\n    child = os.fork()\n    if child == 0:\n        end(0)\n"
        "    os.waitpid(child, 0)\n    print(cluster.run('1 + rank').text(1))\n"
        "import multiprocessing\nprocess = multiprocessing.get_context('fork').Process(target=print, args=('child',))\n"
        "process.start(); process.join()\nprint(cluster.apply(lambda: 5))\n"
        "cluster.stop()\nprint('end')"
    )
    assert script.wait_end() == 0, script.text
    assert script.text == "2\n2\nchild\n[5, 5]\nend\n"


def test_output_is_kept_and_a_sink_shows_it_live(run):
    script = run(
        "import rankbook\nfrom rankbook.magics.output_panel import TerminalSink\nwith rankbook.start(2) as cluster:\n"
        "    cluster.run('print(1)')\n    print('nothing so far')\n"
        "    cluster.run('print(rank > 5)', sink=TerminalSink())"
    )
    assert script.wait_end() == 0, script.text
    first, *last_lines = script.text.splitlines()
    assert first == "nothing so far"
    assert set(last_lines) in ({"[0-1] False"}, {"[0] False", "[1] False"}), "one may be late"
