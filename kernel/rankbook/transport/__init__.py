"""Move messages and large values between the notebook process, the forkserver and the ranks.

The transport does not interpret messages.

link.py             protocols of the two ends of the link
zmq_link.py         the link over ZeroMQ; the only module that imports zmq
framed_socket.py    length-prefixed messages over a socket pair, for the forkserver
serialization.py    values to buffers and back, with the sources of cells; errors for values that cannot be pickled
tensors.py          torch tensors out of band
shared_memory.py    shared memory files, their transfer to other hosts, and the private folder of a cluster
output_journal.py   crash-safe copy of a rank's latest output, in files that outlive the process
"""
