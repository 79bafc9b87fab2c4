"""Experiment trackers: the `Tracker` protocol, and adapters for files, TensorBoard, Weights & Biases and MLflow.

The package of an adapter is imported when its tracker starts.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeGuard, cast, runtime_checkable

import torch

from rankbook.errors import InvalidArgument
from rankbook.runtime.launch_environment import read_flag, read_text
from rankbook.runtime.process_state import PartialState


@runtime_checkable
class Tracker(Protocol):
    """Destination of metrics.

    Attributes:
        name: name of the tracker in `log_with` and `get_tracker`.
        main_process_only: whether the tracker runs on rank 0 only.
    """

    name: str
    main_process_only: bool

    @property
    def tracker(self) -> Any:  # noqa: ANN401 - the destination's own object
        """Return the object that the tracker writes to, such as a `SummaryWriter`."""

    def start(self) -> None:
        """Open the destination."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - the destination's
        """Log the metrics of one step."""

    def finish(self) -> None:
        """Close the destination."""


class GeneralTracker:
    """Base class of trackers.

    A subclass defines `name`, `requires_logging_directory` and `tracker`, overrides the methods that it needs, and
    calls `super().__init__()`, which raises `NotImplementedError` for a missing attribute. The adapters in this module
    do nothing on ranks other than 0, unless `main_process_only` is False.
    """

    main_process_only: bool = True
    name: str
    requires_logging_directory: bool
    # Whether a copy of the tracker in another process goes on with the same files after `start`.
    _appends: ClassVar[bool] = False

    def __init__(self, _blank: bool = False) -> None:
        needed = ("name", "requires_logging_directory", "tracker")
        lacking = [name for name in needed if name not in dir(self)]  # hasattr would evaluate the property `tracker`
        if lacking and not _blank:
            raise NotImplementedError(f"{type(self).__name__} must define {', '.join(lacking)}")

    @property
    def is_here(self) -> bool:
        """Return True if this tracker runs on this rank."""
        return not self.main_process_only or PartialState().is_main_process

    def start(self) -> None:
        """Open the destination. Does nothing by default."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings of the run. Does nothing by default."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - the destination's
        """Log the metrics of one step. Does nothing by default."""

    def finish(self) -> None:
        """Close the destination. Does nothing by default."""


class InactiveTracker(GeneralTracker):
    """Stand-in for a tracker, and for the object that it writes to, on a rank where the tracker does not run.

    All methods of any name can be called with any arguments. They do nothing and return None.
    """

    requires_logging_directory = False

    def __init__(self, name: str) -> None:
        super().__init__(_blank=True)
        self.name = name

    @property
    def tracker(self) -> InactiveTracker:
        """Return this object, which also stands in for the object that the tracker writes to."""
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):  # asked for by pickle, copy and IPython
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return _do_nothing


def _do_nothing(*_args: object, **_options: object) -> None:
    """Accept the arguments of any method."""


class TensorBoardTracker(GeneralTracker):
    """Tracker that writes TensorBoard event files.

    Args:
        run_name: name of the run.
        logging_dir: the files are written to `logging_dir/run_name`.
        kwargs: keyword arguments of `torch.utils.tensorboard.SummaryWriter`.

    `start` raises `InvalidArgument` if the package tensorboard is not installed.

    Example::

        accelerator = Accelerator(log_with="tensorboard", project_dir="runs")
        accelerator.init_trackers("digits")
        accelerator.log({"loss": 0.5}, step=1)
        accelerator.end_training()
    """

    name = "tensorboard"
    requires_logging_directory = True
    _appends = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:  # noqa: ANN401 - the writer's
        super().__init__()
        self.run_name = run_name
        self.logging_dir = Path(logging_dir).expanduser() / run_name
        self._kwargs = kwargs
        self._writer: Any = None

    @property
    def tracker(self) -> Any:  # noqa: ANN401 - a SummaryWriter
        """Return the `SummaryWriter`; None on other ranks and before `start`."""
        return self._writer

    def start(self) -> None:
        """Open the writer."""
        if not self.is_here or self._writer is not None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InvalidArgument(
                f"log_with='tensorboard' requires the package tensorboard, which is not installed ({error}): "
                "pip install tensorboard, or use log_with='jsonl', which requires no package"
            ) from None
        writer: Any = SummaryWriter
        self._writer = writer(str(self.logging_dir), **self._kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as hyperparameters.

        Values other than bool, int, float and str are stored as text.
        """
        if self._writer is not None:
            # `add_hparams` raises for any other type, such as a list or None.
            plain = (bool, int, float, str)
            self._writer.add_hparams(
                {key: value if isinstance(value, plain) else str(value) for key, value in values.items()},
                metric_dict={},
            )
            self._writer.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - the writer's
        """Log numbers as scalars, strings as text, and dicts of numbers as one chart.

        Raises `InvalidArgument` for other types.
        """
        if self._writer is None:
            return
        for key, value in _plain(values).items():
            if isinstance(value, bool | int | float):
                self._writer.add_scalar(key, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self._writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self._writer.add_scalars(key, value, global_step=step, **kwargs)
            else:
                raise InvalidArgument(
                    f"TensorBoard cannot log {key!r} of type {type(value).__name__}: expected a number, a string or a "
                    "dict of numbers"
                )
        # The curve is watched while the cell runs, and a killed rank loses no metrics.
        self._writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - the writer's
        """Log batches of images, in the format of `SummaryWriter.add_images`."""
        if self._writer is not None:
            for key, value in values.items():
                self._writer.add_images(key, value, global_step=step, **kwargs)

    def finish(self) -> None:
        """Close the writer."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __getstate__(self) -> dict[str, Any]:
        # With `purge_step` the second writer would hide what the first one has written.
        kwargs = {name: value for name, value in self._kwargs.items() if name != "purge_step"}
        return {**self.__dict__, "_writer": None, "_kwargs": kwargs}


class JSONLinesTracker(GeneralTracker):
    """Tracker that appends metrics to the file `logging_dir/run_name/metrics.jsonl`.

    Every call of `log` adds one line: `{"step": …, "time": …, "values": …}`, with the time in seconds since the Unix
    epoch. The settings are a line with the key "config". Values that JSON cannot represent are stored as text, also
    numbers that are not finite: `"nan"`, `"inf"` and `"-inf"`, which `float` reads. No package is required.

    Example::

        accelerator = Accelerator(log_with="jsonl", project_dir="runs")
        accelerator.init_trackers("digits", config={"lr": 0.1})
        accelerator.log({"loss": 0.5}, step=1)
        accelerator.end_training()  # runs/digits/metrics.jsonl has two lines
    """

    name = "jsonl"
    requires_logging_directory = True
    _appends = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(logging_dir).expanduser() / run_name / "metrics.jsonl"
        self._file: Any = None

    @property
    def tracker(self) -> Any:  # noqa: ANN401 - a text file
        """Return the open file; None on other ranks and before `start`."""
        return self._file

    def start(self) -> None:
        """Open the file for appending."""
        if self.is_here and self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings of the run."""
        self._write({"config": _plain(values), "time": time.time()})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - kept as well
        """Log the metrics of one step. Tensors are stored as numbers or lists."""
        self._write({"step": step, "time": time.time(), "values": _plain(values), **kwargs})

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(_finite(line), default=str, allow_nan=False) + "\n")
            self._file.flush()  # a killed rank loses no lines


class WandBTracker(GeneralTracker):
    """Tracker that logs to Weights & Biases, with the package wandb.

    Args:
        run_name: name of the project.
        main_process_only: False starts a run on every rank. Use it with `group`, which shows these runs together.
        kwargs: keyword arguments of `wandb.init`, such as `name`, `group`, `mode="offline"` and `dir`.

    `start` raises `InvalidArgument` if the package is not installed.

    Example::

        accelerator = Accelerator(log_with="wandb")
        accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs={"wandb": {"mode": "offline"}})
    """

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, run_name: str, *, main_process_only: bool = True, **kwargs: Any) -> None:  # noqa: ANN401 - wandb.init's
        super().__init__()
        self.run_name = run_name
        self.main_process_only = main_process_only
        self._kwargs = kwargs
        self._run: Any = None

    @property
    def tracker(self) -> Any:  # noqa: ANN401 - a wandb run
        """Return the run that `wandb.init` has returned; None on other ranks and before `start`."""
        return self._run

    def start(self) -> None:
        """Start the run."""
        if self.is_here:
            self._run = _package("wandb").init(project=self.run_name, **self._kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Add the settings to the configuration of the run."""
        if self._run is not None:
            # A cell may run again with other settings, which wandb refuses otherwise.
            self._run.config.update(_plain(values), allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - the run's
        """Log numbers, strings, dicts, and objects of wandb such as images and tables."""
        if self._run is not None:
            self._run.log(_plain(values), step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - wandb.Image's
        """Log lists of images. The keyword arguments are those of `wandb.Image`."""
        if self._run is not None:
            image = _package("wandb").Image
            self._run.log({key: [image(item, **kwargs) for item in value] for key, value in values.items()}, step=step)

    def finish(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class MLflowTracker(GeneralTracker):
    """Tracker that logs to MLflow, with the package mlflow or mlflow-skinny.

    The server or folder is that of MLflow: `mlflow.set_tracking_uri` or the environment variable
    `MLFLOW_TRACKING_URI`. Call or set it on the rank that logs, before `init_trackers`.

    Args:
        experiment_name: name of the experiment. It is created if it does not exist.
        main_process_only: False starts a run on every rank.
        nested_run: start the run inside the active run, if there is one.
        tags: tags of the run, as a dict or as JSON text.
        kwargs: other keyword arguments of `mlflow.start_run`, such as `run_name` and `run_id`.

    The environment variables `MLFLOW_EXPERIMENT_NAME`, `MLFLOW_NESTED_RUN` (1 or 0) and `MLFLOW_TAGS` (JSON) take
    precedence over these arguments, as they do with Accelerate.

    Raises `InvalidArgument` if the tags are not a dict, or `MLFLOW_NESTED_RUN` is not a boolean. `start` raises it if
    the package is not installed.

    Example::

        accelerator = Accelerator(log_with="mlflow")
        accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs={"mlflow": {"run_name": "first"}})
    """

    name = "mlflow"
    requires_logging_directory = False
    _started: ClassVar[set[str]] = set()
    """Ids of the runs that trackers of this process have started and not ended."""

    def __init__(
        self,
        experiment_name: str,
        *,
        main_process_only: bool = True,
        nested_run: bool = False,
        tags: dict[str, Any] | str | None = None,
        **kwargs: Any,  # noqa: ANN401 - mlflow.start_run's
    ) -> None:
        super().__init__()
        self.experiment_name = read_text("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.main_process_only = main_process_only
        self.nested_run = read_flag("MLFLOW_NESTED_RUN") if "MLFLOW_NESTED_RUN" in os.environ else nested_run
        self.tags = _read_tags(read_text("MLFLOW_TAGS") or tags)
        self._kwargs = kwargs
        self._run: Any = None

    @property
    def tracker(self) -> Any:  # noqa: ANN401 - an mlflow.ActiveRun
        """Return the run that `mlflow.start_run` has returned; None on other ranks and before `start`."""
        return self._run

    def start(self) -> None:
        """Start the run. A run that an earlier tracker has left open is ended: its cell has failed or runs again."""
        if not self.is_here:
            return
        mlflow = _package("mlflow")
        active = mlflow.active_run()
        # Only a run of ours, and not the parent of this one. MLflow itself reports a run that the user has started.
        if active is not None and active.info.run_id in self._started and not self.nested_run:
            self._started.remove(active.info.run_id)
            mlflow.end_run()
        experiment = mlflow.set_experiment(self.experiment_name)
        self._run = mlflow.start_run(
            experiment_id=experiment.experiment_id, nested=self.nested_run, tags=self.tags, **self._kwargs
        )
        self._started.add(self._run.info.run_id)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as parameters of the run."""
        if self._run is not None:
            settings = list(_plain(values).items())
            # In several requests: the server refuses more parameters at once.
            for start in range(0, len(settings), _MLFLOW_PARAMETERS):
                _package("mlflow").log_params(dict(settings[start : start + _MLFLOW_PARAMETERS]))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - log_metrics'
        """Log numbers as metrics. A dict of numbers becomes one metric per key: `loss/train`, `loss/test`.

        Raises `InvalidArgument` for other types.
        """
        if self._run is not None:
            _package("mlflow").log_metrics(dict(_numbers(_plain(values))), step=step, **kwargs)

    def finish(self) -> None:
        """End the run."""
        if self._run is not None:
            self._started.discard(self._run.info.run_id)
            self._run = None
            _package("mlflow").end_run()


def _read_tags(tags: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """Return the tags of a run, which may be given as JSON text."""
    if isinstance(tags, str):
        try:
            tags = json.loads(tags)
        except ValueError as error:
            raise InvalidArgument(f"invalid tags {tags!r}: expected the JSON text of an object: {error}") from None
    if tags is not None and not isinstance(tags, dict):
        raise InvalidArgument(f"invalid tags {tags!r}: expected a dict")
    return tags


_MLFLOW_PARAMETERS = 100
"""Number of parameters that MLflow's server accepts in one request."""

TRACKERS: dict[str, Callable[..., Tracker]] = {
    "jsonl": JSONLinesTracker,
    "mlflow": MLflowTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
}
"""Adapters by name. Add other classes here, or pass instances instead of names."""
_PACKAGES = {"mlflow": "mlflow", "tensorboard": "tensorboard", "wandb": "wandb"}


def available_trackers() -> list[str]:
    """Return the names of the trackers whose packages are installed."""
    return [name for name in TRACKERS if name not in _PACKAGES or _is_installed(_PACKAGES[name])]


def filter_trackers(
    log_with: str | Tracker | Iterable[str | Tracker] | None,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[str | Tracker]:
    """Return the requested trackers without duplicates: instances, then names.

    Args:
        log_with: names or instances; "all" selects all trackers that are installed.
        logging_dir: directory of the trackers' files.

    Raises `InvalidArgument` for an unknown name, a package that is not installed, and a missing `logging_dir`.

    Example::

        filter_trackers(["jsonl", "jsonl"], "runs")  # ['jsonl']
    """
    if log_with is None:
        return []
    # A string is iterable, too, so one name must not be taken for a list of letters.
    single = isinstance(log_with, str) or _is_tracker(log_with)
    requested: list[Any] = [log_with] if single else list(cast("Iterable[str | Tracker]", log_with))
    names = [str(entry) for entry in requested if not _is_tracker(entry)]
    chosen: list[str | Tracker] = [tracker for tracker in requested if _is_tracker(tracker)]
    for name in dict.fromkeys(available_trackers() if "all" in names else names):
        if name not in TRACKERS:
            raise InvalidArgument(f"unknown log_with {name!r}; choose from {', '.join([*TRACKERS, 'all'])}")
        if name not in available_trackers():
            raise InvalidArgument(
                f"log_with={name!r} requires a package that is not installed: pip install {_PACKAGES[name]}"
            )
        # Instances were made by the user and have their directory already; only trackers by name are checked.
        if logging_dir is None and getattr(TRACKERS[name], "requires_logging_directory", False):
            raise InvalidArgument(
                f"Logging with `{name}` requires a `logging_dir` for its files: set logging_dir or project_dir"
            )
        chosen.append(name)
    return chosen


def make_tracker(
    tracker: str | Tracker,
    run_name: str,
    logging_dir: str | os.PathLike[str] | None = None,
    /,
    **kwargs: Any,  # noqa: ANN401 - the tracker's, which may be called `run_name` too
) -> Tracker:
    """Create a tracker that `filter_trackers` returned. It is not started.

    An instance is returned as it is.
    """
    if not isinstance(tracker, str):
        return tracker
    kind = TRACKERS[tracker]
    # The same signature rule as in Accelerate: only trackers that write files take a directory.
    return (
        kind(run_name, logging_dir, **kwargs)
        if getattr(kind, "requires_logging_directory", False)
        else kind(run_name, **kwargs)
    )


def _is_tracker(value: object) -> TypeGuard[Tracker]:
    """Return True for a tracker instance. Checks the class, as `tracker` may not be available before `start`."""
    return not isinstance(value, str) and callable(getattr(type(value), "log", None))


def _is_installed(package: str) -> bool:
    """Return True if `package` can be imported. A folder of this name does not count: wandb makes `./wandb`."""
    # A folder without `__init__.py` is a namespace package, which has a spec but no origin.
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _package(name: str) -> Any:  # noqa: ANN401 - a module
    """Import the package of a tracker. Raises `InvalidArgument` if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise InvalidArgument(
            f"log_with={name!r} requires the package {name}, which is not installed ({error}): pip install {name}, "
            "or use log_with='jsonl', which requires no package"
        ) from None


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested dicts, with the keys joined by slashes."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, bool | int | float):
            yield f"{prefix}{key}", value
        else:
            raise InvalidArgument(
                f"MLflow cannot log {prefix + key!r} of type {type(value).__name__}: expected a number or a dict of "
                "numbers; store settings with init_trackers(config=...)"
            )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with tensors and arrays converted to numbers or lists."""
    return {key: _number(value) for key, value in values.items()}


def _number(value: Any) -> Any:  # noqa: ANN401 - anything
    # Metrics may be nested, such as a dict of curves for one chart.
    if isinstance(value, Mapping):
        return _plain(value)
    if isinstance(value, torch.Tensor) or (hasattr(value, "tolist") and hasattr(value, "dtype")):
        if any(not placement.is_replicate() for placement in getattr(value, "placements", ())):
            raise InvalidArgument(
                "a DTensor that is divided between the ranks, or whose parts are not summed up, has no number here: "
                "log its full_tensor(), which all ranks call"
            )
        elements = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", 0)
        return value.item() if elements == 1 else value.tolist()
    return value


def _finite(value: Any) -> Any:  # noqa: ANN401 - anything
    """Return `value` with NaN and infinities as text: JSON has no number for them, and `json.dumps` writes `NaN`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {_finite(key) if isinstance(key, float) else key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
