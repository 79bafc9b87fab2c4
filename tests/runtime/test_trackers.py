"""Test what trackers write, on which rank, and the error if they cannot write."""

from __future__ import annotations

import json
import pickle
import sys
import types

import numpy as np
import pytest
import torch

from rankbook.errors import InvalidArgument
from rankbook.runtime import Accelerator, trackers
from rankbook.runtime.process_state import PartialState
from rankbook.runtime.trackers import (
    GeneralTracker,
    JSONLinesTracker,
    MLflowTracker,
    TensorBoardTracker,
    Tracker,
    WandBTracker,
    filter_trackers,
    make_tracker,
)
from tests.conftest import wait_until


class RecordingTracker(GeneralTracker):
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
    """Stand-in for the writer of TensorBoard."""

    made: list = []  # noqa: RUF012 - for the test to look at

    def __init__(self, folder, **kwargs):
        self.calls = [("made", folder, kwargs)]
        Writer.made.append(self)

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


@pytest.fixture
def writer(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr(trackers, "_is_installed", lambda _: True)
    Writer.made.clear()
    return Writer.made


class Hosted:
    """Stand-in for the packages wandb and mlflow: records every call, and every call returns this object."""

    def __init__(self):
        self.calls = []
        self.active = None

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args, kwargs))

    def init(self, **kwargs):
        self.calls.append(("init", kwargs))
        return self

    @property
    def config(self):
        return self

    def Image(self, data, **kwargs):
        return ("image", data, kwargs)

    def set_experiment(self, name):
        self.calls.append(("set_experiment", name))
        return types.SimpleNamespace(experiment_id=f"id of {name}")

    def active_run(self):
        return self.active

    def start_run(self, **kwargs):
        assert self.active is None, "Run is already active"
        self.calls.append(("start_run", kwargs))
        self.active = types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run {len(self.calls)}"))
        return self.active

    def end_run(self):
        self.calls.append(("end_run",))
        self.active = None


@pytest.fixture
def hosted(monkeypatch):
    package = Hosted()
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    return package


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    entries = lines(tmp_path / "run" / "metrics.jsonl")
    assert [entry["config"] for entry in entries[::2]] == [{"lr": 0.1, "run": run, "device": "cpu"} for run in range(2)]
    assert entries[1]["values"] == {"loss": 0.5, "per": {"class": [0, 1]}}
    assert (entries[1]["step"], entries[1]["note"]) == (3, "x")


def test_a_part_of_a_dtensor_is_not_logged_as_the_whole(tmp_path):
    from torch.distributed.tensor import Partial

    PartialState(cpu=True)
    tracker = JSONLinesTracker("run", tmp_path)
    tracker.start()
    part = torch.ones(1)
    part.placements = (Partial(),)  # as of a norm under FSDP2
    with pytest.raises(InvalidArgument, match="full_tensor"):
        tracker.log({"norm": part})
    tracker.finish()


def test_arrays_with_one_element_are_numbers(tmp_path):
    PartialState(cpu=True)
    tracker = JSONLinesTracker("run", tmp_path)
    tracker.start()
    tracker.log({"loss": torch.tensor([0.5]), "rate": np.ones((1, 1)), "none": torch.ones(0), "two": np.ones(2)})
    tracker.finish()
    (entry,) = lines(tracker.path)
    assert entry["values"] == {"loss": 0.5, "rate": 1.0, "none": [], "two": [1.0, 1.0]}


def test_json_lines_hold_numbers_that_are_not_finite_as_text(tmp_path):
    PartialState(cpu=True)
    tracker = JSONLinesTracker("run", tmp_path)
    tracker.start()
    tracker.store_init_configuration({"limits": (float("-inf"), 1.5)})
    tracker.log(
        {"loss": torch.tensor(float("nan")), "per": {"class": torch.tensor([1.0, float("inf")])}}, lr=float("nan")
    )
    tracker.finish()
    config, entry = map(strict_json, tracker.path.read_text().splitlines())
    assert config["config"] == {"limits": ["-inf", 1.5]}
    assert entry["values"] == {"loss": "nan", "per": {"class": [1.0, "inf"]}}
    assert entry["lr"] == "nan"


def strict_json(line):
    """Read JSON as the standard defines it, without the constants that Python adds."""

    def refuse(constant):
        raise AssertionError(f"not JSON: {constant}")

    return json.loads(line, parse_constant=refuse)


def test_other_ranks_write_nothing(tmp_path, writer, hosted):
    PartialState(cpu=True).process_index = 1
    for tracker in (
        JSONLinesTracker("run", tmp_path),
        TensorBoardTracker("run", tmp_path),
        WandBTracker("run"),
        MLflowTracker("run"),
    ):
        tracker.start()
        tracker.store_init_configuration({})
        tracker.log({"x": 1})
        tracker.finish()
        assert tracker.tracker is None
    assert not list(tmp_path.iterdir())
    assert not writer
    assert not hosted.calls


def test_tracker_of_other_ranks_accepts_all_calls(tmp_path, writer):
    PartialState(cpu=True).process_index = 1
    tracker, everywhere = RecordingTracker(), RecordingTracker()
    everywhere.name, everywhere.main_process_only = "everywhere", False
    accelerator = Accelerator(log_with=["tensorboard", tracker, everywhere], project_dir=tmp_path)
    early = accelerator.get_tracker("tensorboard", unwrap=True)
    accelerator.init_trackers("run")
    assert accelerator.get_tracker("kept") is tracker
    assert accelerator.get_tracker("everywhere", unwrap=True) is everywhere.calls
    for name in ("tensorboard", "kept"):
        for inner in (early, accelerator.get_tracker(name, unwrap=True)):
            assert inner.add_histogram("weights", torch.ones(3), global_step=1) is None
            assert inner.log({"x": 1}, step=2) is inner.finish() is None
    assert pickle.loads(pickle.dumps(inner)).tracker.name == "kept"
    assert not writer and not hasattr(inner, "_ipython_display_")


def test_in_a_process_that_replaces_a_rank_files_are_continued_and_other_trackers_reported(
    tmp_path, writer, hosted, caplog
):
    log_with = ["jsonl", "tensorboard", "wandb", RecordingTracker()]
    accelerator = Accelerator(log_with=log_with, project_dir=tmp_path)
    options = {"tensorboard": {"purge_step": 1, "flush_secs": 5}}
    accelerator.init_trackers("run", config={"lr": 0.1}, init_kwargs=options)
    accelerator.log({"x": 1}, step=1)
    copied = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(accelerator))))
    assert len(writer) == 1 and not copied.trackers, "nothing is opened before it is needed"
    copied.log({"x": 2}, step=2)
    copied.log({"x": 3}, step=3)
    assert [line.get("step") for line in lines(tmp_path / "run" / "metrics.jsonl")] == [None, 1, 2, 3]
    assert writer[1].calls[0] == ("made", str(tmp_path / "run"), {"flush_secs": 5})
    assert [call[1:] for call in writer[1].calls if call[0] == "add_scalar"] == [("x", 2, 2), ("x", 3, 3)]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "This rank has no run of kept, wandb, since the rank was replaced: nothing is"
    )
    with pytest.raises(InvalidArgument, match="'wandb' was not started"):
        copied.get_tracker("wandb")
    pickle.loads(pickle.dumps(accelerator)).end_training()
    assert len(writer) == 2
    accelerator.end_training()
    copied.end_training()


def test_in_a_process_that_replaces_another_rank_no_tracker_starts(tmp_path, writer, caplog):
    accelerator = Accelerator(log_with=["jsonl", RecordingTracker()], project_dir=tmp_path)
    accelerator.init_trackers("run")
    sent = pickle.dumps(accelerator)
    accelerator.end_training()
    PartialState().process_index = 1
    pickle.loads(sent).log({"x": 1})
    assert not (tmp_path / "run" / "metrics.jsonl").read_text() and not caplog.records


def test_tensorboard_gets_scalars_texts_and_groups_separately(tmp_path, writer):
    PartialState(cpu=True)
    tracker = TensorBoardTracker("run", tmp_path, flush_secs=5)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "layers": [1, 2]})
    tracker.log({"loss": torch.tensor(0.5), "note": "x", "both": {"a": 1}}, step=2)
    tracker.log_images({"i": "images"}, step=2)
    with pytest.raises(InvalidArgument, match="cannot log 'bad' of type NoneType"):
        tracker.log({"bad": None})
    tracker.finish()
    calls = [call for call in writer[0].calls if call[0] != "flush"]
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
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("loss")] == [(0, 0.5), (1, 0.25)]


def test_wandb_gets_plain_numbers_and_its_own_objects(hosted):
    PartialState(cpu=True)
    tracker = make_tracker("wandb", "project", None, mode="offline")
    assert isinstance(tracker, WandBTracker)
    tracker.start()
    assert tracker.tracker is hosted
    tracker.store_init_configuration({"lr": torch.tensor(0.5)})
    table = object()
    tracker.log({"loss": torch.tensor(0.25), "per": {"a": 1}, "table": table}, step=2, commit=False)
    tracker.log_images({"digits": ["one", "two"]}, step=2, caption="x")
    tracker.finish()
    tracker.finish()
    assert tracker.tracker is None
    assert hosted.calls == [
        ("init", {"project": "project", "mode": "offline"}),
        ("update", {"lr": 0.5}, {"allow_val_change": True}),
        ("log", {"loss": 0.25, "per": {"a": 1}, "table": table}, {"step": 2, "commit": False}),
        ("log", {"digits": [("image", name, {"caption": "x"}) for name in ("one", "two")]}, {"step": 2}),
        ("finish", {}),
    ]


def test_mlflow_gets_numbers_by_name_and_parameters_in_requests_of_100(hosted):
    PartialState(cpu=True)
    tracker = make_tracker("mlflow", "experiment", None, run_name="first")
    tracker.start()
    tracker.store_init_configuration({f"setting {number}": number for number in range(150)})
    tracker.log({"loss": {"train": torch.tensor(0.5), "test": 1}}, step=3)
    with pytest.raises(InvalidArgument, match="MLflow cannot log 'loss/note' of type str: expected a number"):
        tracker.log({"loss": {"note": "x"}})
    tracker.finish()
    tracker.finish()
    experiment, run, *parameters, metrics, end = hosted.calls
    assert experiment == ("set_experiment", "experiment")
    expected = {"experiment_id": "id of experiment", "nested": False, "tags": None, "run_name": "first"}
    assert run == ("start_run", expected)
    assert [(name, len(values)) for name, values, _ in parameters] == [("log_params", 100), ("log_params", 50)]
    assert metrics == ("log_metrics", {"loss/train": 0.5, "loss/test": 1}, {"step": 3})
    assert end == ("end_run",)


def test_a_run_of_mlflow_that_a_failed_cell_left_open_is_ended_by_the_next_one(hosted):
    PartialState(cpu=True)
    make_tracker("mlflow", "experiment").start()
    make_tracker("mlflow", "experiment").start()
    assert [call[0] for call in hosted.calls][2:] == ["end_run", "set_experiment", "start_run"]
    hosted.active = types.SimpleNamespace(info=types.SimpleNamespace(run_id="of the user"))
    with pytest.raises(AssertionError, match="already active"):
        make_tracker("mlflow", "experiment").start()


def test_environment_variables_of_mlflow_take_precedence_over_arguments(hosted, monkeypatch):
    PartialState(cpu=True)
    assert MLflowTracker("run", nested_run=True, tags='{"a": 1}').tags == {"a": 1}
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the environment")
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "False")
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "vision"}')
    MLflowTracker("run", nested_run=True, tags={"a": 1}).start()
    experiment, run = hosted.calls
    assert experiment == ("set_experiment", "of the environment")
    assert run[1] == {"experiment_id": "id of of the environment", "nested": False, "tags": {"team": "vision"}}


def test_a_nested_run_of_mlflow_leaves_its_parent_open(hosted):
    PartialState(cpu=True)
    MLflowTracker("run").start()
    with pytest.raises(AssertionError, match="already active"):  # the stand-in knows no nested runs
        MLflowTracker("run", nested_run=True).start()
    assert "end_run" not in [call[0] for call in hosted.calls]


@pytest.mark.parametrize("tags", ["{", "[1]", ["a"]])
def test_invalid_tags_of_mlflow_are_refused(tags):
    with pytest.raises(InvalidArgument, match="invalid tags"):
        MLflowTracker("run", tags=tags)


@pytest.mark.parametrize("kind", [WandBTracker, MLflowTracker])
def test_every_rank_has_a_run_on_demand(hosted, kind):
    PartialState(cpu=True).process_index = 1
    tracker = kind("run", main_process_only=False)
    tracker.start()
    assert tracker.tracker is not None
    tracker.finish()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_without_the_package_of_a_tracker_it_says_what_to_install(monkeypatch, name):
    PartialState(cpu=True)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidArgument, match=f"pip install {name}, or use log_with='jsonl'"):
        make_tracker(name, "run").start()


def test_a_folder_with_the_name_of_a_package_is_not_this_package(tmp_path, monkeypatch):
    (tmp_path / "folder_of_runs").mkdir()  # as ./wandb, which wandb makes
    monkeypatch.syspath_prepend(tmp_path)
    assert not trackers._is_installed("folder_of_runs")
    assert not trackers._is_installed("no_such_package")
    assert trackers._is_installed("json")


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # wandb's own
def test_wandb_itself_writes_a_run_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    # wandb sets it, and the kernels that this process starts later would inherit it.
    monkeypatch.setenv("WANDB_SERVICE", "")
    monkeypatch.delenv("WANDB_SERVICE")
    monkeypatch.setenv("WANDB_SILENT", "true")
    PartialState(cpu=True)
    tracker = WandBTracker("project", mode="offline", dir=str(tmp_path))
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": torch.tensor(0.5)}, step=3)
    assert tracker.tracker.config["lr"] == 0.1
    tracker.finish()
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    # The process of wandb writes the file, and may still do so when `finish` returns.
    wait_until(lambda: b"loss" in written.read_bytes(), timeout=60, what="wandb to write the run")


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # mlflow's own
def test_mlflow_itself_reads_what_was_logged(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    # Not `set_tracking_uri`, which would set the variable for the processes of later tests.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    PartialState(cpu=True)
    tracker = MLflowTracker("experiment", run_name="first")
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": {"train": torch.tensor(0.5)}}, step=3)
    run = tracker.tracker.info.run_id
    tracker.finish()
    assert mlflow.active_run() is None
    (point,) = mlflow.MlflowClient().get_metric_history(run, "loss/train")
    assert (point.step, point.value) == (3, 0.5)
    assert mlflow.get_run(run).data.params == {"lr": "0.1"}


def test_without_tensorboard_it_says_what_to_install(tmp_path, monkeypatch):
    PartialState(cpu=True)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InvalidArgument, match="pip install tensorboard, or use log_with='jsonl'"):
        TensorBoardTracker("run", tmp_path).start()
    monkeypatch.setattr(trackers, "_is_installed", lambda _: False)
    with pytest.raises(InvalidArgument, match="requires a package that is not installed: pip install tensorboard"):
        filter_trackers("tensorboard", tmp_path)


def test_trackers_are_selected_without_duplicates(tmp_path, monkeypatch):
    tracker = RecordingTracker()
    assert filter_trackers(None) == []
    assert filter_trackers(tracker) == [tracker]
    assert filter_trackers(["jsonl", tracker, "jsonl"], tmp_path) == [tracker, "jsonl"]
    monkeypatch.setattr(trackers, "_is_installed", lambda _: True)
    assert filter_trackers(["all", tracker], tmp_path) == [tracker, "jsonl", "mlflow", "tensorboard", "wandb"]
    assert make_tracker(tracker, "run") is tracker


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


def test_unknown_tracker_name_and_missing_folder_are_errors():
    with pytest.raises(
        InvalidArgument, match="unknown log_with 'comet'; choose from jsonl, mlflow, tensorboard, wandb, all"
    ):
        filter_trackers(["comet"])
    with pytest.raises(InvalidArgument, match="set logging_dir or project_dir"):
        filter_trackers("jsonl")


def test_custom_tracker_must_be_complete():
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match="Half must define requires_logging_directory, tracker"):
        Half()
    assert isinstance(RecordingTracker(), Tracker)
    assert GeneralTracker(_blank=True).main_process_only
