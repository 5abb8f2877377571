"""Reading a mutated file returns its content or raises one sentence that says what is wrong."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from multitudes.lab.study.spec.method_rows import METHODS
from multitudes.lab.study.spec.planning import check_methods
from multitudes.lab.study.spec.specification import Spec
from tests.campaigns.fuzz import KINDS, fuzz, outcome

ODD = (-1, 0, 1, 2.5, 1e9, 10**6, 10**20, "x", [], [1], "", True)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_are_read_or_refused(kind: str, count: int, tmp_path: Path) -> None:
    found = fuzz(kind, count, 0, tmp_path)
    assert found.keys() <= {"read", "refused"}, found
    assert count < 100 or (found["read"] and found["refused"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].settings])
def test_odd_settings_are_built_or_refused(name: str) -> None:
    about = {"shape": [1, 8, 8], "task": "classification", "outputs": 10, "parts": {"train": 200}}
    for key, value in itertools.product(METHODS[name].settings, ODD):

        def build(key: str = key, value: object = value) -> None:
            spec = Spec.of(data="digits", methods={name: {key: value}}, epochs=3)
            check_methods(spec.resolved((1, 8, 8)), about, [name])

        assert outcome(build) in ("read", "refused"), (key, value)
