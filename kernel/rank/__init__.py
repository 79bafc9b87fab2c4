"""The rank side: the processes that run the cells.

Owns: what happens inside the forkserver and a rank. Refuses: to know the notebook's side but by its messages.

forkserver.py     imports torch once, forks ranks, reaps them
host.py           what the operating system is asked for: sessions, parent death, pipes, control groups
main.py           a rank's life, and its main thread's loop
control.py        a rank's second thread, which always answers
shell.py          the IPython shell that cells run in, and its display
execute.py        one task: run, call, assign, fetch
tracebacks.py     errors, short and for people
capture.py        stdout and stderr, of the process and its children
process_group.py  torch's process groups: made, aborted, formed anew
recoverable.py    a group that outlives its connections
collectives.py    what a group was asked for, and what has not ended
models.py         what an error leaves half way in a sharded model, made whole
sockets.py        the TCP sockets behind a group, to end a wait with
"""
