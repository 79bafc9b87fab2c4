"""Checks of the numbers of a training run.

    hashing.py           hashes of tensors and their differences between ranks
    commands.py          public functions that the ranks run
    watch_conditions.py  conditions of `watch_numbers`
    watch.py             number watch of a rank: hooks on modules, gradients, collectives and optimizers
    attribution.py       on which rank, in which module and phase a non-finite value was born (pure code)
    naming.py            names of modules and parameters, lines of cells

The modules that import torch are loaded by the ranks when a check is used. Nothing here imports `rank` or
`coordinator`, so that both can import it.
"""
