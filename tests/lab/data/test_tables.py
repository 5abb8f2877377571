"""Tables: parts, features fitted to the training part, targets, and refused files and rows."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from multitudes.lab import data as md
from multitudes.lab.data import Data
from tests.zoo.predictions import raises


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def numbered(path: Path, rows: Iterable[int], header: str = "a,y", form: str = "{row},{third}") -> Path:
    """Write a row per number, with a third of it as the target."""
    return write(path, header, *(form.format(row=row, third=row / 3, odd=row % 2) for row in rows))


def rows_of(data: Data, column: str) -> dict[str, list[float]]:
    """Return the sorted values of a feature by part."""
    index = data.columns.index(column)
    return {name: sorted(part.x[:, index].tolist()) for name, part in data.parts.items()}


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    """Write 60 rows: a row number, a size, a colour, and a kind that is 'a' for every third row."""
    rows = [f"{row},{row / 10},{('red', 'green')[row % 2]},{'a' if row % 3 == 0 else 'b'}" for row in range(60)]
    return write(tmp_path / "flowers.csv", "id,size,colour,kind", *rows)


KIND: dict[str, Any] = {"target": "kind", "read_as": {"id": "number"}}
"""Options for flowers that keep the row numbers."""


# -- parts -------------------------------------------------------------------------------------------------


def test_every_row_is_in_one_part_stratified_by_class(flowers: Path) -> None:
    data = md.load(flowers, **KIND)
    ids = rows_of(data, "id")
    assert [len(part) for part in data.parts.values()] == [39, 9, 12]
    assert sorted(chain(*ids.values())) == list(range(60))
    assert [int((part.y == 0).sum()) for part in data.parts.values()] == [13, 3, 4]
    for part in data.parts.values():
        assert torch.equal(part.y, (part.x[:, 0] % 3 != 0).long())


def test_the_split_depends_only_on_the_seed(flowers: Path) -> None:
    same = [md.load(flowers, **KIND, seed=3) for _ in range(2)]
    assert same[0].fingerprint == same[1].fingerprint
    assert rows_of(same[0], "id")["test"] != rows_of(md.load(flowers, **KIND, seed=4), "id")["test"]
    assert md.load(flowers, **KIND, seed=2**60).fingerprint != same[0].fingerprint


def test_given_parts_are_kept_and_missing_ones_are_drawn(tmp_path: Path) -> None:
    numbered(tmp_path / "train-of-it.csv", range(100))
    numbered(tmp_path / "test-of-it.csv", range(100, 130))
    data = md.load(tmp_path, target="y", validation=0.25)
    ids = rows_of(data, "a")
    assert ids["test"] == list(range(100, 130))
    assert len(ids["validation"]) == 25 and sorted(ids["train"] + ids["validation"]) == list(range(100))
    write(tmp_path / "val.csv", "a,y", "-1,0.5", "-2,0.25")
    ids = rows_of(md.load(tmp_path, target="y"), "a")
    assert ids == {"train": list(range(100)), "validation": [-2, -1], "test": list(range(100, 130))}


def test_the_name_of_a_file_overrides_that_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "test_runs").mkdir()
    numbered(tmp_path / "test_runs" / "train.csv", range(20))
    numbered(tmp_path / "test_runs" / "more.csv", range(20, 25))
    assert rows_of(md.load(tmp_path, target="y"), "a")["test"] == list(range(20, 25))


def test_a_column_can_assign_the_parts(tmp_path: Path) -> None:
    parts = ["train"] * 6 + ["dev"] * 2 + ["Test"] * 3
    path = write(tmp_path / "x.csv", "a,y,use", *(f"{row},{row / 7},{part}" for row, part in enumerate(parts)))
    data = md.load(path, target="y", split="use")
    assert data.columns == ("a",)
    assert rows_of(data, "a") == {"train": list(range(6)), "validation": [6, 7], "test": [8, 9, 10]}


def test_limit_keeps_a_stratified_sample_of_each_part(flowers: Path) -> None:
    data = md.load(flowers, target="kind", limit=9)
    assert [len(part) for part in data.parts.values()] == [9, 9, 9]
    assert int((data.train.y == 0).sum()) == 3


def test_a_fold_of_arrays_is_its_own_split(tmp_path: Path) -> None:
    fold = 1
    x, y = np.arange(60.0).reshape(20, 3), np.arange(20.0) / 3
    test = np.array([[0, 1, 2, 3], [4, 5, 6, 7]], dtype="uint16")
    train = np.array([[row for row in range(20) if row not in rows] for rows in test], dtype="uint16")
    np.savez(tmp_path / "arrays.npz", X=x, y=y, train_idx=train, test_idx=test)
    data = md.load(tmp_path / "arrays.npz", fold=fold)
    assert (data.name, data.task, data.columns) == ("arrays", "regression", ("x0", "x1", "x2"))
    np.testing.assert_array_equal(data.test.x.numpy(), x[test[fold]].astype("float32"))
    np.testing.assert_array_equal(data.test.y.numpy(), y[test[fold]].astype("float32"))
    seen = torch.cat([data.train.x[:, 0], data.validation.x[:, 0]]) / 3
    assert sorted(seen.tolist()) == train[fold].tolist() and len(data.validation) == 2


def test_a_missing_or_leaking_fold_is_refused(tmp_path: Path, flowers: Path) -> None:
    x, y = np.zeros((4, 1)), np.arange(4.0)
    np.savez(tmp_path / "a.npz", X=x, y=y, train_idx=[[0, 1, 2]], test_idx=[[2, 3]])
    with raises("fold=1 must be one of the 1 splits of a.npz, counted from 0"):
        md.load(tmp_path / "a.npz", fold=1)
    with raises("a.npz must have distinct rows below 4 in train_idx and test_idx of fold 0"):
        md.load(tmp_path / "a.npz")
    with raises(f"fold=1 needs folds= or a .npz file with its own splits, got {str(flowers)!r}"):
        md.load(flowers, target="kind", fold=1)
    np.savez(tmp_path / "b.npz", X=x)
    with pytest.raises(ValueError, match="^b.npz must hold two numeric arrays, X and y: "):
        md.load(tmp_path / "b.npz")


# -- features ----------------------------------------------------------------------------------------------


def test_features_equal_those_of_scikit_learn(flowers: Path) -> None:
    data = md.load(flowers, **KIND, numbers="standard")
    assert data.columns == ("id", "size", "colour=green", "colour=red")
    numbers = data.train.x[:, 0].long().tolist()
    colours = np.array([["red", "green"][number % 2] for number in numbers])[:, None]
    encoded = OneHotEncoder(sparse_output=False).fit_transform(colours)
    np.testing.assert_array_equal(data.train.x[:, 2:].numpy(), encoded)
    scaler = StandardScaler().fit(data.train.x.double())
    expected = torch.from_numpy(scaler.transform(data.test.x.double())).float()
    torch.testing.assert_close(data.preprocess(data.scaled(data.test.x)), expected)


def test_scales_and_categories_come_from_the_training_part(tmp_path: Path) -> None:
    numbered(tmp_path / "train.csv", range(20), "a,c,y", "{row},x{odd},{third}")
    write(tmp_path / "val.csv", "a,c,y", "1e6,x0,5")
    write(tmp_path / "test.csv", "a,c,y", "-1e6,never seen,1e9")
    data = md.load(tmp_path, target="y")
    assert data.columns == ("a", "c=x0", "c=x1")
    preprocessing = data.preprocessing
    assert preprocessing.mean[0].item() == 9.5 and preprocessing.std[0].item() == pytest.approx(np.arange(20).std())
    assert data.test.x.tolist() == [[-1e6, 0.0, 0.0]]
    assert data.target_mean == pytest.approx(9.5 / 3) and data.target_std == pytest.approx(np.arange(20).std() / 3)


def test_parquet_types_decide_how_columns_are_read(tmp_path: Path) -> None:
    table = pa.table(
        {
            "code": [str(row % 2) for row in range(40)],
            "flag": [row % 2 == 0 for row in range(40)],
            "level": pa.array([f"l{row % 2}" for row in range(40)]).dictionary_encode(),
            "count": pa.array(range(0, 80, 2), pa.int16()),
            "y": pa.array([row / 3 for row in range(40)], pa.float32()),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    data = md.load(tmp_path / "x.parquet", target="y")
    assert data.columns == ("code=0", "code=1", "flag", "level=l0", "level=l1", "count")
    for row in data.train.x:
        number = int(row[-1]) // 2
        even, odd = float(number % 2 == 0), float(number % 2)
        assert row.tolist() == [even, odd, even, even, odd, 2 * number]


def test_columns_can_be_chosen(flowers: Path, tmp_path: Path) -> None:
    assert md.load(flowers, target="kind", columns=["size"]).columns == ("size",)
    path = numbered(tmp_path / "x.csv", range(20), ",a,y", "{row},1,{third}")  # one has no name
    assert md.load(path, target="y", columns=["a"]).columns == ("a",)
    pq.write_table(pa.table({"list": [[1]] * 9, "y": [0.5] * 9}), tmp_path / "x.parquet")
    with raises("column 'list' is of kind list<element: int64>, which cannot be a feature"):
        md.load(tmp_path / "x.parquet", target="y", columns=["list"])


# -- targets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (["yes", "no"] * 50, "classification", ("no", "yes")),
        ([3, 11] * 50, "classification", ("3", "11")),  # in numeric order
        (list(range(100)), "regression", ()),
        (list(range(20)) * 5, "regression", ()),  # only five rows each
        ([0.0, 1.0] * 50, "regression", ()),
    ],
    ids=["texts", "few integers", "distinct", "rare", "two floats"],
)
def test_the_target_determines_the_task(
    tmp_path: Path, values: list[object], task: str, classes: tuple[str, ...]
) -> None:
    path = write(tmp_path / "x.csv", "a,y", *(f"{row},{value}" for row, value in enumerate(values)))
    data = md.load(path, target="y")
    assert (data.task, data.classes) == (task, classes)
    assert data.outputs == max(1, len(classes))
    for part in data.parts.values():
        for x, y in zip(part.x[:, 0].tolist(), part.y.tolist(), strict=True):
            value = values[int(x)]
            assert classes[y] == str(value) if classes else y == pytest.approx(value)


def test_the_task_can_be_overridden_and_booleans_are_classes(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(20), "y": [row > 9 for row in range(20)]}), tmp_path / "x.parquet")
    data = md.load(tmp_path / "x.parquet", target="y")
    assert data.classes == ("False", "True")
    assert torch.equal(data.train.y, (data.train.x[:, 0] > 9).long())
    path = numbered(tmp_path / "x.csv", range(40), form="{row},{odd}")
    data = md.load(path, target="y", task="regression")
    assert data.task == "regression" and data.train.y.dtype == torch.float32
    path = numbered(tmp_path / "x.csv", range(40), form="{row},{odd}.5")
    assert md.load(path, target="y", task="classification").classes == ("0.5", "1.5")


# -- CSV ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv_may_have_any_separator_and_line_end(tmp_path: Path, separator: str) -> None:
    lines = [
        separator.join(cells)
        for cells in [("a", '"b, \nc"', "y"), *((str(r), f"1.{r}", str(r / 3)) for r in range(20))]
    ]
    (tmp_path / "x.csv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert md.load(tmp_path / "x.csv", target="y", columns=["a", "b, \nc"]).columns == ("a", "b, \nc")


# -- refusals ----------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "target= must name the column of flowers.csv to predict, one of id, size, colour, kind": {"target": None},
    "target='sort' is not a column of flowers.csv, which has id, size, colour, kind": {"target": "sort"},
    "columns='weight' is not a column of flowers.csv, which has id, size, colour, kind": {"columns": ["weight"]},
    "columns must not name the target 'kind', got ['kind']": {"columns": ["kind"]},
    "columns must be a list of names, got 'size'": {"columns": "size"},
    "size= does not apply to flowers.csv, which holds rows: leave it out": {"size": 8},
    "task='regression' needs numbers to predict, but 'kind' holds texts like 'a'": {"task": "regression"},
    "task must be None, classification or regression, got 'ranking'": {"task": "ranking"},
    "validation=0.5 and test=0.5 must sum to less than 1": {"validation": 0.5, "test": 0.5},
    "test must be above 0 and below 1, got 0": {"test": 0},
    "split='size' must hold train, validation or test, got a column of kind number": {"split": "size"},
    "split='colour' must hold train, validation or test, got 'red' at flowers.csv line 2": {"split": "colour"},
}
WORDS = ["a,y", *(f"n{row},{row / 3}" for row in range(600))]
CSV = {
    "x.csv must have distinct column names in its first line, got 'a' twice": ["a,a,y", "1,2,3"],
    "x.csv holds no rows": ["a,y"],
    "x.csv: 2 rows are too few to take test and validation from": ["a,y", "1,0.5", "2,0.75"],
    "x.csv has no usable row: all inputs are missing": ["a,y", ",0.5", ",0.75"],
    "target='y' must hold 2 or more classes, got only same": ["a,y", *(f"{row},same" for row in range(20))],
    "columns= must name the features, since all columns were left out ('a': all values are distinct)": WORDS,
}


@pytest.mark.parametrize("sentence", OPTIONS)
def test_wrong_options_are_refused(sentence: str, flowers: Path) -> None:
    with raises(sentence):
        md.load(flowers, **({"target": "kind"} | OPTIONS[sentence]))


@pytest.mark.parametrize("sentence", CSV)
def test_useless_tables_are_refused(sentence: str, tmp_path: Path) -> None:
    with raises(sentence):
        md.load(write(tmp_path / "x.csv", *CSV[sentence]), target="y", skip_bad="no usable row" in sentence)


def test_csv_files_with_different_columns_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "x.csv", "a,y", "1,2")
    write(tmp_path / "z.csv", "a,b", "1,2")
    with raises("z.csv must have the columns of the previous file, a, y, got a, b"):
        md.load(tmp_path, target="y")


# -- bad rows ----------------------------------------------------------------------------------------------


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    """Write 100 rows with faults: missing, invalid and infinite values, and a row that is too short."""
    rows = [f"{row},{'rg'[row % 2]},{row / 3}" for row in range(100)]
    rows[3], rows[5], rows[8] = ",r,1.5", "oops,r,1.5", "inf,r,1.5"
    rows[11], rows[12], rows[20] = "11,NA,1.5", "12,r,?", "20,r"
    return write(tmp_path / "spoilt.csv", "a,c,y", *rows)


def test_bad_rows_raise_an_error_with_line_and_reason(spoilt: Path) -> None:
    rows = "spoilt.csv line 14: 'y' is missing or not finite; spoilt.csv line 22: the number of cells is not 3"
    with raises(f"spoilt.csv has 2 bad rows: {rows}. skip_bad=True leaves them out"):
        md.load(spoilt, target="y")
    with pytest.raises(ValueError, match="has 3 bad rows: spoilt.csv line 13: all inputs are missing; "):
        md.load(spoilt, target="y", columns=["c"])

    data = md.load(spoilt, target="y", skip_bad=True)
    assert data.dropped == {"the number of cells is not 3": 1, "'y' is missing or not finite": 1}
    assert sum(map(len, data.parts.values())) == 98


# -- out-of-distribution rows ------------------------------------------------------------------------------


def test_ood_rows_are_encoded_as_in_training(tmp_path: Path, flowers: Path) -> None:
    other = write(tmp_path / "far.csv", "colour,id,size", "red,1000,5", "blue,2000,6")
    prepared = md.save(md.load(flowers, **KIND), tmp_path / "flowers.mtdata")
    for data in (md.load(flowers, **KIND, ood=other), md.load(prepared, ood=other)):
        assert data.ood["far"].tolist() == [[1000, 5, 0, 1], [2000, 6, 0, 0]]
    with raises("far.csv must have the column 'size', as in training; it has colour, id"):
        md.load(flowers, **KIND, ood=write(other, "colour,id", "red,1"))
    with raises("column 'id' of far.csv must hold numbers, as in training, got 'big'"):
        md.load(flowers, **KIND, ood=write(other, "colour,id,size", "red,big,1", "red,small,1"))
    with pytest.raises(ValueError, match="^ood 'digits' must hold inputs like those of flowers, got Data\\('digits'"):
        md.load(flowers, **KIND, ood="digits")
