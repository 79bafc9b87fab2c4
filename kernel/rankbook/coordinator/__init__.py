"""The notebook side: what the ranks shall do, and whoever waits for them.

Owns: the cluster's state, its driver thread, the public `Cluster`. Refuses: torch, IPython, zmq.

events.py   what can happen
actions.py  what is to be done about it
tables.py   the states of ranks and cells, and what follows on what
state.py    from one to the other, pure
supervisor.py  the same for the collectives of the cells that run
watch.py    which of their waits cannot end, and where the ranks disagree
journal.py  how it got there
exits.py    how a rank's process ended, in words
presence.py  which ranks answer when they are asked
questions.py  what ranks are asked while they run, and whose the answers are
board.py    their answers as one picture, pure
shards.py   the same for the shards of a variable
lookout.py  asks them while somebody looks, and on demand
hints.py    asks one of them while a person types
peek.py     an expression, evaluated on the ranks while they run
feed.py     what views see of a cluster, and do to it
silence.py  what it means when a rank does not answer, in words
timers.py   what is to be done later
comms.py      widgets that live on ranks: whose they are
debugs.py     ranks under a debugger: who hears theirs, which are paused
farewells.py  ask a rank to leave, kill it after a grace period
grace.py      the grace periods, in seconds
inbox.py    receives what the ranks send; what a message costs that cannot be read or handled
driver.py   performs the actions: links, forkserver, timers
cell.py     one task on its way: output, waiters, result
vigil.py    tells, beside a long cell, of a rank that has fallen silent
wait.py     what the notebook's main thread does while a cell runs
interrupts.py  its SIGINT, held until it is safe
heal.py     a new rank in the place of a dead one
status.py   what is told of a rank
crew.py     the processes of one cluster, started and ended together
adopted.py  the state of a kept cluster in a new owner's hands; what was seen is told
adoption.py   what was missed, as cells and headings
reunion.py  asking the ranks of a kept cluster
reattach.py the crew of a kept cluster, taken over
work.py     tasks for the ranks, and what comes back
sight.py      what can be asked of the ranks whatever they run
cluster.py  the public face
current.py  the notebook's one cluster
"""
