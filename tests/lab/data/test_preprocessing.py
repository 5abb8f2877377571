"""Preprocessing of tables: normal scores and bins of numbers; zeros and ones unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.preprocessing import QuantileTransformer
from torch import Tensor

import multitudes.lab.data as md
from multitudes.lab.data.preprocessing import MOST, Preprocessing, edges_of
from tests.zoo.predictions import raises


def fitted(values: Tensor) -> Tensor:
    return Preprocessing.fitted(values[:, None], [True])(values[:, None])[:, 0]


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=60))
@settings(deadline=None)
def test_few_values_get_the_normal_scores_of_their_mid_ranks(numbers: list[int]) -> None:
    want = stats.norm.ppf((stats.rankdata(numbers) - 0.5) / len(numbers))
    np.testing.assert_allclose(fitted(torch.tensor(numbers, dtype=torch.float32)), want, atol=1e-5)


def test_many_values_are_close_to_scikit_learn_s_transform() -> None:
    values = torch.randn(30_000, generator=torch.Generator().manual_seed(0)).exp()
    judge = QuantileTransformer(n_quantiles=1000, output_distribution="normal", subsample=None)
    want = judge.fit_transform(values[:, None].numpy())[:, 0]
    inside = np.abs(want) < 2.5  # theirs extends the extremes to 5.2
    np.testing.assert_allclose(fitted(values).numpy()[inside], want[inside], atol=0.01)
    assert Preprocessing.fitted(values[:, None], [True]).knots.shape[1] <= MOST + 3  # type: ignore[union-attr]


def test_scores_are_monotonic_and_bounded() -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0))
    transform = Preprocessing.fitted(values[:, None], [True])
    far = torch.tensor([-1e30, -10.0, *values.sort().values.tolist(), 10.0, 1e30])
    scores = transform(far[:, None])[:, 0]
    assert (scores.diff() >= 0).all() and scores.isfinite().all()
    top = scores[2:-2].max()
    assert scores[-1] == scores[-2] == top + 2  # extended by two standard deviations
    beyond = transform((values.max() + values.std(correction=0))[None, None]).item()
    assert beyond == pytest.approx(top.item() + 1, abs=1e-5)


def test_an_exported_preprocessing_is_equal() -> None:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    x[:, 1] = x[:, 1].round()
    x[:, 2] = (x[:, 2] > 0).float()
    transform = Preprocessing.fitted(x, [True, True, False])
    exported = torch.export.export(transform, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},)).module()
    new = torch.cat([x, 3 * x])
    torch.testing.assert_close(exported(new), transform(new))
    torch.testing.assert_close(transform(x)[:, 2], x[:, 2])
    torch.testing.assert_close(transform.double()(new.double()).float(), transform.float()(new))


def test_constant_columns_and_single_rows_are_supported() -> None:
    x = torch.tensor([[5.0, 1.0], [5.0, 2.0]])
    scores = Preprocessing.fitted(x, [True, True])(x)
    assert scores[:, 0].tolist() == [0.0, 0.0] and scores[0, 1] == -scores[1, 1] != 0
    assert Preprocessing.fitted(x[:1], [True, True])(x[:1]).tolist() == [[0.0, 0.0]]


def test_numbers_can_be_standardised_instead() -> None:
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)) * 7 + 3
    z = Preprocessing.fitted(x, [True, True], "standard")(x)
    torch.testing.assert_close(z, (x - x.mean(0)) / x.std(0, correction=0))
    with raises("numbers must be one of quantile, standard, got 'ranks'"):
        Preprocessing.fitted(x, [True, True], "ranks")


def test_bins_hold_equal_numbers_of_rows() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).exp()
    edges = torch.tensor(edges_of(values, 8))
    counts = torch.histogram(values, edges).hist
    assert len(edges) == 9 and counts.min() >= 120 and counts.max() <= 130
    assert edges_of(torch.tensor([1.0, 1.0, 1.0, 2.0]), 48) == [1.0, 2.0]
    assert edges_of(torch.tensor([1.0, 1.0 + 1e-6, 1.0 + 2e-6]), 48) == []  # rounding noise


def test_the_layout_of_a_table_describes_its_features(tmp_path: Path) -> None:
    rows = [
        f"{row},{'' if row % 7 == 0 else row % 10},{'abc'[row % 3]},2020-0{1 + row % 9}-0{1 + row % 8},{row % 13}.5"
        for row in range(200)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,c,d,y", *rows]))
    data = md.load(tmp_path / "t.csv", target="y", read_as={"a": "number"})
    layout = data.layout(4)
    assert sum(1 if isinstance(each, list) else each for each in layout) == data.shape[0] == len(data.columns)
    places = dict(zip(data.columns, range(99), strict=False))
    features, kinds = 0, {}
    for each in layout:
        kinds[features] = each
        features += 1 if isinstance(each, list) else each
    assert len(kinds[places["a"]]) == 5 and kinds[places["b missing"]] == 1 and kinds[places["c=a"]] == 3
    assert isinstance(kinds[places["d days"]], list)
    seen = data.normalised(data.train.x)
    assert seen[:, places["c=a"]].unique().tolist() == [0.0, 1.0]
    assert abs(seen[:, places["a"]].mean().item()) < 0.05 and seen[:, places["a"]].std().item() == pytest.approx(1, 0.1)


def test_prepared_files_keep_the_preprocessing(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\n".join(["a,y", *(f"{row**2},{row}.5" for row in range(100))]))
    found = {}
    for numbers in ("quantile", "standard"):
        data = md.load(tmp_path / "t.csv", target="y", numbers=numbers, read_as={"a": "number"})
        again = md.read(md.save(data, tmp_path / f"{numbers}.mtdata"))
        torch.testing.assert_close(again.normalised(again.test.x), data.normalised(data.test.x))
        found[numbers] = again.fingerprint
    assert found["quantile"] != found["standard"]
