"""Hundreds of damaged files: no finished work is lost, no wrong result is used, no traceback, no hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.damage import DAMAGE, FAULTS, campaign


@pytest.mark.slow
def test_five_hundred_damaged_files_lose_nothing_and_change_no_result(tmp_path: Path) -> None:
    told: list[str] = []
    found = campaign(500, 0, tmp_path, told.append)
    assert found["cases"] == 500 and all(found[how] for how in DAMAGE)
    assert not any(found[fault] for fault in FAULTS), told
