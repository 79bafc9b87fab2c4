"""`%%distributed --time` and `--profile`: tables without ranks, then both in a kernel."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

from rankbook.errors import InvalidArgument
from rankbook.magics.arguments import parse_cell_line
from rankbook.magics.profiling import (
    Measuring,
    Trace,
    check_file,
    late_ranks,
    merge_ops,
    profile_table,
    seconds,
    times_table,
)
from rankbook.protocol.telemetry import CollectiveSpan, OpTime, Times
from tests.conftest import Kernel

MARK = '{"rankbook": "profile of cell [7]"'


def waited(*amounts, wall=10.0):
    return {rank: Times(wall, 2.5, 1.25, item, 3) for rank, item in enumerate(amounts)}


# Times ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amounts", "late"),
    [
        ((0.1, 5.0, 5.1, 4.9), {0}),
        ((0.1, 0.2, 5.0, 4.0), {0, 1}),
        ((5.0, 5.1, 5.2, 4.9), set()),
        ((0.0, 0.0), set()),
        ((3.0,), set()),
        ((0.0, 0.4), set()),
    ],
)
def test_ranks_that_wait_least_are_reported_as_late(amounts, late):
    assert late_ranks(waited(*amounts)) == late


def test_a_column_has_the_time_until_the_device_was_done():
    assert "device" not in times_table(waited(1.0, 1.0))["text/plain"]
    times = {0: Times(0.5, 0.5, 0.5, 0.0, 3, device=7.0), 1: Times(0.5, 0.5, 0.5, 0.0, 3)}
    header, first, second = times_table(times)["text/plain"].splitlines()
    assert re.split(r"  +", header)[1:3] == ["wall", "device done"]
    assert re.split(r"  +", first)[1:4] == ["500.0 ms", "7.00 s", "500.0 ms"]
    assert re.split(r"  +", second)[1:3] == ["500.0 ms", "500.0 ms"]


def test_nobody_waits_for_a_rank_without_collectives():
    times = waited(4.0, 0.1, 0.0)
    times[2] = Times(10.0, 2.5, 1.25, 0.0, 0)
    assert late_ranks(times) == {1}


def in_turn(*launches):
    """Return the times of ranks that launch collective after collective and wait for the last one."""
    spans = [
        [CollectiveSpan("0", number, at, at, max(row)) for at in row] for number, row in enumerate(launches, start=1)
    ]
    columns = [tuple(row[rank] for row in spans) for rank in range(len(launches[0]))]
    return {
        rank: Times(10.0, 2.5, 1.25, sum(span.ends - span.waits for span in column), len(column), column)
        for rank, column in enumerate(columns)
    }


def test_every_rank_that_others_waited_for_is_late_also_if_they_were_late_in_turn():
    assert late_ranks(in_turn((2.0, 1.0, 1.0), (5.0, 6.0, 5.0))) == {0, 1}
    assert late_ranks(in_turn((2.0, 1.0, 1.0), (5.0, 6.0, 5.0), (8.0, 8.0, 9.0))) == {0, 1, 2}
    assert late_ranks(in_turn((2.0, 1.9, 1.0))) == {0, 1}, "rank 2 waited for both"
    assert late_ranks(in_turn((1.01, 1.0, 1.02), (2.01, 2.0, 2.03))) == set()


def test_a_collective_that_overlaps_with_computation_makes_nobody_late():
    early, late = CollectiveSpan("0", 1, 1.0, 1.0, 5.0), CollectiveSpan("0", 1, 4.0, 4.0, 5.0)
    assert late_ranks({0: Times(10.0, 9.0, 9.0, 0.1, 1, (early,)), 1: Times(10.0, 9.0, 9.0, 0.1, 1, (late,))}) == set()


def test_the_table_of_times_has_a_row_per_rank():
    text = times_table(waited(5.0, 0.0)).get("text/plain", "")
    head, first, second = text.splitlines()
    assert head.split("  ")[0] == "rank" and "waited" in head
    assert first.split() == ["0", "10.00", "s", "2.50", "s", "1.25", "s", "5.00", "s", "3"]
    assert second.endswith("the others waited for it")
    assert "note" not in times_table(waited(1.0, 1.0))["text/plain"]


@pytest.mark.parametrize(
    ("amount", "words"), [(123.456, "123.46 s"), (1, "1.00 s"), (0.0125, "12.5 ms"), (8e-5, "80 µs"), (0, "0 µs")]
)
def test_short_duration_is_formatted(amount, words):
    assert seconds(amount) == words


# Profiles ------------------------------------------------------------------------------------------------------------


def test_ops_are_merged_over_ranks_the_largest_total_first():
    merged = merge_ops(
        {
            0: [OpTime("mm", "cpu", 4, 1.0), OpTime("gemm", "cuda:0", 4, 5.0)],
            1: [OpTime("mm", "cpu", 4, 3.0), OpTime("gemm", "cuda:1", 4, 1.0), OpTime("only", "cpu", 1, 0.5)],
        }
    )
    assert [(item.name, item.where, item.total) for item in merged] == [
        ("gemm", "cuda", 6.0),
        ("mm", "cpu", 4.0),
        ("only", "cpu", 0.5),
    ]
    assert [element.imbalance for element in merged] == [pytest.approx(5 / 3), 1.5, 2.0]
    assert merged[2].calls == {0: 0, 1: 1}


def test_the_table_shows_the_largest_and_says_how_many_there_are():
    ops = {rank: [OpTime(f"op{n}", "cpu", 2 + rank, 0.1 * (n + 1)) for n in range(25)] for rank in range(2)}
    bundle, words = profile_table(ops)
    head, *rows = bundle["text/plain"].splitlines()
    assert head.split() == ["op", "calls", "rank", "0", "rank", "1", "imbalance"]
    assert (len(rows), rows[0].split()) == (20, ["op24", "2–3", "2,500.00", "ms", "2,500.00", "ms", "1.00×"])
    assert words.startswith("20 of 25 ops")


def test_times_of_many_ranks_are_minimum_mean_and_maximum():
    ops = {rank: [OpTime("mm", "cpu", 1, 0.001 * (rank + 1)), OpTime("k", f"cuda:{rank}", 1, 1)] for rank in range(9)}
    head, _, row = profile_table(ops)[0]["text/plain"].splitlines()
    assert head.split() == ["op", "device", "calls", "least", "mean", "most", "imbalance"]
    assert row.split() == ["mm", "cpu", "1", "1.00", "ms", "5.00", "ms", "9.00", "ms", "1.80×", "(rank", "8)"]


def test_one_rank_has_no_imbalance():
    assert "imbalance" not in profile_table({3: [OpTime("mm", "cpu", 1, 1.0)]})[0]["text/plain"]


def test_a_trace_is_one_json_of_all_ranks_and_replaces_only_one_of_ours(tmp_path):
    file = tmp_path / "run.json"
    trace = Trace('cell "7"', 12, {1: b'{"pid":1}', 0: b'{"pid":0},\n{"pid":0}', 2: b""})
    trace.write(check_file(file))
    content = json.loads(file.read_text())
    assert [item["pid"] for item in content["traceEvents"]] == [0, 0, 1]
    assert (content["baseTimeNanoseconds"], content["rankbook"]) == (12, 'profile of cell "7"')
    trace.write(check_file(file))
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    file.write_text('{"mine": 1}')
    with pytest.raises(InvalidArgument, match="not a trace of Rankbook"):
        check_file(file)
    with pytest.raises(FileExistsError):
        trace.write(file)
    assert file.read_text() == '{"mine": 1}'


def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(InvalidArgument, match="nowhere does not exist"):
        check_file(tmp_path / "nowhere" / "run.json")
    with pytest.raises(InvalidArgument, match="not a trace"):
        check_file(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(InvalidArgument, match="not a trace"):
        check_file(tmp_path / "link")


class Recorder:
    """A cluster that only notes what it is given."""

    def __init__(self):
        self.submitted = []

    def submit_code(self, code, **options):
        self.submitted.append((code, options["ranks"], options["measure"]))
        return "cell"


def test_the_profiler_has_run_once_on_all_ranks_before_the_cell_begins_on_any(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster = Recorder()
    assert Measuring(parse_cell_line("--time"), 4).prepare(cluster, (0, 2)) is None
    measuring = Measuring(parse_cell_line("--profile"), 4)
    assert measuring.prepare(cluster, (0, 2)) == "cell"
    assert cluster.submitted == [("", (0, 2), measuring.measure)] and measuring.measure.profile


# In a kernel ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def module_notebook(kernel: Kernel, folder):
    notebook = kernel(ranks=2, cwd=folder)
    notebook.ok("%%distributed\nimport sys, time\nfrom torch.nn.parallel import DistributedDataParallel\n")
    notebook.ok("%%distributed\nmodel = DistributedDataParallel(torch.nn.Linear(50, 50))\ntotal = torch.ones(3)")
    notebook.ok("%%distributed\ndef step():\n    model(torch.ones(4, 50)).sum().backward()\n")
    notebook.ok("%%distributed\nfor _ in range(3):  # the second one is DDP's last to wait in Python\n    step()")
    return notebook


def rows(outcome, heading):
    """The table whose first heading is `heading`, by first cell: its row's words."""
    (text,) = [display["text/plain"] for display in outcome.displays if display["text/plain"].startswith(heading)]
    return {line.split("  ")[0]: line.split("  ", 1)[1].split() for line in text.splitlines()[1:]}


def milliseconds(words):
    """Return all times of a row, such as "1.5 ms" or "2 s", in milliseconds."""
    units = {"s": 1000.0, "ms": 1.0, "µs": 0.001}
    return [float(amount.replace(",", "")) * units[unit] for amount, unit in pairwise(words) if unit in units]


@pytest.mark.processes
@pytest.mark.parametrize("work", ["dist.all_reduce(total)", "step()", "dist.barrier()"])
def test_times_name_the_ranks_that_were_waited_for(notebook, work):
    outcome = notebook.ok(f"%%distributed --time\nprint('there')\nif rank == 1:\n    time.sleep(2)\n{work}")
    assert outcome.text.index("[0-1] there\n") < outcome.text.index("rank  wall"), "the table comes last"
    times = rows(outcome, "rank")
    wall, cpu, main, wait_time = milliseconds(times["0"])
    assert 200 < wait_time <= wall and main <= cpu + 1 < 300
    assert milliseconds(times["1"])[3] < wait_time / 2
    assert " ".join(times["1"]).endswith("the others waited for it")
    assert "the others" not in " ".join(times["0"])


@pytest.mark.slow
def test_ranks_that_were_late_in_turn_are_both_named(notebook):
    outcome = notebook.ok(
        "%%distributed --time\nfor late in range(2):\n    if rank == late:\n        time.sleep(2)\n    dist.barrier()"
    )
    assert all(" ".join(words).endswith("the others waited for it") for words in rows(outcome, "rank").values())


@pytest.mark.slow
def test_the_time_of_threads_counts_but_not_as_the_main_threads(notebook):
    spin = "def spin():\n    until = time.thread_time() + 0.3\n    while time.thread_time() < until: pass\n"
    outcome = notebook.ok(
        f"%%distributed --time --ranks 1 --quiet\nimport threading\n{spin}"
        "thread = threading.Thread(target=spin); thread.start(); thread.join()"
    )
    times = rows(outcome, "rank")
    wall, cpu, main, _ = milliseconds(times.pop("1"))
    assert not times and cpu > 290 and main < 150 and wall > 290


@pytest.mark.slow
def test_a_cell_in_the_background_and_one_that_fails_are_measured_too(notebook):
    outcome = notebook.run("%%distributed --time\n1 / (rank - 1)")
    assert outcome.status == "error" and "ZeroDivisionError" in outcome.traceback
    assert set(rows(outcome, "rank")) == {"0", "1"}
    message = notebook.send("%%distributed --time --background\ntime.sleep(0.3)")
    outcome = notebook.finish(message)
    notebook.follow(
        message, outcome, lambda so_far: any("waited" in display["text/plain"] for display in so_far.displays)
    )
    assert min(milliseconds(rows(outcome, "rank")["0"])[:1]) > 290


@pytest.mark.slow
def test_a_profile_is_a_table_and_a_trace_whose_times_fit_together(notebook, folder):
    outcome = notebook.ok(
        "%%distributed --profile\n"
        "dist.barrier()\nif rank == 1:\n    time.sleep(2)\n"
        "dist.all_reduce(total)\nstep()\ny = torch.ones(60, 60) @ torch.ones(60, 60)\nprint(time.time_ns())"
    )
    assert "stderr" not in {output.get("name") for output in outcome.outputs}
    table = rows(outcome, "op")
    assert table["dist.all_reduce: wait"][:1] == ["1"] and milliseconds(table["dist.all_reduce: wait"])[0] > 250
    assert "(rank 0)" in " ".join(table["dist.all_reduce: wait"])
    assert "dist.all_reduce" in table and any(name.startswith("aten::") for name in table)
    name = f"rankbook-profile-{outcome.count}.json"
    assert outcome.stdout.endswith(f": {name}\n")
    trace = json.loads((folder / name).read_text())
    spans = [item for item in trace["traceEvents"] if item["ph"] == "X"]
    assert {entry["pid"] for entry in spans} == {0, 1}
    names = {
        element["pid"]: element["args"]["name"] for element in trace["traceEvents"] if element["name"] == "process_name"
    }
    assert names[0].startswith("rank 0 (cpu, process ")
    (waits,) = [span for span in spans if span["name"] == "dist.all_reduce: wait" and span["pid"] == 0]
    start = min(member["ts"] for member in spans if member["name"] == "dist.all_reduce" and member["pid"] == 1)
    assert waits["ts"] + 200_000 < start < waits["ts"] + waits["dur"] + 1000, "the clocks of the ranks are one"
    printed = [int(line.split()[-1]) for line in outcome.stdout.splitlines() if line.startswith("[")]
    last = max(part["ts"] + part["dur"] for part in spans)
    assert abs(trace["baseTimeNanoseconds"] / 1e3 + last - max(printed) / 1e3) < 1_000_000, "microseconds since 1970"


@pytest.mark.slow
def test_profile_has_the_ops_before_an_error_or_an_interrupt(notebook, folder):
    outcome = notebook.run("%%distributed --profile=err.json\ntotal.exp()\nstep()\n1 / 0")
    assert outcome.status == "error"
    assert "aten::exp" in rows(outcome, "op") and (folder / "err.json").exists()
    message = notebook.send("%%distributed --profile=err.json --time\ntotal.sin()\nprint('now')\ntime.sleep(60)")

    def stop(so_far):
        if "now" in so_far.stdout and not interrupted:
            interrupted.append(True)
            notebook.interrupt()

    interrupted = []
    outcome = notebook.finish(message, seen=stop)
    assert outcome.status == "error" and "KeyboardInterrupt" in outcome.ename
    assert "aten::sin" in rows(outcome, "op")
    assert "aten::exp" not in (folder / "err.json").read_text(), "an earlier trace of ours is replaced"


@pytest.mark.slow
def test_existing_file_is_not_overwritten_and_the_cell_does_not_run(notebook, folder):
    (folder / "notes.json").write_text("{}")
    outcome = notebook.run("%%distributed --profile=notes.json\nran = True")
    assert outcome.status == "error" and "not a trace of Rankbook" in outcome.stderr
    assert notebook.run("%%distributed\nran").status == "error"
    assert (folder / "notes.json").read_text() == "{}"


@pytest.mark.slow
def test_cell_without_options_is_not_measured(notebook):
    notebook.ok("%%distributed --profile --time\ndist.all_reduce(total)")
    notebook.ok("%%distributed\nfrom rankbook.rank.process_groups import interruptible_work\nimport os")
    code = "print(interruptible_work.active_observer.value, os.environ.get('KINETO_LOG_LEVEL'))"
    assert "[0-1] None None" in notebook.ok(f"%%distributed\n{code}").stdout
    outcome = notebook.ok("%%distributed --profile\nx = 3")
    assert "no torch op ran" in outcome.stdout


@pytest.mark.slow
def test_profiler_in_the_cell_disables_the_profile_of_the_magic(notebook):
    check = "print('aten::exp' in {e.name for e in mine.events()})"
    cell = f"with torch.profiler.profile() as mine:\n    total.exp()\n{check}"
    outcome = notebook.ok(f"%%distributed --profile --time\n{cell}")
    assert "[0-1] True" in outcome.stdout and set(rows(outcome, "rank")) == {"0", "1"}
    assert "ranks 0-1: torch's profiler could not record the cell: the cell started a profiler itself" in outcome.stderr
    outcome = notebook.ok("%%distributed --profile\nmine = torch.profiler.profile()\nmine.start()\ntotal.sin()")
    assert "the cell started a profiler itself" in outcome.stderr
    outcome = notebook.ok("%%distributed --profile\ntotal.cos()")
    assert "a profiler started by an earlier cell is still running" in outcome.stderr
    cell = "mine.stop()\nprint({'aten::sin', 'aten::cos'} <= {e.name for e in mine.events()})"
    assert "[0-1] True" in notebook.ok(f"%%distributed\n{cell}").stdout
    assert "aten::exp" in rows(notebook.ok("%%distributed --profile\ntotal.exp()"), "op")


@pytest.mark.slow
def test_the_measurement_is_imported_by_the_first_cell_that_is_measured(fresh_notebook):
    fresh_notebook.ok("%distributed start -n 1\n")
    reported = "import sys\nprint('rankbook.rank.measurement' in sys.modules)"
    assert "False" in fresh_notebook.ok(f"%%distributed\n{reported}").stdout
    assert "True" in fresh_notebook.ok(f"%%distributed --time\n{reported}").stdout
