"""How ranks come to be.

Owns: the processes that make ranks, and the environment a rank is given. Refuses: to decide which rank runs when.

launcher.py   what a launcher is: one Protocol
local.py      this machine: the forkserver's process
kept.py       the forkserver of a kept cluster, claimed
records.py    which clusters are kept: where they lie, and their secrets
environment.py  torch's environment contract, devices, backends, threads
look.py       what the operating system says of a process that does not answer
folders.py    where sockets, shared memory and logs lie
"""
