"""Store checkpoints: local folders, fsspec file systems, step directories and their locks."""
