"""Test the suite for engines: `FakeEngine` and an engine of another package pass, and each defect is found."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from rankbook.engines import AgentConnection, HostEnded, HostStarted, Limits, engine, supervisor
from rankbook.engines.processes import Job, ProcessEngine
from rankbook.errors import StartError
from rankbook.testing import FakeEngine, check_engine
from tests.conftest import wait_until
from tests.engines.test_engine import third_party  # noqa: F401 - a fixture

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@pytest.mark.parametrize("spare", [0, 1])
def test_the_fake_engine_passes(spare):
    check_engine(lambda: FakeEngine(2, spare=spare))


def test_an_engine_of_another_package_passes(third_party):  # noqa: F811 - the fixture
    check_engine(lambda: engine.make_engine("submit", []))


class LeaksKey(FakeEngine):
    def start(self, hosts, slots, connection):
        self.jobs[None] = Job(["sleep", "30"], env={**os.environ, "KEY": connection.text})
        super().start(hosts, slots, connection)


class SaysNothing(FakeEngine):
    def events(self):
        return [event for event in super().events() if not isinstance(event, HostEnded)]


class EndsAll(FakeEngine):
    def events(self):
        events = super().events()
        if any(isinstance(event, HostEnded) for event in events):
            self.stop()
        return events


class UsesNumbersTwice(FakeEngine):
    def replace(self, host, *, wait):
        return 1


class GivesOneNumber(FakeEngine):
    def start(self, hosts, slots, connection):
        numbered = dataclasses.replace(connection)
        command = connection.command
        object.__setattr__(numbered, "command", lambda _, slots: command(0, slots))
        super().start(hosts, slots, numbered)


class HasNoLimits(FakeEngine):
    def limits(self):
        return None


class HasEnded(FakeEngine):
    def limits(self):
        return Limits(time.time() - 1)


class TakesFewerSlots(FakeEngine):
    def start(self, hosts, slots, connection):
        super().start(hosts, 1, connection)


class ReportsOthers(FakeEngine):
    def events(self):
        events = super().events()
        return [*events, *(HostEnded(1, "") for event in events if isinstance(event, HostEnded))]


class StartsNothing(FakeEngine):
    def start(self, hosts, slots, connection):
        self.pending += [HostStarted(0), HostStarted(1)]


class EndsWhatItHasReported(FakeEngine):
    reported: frozenset[int] = frozenset()

    def events(self):
        events = super().events()
        self.reported |= {event.host for event in events if isinstance(event, HostStarted)}
        return events

    def stop(self):
        missed = {host: self.jobs.pop(host) for host in [*self.jobs] if host not in self.reported}
        super().stop()
        self.jobs, self.reported = missed, frozenset(missed)  # the next call ends them


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (LeaksKey, r"text is in environ of process"),
        (SaysNothing, r"expected HostEnded of every host in \[0\]"),
        (EndsAll, r"the agent of host 1 ended with that of host 0"),
        pytest.param(
            UsesNumbersTwice, r"expected replace\(\) to return a number that no host has", marks=pytest.mark.full
        ),
        pytest.param(GivesOneNumber, r"two agents have the same number", marks=pytest.mark.full),
        pytest.param(HasNoLimits, r"expected limits\(\) to return Limits, got None", marks=pytest.mark.full),
        pytest.param(HasEnded, r"the hosts have ended already", marks=pytest.mark.full),
        pytest.param(TakesFewerSlots, r"expected at least 4 slots, the agents offer 2", marks=pytest.mark.full),
        pytest.param(ReportsOthers, r"expected the end of host 0 alone", marks=pytest.mark.full),
        pytest.param(EndsWhatItHasReported, r"the agent of host [01] runs after stop\(\)", marks=pytest.mark.full),
        (StartsNothing, r"an agent of every host in \[0, 1\] to connect"),
    ],
)
def test_a_defect_is_found(make, text, monkeypatch):
    monkeypatch.setattr("rankbook.testing._END_SECONDS", 3.0)
    made = []

    def make_one():
        made.append(make(2))
        return made[-1]

    try:
        with pytest.raises(AssertionError, match=text):
            check_engine(make_one, slots=4, timeout=20.0 if make is not StartsNothing else 0.5)
    finally:
        for one in made:
            one.stop()


def test_a_job_gets_its_text_and_its_output_and_end_are_read():
    job = Job([sys.executable, "-c", "import sys; print(sys.stdin.read().upper()); sys.exit(3)"], "secret")
    assert job.wait(30)
    assert job.poll() == 3
    with pytest.raises(StartError, match="no-such-program is not installed"):
        Job(["no-such-program"])


def test_a_debugger_of_the_notebook_does_not_attach_itself_to_a_job(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def skip():
        entered.append(True)
        yield
        entered.append(False)

    def run(*_, **__):
        assert entered == [True]
        raise FileNotFoundError("not started")

    monkeypatch.setitem(sys.modules, "pydevd", SimpleNamespace(skip_subprocess_arg_patch=skip))
    monkeypatch.setattr("rankbook.engines.processes.subprocess.Popen", run)
    with pytest.raises(StartError, match="not started"):
        Job(["true"])


def test_a_job_whose_supervisor_does_not_react_is_killed_at_the_stop(monkeypatch):
    monkeypatch.setattr("rankbook.engines.processes._STOP_SECONDS", 0.2)
    engine = ProcessEngine()
    job = engine.jobs[0] = Job(["sh", "-c", "echo $$; exec sleep 1000"])
    output = []
    wait_until(lambda: output.append(job.read()) or "\n" in "".join(output), timeout=20, what="it runs")
    processes = [psutil.Process(job._process.pid), psutil.Process(int("".join(output)))]
    processes[0].suspend()
    with pytest.raises(StartError, match=r"did not end within .* and was killed"):
        engine.stop()
    _, left = psutil.wait_procs(processes, timeout=20)
    for process in left:
        process.kill()
    assert not left


@pytest.mark.slow
def test_a_job_that_ignores_sigterm_is_killed_with_what_it_has_started():
    code = "trap '' TERM; sleep 1000 & echo $!; wait; sleep 1000"
    job = Job(["bash", "-c", code])
    output = []
    wait_until(lambda: output.append(job.read()) or "\n" in "".join(output), timeout=20, what="it writes")
    grandchild = int("".join(output))
    job.end()
    assert job.wait(30)
    wait_until(lambda: not psutil.pid_exists(grandchild), timeout=20, what="the grandchild ends")


def test_jobs_end_when_the_process_that_started_them_is_killed(tmp_path):
    code = (
        "from rankbook.engines.processes import Job\nimport time\n"
        "job = Job(['bash', '-c', 'sleep 1000 & echo $!; wait'])\n"
        "text = ''\nwhile not text: text = job.read(); time.sleep(0.02)\n"
        "print(text, flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as notebook:
        assert notebook.stdout is not None
        pid = int(notebook.stdout.readline())
        notebook.kill()
    wait_until(lambda: not psutil.pid_exists(pid), timeout=20, what="the job ends")


def test_a_job_ends_although_a_forked_child_has_a_copy_of_the_pipe():
    job = Job(["sleep", "1000"])
    copy = os.dup(job._alive)
    try:
        job.end()
        assert job.wait(60)
    finally:
        os.close(copy)
        job.wait(60)


def test_a_job_ends_in_a_process_with_many_open_files():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    read, write = os.pipe()
    number = fcntl.fcntl(read, fcntl.F_DUPFD, 1500)
    try:
        command = [sys.executable, supervisor.__file__, "--alive", f"{number},{signal.SIGTERM:d}", "sleep", "1000"]
        with subprocess.Popen(command, pass_fds=(number,), stderr=subprocess.PIPE) as supervising:
            os.write(write, b"\0")
            _, errors = supervising.communicate(timeout=60)
            assert (supervising.returncode, errors) == (128 + signal.SIGTERM, b"")
    finally:
        for end in (read, write, number):
            os.close(end)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_job_of_slurm_is_kept_after_its_first_step_until_it_is_to_end_or_has_ended(tmp_path):
    ended = tmp_path / "ended"
    for hold, signals in ((f"cat > /dev/null; touch {ended}", 1), ("sleep 0.5", 0)):
        holder = ["sh", "-c", f"echo rankbook-job 9; {hold}"]
        in_job = [sys.executable, supervisor.__file__, "--in-job", str(len(holder)), *holder]
        command = [*in_job, "sh", "-c", "printf 'in job %s' $SLURM_JOB_ID; exit 3"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as kept:
            assert kept.stdout is not None
            lines = [kept.stdout.readline() for _ in range(2)]
            assert lines[0] == "in job 9\n" and supervisor.read_step_end(lines[1]) == 3
            if signals:
                with pytest.raises(subprocess.TimeoutExpired):
                    kept.wait(0.5)
                assert not ended.exists()
                kept.terminate()
            assert kept.wait(60) == 3
    assert ended.exists()


def test_the_program_that_keeps_a_job_of_slurm_ends_with_its_standard_input(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    with subprocess.Popen(supervisor.HOLD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "rankbook-job 9\n"
        for number in (signal.SIGTERM, signal.SIGUSR2):
            holder.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            holder.wait(0.3)
        holder.stdin.close()
        assert holder.wait(60) == 0


@pytest.mark.parametrize(
    ("mode", "signals", "lines"),
    [
        ("--report", 1, ["ended: it was killed by SIGTERM"]),
        ("--report-sigterm", 2, ["ending: node9", "ended: it was killed by SIGTERM"]),
    ],
)
def test_slurms_first_sigterm_is_reported_and_not_passed_on(monkeypatch, mode, signals, lines):
    monkeypatch.setenv("SLURMD_NODENAME", "node9")
    command = [sys.executable, supervisor.__file__, mode, "4", "sh", "-c", "echo runs; exec sleep 1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reporter:
        assert reporter.stdout is not None
        assert [reporter.stdout.readline() for _ in range(2)] == ["rankbook-host 4 started: node9\n", "runs\n"]
        output = []
        for _ in range(signals):
            reporter.terminate()
            output.append(reporter.stdout.readline())
        assert output == [f"rankbook-host 4 {line}\n" for line in lines]


def test_a_connection_can_name_another_module():
    connection = dataclasses.replace(AgentConnection("", None), module="other")  # type: ignore[arg-type]
    assert connection.command(None, None)[:4] == [sys.executable, "-P", "-m", "other"]
