"""Test the progress reports of a save, and a callback that raises."""

from __future__ import annotations

import pytest

from rankbook.checkpoint import async_save
from rankbook.checkpoint.async_save import SaveProgress
from rankbook.protocol import telemetry


def test_progress_reports_every_phase_and_bytes_at_intervals(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(async_save.time, "monotonic", lambda: next(clock) / 100)  # a hundredth for each look at it
    reports = []
    save_progress = SaveProgress("runs", background=True, on_progress=reports.append)
    save_progress.name, save_progress.step, save_progress.total = "step-3", 3, 400
    save_progress.enter("writing")
    for _ in range(40):
        save_progress.add_written(10)
    save_progress.enter("done")
    assert [item.phase for item in reports][:2] == ["planning", "writing"]
    assert reports[-1].phase == "done"
    assert 3 < len(reports) < 20
    last = reports[-1]
    assert (last.folder, last.name, last.step, last.written, last.total) == ("runs", "step-3", 3, 400, 400)
    assert last.background
    assert last.rate > 0
    assert reports[0].rate is None
    assert save_progress._source not in telemetry._sources


def test_the_rate_is_of_the_time_of_writing_and_nothing_changes_after_the_end(monkeypatch):
    clock = [1.0]
    monkeypatch.setattr(async_save.time, "monotonic", lambda: clock[0])
    save_progress = SaveProgress("runs", background=True)
    for phase, seconds in (("staging", 1.0), ("writing", 2.0), ("committing", 4.0)):
        save_progress.enter(phase)
        save_progress.add_written(100 if phase == "writing" else 0)
        clock[0] += seconds
    assert (save_progress.snapshot().seconds, save_progress.snapshot().rate) == (7.0, 50.0)
    save_progress.fail("no space")
    failed = save_progress.snapshot()
    clock[0] += 3600.0
    assert save_progress.snapshot() == failed
    save_progress.withdraw()


def test_no_progress_is_reported_after_a_failure():
    reports = []
    save_progress = SaveProgress("runs", on_progress=reports.append)
    assert "planning" in {getattr(item, "phase", "") for item in telemetry.snapshot()}
    save_progress.fail("no space")
    assert (reports[-1].phase, reports[-1].error) == ("failed", "no space")
    assert save_progress._source not in telemetry._sources


def test_a_save_that_does_not_get_as_far_as_its_group_is_reported_to_have_failed(monkeypatch):
    def refuse():
        raise RuntimeError("no group")

    monkeypatch.setattr(async_save, "_ensure_group", refuse)
    reports = []
    save_progress = SaveProgress("runs", background=True, on_progress=reports.append)
    with pytest.raises(RuntimeError, match="no group"):
        async_save.start_save(None, save_progress, None, target="runs/step-3", copy_replicas=False)
    assert (reports[-1].phase, reports[-1].error) == ("failed", "RuntimeError: no group")
    assert save_progress._source not in telemetry._sources


def test_interrupt_of_the_callback_is_raised_by_check():
    calls = []

    def broken(report):
        calls.append(report)
        raise KeyboardInterrupt

    save_progress = SaveProgress("runs", on_progress=broken)
    save_progress.enter("writing")
    assert len(calls) == 1  # it is not called again
    with pytest.raises(KeyboardInterrupt):
        save_progress.check()
    SaveProgress("runs").check()
