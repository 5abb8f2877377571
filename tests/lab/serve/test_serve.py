"""`multitudes serve`: its answers equal those of `predict`; tokens, metrics and descriptions."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from multitudes.ensemble.multitude import Multitude
from multitudes.lab import data as datasets
from multitudes.lab.data import Data
from multitudes.lab.serve.served_network import Question, ServedNetwork
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.run.trained_network import Trained
from tests.lab.cli.test_cli import run_cli, sentence
from tests.lab.cli.test_predict import draw, trained
from tests.lab.serve.serve_cases import (
    CLOSE,
    IMAGE,
    PNG,
    Client,
    base64_png,
    check_classes,
    expected,
    in_thread,
    png,
    served,
)
from tests.zoo.tiny_text import reviews, text_model, write_csv

# -- answers -----------------------------------------------------------------------------------------------


def test_images_get_the_answers_of_the_network(images: Run, digits: Data, client: Client) -> None:
    x = digits.test.x[:30]
    want = expected(images, "deep", x)
    together = client.answers({"images": [base64_png(image) for image in x]})
    for row, answer in enumerate(together):
        check_classes(answer, want, row, digits.classes)
    (alone,) = client.answers(png(x[7]), "image/png")
    check_classes(alone, want, 7, digits.classes)


def test_answers_equal_those_of_predict(images: Run, digits: Data, client: Client, tmp_path: Path) -> None:
    paths = draw(tmp_path / "some", digits.test.x[:5])
    to = tmp_path / "answers.json"
    ran = run_cli("predict", images.job("deep", 0).directory, *paths, "--probs", "--to", to, "--device", "cpu")
    assert ran.code == 0, ran.err
    for want, path in zip(json.loads(to.read_text()), paths, strict=True):
        (found,) = client.answers(path.read_bytes(), "image/png")
        assert found["label"] == want["label"]
        for name in ("confidence", "entropy", "mutual_information"):
            assert found[name] == pytest.approx(want[name], abs=CLOSE)
        assert found["probabilities"] == pytest.approx({c: want[f"p({c})"] for c in digits.classes}, abs=CLOSE)


def test_sets_are_conformal_with_scores_of_the_test_part(images: Run, digits: Data, client: Client) -> None:
    """By the textbook: a class's score is the probability of the classes before it, the threshold a quantile."""
    saved = images.job("deep", 0).predictions
    probs, target = saved["probs"].astype(float), saved["target"]
    x = digits.test.x[:20]
    for level in (0.5, 0.95):
        ranked = np.argsort(-probs, 1, kind="stable")
        place = (ranked == target[:, None]).argmax(1)
        scores = [probs[row][ranked[row][:rank]].sum() for row, rank in enumerate(place)]
        threshold = sorted(scores)[math.ceil((len(scores) + 1) * level) - 1]
        found = client.predict({"images": [base64_png(image) for image in x]}, query=f"?level={level}").json
        assert found["level"] == level and found["conformal"] is True
        for row, answer in enumerate(found["answers"]):
            before = np.cumsum(probs[row][ranked[row]]) - probs[row][ranked[row]]
            want = {digits.classes[c] for c, score in zip(ranked[row], before, strict=True) if score <= threshold}
            assert set(answer["set"]) == want and answer["label"] in want


def test_draws_do_not_depend_on_the_rest_of_the_batch(images: Run, digits: Data) -> None:
    x = digits.test.x[:8]
    with in_thread(images.job("mc_dropout", 0).directory) as client, ThreadPoolExecutor(8) as pool:
        alone = list(pool.map(lambda image: client.answers(png(image), "image/png")[0], x))
        together = client.answers({"images": [base64_png(image) for image in x]})
    want = expected(images, "mc_dropout", x)
    for row, image in enumerate(x):
        check_classes(alone[row], expected(images, "mc_dropout", image[None]), 0, digits.classes)
        check_classes(together[row], want, row, digits.classes)


class Centred(nn.Module):
    """A network whose rows interact."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.last(x.flatten(1))
        return found - found.mean(0)


def test_requests_run_alone_if_rows_interact(images: Run, digits: Data) -> None:
    torch.manual_seed(0)
    whole = Trained.read(images.job("deep", 0).directory, "cpu")
    network = ServedNetwork(replace(whole, net=Multitude(Centred()).eval()))
    assert not network.batchable and not network.draws
    x = digits.test.x[:9]
    found = network.answer([Question(x[:3], 0.9), Question(x[3:9], 0.9)])
    for own, answers in ((x[:3], found[0]), (x[3:9], found[1])):
        with torch.no_grad():
            want = network.trained.net.predict(digits.normalised(own))
        for row, answer in enumerate(answers):
            check_classes(answer, want, row, digits.classes)


def test_rows_get_the_answers_of_predict(table: Run, rows: Client, tmp_path: Path) -> None:
    lines = [{"sun": 4, "kind": "oak"}, {"sun": 0.5, "kind": "rose"}, {"sun": None, "kind": "fern"}]
    (tmp_path / "new.csv").write_text("kind,sun\noak,4\nrose,0.5\nfern,\n")
    ran = run_cli("predict", table.directory, tmp_path / "new.csv", "--device", "cpu", "--level", "0.8")
    found = rows.predict({"rows": lines}, query="?level=0.8").json
    assert found["notes"] == ["'sun' is missing in 1 row and was imputed as in training"]
    want = list(csv.DictReader(io.StringIO(ran.out)))
    data = datasets.read(table.data_path)
    for row, (answer, one) in enumerate(zip(found["answers"], want, strict=True)):
        for name in ("mean", "std", "low", "high"):
            assert answer[name] == pytest.approx(float(one[name]), rel=1e-5)
        means = [member["mean"] for member in answer["members"]]
        assert np.mean(means) == pytest.approx(answer["mean"], rel=1e-5), row
        assert np.std(means) == pytest.approx(answer["std_between_members"], rel=1e-3, abs=1e-4 * data.target_std)


@pytest.mark.parametrize(
    "row", [{"sun": "4", "kind": "oak"}, {"kind": "oak", "sun": "4,0"}, {"sun": "4.0 ", "kind": " oak"}]
)
def test_values_are_parsed_as_in_csv_files(rows: Client, row: dict[str, str]) -> None:
    assert rows.answers({"rows": [row]}) == rows.answers({"rows": [{"sun": 4, "kind": "oak"}]})


@pytest.mark.slow
def test_texts_get_the_answers_of_predict(tmp_path: Path) -> None:
    text_model(tmp_path / "bert", "bert")
    source = write_csv(tmp_path / "reviews.csv", reviews(120))
    options = {"target": "label", "model": f"hf:{tmp_path / 'bert'}", "methods": {"deep": {"members": 2}}, "epochs": 2}
    run = trained(tmp_path / "run", data=source, **options)
    texts = ["the film was great", "the meal was awful and the phone came late and the song was dull", "<b>&</b> été"]
    given = [part for text in texts for part in ("--text", text)]
    ran = run_cli("predict", run.directory, *given, "--device", "cpu")
    assert ran.code == 0, ran.err
    want = list(csv.DictReader(io.StringIO(ran.out)))
    with in_thread(run.jobs[0].directory) as client, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda text: client.answers(text.encode(), "text/plain; charset=utf-8")[0], texts))
        assert len(client.answers({"texts": texts})) == 3
        assert "text 1 must be a string, got a number" in client.predict({"texts": ["a", 3]}).error
        assert "trained on texts" in client.predict(png(torch.zeros(1, 8, 8, dtype=torch.uint8)), "image/png").error
        assert client.predict(b"\xff\xfe\xfd", "text/plain").status == 400
        examples = client.get("/about").json["examples"]
    for answer, one in zip(found, want, strict=True):
        assert answer["label"] == one["label"]
        for name in ("confidence", "entropy", "mutual_information"):
            assert answer[name] == pytest.approx(float(one[name]), abs=CLOSE)
    known = {text for text, _ in reviews(120)}
    assert examples["sure"] and {each["text"] for each in (*examples["sure"], *examples["unsure"])} <= known


def test_requests_at_different_levels_share_a_batch_and_get_their_own_intervals(table: Run) -> None:
    network = served(table.jobs[0].directory)
    levels, row = (0.2, 0.5, 0.9), {"rows": [{"sun": 3, "kind": "fern"}]}
    with in_thread(network) as client, ThreadPoolExecutor(9) as pool:
        found = list(pool.map(lambda level: client.answers(row, query=f"?level={level}")[0], levels * 3))
    widths = {level: answer["high"] - answer["low"] for level, answer in zip(levels * 3, found, strict=True)}
    assert widths[0.2] < widths[0.5] < widths[0.9]
    assert len({(answer["low"], answer["high"]) for answer in found}) == 3


# -- access, descriptions and metrics ----------------------------------------------------------------------


def test_a_server_with_a_token_requires_it(deep: ServedNetwork, digits: Data) -> None:
    token = "correct-horse"
    with in_thread(deep, token=token) as client:
        wrong = ("", "Bearer", f"Basic {token}", token, f"Bearer {token}x", "Bearer ünï")
        for given in wrong:
            headers = {"Authorization": given.encode("latin-1")} if given else {}
            for method, path in (("POST", "/predict"), ("GET", "/about"), ("GET", "/metrics")):
                found = client.send(method, path, IMAGE if method == "POST" else None, PNG, **headers)
                assert found.status == 401 and found.headers["www-authenticate"] == "Bearer"
                assert token not in found.body.decode()
        assert client.predict(IMAGE, PNG, Authorization=f"Bearer {token}").status == 200
        assert client.get("/about", Authorization=f"bearer {token}").json["classes"] == list(digits.classes)
        for path in ("/health", "/", "/docs", "/openapi.json"):
            found = client.get(path)
            assert found.status == 200 and "digits" not in found.body.decode() and token not in found.body.decode()


def test_a_local_server_accepts_only_local_host_names(deep: ServedNetwork) -> None:
    """Otherwise, a web page whose name resolves to 127.0.0.1 could use the server."""
    with in_thread(deep, local=True) as client:
        for host in ("127.0.0.1:80", "localhost", "[::1]:8000", "LOCALHOST:1"):
            assert client.get("/about", Host=host).status == 200
        for host in ("evil.example", "127.0.0.1.evil.example:80", "evil.example:127.0.0.1"):
            found = client.predict(IMAGE, PNG, Host=host)
            assert found.status == 403 and "Host must be one of localhost" in found.error
    with in_thread(deep, local=True, token="a") as client:
        assert client.get("/about", Host="mine.example", Authorization="Bearer a").status == 200


@pytest.mark.slow
def test_a_public_server_without_a_token_warns(images: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    apps: list[Any] = []
    monkeypatch.setattr("multitudes.lab.serve.server.run", lambda app, listening, seconds: apps.append(app))
    command = ("serve", images.job("deep", 0).directory, "--port", 0, "--device", "cpu")
    ran = {host: run_cli(*command, "--host", host) for host in ("127.0.0.1", "0.0.0.0")}
    assert "Warning" not in ran["127.0.0.1"].err and "at http://127.0.0.1:" in ran["127.0.0.1"].err
    assert "Warning: anyone who can reach 0.0.0.0:" in ran["0.0.0.0"].err
    monkeypatch.setenv("MULTITUDES_TOKEN", "open-sesame")
    quiet = run_cli(*command, "--host", "0.0.0.0")
    assert quiet.code == 0 and "Warning" not in quiet.err and "sesame" not in quiet.err + quiet.out
    assert len(apps) == 3


def test_about_has_examples_of_low_and_high_uncertainty(client: Client, digits: Data) -> None:
    about = client.get("/about").json
    assert (about["inputs"], about["data"], about["members"]) == ("images", "digits", 3)
    entropies: dict[str, list[float]] = {}
    for name, examples in about["examples"].items():
        assert len(examples) == 6
        images = [each["image"].partition(",")[2] for each in examples]
        entropies[name] = [answer["entropy"] for answer in client.answers({"images": images})]
        assert {each["truth"] for each in examples} <= set(digits.classes)
    assert max(entropies["sure"]) < min(entropies["unsure"])


def test_examples_of_rows_can_be_predicted(table: Run, rows: Client) -> None:
    about = rows.get("/about").json
    known = ["fern", "oak", "rose"]
    assert [(each["name"], each["kind"], each["known"]) for each in about["columns"]] == [
        ("sun", "number", []), ("kind", "category", known)
    ]  # fmt: skip
    deviations = {
        name: [answer["std"] for answer in rows.answers({"rows": [each["row"] for each in own]})]
        for name, own in about["examples"].items()
    }
    assert max(deviations["sure"]) < min(deviations["unsure"])
    data = datasets.read(table.data_path)
    heights = {f"{value:.6g}" for value in data.test.y.tolist()}
    assert {f"{each['truth']:.6g}" for each in about["examples"]["sure"]} <= heights


def test_metrics_are_prometheus_text(deep: ServedNetwork) -> None:
    with in_thread(deep) as client:
        for _ in range(3):
            client.answers(IMAGE, PNG)
        client.get("/nowhere")
        found = client.get("/metrics")
    assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = found.body.decode().splitlines()
    sample = re.compile(r'[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? [0-9.e+-]+')
    assert all(line.startswith(("# HELP ", "# TYPE ")) or sample.fullmatch(line) for line in lines)
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values['multitudes_requests_total{path="/predict",status="200"}'] == "3"
    assert values['multitudes_requests_total{path="other",status="404"}'] == "1"
    assert values["multitudes_batch_rows_sum"] == values['multitudes_predict_seconds_bucket{le="+Inf"}'] == "3"


def test_openapi_describes_every_route(client: Client) -> None:
    found = client.get("/openapi.json").json
    assert set(found["paths"]) == {"/predict", "/about", "/health", "/metrics"}
    content = found["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert set(content) == {"application/json", "image/*", "text/plain"}
    (answer,) = client.answers(IMAGE, PNG)
    answers = found["paths"]["/predict"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert set(answer) <= set(answers["properties"]["answers"]["items"]["properties"])
    docs = client.get("/docs").body.decode()
    assert all(path in docs for path in found["paths"]) and "http" not in docs.partition("<main>")[2]


def test_the_program_refuses_bad_arguments(images: Run, tmp_path: Path) -> None:
    job = images.job("deep", 0).directory
    with socket.create_server(("127.0.0.1", 0)) as taken:
        error = sentence(run_cli("serve", job, "--port", taken.getsockname()[1], "--device", "cpu"))
    assert "--host '127.0.0.1' and --port" in error and "in use" in error
    assert "--level must be above 0" in sentence(run_cli("serve", job, "--level", "0"))
    error = sentence(run_cli("serve", job, "--token", " spaced "))
    assert "--token must be printable" in error and "spaced" not in error
    assert "JOB must be a job directory" in sentence(run_cli("serve", tmp_path))
