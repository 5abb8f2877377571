"""Write a run directory without training: random logits, with scores computed by `evaluate`. `Tags` parses a page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import multitudes.lab.data
from multitudes import Predictive, evaluate
from multitudes.base.archives import write_arrays
from multitudes.base.sealed_files import write_json
from multitudes.lab.data import Data, Part
from multitudes.lab.report import Results
from multitudes.lab.report.chart import Series, View
from multitudes.lab.study.run.baselines import measure_baselines
from multitudes.lab.study.run.store import Job, Run
from multitudes.lab.study.spec.toml import to_toml
from multitudes.metrics import interval_coverage, interval_width
from multitudes.metrics.regression_inputs import read_forecasts
from multitudes.tasks.gaussian import join_gaussian


@dataclass(frozen=True)
class Fake:
    """A method: number, diversity and error of its members, and its costs."""

    members: int
    apart: float
    wrong: float
    slower: float
    parameters: float


COLUMNS = [
    {"name": "id", "read_as": "id", "values": 270, "missing": 0, "dropped": "every row has another value", "note": ""},
    {"name": "day <b>", "read_as": "date", "values": 31, "missing": 4, "dropped": "", "note": "parts of a date"},
]
"""Columns with remarks."""

METHODS = {
    "single": Fake(1, 0.0, 1.0, 1.0, 1.0),
    "deep": Fake(4, 1.0, 0.95, 4.1, 4.0),
    "packed": Fake(4, 0.95, 1.0, 1.2, 0.95),
    "masksembles": Fake(4, 0.6, 1.05, 3.8, 1.0),
    "mimo": Fake(3, 0.7, 1.15, 1.02, 1.1),
    "mc_dropout": Fake(16, 0.4, 1.0, 14.0, 1.0),
    "variance": Fake(16, 0.8, 1.2, 18.0, 1.01),
    "smooth": Fake(1, 0.0, 0.98, 1.1, 1.0),
    "swag": Fake(16, 0.35, 0.97, 19.0, 12.0),
}
FEW = ("single", "deep", "packed", "mc_dropout")
OVERCONFIDENT = 1.6
"""Factor of logits, and divisor of standard deviations, before calibration."""
CORRUPTIONS, SEVERITIES = ("gaussian_noise", "fog"), (1, 3, 5)


def write_run(
    directory: Path,
    methods: Mapping[str, Fake] | Sequence[str] = FEW,
    seeds: Sequence[int] = (0, 1, 2),
    *,
    data: Data | None = None,
    missing: Sequence[str] = (),
    failed: Mapping[str, str] | None = None,
    landscape: bool = True,
) -> Path:
    """Write a run on the digits or on `data`, without the jobs `missing` and `failed`."""
    chosen = dict(methods) if isinstance(methods, Mapping) else {name: METHODS[name] for name in methods}
    run = Run(directory)
    directory.mkdir(parents=True, exist_ok=True)
    used = multitudes.lab.data.load("digits") if data is None else data
    place: dict[str, Any] = {"source": "digits"}
    if data is not None:
        multitudes.lab.data.save(data, run.data_path)
        place = {"file": "../../data.mtdata", "fingerprint": data.fingerprint}
    tables = {name: {"method": "packed", "members": fake.members} for name, fake in chosen.items()}
    spec = {"seeds": list(seeds), "device": "cpu", "methods": tables, "data": {"source": used.name}}
    spec |= {"model": {"name": "small_cnn"}, "training": {"epochs": 30, "batch_size": 64, "lr": 0.05}}
    run.write_spec(to_toml(spec))
    about = {name: getattr(used, name) for name in ("name", "task", "fingerprint")}
    if data is not None and data.columns:
        about["columns"] = [{"name": name, "read_as": "number", "values": 90, "missing": 0} for name in data.columns]
        about["columns"] += COLUMNS
    about |= {"parts": {name: len(part) for name, part in used.parts.items()}, "dropped": dict(used.dropped)}
    write_json(run.about_path, about)
    for number, (name, fake) in enumerate(chosen.items()):
        for seed in seeds:
            job = run.job(name, seed)
            job.directory.mkdir(parents=True)
            config = {"version": 1, "method": name, "settings": {}, "seed": seed, "data": place, "device": "cpu"}
            write_json(job.directory / "config.json", config)
            if failed and job.name in failed:
                line = {"time": 1.7e9, "event": "failed", "message": failed[job.name]}
                (job.directory / "log.jsonl").write_text(json.dumps(line) + "\n")
            if job.name in missing or (failed and job.name in failed):
                continue
            make = _classification if used.task == "classification" else _regression
            arrays, scores, sizes = make(fake, used, np.random.default_rng([number, seed]))
            write_arrays(job.directory / "predictions.safetensors", arrays)
            job.write_metrics({"scores": scores, "by_size": sizes, "costs": _costs(fake), **PROVENANCE})
    run.write_table("costs.json", _times(chosen), run.timed)
    run.write_table("baselines.json", measure_baselines(used), used.fingerprint)
    if landscape and used.task == "classification":
        run.write_table("landscape.json", {"plane": _plane()})
    return directory


class Identity(nn.Module):
    """Network that returns its inputs as predictions, `[B, S, ...]`."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self.task = task

    def predict(self, x: Tensor, **options: Any) -> Predictive:
        return Predictive(x.movedim(1, 0), task=self.task)


def _scores(members: Tensor, target: Tensor, task: str = "classification", **options: Any) -> dict[str, Any]:
    """Compute all scores of members `[S, N, ...]`, in the format of a study."""
    found = evaluate(Identity(task), (members.movedim(0, 1), target), progress=False, **options)
    values = {name: None if math.isnan(value) else float(value) for name, value in found.items()}
    return {name: {"value": value, "count": found.counts[name]} for name, value in values.items()}


def _by_size(members: Tensor, target: Tensor, names: Sequence[str], **options: Any) -> dict[str, Any]:
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= len(members)]
    found = [_scores(members[:size], target, tasks="scores", **options) for size in sizes]
    return {"sizes": sizes} | {name: [scores[name]["value"] for scores in found] for name in names}


def _classification(fake: Fake, data: Any, generator: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    target = data.test.y
    shared = np.random.default_rng(0)
    margin = shared.gamma(3.0, 4.5, len(target))
    common = shared.normal(0, 1.6, (len(target), data.outputs))

    def members(level: float) -> Tensor:
        truth = np.eye(data.outputs)[target.numpy()] * (margin * (1 - level))[:, None]
        run = fake.wrong * generator.normal(0, 1.2, common.shape)
        own = generator.normal(0, 1.2, (fake.members, *common.shape))
        logits = truth + common * (1 + level) + run * math.sqrt(1 - fake.apart**2) + own * fake.apart * fake.wrong
        return torch.tensor(logits).float()

    def ood(rows: int) -> Tensor:
        noise = generator.normal(0, 1.6 + fake.apart, (fake.members, rows, data.outputs))
        return torch.tensor(noise + shared.normal(0, 1.3, (rows, data.outputs))).float()

    logits = members(0.0)
    shifted = {severity: (members(0.12 * severity).movedim(0, 1), target) for severity in SEVERITIES}
    shift = {f"{name}/{severity}": each for severity, each in shifted.items() for name in (*CORRUPTIONS, "mean")}
    outside = {name: ood(len(x)) for name, x in data.ood.items()}
    scores = _scores(
        logits, target, shift=shift | {"mean": shifted[SEVERITIES[1]]},
        ood={name: each.movedim(0, 1) for name, each in outside.items()},
    )  # fmt: skip
    raw = OVERCONFIDENT * logits
    scores |= _raw(_scores(raw, target, tasks=("scores", "calibration")))
    clean = Predictive(logits)
    arrays = {"probs": clean.probs.numpy(), "members": clean.member_probs.half().numpy(), "target": target.numpy()}
    arrays |= {"raw/probs": Predictive(raw).probs.numpy()}
    for prefix, predicted in (("", clean), ("raw/", Predictive(raw))):
        arrays |= {f"{prefix}rows/{name}": each.numpy() for name, each in _rows_of_classes(predicted, target).items()}
    arrays |= {f"ood/{name}/members": each.softmax(2).half().numpy() for name, each in outside.items()}
    return arrays, scores, _by_size(logits, target, ("nll", "accuracy"))


def _regression(fake: Fake, data: Any, generator: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    target = data.test.y.numpy()
    common = np.random.default_rng(0).normal(0, 0.3, len(target))
    own = generator.normal(0, 0.3, (fake.members, len(target)))
    members = target + data.target_std * (common + fake.wrong * fake.apart * own)
    means = torch.tensor(members)[..., None]
    variance = torch.full_like(means, (0.25 * data.target_std) ** 2)
    given, raw = (join_gaussian(means, each, dim=2) for each in (variance, variance / OVERCONFIDENT**2))
    predicted, before, y = *(Predictive(each, task="gaussian") for each in (given, raw)), data.test.y[:, None]
    arrays = {"mean": predicted.mean[:, 0], "std": predicted.std[:, 0], "members": members, "target": target}
    arrays |= {"raw/mean": before.mean[:, 0], "raw/std": before.std[:, 0]}
    for prefix, each in (("", predicted), ("raw/", before)):
        rows = read_forecasts(each, y)
        squares = (rows.mean - rows.target).square()
        arrays |= {f"{prefix}rows/log_density": rows.log_density, f"{prefix}rows/crps": rows.crps}
        arrays |= {f"{prefix}rows/rmse": squares}
        low, high = rows.interval(0.9)
        arrays |= {f"{prefix}low": low, f"{prefix}high": high, f"{prefix}cdf": rows.cdf}
    scores = _scores(given, y, "gaussian") | _intervals(predicted, y)
    scores |= _raw(_scores(raw, y, "gaussian") | _intervals(before, y))
    return arrays, scores, _by_size(given, y, ("rmse",), task="gaussian")


def _intervals(predicted: Predictive, y: Tensor) -> dict[str, Any]:
    """Return coverage and width of 90 % intervals."""
    values = {"coverage_90": interval_coverage(predicted, y, 0.9), "width_90": interval_width(predicted, y, 0.9)}
    return {name: {"value": float(value), "count": len(y)} for name, value in values.items()}


def _rows_of_classes(predicted: Predictive, target: Tensor) -> dict[str, Tensor]:
    """Return the contribution of each row to the scores."""
    hit = nn.functional.one_hot(target, predicted.probs.shape[1])
    nll = -predicted.log_probs.gather(1, target[:, None])[:, 0]
    right = (predicted.label == target).float()
    return {"nll": nll, "accuracy": right, "brier": (predicted.probs - hit).square().sum(1)}


def _raw(scores: dict[str, Any]) -> dict[str, Any]:
    """Rename scores to those before calibration."""
    return {f"raw/{name}": score for name, score in scores.items()}


# -- the rest ----------------------------------------------------------------------------------------------


def _costs(fake: Fake) -> dict[str, float]:
    ratios = {"parameters": fake.parameters, "multiply_adds": fake.slower, "peak_memory_bytes": fake.parameters + 0.5}
    return {f"{name}_ratio": ratio for name, ratio in ratios.items()} | {name: 1e4 * ratios[name] for name in ratios}


def _times(methods: Mapping[str, Fake]) -> dict[str, Any]:
    """Return times with a range, in the format of `costs.json`."""

    def time(ratio: float) -> dict[str, float]:
        wide = 1.25 if ratio != 1 else 1.0
        return {"ratio": ratio, "low": ratio / wide, "high": ratio * wide, "seconds": 0.01 * ratio}

    both = {
        name: {"inference": time(fake.slower), "training": time(fake.slower**0.8)} for name, fake in methods.items()
    }
    return {"tiny": False, "batch": 256, "methods": both}


PROVENANCE = {
    "history": [{"epoch": 1, "loss": 2.0, "lr": 0.05, "seconds": 0.2}],
    "machine": {"cpu": "A processor", "cores": 2, "device": "cpu"},
    "versions": {"multitudes": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    "seconds": 7.5,
}


def _plane() -> dict[str, Any]:
    x, y = np.linspace(-1, 2, 25), np.linspace(-1, 2, 21)
    loss = 0.1 + 2 * np.minimum(x**2 + y[:, None] ** 2, (x - 1) ** 2 + (y[:, None] - 0.8) ** 2)
    points = [{"name": f"member {at + 1}", "x": 1.0 * at, "y": 0.8 * at, "loss": 0.1} for at in range(2)]
    return {"x": x.tolist(), "y": y.tolist(), "loss": loss.tolist(), "points": points}


def table_data() -> Data:
    """Return a regression data set."""
    x = torch.randn(3, 90, 3, generator=torch.Generator().manual_seed(0))
    parts = [Part(each, 10 + 3 * each.sum(1) + each[:, 0].cos()) for each in x]
    return Data("a table", *parts, columns=("a", "b", "c"))


MARKUP = "</script><img src=x onerror=alert(1)>"


def evil_run(directory: Path, methods: Mapping[str, Fake]) -> Path:
    """Write a run on colour images in which all names are markup."""
    x = torch.randint(0, 256, (4, 60, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    parts = [Part(each, torch.arange(60) % 3) for each in x[:3]]
    data = Data("images", *parts, classes=(MARKUP, "b", "c"), ood={f"a/{MARKUP}": x[3]})
    run = Run(write_run(directory, {"<script>alert(1)": METHODS["deep"], **methods}, [0, 1], data=data))
    plane, about, baselines = _plane(), run.about or {}, run.baselines or {}
    for point in plane["points"]:
        point["name"] = f"{MARKUP} {point['name']}"
    column = {"name": MARKUP, "read_as": MARKUP, "values": MARKUP, "missing": MARKUP, "dropped": MARKUP, "note": MARKUP}
    baselines["baselines"] = {f"{MARKUP}_{name}": own for name, own in baselines["baselines"].items()}
    run.write_table("landscape.json", {"plane": plane})
    write_json(run.about_path, {**about, "columns": [column], "dropped": {MARKUP: 1}})
    run.write_table("baselines.json", baselines, data.fingerprint)
    return directory


# -- reading a page ---------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Collect the tags of a page with their attributes, and unclosed tags."""

    VOID = ("meta", "img", "link", "br", "hr", "input", "wbr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def series(views: list[View], results: Results, view: int = 0) -> dict[str, Series]:
    """Return the lines of a figure by method."""
    return {results.methods[each.method]: each for each in views[view].series if each.method is not None}


def read_file(run: Path, method: str, seed: int, name: str = "metrics.json") -> Any:
    path = run / "jobs" / f"{method}-{seed}" / name
    return json.loads(path.read_text()) if name.endswith("json") else Job(path.parent).predictions
