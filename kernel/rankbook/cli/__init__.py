"""The command `rankbook`: `main` parses it, `notebook_runner` runs a notebook, `console` prints the run's output."""
