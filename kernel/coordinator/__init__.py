"""The notebook side: what the ranks shall do, and whoever waits for them.

Owns: the cluster's state, its driver thread, the public `Cluster`. Refuses: torch, IPython, zmq.

events.py   what can happen
actions.py  what is to be done about it
state.py    from one to the other, pure
journal.py  how it got there
exits.py    how a rank's process ended, in words
timers.py   what is to be done later
driver.py   performs the actions: links, forkserver, timers
cell.py     one task on its way: output, waiters, result
wait.py     what the notebook's main thread does while a cell runs
interrupts.py  its SIGINT, held until it is safe
crew.py     the processes of one cluster, started and ended together
adopted.py  the state of a kept cluster in a new owner's hands; what was seen is told
adoption.py   what was missed, as cells and headings
reunion.py  asking the ranks of a kept cluster
reattach.py the crew of a kept cluster, taken over
cluster.py  the public face
current.py  the notebook's one cluster
"""
