"""Test the capture of output with real pipes, in processes of their own."""

from __future__ import annotations

import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rankbook.protocol.messages import Text, TextCut
from rankbook.rank import output_capture
from rankbook.rank.output_capture import MAX_CELL_OUTPUT, TAIL_BYTES, RateLimit

pytestmark = pytest.mark.processes

BEFORE = """
import contextlib, ctypes, multiprocessing, os, pickle, resource, select, subprocess, sys, threading
from pathlib import Path
answer = os.dup(1)
from rankbook.rank import os_utils
from rankbook.rank.output_capture import MAX_CELL_OUTPUT, OutputCapture

sent, shields = [], []
@contextlib.contextmanager
def shield():
    shields.append("on")
    try:
        yield
    finally:
        shields.append("off")
capture = OutputCapture((*os_utils.output_pipe(), *os_utils.output_pipe()), sent.append, shield, Path(sys.argv[1]), 3)

def read_always():
    while True:
        select.select(capture.files, [], [])
        capture.drain()

told = None
"""
AFTER = """
with os.fdopen(answer, "wb") as file:
    pickle.dump((sent, told), file)
os._exit(0)
"""


def run(logs: Path, body: str) -> tuple[list[Text | TextCut], object]:
    """Run `body` under capture. Return the messages that were sent, and the value of `reported`."""
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + body + AFTER, str(logs)], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0 and done.stdout, done.stderr.decode()
    return pickle.loads(done.stdout)


def streams(sent: list[Text | TextCut]) -> list[tuple[str, str]]:
    """Return pairs of stream and text in order, with neighbours of one stream joined."""
    joined: list[tuple[str, str]] = []
    for message in sent:
        assert isinstance(message, Text)
        text = message.data.decode()
        if joined and joined[-1][0] == message.stream:
            joined[-1] = (message.stream, joined[-1][1] + text)
        else:
            joined.append((message.stream, text))
    return joined


def test_stdout_and_stderr_keep_the_order_in_which_python_wrote_them(tmp_path):
    sent, _ = run(
        tmp_path,
        """
capture.begin(1)
for i in range(3):
    print("out", i)
    print("err", i, file=sys.stderr)
capture.end()
""",
    )
    assert streams(sent) == [(name, f"{name[3:]} {i}\n") for i in range(3) for name in ("stdout", "stderr")]


def test_output_of_a_child_does_not_overtake_stderr(tmp_path):
    sent, _ = run(
        tmp_path,
        """
capture.begin(1)
print("before", file=sys.stderr)
subprocess.run(["echo", "child"])
print("after", file=sys.stderr)
capture.end()
""",
    )
    assert streams(sent) == [("stderr", "before\n"), ("stdout", "child\n"), ("stderr", "after\n")]


def test_a_finalizer_that_prints_in_the_middle_of_a_send_waits_for_no_lock(tmp_path):
    sent, reported = run(
        tmp_path,
        """
from rankbook.transport import sending
taken = threading.Event()
def hold():  # another thread drains, and waits for the send
    with capture.lock:
        taken.set()
        threading.Event().wait(60)
threading.Thread(target=hold, daemon=True).start()
taken.wait()
def finalize():
    with sending:
        print("bar closed", file=sys.stderr)
thread = threading.Thread(target=finalize, daemon=True)
thread.start()
thread.join(10)
told = thread.is_alive()
""",
    )
    assert (sent, reported) == ([], False)


def test_a_finalizer_that_prints_during_a_drain_keeps_the_order(tmp_path):
    sent, _ = run(
        tmp_path,
        """
capture.begin(1)
quota = capture._quota.admit
def admit(name, data):
    if data == b"first\\n":
        print("closed", file=sys.stderr)  # as the garbage collector does
    return quota(name, data)
capture._quota.admit = admit
print("first", file=sys.stderr)
capture.drain()
capture.end()
""",
    )
    assert streams(sent) == [("stderr", "first\nclosed\n")]


def test_half_lines_and_their_order_are_kept_too(tmp_path):
    sent, _ = run(
        tmp_path,
        """
capture.begin(1)
print("a", end="")
print("b", end="", file=sys.stderr)
print("c", end="")
capture.end()
""",
    )
    assert streams(sent) == [("stdout", "a"), ("stderr", "b"), ("stdout", "c")]


def test_output_of_c_code_and_subprocesses_is_in_order_with_python(tmp_path):
    sent, _ = run(
        tmp_path,
        """
capture.begin(1)
print("python")
subprocess.run(["echo", "child"])
libc = ctypes.CDLL(None)
libc.puts(b"c library")
libc.fflush(None)
os.write(1, b"descriptor\\n")
print("python again")
capture.end()
""",
    )
    assert streams(sent) == [("stdout", "python\nchild\nc library\ndescriptor\npython again\n")]


def test_a_forked_worker_that_writes_to_both_streams_is_noticed(tmp_path):
    sent, reported = run(
        tmp_path,
        """
capture.begin(1)
def work():
    for i in range(3):
        print("out", i)
        print("err", i, file=sys.stderr)
    os._exit(len(sent))
worker = multiprocessing.get_context("fork").Process(target=work)
worker.start()
worker.join()
told = worker.exitcode
capture.end()
""",
    )
    assert reported == 0, "the worker must leave the pipes to the rank"
    received = dict(streams(sent))
    assert received == {"stdout": "out 0\nout 1\nout 2\n", "stderr": "err 0\nerr 1\nerr 2\n"}


def test_text_belongs_to_the_cell_in_which_it_was_written(tmp_path):
    sent, _ = run(
        tmp_path,
        """
capture.begin(1)
print("one", end="")
capture.end()
print("between")
capture.begin(2)
print("two")
capture.end()
""",
    )
    assert [(message.cell, message.data) for message in sent] == [(1, b"one"), (1, b"between\n"), (2, b"two\n")]


def test_text_is_sent_under_the_shield(tmp_path):
    _, reported = run(tmp_path, "capture.begin(1); print('x'); capture.end(); told = shields")
    assert reported and reported == ["on", "off"] * (len(reported) // 2)


def test_bytes_that_are_not_utf8_are_passed_on(tmp_path):
    sent, _ = run(
        tmp_path,
        r"""
capture.begin(1)
os.write(1, b"\xff\xfe\n")
print("\udc80 é")
capture.end()
""",
    )
    assert b"".join(message.data for message in sent) == b"\xff\xfe\n\\udc80 \xc3\xa9\n"


@pytest.mark.parametrize(
    "harm",
    [
        "sys.stdout.close()",
        "sys.stdout = None",
        "sys.stdout = object()",
        "sys.stdout = type('Loud', (), {'flush': lambda self: 1 / 0})()",
        "sys.stdout = type('Leaving', (), {'flush': lambda self: sys.exit()})()",
    ],
)
def test_user_code_that_breaks_its_stdout_harms_only_itself(tmp_path, harm):
    sent, _ = run(
        tmp_path,
        f"""
capture.begin(1)
print("before")
{harm}
capture.end()
capture.begin(2)
os.write(1, b"after")
capture.end()
""",
    )
    assert [(message.cell, message.data) for message in sent] == [(1, b"before\n"), (2, b"after")]


FLOOD = """
line = b"%07d" + b"." * 92 + b"\\n"
def flood(lines, stream=1):
    for i in range(lines):
        data = memoryview(line % i)
        while data:
            data = data[os.write(stream, data):]
threading.Thread(target=read_always, daemon=True).start()
capture.begin(1)
"""
LINE = 100


def flood_lines(data: bytes) -> list[int]:
    """The numbers of the flood's lines."""
    return [int(line[:7]) for line in data.splitlines() if line[:7].isdigit()]


def test_output_up_to_the_limit_is_shown_completely(tmp_path):
    lines = MAX_CELL_OUTPUT // LINE
    sent, _ = run(tmp_path, FLOOD + f"flood({lines}); capture.end()")
    assert flood_lines(b"".join(message.data for message in sent)) == list(range(lines))
    assert not list(tmp_path.iterdir()), "no log without a flood"


def test_a_flood_is_cut_says_how_much_is_missing_and_keeps_all_of_it_in_its_log(tmp_path):
    lines = 3 * MAX_CELL_OUTPUT // LINE
    sent, _ = run(tmp_path, FLOOD + f"flood({lines}); capture.end()")
    cuts = [i for i, message in enumerate(sent) if isinstance(message, TextCut)]
    assert len(cuts) == 1
    cut = sent[cuts[0]]
    log = tmp_path / "cell-1-rank-3.log"
    assert cut.log == str(log)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert flood_lines(log.read_bytes()) == list(range(lines))
    assert log.stat().st_size == lines * LINE

    before = b"".join(m.data for m in sent[: cuts[0]] if m.stream == "stdout")
    after = b"".join(m.data for m in sent[cuts[0] :] if isinstance(m, Text))
    head, tail = flood_lines(before), flood_lines(after)
    assert len(before) <= MAX_CELL_OUTPUT and 0 < len(after) <= TAIL_BYTES
    assert head == list(range(len(head))), "the beginning is shown"
    assert tail == list(range(lines - len(tail), lines)), "and the end, whole lines of it"
    assert cut.lines == lines - len(head) - len(tail)
    assert cut.size == lines * LINE - len(before) - len(after)
    note = b"".join(m.data for m in sent[: cuts[0]] if m.stream == "stderr").decode()
    assert str(log) in note, "said at once, not only at the end"


def test_a_log_on_another_host_is_named_with_it(tmp_path):
    lines = 2 * MAX_CELL_OUTPUT // LINE
    sent, _ = run(tmp_path, "capture._host = 'node1'" + FLOOD + f"flood({lines}); capture.end()")
    named = f"{tmp_path / 'cell-1-rank-3.log'} on node1"
    assert [m.log for m in sent if isinstance(m, TextCut)] == [named]
    assert any(f"is written to {named}\n".encode() in m.data for m in sent if isinstance(m, Text)), "said at once too"


@pytest.mark.parametrize(
    "states",
    [
        (b"\r 50%|" + b"#" * 70,),
        (b"\r 50%|" + b"#" * 70 + b"\n", b"\r 60%|" + b"#" * 70, b"\x1b[A"),  # one below the other
        (b"step 50 " + b"#" * 70 + b"\r",),
    ],
)
def test_of_a_progress_bar_only_the_latest_state_counts(tmp_path, states):
    quota = output_capture._Quota(1, tmp_path, "log")
    for _ in range(2 * MAX_CELL_OUTPUT // 78):
        for state in states:
            assert quota.admit("stderr", state) == [Text(cell=1, stream="stderr", data=state)]
    assert quota.admit("stdout", b"loss 0.1\n") == [Text(cell=1, stream="stdout", data=b"loss 0.1\n")]
    assert quota.open and not list(tmp_path.iterdir())
    quota.exhaust()
    quota.admit("stderr", states[-1])
    assert not quota.open, "the ranks together have printed too much"
    quota.close()


def test_rewritten_rows_without_end_are_cut_as_well(tmp_path):
    quota, row, rows = output_capture._Quota(1, tmp_path, "log"), b"\r" + b"x" * (1 << 20), 0
    while quota.open:
        quota.admit("stdout", row)
        rows += 1
        assert rows < 1000
    quota.close()


def test_the_log_has_the_lines_between_the_states_of_a_bar(tmp_path):
    quota = output_capture._Quota(1, tmp_path, "log")
    for data in (b"first\r\n", b"\r 10%", b"\r    \rsecond\n\r 20%", b"\r 30%\nthird, ", b"fourth\n"):
        quota.admit("stdout", data)
    quota.admit("stderr", b"\r" + b"#" * MAX_CELL_OUTPUT)
    quota.exhaust()
    quota.admit("stdout", b"last\n")
    quota.close()
    log = (tmp_path / "log").read_bytes()
    assert log.startswith(b"first\r\nsecond\n 30%\nthird, fourth\n\r##") and log.endswith(b"##last\n")


def test_the_log_has_the_last_state_of_a_bar_and_of_a_line_whose_break_is_in_two_pieces(tmp_path):
    quota = output_capture._Quota(1, tmp_path, "log")
    bar = b"\r" + b"#" * (MAX_CELL_OUTPUT // 2)
    for data in (b"\r 99%", b"\r100%", b"\n", b"windows\r", b"\n", bar, b"\r 7%", bar, bar, b"last\n"):
        assert quota.admit("stdout", data)
    quota.exhaust()
    quota.admit("stdout", b"end\n")
    quota.close()
    # The last bar but one is the state before the last one.
    assert (tmp_path / "log").read_bytes() == b"100%\nwindows\n" + bar[1:] + bar + b"last\nend\n"


def test_bars_below_each_other_leave_nothing_but_line_breaks_for_the_log(tmp_path):
    quota = output_capture._Quota(1, tmp_path, "log")
    for _ in range(3 * MAX_CELL_OUTPUT // 200):
        assert quota.admit("stderr", b"\r outer" + b"#" * 90 + b"\n\r inner" + b"#" * 90 + b"\x1b[A")
    assert quota.open
    assert sum(map(len, quota._sent)) < 2 * MAX_CELL_OUTPUT
    quota.close()


def test_a_limited_cell_sends_no_more_text_but_logs_all_of_it(tmp_path):
    sent, _ = run(tmp_path, FLOOD + "flood(50); capture.drain(); capture.limit(1); flood(500); capture.end()")
    (cut,) = [message for message in sent if isinstance(message, TextCut)]
    assert flood_lines(Path(cut.log).read_bytes()) == [*range(50), *range(500)]
    before = b"".join(message.data for message in sent[: sent.index(cut)] if message.stream == "stdout")
    assert flood_lines(before) == list(range(50))
    assert flood_lines(b"".join(message.data for message in sent[sent.index(cut) + 1 :]))[-1] == 499


def test_the_limit_of_an_earlier_cell_has_no_effect(tmp_path):
    sent, _ = run(tmp_path, FLOOD + "capture.limit(0); flood(50); capture.end()")
    assert flood_lines(b"".join(message.data for message in sent)) == list(range(50))


def test_a_flood_on_both_streams_is_logged_in_order_of_arrival_and_counted_once(tmp_path):
    lines = MAX_CELL_OUTPUT // LINE
    sent, _ = run(tmp_path, FLOOD + f"flood({lines}); flood({lines}, 2); flood({lines}); capture.end()")
    (cut,) = [message for message in sent if isinstance(message, TextCut)]
    sent_size = sum(len(flood_lines(message.data)) for message in sent if isinstance(message, Text))
    assert cut.lines + sent_size == 3 * lines
    assert len(flood_lines(Path(cut.log).read_bytes())) == 3 * lines


def test_a_flood_without_any_line_break_is_cut_as_well(tmp_path):
    sent, _ = run(tmp_path, FLOOD + f"line = b'%07d' + b'.' * 93; flood({2 * MAX_CELL_OUTPUT // LINE}); capture.end()")
    (cut,) = [message for message in sent if isinstance(message, TextCut)]
    sent_size = sum(len(m.data) for m in sent if isinstance(m, Text) and m.stream == "stdout")
    assert sent_size <= MAX_CELL_OUTPUT + TAIL_BYTES
    assert cut.size + sent_size == Path(cut.log).stat().st_size


def test_the_next_cell_may_print_again(tmp_path):
    sent, _ = run(
        tmp_path,
        FLOOD + f"flood({2 * MAX_CELL_OUTPUT // LINE}); capture.end(); capture.begin(2); print('fresh'); capture.end()",
    )
    assert (sent[-1].cell, sent[-1].data) == (2, b"fresh\n")


def test_output_after_a_flooded_cell_is_logged_and_reported(tmp_path):
    lines = 2 * MAX_CELL_OUTPUT // LINE
    sent, _ = run(
        tmp_path,
        FLOOD + f"flood({lines}); capture.end(); os.write(1, b'late\\n'); capture.begin(2); capture.end()",
    )
    assert (tmp_path / "cell-1-rank-3.log").read_bytes().endswith(b"late\n")
    late = [message for message in sent if isinstance(message, Text) and message.data.endswith(b"late\n")]
    assert late, "what a background thread prints after the end is shown too"


def test_missing_log_is_reported(tmp_path):
    folder = tmp_path / "file"
    folder.write_text("in the way")
    sent, _ = run(folder, FLOOD + f"flood({2 * MAX_CELL_OUTPUT // LINE}); capture.end()")
    (cut,) = [message for message in sent if isinstance(message, TextCut)]
    assert "no log could be written" in cut.log
    assert any(b"no log file can be written" in message.data for message in sent if isinstance(message, Text))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_is_said_and_costs_no_more_than_the_log(tmp_path):
    (tmp_path / "cell-1-rank-3.log").symlink_to("/dev/full")
    sent, _ = run(tmp_path, FLOOD + f"flood({2 * MAX_CELL_OUTPUT // LINE}); capture.end()")
    (cut,) = [message for message in sent if isinstance(message, TextCut)]
    assert "the disk is full" in cut.log
    assert flood_lines(sent[-1].data), "the end is shown all the same"


def test_a_flood_costs_the_rank_no_memory(tmp_path):
    _, reported = run(
        tmp_path,
        """
threading.Thread(target=read_always, daemon=True).start()
capture.begin(1)
block = (b"x" * 99 + b"\\n") * 10_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(64):
    data = memoryview(block)
    while data:
        data = data[os.write(1, data):]
capture.end()
told = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
""",
    )
    log = tmp_path / "cell-1-rank-3.log"
    assert log.stat().st_size == 64_000_000
    log.unlink()
    assert reported < 32 << 20


def test_the_end_of_a_cell_keeps_the_pace_too(tmp_path):
    _, reported = run(
        tmp_path,
        """
from rankbook.rank.output_capture import RateLimit
capture._rate_limit = RateLimit(rate=400_000, burst=20_000, window=1 << 20)
capture.begin(1)
os.write(1, b"x" * 60_000)
capture.end()
told = [len(text.data) for text in sent]
""",
    )
    assert isinstance(reported, list)
    assert sum(reported) == 60_000
    assert max(reported) <= 20_000, "and nothing at once because a byte's worth of time had passed"


def test_rate_limit_allows_a_burst_and_bounds_every_window(monkeypatch):
    now = 100.0
    monkeypatch.setattr(output_capture.time, "monotonic", lambda: now)
    pace = RateLimit(rate=650.0, burst=1800, window=2400)
    went = []
    for _ in range(400):
        room = pace.room()
        assert room is not None
        pace.spend(room)
        went.append((now, room))
        now += 0.05
    assert went[0] == (100.0, 1800)
    assert max(sum(size for at, size in went if start <= at < start + 3.0) for start, _ in went) <= 2400
    assert sum(size for _, size in went) >= 0.9 * 650 * 20, "in the long run as fast as the rate"


def test_sent_bytes_reduce_the_burst_until_the_rate_refills_it(monkeypatch):
    now = 100.0
    monkeypatch.setattr(output_capture.time, "monotonic", lambda: now)
    pace = RateLimit(rate=500.0, burst=1800, window=1 << 20)
    pace.spend(1000)
    assert pace.room() == 800
    pace.spend(1300)
    assert pace.room() == 0, "more than there was room for is owed"
    now += 2.0
    assert pace.room() == 500
    now += 60.0
    assert pace.room() == 1800


def test_the_original_streams_are_captured_in_order_too(tmp_path):
    sent, _ = run(
        tmp_path,
        """
print("a", file=sys.__stdout__)
sys.stdout = open(os.devnull, "w")
print("hidden")
sys.stdout = sys.__stdout__
print("b")
print("c", file=sys.__stderr__)
print("d")
capture.drain()
""",
    )
    assert streams(sent) == [("stdout", "a\nb\n"), ("stderr", "c\n"), ("stdout", "d\n")]


def test_the_stacks_of_a_child_that_crashes_go_to_stderr_and_not_into_the_file_of_the_rank(tmp_path):
    body = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from rankbook.rank import main
request = SimpleNamespace(segments=sys.argv[1], rank=0, incarnation=1)
main._enable_faulthandler(request)
if not (pid := os.fork()):
    os.abort()
os.waitpid(pid, 0)
"""
    done = subprocess.run([sys.executable, "-c", body, str(tmp_path)], capture_output=True, check=True, timeout=60)
    assert b"Fatal Python error: Aborted" in done.stderr
    (file,) = tmp_path.rglob("*crash*")
    assert file.read_bytes() == b""
