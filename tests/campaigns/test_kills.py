"""Kill studies and their processes at random moments: nothing is lost, different, left over or hangs.

pytest tests/campaigns/test_kills.py -m campaign -s     # prints the counts
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from multitudes.lab.study.run.store import Run
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec
from tests.lab.study.study_cases import folders_left, nodes, write_table
from tests.lab.study.test_interruptions import processes, results

KILLS = {"local": 70, "ray": 30}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
RAY_NAMES = ("ray::work", "ray::IDLE", "ray::SharedStat")  # Linux cuts names to 15 characters
FAULTS = (
    "lost finished work", "jobs not done", "different results", "exit code 0 without all jobs", "tracebacks shown",
    "hangs", "orphans", "temporary folders left",
)  # fmt: skip
"""Counts that must be 0."""

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc"),
]

STUDY = """
data = {{ source = "{table}", target = "y" }}
seeds = [0, 1]
device = "cpu"
[methods.single]
[methods.mc_dropout]
[methods.swag]
[training]
epochs = 150
"""


class Campaign:
    """Disturb a study and start it again until it is done, in rounds, until there were enough kills."""

    def __init__(
        self, folder: Path, options: list[str], dice: random.Random, elsewhere: Callable[[], list[int]] = list
    ) -> None:
        self.folder, self.options, self.dice = folder, options, dice
        self.elsewhere = elsewhere
        """Lists the processes of a study that are not its descendants."""
        self.counts: Counter[str] = Counter(dict.fromkeys(("kills", *FAULTS), 0))
        self.spec, self.output = folder / "study.toml", folder / "output.txt"
        self.spec.write_text(STUDY.format(table=write_table(folder)))
        self.undisturbed = prepare(Spec.load(self.spec), folder / "undisturbed")
        assert self._start(self.undisturbed, []).wait(timeout=900) == 0 and not self.undisturbed.missing

    def run(self, kills: int) -> Counter[str]:
        rounds = 0
        while self.counts["kills"] < kills:
            rounds += 1
            run = Run(self.folder / f"round-{rounds}")
            last_tries = 0
            while not self._run_once(run, kills) and last_tries < 3:
                last_tries += self.counts["kills"] >= kills
            self._compare(run)
        return self.counts

    def _start(self, run: Run, options: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "multitudes", "compare", str(self.spec), "--out", str(run.directory), *options]
        with self.output.open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def _run_once(self, run: Run, kills: int) -> bool:
        """Start the study and disturb it at random until it ends; return whether its exit code is 0."""
        before = self._finished(run)
        study = self._start(run, self.options)
        seen: set[int] = set()
        deadline = time.monotonic() + 600
        while study.poll() is None and self.counts["kills"] < kills:
            moment = time.monotonic() + self.dice.uniform(0, 15)
            while study.poll() is None and time.monotonic() < moment:
                time.sleep(0.05)
            seen |= set(processes(study.pid))
            if study.poll() is None and self._kill(study, [*sorted(processes(study.pid)), *self.elsewhere()]):
                break
        try:
            study.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.counts["hangs"] += 1
            study.kill()
            study.wait()
        self._count_orphans(seen)
        after = self._finished(run)
        self.counts["lost finished work"] += sum(after.get(name) != content for name, content in before.items())
        self.counts["exit code 0 without all jobs"] += study.returncode == 0 and bool(run.missing)
        return study.returncode == 0

    def _kill(self, study: subprocess.Popen[bytes], others: list[int]) -> bool:
        """Send a signal to the study or to one of its other processes; return whether it was the study."""
        itself = not others or self.dice.random() < 0.25
        victim = study.pid if itself else self.dice.choice(others)
        try:
            os.kill(victim, self.dice.choice(SIGNALS))
        except ProcessLookupError:
            return False
        self.counts["kills"] += 1
        return itself

    def _finished(self, run: Run) -> dict[str, bytes]:
        return {path.parent.name: path.read_bytes() for path in run.directory.glob("jobs/*/metrics.json")}

    def _count_orphans(self, seen: set[int]) -> None:
        deadline = time.monotonic() + 30
        while (left := {pid for pid in seen if _is_ours(pid)}) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.counts["orphans"] += len(left)

    def _compare(self, run: Run) -> None:
        for job, expected in zip(run.jobs, self.undisturbed.jobs, strict=True):
            self.counts["jobs not done"] += not job.done
            self.counts["different results"] += job.done and results(job) != results(expected)
        self.counts["tracebacks shown"] += self.output.read_text().count("Traceback")
        self.output.write_text("")


def _is_ours(pid: int) -> bool:
    """Return whether a process still runs; a zombie has no command line."""
    try:
        return "multitudes" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def _workers() -> list[int]:
    """List Ray's workers on this machine and their jobs."""
    tasks = [pid for pid, name in processes(os.getpid()).items() if name in RAY_NAMES]
    return sorted({*tasks, *(job for task in tasks for job in processes(task))})


@pytest.mark.parametrize("place", KILLS)
def test_kills_at_random_moments_cost_nothing_but_time(place, tmp_path):
    dice = random.Random(0)
    if place == "local":
        counts = Campaign(tmp_path, ["--workers", "2"], dice).run(KILLS[place])
    else:
        pytest.importorskip("ray")
        with nodes(2) as cluster:
            counts = Campaign(tmp_path, ["--ray", cluster.address], dice, _workers).run(KILLS[place])
            deadline = time.monotonic() + 60
            while folders_left() and time.monotonic() < deadline:
                time.sleep(0.5)
            counts["temporary folders left"] = len(folders_left())
    print(f"\n{place}: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    assert counts["kills"] >= KILLS[place] and not any(counts[name] for name in FAULTS), counts
