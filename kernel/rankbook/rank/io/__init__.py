"""Capture the output of a rank's cells, and exchange the comm messages of its widgets."""
