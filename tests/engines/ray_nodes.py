"""A Ray cluster of two nodes on this machine: prints its address, and ends with its standard input.

The line `remove` on its input ends the second node, and `add` starts another one.
"""

import socket
import sys

from ray.cluster_utils import Cluster


def ports() -> dict[str, int]:
    """Return free ports for the agents of a node: for those that it chooses itself, it waits 15 s and then fails."""
    names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in names}
    chosen = {name: listener.getsockname()[1] for name, listener in sockets.items()}
    for listener in sockets.values():
        listener.close()
    return chosen


cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20, **ports()},
)
node = cluster.add_node(num_cpus=2, object_store_memory=100 << 20, **ports())
print("address", cluster.address, flush=True)
for line in sys.stdin:
    if line == "remove\n":
        cluster.remove_node(node, allow_graceful=False)
    elif line == "add\n":
        node = cluster.add_node(num_cpus=2, object_store_memory=100 << 20, **ports())
cluster.shutdown()
