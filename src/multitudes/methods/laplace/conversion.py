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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.batches import Batches
from multitudes.core.checks import check_choice, check_count, check_number
from multitudes.core.draws.memory import free_bytes, in_bytes
from multitudes.core.members import Members
from multitudes.core.multitude import Multitude, plain
from multitudes.core.predictor import PredictorModule
from multitudes.core.tasks import Task, task_of
from multitudes.methods.laplace.curvature import Curvature, structure_for, wide
from multitudes.methods.laplace.layers import (
    STRUCTURES,
    LaplaceConv,
    LaplaceLayer,
    LaplaceLinear,
    WithNoise,
)
from multitudes.methods.laplace.posterior import measured
from multitudes.methods.laplace.predicting import Laplace, LaplaceMembers, approximations
from multitudes.methods.laplace.rows import OutputLayer, device_of, fits_noise, output_layer, rows_of
from multitudes.methods.registry import Method, Settings, single
from multitudes.surgery.affine import weight_of
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
    options = _Options(structure, prior, validation, approximation, layers, noise, draws, memory, task)
    batches = Batches(data)
    held_out = Batches.of(validation)
    if isinstance(model, Members):
        alone = [Multitude(plain(model.member(index))).like(model) for index in range(model.members)]
        made = [_converted(each, batches, held_out, options) for each in alone]
        net: Laplace = LaplaceMembers([plain(each) for each in made], len(made)).like(model)
        net.notes = {name: _note(net) if "posterior" in note else note for name, note in made[0].notes.items()}
        return _set(net, made[0].task, options)
    return _converted(model, batches, held_out, options)


@dataclass(frozen=True)
class _Options:
    """The arguments of `laplace`, checked."""

    structure: str
    prior: float | str
    validation: Any
    approximation: str
    layers: Selector
    noise: float | Tensor | None
    draws: int | None
    memory: str | float | None
    task: str | None

    def __post_init__(self) -> None:
        check_choice("structure", self.structure, ("auto", *STRUCTURES))
        check_choice("approximation", self.approximation, ("draws", "probit", "exact"))
        if self.draws is not None:
            check_count("draws", self.draws)
        if self.task is not None:
            task_of(self.task)
        if self.memory is not None:
            in_bytes(self.memory)
        if isinstance(self.prior, str):
            check_choice("prior", self.prior, ("marginal", "validation"))
        else:
            check_number("prior", self.prior, 0, above=True)
        if (self.prior == "validation") != (self.validation is not None):
            got = "none" if self.validation is None else f"prior={self.prior!r}"
            raise ValueError(f"validation is the held-out data of prior='validation', and goes with it, got {got}")
        if isinstance(self.noise, Tensor):
            if not bool((self.noise > 0).all()) or not bool(self.noise.isfinite().all()):
                raise ValueError("noise must hold variances, finite and above 0")
        elif self.noise is not None:
            check_number("noise", self.noise, 0, above=True)

    def budget(self, device: torch.device) -> float:
        """How many bytes a curvature may take."""
        return free_bytes(device) / 4 if self.memory is None else in_bytes(self.memory)


def _converted(model: nn.Module, batches: Batches, held_out: Batches | None, options: _Options) -> Laplace:
    network = _network(model)
    reader = Multitude(network).like(model, options.task)
    task = reader.reading
    _check_task(task, options)
    x, _ = next(iter(batches.on(device_of(network))))
    output = output_layer(network, options.layers, x)
    weight, bias = _weights(output)
    random = len(weight) // task.per_value
    features = weight.shape[1] + (bias is not None)
    softmax = task.class_axis is not None
    most = MOST if options.memory is None else math.inf
    structure = structure_for(options.structure, random, features, softmax, options.budget(weight.device), most)
    trained = wide(weight.flatten(1))[:random].square().sum()
    trained = trained if bias is None else trained + wide(bias.detach())[:random].square().sum()
    curvature = Curvature(structure, random, features, softmax, weight)
    posterior = measured(task, rows_of(network, output, batches, reader), curvature, float(trained))
    prior = None if isinstance(options.prior, str) else float(options.prior)
    noise = _given_noise(options.noise, posterior.evidence.errors)
    held = None if held_out is None else rows_of(network, output, held_out, reader, "validation")
    fitted = posterior.fitted(prior, noise, held)
    kind = LaplaceConv if output.dense else LaplaceLinear
    learns = any(p.requires_grad for name, p in output.layer.named_parameters() if name != "bias")
    layer: LaplaceLayer = kind.of(output.layer, weight, bias, learns).train(output.layer.training)
    tensors = posterior.spectrum.posterior(posterior.precisions(fitted))
    layer.hold(structure, tensors, fitted.prior, fitted.log_evidence)
    converted = replace(network, {output.name: layer})
    if fitted.noise is not None:
        # A network that is its output layer has no place for a name; inside another it has one.
        inside = converted if output.name else nn.Sequential(converted).train(converted.training)
        noise = fitted.noise.to(torch.float32)
        converted = WithNoise(inside, noise[0] if len(noise) == 1 else noise)
    net = Laplace(converted).like(model)
    net.notes = {**getattr(model, "notes", {}), output.name: _note(net)}
    return _set(net, "gaussian" if fits_noise(task) else task.name, options)


def _set(net: Laplace, task: str, options: _Options) -> Laplace:
    """With the settings that were asked for."""
    if options.task is not None or not task_of(task).classes:
        net.task = task
    net.draws = net.draws if options.draws is None else options.draws
    net.memory = options.memory if options.memory is not None else net.memory
    if options.approximation != "draws":
        net.approximation = options.approximation
    return net


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


def _check_task(task: Task, options: _Options) -> None:
    if not task.likelihood:
        raise ValueError(f"task {task.name!r} has no likelihood, which a Laplace posterior needs: use another method")
    if options.noise is not None and not fits_noise(task):
        raise ValueError(f"noise={options.noise!r} is for task 'regression', and the task is {task.name!r}")
    if options.approximation not in approximations(task):
        choices = " or ".join(map(repr, approximations(task)))
        raise ValueError(f"approximation must be {choices} for task {task.name!r}, got {options.approximation!r}")


def _weights(output: OutputLayer) -> tuple[Tensor, nn.Parameter | None]:
    """The trained weight, `[O, I]` or `[O, I, 1, 1]`, and bias."""
    weight = weight_of(output.layer).detach()
    bias = output.layer.bias if output.has_bias else None
    return weight.mT if output.affine.inputs == 0 else weight, bias


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
