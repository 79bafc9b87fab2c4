"""The agent: the process that represents another host. `python -m rankbook.agent --connect FILE` runs it."""
