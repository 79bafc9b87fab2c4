"""Launching of ranks: forkserver processes, and the environment of a rank.

launcher.py      the Protocol of a launcher
local.py         ranks on this machine, through a forkserver; reattaching to a detached cluster
registry.py      records of detached clusters
environment.py   environment variables, devices, backend and threads of a rank
process_info.py  state of an unresponsive process, as the operating system reports it
paths.py         folders for sockets, shared memory and logs
"""
