"""Plan saves and loads as data: which rank writes a chunk, and which byte ranges a rank reads."""
