"""A job: from its `config.json` to its results, also after it was killed, without extras, and when it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multitudes.base.sealed_files import write_json
from multitudes.ensemble.multitude import Multitude
from multitudes.files.save import load
from multitudes.lab import data as datasets
from multitudes.lab.data import Data, Part
from multitudes.lab.data.splits import spread
from multitudes.lab.study.run.store import Job
from multitudes.lab.study.run.trained_network import Trained
from multitudes.lab.study.run.worker import run
from multitudes.lab.study.spec.assignment import Assignment
from multitudes.lab.study.spec.method_rows import METHODS
from multitudes.lab.study.spec.network_sources import defaults
from multitudes.metrics import ece, mce, nll
from multitudes.shift import corrupt
from multitudes.tasks.predictive import Predictive
from multitudes.training.optimizers import batch_size_for

SOURCE = Path(__file__).parents[3] / "src"


def config(method: str = "single", **changes: Any) -> dict[str, Any]:
    """A small job on a part of the digits."""
    training = {**defaults((1, 8, 8))["training"], "epochs": 4, **changes.pop("training", {})}
    evaluation = {"shift": ["contrast"], "severities": [3], "draws": 6, "batch_size": 32, "sizes": [1, 2, 4]}
    return {
        "version": 1, "method": method, "settings": METHODS[method].complete(changes.pop("settings", {})), "seed": 0,
        "data": {"source": "digits", "limit": 100}, "model": {"name": "small_cnn", "settings": {}},
        "training": training, "evaluation": {**evaluation, **changes.pop("evaluation", {})}, "device": "cpu", **changes,
    }  # fmt: skip


def done(folder: Path, content: dict[str, Any]) -> Path:
    """Run a job and return its directory."""
    directory = written(folder, content)
    run(directory)
    return directory


def written(folder: Path, content: dict[str, Any]) -> Path:
    directory = folder / "jobs" / f"{content['method']}-{content['seed']}"
    directory.mkdir(parents=True)
    write_json(directory / "config.json", content)
    return directory


def metrics_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "metrics.json").read_text())
    return found


def events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return done(tmp_path_factory.mktemp("run"), config("deep"))


# -- what a job leaves behind ------------------------------------------------------------------------------


def test_a_job_writes_its_results_and_logs_every_epoch(deep: Path) -> None:
    names = {path.name for path in deep.iterdir()}
    assert names == {"config.json", "log.jsonl", "metrics.json", "model.safetensors", "predictions.safetensors"}
    log, found = events(deep), metrics_of(deep)
    assert [event["event"] for event in log] == ["start", *["epoch"] * 4, "evaluate", "done"]
    assert [(event["epoch"], event["epochs"]) for event in log[1:5]] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [event["loss"] for event in log[1:5]] == [epoch["loss"] for epoch in found["history"]]
    assert found["versions"]["torch"] == torch.__version__ and found["machine"]["device"] == "cpu"
    assert found["seconds"] > sum(epoch["seconds"] for epoch in found["history"])
    before = {path.name: path.stat().st_mtime_ns for path in deep.iterdir()}
    run(deep)  # a job that is done is left alone
    assert {path.name: path.stat().st_mtime_ns for path in deep.iterdir()} == before


def probabilities(directory: Path) -> Predictive:
    """Return the predictions of the saved network on the test digits."""
    digits = datasets.load("digits", limit=100)
    return load(directory / "model.safetensors").predict(digits.normalised(digits.test.x))


def test_scores_are_those_of_the_saved_predictions(deep: Path) -> None:
    found = metrics_of(deep)["scores"]
    saved = Job(deep).predictions
    probs, target = saved["probs"], saved["target"]
    assert probs.shape == (100, 10) and probs.dtype == np.float32
    assert found["accuracy"] == {"value": pytest.approx((probs.argmax(1) == target).mean()), "count": 100}
    assert found["nll"]["value"] == pytest.approx(-np.log(probs[np.arange(100), target]).mean(), rel=1e-5)
    assert {"shift/contrast/3/accuracy", "ood/photographs/mutual_information/auroc"} < set(found)
    assert saved["members"].shape == (4, 100, 10) and saved["members"].dtype == np.float16
    assert saved["ood/photographs/members"].shape == (4, 100, 10)
    np.testing.assert_allclose(saved["members"].astype(np.float32).mean(0), saved["raw/probs"], atol=1e-3)
    np.testing.assert_allclose(probabilities(deep).probs.numpy(), probs, atol=1e-5)
    for name in ("nll", "accuracy", "brier", "raw/nll", "raw/accuracy", "raw/brier"):
        rows = saved[f"raw/rows/{name[4:]}" if name.startswith("raw/") else f"rows/{name}"]
        assert rows.shape == (100,) and rows.mean() == pytest.approx(found[name]["value"], rel=1e-4)


def test_calibration_uses_the_validation_part_and_both_networks_are_scored(deep: Path) -> None:
    data, found = datasets.load("digits", limit=100), metrics_of(deep)["scores"]
    net = load(deep / "model.safetensors")
    saved = Job(deep).predictions
    p = net.net.predict(data.normalised(data.validation.x))
    logs = p.log_probs.double().numpy()

    def nll(temperature: float) -> float:
        scaled = logs / temperature
        scaled = scaled - np.logaddexp.reduce(scaled, 1, keepdims=True)
        return -scaled[np.arange(100), data.validation.y].mean()

    grid = np.geomspace(0.02, 5, 4001)
    assert float(net.temperature) == pytest.approx(grid[np.argmin([nll(t) for t in grid])], rel=2e-3)
    rows = np.arange(100), saved["target"]
    assert found["raw/nll"]["value"] == pytest.approx(-np.log(saved["raw/probs"][rows]).mean(), rel=1e-5)
    assert found["raw/accuracy"] == found["accuracy"]
    assert found["nll"]["value"] < found["raw/nll"]["value"]  # of a network that was hardly trained


def test_calibration_can_be_disabled(tmp_path: Path) -> None:
    directory = done(tmp_path, config("single", evaluation={"calibrate": False}))
    assert isinstance(load(directory / "model.safetensors"), Multitude)
    assert not [name for name in metrics_of(directory)["scores"] if name.startswith("raw/")]


def test_scores_by_size_are_means_over_groups_of_members(deep: Path) -> None:
    by_size, scores = metrics_of(deep)["by_size"], metrics_of(deep)["scores"]
    members, target = probabilities(deep).member_probs.double().numpy(), Job(deep).predictions["target"]
    assert by_size["sizes"] == [1, 2, 4]
    assert by_size["nll"][2] == pytest.approx(scores["raw/nll"]["value"], rel=1e-6)
    assert by_size["accuracy"][0] == pytest.approx((members.argmax(2) == target).mean())
    pairs = [members[:2].mean(0), members[2:].mean(0)]
    assert by_size["accuracy"][1] == pytest.approx(np.mean([pair.argmax(1) == target for pair in pairs]))
    assert by_size["nll"][1] == pytest.approx(
        -np.mean([np.log(pair[np.arange(100), target]) for pair in pairs]), rel=1e-4
    )
    two = torch.from_numpy(np.concatenate(pairs)).log()[None]
    together, twice = Predictive(two), torch.from_numpy(target).repeat(2)
    assert by_size["ece"][1] == pytest.approx(float(ece(together, twice)), abs=1e-4)
    assert by_size["mce"][1] == pytest.approx(float(mce(together, twice)), abs=1e-4)
    assert by_size["ece"][2] == pytest.approx(scores["raw/ece"]["value"], abs=1e-6)


def test_corrupted_images_and_their_draws_can_be_limited(tmp_path: Path) -> None:
    few = {"shift_limit": 30, "shift_draws": 2, "bins": 5, "min_count": 4}
    directory = done(tmp_path, config("mc_dropout", evaluation=few))
    scores = metrics_of(directory)["scores"]
    assert scores["shift/contrast/3/nll"]["count"] == 30 and scores["nll"]["count"] == 100
    net, data = load(directory / "model.safetensors"), datasets.load("digits", limit=100)
    rows = spread(data.test.y, 30, 0)
    x = corrupt(data.scaled(data.test.x[rows]), "contrast", 3, seed=0)
    p = net.predict(data.preprocess(x), draws=2, seed=0)
    assert scores["shift/contrast/3/nll"]["value"] == pytest.approx(float(nll(p, data.test.y[rows])), rel=1e-4)
    assert scores["shift/contrast/3/ece"]["value"] == pytest.approx(
        float(ece(p, data.test.y[rows], bins=5, min_count=4)), rel=1e-4
    )


def test_costs_are_relative_to_the_single_network(deep: Path, tmp_path: Path) -> None:
    found = metrics_of(deep)["costs"]
    names = ["parameters", "multiply_adds", "peak_memory_bytes"]
    assert set(found) == {*names, *(f"{name}_ratio" for name in names), "training_seconds"}
    assert found["parameters_ratio"] == found["multiply_adds_ratio"] == 4.0
    assert found["training_seconds"] == sum(epoch["seconds"] for epoch in metrics_of(deep)["history"])
    assert min(found.values()) > 0
    single = metrics_of(done(tmp_path, config()))["costs"]
    assert {value for name, value in single.items() if name.endswith("_ratio")} == {1.0}


@pytest.mark.parametrize("name", ["mc_dropout", "variance"])
def test_a_seed_fixes_the_results_and_the_random_state_is_kept(tmp_path: Path, name: str) -> None:
    directories = [written(tmp_path / which, config(name)) for which in ("one", "two")]
    for directory in directories:
        state = torch.get_rng_state()
        run(directory)
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(1)
    one, two = map(metrics_of, directories)
    assert one["scores"] == two["scores"] and one["by_size"] == two["by_size"]


# -- other data --------------------------------------------------------------------------------------------


def plane(task: str) -> Data:
    """A target that is a plane over four features, and noise; in units far from 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=generator) * torch.tensor([1.0, 10.0, 0.1, 1.0])
    y = 5000 + 200 * x[:, 0] + 10 * x[:, 1] + 20 * torch.randn(300, generator=generator)
    y = y if task == "regression" else (y > 5000).long()
    parts = [Part(x[rows], y[rows]) for rows in (slice(200), slice(200, 240), slice(240, 300))]
    return Data("plane", *parts, () if task == "regression" else ("low", "high"), ("a", "b", "c", "d"))


def on_plane(folder: Path, task: str, method: str, **changes: Any) -> Path:
    data = plane(task)
    model = {"name": "mlp", "settings": {"hidden": [16]}}
    content = config(
        method, model=model, evaluation={"shift": []}, training={"epochs": 40, **changes.pop("training", {})}, **changes
    )
    content["data"] = {"file": "../../data.mtdata", "fingerprint": data.fingerprint}
    directory = written(folder, content)
    datasets.save(data, folder / "data.mtdata")
    return directory


@pytest.mark.parametrize("method", ["deep", "mc_dropout", "mimo"])
def test_regression_scores_have_the_units_of_the_targets(tmp_path: Path, method: str) -> None:
    directory = on_plane(tmp_path, "regression", method)
    run(directory)
    kept, scores = Job(directory).predictions, metrics_of(directory)["scores"]
    mean, target = (kept[name].astype(np.float64) for name in ("mean", "target"))
    assert kept["members"].shape[1] == 60 and abs(mean - target).mean() < 100 < target.std()
    assert scores["rmse"]["value"] == pytest.approx(np.sqrt(((mean - target) ** 2).mean()), rel=1e-3)
    np.testing.assert_allclose(kept["members"].mean(0), mean, rtol=1e-3)
    inside = (kept["low"] <= target) & (target <= kept["high"])
    assert scores["coverage_90"]["value"] == pytest.approx(inside.mean(), abs=1e-6)
    assert scores["width_90"]["value"] == pytest.approx((kept["high"] - kept["low"]).mean(), rel=1e-5)
    before = np.abs(target - kept["raw/mean"]) < 1.959964 * kept["raw/std"]
    assert scores["raw/coverage_95"]["value"] == pytest.approx(before.mean(), abs=1e-6)
    assert kept["raw/reach"][-2] == pytest.approx(1.959964, rel=1e-5)  # of 95 %, before intervals are conformal
    by_size = metrics_of(directory)["by_size"]
    assert by_size["rmse"][0] >= by_size["rmse"][-1] and len(by_size["nll"]) == len(by_size["sizes"])


def test_the_density_of_a_single_network_is_gaussian(tmp_path: Path) -> None:
    directory = on_plane(tmp_path, "regression", "single")
    run(directory)
    kept = Job(directory).predictions
    mean, std, target = (kept[name].astype(np.float64) for name in ("mean", "std", "target"))
    density = -0.5 * ((target - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    found = metrics_of(directory)
    assert found["scores"]["log_density"]["value"] == pytest.approx(density.mean(), rel=1e-4)
    assert found["by_size"]["nll"] == [pytest.approx(-found["scores"]["raw/log_density"]["value"], rel=1e-6)]
    assert kept["rows/log_density"] == pytest.approx(density, rel=1e-3, abs=1e-3)
    assert kept["rows/rmse"] == pytest.approx((mean - target) ** 2, rel=1e-3, abs=1e-3)


# -- how training ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_early_stopping_keeps_the_best_weights_by_validation(tmp_path: Path, task: str) -> None:
    directory = on_plane(tmp_path, task, "packed", training={"epochs": 300, "lr": 0.05, "patience": 3})
    run(directory)
    history = metrics_of(directory)["history"]
    scores = [epoch["validation"] for epoch in history]
    best = int(np.argmin(scores))
    assert len(history) < 300 and len(history) == best + 1 + 3
    trained = Trained.read(directory, "cpu")
    part, data = trained.data.validation, trained.data
    with torch.no_grad():
        p = trained.multitude.predict(data.normalised(part.x))
    if task == "classification":
        found = float(-p.log_probs.gather(1, part.y[:, None]).mean())
    else:
        found = float((p.mean - data.standardised(part.y)[:, None]).square().mean().sqrt())
    assert found == pytest.approx(scores[best], rel=1e-4)


def test_methods_that_record_checkpoints_train_all_epochs(tmp_path: Path) -> None:
    directory = on_plane(tmp_path, "regression", "swag", training={"epochs": 12, "patience": 1})
    run(directory)
    history = metrics_of(directory)["history"]
    assert len(history) >= 12 and history[0]["validation"] is None


def test_batch_size_zero_depends_on_the_number_of_rows(tmp_path: Path) -> None:
    directory = on_plane(tmp_path, "regression", "single", training={"batch_size": 0})
    job = Assignment.read(directory)
    assert job.loader.batch_size == batch_size_for(len(job.data.train))


# -- killed, and run again ---------------------------------------------------------------------------------

OWN = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread, as jobs do: the number of threads changes rounding."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_killed_job_ends_with_the_same_results(tmp_path: Path, one_thread: None) -> None:
    often = {"epochs": 20, "checkpoint_seconds": 0.0004}
    whole, killed = (written(tmp_path / which, config("swag", training=often)) for which in ("whole", "killed"))
    run(whole)
    process = subprocess.Popen([sys.executable, "-m", "multitudes.lab.study.run.worker", str(killed)], env=OWN)
    deadline = time.monotonic() + 300
    checkpoint = killed / "checkpoint.safetensors"
    while not (checkpoint.exists() and list(killed.glob("recording/checkpoint-*"))) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "metrics.json").exists()
    assert checkpoint.exists() and list((killed / "recording").iterdir())
    run(killed)
    one, two = metrics_of(whole), metrics_of(killed)
    assert one["scores"] == two["scores"]
    assert [epoch["loss"] for epoch in one["history"]] == [epoch["loss"] for epoch in two["history"]]
    assert not checkpoint.exists() and not (killed / "recording").exists()


def test_recordings_without_a_checkpoint_are_discarded(tmp_path: Path) -> None:
    fresh, old = (written(tmp_path / which, config("snapshots")) for which in ("fresh", "old"))
    (old / "recording").mkdir()
    (old / "recording" / "checkpoint-00000001.safetensors").write_bytes(b"of another training")
    run(fresh)
    run(old)
    assert metrics_of(fresh)["scores"] == metrics_of(old)["scores"]


# -- lean machines -----------------------------------------------------------------------------------------

LEAN = """
import sys
sys.modules.update(dict.fromkeys(("pydantic", "datasets", "plotly", "ray", "typer", "rich", "pandas", "pyarrow")))
from multitudes.lab.study.run.worker import main
main(sys.argv[1:])
"""  # a module that is None cannot be imported


def test_a_job_runs_without_the_extras_of_planning_plotting_and_clusters(tmp_path: Path) -> None:
    directory = on_plane(tmp_path, "regression", "deep")
    done = subprocess.run([sys.executable, "-c", LEAN, str(directory)], env=OWN, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (directory / "metrics.json").exists()


# -- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "must be 1, got 2"),
        ({"device": "cuda:7"} if not torch.cuda.is_available() else {"device": "abc"}, "device"),
        ({"model": {"name": "small"}}, "model must be one of .*, got 'small'"),
        ({"training": {"epochs": 1}, "method": "swag"}, "do not fit into 4 training steps"),
    ],
)
def test_a_failure_is_logged_and_raised(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    directory = written(tmp_path, config(**changes))
    with pytest.raises((ValueError, RuntimeError), match=message):
        run(directory)
    last = events(directory)[-1]
    assert last["event"] == "failed" and "\n" not in last["message"] and last["message"]
    assert not (directory / "metrics.json").exists()


def test_a_job_with_other_data_or_without_a_configuration_is_refused(tmp_path: Path) -> None:
    directory = on_plane(tmp_path, "regression", "single")
    datasets.save(plane("classification"), tmp_path / "data.mtdata")
    with pytest.raises(ValueError, match="changed since the study was prepared"):
        run(directory)
    with pytest.raises(ValueError, match="needs images, got rows of 4"):
        run(on_plane(tmp_path, "regression", "smooth"))
    with pytest.raises(ValueError, match=r"directory must be a job.*no config\.json"):
        run(tmp_path / "nothing")
