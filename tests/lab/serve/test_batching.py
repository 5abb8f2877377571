"""Concurrent requests share a batch, and a failure affects only its request."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, Future

import pytest

from multitudes.lab.serve.batching import Batcher, QueueFull


class Work:
    """Double numbers, refuse negative ones, and record the batches; wait while `free` is not set."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.free, self.begun = threading.Event(), threading.Event()
        self.free.set()

    def __call__(self, numbers: list[int]) -> list[int]:
        self.begun.set()
        assert self.free.wait(10)
        self.batches.append(numbers)
        if any(number < 0 for number in numbers):
            raise ValueError(f"{min(numbers)} is negative")
        return [2 * number for number in numbers]


def blocked(batcher: Batcher[int, int], work: Work) -> Future[int]:
    """Submit a question that is computed until `work.free` is set, so that others wait."""
    work.free.clear()
    first = batcher.submit(0)
    assert work.begun.wait(10)
    return first


def test_waiting_questions_are_answered_in_one_batch() -> None:
    work = Work()
    batcher = Batcher(work)
    first = blocked(batcher, work)
    others = [batcher.submit(number) for number in range(1, 20)]
    work.free.set()
    assert [each.result(10) for each in (first, *others)] == [2 * number for number in range(20)]
    assert work.batches == [[0], list(range(1, 20))]
    batcher.close()


def test_a_failure_does_not_affect_the_rest_of_the_batch() -> None:
    work = Work()
    batcher = Batcher(work)
    blocked(batcher, work)
    asked = {number: batcher.submit(number) for number in (1, -7, 3)}
    work.free.set()
    assert (asked[1].result(10), asked[3].result(10)) == (2, 6)
    with pytest.raises(ValueError, match="-7 is negative"):
        asked[-7].result(10)
    assert batcher.submit(4).result(10) == 8
    batcher.close()


def test_batches_have_a_maximum_size_and_larger_questions_run_alone() -> None:
    work = Work()
    batcher = Batcher(work, rows=10)
    blocked(batcher, work)
    asked = [batcher.submit(number, rows) for number, rows in ((1, 6), (2, 5), (3, 4), (4, 30), (5, 1))]
    work.free.set()
    assert [each.result(10) for each in asked] == [2, 4, 6, 8, 10]
    assert work.batches == [[0], [1], [2, 3], [4], [5]]
    batcher.close()


def test_a_full_queue_refuses_questions() -> None:
    work = Work()
    batcher = Batcher(work, waiting=10)
    blocked(batcher, work)
    asked = batcher.submit(1, 9)
    with pytest.raises(QueueFull):
        batcher.submit(2, 2)
    assert batcher.waiting == 9
    work.free.set()
    assert asked.result(10) == 2
    batcher.close()


def test_a_cancelled_question_is_not_computed() -> None:
    work = Work()
    batcher = Batcher(work)
    blocked(batcher, work)
    one, two = batcher.submit(1), batcher.submit(2)
    assert one.cancel()
    work.free.set()
    assert two.result(10) == 4
    with pytest.raises(CancelledError):
        one.result(0)
    assert work.batches == [[0], [2]]
    batcher.close()


def test_a_batch_waits_for_expected_questions_only() -> None:
    work = Work()
    batcher = Batcher(work, wait=5.0)
    assert batcher.submit(1).result(4) == 2
    with batcher.expecting():
        one = batcher.submit(2)
        time.sleep(0.05)
        assert not one.done()
        two = batcher.submit(3)
    assert (one.result(4), two.result(4)) == (4, 6)
    assert work.batches == [[1], [2, 3]]
    batcher.close()


def test_a_batch_does_not_wait_forever() -> None:
    batcher = Batcher(Work(), wait=0.05)
    with batcher.expecting():
        assert batcher.submit(1).result(5) == 2
    batcher.close()


def test_closing_answers_waiting_questions() -> None:
    work = Work()
    batcher = Batcher(work)
    blocked(batcher, work)
    asked = [batcher.submit(number) for number in range(50)]
    threading.Timer(0.05, work.free.set).start()
    batcher.close()
    assert [each.result(0) for each in asked] == [2 * number for number in range(50)]
    with pytest.raises(RuntimeError, match="after shutdown"):
        batcher.submit(1)
