"""Which models are prepared now, and what became of their parameters.

Owns: for each model of the person's the one generation that is prepared, and for each parameter that was replaced its
successor. Refuses: to keep any of them alive: a cell that is run again leaves nothing behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from rankbook.runtime.strategies.base import Strategy


@dataclass
class Generation:
    """A model as it was prepared last. `signature`: what would have to be done again, were it different."""

    wrapped: weakref.ref[nn.Module]
    strategy: Strategy
    signature: tuple[Any, ...]
    name: str


_generations: weakref.WeakKeyDictionary[nn.Module, Generation] = weakref.WeakKeyDictionary()
_successors: WeakIdKeyDictionary = WeakIdKeyDictionary()


def raw_of(model: nn.Module) -> nn.Module:
    """The person's own model, of one that `prepare` returned; any other model as it is."""
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        if "reducer" not in model.__dict__ or inner in _generations:
            return inner
    return model


def generation_of(raw: nn.Module) -> Generation | None:
    """How the model is prepared now, if it is."""
    return _generations.get(raw)


def strategy_of(model: nn.Module) -> Strategy | None:
    """The way the model was prepared, if it was."""
    found = _generations.get(raw_of(model))
    return found.strategy if found is not None else None


def remember(raw: nn.Module, generation: Generation) -> None:
    """This is the model's generation from now on."""
    _generations[raw] = generation


def forget(raw: nn.Module) -> Generation | None:
    """The model is the person's own again."""
    return _generations.pop(raw, None)


def living() -> list[tuple[Strategy, nn.Module]]:
    """The prepared models that somebody still holds, with their strategies."""
    found = [(each.strategy, each.wrapped()) for each in tuple(_generations.values())]
    return [(strategy, wrapped) for strategy, wrapped in found if wrapped is not None]


def count() -> int:
    """How many models are prepared now."""
    return len(_generations)


@contextmanager
def following(model: nn.Module) -> Iterator[None]:
    """Note which parameters of `model` are replaced within the block."""
    before = [(each, name, parameter) for each in model.modules() for name, parameter in each._parameters.items()]
    yield
    pairs = [(old, module._parameters.get(name)) for module, name, old in before]
    replaced = {id(old): (old, new) for old, new in pairs if old is not None and new is not None and new is not old}
    # Whoever holds what an old one has replaced is sent to the new one at once: the old one itself is about to go.
    for earlier, reference in list(_successors.items()):
        middle = reference()
        if middle is not None and id(middle) in replaced:
            _successors[earlier] = TensorWeakRef(replaced[id(middle)][1])
    for old, new in replaced.values():
        _successors[old] = TensorWeakRef(new)
        _successors.pop(new, None)  # or two of them could lead to each other


def successor_of(parameter: torch.Tensor) -> torch.Tensor:
    """What stands for `parameter` in its model now: itself, unless it was replaced."""
    reference = _successors.get(parameter)
    found: torch.Tensor | None = reference() if reference is not None else None
    return parameter if found is None else found  # None: its model is gone, and with it who would need this
