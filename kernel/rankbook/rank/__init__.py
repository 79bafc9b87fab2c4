"""The rank side: the processes that run the cells.

Owns: what happens inside the forkserver and a rank. Refuses: to know the notebook's side but by its messages.

forkserver.py     imports torch once, forks ranks, reaps them
owner.py          which notebook it serves, and who may claim a kept cluster
forks.py          a rank's forks: loaders' workers
host.py           what the operating system is asked for: sessions, parent death, pipes
control_groups.py whom the kernel's OOM killer ended
main.py           a rank's life, and its main thread's loop
comms.py          widgets that are made here
outputs.py        what is captured in one of them, an Output
captured.py       what stands in it
debug.py          a debugger, where a front end wants one
farewell.py       what is left to do as it is to leave: saves, exit functions, files
control.py        a rank's second thread, which always answers
shell.py          the IPython shell that cells run in, and its display
execute.py        one task: run, call, assign, fetch
failures.py       the exception that ended a task, as a report
originals.py      builtins that a cell has replaced, put back where the rank needs them
memory.py         which variables hold the memory
out_of_memory.py  an error that ran out of it: told, and what it held freed
tracebacks.py     errors, short and for people
outbox.py         what a kept rank has sent and nobody has seen
capture.py        stdout and stderr, of the process and its children
streams.py        Python's stdout and stderr, in order
process_group.py  torch's process groups: made, aborted, formed anew
store.py          the store in which ranks find each other
gloo.py           gloo, connected to ranks of this user only
backends.py       torch's gloo and nccl, made
recoverable.py    a group that outlives its connections
waits.py          waits for a collective, so that the wait ends
collectives.py    what a group was asked for, and what has not ended
inquiries.py      the threads that look while the main thread works
hints.py          what an editor is told while a person types
reading.py        the code before its cursor
members.py        what an object has, without asking it
describe.py       what a person is told of it
measure.py        the times of a cell, and its profile, where they were asked for
wait_clock.py     how long it stood still for other ranks
profiling.py      what torch's profiler sees of it
trace.py          that, as a piece of one trace of all ranks
look.py           what the rank tells of itself to whoever looks
peek.py           expressions, evaluated beside the cell that runs
belongings.py     the models, optimizers and loaders that live here
parts.py          their tensors, by metadata
memory_use.py     how full the device is
variables.py      the namespace, as a person lists it
shard_map.py      which part of which tensor lies where
statistic.py      the numbers of a tensor, a little at a time
heal.py           what a rank hands to one that takes a dead one's place
pickle_check.py   which of its values can be pickled, checked in a child
lifeboat.py       survives gloo's giving up
models.py         models that an error left half way through a step
sockets.py        the TCP sockets behind a group, to end a wait with
"""
