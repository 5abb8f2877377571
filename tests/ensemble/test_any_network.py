"""Networks that write as they run, are checkpointed, have their batch elsewhere: as each alone, or draw by draw."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import multitudes as mt
from tests.zoo.of_parts import Of

CLASSES = 3


class Writes(nn.Module):
    """Buffers moved in place, assigned, and made late; a counter, a list and a remembered value, all of them read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, CLASSES)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("late", None)
        self.steps, self.seen = 0, [1.0]
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.steps += 1
        self.count += 1
        self.seen.append(float(h.detach().mean()))
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        before = 0.0 if self.hidden is None else self.hidden
        self.hidden = h.detach().amax(0)
        self.late = h.detach().sum()
        return self.last((h - self.mean + before).relu()) + self.steps + self.count + sum(self.seen)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.last(checkpoint(self.inner, h, use_reentrant=self.use_reentrant))


def in_two(function: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    """A builder of networks with a `first` and a `last` layer."""
    return lambda: Of(function, first=nn.Linear(4, 8), last=nn.Linear(8, CLASSES))


def without_gradients(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.first(x)
    return net.last(h.relu())


def over_the_batch(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    return net.last(h - h.mean(0))


def writes_over_the_batch(net: Any, x: Tensor) -> Tensor:
    net.features = net.first(x)
    return net.last(net.features - net.features.mean(0))


def along_edges(net: Any, x: Tensor, edges: Tensor) -> Tensor:
    h = net.first(x).relu()
    return net.last(h.index_add(0, edges[1], h[edges[0]]))


def branches(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    return net.last(h if h.sum() > 0 else -h)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, CLASSES)
        self.register_buffer("mixing", (torch.eye(4) * 2).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sparse.mm(self.mixing, x.T).T)


def weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, CLASSES))
    model(torch.randn(2, 4))  # leaves a tensor with a history behind
    return model


HARD: dict[str, Callable[[], nn.Module]] = {
    "writes": Writes,
    "checkpoint_reentrant": lambda: Checkpointed(True),
    "checkpoint": lambda: Checkpointed(False),
    "no_gradient": in_two(without_gradients),
    "sparse": Sparse,
    "branches": in_two(branches),
    "weight_norm": weight_norm,
}


@pytest.mark.parametrize("name", list(HARD))
@pytest.mark.parametrize("runner", ["loop", "packed", "vmapped"])
def test_members_run_and_learn_as_they_would_alone(name: str, runner: str) -> None:
    torch.manual_seed(0)
    models = [HARD[name]() for _ in range(3)]
    x, y = torch.randn(6, 4, requires_grad=True), torch.randint(CLASSES, (6,))
    net = mt.fuse(models)
    try:
        net.runner = runner
    except ValueError:
        assert name == "weight_norm" or (runner == "packed" and name != "sparse")
        return
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (net, *models)]
    for _ in range(3):
        for m, optimizer in zip((net, *models), optimizers, strict=True):
            optimizer.zero_grad()
            try:
                loss = net.loss(x, y) if m is net else F.cross_entropy(m(x), y)
            except ValueError as error:
                assert runner != "loop" and f"'{runner}' cannot run this network" in str(error)
                return
            loss.backward()
            optimizer.step()
        for index, model in enumerate(models):
            member = net.member(index)
            for (_, got), (key, want) in zip(member.state_dict().items(), model.state_dict().items(), strict=True):
                torch.testing.assert_close(got, want, msg=f"{key} of {index}")
            assert getattr(member, "steps", None) == getattr(model, "steps", None)
            torch.testing.assert_close(copy_of(member).eval()(x), copy_of(model).eval()(x))


def copy_of(model: nn.Module) -> nn.Module:
    return mt.fuse([model]).member(0)


def test_what_is_set_from_outside_counts() -> None:
    net = mt.fuse([Writes(), Writes()])
    net(torch.randn(5, 4))
    net.member(1).steps = 100
    net(torch.randn(5, 4))
    assert [net.member(index).steps for index in range(2)] == [2, 101]


@pytest.mark.parametrize("name", ["writes", "no_gradient", "branches"])
def test_tracing_leaves_nothing_behind(name: str) -> None:
    model = HARD[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    net = mt.deep_ensemble(model, members=2, seed=0)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    for tensor in [*net.buffers(), *net.parameters()]:
        assert type(tensor) in (Tensor, nn.Parameter)
    copy.deepcopy(model)(torch.randn(2, 4))


# -- the batch elsewhere -----------------------------------------------------------------------------------


class SequenceFirst(nn.Module):
    """`[T, B, F] -> [B, C]`; `gate` starts closed, so that attention says nothing at first."""

    def __init__(self, closed: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, CLASSES)
        self.attention = nn.MultiheadAttention(8, 2)
        self.gate = nn.Parameter(torch.zeros(()) if closed else torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last((h + self.gate * self.attention(h, h, h)[0]).mean(0))


class Queries(nn.Module):
    """Learned queries, which have no batch, look at the input."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(4, 8))
        self.drop, self.turn = nn.Dropout(0.5), nn.Linear(8, 8)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.softmax(self.turn(self.drop(self.queries)) @ self.first(x).mT, -1)  # [B, 4, T]
        return self.last((seen @ self.first(x)).flatten(1))


class OfDict(nn.Module):
    """A forward with one parameter, to which a dictionary is passed whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, CLASSES)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.last(self.first(batch["x"]).relu() + batch["more"][0])


def inputs(name: str) -> Any:
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "sequence_first": noise(5, 7, 4),
        "closed_gate": noise(4, 4, 4),
        "over_the_batch": noise(6, 4),
        "queries": noise(4, 5, 4),
        "graph": (noise(6, 4), torch.randint(6, (2, 9), generator=generator)),
        "of_dict": {"x": noise(6, 4), "more": [noise(6, 8)]},
    }[name]


ELSEWHERE: dict[str, Callable[[], nn.Module]] = {
    "sequence_first": SequenceFirst,
    "closed_gate": lambda: SequenceFirst(closed=True),
    "over_the_batch": in_two(over_the_batch),
    "queries": Queries,
    "graph": in_two(along_edges),
    "of_dict": OfDict,
}


def shared(name: str, model: nn.Module) -> mt.Multitude:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "batch_ensemble":
            return mt.batch_ensemble(model, members=2, seed=0)
        return mt.masksembles(model, members=2, layers=["last"], seed=0)


@pytest.mark.parametrize("name", list(ELSEWHERE))
@pytest.mark.parametrize("method", ["batch_ensemble", "masksembles"])
def test_members_that_share_weights_train_as_they_evaluate(name: str, method: str) -> None:
    torch.manual_seed(0)
    model = ELSEWHERE[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    net, x = shared(method, model), inputs(name)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):  # a gate that starts closed opens
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            predictions = net.train()(x)
        alone = [member(*x) if isinstance(x, tuple) else member(x) for member in (net.member(0), net.member(1))]
        torch.testing.assert_close(predictions, torch.stack(alone), rtol=1e-4, atol=1e-5)
        optimizer.zero_grad()
        predictions.square().mean().backward()
        optimizer.step()


def test_a_tiled_batch_that_is_another_computation_is_told_with_the_layer() -> None:
    net = shared("batch_ensemble", in_two(writes_over_the_batch)())
    x = torch.randn(6, 4)
    before, python = torch.get_rng_state(), random.getstate()
    with pytest.warns(UserWarning, match="'last.*one after the other"):
        net(x)
    assert torch.equal(before, torch.get_rng_state()) and python == random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(torch.randn(3, 4))  # once for a kind of input


def test_a_gate_that_is_nearly_closed_hides_nothing() -> None:
    model = SequenceFirst()
    model.gate.data.fill_(1e-6)
    net = shared("batch_ensemble", model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.randn(4, 4, 4)
        predictions = net.train()(x)
    torch.testing.assert_close(predictions, torch.stack([net.member(index)(x) for index in (0, 1)]))


def test_a_convolutional_network_is_tiled_without_a_word() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, CLASSES))
    net = mt.batch_ensemble(model, members=3, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(torch.randn(4, 1, 8, 8))
    assert float(net.get_submodule("1").num_batches_tracked) == 1  # the trial left no trace


def test_dropout_on_learned_queries_gives_draws_that_differ() -> None:
    net, x = mt.mc_dropout(Queries(), example=inputs("queries")), inputs("queries")
    p = net.predict(x, draws=8, seed=0)
    assert float(p.predictions.std(0).min()) > 0
    for memory in (1, "1GB"):
        torch.testing.assert_close(net.predict(x, draws=8, seed=0, memory=memory).predictions, p.predictions)


def test_a_network_that_looks_at_values_draws_the_same_in_every_chunk() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), HARD["branches"]())
    net, x = mt.mc_dropout(model).eval(), torch.randn(5, 4)
    with pytest.warns(UserWarning, match="one after the other"):
        whole = net(x, draws=6, seed=3)
    torch.testing.assert_close(net(x, draws=6, seed=3, memory=1), whole)


def test_adaptive_draws_and_cut_tensors_ask_for_inputs_that_are_predicted_apart() -> None:
    whole = in_two(over_the_batch)()
    model = nn.Sequential(nn.Dropout(0.5), whole)
    with pytest.raises(ValueError, match="may depend on the other"):
        mt.mc_dropout(model).predict(torch.randn(6, 4), draws="auto")
    with pytest.raises(ValueError, match="pass a list of whole batches"):
        mt.predict(whole, torch.randn(300, 4))
    assert len(mt.predict(whole, [torch.randn(300, 4)])) == 300


def test_a_sequence_first_network_is_predicted_and_evaluated() -> None:
    net = mt.deep_ensemble(SequenceFirst(), members=2, seed=0)
    x, y = torch.randn(5, 7, 4), torch.randint(CLASSES, (7,))
    assert net.predict(x).probs.shape == (7, CLASSES)
    assert mt.evaluate(net, (x, y)).counts["accuracy"] == 7
