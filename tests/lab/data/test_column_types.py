"""Types of table columns: numbers, dates and categories in many notations; ids are left out."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.impute import SimpleImputer

from multitudes.lab import data as md
from multitudes.lab.data import Data
from multitudes.lab.data.tables.column_types import ColumnReading, read_columns
from multitudes.lab.data.tables.columns import Column
from multitudes.lab.data.tables.features import DATE_PARTS, Category, Date, Number, date_parts, feature_of
from multitudes.lab.data.tables.numbers_and_dates import date_order, decimal_marks, read_date, read_number
from tests.zoo.predictions import raises

ROWS = 60


def written(path: Path, separator: str = ",", **columns: Callable[[int], object]) -> Path:
    """Write a CSV file of columns, each a function of the row, and the target `y`, a third of the row."""
    columns = {**columns, "y": lambda row: row / 3}
    lines = [separator.join(columns)]
    lines += [separator.join(str(column(row)) for column in columns.values()) for row in range(ROWS)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def reading(data: Data, name: str) -> ColumnReading:
    return next(each for each in data.reading if each.name == name)


def values(data: Data, feature: str) -> dict[int, float]:
    """Return a feature by row; the target identifies the row."""
    index = data.columns.index(feature)
    return {
        round(3 * y): x
        for part in data.parts.values()
        for x, y in zip(part.x[:, index].tolist(), part.y.tolist(), strict=True)
    }


# -- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mark", "number"),
    [
        ("1.5", ".", 1.5),
        ("1,234,567.5", ".", 1234567.5),
        ("1'234", ".", 1234),
        ("1,5", ",", 1.5),
        ("1\u00a0234,5", ",", 1234.5),
        ("1.234", ",", 1234),
        ("2.5", ",", 2.5),
        ("$1,200.50", ".", 1200.5),
        ("3,5 %", ",", 3.5),
        ("1,23,4", ".", math.nan),
        ("1_000", ".", math.nan),
        (".", ".", math.nan),
    ],
)
def test_a_number_is_read_with_its_decimal_mark(text: str, mark: str, number: float) -> None:
    assert read_number(text, mark) == pytest.approx(number, nan_ok=True)


@pytest.mark.parametrize(
    ("columns", "separator", "marks"),
    [
        ([["1,5", "2"]], ";", [","]),
        ([["1,234", "12,345"]], ",", ["."]),  # in quotes: thousands
        ([["1,234", "12,345"]], ";", [","]),
        ([["1.234", "2.345"]], ";", ["."]),
        ([["1.234", "2.345"], ["0,5", "0,25"]], ";", [",", ","]),  # from the other column
        ([["1.234", "2.5"], ["0,5", "0,25"]], ";", [".", ","]),
        ([["red, big", "blue"]], ";", ["."]),
    ],
)
def test_the_decimal_mark_follows_from_the_cells(columns: Any, separator: str, marks: list[str]) -> None:
    assert decimal_marks(columns, separator) == marks


def test_decimal_commas_are_read_in_features_targets_and_new_rows(tmp_path: Path) -> None:
    def comma(number: float) -> str:
        return f"{number:,.2f}".translate(str.maketrans(",.", ".,"))

    path = written(tmp_path / "x.csv", ";", price=lambda row: comma(1000.25 * row), a=lambda row: row % 7 + 0.5)
    path.write_text(path.read_text().replace(".5;", ",5;"))
    data = md.load(path, target="y")
    assert data.columns == ("price", "a") and reading(data, "price").note == "decimal commas"
    assert values(data, "price") == {row: pytest.approx(1000.25 * row) for row in range(ROWS)}
    far = tmp_path / "far.csv"
    far.write_text("price;a\n1.234;0,5\n")  # alone, it would be read as 1.234
    assert md.load(path, target="y", ood=far).ood["far"].tolist() == [[1234.0, 0.5]]
    points = written(tmp_path / "points.csv", a=lambda row: row % 7 + 0.25, b=lambda row: row % 5)
    far.write_text("a;b\n1,25;2\n")  # new rows may have another decimal mark
    assert md.load(points, target="y", ood=far).ood["far"].tolist() == [[1.25, 2.0]]


def test_a_mixed_column_is_a_category_unless_read_as_numbers(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", size=lambda row: ("S", "38", "40", "42")[row % 4], b=lambda row: row % 5)
    data = md.load(path, target="y")
    assert reading(data, "size").read_as == "category"
    assert reading(data, "size").note == "3 of 4 distinct values are numbers: maybe to be read as number"
    as_number = md.load(path, target="y", read_as={"size": "number"})
    assert as_number.columns[:2] == ("size", "size missing")
    assert {values(as_number, "size missing")[row] for row in range(0, ROWS, 4)} == {1.0}


def test_large_numbers_with_small_differences_keep_their_differences(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", time=lambda row: 1_600_000_000 + row % 20, b=lambda row: row % 5)
    data = md.load(path, target="y")
    start = min(values(data, "time").values())
    assert values(data, "time") == {row: start + row % 20 for row in range(ROWS)}


@pytest.mark.parametrize(
    ("value", "note"),
    [
        (lambda row: f"{row * 37 % 50:03}", "leading zeros: maybe codes, to be read as category"),
        (lambda row: f"202{row % 3}12{row % 28 + 1:02}", "maybe dates, to be read as date"),
        (lambda row: 1_600_000_000 + row * 40_009 % 1000, "maybe dates, to be read as date"),
    ],
    ids=["codes", "days", "seconds"],
)
def test_integers_that_may_be_codes_or_dates_get_a_note(tmp_path: Path, value: Any, note: str) -> None:
    data = md.load(written(tmp_path / "x.csv", a=value, b=lambda row: row % 5), target="y")
    assert reading(data, "a").read_as == "number" and note in reading(data, "a").note


@pytest.mark.parametrize(("name", "encoding"), [("x.tsv", "utf-8"), ("x.csv", "utf-16")])
def test_tsv_and_utf_16_files_are_read(tmp_path: Path, name: str, encoding: str) -> None:
    path = written(tmp_path / name, "\t", ä=lambda row: row % 7, b=lambda row: row % 5)
    path.write_text(path.read_text(encoding="utf-8"), encoding=encoding)
    assert md.load(path, target="y").columns == ("ä", "b")


# -- missing values ----------------------------------------------------------------------------------------


def test_missing_numbers_are_imputed_like_in_scikit_learn(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", a=lambda row: "" if row % 6 == 0 else row * row, b=lambda row: row % 5)
    data = md.load(path, target="y")
    assert data.columns == ("a", "a missing", "b")
    rows = [[math.nan if row % 6 == 0 else row * row] for row in (data.train.y * 3).round().int().tolist()]
    imputer = SimpleImputer(strategy="median", add_indicator=True)
    np.testing.assert_allclose(data.train.x[:, :2].numpy(), imputer.fit_transform(rows))
    assert reading(data, "a").missing == 10
    far = tmp_path / "far.csv"
    far.write_text("a,b\n1,\n,2\n")  # b was never missing in training
    x = md.load(path, target="y", ood=far).ood["far"]
    np.testing.assert_allclose(x[:, :2].numpy(), imputer.transform([[1.0], [math.nan]]))
    assert x[0, 2] == np.median((data.train.y * 3).round() % 5)


def test_a_missing_text_is_a_category_of_its_own(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", c=lambda row: ("red", "NA", "blue")[row % 3], b=lambda row: row % 5)
    data = md.load(path, target="y")
    assert data.columns == ("c=blue", "c=red", "c missing", "b")
    assert bool((data.train.x[:, :3].sum(1) == 1).all())
    assert values(data, "c missing") == {row: float(row % 3 == 1) for row in range(ROWS)}


# -- dates -------------------------------------------------------------------------------------------------


def test_the_parts_of_dates_are_those_of_pandas() -> None:
    times = pd.date_range("1599-12-28", "2401-03-02", freq="31h17min", unit="s")
    found = date_parts(torch.from_numpy(times.astype("int64").to_numpy() / 86400))
    theirs = {"year": times.year, "month": times.month, "day": times.day, "weekday": times.day_of_week}
    for part, want in theirs.items():
        np.testing.assert_array_equal(found[part].numpy(), want.to_numpy())
    np.testing.assert_allclose(found["hour"].numpy(), times.hour + times.minute / 60 + times.second / 3600)


@pytest.mark.parametrize(
    ("text", "order", "want"),
    [
        ("2020-02-29", "ymd", "2020-02-29"),
        ("2020-02-29T18:30:15.5Z", "ymd", "2020-02-29 18:30:15.5"),
        ("2020-02-29 01:00+02:00", "ymd", "2020-02-28 23:00"),
        ("29.2.2020 7:05", "dmy", "2020-02-29 07:05"),
        ("2/29/2020 7:05 PM", "mdy", "2020-02-29 19:05"),
        ("12/31/99", "mdy", "1999-12-31"),
        ("3 March 2021", "ymd", "2021-03-03"),
        ("Mar 3rd, 2021", "ymd", "2021-03-03"),
        ("2021-03", "ymd", "2021-03-01"),
        ("1600000000", "ymd", "2020-09-13 12:26:40"),
        ("1600000000500", "ymd", "2020-09-13 12:26:40.5"),
    ],
)
def test_a_date_is_parsed(text: str, order: str, want: str) -> None:
    assert read_date(text, order) == pytest.approx(pd.Timestamp(want).timestamp() / 86400, abs=1e-9)


@pytest.mark.parametrize("text", ["2021-02-29", "31.4.2020", "2020-13-01", "2020-01-01 25:00", "1.2.10", "soon", "12"])
def test_an_invalid_date_is_nan(text: str) -> None:
    assert all(math.isnan(read_date(text, order)) for order in ("ymd", "dmy", "mdy"))


def test_the_order_of_day_and_month_follows_from_the_whole_column() -> None:
    assert date_order(["01/02/2020", "13/02/2020", None]) == "dmy"
    assert date_order(["01/02/2020", "02/13/2020"]) == "mdy"
    assert date_order(["1.2.2020"]) == "dmy"
    assert date_order(["01/02/2020", "03/04/2020"]) == "ambiguous"
    assert date_order(["31/12/2020", "12/31/2020"]) is None
    assert date_order(["1.2.10", "1.3.0"]) is None and date_order([None]) is None


def day(row: int) -> datetime.datetime:
    return datetime.datetime(2019, 11, 1, 6) + datetime.timedelta(days=5 * row, hours=row % 3)


@pytest.mark.parametrize("form", ["%Y-%m-%d %H:%M", "%d.%m.%Y %H:%M:%S", "%m/%d/%Y %I:%M %p", "parquet"])
def test_dates_become_their_parts(tmp_path: Path, form: str) -> None:
    if form == "parquet":
        table = {"when": [day(row) for row in range(ROWS)], "y": [row / 3 for row in range(ROWS)]}
        pq.write_table(pa.table(table), tmp_path / "x.parquet")
        data = md.load(tmp_path / "x.parquet", target="y")
    else:
        data = md.load(written(tmp_path / "x.csv", when=lambda row: day(row).strftime(form)), target="y")
    assert data.columns == tuple(f"when {part}" for part in DATE_PARTS)
    assert (reading(data, "when").read_as, reading(data, "when").values) == ("date", ROWS)
    assert values(data, "when month") == {row: day(row).month for row in range(ROWS)}
    assert values(data, "when hour") == {row: 6 + row % 3 for row in range(ROWS)}
    days = values(data, "when days")
    assert days[9] - days[3] == pytest.approx(30)


def test_ambiguous_dates_are_left_out_unless_the_order_is_given(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", d=lambda row: f"{row % 12 + 1}/{row % 7 + 1}/2020", b=lambda row: row % 5)
    data = md.load(path, target="y")
    assert data.columns == ("b",)
    assert reading(data, "d").dropped == "the order of day and month is ambiguous in '1/1/2020': read it as dmy or mdy"
    with raises("read_as of 'd' must be dmy or mdy, got 'date': the order of day and month is ambiguous"):
        md.load(path, target="y", read_as={"d": "date"})
    for order, part in (("dmy", "day"), ("mdy", "month")):
        data = md.load(path, target="y", read_as={"d": order})
        assert values(data, f"d {part}") == {row: row % 12 + 1 for row in range(ROWS)}


def test_parquet_columns_of_times_are_read(tmp_path: Path) -> None:
    times = [day(row) if row % 9 else None for row in range(ROWS)]
    table = {
        "nanoseconds": pa.array(times, pa.timestamp("ns")),
        "elsewhere": pa.array(times, pa.timestamp("ms", tz="Europe/Berlin")),
        "date": pa.array([time and time.date() for time in times], pa.date32()),
        "clock": pa.array([time and time.time() for time in times], pa.time32("s")),
        "length": pa.array([datetime.timedelta(minutes=row % 7) for row in range(ROWS)], pa.duration("us")),
        "list": [[row] for row in range(ROWS)],
        "y": [row / 3 for row in range(ROWS)],
    }
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    data = md.load(tmp_path / "x.parquet", target="y")
    for name in ("nanoseconds", "elsewhere"):
        found = values(data, f"{name} hour")
        assert all(found[row] == 6 + row % 3 for row in range(ROWS) if row % 9)
        assert values(data, f"{name} missing") == {row: float(row % 9 == 0) for row in range(ROWS)}
    assert "date hour" not in data.columns
    assert all(values(data, "clock")[row] == 6 + row % 3 for row in range(ROWS) if row % 9)
    assert values(data, "length")[5] == pytest.approx(5 / 60)
    assert reading(data, "list").dropped == "unsupported type"


# -- categories, ids, constants ----------------------------------------------------------------------------


def test_rare_categories_are_merged(tmp_path: Path) -> None:
    path = written(
        tmp_path / "x.csv", c=lambda row: "abc"[row % 3] if row < 45 else f"rare {row}", b=lambda row: row % 5
    )
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[1:46] * 2, *lines[46:], *(f"r{row},1,{row}" for row in range(30))]))
    data = md.load(path, target="y")
    assert data.columns == ("c=a", "c=b", "c=c", "c other", "b")
    assert reading(data, "c").note == "many categories: the 3 most frequent are kept, the others are merged"
    far = tmp_path / "far.csv"
    far.write_text("c,b\nb,1\nnew,1\n")
    assert md.load(path, target="y", ood=far).ood["far"].tolist() == [[0, 1, 0, 0, 1], [0, 0, 0, 1, 1]]


DROPPED: dict[str, tuple[Callable[[int], object], str, str]] = {
    "row numbers": (lambda row: row + 17, "id", "consecutive integers, probably row numbers"),
    "user_id": (lambda row: row * 7919 % 1009, "id", "all values are distinct, and the name suggests an id"),
    "token": (lambda row: f"x-{row * 7919 % 1009:x}", "id", "all values are distinct"),
    "remark": (lambda row: f"text {row // 2}", "text", "30 distinct texts, none in at least 10 training rows"),
    "constant": (lambda row: 7.5, "constant", "constant in the training rows"),
    "one word": (lambda row: "same", "constant", "constant in the training rows"),
    "empty": (lambda row: "", "empty", "no value in the training rows"),
    "": (lambda row: row % 9, "id", "no name, probably row numbers"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_useless_columns_are_left_out_with_a_reason(name: str, tmp_path: Path) -> None:
    value, read_as, reason = DROPPED[name]
    data = md.load(written(tmp_path / "x.csv", **{name: value, "b": lambda row: row % 5}), target="y")
    assert data.columns == ("b",)
    assert (reading(data, name).read_as, reading(data, name).dropped) == (read_as, reason)


def test_distinct_integers_are_kept_with_a_note(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", people=lambda row: row * 7919 % 1009, b=lambda row: row % 5)
    data = md.load(path, target="y")
    assert data.columns == ("people", "b")
    assert reading(data, "people").note == "all values are distinct: maybe an id"


def test_a_column_given_by_name_is_not_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", id=lambda row: row, c=lambda row: 1, b=lambda row: row % 5)
    assert md.load(path, target="y", columns=["id", "c"]).columns == ("id", "c")
    assert md.load(path, target="y", read_as={"id": "number"}).columns == ("id", "b")
    assert md.load(path, target="y", drop=["b"]).columns == ("id",)  # row numbers are the last resort
    assert md.load(path, target="y", read_as={"b": "category"}).columns == tuple(f"b={value}" for value in range(5))
    data = md.load(path, target="y", read_as={"b": "text"}, columns=["b", "id"])
    assert data.columns == ("id",) and reading(data, "b").dropped == "free text cannot be a feature"
    assert reading(data, "c").dropped == "not among the selected columns"


OPTIONS: dict[str, dict[str, Any]] = {
    "drop='size' is not a column of x.csv, which has a, b, y": {"drop": ["size"]},
    "read_as='size' is not a column of x.csv, which has a, b, y": {"read_as": {"size": "date"}},
    "read_as of 'a' must be number, date, category, text, dmy or mdy, got 'float'": {"read_as": {"a": "float"}},
    "read_as of 'b' cannot be date: its values look like '0'": {"read_as": {"b": "date"}},
    "read_as of 'a' cannot be number: its values look like 'red'": {"read_as": {"a": "number"}},
    "read_as of 'a' must be left out, since drop= leaves this column out": {"drop": ["a"], "read_as": {"a": "text"}},
    "drop must not name the target 'y', got ['y']": {"drop": ["y"]},
    "columns must leave a feature beside the target 'y' in x.csv, got none": {"drop": ["a", "b"]},
    "drop must be a list of names, got 'a'": {"drop": "a"},
}


@pytest.mark.parametrize("sentence", OPTIONS)
def test_contradictory_options_are_refused(sentence: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", a=lambda row: ("red", "blue")[row % 2], b=lambda row: row % 5)
    with raises(sentence):
        md.load(path, target="y", **OPTIONS[sentence])


# -- what is kept ------------------------------------------------------------------------------------------


def test_a_prepared_file_keeps_features_and_readings(tmp_path: Path) -> None:
    columns = {"d": lambda row: day(row).date(), "c": lambda row: "ab"[row % 2], "a": lambda row: row % 7 or ""}
    data = md.load(written(tmp_path / "x.csv", **columns), target="y")
    back = md.read(md.save(data, tmp_path / "x.mtdata"))
    assert (back.features, back.reading) == (data.features, data.reading)
    assert [type(feature) for feature in back.features] == [Date, Category, Number]
    for feature in (Number("a", 1.5, True, ",", 7.0), Date("d", ("year", "days"), "dmy", 3.0), Category("c", ("é",))):
        assert feature_of(feature.plain()) == feature


@pytest.mark.parametrize(
    "plain",
    [
        {"as": "code", "column": "a"},
        {"as": "number", "column": "a", "fill": "1"},
        {"as": "number", "column": None},
        {"as": "category", "column": "a", "known": [1]},
        ["number"],
    ],
)
def test_an_invalid_feature_is_refused(plain: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        feature_of(plain)


def test_categories_come_from_the_training_rows() -> None:
    column = Column("text", ["a", "b"] * 10 + ["c"] * 10)
    (feature,), _ = read_columns({"c": column}, torch.arange(20))
    assert feature.names == ("c=a", "c=b")
