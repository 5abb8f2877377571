"""Settings of all tests. Only the first cases of a test marked `quick(count)` are quick; `campaign` implies `slow`."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background, where Ctrl-C could not be tested
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("campaign") is not None:
            item.add_marker(pytest.mark.slow)
        if (mark := item.get_closest_marker("quick")) is not None:
            name = f"{item.path}::{item.originalname}"
            seen[name] += 1
            if seen[name] > mark.args[0]:
                item.add_marker(pytest.mark.slow)
