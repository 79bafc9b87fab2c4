"""How far a save is, for whoever looks: the person's callback, and telemetry.

Owns: the phases, and that a listener hears of each and of bytes in between, not too often. Refuses: to know who looks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rankbook.protocol import telemetry
from rankbook.protocol.telemetry import CheckpointSave

logger = logging.getLogger(__name__)

OFTEN = 0.1
"""Seconds between two reports of bytes."""

_numbers = iter(range(1, 1 << 62))


class SaveProgress:
    """One save of this rank. Written by the thread that saves, read by any."""

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
        """Raises the interrupt that hit the listener. Called where an error of one rank reaches all of them."""
        if self._raised is not None:
            raise self._raised

    def now(self) -> CheckpointSave:
        """A snapshot."""
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
        """A phase begins: planning, staging, writing, committing, done."""
        self.phase = phase
        if phase == "writing":
            self._writing_began = time.monotonic()
        elif phase == "done" or (phase == "failed" and not self.background):
            telemetry.withdraw_source(self._source)
        self._tell()

    def wrote(self, count: int) -> None:
        """More bytes are written."""
        self.written += count
        if time.monotonic() - self._told > OFTEN:
            self._tell()

    def failed(self, error: str) -> None:
        """The save has ended without a checkpoint."""
        self.error = error
        self.enter("failed")

    def withdraw(self) -> None:
        """Show a save that failed in the background no longer: the person has been told."""
        telemetry.withdraw_source(self._source)

    def _tell(self) -> None:
        self._told = time.monotonic()
        said = self.now()
        telemetry.report_value(said)
        if self._on_progress is not None:
            try:
                self._on_progress(said)
            except Exception:  # the other ranks go on, and so does this one's save
                logger.exception("on_progress= has failed and is not called again for this save to %s", self.folder)
                self._on_progress = None
            except BaseException as error:  # noqa: BLE001 - `check` raises it: here other ranks might be left waiting
                self._raised, self._on_progress = error, None
