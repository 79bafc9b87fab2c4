"""Tab completion and object inspection on a rank, with a strict timeout."""

from __future__ import annotations

import msgspec

from rankbook.coordinator.cluster_processes import ClusterProcesses
from rankbook.errors import RankbookError
from rankbook.protocol.queries import (
    Answer,
    Completion,
    CompletionsReply,
    GetCompletions,
    GetInspection,
    Hint,
    InspectionReply,
)

SOON = 0.09
"""Seconds: the front end should show a completion within 0.1 s, and needs part of that itself."""


class CompletionClient:
    """Request completions and inspections from the ranks of `crew`. Any thread but the driver's."""

    def __init__(self, crew: ClusterProcesses) -> None:
        self._crew = crew

    def complete(
        self, text: str, cursor: int, ranks: tuple[int, ...], *, variables: bool, timeout: float
    ) -> tuple[int, tuple[Completion, ...]]:
        """See `Cluster.complete`."""
        answer = self._ask(GetCompletions(0, text[:cursor], cursor, variables), ranks, timeout)
        return (answer.start, answer.completions) if isinstance(answer, CompletionsReply) else (cursor, ())

    def inspect(self, text: str, cursor: int, ranks: tuple[int, ...], *, source: bool, timeout: float) -> str:
        """See `Cluster.inspect`."""
        answer = self._ask(GetInspection(0, text, cursor, source), ranks, timeout)
        return answer.text if isinstance(answer, InspectionReply) else ""

    def _ask(self, question: Hint, ranks: tuple[int, ...], timeout: float) -> Answer | None:
        """Return the reply of the first of `ranks` that can reply; None if it does not in time."""
        try:
            driver = self._crew.driver
        except RankbookError:  # the ranks are stopped
            return None
        answering = driver.answering()
        chosen = next((rank for rank in ranks if rank in answering), None)
        if chosen is None:
            return None
        answers = driver.presence.questions.wait_answers(
            (chosen,),
            lambda token, _: msgspec.structs.replace(question, token=token),
            timeout=timeout,
            there=driver.answering,
        )
        return answers.get(chosen)
