"""A process that has imported what a job needs, and forks itself for each job, which so starts in milliseconds.

    python -m multitudes.study.fork_server

It is asked on stdin and answers on stdout, with a JSON object a line: `{"job": 3, "directory": "...", "environment":
{...}}` starts a job, `{"job": 3, "signal": 15}` sends it a signal, and `{"job": 3, "code": 0}` is the answer once it
has ended. Once stdin is closed, it ends the jobs and itself; when it is killed, Linux ends them.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["end_with_parent", "main"]

PRELOADED = ("multitudes.study.worker", "safetensors.torch", "sklearn.datasets", "torch.profiler", "PIL.Image")
"""What jobs import, or some of them, as far as it is installed. It must not start a GPU, or threads that forks lose."""
OUTPUT = "output.txt"
"""What a job prints, in its directory."""
HELD = (signal.SIGINT, signal.SIGTERM)
DIE_WITH_PARENT, SET_NAME = 1, 15
"""Options of Linux's prctl."""


def main() -> None:
    """Serve until stdin is closed."""
    for number in HELD:  # Ctrl-C reaches the whole group of processes; this one ends with its parent
        signal.signal(number, signal.SIG_IGN)
    answers = os.dup(1)
    os.dup2(2, 1)  # what an import prints is no answer
    for name in PRELOADED:
        with suppress(ImportError):  # a job that needs it will say so
            importlib.import_module(name)
    gc.freeze()  # pages that are never collected stay shared with the jobs
    _Server(0, answers).serve()


def end_with_parent() -> None:
    """Have Linux kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


class _Server:
    """The loop, and the jobs that are running: their process, by number."""

    def __init__(self, questions: int, answers: int) -> None:
        self.questions, self.answers = questions, answers
        self.running: dict[int, int] = {}
        self.prctl = ctypes.CDLL(None).prctl
        self.ended, self.wake = os.pipe()
        for end in (self.ended, self.wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the descriptor is written to

    def serve(self) -> None:
        heard = b""
        with selectors.DefaultSelector() as both:
            both.register(self.questions, selectors.EVENT_READ)
            both.register(self.ended, selectors.EVENT_READ)
            while True:
                for key, _ in both.select():
                    new = os.read(key.fd, 65536)
                    if key.fd == self.ended:
                        self._collect()
                    elif not new:
                        return self._stop()
                    else:
                        *lines, heard = (heard + new).split(b"\n")
                        for line in lines:
                            self._obey(json.loads(line))

    def _obey(self, asked: Mapping[str, Any]) -> None:
        number = asked["job"]
        if "signal" not in asked:
            self._start(number, Path(asked["directory"]), asked["environment"])
        elif number in self.running:
            os.kill(self.running[number], asked["signal"])

    def _start(self, number: int, directory: Path, environment: Mapping[str, str]) -> None:
        server = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)  # until the job has handlers of its own
        process = os.fork()
        if process == 0:
            try:
                self.prctl(DIE_WITH_PARENT, signal.SIGKILL)
                self.prctl(SET_NAME, directory.name.encode()[:15])
                if os.getppid() == server:
                    os.close(self.answers)
                    _become(directory, environment)
            finally:
                os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        self.running[number] = process

    def _collect(self) -> None:
        """Tell of the jobs that have ended."""
        for number, process in list(self.running.items()):
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                del self.running[number]
                answer = {"job": number, "code": os.waitstatus_to_exitcode(status)}
                os.write(self.answers, json.dumps(answer).encode() + b"\n")

    def _stop(self) -> None:
        for process in self.running.values():
            os.kill(process, signal.SIGKILL)
        for process in self.running.values():
            os.waitpid(process, 0)


def _become(directory: Path, environment: Mapping[str, str]) -> NoReturn:
    """In a new process: be the job, as `python -m multitudes.study.worker` would be in this environment."""
    from multitudes.study import worker

    signal.set_wakeup_fd(-1)
    for number in (*HELD, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    output = os.open(directory / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    code = 1
    try:
        worker.main([str(directory)])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
