"""Members that share no weight: one storage, three ways to run it.

`Members` keeps one plain network and its parameters and buffers stacked, `[M, ...]`, under the network's own
names. Fusing networks is stacking, taking one out is slicing, and both are exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.at_once import AtOnce, at_once
from multitudes.core.calling import Input, InputError, call, slots, tensors_in
from multitudes.core.clipping import clip_each
from multitudes.core.compiling import uncompiled
from multitudes.core.devices import milliseconds
from multitudes.core.divergences import Divergence
from multitudes.core.draws.stochastic import as_member
from multitudes.core.lending import (
    Attributes,
    Written,
    apart,
    checkpointed,
    keep_written,
    lent,
    put_back,
    show_last,
    standing,
    written_attributes,
)
from multitudes.core.multitude import Multitude, plain
from multitudes.core.packing import CannotPack, Plan, trace
from multitudes.core.proof import alike, kind_of, silent_trial, unmoved
from multitudes.core.small_members import Sizes
from multitudes.core.stacking import stackable, stacked_copy, with_tensors
from multitudes.core.tasks import Criterion

RUNNERS = ("auto", "loop", "packed", "stacked")


class Members(Multitude):
    """M networks of one architecture that share no weight.

    `net.runner` says how they run: `"loop"` one after the other, `"packed"` with their channels side by side
    in grouped layers, `"stacked"` by the network's own code for all members at once, under `torch.vmap`. `"auto"`, the
    default, loops on a CPU, but packs small networks in evaluation; on a GPU it times all three on the first batch and
    keeps the fastest. Compiled, it packs networks of convolutions and stacks others.
    """

    independent = True
    found_anew = ("_draw_cache", "_refused", "_fastest", "_plans", "_proven", "_proving", "_sizes", "_written")

    def __init__(self, networks: Iterable[nn.Module], members: int) -> None:
        super().__init__(stacked_copy(networks, members), members)
        self._runner = "auto"
        self.forget()

    def forget(self) -> None:
        super().forget()
        self._refused: dict[str, str] = {}
        self._fastest: dict[tuple[bool, int], str] = {}
        self._plans: dict[bool, Plan] = {}
        self._proven: dict[tuple[str, bool], set[Any]] = {}  # the kinds of inputs, by runner and mode
        self._proving = False
        self._sizes = Sizes()
        self._written: list[Attributes] = [{} for _ in range(self.members)]
        if hasattr(self, "_runner"):
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
        """The runners that `auto` times on a device, the likeliest first: on a CPU none but the loop."""
        if torch.device(device).type != "cuda":
            return ["loop"]
        names = ["packed", "loop", "stacked"] if self._convolves() else ["stacked", "packed", "loop"]
        return [name for name in names if name not in self._refused]

    def _convolves(self) -> bool:
        """Whether the network has at least as many kernels as matrices; packing is for convolutions."""
        ranks = [parameter.dim() - 1 for parameter in self.network.parameters()]
        return sum(rank > 2 for rank in ranks) >= ranks.count(2)

    def _predictions(self, x: Input) -> Tensor:
        if self._runner != "auto":
            return self._run(self._runner, x)
        if torch.compiler.is_compiling():
            return self._run(self._likeliest(x), x)
        try:
            return self._run(self._choose(x), x)
        except CannotPack:  # not any more: some of its modules may have been frozen since
            return self._run("loop", x)

    def _of_first(self, x: Input) -> Tensor:
        parameters, buffers = slots(self.network)
        state = {name: tensor[0] for name, tensor in (parameters | buffers).items() if stackable(tensor)}
        with self._as(0, state, dict(self._written[0])):  # it remembers nothing of it
            return call(self.network, x)

    def _prepare(self, x: Input) -> None:
        runner = self._choose(x) if self._runner == "auto" else self._runner
        self._prove_once(runner, x)

    def _likeliest(self, x: Input) -> str:
        """The first of the runners that is right on `x`."""
        for name in self.runners(tensors_in(x)[0].device):
            if name != "loop" and (name, self.training) not in self._proven:
                self._try_once(name, x)
            if name not in self._refused:
                return name
        return "loop"

    @uncompiled
    def _try_once(self, runner: str, x: Input) -> None:
        with suppress(InputError):  # then it is refused from now on
            self._prove_once(runner, x)

    def _choose(self, x: Input) -> str:
        names = self.runners(tensors_in(x)[0].device)
        if len(names) == 1:
            return "packed" if self._packs_small(x) else names[0]
        # Large and small batches may differ in what is fastest; powers of two are fine enough.
        key = self.training, sum(tensor.numel() for tensor in tensors_in(x)).bit_length()
        if key not in self._fastest:
            self._fastest[key] = self._race(names, x)
        return self._fastest[key]

    def _packs_small(self, x: Input) -> bool:
        """Whether members are so small on a CPU that they run packed, which is proven, and each step by a rule."""
        run = partial(self._of_first, x)
        if "packed" in self._refused or not self._sizes.are_small(self.network, self.members, x, run):
            return False
        if kind_of(x) not in self._proven.get(("packed", False), ()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of steps that are slow, for which the loop is taken
                self._prove_once("packed", x)
        return "packed" not in self._refused and not self._plans[False].mapped

    def _race(self, names: list[str], x: Input) -> str:
        """The fastest of the runners that can run `x`.

        Nothing is left of the trials: no statistics, no random numbers drawn.
        """
        times: dict[str, float] = {}
        with unmoved(self.network, x), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a slow runner loses the race; that is warning enough
            for name in names:
                try:
                    times[name] = milliseconds(partial(self._run, name, x))
                except (RuntimeError, ValueError):  # what no runner can run is raised by the loop, after the race
                    continue
        return min(times, key=lambda name: times[name]) if times else "loop"

    def _run(self, runner: str, x: Input) -> Tensor:
        if runner != "loop" and (not torch.compiler.is_compiling() or (runner, self.training) not in self._proven):
            self._prove_once(runner, x)
        if runner == "packed":
            predictions = self._plan()(self.network, x)
        else:
            predictions = self._each(runner, lambda: call(self.network, x))
        # A network that is a multitude itself answers each member with [S, B, ...].
        return predictions.flatten(0, 1) if isinstance(self.network, Multitude) else predictions

    def _each(self, runner: str, function: Callable[[], Tensor]) -> Tensor:
        """`function` of the network as each member in turn, `[M, ...]`, by `loop` or `stacked`."""
        parameters, buffers = slots(self.network)
        buffers = {name: buffer for name, buffer in buffers.items() if stackable(buffer)}
        if runner == "stacked":
            return self._stacked(function, parameters | buffers)
        # `unbind` stacks the members' gradients once; buffers are sliced as views, for their updates to stay.
        slices = {name: parameter.unbind() for name, parameter in parameters.items()}
        results: list[Tensor] = []
        written: list[Written] = []
        for index in range(self.members):
            own: dict[str, Tensor] = {name: parts[index] for name, parts in slices.items()}
            own |= {name: buffer[index] for name, buffer in buffers.items()}
            with self._as(index, own) as assigned:
                results.append(function())
            written.append(assigned)
        keep_written(self.network, written)
        if not torch.compiler.is_compiling():
            show_last(self.network, self._written)
        return torch.stack(results)

    @contextmanager
    def _as(self, index: int, state: dict[str, Tensor], attributes: Attributes | None = None) -> Iterator[Written]:
        """Inside, the network is member `index`: its tensors, its random numbers, its `attributes`, written before."""
        attributes = self._written[index] if attributes is None else attributes
        if torch.compiler.is_compiling():
            with lent(self.network, state) as written:
                yield written
            return
        with (
            as_member(self.network, index, self.members),
            written_attributes(self.network, attributes),
            checkpointed(lambda: lent(self.network, state)),
            lent(self.network, state) as written,
        ):
            yield written

    def _stacked(self, function: Callable[[], Tensor], state: dict[str, Any]) -> Tensor:
        attributes: Attributes = {}
        try:
            with at_once(self.members) as members:
                own = {name: members.own(tensor) for name, tensor in state.items()}
                with self._as_all(members, own, attributes) as assigned:
                    result = function()
                result = members.whole(result)
                written = {name: members.whole(value) for name, value in assigned.items()}
        except RuntimeError as error:
            raise InputError(f"vmap cannot run this network or input: {error}") from error
        if attributes:
            (path, key), *_ = attributes
            raise InputError(f"the forward of module {path!r} writes its attribute {key!r}")
        keep_written(self.network, [{name: own[i] for name, own in written.items()} for i in range(self.members)])
        return result

    @contextmanager
    def _as_all(self, members: AtOnce, state: dict[str, Tensor], attributes: Attributes) -> Iterator[Written]:
        """Inside, the network is all members at once; `attributes` has what its code writes, which none may."""
        if torch.compiler.is_compiling():
            with lent(self.network, state) as written:
                yield written
            return
        with (
            as_member(self.network, members.own(torch.arange(self.members)), self.members),
            written_attributes(self.network, attributes),
            checkpointed(None),
            lent(self.network, state) as written,
        ):
            yield written

    def _trace(self) -> None:
        self._proven = {key: kinds for key, kinds in self._proven.items() if key[0] != "packed"}
        try:
            self._plans = {mode: trace(self.network, self.members, training=mode) for mode in (True, False)}
        except CannotPack as refusal:
            self._plans = {}
            self._refused["packed"] = str(refusal)

    def _plan(self) -> Plan:
        """The steps for the current mode."""
        if not self._plans:
            raise CannotPack(f"runner 'packed' cannot run this network: {self._refused['packed']}")
        return self._plans[self.training]

    @uncompiled
    def _prove_once(self, runner: str, x: Input) -> None:
        """Compare a runner with the loop on the first input of each kind, in the current mode.

        A trace follows most of Python, not all of it, and is made again where settings have changed since.
        """
        if runner == "packed" and self._plans and self._plans[self.training].outdated(self.network):
            self._trace()
        if runner == "loop" or runner in self._refused or self._proving:
            return
        kinds, kind = self._proven.setdefault((runner, self.training), set()), kind_of(x)
        if kind in kinds:
            return
        self._proving = True
        try:
            reason = self._difference(runner, x)
        finally:
            self._proving = False
        kinds.add(kind)
        if reason:
            self._refused[runner] = reason
            self._plans = {} if runner == "packed" else self._plans
            if self._runner == "auto" and tensors_in(x)[0].is_cuda:  # on a CPU they loop as a rule
                warnings.warn(f"the members run one after the other, not {runner}: {reason}", stacklevel=2)
            if runner == "stacked":
                raise InputError(f"runner 'stacked' cannot run this network: {reason}")

    def _difference(self, runner: str, x: Input) -> str:
        """What differs between a runner and the loop: predictions, or what the run makes of the buffers."""
        with silent_trial(self.network, x) as doubt:
            want = self._trial("loop", x)
            try:
                got = self._trial(runner, x)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
                return str(error).splitlines()[0]
            if doubt():
                return doubt()
        if not alike(got[""], want[""]):
            return "it gives different predictions from those of the members one by one"
        wrong = [name for name in want if name not in got or not alike(got[name], want[name])]
        return f"buffer {wrong[0]!r} would not be as each member's own" if wrong else ""

    def _trial(self, runner: str, x: Input) -> dict[str, Tensor]:
        """What a run gives, and what it makes of the buffers."""
        with unmoved(self.network, x):
            predictions = self._run(runner, x)
            buffers = {n: b.clone() for n, b in self.network.named_buffers() if stackable(b) and b.dim()}
            return {"": predictions, **buffers}

    # -- the protocol ------------------------------------------------------------------------------------

    def loss(
        self,
        x: Input,
        y: Tensor,
        criterion: Criterion | None = None,
        *,
        task: str | None = None,
        dataset_size: int | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        options: dict[str, Any] = {"task": task or self.chosen_task, "dataset_size": dataset_size, "weight": weight}
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
        return self._each("loop", lambda: function(self.network)).sum()

    def _member(self, index: int) -> nn.Module:
        member = with_tensors(self.network, lambda tensor: tensor[index])
        for path, key, value in standing(self.network, self._written[index]):
            put_back(member.get_submodule(path), key, apart(value))
        return member

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale each member's gradient to at most `max_norm`, as training it alone would; the norms, `[M]`.

        A norm over all parameters at once would tie the members together.
        """
        return clip_each(self.parameters(), self.members, max_norm)

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
        self._plans, proven = {}, self._proven
        if "packed" not in self._refused:
            self._trace()
            self._proven = proven


def _sum(divergences: Iterable[Divergence], prior: dict[str, Any], network: nn.Module) -> Tensor:
    return torch.stack([divergence(network, **prior) for divergence in divergences]).sum()


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
