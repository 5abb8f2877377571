"""Loss, accuracy and agreement of a network at many weight settings, vectors `[P]`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_choice, check_count
from multitudes.ensemble.multitude import Multitude, plain
from multitudes.landscape.targets import count_targets, task_and_criterion, with_targets
from multitudes.landscape.weight_space.fused_weights import Fused, settings_at_once
from multitudes.networks.calls import Input, call_with, input_errors, plain_attention, to_device
from multitudes.networks.copies import copied
from multitudes.networks.seeds import mixed, seeded
from multitudes.networks.stochastic import Draw, drawing, expecting, stochastic_layers
from multitudes.tasks import Criterion, task_of
from multitudes.training.batch_norm import norms, statistics
from multitudes.training.batches import Batches
from multitudes.training.recorder import State, checked_state, unflattened, weights_of

Solution = nn.Module | Mapping[str, Tensor]
"""A trained network, or its state dict."""

MEASURES = ("loss", "accuracy", "agreement")


# -- solutions ---------------------------------------------------------------------------------------------


def single_network(network: nn.Module) -> nn.Module:
    """Return the network, or that of a multitude that only draws; raise for several members."""
    if not isinstance(network, nn.Module):
        raise ValueError(f"network must be an nn.Module, got {type(network).__name__}")
    alone = plain(network)
    if isinstance(alone, Multitude):
        raise ValueError(
            f"network must be one network, got {type(alone).__name__} of {alone.members}: pass one of them, member(i)"
        )
    if not weights_of(alone):
        raise ValueError(f"network ({type(alone).__name__}) has no weights")
    return alone


def state_of(given: Solution, network: nn.Module, what: str) -> State:
    """Return the tensors of a solution; raise if they do not fit the network."""
    state = given.state_dict() if isinstance(given, nn.Module) else given
    return checked_state(state, network, what, "a network or its state dict")


# -- scores ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of K settings, float64 on the CPU."""

    table: Tensor
    """Loss, `[K, 1]`; for classes `[K, 2 + R]`, with accuracy and agreement with R solutions."""

    @property
    def loss(self) -> Tensor:
        """Loss, `[K]`."""
        return self.table[..., 0]

    @property
    def accuracy(self) -> Tensor | None:
        """Fraction of correct labels, `[K]`; None if the targets are not classes."""
        return self.table[..., 1] if self.table.shape[-1] > 1 else None

    @property
    def agreement(self) -> Tensor | None:
        """Fraction of labels equal to those of each solution, `[K, R]`; None if the targets are not classes."""
        return self.table[..., 2:] if self.table.shape[-1] > 1 else None


def measured(result: Any, what: str) -> Tensor:
    """Return a measure of a result by name."""
    check_choice("what", what, MEASURES)
    values: Tensor | None = getattr(result, what)
    if values is None:
        raise ValueError(f"what={what!r} requires targets that are classes")
    return values


@dataclass(frozen=True)
class Noise:
    """Random numbers of a network that draws: draws `first` to `first + draws - 1` of a seed."""

    seed: int
    draws: int = 1
    first: int = 0


class WeightScorer:
    """Scores weight settings of a copy of a network on cached data.

    Without noise, layers that draw give expectations. With `batch_norm` data, batch-norm statistics are recomputed for
    each setting, but not for solutions.
    """

    def __init__(
        self,
        network: nn.Module,
        data: Any,
        criterion: Criterion | None = None,
        batch_norm: Any = None,
        at_once: int | None = None,
        draws: int = 1,
    ) -> None:
        self.model = copied(single_network(network)).eval().requires_grad_(False)
        self.task, self.criterion = task_and_criterion(network, criterion, averages=draws > 1)
        self.reading = task_of(self.task)
        self.device = next(iter(weights_of(self.model).values())).device
        self.batches = with_targets(data, self.device)
        self.norm_data: Batches | None = None
        if batch_norm is not None and norms(self.model):  # cached: a shuffling loader would differ between settings
            self.norm_data = Batches(list(Batches(batch_norm).on(self.device)))
        if at_once is not None:
            check_count("at_once", at_once)
        self.classes = self._check_targets(criterion is None and self.reading.class_axis == 1)
        self.at_once = at_once or settings_at_once(self.model, self.batches[0][0])
        self.references: list[list[Tensor]] = []
        self._fused: Fused | None = None

    def identity(self) -> list[Any]:
        """Return everything that scores depend on besides the weights, for a fingerprint."""
        criterion = getattr(self.criterion, "__qualname__", repr(self.criterion))
        norm_data = None if self.norm_data is None else list(self.norm_data.batches)
        return [repr(self.model), dict(self.model.named_buffers()), self.task, criterion, self.batches, norm_data]

    def take_buffers(self, given: Mapping[str, State]) -> None:
        """Load the buffers of solutions, which must be equal; only weights are interpolated."""
        recomputed_norms = tuple(norms(self.model)) if self.norm_data is not None else ()
        (first, buffers), *others = given.items()
        for name, state in others:
            for buffer, _ in self.model.named_buffers():
                recomputed = buffer.rpartition(".")[0] in recomputed_norms or buffer.endswith("num_batches_tracked")
                if buffer in state and not recomputed and not torch.equal(state[buffer].cpu(), buffers[buffer].cpu()):
                    raise ValueError(
                        f"{first} and {name} differ in the buffer {buffer!r}, and buffers cannot be interpolated; "
                        "pass batch_norm=data to recompute batch-norm statistics at each point"
                    )
        self.model.load_state_dict(buffers, strict=False)

    @torch.no_grad()
    def score_solutions(self, states: Sequence[State], noise: Noise | None = None) -> Scores:
        """Score solutions individually; from now on they are the references for agreement."""
        self.references = []
        on_device = [to_device(state, self.device) for state in states]
        predictions = [[self._predict(state, x, noise) for x, _ in self.batches] for state in on_device]
        if self.classes:
            self.references = [[own.argmax(1) for own in by_batch] for by_batch in predictions]
        rows = [self._scores([own.unsqueeze(0) for own in by_batch]) for by_batch in predictions]
        return Scores(torch.cat(rows))

    @torch.no_grad()
    def score(self, weights: Tensor, noises: Sequence[Noise] | None = None) -> Tensor:
        """Return the scores of at most `at_once` settings `[K, P]`; with noise, layers draw."""
        states = [unflattened(vector.to(self.device), self.model) for vector in weights]
        states = [state | self.statistics(state) for state in states]
        if noises is not None:
            pairs = list(zip(states, noises, strict=True))
            return self._scores(torch.stack([self._predict(s, x, n) for s, n in pairs]) for x, _ in self.batches)
        if self._fused is None:
            self._fused = Fused(self.model, self.at_once, [x for x, _ in self.batches])
        return self._scores(self._fused.predict(states))

    def score_all(self, weights: Tensor) -> Scores:
        """Score any number of settings `[K, P]`."""
        return Scores(torch.cat([self.score(chunk) for chunk in weights.split(self.at_once)]))

    def statistics(self, state: State) -> State:
        """Return recomputed batch-norm statistics for these weights, if there are data for them."""
        return {} if self.norm_data is None else statistics(self.model, state, self.norm_data)

    def _predict(self, state: State, x: Input, noise: Noise | None) -> Tensor:
        """Predict with one setting, `[B, ...]`."""
        with input_errors(x), plain_attention():
            if noise is None:
                with expecting(self.model):
                    return call_with(self.model, state, x)
            draw = Draw(noise.seed)
            predictions = []
            for number in range(noise.first, noise.first + noise.draws):
                draw.index = torch.tensor(number)
                with drawing(stochastic_layers(self.model), draw), seeded(mixed(noise.seed, number)):
                    predictions.append(call_with(self.model, state, x))
            return self.reading.averaged(torch.stack(predictions))

    def _scores(self, predictions: Iterable[Tensor]) -> Tensor:
        """Return the scores of K settings from their predictions `[K, B, ...]` by batch."""
        loss: Any = 0.0
        right: Any = 0
        agree: Any = 0
        weight = counted = total = 0
        for index, ((_, y), prediction) in enumerate(zip(self.batches, predictions, strict=True)):
            number = count_targets(self.criterion, y) if self.classes or self.reading.classes else len(y)
            if number:  # avoid NaN of an empty mean
                loss = loss + torch.stack([self.criterion(one, y) for one in prediction]).double().cpu() * number
            weight += number
            if self.classes:
                labels = prediction.argmax(2)
                right = right + (labels == y).flatten(1).sum(1).cpu()
                agreed = [(labels == by_batch[index]).flatten(1).sum(1) for by_batch in self.references]
                agree = agree + (torch.stack(agreed, 1).cpu() if agreed else torch.zeros(len(labels), 0))
                counted, total = counted + number, total + y.numel()
        columns = [(loss / weight)[:, None]]
        if self.classes:
            columns += [(right.double() / counted)[:, None], agree.double() / total]
        return torch.cat(columns, 1)

    def _check_targets(self, cross_entropy: bool) -> bool:
        """Return True if the targets are classes of the predictions; raise if the loss cannot be computed."""
        x, y = self.batches[0]
        with torch.no_grad():
            prediction = self._predict({}, x, None)
            count = prediction.shape[1] if prediction.dim() > 1 else 1
            classes = self.reading.class_axis == 1 and not y.is_floating_point() and prediction.dim() == y.dim() + 1
            classes = classes and count > 1
            probabilities = y.is_floating_point() and y.shape == prediction.shape
            probabilities = probabilities and bool((y.sum(1) - 1).abs().max() < 1e-3)
            if cross_entropy and not classes and not probabilities:
                raise ValueError(
                    f"data must have classes as targets for cross entropy, got targets of shape {list(y.shape)} and "
                    f"{y.dtype} for predictions of shape {list(prediction.shape)}: pass criterion= for other targets"
                )
            for _, labels in self.batches if classes else []:
                wrong = labels[(labels != -100) & ((labels < 0) | (labels >= count))]
                if len(wrong):
                    raise ValueError(f"data must have classes 0 to {count - 1}, got {wrong[0].item()}")
            loss = self.criterion(prediction, y)
        if not isinstance(loss, Tensor) or loss.dim():
            raise ValueError(f"criterion must return a scalar, the mean over the batch, got {loss!r}")
        return classes
