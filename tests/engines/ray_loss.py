"""A notebook's process whose Ray cluster loses a node: `python -m tests.engines.ray_loss ADDRESS`.

It says `lost` when the ranks of the node are, and heals them, for which Ray needs another node.
"""

from __future__ import annotations

import sys

from rankbook import Cluster
from rankbook.launch.hosts import HostOptions
from tests.engines.session import tell, wait_for


def main(address: str) -> None:
    """Lose a node and check what is reported."""
    with Cluster(4, hosts=HostOptions("ray", address, nodes=2, lost_after=300.0), timeout=150) as cluster:
        cluster.run("kept = rank")
        tell("up", [host.ranks for host in cluster.hosts()])

        def dead() -> list[int]:
            return [status.rank for status in cluster.status() if status.state == "dead"]

        tell("seconds", wait_for(lambda: len(dead()) == 2, 100))
        ranks, others = dead(), sorted({*range(4)} - {*dead()})
        tell("loss", str(cluster.status()[ranks[0]].loss))
        tell("kept", cluster.pull("kept", ranks=others) == others)
        tell("lost", ranks)
        cluster.heal()
        tell("sum", cluster.run("t = torch.ones(1); dist.all_reduce(t); t.item()").text(0))


if __name__ == "__main__":
    main(sys.argv[1])
