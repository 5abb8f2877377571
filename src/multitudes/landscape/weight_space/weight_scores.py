"""Loss, accuracy and agreement of one network at many weight settings, vectors `[P]`: `WeightScorer`."""

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
from multitudes.networks.calls import Input, call_with, input_errors, moved, plain_attention
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
    """Return the network, or that of a multitude that only draws; raise for several networks."""
    if not isinstance(network, nn.Module):
        raise ValueError(f"network must be an nn.Module, got {type(network).__name__}")
    alone = plain(network)
    if isinstance(alone, Multitude):
        raise ValueError(
            f"network must be one network, got {type(alone).__name__} of {alone.members}: take one out by member(i)"
        )
    if not weights_of(alone):
        raise ValueError(f"network ({type(alone).__name__}) has no weights")
    return alone


def state_of(given: Solution, network: nn.Module, what: str) -> State:
    """Return the tensors of a solution, checked to fit the network."""
    state = given.state_dict() if isinstance(given, nn.Module) else given
    return checked_state(state, network, what, "a network or its state dict")


# -- scores ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of K settings, in float64 on the CPU."""

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
        """Fraction of labels equal to those of each of R solutions, `[K, R]`; None if the targets are not classes."""
        return self.table[..., 2:] if self.table.shape[-1] > 1 else None


def measured(result: Any, what: str) -> Tensor:
    """Return one of a result's measures by name."""
    check_choice("what", what, MEASURES)
    values: Tensor | None = getattr(result, what)
    if values is None:
        raise ValueError(f"what={what!r} needs classes as targets, and the data had none")
    return values


@dataclass(frozen=True)
class Noise:
    """Random numbers for a network that draws: those of `draws` draws of a seed, from number `first` on."""

    seed: int
    draws: int = 1
    first: int = 0


class WeightScorer:
    """Scorer of weight settings of a copy of a network, on data that are read once.

    Without noise, a network that draws gives expectations. With `batch_norm` data, the batch-norm statistics of
    each setting are computed on them; given solutions keep their own.
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
        if batch_norm is not None and norms(self.model):  # cached, as a shuffling loader would differ between settings
            self.norm_data = Batches(list(Batches(batch_norm).on(self.device)))
        if at_once is not None:
            check_count("at_once", at_once)
        self.classes = self._check_targets(criterion is None and self.reading.class_axis == 1)
        self.at_once = at_once or settings_at_once(self.model, self.batches[0][0])
        self.references: list[list[Tensor]] = []
        self._fused: Fused | None = None

    def identity(self) -> list[Any]:
        """Return all that the scores depend on besides the weights, for a fingerprint."""
        criterion = getattr(self.criterion, "__qualname__", repr(self.criterion))
        norm_data = None if self.norm_data is None else list(self.norm_data.batches)
        return [repr(self.model), dict(self.model.named_buffers()), self.task, criterion, self.batches, norm_data]

    def take_buffers(self, given: Mapping[str, State]) -> None:
        """Load the buffers of the solutions that weights are interpolated between; these must be equal."""
        own = tuple(norms(self.model)) if self.norm_data is not None else ()
        (first, held), *others = given.items()
        for name, state in others:
            for buffer, _ in self.model.named_buffers():
                recomputed = buffer.rpartition(".")[0] in own or buffer.endswith("num_batches_tracked")
                if buffer in state and not recomputed and not torch.equal(state[buffer].cpu(), held[buffer].cpu()):
                    raise ValueError(
                        f"{first} and {name} differ in {buffer!r}, which lies on no line between weights; "
                        "batch_norm=data recomputes batch-norm statistics at each point"
                    )
        self.model.load_state_dict(held, strict=False)

    @torch.no_grad()
    def score_solutions(self, states: Sequence[State], noise: Noise | None = None) -> Scores:
        """Score solutions individually. Agreement is measured with these from now on."""
        self.references = []
        here = [moved(state, self.device) for state in states]
        answers = [[self._answer(state, x, noise) for x, _ in self.batches] for state in here]
        if self.classes:
            self.references = [[answer.argmax(1) for answer in of_one] for of_one in answers]
        rows = [self._scores([answer.unsqueeze(0) for answer in of_one]) for of_one in answers]
        return Scores(torch.cat(rows))

    @torch.no_grad()
    def score(self, weights: Tensor, noises: Sequence[Noise] | None = None) -> Tensor:
        """Return the table of settings `[K, P]`, at most `at_once` of them; with noise, layers draw."""
        states = [unflattened(vector.to(self.device), self.model) for vector in weights]
        states = [state | self.statistics(state) for state in states]
        if noises is not None:
            pairs = list(zip(states, noises, strict=True))
            return self._scores(torch.stack([self._answer(s, x, n) for s, n in pairs]) for x, _ in self.batches)
        if self._fused is None:
            self._fused = Fused(self.model, self.at_once, [x for x, _ in self.batches])
        return self._scores(self._fused.answers(states))

    def score_all(self, weights: Tensor) -> Scores:
        """Score any number of settings `[K, P]`."""
        return Scores(torch.cat([self.score(chunk) for chunk in weights.split(self.at_once)]))

    def statistics(self, state: State) -> State:
        """Return the batch-norm statistics for these weights, if they are to be recomputed."""
        return {} if self.norm_data is None else statistics(self.model, state, self.norm_data)

    def _answer(self, state: State, x: Input, noise: Noise | None) -> Tensor:
        """Predict with one setting by a plain call, `[B, ...]`."""
        with input_errors(x), plain_attention():
            if noise is None:
                with expecting(self.model):
                    return call_with(self.model, state, x)
            draw = Draw(noise.seed)
            answers = []
            for number in range(noise.first, noise.first + noise.draws):
                draw.index = torch.tensor(number)
                with drawing(stochastic_layers(self.model), draw), seeded(mixed(noise.seed, number)):
                    answers.append(call_with(self.model, state, x))
            return self.reading.averaged(torch.stack(answers))

    def _scores(self, answers: Iterable[Tensor]) -> Tensor:
        """Return the table of scores of K settings, from their predictions `[K, B, ...]` for each batch."""
        loss: Any = 0.0
        right: Any = 0
        agree: Any = 0
        weight = counted = total = 0
        for index, ((_, y), answer) in enumerate(zip(self.batches, answers, strict=True)):
            number = count_targets(self.criterion, y) if self.classes or self.reading.classes else len(y)
            if number:  # avoid NaN of an empty mean
                loss = loss + torch.stack([self.criterion(one, y) for one in answer]).double().cpu() * number
            weight += number
            if self.classes:
                labels = answer.argmax(2)
                right = right + (labels == y).flatten(1).sum(1).cpu()
                agreed = [(labels == of_one[index]).flatten(1).sum(1) for of_one in self.references]
                agree = agree + (torch.stack(agreed, 1).cpu() if agreed else torch.zeros(len(labels), 0))
                counted, total = counted + number, total + y.numel()
        columns = [(loss / weight)[:, None]]
        if self.classes:
            columns += [(right.double() / counted)[:, None], agree.double() / total]
        return torch.cat(columns, 1)

    def _check_targets(self, cross_entropy: bool) -> bool:
        """Return whether the targets are classes of the predictions; raise if the loss cannot be computed."""
        x, y = self.batches[0]
        with torch.no_grad():
            answer = self._answer({}, x, None)
            classes = self.reading.class_axis == 1 and not y.is_floating_point() and answer.dim() == y.dim() + 1
            classes = classes and answer.shape[1] > 1
            probabilities = y.is_floating_point() and y.shape == answer.shape
            probabilities = probabilities and bool((y.sum(1) - 1).abs().max() < 1e-3)
            if cross_entropy and not classes and not probabilities:
                raise ValueError(
                    f"data has targets of shape {list(y.shape)} and {y.dtype} for predictions of shape "
                    f"{list(answer.shape)}, where cross entropy needs classes: pass criterion= for anything else"
                )
            for _, y in self.batches if classes else []:
                wrong = y[(y != -100) & ((y < 0) | (y >= answer.shape[1]))]
                if len(wrong):
                    raise ValueError(f"data must have classes 0 to {answer.shape[1] - 1}, got {wrong[0].item()}")
            loss = self.criterion(answer, self.batches[0][1])
        if not isinstance(loss, Tensor) or loss.dim():
            raise ValueError(f"criterion must give one number, the batch's mean, got {loss!r}")
        return classes
