"""A hundred kills at random moments, of studies and of their processes: nothing is lost, wrong, left over or hangs.

pytest tests/campaigns/test_kills.py -m slow -s     # prints the counts
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
from tests.lab.study.ray_nodes import folders_left, nodes
from tests.lab.study.study_cases import write_table
from tests.lab.study.test_faults import processes, results

KILLS = {"local": 70, "ray": 30}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
BAD = ("lost finished work", "wrong results", "tracebacks shown", "hangs", "orphans", "temporary folders left")
"""What is counted, and must be 0."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the processes are looked up in /proc"),
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
    """A study that is disturbed and started again until it is done, in rounds until there were enough kills."""

    def __init__(
        self, folder: Path, options: list[str], dice: random.Random, elsewhere: Callable[[], list[int]] = list
    ) -> None:
        self.folder, self.options, self.dice = folder, options, dice
        self.elsewhere = elsewhere
        """The processes of a study that are not below its own."""
        self.counts: Counter[str] = Counter(dict.fromkeys(("kills", *BAD), 0))
        self.spec = folder / "study.toml"
        self.spec.write_text(STUDY.format(table=write_table(folder)))
        self.whole = prepare(Spec.load(self.spec), folder / "whole")
        self._study(self.whole.directory, []).wait(timeout=900)
        assert not self.whole.missing, "the study that nobody disturbs"

    def run(self, kills: int) -> Counter[str]:
        """Until so many were killed, and the last round is done."""
        rounds = 0
        while self.counts["kills"] < kills:
            rounds += 1
            run = Run(self.folder / f"round-{rounds}")
            undisturbed = 0
            while not self._once(run, kills) and undisturbed < 3:
                undisturbed += self.counts["kills"] >= kills
            self._compare(run)
        return self.counts

    def _study(self, out: Path, options: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "multitudes", "compare", str(self.spec), "--out", str(out), *options]
        with (self.folder / "said.txt").open("ab") as said:
            return subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)

    def _once(self, run: Run, kills: int) -> bool:
        """Start the study and disturb it at random until it ends; whether it has ended by itself, and well."""
        before = self._done(run)
        study = self._study(run.directory, self.options)
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
        self._look_for_orphans(seen)
        self.counts["lost finished work"] += sum(self._done(run).get(name) != what for name, what in before.items())
        return study.returncode == 0

    def _kill(self, study: subprocess.Popen[bytes], below: list[int]) -> bool:
        """Send a signal to the study, or to one of the processes below it; whether it was the study."""
        whole = not below or self.dice.random() < 0.25
        victim = study.pid if whole else self.dice.choice(below)
        try:
            os.kill(victim, self.dice.choice(SIGNALS))
        except ProcessLookupError:
            return False
        self.counts["kills"] += 1
        return whole

    def _done(self, run: Run) -> dict[str, bytes]:
        """The results that are there, by job."""
        return {path.parent.name: path.read_bytes() for path in run.directory.glob("jobs/*/metrics.json")}

    def _look_for_orphans(self, seen: set[int]) -> None:
        deadline = time.monotonic() + 30
        while (left := {pid for pid in seen if _is_ours(pid)}) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.counts["orphans"] += len(left)

    def _compare(self, run: Run) -> None:
        for one, other in zip(run.jobs, self.whole.jobs, strict=True):
            self.counts["wrong results"] += not one.done or results(one) != results(other)
        self.counts["tracebacks shown"] += (self.folder / "said.txt").read_text().count("Traceback")
        (self.folder / "said.txt").write_text("")


def _is_ours(pid: int) -> bool:
    """Whether it still runs; one that nobody has waited for has no command line."""
    try:
        return "multitudes" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def _workers() -> list[int]:
    """The workers of Ray on this machine, and the jobs below them."""
    below = processes(os.getpid())
    tasks = [pid for pid, name in below.items() if name in ("ray::work", "ray::IDLE", "ray::Board")]
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
    assert counts["kills"] >= KILLS[place] and not any(counts[name] for name in BAD), counts
