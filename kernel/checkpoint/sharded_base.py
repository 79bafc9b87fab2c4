"""What all entries of a sharded state dict have in common.

Owns: their base class, the names of their types, which replica is the main one. Refuses: tensors and shapes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, TypeAlias

StateDict: TypeAlias = dict[str, Any]
CommonStateDict: TypeAlias = dict[str, Any]
ShardedStateDict: TypeAlias = dict[str, Any]
ReplicaId: TypeAlias = int | tuple[int, ...]


class ShardedBase(ABC):
    """An entry of a sharded state dict: a local object, and what of which global object it is."""

    key: str
    data: object
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raises `CheckpointingException` where its attributes do not agree."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """A new one with `data=None`."""


def is_main_replica(replica_id: ReplicaId | Iterable[int]) -> bool:
    """Whether the replica with this id is the one that is stored: the integer 0, or zeros only, `()` included."""
    if isinstance(replica_id, Iterable):
        return all(each == 0 for each in replica_id)
    return replica_id == 0
