"""The three random states that a process has whether it wants them or not: `random`'s, numpy's and torch's.

Owns: setting them for one batch and putting them back, in a few microseconds. Refuses: to decide for which batch.

Through their front doors this takes 0.2 ms (numpy 2.4 builds its state word by word, in Python objects), which is more
than a small batch. So numpy's generator is swapped for another one; and the Mersenne Twister's words are copied as
memory: numpy gives out the address of its own, CPython's are checked against `getstate` once, and go through the front
door where they are not where they are expected.
"""

from __future__ import annotations

import ctypes
import random
import struct
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

_WORDS = 624
_BYTES = 4 * _WORDS
_ALL_USED = struct.pack("=i", _WORDS)  # the next draw makes new words of these


def _memory(address: int) -> memoryview:
    """The words of a Mersenne Twister with their position, before or after them."""
    return memoryview((ctypes.c_char * (_BYTES + 4)).from_address(address)).cast("B")


def python_memory(source: random.Random) -> memoryview | None:
    """The position and the words of `source` in memory; None where this interpreter keeps them elsewhere.

    CPython's `RandomObject` is an object's head, an int and 624 words (Modules/_randommodule.c).
    """
    head = object.__basicsize__
    if type(source) is not random.Random or random.Random.__base__.__basicsize__ < head + _BYTES + 4:  # type: ignore[union-attr]
        return None
    memory = _memory(id(source) + head)
    position, *words = struct.unpack(f"=i{_WORDS}I", memory)
    return memory if (*words, position) == source.getstate()[1] else None


class Saved(NamedTuple):
    """What was there before."""

    python: Any
    half: float | None
    bits: Any
    numpy: Any
    nested: bytes | None
    torch: torch.Tensor


class GlobalStreams:
    """The global states of this process. There is one object of it, `global_streams()`."""

    def __init__(self) -> None:
        self._python: Any = random._inst
        self._memory = python_memory(self._python)
        self._ours = np.random.MT19937(0)
        self._our_memory = _memory(self._ours.ctypes.state_address)
        self._theirs: tuple[Any, memoryview | None] = (None, None)
        self._without_half: bytes | None = None
        self._source = np.random.SFC64(0)
        self._state: Any = self._source.state

    def begin(self, digest: bytes) -> Saved:
        """Set all three to the streams that follow from 40 hashed bytes; `end` puts back what this gives."""
        bits, state, nested = self._look()
        memory = self._memory
        python = self._python.getstate() if memory is None else bytes(memory)
        saved = Saved(python, self._python.gauss_next, bits, state, nested, torch.default_generator.get_state())
        self.seed(digest)
        return saved

    def seed(self, digest: bytes) -> None:
        """The same, for a process that nobody will want to have its own states back."""
        self._state["state"]["state"][:] = np.frombuffer(digest, np.uint64, 4)
        self._source.state = self._state
        words = self._source.random_raw(_WORDS).data.cast("B")
        if self._memory is None:
            self._python.seed(digest)
        else:
            self._memory[4:] = words[:_BYTES]
            self._memory[:4] = _ALL_USED
            self._python.gauss_next = None
        self._our_memory[:_BYTES] = words[_BYTES:]
        self._our_memory[_BYTES:] = _ALL_USED
        np.random.set_bit_generator(self._ours)  # type: ignore[attr-defined,no-untyped-call,unused-ignore]  # its stub lacks it
        torch.default_generator.manual_seed(int.from_bytes(digest[32:40], "big") >> 1)

    def end(self, saved: Saved) -> None:
        """Put back what `begin` found."""
        if self._memory is None:
            self._python.setstate(saved.python)
        else:
            self._memory[:] = saved.python
            self._python.gauss_next = saved.half
        if saved.nested is not None:
            self._our_memory[:] = saved.nested
        np.random.set_bit_generator(saved.bits)  # type: ignore[attr-defined,no-untyped-call,unused-ignore]  # its stub lacks it
        if saved.numpy is not None:
            np.random.set_state(saved.numpy)  # noqa: NPY002 - the global state is the one that is put back
        torch.default_generator.set_state(saved.torch)

    def _look(self) -> tuple[Any, Any, bytes | None]:
        """Numpy's generator now; its whole state if a swap would lose some of it; our words if it is ours already.

        A swap loses the half of a pair of normal numbers that the legacy functions keep for the next call. There is
        none if there was none at the last look and no word was drawn since.
        """
        bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined,no-untyped-call,unused-ignore]  # its stub lacks it
        if bits is not self._theirs[0]:
            known = type(bits) is np.random.MT19937
            self._theirs = (bits, _memory(bits.ctypes.state_address) if known else None)
            self._without_half = None
        memory = self._theirs[1]
        nested = bytes(self._our_memory) if bits is self._ours else None
        if memory is not None and self._without_half is not None and bytes(memory) == self._without_half:
            return bits, None, nested
        state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the global state is the one that is kept
        if state["has_gauss"]:
            self._without_half = None
            return bits, state, nested
        self._without_half = None if memory is None else bytes(memory)
        return bits, None, nested


@cache
def global_streams() -> GlobalStreams:
    """This process's."""
    return GlobalStreams()
