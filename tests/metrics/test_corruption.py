import math

import numpy as np
import pytest
import torch

from multitudes import metrics, shift


def tables(seed=0):
    """Errors of a model and of a baseline under each corruption and severity."""
    random = np.random.default_rng(seed)
    names = shift.CORRUPTIONS
    return ({name: random.uniform(0.1, 0.9, 5).tolist() for name in names} for _ in range(2))


def test_corruption_errors_are_the_textbooks():
    errors, baseline = tables()
    by_hand = [sum(errors[c][s] for s in range(5)) / sum(baseline[c][s] for s in range(5)) for c in errors]
    np.testing.assert_allclose(metrics.corruption_error(errors, baseline), by_hand)
    assert float(metrics.mean_corruption_error(errors, baseline)) == pytest.approx(np.mean(by_hand))
    means = [np.mean(errors[c]) for c in errors]
    np.testing.assert_allclose(metrics.corruption_error(errors), means)
    assert float(metrics.mean_corruption_error(errors)) == pytest.approx(np.mean(means))


def test_relative_corruption_errors_are_those_of_hendrycks_and_dietterich():
    errors, baseline = tables()
    by_hand = [
        sum(errors[c][s] - 0.05 for s in range(5)) / sum(baseline[c][s] - 0.08 for s in range(5)) for c in errors
    ]
    found = metrics.relative_corruption_error(errors, 0.05, baseline, 0.08)
    np.testing.assert_allclose(found, by_hand)
    mean = metrics.relative_mean_corruption_error(errors, torch.tensor(0.05), baseline, 0.08)
    assert float(mean) == pytest.approx(np.mean(by_hand))
    growth = [np.mean(errors[c]) - 0.05 for c in errors]
    np.testing.assert_allclose(metrics.relative_corruption_error(errors, 0.05), growth)
    assert float(metrics.relative_mean_corruption_error(errors, 0.05)) == pytest.approx(np.mean(growth))


def test_the_baseline_itself_has_an_error_of_1_in_any_unit():
    errors, _ = tables()
    percent = {name: [100 * value for value in values] for name, values in errors.items()}
    np.testing.assert_allclose(metrics.corruption_error(percent, percent), 1)
    np.testing.assert_allclose(metrics.relative_corruption_error(percent, 5, percent, 5), 1)


def test_the_patching_papers_mean_is_that_of_its_table():
    # Table 5 of Ensemble Model Patching, in percent of the vanilla network: mCE 97.8 for EMP (BN+O).
    ce = [98.4, 98.2, 98.5, 97.9, 98.8, 96.9, 98.3, 99.6, 101.1, 99.8, 97.9, 100, 95.4, 91.3, 94.2]
    vanilla = {name: [0.5, 0.6, 0.7, 0.8, 0.9] for name in shift.CORRUPTIONS}
    errors = {name: [c * e for e in vanilla[name]] for name, c in zip(vanilla, ce, strict=True)}
    np.testing.assert_allclose(metrics.corruption_error(errors, vanilla), ce)
    assert float(metrics.mean_corruption_error(errors, vanilla)) == pytest.approx(97.8, abs=0.05)


def test_tables_may_be_tensors_lists_or_mappings_of_either_in_any_order():
    errors, baseline = tables()
    expected = metrics.corruption_error(errors, baseline)
    turned = {name: torch.tensor(baseline[name]) for name in reversed(baseline)}
    torch.testing.assert_close(metrics.corruption_error(errors, turned), expected, rtol=1e-6, atol=0)
    rows = [errors[name] for name in errors], [baseline[name] for name in errors]
    torch.testing.assert_close(metrics.corruption_error(*rows), expected)
    tensors = (torch.tensor(table, dtype=torch.float64) for table in rows)
    torch.testing.assert_close(metrics.corruption_error(*tensors), expected)


FIVE = [0.1, 0.2, 0.3, 0.4, 0.5]
BAD_TABLES = {
    "zero": (
        ({"fog": FIVE, "snow": FIVE}, {"fog": FIVE, "snow": [0] * 5}),
        "must not add up to 0, as they do for 'snow'",
    ),
    "zero row": ((torch.ones(2, 5), torch.eye(2, 5) * torch.tensor([[1], [0]])), "as they do for corruption 1"),
    "other": (({"fog": FIVE}, {"snow": FIVE}), "baseline must hold the corruptions of errors, 'fog', got 'snow'"),
    "kinds": (({"fog": FIVE}, [FIVE]), "baseline must hold the corruptions of errors, 'fog', got corruption 0"),
    "fewer": (({"fog": FIVE}, {"fog": FIVE[:3]}), "baseline must hold as many severities as errors, 5, got 3"),
    "ragged": (({"fog": FIVE, "snow": FIVE[:3]},), r"as many severities for 'snow' as for 'fog', 5, got shape \[3\]"),
    "nan": (({"fog": FIVE, "snow": [0.1, math.nan]},), "as many severities"),
    "nan value": (({"fog": [0.1, 0.2, math.nan]},), "errors must hold finite scores, got nan for 'fog' at index 2"),
    "inf": (
        (torch.tensor([[1.0], [math.inf]]),),
        "errors must hold finite scores, got inf for corruption 1 at index 0",
    ),
    "empty": (({},), "errors must hold one score or more"),
    "scalars": (({"fog": 0.1},), "errors must hold one score or more"),
    "no severity": ((torch.zeros(3, 0),), "errors must hold one score or more"),
    "flat": ((torch.zeros(5),), r"errors must be {corruption: scores} or \[corruptions, severities\]"),
    "number": ((0.3,), r"errors must be {corruption: scores} or \[corruptions, severities\], got 0.3"),
}


@pytest.mark.parametrize("given, message", BAD_TABLES.values(), ids=BAD_TABLES)
def test_bad_tables_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        metrics.mean_corruption_error(*given)


def test_a_bad_clean_error_is_named():
    with pytest.raises(ValueError, match="baseline and baseline_clean must be given together"):
        metrics.relative_corruption_error([FIVE], 0.1, [FIVE])
    with pytest.raises(ValueError, match="baseline and baseline_clean must be given together, got baseline_clean=0.1"):
        metrics.relative_corruption_error([FIVE], 0.1, baseline_clean=0.1)
    with pytest.raises(ValueError, match="clean must be one finite number, the score without corruption, got nan"):
        metrics.relative_corruption_error([FIVE], math.nan)
    with pytest.raises(ValueError, match="baseline_clean must be one finite number, .* got \\[0.1, 0.1\\]"):
        metrics.relative_corruption_error([FIVE], 0.1, [FIVE], [0.1, 0.1])
    with pytest.raises(ValueError, match="beyond baseline_clean must not add up to 0, as they do for corruption 0"):
        metrics.relative_corruption_error([[0.2, 0.2]], 0.1, [[0.25, 0.25]], 0.25)
