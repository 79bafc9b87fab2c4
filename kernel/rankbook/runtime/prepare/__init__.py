"""What `Accelerator.prepare` does with each kind of object.

Owns: one small module for each kind, and their order. Refuses: to touch what it does not know; that passes through.

context.py      what the Accelerator was asked for, as these modules read it
dispatch.py     which module an object belongs to, and in what order
registry.py     which models are prepared now; an earlier generation of a model is released
models.py       placed, spread over the ranks, run in mixed precision, compiled
optimizers.py   follow their parameters, act when gradients sync
schedulers.py   step with their optimizers
loaders.py      give each rank its share
reports.py      tells what was prepared
"""
