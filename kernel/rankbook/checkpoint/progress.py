"""Report the progress of a save to the user's callback and to telemetry.

A report is made at the start of every phase, and while bytes are written at most once per `REPORT_INTERVAL` seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rankbook.protocol import telemetry
from rankbook.protocol.telemetry import CheckpointSave

logger = logging.getLogger(__name__)

REPORT_INTERVAL = 0.1
"""Minimum time in seconds between two reports of written bytes."""

# Names of the telemetry sources. `next` on an iterator is atomic under the GIL, and saves start in several threads.
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
        self._start_time = self._last_report = time.monotonic()
        self._writing_start = 0.0
        self._on_progress = on_progress
        self._interrupt: BaseException | None = None
        # A source of its own per save: a background save and the next one may exist at the same time.
        self._source = f"checkpoint {next(_numbers)}"
        telemetry.offer_source(self._source, self.snapshot)
        self._report()

    def check(self) -> None:
        """Raise the interrupt that occurred in the callback, if any.

        Called where an error of one rank is propagated to all ranks.
        """
        if self._interrupt is not None:
            raise self._interrupt

    def snapshot(self) -> CheckpointSave:
        """Return a snapshot of the progress, with durations in seconds and the rate in bytes per second."""
        seconds = time.monotonic() - self._start_time
        # The rate counts from the first byte of the file. Planning and waiting for other ranks are not writing.
        writing = time.monotonic() - self._writing_start if self._writing_start else 0.0
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
            self._writing_start = time.monotonic()
        # A failed background save stays visible until its error was reported; a failed save in the foreground has
        # raised already.
        elif phase == "done" or (phase == "failed" and not self.background):
            telemetry.withdraw_source(self._source)
        self._report()

    def add_written(self, count: int) -> None:
        """Count `count` more written bytes."""
        self.written += count
        if time.monotonic() - self._last_report > REPORT_INTERVAL:
            self._report()

    def fail(self, error: str) -> None:
        """End the save without a checkpoint."""
        self.error = error
        self.enter("failed")

    def withdraw(self) -> None:
        """Stop showing a failed asynchronous save in telemetry, because its error was reported."""
        telemetry.withdraw_source(self._source)

    def _report(self) -> None:
        self._last_report = time.monotonic()
        progress = self.snapshot()
        telemetry.report_value(progress)
        if self._on_progress is not None:
            try:
                self._on_progress(progress)
            except Exception:  # a failing callback must not fail the save on all ranks
                logger.exception(
                    "on_progress raised an exception and is not called again during this save to %s", self.folder
                )
                self._on_progress = None
            except BaseException as error:  # noqa: BLE001 - `check` raises it: raised here, it could leave other ranks waiting
                self._interrupt, self._on_progress = error, None
