"""Check in a forked child which values can be pickled.

Owns: the children and their time limit. Refuses: to send anything.

Pickling runs code of the values' classes. That code may raise, end the process, crash it or wait for ever, and the
process that is asked for its state must survive it. So every value is pickled in a child first, one after the other.
A child that ends early, or that takes too long, tells which value was to blame; the next child goes on behind it.

The child must not touch CUDA, and a copy of every tensor would be slow: the caller's `reduce` leaves tensors out.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import struct
import time
import warnings
from collections.abc import Iterator, Mapping

import torch

from rankbook.transport.serialization import Reduce, why_not

VALUE_SECONDS = 10.0
"""How long pickling one value may take. It pickles no tensor data, and writes nothing."""
_LENGTH = struct.Struct("I")
_NO_CUDA = "forked subprocess"
"""In torch's error where a forked child uses CUDA."""


def check_pickling(values: Mapping[str, object], reduce: Reduce, *, seconds: float = VALUE_SECONDS) -> dict[str, str]:
    """Return why values cannot be pickled, by name; those that can be are left out.

    Each value may take `seconds`. This process pickles nothing unless the check needs CUDA, or no child can be made.
    """
    problems: dict[str, str] = {}
    names = list(values)
    while names:
        try:
            child = _Child({name: values[name] for name in names}, reduce)
        except OSError:  # no process, descriptor or memory left for a child
            return problems | _check_here(names, values, reduce)
        try:
            answers = list(child.answers(len(names), seconds))
        finally:
            ending = child.end()
        failed = {name: answer for name, answer in zip(names, answers[1:], strict=False) if answer}
        problems |= {name: answer for name, answer in failed.items() if _NO_CUDA not in answer}
        problems |= _check_here([name for name in failed if name not in problems], values, reduce)
        if not answers:  # a hook of os.register_at_fork ends or stops children
            return problems | _check_here(names, values, reduce)
        names = names[len(answers) - 1 :]
        if names:
            how = ending or f"takes longer than {seconds:g} s"
            problems[names.pop(0)] = f"pickling it {how}"
    return problems


def _check_here(names: list[str], values: Mapping[str, object], reduce: Reduce) -> dict[str, str]:
    found = {name: why_not(values[name], name=name, reduce=reduce) for name in names}
    return {name: problem for name, problem in found.items() if problem}


class _Child:
    """A forked process that pickles `values` and writes an answer for each: its length, then the problem or nothing."""

    def __init__(self, values: Mapping[str, object], reduce: Reduce) -> None:
        self._read, write = os.pipe()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads
                self._pid = os.fork()
        except OSError:
            os.close(self._read)
            os.close(write)
            raise
        if self._pid == 0:
            try:
                _run(values, reduce, write)
            finally:
                os._exit(1)
        os.close(write)

    def answers(self, count: int, seconds: float) -> Iterator[str]:
        """Yield an empty string as the child begins, then the answers; stop early where none comes within `seconds`."""
        received, taken = b"", 0
        deadline = time.monotonic() + seconds
        while taken <= count:
            readable, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._read, 1 << 16) if readable else b""
            if not chunk:
                return
            received += chunk
            while len(received) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
                if len(received) < end:
                    break
                yield received[_LENGTH.size : end].decode(errors="replace")
                received, taken = received[end:], taken + 1
                deadline = time.monotonic() + seconds

    def end(self) -> str:
        """Kill the child, unless it has ended, and return how it ended by itself: "" where it had to be killed."""
        os.close(self._read)
        ended, status = os.waitpid(self._pid, os.WNOHANG)
        deadline = time.monotonic() + 0.2  # its end of the pipe closes a moment before the process is gone
        while not ended and time.monotonic() < deadline:
            time.sleep(0.002)
            ended, status = os.waitpid(self._pid, os.WNOHANG)
        if not ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            return ""
        code = os.waitstatus_to_exitcode(status)
        return f"ends the process with exit code {code}" if code >= 0 else f"kills the process with signal {-code}"


def _run(values: Mapping[str, object], reduce: Reduce, write: int) -> None:
    """Pickle `values` and answer. In the child."""
    own = os.getpid()
    os.setpgid(0, 0)  # a value that kills its process group kills this one
    faulthandler.disable()  # its file belongs to the parent
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    torch.set_num_threads(1)  # the parent's threads are not there
    _answer(write, "")
    for name, value in values.items():
        problem = why_not(value, name=name, reduce=reduce)
        if os.getpid() != own:
            os._exit(1)  # the value has forked, and this is its child
        _answer(write, problem or "")
    os._exit(0)


def _answer(write: int, problem: str) -> None:
    text = problem.encode(errors="replace")
    whole = _LENGTH.pack(len(text)) + text
    while whole:
        whole = whole[os.write(write, whole) :]
