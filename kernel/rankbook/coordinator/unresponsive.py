"""What a rank's silence means, in words.

Owns: the words for a rank that lives and does not answer. Refuses: to find out, and to call it dead: a process that is
stopped, or whose C code holds the interpreter lock, goes on where it was as soon as it can.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankbook.launch.process_info import Look, describe_look


@dataclass(frozen=True)
class Silence:
    """A rank that has not answered for `seconds` and was last heard `heard` seconds ago; `look` is at its process."""

    rank: int
    pid: int | None
    seconds: float
    heard: float
    look: Look | None

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped, which is certain and needs no patience."""
        return self.look is not None and (self.look.stopped or self.look.traced)


def describe_silence(silence: Silence) -> str:
    """The rank's state: `unresponsive for 12 s, process running, 3.1 s of CPU time`."""
    if silence.seconds >= 1:
        since = f"unresponsive for {silence.seconds:.0f} s"
    else:
        since = f"unresponsive, last heard from {max(silence.heard, silence.seconds):.0f} s ago"
    return f"{since}, {describe_look(silence.look, silence.pid)}"


def describe_straggler(rank: int, silence: Silence | None) -> str:
    """What is to be said of a rank that still runs a cell which the notebook waits for no more."""
    fresh = f"%distributed restart {rank} gives it a fresh process"
    if silence is None:
        return f"rank {rank} still runs; %distributed stacks shows where"
    if silence.stopped:
        return f"rank {rank} is stopped ({describe_look(silence.look, silence.pid)}); {fresh}"
    held = "it may be in C code that holds the interpreter"
    return f"rank {rank} still runs, {describe_silence(silence)}: {held}; {fresh}"
