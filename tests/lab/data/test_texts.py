"""Texts as token ids: read, prepared, batched, and encoded again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from multitudes.lab import data as datasets
from multitudes.lab.data import Loader, load
from multitudes.lab.data.sources import open_source
from multitudes.lab.data.tables.features import Text, feature_of
from multitudes.lab.data.texts import TextEncoder
from tests.zoo.predictions import raises
from tests.zoo.tiny_text import reviews, text_model, tokenizer, vit_model, write_csv


def says(part: str) -> Any:
    """Expect a ValueError that contains this text."""
    return pytest.raises(ValueError, match=re.escape(part))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("texts")
    text_model(place / "bert")
    text_model(place / "gpt2", "gpt2")
    write_csv(place / "reviews.csv", reviews(120))
    return place


def read(folder: Path, name: str = "reviews.csv", **options: Any) -> datasets.Data:
    return load(folder / name, **{"target": "label", "tokenizer": str(folder / "bert"), "max_length": 24} | options)


def test_tokens_equal_those_of_transformers(folder: Path) -> None:
    data = read(folder)
    fast = tokenizer(folder / "again")
    texts = [file.decode() for file in data.test.files]
    assert len(texts) == 24 and set(texts) <= {text for text, _ in reviews(120)}
    for tokens, text in zip(data.test.x, texts, strict=True):
        want = fast(text, truncation=True, max_length=24)["input_ids"]
        assert tokens[tokens >= 0].tolist() == want
        assert tokens[len(want) :].eq(-1).all()
    assert data.kind.name == "text" and data.shape == (24,) and data.train.x.dtype == torch.int32
    assert repr(data) == "Data('reviews': 84 + 12 + 24 texts of [24], 2 classes)"
    assert [data.classes[label] for label in data.test.y.tolist()] == [dict(reviews(120))[text] for text in texts]


def test_a_batch_is_cut_to_its_longest_text(folder: Path) -> None:
    data = read(folder)
    for x, _ in Loader(data.train, data, batch_size=10, shuffle=False):
        longest = int((x >= 0).sum(1).max())
        assert x.dtype == torch.int32 and longest <= x.shape[1] <= max(8, longest + 7)


def test_a_prepared_file_contains_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    data = read(folder)
    datasets.save(data, tmp_path / "reviews.mtdata")
    again = datasets.read(tmp_path / "reviews.mtdata")
    assert again.fingerprint == data.fingerprint and again.test.files == data.test.files
    assert again.train.files == ()  # pages show only test texts
    source = open_source(write_csv(tmp_path / "new.csv", [["The FILM was great!", "x"]]))
    encoded = again.encoder(again.encoder.columns(source), torch.tensor([0]), source.where)
    want = tokenizer(folder / "again")("The FILM was great!")["input_ids"]
    assert encoded.x[0][encoded.x[0] >= 0].tolist() == want


def test_long_texts_are_truncated_and_counted(folder: Path, tmp_path: Path) -> None:
    book = write_csv(tmp_path / "long.csv", [*reviews(40), ("word " * 60_000, "good")])
    assert "1 of 41 texts are truncated to 24 tokens" in read(folder, book).reading[0].note
    data = read(folder, max_length=6)
    long = sum(len(text.split()) + 2 > 6 for text, _ in reviews(120))
    note = next(each.note for each in data.reading if each.name == "review")
    assert f"{long} of 120 texts are truncated to 6 tokens" in note
    assert data.shape == (6,) and bool((data.train.x[:, 5] == 3).any())  # with the end token, as in transformers


def test_texts_may_be_empty_odd_or_repeated(folder: Path, tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    texts = ["", "the film was great", "\u00e9\u4e2d\U0001f600 \x00", "5", "a" * 300, "x\ny"]
    table = arrow.table({"text": texts * 4, "label": ["a", "b", "a", "b", "a", "b"] * 4})
    parquet.write_table(table, tmp_path / "odd.parquet")
    data = load(tmp_path / "odd.parquet", tokenizer=str(folder / "bert"), max_length=8)
    every = torch.cat([part.x for part in data.parts.values()])
    assert len(every) == 24 and bool((every >= 0).any(1).all())
    assert data.reading[0].note.startswith("6 repeated texts")
    plain = load(tmp_path / "odd.parquet", tokenizer=str(folder / "gpt2"), max_length=8)
    every = torch.cat([part.x for part in plain.parts.values()])
    assert bool((every >= 0).any(1).all())  # a text without tokens gets the end token


def test_missing_texts_raise_or_are_skipped(folder: Path, tmp_path: Path) -> None:
    rows = [*reviews(40), ("", "good"), ("NA", "bad")]
    write_csv(tmp_path / "holes.csv", rows)
    with says("holes.csv has 2 bad rows: holes.csv line 42: 'review' is missing"):
        read(folder, tmp_path / "holes.csv")
    assert read(folder, tmp_path / "holes.csv", skip_bad=True).dropped == {"'review' is missing": 2}


def test_test_texts_in_the_training_part_are_counted(folder: Path) -> None:
    data = read(folder)
    known = set(data.train.files)
    count = sum(file in known for file in data.test.files)
    assert count and f"{count} of 24 test texts also occur in the training part" in data.reading[0].note


def test_a_column_of_texts_beside_images_can_be_chosen(folder: Path, tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    images = [{"bytes": b"", "path": None}] * 60
    texts, labels = zip(*reviews(60), strict=True)
    parquet.write_table(arrow.table({"image": images, "caption": texts, "label": labels}), tmp_path / "both.parquet")
    assert read(folder, tmp_path / "both.parquet", text="caption").kind.name == "text"
    with raises("tokenizer= does not apply to both.parquet, which holds images: leave it out"):
        read(folder, tmp_path / "both.parquet")


def test_the_column_of_texts_is_found_or_must_be_named(folder: Path, tmp_path: Path) -> None:
    rows = [(text, f"title {index}", label, index) for index, (text, label) in enumerate(reviews(60))]
    path = write_csv(tmp_path / "more.csv", rows, ("body", "title", "label", "stars"))
    with raises("text= must name the column of more.csv that holds the texts, one of body, title"):
        read(folder, path)
    assert read(folder, path, text="body").encoder.features[0].column == "body"
    with raises("text='stars' must be a column of texts, got one of kind number"):
        read(folder, path, text="stars")
    with raises("text='nothing' is not a column of more.csv, which has body, title, label, stars"):
        read(folder, path, text="nothing")
    with raises("text must not name the target 'label'"):
        read(folder, path, text="label")
    with says("tokenizer= must name the tokenizer for the texts in 'body'"):
        load(path, target="label", text="body")
    table = load(path, target="label")  # a table without a tokenizer
    assert table.kind.name == "table" and "body" not in table.columns
    numbers = write_csv(tmp_path / "numbers.csv", [(index, index % 2) for index in range(60)], ("a", "label"))
    with raises("text= must be a column of texts, and numbers.csv has none: its columns are a, label"):
        read(folder, numbers)


def test_bad_tokenizers_are_refused(folder: Path, tmp_path: Path) -> None:
    with raises("tokenizer './nowhere' does not exist: it must be a folder, or a name in Hugging Face's local cache"):
        read(folder, tokenizer="./nowhere")
    with says("local cache; `hf download nobody/none` fetches it"):
        read(folder, tokenizer="nobody/none")
    vit_model(tmp_path / "vit")
    with says("has no tokenizer.json"):
        read(folder, tokenizer=str(tmp_path / "vit"))
    with raises("max_length must be above 2, the number of special tokens, got 2"):
        read(folder, max_length=2)
    with raises("longest of a text must be int, got '5'"):
        feature_of({"as": "text", "column": "a", "tokenizer": "", "longest": "5"})
    with says("the tokenizer of 'a' cannot be read"):
        TextEncoder(Text("a", json.dumps({"model": "none"}), 4)).tokens(["b"])


def test_out_of_distribution_texts_are_encoded_as_in_training(folder: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "other.csv", [("something else entirely", "x")] * 5)
    data = read(folder, ood=tmp_path / "other.csv")
    assert data.ood["other"].shape == (5, 24)
    with raises("wrong.csv must have the column 'review', as in training; it has words"):
        read(folder, ood=write_csv(tmp_path / "wrong.csv", [["a"]], ["words"]))


def test_texts_support_regression(folder: Path, tmp_path: Path) -> None:
    rows = [(text, len(text) + 0.5) for text, _ in reviews(60)]
    data = read(folder, write_csv(tmp_path / "lengths.csv", rows), task="regression")
    assert data.task == "regression" and data.test.y.dtype == torch.float32
