"""Run a command until it ends or the notebook does. Run as a script, with the standard library only.

    python supervisor.py --alive FD,SIGNAL COMMAND...  on the notebook's host
    python supervisor.py --in-job N HOLDER COMMAND...  on the notebook's host
    python supervisor.py --report NAME COMMAND...      on another host

With `--alive`, the command runs in a session of its own and is ended when the pipe FD has data, is closed at its other
end, or the process that has started this one ends. That is what a killed kernel leaves behind: neither a handler nor an
exit function runs there. First comes the number SIGNAL, then SIGTERM and SIGKILL, with some seconds between.

With `--in-job`, HOLDER, of N words, asks for a job, writes a line with its number (`HOLD`), and keeps it until its
standard input ends. The command runs in that job. A line says that it has ended (`read_step_end`), and the job is kept
for others until this process gets SIGUSR2 or SIGTERM, or the one that has started it ends.

With `--report`, lines on standard output say that the command has started and how it has ended (`read_report`), and
the exit status is 0: MPI ends all processes when one has failed, and Slurm says only of some ends which task it was.
NAME is the variable that has the number of the host, or the number itself. In the first case, `--node` and the number
are appended to the command: variables of another launcher, in which the notebook runs, say nothing about its hosts.
With `--report-sigterm` in its place, the first SIGTERM is reported and not passed on.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time

_GRACE = 4.0
"""Seconds between two signals that end a command."""
_POLL = 0.2
_REPORT = re.compile(r"rankbook-host (\d+) (started|ending|ended): (.*)")
_STEP_END = re.compile(r"rankbook-step ended: (-?\d+)")
_JOB = "rankbook-job "
# It ends when its standard input does, and with no signal but SIGKILL: the agents need the job when a signal comes to
# all of its tasks.
HOLD = (
    *("sh", "-c"),
    f"""trap "" HUP INT TERM USR1 USR2; [ "$SLURM_PROCID" != 0 ] || echo "{_JOB}$SLURM_JOB_ID"; exec cat""",
)
"""Command that keeps a job of Slurm, for `--in-job`."""


def read_report(line: str) -> tuple[int, str, str] | None:
    """Return what a line of `--report` says: the host, "started", "ending" or "ended", and its name or the reason.

    "ending" means that the launcher has sent SIGTERM, and the agent runs on.

    Example::

        read_report("rankbook-host 1 ended: it was killed by SIGKILL")  # (1, 'ended', 'it was killed by SIGKILL')
    """
    match = _REPORT.fullmatch(line.strip())
    return None if match is None else (int(match[1]), match[2], match[3])


def read_step_end(line: str) -> int | None:
    """Return the exit code of the command of `--in-job` if a line says that it has ended; None for another line."""
    match = _STEP_END.fullmatch(line.strip())
    return None if match is None else int(match[1])


def without_step_end(text: str) -> str:
    """Return a program's output without the line of `read_step_end`."""
    return "\n".join(line for line in text.split("\n") if read_step_end(line) is None)


def describe_code(code: int) -> str:
    """Describe the exit of a process, to follow "because"."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"it was killed by {signal.Signals(-code).name}"
    return f"it exited with code {code}"


def _supervise(alive: int, first_signal: int, command: list[str]) -> int:
    parent = os.getppid()
    terminated: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: terminated.append(number))
    # An interrupt of the kernel is for the cells.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        child = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        return 127
    # `select.select` has no descriptors above 1023, and the notebook may have many open files.
    pipe = select.poll()
    pipe.register(alive, select.POLLIN)
    while child.poll() is None:
        if pipe.poll(1000 * _POLL) or terminated or os.getppid() != parent:
            _end(child, first_signal)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end(child: subprocess.Popen[bytes], first_signal: int) -> None:
    for number in dict.fromkeys((first_signal, signal.SIGTERM, signal.SIGKILL)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        deadline = time.monotonic() + _GRACE
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if child.poll() is not None:
            break
    # What the command has started and left, also if it has ended by itself.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _run_in_job(holder_command: list[str], command: list[str]) -> int:
    ended: list[int] = []
    parent = os.getppid()
    # They also go to both programs. The holder's tasks ignore them, so that the other one has time to end.
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: ended.append(number))
    try:
        holder = subprocess.Popen(holder_command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        sys.stderr.write(f"cannot run {holder_command[0]}: {error.strerror}\n")
        return 127
    assert holder.stdin is not None and holder.stdout is not None
    code: int | None = None
    for line in holder.stdout:
        if line.startswith(_JOB):
            if not ended:
                # srun takes the job of this variable.
                environment = {**os.environ, "SLURM_JOB_ID": line.removeprefix(_JOB).strip()}
                code = subprocess.run(command, env=environment, check=False).returncode
                # In one write, and behind what the command may have left of a line. The notebook may have gone.
                with contextlib.suppress(OSError):
                    os.write(1, f"\nrankbook-step ended: {code}\n".encode())
            while not ended and holder.poll() is None and os.getppid() == parent:
                time.sleep(_POLL)
            break
        sys.stdout.write(line)
        sys.stdout.flush()
    holder.stdin.close()
    held = holder.wait()
    code = held if code is None else code
    return code if code >= 0 else 128 - code


def _report(variable: str, command: list[str], *, sigterm: bool) -> int:
    ended = False
    is_first = sigterm

    def forward(number: int, _frame: object) -> None:
        nonlocal ended, is_first
        if number == signal.SIGTERM and is_first:
            is_first = False
            with contextlib.suppress(OSError):
                os.write(1, f"rankbook-host {host} ending: {name}\n".encode())
            return
        ended = True
        if child is not None:
            child.send_signal(number)

    child: subprocess.Popen[bytes] | None = None
    host = variable
    if not variable.isdecimal():
        host = os.environ.get(variable, "0")
        command = [*command, "--node", host]
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, forward)
    # Users ask Slurm to send this one before the end of a job, to save. The agent learns of the end from the notebook.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # In one write, so that lines of several hosts are not mixed.
    os.write(1, f"rankbook-host {host} started: {name}\n".encode())
    try:
        child = subprocess.Popen(command)
        if ended:
            child.terminate()
        reason = describe_code(child.wait())
    except OSError as error:
        reason = f"{command[0]} cannot be run: {error.strerror}"
    # The launcher may have gone.
    with contextlib.suppress(OSError):
        os.write(1, f"rankbook-host {host} ended: {reason}\n".encode())
    return 0


def main(arguments: list[str]) -> int:
    """Run the command that the arguments name, and return the exit code."""
    mode, value, *command = arguments
    if mode.startswith("--report"):
        return _report(value, command, sigterm=mode == "--report-sigterm")
    if mode == "--in-job":
        return _run_in_job(command[: int(value)], command[int(value) :])
    alive, first_signal = value.split(",")
    return _supervise(int(alive), int(first_signal), command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
