"""The README's Python runs as it is written there, from top to bottom."""

import re
from pathlib import Path

import pytest
import torch

import multitudes as mt
from multitudes.tasks import TASKS

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_every_python_block_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = README.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python") > 0
    monkeypatch.chdir(tmp_path)  # where the README's own files may lie
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        # Behind as many empty lines as in the README, so that a traceback names its own line.
        source = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(source, str(README), "exec"), namespace)


SIZES = {"B": 6, "C": 4, "H": 8, "W": 8, "T": 5, "L": 3, "D": 2, "2*D": 4, "Q": 5, "1": 1}
ROW = re.compile(r"^\| `\"(\w+)\"` \| (.*?) \| (.*?) \| .*? \| (.*?) \|$", re.MULTILINE)


def shapes_in(text: str) -> list[list[int]]:
    return [[SIZES[name.strip()] for name in shape.split(",")] for shape in re.findall(r"`\[(.*?)\]`", text)]


def test_the_table_of_tasks_has_every_task_with_the_shapes_and_quantities_that_it_has() -> None:
    rows = ROW.findall(README.read_text(encoding="utf-8"))
    assert {task for task, *_ in rows} == set(TASKS)
    for task, outputs, targets, quantities in rows:
        for output, target in zip(shapes_in(outputs), shapes_in(targets), strict=False):
            net = mt.Multitude(torch.nn.Identity())
            net.task = task
            x, whole = torch.randn(output), task in ("classification", "tokens", "binary", "multilabel")
            y = torch.randint(2, target) if whole else torch.randn(target)
            assert net.loss(x, y).isfinite()
            p = net.predict(x)
            for name, level in re.findall(r"`(\w+)(?:\((.*?)\))?`", quantities):
                found = getattr(p, name)(float(level)) if level else getattr(p, name)
                for tensor in found if isinstance(found, tuple) else (found,):
                    assert tensor.isfinite().all()
