"""Test the output of ranks: live, complete, in order, labelled and bounded."""

from __future__ import annotations

import re
import statistics
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.conftest import Gate

pytestmark = pytest.mark.processes

LINE = re.compile(r"\[([0-9,-]+)\] ?(.*)")


def by_rank(text: str, ranks: int = 2) -> dict[int, list[str]]:
    """The lines of each rank, their labels taken apart. Fails on a line without a label."""
    lines_by_rank: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
    for line in text.splitlines():
        matched = LINE.fullmatch(line)
        assert matched, f"no label: {line!r}"
        first, _, last = matched[1].partition("-")
        for rank in range(int(first), int(last or first) + 1):
            lines_by_rank[rank].append(matched[2])
    return lines_by_rank


def test_the_notebook_waits_longer_for_equal_output_than_a_users_does(notebook):
    """The other tests depend on it: ranks on a busy machine are late with what the others print too."""
    assert notebook.ok("from rankbook.output import merger; print(merger._HOLD)").stdout == "1.0\n"


# Labels --------------------------------------------------------------------------------------------------------------


def test_equal_output_is_shown_once_and_different_output_per_rank(notebook):
    outcome = notebook.ok("%%distributed\nprint('same'); print('mine', rank); print('same again')")
    assert outcome.stdout.startswith("[0-1] same\n")
    assert outcome.stdout.endswith("[0-1] same again\n")
    assert by_rank(outcome.stdout) == {rank: ["same", f"mine {rank}", "same again"] for rank in (0, 1)}


def test_a_rank_that_is_late_does_not_hold_the_others_back(notebook, tmp_path):
    gate = Gate(tmp_path / "gate")
    message = notebook.send(
        f"""%%distributed
import os, time
if rank == 0:
    print("early")
else:
    {gate.wait}
    print("late")"""
    )

    def open_gate(outcome):
        if outcome.stdout == "[0] early\n":
            gate.open()

    outcome = notebook.finish(message, seen=open_gate, timeout=20)
    assert gate.is_open
    assert outcome.stdout == "[0] early\n[1] late\n"


def test_an_empty_line_keeps_its_label(notebook):
    assert by_rank(notebook.ok("%%distributed\nprint(); print('x')").stdout) == {0: ["", "x"], 1: ["", "x"]}


def test_text_with_wide_and_broken_characters_arrives(notebook):
    outcome = notebook.ok(
        """%%distributed
import os
print("日本語 ✓ é")
half, rest = "日".encode()[:1], "日".encode()[1:]
os.write(1, half), os.write(1, rest + b"\\n"), os.write(1, b"\\xff\\n");"""
    )
    assert by_rank(outcome.stdout)[1] == ["日本語 ✓ é", "日", "\ufffd"]


# Streams -------------------------------------------------------------------------------------------------------------


def test_stdout_and_stderr_arrive_as_such_and_in_their_order(notebook):
    outcome = notebook.ok(
        "%%distributed --ranks 1\nimport sys\n"
        "for i in range(3):\n    print('out', i)\n    print('err', i, file=sys.stderr)"
    )
    assert outcome.stdout == "".join(f"[1] out {i}\n" for i in range(3))
    assert outcome.stderr == "".join(f"[1] err {i}\n" for i in range(3))
    assert outcome.text == "".join(f"[1] {name} {i}\n" for i in range(3) for name in ("out", "err"))


def test_warnings_and_logging_are_shown(notebook):
    outcome = notebook.ok(
        "%%distributed\nimport logging, warnings\nwarnings.warn('beware')\nlogging.getLogger('mine').warning('logged')"
    )
    assert "UserWarning: beware" in outcome.stderr and "[0-1] logged" in outcome.stderr


def test_output_of_c_code_keeps_its_position(notebook):
    outcome = notebook.ok(
        "%%distributed\nimport ctypes, os\nprint('python')\nlibc = ctypes.CDLL(None)\n"
        "libc.puts(b'from c')\nlibc.fflush(None)\nos.write(2, b'to descriptor 2\\n')\nprint('python again')"
    )
    assert outcome.stdout == "[0-1] python\n[0-1] from c\n[0-1] python again\n"
    assert outcome.stderr == "[0-1] to descriptor 2\n"


def test_output_of_subprocesses_is_shown(notebook):
    outcome = notebook.ok(
        "%%distributed\nimport subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import sys; print(\"child\"); print(\"oh\", file=sys.stderr)']);"
    )
    for rank in (0, 1):  # one child may start long after the other
        assert by_rank(outcome.stdout)[rank] == ["child"]
        assert by_rank(outcome.stderr)[rank] == ["oh"]


def test_output_of_dataloader_workers_is_shown_for_both_streams(notebook):
    outcome = notebook.ok(
        """%%distributed
import sys
from torch.utils.data import DataLoader, Dataset
class Loud(Dataset):
    def __len__(self): return 6
    def __getitem__(self, i):
        print("item", i)
        print("warning", i, file=sys.stderr)
        return i
total = sum(int(batch) for batch in DataLoader(Loud(), num_workers=2))
print("total", total)"""
    )
    for rank in (0, 1):
        assert sorted(by_rank(outcome.stdout)[rank]) == [*(f"item {i}" for i in range(6)), "total 15"]
        assert by_rank(outcome.stdout)[rank][-1] == "total 15"
        assert sorted(by_rank(outcome.stderr)[rank]) == [f"warning {i}" for i in range(6)]


def test_displays_of_a_forked_child_become_text(notebook):
    outcome = notebook.ok(
        "%%distributed --ranks 0\nimport multiprocessing\n"
        "child = multiprocessing.get_context('fork').Process(target=display, args=('shown by a child',))\n"
        "child.start(); child.join(); print(child.exitcode)"
    )
    assert outcome.stdout == "[0] 'shown by a child'\n[0] 0\n"


def test_threads_are_noticed_also_after_their_cell_has_ended(notebook):
    message = notebook.send(
        "%%distributed --ranks 0\nimport threading\ngo = threading.Event()\n"
        "def later():\n    go.wait()\n    print('from a thread')\nt = threading.Thread(target=later); t.start()"
    )
    first = notebook.finish(message)
    assert first.stdout == ""
    second = notebook.ok("%%distributed --ranks 0\ngo.set(); t.join()\nprint('joined')")
    assert "from a thread" in first.text + second.text


def test_user_code_that_takes_stdout_away_harms_only_itself(notebook):
    notebook.ok("%%distributed --ranks 1\nimport sys\nmine = sys.stdout\nsys.stdout = None")
    outcome = notebook.ok("%%distributed\nimport os\nos.write(1, b'direct\\n');")
    assert outcome.stdout == "[0-1] direct\n"
    notebook.ok("%%distributed --ranks 1\nsys.stdout = mine")


def test_stdout_can_be_redirected(notebook):
    outcome = notebook.ok(
        "%%distributed\nimport contextlib, io\ntext = io.StringIO()\n"
        "with contextlib.redirect_stdout(text): print('caught')\nprint(repr(text.getvalue()))"
    )
    assert outcome.stdout == "[0-1] 'caught\\n'\n"


# Lines ---------------------------------------------------------------------------------------------------------------


def test_half_lines_are_never_interleaved(notebook):
    outcome = notebook.ok(
        "%%distributed\nimport sys, time\n"
        "for i in range(20):\n"
        "    for part in ('a', 'b', 'c'):\n"
        "        print(f'{part}{rank}{i}', end=' ', flush=True)\n        time.sleep(0.0007 * (rank + 1))\n"
        "    print()"
    )
    for rank, lines in by_rank(outcome.stdout).items():
        assert lines == [f"a{rank}{i} b{rank}{i} c{rank}{i} " for i in range(20)]


def test_a_half_line_at_the_end_of_a_cell_is_shown(notebook):
    assert by_rank(notebook.ok("%%distributed\nprint('no newline', rank, end='')").stdout) == {
        0: ["no newline 0"],
        1: ["no newline 1"],
    }


def test_a_half_line_is_shown_while_the_rank_computes_on(notebook, tmp_path):
    gate = Gate(tmp_path / "gate")
    message = notebook.send(
        f"""%%distributed --ranks 0
import os, time
print("loading...", end="", flush=True)
{gate.wait}
print(" done")"""
    )

    def open_gate(outcome):
        if "loading..." in outcome.text:
            gate.open()

    outcome = notebook.finish(message, seen=open_gate, timeout=20)
    assert gate.is_open
    assert "loading... done" in outcome.text


def test_progress_bars_keep_a_line_for_every_rank(notebook):
    outcome = notebook.ok(
        "%%distributed\nimport time\nfrom tqdm import tqdm\n"
        "for _ in tqdm(range(40), desc=f'rank {rank}', mininterval=0.02): time.sleep(0.02)\nprint('done')"
    )
    text = outcome.text
    assert "\r" not in text
    for rank in (0, 1):
        bars = [line for line in text.splitlines() if f"rank {rank}: " in line]
        assert len(bars) == 1, text
        assert "100%" in bars[0] and "40/40" in bars[0]
        assert f"[{rank}]" in bars[0]
    assert outcome.stdout.endswith("[0-1] done\n")


def test_a_progress_bar_moves_while_it_runs(notebook, tmp_path):
    states, gate = set(), Gate(tmp_path / "gate")
    message = notebook.send(
        "%%distributed --ranks 0\nimport os, time\nfrom tqdm import tqdm\n"
        "for step in tqdm(range(1000), mininterval=0.02):\n"
        f"    if not os.path.exists({str(gate.path)!r}): time.sleep(0.02)"
    )

    def look(outcome):
        states.update(re.findall(r"(\d+)%", outcome.text))
        if len(states) >= 4:
            gate.open()

    notebook.finish(message, seen=look)
    assert gate.is_open, states


# Much ----------------------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_lines_of_every_rank_arrive_complete_and_in_order(notebook):
    outcome = notebook.ok("%%distributed\nfor i in range(100_000): print('line', i, 'of', rank)", timeout=60)
    printed = {rank: [f"line {i} of {rank}" for i in range(100_000)] for rank in (0, 1)}
    assert by_rank(outcome.stdout) == printed
    messages = [message for message in outcome.messages if message["msg_type"] == "stream"]
    assert len(messages) < 2_000, "in blocks, for Jupyter drops what comes by the thousand"
    sent = sum(len(item["content"]["text"]) for item in messages)
    assert sent <= 1.5 * sum(len(line) + 1 for lines in printed.values() for line in lines)


def test_a_hundred_thousand_equal_lines_show_once(notebook):
    # On a busy machine one rank may be a second ahead of the other, and its lines are not held back for so long.
    code = "for i in range(100_000):\n    print(i)\n    if i % 500 == 0: dist.barrier()"
    outcome = notebook.ok(f"%%distributed\n{code}", timeout=60)
    for lines in by_rank(outcome.stdout).values():
        assert lines == [str(i) for i in range(100_000)]
    assert outcome.stdout.count("\n") < 150_000, "most of them have met"


FLOOD = """%%distributed --ranks 1{options}
for start in range(0, {lines}, 100_000):
    print("\\n".join(map(str, range(start, start + 100_000))))"""


def cut_line(text: str) -> tuple[int, Path]:
    """The number of lines left out, and the log, as the person is told."""
    matched = re.search(r"([\d,]+) lines.*? (/\S+cell-\d+-rank-1\.log)", text)
    assert matched, text[-2000:]
    return int(matched[1].replace(",", "")), Path(matched[2])


def test_excessive_output_is_truncated_with_a_message_and_complete_in_its_log(notebook):
    lines = 10_000_000
    process = psutil.Process(notebook.pid)
    before, most = process.memory_info().rss, [0]

    def look(_):
        most[0] = max(most[0], process.memory_info().rss)

    outcome = notebook.finish(notebook.send(FLOOD.format(lines=lines, options="")), seen=look, timeout=60)
    assert outcome.status == "ok"
    assert most[0] - before < 100 << 20, "the notebook's memory stays bounded"
    left_out, log = cut_line(outcome.text)
    numbers = [int(line) for line in by_rank(outcome.stdout)[1] if line.isdigit()]
    assert left_out + len(numbers) == lines
    assert numbers[0] == 0 and numbers[-1] == lines - 1, "the beginning and the end are shown"
    assert numbers == sorted(numbers)
    assert (
        sum(len(message["content"]["text"]) for message in outcome.messages if message["msg_type"] == "stream")
        < 10 << 20
    )
    expected = sum(9 * 10**digits * (digits + 2) for digits in range(1, 7)) + 20
    assert log.stat().st_size == expected
    ends = subprocess.run(["tail", "-n1", str(log)], capture_output=True, text=True, check=True).stdout
    assert int(ends) == lines - 1
    assert (
        int(subprocess.run(["wc", "-l", str(log)], capture_output=True, text=True, check=True).stdout.split()[0])
        == lines
    )
    log.unlink()


@pytest.mark.slow
def test_a_flood_of_all_ranks_together_is_cut(notebook):
    # Rank 1 begins when rank 0 has printed everything, and prints slowly enough that the limit reaches it meanwhile.
    outcome = notebook.ok(
        "%%distributed\nimport time\n"
        "for turn in range(2):\n"
        "    for part in range(120 if turn == rank else 0):\n"
        "        print((f'{rank}.{part} ' + 'x' * 100 + '\\n') * 300, end='')\n"
        "        time.sleep(0.1 * rank)\n"
        "    dist.barrier()",
        timeout=100,
    )
    numbers = by_rank(outcome.stdout)
    assert sum(map(len, numbers[0])) > 3 << 20, "less than the limit"
    assert sum(len(line) for lines in numbers.values() for line in lines) < 5 << 20
    cut_line(outcome.text)[1].unlink()


def test_the_notebook_answers_while_a_rank_floods(notebook):
    message = notebook.send(FLOOD.format(lines=4_000_000, options=" --background"))
    outcome = notebook.finish(message)
    notebook.ok("flooding = _")
    plain = [notebook.ok(f"{i} + 1").seconds for i in range(5)]
    calm = [notebook.ok("%%distributed --ranks 0\nprint('calm')").seconds for _ in range(5)]
    assert statistics.median(plain) < 5
    assert statistics.median(calm) < 5
    assert notebook.ok("flooding.wait().ok", timeout=60).displays[-1]["text/plain"] == "True"
    notebook.follow(message, outcome, lambda o: "cell-" in o.text and "3999999" in o.text)
    cut_line(outcome.text)[1].unlink()


def test_memory_of_the_rank_that_prints_stays_bounded(notebook):
    outcome = notebook.ok(
        "%%distributed --ranks 1 --out grown\nimport psutil\nprocess = psutil.Process()\n"
        "before = process.memory_info().rss\n"
        "for i in range(300_000): print('x' * 100)\n"
        "(process.memory_info().rss - before) >> 20",
        timeout=60,
    )
    assert int(notebook.ok("int(grown.text(1))").displays[-1]["text/plain"]) < 24
    cut_line(outcome.text)[1].unlink()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_ten_million_single_prints_do_not_hurt(notebook):
    outcome = notebook.ok("%%distributed --ranks 1\nfor i in range(10_000_000): print(i)", timeout=280)
    left_out, log = cut_line(outcome.text)
    numbers = [line for line in by_rank(outcome.stdout)[1] if line.isdigit()]
    assert left_out + len(numbers) == 10_000_000
    log.unlink()
