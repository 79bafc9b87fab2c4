"""A Jupyter kernel whose plain cells run on the ranks: "Python 3 (Rankbook)".

Owns: the kernel and what Jupyter knows about it. Refuses: what `%load_ext rankbook` gives to any kernel; this one has
it loaded.

kernel.py    the kernel
spec.py      what Jupyter is told about it, and where that is put
__main__.py  runs it, or installs it
"""
