"""Part of a rank in a change of the number of ranks.

`check` describes this rank's state before the change, `enter_world` adapts it afterwards. What was prepared for
training is the concern of runtime/resize.py, which is not imported unless a cell has used the runtime.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, TypedDict

import torch
from msgspec import structs
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rankbook import snapshot_files
from rankbook.protocol.messages import EnterWorld
from rankbook.rank import model_reset, recovery
from rankbook.rank.process_groups.recoverable_group import RecoverableProcessGroup

_RUNTIME = "rankbook.runtime.accelerator"
_SAVES = "rankbook.checkpoint.async_save"
_SAVE_TIMEOUT = 60.0
"""Seconds to wait for a background save, whose process group ends with the number of ranks."""
_LARGEST = 1 << 26
"""Bytes of a variable that are compared with other ranks; larger ones count as equal."""
_MOST_ITEMS = 10_000
"""Items of a container that are compared with other ranks; a larger one counts as equal."""


class ResizeCheck(TypedDict):
    """Answer to `CheckResize`.

    `problem`: why the state does not fit the new number of ranks; empty if it does. `size`: the bytes that this rank
    hands over. `digests` of the variables, empty for those that cannot be compared between ranks. `groups`: the
    variables that hold process groups, device meshes or sharded tensors, which belong to the number of ranks before.
    `meshes`: those that all ranks create. `every`: the interval of the protection, 0 without. `steps`: the optimizer
    steps made. `random`: the state of the random generators. `sharing`: the number of ranks that will read the same
    batches, 1 without tensor parallelism.
    """

    problem: str
    size: int
    digests: dict[str, str]
    groups: list[str]
    meshes: tuple[Any, ...]
    every: int
    steps: int
    random: bytes
    sharing: int


def check(namespace: Mapping[str, Any], hidden: Mapping[str, Any], world_size: int) -> ResizeCheck:
    """Describe this rank for a change to `world_size` ranks. Changes nothing."""
    answer = ResizeCheck(
        problem="",
        size=0,
        digests={},
        groups=[],
        meshes=(),
        every=0,
        steps=0,
        random=recovery.random_state(),
        sharing=1,
    )
    save = sys.modules.get(_SAVES)
    if save is not None and not save.wait_for_saves(_SAVE_TIMEOUT):
        answer["problem"] = f"a background save has not finished within {_SAVE_TIMEOUT:.0f} s; wait for it"
        return answer
    prepared_ids: set[int] = set()
    if _RUNTIME in sys.modules:
        from rankbook.runtime import protection, resize

        answer["problem"] = resize.find_problem(world_size) or resize.find_unmovable()
        if answer["problem"]:
            return answer
        answer["size"] = resize.bytes_to_hand_over()
        answer["meshes"], answer["sharing"] = resize.fitted_meshes(world_size)
        answer["every"], answer["steps"] = protection.interval(), protection.steps_made()
        prepared_ids = protection.covered()
    for name, value in namespace.items():
        if name.startswith("_") or name in hidden or id(value) in prepared_ids:
            continue
        if isinstance(value, (RecoverableProcessGroup, DeviceMesh, DTensor)):
            answer["groups"].append(name)
        else:
            # A value that cannot be compared counts as equal, but a rank may have none.
            answer["digests"][name] = digest_of(value) or ""
    return answer


def digest_of(value: object) -> str | None:
    """Return a digest of a number, text, tensor or array, or a container of them; None for other values."""
    hasher = blake2b(digest_size=16)
    try:
        for index, part in enumerate(_parts_of(value)):
            if index > _MOST_ITEMS:
                return None
            hasher.update(part)
    except (TypeError, RuntimeError, RecursionError):  # another type, or data on a device that has failed
        return None
    return hasher.hexdigest()


def _parts_of(value: object) -> Iterator[Any]:
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        yield f"{kind.__name__} {value!r};".encode(errors="replace")
    elif kind in (list, tuple):
        yield f"{kind.__name__} {len(value)};".encode()  # type: ignore[arg-type]
        for item in value:  # type: ignore[attr-defined]
            yield from _parts_of(item)
    elif kind is dict:
        yield f"dict {len(value)};".encode()  # type: ignore[arg-type]
        for key, item in value.items():  # type: ignore[attr-defined]
            yield from _parts_of(key)
            yield from _parts_of(item)
    elif kind in (torch.Tensor, torch.nn.Parameter):
        tensor = value.detach()  # type: ignore[attr-defined]
        if tensor.nbytes > _LARGEST or tensor.layout is not torch.strided:
            raise TypeError("too large to compare")
        yield f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode()
        yield tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    elif kind.__module__ == "numpy" and hasattr(value, "tobytes"):
        if value.nbytes > _LARGEST or value.dtype.hasobject:  # type: ignore[attr-defined]
            raise TypeError("too large to compare")
        yield f"array {value.dtype} {value.shape};".encode()  # type: ignore[attr-defined]
        yield value.tobytes()
    else:
        raise TypeError("cannot be compared")


def enter_world(namespace: dict[str, Any], hidden: Mapping[str, Any], message: EnterWorld) -> None:
    """Adapt this rank to the number of ranks of the process group, which has been formed. A collective."""
    world_size = message.world_size
    place = snapshot_files.this_place
    former = place.world_size if place is not None else world_size
    if place is not None:
        snapshot_files.this_place = structs.replace(place, world_size=world_size)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    # The user's own value stays.
    if "world_size" in hidden and namespace.get("world_size") == former:
        namespace["world_size"] = world_size
    torch.set_num_threads(message.threads)
    for model in model_reset.models_with_reducers():
        model.process_group = distributed_c10d._get_default_group()
    if message.meshes or _RUNTIME in sys.modules:
        from rankbook.runtime import resize

        resize.enter_world(message.meshes)
    recovery.continue_random(message.random, message.seeded)


def hand_over(folder: str) -> None:
    """Write this rank's shards into `folder`. A collective."""
    from rankbook.runtime import resize

    resize.hand_over(folder)


def take_over(folder: str) -> None:
    """Read this rank's shards from `folder`. A collective."""
    from rankbook.runtime import resize

    resize.take_over(folder)
