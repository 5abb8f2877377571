"""Which columns matter: against closed forms, and on a page."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from multitudes.ensemble.multitude import Multitude
from multitudes.lab.data import Data, Part
from multitudes.lab.data.tables.features import Category, Number
from multitudes.lab.report.input_examples import important_columns, unsure_rows
from multitudes.lab.report.run_results import Results, read_results
from multitudes.lab.study.results.importance import importance
from multitudes.lab.study.run.store import Run
from multitudes.tasks.gaussian import join_gaussian
from tests.lab.report.fake_run import table_data, write_run


class Known(nn.Module):
    """Predicts `3 a - b` with the deviation `exp(c)`, in the targets' units, from standardised inputs `[B, 3]`."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.mean, self.std = data.train.x.mean(0), data.train.x.std(0, correction=0)
        self.target_mean, self.target_std = data.target_mean, data.target_std

    def forward(self, x: Tensor) -> Tensor:
        own = self.std * x + self.mean
        mean = (3 * own[:, :1] - own[:, 1:2] - self.target_mean) / self.target_std
        return join_gaussian(mean, (own[:, 2:].exp() / self.target_std).square())


def _of_task(network: nn.Module, task: str) -> Multitude:
    net = Multitude(network)
    net.task = task
    return net


def numbers() -> Data:
    x = torch.randn(3, 1500, 3, generator=torch.Generator().manual_seed(0))
    parts = [Part(each, 3 * each[:, 0] - each[:, 1]) for each in x]
    return Data("plane", *parts, columns=("a", "b", "c"), numbers="standard")


def test_shuffling_a_column_of_a_plane_adds_its_slope_times_its_deviation_times_the_root_of_two() -> None:
    data = numbers()
    found = importance(_of_task(Known(data), "gaussian"), data)
    assert found["rows"] == 1000 and list(found["columns"])[:2] == ["a", "b"]
    assert found["base"][0] == pytest.approx(0, abs=1e-4)
    for name, slope, at in (("a", 3, 0), ("b", 1, 1)):
        score = sum(found["columns"][name]["score"]) / 3
        assert score == pytest.approx(slope * math.sqrt(2) * float(data.test.x[:, at].std()), rel=0.08)
        assert found["columns"][name]["uncertainty"] == pytest.approx([0, 0, 0], abs=1e-5)
    # The deviation depends on c alone, whose values are the same in another order: no error, and the same mean.
    assert found["columns"]["c"]["score"] == pytest.approx([0, 0, 0], abs=1e-4)
    assert found["columns"]["c"]["uncertainty"] == pytest.approx([0, 0, 0], abs=1e-4)


class Matching(nn.Module):
    """Certain of class 1 where the number and the category agree, and of no class where nothing is a category."""

    def forward(self, x: Tensor) -> Tensor:
        agree = (x[:, 0] > 0) == (x[:, 1] > 0)
        known = (x[:, 1:] > 0).sum(1) == 1
        logit = torch.where(agree, 8.0, -8.0) * known
        return torch.stack([torch.zeros_like(logit), logit], 1)


def test_all_features_of_a_column_move_together() -> None:
    generator = torch.Generator().manual_seed(0)
    first, category = torch.rand(600, generator=generator) < 0.5, torch.rand(600, generator=generator) < 0.5
    x = torch.stack([2.0 * first - 1, category.float(), (~category).float()], 1)
    part = Part(x, (first == category).long())
    features = (Number("n"), Category("c", known=("u", "v")))
    data = Data("match", part, part, part, ("no", "yes"), ("n", "c=u", "c=v"), features=features, numbers="standard")
    found = importance(_of_task(Matching(), "classification"), data)
    assert found["base"][0] == 1.0 and found["base"][1] < 0.01
    for name in ("n", "c"):  # of independent halves, every second pair disagrees
        assert sum(found["columns"][name]["score"]) / 3 == pytest.approx(0.5, abs=0.06)
        assert found["columns"][name]["uncertainty"] == pytest.approx([0, 0, 0], abs=1e-6)  # there is always one


# -- on the page -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    directory: Path = write_run(tmp_path_factory.mktemp("run"), ["single", "packed"], [0], data=table_data())
    columns = {name: {"score": [1.0 - at, 2.0 - at], "uncertainty": [at, -3.0 * at]} for at, name in enumerate("bac")}
    own = {"rows": 90, "base": [1.0, 1.0], "columns": columns}
    Run(directory).write_table("importance.json", {"score": "rmse", "uncertainty": "std", "methods": {"packed": own}})
    return read_results(directory)


def test_bars_are_in_proportion_to_the_largest_change(results: Results) -> None:
    found = important_columns(results)
    (panel,) = found["panels"]
    assert [name for name, _ in panel["lines"]] == ["b", "a", "c"]
    assert [cells[0] for _, cells in panel["lines"]] == [("+1.5", 1.0), ("+0.5", 1 / 3), ("−0.5", -1 / 3)]
    assert [cells[1][1] for _, cells in panel["lines"]] == [0.0, -0.5, -1.0]


def test_the_rows_of_the_largest_deviation_are_shown_as_they_were_read(results: Results) -> None:
    found = unsure_rows(results)
    best = next(row.name for row in results.board if not row.baseline)
    std, low, high, target = results.tensors(best, "std", "low", "high", "target")[0]
    assert found["columns"] == ["b", "a", "c"]  # as they matter
    assert [row for row, _, _ in found["rows"]] == std.argsort(descending=True, stable=True)[:10].tolist()
    for row, values, (told, inside) in found["rows"]:
        x = results.table.test.x[row]
        assert [float(value.replace("−", "-")) for value in values] == pytest.approx(x[[1, 0, 2]].tolist(), rel=1e-3)
        assert inside == bool(low[row] <= target[row] <= high[row])
        assert float(told[2].replace("−", "-")) == pytest.approx(float(target[row]), rel=1e-3)
