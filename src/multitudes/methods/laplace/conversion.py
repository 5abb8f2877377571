"""Last-layer Laplace: uncertainty for a trained network.

MacKay, *A practical Bayesian framework for backpropagation networks*, 1992. Kristiadi, Hein & Hennig, *Being Bayesian,
even just a bit, fixes overconfidence in ReLU networks*, 2020. Daxberger et al., *Laplace Redux: effortless Bayesian
deep learning*, 2021. The trained weights w of the output layer are the mean of a Gaussian posterior. Its precision is
the curvature H of the likelihood at w (`curvature.py`) plus the precision delta of the prior N(0, 1/delta):

    p(W | data) = N(w, (H + delta)^-1).

Predictions are draws of W or closed forms: `softmax(f / sqrt(1 + pi/8 var f))` for classes, the exact Gaussian for
values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_choice, check_count, check_number
from multitudes.ensemble.members import Members
from multitudes.ensemble.multitude import Multitude, plain
from multitudes.ensemble.predictor import PredictorModule
from multitudes.methods.laplace.curvature import Curvature, structure_for, wide
from multitudes.methods.laplace.layers import STRUCTURES, LaplaceLayer, WithNoise
from multitudes.methods.laplace.output_rows import fits_noise, layer_label, output_layer, rows_of
from multitudes.methods.laplace.posterior import posterior_of
from multitudes.methods.laplace.prediction import Laplace, LaplaceMembers, approximations
from multitudes.methods.registry import Method, Settings, single
from multitudes.networks.devices import device_in, free_bytes, in_bytes
from multitudes.surgery.select import Selector, check_model, replace
from multitudes.tasks import Task, task_of
from multitudes.training.batches import Batches

MOST = 256e6
"""Default limit in bytes for a full curvature chosen by "auto", since larger ones take minutes to decompose."""


# -- conversion --------------------------------------------------------------------------------------------


def laplace(
    model: nn.Module,
    data: Any,
    *,
    structure: str = "auto",
    prior: float | str = "marginal",
    validation: Any = None,
    approximation: str = "draws",
    layers: Selector = None,
    noise: float | Tensor | None = None,
    draws: int | None = None,
    memory: str | float | None = None,
    task: str | None = None,
) -> Laplace:
    """Give a trained network a Gaussian posterior over its output layer (Daxberger et al., 2021).

    The posterior is `N(w, (H + delta)^-1)`, with the trained weights w, the curvature H of the likelihood and the prior
    precision delta. One pass over `data` computes it; nothing is trained. The rest of the network runs once for all
    draws, and `draws=0` is the network's own prediction.

    A network that predicts values gets noise variances too, and predicts for `task="gaussian"`: `epistemic_variance` is
    the posterior's, `aleatoric_variance` is the noise. Means `[B]` become `[B, 1]`. A network that predicts means and
    variances keeps its variances, and gets a posterior over the weights of the means.

    Args:
        model: A trained network, a multitude of one network, or `Members`, each of which gets its own posterior. It is
            not changed.
        data: The training data, `(x, y)` or an iterable of such batches, as for `fit`.
        structure: Structure of the posterior covariance: `"full"`, `"kron"` (Kronecker-factored), `"diag"`, or `"auto"`
            for the first of these that fits in `memory`.
        prior: Precision of the Gaussian prior over weights: a number; `"marginal"` to maximize the marginal
            likelihood; or `"validation"` for the best value of a grid by the likelihood of held-out data. For weights
            trained until they fit every target, `"marginal"` gives underconfident predictions.
        validation: Held-out data for `prior="validation"`, in the form of `data`.
        approximation: How to predict: `"draws"`; `"probit"` for classes; `"exact"` for values. It can be changed later.
        layers: Selects the output layer, if the network has several.
        noise: Variance of values around their mean: one number, or one per output `[O]`. By default it maximizes the
            marginal likelihood. Only for `task="regression"`.
        draws: Number of draws; by default that of `model`, or 20 if it makes none.
        memory: Limit for the curvature, its decomposition and later the draws: `"2GB"` or a number of bytes. By default
            a quarter of the free memory, and 256 MB for a full covariance chosen by `"auto"`.
        task: Task of the predictions; by default the network's.

    Returns:
        A multitude that draws: `net(x, draws=D)` is `[D, B, ...]`, or `[M * D, B, ...]` for `Members`.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x, y = torch.randn(100, 3), torch.randint(2, (100,))
        >>> net = laplace(model, (x, y), structure="kron")
        >>> net.predict(x[:5])
        Predictive(task='classification', members=20, inputs=5, outputs=[2])
        >>> net.approximation = "probit"
        >>> net.predict(x[:5]).members
        1
        >>> torch.equal(net(x, draws=0)[0], model(x))
        True
    """
    check_choice("structure", structure, ("auto", *STRUCTURES))
    check_choice("approximation", approximation, ("draws", "probit", "exact"))
    if isinstance(prior, str):
        check_choice("prior", prior, ("marginal", "validation"))
    else:
        check_number("prior", prior, 0, above=True)
    if (prior == "validation") != (validation is not None):
        got = "no validation" if validation is None else f"prior={prior!r}"
        raise ValueError(f"prior='validation' and validation=, its held-out data, need each other, got {got}")
    if isinstance(noise, Tensor):
        if not bool((noise > 0).all()) or not bool(noise.isfinite().all()):
            raise ValueError("noise must consist of finite variances above 0")
    elif noise is not None:
        check_number("noise", noise, 0, above=True)
    if draws is not None:
        check_count("draws", draws)
    if task is not None:
        task_of(task)
    if memory is not None:
        in_bytes(memory)
    batches, held_out = Batches.of(data), Batches.of(validation)
    options: dict[str, Any] = {"structure": structure, "prior": prior, "approximation": approximation}
    options |= {"layers": layers, "noise": noise, "memory": memory, "task": task}
    if isinstance(model, Members):
        members = [Multitude(plain(model.member(index))).like(model) for index in range(model.members)]
        nets = [laplace(member, batches, validation=held_out, **options) for member in members]
        net: Laplace = LaplaceMembers([plain(each) for each in nets], len(nets)).like(model)
        net.notes = {name: _note(net) if "posterior" in note else note for name, note in nets[0].notes.items()}
        own_task = nets[0].task
    else:
        net, own_task = _converted(model, batches, held_out, **options)
    if task is not None or not task_of(own_task).classes:
        net.task = own_task
    net.draws = net.draws if draws is None else draws
    net.memory = net.memory if memory is None else memory
    if approximation != "draws":
        net.approximation = approximation
    return net


def _converted(
    model: nn.Module,
    batches: Any,
    held_out: Batches | None,
    *,
    structure: str,
    prior: float | str,
    approximation: str,
    layers: Selector,
    noise: float | Tensor | None,
    memory: str | float | None,
    task: str | None,
) -> tuple[Laplace, str]:
    """Return the converted network and its task."""
    network = _network(model)
    reader = Multitude(network).like(model, task)
    reading = reader.reading
    _check_task(reading, noise, approximation)
    x, _ = next(iter(batches.on(device_in(network))))
    name = output_layer(network, layers, x)
    where, layer = layer_label(network, name), LaplaceLayer.of(network.get_submodule(name))
    converted = replace(network, {name: layer})
    weight, bias = layer.weight, layer.bias
    random = len(weight) // reading.per_value
    features = weight.shape[1] + (bias is not None)
    softmax = reading.class_axis is not None
    budget = free_bytes(weight.device) / 4 if memory is None else in_bytes(memory)
    structure = structure_for(structure, random, features, softmax, budget, MOST if memory is None else math.inf)
    square = sum(float(wide(own.detach())[:random].square().sum()) for own in (weight, bias) if own is not None)
    curvature = Curvature(structure, random, features, softmax, weight)
    posterior = posterior_of(reading, rows_of(converted, name, where, batches, reader), curvature, square)
    held = None if held_out is None else rows_of(converted, name, where, held_out, reader, "validation")
    given = None if isinstance(prior, str) else float(prior)
    fitted = posterior.fit(given, _given_noise(noise, posterior.errors), held)
    tensors = posterior.spectrum.posterior(posterior.precisions(fitted))
    layer.set_posterior(structure, tensors, fitted.prior, fitted.log_evidence)
    if fitted.noise is not None:
        # WithNoise shares the registries of its network, so a bare output layer would not be a submodule: wrap it.
        inside = converted if name else nn.Sequential(converted).train(converted.training)
        variances = fitted.noise.to(torch.float32)
        converted = WithNoise(inside, variances[0] if len(variances) == 1 else variances)
    net = Laplace(converted).like(model)
    net.notes = {**getattr(model, "notes", {}), name: _note(net)}
    return net, "gaussian" if fits_noise(reading) else reading.name


def _note(net: Laplace) -> str:
    """Describe the output layer's posterior, for `summary`."""
    prior, evidence = (
        " to ".join(dict.fromkeys(f"{end:.4g}" for end in (float(values.min()), float(values.max()))))
        for values in (net.prior, net.log_marginal_likelihood)
    )
    return f"posterior {net.structure!r}, prior precision {prior}, log marginal likelihood {evidence}"


def _network(model: nn.Module) -> nn.Module:
    """Return the plain network to convert, or raise."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a trained network, got {type(model).__name__}")
    if isinstance(model, PredictorModule):
        raise ValueError(f"model must be a multitude or a network, got a {type(model).__name__}: pass its network")
    if isinstance(plain(model), Multitude):
        raise ValueError(
            f"model ({type(model).__name__}) has {model.members} members that share weights, but each needs its own "
            "posterior: separate them with mt.fuse([net.member(i) for i in range(net.members)])"
        )
    return check_model(model)


def _check_task(task: Task, noise: float | Tensor | None, approximation: str) -> None:
    if not task.likelihood:
        raise ValueError(f"a Laplace posterior needs a likelihood, and task {task.name!r} has none: use another method")
    if noise is not None and not fits_noise(task):
        raise ValueError(f"noise={noise!r} is for task 'regression', but the task is {task.name!r}")
    if approximation not in approximations(task):
        choices = " or ".join(map(repr, approximations(task)))
        raise ValueError(f"approximation must be {choices} for task {task.name!r}, got {approximation!r}")


def _given_noise(noise: float | Tensor | None, errors: Tensor | None) -> Tensor | None:
    """Return the given noise, one per output or one for all, or None if it must be fitted."""
    if noise is None or errors is None:
        if errors is not None and not bool((errors > 0).all()):
            raise ValueError("noise must be given, since the network predicts the targets of an output without error")
        return None
    given = torch.as_tensor(noise, dtype=errors.dtype, device=errors.device).reshape(-1)
    if len(given) not in (1, len(errors)):
        raise ValueError(f"noise must be one variance, or one for each of {len(errors)} outputs, got {len(given)}")
    return given.expand(len(errors)).clone()


# -- for studies -------------------------------------------------------------------------------------------


def _after(
    net: Multitude, train: Iterable[Any], held_out: Iterable[Any] | None, settings: Settings, seed: int
) -> Multitude:
    """Convert after training; without held-out data, choose the prior by the marginal likelihood."""
    validated = settings["prior"] == "validation"
    prior = "marginal" if validated and held_out is None else settings["prior"]
    return laplace(net, train, **{**settings, "prior": prior}, validation=held_out if validated else None)


ROWS = (
    Method(
        "laplace", single, {"structure": "auto", "prior": "validation", "approximation": "draws"},
        "Training of one network, plus one pass over the training data. A draw runs the output layer only.",
        "Pick it for a network that is already trained.",
        place=45, after=_after,
    ),
)  # fmt: skip
