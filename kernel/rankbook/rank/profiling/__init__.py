"""Measure cells: wall time, time in collectives, and torch's profiler."""
