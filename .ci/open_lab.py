"""Run a command that opens JupyterLab, without a browser, until its server answers: `open_lab.py jupyter lab NOTEBOOK`.

Check that the server of the command has the notebook, which is the last argument. Exit with 1 if it does not.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

SECONDS = 120


def get(server: dict, path: str) -> dict:
    """Return the answer of a running server to a request of its REST API."""
    with urllib.request.urlopen(f"{server['url']}{path}?token={server['token']}", timeout=SECONDS) as answer:  # noqa: S310 - this machine
        return json.load(answer)


def wait_server(process: subprocess.Popen, folder: Path) -> dict:
    """Return what the server has written about itself. It does so when it listens."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for file in folder.glob("jpserver-*.json"):
            try:
                server = json.loads(file.read_text())
                get(server, "api/status")
            except (ValueError, OSError):  # half of the file is written, or the server does not accept yet
                continue
            return server
        try:
            sys.exit(f"{process.args} exited with code {process.wait(0.1)}")
        except subprocess.TimeoutExpired:
            pass
    sys.exit(f"{process.args} did not answer within {SECONDS} s")


def main(command: list[str]) -> None:
    """Run the command, look at the server, and end it."""
    # Port 0: the kernel chooses one that is free.
    options = [
        "--no-browser",
        "--ServerApp.port=0",
        "--log-level=WARN",
        *(["--allow-root"] if os.geteuid() == 0 else []),
    ]
    with tempfile.TemporaryDirectory(prefix="rankbook-lab-") as folder:
        environment = {**os.environ, "JUPYTER_RUNTIME_DIR": folder, "JUPYTER_CONFIG_DIR": f"{folder}/config"}
        process = subprocess.Popen([*command, *options], env=environment)
        try:
            server = wait_server(process, Path(folder))
            notebook = Path(command[-1]).resolve().relative_to(Path(server["root_dir"]).resolve())
            cells = get(server, f"api/contents/{notebook}")["content"]["cells"]
            print(f"JupyterLab answers and has {notebook} with {len(cells)} cells")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
