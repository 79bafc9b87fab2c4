"""Merge, store and replay the output of ranks: streams, displays and results of cells.

merger.py       live merge of the output of all ranks (with its theory of operation)
interleave.py   queues of unshown output, and the order between ranks
terminal.py     bytes to lines, carriage returns, live displays of progress bars
by_rank.py      output as blocks grouped by rank
cell_result.py  `CellResult`: status, output and errors of a finished cell
"""
