"""Experiment trackers: the `Tracker` protocol, and adapters that write metrics to files or TensorBoard.

The package of an adapter is imported when its tracker starts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeGuard, cast, runtime_checkable

import torch

from rankbook.errors import BadRequest
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

    def __init__(self, _blank: bool = False) -> None:
        needed = ("name", "requires_logging_directory", "tracker")
        lacking = [name for name in needed if name not in dir(self)]  # hasattr would evaluate the property `tracker`
        if lacking and not _blank:
            raise NotImplementedError(f"{type(self).__name__} has to define {', '.join(lacking)}")

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


class TensorBoardTracker(GeneralTracker):
    """Tracker that writes TensorBoard event files.

    Args:
        run_name: name of the run.
        logging_dir: the files are written to `logging_dir/run_name`.
        kwargs: keyword arguments of `torch.utils.tensorboard.SummaryWriter`.

    `start` raises `BadRequest` if the package tensorboard is not installed.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:  # noqa: ANN401 - the writer's
        super().__init__()
        self.run_name = run_name
        self.logging_dir = Path(logging_dir) / run_name
        self._kwargs = kwargs
        self._writer: Any = None

    @property
    def tracker(self) -> Any:  # noqa: ANN401 - a SummaryWriter
        """Return the `SummaryWriter`; None on other ranks and before `start`."""
        return self._writer

    def start(self) -> None:
        """Open the writer."""
        if not self.is_here:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise BadRequest(
                f"log_with='tensorboard' writes with the package tensorboard, which is not installed here ({error}): "
                "pip install tensorboard, or log_with='jsonl', which needs nothing"
            ) from None
        writer: Any = SummaryWriter
        self._writer = writer(str(self.logging_dir), **self._kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as hyperparameters.

        Values other than bool, int, float and str are stored as text.
        """
        if self._writer is not None:
            plain = (bool, int, float, str)
            self._writer.add_hparams(
                {key: value if isinstance(value, plain) else str(value) for key, value in values.items()},
                metric_dict={},
            )
            self._writer.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - the writer's
        """Log numbers as scalars, strings as text, and dicts of numbers as one chart.

        Raises `BadRequest` for other types.
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
                raise BadRequest(f"TensorBoard has no chart for {key!r}, a {type(value).__name__}")
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


class JSONLinesTracker(GeneralTracker):
    """Tracker that appends metrics to the file `logging_dir/run_name/metrics.jsonl`.

    Every call of `log` adds one line: `{"step": …, "time": …, "values": …}`, with the time in seconds since the Unix
    epoch. The settings are a line with the key "config". Values that JSON cannot represent are stored as text. No
    package is required.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(logging_dir) / run_name / "metrics.jsonl"
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

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line, default=str) + "\n")
            self._file.flush()  # a killed rank loses no lines


TRACKERS: dict[str, Callable[..., Tracker]] = {"jsonl": JSONLinesTracker, "tensorboard": TensorBoardTracker}
"""Adapters by name. Add other classes here, or pass instances instead of names."""
_PACKAGES = {"tensorboard": "tensorboard"}


def available_trackers() -> list[str]:
    """Return the names of the trackers whose packages are installed."""
    return [name for name in TRACKERS if name not in _PACKAGES or find_spec(_PACKAGES[name]) is not None]


def filter_trackers(
    log_with: str | Tracker | Iterable[str | Tracker] | None,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[str | Tracker]:
    """Return the requested trackers without duplicates: instances, then names.

    Args:
        log_with: names or instances; "all" selects all trackers that are installed.
        logging_dir: directory of the trackers' files.

    Raises `BadRequest` for an unknown name, a package that is not installed, and a missing `logging_dir`.
    """
    if log_with is None:
        return []
    single = isinstance(log_with, str) or _is_tracker(log_with)
    requested: list[Any] = [log_with] if single else list(cast("Iterable[str | Tracker]", log_with))
    names = [str(entry) for entry in requested if not _is_tracker(entry)]
    chosen: list[str | Tracker] = [tracker for tracker in requested if _is_tracker(tracker)]
    for name in dict.fromkeys(available_trackers() if "all" in names else names):
        if name not in TRACKERS:
            raise BadRequest(f"log_with={name!r} is not there; use one of {', '.join(map(repr, [*TRACKERS, 'all']))}")
        if name not in available_trackers():
            raise BadRequest(f"log_with={name!r} needs a package that is not installed: pip install {_PACKAGES[name]}")
        if logging_dir is None and getattr(TRACKERS[name], "requires_logging_directory", False):
            raise BadRequest(f"log_with={name!r} writes files: say where, with logging_dir or project_dir")
        chosen.append(name)
    return chosen


def make_tracker(
    tracker: str | Tracker,
    run_name: str,
    logging_dir: str | os.PathLike[str] | None = None,
    **kwargs: Any,  # noqa: ANN401 - the tracker's
) -> Tracker:
    """Create a tracker that `filter_trackers` returned. It is not started.

    An instance is returned as it is.
    """
    if not isinstance(tracker, str):
        return tracker
    kind = TRACKERS[tracker]
    return (
        kind(run_name, logging_dir, **kwargs)
        if getattr(kind, "requires_logging_directory", False)
        else kind(run_name, **kwargs)
    )


def _is_tracker(value: object) -> TypeGuard[Tracker]:
    """Return True for a tracker instance. Checks the class, as `tracker` may not be available before `start`."""
    return not isinstance(value, str) and callable(getattr(type(value), "log", None))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with tensors and arrays converted to numbers or lists."""
    return {key: _number(value) for key, value in values.items()}


def _number(value: Any) -> Any:  # noqa: ANN401 - anything
    if isinstance(value, Mapping):
        return _plain(value)
    if isinstance(value, torch.Tensor) or (hasattr(value, "tolist") and hasattr(value, "dtype")):
        return value.tolist()
    return value
