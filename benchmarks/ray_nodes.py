"""Utilization of two local Ray nodes of one core each in a study of many small jobs.

python -m benchmarks.ray_nodes 200
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from multitudes.lab.study.run.execution import run_cluster
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec
from tests.lab.study.study_cases import nodes, write_table


def main(count: int) -> None:
    """Run `count` jobs, and print the share of the nodes' time in which a job was running."""
    with tempfile.TemporaryDirectory() as folder:
        table = write_table(Path(folder))
        spec = Spec.of(data=table, target="y", methods=["single"], seeds=count, epochs=20)
        run = prepare(spec, Path(folder) / "run")
        with nodes(2) as cluster:
            start = time.time()
            run_cluster(run, cluster.address)
            whole = time.time() - start
        spans = [[event["time"] for event in job.events()[0]] for job in run.done]
        first, last = min(span[0] for span in spans), max(span[-1] for span in spans)
        busy = sum(span[-1] - span[0] for span in spans)
        print(f"{len(spans)} jobs in {whole:.0f} s, {last - first:.0f} s from the first start to the last end;")
        print(f"both nodes were busy for {busy / 2 / (last - first):.0%} of that, {busy / len(spans):.2f} s a job")


if __name__ == "__main__":
    main(int(sys.argv[1]))
