"""A stand-in for srun, mpirun and ssh, by the name that it is called by: it runs the command on this machine.

Its arguments are appended to the file STUB_LOG. The standard input goes to all processes, as srun and
`mpirun --stdin all` do it, and SIGTERM ends them. A command that keeps a job gets the number 9.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path


def main() -> int:
    name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    if arguments == ["--version"]:
        sys.stdout.write(f"slurm {os.environ.get('STUB_VERSION', '22.05.8')}\n")
        return 0
    with Path(os.environ["STUB_LOG"]).open("a") as log:
        log.write(json.dumps([name, *arguments]) + "\n")
    if failure := os.environ.get("STUB_FAILURE"):
        sys.stderr.write(f"{name}: error: {failure}\n")
        return 1
    if "sh" in arguments:
        command = arguments[arguments.index("sh") :]
        os.execvpe(command[0], command, {**os.environ, "SLURM_PROCID": "0", "SLURM_JOB_ID": "9"})
    text = sys.stdin.read()
    if name == "ssh":
        commands = [["bash", "-c", arguments[-1]]]
    else:
        start = arguments.index(sys.executable)
        sizes = [word.partition("=")[2] for word in arguments if word.startswith("--nodes=")]
        count = int(sizes[0] if sizes else arguments[arguments.index("-np") + 1])
        commands = [arguments[start:]] * count
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env={**os.environ, **variables(name, node)})
        for node, command in enumerate(commands)
    ]
    signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in processes])
    for process in processes:
        process.stdin.write(text)
        process.stdin.close()
    return max(abs(process.wait()) for process in processes)


def variables(name: str, node: int) -> dict[str, str]:
    if name == "mpirun":
        return {"OMPI_COMM_WORLD_RANK": str(node), "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    if name == "srun":
        return {"SLURM_PROCID": str(node), "SLURM_NODEID": str(node), "SLURMD_NODENAME": f"node{node + 1}"}
    return {}


sys.exit(main())
