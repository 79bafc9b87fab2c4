"""How a rank's process ended, in words.

Owns: the words. Refuses: to find out.
"""

from __future__ import annotations

import signal

from rankbook.messages import RankExited


def describe_exit(message: RankExited) -> str:
    """How a rank ended, in plain words, to stand behind `rank 2`."""
    if message.code >= 0:
        return f"exited with code {message.code}"
    number = -message.code
    if message.memory_kills > 0 and number == signal.SIGKILL:
        return "was killed by the kernel because memory ran out (signal 9)"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    hints = {
        signal.SIGKILL: " (out of memory?)",
        signal.SIGSEGV: " (segmentation fault)",
        signal.SIGBUS: " (bus error)",
    }
    return f"was killed by signal {number}{hints.get(number, f' ({name})')}"  # type: ignore[call-overload]
