"""The rank side: the processes that run the cells.

Owns: what happens inside the forkserver and a rank. Refuses: to know the notebook's side but by its messages.

forkserver.py     imports torch once, forks ranks, reaps them
owner.py          which notebook it serves, and who may claim a kept cluster
host.py           what the operating system is asked for: sessions, parent death, pipes, control groups
main.py           a rank's life, and its main thread's loop
control.py        a rank's second thread, which always answers
shell.py          the IPython shell that cells run in, and its display
execute.py        one task: run, call, assign, fetch
tracebacks.py     errors, short and for people
outbox.py         what a kept rank has sent and nobody has seen
capture.py        stdout and stderr, of the process and its children
process_group.py  joining and leaving torch's process group
"""
