"""Every method put to a random network: how its multitude is built, and by which checks it is judged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import multitudes as mt
from tests.campaigns.random_judge import (
    MEMBERS,
    Verdict,
    Wrong,
    criterion,
    frozen_is_kept,
    is_constant,
    judge_members,
    judge_noise_of_members,
    judge_shared,
    judged,
    left_alone,
    same,
    saved_and_loaded,
)
from tests.campaigns.random_networks import Case, case, in_double, run

Make = Callable[..., Case]
"""`make(noise, weights)` builds a case: with all its noise or some, with its own weights or others."""
Check = Callable[[Make, str], None]
RUNNERS = ("loop", "packed", "vmapped")
INITS = ("fresh", "pretrained")
KINDS = ("random", "dropout", "diagonal", "low_rank")
DRAWS = 6
VANISHING = 1e-9
"""A rate, or a spread, so small that a network that draws computes what the given one computes."""


def given(of: Case) -> nn.Module:
    """A network as a user hands it to a method: where it answers with a tuple, with the word that the first counts."""
    return mt.Multitude(of.model, output=0) if of.parts[-1] == "tuple" else of.model


# -- independent members -----------------------------------------------------------------------------------


def fuse(make: Make, runner: str) -> None:
    cases = [make(noise=(), weights=index) for index in range(MEMBERS)]
    known = [make(noise=(), weights=index).model for index in range(MEMBERS)]
    with left_alone(cases[0]):
        net = mt.fuse([given(each) for each in cases])
        judge_members(net, known, cases[0], runner)
        saved_and_loaded(net, cases[0])
    noisy = make()
    if noisy.noise:
        judge_noise_of_members(mt.fuse([given(make()) for _ in range(MEMBERS)]), noisy, runner)


def deep_ensemble(make: Make, runner: str) -> None:
    quiet = make(noise=())
    with left_alone(quiet):
        net = mt.deep_ensemble(given(quiet), MEMBERS, init="fresh", seed=quiet.number)
        members = [copy.deepcopy(net.member(index)) for index in range(MEMBERS)]
        frozen_is_kept(quiet, members)
        judge_members(net, members, quiet, runner)


def packed(make: Make, runner: str) -> None:
    quiet = make(noise=())
    init = INITS[quiet.number % 2]
    alpha = 1 if init == "pretrained" else (1, 2)[quiet.number // 2 % 2]
    with left_alone(quiet):
        net = mt.packed(given(quiet), MEMBERS, alpha, example=quiet.x, init=init, seed=quiet.number)
        members = [copy.deepcopy(net.member(index)) for index in range(MEMBERS)]
        frozen_is_kept(quiet, members)
        judge_members(net, members, quiet, runner)
        saved_and_loaded(net, quiet)


def snapshots(make: Make, runner: str) -> None:
    quiet = make(noise=())
    states = checkpoints(quiet, MEMBERS)
    known = [make(noise=()).model for _ in states]
    for network, state in zip(known, states, strict=True):
        network.load_state_dict(state)
    with left_alone(quiet):
        judge_members(mt.snapshots(given(quiet), states), known, quiet, runner)


def checkpoints(of: Case, count: int) -> list[dict[str, Tensor]]:
    """States on the way of a training: what is trained moves, what is frozen or a buffer stays."""
    trained = {name for name, parameter in of.model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    moves = {name: p for name, p in of.model.named_parameters()}
    states = []
    for index in range(count):
        state = {name: tensor.detach().clone() for name, tensor in of.model.state_dict().items()}
        with in_double(index):
            steps = {id(p): 0.1 * torch.randn_like(p) for name, p in moves.items() if name in trained}
        for name, parameter in of.model.named_parameters(remove_duplicate=False):
            if id(parameter) in steps:
                state[name] += steps[id(parameter)]
        states.append(state)
    return states


# -- members that share weights ----------------------------------------------------------------------------


def _shared(build: Callable[[Case, str], mt.Multitude]) -> Check:
    def check(make: Make, runner: str) -> None:
        quiet = make(noise=())
        with left_alone(quiet):
            net = build(quiet, INITS[quiet.number % 2])
            frozen = [p.detach().clone() for p in net.parameters() if not p.requires_grad]
            _frozen_is_somewhere(quiet, net)
            judge_shared(net, quiet)
            for before, after in zip(frozen, [p for p in net.parameters() if not p.requires_grad], strict=True):
                same("frozen after training", after, before, 0.0)
            saved_and_loaded(net, quiet)

    return check


def _frozen_is_somewhere(of: Case, net: mt.Multitude) -> None:
    """Check that frozen parameters stay frozen, whole or once per member, unless they were narrowed."""
    tensors = [t for t in (*net.parameters(), *net.buffers()) if not t.is_sparse]
    for name, parameter in of.model.named_parameters():
        each = parameter.expand(net.members, *parameter.shape)
        alike = [t for t in tensors if t.shape in (parameter.shape, each.shape)]
        kept = [t for t in alike if torch.equal(t, parameter) or torch.equal(t, each)]
        if not parameter.requires_grad and alike and not any(not t.requires_grad for t in kept):
            raise Wrong(f"frozen {name} has other values, or is trained")


def _mimo(of: Case, init: str) -> mt.Multitude:
    net = mt.mimo(given(of), MEMBERS, 0.0, example=of.x, init=init, seed=of.number)
    net.repetition = 1.0  # else the members see different inputs in training
    if init == "pretrained":
        with torch.no_grad():
            same("pretrained", net.eval()(of.x)[0], run(of.model, of.x))
    return net


SHARED = {
    "batch_ensemble": _shared(lambda of, init: mt.batch_ensemble(given(of), MEMBERS, init=init, seed=of.number)),
    "masksembles": _shared(
        lambda of, init: mt.masksembles(given(of), MEMBERS, 2.0, example=of.x, init=init, seed=of.number)
    ),
    "mimo": _shared(_mimo),
    "heads": _shared(
        lambda of, init: mt.heads(
            given(of), MEMBERS, init="fresh" if init == "fresh" else None, example=of.x, seed=of.number
        )
    ),
    "lora": _shared(lambda of, init: mt.lora(given(of), MEMBERS, 2, example=of.x, seed=of.number)),
}


# -- networks that draw ------------------------------------------------------------------------------------


def _judge_draws(net: mt.Multitude, of: Case) -> Tensor:
    """Draws differ; the same seed gives the same ones, in chunks of any size; torch's random state is left alone."""
    net.eval()
    torch.manual_seed(of.number)
    state = torch.get_rng_state()
    with torch.no_grad():
        drawn = net(of.x, draws=DRAWS, seed=3)
        same("the same seed", net(of.x, draws=DRAWS, seed=3), drawn, 0.0)
        same("the same seed in small memory", net(of.x, draws=DRAWS, seed=3, memory=1), drawn, 1e-9)
        same("the first draws", net(of.x, draws=2, seed=3), drawn[:2], 1e-9)
        if not torch.equal(torch.get_rng_state(), state):
            raise Wrong("a draw with a seed moved torch's random state")
        if is_constant(of):  # a pool that sees masked steps alone, say
            return drawn
        # A few draws of a few components may be the same by chance.
        many, others = (net(of.x, draws=4 * DRAWS, seed=seed) for seed in (3, 4))
        if torch.equal(many, others):
            raise Wrong("another seed gives the same draws")
        one = net.predict(of.x, of.task, draws=4 * DRAWS, seed=3)
    if of.task == "classification" and not bool(one.mutual_information.max() > 0):
        raise Wrong("mutual information is 0")
    if bool((many.std(0).amax() == 0).all()):
        raise Wrong("all draws are the same")
    saved_and_loaded(net, of, draws=DRAWS, seed=3)
    return drawn


def _judge_vanishing(net: mt.Multitude, of: Case, model: nn.Module, tolerance: float = 1e-6) -> None:
    """Check that without noise the network has the predictions and gradients of `model` in both modes."""
    with torch.no_grad():
        want = run(model.eval(), of.x)
        for index, draw in enumerate(net.eval()(of.x, draws=3, seed=1)):
            same(f"evaluation, draw {index}", draw, want, tolerance)
        same("expectation", net(of.x, draws=0)[0], want)
    own = {name: p for name, p in net.named_parameters() if _holds(model, name, p)}
    net.train()
    model.train()
    loss, alone = net.loss(of.x, of.y, task=of.task), criterion(of, run(model, of.x))
    same("loss", loss, alone, tolerance)
    loss.backward()
    alone.backward()
    for name, parameter in own.items():
        same(f"gradient of {name}", parameter.grad, model.get_parameter(name).grad, 10 * tolerance)
    buffers = dict(net.named_buffers())
    for name, buffer in model.named_buffers():
        if name in buffers:
            same(f"buffer {name}", buffers[name], buffer, tolerance)


def _holds(model: nn.Module, name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is the model's of that name, neither one of several components nor transposed."""
    own = dict(model.named_parameters()).get(name)
    return own is not None and torch.equal(own, parameter)


def _drawing(build: Callable[..., mt.Multitude], tolerance: float = 1e-6) -> Check:
    """`build(case, vanishing)` makes the multitude, with noise that is felt or noise that vanishes."""

    def check(make: Make, runner: str) -> None:
        quiet = _with_open_gates(make(noise=()))
        with left_alone(quiet):
            _judge_draws(build(quiet, False), quiet)
            _judge_vanishing(build(quiet, True), quiet, _with_open_gates(make(noise=())).model, tolerance)

    return check


def mc_dropout(make: Make, runner: str) -> None:
    """All of a network's noise together, and each source of it alone: what cannot be kept on is refused."""
    noisy = _with_open_gates(make())
    with left_alone(noisy):
        if not noisy.noise:
            _judge_draws(mt.mc_dropout(given(noisy), 0.3, _is_linear, example=noisy.x), noisy)
            return
        net = mt.mc_dropout(given(noisy))
        _judge_draws(net, noisy)
        _judge_statistics(net, noisy, make, None)
    for source in range(len(noisy.noise)) if len(noisy.noise) > 1 else ():
        alone = _with_open_gates(make(noise=(source,)))
        _judge_statistics(mt.mc_dropout(given(alone)), alone, make, (source,))
    quiet = _with_open_gates(make(noise=()))
    if any(isinstance(m, (nn.Dropout, nn.Dropout2d)) for m in noisy.model.modules()):
        with left_alone(quiet):
            known = _with_open_gates(make(noise=())).model
            _judge_vanishing(mt.mc_dropout(given(quiet), VANISHING), quiet, known)


def _with_open_gates(of: Case) -> Case:
    """A gate at 0 hides the noise behind it."""
    for parameter in of.model.parameters():
        if parameter.numel() == 1 and not parameter.any():
            parameter.data.fill_(0.5)
    return of


def _is_linear(name: str, layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear)


def _judge_statistics(net: mt.Multitude, of: Case, make: Make, noise: tuple[int, ...] | None, count: int = 150) -> None:
    """The draws' means and variances are those of the network itself in training mode, batch norm in evaluation.

    Where the two modes differ by more than noise, they cannot be compared.
    """
    quiet = _with_open_gates(make(noise=()))
    with torch.no_grad():
        answers = [run(_training(quiet.model), of.x), run(quiet.model, of.x), run(quiet.model.eval(), of.x)]
        if not all(torch.equal(answers[0], answer) for answer in answers):
            return
        torch.manual_seed(of.number)
        model = _training(_with_open_gates(make(noise)).model)
        want = torch.stack([run(model, of.x) for _ in range(count)])
        got = net.eval()(of.x, draws=count, seed=5)
    error = ((got.var(0) + want.var(0)) / count).sqrt()
    far = ((got.mean(0) - want.mean(0)).abs() - 1e-9) / error.clamp(min=1e-12)
    if bool(far.max() > 7):
        raise Wrong(f"the mean of draws is {far.max():.0f} standard errors from the network's in training mode")
    spread, due = got.var(0).sum().item(), want.var(0).sum().item()
    if not 0.5 * due <= spread <= 2 * due:
        raise Wrong(f"draws have variance {spread:.2e}, the network in training mode {due:.2e}")


def _training(model: nn.Module) -> nn.Module:
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def _variance(of: Case, vanishing: bool) -> mt.Multitude:
    net = mt.variance(given(of), None, "additive" if vanishing else "layer", init="pretrained", log_alpha=-2.0)
    for name, parameter in net.named_parameters():
        if name.endswith("log_sigma"):
            parameter.data.fill_(-60.0)
    return net


def _patched(of: Case, vanishing: bool) -> mt.Multitude:
    norms = any(isinstance(m, (nn.LayerNorm, nn.GroupNorm)) for m in of.model.modules())
    layers = None if of.number % 3 == 0 else "norm+output" if norms else "output"
    spread = VANISHING if vanishing else 0.5
    return mt.patched(given(of), 2, layers, init="pretrained", spread=spread, example=of.x, seed=1)


def _swag(of: Case, vanishing: bool) -> mt.Multitude:
    states = checkpoints(of, 4)
    return mt.swag(given(of), [states[0]] * 3 if vanishing else states)


def _subspace(of: Case, vanishing: bool) -> mt.Multitude:
    kind = KINDS[of.number % 4]
    rank = {"rank": 2} if kind == "low_rank" else {}
    scale: dict[str, Any] = {"p": VANISHING if vanishing else 0.2} if kind == "dropout" else {
        "scale": VANISHING if vanishing else 0.5
    }  # fmt: skip
    return mt.subspace(given(of), kind, checkpoints(of, 4), **rank, **scale)


def subspaces(build: Callable[[Case, bool], mt.Multitude]) -> Check:
    def check(make: Make, runner: str) -> None:
        quiet = make(noise=())
        with left_alone(quiet):
            _judge_draws(build(quiet, False), quiet)
        centre = make(noise=()).model
        states = checkpoints(quiet, 4)
        kind = None if build is _swag else KINDS[quiet.number % 4]
        if kind in ("diagonal", "low_rank"):
            centre.load_state_dict(mean_of(states))
        else:
            centre.load_state_dict(states[0] if build is _swag else states[-1])
        with torch.no_grad():
            want = run(centre.eval(), quiet.x)
            for index, draw in enumerate(build(quiet, True).eval()(quiet.x, draws=3, seed=1)):
                same(f"draw {index} around the centre", draw, want, 1e-6)

    return check


def mean_of(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of what moves, parameter by parameter; what stays is what it is."""
    mean = dict(states[-1])
    for name, tensor in mean.items():
        if (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_sparse:
            mean[name] = torch.stack([state[name] for state in states]).mean(0)
    return mean


def swa(make: Make, runner: str) -> None:
    quiet = make(noise=())
    states = checkpoints(quiet, 3)
    known = make(noise=()).model
    known.load_state_dict(mean_of(states))
    with left_alone(quiet):
        net = mt.swa(given(quiet), states)
        with torch.no_grad():
            same("evaluation", net.eval()(quiet.x)[0], run(known.eval(), quiet.x))


def smooth(make: Make, runner: str) -> None:
    """A smoothing that changes nothing, a kernel of one point and no cut-off, changes nothing."""
    quiet = make(noise=())
    with left_alone(quiet):
        smoothed = mt.smooth(given(quiet), (1,), "none", example=quiet.x)
        with torch.no_grad():
            same("evaluation", run(smoothed.eval(), quiet.x), run(quiet.model, quiet.x))
        _ = run(mt.smooth(given(quiet), example=quiet.x).train(), quiet.x)


def laplace(make: Make, runner: str) -> None:
    """Draws around the network's own prediction; of values, means of a network that tells their noise as well."""
    quiet = _with_open_gates(make(noise=()))
    with left_alone(quiet), torch.no_grad():
        _judge_draws(mt.laplace(given(quiet), [(quiet.x, quiet.y)], task=quiet.task, prior=1.0), quiet)
        net = mt.laplace(given(quiet), [(quiet.x, quiet.y)], task=quiet.task, prior=1 / VANISHING**2)
        want = run(quiet.model.eval(), quiet.x)
        for what, drawn in (("draw", net(quiet.x, draws=3, seed=1)), ("expectation", net(quiet.x, draws=0))):
            for index, draw in enumerate(drawn):
                own = draw.chunk(2, 1)[0] if quiet.task == "regression" else draw
                same(f"{what} {index}", own, want, 1e-6)


def _drop_connect(of: Case, vanishing: bool) -> mt.Multitude:
    return mt.drop_connect(given(of), VANISHING if vanishing else 0.2)


CHECKS: dict[str, Check] = {
    "fuse": fuse,
    "deep_ensemble": deep_ensemble,
    "packed": packed,
    "snapshots": snapshots,
    **SHARED,
    "mc_dropout": mc_dropout,
    "drop_connect": _drawing(_drop_connect),
    "variance": _drawing(_variance, 1e-4),  # what is left of its noise is 1e-8 an activation, and grows on its way
    "patched": _drawing(_patched, 1e-5),  # layers that are narrow make much of a little
    "swa": swa,
    "swag": subspaces(_swag),
    "subspace": subspaces(_subspace),
    "smooth": smooth,
    "laplace": laplace,
}
INDEPENDENT = ("fuse", "deep_ensemble", "packed", "snapshots")
ROWS = [(m, r) for m in CHECKS for r in (RUNNERS if m in INDEPENDENT else ("",))]
"""Every method, and where members are independent every runner."""


def verdict(number: int, method: str, runner: str = "") -> Verdict:
    """Judge a random network under a method and, if members are independent, a runner."""
    return judged(lambda: CHECKS[method](partial(case, number), runner))
