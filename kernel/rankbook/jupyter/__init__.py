"""A Jupyter kernel that runs plain cells on the ranks: "Python 3 (Rankbook)".

It is IPython's kernel with the `rankbook` extension loaded and auto mode on.

kernel.py    the kernel class
spec.py      the kernel spec, and its installation
__main__.py  run the kernel, or install its spec
"""
