"""The `rankbook` command: `main` parses it, `notebook_runner` executes notebooks, `console` prints their output."""
