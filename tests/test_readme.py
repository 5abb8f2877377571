"""The README's Python runs as it is written there, from top to bottom."""

import re
from pathlib import Path

import pytest
import torch

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
