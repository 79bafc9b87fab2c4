"""Rank-aware logging: a logger adapter that selects the ranks that log, and tqdm on one process per host.

Handlers and formats are left to the program.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, MutableMapping
from functools import cache
from typing import Any

import torch.distributed as dist

from rankbook.errors import InvalidArgument
from rankbook.protocol import telemetry
from rankbook.runtime.process_state import PartialState

_calls = itertools.count()
"""Numbers of the calls with `in_order`, which all ranks make alike."""


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """Logger adapter whose methods accept `main_process_only` and `in_order`.

    Args:
        main_process_only: log on rank 0 only (the default).
        in_order: log on all ranks, in rank order, whatever `main_process_only` is. A collective.
        stacklevel: as in Accelerate 2 is the line of the call, the default; 3 is the line that called its function.

    Without a `PartialState` and a process group, the process counts as the only one.

    Example::

        log = get_logger(__name__)
        log.info("loss %f", loss, main_process_only=False, in_order=True)
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:  # noqa: ANN401 - logging's
        """Log `msg % args` as `logging.Logger.log` does, on the selected ranks."""
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        # Accelerate's adapter has one frame of its own, so its callers count from 2. There are two frames here: this
        # method and `_emit`. A number below 2 would name this file.
        kwargs["stacklevel"] = max(2, kwargs.get("stacklevel", 2)) + 1
        rank, size = _rank_and_size()
        if in_order and size > 1:
            self._emit_in_order(PartialState(), level, msg, args, kwargs)
        elif in_order or not main_only or rank == 0:
            self._emit(level, msg, args, kwargs)

    def _emit_in_order(
        self, state: PartialState, level: int, msg: object, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> None:
        kwargs["stacklevel"] += 1  # this method
        call = next(_calls)
        for index in range(state.num_processes):  # ranks with a higher level take part in the barriers, too
            # A notebook does not show the lines of several ranks in the order of time. So the ranks mark the end of the
            # turn in their output: the rank whose turn it is before the barrier, which sends its line, the others after
            # it.
            if index == state.process_index:
                self._emit(level, msg, args, kwargs)
                _mark_output(f"{call} {index}")
            state.wait_for_everyone()
            if index != state.process_index:
                _mark_output(f"{call} {index}")

    def _emit(self, level: int, msg: object, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        if self.isEnabledFor(level):
            msg, processed = self.process(msg, kwargs)
            self.logger.log(level, msg, *args, **processed)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:  # noqa: ANN401 - logging's
        """Add `rank` and `world_size` to the record's extra fields, for formats that show them."""
        extra: Mapping[str, object] = kwargs.get("extra") or {}
        rank, size = _rank_and_size()
        kwargs["extra"] = {"rank": rank, "world_size": size, **extra}
        return msg, kwargs

    @cache  # noqa: B019 - loggers live as long as the process
    def warning_once(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as `warning`
        """Log a warning; later calls with the same arguments do nothing."""
        self.warning(*args, **kwargs)


def _rank_and_size() -> tuple[int, int]:
    """Return the rank and the number of processes, without the effects of a first `PartialState`."""
    if PartialState._shared_state:
        state = PartialState()
        return state.process_index, state.num_processes
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _mark_output(name: str) -> None:
    if telemetry.output_barrier is not None:
        telemetry.output_barrier(name)


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """Return a logger that logs on rank 0 only, unless a call selects more ranks.

    Args:
        name: name of the logger, as in `logging.getLogger`.
        log_level: "DEBUG", "INFO" and so on; by default RANKBOOK_LOG_LEVEL. If neither is set, the level is not
            changed.

    Example::

        log = get_logger("training", log_level="INFO")
        log.info("one line, of rank 0")
    """
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("RANKBOOK_LOG_LEVEL") or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper())
    return RankLogger(logger, {})


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:  # noqa: ANN401 - tqdm's
    """Return a `tqdm.auto.tqdm` bar that is visible only on the first process of every host.

    Args:
        args: arguments of tqdm; the first one is the iterable.
        main_process_only: if False, show the bar on all processes.
        kwargs: keyword arguments of tqdm.

    Raises `InvalidArgument` if tqdm is not installed, and for a bool as the first argument, which is an obsolete
    signature.

    Example::

        for batch in tqdm(loader, desc="epoch 1"):
            ...
    """
    try:
        from tqdm.auto import tqdm as bar
    except ImportError:
        raise InvalidArgument(
            "rankbook's tqdm() requires the package tqdm, which is not installed: pip install tqdm"
        ) from None
    if args and isinstance(args[0], bool):
        raise InvalidArgument(
            f"the first argument of tqdm() must be an iterable, got {args[0]}; pass main_process_only by keyword"
        )
    # A bar that is disabled anyway needs no `PartialState`, which might start a process group.
    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = not PartialState().is_local_main_process
    return bar(*args, **kwargs)
