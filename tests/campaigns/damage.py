"""A campaign of damage: files of a finished study are spoilt, one at a time, and the study is read and run again.

    python -m tests.campaigns.damage 500 0

Counts what must never happen: finished work that is lost, wrong results that are used, tracebacks, hangs.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import traceback
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import multitudes as mt
from multitudes.lab import report
from multitudes.lab.study.results.leaderboard import leaderboard
from multitudes.lab.study.run import conclusion
from multitudes.lab.study.run.store import Job, Run
from multitudes.lab.study.run.trained_network import Trained
from multitudes.lab.study.run.worker import run as run_job
from multitudes.lab.study.spec import planning
from multitudes.lab.study.spec.specification import Spec
from multitudes.training.fit import Trainer
from tests.campaigns.fuzz import Hangs, limited

METHODS = {"single": {}, "deep": {"members": 3}, "snapshots": {"members": 2}}
SECONDS = 120
"""After which one case counts as hanging."""


def specification(folder: Path) -> Spec:
    """A study of classes in a small table."""
    table = folder / "rows.csv"
    if not table.exists():
        dice = random.Random(0)
        rows = ((dice.gauss(0, 1), dice.gauss(0, 1)) for _ in range(90))
        table.write_text("a,b,y\n" + "".join(f"{a:.4f},{b:.4f},{'no' if a + b > 0 else 'yes'}\n" for a, b in rows))
    return Spec.of(
        data=table, target="y", model="mlp", methods=METHODS, seeds=2, epochs=4, device="cpu", sizes=[1], draws=2
    )


CONCLUSIONS: dict[str, Callable[[Run], Any]] = {
    "costs.json": lambda run: run.times,
    "baselines.json": lambda run: run.baselines,
    "landscape.json": lambda run: run.read_table("landscape.json"),
}
"""Readers of the files that are made from all jobs."""


class Stopped(Exception):
    """A process that was killed."""


@contextmanager
def stopping(steps: int) -> Iterator[None]:
    """Stop a training after some steps, with a checkpoint of the last one, inside the context."""
    step = Trainer._step

    def stop(self: Any, *given: Any) -> Any:
        if self.state.step == steps:
            self._read_losses(all_of_them=True)
            self._save()
            raise Stopped
        return step(self, *given)

    Trainer._step = stop  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer._step = step  # type: ignore[method-assign]


class Campaign:
    """A study with all jobs done but one, which was interrupted; copies of it are damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole = folder / "whole"
        run = self._prepared(self.whole)
        for job in run.jobs:
            run_job(job.directory)
        self._conclude(run)
        self.x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
        self.scores = {job.name: job.metrics["scores"] for job in run.jobs}
        self.answers = {job.name: self._answer(job) for job in run.jobs}
        self.interrupted = ("snapshots-0", "snapshots-1")
        for name in self.interrupted:
            (run.named(name).directory / "metrics.json").unlink()
            with stopping(6):
                try:
                    run_job(run.named(name).directory)
                except Stopped:
                    continue
                raise AssertionError("the training was not interrupted")
        self.net = mt.deep_ensemble(torch.nn.Linear(2, 2), 2)
        mt.save(self.net, self.whole / "saved.safetensors")
        self.files = [path.relative_to(self.whole) for path in sorted(self.whole.rglob("*")) if self._counts(path)]

    def _counts(self, path: Path) -> bool:
        return path.is_file() and path.name not in (".lock", "output.txt", "report.html")

    def _prepared(self, directory: Path) -> Run:
        return planning.prepare(specification(self.folder), directory)

    def _conclude(self, run: Run) -> None:
        time = {"ratio": 2.0, "low": 1.0, "high": 3.0, "seconds": 1.0}
        own = {"inference": time, "training": time}
        times = {"tiny": False, "batch": 4, "machine": {}, "methods": dict.fromkeys(run.timed, own)}
        with unittest.mock.patch.object(conclusion, "measure_times", lambda *given: times):  # which takes long
            conclusion.measure_all(run, lambda message: None)

    def _answer(self, job: Job) -> torch.Tensor:
        return Trained.read(job.directory, "cpu").net.predict(self.x, seed=0).probs

    # -- one case --------------------------------------------------------------------------------------------

    def case(self, dice: random.Random) -> tuple[str, list[str]]:
        """Damage one file of a copy; gives which and how, and what went wrong."""
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.whole, copy)
        kinds: dict[str, list[Path]] = {}
        for file in self.files:
            kinds.setdefault(file.name, []).append(file)
        file = dice.choice(kinds[dice.choice(list(kinds))])
        alone = file.name == "saved.safetensors"  # nothing tells which network a user's file is of
        how = dice.choice([how for how in DAMAGE if not (alone and how == "swapped")])
        DAMAGE[how](copy / file, self.whole, dice)
        wrong: list[str] = []
        try:
            with limited(SECONDS):
                self._read(Run(copy), file, wrong)
                self._run_again(copy, file, wrong)
        except Hangs:
            wrong.append("hang")
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"traceback: {type(error).__name__}: {error} at {where.filename}:{where.lineno}")
        return f"{file} {how}", wrong

    def _read(self, run: Run, file: Path, wrong: list[str]) -> None:
        """Read the copy: numbers must be right, or the error one sentence."""

        def attempt(read: Callable[[], object]) -> None:
            try:
                read()
            except ValueError as error:
                if not str(error) or "\n" in str(error):
                    wrong.append(f"no sentence: {error!r}")

        def scores() -> None:
            for job in run.done:
                if job.metrics["scores"] != self.scores[job.name]:
                    wrong.append(f"wrong result: the scores of {job.name}")

        def saved() -> None:
            if not torch.equal(mt.load(run.directory / "saved.safetensors")(self.x), self.net(self.x)):
                wrong.append("wrong result: a saved network")

        def answers(job: Job) -> None:
            if not torch.equal(self._answer(job), self.answers[job.name]):
                wrong.append(f"wrong result: the predictions of {job.name}")

        attempt(scores)
        attempt(saved)
        attempt(lambda: leaderboard(run))
        if file.suffix != ".safetensors":  # which a page is not made from
            attempt(lambda: report.write(run.directory))
        for name in [name for name in self.scores if name in file.parts or len(file.parts) == 1]:
            attempt(lambda name=name: answers(run.named(name)))

    def _run_again(self, copy: Path, file: Path, wrong: list[str]) -> None:
        """Run the study again: results must be the same, and no intact job may be repeated."""
        others = {name for name in self.scores if name not in file.parts}
        before = {name: self._time(copy, name) for name in others}
        run = self._prepared(copy)
        waiting = others & set(self.interrupted)  # they would end as ever
        for job in run.missing:
            if job.name not in waiting:
                run_job(job.directory)
        if file.name in CONCLUSIONS:
            self._conclude(run)
            if any(read(run) is None for read in CONCLUSIONS.values()):
                wrong.append("wrong result: what concerns all jobs was not measured again")
        for name in sorted(others - waiting):
            if self._time(copy, name) != before[name]:
                wrong.append(f"lost work: {name} was done again")
        for job in [job for job in run.jobs if job.name not in waiting]:
            if not job.done or job.metrics["scores"] != self.scores[job.name]:
                wrong.append(f"wrong result: {job.name} at the end")
            elif not torch.equal(self._answer(job), self.answers[job.name]):
                wrong.append(f"wrong result: the predictions of {job.name} at the end")

    def _time(self, copy: Path, name: str) -> int | None:
        path = copy / "jobs" / name / "metrics.json"
        return path.stat().st_mtime_ns if path.is_file() else None


def _truncate(path: Path, whole: Path, dice: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: dice.randrange(len(content))] if content else b"")


def _flip(path: Path, whole: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(min(len(content), dice.choice((1, 1, 16, 4000)))):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def _swap(path: Path, whole: Path, dice: random.Random) -> None:
    """Replace a file by another intact one, of the same name or else of the same type."""
    content = path.read_bytes()
    others = [each for each in whole.rglob(f"*{path.suffix}") if each.is_file() and each.read_bytes() != content]
    same = [each for each in others if each.name == path.name]
    if same or others:
        shutil.copyfile(dice.choice(same or others), path)


DAMAGE: dict[str, Callable[[Path, Path, random.Random], object]] = {
    "truncated": _truncate,
    "flipped": _flip,
    "swapped": _swap,
    "emptied": lambda path, whole, dice: path.write_bytes(b""),
    "deleted": lambda path, whole, dice: path.unlink(),
}


def campaign(count: int, seed: int, folder: Path, show: Callable[[str], object] = print) -> Counter[str]:
    """Run damage cases and count them by kind of damage and of fault."""
    damaged, found = Campaign(folder), Counter[str]()
    for number in range(count):
        what, wrong = damaged.case(random.Random(f"{seed} {number}"))
        found["cases"] += 1
        found[what.rpartition(" ")[2]] += 1
        for each in wrong:
            found[each.partition(":")[0]] += 1
            show(f"case {number}, {what}: {each}")
    return found


FAULTS = ("lost work", "wrong result", "traceback", "hang", "no sentence")


def main() -> None:
    """Print the counts."""
    count, seed = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 2 else (500, 0)
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(count, seed, Path(folder))
    print(", ".join(f"{found[name]} {name}" for name in ("cases", *DAMAGE)))
    print(", ".join(f"{name} {found[name]}" for name in FAULTS))


if __name__ == "__main__":
    main()
