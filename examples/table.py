"""Tables with the scikit-learn estimators: predictions with standard deviations, intervals and sets.

The data are scikit-learn's: diabetes, a regression with 442 patients as a data frame, and wine, 178 wines of three
growers. Gradient boosting with default settings is the baseline. Run it with `python examples/table.py`. It takes about
twenty seconds on two CPU cores.
"""

import time

import numpy as np
from sklearn.datasets import load_diabetes, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import log_loss, root_mean_squared_error
from sklearn.model_selection import train_test_split

from multitudes.sklearn import MultitudeClassifier, MultitudeRegressor

SEED, LEVEL = 0, 0.9


def disease() -> None:
    """Predict the progression of diabetes after a year, with a standard deviation and an interval."""
    X, y = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
    X, X_new, y, y_new = train_test_split(X, y, test_size=0.25, random_state=SEED)
    start = time.perf_counter()
    model = MultitudeRegressor(random_state=SEED).fit(X, y)
    seconds = time.perf_counter() - start
    boosting = HistGradientBoostingRegressor(random_state=SEED).fit(X, y)
    low, high = model.predict_interval(X_new, LEVEL)
    held = ((low <= y_new) & (y_new <= high)).mean()
    print(f"diabetes: {len(X)} rows to learn from, {model.n_iter_} epochs in {seconds:.1f} s")
    print(f"  root mean squared error {root_mean_squared_error(y_new, model.predict(X_new)):.1f}", end=", ")
    print(f"gradient boosting {root_mean_squared_error(y_new, boosting.predict(X_new)):.1f}")
    print(f"  {LEVEL:.0%} intervals hold {held:.0%} of the truth and are {np.mean(high - low):.0f} wide on average")

    mean, std = model.predict(X_new, return_std=True)
    parts = model.uncertainty(X_new)
    print(f"  {'':10}{'truth':>8}{'mean':>8}{'std':>8}{'interval':>16}{'epistemic':>12}")
    for name, row in (("surest", std.argmin()), ("least sure", std.argmax())):
        share = parts["epistemic"][row] / parts["total"][row]
        interval = f"{low[row]:.0f} to {high[row]:.0f}"
        print(f"  {name:10}{y_new.iloc[row]:8.0f}{mean[row]:8.0f}{std[row]:8.0f}{interval:>16}{share:>12.0%}")


def wines() -> None:
    """Predict the grower of a wine: probabilities, and sets that contain the right one."""
    X, y = load_wine(return_X_y=True)
    labels = np.array(["first", "second", "third"])[y]
    X, X_new, labels, new_labels = train_test_split(X, labels, test_size=0.25, random_state=SEED, stratify=labels)
    model = MultitudeClassifier(random_state=SEED).fit(X, labels)
    boosting = HistGradientBoostingClassifier(random_state=SEED).fit(X, labels)
    print(f"\nwine: {len(X)} rows to learn from")
    for name, each in (("tabm", model), ("gradient boosting", boosting)):
        loss = log_loss(new_labels, each.predict_proba(X_new))
        print(f"  {name:18}{each.score(X_new, new_labels):.1%} right, log loss {loss:.3f}")
    sets = model.predict_set(X_new, LEVEL)
    right = sets[np.arange(len(sets)), np.searchsorted(model.classes_, new_labels)]
    print(f"  {LEVEL:.0%} sets hold the right grower of {right.mean():.0%}, and {sets.sum(1).mean():.2f} on average")


if __name__ == "__main__":
    disease()
    wines()
