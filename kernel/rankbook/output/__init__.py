"""Merge, store and replay the output of ranks: streams, displays and results of cells."""
