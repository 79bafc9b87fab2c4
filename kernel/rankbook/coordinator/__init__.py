"""Coordinator: the notebook's side of a cluster, which sends cells to the ranks and collects their results.

Imports neither torch nor IPython. The theory of operation is in driver.py.

    cluster.py              public API: `Cluster` and `RankStatus`
    default_cluster.py      the notebook's default cluster: start, attach, stop
    state_machine.py        pure state machine: events in, actions out; its state after a reattachment
    events.py               events of the state machine
    actions.py              actions of the state machine
    states.py               states and transition tables of ranks and cells; grace periods, in seconds
    deadlock.py             deadlock and mismatch detection for collectives
    driver.py               driver thread, message receiver, timers, graceful shutdown
    cluster_processes.py    processes and resources of one cluster, from start to stop
    running_cell.py         one cell: tasks, output, input questions, result
    wait.py                 waiting for a cell on the main thread: input, deferred interrupts, liveness warnings
    liveness.py             stack requests and unresponsive ranks; description of a rank's exit, and its last output
    monitor.py              status monitoring for views, maps of shards
    queries.py              evaluation, completion and inspection on running ranks; pauses of all ranks at one step
    channels.py             queries, comms of widgets and debugger messages, to and from ranks
    recovery.py             heal: hand over variables to the replacement of a dead rank; records of what is under way
    reattach.py             attach to a detached cluster: handshake, replay, takeover
"""
