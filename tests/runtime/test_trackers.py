"""Where metrics go: what is written, on which rank, and what is said when it cannot be."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

from rankbook.errors import BadRequest
from rankbook.runtime import trackers
from rankbook.runtime.process_state import PartialState
from rankbook.runtime.trackers import (
    GeneralTracker,
    JSONLinesTracker,
    TensorBoardTracker,
    Tracker,
    filter_trackers,
    make_tracker,
)


class Kept(GeneralTracker):
    name = "kept"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.calls = []

    @property
    def tracker(self):
        return self.calls

    def log(self, values, step=None, **kwargs):
        self.calls.append((values, step, kwargs))


class Writer:
    """As TensorBoard's."""

    made: list = []  # noqa: RUF012 - for the test to look at

    def __init__(self, folder, **kwargs):
        self.calls = [("made", folder, kwargs)]
        Writer.made.append(self)

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


@pytest.fixture
def writer(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    Writer.made.clear()
    return Writer.made


def lines(path):
    return [json.loads(each) for each in path.read_text().splitlines()]


def test_json_lines_are_appended_and_hold_plain_numbers(tmp_path):
    PartialState(cpu=True)
    for run in range(2):
        tracker = make_tracker("jsonl", "run", tmp_path)
        assert isinstance(tracker, Tracker)
        tracker.start()
        tracker.store_init_configuration({"lr": 0.1, "run": run, "device": torch.device("cpu")})
        tracker.log({"loss": torch.tensor(0.5), "per": {"class": torch.arange(2)}}, step=3, note="x")
        assert tracker.tracker is not None
        tracker.finish()
        tracker.finish()
    told = lines(tmp_path / "run" / "metrics.jsonl")
    assert [each["config"] for each in told[::2]] == [{"lr": 0.1, "run": run, "device": "cpu"} for run in range(2)]
    assert told[1]["values"] == {"loss": 0.5, "per": {"class": [0, 1]}}
    assert (told[1]["step"], told[1]["note"]) == (3, "x")


def test_other_ranks_write_nothing(tmp_path, writer):
    PartialState(cpu=True).process_index = 1
    for tracker in (JSONLinesTracker("run", tmp_path), TensorBoardTracker("run", tmp_path)):
        tracker.start()
        tracker.store_init_configuration({})
        tracker.log({"x": 1})
        tracker.finish()
        assert tracker.tracker is None
    assert not list(tmp_path.iterdir())
    assert not writer


def test_tensorboard_is_given_each_kind_its_own_chart(tmp_path, writer):
    PartialState(cpu=True)
    tracker = TensorBoardTracker("run", tmp_path, flush_secs=5)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "layers": [1, 2]})
    tracker.log({"loss": torch.tensor(0.5), "note": "x", "both": {"a": 1}}, step=2)
    tracker.log_images({"i": "images"}, step=2)
    with pytest.raises(BadRequest, match="no chart for 'bad', a NoneType"):
        tracker.log({"bad": None})
    tracker.finish()
    calls = [each for each in writer[0].calls if each[0] != "flush"]
    assert calls == [
        ("made", str(tmp_path / "run"), {"flush_secs": 5}),
        ("add_hparams", {"lr": 0.1, "layers": "[1, 2]"}, {}),
        ("add_scalar", "loss", 0.5, 2),
        ("add_text", "note", "x", 2),
        ("add_scalars", "both", {"a": 1}, 2),
        ("add_images", "i", "images", 2),
        ("close",),
    ]


@pytest.mark.filterwarnings("default")  # tensorboard's and protobuf's own
def test_tensorboard_reads_the_scalars_that_were_logged(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    PartialState(cpu=True)
    tracker = TensorBoardTracker("run", tmp_path)
    tracker.start()
    for step, loss in enumerate((0.5, 0.25)):
        tracker.log({"loss": torch.tensor(loss)}, step=step)
    tracker.finish()
    events = accumulators.EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(0, 0.5), (1, 0.25)]


def test_without_tensorboard_it_says_what_to_install(tmp_path, monkeypatch):
    PartialState(cpu=True)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BadRequest, match="pip install tensorboard, or log_with='jsonl'"):
        TensorBoardTracker("run", tmp_path).start()
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(BadRequest, match="needs a package that is not installed: pip install tensorboard"):
        filter_trackers("tensorboard", tmp_path)


def test_what_was_asked_for_is_found_once(tmp_path, monkeypatch):
    own = Kept()
    assert filter_trackers(None) == []
    assert filter_trackers(own) == [own]
    assert filter_trackers(["jsonl", own, "jsonl"], tmp_path) == [own, "jsonl"]
    monkeypatch.setattr(trackers, "find_spec", lambda _: True)
    assert filter_trackers(["all", own], tmp_path) == [own, "jsonl", "tensorboard"]
    assert make_tracker(own, "run") is own


def test_a_tracker_whose_destination_is_not_open_yet_is_one():
    class Late(GeneralTracker):
        name = "late"
        requires_logging_directory = False

        @property
        def tracker(self):
            return self.opened

    late = Late()
    assert filter_trackers(late) == filter_trackers([late]) == [late]
    assert make_tracker(late, "run") is late


def test_a_name_that_is_not_there_and_a_missing_folder_are_errors():
    with pytest.raises(BadRequest, match="log_with='wandb' is not there; use one of 'jsonl', 'tensorboard', 'all'"):
        filter_trackers(["wandb"])
    with pytest.raises(BadRequest, match="say where, with logging_dir or project_dir"):
        filter_trackers("jsonl")


def test_a_tracker_of_the_persons_own_has_to_be_complete():
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match="Half has to define requires_logging_directory, tracker"):
        Half()
    assert isinstance(Kept(), Tracker)
    assert GeneralTracker(_blank=True).main_process_only
