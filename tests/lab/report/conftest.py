"""Runs for the tests of the page, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from multitudes.lab.report.run_results import Results, read_results
from tests.lab.report.fake_run import table_data, write_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="session")
def results(run: Path) -> Results:
    return read_results(run)


@pytest.fixture(scope="session")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return read_results(write_run(tmp_path_factory.mktemp("table"), data=table_data()))
