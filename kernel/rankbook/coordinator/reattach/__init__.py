"""Reattach a notebook to a detached cluster: claim it, replay its output, rebuild its state."""
