"""Where metrics go.

Owns: the `Tracker` protocol, and one small adapter per destination. Refuses: to import a destination before it is used.
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
    """What takes metrics. `name` is how it is asked for; `main_process_only`: it lives on rank 0 alone."""

    name: str
    main_process_only: bool

    @property
    def tracker(self) -> Any:  # noqa: ANN401 - the destination's own object
        """The destination's own object."""

    def start(self) -> None:
        """Open the destination."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - the destination's
        """Keep metrics of one step."""

    def finish(self) -> None:
        """Close the destination."""


class GeneralTracker:
    """The base of trackers: a subclass has `name`, `requires_logging_directory`, `tracker`, and what it overrides.

    On ranks other than 0 the adapters below do nothing, unless `main_process_only` is False. A subclass calls
    `super().__init__()`, which raises `NotImplementedError` for an attribute that is missing.
    """

    main_process_only: bool = True
    name: str
    requires_logging_directory: bool

    def __init__(self, _blank: bool = False) -> None:
        needed = ("name", "requires_logging_directory", "tracker")
        lacking = [each for each in needed if each not in dir(self)]  # `tracker` may be a property that is not ready
        if lacking and not _blank:
            raise NotImplementedError(f"{type(self).__name__} has to define {', '.join(lacking)}")

    @property
    def is_here(self) -> bool:
        """Whether this tracker does anything on this rank."""
        return not self.main_process_only or PartialState().is_main_process

    def start(self) -> None:
        """Open the destination. A subclass that opens nothing leaves this out."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - the destination's
        """Keep metrics of one step."""

    def finish(self) -> None:
        """Close the destination. A subclass that opens nothing leaves this out."""


class TensorBoardTracker(GeneralTracker):
    """Writes event files for TensorBoard below `logging_dir/run_name`; `kwargs` go to its `SummaryWriter`.

    `start` raises `BadRequest` where the package is not installed.
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
        """The `SummaryWriter`; None on other ranks and before `start`."""
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
        """Keep the settings as hyperparameters. Values that TensorBoard has no type for are kept as text."""
        if self._writer is not None:
            plain = (bool, int, float, str)
            self._writer.add_hparams(
                {key: value if isinstance(value, plain) else str(value) for key, value in values.items()},
                metric_dict={},
            )
            self._writer.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - the writer's
        """Numbers as scalars, texts as text, dicts of numbers as one chart. Raises `BadRequest` for anything else."""
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
        """Batches of images, as `SummaryWriter.add_images` takes them."""
        if self._writer is not None:
            for key, value in values.items():
                self._writer.add_images(key, value, global_step=step, **kwargs)

    def finish(self) -> None:
        """Close the writer."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class JSONLinesTracker(GeneralTracker):
    """Appends one line per call to `logging_dir/run_name/metrics.jsonl`: `{"step": …, "time": …, "values": …}`.

    `time` is in seconds since 1970. The settings are a line of their own, under "config". It needs no package. What
    JSON does not know is kept as text.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(logging_dir) / run_name / "metrics.jsonl"
        self._file: Any = None

    @property
    def tracker(self) -> Any:  # noqa: ANN401 - a text file
        """The open file; None on other ranks and before `start`."""
        return self._file

    def start(self) -> None:
        """Open the file, at its end."""
        if self.is_here and self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings."""
        self._write({"config": _plain(values), "time": time.time()})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401 - kept as well
        """Keep metrics of one step; tensors as numbers or lists."""
        self._write({"step": step, "time": time.time(), "values": _plain(values), **kwargs})

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line, default=str) + "\n")
            self._file.flush()  # a rank that is killed loses nothing


TRACKERS: dict[str, Callable[..., Tracker]] = {"jsonl": JSONLinesTracker, "tensorboard": TensorBoardTracker}
"""The adapters by name. Add your own, or give an instance of it instead of a name."""
_PACKAGES = {"tensorboard": "tensorboard"}


def available_trackers() -> list[str]:
    """The names whose packages are installed."""
    return [name for name in TRACKERS if name not in _PACKAGES or find_spec(_PACKAGES[name]) is not None]


def filter_trackers(
    log_with: str | Tracker | Iterable[str | Tracker] | None,
    logging_dir: str | os.PathLike[str] | None = None,
) -> list[str | Tracker]:
    """The trackers that were asked for, each once: names and instances. "all" stands for every one that is installed.

    Raises `BadRequest` for a name that is not there, a package that is not installed, and a missing `logging_dir`.
    """
    if log_with is None:
        return []
    one = isinstance(log_with, str) or _is_tracker(log_with)
    asked: list[Any] = [log_with] if one else list(cast("Iterable[str | Tracker]", log_with))
    names = [str(each) for each in asked if not _is_tracker(each)]
    chosen: list[str | Tracker] = [each for each in asked if _is_tracker(each)]
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
    """The tracker that `filter_trackers` let through, made for this run; not started yet. An instance as it is."""
    if not isinstance(tracker, str):
        return tracker
    kind = TRACKERS[tracker]
    return (
        kind(run_name, logging_dir, **kwargs)
        if getattr(kind, "requires_logging_directory", False)
        else kind(run_name, **kwargs)
    )


def _is_tracker(value: object) -> TypeGuard[Tracker]:
    """An instance, by what its class has: its `tracker` may not be ready before `start`."""
    return not isinstance(value, str) and callable(getattr(type(value), "log", None))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors and arrays as numbers or lists."""
    return {key: _number(value) for key, value in values.items()}


def _number(value: Any) -> Any:  # noqa: ANN401 - anything
    if isinstance(value, Mapping):
        return _plain(value)
    if isinstance(value, torch.Tensor) or (hasattr(value, "tolist") and hasattr(value, "dtype")):
        return value.tolist()
    return value
