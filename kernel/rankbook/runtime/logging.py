"""A logger that knows its rank.

Owns: which rank's records are let through. Refuses: handlers and formats; those are the program's.

tqdm on one process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from functools import cache
from typing import Any

from rankbook.errors import BadRequest
from rankbook.runtime.process_state import PartialState


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """`log.info(message, main_process_only=True, in_order=False)`, and so for each level.

    `main_process_only` (the default): only rank 0 logs. `in_order`: every rank does, one after the other; all of them
    have to make that call. Before a `PartialState` was built this process counts as the only one.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:  # noqa: ANN401 - logging's
        """As `logging.Logger.log`, on the ranks that are asked for."""
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 2  # this method and the next
        state = PartialState() if PartialState._shared_state else None
        if in_order and not main_only and state is not None:
            for index in range(state.num_processes):  # a rank whose level is higher waits for its turn all the same
                if index == state.process_index:
                    self._emit(level, msg, args, kwargs)
                state.wait_for_everyone()
        elif not main_only or state is None or state.is_main_process:
            self._emit(level, msg, args, kwargs)

    def _emit(self, level: int, msg: object, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        if self.isEnabledFor(level):
            msg, processed = self.process(msg, kwargs)
            self.logger.log(level, msg, *args, **processed)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:  # noqa: ANN401 - logging's
        """Put `rank` and `world_size` beside the record's other fields, for formats that show them."""
        state = PartialState() if PartialState._shared_state else None
        extra: Mapping[str, object] = kwargs.get("extra") or {}
        rank, size = (0, 1) if state is None else (state.process_index, state.num_processes)
        kwargs["extra"] = {"rank": rank, "world_size": size, **extra}
        return msg, kwargs

    @cache  # noqa: B019 - loggers live as long as the process
    def warning_once(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as `warning`
        """As `warning`, and the second time nothing."""
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """The logger `name`, which logs on rank 0 only unless told otherwise.

    `log_level`: "DEBUG", "INFO", ...; its default comes from RANKBOOK_LOG_LEVEL, else the level stays.
    """
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("RANKBOOK_LOG_LEVEL") or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper())
    return RankLogger(logger, {})


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:  # noqa: ANN401 - tqdm's
    """`tqdm.auto.tqdm`, shown on the first process of each host only; elsewhere it iterates silently.

    Raises `BadRequest` where tqdm is not installed, and for a bool in the iterable's place, which is an old signature.
    """
    try:
        from tqdm.auto import tqdm as bar
    except ImportError:
        raise BadRequest("tqdm shows the progress and is not installed here: pip install tqdm") from None
    if args and isinstance(args[0], bool):
        raise BadRequest("the first argument of tqdm is what it iterates over; give main_process_only by its name")
    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = not PartialState().is_local_main_process
    return bar(*args, **kwargs)
