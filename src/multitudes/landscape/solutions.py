"""Solutions: networks with their weights and predictions, each with its run and its kind.

Checkpoints of a training, independently trained networks, members of an ensemble, or draws from a subspace around a
solution (Fort, Hu and Lakshminarayanan, *Deep ensembles: a loss landscape perspective*, 2019, section 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_choice, check_count, check_seed
from multitudes.ensemble.multitude import Multitude, plain
from multitudes.evaluation.predict import predict
from multitudes.methods.subspace import KINDS, Around, Subspace, subspace
from multitudes.networks.calls import split_batch
from multitudes.networks.copies import copied
from multitudes.networks.stochastic import stochastic_layers
from multitudes.tasks import TASKS
from multitudes.tasks.predictive import Predictive
from multitudes.training.batches import Batches
from multitudes.training.recorder import Checkpoints, Recorder, State, Trajectory, checked_state

CachedInputs = list[tuple[Any, None]]
"""Cached batches of inputs: all solutions get the same ones in the same order."""


@dataclass(frozen=True, eq=False, repr=False)
class Labelled:
    """Base of results about S solutions."""

    labels: tuple[str, ...]
    """Unique name of each solution."""
    runs: tuple[str, ...]
    """Training run of each solution."""
    kinds: tuple[str, ...]
    """Kind of each solution in its run: checkpoint, draw from a subspace, ..."""

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(solutions={len(self)}, runs={len(set(self.runs))})"

    @property
    def places(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Labels, runs and kinds."""
        return self.labels, self.runs, self.kinds

    def groups(self) -> dict[tuple[str, str], list[int]]:
        """Return the indices of the solutions of each run and kind."""
        found: dict[tuple[str, str], list[int]] = {}
        for index, place in enumerate(zip(self.runs, self.kinds, strict=True)):
            found.setdefault(place, []).append(index)
        return found

    def index(self, label: str) -> int:
        """Return the index of a solution."""
        check_choice("label", label, self.labels)
        return self.labels.index(label)


@dataclass(frozen=True, eq=False, repr=False)
class Solutions(Labelled):
    """S solutions with their networks and their predictions for the same N inputs, on the CPU."""

    predictive: Predictive
    """Logits `[S, N, C, ...]`, or predicted numbers."""
    networks: tuple[nn.Module, ...]
    """Network of each solution; draws that do not change weights share one."""
    target: Tensor | None = None
    """True classes or numbers `[N, ...]`, if the data have them."""

    @property
    def task(self) -> str:
        """Task of the predictions."""
        return self.predictive.task

    def classes(self) -> Tensor:
        """Return the target, or raise if the data has none or numbers are predicted."""
        if not self.predictive.reading.classes:
            raise ValueError(f"solutions must classify, got predictions of task {self.task}")
        if self.target is None:
            raise ValueError("data must hold classes, as (x, y) or batches of them, got only inputs")
        return self.target

    def chosen(self, kind: str, runs: Iterable[str]) -> Predictive:
        """Return the predictions of the solutions of a kind in some runs."""
        places = self.groups()
        rows = [index for run in dict.fromkeys(runs) for index in places.get((run, kind), [])]
        return Predictive(self.predictive.predictions[sorted(rows)], self.task)


def read_solutions(
    solutions: Any, data: Any = None, *, model: nn.Module | None = None, draws: int = 10, seed: int = 0
) -> Solutions:
    """Predict data with each solution, in evaluation mode. Arguments are not changed.

    Args:
        solutions: Runs by name, a list of runs, or one run. A run is a network, a state dict, a `Recorder`, a list of
            networks or state dicts, a multitude, or a mapping from kinds to these:
            `{"checkpoints": recorder, "dropout": subspace(...)}`. Each member of a multitude is a solution, in a run of
            its own if members share no weights. If it draws, each draw is a solution.
        data: Inputs `[N, ...]`, `(x, y)` or an iterable of batches, which is iterated once.
        model: Network for state dicts; a `Recorder` has its own.
        draws: Number of draws from a network that draws.
        seed: Seed of the draws.

    Returns:
        The solutions with their predictions; a valid argument for all functions that take solutions.

    Example:
        >>> nets = [nn.Linear(3, 2) for _ in range(2)]
        >>> read = read_solutions(
        ...     {"left": nets[0], "right": [nets[1].state_dict()] * 2}, torch.ones(5, 3), model=nets[0]
        ... )
        >>> read, read.labels
        (Solutions(solutions=3, runs=2), ('left', 'right, checkpoint 0', 'right, checkpoint 1'))
    """
    if isinstance(solutions, Solutions):
        if data is not None:
            raise ValueError(f"data must not be passed with {solutions!r}, which has its predictions")
        return solutions
    check_count("draws", draws)
    check_seed(seed)
    found = list(_found(solutions, model))
    if not found:
        raise ValueError("solutions must hold at least one network, got none")
    batches, target = _cached(data)
    rows: list[tuple[str, str, nn.Module]] = []
    predictions: list[Tensor] = []
    tasks = sorted({task or "classification" for _, _, _, task in found})
    if len(tasks) > 1:
        raise ValueError(f"solutions must have one task, got {' and '.join(tasks)}")
    for run, kind, network, task in found:
        for one, own in _predictions(network, batches, draws, seed, task):
            rows += [(run, kind, one)] * len(own)
            predictions.append(own)
    if len(shapes := sorted({tuple(part.shape[1:]) for part in predictions})) > 1:
        raise ValueError(f"solutions must give predictions of one shape, got {list(shapes[0])} and {list(shapes[1])}")
    runs, kinds, networks = zip(*rows, strict=True)
    predictive = Predictive(torch.cat(predictions), tasks[0])
    return Solutions(_labels(runs, kinds), runs, kinds, predictive, networks, target)


def _cached(data: Any) -> tuple[CachedInputs, Tensor | None]:
    """Cache the inputs of `data` by batch, and all targets `[N, ...]` on the CPU, if any."""
    if data is None:
        raise ValueError("data must be inputs, (inputs, classes) or batches of them, got None")
    parts = [split_batch(batch) for batch in Batches(data).batches]
    targets = [y.cpu() for _, y in parts if y is not None]
    if not parts:
        raise ValueError("data must hold at least one batch, got none")
    if targets and len(targets) < len(parts):
        raise ValueError(f"data must have targets in all {len(parts)} batches or in none, got {len(targets)}")
    return [(x, None) for x, _ in parts], torch.cat(targets) if targets else None


# -- subspaces around a run --------------------------------------------------------------------------------


def subspaces(
    run: Checkpoints, model: nn.Module | None = None, kinds: Iterable[str] = KINDS, **options: Any
) -> dict[str, Any]:
    """Build subspaces around the last checkpoints of a run, by kind (section 4.2); see `multitudes.subspace`.

    Args:
        run: A `Recorder`, or state dicts from old to new.
        model: Network of the state dicts; a `Recorder` has its own.
        kinds: Kinds of subspaces.
        options: Options of `subspace` for all kinds, or for one kind under its name, as in
            `subspaces(recorder, data=(x, y), floor=0.65, low_rank={"scale": 0.1})`.

    Returns:
        Subspaces by kind, which can be a run in `read_solutions`.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> checkpoints = [{k: v + i**j for j, (k, v) in enumerate(model.state_dict().items())} for i in range(9)]
        >>> list(subspaces(checkpoints, model, low_rank={"rank": 1}))
        ['random', 'dropout', 'diagonal', 'low_rank']
    """
    chosen = list(kinds)
    for kind in chosen:
        if kind not in KINDS:
            raise ValueError(f"kinds must be among {', '.join(KINDS)}, got {kind!r}")
    network, states = trajectory_of(run, model)
    common = {name: value for name, value in options.items() if name not in KINDS}
    common["data"] = Batches.of(common.get("data"))  # each kind iterates it
    return {kind: subspace(network, kind, states, **(common | options.get(kind, {}))) for kind in chosen}


def trajectory_of(run: Checkpoints, model: nn.Module | None) -> tuple[nn.Module, list[State]]:
    """Return the network of a run and its last checkpoints, oldest first."""
    network = run.net if model is None and isinstance(run, Recorder) else model
    if network is None:
        raise ValueError("model must be the network of the state dicts, got None")
    return network, Trajectory.of(run, network).states


def last_checkpoint(run: Checkpoints, model: nn.Module | None = None) -> nn.Module:
    """Return a copy of the network of a run with its last checkpoint loaded."""
    network, states = trajectory_of(run, model)
    return _loaded(network, states[-1])


# -- networks in a source ------------------------------------------------------------------------------------


def _networks_in(source: Any, model: nn.Module | None = None, name: str = "solutions") -> Iterator[tuple[str, Any]]:
    """Yield the networks in `source`, each with its kind; a multitude is not split."""
    if isinstance(source, Recorder):
        for state in Trajectory.of(source, source.net).states:
            yield "checkpoint", _loaded(source.net, state)
    elif isinstance(source, nn.Module):
        drawing = bool(stochastic_layers(source.network if isinstance(source, Multitude) else source))
        yield "draw" if drawing else "member" if isinstance(source, Multitude) else "network", source
    elif _is_state(source):
        if model is None:
            raise ValueError(f"{name} holds state dicts: pass their network as model=")
        yield "checkpoint", _loaded(model, checked_state(source, model, name))
    elif isinstance(source, Iterable) and not isinstance(source, (str, Mapping, Tensor)):
        for index, part in enumerate(source):
            yield from _networks_in(part, model, f"{name}[{index}]")
    else:
        raise ValueError(
            f"{name} must be a network, a state dict, a Recorder, or a list of them, got {type(source).__name__}"
        )


def _found(solutions: Any, model: nn.Module | None) -> Iterator[tuple[str, str, nn.Module, str | None]]:
    """Yield run, kind, network and known task of each network."""
    named: dict[str, Any]
    if isinstance(solutions, Mapping) and not _is_state(solutions):
        named = {str(name): run for name, run in solutions.items()}
    elif isinstance(solutions, (list, tuple)):
        named = {f"run {index}": run for index, run in enumerate(solutions)}
    else:
        named = {"run 0": solutions}
    for run, source in named.items():
        kinds = dict(source) if isinstance(source, Mapping) and not _is_state(source) else {None: source}
        for kind, part in kinds.items():
            place = f"solutions[{run!r}]" + (f"[{kind!r}]" if kind is not None else "")
            for own_kind, network in _networks_in(part, model, place):
                for suffix, alone, task in _members(network):
                    yield run + suffix, own_kind if kind is None else str(kind), alone, task


def _members(network: nn.Module) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Yield each member with a suffix for the name of its run and its known task."""
    net = network if isinstance(network, Multitude) else Multitude(network)
    if not net.reading.compared:
        kind = "multitude" if net is network else "network"
        known = ", ".join(name for name, task in TASKS.items() if task.compared)
        raise ValueError(f"solutions must have task {known}, got a {kind} of task {net.task}")
    if isinstance(network, Multitude):
        own_run = network.independent and network.members > 1
        for index in range(network.members):
            yield f", member {index}" if own_run else "", plain(network.member(index)), net.known_task
    else:
        yield "", network, net.known_task


def _predictions(
    network: nn.Module, batches: CachedInputs, draws: int, seed: int, task: str | None
) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yield networks with their predictions `[1, N, ...]`, or those of their draws `[D, N, ...]`."""
    if isinstance(network, Around):
        samples = Subspace(network).networks(draws, seed)
        for index in range(draws):
            yield from _predictions(samples.member(index), batches, draws, seed, task)
        return
    options: dict[str, Any] = {"draws": draws, "seed": seed} if stochastic_layers(network) else {}
    yield network, predict(Multitude(network), batches, task=task, **options).predictions


def _loaded(network: nn.Module, state: State) -> nn.Module:
    loaded = copied(network)
    loaded.load_state_dict(state, strict=False)  # entries that are not tensors are kept from the model
    return loaded


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(entry, Tensor) for entry in value.values())


def _labels(runs: Iterable[str], kinds: Iterable[str]) -> tuple[str, ...]:
    """Return unique labels: the name of the run, with kind and number if it has several solutions."""
    places = list(zip(runs, kinds, strict=True))
    of_run, seen = Counter(run for run, _ in places), Counter[tuple[str, str]]()
    labels = []
    for run, kind in places:
        labels.append(run if of_run[run] == 1 else f"{run}, {kind} {seen[run, kind]}")
        seen[run, kind] += 1
    return tuple(labels)
