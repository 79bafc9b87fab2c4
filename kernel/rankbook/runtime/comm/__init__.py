"""Communicate between ranks: collectives over nested containers, and metrics.

collectives.py  gather, broadcast, reduce, pad, and object collectives; the methods of the `Accelerator`
tree.py         operations on nested containers of tensors
"""
