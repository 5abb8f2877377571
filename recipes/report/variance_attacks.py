"""Page section on attacks on variance networks, compared with the paper's Figure 2 and Table 1."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from multitudes.methods.variance.kl import K1, K2, K3
from multitudes.methods.variance.layers import CLIP
from recipes.report.raw import MISSING, Claim, Raw, Section, line_figure, mean_of, number, percent, table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NAME = "variance_attacks"

TABLE_1 = {"dropout": (91.0, 93.1, 93.4), "variance": (91.3, 10.0, 93.4)}
"""VGG-like network on CIFAR-10: stochastic, deterministic and ensemble accuracy in percent."""

CURVES = ("dropout, deterministic", "dropout", "deep ensemble", "variance", "variance ensemble")
"""Curves of Figure 2. The paper prints no numbers for them."""

PIECES = ("dropout-0", "variance-0", "deep_ensemble", "variance_ensemble")
CHANCE = 0.2
"""Threshold for a deterministic accuracy to count as near chance, which is 0.1."""

START = -5.0
"""Initial log alpha."""
RATE = 1e-3
"""Learning rate of all other parameters."""


def section(raw: Raw) -> Section:
    """Write the section, using only the raw files."""
    curves = attacks(raw)
    text = [_done(raw), _accuracies(raw), _alphas(raw), _attacks(raw, curves)]
    figures: dict[str, Figure] = {}
    if curves:
        figures = {
            "success": curve_figure(curves, "success", "Targeted attacks that succeed", "share of images, %", 100),
            "entropy": curve_figure(curves, "entropy", "Entropy under attack", "mean entropy, nats", 1),
        }
        text.append(
            f"![Success rate of the attack over its steps]({NAME}/success.svg)\n\n"
            f"![Mean entropy over the attack's steps]({NAME}/entropy.svg)"
        )
    return Section("Variance networks: attacks on CIFAR-10", "\n\n".join(text), claims(raw), figures)


def attacks(raw: Raw) -> dict[str, dict[str, list[float]]]:
    """Return the available curves, in the figure's order."""
    found: dict[str, dict[str, list[float]]] = {}
    for piece in PIECES:
        found |= (raw[piece] or {}).get("attacks", {})
    return {name: found[name] for name in CURVES if name in found}


# -- text --------------------------------------------------------------------------------------------------


def _done(raw: Raw) -> str:
    first = next(iter([*raw.matching("variance-").values(), *raw.matching("dropout-").values()]), None)
    members = next((raw[name]["members"] for name in PIECES[2:] if raw[name] is not None), None)
    scale = "" if first is None else f"Here {first['epochs']} epochs in batches of {first['batch']}"
    scale += "" if not scale or members is None else f", and ensembles of {members} networks"
    scale += f"; {first['attacked_images']:,} test images are attacked. " if first is not None else ""
    faster = MISSING if first is None else f"{first['log_alpha_rate'] / RATE:g}"
    return (
        "Neklyudov et al. 2018, section 6.3: the VGG-like network of Zagoruyko, and targeted iterative fast-sign "
        "attacks, whose every step moves each pixel by 0.5 of 255 towards a class that was drawn at random; the images "
        "stay in [0, 1], and there is no other limit. A network that draws is attacked through the mean of ten draws, "
        "with new draws at each step; ensembles of networks that draw share ten draws, as evenly as possible. As "
        "in the authors' code, the variance layers are the last three convolutions and the first dense layer, and the "
        "dropout before them stays on.\n\n"
        "**Scaled down.** The paper trains 550 epochs in batches of 100 with Adam at 1e-3 falling linearly to 0, and "
        f"its ensembles have five networks. {scale}So that alpha gets as far, it starts at exp({START:.0f}) rather "
        f"than exp(-10), and learns at {faster} times the rate of the rest. One seed."
    )


def _accuracies(raw: Raw) -> str:
    rows = []
    for name, paper in TABLE_1.items():
        found = raw[f"{name}-0"] or {}
        ours = [found.get(key) for key in ("stochastic", "deterministic", "ensemble")]
        rows.append([name, *[cell for a, b in zip(paper, ours, strict=True) for cell in (number(a, 1), percent(b))]])
    for piece, name in (("deep_ensemble", "deep ensemble"), ("variance_ensemble", "variance ensemble")):
        rows.append([name, *[MISSING] * 5, percent((raw[piece] or {}).get("ensemble"))])
    header = ["network", "stochastic: paper", "ours", "deterministic: paper", "ours", "ensemble: paper", "ours"]
    return f"**Table 1, CIFAR-10**, accuracy in percent.\n\n{table(header, rows)}"


def _alphas(raw: Raw) -> str:
    """Report the final log alpha, and how far it could have got."""
    nets = list(raw.matching("variance-").values())
    layers = nets[0]["log_alpha"] if nets else {}
    mean = {layer: mean_of(net["log_alpha"].get(layer) for net in nets) for layer in layers}
    reached = ", ".join(f"{layer} {number(value, 1)}" for layer, value in mean.items()) or MISSING
    text = (
        f"**log alpha in the end**: {reached}; in the paper above 15 in the convolutions and above 12 in the dense "
        "layer, where expectations say nothing any more. The divergence's pull falls as 1 / alpha, and Adam, which "
        "divides by what it remembers of stronger ones, lets log alpha rise by (1 - beta2) / 2 a step in the long run."
    )
    if not nets:
        return text
    net = nets[0]
    steps = net["epochs"] * (net["images"] // net["batch"])
    end = driven(steps, net["log_alpha_rate"], net["memory"])
    return (
        f"{text} By the divergence alone, with no data to hold it back, it gets to {number(end, 1)} in the "
        f"{steps:,} steps made here with beta2 = {net['memory']:g}; the paper makes 275,000."
    )


def driven(steps: int, rate: float, memory: float) -> float:
    """Return the log alpha that Adam reaches by the divergence alone, at a rate that falls linearly to 0."""
    log_alpha, mean, square = START, 0.0, 0.0
    for step in range(steps):
        tail, bend = (1 / (1 + math.exp(u)) for u in (log_alpha, K2 + K3 * log_alpha))
        gradient = -0.5 * tail - K1 * K3 * bend * (1 - bend)  # of eq. (10), per weight: Adam is invariant to scale
        mean, square = 0.9 * mean + 0.1 * gradient, memory * square + (1 - memory) * gradient**2
        corrected = mean / (1 - 0.9 ** (step + 1)) / math.sqrt(square / (1 - memory ** (step + 1)))
        log_alpha -= rate * (1 - step / steps) * corrected
    return min(log_alpha, CLIP)


def _attacks(raw: Raw, curves: dict[str, dict[str, list[float]]]) -> str:
    rows = []
    for name in CURVES:
        curve = curves.get(name)
        if curve is None:
            rows.append([name, *[MISSING] * 7])
            continue
        last, entropy = len(curve["success"]) - 1, curve["entropy"]
        rows.append([
            name,
            *[percent(curve["success"][min(step, last)]) for step in (last // 3, 2 * last // 3, last)],
            percent(curve["accuracy"][last]),
            number(entropy[0]), f"{number(max(entropy))} ({entropy.index(max(entropy))})", number(entropy[last]),
        ])  # fmt: skip
    last = max((len(curve["success"]) - 1 for curve in curves.values()), default=0)
    at = [f"success after {step}, %" for step in (last // 3, 2 * last // 3, last)] if last else ["success, %"] * 3
    header = ["network", *at, "accuracy after all, %", "entropy before", "greatest (at step)", "after all"]
    return (
        "**Figure 2.** Success is the share of images, of those not taken for the wanted class before, that are taken "
        "for it. The paper prints no numbers. Entropy rises while images are between two classes, and falls as "
        "they arrive: whether it ends above where it began depends on the number of steps, which the paper's text does "
        f"not say.\n\n{table(header, rows)}"
    )


# -- claims ------------------------------------------------------------------------------------------------


def claims(raw: Raw) -> list[Claim]:
    """Check the paper's claims about the figure."""
    curves = attacks(raw)
    success = {name: mean_of(curve["success"]) for name, curve in curves.items()}
    rise = {name: curve["entropy"][-1] - curve["entropy"][0] for name, curve in curves.items()}
    under = {name: mean_of(curve["entropy"]) for name, curve in curves.items()}
    others = CURVES[:3]
    variance = raw["variance-0"]
    near_chance = None if variance is None else variance["deterministic"] < CHANCE
    shown = "" if variance is None else f"{percent(variance['deterministic'])} %"
    return [
        Claim("The variance network's deterministic accuracy is near chance (below 20 %)", near_chance, shown),
        _below("Attacks succeed less often against the variance network than against dropout and the deep ensemble, "
               "on average over the steps", ["variance"], list(others), success, 100, "%"),
        _below("They succeed least often against the ensemble of variance networks", ["variance ensemble"],
               [*others, "variance"], success, 100, "%"),
        _below("Entropy under attack is higher for the variance network and ensemble than for the others",
               list(others), ["variance", "variance ensemble"], under, 1, "nats"),
        _rising(rise),
    ]  # fmt: skip


def _below(
    text: str, low: list[str], high: list[str], values: dict[str, float | None], factor: float, unit: str
) -> Claim:
    found = {name: values.get(name) for name in (*low, *high)}
    known = {name: factor * value for name, value in found.items() if value is not None}
    if len(known) < len(found):
        return Claim(text, None)
    numbers = ", ".join(f"{name} {number(value, 2)} {unit}" for name, value in known.items())
    return Claim(text, max(known[name] for name in low) < min(known[name] for name in high), numbers)


def _rising(rise: dict[str, float]) -> Claim:
    text = "Only for the variance network and ensemble is entropy higher after the attack than before"
    if set(rise) != set(CURVES):
        return Claim(text, None)
    numbers = ", ".join(f"{name} {value:+.3f}" for name, value in rise.items())
    return Claim(text, all((value > 0) == name.startswith("variance") for name, value in rise.items()), numbers)


# -- figures -----------------------------------------------------------------------------------------------


def curve_figure(curves: dict[str, Any], key: str, title: str, axis: str, factor: float) -> Figure:
    """Plot one half of Figure 2."""
    values = {name: [factor * value for value in curve[key]] for name, curve in curves.items()}
    return line_figure(title, "steps of the attack", axis, range(max(map(len, values.values()))), values)
