"""The answer: what was asked, what came out, and the numbers that it stands on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from multitudes.metrics.declare import Better
from multitudes.report.html import Cell, Section, details, number, plotted, section, table, text
from multitudes.report.quality import axes
from multitudes.report.results import Results, mean_spread
from multitudes.report.style import Style, View, chooser, legend, named, plot
from multitudes.study.leaderboard import better, marks, verdict

__all__ = ["answer", "cost", "standings"]


def answer(results: Results) -> str:
    """The head of the page: the question, the answer, and what is missing from it."""
    methods = results.methods
    question = f"Which of {len(methods)} methods" if len(methods) > 1 else f"Is {methods[0]}"
    question += (
        f" is worth its price on {results.name}?" if len(methods) > 1 else f" worth its price on {results.name}?"
    )
    head = f'<header><h1>{text(question)}</h1>\n<p class="answer">{text(verdict(results.board))}</p>'
    return f"{head}\n{_missing(results)}</header>"


def _missing(results: Results) -> str:
    if not results.missing:
        return ""
    failed = [f"{name} failed: {reason}" for name, reason in results.missing.items() if reason]
    waiting = [name for name, reason in results.missing.items() if not reason]
    total = len(results.missing) + len(results.outcomes)
    lines = [f"<li>{text(line)}</li>" for line in failed]
    if waiting:
        lines.append(f"<li>not done: {text(', '.join(waiting))}</li>")
    start = f"<b>This page is not complete:</b> {len(results.missing)} of {total} jobs have no result."
    return f'<aside class="missing" role="note"><p>{start}</p><ul>{"".join(lines)}</ul></aside>'


# -- the leaderboard ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of the leaderboard: its heading, the score or cost that it shows, and in which unit."""

    title: str
    name: str
    unit: str = ""
    """ "%" of what is a share, "×" of what is a ratio."""
    inverse: bool = False
    """Whether a speed is shown as a time."""

    @property
    def digits(self) -> int:
        """Of the fraction: the same for all methods, so that numbers can be compared at a glance."""
        return 1 if self.unit else 3

    def values(self, results: Results, method: str) -> list[float]:
        """For each seed, as they are shown."""
        if self.name.startswith("costs/"):
            found = results.costs(method, self.name.removeprefix("costs/"))
        else:
            found = results.scores(method, self.name)
        scale = 100 if self.unit == "%" else 1
        return [scale / value if self.inverse else scale * value for value in found if value or not self.inverse]


SCORES = (
    Column("accuracy", "accuracy", "%"),
    Column("NLL", "nll"),
    Column("ECE", "ece", "%"),
    Column("RMSE", "rmse"),
    Column("log density", "log_density"),
    Column("CRPS", "crps"),
    Column("95 % interval holds", "coverage_95", "%"),
    Column("95 % width", "width_95"),
    Column("shifted accuracy", "shift/mean/accuracy", "%"),
)
COSTS = (
    Column("inference time", "costs/inference_per_second_ratio", "×", inverse=True),
    Column("training time", "costs/training_seconds_ratio", "×"),
    Column("parameters", "costs/parameters_ratio", "×"),
    Column("multiply-adds", "costs/multiply_adds_ratio", "×"),
    Column("peak memory", "costs/peak_memory_bytes_ratio", "×"),
)
PARAMETERS = COSTS[2]


def columns(results: Results) -> tuple[list[Column], list[Column]]:
    """Those of the leaderboard, and the rest, that something is known about."""
    names = results.score_names()
    foreign = [name.split("/")[1:-2] for name in names if name.startswith("ood/") and name.endswith("/entropy/auroc")]
    tell = [Column(f"AUROC {'/'.join(each)}", f"ood/{'/'.join(each)}/entropy/auroc", "%") for each in foreign]
    first = [*SCORES, *tell, *COSTS[:3]]
    told = [column.name for column in first]
    rest = [Column(name.replace("_", " "), name) for name in names if "/" not in name and name not in told]

    def known(columns: list[Column]) -> list[Column]:
        return [column for column in columns if any(column.values(results, method) for method in results.methods)]

    return known(first), known([*rest, *COSTS[3:]])


def standings(results: Results) -> Section:
    """The leaderboard: mean and deviation over seeds, the best of each score, and what is within noise of it."""
    first, rest = columns(results)
    seeds = sorted({len(row.seeds) for row in results.board})
    over = "one seed" if seeds == [1] else f"{' to '.join(map(str, sorted({seeds[0], seeds[-1]})))} seeds"
    deviation = "" if seeds == [1] else ", ± the standard deviation between them"
    caption = (
        f"Mean over {over}{deviation}. <b class=best>★</b> is the best of a score, <span class=noise>≈</span> within "
        "noise of it. Costs are ratios to a single network, measured beside it."
    )
    noise = (
        "<p>A method is within noise of the best where their difference is no larger than two standard errors of the "
        "difference: over several seeds, from the deviation between them; with one seed, from the test inputs, which "
        "all methods answered. Over few seeds this is a rough measure: a difference that is called noise may be real, "
        "and of many comparisons one that is not may be none. More seeds tell.</p>"
    )
    return section(
        "leaderboard",
        "Leaderboard",
        _board(results, caption, first),
        details("What “within noise” means", noise),
        details("More scores and costs", _board(results, "More scores and costs, told as above", rest)) if rest else "",
    )


def _board(results: Results, caption: str, shown: list[Column]) -> str:
    # A cost has its cheapest, but of that nobody needs to be told: it is the single network.
    found = {column.name: marks(results.board, column.name) for column in shown if column not in COSTS}
    rows = []
    for row in results.board:
        cells = [Cell(named(results.methods.index(row.name), row.name), row.name)]
        for column in shown:
            cells.append(_cell(column, column.values(results, row.name), found.get(column.name, {}).get(row.name, "")))
        rows.append(cells)
    return table(caption, ["Method", *(_title(column) for column in shown)], rows, sortable=True, style="board")


def _title(column: Column) -> str:
    """With its unit and an arrow to what is better."""
    arrow = "" if column in COSTS else better(column.name).value
    return f"{column.title} {column.unit}".strip() + (f"\u00a0{arrow}" if arrow else "")


SIGNS = {"best": ("★", "the best"), "noise": ("≈", "within noise of the best")}


def _cell(column: Column, values: list[float], mark: str) -> Cell:
    mean, spread = mean_spread(values)
    if math.isnan(mean):
        return Cell("–")
    sign = '<b class="sign" title="{1}">{0}</b>'.format(*SIGNS[mark]) if mark else ""
    # How a ratio varies between seeds is the clock's noise, and says nothing of the method.
    quiet = math.isnan(spread) or column in COSTS
    deviation = "" if quiet else f' <small class="pm">± {_fixed(spread, column.digits)}</small>'
    return Cell(f"{sign}<span>{_fixed(mean, column.digits)}</span>{deviation}", mean, mark)


def _fixed(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}".replace("-", "−") if math.isfinite(value) else number(value)


# -- cost --------------------------------------------------------------------------------------------------

GAINS = {"accuracy": ("accuracy", ".1%"), "nll": ("negative log-likelihood", ".3f"), "rmse": ("RMSE", ".4g")}


def cost(results: Results) -> Section | None:
    """What is gained against what it costs, circles sized by parameters, and the line of what is worth it."""
    gains = [gain for gain in GAINS if any(results.scores(method, gain) for method in results.methods)]
    views = [
        view
        for gain in gains
        for column in COSTS
        if column is not PARAMETERS and (view := _view(results, gain, column)) is not None
    ]
    if not views:
        return None
    gain = GAINS[gains[0]][0]
    return section(
        "cost",
        "What it costs",
        chooser(views, "plot-cost"),
        plot(
            "plot-cost", f"{gain} of each method against its cost; the leaderboard has the numbers",
            *views, below=legend(results.methods, results.methods),
            caption="Cost is relative to a single network, on a logarithmic axis. The area of a circle is the number "
            "of parameters. Methods on the dotted line are worth their price: nothing cheaper is better.",
        ),
    )  # fmt: skip


def _view(results: Results, gain: str, column: Column) -> View | None:
    title, form = GAINS[gain]
    points: dict[str, tuple[float, float]] = {}
    traces: list[dict[str, Any]] = []
    most = max((mean_spread(PARAMETERS.values(results, method))[0] for method in results.methods), default=1.0)
    for at, method in enumerate(results.methods):
        price, (mean, spread) = (
            mean_spread(column.values(results, method))[0],
            mean_spread(results.scores(method, gain)),
        )
        size = mean_spread(PARAMETERS.values(results, method))[0]
        if not (math.isfinite(price) and price > 0 and math.isfinite(mean)):
            continue
        points[method] = (price, mean)
        style = Style(at)
        same = {"type": "scatter", "mode": "markers", "meta": at, "x": [price], "y": [mean]}
        area = {"size": [size], "sizemode": "area", "sizeref": 2 * most / 54**2, "sizemin": 5, "symbol": "circle"}
        circle = {**area, "color": style.colour, "opacity": 0.22, "line": {"width": 0}}
        bars = {"type": "data", "array": [spread], "thickness": 1, "width": 3, "color": style.colour}
        hover = f"<b>%{{text}}</b><br>{title} %{{y:{form}}}<br>{column.title} × %{{x:.2f}}<br>"
        hover += f"parameters × {size:.2f}<extra></extra>"
        if not math.isnan(size):
            traces.append({**same, "marker": circle, "hoverinfo": "skip"})
        traces.append(
            {**same, "marker": style.marker(9), "error_y": bars, "text": [plotted(method)], "hovertemplate": hover}
        )
    if len(points) < 2:
        return None
    traces += _front(points, better(gain))
    prices = [price for price, _ in points.values()]
    ticks = [2.0**power for power in range(-4, 11)]
    room = [math.log10(min(prices) / 2), math.log10(max(prices) * 1.4)]
    exact = {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks], "range": room}
    layout = axes(f"{column.title}, single network = 1", title, xaxis=exact, yaxis={"tickformat": form})
    return View(traces, layout, f"{title} against {column.title}")


def _front(points: dict[str, tuple[float, float]], better: Better) -> list[dict[str, Any]]:
    """The methods that nothing cheaper is better than, from the cheapest on, with their names."""
    quality = {name: better.quality(score) for name, (_, score) in points.items()}
    front: list[str] = []
    for name in sorted(points, key=lambda name: (points[name][0], -quality[name])):
        if not front or quality[name] > quality[front[-1]]:
            front.append(name)
    return [
        {
            "type": "scatter", "mode": "lines+markers+text", "x": [points[name][0] for name in front],
            "y": [points[name][1] for name in front], "text": [plotted(name) for name in front],
            "textposition": "top left" if better is Better.HIGHER else "bottom left", "hoverinfo": "skip",
            "cliponaxis": False,
            "marker": {"size": 12, "opacity": 0},  # unseen, it keeps the names off the symbols
            "line": {"color": "var(--quiet)", "dash": "dot", "width": 1.5},
        }
    ]  # fmt: skip
