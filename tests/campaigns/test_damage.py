"""Damage files of a finished study: no finished work is lost, no wrong result is used, no traceback, no hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.damage import DAMAGE, FAULTS, campaign


@pytest.mark.parametrize(
    "count", [pytest.param(10, marks=pytest.mark.slow), pytest.param(500, marks=pytest.mark.campaign)]
)
def test_damaged_files_lose_nothing_and_change_no_result(count: int, tmp_path: Path) -> None:
    messages: list[str] = []
    found = campaign(count, 0, tmp_path, messages.append)
    assert found["cases"] == count and (count < 100 or all(found[kind] for kind in DAMAGE))
    assert not any(found[fault] for fault in FAULTS), messages
