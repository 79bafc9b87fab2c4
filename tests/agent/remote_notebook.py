"""A notebook's process on one of the hosts of `namespaces`: it runs the code that it reads from standard input.

A request is a line with a JSON text of Python code, the reply a line with `repr(result)` or the error. Lines that the
cluster reports are replies to nothing, and begin with `#`.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any


def serve() -> None:
    """Run the requests until the end of the input."""
    names: dict[str, Any] = {}
    for line in sys.stdin:
        names["result"] = None
        try:
            exec(json.loads(line), names)
            reply = {"result": repr(names["result"])}
        except BaseException as error:  # noqa: BLE001 - the test sees it
            reply = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
