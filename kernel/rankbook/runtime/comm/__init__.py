"""Communicate between ranks: collectives over nested containers, metrics, consistency checks.

collectives.py  gather, broadcast, reduce, pad, and object collectives
consistency.py  checks that all ranks agree, before a collective
methods.py      communication methods of the `Accelerator`
tree.py         operations on nested containers of tensors
"""
