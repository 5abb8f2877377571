"""Trained networks and their servers, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from multitudes.lab import data as datasets
from multitudes.lab.data import Data
from multitudes.lab.serve.requests import Limits
from multitudes.lab.serve.served_network import ServedNetwork
from multitudes.lab.study.run.store import Run
from tests.lab.cli.test_predict import garden
from tests.lab.serve.serve_cases import Client, in_thread, once, served


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Run:
    methods = {"deep": {"members": 3}, "mc_dropout": {}}
    return once(tmp_path_factory, "images", data="digits", limit=300, methods=methods, epochs=3)


@pytest.fixture(scope="module")
def digits(images: Run) -> Data:
    return datasets.read(images.data_path)


@pytest.fixture(scope="module")
def deep(images: Run) -> ServedNetwork:
    return served(images.job("deep", 0).directory)


@pytest.fixture(scope="module")
def client(deep: ServedNetwork) -> Iterator[Client]:
    with in_thread(deep, limits=Limits(size=200_000, rows=40, pixels=1_000_000)) as found:
        yield found


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Run:
    source = garden(tmp_path_factory.mktemp("garden") / "garden.csv")
    options = {"target": "height", "methods": {"deep": {"members": 2}}, "epochs": 20, "model": "mlp"}
    return once(tmp_path_factory, "table", data=source, **options)


@pytest.fixture(scope="module")
def rows(table: Run) -> Iterator[Client]:
    with in_thread(table.jobs[0].directory, limits=Limits(rows=40)) as found:
        yield found
