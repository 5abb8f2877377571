"""The page of a study of texts: the most uncertain ones, escaped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from multitudes.lab.report.input_examples import shortened, uncertain_texts
from multitudes.lab.report.page import sections
from multitudes.lab.report.run_results import Results, read_results
from multitudes.lab.study.run.worker import run as run_job
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec
from tests.zoo.tiny_text import reviews, text_model, write_csv

NASTY = "<script>alert('x')</script> <b>the film</b> & \"more\""


def finished(folder: Path, rows: list[tuple[str, object]], task: str | None = None) -> Path:
    text_model(folder / "bert")
    data = write_csv(folder / "reviews.csv", rows)
    methods = {"single": {}, "deep": {"members": 3}}
    spec = Spec.of(
        data=data, target="label", model=f"hf:{folder / 'bert'}", methods=methods, epochs=1, device="cpu", task=task
    )
    run = prepare(spec, folder / "run")
    for job in run.jobs:
        run_job(job.directory, "cpu")
    return run.directory


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [(f"{NASTY} {index}" if index % 4 == 0 else text, label) for index, (text, label) in enumerate(reviews(80))]
    return finished(tmp_path_factory.mktemp("classes"), rows)


@pytest.fixture(scope="module")
def results(classes: Path) -> Results:
    return read_results(classes)


def test_the_most_uncertain_texts_have_all_predictions(results: Results) -> None:
    data = uncertain_texts(results)
    probs = {name: results.of(name)[0].tensors("probs", "members", "target") for name in results.methods}
    arrays = {name: own for name, own in probs.items() if own is not None}
    entropy = torch.stack([-(own[0] * own[0].log()).sum(1) for own in arrays.values()]).mean(0)
    rows = data["rows"]
    assert data["best"] == "deep" and len(rows) == 10
    shown = [row[0] for row in rows]
    assert len(set(shown)) == 10
    own_entropy = dict(zip(results.texts, entropy.tolist(), strict=True))
    assert [row[2] for row in rows] == pytest.approx(sorted(own_entropy.values(), reverse=True)[:10], abs=1e-6)
    for text, truth, unsure, information, votes, cells in rows:
        assert unsure == pytest.approx(own_entropy[text], abs=1e-6)
        at = results.texts.index(text)
        assert truth == results.classes[int(arrays["single"][2][at])]
        members = arrays["deep"][1][:, at].double()
        mean = members.mean(0)
        want = -(mean * mean.log()).sum() + (members * members.log()).sum(1).mean()
        assert information == pytest.approx(float(want), abs=1e-6)
        assert sum(int(vote.split()[0]) for vote in votes.split(", ")) == 3
        for method, (label, confidence, right) in zip(data["columns"], cells, strict=True):
            own = arrays[results.methods[method]][0][at]
            assert label == results.classes[int(own.argmax())] and right == (label == truth)
            assert confidence == pytest.approx(100 * float(own.max()))


def test_texts_are_escaped(results: Results) -> None:
    nasty = replace(results, texts=[f"{NASTY} {index}" for index in range(len(results.texts))])
    html = next(str(part.html) for part in sections(nasty) if part.name == "texts")
    assert html.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &lt;b&gt;the film") == 10
    assert "<script" not in html and "<b>the" not in html


def test_long_texts_are_truncated_and_invisible_characters_replaced() -> None:
    assert shortened("word " * 200).endswith(" …") and len(shortened("word " * 200)) <= 280
    assert shortened("a\u202eb\x07") == "a\ufffdb\ufffd"
    assert shortened("two\nlines") == "two\nlines"


def test_the_page_shows_how_texts_were_read(results: Results) -> None:
    parts = {part.name: str(part.html) for part in sections(results)}
    assert "column review, at most 32 tokens" in parts["provenance"]
    assert "--text-column" in parts["columns"] and "--as COLUMN" not in parts["columns"]
    assert "images" not in parts and "unsure" not in parts and "matter" not in parts


def test_regression_of_texts_has_intervals(tmp_path: Path) -> None:
    rows: list[tuple[str, object]] = [(text, len(text) + 0.5) for text, _ in reviews(60)]
    results = read_results(finished(tmp_path, rows, "regression"))
    data = uncertain_texts(results)
    deviations = [row[-1] for row in data["numbers"]]
    assert deviations == sorted(deviations, reverse=True)
    for text, mean, low, high, truth, _ in data["numbers"]:
        assert truth == len(text) + 0.5 and low < mean < high
    assert "texts" in [part.name for part in sections(results)]
