"""Run the command as `python -m rankbook.cli`."""

import sys

from rankbook.cli.main import main

sys.exit(main())
