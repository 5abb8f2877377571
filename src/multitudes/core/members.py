"""Members that share no weight: one storage, three ways to run it.

`Members` keeps one plain network and its parameters and buffers stacked, `[M, ...]`, under the network's own
names. Fusing networks is stacking, taking one out is slicing, and both are exact.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from multitudes.core.calling import Input, InputError, prediction_in, slots, split_call, tensors_in
from multitudes.core.divergences import Divergence
from multitudes.core.draws.stochastic import WithoutDropout, as_member, expecting
from multitudes.core.multitude import Multitude, plain
from multitudes.core.packing import CannotPack, Plan, trace
from multitudes.core.settings import described
from multitudes.core.tasks import Criterion

RUNNERS = ("auto", "loop", "packed", "stacked")


class Members(Multitude):
    """M networks of one architecture that share no weight.

    `net.runner` says how they run: `"loop"` one after the other, `"packed"` with their channels side by side
    in grouped layers, `"stacked"` under `torch.vmap`. `"auto"`, the default, loops on a CPU, where grouped
    convolutions are slow; on a GPU it times all three on the first batch and keeps the fastest (compiled, it
    packs).
    """

    independent = True

    def __init__(self, networks: Iterable[nn.Module], members: int) -> None:
        super().__init__(_stacked_copy(networks, members), members)
        self._runner = "auto"
        self._refused: dict[str, str] = {}
        self._fastest: dict[tuple[bool, int], str] = {}
        self._plans: dict[bool, Plan] = {}
        self._trace()

    # -- runners -----------------------------------------------------------------------------------------

    @property
    def runner(self) -> str:
        return self._runner

    @runner.setter
    def runner(self, name: str) -> None:
        if name not in RUNNERS:
            raise ValueError(f"runner must be one of {', '.join(RUNNERS)}, got {name!r}")
        if name in self._refused:
            raise ValueError(f"runner {name!r} cannot run this network: {self._refused[name]}")
        self._runner = name

    def runners(self, device: torch.device | str) -> list[str]:
        """The runners that `auto` chooses from on a device: on a CPU always the loop."""
        names = ["packed", "loop", "stacked"] if torch.device(device).type == "cuda" else ["loop"]
        return [name for name in names if name not in self._refused]

    def _predictions(self, x: Input) -> Tensor:
        if self._runner != "auto":
            return self._run(self._runner, x)
        if torch.compiler.is_compiling():
            return self._run(self.runners(tensors_in(x)[0].device)[0], x)
        try:
            return self._run(self._choose(x), x)
        except CannotPack:  # not any more: some of its modules may have been frozen since
            return self._run("loop", x)

    def _prepare(self, x: Input) -> None:
        if self._runner == "auto":
            self._choose(x)
        if "packed" in (self._runner, *self._fastest.values()) and self._plans and self.training not in self._proven:
            self._prove(x)

    def _choose(self, x: Input) -> str:
        names = self.runners(tensors_in(x)[0].device)
        if len(names) == 1:
            return names[0]
        # Large and small batches may differ in what is fastest; powers of two are fine enough.
        key = self.training, sum(tensor.numel() for tensor in tensors_in(x)).bit_length()
        if key not in self._fastest:
            self._fastest[key] = self._race(names, x)
        return self._fastest[key]

    def _race(self, names: list[str], x: Input) -> str:
        """The fastest of the runners that can run `x`.

        Nothing is left of the trials: no statistics, no random numbers drawn.
        """
        times: dict[str, float] = {}
        buffers = [(buffer, buffer.clone()) for buffer in self.buffers()]
        with torch.random.fork_rng(devices=[tensors_in(x)[0].device]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a slow runner loses the race; that is warning enough
            for name in names:
                try:
                    times[name] = _milliseconds(partial(self._run, name, x))
                except (RuntimeError, ValueError):  # what no runner can run is raised by the loop, after the race
                    continue
        for buffer, before in buffers:
            buffer.copy_(before)
        return min(times, key=lambda name: times[name]) if times else "loop"

    def _run(self, runner: str, x: Input) -> Tensor:
        if runner == "packed":
            predictions = self._plan(x)(self.network, x)
        else:
            args, kwargs = split_call(x)
            predictions = self._each(
                runner,
                lambda state: prediction_in(
                    functional_call(self.network, state, args, kwargs, tie_weights=False), self.network
                ),
            )
        # A network that is a multitude itself answers each member with [S, B, ...].
        return predictions.flatten(0, 1) if isinstance(self.network, Multitude) else predictions

    def _each(self, runner: str, function: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
        """`function` of each member's own state, `[M, ...]`, by `loop` or `stacked`."""
        parameters, buffers = slots(self.network)

        def of_one(index: int | Tensor, state: dict[str, Tensor]) -> Tensor:
            with as_member(self.network, index, self.members):
                return function(state)

        if runner == "stacked":
            try:
                return torch.vmap(of_one, randomness="different")(torch.arange(self.members), parameters | buffers)
            except RuntimeError as error:
                raise InputError(f"runner 'stacked' failed on this network or input: {error}") from error
        # `unbind` stacks the members' gradients once; buffers are sliced as views, for their updates to stay.
        slices = {name: parameter.unbind() for name, parameter in parameters.items()}
        return torch.stack(
            [
                of_one(
                    index,
                    {name: parts[index] for name, parts in slices.items()}
                    | {name: buffer[index] for name, buffer in buffers.items()},
                )
                for index in range(self.members)
            ]
        )

    def _trace(self) -> None:
        self._proven: set[bool] = set()  # modes
        try:
            self._plans = {mode: trace(self.network, self.members, training=mode) for mode in (True, False)}
        except CannotPack as refusal:
            self._plans = {}
            self._refused["packed"] = str(refusal)

    def _plan(self, x: Input) -> Plan:
        """The steps for the current mode: traced again where settings have changed, proven once on an input."""
        if self._plans and not torch.compiler.is_compiling() and self._plans[self.training].outdated(self.network):
            self._trace()
        if self._plans and self.training not in self._proven:
            self._prove(x)
        if not self._plans:
            raise CannotPack(f"runner 'packed' cannot run this network: {self._refused['packed']}")
        return self._plans[self.training]

    @torch.compiler.disable
    def _prove(self, x: Input) -> None:
        """Compare the current mode's plan with the loop, once: a trace follows most of Python, not all of it.

        In training, what layers do to buffers is compared as well, and undone. Dropout is off in both. Where the
        network draws other random numbers, the two cannot be compared, and the plan is used as it is.
        """
        self._proven.add(self.training)
        device = tensors_in(x)[0].device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), expecting(self.network), WithoutDropout(), torch.no_grad():
            state = torch.get_rng_state()
            want = self._trial(lambda: self._run("loop", x))
            if not torch.equal(state, torch.get_rng_state()):
                return
            got = self._trial(lambda: self._plans[self.training](self.network, x))
        half = torch.is_autocast_enabled(want[0].device.type) or want[0].dtype in (torch.bfloat16, torch.float16)
        if not all(_alike(one, other, 0.1 if half else 0.01) for one, other in zip(got, want, strict=True)):
            self._plans = {}
            self._refused["packed"] = "its trace and the network itself give different predictions"

    def _trial(self, run: Callable[[], Tensor]) -> list[Tensor]:
        """What a run gives and what it makes of the buffers, which are then as they were."""
        before = [(buffer, buffer.clone()) for buffer in self.buffers()]
        try:
            return [run(), *(buffer.clone() for buffer, _ in before)]
        finally:
            for buffer, saved in before:
                buffer.copy_(saved)

    # -- the protocol ------------------------------------------------------------------------------------

    def loss(
        self,
        x: Input,
        y: Tensor,
        criterion: Criterion | None = None,
        *,
        task: str | None = None,
        dataset_size: int | None = None,
    ) -> Tensor:
        options: dict[str, Any] = {"task": task or self.chosen_task, "dataset_size": dataset_size}
        if not isinstance(self.network, Multitude):
            return super().loss(x, y, criterion, **options)
        return self._sum_of(lambda network: network.loss(x, y, criterion, **options))

    def kl(self, **prior: Any) -> Tensor:
        """The sum of the members' divergences."""
        if not self.divergences:
            return torch.zeros(())
        return self._sum_of(partial(_sum, self.divergences, prior))

    def _sum_of(self, function: Callable[[Any], Tensor]) -> Tensor:
        """The sum over members of a function of each one's network."""
        called = _Called(self.network, function)

        def of_one(state: dict[str, Tensor]) -> Tensor:
            state = {f"network.{name}": tensor for name, tensor in state.items()}
            return functional_call(called, state, (), tie_weights=False)

        return self._each("loop", of_one).sum()

    def _member(self, index: int) -> nn.Module:
        return _with_tensors(self.network, lambda tensor: tensor[index])

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale each member's gradient to at most `max_norm`, as training it alone would; the norms, `[M]`.

        A norm over all parameters at once would tie the members together.
        """
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if not gradients:
            return torch.zeros(self.members)
        norms = torch.stack([g.reshape(self.members, -1).norm(dim=1) for g in gradients]).norm(dim=0)
        scale = (max_norm / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))
        return norms

    def to(self, *args: Any, **kwargs: Any) -> Members:
        """As `nn.Module.to`; a memory format is that of the members' own weights."""
        memory_format = kwargs.pop("memory_format", None)
        super().to(*args, **kwargs)
        if memory_format is not None:
            rank = {torch.channels_last: 5, torch.channels_last_3d: 6}.get(memory_format)
            for tensor in self.parameters():
                if tensor.dim() == rank:
                    flat = tensor.data.flatten(0, 1).contiguous(memory_format=memory_format)
                    tensor.data = flat.unflatten(0, tensor.shape[:2])
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_plans"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans = {}
        if "packed" not in self._refused:
            self._trace()
            self._proven = set(state["_proven"] or ())


def _alike(got: Tensor, want: Tensor, tolerance: float) -> bool:
    """Whether the relative error is small, and the same numbers are finite."""
    got, want = got.flatten().float(), want.flatten().float()
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return False
    return ((got - want)[finite].norm() / want[finite].norm().clamp(min=1e-12)).item() <= tolerance


def _milliseconds(function: Callable[[], Any], warmups: int = 2, repeats: int = 3) -> float:
    for _ in range(warmups):
        function()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def _sum(divergences: Iterable[Divergence], prior: dict[str, Any], network: nn.Module) -> Tensor:
    return torch.stack([divergence(network, **prior) for divergence in divergences]).sum()


class _Called(nn.Module):
    """A function of a network as a module's forward, for `functional_call`."""

    def __init__(self, network: nn.Module, function: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.network = network
        self.function = function

    def forward(self) -> Tensor:
        return self.function(self.network)


def fuse(networks: Sequence[nn.Module], *, task: str | None = None) -> Members:
    """One multitude of networks that were built or trained apart, exact to float rounding.

    The networks must have the same architecture: the same names, shapes and dtypes. `fused.member(i)` gives
    network `i` back.

    >>> nets = [nn.Linear(3, 2) for _ in range(4)]
    >>> net = fuse(nets)
    >>> net(torch.ones(5, 3)).shape
    torch.Size([4, 5, 2])
    >>> torch.equal(net.member(2).weight, nets[2].weight)
    True
    """
    networks = list(networks)
    if not networks:
        raise ValueError("networks must hold at least one network, got an empty list")
    for network in networks:
        if not isinstance(network, nn.Module):
            raise ValueError(f"networks must hold nn.Module objects, got {type(network).__name__}")
    return Members(map(plain, networks), len(networks)).like(networks[0], task)


def _stacked_copy(networks: Iterable[nn.Module], members: int) -> nn.Module:
    """A copy of the first network whose tensors are all the networks' tensors, stacked.

    The networks are taken one at a time, so that an iterator need not hold them all in memory.
    """
    stacked: nn.Module | None = None
    for index, network in enumerate(networks):
        if stacked is None:
            settings = _settings(network)
            stacked = _with_tensors(network, lambda tensor: tensor.new_empty(members, *tensor.shape))
            slots = _state(stacked)
        state = _state(network)
        _check_alike(slots, state, index)
        _check_settings(settings, _settings(network), index)
        for name, slot in slots.items():
            slot.data[index].copy_(state[name].detach())
    assert stacked is not None
    return stacked


def _check_alike(slots: dict[str, Tensor], state: dict[str, Tensor], index: int) -> None:
    if slots.keys() != state.keys():
        name = min(slots.keys() ^ state.keys())
        raise ValueError(f"networks[{index}] and networks[0] differ: only one of them has {name!r}")
    for name, slot in slots.items():
        want, got = slot.shape[1:], state[name].shape
        if want != got or slot.dtype != state[name].dtype:
            raise ValueError(
                f"networks[{index}] and networks[0] differ at {name!r}: {list(got)} {state[name].dtype} against "
                f"{list(want)} {slot.dtype}"
            )


def _check_settings(first: dict[str, dict[str, str]], other: dict[str, dict[str, str]], index: int) -> None:
    for name, own in other.items():
        for key in own | first[name]:
            one, two = (settings.get(key, "missing") for settings in (own, first[name]))
            if one != two:
                place = f"module {name!r}" if name else "the network itself"
                what = f"{key} is {one[:100]} against {two[:100]}"
                raise ValueError(f"networks[{index}] and networks[0] differ in {place}: {what}")


def _settings(network: nn.Module) -> dict[str, dict[str, str]]:
    """What every module is, beside its tensors: its class and its settings, described."""
    passing = ("training", "draw", "expects")
    return {
        name: {"class": type(module).__name__}
        | {key: described(value) for key, value in vars(module).items() if key[0] != "_" and key not in passing}
        for name, module in network.named_modules()
    }


def _state(network: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name, shared ones once, buffers left out of checkpoints included."""
    for name, parameter in network.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run the network once before converting it")
    return dict(network.named_parameters()) | dict(network.named_buffers())


def _with_tensors(network: nn.Module, function: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a network in which `function` has been put to every parameter and buffer, ties kept."""
    memo: dict[int, Any] = {}
    for tensor in _state(network).values():
        new = function(tensor.detach()).clone(memory_format=torch.preserve_format)
        memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    return copy.deepcopy(network, memo)
