"""Models compared by the recipe for tables: our estimators, common alternatives, and the package of TabM.

Each is a function `(table, seed, quick) -> Answer`, which trains on the training rows and predicts the test rows.
Baselines use scikit-learn's default settings. They predict no standard deviations, so these, and the intervals, come
from their errors on held-out rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LEVEL = 0.9
"""Target coverage of intervals and sets."""
HELD_OUT = 0.15
"""Share of the training rows used to estimate errors, and for early stopping of the package."""
TREES = 300
"""Trees in the random forest."""
ALPHAS = np.logspace(-3, 3, 13)
"""Candidate penalties of the linear regression."""


@dataclass(frozen=True)
class Table:
    """Training rows, `x [N, F]` and `y [N]`, and test rows `test` `[T, F]`; `classes` is 0 for regression."""

    x: Any
    y: Any
    test: Any
    classes: int
    device: torch.device

    def held_out(self, seed: int) -> tuple[Any, Any]:
        """Return indices of the rows to train on and of the held-out ones, stratified by class."""
        from sklearn.model_selection import train_test_split

        groups = self.y if self.classes else None
        kept, held = train_test_split(np.arange(len(self.y)), test_size=HELD_OUT, random_state=seed, stratify=groups)
        return kept, held


@dataclass(frozen=True)
class Answer:
    """Predictions for T test rows: means, deviations and interval ends, `[T]`; or probabilities and sets, `[T, C]`."""

    mean: Any = None
    std: Any = None
    low: Any = None
    high: Any = None
    probs: Any = None
    sets: Any = None


Model = Callable[[Table, int, bool], Answer]

# -- ours --------------------------------------------------------------------------------------------------

NETWORKS = ("tabm", "packed", "deep", "single")
"""Our methods."""


def network(method: str, table: Table, seed: int, quick: bool) -> Answer:
    """Fit an estimator with default settings, including early stopping and calibration on held-out rows."""
    from multitudes.sklearn import MultitudeClassifier, MultitudeRegressor

    settings: dict[str, Any] = {"random_state": seed, "device": str(table.device), "verbose": False}
    if quick:
        settings["epochs"] = 3
    if table.classes:
        model = MultitudeClassifier(method, **settings).fit(table.x, table.y)
        return Answer(probs=model.predict_proba(table.test), sets=model.predict_set(table.test, LEVEL))
    model = MultitudeRegressor(method, **settings).fit(table.x, table.y)
    mean, std = model.predict(table.test, return_std=True)
    low, high = model.predict_interval(table.test, LEVEL)
    return Answer(mean=mean, std=std, low=low, high=high)


# -- common alternatives -----------------------------------------------------------------------------------


def boosting(table: Table, seed: int, quick: bool) -> Answer:
    """Fit scikit-learn's HistGradientBoosting."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    kind = HistGradientBoostingClassifier if table.classes else HistGradientBoostingRegressor
    settings = {"max_iter": 10} if quick else {}
    return fitted_twice(partial(kind, random_state=seed, **settings), table, seed)


def forest(table: Table, seed: int, quick: bool) -> Answer:
    """Fit a random forest of 300 trees; errors are out-of-bag."""
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    settings = {"n_estimators": 50 if quick else TREES, "random_state": seed, "n_jobs": torch.get_num_threads()}
    if table.classes:
        return Answer(probs=RandomForestClassifier(**settings).fit(table.x, table.y).predict_proba(table.test))
    model = RandomForestRegressor(**settings, oob_score=True).fit(table.x, table.y)
    return with_errors(model.predict(table.test), table.y - model.oob_prediction_)


def linear(table: Table, seed: int, quick: bool) -> Answer:
    """Fit a linear model of standardised columns: ridge or logistic regression."""
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def made() -> Any:
        last = LogisticRegression(max_iter=1000) if table.classes else RidgeCV(ALPHAS)
        return make_pipeline(StandardScaler(), last)

    return fitted_twice(made, table, seed)


def constant(table: Table, seed: int, quick: bool) -> Answer:
    """Predict the mean and deviation of the training rows, or the class frequencies."""
    if table.classes:
        shares = np.bincount(table.y, minlength=table.classes) / len(table.y)
        return Answer(probs=np.tile(shares, (len(table.test), 1)))
    return with_errors(np.full(len(table.test), table.y.mean()), table.y - table.y.mean())


def fitted_twice(made: Callable[[], Any], table: Table, seed: int) -> Answer:
    """Fit a model to all training rows; for regression, errors come from one fitted without the held-out rows."""
    model = made().fit(table.x, table.y)
    if table.classes:
        return Answer(probs=model.predict_proba(table.test))
    kept, held = table.held_out(seed)
    partial_model = made().fit(table.x[kept], table.y[kept])
    return with_errors(model.predict(table.test), table.y[held] - partial_model.predict(table.x[held]))


def with_errors(mean: Any, errors: Any) -> Answer:
    """Return means `[T]` with the deviation of other rows' errors `[N]`, and conformal intervals from them."""
    std = math.sqrt(float(np.mean(np.square(errors))))
    reach = conformal_quantile(np.abs(errors))
    return Answer(mean=mean, std=np.full(len(mean), std), low=mean - reach, high=mean + reach)


def conformal_quantile(scores: Any) -> float:
    """Return the bound of a new score with probability at least `LEVEL`: the `ceil((N + 1) * LEVEL)`-th smallest.

    >>> conformal_quantile(np.arange(1, 20))
    18.0
    """
    rank = min(len(scores), math.ceil((len(scores) + 1) * LEVEL))
    return float(np.sort(scores)[rank - 1])


# -- the package of TabM -----------------------------------------------------------------------------------

PATIENCE, LONGEST = 16, 1000
"""Epochs without a better score on the held-out rows, and maximum epochs."""
BATCHES = {2_800: 32, 4_500: 64, 6_400: 128, 32_000: 256, 108_000: 512}
"""Batch sizes of the authors' experiments, by upper bound of training rows; 1,024 above."""


def package_batch(rows: int) -> int:
    """Return the authors' batch size for this many training rows.

    >>> package_batch(1_000), package_batch(7_000), package_batch(500_000)
    (32, 256, 1024)
    """
    return next((size for most, size in BATCHES.items() if rows < most), 1024)


def package(table: Table, seed: int, quick: bool) -> Answer:
    """Fit the authors' `tabm` as in their example: 32 members, normal scores in 48 bins, AdamW."""
    kept, held = table.held_out(seed)
    x, x_held, test = (tensor.to(table.device) for tensor in normal_scores(table, kept, held))
    dtype = torch.int64 if table.classes else torch.float32
    center, scale = (0.0, 1.0) if table.classes else (table.y[kept].mean(), table.y[kept].std())
    y, y_held = (
        torch.as_tensor((table.y[rows] - center) / scale).to(table.device, dtype) for rows in (kept, held)
    )  # fmt: skip
    torch.manual_seed(seed)
    net = package_network(x, table.classes).to(table.device)
    train_package(net, (x, y), (x_held, y_held), bool(table.classes), 2 if quick else LONGEST)
    if table.classes:
        return Answer(probs=answers(net, test, True).double().cpu().numpy())
    predicted, unseen = (answers(net, rows, False).double().cpu().numpy() for rows in (test, x_held))
    return with_errors(predicted * scale + center, table.y[held] - (unseen * scale + center))


def normal_scores(table: Table, kept: Any, held: Any) -> list[Tensor]:
    """Return training, held-out and test rows as normal scores of the training rows, without constant columns."""
    from sklearn.preprocessing import QuantileTransformer

    varies = table.x[kept].std(0) > 0
    x, x_held, test = (part[:, varies] for part in (table.x[kept], table.x[held], table.test))
    noise = np.random.default_rng(0).normal(0.0, 1e-5, x.shape)  # as the authors do: breaks ties
    count = max(min(len(x) // 30, 1000), 10)
    scores = QuantileTransformer(n_quantiles=count, output_distribution="normal", subsample=10**9).fit(x + noise)
    return [torch.from_numpy(scores.transform(part)).float() for part in (x, x_held, test)]


def package_network(x: Tensor, classes: int) -> nn.Module:
    """Build the package's default network for training rows `[N, F]`."""
    import rtdl_num_embeddings as embeddings
    import tabm

    bins = embeddings.compute_bins(x.cpu(), n_bins=min(48, len(x) - 1))
    numbers = embeddings.PiecewiseLinearEmbeddings(bins, d_embedding=16, activation=False, version="B")
    return tabm.TabM.make(n_num_features=x.shape[1], d_out=classes or 1, num_embeddings=numbers)


def train_package(
    net: nn.Module, train: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor], classes: bool, epochs: int
) -> None:
    """Train as in the authors' example: the mean of the members' losses, and the best weights on held-out rows."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=3e-4)
    (x, y), best, state, since = train, math.inf, net.state_dict(), 0
    for _ in range(epochs):
        net.train()
        for rows in torch.randperm(len(x), device=x.device).split(package_batch(len(x))):
            optimizer.zero_grad()
            own = net(x[rows])
            target = y[rows].repeat_interleave(own.shape[1])
            flat = own.flatten(0, 1)
            loss = nn.functional.cross_entropy(flat, target) if classes else (flat[:, 0] - target).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        score, since = score_of(answers(net, held[0], classes), held[1]), since + 1
        if score < best:
            best, state, since = score, copy.deepcopy(net.state_dict()), 0
        if since >= PATIENCE:
            break
    net.load_state_dict(state)


@torch.no_grad()
def answers(net: nn.Module, x: Tensor, classes: bool) -> Tensor:
    """Return the members' mean prediction `[T]`, or their mean probabilities `[T, C]`."""
    net.eval()
    own = torch.cat([net(rows) for rows in x.split(2048)])
    return own.softmax(-1).mean(1) if classes else own[..., 0].mean(1)


def score_of(answer: Tensor, y: Tensor) -> float:
    """Return the authors' stopping score, lower is better: error rate of probabilities, or squared error of means."""
    wrong = answer.argmax(1) != y if answer.ndim == 2 else (answer - y).square()
    return wrong.float().mean().item()


METHODS: dict[str, Model] = {
    **{name: partial(network, name) for name in NETWORKS},
    "boosting": boosting,
    "forest": forest,
    "linear": linear,
    "constant": constant,
    "package": package,
}
"""All compared models, by piece name."""
