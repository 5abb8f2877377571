"""What every method must show, on every kind of network."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import multitudes as mt
from multitudes.core.shared import MemberLayer
from tests.cases import CASES, CLASSES, INDEPENDENT, NETWORKS, build, by_compiling

contract = pytest.mark.parametrize(("method", "network"), CASES)


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@contract
@pytest.mark.parametrize("training", [True, False])
def test_a_multitude_gives_one_prediction_for_each_member_and_input(method: str, network: str, training: bool) -> None:
    case = NETWORKS[network]
    net = build(method, case.model(), network).train(training)
    x, _ = case.batch(7)
    assert net(x).shape == (3, 7, CLASSES)
    assert net(x).dtype == torch.float32


@contract
def test_a_batch_of_one_works(method: str, network: str) -> None:
    case = NETWORKS[network]
    net = build(method, case.model(), network).eval()
    x, _ = case.batch(3)
    torch.testing.assert_close(net(x[:1]), net(x)[:, :1], rtol=1e-4, atol=1e-5)


@contract
def test_dtype_is_kept(method: str, network: str) -> None:
    case = NETWORKS[network]
    model = case.model().double()
    x = case.batch(2)[0].double()
    options = {"example": x} if method in ("packed", "masksembles", "mimo") else {}
    net = build(method, model, network, **options)
    assert net(x).dtype == torch.float64
    assert {p.dtype for p in net.parameters()} == {torch.float64}


@contract
def test_one_pretrained_member_is_the_base_network(method: str, network: str) -> None:
    case = NETWORKS[network]
    model = case.model()
    net = build(method, model, network, members=1, init="pretrained")
    x, _ = case.batch()
    torch.testing.assert_close(net(x)[0], model(x), rtol=1e-4, atol=1e-5)


@contract
def test_the_given_model_is_left_as_it_was(method: str, network: str) -> None:
    model = NETWORKS[network].model()
    before, structure = snapshot(model), repr(model)
    for init in ("fresh", "pretrained"):
        net = build(method, model, network, init=init)
        net.loss(*NETWORKS[network].batch()).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1.0)
    assert repr(model) == structure
    assert not model.training
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())


@contract
def test_training_mode_is_the_models(method: str, network: str) -> None:
    for mode in (True, False):
        net = build(method, NETWORKS[network].model().train(mode), network)
        assert {module.training for module in net.modules()} == {mode}


@contract
def test_backward_reaches_every_parameter(method: str, network: str) -> None:
    case = NETWORKS[network]
    net = build(method, case.model(), network).train()
    loss = net.loss(*case.batch(16))
    assert loss.shape == ()
    assert loss.isfinite()
    loss.backward()
    dead = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()]
    assert not dead


@contract
def test_the_loss_falls(method: str, network: str) -> None:
    case = NETWORKS[network]
    torch.manual_seed(0)
    net = build(method, case.model(), network, seed=0).train()
    x, y = case.batch(16)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        loss = net.loss(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-3:]) < 0.9 * losses[0]


@contract
def test_a_member_alone_is_a_plain_network_with_the_same_predictions(method: str, network: str) -> None:
    case = NETWORKS[network]
    net = build(method, case.model(), network).train()
    net.loss(*case.batch(8)).backward()
    with torch.no_grad():
        for parameter in net.parameters():  # away from any special start
            parameter.sub_(0.1 * parameter.grad.sign() * parameter.std())
    net.eval()
    x, _ = case.batch()
    together = net(x)
    own_classes = {type(module) for module in case.build().modules()}
    for index in range(3):
        member = net.member(index)
        assert {type(module) for module in member.modules()} <= own_classes
        torch.testing.assert_close(member(x), together[index], rtol=1e-3, atol=1e-4)


@contract
def test_saving_and_loading_gives_the_same_numbers(method: str, network: str, tmp_path: Path) -> None:
    case = NETWORKS[network]
    trained = build(method, case.model(), network, seed=0).train()
    optimizer = torch.optim.SGD(trained.parameters(), 0.01)
    trained.loss(*case.batch()).backward()
    optimizer.step()
    save_file({k: v.contiguous() for k, v in trained.state_dict().items()}, tmp_path / "net.safetensors")

    loaded = build(method, case.model(seed=5), network, seed=7)
    loaded.load_state_dict(load_file(tmp_path / "net.safetensors"))
    x, _ = case.batch()
    assert torch.equal(loaded.eval()(x), trained.eval()(x))


@contract
def test_copies_and_pickles_give_the_same_numbers(method: str, network: str) -> None:
    case = NETWORKS[network]
    net = build(method, case.model(), network).eval()
    x, _ = case.batch()
    want = net(x)
    stream = io.BytesIO()
    pickle.dump(net, stream)
    stream.seek(0)
    for other in (copy.deepcopy(net), pickle.load(stream)):
        assert torch.equal(other(x), want)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
    assert torch.equal(net(x), want)


@contract
def test_the_same_seed_gives_the_same_network_and_leaves_torchs_state_alone(method: str, network: str) -> None:
    case = NETWORKS[network]
    state = torch.get_rng_state()
    nets = [build(method, case.model(), network, seed=seed) for seed in (3, 3, 4)]
    torch.set_rng_state(state)
    build(method, model := case.model(), network, seed=3)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    build(method, model, network, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    x, _ = case.batch()
    one, same, other = (net.eval()(x) for net in nets)
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


@contract
def test_fresh_members_differ_from_each_other_and_from_the_model(method: str, network: str) -> None:
    case = NETWORKS[network]
    model = case.model()
    net = build(method, model, network, init="fresh").eval()
    x, _ = case.batch()
    predictions = net(x)
    for i in range(3):
        assert not torch.allclose(predictions[i], model(x), atol=1e-3)
        for j in range(i):
            assert not torch.allclose(predictions[i], predictions[j], atol=1e-4)


@contract
def test_predict_is_the_mean_of_the_members_probabilities_in_evaluation_mode(method: str, network: str) -> None:
    case = NETWORKS[network]
    net = build(method, case.model(), network).train()
    x, _ = case.batch()
    predictive = net.predict(x)
    assert net.training
    assert not predictive.predictions.requires_grad
    want = net.eval()(x).softmax(-1).mean(0)
    torch.testing.assert_close(predictive.probs, want, rtol=1e-4, atol=1e-6)


@contract
def test_check_agrees(method: str, network: str) -> None:
    case = NETWORKS[network]
    mt.check(build(method, case.model(), network), case.batch(4)[0])


@contract
def test_any_criterion_works(method: str, network: str) -> None:
    case = NETWORKS[network]
    net = build(method, case.model(), network).eval()
    x, _ = case.batch()
    y = torch.randn(len(x), CLASSES)
    losses = torch.stack([F.mse_loss(prediction, y) for prediction in net(x)])
    want = losses.sum() if method in INDEPENDENT else losses.mean()
    if method == "mimo":  # inputs are shuffled apart unless all are shared
        net.repetition = 1.0
    torch.testing.assert_close(net.loss(x, y, task="regression"), want, rtol=1e-4, atol=1e-5)


@contract
def test_one_training_loop_serves_every_method(method: str, network: str) -> None:
    case = NETWORKS[network]
    net = build(method, case.model(), network).train()
    assert not net.clip_grad_norm_(1.0).any()  # no gradients yet
    x, y = case.batch(8)
    net.loss(x, y).backward()
    before = net.clip_grad_norm_(1e-3)
    assert bool((before > 1e-3).all())
    torch.testing.assert_close(net.clip_grad_norm_(1.0), torch.full_like(before, 1e-3), rtol=0.01, atol=0)
    with pytest.raises(ValueError, match="criterion must give one number"):
        net.loss(x, y, lambda p, t: F.cross_entropy(p, t, reduction="none"))
    with pytest.raises(ValueError):
        net.loss(x, y[:3])
    with pytest.raises(ValueError, match="does not fit the network"):
        net.loss(x[..., :0], y)


def test_a_regression_without_its_criterion_is_noticed() -> None:
    net = mt.deep_ensemble(nn.Linear(4, 1), 2)
    with pytest.raises(ValueError, match="pass task="):  # the cross entropy of one class is 0, whatever it says
        net.loss(torch.randn(3, 4), torch.randn(3, 1))


@pytest.mark.parametrize(("method", "network"), by_compiling(CASES))
def test_compiled_agrees_with_eager(method: str, network: str) -> None:
    torch.compiler.reset()
    case = NETWORKS[network]
    net = build(method, case.model(), network)
    x, _ = case.batch()
    for training in (False, True):
        net.train(training)
        compiled = torch.compile(copy.deepcopy(net), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)


@contract
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_agrees_with_cpu(method: str, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its rounding is coarser than what is tested
    case = NETWORKS[network]
    net = build(method, case.model(), network).eval()
    x, _ = case.batch()
    on_gpu = copy.deepcopy(net).to("cuda")
    torch.testing.assert_close(on_gpu(x.cuda()).cpu(), net(x), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(on_gpu.predict(x.cuda()).probs.cpu(), net.predict(x).probs, rtol=1e-3, atol=1e-3)


@contract
def test_bad_arguments_are_named(method: str, network: str) -> None:
    model = NETWORKS[network].model()
    for members in (0, -1, 2.5, True, "4"):
        with pytest.raises(ValueError, match="members"):
            build(method, model, network, members=members)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="init"):
        build(method, model, network, init="random")
    net = build(method, model, network)
    for index in (3, -1, "0"):
        with pytest.raises(ValueError, match="index"):
            net.member(index)  # type: ignore[arg-type]


@contract
def test_bad_inputs_are_told_in_a_sentence(method: str, network: str) -> None:
    case = NETWORKS[network]
    net = build(method, case.model(), network).eval()
    x, y = case.batch(4)
    for wrong in (x[0], x[:, :-1], x.flatten(1)[:, :4], x.unsqueeze(0).unsqueeze(0), [1, 2], None):
        with pytest.raises(ValueError, match=r"^x (of shape|must be)"):
            net.predict(wrong)  # type: ignore[arg-type]
    nan = x.clone()
    nan[1].view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        net.predict(nan)
    y[2] = CLASSES
    with pytest.raises(ValueError, match=f"0 to {CLASSES - 1}, got {CLASSES}"):
        net.loss(x, y)


def test_shared_layers_know_their_member_only_while_it_runs() -> None:
    case = NETWORKS["cnn"]
    net = build("batch_ensemble", case.model(), "cnn").eval()
    with pytest.raises(ValueError, match="x"):
        net(torch.zeros(2, 99, 8, 8))
    layers = [m for m in net.modules() if isinstance(m, MemberLayer)]
    assert layers
    assert all(layer.member is None for layer in layers)
