"""Traces record a run, and the run has no side effects."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.networks.calls import InputError, call
from multitudes.networks.trace import FunctionCall, Shape, Trace, hooked, observing, record, recording
from multitudes.networks.verification import rows_interact
from tests.zoo.of_parts import Of


def nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 2))


def hooks(network: nn.Module) -> list[int]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs",
             "_forward_pre_hooks_with_kwargs")  # fmt: skip
    return [len(getattr(module, name)) for module in network.modules() for name in names]


# -- calls -------------------------------------------------------------------------------------------------


def test_calls_are_recorded_in_order_with_arguments_and_outputs() -> None:
    network, x = nested().eval(), torch.randn(5, 3)
    trace = record(network, x)
    assert [each.name for each in trace.calls] == ["", "0", "0.0", "0.1", "1"]
    assert [each.name for each in trace.ended] == ["0.0", "0.1", "0", "1", ""]
    assert [[outer.name for outer in each.inside] for each in trace.calls] == [[], [""], ["", "0"], ["", "0"], [""]]
    first = trace.calls[2]
    assert first.args[0] is x
    assert torch.equal(first.output, F.linear(x, network[0][0].weight, network[0][0].bias))
    assert trace.calls[3].args[0] is first.output
    assert torch.equal(trace.output, network(x))


def test_keyword_arguments_and_outputs_of_any_type_are_recorded() -> None:
    inner = Of(lambda own, x: {"logits": x, "more": (x, None)})
    network = Of(lambda own, x: own.inner(x=x)["logits"], inner=inner)
    (seen,) = record(network, torch.ones(2, 3), ["inner"]).calls
    assert seen.args == () and torch.equal(seen.kwargs["x"], torch.ones(2, 3)) and seen.output["more"][1] is None


def test_shapes_can_be_recorded_in_place_of_tensors() -> None:
    trace = record(nested(), torch.ones(5, 3), tensors=False)
    assert all(type(each.output) is Shape for each in trace.calls)
    assert [tuple(each.output.shape) for each in trace.ended] == [(5, 4), (5, 4), (5, 4), (5, 2), (5, 2)]
    assert trace.calls[0].args[0].nbytes == 5 * 3 * 4


def test_modules_are_selected_by_class_and_by_name() -> None:
    for which, names in (((nn.Linear,), ["0.0", "1"]), (("0.1",), ["0.1"]), ((), [])):
        assert [each.name for each in record(nested(), torch.ones(5, 3), which).calls] == names


def test_a_layer_with_two_names_is_recorded_once_for_each_call() -> None:
    layer = nn.Linear(3, 3)
    network = nn.Sequential(layer, nn.ReLU(), layer)
    trace = record(network, torch.ones(2, 3), work=True)
    assert [each.name for each in trace.calls] == ["", "0", "1", "0"]
    assert [each.name for each in record(network, torch.ones(2, 3), ["2"]).calls] == ["2", "2"]
    assert trace.multiply_adds == 2 * (2 * 3 * 3)


def test_hooks_of_the_network_still_run_and_are_recorded() -> None:
    network, x = nested().eval(), torch.randn(5, 3)
    network[0][0].register_forward_hook(lambda module, args, y: y + 1)
    network[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    before = hooks(network)
    trace = record(network, x)
    plain = F.linear(x, network[0][0].weight, network[0][0].bias)
    assert torch.equal(trace.calls[2].output, plain + 1)
    assert torch.equal(trace.calls[4].args[0], (plain + 1).relu() * 2)
    assert hooks(network) == before


def test_outputs_and_arguments_can_be_replaced() -> None:
    network, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.randn(4, 3)
    with hooked(network, ["0"], lambda name, module, args, y: torch.zeros_like(y)):
        assert torch.equal(network(x), network[1](torch.zeros(4, 3)))
    with hooked(network, ["0"], enter=lambda name, module, args, kwargs: ((args[0] * 0,), kwargs)):
        assert torch.equal(network(x), network[1](network[0](torch.zeros(4, 3))))
    assert not any(hooks(network))


# -- multiply-adds -----------------------------------------------------------------------------------------

WORK: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "linear": (lambda: nn.Linear(3, 4), (5, 3), 5 * 3 * 4),
    "linear, of a sequence": (lambda: nn.Linear(3, 4), (5, 7, 3), 5 * 7 * 3 * 4),
    "convolution": (lambda: nn.Conv2d(3, 8, 3, padding=1), (2, 3, 6, 6), 2 * 36 * 8 * 3 * 9),
    "groups": (lambda: nn.Conv2d(4, 8, 3, groups=2), (2, 4, 6, 6), 2 * 16 * 8 * 2 * 9),
    "transposed": (lambda: nn.ConvTranspose2d(3, 5, 2, stride=2), (2, 3, 4, 4), 2 * 16 * 3 * 5 * 4),
    "lstm": (lambda: nn.LSTM(3, 4, batch_first=True), (2, 7, 3), 2 * 7 * 4 * 4 * (3 + 4)),
    "lstm, two layers both ways": (
        lambda: nn.LSTM(3, 4, 2, bidirectional=True), (7, 2, 3), 2 * 7 * 2 * 4 * 4 * ((3 + 4) + (8 + 4)),
    ),
    "gru": (lambda: nn.GRU(3, 4, batch_first=True), (2, 7, 3), 2 * 7 * 3 * 4 * (3 + 4)),
    "rnn": (lambda: nn.RNN(3, 4), (7, 2, 3), 2 * 7 * 4 * (3 + 4)),
    "norms and activations": (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()), (5, 3), 0),
}  # fmt: skip


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", list(WORK))
def test_multiply_adds_are_those_of_the_formula(name: str, mode: Any) -> None:
    build, shape, want = WORK[name]
    network, x = build().eval(), torch.randn(shape)
    with mode(), recording(network, work=True) as trace:
        network(x)
    assert trace.multiply_adds == want == trace.calls[0].work


def test_multiply_adds_of_attention_are_those_of_the_formula() -> None:
    batch, length, width = 2, 7, 12
    network = Of(lambda own, x: own.attention(x, x, x)[0], attention=nn.MultiheadAttention(width, 3, batch_first=True))
    trace = record(network.train(), torch.randn(batch, length, width), work=True)
    assert trace.multiply_adds == batch * (4 * length * width * width + 2 * length * length * width)


def test_calls_record_the_work_before_and_in_them() -> None:
    trace = record(nested(), torch.ones(5, 3), work=True)
    assert [(each.name, each.before, each.work) for each in trace.calls] == [
        ("", 0, 100), ("0", 0, 60), ("0.0", 0, 60), ("0.1", 60, 0), ("1", 60, 40),
    ]  # fmt: skip


def test_work_is_counted_for_a_layer_called_with_a_parameter() -> None:
    layer, positions = nn.Linear(3, 4), nn.Parameter(torch.randn(5, 3))  # as DeBERTa's positions are
    with torch.inference_mode(), recording(layer, work=True) as trace:
        layer(positions)
    assert trace.multiply_adds == 5 * 3 * 4


def test_the_largest_tensor_is_not_a_view() -> None:
    network = nn.Sequential(nn.Linear(3, 100), nn.ReLU(), nn.Linear(100, 2))
    assert record(network, torch.ones(5, 3), work=True).nbytes == 5 * 100 * 4
    views = Of(lambda own, x: x.expand(1000, 5, 3)[0].flip(0))
    assert record(views, torch.ones(5, 3), work=True).nbytes == 5 * 3 * 4


# -- functions, values and random numbers ------------------------------------------------------------------


def caller(use: FunctionCall) -> str:
    return use.inside[-1].name if use.inside else ""


def test_functions_are_recorded_with_their_modules() -> None:
    inner = Of(lambda own, x: torch.tanh(x) if x.shape[0] and x.dim() > 1 and len(x) else x)
    network = Of(lambda own, x: own.inner(x).sin(), inner=inner)
    x = torch.ones(2, 3)
    uses = record(network, x, functions=True).functions
    assert [(use.function, caller(use)) for use in uses] == [("tanh", "inner"), ("sin", "")]
    assert uses[0].tensors == (x,)


def test_only_functions_of_selected_tensors_are_recorded() -> None:
    network = Of(lambda own, x: own.layer(x) @ own.layer.weight.T, layer=nn.Linear(3, 3))
    with recording(network, functions=[network.layer.weight]) as trace:
        network(torch.ones(2, 3))
    inner, outer = trace.functions
    assert (inner.function, caller(inner)) == ("linear", "layer")
    assert caller(outer) == "" and outer.tensors == (network.layer.weight,)  # by way of its `.T`


def looked_at(network: nn.Module, x: Tensor) -> list[FunctionCall]:
    return record(network, x, inspected=[*network.parameters(), x]).inspections


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * x.mean().item(),
        lambda x: x * float(x.max()),
        lambda x: x * len(x[0].tolist()),
        lambda x: x * int(torch.equal(x, x)),
        lambda x: x[: int((x > 0).all()) + 1],
    ],
)
def test_inspected_values_are_recorded_with_their_module(look: Callable[[Tensor], Tensor]) -> None:
    network = Of(lambda own, x: own.layer(x), layer=nn.Sequential(nn.Linear(3, 3), Of(lambda own, x: look(x))))
    assert {caller(use) for use in looked_at(network, torch.randn(2, 3))} == {"layer.1"}


def test_inspecting_shapes_or_other_tensors_is_not_recorded() -> None:
    network = Of(lambda own, x: own.layer(x) * int(torch.arange(3).sum()) * x.shape[0], layer=nn.Linear(3, 3))
    assert not looked_at(network, torch.randn(2, 3))


def drawing(own: Any, x: Tensor) -> Tensor:
    return own.inner(x) + torch.rand(x.shape)


def test_random_functions_are_recorded_with_their_module() -> None:
    inner = Of(lambda own, x: F.dropout(x, 0.5, own.training) + F.dropout(x, 0.0))
    network = Of(drawing, inner=inner).train()
    x = torch.ones(2, 3)
    with recording(network, noise=True) as trace:
        got = network(x)
    assert trace.random == {"inner": {"dropout"}, "": {"rand"}} and not trace.unknown_random
    assert torch.equal(got, 2 * x + 0.5)  # nothing is dropped, and the middle of [0, 1)
    assert record(network, x, noise=True).random == {"": {"rand"}}


@pytest.mark.parametrize("draw", [lambda x: x + random.random(), lambda x: x + np.random.rand(), lambda x: x.cauchy_()])
def test_unknown_random_functions_are_recorded_with_their_module(draw: Callable[[Tensor], Tensor]) -> None:
    network = nn.Sequential(nn.Linear(3, 3), Of(lambda own, x: draw(x.clone())), nn.ReLU())
    assert list(record(network, torch.ones(2, 3), noise=True).unknown_random) == ["1"]


# -- nothing is left behind --------------------------------------------------------------------------------


class Writing(nn.Module):
    """Writes all that a network may write as it runs, and draws."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3))
        self.history: list[int] = []
        self.named, self.gone, self.steps = {"a": 1}, "here", 0

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.last = x[0]
        self.history.append(1)
        self.named["b"] = x
        self.steps += 1
        self.hidden = x
        del self.gone
        self.drop.train()
        x = self.layer(x) * random.random() + np.random.rand() + torch.rand(())
        if self.fails:
            raise RuntimeError("half way")
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_leaves_the_network_unchanged_even_if_it_fails(fails: bool) -> None:
    network = nn.Sequential(Writing(), nn.BatchNorm1d(3)).train()
    own: Any = network[0]
    own.drop.eval()
    own.fails = fails
    state = {name: value.clone() for name, value in network.state_dict().items()}
    places = {name: id(value) for name, value in network.state_dict(keep_vars=True).items()}
    history, keys, modes = own.history, set(vars(own)), [module.training for module in network.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    trace = Trace()
    try:
        trace = record(network, torch.ones(4, 3), functions=True, inspected=network.parameters(), noise=True, work=True)
    except InputError as error:
        assert fails and "half way" in str(error)
    else:
        assert not fails
        assert trace.buffers == {"0.count", "0.last"}
        assert trace.attributes == {f"0.{name}" for name in ("history", "named", "steps", "hidden", "gone")}
    after = network.state_dict(keep_vars=True)
    assert {name: id(value) for name, value in after.items()} == places
    assert all(torch.equal(after[name], state[name]) for name in state)
    assert set(vars(own)) == keys and (own.history, own.named, own.gone, own.steps) == (history, {"a": 1}, "here", 0)
    assert own.history is history and not history
    assert [module.training for module in network.modules()] == modes
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    assert not any(hooks(network))
    assert torch._C._len_torch_function_stack() == 0 and torch._C._len_torch_dispatch_stack() == 0


def test_a_network_without_writes_records_no_writes() -> None:
    trace = record(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).train(), torch.ones(4, 3))
    assert not trace.buffers and not trace.attributes


@pytest.mark.parametrize("by_hook", [False, True])
def test_a_call_that_fails_and_is_caught_leaves_the_calls_in_order(by_hook: bool) -> None:
    def either(own: Any, x: Tensor) -> Any:
        try:
            return own.first(x)
        except RuntimeError:
            return own.second(x)

    def refuse(module: nn.Module, args: Any) -> None:
        raise RuntimeError("refused")

    network = Of(either, first=nn.Sequential(nn.Linear(2, 2)), second=nn.Linear(3, 2))
    if by_hook:
        network.first.register_forward_pre_hook(refuse)
    calls = record(network, torch.ones(2, 3)).calls
    assert [each.name for each in calls] == ["", *([] if by_hook else ["first", "first.0"]), "second"]
    assert [outer.name for outer in calls[-1].inside] == [""]


# -- rows --------------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """Adds a parameter that belongs to the position in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift[: len(x)]


ROWS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "linear": (nested, False),
    "batch norm in evaluation": (lambda: nn.Sequential(nn.BatchNorm1d(3)).eval(), False),
    "batch norm in training": (lambda: nn.Sequential(nn.BatchNorm1d(3)).train(), True),
    "dropout": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout()).train(), False),
    "softmax over the batch": (lambda: Of(lambda own, x: x.softmax(0)), True),
    "the mean of the batch, behind a closed gate": (
        lambda: Of(lambda own, x: x + x.mean(0) * own.gate(x), gate=closed()), True,
    ),
    "sums up to each row": (lambda: Of(lambda own, x: x.cumsum(0)), True),
    "a parameter of each position": (Positions, True),
    "sums over the batch": (lambda: Of(lambda own, x: x.sum(0)), True),
    "code that inspects values": (lambda: Of(lambda own, x: own.a(x) if own.a(x).sum() > -math.inf else x,
                                             a=nn.Linear(3, 3)), True),
}  # fmt: skip


def closed() -> nn.Module:
    layer = nn.Linear(3, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name", list(ROWS))
def test_rows_that_affect_each_other_are_detected(name: str, batch: int) -> None:
    torch.manual_seed(0)
    build, want = ROWS[name]
    network = build()
    assert bool(rows_interact(network, lambda x: call(network, x)[None], torch.randn(batch, 3))) == want


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_causal_network_with_its_sequence_first_mixes_rows(batch_first: bool) -> None:
    network = Of(lambda own, x: own.lstm(x)[0], lstm=nn.LSTM(3, 4, batch_first=batch_first))
    assert bool(rows_interact(network, lambda x: call(network, x)[None], torch.randn(6, 5, 3))) != batch_first


def test_threads_that_observe_one_network_restore_its_modes() -> None:
    network = nn.Sequential(Writing(), nn.BatchNorm1d(3)).train()

    def look() -> None:
        for _ in range(30):
            with observing(network):
                call(network, torch.ones(4, 3))
            record(network, torch.ones(4, 3))

    switched = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: look(), range(4)))
    finally:
        sys.setswitchinterval(switched)
    assert all(module.training for module in network.modules()) and not any(hooks(network))
    assert float(network.state_dict()["0.count"]) == 0
