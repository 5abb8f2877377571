"""A server in a thread or as a process, a client for it, and checks of answers."""

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
from multitudes.lab.serve.http_app import create_app
from multitudes.lab.serve.served_network import ServedNetwork
from multitudes.lab.serve.server import listen
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.run.trained_network import Trained
from multitudes.tasks.predictive import Predictive
from tests.lab.cli.test_cli import PACKAGE
from tests.lab.cli.test_predict import trained

WAIT = 60.0
"""Timeout in seconds."""


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
        """The message of a refusal."""
        found = self.json
        assert set(found) == {"error"} and found["error"], found
        return found["error"]


@dataclass(frozen=True)
class Client:
    """Send each request over a new connection."""

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
    """Run a server in a thread."""
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
    """Run `multitudes serve` on a free port."""
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
    """Encode an image `[1, H, W]`."""
    file = io.BytesIO()
    Image.fromarray(image[0].numpy()).save(file, "PNG")
    return file.getvalue()


def base64_png(image: torch.Tensor) -> str:
    return base64.b64encode(png(image)).decode()


def eventually(holds: Any, seconds: float = 10.0) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


IMAGE = png(torch.zeros(1, 8, 8, dtype=torch.uint8))
JSON, PNG = "application/json", "image/png"
OAK = {"sun": 1.0, "kind": "oak"}

# -- trained networks --------------------------------------------------------------------------------------


def once(factory: pytest.TempPathFactory, name: str, **options: Any) -> Run:
    """Train a run, shared between the test files."""
    place = factory.getbasetemp() / f"served-{name}"
    return Run(place) if place.exists() else trained(place, **options)


CLOSE = 2e-5
"""Tolerance: answers have six digits, and float32 rounds batches differently."""


def expected(run: Run, name: str, x: torch.Tensor) -> Predictive:
    """Predict with the saved network."""
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
