"""Define the wire protocol: the messages between the notebook process, the forkserver and the ranks."""
