"""Plan saves and loads as data: which chunk is written by which rank, and read from where."""
