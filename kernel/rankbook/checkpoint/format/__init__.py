"""Read and write checkpoint files: manifest, checksums, torch.save zips, safetensors and DCP metadata."""
