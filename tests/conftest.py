"""Settings of all tests. `quick(count)` marks all but the first `count` cases of a test as slow, `campaign` all."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # true in a shell's background; tests send Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
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
