"""Studies whose jobs train nothing, and real Ray nodes on this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from multitudes.lab.study.run.execution import run_local
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec

FAKE = """
import hashlib, json, os, sys, time, zlib
from pathlib import Path

behavior, directory = json.loads(sys.argv[1]), Path(sys.argv[2])
config = json.loads((directory / "config.json").read_text())

def log(event, **what):
    with (directory / "log.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "event": event, **what}) + "\\n")

if (directory / "metrics.json").exists():
    raise SystemExit("the job was done before")
(Path(behavior.get("notes", directory)) / f"{directory.name}-started-{os.getpid()}-{os.getppid()}").touch()
if "data_notes" in behavior:
    (Path(behavior["data_notes"]) / str((directory / config["data"]["file"]).stat().st_ino)).touch()
how = behavior.get(directory.name, "well")
log("start")
if how == "fails":
    log("failed", message="the loss is not finite")
    raise SystemExit(1)
if how == "crashes":
    raise RuntimeError("no memory left")
if how == "dies":
    os.kill(os.getpid(), 9)
if how == "writes nothing":
    raise SystemExit(0)
for epoch in range(3):
    time.sleep(behavior.get("seconds", 0) / 3)
    log("epoch", epoch=epoch + 1, epochs=3, loss=1 / (epoch + 1))
(directory / ".metrics.json.0.unfinished").write_text("half")
if how == "hangs":
    time.sleep(60)
content = (directory / config["data"]["file"]).read_bytes() + json.dumps({**config, "device": None}).encode()
value = zlib.crc32(content)  # results depend only on the configuration and the data
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
    """Return a command that runs a job without training; options say how it behaves."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    return lambda **behavior: [sys.executable, "-S", str(script), json.dumps(behavior)]


def write_table(folder: Path) -> Path:
    path = folder / "rows.csv"
    path.write_text("a,b,y\n" + "".join(f"{i},{i % 7},{i * 0.5}\n" for i in range(60)))
    return path


@pytest.fixture
def make(tmp_path):
    """Return a specification for a small table: two methods and two seeds by default."""
    table = write_table(tmp_path)
    usual = {"data": table, "target": "y", "methods": ["single", "packed"], "seeds": 2, "epochs": 3}
    return lambda **options: Spec.of(**{**usual, **options})


@pytest.fixture
def run(make, tmp_path):
    """A prepared study."""
    return prepare(make(), tmp_path / "run")


@pytest.fixture
def finished(run, fake):
    """The study with all jobs done."""
    run_local(run, command=fake())
    return run


def snapshot_of(directory: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def metrics_of(run: Run) -> dict[str, bytes]:
    return {job.name: (job.directory / "metrics.json").read_bytes() for job in run.jobs}


# -- Ray ---------------------------------------------------------------------------------------------------

SMALL = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}


@contextmanager
def nodes(count: int = 2) -> Iterator[Any]:
    """Start a cluster of nodes with one core each; the first is the head."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=SMALL)
    try:
        for _ in range(count - 1):
            cluster.add_node(**SMALL)
        yield cluster
    finally:
        cluster.shutdown()


def kill_node(node: Any) -> None:
    """Kill all processes of a node at once."""
    for processes in node.all_processes.values():
        for each in processes:
            os.kill(each.process.pid, signal.SIGKILL)


def folders_left() -> list[Path]:
    """Return the temporary folders that studies have left."""
    return [path for path in Path(tempfile.gettempdir()).glob("multitudes-nodes-*/*") if path.exists()]
