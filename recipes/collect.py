"""Copy the measurements of recipes to `results/`, without weights and predictions."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from multitudes.base.sealed_files import write_atomically
from multitudes.lab.study.run.store import Job, Run
from recipes.recipe import ROOT, rounded

RESULTS = ROOT / "results"


def collect(run: Path, results: Path = RESULTS) -> list[Path]:
    """Write the pieces of a run to `results/RECIPE/`; return the files."""
    if not run.is_dir():
        raise ValueError(f"run must be the directory of a run, got {str(run)!r}, which does not exist")
    pieces = list(_jobs(run) if (run / "study.toml").is_file() else _pieces(run))
    if not pieces:
        raise ValueError(f"run must have a finished piece, got {str(run)!r}")
    written = []
    for piece in pieces:
        if piece["scale"] != "full":
            raise ValueError(f"{str(run)!r} has scale {piece['scale']}: only full runs are collected")
        path = results / piece["recipe"] / f"{piece['piece']}.json"
        written.append(write_atomically(path, json.dumps(rounded(piece), indent=1, allow_nan=False) + "\n"))
    return written


def _pieces(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the pieces of a script."""
    for file in sorted(run.glob("*.json")):
        yield json.loads(file.read_text("utf-8"))


def _jobs(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the jobs of a study file in a script's format."""
    recipe, _, scale = run.name.partition("-")
    file = ROOT / "recipes" / f"{recipe}.toml"
    if not file.is_file():
        raise ValueError(
            f"run must be named after its recipe, got {str(run)!r}, but recipes/{recipe}.toml does not exist"
        )
    times = _times(Run(run))
    for job in Run(run).done:
        yield {
            "recipe": recipe,
            "piece": job.name,
            "scale": scale or "full",
            "command": f"multitudes compare recipes/{recipe}.toml",
            "data": {_source(file): (job.config or {})["data"]["fingerprint"]},
            **_measured(job, times.get(job.label, {})),
        }


def _source(file: Path) -> str:
    return tomllib.loads(file.read_text("utf-8"))["data"]["source"]


def _times(run: Run) -> dict[str, dict[str, float]]:
    """Return the times of each method, measured after all jobs were done."""
    found = run.times or {"batch": 0, "methods": {}}
    return {
        label: {
            "training_seconds_ratio": own["training"]["ratio"],
            "inference_per_second": found["batch"] / own["inference"]["seconds"],
            "inference_per_second_ratio": 1 / own["inference"]["ratio"],
        }
        for label, own in found["methods"].items()
    }


def _measured(job: Job, times: dict[str, float]) -> dict[str, Any]:
    metrics = dict(job.metrics)
    metrics["costs"] = {**metrics["costs"], **times}
    about = {"commit": metrics.pop("commit", None)}  # not recorded by earlier versions
    about |= {name: metrics.pop(name) for name in ("machine", "versions", "seconds")}
    history = metrics.pop("history")
    metrics["losses"] = [epoch["loss"] for epoch in history]
    metrics["scores"] = {name: score["value"] for name, score in metrics["scores"].items()}
    config = {name: value for name, value in (job.config or {}).items() if name not in ("data", "device", "version")}
    return {**about, "result": {"config": config, **metrics}}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.collect", description="Copy runs to results/.")
    parser.add_argument("runs", type=Path, nargs="+", help="directories of runs, named after their recipes")
    parser.add_argument("--again", action="store_true", help="second runs, to be compared with the first")
    given = parser.parse_args(arguments)
    for run in given.runs:
        try:
            print(f"{run}: {len(collect(run, RESULTS / 'again' if given.again else RESULTS))} pieces")
        except ValueError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
