"""`multitudes serve`: answers are those of `predict`, and bad requests are refused with a sentence."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import re
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multitudes import data as datasets
from multitudes.core.predictive import Predictive
from multitudes.data import Data
from multitudes.serve.limits import Limits
from multitudes.serve.network import ServedNetwork
from multitudes.storage.save import load
from multitudes.study.store import Run

from .serve_cases import WAIT, Client, base64_png, eventually, in_thread, png, served
from .test_cli import multitudes_says, sentence
from .test_cli_predict import draw, garden, trained
from .tiny_text import reviews, text_model, write_csv

CLOSE = 2e-5
"""Six digits are sent, and rows of one batch are rounded by float32 in another order."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Run:
    methods = {"deep": {"members": 3}, "mc_dropout": {}}
    return trained(tmp_path_factory.mktemp("images"), data="digits", limit=300, methods=methods, epochs=3)


@pytest.fixture(scope="module")
def digits(images: Run) -> Data:
    return datasets.read(images.data_path)


@pytest.fixture(scope="module")
def deep(images: Run) -> ServedNetwork:
    return served(images.job("deep", 0).directory)


@pytest.fixture(scope="module")
def client(deep: ServedNetwork) -> Iterator[Client]:
    with in_thread(deep, limits=Limits(size=200_000, rows=40, pixels=1_000_000)) as found:
        yield found


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("table")
    options = {"target": "height", "methods": {"deep": {"members": 2}}, "epochs": 20}
    return trained(folder / "run", data=garden(folder / "garden.csv"), model="mlp", **options)


@pytest.fixture(scope="module")
def rows(table: Run) -> Iterator[Client]:
    with in_thread(table.jobs[0].directory, limits=Limits(rows=40)) as found:
        yield found


def expected(run: Run, name: str, x: torch.Tensor) -> Predictive:
    """What the saved network predicts itself."""
    net = load(run.job(name, 0).directory / "model.safetensors").eval()
    with torch.no_grad():
        return net.predict(datasets.read(run.data_path).normalised(x), seed=0)


def check_classes(answer: dict[str, Any], want: Predictive, row: int, classes: tuple[str, ...]) -> None:
    assert answer["label"] == classes[int(want.label[row])]
    assert list(answer["probabilities"]) == list(classes)
    assert list(answer["probabilities"].values()) == pytest.approx(want.probs[row].tolist(), abs=CLOSE)
    for name in ("confidence", "entropy", "mutual_information"):
        assert answer[name] == pytest.approx(getattr(want, name)[row].item(), abs=CLOSE)
    votes = want.member_probs[:, row].max(1)
    assert [member["label"] for member in answer["members"]] == [classes[at] for at in votes.indices.tolist()]
    assert [member["confidence"] for member in answer["members"]] == pytest.approx(votes.values.tolist(), abs=CLOSE)


# -- answers -----------------------------------------------------------------------------------------------


def test_images_get_the_answers_of_the_network_itself(images: Run, digits: Data, client: Client) -> None:
    x = digits.test.x[:30]
    want = expected(images, "deep", x)
    together = client.answers({"images": [base64_png(image) for image in x]})
    for row, answer in enumerate(together):
        check_classes(answer, want, row, digits.classes)
    (alone,) = client.answers(png(x[7]), "image/png")
    check_classes(alone, want, 7, digits.classes)


def test_answers_are_those_that_predict_writes(images: Run, digits: Data, client: Client, tmp_path: Path) -> None:
    paths = draw(tmp_path / "some", digits.test.x[:5])
    to = tmp_path / "answers.json"
    ran = multitudes_says("predict", images.job("deep", 0).directory, *paths, "--probs", "--to", to, "--device", "cpu")
    assert ran.code == 0, ran.err
    for want, path in zip(json.loads(to.read_text()), paths, strict=True):
        (found,) = client.answers(path.read_bytes(), "image/png")
        assert found["label"] == want["label"]
        for name in ("confidence", "entropy", "mutual_information"):
            assert found[name] == pytest.approx(want[name], abs=CLOSE)
        assert found["probabilities"] == pytest.approx({c: want[f"p({c})"] for c in digits.classes}, abs=CLOSE)


def test_sets_are_the_conformal_ones_of_the_test_part(images: Run, digits: Data, client: Client) -> None:
    """By the textbook: a class's score is the probability of the classes before it, the threshold a quantile."""
    with np.load(images.job("deep", 0).directory / "predictions.npz") as saved:
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


def test_a_network_that_draws_gives_an_input_the_same_answer_in_any_company(images: Run, digits: Data) -> None:
    x = digits.test.x[:24]
    with in_thread(images.job("mc_dropout", 0).directory) as client, ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda image: client.answers(png(image), "image/png")[0], x))
        (three,) = (client.answers({"images": [base64_png(image) for image in x[:3]]}),)
    for image, answer in zip(x, found, strict=True):
        check_classes(answer, expected(images, "mc_dropout", image[None]), 0, digits.classes)
    want = expected(images, "mc_dropout", x[:3])
    for row, answer in enumerate(three):
        check_classes(answer, want, row, digits.classes)


def test_rows_get_the_answers_that_predict_gives_to_a_file(table: Run, rows: Client, tmp_path: Path) -> None:
    lines = [{"sun": 4, "kind": "oak"}, {"sun": 0.5, "kind": "rose"}, {"sun": None, "kind": "fern"}]
    (tmp_path / "new.csv").write_text("kind,sun\noak,4\nrose,0.5\nfern,\n")
    ran = multitudes_says("predict", table.directory, tmp_path / "new.csv", "--device", "cpu", "--level", "0.8")
    found = rows.predict({"rows": lines}, query="?level=0.8").json
    assert found["notes"] == ["'sun' is missing in 1 row, and filled in as in training"]
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
def test_values_may_be_written_as_in_a_csv_file(rows: Client, row: dict[str, str]) -> None:
    assert rows.answers({"rows": [row]}) == rows.answers({"rows": [{"sun": 4, "kind": "oak"}]})


def test_texts_get_the_answers_of_predict(tmp_path: Path) -> None:
    text_model(tmp_path / "bert", "bert")
    source = write_csv(tmp_path / "reviews.csv", reviews(120))
    options = {"target": "label", "model": f"hf:{tmp_path / 'bert'}", "methods": {"deep": {"members": 2}}, "epochs": 2}
    run = trained(tmp_path / "run", data=source, **options)
    texts = ["the film was great", "the meal was awful and the phone came late and the song was dull", "<b>&</b> été"]
    given = [part for text in texts for part in ("--text", text)]
    ran = multitudes_says("predict", run.directory, *given, "--device", "cpu")
    assert ran.code == 0, ran.err
    want = list(csv.DictReader(io.StringIO(ran.out)))
    with in_thread(run.jobs[0].directory) as client, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda text: client.answers(text.encode(), "text/plain; charset=utf-8")[0], texts))
        assert len(client.answers({"texts": texts})) == 3
        assert "text 1 must be a text, got a number" in client.predict({"texts": ["a", 3]}).error
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


# -- bad requests ------------------------------------------------------------------------------------------


def bomb() -> bytes:
    """A PNG of 40,000 x 40,000 pixels in a few bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


IMAGE = png(torch.zeros(1, 8, 8, dtype=torch.uint8))
JSON, PNG = "application/json", "image/png"
BAD_IMAGES: dict[str, tuple[Any, str, int, str]] = {
    "nothing": (b"", PNG, 422, "0 bytes"),
    "no image": (b"GIF89a but not really", PNG, 422, "image 0"),
    "half an image": (IMAGE[: len(IMAGE) // 2], PNG, 422, "image 0"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n", PNG, 422, "must be an image (PNG,"),
    "a bomb": (bomb(), PNG, 422, "1,000,000 pixels"),
    "a large image": (png(torch.zeros(1, 1200, 1200, dtype=torch.uint8)), PNG, 422, "1200 x 1200"),
    "no base64": ({"images": ["no base64!"]}, JSON, 422, "'no base64!'"),
    "a number for an image": ({"images": [3]}, JSON, 422, "image 0 must be a file in base64, got a number"),
    "one image not in a list": ({"images": base64_png(torch.zeros(1, 8, 8, dtype=torch.uint8))}, JSON, 422, "a text"),
    "rows": ({"rows": [{"a": 1}]}, JSON, 422, "must have the key 'images'"),
    "another key": ({"images": [], "level": 0.5}, JSON, 422, "'level'"),
    "no images": ({"images": []}, JSON, 422, "1 to 40, got 0"),
    "too many": ({"images": ["aaaa"] * 41}, JSON, 422, "1 to 40, got 41"),
    "no JSON": (b"{images: [1]}", JSON, 400, "line 1 column 2"),
    "no UTF-8": (b'{"images": ["\xff"]}', JSON, 400, "the byte 255"),
    "a list": ([1, 2], JSON, 422, "a list"),
    "NaN": (b'{"images": [NaN]}', JSON, 422, "NaN"),
    "deep": (b"[" * 100_000, JSON, 400, "nested"),
    "many digits": (b'{"images": [' + b"9" * 6000 + b"]}", JSON, 400, "digits"),
    "half a character": (b'{"\\ud800": 1}', JSON, 422, "ud800"),
    "an unknown type": (IMAGE, "application/x-www-form-urlencoded", 415, "application/json, image/* or text/plain"),
    "a text": (b"three", "text/plain", 415, "trained on images"),
    "large": (b"x" * 200_001, PNG, 413, "200,000 bytes at most, got 200,001"),
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_what_is_no_image_is_refused_with_a_sentence(case: str, client: Client) -> None:
    body, kind, status, words = BAD_IMAGES[case]
    found = client.predict(body, kind)
    assert found.status == status, found
    assert words in found.error
    assert found.headers["content-type"] == "application/json"


OAK = {"sun": 1.0, "kind": "oak"}
BAD_ROWS: dict[str, tuple[Any, str]] = {
    "a column that is missing": ({"rows": [OAK, {"sun": 2}]}, "row 1 must have the column 'kind'"),
    "a column that is not known": ({"rows": [{**OAK, "moon": 1}]}, "row 0 has the column 'moon'"),
    "a list of values": ({"rows": [[1.0, "oak"]]}, "row 0 must be an object of values by column, got a list"),
    "a row that is not in a list": ({"rows": OAK}, "rows must be a list, got an object"),
    "a list for a value": ({"rows": [{"sun": [1], "kind": "oak"}]}, "row 0: 'sun' must be a number"),
    "a word for a number": ({"rows": [{"sun": "high", "kind": "oak"}]}, "'sun' of the request must hold numbers"),
    "nothing in a row": ({"rows": [{"sun": None, "kind": None}]}, "row 0: all inputs are missing"),
    "NaN": (b'{"rows": [{"sun": NaN, "kind": "oak"}]}', "numbers must be finite, got NaN"),
    "infinity": (b'{"rows": [{"sun": -Infinity, "kind": "oak"}]}', "got -Infinity"),
    "an infinite number": (b'{"rows": [{"sun": 1e999, "kind": "oak"}]}', "row 0: 'sun' must be finite in float32"),
    "larger than float32": ({"rows": [{"sun": 1e300, "kind": "oak"}]}, "finite in float32, got 1e+300"),
    "a very large integer": ({"rows": [{"sun": 10**400, "kind": "oak"}]}, "finite in float32"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_that_do_not_fit_are_refused_with_a_sentence(case: str, rows: Client) -> None:
    body, words = BAD_ROWS[case]
    found = rows.predict(body)
    assert found.status == 422, found
    assert words in found.error and "skip_bad" not in found.error


@pytest.mark.parametrize("query", ["?level=2", "?level=0", "?level=nan", "?level=high", "?level=", "?levle=0.5"])
def test_a_level_that_is_none_is_refused(query: str, client: Client) -> None:
    found = client.predict(IMAGE, PNG, query)
    assert found.status == 422 and "level" in found.error


def test_addresses_and_methods_that_are_not_there_are_refused(client: Client) -> None:
    assert client.get("/../../etc/passwd").status == 404
    assert client.get("/nowhere").error == "there is nothing at '/nowhere': see /docs"
    refused = client.get("/predict")
    assert refused.status == 405 and refused.headers["allow"] == "POST"
    assert client.send("DELETE", "/predict").status == 405


def test_random_bytes_are_refused_and_the_server_answers_on(client: Client, rows: Client) -> None:
    dice = random.Random(0)
    kinds = (JSON, PNG, "text/plain", "image/jpeg", "x", "application/json; charset=utf-16", "\t;;")
    starts = (b"", b'{"images": [', b'{"rows": [{"sun": ', IMAGE[:30], b"\xff\xd8\xff\xe0", b"RIFF\x00\x00\x00\x00WEBP")
    for _ in range(150):
        body = dice.choice(starts) + dice.randbytes(dice.randrange(200))
        for server in (client, rows):
            found = server.predict(body, dice.choice(kinds))
            assert 400 <= found.status < 500 and found.error
    assert client.answers(IMAGE, PNG) and rows.answers({"rows": [OAK]})


def exchange(port: int, sent: list[bytes]) -> bytes:
    """What the server answers to these bytes before it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as connection:
        try:
            for part in sent:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has answered, and closed
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except ConnectionResetError:
            pass
        return found


def test_a_body_is_read_no_further_than_its_limit(client: Client) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\n"
    told = exchange(client.port, [head + b"Content-Length: 99999999999999999999999\r\n\r\n"])
    assert told.startswith(b"HTTP/1.1 413") or told.startswith(b"HTTP/1.1 400")
    piece = b"%x\r\n%s\r\n" % (20_000, b"x" * 20_000)
    told = exchange(client.port, [head + b"Transfer-Encoding: chunked\r\n\r\n", *[piece] * 11])
    assert told.startswith(b"HTTP/1.1 413") and b"200,000 bytes at most, got more" in told


def test_what_is_no_http_is_refused(client: Client) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"POST /predict HTTP/9.9\r\n\r\n", bytes(5000)):
        told = exchange(client.port, [sent + b"\r\n\r\n"])
        assert told == b"" or told.startswith(b"HTTP/1.1 4")
    assert client.get("/health").json == {"status": "ok"}


def test_a_request_that_is_broken_off_does_no_harm(client: Client) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 5000\r\n\r\n"
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", client.port), timeout=WAIT) as connection:
            connection.sendall(head + b"half")
    assert client.answers(IMAGE, PNG)


# -- limits ------------------------------------------------------------------------------------------------


class Slow:
    """A network that answers when it is let."""

    def __init__(self, network: ServedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.begun = threading.Event(), threading.Event()
        answer = network.answer

        def slow(questions: Any) -> Any:
            self.begun.set()
            assert self.free.wait(WAIT)
            return answer(questions)

        monkeypatch.setattr(network, "answer", slow)


def test_more_requests_than_may_be_under_way_are_asked_to_come_again(
    deep: ServedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(deep, monkeypatch)
    with in_thread(deep, limits=Limits(requests=3)) as client, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(client.predict, IMAGE, PNG) for _ in range(3)]
        eventually(lambda: "multitudes_under_way 3\n" in client.get("/metrics").body.decode())
        refused = client.predict(IMAGE, PNG)
        assert refused.headers["retry-after"] == "1" and "3 requests are under way" in refused.error
        assert refused.status == 503 and client.get("/health").status == 200
        slow.free.set()
        assert [each.result(WAIT).status for each in asked] == [200, 200, 200]
        eventually(lambda: client.predict(IMAGE, PNG).status == 200)


def test_a_request_that_takes_too_long_is_given_up(deep: ServedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(deep, monkeypatch)
    with in_thread(deep, limits=Limits(seconds=0.3)) as client:
        found = client.predict(IMAGE, PNG)
        assert found.status == 504 and "longer than 0.3 seconds" in found.error
        head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 500\r\n\r\n"
        assert exchange(client.port, [head]).startswith(b"HTTP/1.1 504"), "the body that never came"
        slow.free.set()
        eventually(lambda: client.predict(IMAGE, PNG).status == 200)


def test_an_error_that_nobody_expected_is_told_and_the_server_lives_on(
    deep: ServedNetwork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with in_thread(deep) as client:
        with monkeypatch.context() as patched:
            patched.setattr(deep, "predict", lambda x: 1 / 0)
            found = client.predict(IMAGE, PNG)
        assert found.status == 500 and found.error == "the server failed on this request; its log says why"
        assert "ZeroDivisionError" in caplog.text
        assert client.predict(IMAGE, PNG).status == 200
        assert 'multitudes_requests_total{path="/predict",status="500"} 1' in client.get("/metrics").body.decode()


def test_numbers_that_are_not_finite_are_null(deep: ServedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Predictive(torch.full((3, 1, 10), math.nan))
    monkeypatch.setattr(deep, "predict", lambda x: broken)
    with in_thread(deep) as client:
        (answer,) = client.answers(IMAGE, PNG)
    assert answer["confidence"] is None and set(answer["probabilities"].values()) == {None}


# -- what else there is ------------------------------------------------------------------------------------


def test_without_its_token_a_server_shows_nothing_of_the_network(deep: ServedNetwork, digits: Data) -> None:
    token = "correct-horse"
    with in_thread(deep, token=token) as client:
        wrong = ("", "Bearer", "Bearer wrong", f"Basic {token}", token, f"Bearer {token}x", "Bearer ünï")
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


def test_about_has_examples_that_the_network_is_sure_and_unsure_of(client: Client, digits: Data) -> None:
    about = client.get("/about").json
    assert (about["inputs"], about["data"], about["members"]) == ("images", "digits", 3)
    entropies: dict[str, list[float]] = {}
    for name, examples in about["examples"].items():
        assert len(examples) == 6
        images = [each["image"].partition(",")[2] for each in examples]
        entropies[name] = [answer["entropy"] for answer in client.answers({"images": images})]
        assert {each["truth"] for each in examples} <= set(digits.classes)
    assert max(entropies["sure"]) < min(entropies["unsure"])


def test_rows_of_examples_can_be_sent_back(table: Run, rows: Client) -> None:
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


def test_openapi_describes_every_address_of_programs(client: Client) -> None:
    found = client.get("/openapi.json").json
    assert set(found["paths"]) == {"/predict", "/about", "/health", "/metrics"}
    content = found["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert set(content) == {"application/json", "image/*", "text/plain"}
    (answer,) = client.answers(IMAGE, PNG)
    answers = found["paths"]["/predict"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert set(answer) <= set(answers["properties"]["answers"]["items"]["properties"])
    docs = client.get("/docs").body.decode()
    assert all(path in docs for path in found["paths"]) and "http" not in docs.partition("<main>")[2]


def test_the_program_refuses_what_it_cannot_serve(images: Run, tmp_path: Path) -> None:
    job = images.job("deep", 0).directory
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = sentence(multitudes_says("serve", job, "--port", taken.getsockname()[1], "--device", "cpu"))
    assert "--host '127.0.0.1' and --port" in told and "in use" in told
    assert "--level must be above 0" in sentence(multitudes_says("serve", job, "--level", "0"))
    told = sentence(multitudes_says("serve", job, "--token", " spaced "))
    assert "--token must be printable" in told and "spaced" not in told
    assert "JOB must be a directory" in sentence(multitudes_says("serve", tmp_path))
