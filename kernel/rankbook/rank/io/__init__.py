"""Capture the output of a rank's cells and carry the comm messages of its widgets."""
