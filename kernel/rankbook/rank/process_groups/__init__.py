"""Create, abort and re-form the process groups of a rank, and log the collectives on them."""
