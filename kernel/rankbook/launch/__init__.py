"""Launching of ranks: forkserver processes, and the environment of a rank.

local.py         the Protocol of a launcher; ranks on this machine, through a forkserver; reattaching to a detached
                 cluster
registry.py      folders for sockets, shared memory and logs; records of detached clusters
hosts.py         ranks on other hosts: the coordinator's side of the agents
placement.py     which rank runs on which host and device
connection.py    the file with which an agent connects
code_sync.py     modules of the notebook's folder for other hosts
"""
