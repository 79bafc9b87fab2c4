"""Strategies for spreading a model over the ranks, one class per strategy.

Optimizers, loaders and precision are the same for all strategies, and are handled elsewhere.

    base.py             the `Strategy` interface; a single device, and replicas that average their gradients
                        (DistributedDataParallel); device meshes; unsharding
    fsdp2.py            sharded parameters, gradients and optimizer state (fully_shard); layers split over ranks by a
                        plan
    transfer.py         sharded models on the way to the process that replaces a dead rank
"""
