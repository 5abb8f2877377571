"""Combine concurrent requests into batches.

One thread computes. When it is free, it takes all waiting requests up to a number of rows, after a few milliseconds if
others are expected (`expecting`). A failed batch is retried request by request, so that only the faulty one gets the
error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class QueueFull(Exception):
    """Exception of a full queue."""


@dataclass(eq=False)
class _Waiting(Generic[Question, Answer]):
    question: Question
    rows: int
    answer: Future[Answer] = field(default_factory=Future)


class Batcher(Generic[Question, Answer]):
    """Answer questions in batches, in a separate thread.

    Args:
        work: Function that answers a batch of questions, in order.
        rows: Maximum rows of a batch; a larger question is a batch of its own.
        wait: Seconds that a batch waits for expected questions.
        waiting: Maximum waiting rows; beyond, `submit` raises `QueueFull`.
        watch: Function called with the rows of each batch.

    >>> batcher = Batcher(lambda numbers: [2 * number for number in numbers])
    >>> batcher.submit(21).result()
    42
    >>> batcher.close()
    """

    def __init__(
        self,
        work: Callable[[list[Question]], Sequence[Answer]],
        *,
        rows: int = 256,
        wait: float = 0.003,
        waiting: int = 4096,
        watch: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self._work, self._watch = work, watch
        self._most, self._wait, self._limit = rows, wait, waiting
        self._queue: deque[_Waiting[Question, Answer]] = deque()
        self._changed = threading.Condition()
        self._expected = 0
        self._thread = ThreadPoolExecutor(1, "batches")

    def submit(self, question: Question, rows: int = 1) -> Future[Answer]:
        """Queue a question; cancelling the future before its batch starts skips it."""
        one: _Waiting[Question, Answer] = _Waiting(question, rows)
        with self._changed:
            if self._queue and self.waiting + rows > self._limit:
                raise QueueFull
            self._thread.submit(self._run)  # raises a RuntimeError once it is closed
            self._queue.append(one)
            self._changed.notify()
        return one.answer

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Announce a question inside the context, so that a batch may wait for it."""
        with self._changed:
            self._expected += 1
        try:
            yield
        finally:
            with self._changed:
                self._expected -= 1
                self._changed.notify()

    @property
    def waiting(self) -> int:
        """Rows waiting to be computed."""
        return sum(each.rows for each in list(self._queue))

    def close(self) -> None:
        """Answer waiting questions, and end."""
        self._thread.shutdown()

    # -- in the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Answer a batch. Called once per question; does nothing once all have been taken."""
        batch = [each for each in self._next() if each.answer.set_running_or_notify_cancel()]
        if batch:
            self._watch(sum(each.rows for each in batch))
            self._answer(batch)

    def _next(self) -> list[_Waiting[Question, Answer]]:
        """Take the questions of the next batch."""
        batch: list[_Waiting[Question, Answer]] = []
        with self._changed:
            until = time.monotonic() + self._wait
            while self._queue and self._expected and self.waiting < self._most:
                if (left := until - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
            while self._queue and (not batch or sum(e.rows for e in batch) + self._queue[0].rows <= self._most):
                batch.append(self._queue.popleft())
        return batch

    def _answer(self, batch: list[_Waiting[Question, Answer]]) -> None:
        try:
            answers = self._work([each.question for each in batch])
            if len(answers) != len(batch):
                raise RuntimeError(f"{len(batch)} questions got {len(answers)} answers")
        except BaseException as error:  # the thread must survive any error
            if len(batch) == 1:
                batch[0].answer.set_exception(error)
                return
            for each in batch:
                self._answer([each])
            return
        for each, answer in zip(batch, answers, strict=True):
            each.answer.set_result(answer)
