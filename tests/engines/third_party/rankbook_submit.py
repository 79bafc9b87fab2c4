"""An engine of another package, as short as it can be."""

import os
import subprocess

from rankbook.engines import HostEnded, HostOutput, HostStarted, Limits
from rankbook.errors import InvalidArgument


class SubmitEngine:
    def __init__(self, arguments):
        if arguments:
            raise InvalidArgument(f"submit has no options, got {arguments}")
        self._processes, self._events, self._next = {}, [], 0

    def start(self, hosts, slots, connection):
        self._connection, self._slots = connection, -(-slots // (hosts or 2))
        for _ in range(hosts or 2):
            self._submit()

    def _submit(self):
        host, self._next = self._next, self._next + 1
        command = self._connection.command(host, self._slots)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with process.stdin:
            process.stdin.write(self._connection.text.encode())
        # Without blocking: `events` must not wait.
        os.set_blocking(process.stdout.fileno(), False)
        self._processes[host] = process
        self._events.append(HostStarted(host))
        return host

    def events(self):
        events, self._events = self._events, []
        for host, process in list(self._processes.items()):
            code = process.poll()
            if data := process.stdout.read():
                events.append(HostOutput(host, data.decode()))
            if code is not None:
                self._processes.pop(host).stdout.close()
                events.append(HostEnded(host, f"it exited with code {code}"))
        return events

    def replace(self, host, *, wait):
        return self._submit()

    def limits(self):
        return Limits()

    def stop(self):
        for process in self._processes.values():
            process.terminate()
            process.wait(10)
            process.stdout.close()
        self._processes.clear()
