"""Communicate between ranks: collectives over nested containers, splitting, consistency checks."""
