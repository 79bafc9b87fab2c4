"""The thread that looks: a rank's third, made by the first question.

Owns: questions in their order, and that each gets an answer. Refuses: to hold up the control thread, which must be free
for interrupts, and the main thread, which takes what arrives between two cells.
"""

from __future__ import annotations

import _thread
import queue
import signal
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from rankbook.looking import Answer, NothingTold, Question

if TYPE_CHECKING:
    from rankbook.rank.look import Lookout


class Inquiries:
    """Answers with `send`. `make` makes what looks, once; it imports what a rank needs for nothing else."""

    def __init__(self, send: Callable[[Answer], None], make: Callable[[], Lookout]) -> None:
        self._send = send
        self._make = make
        self._questions: queue.SimpleQueue[Question] = queue.SimpleQueue()
        self._started = _thread.allocate_lock()

    def put(self, question: Question) -> None:
        """Have it answered. Any thread."""
        self._questions.put(question)
        if self._started.acquire(blocking=False):
            _thread.start_new_thread(self._run, ())  # Thread.start would wait, and the main thread be interrupted there

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it is the main thread that has to wake up
        lookout: Lookout | None = None
        while True:
            question = self._questions.get()
            try:
                lookout = lookout or self._make()
                answer = lookout.answer(question)
            except Exception as error:  # noqa: BLE001 - the notebook is told the whole of it, and the next one may go well
                answer = NothingTold(question.token, f"a look at the rank failed: {error}\n{traceback.format_exc()}")
            self._send(answer)
