"""Report the progress of a save to the user's callback and to telemetry.

A report is made at the start of every phase, and while bytes are written at most once per `OFTEN` seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rankbook.protocol import telemetry
from rankbook.protocol.telemetry import CheckpointSave

logger = logging.getLogger(__name__)

OFTEN = 0.1
"""Minimum time in seconds between two reports of written bytes."""

_numbers = iter(range(1, 1 << 62))


class SaveProgress:
    """Track and report the progress of one save on this rank.

    The thread that saves changes it; any thread may read it. `on_progress` is called in the thread that saves. If it
    raises an Exception, the error is logged and the callback is not called again.
    """

    def __init__(
        self, folder: str, *, background: bool = False, on_progress: Callable[[CheckpointSave], None] | None = None
    ) -> None:
        self.folder, self.background = folder, background
        self.name = ""
        self.step: int | None = None
        self.phase, self.error = "planning", ""
        self.written = self.total = 0
        self._began = self._told = time.monotonic()
        self._writing_began = 0.0
        self._on_progress = on_progress
        self._raised: BaseException | None = None
        self._source = f"checkpoint {next(_numbers)}"
        telemetry.offer_source(self._source, self.now)
        self._tell()

    def check(self) -> None:
        """Raise the interrupt that occurred in the callback, if any.

        Called where an error of one rank is propagated to all ranks.
        """
        if self._raised is not None:
            raise self._raised

    def now(self) -> CheckpointSave:
        """Return a snapshot of the progress, with durations in seconds and the rate in bytes per second."""
        seconds = time.monotonic() - self._began
        writing = time.monotonic() - self._writing_began if self._writing_began else 0.0
        return CheckpointSave(
            folder=self.folder,
            name=self.name,
            step=self.step,
            phase=self.phase,
            written=self.written,
            total=self.total,
            seconds=seconds,
            rate=self.written / writing if writing > 0 else None,
            background=self.background,
            error=self.error,
        )

    def enter(self, phase: str) -> None:
        """Begin a phase: planning, staging, writing, committing, done or failed."""
        self.phase = phase
        if phase == "writing":
            self._writing_began = time.monotonic()
        elif phase == "done" or (phase == "failed" and not self.background):
            telemetry.withdraw_source(self._source)
        self._tell()

    def wrote(self, count: int) -> None:
        """Count `count` more written bytes."""
        self.written += count
        if time.monotonic() - self._told > OFTEN:
            self._tell()

    def failed(self, error: str) -> None:
        """End the save without a checkpoint."""
        self.error = error
        self.enter("failed")

    def withdraw(self) -> None:
        """Stop showing a failed asynchronous save in telemetry, because its error was reported."""
        telemetry.withdraw_source(self._source)

    def _tell(self) -> None:
        self._told = time.monotonic()
        progress = self.now()
        telemetry.report_value(progress)
        if self._on_progress is not None:
            try:
                self._on_progress(progress)
            except Exception:  # a failing callback must not fail the save on all ranks
                logger.exception("on_progress= has failed and is not called again for this save to %s", self.folder)
                self._on_progress = None
            except BaseException as error:  # noqa: BLE001 - `check` raises it: raised here, it could leave other ranks waiting
                self._raised, self._on_progress = error, None
