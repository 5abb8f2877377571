"""A run directory that looks like a study's, written in a second and trained by nobody.

Networks are logits from a fixed random generator: what all networks get wrong alike, what each run gets wrong and what
each member does. From them everything else is computed as a study would: scores, sizes, costs. `Tags` reads a page.
"""

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

import multitudes.data
from multitudes import Predictive
from multitudes.metrics import calibration_error as calibration
from multitudes.metrics import divergences, diversity, ood, regression, scoring, selective
from multitudes.study.store import Run
from multitudes.study.toml import to_toml


@dataclass(frozen=True)
class Fake:
    """A method: how many members it has, how far they are apart and how wrong they are, and what they cost."""

    members: int
    apart: float
    wrong: float
    slower: float
    parameters: float


METHODS = {
    "single": Fake(1, 0.0, 1.0, 1.0, 1.0),
    "deep": Fake(4, 1.0, 0.95, 4.1, 4.0),
    "packed": Fake(4, 0.95, 1.0, 1.2, 0.95),
    "batch_ensemble": Fake(4, 0.35, 1.0, 3.9, 1.04),
    "masksembles": Fake(4, 0.6, 1.05, 3.8, 1.0),
    "mimo": Fake(3, 0.7, 1.15, 1.02, 1.1),
    "mc_dropout": Fake(16, 0.4, 1.0, 14.0, 1.0),
    "drop_connect": Fake(16, 0.3, 1.02, 17.0, 1.0),
    "patched": Fake(16, 0.25, 1.0, 15.0, 1.2),
    "cross_patched": Fake(16, 0.3, 1.0, 15.5, 1.2),
    "variance": Fake(16, 0.8, 1.2, 18.0, 1.01),
    "smooth": Fake(1, 0.0, 0.98, 1.1, 1.0),
    "smooth_dropout": Fake(16, 0.4, 0.97, 15.0, 1.0),
    "swag": Fake(16, 0.35, 0.97, 19.0, 12.0),
    "subspace": Fake(16, 0.3, 0.99, 18.0, 6.0),
    "snapshots": Fake(4, 0.6, 1.02, 4.0, 4.0),
}
SHIFTED = (scoring.accuracy, scoring.nll, calibration.ece)
FEW = ("single", "deep", "packed", "mc_dropout")
CORRUPTIONS, SEVERITIES = ("gaussian_noise", "fog"), (1, 3, 5)


def write_run(
    directory: Path,
    methods: Mapping[str, Fake] | Sequence[str] = FEW,
    seeds: Sequence[int] = (0, 1, 2),
    *,
    task: str = "classification",
    data: multitudes.data.Data | None = None,
    missing: Sequence[str] = (),
    failed: Mapping[str, str] | None = None,
    landscape: bool = True,
) -> Path:
    """Write a run: on the digits, or on `data`; without the jobs that are `missing` or `failed`."""
    chosen = dict(methods) if isinstance(methods, Mapping) else {name: METHODS[name] for name in methods}
    run = Run(directory)
    directory.mkdir(parents=True, exist_ok=True)
    used = multitudes.data.load("digits") if data is None else data
    place: dict[str, Any] = {"source": "digits"}
    if data is not None:
        multitudes.data.save(data, run.data_path)
        place = {"file": "../../data.mtdata", "fingerprint": data.fingerprint}
    tables = {
        name: {"method": name if name in METHODS else "packed", "members": fake.members}
        for name, fake in chosen.items()
    }
    spec = {"seeds": list(seeds), "device": "cpu", "methods": tables, "data": {"source": used.name}}
    spec |= {"model": {"name": "small_cnn"}, "training": {"epochs": 30, "batch_size": 64, "lr": 0.05}}
    run.spec_path.write_text(to_toml(spec), encoding="utf-8")
    about = {name: getattr(used, name) for name in ("name", "task", "shape", "outputs", "fingerprint")}
    about["kind"] = used.kind.name
    about |= {"parts": {name: len(part) for name, part in used.parts.items()}, "dropped": dict(used.dropped)}
    run.about_path.write_text(json.dumps(about))
    for number, (name, fake) in enumerate(chosen.items()):
        for seed in seeds:
            job = run.job(name, seed)
            job.directory.mkdir(parents=True)
            config = {"version": 1, "method": name, "settings": {}, "seed": seed, "data": place, "device": "cpu"}
            (job.directory / "config.json").write_text(json.dumps(config))
            if job.name in missing or job.name in (failed or {}):
                _log_failure(job.directory, (failed or {}).get(job.name))
                continue
            make = _classification if task == "classification" else _regression
            arrays, scores, sizes = make(fake, used, np.random.default_rng([number, seed]))
            np.savez_compressed(job.directory / "predictions.npz", **arrays)
            metrics = {"scores": scores, "by_size": sizes, "costs": _costs(fake, seed), **_made()}
            (job.directory / "metrics.json").write_text(json.dumps(metrics))
    if landscape and task == "classification":
        (directory / "landscape.json").write_text(json.dumps({"plane": _plane()}))
    return directory


def _log_failure(directory: Path, message: str | None) -> None:
    if message is not None:
        line = {"time": 1.7e9, "event": "failed", "message": message}
        (directory / "log.jsonl").write_text(json.dumps(line) + "\n")


# -- classification ----------------------------------------------------------------------------------------


def _classification(fake: Fake, data: Any, generator: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    target = data.test.y
    shared = np.random.default_rng(0)
    margin = shared.gamma(3.0, 4.5, len(target))
    common = shared.normal(0, 1.6, (len(target), data.outputs))

    def members(level: float) -> torch.Tensor:
        truth = np.eye(data.outputs)[target.numpy()] * (margin * (1 - level))[:, None]
        run = fake.wrong * generator.normal(0, 1.2, common.shape)
        own = generator.normal(0, 1.2, (fake.members, *common.shape))
        logits = truth + common * (1 + level) + run * math.sqrt(1 - fake.apart**2) + own * fake.apart * fake.wrong
        return torch.tensor(logits).float()

    clean = Predictive(members(0.0))
    arrays = {"probs": clean.probs.numpy(), "members": clean.member_probs.half().numpy(), "target": target.numpy()}
    scores = _class_scores(clean, target)
    for measure in SHIFTED:
        for severity in SEVERITIES:
            shifted = Predictive(members(0.12 * severity))
            for corruption in (*CORRUPTIONS, "mean"):
                place = f"shift/{corruption}/{severity}/{measure.__name__}"
                scores[place] = _score(measure(shifted, target), len(target))
        scores[f"shift/mean/{measure.__name__}"] = scores[f"shift/mean/{SEVERITIES[1]}/{measure.__name__}"]
    for name, x in data.ood.items():
        noise = generator.normal(0, 1.6 + fake.apart, (fake.members, len(x), data.outputs))
        foreign = Predictive(torch.tensor(noise + shared.normal(0, 1.3, (len(x), data.outputs))).float())
        arrays[f"ood/{name}/members"] = foreign.member_probs.half().numpy()
        outside = torch.arange(len(target) + len(x)) >= len(target)
        for criterion, of in ood.CRITERIA.items():
            values = torch.cat([of(clean), of(foreign)])
            scores[f"ood/{name}/{criterion}/auroc"] = _score(ood.auroc(values, outside), len(values))
            scores[f"ood/{name}/{criterion}/aupr"] = _score(ood.aupr(values, outside), len(values))
            scores[f"ood/{name}/{criterion}/fpr95"] = _score(ood.fpr_at_recall(values, outside), len(values))
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= fake.members]
    parts = [Predictive(clean.predictions[:size]) for size in sizes]
    by_size = {"sizes": sizes, "nll": [float(scoring.nll(part, target)) for part in parts]}
    return arrays, scores, by_size | {"accuracy": [float(scoring.accuracy(part, target)) for part in parts]}


def _class_scores(predicted: Predictive, target: torch.Tensor) -> dict[str, Any]:
    measures = (scoring.accuracy, scoring.nll, scoring.brier, calibration.ece, selective.aurc, scoring.member_error)
    measures += (diversity.disagreement, divergences.ensemble_js)
    return {measure.__name__: _score(measure(predicted, target), len(target)) for measure in measures}


def _score(value: Any, count: int) -> dict[str, Any]:
    return {"value": None if math.isnan(value) else float(value), "count": count}


# -- regression --------------------------------------------------------------------------------------------


def _regression(fake: Fake, data: Any, generator: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    target = data.test.y.numpy()
    common = np.random.default_rng(0).normal(0, 0.3, len(target))
    own = generator.normal(0, 0.3, (fake.members, len(target)))
    members = target + data.target_std * (common + fake.wrong * fake.apart * own)
    mean, std = members.mean(0), np.sqrt(members.var(0) + (0.25 * data.target_std) ** 2)
    predicted = Predictive(torch.tensor(members), task="regression")
    noisy = {"tau": 1 / (0.25 * data.target_std) ** 2}
    scores = {
        "rmse": regression.rmse(predicted, data.test.y),
        "log_density": regression.log_density(predicted, data.test.y, **noisy),
        "crps": regression.crps(predicted, data.test.y, **noisy),
        "gaussian_ece": regression.gaussian_ece(predicted, data.test.y, **noisy),
        "coverage_95": regression.interval_coverage(predicted, data.test.y, **noisy),
        "width_95": regression.interval_width(predicted, data.test.y, **noisy),
    }
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= fake.members]
    rmse = [
        float(regression.rmse(Predictive(predicted.predictions[:size], task="regression"), data.test.y))
        for size in sizes
    ]
    arrays = {"mean": mean, "std": std, "members": members, "target": target}
    return arrays, {name: _score(value, len(target)) for name, value in scores.items()}, {"sizes": sizes, "rmse": rmse}


# -- the rest ----------------------------------------------------------------------------------------------


def _costs(fake: Fake, seed: int) -> dict[str, float]:
    single = {"parameters": 12_000, "multiply_adds": 400_000, "training_seconds": 6.0, "inference_per_second": 20_000.0}
    single["peak_memory_bytes"] = 3_000_000
    noise = 1 + 0.02 * seed * (fake.slower > 1)
    ratios = {"parameters": fake.parameters, "multiply_adds": fake.slower, "training_seconds": noise * fake.slower**0.8}
    ratios |= {"inference_per_second": 1 / (fake.slower * noise), "peak_memory_bytes": fake.parameters + 0.5}
    costs = {name: single[name] * ratio for name, ratio in ratios.items()}
    return costs | {f"{name}_ratio": ratio for name, ratio in ratios.items()}


def _made() -> dict[str, Any]:
    return {
        "history": [{"epoch": 1, "loss": 2.0, "lr": 0.05, "seconds": 0.2}],
        "machine": {"cpu": "A processor", "cores": 2, "device": "cpu"},
        "versions": {"multitudes": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "seconds": 7.5,
    }


def _plane() -> dict[str, Any]:
    x, y = np.linspace(-1, 2, 25), np.linspace(-1, 2, 21)
    loss = 0.1 + 2 * np.minimum((x - 0) ** 2 + y[:, None] ** 2, (x - 1) ** 2 + (y[:, None] - 0.8) ** 2)
    points = [
        {"name": "member 1", "x": 0.0, "y": 0.0, "loss": 0.1},
        {"name": "member 2", "x": 1.0, "y": 0.8, "loss": 0.1},
    ]
    return {"x": x.tolist(), "y": y.tolist(), "loss": loss.tolist(), "points": points}


def table_data(rows: int = 90, features: int = 3) -> multitudes.data.Data:
    """Numbers to predict from numbers."""
    generator = torch.Generator().manual_seed(0)

    def part() -> multitudes.data.Part:
        x = torch.randn(rows, features, generator=generator)
        return multitudes.data.Part(x, 10 + 3 * x.sum(1) + torch.randn(rows, generator=generator))

    columns = tuple(f"feature {at}" for at in range(features))
    return multitudes.data.Data("a table", part(), part(), part(), columns=columns)


def image_data(classes: Sequence[str], rows: int = 60, foreign: str = "noise") -> multitudes.data.Data:
    """Colour images of noise, in classes of any names."""
    generator = torch.Generator().manual_seed(0)

    def x() -> torch.Tensor:
        return torch.randint(0, 256, (rows, 3, 8, 8), generator=generator).to(torch.uint8)

    parts = [multitudes.data.Part(x(), torch.arange(rows) % len(classes)) for _ in range(3)]
    return multitudes.data.Data("images", *parts, classes=tuple(classes), ood={foreign: x()})


# -- reading a page ---------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """The tags of a page with their attributes, and which of them are left open."""

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
