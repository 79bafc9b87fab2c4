"""Verify, describe and convert checkpoints."""
