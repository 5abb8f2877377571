"""Requests that `multitudes serve` refuses, and its limits."""

from __future__ import annotations

import math
import random
import socket
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from multitudes.lab.serve.requests import Limits
from multitudes.lab.serve.served_network import ServedNetwork
from multitudes.tasks.predictive import Predictive
from tests.lab.serve.serve_cases import IMAGE, JSON, OAK, PNG, WAIT, Client, base64_png, eventually, in_thread, png

# -- bad requests ------------------------------------------------------------------------------------------


def bomb() -> bytes:
    """Return a PNG of 40,000 x 40,000 pixels in a few bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


BAD_IMAGES: dict[str, tuple[Any, str, int, str]] = {
    "nothing": (b"", PNG, 422, "0 bytes"),
    "no image": (b"GIF89a but not really", PNG, 422, "image 0"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n", PNG, 422, "must be an image (PNG,"),
    "a bomb": (bomb(), PNG, 422, "1,000,000 pixels"),
    "a large image": (png(torch.zeros(1, 1200, 1200, dtype=torch.uint8)), PNG, 422, "1200 x 1200"),
    "no base64": ({"images": ["no base64!"]}, JSON, 422, "'no base64!'"),
    "half an image": (IMAGE[: len(IMAGE) // 2], PNG, 422, "image 0"),
    "a number for an image": ({"images": [3]}, JSON, 422, "image 0 must be a file in base64, got a number"),
    "no images": ({"images": []}, JSON, 422, "1 to 40 items, got 0"),
    "one image not in a list": ({"images": base64_png(torch.zeros(1, 8, 8, dtype=torch.uint8))}, JSON, 422, "a string"),
    "rows": ({"rows": [{"a": 1}]}, JSON, 422, "must have the key 'images'"),
    "another key": ({"images": [], "level": 0.5}, JSON, 422, "'level'"),
    "too many": ({"images": ["aaaa"] * 41}, JSON, 422, "1 to 40 items, got 41"),
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
def test_invalid_images_are_refused(case: str, client: Client) -> None:
    body, kind, status, words = BAD_IMAGES[case]
    found = client.predict(body, kind)
    assert found.status == status, found
    assert words in found.error
    assert found.headers["content-type"] == "application/json"


BAD_ROWS: dict[str, tuple[Any, str]] = {
    "a column that is missing": ({"rows": [OAK, {"sun": 2}]}, "row 1 must have the column 'kind'"),
    "a column that is not known": ({"rows": [{**OAK, "moon": 1}]}, "row 0 has the unknown column 'moon'"),
    "a list of values": ({"rows": [[1.0, "oak"]]}, "row 0 must be an object of values by column, got a list"),
    "a row that is not in a list": ({"rows": OAK}, "rows must be a list, got an object"),
    "a list for a value": ({"rows": [{"sun": [1], "kind": "oak"}]}, "row 0: 'sun' must be a number"),
    "a word for a number": ({"rows": [{"sun": "high", "kind": "oak"}]}, "'sun' of the request must hold numbers"),
    "nothing in a row": ({"rows": [{"sun": None, "kind": None}]}, "row 0: all inputs are missing"),
    "NaN": (b'{"rows": [{"sun": NaN, "kind": "oak"}]}', "numbers must be finite, got NaN"),
    "an infinite number": (b'{"rows": [{"sun": 1e999, "kind": "oak"}]}', "row 0: 'sun' must be finite in float32"),
    "larger than float32": ({"rows": [{"sun": 1e300, "kind": "oak"}]}, "finite in float32, got 1e+300"),
    "a very large integer": ({"rows": [{"sun": 10**400, "kind": "oak"}]}, "finite in float32"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_invalid_rows_are_refused(case: str, rows: Client) -> None:
    body, words = BAD_ROWS[case]
    found = rows.predict(body)
    assert found.status == 422, found
    assert words in found.error and "skip_bad" not in found.error


@pytest.mark.parametrize("query", ["?level=2", "?level=nan", "?level=high", "?levle=0.5"])
def test_an_invalid_level_is_refused(query: str, client: Client) -> None:
    found = client.predict(IMAGE, PNG, query)
    assert found.status == 422 and "level" in found.error


def test_unknown_paths_and_methods_are_refused(client: Client) -> None:
    assert client.get("/../../etc/passwd").status == 404
    assert client.get("/nowhere").error == "unknown path '/nowhere': see /docs"
    refused = client.get("/predict")
    assert refused.status == 405 and refused.headers["allow"] == "POST"


def test_random_bytes_are_refused_and_the_server_goes_on(client: Client, rows: Client) -> None:
    dice = random.Random(0)
    kinds = (JSON, PNG, "text/plain", "image/jpeg", "x", "application/json; charset=utf-16", "\t;;")
    starts = (b"", b'{"images": [', b'{"rows": [{"sun": ', IMAGE[:30], b"\xff\xd8\xff\xe0", b"RIFF\x00\x00\x00\x00WEBP")
    for _ in range(60):
        body = dice.choice(starts) + dice.randbytes(dice.randrange(200))
        for server in (client, rows):
            found = server.predict(body, dice.choice(kinds))
            assert 400 <= found.status < 500 and found.error
    assert client.answers(IMAGE, PNG) and rows.answers({"rows": [OAK]})


def exchange(port: int, sent: list[bytes]) -> bytes:
    """Send bytes, and return the response until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as connection:
        try:
            for part in sent:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has already answered and closed
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except ConnectionResetError:
            pass
        return found


def test_a_body_is_read_up_to_its_limit(client: Client) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\n"
    response = exchange(client.port, [head + b"Content-Length: 99999999999999999999999\r\n\r\n"])
    assert response.startswith(b"HTTP/1.1 413") or response.startswith(b"HTTP/1.1 400")
    piece = b"%x\r\n%s\r\n" % (20_000, b"x" * 20_000)
    response = exchange(client.port, [head + b"Transfer-Encoding: chunked\r\n\r\n", *[piece] * 11])
    assert response.startswith(b"HTTP/1.1 413") and b"200,000 bytes at most, got more" in response


def test_invalid_http_and_aborted_requests_are_harmless(client: Client) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"POST /predict HTTP/9.9\r\n\r\n", bytes(5000)):
        response = exchange(client.port, [sent + b"\r\n\r\n"])
        assert response == b"" or response.startswith(b"HTTP/1.1 4")
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 5000\r\n\r\n"
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", client.port), timeout=WAIT) as connection:
            connection.sendall(head + b"half")
    assert client.answers(IMAGE, PNG)


# -- limits ------------------------------------------------------------------------------------------------


class Slow:
    """Block a network's answers until `free` is set."""

    def __init__(self, network: ServedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.begun = threading.Event(), threading.Event()
        answer = network.answer

        def slow(questions: Any) -> Any:
            self.begun.set()
            assert self.free.wait(WAIT)
            return answer(questions)

        monkeypatch.setattr(network, "answer", slow)


def test_too_many_concurrent_requests_are_refused(deep: ServedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(deep, monkeypatch)
    with in_thread(deep, limits=Limits(requests=3)) as client, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(client.predict, IMAGE, PNG) for _ in range(3)]
        eventually(lambda: "multitudes_under_way 3\n" in client.get("/metrics").body.decode())
        refused = client.predict(IMAGE, PNG)
        assert refused.headers["retry-after"] == "1" and "3 requests are running" in refused.error
        assert refused.status == 503 and client.get("/health").status == 200
        slow.free.set()
        assert [each.result(WAIT).status for each in asked] == [200, 200, 200]
        eventually(lambda: client.predict(IMAGE, PNG).status == 200)


def test_a_slow_request_times_out(deep: ServedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(deep, monkeypatch)
    with in_thread(deep, limits=Limits(seconds=0.3)) as client:
        found = client.predict(IMAGE, PNG)
        assert found.status == 504 and "longer than 0.3 seconds" in found.error
        head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 500\r\n\r\n"
        assert exchange(client.port, [head]).startswith(b"HTTP/1.1 504"), "an incomplete body"
        slow.free.set()
        eventually(lambda: client.predict(IMAGE, PNG).status == 200)


def test_an_unexpected_error_is_logged_and_the_server_goes_on(
    deep: ServedNetwork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with in_thread(deep) as client:
        with monkeypatch.context() as patched:
            patched.setattr(deep, "predict", lambda x: 1 / 0)
            found = client.predict(IMAGE, PNG)
        assert found.status == 500 and found.error == "internal error; see the server's log"
        assert "ZeroDivisionError" in caplog.text
        assert client.predict(IMAGE, PNG).status == 200
        assert 'multitudes_requests_total{path="/predict",status="500"} 1' in client.get("/metrics").body.decode()


def test_non_finite_numbers_are_null(deep: ServedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Predictive(torch.full((3, 1, 10), math.nan))
    monkeypatch.setattr(deep, "predict", lambda x: broken)
    with in_thread(deep) as client:
        (answer,) = client.answers(IMAGE, PNG)
    assert answer["confidence"] is None and set(answer["probabilities"].values()) == {None}
