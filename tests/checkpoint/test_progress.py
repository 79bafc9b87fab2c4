"""What a listener hears of a save, and that one that breaks does no harm before its time."""

from __future__ import annotations

import pytest

from rankbook.checkpoint import async_save, progress
from rankbook.checkpoint.progress import SaveProgress
from rankbook.protocol import telemetry


def test_each_phase_is_told_and_bytes_now_and_then(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock) / 100)  # a hundredth for each look at it
    heard = []
    told = SaveProgress("runs", background=True, on_progress=heard.append)
    told.name, told.step, told.total = "step-3", 3, 400
    told.enter("writing")
    for _ in range(40):
        told.wrote(10)
    told.enter("done")
    assert [each.phase for each in heard][:2] == ["planning", "writing"]
    assert heard[-1].phase == "done"
    assert 3 < len(heard) < 20
    last = heard[-1]
    assert (last.folder, last.name, last.step, last.written, last.total) == ("runs", "step-3", 3, 400, 400)
    assert last.background
    assert last.rate > 0
    assert heard[0].rate is None
    assert told._source not in telemetry._sources


def test_a_failure_is_the_last_word():
    heard = []
    told = SaveProgress("runs", on_progress=heard.append)
    assert "planning" in {getattr(each, "phase", "") for each in telemetry.snapshot()}
    told.failed("no space")
    assert (heard[-1].phase, heard[-1].error) == ("failed", "no space")
    assert told._source not in telemetry._sources


def test_a_save_that_does_not_get_as_far_as_its_group_is_told_to_have_failed(monkeypatch):
    def refuse():
        raise RuntimeError("no group")

    monkeypatch.setattr(async_save, "_meet", refuse)
    heard = []
    told = SaveProgress("runs", background=True, on_progress=heard.append)
    with pytest.raises(RuntimeError, match="no group"):
        async_save.start_save(None, told, None, everything=False)
    assert (heard[-1].phase, heard[-1].error) == ("failed", "RuntimeError: no group")
    assert told._source not in telemetry._sources


def test_what_a_listener_raises_waits_until_it_is_asked_for():
    calls = []

    def broken(said):
        calls.append(said)
        raise KeyboardInterrupt

    told = SaveProgress("runs", on_progress=broken)
    told.enter("writing")
    assert len(calls) == 1  # it is not called again
    with pytest.raises(KeyboardInterrupt):
        told.check()
    SaveProgress("runs").check()
