"""Checks of the numbers of a training run.

    hashing.py           hashes of tensors and their differences between ranks
    norms.py             norms of gradients over all ranks, by parameter and module (pure code)
    gradients.py         norms of the gradients of this rank
    step_ends.py         ends of optimizer steps, for views and checks that must not read in the middle of a step
    tables.py            results that are shown as a table, as text and HTML
    commands.py          public functions that the ranks run
    watch_conditions.py  conditions of `watch_numbers`
    watch.py             number watch of a rank: hooks on modules, gradients, collectives and optimizers
    attribution.py       on which rank, in which module and phase a non-finite value was born (pure code)
    comparison.py        `compare`: where a step in two layouts parts first
    training_step.py     training step made of a loss function, and the batch of a loader
    step_layout.py       names of layouts
    layouts.py           copies of a model and its optimizer in a layout
    recording.py         record of a step: summaries of its tensors, as whole ones
    relations.py         relation of two tensors: a factor, a missing rank, another mask, a precision (pure functions)
    naming.py            names of modules and parameters, lines of cells

The modules that import torch are loaded by the ranks when a check is used. Nothing here imports `rank` or
`coordinator`, so that both can import it.
"""
