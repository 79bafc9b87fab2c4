"""Run the command as `python -m rankbook.cli`."""

import sys

from rankbook.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
