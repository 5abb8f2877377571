"""What is shown: how far a study is, and tables. On a terminal it is redrawn; in a pipe it is plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from multitudes.core.checks import plural
from multitudes.study.monitor import JobProgress, Snapshot
from multitudes.study.rows import Row

if TYPE_CHECKING:
    from multitudes.study.columns import Column

__all__ = ["clock", "console", "leaderboard_tables", "say", "say_dropped", "show", "table", "watching"]

WIDE = 1000
"""The columns of a pipe, in which nothing is cut off."""


def console(stderr: bool = False) -> Console:
    """Where to write: on a terminal as wide as that is."""
    file = sys.stderr if stderr else sys.stdout
    return Console(file=file, width=None if file.isatty() else WIDE, highlight=False, soft_wrap=not file.isatty())


def say(message: str) -> None:
    """A line about the work, on stderr."""
    console(stderr=True).print(Text(message, style="dim"))


def say_dropped(dropped: Mapping[str, int], say: Callable[[str], None] = say) -> None:
    """Say how many bad rows were left out, by reason."""
    for reason, count in dropped.items():
        say(f"Left out {plural(count, 'bad row')}: {reason}")


def show(*what: Any) -> None:
    """Results, on stdout; text is shown as it is."""
    out = console()
    for each in what:
        out.print(Text(each) if isinstance(each, str) else each)


# -- how far a study is ------------------------------------------------------------------------------------


@contextmanager
def watching(every: float = 10.0) -> Iterator[Callable[[Snapshot], None]]:
    """A function that shows snapshots; in a pipe, a line for each job that ends, and `every` so many seconds."""
    out = console(stderr=True)
    if not out.is_terminal or out.is_dumb_terminal:
        yield _Lines(every)
        return
    with Live(console=out, transient=True, refresh_per_second=5) as live:
        yield _Panel(live)


class _Lines:
    """One line after the other."""

    def __init__(self, every: float) -> None:
        self.every, self.ended, self.shown = every, -1, -every

    def __call__(self, now: Snapshot) -> None:
        ended = now.done + now.failed
        if ended == self.ended and now.seconds - self.shown < self.every:
            return
        self.ended, self.shown = ended, now.seconds
        parts = [_jobs(now), *(f"{job.name}: {', '.join(filter(None, _state(job)))}" for job in now.running)]
        if now.left is not None and ended < now.total:
            parts.append(f"about {clock(now.left)} left")
        print("; ".join(parts), file=sys.stderr, flush=True)


class _Panel:
    """All running jobs at once, redrawn in place."""

    def __init__(self, live: Live) -> None:
        self.live, self.drawn = live, 0.0

    def __call__(self, now: Snapshot) -> None:
        if time.monotonic() - self.drawn < 0.2:
            return
        self.drawn = time.monotonic()
        left = "" if now.left is None else f", about {clock(now.left)} left"
        head = Text(f"{_jobs(now)}, {clock(now.seconds)} passed{left}", style="bold")
        jobs = Table.grid(padding=(0, 2))
        for job in now.running:
            bar = ProgressBar(total=max(job.epochs, 1), completed=job.epoch, width=24)
            jobs.add_row(job.name, bar, *_state(job), clock(job.seconds))
        self.live.update(Group(head, jobs))


def _jobs(now: Snapshot) -> str:
    failed = f", {now.failed} failed" if now.failed else ""
    return f"{now.done} of {now.total} jobs done{failed}"


def _state(job: JobProgress) -> tuple[str, str]:
    """What a job is doing, and its loss."""
    epoch = f"epoch {job.epoch} of {job.epochs}" if job.epochs else "starting"
    doing = {"evaluate": "measuring", "done": "done"}.get(job.event, epoch)
    return doing, "" if job.loss is None else f"loss {job.loss:.4f}"


def clock(seconds: float) -> str:
    """Minutes and seconds.

    >>> clock(75.2), clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# -- tables ------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], words: int = 1) -> Table:
    """Rows under a head; the first `words` columns are words, the rest numbers."""
    made = Table(box=SIMPLE, pad_edge=False, show_edge=False)
    for index, title in enumerate(head):
        made.add_column(title, justify="left" if index < words else "right", no_wrap=index == 0 or index >= words)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


def leaderboard_tables(
    rows: Sequence[Row], by: str, width: int = WIDE, tiny: bool = False, unbalanced: bool = False
) -> list[Table]:
    """A row for each method and baseline, with the columns of the page; the best of a score has a star.

    Where `width` is too small for all columns, the rest of them is in further tables.
    """
    from multitudes.study.columns import first_columns, remark

    methods = [Text("method"), *(_name(row, remark(row, rows, by)) for row in rows)]
    groups: list[list[list[Text]]] = [[methods]]
    for column in first_columns(rows, by, tiny, unbalanced):
        top = column.best(rows)
        cells = [Text(column.heading), *(_cell(row, column, row is top) for row in rows)]
        if len(groups[-1]) > 1 and sum(map(_width, [*groups[-1], cells])) > width:
            groups.append([methods])
        groups[-1].append(cells)
    return [table([column[0].plain for column in group], list(zip(*group, strict=True))[1:]) for group in groups]


def _name(row: Row, remark: str) -> Text:
    from multitudes.study.columns import in_words

    return Text(f"{in_words(row)} ({remark})" if remark else row.name, style="dim" if row.baseline else "")


def _width(column: list[Text]) -> int:
    return max(map(len, column)) + 3  # two spaces and a line between columns


def _cell(row: Row, column: Column, is_best: bool) -> Text:
    value = column.of(row)
    if value is None:
        return Text("–", style="dim")
    if column.is_cost:
        return Text(column.cell(value))
    spread = "" if value.spread is None else f" ± {column.text(value.spread, beside=value.mean)}"
    return Text(f"{'★ ' if is_best else ''}{column.cell(value)}{spread}", style="bold" if is_best else "")
