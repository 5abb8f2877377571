"""Terminal output: tables, and progress of a study (redrawn on a terminal, lines in a pipe)."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from multitudes.base.checks import plural
from multitudes.lab.study.results.result_rows import Row
from multitudes.lab.study.run.monitor import JobProgress, Snapshot

if TYPE_CHECKING:
    from multitudes.lab.data.tables.column_types import ColumnReading
    from multitudes.lab.report.board import Cell

WIDE = 1000
"""Width in columns of output to a pipe, so that nothing is cut."""
SHOWN = 20
"""Maximum number of columns that are all listed; with more, those without a remark are counted."""


def console(stderr: bool = False) -> Console:
    """Return a console for stdout or stderr."""
    file = sys.stderr if stderr else sys.stdout
    return Console(file=file, width=None if file.isatty() else WIDE, highlight=False, soft_wrap=not file.isatty())


def say(message: str) -> None:
    """Print a status line to stderr."""
    console(stderr=True).print(Text(message, style="dim"))


def say_dropped(dropped: Mapping[str, int], say: Callable[[str], None] = say) -> None:
    """Print the number of bad rows that were left out, by reason."""
    for reason, count in dropped.items():
        say(f"Left out {plural(count, 'bad row')}: {reason}")


def say_columns(readings: Sequence[ColumnReading]) -> None:
    """Print to stderr how each column was parsed."""
    if not readings:
        return
    plain = [each for each in readings if not (each.dropped or each.note or each.missing)]
    counted = plain if len(readings) > SHOWN else []
    rows = []
    for each in readings:
        if each not in counted:
            remarks = [f"left out: {each.dropped}" if each.dropped else "", each.note]
            rows.append([each.name, each.read_as, each.values, each.missing, "; ".join(filter(None, remarks))])
    console(stderr=True).print(table(["column", "read as", "values", "missing", "remark"], rows, words=5))
    for kind, count in Counter(each.read_as for each in counted).items():
        say(f"and {plural(count, 'column')} more, read as {kind}, without a remark")
    texts = any(each.read_as == "text" and not each.dropped for each in readings)  # at most one column
    if any(each.dropped or each.note for each in readings) and not texts:
        say("Leave a column out with --drop COLUMN, or set its type with --as COLUMN=KIND")


def show(*what: Any) -> None:
    """Print results to stdout; strings are printed as they are."""
    out = console()
    for each in what:
        out.print(Text(each) if isinstance(each, str) else each)


# -- progress of a study -----------------------------------------------------------------------------------


@contextmanager
def watching(every: float = 10.0) -> Iterator[Callable[[Snapshot], None]]:
    """Yield a function that shows snapshots; in a pipe, it prints when a job ends and `every` few seconds."""
    out = console(stderr=True)
    if out.is_terminal and not out.is_dumb_terminal:
        with Live(console=out, transient=True, refresh_per_second=5) as live:
            yield lambda now: live.update(_panel(now))
        return
    ended, shown = -1, -every

    def line(now: Snapshot) -> None:
        nonlocal ended, shown
        if now.done + now.failed == ended and now.seconds - shown < every:
            return
        ended, shown = now.done + now.failed, now.seconds
        parts = [_jobs(now), *(f"{job.name}: {', '.join(filter(None, _state(job)))}" for job in now.running)]
        if now.left is not None and ended < now.total:
            parts.append(f"about {clock(now.left)} left")
        print("; ".join(parts), file=sys.stderr, flush=True)

    yield line


def _panel(now: Snapshot) -> Group:
    """Show all running jobs."""
    left = "" if now.left is None else f", about {clock(now.left)} left"
    head = Text(f"{_jobs(now)}, {clock(now.seconds)} elapsed{left}", style="bold")
    jobs = Table.grid(padding=(0, 2))
    for job in now.running:
        bar = ProgressBar(total=max(job.epochs, 1), completed=job.epoch, width=24)
        jobs.add_row(job.name, bar, *_state(job), clock(job.seconds))
    return Group(head, jobs)


def _jobs(now: Snapshot) -> str:
    failed = f", {now.failed} failed" if now.failed else ""
    return f"{now.done} of {now.total} jobs done{failed}"


def _state(job: JobProgress) -> tuple[str, str]:
    """Return what a job is doing, and its loss."""
    epoch = f"epoch {job.epoch} of {job.epochs}" if job.epochs else "starting"
    doing = {"evaluate": "measuring", "done": "done"}.get(job.event, epoch)
    return doing, "" if job.loss is None else f"loss {job.loss:.4f}"


def clock(seconds: float) -> str:
    """Format minutes and seconds.

    >>> clock(75.2), clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# -- tables ------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], words: int = 1) -> Table:
    """Make a table; the first `words` columns are text, the others numbers."""
    made = Table(box=SIMPLE, pad_edge=False, show_edge=False)
    for index, title in enumerate(head):
        made.add_column(title, justify="left" if index < words else "right", no_wrap=index == 0 or index >= words)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


def leaderboard_tables(
    rows: Sequence[Row], by: str, width: int = WIDE, tiny: bool = False, unbalanced: bool = False
) -> list[Table]:
    """Make the leaderboard tables: a row per method and baseline, with the columns of the page; a star marks the best.

    Columns that exceed `width` go into further tables.
    """
    from multitudes.lab.report.board import cells_of
    from multitudes.lab.study.results.score_columns import display_name, first_columns, remark

    methods = [Text("method")]
    for row in rows:
        note = remark(row, rows, by)
        methods.append(Text(f"{display_name(row)} ({note})" if note else row.name, style="dim" if row.baseline else ""))
    groups: list[list[list[Text]]] = [[methods]]
    for column in first_columns(rows, by, tiny, unbalanced):
        cells = [Text(column.heading), *map(_cell, cells_of(rows, column))]
        if len(groups[-1]) > 1 and sum(map(_width, [*groups[-1], cells])) > width:
            groups.append([methods])
        groups[-1].append(cells)
    return [table([column[0].plain for column in group], list(zip(*group, strict=True))[1:]) for group in groups]


def _width(column: list[Text]) -> int:
    return max(map(len, column)) + 3  # two spaces and a line between columns


def _cell(cell: Cell) -> Text:
    style = "bold" if cell.best else "dim" if math.isnan(cell.value) else ""
    spread = f" ± {cell.spread}" if cell.spread else ""
    return Text(f"{'★ ' if cell.best else ''}{cell.text}{spread}", style=style)
