"""Checks of the numbers of a training run.

    hashing.py           hashes of tensors and their differences between ranks
    norms.py             norms of gradients over all ranks, by parameter and module (pure code)
    gradients.py         norms of the gradients of this rank
    tables.py            results that are shown as a table, as text and HTML
    commands.py          public functions that the ranks run
    watch_conditions.py  conditions of `watch_numbers`
    watch.py             number watch of a rank: hooks on modules, gradients, collectives and optimizers
    attribution.py       on which rank, in which module and phase a non-finite value was born (pure code)
    naming.py            names of modules and parameters, lines of cells

The modules that import torch are loaded by the ranks when a check is used. Nothing here imports `rank` or
`coordinator`, so that both can import it.
"""
