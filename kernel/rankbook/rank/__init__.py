"""The rank side of Rankbook: the forkserver, and the rank processes that run the cells.

Talks to the notebook's process only by the messages of `rankbook.protocol`.

forkserver.py     imports torch once; forks, kills and reaps ranks; ownership of a detached cluster
main.py           entry point of a rank: set-up, task loop, shutdown; imports of the notebook's modules on another host
control_thread.py receives messages while the main thread works; interrupts
executor.py       runs one task (a cell, a call, an assignment) and reports its error
shell.py          the IPython shell of the cells, and its display
tracebacks.py     error reports with short tracebacks
output_capture.py captures what the cells print, from Python, C++ and subprocesses
comms.py          comms of the rank's widgets; the output in an `Output` widget
debugger.py       debugpy's engine, connected to the notebook
measurement.py    times of a cell, time waiting for other ranks, and a profile
recovery.py       transfers variables to the rank that replaces a dead one; adapts a rank to another number of ranks
model_reset.py    resets DDP and FSDP2 models after a failed step
replay_buffer.py  messages of a detached rank that no owner has received
os_utils.py       signals, pipes, sockets, killing processes; builtins that a cell has replaced
inspect/          queries answered beside a running cell: completion, evaluation, memory, shards
process_groups/   process groups that survive aborts, their store, and their log of collectives
"""
