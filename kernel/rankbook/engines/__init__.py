"""Engines: start the agents of other hosts with ssh, Slurm, Open MPI, Ray, or a third party's program.

`engine.py` has the `Engine` protocol, its events and the search for an engine by name; `processes.py` what engines of
command line programs share, with the engines `ssh`, `mpirun` and `env` (lines to run by hand), and `supervisor.py` the
process that ends such a program together with the notebook. `slurm.py` and `ray.py` are the other engines.

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
