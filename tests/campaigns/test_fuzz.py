"""Whatever is in a file, reading it gives what it should, or one sentence that says what is wrong."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from multitudes.lab.study.spec.method_rows import METHODS
from multitudes.lab.study.spec.planning import check_methods
from multitudes.lab.study.spec.specification import Spec
from tests.campaigns.fuzz import KINDS, fuzz, outcome

ODD = (-1, 0, 1, 2.5, 1e9, 10**6, 10**20, "x", [], [1], "", True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_mutated_files_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    found = fuzz(kind, 1000, 0, tmp_path)
    assert found["read"] and found["refused"] and found.keys() == {"read", "refused"}, found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].settings])
def test_odd_settings_are_built_or_refused(name: str) -> None:
    about = {"shape": [1, 8, 8], "task": "classification", "outputs": 10, "parts": {"train": 200}}
    for key, value in itertools.product(METHODS[name].settings, ODD):

        def build(key: str = key, value: object = value) -> None:
            spec = Spec.of(data="digits", methods={name: {key: value}}, epochs=3)
            check_methods(spec.resolved((1, 8, 8)), about, [name])

        assert outcome(build) in ("read", "refused"), (key, value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_mutated_files_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    assert fuzz(kind, 40, 1, tmp_path).keys() <= {"read", "refused"}
