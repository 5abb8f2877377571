"""Large CSV files, read by Arrow, give the same columns as small ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from multitudes.lab.data import load
from multitudes.lab.data.sources import open_source
from multitudes.lab.data.tables import quick_csv
from multitudes.lab.data.tables.quick_csv import quick_columns

PLAIN = (
    "a, b,c,day,code\n1.5,3,red,2020-01-02,007\n-2e3,4, blue ,2020-02-03,012\n.25,,n/a,2021-03-04,003\nNA,+6,red,,9\n"
)
NUMBERS = "a,b\n" + "\n".join(f"{value:.17g},{index}" for index, value in enumerate(np.geomspace(1e-30, 1e30, 50)))


@pytest.fixture(autouse=True)
def every_file_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_csv, "LARGE", 0)


@pytest.mark.parametrize("text", [PLAIN, NUMBERS, PLAIN.replace("\n", "\r\n"), "\ufeff" + PLAIN, PLAIN.rstrip("\n")])
def test_columns_equal_those_read_cell_by_cell(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text, newline="")
    found = open_source(path)
    assert quick_columns(path) is not None
    monkeypatch.setattr(quick_csv, "LARGE", 1 << 40)
    wanted = open_source(path)
    assert list(found.columns) == list(wanted.columns) and found.origins == wanted.origins
    for name, column in wanted.columns.items():
        other = found.columns[name]
        assert (other.kind, other.whole) == (column.kind, column.whole)
        if column.numeric:
            assert torch.equal(other.values.nan_to_num(), column.values.nan_to_num())
            assert torch.equal(other.values.isnan(), column.values.isnan())
            assert torch.equal(other.empty(), column.empty())
        else:
            assert other.texts() == column.texts()
    assert [found.place(row) for row in range(len(found))] == [wanted.place(row) for row in range(len(wanted))]


@pytest.mark.parametrize(
    "text",
    [
        "a;b\n1;2\n",  # another separator
        "a,b\n1,2\n3\n",  # a row with too few cells
        "a,b\n1,2\n\n3,4\n",  # an empty line
        'a,b\n"1\n2",3\n',  # a newline in a cell
        "a,a\n1,2\n",  # a repeated name
        'a,b\n"1,5",2\n"2,5",3\n',  # decimal commas
    ],
)
def test_unusual_files_are_left_to_the_other_reader(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    assert quick_columns(tmp_path / "a.csv") is None


def test_latin_1_is_refused_with_its_byte(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("a,b\n1,größe\n".encode("latin-1"))
    with pytest.raises(ValueError, match="a.csv must be UTF-8, but byte"):
        load(tmp_path / "a.csv", target="b")
