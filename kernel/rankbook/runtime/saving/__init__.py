"""Save and restore the state of a training run and the files of a model."""
