"""Engines: start the agents of other hosts with ssh, Slurm, Open MPI, Ray, or a third party's program.

`engine.py` has the `Engine` protocol, its events and the search for an engine by name; `processes.py` what engines of
command line programs share, and `supervisor.py` the process that ends such a program together with the notebook. The
others are the engines: `env.py` (lines to run by hand), `ssh.py`,
`slurm.py`, `mpirun.py` and `ray.py`.

An engine knows hosts by numbers, and nothing of ranks and of the connection between agents and notebook.
"""

from rankbook.engines.engine import (
    AgentConnection,
    Engine,
    EngineEvent,
    HostEnded,
    HostOutput,
    HostQueued,
    HostStarted,
    Limits,
    Notice,
    split_arguments,
)

__all__ = [
    "AgentConnection",
    "Engine",
    "EngineEvent",
    "HostEnded",
    "HostOutput",
    "HostQueued",
    "HostStarted",
    "Limits",
    "Notice",
    "split_arguments",
]
