"""Requests that come together are one batch, and one that fails spoils no other."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, Future

import pytest

from multitudes.lab.serve.batching import Batcher, QueueFull


class Work:
    """Doubles numbers, refuses negative ones, and remembers its batches; it waits while it is held."""

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


def held(batcher: Batcher[int, int], work: Work) -> Future[int]:
    """A question that is computed until `work.free` is set, so that others wait."""
    work.free.clear()
    first = batcher.submit(0)
    assert work.begun.wait(10)
    return first


def test_what_waits_is_answered_together_and_each_gets_its_own_answer() -> None:
    work = Work()
    batcher = Batcher(work)
    first = held(batcher, work)
    others = [batcher.submit(number) for number in range(1, 20)]
    work.free.set()
    assert [each.result(10) for each in (first, *others)] == [2 * number for number in range(20)]
    assert work.batches == [[0], list(range(1, 20))]
    batcher.close()


def test_one_that_fails_does_not_spoil_the_others_of_its_batch() -> None:
    work = Work()
    batcher = Batcher(work)
    held(batcher, work)
    asked = {number: batcher.submit(number) for number in (1, -7, 3)}
    work.free.set()
    assert (asked[1].result(10), asked[3].result(10)) == (2, 6)
    with pytest.raises(ValueError, match="-7 is negative"):
        asked[-7].result(10)
    assert batcher.submit(4).result(10) == 8, "and the thread lives on"
    batcher.close()


def test_batches_have_so_many_rows_at_most_and_a_larger_question_is_one_by_itself() -> None:
    work = Work()
    batcher = Batcher(work, rows=10)
    held(batcher, work)
    asked = [batcher.submit(number, rows) for number, rows in ((1, 6), (2, 5), (3, 4), (4, 30), (5, 1))]
    work.free.set()
    assert [each.result(10) for each in asked] == [2, 4, 6, 8, 10]
    assert work.batches == [[0], [1], [2, 3], [4], [5]]
    batcher.close()


def test_too_many_rows_that_wait_are_refused_at_once() -> None:
    work = Work()
    batcher = Batcher(work, waiting=10)
    held(batcher, work)
    asked = batcher.submit(1, 9)
    with pytest.raises(QueueFull):
        batcher.submit(2, 2)
    assert batcher.waiting == 9
    work.free.set()
    assert asked.result(10) == 2
    batcher.close()


def test_a_question_that_is_given_up_while_it_waits_is_not_computed() -> None:
    work = Work()
    batcher = Batcher(work)
    held(batcher, work)
    one, two = batcher.submit(1), batcher.submit(2)
    assert one.cancel()
    work.free.set()
    assert two.result(10) == 4
    with pytest.raises(CancelledError):
        one.result(0)
    assert work.batches == [[0], [2]]
    batcher.close()


def test_a_batch_waits_for_questions_on_their_way_and_not_without_them() -> None:
    work = Work()
    batcher = Batcher(work, wait=5.0)
    start = time.monotonic()
    assert batcher.submit(1).result(10) == 2
    assert time.monotonic() - start < 4, "nothing is expected"
    with batcher.expecting():
        one = batcher.submit(2)
        time.sleep(0.05)
        assert not one.done()
        two = batcher.submit(3)
    assert (one.result(10), two.result(10)) == (4, 6)
    assert time.monotonic() - start < 4, "nothing is expected any more"
    assert work.batches == [[1], [2, 3]]
    batcher.close()


def test_a_question_that_never_comes_holds_up_a_batch_for_milliseconds() -> None:
    batcher = Batcher(Work(), wait=0.05)
    with batcher.expecting():
        start = time.monotonic()
        assert batcher.submit(1).result(10) == 2
        assert 0.04 < time.monotonic() - start < 5
    batcher.close()


def test_closing_answers_what_is_waiting() -> None:
    work = Work()
    batcher = Batcher(work)
    held(batcher, work)
    asked = [batcher.submit(number) for number in range(50)]
    threading.Timer(0.05, work.free.set).start()
    batcher.close()
    assert [each.result(0) for each in asked] == [2 * number for number in range(50)]
    with pytest.raises(RuntimeError, match="after shutdown"):
        batcher.submit(1)
