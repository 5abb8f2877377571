"""A study whose jobs train nothing, for the tests of what runs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from multitudes.lab.study.run.execution import run_local
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec

FAKE = """
import hashlib, json, os, sys, time, zlib
from pathlib import Path

behaviour, directory = json.loads(sys.argv[1]), Path(sys.argv[2])
config = json.loads((directory / "config.json").read_text())

def log(event, **what):
    with (directory / "log.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "event": event, **what}) + "\\n")

if (directory / "metrics.json").exists():
    raise SystemExit("it was done already")
(Path(behaviour.get("notes", directory)) / f"{directory.name}-started-{os.getpid()}-{os.getppid()}").touch()
if "data_notes" in behaviour:
    (Path(behaviour["data_notes"]) / str((directory / config["data"]["file"]).stat().st_ino)).touch()
how = behaviour.get(directory.name, "well")
log("start")
if how == "fails":
    log("failed", message="the loss is not finite")
    raise SystemExit(1)
if how == "crashes":
    raise RuntimeError("no memory left")
if how == "dies":
    os.kill(os.getpid(), 9)
if how == "says nothing":
    raise SystemExit(0)
for epoch in range(3):
    time.sleep(behaviour.get("seconds", 0) / 3)
    log("epoch", epoch=epoch + 1, epochs=3, loss=1 / (epoch + 1))
(directory / ".metrics.json.0.unfinished").write_text("half")
if how == "hangs":
    time.sleep(60)
seen = (directory / config["data"]["file"]).read_bytes() + json.dumps({**config, "device": None}).encode()
value = zlib.crc32(seen)  # what it writes depends on its configuration and its data alone
(directory / "predictions.safetensors").write_bytes(str(value).encode() * 1000)
scores = {"nll": {"value": value, "count": 1}, "threads": {"value": int(os.environ["OMP_NUM_THREADS"]), "count": 1}}
text = json.dumps({"sha256": "0" * 64, "files": {}, "scores": scores, "costs": {}})
text = text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest(), 1)  # its checksum
(directory / ".metrics.json.0.unfinished").write_text(text)
(directory / ".metrics.json.0.unfinished").rename(directory / "metrics.json")
log("done")
"""


@pytest.fixture
def fake(tmp_path):
    """A command that does what a job does, but for the training."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    return lambda **behaviour: [sys.executable, "-S", str(script), json.dumps(behaviour)]


def write_table(folder: Path) -> Path:
    path = folder / "rows.csv"
    path.write_text("a,b,y\n" + "".join(f"{i},{i % 7},{i * 0.5}\n" for i in range(60)))
    return path


@pytest.fixture
def make(tmp_path):
    """A specification for a small table, of two methods and two seeds but for what is given."""
    table = write_table(tmp_path)
    usual = {"data": table, "target": "y", "methods": ["single", "packed"], "seeds": 2, "epochs": 3}
    return lambda **options: Spec.of(**{**usual, **options})


@pytest.fixture
def run(make, tmp_path):
    """The study, prepared."""
    return prepare(make(), tmp_path / "run")


@pytest.fixture
def finished(run, fake):
    """The study, with all jobs done."""
    run_local(run, command=fake())
    return run


def snapshot_of(directory: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def metrics_of(run: Run) -> dict[str, bytes]:
    return {job.name: (job.directory / "metrics.json").read_bytes() for job in run.jobs}
