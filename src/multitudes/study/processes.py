"""The process of a job on this machine: started, watched, stopped.

On Linux it is forked from a process that has imported everything (`fork_server`); elsewhere it is a command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from multitudes.study.fork_server import OUTPUT
from multitudes.study.monitor import JobProgress
from multitudes.study.store import Job, failure_in

__all__ = ["GRACE", "Commands", "ForkServer", "JobProcess", "Starter", "starter", "threads", "tied"]

WORKER, SERVER = ((sys.executable, "-P", "-m", f"multitudes.study.{name}") for name in ("worker", "fork_server"))
GRACE = 10.0
"""How many seconds a job has, once it is asked to end, to save its training."""
TRIES = 3
"""How many times a job is started whose process is killed."""
LINUX = sys.platform.startswith("linux")

_TIE = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit('its study has ended'); os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Ends a process when its parent is killed, and then becomes the command."""


class Process(Protocol):
    """A process that runs a job."""

    def poll(self) -> int | None:
        """Its exit code, negative where a signal killed it; None while it runs."""

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""


class Starter(Protocol):
    """What starts the processes of jobs; closing it ends them."""

    def start(self, directory: Path, environment: Mapping[str, str]) -> Process:
        """Run the job in a directory, with these variables added to the environment."""

    def close(self) -> None:
        """End all that it has started."""


def starter(command: Sequence[str] | None = None) -> Starter:
    """What starts jobs here: a fork server where the system allows it, or a command to which the directory is added."""
    return ForkServer() if LINUX and command is None else Commands(command or WORKER)


def tied(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that ends when this one does, even if that is killed; elsewhere than on Linux it may go on."""
    tie = [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid())] if LINUX else []
    return subprocess.Popen([*tie, *command], **options)


def threads(count: float) -> dict[str, str]:
    """The environment of a job that computes with so many threads, rounded down."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(max(1, int(count))))


class Commands:
    """Runs a command for each job."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, directory: Path, environment: Mapping[str, str]) -> Process:
        """Run it in a process of its own."""
        with (directory / OUTPUT).open("wb") as output:
            process = tied(
                [*self.command, str(directory)], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )  # fmt: skip
        self.started = [each for each in self.started if each.poll() is None] + [process]
        return process

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.started:
            process.kill()
            process.wait()


class ForkServer:
    """Has jobs forked from a process that has imported what they need. It is started with the first job.

    Its environment is that of the first job: what libraries read when they are loaded, such as the number of threads,
    must be the same for all.
    """

    def __init__(self) -> None:
        self.count = 0
        self.codes: dict[int, int | None] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._heard = b""

    def start(self, directory: Path, environment: Mapping[str, str]) -> Process:
        """Fork it."""
        if self._server is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as the server
            own = {**os.environ, **environment}
            pipe = subprocess.PIPE
            self._server = tied(SERVER, stdin=pipe, stdout=pipe, stderr=self._errors, env=own, bufsize=0)
            assert self._server.stdout is not None
            os.set_blocking(self._server.stdout.fileno(), False)
        self.count += 1
        self.codes[self.count] = None
        (directory / OUTPUT).touch()
        self.ask(job=self.count, directory=str(directory.resolve()), environment=dict(environment))
        return _Forked(self, self.count, directory)

    def ask(self, **request: Any) -> None:
        """Send a request; where the server has died, `listen` will find that out."""
        if self._server is None or self._server.stdin is None:
            return
        with suppress(BrokenPipeError):
            os.write(self._server.stdin.fileno(), json.dumps(request).encode() + b"\n")

    def listen(self) -> None:
        """Note which jobs have ended: all of them, where the server has died."""
        if self._server is None:
            return
        assert self._server.stdout is not None
        new = self._server.stdout.read()
        *lines, self._heard = (self._heard + (new or b"")).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self.codes[answer["job"]] = answer["code"]
        if new == b"":
            code = self._server.wait() or -signal.SIGKILL  # its jobs are killed with it
            self.codes |= {number: code for number, known in self.codes.items() if known is None}
            self._forget()

    @property
    def errors(self) -> bytes:
        """What the server itself has printed."""
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> None:
        """End the server, which ends its jobs."""
        if self._server is not None and self._server.stdin is not None:
            self._server.stdin.close()
            try:
                self._server.wait(GRACE)
            except subprocess.TimeoutExpired:  # it still imports
                self._server.kill()
                self._server.wait()
            self._forget()

    def _forget(self) -> None:
        server, self._server, self._heard = self._server, None, b""
        for pipe in () if server is None else (server.stdin, server.stdout):
            if pipe is not None:
                pipe.close()


class _Forked:
    """A job that was forked."""

    def __init__(self, server: ForkServer, number: int, directory: Path) -> None:
        self.server, self.number, self.directory = server, number, directory

    def poll(self) -> int | None:
        self.server.listen()
        code = self.server.codes[self.number]
        if code is not None and code > 0 and not (self.directory / OUTPUT).stat().st_size:
            (self.directory / OUTPUT).write_bytes(self.server.errors)
        return code

    def send_signal(self, number: int) -> None:
        self.server.ask(job=self.number, signal=int(number))


class JobProcess:
    """A process that runs a job, and how far it is; what it prints goes to `output.txt` in the job's directory.

    On Linux it ends when this process does, even if that is killed. Elsewhere it may run to its end, which does no
    harm: a job writes the same files however often it is run. One that is killed by a signal is started again, with the
    checkpoint that it has left, `TRIES` times in all.
    """

    def __init__(self, job: Job, starter: Starter, environment: Mapping[str, str]) -> None:
        self.job, self.progress = job, JobProgress(job.name)
        self.reason = ""
        """Why it failed, once it has ended without results."""
        self.tries, self._begun = 0, time.monotonic()
        self._output = job.directory / OUTPUT
        self._begin: Callable[[], Process] = lambda: starter.start(job.directory, environment)
        self._start()

    def _start(self) -> None:
        self.tries += 1
        _, self._read = self.job.events()
        self.process = self._begin()

    def ended(self) -> bool:
        """Whether it has ended, for good; reads its log up to now."""
        code = self.process.poll()  # before the log is read, so that no event is missed
        events, self._read = self.job.events(self._read)
        for event in [{}, *events]:
            self.progress = self.progress.after(event, time.monotonic() - self._begun)
            self.reason = failure_in(event) or self.reason
        if code is None:
            return False
        if code < 0 and not (self.job.done or self.reason) and self.tries < TRIES:
            self._start()
            return False
        self.reason = self.reason or self._how_it_ended(code)
        if self._output.is_file() and not self._output.stat().st_size:
            self._output.unlink()
        return True

    def terminate(self) -> None:
        """Ask it to save its training and to end."""
        self.process.send_signal(signal.SIGTERM)

    def stop(self, grace: float = GRACE) -> None:
        """End it, at once after so many seconds; what it has half-written has no name yet."""
        self.terminate()
        deadline = time.monotonic() + grace
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                self.process.send_signal(signal.SIGKILL)
            time.sleep(0.02)

    def _how_it_ended(self, code: int) -> str:
        """Its exit code, and the last line that it printed."""
        lines = [line.strip() for line in self._output.read_text(errors="replace").split("\n")]
        last = next((line for line in reversed(lines) if line), "")
        killed = f"it was killed by {signal.Signals(-code).name} {self.tries} times" if code < 0 else ""
        if code == -signal.SIGKILL and not last:
            last = "perhaps there is too little memory for as many jobs at a time"
        how = killed or (f"it ended with exit code {code}" if code else "it ended without results")
        return f"{how}: {last}" if last else how
