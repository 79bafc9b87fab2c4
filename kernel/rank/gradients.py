"""How many bytes of gradients there are, read beside a training loop.

Owns: the moment at which they may be read. Refuses: any other. A backward pass writes gradients without holding the
interpreter lock, and so does `p.grad = None`; who reads one at that moment may find it freed, which ends the process.

While this thread holds the lock, every other is below the instruction that it executed last. So they may be read where
that is a call out of which nobody comes to a gradient: of a layer's forward pass, of an optimizer's arithmetic, of the
person's own code that does not call torch, or of a wait. Who takes the lock anew keeps it for some milliseconds; from
the last look at the other threads to the end of the reading, which is one call into C, it takes some microseconds.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from types import FrameType

import torch
from torch.autograd import graph

from rankbook.rank.parts import is_dtensor

_TORCH = Path(torch.__file__).parent
_FORWARD = tuple(
    str(_TORCH.joinpath(*each.split("/")))
    for each in ("nn/functional.py", "nn/modules/linear.py", "nn/modules/conv.py", "nn/modules/activation.py", "optim/")
)
_SETS_THEM = tuple(str(_TORCH / "optim" / each) for each in ("optimizer.py", "lbfgs.py"))
_ENGINE_CODE = getattr(getattr(graph, "_engine_run_backward", None), "__code__", None)
_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__
_AT = attrgetter("f_lasti")
_TRIES = 20
_PAUSE = 0.001
_never = threading.Event()


def gradient_bytes(parameters: Sequence[torch.Tensor]) -> list[int] | None:
    """Of each parameter what is here of its gradient, 0 if it has none; None if no moment to read them was found."""
    sharded = [is_dtensor(each) for each in parameters]
    plain = _read([each for each, of in zip(parameters, sharded, strict=True) if not of], local=False)
    parts = _read([each for each, of in zip(parameters, sharded, strict=True) if of], local=True)
    if plain is None or parts is None:
        return None
    of_plain, of_parts = iter(plain), iter(parts)
    return [next(of_parts) if of else next(of_plain) for of in sharded]


def _read(parameters: list[torch.Tensor], *, local: bool) -> list[int] | None:
    if not parameters:
        return []
    name, nothing, size, zero = repeat("_local_tensor"), repeat(None), repeat("nbytes"), repeat(0)
    own = threading.get_ident()
    with torch._C.DisableTorchFunctionSubclass():
        for _ in range(_TRIES if _ENGINE_CODE is not None else 0):
            _never.wait(_PAUSE)  # gives the lock away, and takes it anew
            frames = sys._current_frames()
            frames.pop(own, None)
            tops = list(frames.values())
            places = list(map(_AT, tops))
            if not all(map(_is_harmless, tops)):
                continue
            # No gradient is held: it may be gone the next moment, and its memory shall be.
            if local:
                todo = map(getattr, map(getattr, map(_GRADIENT, parameters), name, nothing), size, zero)
            else:
                todo = map(getattr, map(_GRADIENT, parameters), size, zero)
            frames = sys._current_frames()
            frames.pop(own, None)
            if list(frames.values()) == tops and list(map(_AT, tops)) == places:
                return list(todo)
    return None


def _is_harmless(top: FrameType) -> bool:
    """Whether what a thread executes leaves gradients alone, whatever it does without the interpreter lock."""
    file = top.f_code.co_filename
    if file.startswith(str(_TORCH)) and (not file.startswith(_FORWARD) or file.startswith(_SETS_THEM)):
        return False
    if top.f_lasti < 0 or "CALL" not in dis.opname[top.f_code.co_code[top.f_lasti]]:
        return False
    frame: FrameType | None = top
    while frame is not None:
        if frame.f_code is _ENGINE_CODE:
            return False  # below a hook of the backward pass, which goes on in other threads
        frame = frame.f_back
    return True
