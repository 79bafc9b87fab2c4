"""Checks of numbers: hashes of tensors and their differences between ranks (hashing.py).

The modules that import torch are loaded by the ranks when a check is used. Nothing here imports `rank` or
`coordinator`, so that both can import it.
"""
