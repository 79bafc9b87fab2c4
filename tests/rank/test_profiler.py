"""Test how a trace of torch's profiler becomes a rank's part of a trace of all ranks."""

from __future__ import annotations

import json

import pytest
import torch

from rankbook.protocol.telemetry import OpTime
from rankbook.rank.measurement import Profiling, RankTrace, sum_op_times


def span(name, ts, dur, *, pid=50, tid=50, cat="cpu_op"):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}


def times(events):
    return {(time.name, time.where): (time.calls, round(time.seconds * 1e6, 3)) for time in sum_op_times(events)}


def test_time_is_without_what_was_called():
    events = [
        span("outer", 0, 100),
        span("inner", 10, 40),
        span("leaf", 20, 5),
        span("inner", 60, 10),
        span("outer", 200, 1),
    ]
    assert times(events) == {("outer", "cpu"): (2, 51), ("inner", "cpu"): (2, 45), ("leaf", "cpu"): (1, 5)}
    assert [time.name for time in sum_op_times(events)] == ["outer", "inner", "leaf"]


def test_equal_starts_and_ends_nest_and_neighbours_do_not():
    events = [span("b", 0, 10), span("a", 0, 30), span("c", 10, 20)]
    assert times(events) == {("a", "cpu"): (1, 0), ("b", "cpu"): (1, 10), ("c", "cpu"): (1, 20)}


def test_op_that_outlives_its_caller_is_not_nested():
    events = [span("step", 0, 100), span("gloo:all_reduce", 50, 500), span("next", 60, 20), span("later", 200, 10)]
    assert times(events) == {
        ("step", "cpu"): (1, 80),
        ("gloo:all_reduce", "cpu"): (1, 500),
        ("next", "cpu"): (1, 20),
        ("later", "cpu"): (1, 10),
    }


def test_threads_and_kernels_are_apart():
    events = [
        span("a", 0, 100),
        span("a", 0, 7, tid=51),
        span("gemm", 10, 3, pid=2, tid=7, cat="kernel"),
        span("cudaLaunchKernel", 5, 2, cat="cuda_runtime"),
    ]
    assert times(events) == {
        ("a", "cpu"): (2, 105),
        ("gemm", "cuda:2"): (1, 3),
        ("cudaLaunchKernel", "cpu"): (1, 2),
    }


BASE = 1_790_000_000_000_000_000
TRACE = {
    "baseTimeNanoseconds": BASE,
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 50, "tid": 0, "ts": 5, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": 50, "tid": 61, "ts": 5, "args": {"name": "thread 61 (gloo)"}},
        span("late", 4_000_002_000_009.5, 3, tid=61),
        span("op", 4_000_002_000_001.25, 3),
        span("gemm", 4_000_002_000_005.0, 3, pid=0, tid=7, cat="kernel"),
        span("mine", 4_000_002_000_005.0, 9, pid=0, tid=7, cat="gpu_user_annotation"),
        {"ph": "s", "id": 9, "cat": "ac2g", "name": "ac2g", "pid": 50, "tid": 50, "ts": 4_000_002_000_001.25},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 1, "dur": 9},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1},
    ],
}


def piece(rank):
    return RankTrace(TRACE, rank=rank, device="cuda:0", pid=50, epoch=BASE + 4_000_002_000_000_000)


def test_a_rank_is_one_process_with_its_threads_and_streams():
    events = piece(3).events()
    assert {element["pid"] for element in events} == {3}
    reported = {(event["name"], event["tid"]): event["args"] for event in events if event["ph"] == "M"}
    assert reported["process_name", 0] == {"name": "rank 3 (cuda:0, process 50)"}
    assert reported["process_sort_index", 0] == {"sort_index": 3}
    names = {args["name"]: tid for (what, tid), args in reported.items() if what == "thread_name"}
    assert set(names) == {"main thread", "thread 61 (gloo)", "cuda:0 stream 7"}
    placed = {item["name"]: (item["tid"], item["ts"]) for item in events if item["ph"] == "X"}
    assert placed == {
        "op": (names["main thread"], 1.25),
        "late": (names["thread 61 (gloo)"], 9.5),
        "gemm": (names["cuda:0 stream 7"], 5.0),
        "mine": (names["cuda:0 stream 7"], 5.0),
    }


def test_arrows_of_two_ranks_are_different_ones():
    flows = [next(event["id"] for event in piece(rank).events() if event["ph"] == "s") for rank in (0, 1)]
    assert flows[0] != flows[1] and max(flows) < 1 << 53


def test_spans_around_ops_are_not_counted():
    assert {item.name for item in piece(0).ops()} == {"late", "op", "gemm"}


def test_a_trace_without_its_zero_is_refused():
    with pytest.raises(ValueError, match="baseTimeNanoseconds"):
        RankTrace({"traceEvents": []}, rank=0, device="cpu", pid=1, epoch=0)


def test_torchs_own_profiler_is_read_and_agrees_with_its_sums(capfd):
    import time

    epoch = time.time_ns()
    profiling = Profiling(epoch, 2, torch.device("cpu"))
    profiling.start()
    started = time.time_ns()
    with profiling.span("barrier"):
        x = torch.randn(200, 200)
        for _ in range(20):
            x = (x @ x).tanh()
    profiling.stop()
    ended = time.time_ns()
    profile = profiling.result()
    ours: dict[str, OpTime] = {item.name: item for item in profile.ops}
    for average in profiling._profiler.key_averages():
        if average.key in ("aten::mm", "aten::tanh", "aten::matmul"):
            assert ours[average.key].calls == average.count
            assert ours[average.key].seconds * 1e6 == pytest.approx(average.self_cpu_time_total, rel=0.01, abs=5)
    events = json.loads(b"[" + profile.events + b"]")
    (noted,) = [event for event in events if event["name"] == "dist.barrier"]
    assert (started - epoch) / 1e3 - 1000 <= noted["ts"]
    assert noted["ts"] + noted["dur"] <= (ended - epoch) / 1e3 + 1000
    assert capfd.readouterr().err == ""
