"""Recommend a method for each budget: one that is significantly better than the single network by one score.

A method is worth its price if its gain over the single network is large enough to matter (`NEGLIGIBLE`) and
significant: above zero with 95 % confidence, over seeds and test rows, jointly for all methods of the budget
(Bonferroni). The price is the time of a prediction, or its multiply-adds if the network is so small that call overhead
dominates the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from multitudes.base.checks import plural
from multitudes.lab.study.results.leaderboard import best, better, level_with_best, score_to_rank_by
from multitudes.lab.study.results.paired import Comparison, Difference
from multitudes.lab.study.results.result_rows import MODELS, Row
from multitudes.lab.study.results.score_columns import column_of, display_name, is_vague
from multitudes.metrics.declare import Better

NEGLIGIBLE = {"nll": 0.03, "brier": 0.03, "crps": 0.02, "rmse": 0.02, "accuracy": 0.005, "log_density": 0.03}
"""Negligible gains, relative to the single network's score; absolute for accuracy and log density."""
ABSOLUTE = ("accuracy", "log_density")
BUDGETS = {"At the price of one network": 1.3, "At up to four times the price": 4.4, "At any price": math.inf}
"""Largest multiple of the single network's price in each budget."""
TIME, PRODUCTS = "costs/inference_time_ratio", "costs/multiply_adds_ratio"
COSTS = {TIME: "time of a prediction", PRODUCTS: "multiply-adds"}
SHORTFALL = 0.02
"""Undercoverage of intervals, beyond chance, that triggers a warning."""


@dataclass(frozen=True)
class Advice:
    """Recommendation for one budget."""

    budget: str
    method: str | None
    """None if no method is worth it."""
    sentence: str

    def __str__(self) -> str:
        return f"{self.budget}: {self.sentence}"


@dataclass(frozen=True)
class Point:
    """A method in the figure: its cost, its score, and the interval of its gain over the single network."""

    method: str
    cost: float
    score: float
    low: float
    high: float
    on_frontier: bool


@dataclass(frozen=True)
class Recommendation:
    """The answer of a study in words and numbers, the same in terminal and page."""

    by: str
    """Score."""
    cost: str
    """Axis label of the price."""
    headline: str
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()
    """Further facts: methods level with the best, and the evidence."""
    warnings: tuple[str, ...] = ()
    points: tuple[Point, ...] = ()

    @property
    def methods(self) -> list[str]:
        """Recommended methods, without duplicates."""
        return list(dict.fromkeys(each.method for each in self.advice if each.method))


def recommend(rows: Sequence[Row], by: str | None = None, tiny: bool = False) -> Recommendation:
    """Recommend methods from leaderboard rows; `tiny` means the network is too small to be timed."""
    name = score_to_rank_by(rows, by)
    methods = [row for row in rows if not row.baseline and math.isfinite(row[name])]
    timed = not tiny and all(math.isfinite(row[TIME]) for row in methods)
    answer = _Answer(rows, methods, name, TIME if timed and methods else PRODUCTS)
    return Recommendation(
        name, f"{COSTS[answer.cost]}, × the single network's", answer.beaten() or answer.worthwhile(),
        answer.advice(), answer.notes(),
        answer.warnings(), answer.points(),
    )  # fmt: skip


class _Answer:
    """Compute the parts of a recommendation."""

    def __init__(self, rows: Sequence[Row], methods: Sequence[Row], name: str, cost: str) -> None:
        self.rows, self.methods, self.name, self.cost = rows, methods, name, cost
        self.comparison = Comparison(methods, name)
        self.sign = 1.0 if better(name) is Better.HIGHER else -1.0
        self.single = next((row for row in methods if row.method == "single"), None)
        self.others = [row for row in methods if row is not self.single]
        self.gains = {row.name: self.gain(row, self.single) for row in self.others if self.single is not None}
        scale = 1.0 if name in ABSOLUTE or self.single is None else abs(self.single[name])
        self.negligible = NEGLIGIBLE[name] * scale
        self.seeds = sorted({len(row.seeds) for row in methods})
        self.unit = "fold" if any(row.folds for row in methods) else "seed"
        self.test_rows = max((row.values[name].count for row in methods), default=0)
        self.title = column_of(name).title
        self.picks = {budget: self.pick(limit) for budget, limit in BUDGETS.items()}

    # -- gains -------------------------------------------------------------------------------------------

    def gain(self, row: Row, over: Row) -> Difference | None:
        """Return how much better a method is than another; positive means better."""
        found = self.comparison.difference(row, over)
        return found and Difference(self.sign * found.mean, found.error, found.freedom)

    def rivals(self, limit: float) -> list[Row]:
        return [row for row in self.others if self.price(row) <= limit]

    def worth(self, row: Row, among: int) -> bool:
        """Return whether a method is better than the single network, significantly and by enough."""
        found = self.gains.get(row.name)
        return found is not None and found.mean >= self.negligible and found.at_least(among) > 0

    def price(self, row: Row) -> float:
        return row[self.cost] if math.isfinite(row[self.cost]) else math.inf

    def pick(self, limit: float) -> Row | None:
        """Return the best worthwhile method up to a price; among methods level with it, the cheapest."""
        rivals = self.rivals(limit)
        worth = [row for row in rivals if self.worth(row, len(rivals))]
        top = best(worth, self.name)
        if top is None:
            return None
        level = [row for row in worth if row is top or not _is_gain(self.gain(top, row))]
        return min(level, key=lambda row: (round(self.price(row), 1), -self.sign * row[self.name]))

    # -- words -------------------------------------------------------------------------------------------

    def beaten(self) -> str:
        """State that a model without a network beats the best method; empty if none does."""
        rival, top = self.ahead(self.name), best(self.methods, self.name)
        if rival is None or top is None:
            return ""
        gain, model = self.gain(rival, top), display_name(rival)
        model = model[:1].upper() + model[1:]
        scores = f"{self.title} {self.score(rival)}, against {self.score(top)} for {top.name}"
        if gain is None or not gain.significant():
            return f"{model} is as good as the best network: {scores}; the difference may be due to chance."
        return f"{model} is better than every network: {scores}, a difference of {self.at_least(gain)}."

    def ahead(self, name: str) -> Row | None:
        """Return the best model without a network if it beats every method by a score."""
        top = best(self.methods, name)
        rival = best([row for row in self.rows if row.baseline and row.method in MODELS], name)
        quality = better(name).quality
        return rival if rival and top and quality(rival[name]) > quality(top[name]) else None

    def worthwhile(self) -> str:
        """State which method is worth its price."""
        if not self.methods:
            return "No job is done yet, so there is nothing to compare."
        if self.single is None:
            top = best(self.methods, self.name)
            assert top is not None
            what = f"{top.name} is the best by {self.title} ({self.score(top)})"
            return f"{what}. To see whether it is worth its price, add the method single to the study."
        alone = f"the single network ({self.title} {self.score(self.single)})"
        if not self.others:
            return f"Only {alone} is done, so there is nothing to compare it with."
        first = next((row for row in self.picks.values() if row is not None), None)
        top = best(self.others, self.name)
        likely = top if top is not None and self.worth(top, 1) else None  # significant on its own
        if (named := first or likely) is not None:
            gain = f"{self.title} {self.score(named)}, against {self.score(self.single)} for the single network"
            if first:
                return f"{named.name} is worth its price: {gain}, at {self.paid(named)}."
            chance = f"the best of {plural(len(self.others), 'method')} may be ahead by chance: run more {self.unit}s"
            return f"{named.name} is probably worth its price: {gain}, at {self.paid(named)}; {chance}."
        known = [found.at_most(len(self.others)) for found in self.gains.values() if found]
        if not known:
            return f"One run per method cannot show whether any method is better than {alone}: run more seeds."
        largest = max(known)
        if largest <= self.negligible:
            much = self.amount(self.negligible)
            return f"No method is worth its price: none is better than {alone} by more than {much}."
        seeds = f" or {self.unit}s ({self.seeds[0]})" if self.seeds[0] > 1 else ""
        few = f"Too few test rows ({self.test_rows:,}){seeds}"
        possible = f"gains of up to {self.amount(largest)} cannot be ruled out"
        return f"{few} to tell whether any method is better than {alone}: {possible}."

    def score(self, row: Row) -> str:
        return column_of(self.name).with_unit(row[self.name])

    def amount(self, value: float) -> str:
        return f"{100 * value:.2g} points" if self.name == "accuracy" else f"{value:.2g}"

    def at_least(self, gain: Difference, among: int = 1) -> str:
        return f"at least {self.amount(gain.at_least(among))} with 95 % confidence"

    def paid(self, row: Row) -> str:
        """Describe a method's price and training time."""
        price = _times(row, self.cost)
        training = _times(row, "costs/training_time_ratio")
        trained = f" and {training} the training time" if training else ""
        return f"{price or 'unknown'} the {COSTS[self.cost]}{trained}"

    def advice(self) -> tuple[Advice, ...]:
        found = [Advice("Among the networks", None, self.worthwhile())] if self.beaten() else []
        if self.single is None or not self.others:
            return tuple(found)
        before: Row | None = None
        cheaper = 0.0
        for budget, limit in BUDGETS.items():
            there = any(cheaper < self.price(row) <= limit for row in self.others)
            if there and any(self.picks.values()):  # otherwise the headline says that nothing is worth its price
                found.append(self.at(budget, self.picks[budget], before))
            before, cheaper = self.picks[budget] or before, limit
        again = self.calibration()
        return (*found, again) if again else tuple(found)

    def at(self, budget: str, row: Row | None, before: Row | None) -> Advice:
        if row is None:
            stay = f"stay with {before.name}" if before else "stay with the single network"
            return Advice(budget, None, f"{stay}; no method at this price has a significant gain that matters.")
        if before is not None and (row is before or not _is_gain(self.gain(row, before))):
            return Advice(budget, before.name, f"still {before.name}; no dearer method is significantly better.")
        gain = self.gains[row.name]
        assert gain is not None
        better_by = self.better_by(gain, len(self.rivals(BUDGETS[budget])))
        how = f"{self.title} {self.score(row)}, {better_by}, at {self.paid(row)}"
        return Advice(budget, row.name, f"take {row.name}: {how}.")

    def better_by(self, gain: Difference, among: int = 1) -> str:
        return f"better by {self.amount(gain.mean)} ({self.at_least(gain, among)})"

    def calibration(self) -> Advice | None:
        """Describe the gain from calibrating the single network, which needs no training."""
        row, raw = self.single, f"raw/{self.name}"
        if row is None or raw not in row.values or self.name in ("accuracy", "rmse"):
            return None
        examples = row.examples()
        if self.name not in examples or raw not in examples or examples[raw].shape[1] < 2:
            return None
        each = (examples[self.name] - examples[raw]).mean(0)
        error = float(each.std(ddof=1)) / math.sqrt(len(each))
        gain = Difference(self.sign * (row[self.name] - row[raw]), error, len(each) - 1.0)
        budget, before = "Without retraining", column_of(self.name).with_unit(row[raw])
        if _is_gain(gain):
            how = f"{self.title} {self.score(row)} instead of {before}, {self.better_by(gain)}"
            return Advice(budget, row.name, f"calibrate the single network: {how}.")
        scores = f"{self.title} {self.score(row)}, before {before}"
        return Advice(budget, None, f"calibrating the single network brings no significant gain ({scores}).")

    def notes(self) -> tuple[str, ...]:
        if len(self.methods) < 2:
            return ()
        level = level_with_best(self.rows, self.name)
        top = level[0]
        names = [row.name for row in level[1:]]
        known = all(self.comparison.difference(row, top) for row in self.methods if row is not top)
        others = ""
        if len(names) > 3:
            others = f"; {len(names)} of the other {len(self.methods) - 1} methods are not significantly worse"
        elif names:
            others = f"; {_listed(names)} {'are' if len(names) > 1 else 'is'} not significantly worse"
        elif known:
            others = "; all others are significantly worse"
        few, many = self.seeds[0], self.seeds[-1]
        seeds = plural(few, self.unit) if few == many else f"{few} to {many} {self.unit}s"
        one_seed = "; differences between two trainings of a method are not included" if many == 1 else ""
        return (
            f"{top.name} is the best by {self.title} ({self.score(top)}){others}.",
            f"Significant means with 95 % confidence, jointly for all methods of a budget (Bonferroni), "
            f"over {seeds} and {self.test_rows:,} test rows{one_seed}.",
        )

    def warnings(self) -> tuple[str, ...]:
        found = []
        short = [row for row in self.methods if _covers_too_little(row)]
        if short:
            shares = sorted(row["coverage_90"] for row in short)
            held = f"{100 * shares[0]:.0f}" + (f" to {100 * shares[-1]:.0f}" if len(shares) > 1 else "")
            found.append(f"The 90 % intervals of {_some(short)} contain only {held} % of the true values.")
        rival = self.ahead(self.name)
        for point in ("rmse", "accuracy"):
            other = self.ahead(point) if point != self.name else None
            if other is not None and other is not rival and (top := best(self.methods, point)):
                column = column_of(point)
                scores = f"{column.with_unit(other[point])}, against {column.with_unit(top[point])} for {top.name}"
                found.append(f"By {column.title} alone, {display_name(other)} is better than every network: {scores}.")
        for baseline in (row for row in self.rows if row.baseline and math.isfinite(row[self.name])):
            if baseline is rival:
                continue  # covered by the headline
            worse = [row for row in self.methods if self.sign * (row[self.name] - baseline[self.name]) < 0]
            if worse:
                every = "Every method" if len(worse) == len(self.methods) else _some(worse)
                verb = "has" if len(worse) in (1, len(self.methods)) else "have"
                name, score = display_name(baseline), self.score(baseline)
                found.append(f"{every} {verb} a worse {self.title} than {name} ({score}).")
        return tuple(found)

    # -- the figure --------------------------------------------------------------------------------------

    def points(self) -> tuple[Point, ...]:
        priced = sorted((row for row in self.methods if math.isfinite(self.price(row))), key=self.price)
        found = []
        for row in priced:
            gain = self.gains.get(row.name)
            low, high = gain.interval() if gain else (0.0, 0.0)
            no_dearer = [other for other in priced if self.price(other) <= self.price(row)]
            front = best(no_dearer, self.name) is row
            found.append(Point(row.name, self.price(row), row[self.name], low, high, front))
        return tuple(found)


def _is_gain(gain: Difference | None) -> bool:
    return gain is not None and gain.mean > 0 and gain.significant()


def _covers_too_little(row: Row) -> bool:
    if "coverage_90" not in row.values:
        return False
    share, count = row["coverage_90"], max(1, row.values["coverage_90"].count)
    return share + 2 * math.sqrt(0.9 * 0.1 / count) < 0.9 and share < 0.9 - SHORTFALL


def _times(row: Row, cost: str) -> str:
    """Format a multiple of the single network's cost, with "about" if times vary by more than the difference."""
    if cost not in row.values:
        return ""
    value = row.values[cost]
    return f"{'about ' if is_vague(value) else ''}{value.mean:.1f} ×"


def _some(rows: Sequence[Row]) -> str:
    names = [row.name for row in rows]
    return _listed(names) if len(names) <= 4 else f"{len(names)} methods ({', '.join(names[:3])}, …)"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
