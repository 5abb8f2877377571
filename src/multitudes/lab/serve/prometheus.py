"""Metrics of the server, in the text format of Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class _Histogram:
    """Counts of values up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def values(self) -> dict[str, Any]:
        """Return the numbers by suffix of their metric names."""
        below = zip((*self.bounds, "+Inf"), accumulate(self.counts), strict=True)
        buckets = {f'_bucket{{le="{bound}"}}': count for bound, count in below}
        return {**buckets, "_sum": f"{self.total:.9g}", "_count": sum(self.counts)}


class ServerMetrics:
    """Counts of requests by path and status, prediction times, and batch sizes; thread-safe.

    >>> metrics = ServerMetrics()
    >>> metrics.request("/predict", 200, 0.02)
    >>> print("\\n".join(metrics.text(0, 0).splitlines()[2:3]))
    multitudes_requests_total{path="/predict",status="200"} 1
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds, self._rows = _Histogram(SECONDS), _Histogram(ROWS)

    def request(self, path: str, status: int, seconds: float) -> None:
        """Record an answered request to one of the server's paths."""
        with self._lock:
            self._requests[path, status] += 1
            if path == "/predict":
                self._seconds.add(seconds)

    def batch(self, rows: int) -> None:
        """Record the start of a batch."""
        with self._lock:
            self._rows.add(rows)

    def text(self, under_way: int, waiting: int) -> str:
        """Format all metrics, including the number of running predictions and waiting rows."""
        with self._lock:
            counts = {f'{{path="{path}",status="{status}"}}': n for (path, status), n in sorted(self._requests.items())}
            lines = [
                *_metric("requests_total", "counter", "Answered requests.", counts),
                *_metric(
                    "predict_seconds", "histogram", "Seconds from the start of a request to its answer.",
                    self._seconds.values(),
                ),
                *_metric("batch_rows", "histogram", "Rows per batch.", self._rows.values()),
                *_metric("under_way", "gauge", "Running requests to /predict.", {"": under_way}),
                *_metric("waiting_rows", "gauge", "Rows waiting for a batch.", {"": waiting}),
            ]  # fmt: skip
        return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, description: str, values: Mapping[str, Any]) -> list[str]:
    name = f"multitudes_{name}"
    return [
        f"# HELP {name} {description}",
        f"# TYPE {name} {kind}",
        *(f"{name}{end} {value}" for end, value in values.items()),
    ]
