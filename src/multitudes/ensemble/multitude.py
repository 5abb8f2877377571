"""`Multitude`, a network that maps a batch `[B, ...]` to predictions `[S, B, ...]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from multitudes.draws.adaptive import predict_adaptively
from multitudes.draws.engine import DrawRun, Draws, check_called
from multitudes.draws.functional_noise import find_noise, has_noise_to_find, has_noise_to_keep
from multitudes.networks.calls import (
    Input,
    InputError,
    Output,
    call,
    check_input,
    evaluating,
    input_errors,
    map_tensors,
    one_per_input,
    one_thread,
    plain_attention,
    raise_about,
    tensor_versions,
    tensors_in,
    with_output,
)
from multitudes.networks.copies import copied, share_registries
from multitudes.networks.dispatch import uncompiled
from multitudes.networks.seeds import seeded
from multitudes.networks.stochastic import expecting, stochastic_layers
from multitudes.networks.trace import preserve_state
from multitudes.tasks import Criterion
from multitudes.tasks.predictive import Predictive
from multitudes.tasks.task_network import TaskNetwork, member_losses

REACH = "(reach)"
"""The key of the note about the share of the network that a method reaches."""

Divergence = Callable[..., Tensor]
"""`(network, **prior) -> scalar`: the Kullback-Leibler term of a variational objective."""

DIVERGENCES: dict[str, Divergence] = {}
"""Registered divergences by module and name; files can name no other function."""

F = TypeVar("F", bound=Divergence)


def divergence(function: F) -> F:
    """Register a function of a module as a divergence (decorator)."""
    DIVERGENCES[divergence_name(function)] = function
    return function


def divergence_name(function: Divergence) -> str:
    """Return the name under which a divergence is registered."""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"


class Multitude(TaskNetwork):
    """A network that makes many predictions: one per member, or one per draw.

    A multitude shares its network's registries of parameters, buffers and children. So `state_dict()`,
    `named_parameters()` and attributes have the names of the user's own network, without a prefix. If the network has
    stochastic layers (see `Stochastic`), evaluation makes `draws` draws of every member, and training `training_draws`.

    Subclasses implement `_predictions` (one draw of all members) and `_member` (one member alone), and set
    `independent`.

    Args:
        network: The network to wrap.
        members: Number of members.
        output: Key, attribute, position or function that selects the prediction if the network returns several
            tensors. Copies and conversions keep it.
    """

    independent = False
    """True if members share no weight. Each then learns from its own loss, and the losses are added."""

    cache_attributes: tuple[str, ...] = ("_draw_cache", "_prepared", "_last", "_rewrites")
    """Names of the caches, which copies and files leave out."""

    _rewrites = False  # True if the network writes into its input, and writing again changes nothing
    _prepared = False  # True after `prepare_run`

    shares = "network"
    """Name of the attribute whose module shares its registries."""

    def __init__(self, network: nn.Module, members: int = 1, *, output: Output | None = None) -> None:
        super().__init__()
        if output is not None:
            if isinstance(network, Multitude):
                raise ValueError(f"output={output!r} is for a network, got a multitude: {type(network).__name__}")
            network = with_output(network, output)
        if not hasattr(network, "training"):
            raise ValueError(
                "network has no attribute `training`, which torch.jit.freeze removes: pass the network before freezing"
            )
        share_registries(self, network)
        object.__setattr__(self, "network", network)  # registering it would prefix its names
        self.training = network.training
        self.members = members
        self.chosen_task = None
        self.draws = 20
        self.training_draws = 1
        self.memory: str | float | None = None
        self.divergences: tuple[Divergence, ...] = ()
        self.notes: dict[str, str] = {}
        self.forget()

    network: nn.Module

    def forget(self) -> None:
        """Clear the caches (`cache_attributes`)."""
        self._draw_cache = Draws()
        self._prepared = self._rewrites = False
        self._last = None

    @property
    def template(self) -> nn.Module:
        """The network whose class, configuration and attributes represent those of the multitude."""
        return self.network

    # -- forward, loss, predict, member ------------------------------------------------------------------

    def forward(
        self,
        x: Input,
        *,
        draws: int | None = None,
        seed: int | None = None,
        memory: str | float | None = None,
    ) -> Tensor:
        """Predict, `[B, ...] -> [S, B, ...]`, member-major, with S = `members`, times `draws` if layers draw.

        Args:
            x: A batch of inputs.
            draws: Draws per member. 0 replaces draws by expectations: one deterministic prediction per member.
            seed: Makes the draws repeatable, whatever the `memory`. Torch's random state does not change.
            memory: Largest size of a chunk of draws (`"2GB"`, or bytes); by default a quarter of the free memory.
        """
        if torch.compiler.is_compiling():
            if seed is not None:
                return self._uncompiled(x, draws, seed, memory)
            self._look(x)
            return self._all_draws(x, draws)
        if not isinstance(x, Tensor):
            check_input(x)
        written = [x._version] if isinstance(x, Tensor) and not x.is_inference() else tensor_versions(x)
        with one_thread(self.network), self._attention():
            try:
                if not self._prepared:
                    self.prepare_run(x)
                predictions = self._all_draws(x, draws, seed, self.memory if memory is None else memory)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                raise_about(x, error)
        now = [x._version] if isinstance(x, Tensor) and not x.is_inference() else tensor_versions(x)
        if now != written and len(predictions) > 1 and not self._rewrites:
            self.check_rewrites(x)
        return one_per_input(predictions, x)

    def prepare_run(self, x: Input) -> None:
        """Find the noise to keep on and check that stochastic layers are called; needed once."""
        if self._prepared:
            return
        self._look(x)
        if type(self)._predictions is Multitude._predictions:
            check_called(self.network, x, self._predictions)
        self._prepared = not has_noise_to_find(self.template)

    def check_rewrites(self, x: Input) -> None:
        """Raise an error if the network writes into its input, unless it is idempotent (ReLU)."""
        before = map_tensors(torch.clone, x)
        with preserve_state(self.network, x), torch.no_grad():
            self._of_first(x)
        self._rewrites = all(map(torch.equal, tensors_in(before), tensors_in(x)))
        if not self._rewrites:
            raise InputError(
                "the network writes into its input x in place, so members and draws would get different inputs: start "
                "its forward with x = x.clone()"
            )

    @uncompiled
    def _uncompiled(self, x: Input, draws: int | None, seed: int, memory: str | float | None) -> Tensor:
        """Run outside of compiled graphs, which do not support seeded draws."""
        return self.forward(x, draws=draws, seed=seed, memory=memory)

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
        """Return the training objective, a scalar.

        The losses of members that share no weight are added, so that each member learns exactly as it would alone. The
        losses of members that share weights are averaged. If a member makes several draws, its loss is that of its
        averaged prediction.

        Args:
            x: A batch of inputs.
            y: Their targets.
            criterion: The loss, as a function of predictions and targets. By default the task's: cross-entropy for
                classes, tokens and yes/no, mean squared error, Gaussian negative log-likelihood, or pinball loss.
            task: The task; by default `net.task`. If there is none, shapes must be those of classification.
            dataset_size: Number of training examples N. Adds the method's Kullback-Leibler divergence as `kl() / N`,
                which gives the negative evidence lower bound (ELBO) of one example.
            weight: Factors of the losses of rows, `[B]`, or of targets, in the shape of y.

        Raises:
            ValueError: If the criterion is for another task or does not return one number.
        """
        if not self._targets_checked and not torch.compiler.is_compiling():
            self._warn_of_copies(x, y, task)
        losses = self._losses(x, y, criterion, task, weight)
        if losses[0].dim():
            raise ValueError(f"criterion must give one number, the batch's mean, got shape {list(losses[0].shape)}")
        total = torch.stack(losses).sum() if self.independent else torch.stack(losses).mean()
        if dataset_size is None:
            return total
        if isinstance(dataset_size, bool) or not isinstance(dataset_size, int) or dataset_size < 1:
            raise ValueError(f"dataset_size must be the number of training examples, got {dataset_size!r}")
        return total + self.kl() / dataset_size if self.divergences else total

    def kl(self, **prior: Any) -> Tensor:
        """Return the divergence from the prior in the method's objective, a scalar; 0 if it has none."""
        return sum((term(self.network, **prior) for term in self.divergences), torch.zeros(()))

    def predict(
        self,
        x: Input,
        task: str | None = None,
        *,
        draws: int | str | None = None,
        seed: int | None = None,
        memory: str | float | None = None,
        tolerance: float = 0.01,
        max_draws: int = 200,
    ) -> Predictive:
        """Return the joint prediction of members and draws, in evaluation mode and without gradients.

        Args:
            x: A batch of inputs.
            task: The task; by default `net.task`.
            draws: Draws per member. `"auto"` draws for each input until the standard error of its mean prediction is
                below `tolerance`; `Predictive.draws` holds the counts.
            seed: Makes the draws repeatable.
            memory: Largest size of a chunk of draws.
            tolerance: The standard error at which `"auto"` stops.
            max_draws: The number of draws at which `"auto"` stops.
        """
        for tensor in tensors_in(x):
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise ValueError(f"x holds {int(tensor.isnan().sum())} NaN values; predictions would be meaningless")
        read = partial(self.predictive_of, x=x, task=task)
        with evaluating(self), torch.no_grad():
            if draws == "auto":
                with input_errors(x), plain_attention():
                    self.prepare_run(x)
                    return predict_adaptively(self, x, read, tolerance, max_draws, seed, memory or self.memory)
            return read(self(x, draws=draws, seed=seed, memory=memory))

    def member(self, index: int) -> nn.Module:
        """Return one member: a plain network of the user's own layer classes, or a multitude if it draws."""
        if not isinstance(index, int) or not 0 <= index < self.members:
            raise ValueError(f"index must be the number of a member, 0 to {self.members - 1}, got {index!r}")
        alone = self._member(index)
        return Multitude(alone).like(self) if stochastic_layers(alone) or has_noise_to_keep(alone) else alone

    # -- for subclasses ----------------------------------------------------------------------------------

    def _predictions(self, x: Input) -> Tensor:
        """Make one draw of every member, `[M, B, ...]`."""
        return call(self.network, x).unsqueeze(0)

    def _of_first(self, x: Input) -> Tensor:
        """Make one draw of the first member alone, `[B, ...]`."""
        return self._predictions(x)[0]

    def _losses(
        self, x: Input, y: Tensor, criterion: Criterion | None, task: str | None, weight: Tensor | None
    ) -> list[Tensor]:
        """Return the loss of each member, or one loss that is their mean."""
        predictions = self(x)
        by_member = predictions.unflatten(0, (self.members, -1))
        objective = self._criterion(criterion, task, predictions, y, averages=by_member.shape[1] > 1)
        return member_losses(objective, by_member, y, weight, not self.independent)

    def _prepare(self, x: Input) -> None:
        """Choose how to run `x`, before its first draw or before compiling."""

    def _member(self, index: int) -> nn.Module:
        return copied(self.network)

    # -- draws -------------------------------------------------------------------------------------------

    def _all_draws(
        self, x: Input, draws: int | None, seed: int | None = None, memory: str | float | None = None
    ) -> Tensor:
        """Make all draws, member-major, `[M * D, B, ...]`."""
        count = self._count(draws)
        if count is None and seed is None:
            return self._predictions(x)
        if count is None:
            with seeded(seed):  # for networks that draw in their own code
                return self._predictions(x)
        if count == 0:
            with expecting(self.network):
                return self._predictions(x)
        if self.training:
            if seed is not None:
                raise InputError(f"seed={seed!r} is for evaluation; in training, draws follow torch's random state")
            drawn = torch.stack([self._predictions(x) for _ in range(count)])
        elif torch.compiler.is_compiling():
            draw_indices = torch.arange(count)
            drawn = torch.vmap(lambda _: self._predictions(x), randomness="different")(draw_indices)
        else:
            drawn = self.draw_numbers(x, range(count), seed, memory)
        return drawn.transpose(0, 1).flatten(0, 1)

    def _attention(self) -> AbstractContextManager[Any]:
        """Make torch's attention call its layers, instead of one kernel that reads their weights."""
        return plain_attention(self.network)

    def _look(self, x: Input) -> None:
        if has_noise_to_find(self.template):
            self.find_noise(x)

    @uncompiled
    def find_noise(self, x: Input) -> None:
        """Run on `x` to find what the network's own code draws in training, and the batch axes of frozen noise."""
        with plain_attention():
            self.notes |= find_noise(self.network, x, self._of_first)

    def draw_numbers(self, x: Input, numbers: range, seed: int | None, memory: str | float | None) -> Tensor:
        """Make the draws of these numbers, `[D, M, B, ...]`."""
        if type(self)._prepare is not Multitude._prepare:
            with expecting(self.network):
                self._prepare(x)
        run = DrawRun(self.network, stochastic_layers(self.network), self._predictions, x)
        return self._draw_cache.make(run, numbers, seed, memory)

    def _count(self, draws: int | None) -> int | None:
        """Return how many draws to make; None if no layer draws, during a draw, or if layers use expectations."""
        count = draws
        if count is None:
            count = self.training_draws if self.training else self.draws
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InputError(f"draws must be a whole number, 0 for expectations, or in predict 'auto', got {count!r}")
        layers = stochastic_layers(self.template)
        if not layers:
            if draws is not None and draws > 1:
                raise InputError(f"draws={draws}: this network has no layer that draws")
            return None
        return None if layers[0].expects or layers[0].draw is not None else count

    # -- nn.Module -----------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        """Set settings directly, since the network may have modules of the same names."""
        if isinstance(value, (Tensor, nn.Module)):
            super().__setattr__(name, value)
        else:
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Return the network's own attributes (`config`, `device`, `dtype`), except callables."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            network = self.template if "network" in vars(self) else None
            value = None if network is None or name.startswith("_") else getattr(network, name, None)
            if value is None or callable(value):
                raise
            return value

    def __getstate__(self) -> dict[str, Any]:
        """Leave the caches out of copies and pickles, since they refer to the network's own objects."""
        return {key: value for key, value in vars(self).items() if key not in self.cache_attributes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        kept = {name: state[name] for name in self.cache_attributes if name in state}
        self.forget()
        vars(self).update(kept)

    def train(self, mode: bool = True) -> Multitude:
        super().train(mode)
        self.network.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Multitude:
        self.network._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        return f"members={self.members}"

    # -- the rest ----------------------------------------------------------------------------------------

    def summary(self) -> str:
        """Return a table of the layers (name, class, parameters, changes by the method) and the converted share."""
        rows = [
            (name or "(root)", type(layer).__name__, f"{count:,}", self.notes.get(name, ""))
            for name, layer, count in self._rows()
            if count or name in self.notes
        ]
        total = sum(p.numel() for p in self.parameters())
        size = f"{self.members} member{'s' if self.members > 1 else ''}"
        if stochastic_layers(self.network):
            size += f" x {self.draws} draws"
        rows.append(("total", size, f"{total:,}", self.notes.get("total", "")))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {count:>{widths[2]}}  {note}".rstrip()
            for name, kind, count, note in rows
        ]
        reach = self.notes.get(REACH, "reaches 100 % of the parameters" if self.independent else None)
        return "\n".join(lines if reach is None else [*lines, reach])

    def _rows(self) -> Iterator[tuple[str, nn.Module, int]]:
        """Yield the layers, with their names and their numbers of parameters over all members."""
        for name, layer in self.network.named_modules():
            yield name, layer, sum(p.numel() for p in layer.parameters(recurse=False))

    def parameter_groups(self, lr: float, **own: float | Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return parameter groups for an optimizer: `torch.optim.Adam(net.parameter_groups(lr=3e-3, log_alpha=0.1))`.

        Args:
            lr: Learning rate of the parameters that `own` does not name.
            own: By last name of parameters, their learning rate, or a dict of the optimizer's options.
        """
        groups: dict[str, list[nn.Parameter]] = {name: [] for name in ("", *own)}
        for name, parameter in self.named_parameters():
            last = name.rpartition(".")[2]
            groups[last if last in own else ""].append(parameter)
        for name in own:
            if not groups[name]:
                raise ValueError(f"{name}={own[name]!r}: no parameter's last name is {name!r}")
        settings = {name: each if isinstance(each, Mapping) else {"lr": each} for name, each in own.items()}
        return [{"params": group, "lr": lr, **settings.get(name, {})} for name, group in groups.items() if group]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradient to at most `max_norm`, per member if they share no weight; return the norm(s)."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def without_draws(self, points: int) -> Multitude | None:
        """Return a multitude that predicts the same without draws, from `points` points; None if there is none."""
        return None

    def like(self, model: nn.Module, task: str | None = None) -> Self:
        """Copy the draw and task settings of `model` if it is a multitude; set `task` if given; return itself."""
        if isinstance(model, Multitude):
            settings = ("chosen_task", "_quantiles", "_next_tokens", "draws", "training_draws", "memory", "divergences")
            for setting in settings:
                setattr(self, setting, getattr(model, setting))
        if task is not None:
            self.task = task
        return self


def plain(model: nn.Module) -> nn.Module:
    """Return the network inside a multitude that only adds draws to it; return any other model unchanged."""
    draws_alone = isinstance(model, Multitude) and type(model)._predictions is Multitude._predictions
    return model.network if isinstance(model, Multitude) and draws_alone else model
