"""The agent: the process that represents another host. `python -m rankbook.agent --connect FILE` runs it.

`agent.py` is the process; `identity.py` reads what a launcher says of the node and the task.
"""
