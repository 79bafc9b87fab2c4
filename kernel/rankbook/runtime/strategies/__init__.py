"""Strategies for spreading a model over the ranks, one class per strategy.

Optimizers, loaders and precision are the same for all strategies, and are handled elsewhere.

    base.py             the `Strategy` interface, `StrategySetup`, device meshes, single device, unsharding
    ddp.py              replicas that average their gradients (DistributedDataParallel)
    fsdp2.py            sharded parameters, gradients and optimizer state (fully_shard); layers split over ranks by a
                        plan
"""
