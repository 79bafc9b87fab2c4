"""One device: nothing to spread.

Owns: the case of one rank without a plan. Refuses: to wrap anything.
"""

from __future__ import annotations

from rankbook.runtime.strategies.base import Setup, Strategy


class SingleDevice(Strategy):
    """The model as it is."""

    name = "NO"
    wrapper = ""

    @classmethod
    def fits(cls, setup: Setup) -> bool:
        """One rank, and neither shards nor a mesh are asked for."""
        return setup.num_processes == 1 and setup.fsdp is None
