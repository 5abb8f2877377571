"""What every method must show, on every kind of network: those with members, and those that draw."""

from __future__ import annotations

import copy
import io
import pickle
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import multitudes as mt
from multitudes.ensemble.member_layer import MemberLayer
from tests.zoo import cases, drawing_cases
from tests.zoo.cases import CLASSES, INDEPENDENT, METHODS, NETWORKS, QUICK, slow_but_for
from tests.zoo.drawing_cases import DRAWING, SAMPLED

MEMBERS = cases.CASES
LEARNING = [*MEMBERS, *drawing_cases.LEARNING_CASES]
EVERY = [*MEMBERS, *drawing_cases.CASES]


def over(table: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("method", "network"), table)


def build(method: str, network: str, model: nn.Module | None = None, seed: int = 0, **options: Any) -> mt.Multitude:
    """The method's multitude of a model, or of the network's own."""
    if method in DRAWING:
        return drawing_cases.build(method, network, seed, model)
    model = NETWORKS[network].model() if model is None else model
    options.setdefault("seed", seed)
    return cases.build(method, model, network, **options)


def three(net: mt.Multitude, x: Tensor) -> Tensor:
    """The predictions of the three members, or three draws, in evaluation: `[3, B, C]`."""
    # A seed whose draws differ: by chance, two may have the same of a patched layer's few components.
    return net.eval()(x) if net.members == 3 else net.eval()(x, draws=3, seed=3)


def without_noise(net: mt.Multitude, x: Tensor) -> Tensor:
    return net.eval()(x, draws=0)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# -- predictions -------------------------------------------------------------------------------------------


@over(EVERY)
def test_each_member_or_draw_gives_a_prediction_of_its_own(method: str, network: str) -> None:
    model, (x, _) = NETWORKS[network].model(), NETWORKS[network].batch(7)
    net = build(method, network, model, seed=1)  # the model itself was drawn with 0
    predictions = three(net, x)
    assert predictions.shape == (3, 7, CLASSES)
    assert predictions.dtype == torch.float32
    assert predictions.isfinite().all()
    for one, other in combinations(predictions, 2):
        assert not torch.allclose(one, other, atol=1e-4)
    if method in METHODS:
        assert not any(torch.allclose(prediction, model(x), atol=1e-3) for prediction in predictions)
    if method not in SAMPLED:
        assert net.train()(x).shape == (3 if method in METHODS else 1, 7, CLASSES)


@over(EVERY)
def test_a_batch_of_one_works(method: str, network: str) -> None:
    net, (x, _) = build(method, network), NETWORKS[network].batch(7)
    torch.testing.assert_close(without_noise(net, x[:1]), without_noise(net, x)[:, :1], rtol=1e-4, atol=1e-5)
    assert three(net, x[:1]).shape == (3, 1, CLASSES)


@over(EVERY)
def test_dtype_is_kept(method: str, network: str) -> None:
    x = NETWORKS[network].batch(2)[0].double()
    options = {"example": x} if method in cases.SEEING else {}
    net = build(method, network, NETWORKS[network].model().double(), **options)
    assert three(net, x).dtype == torch.float64
    assert {p.dtype for p in net.parameters()} == {torch.float64}


@over(MEMBERS)
def test_one_pretrained_member_is_the_base_network(method: str, network: str) -> None:
    model, (x, _) = NETWORKS[network].model(), NETWORKS[network].batch()
    net = build(method, network, model, members=1, init="pretrained")
    torch.testing.assert_close(net(x)[0], model(x), rtol=1e-4, atol=1e-5)


@over(EVERY)
def test_predict_is_the_mean_of_the_probabilities_in_evaluation_mode(method: str, network: str) -> None:
    net, (x, _) = build(method, network).train(), NETWORKS[network].batch()
    options = {"draws": 6, "seed": 1} if method in DRAWING else {}
    predictive = net.predict(x, **options)
    assert net.training
    assert not predictive.predictions.requires_grad
    torch.testing.assert_close(predictive.probs, net.eval()(x, **options).softmax(-1).mean(0), rtol=1e-4, atol=1e-6)


@over(EVERY)
def test_bad_inputs_raise_one_sentence(method: str, network: str) -> None:
    net, (x, y) = build(method, network).eval(), NETWORKS[network].batch(4)
    for wrong in (x[0], x[:, :-1], x.flatten(1)[:, :4], x.unsqueeze(0).unsqueeze(0), [1, 2], None):
        with pytest.raises(ValueError, match=r"^x (of shape|must be)"):
            net.predict(wrong)
    nan = x.clone()
    nan[1].view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        net.predict(nan)
    if method not in SAMPLED:
        y[2] = CLASSES
        with pytest.raises(ValueError, match=f"0 to {CLASSES - 1}, got {CLASSES}"):
            net.loss(x, y)


# -- the model and its copies ------------------------------------------------------------------------------


@over(EVERY)
def test_the_given_model_is_left_as_it_was(method: str, network: str) -> None:
    model, (x, y) = NETWORKS[network].model(), NETWORKS[network].batch()
    before, structure = snapshot(model), repr(model)
    kept: dict[str, Any] = (
        {"init": "pretrained", "perturb": 0.1} if method == "deep_ensemble" else {"init": "pretrained"}
    )
    kept = {} if method == "heads" else kept
    for options in ({"init": "fresh"}, kept) if method in METHODS else ({},):
        net = build(method, network, model, **options)
        three(net, x)
        if method not in SAMPLED:
            net.loss(x, y).backward()
        with torch.no_grad():
            for tensor in [*net.parameters(), *net.buffers()]:
                tensor.add_(1)
    assert repr(model) == structure
    assert not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@over(EVERY)
def test_training_mode_is_the_models(method: str, network: str) -> None:
    for mode in (True, False):
        net = build(method, network, NETWORKS[network].model().train(mode))
        assert {module.training for module in net.modules()} == {mode}


@over(EVERY)
def test_saved_copied_and_pickled_networks_give_the_same_numbers(method: str, network: str, tmp_path: Path) -> None:
    net, (x, _) = build(method, network), NETWORKS[network].batch()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.01)
    want, expected = three(net, x), without_noise(net, x)
    whole = nn.ModuleDict({"part": net})
    save_file({k: v.contiguous() for k, v in whole.state_dict().items()}, tmp_path / "net.safetensors")
    loaded = nn.ModuleDict({"part": build(method, network, NETWORKS[network].model(seed=5), seed=9)})
    loaded.load_state_dict(load_file(tmp_path / "net.safetensors"))
    stream = io.BytesIO()
    pickle.dump(net, stream)
    stream.seek(0)
    # Each of them holds the same numbers in memory of its own, allocated by torch: the same operations, bit for bit.
    for other in (loaded["part"], copy.deepcopy(net), pickle.load(stream)):
        assert torch.equal(three(other, x), want)
        assert torch.equal(without_noise(other, x), expected)
        with torch.no_grad():
            for tensor in [*other.parameters(), *other.buffers()]:
                tensor.zero_()
    assert torch.equal(three(net, x), want)


@over(MEMBERS)
def test_the_same_seed_gives_the_same_network_and_leaves_torchs_state_alone(method: str, network: str) -> None:
    model, (x, _) = NETWORKS[network].model(), NETWORKS[network].batch()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one, same, other = (build(method, network, model, seed=seed).eval()(x) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


@over(slow_but_for(("mlp", "transformer"), MEMBERS))
def test_a_member_alone_is_a_plain_network_with_the_same_predictions(method: str, network: str) -> None:
    case = NETWORKS[network]
    net = build(method, network).train()
    net.loss(*case.batch(8)).backward()
    with torch.no_grad():
        for parameter in net.parameters():  # away from any special start
            if parameter.requires_grad:
                parameter.sub_(0.1 * parameter.grad.sign() * parameter.std().clamp(min=0.1))
    x, _ = case.batch()
    together = net.eval()(x)
    own_classes = {type(module) for module in case.build().modules()}
    for index in range(3):
        member = net.member(index)
        assert {type(module) for module in member.modules()} <= own_classes
        torch.testing.assert_close(member(x), together[index], rtol=1e-3, atol=1e-4)
    mt.check(net, x)


# -- training ----------------------------------------------------------------------------------------------


@over(LEARNING)
def test_backward_reaches_every_parameter(method: str, network: str) -> None:
    net = build(method, network).train()
    missed = {name for name, p in net.named_parameters() if p.requires_grad}
    assert method == "lora" or len(missed) == len(list(net.parameters()))
    # A component learns when it is drawn, and an adapter's first factor when its second is no longer zero.
    for _ in range(30 if method == "patched" else 3 if method in (*DRAWING, "lora") else 1):
        net.zero_grad()
        loss = net.loss(*NETWORKS[network].batch(16), dataset_size=100)
        assert loss.shape == ()
        assert loss.isfinite()
        loss.backward()
        missed -= {name for name, p in net.named_parameters() if p.grad is not None and p.grad.any()}
        if method == "lora":
            torch.optim.SGD(net.parameters(), 0.1).step()
    assert not missed


@over(slow_but_for(QUICK, LEARNING))
def test_the_loss_falls(method: str, network: str) -> None:
    net, (x, y) = build(method, network).train(), NETWORKS[network].batch(16)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    torch.manual_seed(0)
    losses = []
    for _ in range(80 if method in DRAWING else 60):
        loss = net.loss(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@over(MEMBERS)
def test_the_loss_is_the_sum_or_mean_of_the_members_losses(method: str, network: str) -> None:
    net, (x, _) = build(method, network).eval(), NETWORKS[network].batch()
    y = torch.randn(len(x), CLASSES)
    losses = torch.stack([F.mse_loss(prediction, y) for prediction in net(x)])
    want = losses.sum() if method in INDEPENDENT else losses.mean()
    if method == "mimo":  # inputs are shuffled apart unless all are shared
        net.repetition = 1.0
    torch.testing.assert_close(net.loss(x, y, task="regression"), want, rtol=1e-4, atol=1e-5)


@over(MEMBERS)
def test_one_training_loop_serves_every_method(method: str, network: str) -> None:
    net, (x, y) = build(method, network).train(), NETWORKS[network].batch(8)
    assert not net.clip_grad_norm_(1.0).any()  # no gradients yet
    net.loss(x, y).backward()
    before = net.clip_grad_norm_(1e-3)
    assert bool((before > 1e-3).all())
    for _ in range(2):  # a smaller gradient stays as it is
        torch.testing.assert_close(net.clip_grad_norm_(1.0), torch.full_like(before, 1e-3), rtol=0.01, atol=0)
    with pytest.raises(ValueError, match="criterion must give one number"):
        net.loss(x, y, lambda p, t: F.cross_entropy(p, t, reduction="none"))
    with pytest.raises(ValueError):
        net.loss(x, y[:3])
    with pytest.raises(ValueError, match="does not fit the network"):
        net.loss(x[..., :0], y)


# -- compiled, on a GPU ------------------------------------------------------------------------------------


def assert_same_mean(one: Tensor, other: Tensor, slack: float) -> None:
    """The means over many draws differ by no more than chance, six standard errors, and the slack."""
    error = ((one.var(0) + other.var(0)) / len(one)).sqrt()
    assert ((one.mean(0) - other.mean(0)).abs() < 6 * error + slack).all()


COMPILED_QUICKLY = [case for case in LEARNING if case.values[:2] in (("packed", "cnn"), ("mc_dropout", "cnn"))]


@over([*COMPILED_QUICKLY, *slow_but_for((), [case for case in LEARNING if case not in COMPILED_QUICKLY])])
def test_compiled_agrees_with_eager(method: str, network: str) -> None:
    torch.compiler.reset()
    net, (x, _) = build(method, network).eval(), NETWORKS[network].batch()

    def compiled(net: mt.Multitude) -> Any:
        return torch.compile(copy.deepcopy(net), backend="aot_eager", fullgraph=True)

    if method in METHODS:
        for training in (False, True):
            want = net.train(training)(x)  # a first input shows how members may run, before all of it is one graph
            torch.testing.assert_close(compiled(net)(x), want, rtol=1e-4, atol=1e-5)
    else:
        quick = compiled(net)
        torch.testing.assert_close(quick(x, draws=0), net(x, draws=0), rtol=1e-4, atol=1e-5)
        assert_same_mean(quick(x, draws=300), net(x, draws=300), slack=1e-5)
        assert compiled(net.train())(x).shape == (1, 7, CLASSES)


@over(EVERY)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_agrees_with_cpu(method: str, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its rounding is coarser than what is tested
    net, (x, _) = build(method, network).eval(), NETWORKS[network].batch()
    on_gpu, there = copy.deepcopy(net).to("cuda"), x.cuda()
    torch.testing.assert_close(without_noise(on_gpu, there).cpu(), without_noise(net, x), rtol=1e-3, atol=1e-3)
    if method in METHODS:
        torch.testing.assert_close(on_gpu.predict(there).probs.cpu(), net.predict(x).probs, rtol=1e-3, atol=1e-3)
        return
    assert_same_mean(on_gpu(there, draws=500, seed=0).cpu(), net(x, draws=500, seed=0), slack=1e-3)
    state, drawn = torch.cuda.get_rng_state(), on_gpu(there, draws=5, seed=3)
    assert torch.equal(on_gpu(there, draws=5, seed=3), drawn)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.testing.assert_close(on_gpu(there, draws=5, seed=3, memory=1), drawn, rtol=1e-3, atol=1e-3)


# -- arguments ---------------------------------------------------------------------------------------------


@over(MEMBERS)
def test_bad_arguments_are_named(method: str, network: str) -> None:
    model = NETWORKS[network].model()
    for members in (0, -1, 2.5, True, "4"):
        with pytest.raises(ValueError, match="members"):
            build(method, network, model, members=members)
    with pytest.raises(ValueError, match="init"):
        build(method, network, model, init="random")
    net = build(method, network, model)
    for index in (3, -1, "0"):
        with pytest.raises(ValueError, match="index"):
            net.member(index)


def test_shared_layers_know_their_member_only_while_it_runs() -> None:
    net = build("batch_ensemble", "cnn").eval()
    with pytest.raises(ValueError, match="x"):
        net(torch.zeros(2, 99, 8, 8))
    layers = [m for m in net.modules() if isinstance(m, MemberLayer)]
    assert layers
    assert all(layer.member is None for layer in layers)
