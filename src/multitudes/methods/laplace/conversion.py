"""Last-layer Laplace: uncertainty for a network that is trained already.

MacKay, *A practical Bayesian framework for backpropagation networks*, 1992. Kristiadi, Hein & Hennig, *Being Bayesian,
even just a bit, fixes overconfidence in ReLU networks*, 2020. Daxberger et al., *Laplace Redux: effortless Bayesian
deep learning*, 2021. The trained weights w of the output layer are the mean of a Gaussian posterior, whose precision is
the curvature of the data's likelihood there (`curvature.py`) plus that of the prior N(0, 1/delta):

    p(W | data) = N(w, (H + delta)^-1).

Predictions are those of draws of W, or without draws: for classes `softmax(f / sqrt(1 + pi/8 var f))`, for values the
Gaussian that they have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.batches import Batches
from multitudes.core.checks import check_choice, check_count, check_number
from multitudes.core.devices import device_in
from multitudes.core.draws.memory import free_bytes, in_bytes
from multitudes.core.members import Members
from multitudes.core.multitude import Multitude, plain
from multitudes.core.predictor import PredictorModule
from multitudes.core.tasks import Task, task_of
from multitudes.methods.laplace.curvature import Curvature, structure_for, wide
from multitudes.methods.laplace.layers import STRUCTURES, LaplaceLayer, WithNoise
from multitudes.methods.laplace.posterior import measured
from multitudes.methods.laplace.predicting import Laplace, LaplaceMembers, approximations
from multitudes.methods.laplace.rows import described, fits_noise, output_layer, rows_of
from multitudes.methods.registry import Method, Settings, single
from multitudes.surgery.layers import Selector, check_model, replace

MOST = 256e6
"""The bytes that a full curvature may take where neither is asked for: a larger one takes minutes to decompose."""


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
    """A trained network with a Gaussian posterior of its output layer: a multitude that draws, or predicts by formula.

    One pass over `data` in evaluation mode gives the curvature; nothing is trained, and `model` is left as it was.
    Classes are predicted by `draws` of the output layer, for which the rest of the network runs once, and `draws=0` is
    the network's own prediction. A network that predicts values becomes one that tells their noise as well, with
    predictions of `task="gaussian"`: `epistemic_variance` is the posterior's, `aleatoric_variance` the noise. Where it
    predicted `[B]`, its means are `[B, 1]` then. One that predicts means and variances keeps its own variances, and has
    a posterior of the means' weights.

    Args:
        model: a trained network, or a multitude of one; or `Members`, each of which gets a posterior of its own.
        data: the training data, `(x, y)` or an iterable of such batches, as `fit` takes them.
        structure: of the posterior's covariance: "full", "kron" (Kronecker-factored), "diag", or "auto" for the first
            of these that takes no more than `memory`.
        prior: the precision of the weights' Gaussian prior: a number; "marginal", which maximises the marginal
            likelihood; or "validation", the best of a grid by the likelihood of held-out data. The marginal likelihood
            needs no other data, but takes the weights for the best ones under the prior. Where they were trained until
            they fit every target, predictions come out too unsure, and held-out data choose better.
        validation: held-out data for `prior="validation"`, in the form of `data`.
        approximation: how to predict: by "draws"; or of classes by "probit", of values "exact". It can be set later.
        layers: selects the output layer, where the network has several.
        noise: the variance of values around their mean, one, or one for each output `[O]`; by default that which
            maximises the marginal likelihood. For `task="regression"` alone.
        draws: how many to make; by default as many as `model` does, 20 where it makes none.
        memory: how much the curvature and its decomposition, and later the draws, may take: "2GB", or a number of
            bytes. By default a quarter of what is free, of which "auto" takes 256 MB at most for a full covariance,
            since a larger one takes minutes.
        task: what the predictions are of; the network's own by default.

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
    """The converted network, and the task that it predicts for."""
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
        # A network that is its output layer has no place for a name; inside another it has one.
        inside = converted if name else nn.Sequential(converted).train(converted.training)
        variances = fitted.noise.to(torch.float32)
        converted = WithNoise(inside, variances[0] if len(variances) == 1 else variances)
    net = Laplace(converted).like(model)
    net.notes = {**getattr(model, "notes", {}), name: _note(net)}
    return net, "gaussian" if fits_noise(reading) else reading.name


def _note(net: Laplace) -> str:
    """What `summary` tells of the output layer."""
    prior, evidence = (
        " to ".join(dict.fromkeys(f"{end:.4g}" for end in (float(values.min()), float(values.max()))))
        for values in (net.prior, net.log_marginal_likelihood)
    )
    return f"posterior {net.structure!r}, prior precision {prior}, log marginal likelihood {evidence}"


def _network(model: nn.Module) -> nn.Module:
    """The plain network to convert."""
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
    """The given noise for each output, or for all of them."""
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
    """With the prior that held-out data choose, where there are any, and else that of the marginal likelihood."""
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
