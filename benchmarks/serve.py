"""Requests per second of `multitudes serve`, with 1, 8 and 32 clients that each wait for a response.

    python benchmarks/serve.py
    python benchmarks/serve.py --job runs/digits/jobs/packed-0 --seconds 10

Without `--job`, the script first trains a packed ensemble on the digits for a few seconds. Server and clients are two
processes on this machine, and use the loopback interface. Each client sends test inputs of the job, one per request.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from multitudes.lab.serve.held_out import examples, held_out
from multitudes.lab.study.run.trained_network import Trained
from multitudes.lab.study.run.worker import run as run_job
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, help="RUN/jobs/METHOD-SEED")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=5.0, help="for each number of clients")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = given.job or trained(Path(folder) / "run", given.device)
        bodies = [request(each) for each in inputs(job)]
        server, port = started(job, given.device)
        try:
            asyncio.run(load(port, bodies, 8, 1.0))  # warm up
            print(f"{'clients':>8}{'requests/s':>12}{'median ms':>12}{'99 % ms':>12}{'rows/batch':>12}")
            for clients in given.clients:
                before = batches(port)
                start = time.perf_counter()
                times = asyncio.run(load(port, bodies, clients, given.seconds))
                rate = len(times) / (time.perf_counter() - start)
                rows, count = (now - was for now, was in zip(batches(port), before, strict=True))
                late = sorted(times)[int(0.99 * len(times))]
                middle = statistics.median(times)
                print(f"{clients:8}{rate:12.0f}{1e3 * middle:12.2f}{1e3 * late:12.2f}{rows / count:12.1f}", flush=True)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def trained(out: Path, device: str) -> Path:
    spec = Spec.of(data="digits", methods={"packed": {}}, epochs=5, shift=[], device=device)
    (job,) = prepare(spec, out).jobs
    run_job(job.directory)
    return job.directory


def inputs(job: Path) -> list[tuple[str, bytes]]:
    """Return content types and bodies of requests, from test inputs of the job."""
    found = Trained.read(job, "cpu")
    some = examples(found.data, held_out(found))
    bodies = []
    for each in (*some["sure"], *some["unsure"]):
        if "image" in each:
            bodies.append(("image/png", base64.b64decode(each["image"].partition(",")[2])))
        elif "text" in each:
            bodies.append(("text/plain", each["text"].encode()))
        else:
            bodies.append(("application/json", json.dumps({"rows": [each["row"]]}).encode()))
    return bodies


def request(given: tuple[str, bytes]) -> bytes:
    kind, body = given
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def started(job: Path, device: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "multitudes", "serve", str(job), "--port", "0", "--device", device]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"at http://.*:(\d+) ", line):
            return server, int(found[1])
    raise SystemExit("the server did not start")


def batches(port: int) -> tuple[float, float]:
    """Return the numbers of rows and batches so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    rows, count = (re.search(rf"multitudes_batch_rows_{name} (\S+)", text) for name in ("sum", "count"))
    assert rows and count
    return float(rows[1]), float(count[1])


async def load(port: int, bodies: list[bytes], clients: int, seconds: float) -> list[float]:
    """Return the seconds of each request of all clients."""
    until = time.perf_counter() + seconds
    found = await asyncio.gather(*(client(port, bodies, number, until) for number in range(clients)))
    return [each for times in found for each in times]


async def client(port: int, bodies: list[bytes], number: int, until: float) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times = []
    while (start := time.perf_counter()) < until:
        writer.write(bodies[(number + len(times)) % len(bodies)])
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert head.startswith(b"HTTP/1.1 200") and length, head
        await reader.readexactly(int(length[1]))
        times.append(time.perf_counter() - start)
    writer.close()
    return times


if __name__ == "__main__":
    main()
