"""The judge of random networks: is a multitude right, by a loop of its own over the networks it is made of?

A method's multitude of a network is *right*, or *refused* by a `ValueError` in a sentence of the library's, or else
*crashed*, or *wrong*: it gave numbers that are not those of its members run one by one. Nothing of the library is used
for that but `net.member(i)`, and not even that where the members are known.
"""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

import multitudes as mt
from tests.campaigns.random_networks import Case, run

LIBRARY = str(Path(mt.__file__).parent)
MEMBERS = 2
RATE = 0.02
STEPS = 2
OUTPUT = "multitudes_output"
"""Attributes that `mt.Multitude(model, output=...)` sets on the network it wraps."""


class Wrong(Exception):
    """Raised if a multitude computes something wrong."""


class Verdict(NamedTuple):
    """Verdict on one network under one method and runner."""

    kind: str
    why: str


def judged(check: Callable[[], None]) -> Verdict:
    """The verdict of a check that raises `Wrong`, or whatever the library raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check()
        except Wrong as wrong:
            return Verdict("wrong", str(wrong))
        except Exception as error:
            return Verdict("refused" if is_refusal(error) else "crashed", _told(error))
    return Verdict("right", "")


def is_refusal(error: Exception) -> bool:
    """Return whether an error is a refusal: a `ValueError` raised by the library for a network that takes `x`."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    blames_input = str(error).startswith("x of shape") and "does not fit the network" in str(error)
    return isinstance(error, ValueError) and raised_in.startswith(LIBRARY) and not blames_input


def _told(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(LIBRARY)]
    place = f" [{Path(frames[-1].filename).name}:{frames[-1].lineno}]" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"


# -- comparing ---------------------------------------------------------------------------------------------


def same(what: str, got: Tensor | None, want: Tensor | None, tolerance: float = 1e-7) -> None:
    """The same numbers, to rounding; no gradient is a gradient of 0."""
    if got is None or want is None:
        other = want if got is None else got
        if other is not None and bool(other.abs().max() > tolerance):
            raise Wrong(f"{what}: one has a gradient, the other none")
        return
    got, want = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (got, want))
    if got.shape != want.shape:
        raise Wrong(f"{what}: shape {list(got.shape)} instead of {list(want.shape)}")
    if not want.numel():
        return
    error = (got.to(want.dtype) - want).abs().max().item()
    if not error <= tolerance * max(1.0, want.abs().max().item()):
        raise Wrong(f"{what}: off by {error:.1e} of {want.abs().max().item():.1e}")


def criterion(case: Case, prediction: Tensor) -> Tensor:
    if case.task == "regression":
        return F.mse_loss(prediction, case.y)
    return F.cross_entropy(prediction, case.y)


@contextmanager
def left_alone(case: Case) -> Iterator[None]:
    """The given model is what it was, and still runs."""
    before = _image_of(case.model)
    answer = run(case.model, case.x).detach()
    yield
    after = _image_of(case.model)
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            same(f"the given model's {key}", new, old, 0.0)
        elif str(old) != str(new):
            raise Wrong(f"the given model's {key} was {old} and is {new}")
    same("the given model's answer", run(case.model, case.x), answer, 0.0)


def _image_of(model: nn.Module) -> dict[str, Any]:
    image: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        image[f"{name} attributes"] = sorted(vars(module).keys() - {OUTPUT})
        image[f"{name} hooks"] = len(module._forward_hooks), len(module._forward_pre_hooks)
        image[f"{name} mode"] = module.training
        for key, value in vars(module).items():
            if isinstance(value, (int, float, str, bool)) and key != OUTPUT:
                image[f"{name}.{key}"] = value
    image["gradients"] = [name for name, p in model.named_parameters() if p.grad is not None]
    return image


def frozen_is_kept(case: Case, members: list[nn.Module]) -> None:
    """Check that frozen parameters keep their values in every member."""
    for name, parameter in case.model.named_parameters():
        if parameter.requires_grad:
            continue
        for index, member in enumerate(members):
            own = dict(member.named_parameters()).get(name)
            if own is not None and own.shape == parameter.shape:
                same(f"frozen {name} of member {index}", own, parameter, 1e-12)


def saved_and_loaded(net: mt.Multitude, case: Case, **options: Any) -> None:
    """The same predictions after a round trip through a file, unless saving or loading is refused."""
    net.eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        try:
            loaded = mt.load(mt.save(net, Path(folder) / "net.safetensors"), case.model)
        except ValueError as error:
            if is_refusal(error):
                return
            raise
        same("loaded", loaded.eval()(case.x, **options), net(case.x, **options), 1e-9)


def is_constant(of: Case) -> bool:
    """Return whether the prediction does not depend on the input."""
    first = next(iter(of.x.values())) if isinstance(of.x, dict) else of.x[0] if isinstance(of.x, tuple) else of.x
    before = first.clone()
    want = run(of.model.eval(), of.x)
    first.copy_(first.flip(0) if not first.is_floating_point() else first + 1)
    try:
        return torch.equal(run(of.model, of.x), want)
    finally:
        first.copy_(before)


# -- members that share no weight --------------------------------------------------------------------------


def judge_members(net: mt.Members, alone: list[nn.Module], case: Case, runner: str) -> None:
    """Members against the same networks, each run, trained and moved alone."""
    net.runner = runner
    _same_answers(net, alone, case, "at the start")
    optimizers = [torch.optim.SGD(_trained(each), RATE) for each in (net, *alone)]
    for step in range(STEPS):
        frozen = {name: p.detach().clone() for name, p in net.named_parameters() if not p.requires_grad}
        _one_step(net, alone, case, optimizers, f"step {step + 1}")
        for name, before in frozen.items():
            same(f"frozen {name} after step {step + 1}", net.get_parameter(name), before, 0.0)
    _same_answers(net, alone, case, "after training")
    for index, network in enumerate(alone):
        same(f"member({index}) after training", run(net.member(index).eval(), case.x), run(network, case.x))


def _trained(network: nn.Module) -> list[nn.Parameter]:
    return [p for p in network.parameters() if p.requires_grad]


def _same_answers(net: mt.Members, alone: list[nn.Module], case: Case, when: str) -> None:
    with torch.no_grad():
        together = net.eval()(case.x)
        for index, network in enumerate(alone):
            same(f"evaluation of member {index} {when}", together[index], run(network.eval(), case.x))


def _one_step(
    net: mt.Members, alone: list[nn.Module], case: Case, optimizers: list[torch.optim.Optimizer], when: str
) -> None:
    for network, optimizer in zip((net, *alone), optimizers, strict=True):
        network.train()
        optimizer.zero_grad()
    loss = net.loss(case.x, case.y, task=case.task)
    loss.backward()
    losses = [criterion(case, run(network, case.x)) for network in alone]
    for one in losses:
        one.backward()
    same(f"loss, {when}", loss, torch.stack(losses).sum())
    for index, network in enumerate(alone):
        member = net.member(index)
        for name, parameter in network.named_parameters():
            same(f"gradient of {name}, member {index}, {when}", member.get_parameter(name).grad, parameter.grad)
        for name, buffer in network.named_buffers():
            same(f"buffer {name}, member {index}, {when}", member.get_buffer(name), buffer)
    for optimizer in optimizers:
        optimizer.step()


def judge_noise_of_members(net: mt.Members, case: Case, runner: str, tries: int = 20) -> None:
    """Equal members draw noise of their own in training: where a network's answers differ, so do its twins'."""
    net.runner = runner
    net.train()
    model = case.model.train()
    torch.manual_seed(case.number)
    try:
        with torch.no_grad():
            varies = [_varies(model, case) for _ in range(tries)]
            for _ in range(tries if any(varies) else 0):
                one, other = net(case.x)[:2]
                if not torch.equal(one, other):
                    return
    finally:
        model.eval()
    if sum(varies) > tries // 4:
        raise Wrong("noise in training: two members draw the same numbers")


def _varies(model: nn.Module, case: Case) -> bool:
    """Return whether a second prediction from the same buffers and counters differs."""
    state = _moving(model)
    one = run(model, case.x)
    _restore(model, state)
    return not torch.equal(one, run(model, case.x))


# -- members that share weights ----------------------------------------------------------------------------


def judge_shared(net: mt.Multitude, case: Case) -> None:
    """Members that share weights against `net.member(i)`, by differences of their losses where gradients are due.

    Batch norm is by definition that of all members' rows together, which no member alone can compute. So its layers
    are in evaluation mode, and the rest of the network in training mode; where it has no running statistics to
    evaluate with, training is only run.
    """
    for step in range(STEPS + 1):
        when = f"after {step} steps"
        with torch.no_grad():
            together = net.eval()(case.x)
            for index in range(net.members):
                want = run(net.member(index).eval(), case.x)
                same(f"evaluation of member {index} {when}", together[index], want)
        _judge_shared_training(net, case, when)
        with torch.no_grad():
            for parameter in _trained(net):
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
                parameter.grad = None


def _judge_shared_training(net: mt.Multitude, case: Case, when: str) -> None:
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None for m in net.modules()):
        _training_but_batch_norm(net).loss(case.x, case.y, task=case.task).backward()
        return
    _training_but_batch_norm(net)
    members = [_training_but_batch_norm(net.member(index)) for index in range(net.members)]
    state = _moving(net)
    together = net(case.x)
    for index, member in enumerate(members):
        same(f"training of member {index} {when}", together[index], run(member, case.x))
    _restore(net, state)
    loss = net.loss(case.x, case.y, task=case.task)
    loss.backward()
    _restore(net, state)
    each = net.members if net.independent else 1  # losses of members that learn apart are added
    same(f"loss {when}", loss / each, _mean_loss(net, case))
    got, want = _slopes(net, case, state)
    same(f"slope of the loss {when}", got / each, want, 1e-5)


def _slopes(net: mt.Multitude, case: Case, state: list[tuple[nn.Module, str, Any]]) -> tuple[Tensor, Tensor]:
    """Return the slope of the loss in a random direction, by the gradient of `net` and by those of its members.

    How a member's weights move as the network's do is taken from `member` of the network moved a little.
    """
    direction = {p: torch.randn_like(p) for p in _trained(net)}
    gradient = [(p.grad, d) for p, d in direction.items() if p.grad is not None]
    got = sum((_inner(*pair) for pair in gradient), torch.zeros(()))
    want = torch.zeros(())
    for index in range(net.members):
        member = _training_but_batch_norm(net.member(index)).requires_grad_()  # a frozen weight has factors that learn
        criterion(case, run(member, case.x)).backward()
        with _moved(direction, 1e-6):
            ahead = net.member(index).state_dict()
        with _moved(direction, -1e-6):
            behind = net.member(index).state_dict()
        for name, parameter in member.named_parameters():
            if parameter.grad is not None:
                want = want + _inner(parameter.grad, ahead[name] - behind[name]) / 2e-6 / net.members
    _restore(net, state)
    size = 1 + sum((g.abs().pow(2).sum() for g, _ in gradient), torch.zeros(())).sqrt()
    return got / size, want / size


def _inner(one: Tensor, other: Tensor) -> Tensor:
    return (one.conj() * other).sum().real


def _training_but_batch_norm(network: nn.Module) -> nn.Module:
    network.train()
    for module in network.modules():
        hooks = module._forward_pre_hooks.values()
        spectral = isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)
        if spectral or (isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None):
            module.training = False
    return network


def _mean_loss(net: mt.Multitude, case: Case) -> Tensor:
    with torch.no_grad():
        members = [_training_but_batch_norm(net.member(index)) for index in range(net.members)]
        return torch.stack([criterion(case, run(member, case.x)) for member in members]).mean()


@contextmanager
def _moved(direction: dict[nn.Parameter, Tensor], by: float) -> Iterator[None]:
    before = {parameter: parameter.detach().clone() for parameter in direction}
    with torch.no_grad():
        for parameter, step in direction.items():
            parameter += by * step
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, old in before.items():
                parameter.copy_(old)


def _moving(net: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Buffers and counters, as they are now."""
    found: list[tuple[nn.Module, str, Any]] = []
    for module in net.modules():
        found += [(module, name, b.clone()) for name, b in module._buffers.items() if b is not None]
        if isinstance(vars(module).get("steps"), int):
            found.append((module, "steps", module.steps))
    return found


def _restore(net: nn.Module, state: list[tuple[nn.Module, str, Any]]) -> None:
    for module, name, value in state:
        setattr(module, name, value.clone() if isinstance(value, Tensor) else value)
