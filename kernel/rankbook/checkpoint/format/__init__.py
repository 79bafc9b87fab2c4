"""Read and write the files of a checkpoint: manifest, checksums, torch's zip files, DCP's metadata."""
