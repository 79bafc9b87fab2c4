"""What a load does about keys that only one side knows: the ranks that ask, or the checkpoint.

Owns: the modes, their names those of Megatron-Core, and the decision. Refuses: to log, to raise, to look into a file.

*Unexpected* is what a rank asks for and the checkpoint does not have; *missing* is what the checkpoint has and no rank
asks for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple

from rankbook.checkpoint.planning.validation import said
from rankbook.errors import BadRequest
from rankbook.ranks import group_ranks

MOST_KEYS_SAID = 8
"""Keys of one kind that a message names."""


class StrictHandling(Enum):
    """What becomes of unexpected and of missing keys; all that are not raised about are left as they are."""

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """The default: nobody looks for missing keys; an unexpected one is found as it is to be read, and raised about."""
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    """`load` returns (state dict, missing keys, unexpected keys), the missing ones empty."""
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @classmethod
    def of(cls, mode: str | StrictHandling) -> StrictHandling:
        """The mode, or the mode of this name. Raises `BadRequest` for another name."""
        if isinstance(mode, str) and mode.lower() in cls._value2member_map_:
            return cls(mode.lower())
        if not isinstance(mode, cls):
            raise BadRequest(f"strict={mode!r} is no mode: one of {', '.join(each.value for each in cls)}")
        return mode

    @property
    def asks_all_ranks(self) -> bool:
        """Whether it needs to know what the other ranks ask for."""
        return self in {StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL}

    @property
    def returns_keys(self) -> bool:
        """Whether `load` returns the keys beside the state dict."""
        return self in {StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL}


class Decision(NamedTuple):
    """What is to be done, the same on every rank.

    `error` and `warning` are sentences, "" for none. `skipped` are asked for and are not to be read. `missing` and
    `unexpected` are what `load` returns in a mode that `returns_keys`, and empty in the others.
    """

    error: str
    warning: str
    skipped: frozenset[str]
    missing: frozenset[str]
    unexpected: frozenset[str]


def decide(asked: Sequence[Collection[str]], stored: Collection[str], mode: StrictHandling, where: str) -> Decision:
    """What to do about the keys that each rank asks for, rank by rank, of those that the checkpoint `where` has."""
    known = set(stored)
    ranks = group_ranks((rank, key) for rank, keys in enumerate(asked) for key in set(keys) - known)
    unexpected = dict(sorted(ranks.items()))
    missing = sorted(known.difference(*asked)) if mode.asks_all_ranks else []
    none: frozenset[str] = frozenset()
    told = Decision("", "", frozenset(unexpected), none, none)
    if not unexpected and not missing:
        return told
    match mode:
        case StrictHandling.IGNORE_ALL:
            return told
        case StrictHandling.RETURN_UNEXPECTED | StrictHandling.RETURN_ALL:
            return told._replace(missing=frozenset(missing), unexpected=frozenset(unexpected))
        case StrictHandling.LOG_UNEXPECTED | StrictHandling.LOG_ALL:
            return told._replace(warning=f"{_say(unexpected, missing, where)}. The rest is loaded")
    more = "log_all" if missing else "log_unexpected"
    return told._replace(error=f"{_say(unexpected, missing, where)}. strict={more!r} loads the rest", skipped=none)


def _say(unexpected: dict[str, list[int]], missing: Sequence[str], where: str) -> str:
    parts = []
    if unexpected:
        keys = [f"{key!r} ({said(ranks)})" for key, ranks in unexpected.items()]
        parts.append(f"unexpected keys, asked for and not in the checkpoint: {_some(keys)}")
    if missing:
        keys = [repr(key) for key in missing]
        parts.append(f"missing keys, in the checkpoint and asked for by no rank: {_some(keys)}")
    return f"{where}: {'; '.join(parts)}"


def _some(keys: Sequence[str]) -> str:
    more = len(keys) - MOST_KEYS_SAID
    return ", ".join([*keys[:MOST_KEYS_SAID], f"and {more} more"] if more > 0 else keys)
