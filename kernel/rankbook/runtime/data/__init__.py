"""Read batches: prepared loaders, samplers, the dispatcher, random numbers and loader state."""
