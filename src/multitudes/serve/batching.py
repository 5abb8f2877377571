"""Requests that come together are answered as one batch.

One thread computes. While it does, requests wait; when it is free, it takes all that are waiting, up to a number of
rows, and first waits a few milliseconds if others are on their way (`expecting`). A batch that fails is answered
request by request, so that only the one at fault gets the error.
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
    """As many rows as may wait are waiting."""


@dataclass(eq=False)
class _Waiting(Generic[Question, Answer]):
    question: Question
    rows: int
    answer: Future[Answer] = field(default_factory=Future)


class Batcher(Generic[Question, Answer]):
    """Answers questions in batches, in a thread of its own.

    Args:
        work: the answers to a batch of questions, in their order.
        rows: the most rows of a batch; a question with more is a batch by itself.
        wait: for how many seconds a batch waits for questions that are expected.
        waiting: the most rows that may wait; beyond, `submit` raises `QueueFull`.
        watch: is told the rows of each batch.

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
        """Have a question answered; a future that is cancelled before its batch begins costs nothing."""
        one: _Waiting[Question, Answer] = _Waiting(question, rows)
        with self._changed:
            if self._queue and self.waiting + rows > self._limit:
                raise QueueFull
            self._thread.submit(self._run)  # which raises a RuntimeError once it is closed
            self._queue.append(one)
            self._changed.notify()
        return one.answer

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Inside, a question is on its way, for which a batch may wait."""
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
        """Rows that wait to be computed."""
        return sum(each.rows for each in list(self._queue))

    def close(self) -> None:
        """Answer what is waiting, and end."""
        self._thread.shutdown()

    # -- in the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Answer a batch. This is called once for each question, and does nothing once all have been taken."""
        batch = [each for each in self._next() if each.answer.set_running_or_notify_cancel()]
        if batch:
            self._watch(sum(each.rows for each in batch))
            self._settle(batch)

    def _next(self) -> list[_Waiting[Question, Answer]]:
        """The questions to answer together."""
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

    def _settle(self, batch: list[_Waiting[Question, Answer]]) -> None:
        try:
            answers = self._work([each.question for each in batch])
            if len(answers) != len(batch):
                raise RuntimeError(f"{len(batch)} questions got {len(answers)} answers")
        except BaseException as error:  # whatever it is, the thread must live on
            if len(batch) == 1:
                batch[0].answer.set_exception(error)
                return
            for each in batch:
                self._settle([each])
            return
        for each, answer in zip(batch, answers, strict=True):
            each.answer.set_result(answer)
