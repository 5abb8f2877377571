"""The estimators: tables, networks, methods, weights, files and wrong arguments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

import torch
from torch import nn
from torch.utils.data import TensorDataset

from multitudes.methods.registry import collect
from multitudes.sklearn import MultitudeClassifier, MultitudeRegressor
from multitudes.sklearn.train import RowBatches
from tests.sklearn.sklearn_cases import blobs, classifier, line, regressor, small

# -- tables ------------------------------------------------------------------------------------------------


def table(rows: int = 240) -> tuple[dict[str, Any], Any]:
    """Columns of every kind with missing values, and a target that depends on all of them."""
    random = np.random.default_rng(0)
    number = random.normal(size=rows)
    colour = random.choice(["red", "green", "blue"], rows)
    day = np.datetime64("2020-01-01") + random.integers(0, 700, rows)
    y = number + 2.0 * (colour == "red") + 0.003 * (day - np.datetime64("2020-01-01")).astype(float)
    number[::10] = np.nan
    flag = random.random(rows) < 0.5
    return {"number": number, "colour": colour, "day": day.astype("datetime64[ns]"), "flag": flag}, y


def test_a_pandas_frame_may_have_columns_of_every_kind() -> None:
    pd = pytest.importorskip("pandas")
    columns, y = table()
    frame = pd.DataFrame(columns)
    frame.loc[::9, "colour"] = None
    model = regressor(epochs=60).fit(frame, y)
    names = ("number", "number missing", "colour=blue", "colour=green", "colour=red", "colour missing", "day year")
    assert model.model_.encoder.names[:7] == names
    assert list(model.feature_names_in_) == ["number", "colour", "day", "flag"] and model.n_features_in_ == 4
    assert model.score(frame, y) > 0.8
    assert np.isfinite(model.predict(frame.assign(colour="violet"))).all()  # an unknown category


def test_frames_of_pandas_polars_and_arrow_give_the_same_predictions() -> None:
    pd, pl, pa = (pytest.importorskip(name) for name in ("pandas", "polars", "pyarrow"))
    columns, y = table()
    columns["number"] = columns["number"].astype(np.float32)
    columns["kind"] = ["a", "b"] * 120
    frame = pd.DataFrame(columns).astype({"kind": "category"})
    others = pl.from_pandas(frame).with_columns(pl.col("number").fill_nan(None)), pa.Table.from_pandas(frame)
    model = regressor(epochs=2).fit(frame, y)
    want = model.predict(frame)
    for other in others:
        assert np.array_equal(model.predict(other), want)
        assert np.array_equal(regressor(epochs=2).fit(other, y).predict(other), want)


def test_a_warning_lists_dropped_columns() -> None:
    pd = pytest.importorskip("pandas")
    X, y = line(60)
    frame = pd.DataFrame({"a": X[:, 0], "customer_id": np.arange(60) + 7, "same": 1.0})
    with pytest.warns(UserWarning, match=r"left out: 'customer_id' \(consecutive.*, 'same' \(constant"):
        model = regressor().fit(frame, y)
    assert model.model_.encoder.names == ("a",) and model.n_features_in_ == 3


def test_whole_numbers_of_a_categorical_column_are_categories() -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"code": pd.Categorical([3, 1, 2] * 20)})
    model = classifier(epochs=40).fit(frame, frame["code"].astype(str))
    assert model.model_.encoder.names == ("code=1", "code=2", "code=3")
    assert model.score(frame, frame["code"].astype(str)) == 1.0


def test_columns_of_arrays_are_numbers() -> None:
    X, y = line(80)
    whole = np.column_stack([np.arange(80), np.ones(80), X])  # row numbers and a constant
    model = regressor().fit(whole, y)
    assert model.model_.encoder.names == ("x0", "x1", "x2", "x3", "x4")
    missing = whole.copy()
    missing[::5, 2] = np.nan
    assert regressor().fit(missing, y).model_.encoder.names[2:4] == ("x2", "x2 missing")
    assert np.array_equal(regressor().fit(torch.tensor(whole), y).predict(torch.tensor(whole)), model.predict(whole))


def test_a_column_without_values_is_ignored() -> None:
    X, y = line(80)
    empty = np.column_stack([np.full(80, np.nan), X])
    assert np.array_equal(regressor().fit(empty, y).predict(empty), regressor().fit(X, y).predict(X))


# -- networks and methods ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name, method in collect().items() if not method.feature_maps and not method.pretrained]
)
def test_any_method_trains_and_predicts(name: str) -> None:
    X, y = blobs(120)
    model = classifier(method=name, members=None, epochs=12).fit(X, y)
    assert model.score(X, y) > 0.5
    assert np.allclose(model.predict_proba(X).sum(1), 1)


def test_adapters_require_a_trained_network() -> None:
    X, y = blobs(120)
    with pytest.raises(ValueError, match="method 'lora' requires a trained network: pass it as module="):
        classifier(method="lora").fit(X, y)
    adapted = classifier(method="lora", module=Wide(3, 3), settings={"rank": 2}, epochs=2).fit(X, y)
    assert np.allclose(adapted.predict_proba(X).sum(1), 1)


class Wide(nn.Module):
    """A custom network."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("module", [Wide, small, Wide(3, 3)])
def test_a_module_may_be_a_class_a_function_or_a_network(module: Any) -> None:
    X, y = blobs()
    given = module.state_dict()["layers.0.weight"].clone() if isinstance(module, nn.Module) else None
    model = classifier(module=module).fit(X, y)
    assert model.score(X, y) > 0.8
    if given is not None:
        assert torch.equal(module.state_dict()["layers.0.weight"], given)


class InFloat32(Wide):
    """A network that requires float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ torch.eye(x.shape[1]))


def test_predictions_do_not_depend_on_other_rows() -> None:
    X, y = line()
    model = regressor(module=Wide).fit(X, y)
    assert np.allclose(np.concatenate([model.predict(row[None]) for row in X[:20]]), model.predict(X)[:20], rtol=1e-12)
    other = regressor(module=InFloat32, method="single", members=None).fit(X, y)
    assert np.allclose(np.concatenate([other.predict(row[None]) for row in X[:20]]), other.predict(X)[:20], rtol=1e-4)


def test_several_targets_are_learned_together() -> None:
    X, y = line()
    both = np.column_stack([y, -3 * X[:, 1]])
    model = regressor(epochs=30).fit(X, both)
    assert model.predict(X).shape == (200, 2) and model.score(X, both) > 0.8
    assert [part.shape for part in model.predict_interval(X)] == [(200, 2)] * 2
    assert model.predict_quantiles(X).shape == (200, 3, 2)
    assert model.uncertainty(X)["total"].shape == (200, 2)
    assert regressor(epochs=1).fit(X, y[:, None]).predict(X).shape == (200,)


def test_the_parts_of_the_uncertainty_add_up() -> None:
    X, y = line(60)
    numbers, classes = regressor(members=4).fit(X, y), classifier(members=4).fit(X, y > 5)
    for model in (numbers, classes):
        found = model.uncertainty(X)
        assert np.allclose(found["total"], found["aleatoric"] + found["epistemic"], rtol=1e-4, atol=1e-6)
        assert (found["epistemic"] >= 0).all()
    assert np.allclose(numbers.predict(X, return_std=True)[1] ** 2, numbers.uncertainty(X)["total"], rtol=1e-5)


def test_predictions_scale_with_the_targets() -> None:
    X, y = line(80)
    mean, std = regressor().fit(X, y).predict(X, return_std=True)
    mean_2, std_2 = regressor().fit(X, 1e6 + 1000 * y).predict(X, return_std=True)
    assert np.allclose(mean_2, 1e6 + 1000 * mean, rtol=1e-5) and np.allclose(std_2, 1000 * std, rtol=1e-2)


# -- rows --------------------------------------------------------------------------------------------------


def test_rows_with_weight_zero_are_ignored() -> None:
    X, y = blobs(120)
    weight = np.ones(120)
    weight[60:] = 0
    wrong = np.concatenate([y[:60], np.roll(y[60:], 1)])
    assert np.array_equal(
        classifier().fit(X, wrong, weight).predict_proba(X), classifier().fit(X[:60], y[:60]).predict_proba(X)
    )


def test_weights_decide_between_contradicting_rows() -> None:
    X = np.zeros((200, 1))
    X[::2] = 1.0
    y = np.arange(200) // 2 % 2  # half of each
    heavy = classifier(epochs=60, patience=None).fit(X, y, np.where(y == 1, 3.0, 1.0))
    assert np.allclose(heavy.predict_proba([[0.0], [1.0]])[:, 1], 0.75, atol=0.1)
    balanced = classifier(epochs=60, patience=None, class_weight={0: 1, 1: 3}).fit(X, y)
    assert np.allclose(balanced.predict_proba([[0.0], [1.0]])[:, 1], 0.75, atol=0.1)


def test_a_seed_repeats_the_model_and_keeps_random_states() -> None:
    X, y = line(60)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two = regressor().fit(X, y), regressor().fit(X, y)
    assert np.array_equal(one.predict(X), two.predict(X))
    assert not np.array_equal(regressor(random_state=1).fit(X, y).predict(X), one.predict(X))
    assert torch.equal(torch.get_rng_state(), before)


def test_folds_hold_out_each_row_once_stratified_by_class() -> None:
    groups = torch.tensor([0] * 20 + [1] * 10)
    parts = regressor(folds=5)._split(groups, 0)
    assert torch.cat([held for _, held in parts]).sort().values.tolist() == list(range(30))
    assert all(groups[held].bincount().tolist() == [4, 2] for _, held in parts)
    assert all(sorted([*train.tolist(), *held.tolist()]) == list(range(30)) for train, held in parts)


@pytest.mark.slow
def test_folds_in_parallel_equal_folds_in_sequence() -> None:
    X, y = line(90)
    one = regressor(folds=3).fit(X, y)
    two = regressor(folds=3, n_jobs=2).fit(X, y)
    assert np.allclose(one.predict(X), two.predict(X), rtol=1e-5)
    assert len(one.history_) == 3 and one.n_iter_ == max(map(len, one.history_))


def test_the_only_row_of_a_class_is_not_held_out() -> None:
    X, y = blobs(40)
    y = np.append(y[:-1], "rare")
    for seed in range(2):
        assert "rare" in classifier(random_state=seed, epochs=1).fit(X, y).classes_


def test_batches_contain_every_row_once_but_no_single_row() -> None:
    rows = TensorDataset(torch.arange(33.0)[:, None], torch.arange(33))
    batches = RowBatches(rows, 16, seed=0)
    first, second = ([y.tolist() for _, y in batches] for _ in range(2))
    assert [len(batch) for batch in first] == [16, 16] and first != second
    assert [y.tolist() for _, y in RowBatches(rows, 16, seed=0)] == first
    assert sorted(y for _, batch in RowBatches(rows, 17, seed=0) for y in batch.tolist()) == list(range(33))


# -- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["batch_ensemble", "packed", "mc_dropout", "swag"])
def test_a_saved_estimator_predicts_the_same(method: str, tmp_path: Path) -> None:
    X, y = line()
    model = regressor(method=method, members=None).fit(X, y)
    loaded = MultitudeRegressor.load(model.save(tmp_path / "model.safetensors"), module=small)
    assert loaded.get_params() == model.get_params()
    for one, two in zip(model.predict_interval(X), loaded.predict_interval(X), strict=True):
        assert np.array_equal(one, two)
    assert all(np.array_equal(model.uncertainty(X)[key], loaded.uncertainty(X)[key]) for key in model.uncertainty(X))
    assert loaded.history_ == model.history_ and loaded.n_features_in_ == 3


def test_a_saved_classifier_keeps_columns_classes_and_weights(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    columns, y = table()
    frame = pd.DataFrame(columns)
    model = classifier(class_weight={1: 2.0, 3: 1.0}, folds=2).fit(frame, np.where(y > 1, 3, 1))
    loaded = MultitudeClassifier.load(
        model.save(tmp_path / "model.safetensors")
    )  # without module=: the layers are those of torch
    assert loaded.class_weight == {1: 2.0, 3: 1.0} and list(loaded.classes_) == [1, 3]
    assert loaded.classes_.dtype == model.classes_.dtype
    assert np.array_equal(loaded.predict_proba(frame), model.predict_proba(frame))
    assert np.array_equal(loaded.predict_set(frame, 0.9), model.predict_set(frame, 0.9))


def test_damaged_and_other_files_are_refused(tmp_path: Path) -> None:
    X, y = line(40)
    model = regressor(module=Wide).fit(X, y)
    path = model.save(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds a MultitudeRegressor"):
        MultitudeClassifier.load(path)
    with pytest.raises(ValueError, match="Wide"):
        MultitudeRegressor.load(path)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged or of another kind: its checksum does not match"):
        MultitudeRegressor.load(path, module=Wide)


# -- wrong arguments -------------------------------------------------------------------------------------

X, Y = line(40)
LABELS = blobs(40)[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "nope"}, "method must be one of single, deep, .*, got 'nope'"),
        ({"method": "smooth"}, "method 'smooth' smooths feature maps"),
        ({"method": "single", "members": 3}, "method 'single' has no setting 'members'"),
        ({"module": 3}, "module must be an nn.Module, or build one from (inputs, outputs), got 3"),
        ({"module": nn.Linear(3, 5)}, "module must return 2 outputs per row, got predictions of shape [8, 5]"),
        ({"module": nn.Linear(7, 2)}, "module must accept rows of 3 features"),
        ({"module": lambda inputs: None}, "module must build a network from (inputs=3, outputs=2)"),
        ({"module": lambda inputs, outputs: None}, "module must return an nn.Module, got NoneType"),
        ({"epochs": 0}, "epochs must be a whole number, 1 or more, got 0"),
        ({"batch_size": "big"}, "batch_size must be a whole number, 1 or more, got 'big'"),
        ({"lr": 0}, "lr must be above 0, got 0"),
        ({"validation": 1.5}, "validation must be above 0 and below 1, got 1.5"),
        ({"folds": 1}, "folds must be a whole number from 2 to the number of rows, 40, got 1"),
        ({"device": "abacus"}, "device must be auto, cpu, cuda or another device name of torch, got 'abacus'"),
        ({"quantiles": (0.9, 0.1)}, "quantiles must be levels in rising order"),
    ],
)
def test_fit_names_a_wrong_argument(changes: dict[str, Any], message: str) -> None:
    model = regressor(**changes)
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        model.fit(X, Y)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, None), "requires y to be passed"),
        ((X, np.where(Y > 5, np.nan, Y)), "Input y contains NaN"),
        ((np.where(X > 1, np.inf, X), Y), "Input X contains infinity"),
        ((np.full_like(X, np.nan), Y), "X must hold numbers, got NaN in all training rows"),
        ((X, Y[:-1]), "inconsistent numbers of samples"),
        ((X[:1], Y[:1]), "1 sample"),
        ((np.array([["a", "b"]] * 40), Y), "X must hold numbers or be a frame with named columns, got texts"),
        ((X, Y, -np.ones(40)), "sample_weight must be 0 or more, got -1 in row 0"),
        ((X, Y, np.zeros(40)), "Sample weights must contain at least one non-zero number"),
        ((X, Y, np.ones(3)), "sample_weight"),
    ],
)
def test_fit_names_wrong_rows(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regressor().fit(*arguments)


def test_a_classifier_requires_two_classes() -> None:
    with pytest.raises(ValueError, match="y must hold 2 or more classes, got only 'low'"):
        classifier().fit(X, ["low"] * 40)
    with pytest.raises(ValueError, match="got only 'low'"):
        classifier().fit(X, ["low"] * 20 + ["high"] * 20, [1] * 20 + [0] * 20)


def test_quantiles_require_one_target() -> None:
    with pytest.raises(ValueError, match=r"quantiles=\(0.1, 0.9\) require one target, got y with 2 columns"):
        regressor(quantiles=(0.1, 0.9)).fit(X, np.column_stack([Y, Y]))


def test_predict_names_rows_unlike_those_of_training() -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    model = regressor().fit(frame, Y)
    cases = [
        (frame[["a", "b"]], "feature names should match"),
        (frame.rename(columns={"a": "z"}), "feature names should match"),
        (frame.assign(a="red"), "column 'a' of X must hold numbers, as in training, got 'red'"),
        (frame.assign(b=np.inf), "column 'b' of X must hold finite numbers or NaN, got infinity in row 0"),
        (frame.iloc[:0], "X must have 1 or more rows, got n_samples = 0"),
        (pd.concat([frame, frame[["a"]]], axis=1), "unique column names, got 'a' twice"),
    ]
    for wrong, message in cases:
        with pytest.raises(ValueError, match=message):
            model.predict(wrong)
    with pytest.raises(ValueError, match="X has 2 features, but MultitudeRegressor is expecting 3"):
        regressor().fit(X, Y).predict(X[:, :2])
    with pytest.raises(ValueError, match="call X.collect\\(\\) first"):
        model.predict(pytest.importorskip("polars").from_pandas(frame).lazy())


def test_a_level_must_be_between_0_and_1() -> None:
    numbers, classes = regressor(epochs=1).fit(X, Y), classifier(epochs=1).fit(X, LABELS)
    for level, predict in [(0, numbers.predict_interval), (1, classes.predict_set), ("high", numbers.predict_interval)]:
        with pytest.raises(ValueError, match=f"level must be above 0 and below 1, got {level!r}"):
            predict(X, level)
