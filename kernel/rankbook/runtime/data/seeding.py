"""One seed for a run: set everywhere, remembered, and made the same on all ranks.

The generators of a batch are seeded by `streams.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rankbook.errors import BadRequest
from rankbook.runtime.comm import consistency
from rankbook.runtime.data.rng import stream_seed
from rankbook.runtime.process_state import PartialState

RNG_TYPES = ("generator", "torch", "cuda", "numpy", "python")

_remembered: int | None = None


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed `random`, numpy and torch (every device), and remember `seed` for the loaders.

    With `device_specific` each rank gets numbers of its own, derived from (seed, rank) by hashing; the loaders go on
    from `seed` itself, so that all ranks agree on the order of samples. `deterministic`: torch's algorithms too.
    """
    global _remembered
    _remembered = seed
    own = stream_seed(seed, PartialState().process_index, "set_seed") >> 193 if device_specific else seed
    random.seed(own)
    np.random.seed(own % 2**32)  # noqa: NPY002 - the global state is the one that is to be set
    torch.manual_seed(own)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def remembered_seed() -> int | None:
    """What `set_seed` was last given in this process."""
    return _remembered


def run_seed() -> int:
    """The seed that a loader of this process starts from: `set_seed`'s, or else torch's."""
    remembered = remembered_seed()
    return torch.initial_seed() if remembered is None else remembered


def check_rng_types(rng_types: Iterable[str] | None) -> list[str]:
    """Raises `BadRequest` for a name that is not one of `RNG_TYPES`."""
    names = [str(getattr(each, "value", each)) for each in rng_types or ()]
    for name in names:
        if name not in RNG_TYPES:
            raise BadRequest(f"rng type {name!r} is not known; use one of {', '.join(map(repr, RNG_TYPES))}")
    return names


def synchronize_rng_states(rng_types: Iterable[str], generator: torch.Generator | None = None) -> None:
    """Give every rank the state that rank 0 has, for each of `rng_types`; "generator" means `generator`.

    Raises `BadRequest` for an unknown type and for "generator" without one, before anything is sent.
    """
    names = check_rng_types(rng_types)
    if "generator" in names and generator is None:
        raise BadRequest("rng type 'generator' asks for a generator: synchronize_rng_states(['generator'], generator)")
    if not PartialState().use_distributed or not names:
        return
    told: list[Any] = [{name: _state(name, generator) for name in names} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, src=0, device=consistency.control_device())
    for name, state in told[0].items():
        _set_state(name, state, generator)


def _state(name: str, generator: torch.Generator | None) -> Any:  # noqa: ANN401 - what that generator calls its state
    if name == "generator":
        assert generator is not None
        return generator.get_state()
    if name == "torch":
        return torch.get_rng_state()
    if name == "cuda":
        return torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return np.random.get_state(legacy=False) if name == "numpy" else random.getstate()  # noqa: NPY002


def _set_state(name: str, state: Any, generator: torch.Generator | None) -> None:  # noqa: ANN401
    if name == "generator":
        assert generator is not None
        generator.set_state(state)
    elif name == "torch":
        torch.set_rng_state(state)
    elif name == "cuda":
        if state is not None:
            torch.cuda.set_rng_state(state)
    elif name == "numpy":
        np.random.set_state(state)  # noqa: NPY002
    else:
        random.setstate(state)
