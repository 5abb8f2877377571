"""Whatever is in a file, reading it gives what it should, or one sentence that says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import KINDS, fuzz


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_mutated_files_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    found = fuzz(kind, 1000, 0, tmp_path)
    assert found["read"] and found["refused"] and found.keys() == {"read", "refused"}, found


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_mutated_files_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    assert fuzz(kind, 40, 1, tmp_path).keys() <= {"read", "refused"}
