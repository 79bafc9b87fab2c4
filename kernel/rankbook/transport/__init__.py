"""Moves messages and large values between the notebook process, the forkserver and the ranks.

Owns: sockets, framing, pickles that cross a process, shared memory. Refuses: to know what a message means.

link.py       what a link is: the two ends as Protocols
zmq_link.py   the real one; the only module that imports zmq
stream.py     length-prefixed messages over a socket pair, for the forkserver
payload.py    values to buffers and back
culprit.py    what in a value cannot be pickled
tensors.py    torch tensors out of band
segments.py   shared memory files
private_folder.py  a cluster's folder, made anew where it was removed
last_words.py  what a rank sent last, in a file that outlives it
"""
