"""Read batches: prepared loaders, samplers, the dispatcher, random numbers and loader state.

loaders.py         `prepare_data_loader`, `DataLoaderShard`, `DataLoaderDispatcher` (rank 0 reads for all),
                   `skip_first_batches`
loader_base.py     `PreparedLoader`: a pass over the data, common to all prepared loaders
samplers.py        distribution of batches and samples over ranks
batch_requests.py  batch samplers that yield `BatchRequest`s
batch_reader.py    datasets that read a whole batch per request
stateful.py        loader position, and dataset state for checkpoints
rng.py             seeds and random states
"""
