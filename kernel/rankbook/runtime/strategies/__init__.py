"""How a model is spread over the ranks: one class for each way.

Owns: the ways, and nothing between them: a new one is a module and its line in `choose.py`. Refuses: optimizers,
loaders and precision, which are the same for all of them.

strategy.py         what each of them can do, and the setup they are chosen by
single.py           one device
ddp.py              whole copies that average their gradients
fsdp2.py            shards of parameters, gradients and optimizer state
unshard.py          takes such shards together again
tensor_parallel.py  each layer divided by a plan, and shards of that over the data-parallel ranks
meshes.py           device meshes, made once and kept
choose.py           which way a setup asks for
"""
