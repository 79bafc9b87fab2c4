"""A stand-in for Ray: actors are objects of this process, and their calls run in threads."""

from __future__ import annotations

import concurrent.futures
import types
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_threads = ThreadPoolExecutor(16)
arguments: list[object] = []
"""The arguments of all calls of actors."""


class RayError(Exception):
    """Base class of Ray's errors."""


class _Method:
    def __init__(self, function: Any) -> None:
        self._function = function

    def remote(self, *values: object) -> Future[Any]:
        """Call the method in a thread."""
        arguments.extend(values)
        return _threads.submit(self._function, *values)


class _Actor:
    def __init__(self, instance: Any) -> None:
        self.instance = instance

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self.instance, name))


class _ActorClass:
    def __init__(self, cls: type) -> None:
        self._cls = cls

    def options(self, **_options: object) -> _ActorClass:
        """Return the class."""
        return self

    def remote(self) -> _Actor:
        """Make an actor."""
        return _Actor(self._cls())


class _Group:
    def ready(self) -> Future[Any]:
        """Return a result that is there."""
        return _threads.submit(lambda: None)


def _wait(references: list[Future[Any]], *, num_returns: int = 1, timeout: float) -> tuple[list[Any], list[Any]]:
    done, rest = concurrent.futures.wait(references, timeout)
    assert num_returns <= len(references)
    return [*done], [*rest]


def _kill(actor: _Actor) -> None:
    actor.instance._process.kill()
    actor.instance._process.wait(10)


def make_module() -> types.ModuleType:
    """Return the module `ray`, whose cluster has one node."""
    ray = types.ModuleType("ray")
    strategies = types.SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *_, **__: None)
    vars(ray).update(
        is_initialized=lambda: True,
        util=types.SimpleNamespace(
            placement_group=lambda *_, **__: _Group(),
            remove_placement_group=lambda _: None,
            scheduling_strategies=strategies,
        ),
        exceptions=types.SimpleNamespace(RayError=RayError),
        get=lambda reference, timeout=None: reference.result(timeout),
        get_runtime_context=lambda: types.SimpleNamespace(get_node_id=lambda: "node"),
        kill=_kill,
        nodes=lambda: [{"NodeID": "node", "Alive": True}],
        remote=_ActorClass,
        wait=_wait,
    )
    return ray
