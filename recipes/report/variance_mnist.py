"""Page section on variance networks on MNIST, compared with Tables 1 and 2, Figures 3 to 5, appendices B and D."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recipes.report.raw import MISSING, Claim, Raw, Section, line_figure, number, percent, table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NAME = "variance_mnist"
Accuracies = tuple[float | None, float | None, float | None]

TABLE_1: dict[str, Accuracies] = {"dropout": (99.1, 99.4, 99.4), "all": (95.9, 10.1, 99.3)}
"""LeNet-5 on MNIST: stochastic, deterministic and ensemble accuracy in percent."""

TABLE_2: dict[str, tuple[float, float, float]] = {
    "layer": (-5.9e2, 11.3, 99.2),
    "neuron": (-7.7e2, 11.3, 99.2),
    "weight": (-6.4e4, 81.3, 99.2),
    "additive": (-2.3e4, 96.3, 99.2),
}
"""ELBO of the training set, deterministic and ensemble accuracy in percent."""

APPENDICES: dict[str, float] = {"student": 99.2, "zero": 99.2}
"""Ensemble accuracy with Student's prior (B; deterministic: "random guess") and zero-centred (D)."""

LOG_ALPHA = 6.3
"""The paper's log alpha of the first dense layer (section 6.1)."""
THRESHOLD = 1.5
"""log10 of kappa_0, Figure 3."""
ZEROED = 0.98
"""Approximate share of the layer's weights that can be set to 0 without loss of accuracy (section 6.4)."""

NAMES = {
    "dropout": "dropout",
    "all": "variance, four layers",
    "layer": "layer-wise",
    "neuron": "neuron-wise",
    "weight": "weight-wise",
    "additive": "additive",
    "student": "layer-wise, Student's prior (B)",
    "zero": "zero-centred (D)",
    "phase": "layer-wise, softplus (6.4)",
}
CHANCE = 0.2
"""Threshold for a deterministic accuracy to count as near chance, which is 0.1."""


def section(raw: Raw) -> Section:
    """Write the section, using only the raw files."""
    text = [_done(raw), _table_1(raw), _table_2(raw), _others(raw)]
    figures: dict[str, Figure] = {}
    if raw["phase"] is not None:
        figures = {
            "transition": transition(raw["phase"]),
            "kappa": kappas(raw["phase"]),
            "sparsity": sparsity(raw["phase"]),
        }
        text.append(_phase(raw["phase"]))
    return Section("Variance networks: LeNet-5 on MNIST", "\n\n".join(text), claims(raw), figures)


# -- text --------------------------------------------------------------------------------------------------


def _done(raw: Raw) -> str:
    done = [raw[name] for name in ("layer", *NAMES) if raw[name] is not None]
    *more, least = map(str, sorted({result["epochs"] for result in done}, reverse=True)) if done else [""]
    epochs = f"{', '.join(more)} or {least}" if more else least
    scale = "" if not done else (
        f"Here {epochs} epochs (most for softplus, whose transition comes late, and fewest for dropout and "
        "zero-centred weights, which wait for none) of "
        f"{done[0]['images']:,} images in batches of {done[0]['batch']}; an ensemble is {done[0]['draws']} draws. "
        "So that alpha gets as far in fewer steps, Adam starts at {:g}, with {:g} for a log alpha that many weights "
        "share and {:g} for one of a single weight. ".format(*done[0]["rates"])
    )  # fmt: skip
    return (
        "Neklyudov et al., *Variance networks: when expectation does not meet your expectations*, 2018. Weights are "
        "drawn from N(mu, alpha mu²), and training pushes alpha up, until the expectations mu say nothing and "
        "all that is learned is in the variances. The network is Caffe's LeNet-5 with batch norm after the first dense "
        "layer, as in the authors' code; dropout has rate 0.5 before both dense layers, and no batch norm.\n\n"
        f"**Scaled down.** The paper trains 200 epochs in batches of 200, with Adam at 1e-3 falling linearly to 0. "
        f"{scale}One seed. Stochastic is one draw, deterministic the "
        "expectations, ensemble the mean of the draws' probabilities."
    )


def _table_1(raw: Raw) -> str:
    rows = []
    for name, paper in TABLE_1.items():
        ours = _accuracies(raw[name])
        rows.append([NAMES[name], *[cell for pair in zip(map(_one, paper), ours, strict=True) for cell in pair]])
    header = ["network", "stochastic: paper", "ours", "deterministic: paper", "ours", "ensemble: paper", "ours"]
    layers = raw["all"]["log_alpha"] if raw["all"] is not None else {}
    reached = ", ".join(f"{layer} {number(values[1], 1)}" for layer, values in layers.items()) or MISSING
    note = (
        f"Accuracy in percent. In the paper the first dense layer alone passes the transition, with log alpha at "
        f"{LOG_ALPHA}; log alpha of ours in the end: {reached}."
    )
    return f"**Table 1: dropout, and variance layers everywhere.**\n\n{table(header, rows)}\n\n{note}"


def _table_2(raw: Raw) -> str:
    rows = []
    for name, (bound, deterministic, ensemble) in TABLE_2.items():
        result = raw[name] or {}
        rows.append([
            NAMES[name],
            _power(bound), _power(result.get("elbo")),
            _one(deterministic), percent(result.get("deterministic")),
            _one(ensemble), percent(result.get("ensemble"), 2),
            _range(result.get("log_alpha", {}).get("fc1")),
        ])  # fmt: skip
    header = ["parameterization", "ELBO: paper", "ours", "deterministic: paper", "ours", "ensemble: paper", "ours"]
    note = "The ELBO is that of the training set, from five draws; its divergence goes to 0 as alpha grows."
    return (
        "**Table 2: four parameterizations of the first dense layer**, the only variance layer.\n\n"
        f"{table([*header, 'log alpha, least to largest'], rows)}\n\n{note}"
    )


def _others(raw: Raw) -> str:
    rows = [
        [NAMES[name], _one(APPENDICES.get(name, TABLE_2.get(name, (None,) * 3)[2])), *_accuracies(raw[name]),
         percent((raw[name] or {}).get("centred"), 2)]
        for name in ("layer", "phase", "student", "zero")
    ]  # fmt: skip
    header = ["network", "ensemble: paper", "stochastic", "deterministic", "ensemble", "ensemble, mu = 0"]
    return (
        "**Student's prior, zero-centred weights, and eq. (11).** The last column sets the layer's expectations to 0 "
        f"after training and keeps the variances: the paper finds no loss.\n\n{table(header, rows)}"
    )


def _phase(result: dict[str, Any]) -> str:
    rows = [
        [str(look["epoch"]), number(look["log_alpha"]["fc1"][1], 2), percent(look["deterministic"]),
         percent(look["stochastic"]), percent(look["ensemble"]), f"{look['above']:,}"]
        for look in result["curve"]
    ]  # fmt: skip
    header = ["epoch", "log alpha", "deterministic", "stochastic", "ensemble", "weights above kappa_0"]
    fixed = [
        [percent(point["fixed"]), f"{point['threshold']:.2g}", percent(point["zero"], 2), percent(point["mean"], 2)]
        for point in result["sparse"]
    ]
    return (
        f"**Figures 3 and 4: the phase transition**, of a network with softplus after the variance layer. kappa is "
        f"computed on {result['kappa_images']:,} training images and scaled to all {result['images']:,}; the paper "
        f"does not say over how many images it sums, so that its threshold, log10 kappa_0 = {THRESHOLD}, may mean "
        f"something else there. The layer has {result['weights']:,} weights.\n\n"
        f"{table(header, rows)}\n\n"
        f"![Accuracies and log alpha over epochs]({NAME}/transition.svg)\n\n"
        f"![Histograms of kappa]({NAME}/kappa.svg)\n\n"
        "**Figure 5: accuracy against sparsity.** Weights with the smallest |kappa| are fixed, to 0 or to their "
        f"expectations; the paper can set about {percent(ZEROED, 0)} % to 0.\n\n"
        f"{table(['weights fixed, %', 'kappa below', 'to 0: ensemble', 'to mu: ensemble'], fixed)}\n\n"
        f"![Ensemble accuracy against the share of fixed weights]({NAME}/sparsity.svg)"
    )


def _accuracies(result: dict[str, Any] | None) -> list[str]:
    found = result or {}
    return [
        percent(found.get("stochastic"), 2), percent(found.get("deterministic"), 1), percent(found.get("ensemble"), 2)
    ]  # fmt: skip


def _one(value: float | None) -> str:
    return number(value, 1)


def _power(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1e}"


def _range(values: list[float] | None) -> str:
    if values is None:
        return MISSING
    least, mean, largest = values
    return number(mean, 1) if least == largest else f"{least:.1f} to {largest:.1f}, mean {mean:.1f}"


# -- claims ------------------------------------------------------------------------------------------------


def claims(raw: Raw) -> list[Claim]:
    """Check the claims."""
    return [
        _holds(raw, ("layer",), "Layer-wise, the ensemble's accuracy is 99 % or better",
               lambda layer: layer["ensemble"] >= 0.99, ("ensemble",)),
        _holds(raw, ("layer",), "Layer-wise, deterministic accuracy is near chance (below 20 %)",
               lambda layer: layer["deterministic"] < CHANCE, ("deterministic",)),
        _holds(raw, ("all", "dropout"), "With four variance layers, the ensemble is within half a point of dropout's",
               lambda net, dropout: net["ensemble"] >= dropout["ensemble"] - 0.005, ("ensemble",)),
        _holds(raw, ("all",), "With four variance layers, deterministic accuracy is near chance (below 20 %)",
               lambda net: net["deterministic"] < CHANCE, ("deterministic",)),
        _holds(raw, ("neuron",), "Neuron-wise, deterministic accuracy is near chance (below 20 %)",
               lambda neuron: neuron["deterministic"] < CHANCE, ("deterministic",)),
        _holds(raw, ("weight", "additive"), "Weight-wise and additive, the expectations stay useful (above 50 %)",
               lambda *nets: min(net["deterministic"] for net in nets) > 0.5, ("deterministic",)),
        _holds(raw, ("layer", "weight", "additive"), "The layer-wise ELBO is the highest, though the least flexible",
               lambda layer, *rest: layer["elbo"] > max(net["elbo"] for net in rest), ("elbo",)),
        _holds(raw, ("layer",), "Layer-wise, setting all expectations to 0 costs at most half a point (eq. 11)",
               lambda layer: layer["centred"] >= layer["ensemble"] - 0.005, ("ensemble", "centred")),
        _holds(raw, ("zero",), "A zero-centred layer, trained from scratch: ensemble at 99 % or better",
               lambda zero: zero["ensemble"] >= 0.99, ("ensemble",)),
        _emerging(raw["phase"]),
        _sparse(raw["phase"]),
    ]  # fmt: skip


def _holds(raw: Raw, names: tuple[str, ...], text: str, holds: Any, shown: tuple[str, ...]) -> Claim:
    results = [raw[name] for name in names]
    if any(result is None for result in results):
        return Claim(text, None)
    numbers = ", ".join(
        f"{NAMES[name]} {key} {_power(result[key]) if key == 'elbo' else percent(result[key], 2) + ' %'}"
        for name, result in zip(names, results, strict=True)
        for key in shown
    )
    return Claim(text, bool(holds(*results)), numbers)


def _emerging(result: dict[str, Any] | None) -> Claim:
    """Check Figure 4."""
    text = "Wherever the expectations fail (10 points below the ensemble), there are weights above kappa_0"
    failed = [look for look in (result or {}).get("curve", []) if look["deterministic"] < look["ensemble"] - 0.1]
    if not failed:
        return Claim(text, None, "" if result is None else "the expectations do not fail")
    least = min(look["above"] for look in failed)
    return Claim(
        text, least > 0, f"at {len(failed)} looks, at least {least:,} of {(result or {})['weights']:,} weights"
    )


def _sparse(result: dict[str, Any] | None) -> Claim:
    """Check Figure 5."""
    text = "95 % of the layer's weights or more can be set to 0 at a cost of 0.1 points at most"
    if result is None:
        return Claim(text, None)
    full = result["ensemble"]
    kept = [point["fixed"] for point in result["sparse"] if point["zero"] >= full - 0.001]
    most = max(kept, default=0.0)
    return Claim(text, most >= 0.95, f"{percent(most)} % of the weights; the paper about {percent(ZEROED, 0)} %")


# -- figures -----------------------------------------------------------------------------------------------


def transition(result: dict[str, Any]) -> Figure:
    """Plot Figure 4: accuracies over epochs, with log alpha."""
    epochs = [look["epoch"] for look in result["curve"]]
    names = ("ensemble", "stochastic", "deterministic")
    curves = {name: [100 * look[name] for look in result["curve"]] for name in names}
    curves["log alpha (right)"] = [look["log_alpha"]["fc1"][1] for look in result["curve"]]
    fig = line_figure("Along training: the phase transition", "epoch", "accuracy, %", epochs, curves)
    fig.data[3].yaxis = "y2"
    axis = {"overlaying": "y", "side": "right", "title": "log alpha", "showgrid": False, "tickformat": ".1f"}
    fig.update_layout(yaxis2=axis, legend={"x": 1.15})
    return fig


def kappas(result: dict[str, Any]) -> Figure:
    """Plot Figure 3: log10 |kappa| of the weights at the start, when the expectations begin to fail, and at the end."""
    from multitudes.landscape.figures import figure

    fig = figure("Curvature of the weights", "log10 |kappa|", "weights")
    first, last, bins = result["bins"]
    width = (last - first) / bins
    centres = [first + (index + 0.5) * width for index in range(bins)]
    for look in _moments(result["curve"]):
        name = f"epoch {look['epoch']}, deterministic {percent(look['deterministic'], 0)} %"
        fig.add_bar(x=centres, y=look["kappa"], name=name, opacity=0.6)
    fig.add_vline(x=THRESHOLD, line_dash="dash", annotation_text="kappa_0")
    fig.update_layout(barmode="overlay", bargap=0)
    return fig


def _moments(curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last record before the expectations fail, the first one after, and the last of all."""
    failed = next((index for index, look in enumerate(curve) if look["deterministic"] < look["ensemble"] - 0.05), None)
    chosen = [0] if failed is None else [max(0, failed - 1), failed]
    return [curve[index] for index in dict.fromkeys([*chosen, len(curve) - 1])]


def sparsity(result: dict[str, Any]) -> Figure:
    """Plot Figure 5, over the share of fixed weights."""
    shares, mean, zero = ([100 * point[key] for point in result["sparse"]] for key in ("fixed", "mean", "zero"))
    titles = ("Fixing the weights of small kappa", "weights that are fixed, %", "ensemble accuracy, %")
    fig = line_figure(*titles, shares, {"to expectations": mean, "to 0": zero})
    fig.add_hline(y=100 * result["ensemble"], line_dash="dot", annotation_text="full ensemble")
    return fig
