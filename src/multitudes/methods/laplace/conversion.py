"""Last-layer Laplace: uncertainty for a trained network.

MacKay, *A practical Bayesian framework for backpropagation networks*, 1992. Kristiadi, Hein & Hennig, *Being Bayesian,
even just a bit, fixes overconfidence in ReLU networks*, 2020. Daxberger et al., *Laplace Redux: effortless Bayesian
deep learning*, 2021. The trained weights w of the output layer are the mean of a Gaussian posterior. Its precision is
the curvature H of the likelihood at w (`curvature.py`) plus the precision delta of the prior N(0, 1/delta):

    p(W | data) = N(w, (H + delta)^-1).

Predictions use draws of W, or closed forms: `softmax(f / sqrt(1 + pi/8 var f))` for classes, the exact Gaussian for
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
from multitudes.methods.laplace.output_rows import described, fits_noise, output_layer, rows_of
from multitudes.methods.laplace.posterior import measured
from multitudes.methods.laplace.prediction import Laplace, LaplaceMembers, approximations
from multitudes.methods.registry import Method, Settings, single
from multitudes.networks.devices import device_in
from multitudes.networks.memory import free_bytes, in_bytes
from multitudes.surgery.select import Selector, check_model, replace
from multitudes.tasks import Task, task_of
from multitudes.training.batches import Batches

MOST = 256e6
"""Default limit in bytes for a full curvature chosen by "auto": larger ones take minutes to decompose."""


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
    """Give a trained network a Gaussian posterior over its output layer. It predicts by draws or in closed form.

    One pass over `data` in evaluation mode computes the curvature. Nothing is trained, and `model` is not changed.
    Classes are predicted by `draws` of the output layer, with one run of the rest of the network; `draws=0` is the
    network's own prediction. A network that predicts values gets noise variances too, and predicts for
    `task="gaussian"`: `epistemic_variance` is the posterior's, `aleatoric_variance` is the noise. If it predicted
    `[B]`, its means become `[B, 1]`. A network that predicts means and variances keeps its variances, and gets a
    posterior over the means' weights.

    Args:
        model: a trained network, or a multitude of one network; or `Members`, each of which gets its own posterior.
        data: the training data, `(x, y)` or an iterable of such batches, as for `fit`.
        structure: of the posterior covariance: "full", "kron" (Kronecker-factored), "diag", or "auto" for the first
            of these that fits in `memory`.
        prior: the precision of the Gaussian prior over weights: a number; "marginal", which maximises the marginal
            likelihood; or "validation", the best value of a grid by the likelihood of held-out data. The marginal
            likelihood needs no other data, but assumes that the weights are the best ones under the prior. For weights
            trained until they fit every target, its predictions are underconfident; use held-out data there.
        validation: held-out data for `prior="validation"`, in the form of `data`.
        approximation: how to predict: "draws"; "probit" for classes; "exact" for values. Can be changed later.
        layers: selects the output layer, if the network has several.
        noise: the variance of values around their mean: one number, or one per output `[O]`. By default it maximises
            the marginal likelihood. Only for `task="regression"`.
        draws: the number of draws; by default that of `model`, or 20 if it makes none.
        memory: limit for the curvature and its decomposition, and later the draws: "2GB", or a number of bytes. The
            default is a quarter of the free memory, and "auto" then gives a full covariance at most 256 MB, since
            larger ones take minutes.
        task: what the predictions are; by default the network's own task.

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
        got = "none" if validation is None else f"prior={prior!r}"
        raise ValueError(f"validation is the held-out data of prior='validation', and goes with it, got {got}")
    if isinstance(noise, Tensor):
        if not bool((noise > 0).all()) or not bool(noise.isfinite().all()):
            raise ValueError("noise must hold variances, finite and above 0")
    elif noise is not None:
        check_number("noise", noise, 0, above=True)
    if draws is not None:
        check_count("draws", draws)
    if task is not None:
        task_of(task)
    if memory is not None:
        in_bytes(memory)
    batches, held_out = Batches.of(data), Batches.of(validation)
    own: dict[str, Any] = {
        "structure": structure,
        "prior": prior,
        "approximation": approximation,
        "layers": layers,
        "noise": noise,
    }
    if isinstance(model, Members):
        alone = [Multitude(plain(model.member(index))).like(model) for index in range(model.members)]
        made = [laplace(each, batches, validation=held_out, memory=memory, task=task, **own) for each in alone]
        net: Laplace = LaplaceMembers([plain(each) for each in made], len(made)).like(model)
        net.notes = {name: _note(net) if "posterior" in note else note for name, note in made[0].notes.items()}
        predicts = made[0].task
    else:
        net, predicts = _converted(model, batches, held_out, memory=memory, task=task, **own)
    if task is not None or not task_of(predicts).classes:
        net.task = predicts
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
    """Return the converted network and the task that it predicts for."""
    network = _network(model)
    reader = Multitude(network).like(model, task)
    reading = reader.reading
    _check_task(reading, noise, approximation)
    x, _ = next(iter(batches.on(device_in(network))))
    name = output_layer(network, layers, x)
    where, layer = described(network, name), LaplaceLayer.of(network.get_submodule(name))
    converted = replace(network, {name: layer})
    weight, bias = layer.weight, layer.bias
    random = len(weight) // reading.per_value
    features = weight.shape[1] + (bias is not None)
    softmax = reading.class_axis is not None
    budget = free_bytes(weight.device) / 4 if memory is None else in_bytes(memory)
    structure = structure_for(structure, random, features, softmax, budget, MOST if memory is None else math.inf)
    square = sum(float(wide(own.detach())[:random].square().sum()) for own in (weight, bias) if own is not None)
    curvature = Curvature(structure, random, features, softmax, weight)
    posterior = measured(reading, rows_of(converted, name, where, batches, reader), curvature, square)
    held = None if held_out is None else rows_of(converted, name, where, held_out, reader, "validation")
    given = None if isinstance(prior, str) else float(prior)
    fitted = posterior.fitted(given, _given_noise(noise, posterior.errors), held)
    tensors = posterior.spectrum.posterior(posterior.precisions(fitted))
    layer.hold(structure, tensors, fitted.prior, fitted.log_evidence)
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
            f"model is a {type(model).__name__} of {model.members} members that are no networks of their own, and each "
            "needs a posterior: make them so by mt.fuse([net.member(i) for i in range(net.members)])"
        )
    return check_model(model)


def _check_task(task: Task, noise: float | Tensor | None, approximation: str) -> None:
    if not task.likelihood:
        raise ValueError(f"task {task.name!r} has no likelihood, which a Laplace posterior needs: use another method")
    if noise is not None and not fits_noise(task):
        raise ValueError(f"noise={noise!r} is for task 'regression', and the task is {task.name!r}")
    if approximation not in approximations(task):
        choices = " or ".join(map(repr, approximations(task)))
        raise ValueError(f"approximation must be {choices} for task {task.name!r}, got {approximation!r}")


def _given_noise(noise: float | Tensor | None, errors: Tensor | None) -> Tensor | None:
    """Return the given noise, one per output or one for all, or None if it is to be fitted."""
    if noise is None or errors is None:
        if errors is not None and not bool((errors > 0).all()):
            raise ValueError(
                "noise must be given, since the network predicts the targets of an output without any error"
            )
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
    chosen = settings["prior"] == "validation"
    prior = "marginal" if chosen and held_out is None else settings["prior"]
    return laplace(net, train, **{**settings, "prior": prior}, validation=held_out if chosen else None)


ROWS = (
    Method(
        "laplace", single, {"structure": "auto", "prior": "validation", "approximation": "draws"},
        "One network to train, and a pass over its training data; a draw is one of the output layer alone.",
        "Pick it for a network that is trained already.",
        place=45, after=_after,
    ),
)  # fmt: skip
