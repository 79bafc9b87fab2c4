"""What a rank can tell about itself, as plain structs.

Owns: their fields. Refuses: to know who tells and who listens.
"""

from __future__ import annotations

import msgspec


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One collective of one rank.

    `number` counts those of its group since the group was formed, 0 for sends and receives, whose other rank is `peer`.
    `data` is this rank's, in words (`float32[4, 4]`); `alike`: all ranks should have the same there. It began `seconds`
    ago.
    """

    number: int
    op: str
    data: str
    alike: bool
    peer: int | None
    seconds: float


class GroupReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one rank is in one process group: `count` collectives begun; those that have not ended, and the last ones.

    `ranks` are the group's members, as the world counts them. `broken`: its connections are, so that what is pending on
    another rank cannot end either.
    """

    name: str
    ranks: tuple[int, ...]
    count: int
    pending: tuple[Launch, ...]
    recent: tuple[Launch, ...]
    broken: bool = False
