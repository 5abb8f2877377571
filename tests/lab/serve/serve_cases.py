"""Trained networks behind a server, in a thread of the test or as a process, and a client for them."""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from PIL import Image

from multitudes.files.save import load
from multitudes.lab import data as datasets
from multitudes.lab.data import Data
from multitudes.lab.serve.http_app import create_app
from multitudes.lab.serve.limits import Limits
from multitudes.lab.serve.served_network import ServedNetwork
from multitudes.lab.serve.server import listen
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.run.trained_network import Trained
from multitudes.tasks.predictive import Predictive
from tests.lab.cli.test_cli import PACKAGE
from tests.lab.cli.test_predict import garden, trained

WAIT = 60.0
"""Seconds after which a test gives up on a server."""


@dataclass(frozen=True)
class Answered:
    """The answer to a request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))

    @property
    def error(self) -> str:
        """The sentence of a refusal, which is all of it."""
        found = self.json
        assert set(found) == {"error"} and found["error"], found
        return found["error"]


@dataclass(frozen=True)
class Client:
    """Sends requests, each over a connection of its own."""

    port: int

    def send(self, method: str, path: str, body: Any = None, kind: str | None = None, **headers: str) -> Answered:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        try:
            own = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, own | ({"Content-Type": kind} if kind else {}))
            answer = connection.getresponse()
            return Answered(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answered:
        return self.send("GET", path, **headers)

    def predict(self, body: Any, kind: str = "application/json", query: str = "", **headers: str) -> Answered:
        content = json.dumps(body) if kind == "application/json" and not isinstance(body, (bytes, str)) else body
        return self.send("POST", f"/predict{query}", content, kind, **headers)

    def answers(self, body: Any, kind: str = "application/json", query: str = "") -> list[dict[str, Any]]:
        found = self.predict(body, kind, query)
        assert found.status == 200, found
        return found.json["answers"]


@contextmanager
def in_thread(job: Path | ServedNetwork, **options: Any) -> Iterator[Client]:
    """A server in a thread of this process."""
    network = job if isinstance(job, ServedNetwork) else served(job)
    config = uvicorn.Config(create_app(network, **options), log_level="critical")
    server = uvicorn.Server(config)
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield Client(listening.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()


def served(job: Path, **options: Any) -> ServedNetwork:
    return ServedNetwork(Trained.read(job, "cpu"), **options)


@contextmanager
def as_process(job: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """The program `multitudes serve` itself, on a free port."""
    command = [sys.executable, "-m", "multitudes", "serve", str(job), "--port", "0", "--device", "cpu", *options]
    environment = {**os.environ, "PYTHONPATH": PACKAGE, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r" at http://127\.0\.0\.1:(\d+) ", line):
                yield process, Client(int(found[1]))
                break
        else:
            raise AssertionError("".join(lines))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(WAIT)
        process.stderr.close()


def png(image: torch.Tensor) -> bytes:
    """An image `[1, H, W]` as a file."""
    file = io.BytesIO()
    Image.fromarray(image[0].numpy()).save(file, "PNG")
    return file.getvalue()


def base64_png(image: torch.Tensor) -> str:
    return base64.b64encode(png(image)).decode()


def eventually(holds: Any, seconds: float = 10.0) -> None:
    """Wait until something holds."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


IMAGE = png(torch.zeros(1, 8, 8, dtype=torch.uint8))
JSON, PNG = "application/json", "image/png"
OAK = {"sun": 1.0, "kind": "oak"}

# -- trained networks --------------------------------------------------------------------------------------


def once(factory: pytest.TempPathFactory, name: str, **options: Any) -> Run:
    """A trained run, which the files of tests share."""
    place = factory.getbasetemp() / f"served-{name}"
    return Run(place) if place.exists() else trained(place, **options)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Run:
    methods = {"deep": {"members": 3}, "mc_dropout": {}}
    return once(tmp_path_factory, "images", data="digits", limit=300, methods=methods, epochs=3)


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
    source = garden(tmp_path_factory.mktemp("garden") / "garden.csv")
    options = {"target": "height", "methods": {"deep": {"members": 2}}, "epochs": 20, "model": "mlp"}
    return once(tmp_path_factory, "table", data=source, **options)


@pytest.fixture(scope="module")
def rows(table: Run) -> Iterator[Client]:
    with in_thread(table.jobs[0].directory, limits=Limits(rows=40)) as found:
        yield found


CLOSE = 2e-5
"""Six digits are sent, and rows of one batch are rounded by float32 in another order."""


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
